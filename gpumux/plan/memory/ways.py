"""A training step in several ways, from really captured Programs: its bytes, and the time that a roofline predicts.

    whole          one batch
    doubled        two batches as one: what all others are compared with
    microbatches   the doubled batch in two halves, whose gradients add up before the optimizer runs
    checkpointing  the doubled batch, where each block keeps its input alone and runs again in the backward pass
    waves          two batches in turn, each with a replica of the model and of the optimizer (gpumux/waves)

Nothing runs: a step is captured over fake tensors. Temporaries lie as `memory.plan` has them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gpumux.device.sim.cost import op_profiles
from gpumux.device.sim.spec import GpuSpec
from gpumux.errors import CaptureError, ConfigError
from gpumux.fuse.member import Member
from gpumux.plan.models import LoadedModel
from gpumux.program import memory
from gpumux.program.ir import Program, aligned, labels

WAYS = ("whole", "doubled", "microbatches", "checkpointing", "waves")
PHASES = ("forward", "backward", "optimizer")
MOST_PHASES = 6  # of an optimizer's beginning; Adam has two
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
}

# ---- What is found.


@dataclass(frozen=True)
class StepMemory:
    """A step done in one way, for `samples` samples. All sizes in bytes, `seconds` by the roofline. `batch_bytes`: the
    batch and the step's results. `live`: for each operator its seconds, its phase and the bytes that are alive then,
    `state_bytes` and `batch_bytes` not among them; of waves, of both."""

    way: str
    samples: int
    state_bytes: int
    batch_bytes: int
    temporary_bytes: int
    seconds: float
    live: tuple[tuple[float, str, int], ...]

    @property
    def total_bytes(self) -> int:
        return self.state_bytes + self.batch_bytes + self.temporary_bytes


@dataclass(frozen=True)
class MemoryComparison:
    """All ways of a model at a batch. `left_out`: why a way is not among them. `notes`: what a way changes."""

    model: str
    batch: int
    optimizer: str
    device: str
    ways: tuple[StepMemory, ...]
    left_out: dict[str, str]
    notes: dict[str, str]

    def way(self, name: str) -> StepMemory:
        return next(each for each in self.ways if each.way == name)

    def relative(self, name: str) -> float:
        """The predicted time of a way over that of the doubled batch."""
        return self.way(name).seconds / self.way("doubled").seconds

    def best(self, within: float) -> StepMemory:
        """Of the ways to train on a doubled batch the one that takes the fewest bytes, of those that take at most
        `within` times as long as the doubled batch itself."""
        ways = [each for each in self.ways if each.way != "whole" and self.relative(each.way) <= within]
        return min(ways, key=lambda each: (each.total_bytes, each.seconds))


# ---- Capturing.


def compare(
    loaded: LoadedModel, batch: int, spec: GpuSpec, *, optimizer: str = "adamw",
    progress: Callable[[int, int, str], None] | None = None,
) -> MemoryComparison:  # fmt: skip
    """Capture the step in each way. The model is on the CPU. Raises ConfigError for an unknown optimizer or a batch
    below 1, CaptureError for a model whose step can't be captured."""
    if optimizer not in OPTIMIZERS:
        raise ConfigError(f"no optimizer is called {optimizer!r}", f"use one of {', '.join(OPTIMIZERS)}")
    if batch < 1:
        raise ConfigError(f"a batch of {batch}", "give 1 or more")
    found: dict[str, StepMemory] = {}
    left_out: dict[str, str] = {}
    notes: dict[str, str] = {}

    def begin(way: str) -> None:
        if progress is not None:
            progress(len(found), 4, way)

    model, make = loaded.module.train(), OPTIMIZERS[optimizer]
    begin("whole")
    single = captured_step(model, make, loaded.example(batch))
    found["whole"] = _step("whole", batch, single, spec)
    begin("doubled")
    examples = loaded.example(2 * batch)
    found["doubled"] = _step("doubled", 2 * batch, captured_step(model, make, examples), spec)
    begin("microbatches")
    found["microbatches"] = _step("microbatches", 2 * batch, captured_step(model, make, examples, parts=2), spec)
    if norm := next((name for name, each in model.named_modules() if isinstance(each, _BATCH_NORMS)), None):
        notes["microbatches"] = (
            f"batch norm ({norm}) then sees one half at a time, which is another computation: submit(microbatches=2)"
            " refuses it, a loop of your own over both halves does it"
        )
    blocks = block_lists(model)
    begin("checkpointing")
    if blocks:
        try:
            with checkpointed([block for each in blocks for block in each]):
                program = captured_step(model, make, examples)
            found["checkpointing"] = _step("checkpointing", 2 * batch, program, spec)
        except CaptureError as error:
            left_out["checkpointing"] = f"its blocks can't be captured under torch.utils.checkpoint: {error.message}"
    else:
        left_out["checkpointing"] = "the model has no list of blocks of one class of its own"
    found["waves"] = _waves(batch, single, gradient_bytes(model), spec)
    notes["waves"] = (
        "each wave updates its own replica with the mean of its gradient and of the other wave's last one, which is not"
        " training on the doubled batch"
    )
    ordered = tuple(found[way] for way in WAYS if way in found)
    return MemoryComparison(loaded.name, batch, optimizer, spec.name, ordered, left_out, notes)


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def loss_of(result: Any) -> Tensor:
    """What a step minimizes: what the model returns, if that is one number; the `loss` in it, if it has one; else the
    cross entropy of the first tensor over its last dimension, with class 0 for all. Raises CaptureError for results
    without a tensor of numbers."""
    given = getattr(result, "loss", None)
    if given is None and isinstance(result, dict):
        given = result.get("loss")
    if isinstance(given, Tensor):
        return given
    values = list(result.values()) if isinstance(result, dict) else result
    first = (
        next((each for each in values if isinstance(each, Tensor)), None)
        if isinstance(values, tuple | list)
        else values
    )
    if not isinstance(first, Tensor) or not first.is_floating_point():
        raise CaptureError("the model returns no tensor of numbers to train on", "let it return a loss, or a tensor")
    if not first.dim():
        return first
    flat = first.flatten(0, -2) if first.dim() > 1 else first[None]
    return nn.functional.cross_entropy(flat, flat.new_zeros(len(flat), dtype=torch.int64))


