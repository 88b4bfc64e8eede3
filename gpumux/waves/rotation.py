"""Schedules of model-parallel waves (Wavelet, section 3.3), and of the pipelines they are compared with, as data.

A model in N partitions trains on N devices. `rotation` has every device busy in every cycle: in forward cycle c, device
i runs partition c on batch (i - c) mod N, so all devices use one partition at a time and batch b is on device
(b + c) mod N. The backward pass is the same in reverse: partition c runs on the device that holds what its forward pass
saved. After backward cycle c the gradients of partition c are averaged over all devices, beside the next cycle.

Every device keeps all partitions' weights and optimizer state at home, outside its memory. In its memory lie at most
two at a time: the one in use, and the one that comes next or was used before. Forward cycle c loads partition c + 1;
the last but one stays for the first backward cycles. A backward cycle begins beside the averaging of the partition
before; when that is updated and stored at home, the next one is loaded in its place. Partition 0 is there when a step
begins and ends.

`pipelined` is GPipe: a device keeps one partition, and all forward passes of a step's microbatches come before all
backward passes, last one first. `model_parallel` is plain model parallelism: one batch at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from gpumux.errors import ConfigError

Direction = Literal["forward", "backward"]


class Transfer(NamedTuple):
    """One batch's activations, or the gradients of them, from one device to another, which may be the same.
    `partition`: the one that made them."""

    kind: Literal["activations", "gradients"]
    partition: int
    batch: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Box:
    """What a device does in a cycle: one direction of a partition on one batch. `receives` is there before, `sends`
    goes when it is done. `resident`: the partitions whose weights lie on the device, by phase of the cycle; a phase
    ends when the averaging beside it is done, and then `stores` goes home and `loads` comes."""

    device: int
    cycle: int
    partition: int
    batch: int
    direction: Direction
    receives: tuple[Transfer, ...]
    sends: tuple[Transfer, ...]
    resident: tuple[tuple[int, ...], ...]
    loads: int | None = None
    stores: int | None = None

    @property
    def label(self) -> str:
        """As the paper writes it: F or B, the device, then partition and batch."""
        return f"{self.direction[0].upper()}{self.device}_{self.partition},{self.batch}"


class Reduction(NamedTuple):
    """Gradients of a partition, averaged over the step's batches and over `devices` when cycle `after` has ended, and
    applied there."""

    partition: int
    after: int
    devices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PartitionSchedule:
    """One optimizer step. `boxes` by cycle, then device; a device has one box in a cycle, or none."""

    name: str
    partitions: int
    batches: int
    boxes: tuple[Box, ...]
    reductions: tuple[Reduction, ...]

    @property
    def devices(self) -> int:
        return self.partitions

    @property
    def cycles(self) -> int:
        return self.boxes[-1].cycle + 1

    def in_cycle(self, cycle: int) -> list[Box]:
        return [box for box in self.boxes if box.cycle == cycle]

    def saved(self) -> dict[tuple[int, int], set[tuple[int, int]]]:
        """By (device, cycle): the (partition, batch) pairs whose activations for the backward pass lie on the device
        during that cycle."""
        held: list[set[tuple[int, int]]] = [set() for _ in range(self.devices)]
        found = {}
        for cycle in range(self.cycles):
            boxes = self.in_cycle(cycle)
            for box in boxes:
                if box.direction == "forward":
                    held[box.device].add((box.partition, box.batch))
            found.update({(device, cycle): set(each) for device, each in enumerate(held)})
            for box in boxes:
                if box.direction == "backward":
                    held[box.device].remove((box.partition, box.batch))
        return found


def rotation(devices: int) -> PartitionSchedule:
    """Model-parallel waves: as many partitions and batches as devices. Raises ConfigError for none."""
    n = _at_least_one(devices, "devices")
    where = {(c, (i - c) % n): i for c in range(n) for i in range(n)}  # (partition, batch): device
    boxes = []
    for cycle in range(2 * n):
        direction: Direction = "forward" if cycle < n else "backward"
        partition = cycle if cycle < n else 2 * n - 1 - cycle
        resident, loads, stores = _residency(n, partition, direction)
        for device in range(n):
            box = _box(where, n, cycle, partition, (device - partition) % n, direction)
            boxes.append(Box(*box, resident=resident, loads=loads, stores=stores))
    reductions = tuple(Reduction(m, 2 * n - 1 - m, tuple(range(n))) for m in reversed(range(n)))
    return PartitionSchedule("waves", n, n, tuple(boxes), reductions)


def pipelined(devices: int, microbatches: int) -> PartitionSchedule:
    """GPipe: partition d on device d, one optimizer step for all microbatches. Raises ConfigError for none."""
    n, m = _at_least_one(devices, "devices"), _at_least_one(microbatches, "microbatches")
    ahead = n + m - 1
    cells: list[tuple[int, int, int, Direction]] = []  # cycle, partition, batch, direction
    for batch in range(m):
        for partition in range(n):
            cells.append((batch + partition, partition, batch, "forward"))
            cells.append((ahead + (m - 1 - batch) + (n - 1 - partition), partition, batch, "backward"))
    return _in_place("pipelined", n, m, cells)


def model_parallel(devices: int, batches: int = 1) -> PartitionSchedule:
    """Plain model parallelism: partition d on device d, and one batch after the other through all of them. One
    optimizer step for all of them. Raises ConfigError for none."""
    n, m = _at_least_one(devices, "devices"), _at_least_one(batches, "batches")
    cells: list[tuple[int, int, int, Direction]] = []
    for batch in range(m):
        for partition in range(n):
            cells.append((2 * n * batch + partition, partition, batch, "forward"))
            cells.append((2 * n * (batch + 1) - 1 - partition, partition, batch, "backward"))
    return _in_place("model parallel", n, m, cells)


def _in_place(name: str, n: int, batches: int, cells: Sequence[tuple[int, int, int, Direction]]) -> PartitionSchedule:
    """Partition d stays on device d, which applies its gradients when it has been through all batches."""
    where = {(partition, batch): partition for partition in range(n) for batch in range(batches)}
    boxes = []
    last = {}
    for cycle, partition, batch, direction in sorted(cells):
        box = _box(where, n, cycle, partition, batch, direction)
        boxes.append(Box(*box, resident=((partition,),)))
        last[partition] = cycle
    reductions = sorted((Reduction(m, after, (m,)) for m, after in last.items()), key=lambda each: each.after)
    return PartitionSchedule(name, n, batches, tuple(boxes), tuple(reductions))


def _box(
    where: dict[tuple[int, int], int], n: int, cycle: int, partition: int, batch: int, direction: Direction
) -> tuple[int, int, int, int, Direction, tuple[Transfer, ...], tuple[Transfer, ...]]:
    """A box up to its transfers. `where`: the device of (partition, batch), the same in both directions."""
    device = where[partition, batch]
    before, after = where.get((partition - 1, batch)), where.get((partition + 1, batch))
    receives: tuple[Transfer, ...] = ()
    sends: tuple[Transfer, ...] = ()
    if direction == "forward":
        if before is not None:
            receives = (Transfer("activations", partition - 1, batch, before, device),)
        if after is not None:
            sends = (Transfer("activations", partition, batch, device, after),)
    else:
        if after is not None:
            receives = (Transfer("gradients", partition + 1, batch, after, device),)
        if before is not None:
            sends = (Transfer("gradients", partition, batch, device, before),)
    return device, cycle, partition, batch, direction, receives, sends


def _residency(
    n: int, partition: int, direction: Direction
) -> tuple[tuple[tuple[int, ...], ...], int | None, int | None]:
    """Of a cycle of `rotation`, the same on all devices: (resident by phase, loads, stores)."""
    before, after = partition - 1, partition + 1
    if direction == "forward":
        if after < n:
            return ((partition, after),), after, None
        return ((before, partition) if before >= 0 else (partition,),), None, None
    if after == n:  # the last one's own backward pass: nothing is averaged yet
        return ((before, partition) if before >= 0 else (partition,),), None, None
    if before < 0:
        return ((partition, after), (partition,)), None, after
    return ((partition, after), (before, partition)), before, after


def _at_least_one(count: int, what: str) -> int:
    if count < 1:
        raise ConfigError(f"{count} {what}", "give at least one")
    return count
