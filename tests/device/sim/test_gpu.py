"""The behaviour of the simulated GPU, one rule in each test."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan

import pytest

from gpumux.device.sim.cost import Kernel, solo_seconds
from gpumux.device.sim.gpu import Finished, Gpu
from gpumux.device.sim.spec import A100, H200, PRESETS, GpuSpec, preset
from gpumux.errors import ConfigError

# Ten multiprocessors and no overhead at all: times can be worked out by hand.
PLAIN = replace(
    A100, name="plain", sms=10, bandwidth=1e12, graph_s=0.0, graph_node_s=0.0, call_s=0.0, transmit_s=0.0,
    launch_gap_s=0.0, node_gap_s=0.0, completion_s=0.0, shares=(1.0, 0.5, 0.2), share_multiple=1,
)  # fmt: skip
SHARED = replace(PLAIN, launch_queue="shared")
US = 1e-6


def compute(blocks: int, block_us: float, per_sm: int = 1, sensitivity: float = 1.0) -> Kernel:
    return Kernel("compute", blocks, block_us * US, per_sm, 0, sensitivity)


def run(gpu: Gpu) -> dict[int, Finished]:
    """Run all launches to their end."""
    done: list[Finished] = []
    while gpu.next_event() < inf:
        done += gpu.advance(gpu.next_event())
    assert [d.ended for d in done] == sorted(d.ended for d in done)
    return {d.launch: d for d in done}


def seconds(done: Finished) -> float:
    return done.ended - done.started


def test_alone_a_kernel_runs_in_waves() -> None:
    gpu = Gpu(PLAIN)
    gpu.launch(1, "a", 1, [compute(25, 10.0)], 0.0)
    assert run(gpu)[1] == Finished(1, 0.0, pytest.approx(30 * US))
    assert gpu.busy().sm_seconds["a"] == pytest.approx(25 * 10 * US)


@pytest.mark.parametrize("spec", PRESETS.values(), ids=PRESETS)
def test_alone_a_launch_takes_its_kernels_and_the_gaps(spec: GpuSpec) -> None:
    gpu = Gpu(spec)
    kernels = (Kernel("a", 5000, 15 * US, 4, 10**9), Kernel("b", 7, 3 * US, 1, 10), Kernel("c", 900, 9 * US, 8, 10**8))
    gpu.launch(1, "a", 1, kernels, 1.0)
    host = spec.graph_s + 3 * spec.graph_node_s + spec.transmit_s
    done = run(gpu)[1]
    assert done.started == pytest.approx(1.0 + host)
    alone = sum(solo_seconds(kernel, spec) for kernel in kernels)
    assert seconds(done) == pytest.approx(spec.launch_gap_s + 2 * spec.node_gap_s + alone)
    assert gpu.busy().moved_bytes == pytest.approx(10**9 + 10 + 10**8)
    assert gpu.busy().launching_s == pytest.approx(spec.graph_s + 3 * spec.graph_node_s)


def test_a_memory_bound_kernel_takes_what_moving_its_bytes_takes() -> None:
    bound = Kernel("copy", 100, 1 * US, 2, 10**9)
    assert solo_seconds(bound, PLAIN) == pytest.approx(1e-3)
    gpu = Gpu(PLAIN)
    gpu.launch(1, "a", 1, [bound], 0.0)
    assert seconds(run(gpu)[1]) == pytest.approx(1e-3)


def test_blocks_are_not_preempted_and_high_ones_get_the_room_that_frees() -> None:
    gpu = Gpu(PLAIN)
    gpu.launch(1, "low", 0, [compute(30, 100.0)], 0.0)
    gpu.launch(2, "high", 1, [compute(10, 10.0)], 50 * US)
    done = run(gpu)
    assert done[2] == Finished(2, pytest.approx(50 * US), pytest.approx(110 * US))  # after the first low wave
    assert done[1].ended == pytest.approx(310 * US)


def test_without_priorities_the_older_kernel_goes_first() -> None:
    gpu = Gpu(PLAIN, priorities=False)
    gpu.launch(1, "low", 0, [compute(30, 100.0)], 0.0)
    gpu.launch(2, "high", 1, [compute(10, 10.0)], 50 * US)
    done = run(gpu)
    assert done[1].ended == pytest.approx(300 * US)
    assert done[2].ended == pytest.approx(310 * US)


def test_low_blocks_use_what_high_ones_leave() -> None:
    gpu = Gpu(PLAIN)
    gpu.launch(1, "high", 1, [compute(6, 100.0)], 0.0)
    gpu.launch(2, "low", 0, [compute(8, 50.0)], 0.0)
    done = run(gpu)
    assert seconds(done[1]) == pytest.approx(100 * US)
    assert seconds(done[2]) == pytest.approx(100 * US)  # four at a time


def test_a_share_confines_a_launch() -> None:
    gpu = Gpu(PLAIN)
    gpu.launch(1, "low", 0, [compute(10, 10.0)], 0.0, share=0.5)
    gpu.launch(2, "high", 1, [compute(5, 10.0)], 1 * US)
    done = run(gpu)
    assert seconds(done[1]) == pytest.approx(20 * US)
    assert seconds(done[2]) == pytest.approx(10 * US)


def test_launches_of_one_share_have_it_in_common() -> None:
    gpu = Gpu(PLAIN)
    for launch, job in enumerate(("a", "b")):
        gpu.launch(launch, job, 0, [compute(5, 10.0)], 0.0, share=0.5)
    done = run(gpu)
    assert [each.ended for each in done.values()] == [pytest.approx(10 * US), pytest.approx(20 * US)]


def test_a_sensitive_kernel_suffers_only_from_other_jobs() -> None:
    gpu = Gpu(PLAIN)
    gpu.launch(1, "high", 1, [compute(5, 100.0, sensitivity=2.0)], 0.0)
    gpu.launch(2, "low", 0, [compute(5, 40.0)], 0.0)
    assert seconds(run(gpu)[1]) == pytest.approx(120 * US)  # 40 us of it at half speed
    alone = Gpu(PLAIN)
    alone.launch(1, "high", 1, [compute(5, 100.0, sensitivity=2.0)], 0.0)
    assert seconds(run(alone)[1]) == pytest.approx(100 * US)


def test_bandwidth_is_shared_and_stretches_only_what_is_memory_bound() -> None:
    copy = Kernel("copy", 5, 100 * US, 1, 10**8)  # all of the bandwidth
    gpu = Gpu(PLAIN)
    for launch, job in enumerate(("a", "b")):
        gpu.launch(launch, job, 0, [copy], 0.0)
    assert [seconds(d) for d in run(gpu).values()] == [pytest.approx(200 * US)] * 2
    gpu = Gpu(PLAIN)
    gpu.launch(1, "a", 0, [copy], 0.0)
    gpu.launch(2, "b", 0, [compute(5, 100.0)], 0.0)
    assert [seconds(d) for d in run(gpu).values()] == [pytest.approx(100 * US)] * 2


def test_a_jobs_launches_run_in_order() -> None:
    gpu = Gpu(A100)
    for launch in range(20):
        gpu.launch(launch, "a", launch % 2, (compute(100, 10.0), compute(5, 1.0)), 0.0)
    done = run(gpu)
    assert list(done) == list(range(20))
    assert all(done[n].ended <= done[n + 1].started for n in range(19))


def test_where_all_share_one_queue_a_deep_low_stream_blocks_high_launches_behind_it() -> None:
    low = (compute(10, 300.0),)
    high = (compute(10, 10.0),)
    deep, paced = Gpu(SHARED), Gpu(SHARED)
    for launch in range(10):
        deep.launch(launch, "low", 0, low, 0.0)
    paced.launch(0, "low", 0, low, 0.0)
    for gpu in (deep, paced):
        gpu.launch(99, "high", 1, high, 1 * US)
    # Ten launches, four on the device: the high one's way is free when the sixth has ended.
    assert run(deep)[99].ended == pytest.approx(6 * 300 * US + 10 * US)
    assert run(paced)[99].ended == pytest.approx(310 * US)


def test_a_full_shared_queue_blocks_the_host() -> None:
    spec = replace(SHARED, queue_length=2, stream_depth=1, graph_s=1 * US)
    gpu = Gpu(spec)
    for launch in range(6):
        gpu.launch(launch, "low", 0, (compute(10, 100.0),), 0.0)
    gpu.advance(50 * US)
    assert gpu.busy().launching_s == pytest.approx(3 * US)  # one runs, two queue, the host holds the fourth
    gpu.launch(9, "high", 1, (compute(1, 1.0),), 50 * US)
    assert run(gpu)[9].ended > 300 * US


def test_a_slow_host_starves_the_device_without_graphs() -> None:
    kernels = tuple(compute(10, 2.0) for _ in range(50))
    ended = {}
    for graphs in (True, False):
        gpu = Gpu(A100, graphs=graphs)
        gpu.launch(1, "a", 1, kernels, 0.0)
        ended[graphs] = run(gpu)[1].ended
        launching = 50 * A100.call_s if not graphs else A100.graph_s + 50 * A100.graph_node_s
        assert gpu.busy().launching_s == pytest.approx(launching)
    assert ended[False] > 50 * A100.call_s > 1.5 * ended[True]


def test_the_host_learns_of_an_end_a_little_later() -> None:
    gpu = Gpu(replace(PLAIN, completion_s=5 * US))
    gpu.launch(1, "a", 1, (compute(10, 10.0),), 0.0)
    assert gpu.advance(14.9 * US) == []
    assert gpu.next_event() == pytest.approx(15 * US)
    assert [d.ended for d in gpu.advance(gpu.next_event())] == [pytest.approx(10 * US)]


def test_advance_to_finish_stops_at_the_first_news() -> None:
    gpu = Gpu(PLAIN)
    gpu.launch(1, "a", 1, (compute(10, 10.0),), 0.0)
    gpu.launch(2, "a", 1, (compute(10, 10.0),), 0.0)
    assert [d.launch for d in gpu.advance_to_finish(5 * US)] == []
    assert gpu.now == 5 * US
    assert [d.launch for d in gpu.advance_to_finish()] == [1]
    assert gpu.now == pytest.approx(10 * US)
    assert [d.launch for d in gpu.advance_to_finish()] == [2]
    assert gpu.advance_to_finish() == []
    assert gpu.now == pytest.approx(20 * US)


@pytest.mark.parametrize(
    ("at_us", "ended_us"), [(0.0, 20.0), (5.0, 20.0), (10.0, 30.0), (15.0, 30.0), (20.0, 40.0), (35.0, 50.0)]
)
def test_a_dropped_job_says_nothing_more_and_its_blocks_run_out(at_us: float, ended_us: float) -> None:
    gpu = Gpu(replace(PLAIN, completion_s=2 * US))
    gpu.launch(1, "a", 1, (compute(25, 10.0), compute(10, 10.0)), 0.0)
    gpu.launch(2, "a", 1, (compute(25, 10.0),), 0.0)
    gpu.launch(3, "b", 0, (compute(10, 10.0),), 0.0)
    gpu.advance(at_us * US)
    gpu.drop("a", at_us * US)
    done = run(gpu)
    assert list(done) == [3]
    assert done[3].ended == pytest.approx(ended_us * US)


def test_a_job_dropped_may_come_again() -> None:
    gpu = Gpu(PLAIN)
    gpu.launch(1, "a", 1, (compute(10, 10.0),), 0.0)
    gpu.drop("a", 5 * US)
    gpu.launch(2, "a", 1, (compute(10, 10.0),), 5 * US)
    assert {n: d.ended for n, d in run(gpu).items()} == {2: pytest.approx(20 * US)}


@pytest.mark.parametrize(
    "kernel",
    [
        Kernel("k", 0, 1e-6, 1, 0), Kernel("k", 1, 0.0, 1, 0), Kernel("k", 1, nan, 1, 0), Kernel("k", 1, inf, 1, 0),
        Kernel("k", 1, 1e-6, 0, 0), Kernel("k", 1, 1e-6, 33, 0), Kernel("k", 1, 1e-6, 1, -1),
        Kernel("k", 1, 1e-6, 1, 0, 0.5),
    ],
)  # fmt: skip
def test_a_kernel_that_can_not_be_is_refused(kernel: Kernel) -> None:
    gpu = Gpu(A100)
    with pytest.raises(ConfigError, match="'k'"):
        gpu.launch(1, "a", 1, (kernel,), 0.0)


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5, nan])
def test_a_share_that_can_not_be_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match="share"):
        Gpu(A100).launch(1, "a", 1, (compute(1, 1.0),), 0.0, share)


def test_shares_are_what_the_hardware_can_set_apart() -> None:
    assert [A100.share_sms(share) for share in A100.shares] == [108, 54, 26]
    assert [H200.share_sms(share) for share in H200.shares] == [132, 64, 32]


def test_every_constant_has_its_source() -> None:
    for spec in PRESETS.values():
        rows = list(spec.constants())
        assert len(rows) == 21
        assert all(row.source for row in rows)
        with pytest.raises(ConfigError, match="no source for call_s"):
            replace(spec, sources={name: text for name, text in spec.sources.items() if name != "call_s"})
    with pytest.raises(ConfigError, match="v100, a100, a100-80gb, h100, h200"):
        preset("b200")


@pytest.mark.parametrize("spec", PRESETS.values(), ids=PRESETS)
def test_a_guess_has_a_range_that_its_value_lies_in_and_nothing_else_has(spec: GpuSpec) -> None:
    for name, (least, most) in spec.ranges.items():
        assert least <= getattr(spec, name) <= most
        assert least < most
    unranged = {name: bounds for name, bounds in spec.ranges.items() if name != "transmit_s"}
    for wrong in (unranged, {**spec.ranges, "sms": (1.0, 200.0)}):
        with pytest.raises(ConfigError, match="each guess has one"):
            replace(spec, ranges=wrong)


# ---- two jobs that train side by side

SMALL = tuple(compute(60, 30.0) for _ in range(4))  # a piece of the high job: room for two jobs in each wave
LARGE = tuple(compute(300, 60.0) for _ in range(3))


def steps_beside(gpu_model: str, *, priorities: bool, high_depth: int, low_depth: int) -> float:
    """Seconds a piece of a high job takes from its launch to its end, on average, while a low one keeps
    `low_depth` launches outstanding. 0: it is alone."""
    gpu = Gpu(preset(gpu_model), priorities=priorities)
    launched: dict[int, tuple[str, float]] = {}

    def launch(job: str) -> None:
        number = len(launched)
        launched[number] = (job, gpu.now)
        gpu.launch(number, job, int(job == "high"), SMALL if job == "high" else LARGE, gpu.now)

    for _ in range(low_depth):
        launch("low")
    for _ in range(high_depth):
        launch("high")
    waits: list[float] = []
    while len(waits) < 40:
        for done in gpu.advance_to_finish():
            job, at = launched[done.launch]
            if job == "high":
                waits.append(gpu.now - at)
            launch(job)
    return sum(waits[8:]) / len(waits[8:]) / high_depth


@pytest.mark.parametrize("model", ["a100", "a100+shared-queue"])
def test_a_naive_second_job_hurts_and_pacing_gives_most_back(model: str) -> None:
    alone = steps_beside(model, priorities=True, high_depth=2, low_depth=0)
    naive = steps_beside(model, priorities=False, high_depth=8, low_depth=16)
    preferred = steps_beside(model, priorities=True, high_depth=8, low_depth=16)
    paced = steps_beside(model, priorities=True, high_depth=2, low_depth=1)
    assert naive > 1.5 * alone
    assert paced < naive - 0.7 * (naive - alone)
    if model == "a100":
        assert preferred < naive - 0.7 * (naive - alone), "priorities alone do as much where each stream has a queue"
    else:
        assert preferred > naive - 0.5 * (naive - alone), "launches of both wait in one queue"


def test_longer_low_blocks_hurt_a_short_high_kernel_more() -> None:
    """Nothing is preempted: the figure of DeepPool's section 7.3, by one kernel of each."""
    waited = []
    for block_us in (10.0, 100.0, 1000.0):
        gpu = Gpu(A100)
        gpu.launch(1, "low", 0, (compute(108 * 50, block_us),), 0.0)
        gpu.launch(2, "high", 1, (compute(108, 10.0),), 5.5 * block_us * US)
        waited.append(seconds(run(gpu)[2]) / (10 * US))
    assert waited[0] < 2.0 < 5.0 < waited[1] < 12.0 < 40.0 < waited[2]


