"""One operator run on numbers drawn for it, on the whole batch and on its parts.

The numbers of a proof (proof.py) may hide what an operator does: a mask that holds nowhere, differences that all are
zero, a term that is zero at first. What an operator makes of them fits parts in any order and any factor. Here its
arguments are other numbers, related as those of the step are: samples lie side by side, shares add up, each times its
factor. How the results are related then is what the operator does, whatever the step's numbers are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from gpumux.capture.recorder import RawOp
from gpumux.capture.values.machine import Inconclusive, Machine, filled

NEAR = (-1.0, 0.0, 1.0)  # around numbers that an operator is given, such as bounds


@dataclass(frozen=True, slots=True)
class SampleLayout:
    """How a per-sample value lies in memory: the whole view and those of the parts, which lie along `dim`, `inner`
    times in turns; the whole is `ratio` times what the parts have."""

    whole: int
    parts: tuple[int, ...]
    dim: int
    inner: int
    ratio: float


@dataclass(frozen=True, slots=True)
class ShareLayout:
    """A value that each part has, too, in a storage of the same size: the whole is `ratio` times the sum of the parts'
    values, or, `alike`, times the value that all parts have."""

    whole: int
    parts: tuple[int, ...]
    ratio: float
    alike: bool = False


Layout = SampleLayout | ShareLayout | int  # the number of a storage that all parts read, such as the batch


class OperatorTrial:
    """`given`: the arguments to draw, each once. `kept`: all storages that the operators read or write."""

    def __init__(self, machine: Machine, given: Sequence[Layout], kept: Collection[int]) -> None:
        self._machine, self._given, self._kept = machine, given, kept

    @contextmanager
    def run(self, whole: RawOp, parts: Sequence[RawOp], *, near: bool, positive: bool) -> Iterator[None]:
        """The operators' results, for as long as the block runs. `near`: draw numbers close to those that the operator
        is given; `positive`: draw no negative ones. Raises Inconclusive if torch refuses them for such numbers."""
        numbers = _numbers_of(whole) if near else None
        draw = torch.Generator().manual_seed(5)
        with self._machine.restored(self._kept):
            for layout in self._given:
                if isinstance(layout, SampleLayout):
                    self._samples(layout, draw, numbers, positive)
                elif isinstance(layout, ShareLayout):
                    self._shares(layout, draw, numbers, positive)
                else:
                    flat = self._machine.flat(layout)
                    flat.copy_(_drawn(flat, draw, numbers, positive))
            for op in (whole, *parts):
                self._machine.run(op)
            yield

    def _samples(
        self, layout: SampleLayout, draw: torch.Generator, numbers: Sequence[float] | None, positive: bool
    ) -> None:  # fmt: skip
        target = self._machine.tensor(layout.whole)
        made = _drawn(target, draw, numbers, positive)
        target.copy_(made)
        parts = side_by_side(made, layout.dim, layout.inner, len(layout.parts))
        for view, part in zip(layout.parts, parts, strict=True):
            self._machine.tensor(view).copy_(part / layout.ratio if layout.ratio != 1.0 else part)

    def _shares(
        self, layout: ShareLayout, draw: torch.Generator, numbers: Sequence[float] | None, positive: bool
    ) -> None:  # fmt: skip
        whole, parts = self._machine.flat(layout.whole), [self._machine.flat(storage) for storage in layout.parts]
        if any(part.shape != whole.shape for part in parts):
            raise Inconclusive("memory that lies otherwise in parts")
        for part in parts:
            part.copy_(parts[0] if layout.alike and part is not parts[0] else _drawn(part, draw, numbers, positive))
        total = parts[0] if layout.alike else sum(parts, torch.zeros_like(whole))
        whole.copy_(total * layout.ratio if layout.ratio != 1.0 else total)


def side_by_side(whole: torch.Tensor, dim: int, inner: int, count: int) -> list[torch.Tensor]:
    """The parts of which a tensor is made, which lie along `dim`, `inner` times in turns."""
    blocks = whole.unflatten(dim, (inner, whole.shape[dim] // inner)).chunk(count, dim + 1)
    return [block.flatten(dim, dim + 1) for block in blocks]


def _numbers_of(op: RawOp) -> list[float]:
    """The numbers among an operator's arguments: values close to them are worth a try."""
    given: Mapping[str, Any] = dict(op.kwargs)
    found = [a for a in (*op.args, *given.values()) if isinstance(a, (int, float)) and not isinstance(a, bool)]
    return [float(a) for a in found if abs(a) < 1 << 31]


def _drawn(
    like: torch.Tensor, draw: torch.Generator, numbers: Sequence[float] | None, positive: bool
) -> torch.Tensor:  # fmt: skip
    """Numbers of a tensor's type: booleans, without `numbers` all the same but one; whole numbers among those that are
    there and `numbers`; or normal ones, half of them around `numbers`."""
    if like.dtype == torch.bool:
        return _mask(like, draw, numbers is None, positive)
    numbers, shape = numbers or (), like.shape
    if not like.is_floating_point():
        known = like.unique().tolist()
        known += [int(n + step) for n in numbers for step in NEAR if n + step >= min(known, default=0)]
        choice = torch.tensor(known or [0], dtype=like.dtype)
        return choice[torch.randint(len(choice), shape, generator=draw)]

    def normal(count: int) -> torch.Tensor:
        made = torch.randn(count, generator=draw)
        if numbers:
            centres = torch.tensor(numbers)[torch.randint(len(numbers), (count,), generator=draw)]
            made = torch.where(torch.rand(count, generator=draw) < 0.5, made, made + centres)
        return (made.abs() + 0.1 if positive else made).to(like.dtype)

    return filled(shape, normal)


def _mask(like: torch.Tensor, draw: torch.Generator, all_but_one: bool, positive: bool) -> torch.Tensor:
    if like.numel() == 1:
        return ~like
    if not all_but_one:
        return torch.rand(like.shape, generator=draw) < 0.5
    made = torch.full(like.shape, positive)
    made.view(-1)[int(torch.randint(made.numel(), (), generator=draw))] = not positive
    return made
