"""Job.stats() about the equality of a job's results with the plain run's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gpumux import client
from gpumux.capture.state import StateTable
from gpumux.client.job import exactness
from gpumux.errors import ConfigError
from tests.client.workload_jobs import nearness


def test_each_reason_is_given_and_none_means_bit_equal() -> None:
    table = StateTable([nn.Linear(2, 2)], [])
    assert exactness(table, {"step": 1}) == {"exactness": "bit-equal"}
    told = exactness(table, {"step": 1, "evaluate": 4}, compiled=True)
    assert told["exactness"] == "equivalent"
    assert told["tolerance"]["float64"] < told["tolerance"]["float32"]
    assert told["microbatches"] == {"evaluate": 4}
    assert [reason for reason in told["because"] if "compiles" in reason]
    assert len(told["because"]) == 2
    on_gpu = exactness(StateTable([nn.Linear(2, 2)], [], "cpu", "cuda"), {})
    assert "daemon's GPU" in on_gpu["because"][0]
    table.home = torch.device("cuda", 1)
    assert "cuda:1" in exactness(table, {})["because"][0]


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_compile_is_true_or_false(value: Any) -> None:
    with pytest.raises(ConfigError, match="compile"):
        client.submit(lambda x: x, example=(torch.ones(1),), compile=value, endpoint="ipc:///nowhere")


def test_what_differs_is_found() -> None:
    want = ([torch.tensor([1.0, 2.0])], [{"state": {0: {"step": 3, "m": torch.zeros(2)}}, "param_groups": [{"lr": 1}]}])
    same = (
        [torch.tensor([1.0, 2.0])],
        [{"state": {0: {"step": torch.tensor(3.0), "m": torch.zeros(2)}}, "param_groups": []}],
    )
    assert nearness(want, same).equal
    off = nearness(want, ([torch.tensor([1.0, 2.5])], same[1]))
    assert (off.equal, off.off) == (False, 0.25)
    assert "results" in str(off)
    with pytest.raises(AssertionError, match="finite"):
        nearness(want, ([torch.tensor([1.0, float("nan")])], same[1]))
    with pytest.raises(AssertionError, match="differs"):
        nearness(([torch.tensor(1)], []), ([torch.tensor(2)], []))
