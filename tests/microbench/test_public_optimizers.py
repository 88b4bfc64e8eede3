"""A quick run over optimizers that are equal, refused, different, and not to be constructed alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from microbench import public_optimizers


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


def test_a_quick_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    module = ModuleType("optimizers_of_a_test")
    for each in (torch.optim.SGD, torch.optim.Optimizer, Reads, Around, Unequal):
        setattr(module, each.__name__, each)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    out = tmp_path / "result.json"
    assert public_optimizers.main([module.__name__, "--out", str(out)]) == 1
    found = json.loads(out.read_text())["packages"][module.__name__]
    assert found["equal"] == ["SGD"]
    assert found["differs"] == {"Unequal": "from step 1"}
    assert found["refused"].keys() == {"Reads"}
    assert "DataDependent" in found["refused"]["Reads"]
    assert found["needs more"].keys() == {"Around"}
    assert "refused: Reads" in capsys.readouterr().out
    assert public_optimizers.main([module.__name__, "--replay", "SGD"]) == 0
    assert public_optimizers.main([module.__name__, "--replay", "None"]) == 1
