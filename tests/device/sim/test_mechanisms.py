"""What public measurements say that real GPUs do, one mechanism in each test, by figures that can be worked out by hand
or that were published (docs/simulator.md gives the sources)."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from gpumux.device.sim.cost import Kernel, kernel_of, product, solo_seconds, wave_seconds
from gpumux.device.sim.gpu import Gpu
from gpumux.device.sim.placement import add, place, total, uniform
from gpumux.device.sim.spec import A100, A100_80GB, H100, H200, GpuSpec, preset
from gpumux.program.profile import OpProfile
from tests.device.sim.test_gpu import PLAIN, US, compute, run

TWO = replace(PLAIN, sms=2)


def together(spec: GpuSpec, *kernels: Kernel) -> list[float]:
    """Seconds of each kernel when all are launched at once, by streams of equal priority."""
    gpu = Gpu(spec)
    for number, kernel in enumerate(kernels):
        gpu.launch(number, str(number), 0, [kernel], 0.0)
    done = run(gpu)
    return [done[number].ended for number in range(len(kernels))]


# ---- where blocks go


def test_a_block_needs_room_on_one_multiprocessor() -> None:
    """Two halves of different multiprocessors are no room for a whole block (RTSS 2017, figure 8: K8)."""
    ends = together(TWO, compute(2, 100.0, 2), compute(1, 10.0, 1))
    assert ends == [pytest.approx(100 * US), pytest.approx(110 * US)]


def test_blocks_go_to_where_most_further_ones_fit() -> None:
    """Gilman et al. 2021: most-room; among equals the first."""
    free = uniform(4, 8)
    for blocks, wanted in ((3, [1, 1, 1, 0]), (5, [2, 1, 1, 1])):
        placed, count = place(free, 2, blocks, 4)
        assert count == blocks
        assert [value for stop, value in widened(placed)] == wanted
    free = [(1, 2), (2, 8), (4, 4)]
    placed, count = place(free, 2, 4, 4)
    assert [value for stop, value in widened(placed)] == [0, 3, 1, 0]
    placed, count = place(free, 2, 99, 4)
    assert (count, total(placed)) == (9, 9)
    assert add(free, placed, -2) == [(4, 0)]


def widened(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """One run for each multiprocessor."""
    found: list[tuple[int, int]] = []
    for stop, value in runs:
        found += [(sm + 1, value) for sm in range(len(found), stop)]
    return found


def test_a_high_kernel_that_waits_for_room_holds_up_low_ones_that_would_fit() -> None:
    """RTSS 2017, rule A2 and figure 8; rule-A2: "does low run ahead": no."""
    gpu = Gpu(TWO)
    gpu.launch(1, "running", 0, [compute(2, 100.0, 2)], 0.0)  # half of each multiprocessor
    gpu.launch(2, "high", 1, [compute(1, 10.0, 1)], 10 * US)
    gpu.launch(3, "low", 0, [compute(1, 5.0, 2)], 20 * US)
    done = run(gpu)
    assert done[2].ended == pytest.approx(110 * US)
    assert done[3].ended == pytest.approx(105 * US)  # with the high one, on the other multiprocessor


def test_of_equal_kernels_the_one_behind_waits_until_all_blocks_before_it_are_placed() -> None:
    """RTSS 2017, rules G2, G3 and X1."""
    ends = together(TWO, compute(2, 100.0, 2), compute(3, 10.0, 1), compute(1, 5.0, 2))
    assert ends == [pytest.approx(100 * US), pytest.approx(120 * US), pytest.approx(115 * US)]


# ---- queues


def test_a_deep_stream_blocks_no_other_one_that_has_a_queue_of_its_own() -> None:
    """rule-queue: "when I created 3 streams, each stream can launch 1000 kernel"."""
    gpu = Gpu(PLAIN)
    for launch in range(10):
        gpu.launch(launch, "low", 0, (compute(10, 300.0),), 0.0)
    gpu.launch(99, "high", 1, (compute(10, 10.0),), 1 * US)
    assert run(gpu)[99].ended == pytest.approx(310 * US)


def test_the_host_is_blocked_after_a_thousand_launches_of_one_stream() -> None:
    gpu = Gpu(replace(PLAIN, graph_s=1e-9))
    for launch in range(1200):
        gpu.launch(launch, "a", 0, (compute(10, 190.0),), 0.0)
    gpu.advance(50 * US)
    assert gpu.busy().launching_s == pytest.approx(1001e-9)  # and one that it waits with
    gpu = Gpu(replace(PLAIN, graph_s=1e-9))
    for launch in range(1800):
        gpu.launch(launch, "abc"[launch % 3], 0, (compute(10, 190.0),), 0.0)
    gpu.advance(50 * US)
    assert gpu.busy().launching_s == pytest.approx(1800e-9)


@pytest.mark.parametrize(("channels", "waits"), [(8, True), (9, False), (32, False)])
def test_a_ninth_stream_waits_for_one_that_has_its_channel(channels: int, *, waits: bool) -> None:
    """RTAS 2024, rule R2: it waits until all blocks of that channel's last kernel are placed, with idle
    multiprocessors."""
    gpu = Gpu(replace(PLAIN, sms=100, channels=channels))
    gpu.launch(0, "0", 0, [compute(1, 100.0), compute(1, 10.0)], 0.0)
    for number in range(1, 9):
        gpu.launch(number, str(number), 0, [compute(1, 10.0)], 0.0)
    done = run(gpu)
    assert all(done[number].ended == pytest.approx(10 * US) for number in range(1, 8))
    assert done[8].ended == pytest.approx(110 * US if waits else 10 * US)


# ---- memory

COPY = Kernel("copy", 1000, 100 * US, 2, 5 * 10**9)  # on all multiprocessors: all of the bandwidth


def test_half_of_the_multiprocessors_reach_most_of_the_bandwidth() -> None:
    """membw-saturation-85, membw-half: 0.78 to 0.89."""
    whole, half, fifth = (solo_seconds(COPY, PLAIN, share) for share in (1.0, 0.5, 0.2))
    assert whole == pytest.approx(5e-3)
    assert 0.78 < whole / half < 0.89
    assert 0.3 < whole / fifth < 0.5


def test_few_blocks_reach_more_than_their_part_of_the_bandwidth() -> None:
    """membw-saturation-8 to -340, each within a tenth of what 340 blocks reach."""
    published = {8: 135.7, 32: 487.3, 64: 865.1, 85: 1067.4, 128: 1148.3, 170: 1181.6}
    spec = replace(PLAIN, sms=170, bandwidth=1203.6e9)
    made = Kernel("copy", 170, 1e-3, 2, int(1203.6e6))
    for blocks, rate in published.items():
        moved = made.nbytes / 170 * blocks
        seconds_ = solo_seconds(made, spec, 1.0) if blocks == 170 else wave_seconds(made, spec, blocks)
        assert moved / seconds_ / 1e9 == pytest.approx(rate, abs=0.1 * 1203.6)


def test_two_copies_never_get_more_than_one() -> None:
    """membw-halves-both: on halves of their own each gets 0.6 of what it had there alone, 1.66 times the time."""
    spec = replace(PLAIN, bandwidth=1e12)
    half = COPY._replace(blocks=10, nbytes=5 * 10**7)  # one block for each place of one half
    alone = wave_seconds(COPY, spec, 10)
    both = together(spec, half._replace(blocks=20, nbytes=10**8), half._replace(blocks=20, nbytes=10**8))
    assert max(both) == pytest.approx(200 * US)  # as one after the other
    gpu = Gpu(spec)
    gpu.launch(1, "a", 0, [COPY], 0.0, 0.5)
    gpu.launch(2, "b", 0, [COPY], 0.0, 0.5)
    assert max(each.ended for each in run(gpu).values()) >= 2 * 5e-3
    # Beside each other they have the time that each had alone times this.
    assert 2 * 10 * 5 * 10**6 / 1e12 / alone == pytest.approx(1.661, rel=0.02)


def test_the_bandwidth_is_what_programs_reach_not_the_datasheets() -> None:
    for spec, datasheet in ((A100, 1.555e12), (A100_80GB, 2.039e12), (H200, 4.8e12), (H100, 3.35e12)):
        assert 0.8 < spec.bandwidth / datasheet < 0.9
        copy = kernel_of(OpProfile("aten.add.Tensor", ((1 << 26,),), 10**9 / spec.bandwidth, 10**9), spec)
        both = max(together(replace(spec, graph_s=0.0, transmit_s=0.0), copy, copy))
        assert 2 * copy.nbytes / both <= spec.bandwidth


def test_working_sets_that_exceed_l2_together_are_worse_than_one_after_the_other() -> None:
    """interf-l2-*: both / alone 1.5 to 1.8 while both fit into L2, 4.7 and 5.6 once they do not, 2.0 when not even one
    does."""
    spec = replace(PLAIN, l2_bytes=96 << 20, l2_bandwidth=3.3e12)

    def ratio(megabytes: int) -> float:
        """Two copies on half of the multiprocessors each: both over alone, where one has 0.835 of the bandwidth."""
        cached = megabytes << 20
        bandwidth = spec.l2_bandwidth if cached <= spec.l2_bytes else spec.bandwidth
        alone = cached / (0.835 * bandwidth)
        half = Kernel("copy", 5, alone, 1, 0, cached=cached)
        assert solo_seconds(half, spec) == pytest.approx(alone)
        return max(together(spec, half, half)) / alone

    assert ratio(8) == ratio(48) == pytest.approx(1.67, abs=0.01)
    assert ratio(56) == pytest.approx(5.5, abs=0.1)
    assert ratio(128) == pytest.approx(1.67, abs=0.01)


# ---- neighbours on one multiprocessor


def test_neighbours_slow_each_other_by_what_both_need() -> None:
    """interf-pipe: two kernels of one pipe 2.0; interf-ipc: a copy from L2 and float32 products 1.38; two that need
    little: 1.0."""

    def beside(one: float, other: float) -> float:
        pair = [Kernel("k", 10, 100 * US, 2, 0, issue=issue) for issue in (one, other)]
        return max(together(PLAIN, *pair)) / (100 * US)

    assert beside(1.0, 1.0) == pytest.approx(2.0)
    assert beside(1.0, 0.38) == pytest.approx(1.38, rel=0.02)
    assert beside(0.38, 0.38) == pytest.approx(1.0)


def test_kernels_that_fill_half_of_each_multiprocessor_do_not_slow_each_other() -> None:
    """interf-slots-1 and -2: half of the threads each: 1.0; all of them each: 2.0."""
    half = Kernel("sleep", 10, 100 * US, 2, 0)
    assert together(PLAIN, half, half) == [pytest.approx(100 * US)] * 2
    whole = Kernel("sleep", 20, 100 * US, 2, 0)
    assert max(together(PLAIN, whole, whole)) == pytest.approx(200 * US)


def test_products_need_more_of_a_multiprocessor_than_other_operators() -> None:
    mm = kernel_of(OpProfile("aten.mm.default", ((512, 512),) * 3, 50e-6, 3 << 20), A100)
    relu = kernel_of(OpProfile("aten.relu.default", ((1 << 20,),) * 2, 50e-6, 8 << 20), A100)
    assert mm.issue > 2 * relu.issue > 0


# ---- launches and products


def test_gaps_between_kernels_are_those_measured_on_an_h100() -> None:
    for spec in (H100, H200):
        assert (spec.launch_gap_s, spec.node_gap_s) == (2.1e-6, 1.3e-6)
    assert A100.ranges["node_gap_s"] == (0.5e-6, 1.3e-6)


@pytest.mark.parametrize(
    ("model", "peak", "size", "published"),
    [
        ("a100-80gb", "float16", 1024, 119.4), ("a100-80gb", "float16", 2048, 221.8),
        ("a100-80gb", "float16", 4096, 228.0), ("a100-80gb", "float16", 8192, 253.7),
        ("h200", "int8", 1024, 290.8), ("h200", "int8", 2048, 1013.4),
        ("h200", "int8", 4096, 1249.1), ("h200", "int8", 8192, 1300.6),
    ],
)  # fmt: skip
def test_products_take_what_cublas_takes(model: str, peak: str, size: int, published: float) -> None:
    """azure-*-gemm_cublaslt-*: within 20 %; small products are far from the peak."""
    spec = preset(model)
    item = 2 if peak == "float16" else 1
    cost = product(size, size, size, 3 * item * size * size, spec.flops[peak], spec)
    assert 2 * size**3 / cost.seconds / 1e12 == pytest.approx(published, rel=0.2)


def test_a_drop_lets_what_waits_in_its_channel_begin() -> None:
    gpu = Gpu(replace(PLAIN, channels=1))
    gpu.launch(1, "a", 0, [compute(1, 100.0)] * 2, 0.0)
    gpu.launch(2, "b", 0, [compute(1, 10.0)], 0.0)
    gpu.advance(20 * US)
    gpu.drop("a", 20 * US)
    assert [(each.launch, each.ended) for each in gpu.advance(inf)] == [(2, pytest.approx(30 * US))]
