"""What a test leaves changed for its whole process is named, and put back."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.global_state import changed, settings

CHANGES: dict[str, Callable[[], object]] = {
    "the working directory": lambda: os.chdir("/"),
    "the umask": lambda: os.umask(0o123),
    "sys.path": lambda: sys.path.append("/nowhere"),
    "whether garbage is collected": gc.disable,
    "variables GPUMUX_*": lambda: os.environ.update(GPUMUX_ENDPOINT="ipc:///nowhere"),
    "torch's default type": lambda: torch.set_default_dtype(torch.float64),
    "torch's deterministic mode": lambda: torch.use_deterministic_algorithms(True),
    "whether torch takes gradients": lambda: torch.set_grad_enabled(False),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_named_and_put_back(name: str) -> None:
    before = settings()
    CHANGES[name]()
    (line,) = changed(before)
    assert line.startswith(f"{name} is ")
    assert settings() == before
    assert changed(before) == []


def test_each_setting_can_be_found_changed() -> None:
    assert settings().keys() == CHANGES.keys()


def test_what_a_test_changes_and_mends_is_no_complaint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = settings()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.undo()
    assert changed(before) == []