def captured_step(
    model: nn.Module, make: Callable[[Any], torch.optim.Optimizer], batch: Sequence[Tensor], parts: int = 1
) -> Program:
    """The Program of a training step when the optimizer has all its state. `parts`: the batch is taken in as many
    parts, whose gradients add up. Raises CaptureError or a subclass."""
    optimizer = make([each for each in model.parameters() if each.requires_grad])

    def step(*batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        total: Tensor | None = None
        for part in zip(*(each.chunk(parts) for each in batch), strict=True):
            loss = loss_of(model(*part)) / parts if parts > 1 else loss_of(model(*part))
            loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
        optimizer.step()
        assert total is not None
        return total

    member = Member("the step", step, model, optimizer, max_variants=None, twice=False)
    try:
        choice = member.choose(tuple(batch), {})
        for _ in range(MOST_PHASES):
            before = member.state.structure
            member.advance(choice)
            choice = member.choose(tuple(batch), {})
            if member.state.structure is before:
                break
        program: Program = choice.program.lowered.program
        return program
    finally:
        member.release()


def block_lists(model: nn.Module) -> list[nn.ModuleList | nn.Sequential]:
    """The outermost lists of two or more blocks of one class that is not torch's own, in the model's order."""
    found: list[nn.ModuleList | nn.Sequential] = []

    def visit(module: nn.Module) -> None:
        children = list(module.children())
        kinds = {type(child) for child in children}
        alike = len(children) > 1 and len(kinds) == 1 and not kinds.pop().__module__.startswith("torch.")
        if isinstance(module, nn.ModuleList | nn.Sequential) and alike:
            found.append(module)
            return
        for child in children:
            visit(child)

    visit(model)
    return found


@contextmanager
def checkpointed(blocks: Sequence[nn.Module]) -> Iterator[None]:
    """Within it, each block keeps its input alone in the forward pass and runs again in the backward pass."""

    def wrapped(forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)

    for block in blocks:
        block.forward = wrapped(block.forward)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward  # the class has it


def gradient_bytes(model: nn.Module) -> int:
    """Bytes of one set of gradients, each rounded up as the arena does."""
    return sum(aligned(each.numel() * each.element_size()) for each in model.parameters() if each.requires_grad)


# ---- What a captured step takes.


def phases(program: Program) -> list[str]:
    """The phase of each operator. Only operators of layers say which pass they are of: what runs between counts as
    what ran before it, so the loss and its own gradient count as forward; what runs after the last layer is the
    optimizer's."""
    marks = list(labels(program))
    last = max((at for at, label in enumerate(marks) if label is not None), default=-1)
    found, now = [], "forward"
    for at, label in enumerate(marks):
        if at > last:
            now = "optimizer"
        elif label is not None:
            now = "backward" if label.backward else "forward"
        found.append(now)
    return found


def _step(way: str, samples: int, program: Program, spec: GpuSpec) -> StepMemory:
    planned = memory.plan(program)
    held = memory.footprint(program, planned)
    seconds = [each.seconds for each in op_profiles(program, spec)]
    live = memory.live_bytes(planned)
    live += [0] * (len(seconds) - len(live))
    return StepMemory(
        way, samples, held.state_bytes, held.slot_bytes, held.transient_bytes, sum(seconds),
        tuple(zip(seconds, phases(program), live, strict=False)),
    )  # fmt: skip


def _waves(batch: int, program: Program, gradients: int, spec: GpuSpec) -> StepMemory:
    """Two waves on one device, the second one behind the first's last peak: of all plans the one with which their
    shared arena is lowest. Each takes as long as the batch alone, and averages the gradients once: two sets are read
    and one is written."""
    seconds = [each.seconds for each in op_profiles(program, spec)]
    held = memory.footprint(program, memory.plan(program))
    arena = min(nbytes for nbytes, _ in memory.shared_arenas(program, seconds))
    return StepMemory(
        "waves", 2 * batch, 2 * held.state_bytes, 2 * held.slot_bytes,
        gradients + arena, 2 * (sum(seconds) + 3 * gradients / spec.bandwidth),
        _staggered(program, seconds, gradients),
    )  # fmt: skip


def _staggered(program: Program, seconds: Sequence[float], gradients: int) -> tuple[tuple[float, str, int], ...]:
    """Live bytes of two waves over one step of the first, whose peak the second one waited for."""
    live = memory.live_bytes(memory.first_fit(program))
    live += [0] * (len(seconds) - len(live))
    clock = [0.0, *accumulate(seconds)]
    begun = clock[max(range(len(seconds)), key=lambda at: (live[at], at))]
    found = []
    for at, (each, mark) in enumerate(zip(seconds, phases(program), strict=True)):
        there = bisect_right(clock, (clock[at] - begun) % clock[-1]) - 1  # the second wave's operator
        found.append((each, mark, live[at] + live[min(there, len(seconds) - 1)] + gradients))
    return tuple(found)
