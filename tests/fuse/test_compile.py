"""Arrays whose Program is compiled. What inductor makes of a Program is held against the plain run in tests/device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpumux import fuse
from gpumux.device import inductor
from gpumux.errors import ConfigError, ProgramError
from tests.fuse.serial import batches, check, configs, steady


def module() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Dropout(0.4), torch.nn.Linear(4, 3))


def test_units_of_an_array_are_compiled_and_train_as_each_model_alone(monkeypatch: pytest.MonkeyPatch):
    compiled: list[Any] = []

    def as_it_is(body: Any, examples: Any) -> Any:
        compiled.append(body)
        return body

    monkeypatch.setattr(inductor, "find_compiler", lambda device: None)
    monkeypatch.setattr(inductor, "_compile", as_it_is)
    array = check(steady(module), batches(6, 5), compile=True)
    assert {program.kind for program in array.programs} == {"compiled"}
    assert compiled


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(inductor.shutil, "which", lambda name: None)
    with pytest.raises(ProgramError, match=r"no C\+\+ compiler"):
        fuse.Array(steady(module), configs(), batches(6, 5)[0], choose="fused", compile=True)
    with pytest.raises(ConfigError, match="compile is 1"):
        fuse.Array(steady(module), configs(), batches(6, 5)[0], compile=1)  # type: ignore[arg-type]
