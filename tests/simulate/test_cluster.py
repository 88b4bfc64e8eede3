"""The cluster simulation: without low work and host costs an iteration takes what the plan says; joint kernels start
and end together; low work runs in what is left idle, under the promise."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumux.device.sim.cost import Kernel
from gpumux.device.sim.spec import A100, GpuSpec
from gpumux.errors import ConfigError
from gpumux.plan.plan import BurstPlan
from gpumux.program.saved_plan import PlannedLayer, PlanNetwork, PlanRow, SavedPlan
from gpumux.scheduler import events as ev
from gpumux.simulate.cluster import (
    RANK,
    ClusterResult,
    ClusterSimulation,
    TimelineRow,
    parts_of,
    without_host_costs,
)
from gpumux.simulate.comparison import Comparison, LowJob
from gpumux.simulate.daemon import DaemonSettings
from gpumux.simulate.workload import ALLREDUCE_SENSITIVITY, Workload
from gpumux.types import Priority
from tests.plan.graphs import chain_graph, random_costs, random_graph, random_plan

FREE = without_host_costs(A100)
NO_HOST = DaemonSettings(handle_s=0.0, client_s=0.0)
BATCH = 4
UNIT = 1e-5


def layers(count: int, *, output_bytes: int = 4 << 20) -> tuple[PlannedLayer, ...]:
    return tuple(PlannedLayer(f"l{i}", "Linear", output_bytes, 1 << 20, 1 / 3) for i in range(count))


def simulated(
    rows: tuple[PlanRow, ...], spec: GpuSpec = FREE, how: DaemonSettings = NO_HOST, **rest: Any
) -> ClusterSimulation:
    known = layers(1 + max(row.layer for row in rows))
    gpus = max(row.first + row.gpus for row in rows)
    return ClusterSimulation(parts_of(rows, known, BATCH, spec), gpus, spec, how, **rest)


def check_equal(plan: BurstPlan) -> None:
    """Costs are whole numbers, of 10 us here."""
    rows = tuple(
        replace(r, start=r.start * UNIT, comm=r.comm * UNIT, comp=r.comp * UNIT, sync=r.sync * UNIT) for r in plan.rows
    )
    if plan.seconds:
        assert simulated(rows).run(2).iterations == pytest.approx([plan.seconds * UNIT] * 2, rel=1e-9)


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


# ---- low work


def low(*seconds: float, blocks: int = 216) -> Workload:
    return Workload("low", Priority.LOW, tuple(Kernel("k", blocks, each, 2, 0) for each in seconds))


DOUBLE = (PlanRow(0, 0.0, 0.0, 1e-3, 0.5e-3, 0, 2),)  # computation and the sum of gradients on two GPUs
# Both GPUs, then the first alone: the second is idle for half of the time.
BURST = (PlanRow(0, 0.0, 0.0, 2e-3, 0.0, 0, 2), PlanRow(1, 2e-3, 0.1e-3, 1.9e-3, 0.0, 0, 1, after=(0,)))


def of_kind(result: ClusterResult, gpu: int, kind: str) -> list[TimelineRow]:
    return [row for row in result.timeline[gpu] if row.kind == kind]


def test_joint_kernels_start_with_the_last_arrival_and_end_together() -> None:
    shown = DaemonSettings("paced", timeline=True)
    simulation = simulated(DOUBLE, A100, shown, low=[low(*[70e-6] * 9)])
    result = simulation.run(40)
    sums = list(zip(of_kind(result, 0, "sync"), of_kind(result, 1, "sync"), strict=False))
    assert len(sums) >= 40
    apart = []
    for pair in sums:
        began = {row.started for row in pair}
        assert len(began) == len({row.ended for row in pair}) == 1
        before = [max(r.ended for r in of_kind(result, gpu, "comp") if r.ended < min(began)) for gpu in (0, 1)]
        apart.append(abs(before[0] - before[1]))
    assert max(apart) > 20e-6  # low work delayed one GPU alone, and the other waited
    assert max(a.ended - a.started for a, _ in sums) > 1.1 * 0.5e-3  # a sum suffers from low work beside it


def test_a_joint_kernel_holds_all_members_until_the_slowest_is_done() -> None:
    """Low work is on the second GPU alone, and slows the sum on the first."""
    simulation = simulated(DOUBLE, A100, DaemonSettings("streams", timeline=True), low=[low(*[70e-6] * 9)])
    first = simulation.low[0][0]
    simulation.daemons[0].feed(ev.PauseRequested(first.id))
    result = simulation.run(20)
    assert first.work_s < 0.1 * simulation.low[1][0].work_s
    took = [row.ended - row.started for row in of_kind(result, 0, "sync")]
    assert max(took[2:]) > 1.1 * 0.5e-3


def test_low_work_is_done_where_the_plan_leaves_a_gpu_idle_and_the_promise_is_kept() -> None:
    alone = simulated(BURST, A100, DaemonSettings()).run(3, 1).iteration_s
    result = simulated(BURST, A100, DaemonSettings("guarded"), low=[low(*[30e-6] * 20)], max_slowdown=1.1).run(150, 150)
    assert result.low_of(1) > 0.3
    assert result.low_of(1) > 2 * result.low_of(0)
    assert result.iteration_s < 1.1 * alone


def test_low_work_is_counted_in_the_window_alone() -> None:
    simulation = simulated(BURST, A100, DaemonSettings("paced"), low=[low(*[30e-6] * 20)])
    result = simulation.run(5, 50)
    assert 0.3 < result.low_of(1) < 1.0
    assert result.low_throughput == result.low_of(0) + result.low_of(1)


def test_samples_move_when_all_gpus_that_have_them_are_done() -> None:
    """Low work delays the second GPU alone, whose samples the first one gets."""
    simulation = simulated(BURST, A100, DaemonSettings("paced", timeline=True), low=[low(*[90e-6] * 20)])
    simulation.daemons[0].feed(ev.PauseRequested(simulation.low[0][0].id))
    result = simulation.run(20)
    late = 0
    for move in of_kind(result, 0, "comm"):
        ends = [max(r.ended for r in of_kind(result, gpu, "comp") if r.ended < move.ended) for gpu in (0, 1)]
        assert move.started >= max(ends)
        late += ends[1] > ends[0] + 20e-6
    assert late > 10


def test_low_jobs_start_spread_over_a_step() -> None:
    simulation = simulated(BURST, A100, DaemonSettings("paced"), low=[low(*[30e-6] * 20)])
    starts = [clients[0].starts_at for clients in simulation.low]
    assert len(set(starts)) == 2


def test_the_same_simulation_is_the_same_and_ends_in_time() -> None:
    def run(**rest: Any) -> ClusterResult:
        return simulated(BURST, A100, DaemonSettings("fifo"), low=[low(*[90e-6] * 20)]).run(5, 5, **rest)

    assert run() == run()
    short = run(seconds=0.02)
    assert short.ended_at == pytest.approx(0.02, rel=0.2)
    assert 0 < short.window_s < 0.011


def test_an_interrupt_gives_what_is_known() -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    simulation = simulated(BURST, A100, DaemonSettings("paced"))
    simulation.daemons[0].push(0.05, interrupt, None)
    result = simulation.run(10**6)
    assert result.interrupted
    assert 5 < len(result.iterations) < 20


@pytest.mark.parametrize(
    ("rest", "says"),
    [
        ({"low": [low(1e-4), low(1e-4)]}, "low jobs named"),
        ({"low": [replace(low(1e-4), priority=Priority.HIGH)]}, "low jobs named"),
        ({"low": [replace(low(1e-4), name=RANK)]}, "low jobs named"),
    ],
)
def test_low_jobs_that_can_not_be_are_refused(rest: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        simulated(BURST, **rest)


def test_a_plan_without_time_and_a_run_without_iterations_are_refused() -> None:
    with pytest.raises(ConfigError, match="nothing takes time"):
        simulated((PlanRow(0, 0.0, 0.0, 0.0, 0.0, 0, 2),))
    with pytest.raises(ConfigError, match="0 iterations"):
        simulated(BURST).run(0)


# ---- parts


def test_layers_without_gradients_on_the_same_gpus_are_one_part() -> None:
    rows = (
        PlanRow(0, 0.0, 0.0, 1.0, 0.0, 0, 2),
        PlanRow(1, 1.0, 0.0, 2.0, 0.5, 0, 2, after=(0,)),
        PlanRow(2, 3.5, 0.5, 1.0, 0.0, 0, 1, after=(1,)),
        PlanRow(3, 5.0, 0.0, 1.0, 0.0, 0, 1, after=(2,)),
    )
    parts = parts_of(rows, layers(4), BATCH, FREE)
    assert [(part.title, part.kind, part.seconds, part.after) for part in parts] == [
        ("l0 to l1", "comp", 3.0, ()), ("l1", "sync", 0.5, (0,)), ("l2", "comm", 0.5, (1,)),
        ("l2 to l3", "comp", 2.0, (2,)),
    ]  # fmt: skip
    assert [part.kernels[0].sensitivity for part in parts] == [1.0, ALLREDUCE_SENSITIVITY, 1.0, 1.0]
    assert [part.joint for part in parts] == [False, True, False, False]


def test_what_several_rows_wait_for_stays_a_part_of_its_own() -> None:
    rows = (
        PlanRow(0, 0.0, 0.0, 1.0, 0.0, 0, 1),
        PlanRow(1, 1.0, 0.0, 2.0, 0.0, 0, 1, after=(0,)),
        PlanRow(2, 1.0, 0.5, 1.0, 0.0, 1, 1, after=(0,)),
    )
    assert [part.title for part in parts_of(rows, layers(3), BATCH, FREE)] == ["l0", "l1", "l2", "l2"]
    # Also where a layer that takes no time lies between.
    none = PlanRow(3, 1.0, 0.0, 0.0, 0.0, 0, 1, after=(0,))
    with_none = (rows[0], none, replace(rows[1], after=(1,)), rows[2])
    assert [part.title for part in parts_of(with_none, layers(4), BATCH, FREE)] == ["l0", "l1", "l2", "l2"]


def test_a_layer_that_stands_for_several_has_no_long_blocks() -> None:
    rows = (PlanRow(0, 0.0, 0.0, 3e-3, 0.0, 0, 1),)
    (part,) = parts_of(rows, layers(1, output_bytes=1 << 10), BATCH, FREE)
    assert len(part.kernels) > 20
    assert max(kernel.block_s for kernel in part.kernels) <= 100e-6


# ---- comparison


def saved() -> SavedPlan:
    wide = (PlanRow(0, 0.0, 0.0, 2e-3, 0.0, 0, 2), PlanRow(1, 2e-3, 0.0, 1.5e-3, 0.5e-3, 0, 2, after=(0,)))
    one = (PlanRow(0, 0.0, 0.0, 4e-3, 0.0, 0, 1), PlanRow(1, 4e-3, 0.0, 1.9e-3, 0.0, 0, 1, after=(0,)))
    return SavedPlan(
        model="net", device="a100", algorithm="optimal", gpus=2, batch=BATCH, limit=2.0,
        network=PlanNetwork("n", 1e9, 1e-5), seconds=4e-3, single_seconds=5.9e-3, layers=layers(2), rows=BURST,
        data_parallel=(one, wide),
    )  # fmt: skip


def test_a_comparison_has_every_way_to_use_the_cluster() -> None:
    compared = Comparison(saved(), [LowJob(low(*[30e-6] * 20), 8)], A100, ("paced",), iterations=20, warmup=5)
    cases = {case.name: case for case in compared.cases()}
    assert list(cases) == ["data parallel", "plan", "plan, paced", "1 of 2 GPUs", "2 of 2 GPUs"]
    assert cases["plan"].slowdown == 1.0
    assert cases["plan, paced"].slowdown > 1.0
    assert cases["plan, paced"].low_throughput > 0.3
    assert cases["1 of 2 GPUs"].low == (0.0, 1.0)
    assert cases["1 of 2 GPUs"].speedup == pytest.approx(1.0, abs=0.05)
    for case in cases.values():
        assert case.throughput == case.speedup + case.low_throughput
        per_s = BATCH / case.iteration_s + 8 * case.low_throughput / (20 * 30e-6)
        assert case.samples_per_s == pytest.approx(per_s, rel=0.05)


def test_samples_are_counted_only_where_each_job_says_how_many_a_step_has() -> None:
    unknown = Comparison(saved(), [LowJob(low(*[30e-6] * 20))], A100, (), iterations=1, warmup=0)
    found = {case.name: case.samples_per_s for case in unknown.cases()}
    assert found["1 of 2 GPUs"] is None
    assert found["plan"] is not None
