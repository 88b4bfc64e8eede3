"""`gpumux plan memory` from the outside: the table, the advice, JSON, a picture, and errors for bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpumux.cli.main import EX_CONFIG, EX_USAGE, main
from gpumux.plan.memory import advice
from gpumux.plan.memory.ways import MemoryComparison, StepMemory

TRANSFORMER = ["clients.models.transformer:transformer", "--input", "1,8,8"]


def test_the_table_says_what_each_way_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "step.png"
    assert main(["plan", "memory", *TRANSFORMER, "--batch", "8", "--within", "none", "--plot", str(picture)]) == 0
    out = capsys.readouterr().out
    assert "transformer, batch 8, adamw; times are modelled for an a100" in out
    for name in advice.SAID.values():
        assert f"\n{name}  " in out
    assert "Take doubled, checkpointed: of the ways within inf times" not in out
    assert "\nTake " in out
    assert "waves=2: each wave updates its own replica" in out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_json_has_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "memory", *TRANSFORMER, "--batch", "4", "--optimizer", "sgd", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert (body["model"], body["batch"], body["optimizer"], body["device"]) == ("transformer", 4, "sgd", "a100")
    assert set(body["ways"]) == set(advice.SAID)
    for way in body["ways"].values():
        assert way["total_bytes"] == way["state_bytes"] + way["batch_bytes"] + way["temporary_bytes"]
    assert body["ways"]["doubled"]["relative_time"] == 1.0
    assert body["advice"] in body["ways"]
    assert body["sentence"].startswith("Take ")
    assert body["left_out"] == {}


def made(name: str, nbytes: int, seconds: float) -> StepMemory:
    return StepMemory(name, 2, 0, 0, nbytes, seconds, ())


def test_the_sentence_names_what_is_gained_and_what_would_take_less() -> None:
    ways = (made("doubled", 10, 1.0), made("microbatches", 6, 1.05), made("checkpointing", 3, 1.4))
    found = MemoryComparison("m", 1, "sgd", "a100", ways, {}, {})
    assert advice.sentence(found, 1.1) == (
        "Take doubled, microbatches=2: of the ways within 1.1 times the predicted time of a doubled batch it takes the"
        " fewest bytes, 40% less than a doubled batch; beyond that, doubled, checkpointed takes 50% less at x 1.40."
    )
    assert advice.sentence(found, float("inf")) == (
        "Take doubled, checkpointed: it takes the fewest bytes of all, 70% less than a doubled batch, at x 1.40."
    )
    assert advice.sentence(found, 1.0) == (
        "Take the doubled batch as it is: no other way within 1 times the predicted time of a doubled batch takes fewer"
        " bytes; beyond that, doubled, microbatches=2 takes 40% less at x 1.05 and doubled, checkpointed takes 70% less"
        " at x 1.40."
    )


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["no-such-model", "--batch", "4"], EX_CONFIG, "no model is called 'no-such-model'"),
        (["profile.json", "--batch", "4"], EX_CONFIG, "no step to capture"),
        ([*TRANSFORMER, "--batch", "0"], EX_USAGE, "--batch"),
        (TRANSFORMER, EX_USAGE, "--batch"),
        ([*TRANSFORMER, "--batch", "4", "--within", "0.5"], EX_USAGE, "--within"),
        ([*TRANSFORMER, "--batch", "4", "--optimizer", "lion"], EX_USAGE, "--optimizer"),
        ([*TRANSFORMER, "--batch", "4", "--plot", "nowhere/step.png"], EX_CONFIG, "no directory nowhere"),
    ],
)
def test_wrong_input_is_an_error(
    arguments: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        ended = main(["plan", "memory", *arguments])
    except SystemExit as error:
        ended = int(str(error.code))
    assert ended == code
    assert said in capsys.readouterr().err
