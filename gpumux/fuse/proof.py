"""Holding a fused Program against one that runs every operator once a model, on invented numbers, before it is used.

A wrong rule would train wrong models without a word; a step of each on the same bytes shows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from gpumux.device.cpu.operands import allocate
from gpumux.errors import NotFusible
from gpumux.fuse.doubled import doubled
from gpumux.fuse.fused import Fused, numbers, stream_bytes
from gpumux.fuse.runner import Runner
from gpumux.program.ir import Program

# Relative to the largest value of a tensor, after one step. Batched products round in another order.
_TOLERANCE = {torch.float64: 1e-7, torch.float32: 5e-3, torch.complex128: 1e-7, torch.complex64: 5e-3}
_LOOSE = 0.1  # for types of fewer bits
_SHAKEN = 100.0  # times what the last digits of the numbers before the step make


def check(fused: Fused, each: Fused, values: Sequence[Sequence[float | int]]) -> None:
    """Raises NotFusible unless both do the same to the same state and batch. `values`: each model's host scalars."""
    wide = [doubled(f.program) for f in (fused, each)]
    if wide[0] is not None and wide[1] is not None:
        fused, each = replace(fused, program=wide[0]), replace(each, program=wide[1])
    found, wanted, near = _ran(fused, values), _ran(each, values), _ran(each, values, shaken=True)
    for what, *tensors in zip(("result", "tensor"), found, wanted, near, strict=True):
        for number, (a, b, c) in enumerate(zip(*tensors, strict=True)):
            _same(a, b, c, f"{what} {number} of the {'step' if what == 'result' else 'state'}", fused)


def _same(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, what: str, fused: Fused) -> None:
    """`c` is what `b` would be if the numbers before the step were others in their last digits: where that alone makes a
    difference (a gradient that is truly zero is nothing but rounding), no more can be asked of `a`."""
    if torch.equal(a, b):
        return
    if a.dtype.is_floating_point or a.dtype.is_complex:
        limit = _TOLERANCE.get(a.dtype, _LOOSE)
        wide = torch.complex128 if a.dtype.is_complex else torch.float64
        a, b, c = a.to(wide), b.to(wide), c.to(wide)
        both = torch.isfinite(a) & torch.isfinite(b)
        if torch.equal(torch.isfinite(a), torch.isfinite(b)):
            away = (a - b)[both].abs()
            noise = (c - b)[both & torch.isfinite(c)].abs()
            if _largest(away) <= limit * max(_largest(b[both].abs()), 1e-30) + _SHAKEN * _largest(noise):
                return
    rules = sorted({d.target for d in fused.decisions if d.how == "fused"})
    raise NotFusible(
        f"for all models at once, {what} comes out otherwise than for one model after another",
        f"one of these operators is fused wrongly: {', '.join(rules)}. Report it with the step's code; until then give "
        "those of which you think so as per_model_operators=[...]",
    )


def _largest(values: torch.Tensor) -> float:
    return float(values.max()) if values.numel() else 0.0


def _ran(
    fused: Fused, values: Sequence[Sequence[float | int]], shaken: bool = False
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(results, state) after a step from invented numbers, equal for Programs of equal state; `shaken`: for numbers that
    differ from those in their last digits."""
    program = fused.program
    dtypes = _slot_dtypes(program)
    slots = sorted((s.slot, s.nbytes) for s in program.storages if s.kind == "state")
    unused = max((s for s, _ in slots), default=-1) + 1
    assert len(slots) == unused, "every slot is there"
    generator = torch.Generator().manual_seed(11)
    shake = torch.Generator().manual_seed(12) if shaken else None
    buffers = [_invented(nbytes, dtypes[slot], generator, shake) for slot, nbytes in slots]
    if fused.streams:
        state = torch.Generator().manual_seed(5).get_state()
        buffers[-1].view(-1, stream_bytes()).copy_(state.expand(fused.models, -1))
    runner = Runner(program, buffers)
    for target, index in zip(runner.inputs, program.inputs, strict=True):
        view = program.views[index]
        target.copy_(_invented_tensor(target.shape, getattr(torch, view.dtype), generator, shake))
    batch = len(program.inputs) - len(fused.tables)
    for target, rows in zip(runner.inputs[batch:], numbers(fused, values), strict=True):
        target.copy_(rows)
    results = runner.run([values[model][index] for model, index in fused.scalars])
    typed = [_typed(b, dtypes[slot]) for b, (slot, _) in zip(buffers, slots, strict=True)]
    return results, typed


def _slot_dtypes(program: Program) -> dict[int, torch.dtype]:
    found: dict[int, torch.dtype] = {}
    for view in program.views:
        storage = program.storages[view.storage]
        if storage.kind == "state":
            found.setdefault(storage.slot, getattr(torch, view.dtype))
    for storage in program.storages:
        if storage.kind == "state":
            found.setdefault(storage.slot, torch.uint8)
    return found


def _invented_tensor(
    size: Sequence[int], dtype: torch.dtype, generator: torch.Generator, shake: torch.Generator | None = None
) -> torch.Tensor:
    """Numbers around one: variances and denominators stay away from zero. Whole numbers are zero, which indexes anything."""
    if dtype.is_floating_point:
        made = torch.rand(tuple(size), generator=generator, dtype=torch.float64).add_(0.5)
        if shake is not None:
            step = 8 * torch.finfo(dtype).eps
            made *= 1 + step * torch.rand(tuple(size), generator=shake, dtype=torch.float64)
        return made.to(dtype)
    return torch.zeros(tuple(size), dtype=dtype)


def _invented(
    nbytes: int, dtype: torch.dtype, generator: torch.Generator, shake: torch.Generator | None
) -> torch.Tensor:
    line = allocate(nbytes)
    typed = _typed(line, dtype)
    typed.copy_(_invented_tensor(typed.shape, dtype, generator, shake))
    return line


def _typed(line: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return line[: line.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
