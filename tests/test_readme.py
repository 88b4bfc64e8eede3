"""The README keeps its word: its example runs, learns, and equals the plain loop; its links exist."""

from __future__ import annotations

import json
import re
import runpy
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from clients.compare import differences
from clients.job import PlainJob
from gpumux import client
from microbench.daemon import running_daemon

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
MARK = "<!-- tests/test_readme.py runs this block -->\n"


def example() -> str:
    (block,) = re.findall(re.escape(MARK) + r"```python\n(.*?)```", README, re.DOTALL)
    return block


def run(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The example's printed losses and its model's final state."""
    namespace = runpy.run_path(str(path))
    losses = [float(text) for text in re.findall(r"loss ([\d.]+)", capsys.readouterr().out)]
    return losses, namespace["model"].state_dict()


@pytest.mark.usefixtures("one_thread")
def test_the_example_trains_and_equals_the_plain_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    train = tmp_path / "train.py"
    train.write_text(example())
    with running_daemon(threads=1) as daemon:
        monkeypatch.setenv("GPUMUX_ENDPOINT", daemon.endpoint)
        losses, state = run(train, capsys)
    assert len(losses) == 5
    assert losses[-1] < losses[0] / 2
    said = [float(text) for text in re.findall(r"^epoch \d: loss ([\d.]+)$", README, re.MULTILINE)]
    assert losses == pytest.approx(said, rel=0.05), "what the README says it prints, on another processor"

    @contextmanager
    def plain(step: Any, **_: Any) -> Iterator[PlainJob]:
        yield PlainJob(step)

    monkeypatch.setattr(client, "submit", plain)
    plain_losses, plain_state = run(train, capsys)
    assert losses == plain_losses
    assert differences(state, plain_state) == []


def test_the_loop_is_ten_lines():
    """From the `with` on, as a user reads it: comments aside, it stays as short as promised."""
    body = example()
    loop = body[body.index("def train_step") :].strip().splitlines()
    assert len([line for line in loop if line.strip()]) <= 13


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in ROOT.glob("docs/*.md"))])
def test_links_lead_somewhere(page: str):
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / page).read_text())
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not ((ROOT / page).parent / target).exists()] == []


def test_the_commands_exist():
    pages = README + (ROOT / "CONTRIBUTING.md").read_text()
    commands = re.findall(r"python -m ((?:clients|microbench)\.[\w.]*\w)", pages)
    assert commands
    assert [c for c in commands if not (ROOT / f"{c.replace('.', '/')}.py").exists()] == []
    targets = set(re.findall(r"make ([a-z-]+)", README)) - {"it", "sure"}
    makefile = (ROOT / "Makefile").read_text()
    assert [target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)] == []


def test_the_kills_and_the_soak_it_gives_are_those_in_the_results():
    kills, soak = (json.loads((ROOT / f"microbench/results/cpu-{name}.json").read_text()) for name in ("kills", "soak"))
    (row,) = [line for line in README.splitlines() if "microbench.kills" in line]
    blows, steps, tensors = (
        kills["blows"],
        *(sum(job[key] for job in kills["jobs"]) for key in ("steps", "state_tensors")),
    )
    assert kills["bit_equal"]
    assert f"after {blows['kills']} kills" in row
    assert f"{blows['executors']} of an executor and {blows['restarts']} restarts" in row
    assert f"none, in {steps:,} results and {tensors} tensors" in row
    assert kills["command"].partition(" --out")[0] in row
    page = (ROOT / "docs/operating.md").read_text()
    counted = soak["counted"]
    assert soak["met"]
    assert (
        f"{soak['checks']['steps acknowledged']['value']:,} steps acknowledged in {counted['lives']:,} lives of clients"
        in page
    )
    assert f"{counted['right']:,} steps were compared as they came" in page
    assert f"{soak['trained']['results']:,} results of training" in page
    assert soak["command"].partition(" --out")[0] in page


def test_every_dependency_has_its_reason():
    """docs/dependencies.md names exactly what pyproject.toml asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *(d for extra in project["optional-dependencies"].values() for d in extra)]
    names = {re.split(r"[\[<>=! ]", requirement)[0] for requirement in asked} - {project["name"]}
    rows = re.findall(r"^\| ([a-z-]+)[ (|]", (ROOT / "docs" / "dependencies.md").read_text(), re.MULTILINE)
    assert names <= set(rows), "give each dependency a reason in docs/dependencies.md"
    assert set(rows) - names - {"package"} == set(), "a reason for what is not used"
