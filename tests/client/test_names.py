"""What an editor and a notebook show: names without importing torch, and tables."""

from __future__ import annotations

import inspect
import re
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
    "gpumux.client": {"Job", "JobStatistics", "StepFuture", "SubmitOptions", "submit", "submit_array"},
    "gpumux.fuse": {"Array", "ArrayJob", "submit_array"},
}


def test_the_options_to_pass_on_are_those_of_submit():
    taken = {
        name: parameter.annotation
        for name, parameter in inspect.signature(gpumux.submit).parameters.items()
        if name not in ("step", "example", "model", "optimizer")
    }
    assert taken == {name: hint.__forward_arg__ for name, hint in client.SubmitOptions.__annotations__.items()}


@pytest.mark.parametrize("package", NAMES)
def test_names_are_listed_before_torch_is_imported(package: str):
    """And those that the module imported for itself are not, nor one twice."""
    source = f"import sys, {package}\nprint(*dir({package}))\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", source], check=True, capture_output=True, text=True)
    listed = [name for name in done.stdout.split() if not name.startswith("_")]
    assert set(listed) - {"gpumux", "client", "fuse"} == NAMES[package] - {"client", "fuse"}
    assert NAMES[package] <= set(listed)
    assert len(listed) == len(set(listed))


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


def test_a_job_shows_itself_in_every_state(endpoint: str):
    model = torch.nn.Linear(3, 1)
    example = (torch.ones(2, 3),)
    with gpumux.submit(
        lambda x: model(x), example=example, model=model, name="<b>", endpoint=endpoint, priority="high"
    ) as job:
        shown = job._repr_html_()
        assert "gpumux job &lt;b&gt;" in shown
        assert "high, mean slowdown at most 1.1" in shown
        assert "open" in shown
        job.step(*example).result()
        assert re.search(r"steps</th><td[^>]*>1<", job._repr_html_())
        job.pause()
        assert "paused" in job._repr_html_()
        job.resume()
    assert "closed" in job._repr_html_()


def test_what_users_write_is_no_html():
    shown = facts_table("<b>", {"name": "<script>"})
    assert "&lt;script&gt;" in shown
    assert "<script>" not in shown
    assert "<b>" not in shown
