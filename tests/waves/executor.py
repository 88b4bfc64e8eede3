"""Runs the schedules of gpumux/waves/rotation.py in plain torch, over devices that are emulated in one process.

A device has what the schedule brings to it, and nothing else: partitions that are resident, what was sent to it, and
what its own forward passes saved. Anything else is a KeyError or an AssertionError. Cycle by cycle, all boxes run on
what was there before the cycle.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from gpumux.waves.rotation import Box, PartitionSchedule, Transfer


class EmulatedDevice:
    """One device: its own copies of the partitions it runs, their optimizers, and what lies there now."""

    def __init__(self, partitions: dict[int, nn.Module], make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]):
        self.partitions = copy.deepcopy(partitions)
        self.optimizers = {m: make_optimizer(module) for m, module in self.partitions.items()}
        self.inbox: dict[Transfer, Tensor] = {}
        self.saved: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # by partition and batch: input, output
        self.most_resident = 0

    def run(self, box: Box, data: Tensor, loss_of: Callable[[Tensor], Tensor]) -> Tensor:
        """Run a box. `data` is its batch, for the first partition; `loss_of` gives the loss of the last one's output.
        Returns what it sends."""
        assert all(box.partition in phase for phase in box.resident)
        self.most_resident = max(self.most_resident, *map(len, box.resident))
        given = [self.inbox.pop(transfer) for transfer in box.receives]
        key = (box.partition, box.batch)
        if box.direction == "forward":
            entered = (given[0] if given else data).detach().requires_grad_(bool(given))
            left = self.partitions[box.partition](entered)
            self.saved[key] = (entered, left if box.sends else loss_of(left))
            return left.detach()
        entered, left = self.saved.pop(key)
        left.backward(given[0] if given else None)
        return entered.grad if entered.grad is not None else left.detach()


class Executor:
    """A chain of partitions on the schedule's devices. `loss_fn(output, target)` is a mean over one batch."""

    def __init__(
        self,
        schedule: PartitionSchedule,
        partitions: Sequence[nn.Module],
        make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        loss_fn: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        used: list[dict[int, nn.Module]] = [{} for _ in range(schedule.devices)]
        for box in schedule.boxes:
            used[box.device][box.partition] = partitions[box.partition]
        self.devices = [EmulatedDevice(each, make_optimizer) for each in used]
        self.schedule, self.loss_fn = schedule, loss_fn

    def step(self, batches: Sequence[tuple[Tensor, Tensor]]) -> None:
        """One optimizer step on the mean of the batches' losses."""
        for cycle in range(self.schedule.cycles):
            sent = []
            for box in self.schedule.in_cycle(cycle):
                x, y = batches[box.batch]
                result = self.devices[box.device].run(box, x, lambda out, y=y: self.loss_fn(out, y) / len(batches))
                sent += [(transfer, result) for transfer in box.sends]
            for transfer, tensor in sent:
                self.devices[transfer.target].inbox[transfer] = tensor
            for reduction in self.schedule.reductions:
                if reduction.after == cycle:
                    self._reduce(reduction.partition, reduction.devices)
        assert not any(device.saved or device.inbox for device in self.devices)

    def _reduce(self, partition: int, devices: Sequence[int]) -> None:
        members = [self.devices[device] for device in devices]
        for copies in zip(*(each.partitions[partition].parameters() for each in members), strict=True):
            total = torch.stack([parameter.grad for parameter in copies]).sum(0)
            for parameter in copies:
                parameter.grad = total.clone()
        for each in members:
            each.optimizers[partition].step()
            each.optimizers[partition].zero_grad()
