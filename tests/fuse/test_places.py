"""What a fused step computes for one job does not depend, in any bit, on what the others of its group hold: so a job's
steps can be run again with copies of the job in the other places (gpumux/fuse/replay.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gpumux.capture.state import byte_view
from gpumux.fuse.equal import FusedJobs, StackedState, fuse_jobs
from gpumux.fuse.member import Member
from gpumux.fuse.proof import ProgramRunner
from gpumux.program.ir import Program

nn = torch.nn

JOBS = 3
STEPS = 3
pytestmark = pytest.mark.usefixtures("one_thread")


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(16, 24), nn.Linear(24, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.table((x[:, 0, 0] * 3).long().clamp(0, 15)).mean(1))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(24, 4, 48, dropout=0.0, batch_first=True, activation="gelu")
        self.project, self.layers, self.out = nn.Linear(8, 24), nn.TransformerEncoder(layer, 1), nn.Linear(24, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.layers(self.project(x[:, 0])).mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.out = nn.GRU(8, 12, batch_first=True), nn.Linear(12, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.gru(x[:, 0])[0][:, -1])


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, groups=8), nn.GroupNorm(2, 8), nn.Hardswish(), nn.ConvTranspose2d(8, 4, 2), nn.Sigmoid(),
        nn.AvgPool2d(2, 1), nn.InstanceNorm2d(4, affine=True), nn.Flatten(), nn.Linear(16, 33), nn.LayerNorm(33),
        nn.Tanh(), nn.Linear(33, 10),
    )  # fmt: skip


MODELS: dict[str, Callable[[], nn.Module]] = {
    "perceptron": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(64, 37), nn.Softplus(), nn.Linear(37, 65), nn.ELU(), nn.Linear(65, 10)
    ),
    "convolutions": convolutions, "encoder": Encoder, "words": Words, "recurrent": Recurrent,
}  # fmt: skip
OPTIMIZERS: dict[str, Callable[[Any, float], torch.optim.Optimizer]] = {
    "SGD": lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9, weight_decay=1e-3),
    "Adam": lambda p, lr: torch.optim.Adam(p, lr),
    "AdamW": lambda p, lr: torch.optim.AdamW(p, lr, foreach=True, amsgrad=True),
}


@dataclass
class Job:
    """A job after its first step. `batches`, `scalars`: of its further steps, which all run `program`."""

    program: Program
    buffers: list[torch.Tensor]
    batches: list[list[torch.Tensor]]
    scalars: list[list[float | int]]


def job(seed: int, model: str, optimizer: str, dtype: torch.dtype) -> Job:
    torch.manual_seed(seed)
    made = MODELS[model]().to(dtype)
    optim = OPTIMIZERS[optimizer](made.parameters(), 0.01 * (seed + 1))

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optim.zero_grad()
        loss = F.cross_entropy(made(x), y)
        torch.nn.utils.clip_grad_norm_(made.parameters(), 1.0)
        loss.backward()
        optim.step()
        return loss

    member = Member(f"job {seed}", step, made, optim, max_variants=None)
    local: list[torch.Tensor] = []
    found: list[tuple[Program, tuple[int, ...], list[torch.Tensor], list[float | int]]] = []
    for _ in range(1 + STEPS):
        batch = torch.randn(5, 1, 8, 8, dtype=dtype) * (seed + 1), torch.randint(0, 10, (5,))
        choice = member.choose(batch, {})
        for buffer in member.table.buffers[len(local) :]:
            bytes_ = torch.zeros(buffer.nbytes, dtype=torch.uint8)
            for storage, start in buffer.home if buffer.filled else ():
                bytes_[start : start + storage.nbytes()].copy_(byte_view(storage))
            local.append(bytes_)
        lowered = choice.program.lowered
        numbers = choice.values[: len(lowered.program.scalars)]
        found.append((lowered.program, lowered.binding, [t.clone() for t in choice.tensors], numbers))
        member.advance(choice)
    member.release()
    first, bound, batch, numbers = found[0]
    runner = ProgramRunner(first, [local[index] for index in bound])
    alone(runner, batch, numbers)
    program, binding = found[1][:2]
    assert all(each[0] == program for each in found[1:])
    further = found[1:]
    return Job(program, [local[i] for i in binding], [each[2] for each in further], [each[3] for each in further])


def alone(runner: ProgramRunner, batch: Sequence[torch.Tensor], scalars: Sequence[Any]) -> list[torch.Tensor]:
    for target, source in zip(runner.inputs, batch, strict=True):
        target.copy_(source)
    return [result.clone() for result in runner.run(scalars)]


def together(group: FusedJobs, jobs: Sequence[Job]) -> list[list[torch.Tensor]]:
    """What each place holds after all steps of these jobs as one: the losses of its steps, and its state."""
    state = StackedState(group)
    for place, each in enumerate(jobs):
        state.stack(place, each.buffers)
    whole = ProgramRunner(group.fused.program, state.lines)
    held: list[list[torch.Tensor]] = [[] for _ in jobs]
    for step in range(STEPS):
        for place, each in enumerate(jobs):
            for target, source in zip(whole.inputs, each.batches[step], strict=False):
                target[place].copy_(source)
        values = [each.scalars[step] for each in jobs]
        group.layout.fill_tables(whole.inputs, values)
        for result in whole.run(group.layout.scalars(values)):
            for place in range(len(jobs)):
                held[place].append(result[place].clone())
    return [losses + [part.clone() for part in state.parts(place)] for place, losses in enumerate(held)]


@pytest.mark.parametrize(
    ("model", "optimizer", "dtype"),
    [
        *((model, "SGD", torch.float32) for model in ("perceptron", "convolutions", "words")),
        *(
            pytest.param(model, optimizer, dtype, marks=pytest.mark.extended)
            for model in MODELS for optimizer in OPTIMIZERS for dtype in (torch.float32, torch.float64)
        ),
    ],
)  # fmt: skip
@pytest.mark.every(2)
def test_what_a_job_gets_in_its_place_depends_on_no_bit_of_the_others(model: str, optimizer: str, dtype: torch.dtype):
    jobs = [job(seed, model, optimizer, dtype) for seed in range(JOBS)]
    assert len({id(each.program) for each in jobs}) == JOBS
    assert all(each.program == jobs[0].program for each in jobs)
    group = fuse_jobs(jobs[0].program, JOBS)
    wild = [together(group, jobs)]
    wild.append(together(group, [jobs[0], blown_up(jobs[1]), jobs[2]]))  # the neighbour overflows
    for place in range(JOBS):
        copies = together(group, [jobs[place]] * JOBS)[place]
        for number, mixed in enumerate(wild):
            if number == 0 or place != 1:
                assert all(same_bits(a, b) for a, b in zip(mixed[place], copies, strict=True)), (place, number)


def blown_up(each: Job) -> Job:
    """The same job, with batches that make it overflow."""
    far = [[t * 1e30 if t.is_floating_point() else t for t in batch] for batch in each.batches]
    return Job(each.program, each.buffers, far, each.scalars)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().reshape(-1).view(torch.uint8), other.contiguous().reshape(-1).view(torch.uint8))
