"""The simulation of waves: what it may not claim, and that its parts add up. It repeats exactly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpumux.device.sim.cost import Kernel
from gpumux.waves.rotation import model_parallel, pipelined, rotation
from microbench import waves
from microbench.wave_layers import MODELS, Layer, even_parts, layers_of
from microbench.waves import V100, WARM, Cluster, Tasks, simulate, step_seconds

STEPS = WARM + 6
RESULTS = Path(__file__).parents[2] / "microbench/results/sim-waves.json"


def layer(name: str, share: float = 1.0, *, saved: int = 1 << 20, parameters: int = 4096) -> Layer:
    """Forward 1 ms, backward 2 ms, of blocks that take that share of the GPU."""
    blocks = int(share * V100.sms)
    one = tuple(Kernel(f"{name} {i}", blocks, 100e-6, 1, 0) for i in range(10))
    return Layer(name, one, one * 2, saved, 1 << 20, parameters)


def chain(share: float = 1.0, count: int = 4) -> list[Layer]:
    return [layer(f"layer {i}", share) for i in range(count)]


def rate(tasks: Tasks, samples: int, steps: int = STEPS, gpus: int = 1) -> float:
    return samples / step_seconds(simulate(tasks.all, gpus, V100), steps)


def over_gang(share: float) -> float:
    one = Cluster(2)
    return rate(waves.data_waves(chain(share), one, V100, STEPS), 1) / rate(
        waves.gang(chain(share), one, V100, STEPS), 1
    )


def test_waves_whose_kernels_fill_the_gpu_gain_nothing_but_the_gaps():
    assert 0.98 < over_gang(1.0) < 1.1


def test_waves_overlap_as_far_as_their_kernels_leave_room():
    """At most by 1.5, since a backward pass takes two thirds of a step and has to wait for the one before."""
    assert 1.3 < over_gang(0.5) <= 1.5 * 1.05
    assert over_gang(0.75) <= 1.05 / 0.75  # a quarter of the GPU is left for the other's blocks


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_a_rotation_is_at_most_as_many_times_as_quick_as_there_are_gpus(gpus: int):
    parts = [[each] for each in chain(count=gpus)]
    cluster, steps = Cluster(gpus), WARM + 2

    def of(schedule: object, samples: int) -> float:
        return rate(waves.partition_tasks(schedule, parts, cluster, V100, steps=steps), samples, steps, gpus)

    plain, gpipe, rotated = of(model_parallel(gpus), 1), of(pipelined(gpus, gpus), gpus), of(rotation(gpus), gpus)
    assert plain <= gpipe * 1.001
    assert gpipe <= rotated * 1.001
    assert rotated / plain <= gpus * 1.001
    assert rotated / plain > 0.8 * gpus
    assert gpipe / plain == pytest.approx(gpus * gpus / (2 * gpus - 1), rel=0.1)


def test_swapping_large_weights_costs_time_and_small_ones_hide():
    cluster, steps = Cluster(4), WARM + 2

    def seconds(parameters: int, swaps: bool) -> float:
        parts = [[layer(f"part {i}", parameters=parameters)] for i in range(4)]
        tasks = waves.partition_tasks(rotation(4), parts, cluster, V100, steps=steps, swaps=swaps)
        return step_seconds(simulate(tasks.all, 4, V100), steps)

    assert seconds(4096, True) < 1.02 * seconds(4096, False)
    assert seconds(100 << 20, True) > 2 * seconds(100 << 20, False)


def test_memory_is_what_is_saved_between_a_layers_passes():
    layers = [layer("a", saved=3 << 20), layer("b", saved=1 << 20)]
    run = simulate(waves.gang(layers, Cluster(2), V100, STEPS).all, 1, V100)
    shown = waves.memory(run, 0, 7 << 20, waves._window(run, STEPS, 2))
    assert shown.peak == (7 + 3 + 1) << 20
    assert min(value for _, value in shown.points) == 7 << 20
    # a lies from the first millisecond to the sixth, b from the second to the fourth.
    assert shown.mean / 2**20 == pytest.approx(7 + 3 + 0.5, abs=0.2)
    both = simulate(waves.data_waves(layers, Cluster(2), V100, STEPS).all, 1, V100)
    shown = waves.memory(both, 0, 0, waves._window(both, STEPS, 2))
    assert 4 << 20 < shown.peak <= 8 << 20


def test_tasks_that_wait_for_each_other_are_noticed():
    tasks = Tasks()
    tasks.add("first", 0, [1], kernels=(Kernel("k", 1, 1e-6, 1, 0),))
    tasks.add("second", "link", [0], seconds=1.0)
    with pytest.raises(RuntimeError, match="wait for each other"):
        simulate(tasks.all, 1, V100)


def test_a_link_carries_one_message_at_a_time():
    tasks = Tasks()
    for _ in range(3):
        tasks.add("message", "link", [], seconds=1.0)
    assert [span.ended for span in simulate(tasks.all, 1, V100).spans] == [1.0, 2.0, 3.0]
    assert Cluster(8).link(3, 4)[1] == waves.NVLINK
    assert Cluster(8, 2).link(3, 4) == ("ethernet 0>1", waves.ETHERNET)
    assert Cluster(8, 2).link(0, 1)[1] == waves.NVLINK


def test_parts_are_as_even_as_layers_allow():
    parts = even_parts([layer(f"layer {i}") for i in range(8)], 4, V100)
    assert [len(part) for part in parts] == [2, 2, 2, 2]
    assert len(even_parts([*chain(count=3)], 3, V100)) == 3


def test_a_models_layers_add_up():
    layers = layers_of("VGG-16", 2, V100)
    assert sum(each.parameters for each in layers) == 4 * 138_357_544
    forward, backward = (sum(each.seconds(V100)[i] for each in layers) for i in (0, 1))
    assert 1.5 * forward < backward < 3 * forward
    # Of each convolution and pool the output, of each dense layer with dropout two; a rectifier is in place.
    saved = sum(each.saved for each in layers)
    assert saved / sum(each.saved for each in layers_of("VGG-16", 4, V100)) == pytest.approx(0.5)
    assert 50e6 < saved / 2 < 70e6


def test_what_is_committed_claims_no_more_than_is_possible():
    found = json.loads(RESULTS.read_text())
    for row in found["data_parallel"]:
        assert row["over_gang"] <= 2.0
        assert row["memory"]["waves"]["peak_mib"] <= 2 * row["memory"]["gang"]["peak_mib"]
    for row in found["model_parallel"]:
        gpus = sum(map(int, row["gpus"].split("+")))
        assert row["model"] in MODELS
        assert all(over <= gpus * 1.001 for over in row["waves_over"].values())
        assert row["memory"]["waves, swapping"]["peak_mib"] <= row["memory"]["waves"]["peak_mib"]
