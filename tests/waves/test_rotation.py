"""Schedules of model-parallel waves and their baselines, and what they compute beside plain torch."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gpumux.errors import ConfigError
from gpumux.waves.rotation import PartitionSchedule, model_parallel, pipelined, rotation
from tests.waves.executor import Executor

# Figure 10 of the paper by hand: a line a cycle, devices from left to right; F or B, the device, then partition, batch.
FIGURE_10 = """
F0_0,0 F1_0,1 F2_0,2 F3_0,3
F0_1,3 F1_1,0 F2_1,1 F3_1,2
F0_2,2 F1_2,3 F2_2,0 F3_2,1
F0_3,1 F1_3,2 F2_3,3 F3_3,0
B0_3,1 B1_3,2 B2_3,3 B3_3,0
B0_2,2 B1_2,3 B2_2,0 B3_2,1
B0_1,3 B1_1,0 B2_1,1 B3_1,2
B0_0,0 B1_0,1 B2_0,2 B3_0,3
"""
# GPipe's own figure for three devices and two microbatches; dots are idle.
PIPELINED = """
F0_0,0 . .
F0_0,1 F1_1,0 .
. F1_1,1 F2_2,0
. . F2_2,1
. . B2_2,1
. B1_1,1 B2_2,0
B0_0,1 B1_1,0 .
B0_0,0 . .
"""
counts = st.integers(1, 16)


def labels(schedule: PartitionSchedule) -> list[list[str]]:
    made = [["."] * schedule.devices for _ in range(schedule.cycles)]
    for box in schedule.boxes:
        assert made[box.cycle][box.device] == "."  # one box at a time
        made[box.cycle][box.device] = box.label
    return made


def drawn(text: str) -> list[list[str]]:
    return [line.split() for line in text.strip().splitlines()]


def check(schedule: PartitionSchedule) -> None:
    """Every batch meets every partition once in each direction, in order; what a box receives was sent before, to its
    device, and what is sent is received; the backward pass is where the forward pass was. Boxes are in order."""
    assert [(box.cycle, box.device) for box in schedule.boxes] == sorted(
        (box.cycle, box.device) for box in schedule.boxes
    )
    for batch in range(schedule.batches):
        its = [box for box in schedule.boxes if box.batch == batch]
        assert [box.partition for box in its if box.direction == "forward"] == list(range(schedule.partitions))
        assert [box.partition for box in its if box.direction == "backward"] == list(range(schedule.partitions))[::-1]
        assert len({box.cycle for box in its}) == len(its)
        places = {box.partition: box.device for box in its if box.direction == "forward"}
        assert all(places[box.partition] == box.device for box in its)
    sent: dict[object, int] = {}
    for box in schedule.boxes:
        for transfer in box.receives:
            assert transfer.target == box.device
            assert sent.pop(transfer) < box.cycle
        for transfer in box.sends:
            assert transfer.source == box.device
            sent[transfer] = box.cycle
    assert not sent
    last = {m: max(b.cycle for b in schedule.boxes if b.partition == m) for m in range(schedule.partitions)}
    assert {(r.partition, r.after) for r in schedule.reductions} == set(last.items())
    for reduction in schedule.reductions:
        assert set(reduction.devices) == {b.device for b in schedule.boxes if b.partition == reduction.partition}


def test_four_devices_are_figure_10_box_by_box():
    assert labels(rotation(4)) == drawn(FIGURE_10)
    assert [(r.partition, r.after) for r in rotation(4).reductions] == [(3, 4), (2, 5), (1, 6), (0, 7)]


def test_gpipe_is_its_own_figure():
    assert labels(pipelined(3, 2)) == drawn(PIPELINED)


@given(counts)
def test_in_a_rotation_every_device_works_in_every_cycle(devices: int):
    schedule = rotation(devices)
    check(schedule)
    assert schedule.cycles == 2 * devices
    assert not any("." in line for line in labels(schedule))
    for box in schedule.boxes:
        cycle = box.cycle if box.direction == "forward" else 2 * devices - 1 - box.cycle
        assert (box.partition, box.batch) == (cycle, (box.device - cycle) % devices)


@given(counts)
def test_at_most_two_partitions_lie_on_a_device_and_are_loaded_before_they_are_used(devices: int):
    schedule = rotation(devices)
    for device in range(devices):
        there = {0}  # when a step begins
        stored = set()
        for box in (box for box in schedule.boxes if box.device == device):
            for i, phase in enumerate(box.resident):
                assert len(phase) == len(set(phase)) <= 2
                assert box.partition in phase
                came, went = set(phase) - there, there - set(phase)
                # What comes is loaded, and what goes was updated and stored, or is unchanged since it was loaded.
                assert came <= {box.loads}
                if box.direction == "backward" and went:
                    assert i == 1  # after the averaging beside the cycle
                    assert went == {box.stores}
                    stored |= went
                there = set(phase)
        assert there == {0}
        assert stored == set(range(1, devices))


@given(counts, counts)
def test_baselines_are_schedules_too(devices: int, batches: int):
    for schedule in (pipelined(devices, batches), model_parallel(devices, batches)):
        check(schedule)
        assert all(box.partition == box.device for box in schedule.boxes)
    assert pipelined(devices, batches).cycles == 2 * (devices + batches - 1)
    assert model_parallel(devices, batches).cycles == 2 * devices * batches
    assert labels(pipelined(devices, 1)) == labels(model_parallel(devices))


def test_a_rotation_holds_a_whole_batch_of_activations_on_each_device():
    """As data parallelism does; plain model parallelism holds one partition's, GPipe one partition's of every
    microbatch."""
    assert {len(held) for (_, cycle), held in rotation(4).saved().items() if cycle == 3} == {4}
    assert max(map(len, model_parallel(4).saved().values())) == 1
    assert max(map(len, pipelined(4, 6).saved().values())) == 6


@pytest.mark.parametrize("make", [rotation, lambda n: pipelined(2, n), lambda n: model_parallel(n)])
def test_no_devices_or_batches_are_refused(make):
    with pytest.raises(ConfigError):
        make(0)


def layers() -> list[nn.Module]:
    torch.manual_seed(1)
    made: list[nn.Module] = [nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())]
    made += [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)) for _ in range(6)]
    return [*made, nn.Sequential(nn.Flatten(), nn.Linear(4 * 36, 5))]


def optimizer(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)


SCHEDULES = [
    *(pytest.param(rotation(n), id=f"rotation-{n}") for n in (1, 2, 4, 8)),
    *(pytest.param(model_parallel(n, b), id=f"model-parallel-{n}-{b}") for n, b in ((4, 1), (4, 4))),
    *(pytest.param(pipelined(n, b), id=f"pipelined-{n}-{b}") for n, b in ((2, 4), (4, 4), (4, 6))),
]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_three_steps_are_those_of_plain_torch_on_the_batches(schedule: PartitionSchedule):
    """Gradients averaged over the batches, batch norm by batch, in float64."""
    each = 8 // schedule.partitions
    parts = [nn.Sequential(*layers()[i * each : (i + 1) * each]).double() for i in range(schedule.partitions)]
    plain = nn.Sequential(*copy.deepcopy(parts))
    plain_optimizer = optimizer(plain)
    executor = Executor(schedule, parts, optimizer, F.cross_entropy)
    made = torch.Generator().manual_seed(2)
    for _ in range(3):
        batches = [
            (torch.randn(6, 2, 6, 6, generator=made, dtype=torch.float64), torch.randint(5, (6,), generator=made))
            for _ in range(schedule.batches)
        ]
        plain_optimizer.zero_grad()
        for x, y in batches:
            (F.cross_entropy(plain(x), y) / len(batches)).backward()
        plain_optimizer.step()
        executor.step(batches)
    for device in executor.devices:
        assert device.most_resident <= 2
        for m, module in device.partitions.items():
            for mine, its in zip(module.parameters(), plain[m].parameters(), strict=True):
                assert (mine - its).abs().max() < 1e-10
    moved = [(a - b).abs().max() for a, b in zip(plain.parameters(), parts_of(parts), strict=True)]
    assert min(moved) > 1e-6  # all of them were trained


def parts_of(parts: list[nn.Module]) -> list[nn.Parameter]:
    return [parameter for part in parts for parameter in part.parameters()]


def test_running_statistics_are_those_of_the_batches_a_device_saw():
    """As in data parallelism, each device has its own: device i saw batch (i - c) mod N in partition c."""
    parts = [nn.Sequential(each).double() for each in layers()[:2]]
    parts[1].append(nn.Flatten()).append(nn.Linear(4 * 36, 5).double())
    executor = Executor(rotation(2), parts, optimizer, F.cross_entropy)
    batches = [(torch.randn(6, 2, 6, 6, dtype=torch.float64), torch.randint(5, (6,))) for _ in range(2)]
    executor.step(batches)
    for batch in range(2):
        plain = nn.Sequential(*copy.deepcopy(parts))
        plain(batches[batch][0])
        for c in range(2):
            mine = executor.devices[(batch + c) % 2].partitions[c]
            torch.testing.assert_close(mine[0][1].running_mean, plain[c][0][1].running_mean, rtol=0, atol=1e-12)


def test_the_executor_notices_what_was_not_sent():
    whole = rotation(2)
    without = [box for box in whole.boxes if box.label != "F0_0,0"]
    broken = PartitionSchedule(whole.name, 2, 2, tuple(without), whole.reductions)
    executor = Executor(broken, [nn.Linear(3, 3), nn.Linear(3, 3)], optimizer, F.mse_loss)
    with pytest.raises(KeyError):
        executor.step([(torch.ones(2, 3), torch.ones(2, 3))] * 2)
