"""Saved plans: what is written is read back, rows run as they say, and a file with a fault is refused by its place."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import inf
from pathlib import Path
from random import Random
from typing import Any

import pytest

from gpumux.errors import ConfigError
from gpumux.program.saved_plan import (
    PlannedLayer,
    PlanNetwork,
    PlanRow,
    SavedPlan,
    SmallerPlan,
    check_rows,
    dumps,
    load,
    loads,
    save,
)
from tests.plan.graphs import random_costs, random_graph, random_plan


def plan(**rest: Any) -> SavedPlan:
    """Two layers on two GPUs, the second on one of them; data parallel on both."""
    fields: dict[str, Any] = {
        "model": "net", "device": "a100", "algorithm": "optimal", "gpus": 2, "batch": 4, "limit": inf,
        "network": PlanNetwork("n", 1e9, 1e-5), "seconds": 3.5, "single_seconds": 4.0,
        "layers": (PlannedLayer("a", "Linear", 8, 16, 0.5), PlannedLayer("b", "Linear", 8, 0, 0.25)),
        "rows": (PlanRow(0, 0.0, 0.0, 1.0, 0.5, 0, 2), PlanRow(1, 1.5, 0.5, 1.5, 0.0, 0, 1, after=(0,))),
        "data_parallel": ((PlanRow(0, 0.0, 0.0, 1.0, 0.5, 0, 2), PlanRow(1, 1.5, 0.0, 1.0, 0.0, 0, 2, after=(0,))),),
    }  # fmt: skip
    return SavedPlan(**fields | rest)


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    save(plan(), tmp_path / "plan.json")
    assert load(tmp_path / "plan.json") == plan()
    limited = plan(limit=2.0)
    assert loads(dumps(limited)) == limited


def test_plans_for_fewer_gpus_are_read_and_older_files_have_none() -> None:
    smaller = SmallerPlan(2, plan().rows)
    wide = plan(gpus=4, fewer=(smaller,))
    assert loads(dumps(wide)) == wide
    body = json.loads(dumps(wide))
    del body["fewer"]
    assert loads(json.dumps(body)) == plan(gpus=4)
    with pytest.raises(ConfigError, match=r"fewer\[0\] is for 2 GPUs"):
        plan(fewer=(smaller,))


def test_the_rows_of_any_placement_start_when_what_they_wait_for_has_ended() -> None:
    """Also where branches are away, blocks lie in blocks, and layers take no time."""
    waits = 0
    for seed in range(300):
        random = Random(seed)
        graph = random_graph(random, 9)
        found = random_plan(random, graph, random_costs(random, len(graph.layers), (1, 2, 4)))
        check_rows("rows", found.rows, len(graph.layers), found.width)
        assert all(
            row.start == max((found.rows[each].end for each in row.after), default=0.0) for row in found.rows
        )  # to the last bit
        assert max(row.end for row in found.rows) == found.seconds
        waits += any(len(row.after) > 1 for row in found.rows)
    assert waits > 50


def changed(change: Callable[[dict[str, Any]], object]) -> str:
    body = json.loads(dumps(plan()))
    change(body)
    return json.dumps(body)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda b: b.update(format="gpumux-layers"), "this is no plan"),
        (lambda b: b.update(version=2), "a plan of version 2"),
        (lambda b: b.update(units={}), "units"),
        (lambda b: b.pop("rows"), "lacks 'rows'"),
        (lambda b: b.update(more=1), "unknown key 'more'"),
        (lambda b: b["rows"][1].pop("sync"), r"rows\[1\] lacks 'sync'"),
        (lambda b: b["layers"][1].update(forward=1.5), "layer 'b'"),
        (lambda b: b["network"].update(bandwidth=0), "network"),
        (lambda b: b["network"].pop("latency"), "network lacks"),
        (lambda b: b.update(rows=[]), "rows is empty"),
        (lambda b: b["rows"][0].update(layer=2), r"rows\[0\] is of layer 2"),
        (lambda b: b["rows"][0].update(comp=-1.0), r"rows\[0\] has a time that is negative"),
        (lambda b: b["rows"][0].update(comp=float("nan")), r"rows\[0\] has a time"),
        (lambda b: b["rows"][0].update(comp="1"), r"rows\[0\].comp is '1'"),
        (lambda b: b["rows"][0].update(gpus=3), r"rows\[0\] is on 3 GPUs"),
        (lambda b: b["rows"][1].update(gpus=0), r"rows\[1\] is on 0 GPUs"),
        (lambda b: b["rows"][0].update(after=[1]), r"rows\[0\] waits for"),
        (lambda b: b["rows"][1].update(after=[]), r"rows\[1\] starts at 1.5"),
        (lambda b: b["rows"][1].update(start=0.0, after=[]), r"rows\[1\] starts on GPU 0 before rows\[0\]"),
        (lambda b: b["data_parallel"][0][1].update(gpus=3), r"data_parallel\[0\]\[1\] is on 3 GPUs"),
        (lambda b: b.update(seconds=3.0), "the last row ends at 3.5"),
        (lambda b: b.update(limit=0.5), "limit is 0.5"),
        (lambda b: b.update(gpus=0), "0 GPUs"),
        (lambda b: b.update(rows={}), "rows is {}"),
    ],
)
def test_a_plan_with_a_fault_is_refused_by_its_place(
    change: Callable[[dict[str, Any]], object], says: str, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(changed(change))
    with pytest.raises(ConfigError, match=says) as caught:
        load(path)
    assert str(path) in caught.value.message
    assert caught.value.remedy


def test_files_that_are_no_plans_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't read"):
        load(tmp_path / "none.json")
    (tmp_path / "text").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        load(tmp_path / "text")
