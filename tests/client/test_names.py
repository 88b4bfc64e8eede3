"""What an editor and a notebook show: names without importing torch, and tables."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import gpumux
from gpumux import client, fuse
from gpumux.notebook import facts_table
from tests.fuse.serial import array_of, batches, configs, training

NAMES = {
    "gpumux": {"Job", "StepFuture", "client", "fuse", "submit", "submit_array"},
    "gpumux.client": {"Job", "StepFuture", "submit", "submit_array"},
    "gpumux.fuse": {"Array", "ArrayJob", "submit_array"},
}


@pytest.mark.parametrize("package", NAMES)
def test_names_are_listed_before_torch_is_imported(package: str):
    source = (
        f"import sys, {package}\nassert {NAMES[package]!r} <= set(dir({package}))\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", source], check=True)


def test_they_are_the_same_wherever_they_are():
    assert gpumux.submit is client.submit
    assert gpumux.submit_array is client.submit_array is fuse.submit_array
    assert (gpumux.client, gpumux.fuse, gpumux.Job) == (client, fuse, client.Job)
    with pytest.raises(AttributeError, match="'gpumux' has no attribute 'sumbit'"):
        gpumux.sumbit


def test_an_array_shows_itself():
    data = batches(4, 3)
    array = array_of(training(lambda: torch.nn.Linear(3, 1)), configs(2), data[0], name="sweep")
    assert repr(array) == "<Array 'sweep' of 2 models, open>"
    assert "operators" not in array._repr_html_()
    array.step(*data[0])
    assert "operators for 2 models" in array._repr_html_()
    array.close()
    assert "closed" in array._repr_html_()


def test_what_users_write_is_no_html():
    shown = facts_table("<b>", {"name": "<script>"})
    assert "&lt;script&gt;" in shown
    assert "<script>" not in shown
    assert "<b>" not in shown
