"""The cluster simulation: without low work and host costs an iteration takes what the plan says; joint kernels start and
end together; low work runs in what is left idle, under the promise."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumux.device.sim.cost import A100, GpuSpec, Kernel
from gpumux.errors import ConfigError
from gpumux.plan.plan import BurstPlan
from gpumux.program.saved_plan import PlannedLayer, PlanRow
from gpumux.simulate.cluster import (
    RANK,
    ClusterResult,
    ClusterSimulation,
    PlanPart,
    TimelineRow,
    parts_of,
    without_host_costs,
)
from gpumux.simulate.daemon import DaemonSettings
from gpumux.simulate.workload import Workload
from gpumux.types import Priority
from tests.plan.graphs import chain_graph, random_costs, random_graph, random_plan

FREE = without_host_costs(A100)
NO_HOST = DaemonSettings(handle_s=0.0, client_s=0.0)
BATCH = 4


def layers(count: int, *, output_bytes: int = 4 << 20) -> tuple[PlannedLayer, ...]:
    return tuple(PlannedLayer(f"l{i}", "Linear", output_bytes, 1 << 20, 1 / 3) for i in range(count))


def simulated(
    rows: tuple[PlanRow, ...], spec: GpuSpec = FREE, how: DaemonSettings = NO_HOST, **rest: Any
) -> ClusterSimulation:
    known = layers(1 + max(row.layer for row in rows))
    gpus = max(row.first + row.gpus for row in rows)
    return ClusterSimulation(parts_of(rows, known, BATCH, spec), gpus, spec, how, **rest)


def check_equal(plan: BurstPlan) -> None:
    if plan.seconds == 0:
        return
    result = simulated(plan.rows).run(2)
    assert result.iterations == pytest.approx([plan.seconds] * 2, rel=1e-9)


@given(st.randoms(use_true_random=False), st.integers(1, 12), st.sampled_from(((1, 2, 4), (1, 3), (2, 8))))
@settings(max_examples=40, deadline=None)
def test_alone_and_on_a_free_host_a_chain_takes_what_its_plan_says(
    random: Random, length: int, counts: tuple[int, ...]
) -> None:
    graph = chain_graph(length)
    check_equal(random_plan(random, graph, random_costs(random, length, counts)))


@given(st.randoms(use_true_random=False), st.sampled_from(((1, 2, 4), (1, 3), (2, 4))))
@settings(max_examples=60, deadline=None)
def test_alone_and_on_a_free_host_branches_take_what_their_plan_says(random: Random, counts: tuple[int, ...]) -> None:
    """Branches at home and away, inside of others, and skip connections."""
    graph = random_graph(random, 10)
    check_equal(random_plan(random, graph, random_costs(random, len(graph.layers), counts)))