# ---- kernels that are one with those of other GPUs


def test_a_kernel_that_holds_keeps_its_blocks_until_it_is_released() -> None:
    """It takes four of ten multiprocessors for 10 us, and keeps them until 50 us."""
    done: list[tuple[int, float]] = []
    gpu = Gpu(PLAIN, held=lambda launch, now: done.append((launch, now)))
    gpu.launch(1, "a", 2, [compute(4, 10.0)], 0.0, holds=True)
    gpu.launch(2, "b", 1, [compute(60, 10.0)], 0.0)  # ten waves on six multiprocessors
    assert gpu.advance(50 * US) == []
    assert done == [(1, pytest.approx(10 * US))]
    gpu.release("a", 50 * US)
    ends = {each.launch: each.ended for each in gpu.advance(inf)}
    # Five waves of six, then three of ten.
    assert ends == {1: pytest.approx(50 * US), 2: pytest.approx(80 * US)}
    assert gpu.busy().sm_seconds["a"] == pytest.approx(4 * 50 * US)
    assert gpu.busy().device_s == pytest.approx(80 * US)


def test_alone_on_the_device_it_holds_too() -> None:
    done: list[tuple[int, float]] = []
    gpu = Gpu(PLAIN, held=lambda launch, now: done.append((launch, now)))
    gpu.launch(1, "a", 2, [compute(10, 5.0), compute(4, 10.0)], 0.0, holds=True)
    gpu.launch(2, "a", 2, [compute(10, 5.0)], 0.0)
    assert gpu.advance(30 * US) == []
    assert done == [(1, pytest.approx(15 * US))]
    gpu.release("a", 40 * US)
    ends = [each.ended for each in gpu.advance(inf)]
    assert ends == pytest.approx([40 * US, 45 * US])  # what comes after it in its stream waits
    assert gpu.busy().sm_seconds["a"] == pytest.approx((50 + 4 * 35 + 50) * US)


def test_a_dropped_job_holds_nothing() -> None:
    gpu = Gpu(PLAIN, held=lambda launch, now: None)
    gpu.launch(1, "a", 2, [compute(10, 10.0)], 0.0, holds=True)
    gpu.advance(20 * US)
    gpu.launch(2, "b", 1, [compute(10, 10.0)], 20 * US)
    gpu.drop("a", 30 * US)
    assert [(each.launch, each.ended) for each in gpu.advance(inf)] == [(2, pytest.approx(40 * US))]
