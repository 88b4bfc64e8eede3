"""The engine against the reference without aggregation, on random launches, and invariants of both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumux.device.sim import gpu as model
from gpumux.device.sim.contention import Demand, demand, granted, speed
from gpumux.device.sim.cost import Kernel, solo_seconds
from gpumux.device.sim.gpu import SM_UNITS, Finished, Gpu, Stream
from gpumux.device.sim.placement import total
from gpumux.device.sim.spec import A100, GpuSpec
from tests.device.sim.reference import Asked, Reference

SPEC = replace(
    A100,
    name="small",
    sms=6,
    bandwidth=1e11,
    l2_bytes=1_000_000,
    l2_bandwidth=2.5e11,
    shares=(1.0, 0.5),
    share_multiple=1,
    queue_length=5,
    graph_node_s=1e-7,
    stream_depth=2,
)
SHARED = replace(SPEC, launch_queue="shared")
FEW_CHANNELS = replace(SPEC, channels=2)
# No two of its times are a nanosecond apart: to the engine that is one instant, and to a float perhaps another.
CALM = replace(SPEC, graph_s=0.0, graph_node_s=0.0, call_s=0.0, transmit_s=0.0, launch_gap_s=0.0, node_gap_s=0.0)
LONG = settings(deadline=None, max_examples=60)

kernels = st.builds(
    lambda blocks, us, per_sm, load, sensitivity, issue, cached: Kernel(
        "k",
        blocks,
        us * 1e-6,
        per_sm,
        int(load * blocks * us * 1e-6 * 1e11 / (6 * per_sm)),
        sensitivity,
        issue,
        min(cached, int(blocks * us * 1e-6 * 1e11 / (6 * per_sm))),
    ),
    st.integers(1, 60),
    st.sampled_from([1.0, 2.5, 7.3, 10.0, 31.7]),
    st.integers(1, 4),
    st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.6]),
    st.sampled_from([1.0, 1.0, 1.0, 2.2]),
    st.sampled_from([0.0, 0.0, 0.3, 1.0]),
    st.sampled_from([0, 0, 0, 300_000, 900_000]),
)


def launches(shares: tuple[float, ...] = SPEC.shares) -> st.SearchStrategy[list[Asked]]:
    one = st.tuples(
        st.integers(0, 400),
        st.sampled_from([("a", 1), ("b", 0), ("c", 0)]),
        st.lists(kernels, min_size=1, max_size=4).map(tuple),
        st.sampled_from(shares),
    )

    def numbered(found: list) -> list[Asked]:
        found.sort(key=lambda one: one[0])
        return [
            Asked(at * 1e-6, n, job, priority, ks, 1.0 if priority else share)
            for n, (at, (job, priority), ks, share) in enumerate(found)
        ]

    return st.lists(one, min_size=1, max_size=8).map(numbered)


def engine(
    spec: GpuSpec, asked: list[Asked], graphs: bool = True, priorities: bool = True
) -> tuple[Gpu, list[Finished]]:
    gpu = Gpu(spec, graphs=graphs, priorities=priorities)
    for a in asked:
        gpu.launch(a.launch, a.job, a.priority, a.kernels, a.at, a.share)
    done = gpu.advance(asked[-1].at)
    while gpu.next_event() < inf:
        done += gpu.advance(gpu.next_event())
    return gpu, done


@LONG
@given(launches(), st.booleans(), st.booleans(), st.sampled_from([SPEC, CALM, SHARED, FEW_CHANNELS]))
def test_aggregated_waves_are_the_same_as_single_blocks(
    asked: list[Asked], graphs: bool, priorities: bool, spec: GpuSpec
) -> None:
    reference = Reference(spec, graphs, priorities)
    wanted = {d.launch: d for d in reference.run(asked)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "GRAIN", 0.0)
        gpu, done = engine(spec, asked, graphs, priorities)
    assert set(wanted) == {d.launch for d in done}
    for d in done:
        assert d.started == pytest.approx(wanted[d.launch].started, rel=1e-6, abs=1e-8), d
        assert d.ended == pytest.approx(wanted[d.launch].ended, rel=1e-6, abs=1e-8), d
    busy = gpu.busy()
    assert busy.device_s == pytest.approx(reference.busy_s, rel=1e-5, abs=1e-8)
    assert busy.moved_bytes == pytest.approx(sum(k.nbytes for a in asked for k in a.kernels))
    for job, seconds in reference.sm_seconds.items():
        assert busy.sm_seconds[job] == pytest.approx(seconds, rel=1e-5, abs=1e-8)


def step_through(gpu: Gpu) -> Iterator[list[Stream]]:
    """The streams with a kernel on the device, most preferred first, after every event."""
    while gpu.next_event() < inf:
        gpu.advance(gpu.next_event())
        yield gpu._sms.running


@LONG
@given(launches())
def test_what_is_resident_fits_and_nothing_waits_that_would(asked: list[Asked]) -> None:
    gpu = Gpu(SPEC)
    for a in asked:
        gpu.launch(a.launch, a.job, a.priority, a.kernels, a.at, a.share)
        assert_fair(gpu, gpu._sms.running)
    for running in step_through(gpu):
        assert_fair(gpu, running)


def assert_fair(gpu: Gpu, running: list[Stream]) -> None:
    whole = SPEC.sms
    held = [0] * whole
    for s in running:
        if s.resident:
            assert total(s.places) == s.resident == sum(cohort.blocks for cohort in s.cohorts)
            first = 0
            for stop, count in s.places:
                assert not count or first >= whole - s.work.sms
                for sm in range(first, stop):
                    held[sm] += count * s.size
                first = stop
    assert all(units <= SM_UNITS for units in held)
    moved = sum(s.resident * s.shape.memory.rate * s.rate for s in running)
    assert moved <= SPEC.bandwidth * (1 + 1e-9)
    assert [s.priority for s in running] == sorted((s.priority for s in running), reverse=True)
    assert len({s.job for s in running}) == len(running)
    assert all(s.pending >= 0 for s in running)
    waits = next((s for s in running if s.pending), None)
    if waits is not None and not waits.cycling and gpu._sms.next_at > gpu.now:
        assert all(SM_UNITS - held[sm] < waits.shape.size for sm in range(whole - waits.work.sms, whole))


@LONG
@given(launches())
def test_nothing_is_placed_while_a_kernel_before_it_waits(asked: list[Asked]) -> None:
    reference = Reference(SPEC)
    reference.run(asked)
    for before, after in pairwise(reference.samples):
        if before.end == after.start and after.pending.get("a", 0):  # the only job of high priority
            for low in ("b", "c"):
                assert after.resident.get(low, 0) <= before.resident.get(low, 0)


@LONG
@given(launches(), st.booleans())
def test_the_same_launches_give_the_same_answer(asked: list[Asked], graphs: bool) -> None:
    (first, one), (second, two) = engine(SPEC, asked, graphs), engine(SPEC, asked, graphs)
    assert one == two
    assert first.busy() == second.busy()


@LONG
@given(launches(), st.booleans())
def test_nothing_is_lost_and_a_job_runs_in_order(asked: list[Asked], graphs: bool) -> None:
    gpu, done = engine(SPEC, asked, graphs)
    assert sorted(d.launch for d in done) == [a.launch for a in asked]
    by_job: dict[str, list[Finished]] = {}
    for d in sorted(done):
        assert d.started >= asked[d.launch].at
        by_job.setdefault(asked[d.launch].job, []).append(d)
    for mine in by_job.values():
        assert all(earlier.ended <= later.started for earlier, later in pairwise(mine))
    busy = gpu.busy()
    # Those that wait for memory get more of it while fewer of their blocks are there.
    held = sum(k.blocks * k.block_s / k.per_sm for a in asked for k in a.kernels if not k.nbytes and not k.cached)
    assert sum(busy.sm_seconds.values()) >= held * 0.999
    assert busy.moved_bytes == pytest.approx(sum(k.nbytes for a in asked for k in a.kernels))
    assert busy.moved_bytes <= busy.device_s * SPEC.bandwidth * 1.001


@LONG
@given(st.lists(kernels, min_size=1, max_size=5).map(tuple), st.sampled_from(SPEC.shares))
def test_alone_it_takes_what_the_formula_says(ks: tuple[Kernel, ...], share: float) -> None:
    gpu = Gpu(CALM)
    gpu.launch(1, "a", 0, ks, 0.0, share)
    (done,) = gpu.advance(inf)
    assert done.ended == pytest.approx(sum(solo_seconds(k, CALM, share) for k in ks))
    assert all(solo_seconds(k, CALM) >= k.nbytes / CALM.bandwidth * 0.999 for k in ks)


groups = st.tuples(
    st.integers(1, 1000), st.floats(1.0, 1e9), st.floats(1e-6, 1e-3), st.integers(1, 1000)
)  # (resident blocks, bytes a block, its seconds, blocks when it is alone)


@LONG
@given(st.lists(groups, min_size=1, max_size=6), st.sampled_from([1.0, 2.6, 3.5]))
def test_bandwidth_is_never_exceeded_and_used_up_where_more_is_demanded(
    found: list[tuple[int, float, float, int]], saturation: float
) -> None:
    asked = [(min(n, widest), demand(nbytes, s, widest, 1e12, saturation)) for n, nbytes, s, widest in found]
    f = granted(asked, 1e12, saturation)
    moved = sum(n * one.rate * speed(one, f) for n, one in asked)
    assert moved <= 1e12 * (1 + 1e-9)
    assert f >= 1.0 - 1e-9 or moved >= 1e12 * (1 - 1e-6)


@LONG
@given(groups, st.sampled_from([1.0, 2.6, 3.5]))
def test_a_kernel_alone_with_all_its_blocks_runs_at_full_speed(
    found: tuple[int, float, float, int], saturation: float
) -> None:
    _, nbytes, seconds, widest = found
    one: Demand = demand(nbytes, seconds, widest, 1e12, saturation)
    alone = speed(one, granted([(widest, one)], 1e12, saturation))
    assert alone == pytest.approx(min(1.0, 1e12 / (widest * one.rate)))
    fewer = max(1, widest // 2)
    assert speed(one, granted([(fewer, one)], 1e12, saturation)) >= alone * (1 - 1e-9)


def test_cohorts_that_share_an_end_change_times_by_little() -> None:
    """The error of GRAIN: two jobs that share the device for long, with and without it."""
    off = []
    for seed in range(16):
        rng = Random(seed)
        jobs = [tuple(random_kernel(rng) for _ in range(40)) for _ in range(2)]
        asked = [Asked(0.0, n, "ab"[n], 1 - n, jobs[n]) for n in range(2)]
        rough = sorted(engine(A100, asked)[1])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model, "GRAIN", 0.0)
            exact = sorted(engine(A100, asked)[1])
        off += [r.ended / e.ended - 1 for r, e in zip(rough, exact, strict=True)]
    assert max(map(abs, off)) < 0.04
    assert abs(sum(off) / len(off)) < 0.004


def random_kernel(rng: Random) -> Kernel:
    blocks, block_s = int(10 ** rng.uniform(1, 4)), 10 ** rng.uniform(-5.3, -4)
    per_sm = rng.choice([1, 2, 4, 8])
    waves = -(-blocks // (per_sm * A100.sms))
    return Kernel("k", blocks, block_s, per_sm, int(1.2 * rng.random() * waves * block_s * A100.bandwidth))
