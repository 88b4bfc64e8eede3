"""What a step writes: prints are left out with a warning, and what can't be left out is refused by its line."""

from __future__ import annotations

import io
import logging
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpumux import client, errors
from tests.threads import one_thread

X = torch.randn(3, 4)
LOGGER = logging.getLogger("tests.client.outputs")


def stepped(inside: Callable[[Tensor], Any], endpoint: str, steps: int = 2) -> list[float]:
    model = nn.Linear(4, 2)

    def step(x: Tensor) -> Tensor:
        found = model(x).sum()
        inside(found)
        return found

    with one_thread(), client.submit(step, example=X, model=model, endpoint=endpoint) as job:
        return [job.step(X).item() for _ in range(steps)]


def test_a_print_is_left_out_and_warned_of_once(
    endpoint: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    def inside(found: Tensor) -> None:
        print("loss", found)
        print("shape", found.shape, file=sys.stderr)

    with caplog.at_level(logging.WARNING, "gpumux.client"):
        stepped(inside, endpoint)
        stepped(inside, endpoint)
    assert capsys.readouterr() == ("", "")
    warned = [r.getMessage() for r in caplog.records if "prints inside the step" in r.getMessage()]
    assert len(warned) == 2
    assert all(__file__ in text for text in warned)


def test_prints_of_other_threads_and_outside_of_the_step_appear(
    endpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def inside(found: Tensor) -> None:
        other = threading.Thread(target=lambda: print("from a thread"))
        other.start()
        other.join()

    stepped(inside, endpoint)
    print("outside")
    assert "from a thread" in (said := capsys.readouterr().out)
    assert said.endswith("outside\n")


@pytest.mark.parametrize(
    ("write", "what"),
    [
        (lambda log, found: print("x", file=log), "prints to a file"),
        (lambda log, found: log.write("x"), "writes to a file"),
        (lambda log, found: log.writelines(["x"]), "writes to a file"),
    ],
)
def test_what_goes_to_a_file_is_refused_by_its_line(write: Any, what: str, endpoint: str) -> None:
    log = io.StringIO()
    with pytest.raises(errors.CaptureError, match=what) as caught:
        stepped(lambda found: write(log, found), endpoint)
    assert __file__ in caught.value.message


def test_a_progress_bar_is_refused_by_its_line(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tqdm = pytest.importorskip("tqdm").tqdm
    monkeypatch.setattr(tqdm, "monitor_interval", 0)
    with tqdm(total=3, file=io.StringIO()) as bar:
        for move in (lambda _: bar.update(1), lambda _: bar.set_postfix(loss=1)):
            with pytest.raises(errors.CaptureError, match="updates a progress bar") as caught:
                stepped(move, endpoint)
            assert __file__ in caught.value.message


def test_logging_is_left_alone_and_warned_of_once(endpoint: str, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        with caplog.at_level(logging.INFO):
            stepped(lambda found: LOGGER.info("a step"), endpoint)
    assert "a step" in caplog.text
    warned = [r.getMessage() for r in caplog.records if "logs inside the step" in r.getMessage()]
    assert len(warned) == 1
    assert __file__ in warned[0]


@pytest.mark.parametrize(
    "text",
    [
        lambda found: f"{found:.4f}", lambda found: f"{found}", str, repr,
        lambda found: str([found]), lambda found: str({"loss": found}),
    ],
)  # fmt: skip
def test_a_text_of_a_tensor_is_refused_by_its_line(text: Callable[[Tensor], str], endpoint: str) -> None:
    with pytest.raises(errors.DataDependent, match="makes a text of a tensor") as caught:
        stepped(text, endpoint)
    assert "what job.step gives" in caught.value.remedy


def test_a_text_of_shapes_and_types_is_what_it_is(endpoint: str) -> None:
    def step(x: Tensor) -> tuple[Tensor, str]:
        return x * 2, f"{tuple(x.shape)} {x.dtype} {x.device} {len(x)}"

    with client.submit(step, example=X, endpoint=endpoint) as job:
        assert job.step(X)[1] == step(X)[1]
