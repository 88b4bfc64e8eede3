"""A quick run over optimizers that are equal, refused, different, and not to be constructed alone."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from microbench import public_optimizers
from microbench.daemon import running_daemon


class Reads(torch.optim.SGD):
    """Decides by a value of the gradient."""

    def step(self, closure: Any = None) -> Any:
        if self.param_groups[0]["params"][0].grad.norm() > 1.0:
            return None
        return super().step()


class Around(torch.optim.Optimizer):
    def __init__(self, params: Any, inner: Any) -> None:
        super().__init__(params, {"lr": 1.0})


class Unequal(torch.optim.SGD):
    """Made differently each time."""

    made = 0

    def __init__(self, params: Any) -> None:
        Unequal.made += 1
        super().__init__(params, lr=0.1 * Unequal.made)


@pytest.mark.extended
def test_a_quick_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    module = ModuleType("optimizers_of_a_test")
    for each in (torch.optim.SGD, torch.optim.Optimizer, Reads, Around, Unequal):
        setattr(module, each.__name__, each)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    out = tmp_path / "result.json"
    with running_daemon() as daemon:
        # One for all runs.
        monkeypatch.setattr(public_optimizers, "running_daemon", lambda: nullcontext(daemon))
        say_what_each_is(module.__name__, out, capsys)


def say_what_each_is(module: str, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert public_optimizers.main([module, "--out", str(out)]) == 1
    found = json.loads(out.read_text())["packages"][module]
    assert found["equal"] == ["SGD"]
    assert found["differs"] == {"Unequal": "from step 1"}
    assert found["refused"].keys() == {"Reads"}
    assert "DataDependent" in found["refused"]["Reads"]
    assert found["needs more"].keys() == {"Around"}
    assert "refused: Reads" in capsys.readouterr().out
    assert public_optimizers.main([module, "--replay", "SGD"]) == 0
    assert public_optimizers.main([module, "--replay", "None"]) == 1
