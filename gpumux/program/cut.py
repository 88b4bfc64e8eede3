"""Cutting a Program into pieces of about equal time, between operators only, in captured order."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate, pairwise
from math import ceil, isfinite
from typing import NamedTuple

from gpumux.program.ir import Program, piece_starts

GUESSED_OP_SECONDS = 20e-6  # a small operator on one core, launch included; used until times are measured


def cut(
    op_seconds: Sequence[float], target_s: float, min_s: float | None = None, gates: Sequence[int] = ()
) -> tuple[int, ...]:
    """Boundaries of pieces: starts, then the end. Piece i is operators [b[i], b[i+1]).

    Pieces take about `target_s` and exceed it by at most one operator; each holds at least one operator. Pieces
    shorter than `min_s` are merged with a neighbour if that bound allows it. A piece begins at every operator
    in `gates`. A Program without operators is one empty piece: (0, 0). Raises ValueError for times that are
    negative or not finite, a target that is not positive, or a gate that is no operator.
    """
    count = len(op_seconds)
    if not (isfinite(target_s) and target_s > 0):
        raise ValueError(f"a target of {target_s} s")
    if not all(isfinite(t) and t >= 0 for t in op_seconds):
        raise ValueError("operator times must be finite and not negative")
    if any(not 0 <= gate < count for gate in gates):
        raise ValueError("a gate stands at an operator that does not exist")
    if count == 0:
        return (0, 0)
    clock = [0.0, *accumulate(op_seconds)]
    edges = sorted({0, count, *gates})
    boundaries = [0]
    for start, end in pairwise(edges):
        inner = _even(clock, start, end, target_s)
        if min_s is not None:
            inner = _merged(op_seconds, inner, min(min_s, target_s), target_s)
        boundaries += inner[1:]
    return tuple(boundaries)


def cut_unmeasured(op_count: int, target_s: float, gates: Sequence[int] = ()) -> tuple[int, ...]:
    """A first cut before measurements: pieces of equal numbers of operators."""
    return cut([GUESSED_OP_SECONDS] * op_count, target_s, gates=gates)


def piece_seconds(op_seconds: Sequence[float], boundaries: Sequence[int]) -> tuple[float, ...]:
    """Predicted seconds of each piece."""
    return tuple([sum(op_seconds[a:b]) for a, b in pairwise(boundaries)])


def gated(boundaries: Sequence[int], gates: Collection[int]) -> tuple[int, ...]:
    """The pieces that begin at a gate."""
    return tuple([piece for piece, start in enumerate(boundaries[:-1]) if start in gates])


def _even(clock: Sequence[float], start: int, end: int, target_s: float) -> list[int]:
    """Boundaries of [start, end) nearest to equal shares of its time. A boundary is off its ideal place
    by half an operator at most, so no piece is longer than a share and one operator."""
    # Rounding just above a whole number of targets must not add a piece.
    total = clock[end] - clock[start]
    pieces = max(ceil(total / target_s - 1e-9), 1)
    share = total / pieces

    def ideals(before: int) -> int:
        """Number of ideal places before the middle of operator `before`."""
        middle = (clock[before] + clock[before + 1]) / 2 - clock[start]
        return min(int(middle / share), pieces - 1)

    if pieces == 1:
        return [start, end]
    # Between the middles of its two neighbours a boundary is the nearest to any place.
    return [start, *[at for at in range(start + 1, end) if ideals(at) > ideals(at - 1)], end]


def _merged(op_seconds: Sequence[float], boundaries: list[int], min_s: float, target_s: float) -> list[int]:
    """Merge pieces under `min_s` with the shorter neighbour, if target plus longest operator permits."""
    bounds = list(boundaries)

    def seconds(a: int, b: int) -> float:
        return sum(op_seconds[a:b])

    at = 0
    while at < len(bounds) - 1 and len(bounds) > 2:
        if seconds(bounds[at], bounds[at + 1]) >= min_s:
            at += 1
            continue
        options = [drop for drop in (at, at + 1) if 0 < drop < len(bounds) - 1]
        spans = [(bounds[drop - 1], bounds[drop + 1], drop) for drop in options]
        allowed = [(seconds(a, b), drop) for a, b, drop in spans if seconds(a, b) <= target_s + max(op_seconds[a:b])]
        if not allowed:
            at += 1
            continue
        del bounds[min(allowed)[1]]
        at = max(at - 1, 0)
    return bounds


# ---- The units of a Program that is compiled: operators that are compiled together, and never cut.
#
# Fused kernels round differently from single ones, so the start of a unit must not depend on measured times. It follows
# from the Program alone, and two runs compute the same bits however they are cut into pieces. Units are short, so that
# pieces, which are whole units, can still be near their target. Pure: no torch.


OPERATORS = 48  # in a unit at most
HEAVY = 4  # of these at most: each may take as long as a piece should
_HEAVY = frozenset(
    (
        "mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward",
        "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward",
    )
)  # fmt: skip


class Unit(NamedTuple):
    """Operators start..stop-1. Not `compiled`: they run one by one."""

    start: int
    stop: int
    compiled: bool


def units(program: Program, apart: Collection[int] = ()) -> tuple[Unit, ...]:
    """All operators of a Program as units, in order. apart: operators that can't be compiled. Operators that draw
    random numbers are not compiled either: the generator's position is part of a job's guarantees."""
    found: list[Unit] = []
    begins = set(piece_starts(program))
    start, heavy = 0, 0
    for index, op in enumerate(program.ops):
        alone = index in apart or op.random is not None or op.stream is not None
        weight = op.target.split(".")[1] in _HEAVY
        full = index - start >= OPERATORS or heavy + weight > HEAVY
        if index > start and (alone or full or index in begins):
            found.append(Unit(start, index, True))
            start, heavy = index, 0
        heavy += weight
        if alone:
            found.append(Unit(index, index + 1, False))
            start, heavy = index + 1, 0
    if start < len(program.ops):
        found.append(Unit(start, len(program.ops), True))
    return tuple(found)


def cut_units(
    found: Sequence[Unit], op_s: Sequence[float], target_s: float, least_s: float | None, gates: Collection[int]
) -> tuple[int, ...]:
    """Like `cut`, but between units only. Boundaries are in operators."""
    if not found:
        return (0, 0)
    seconds = [sum(op_s[unit.start : unit.stop]) for unit in found]
    at = [index for index, unit in enumerate(found) if unit.start in gates]
    bounds = cut(seconds, target_s, least_s, at)
    return (*(found[b].start for b in bounds[:-1]), found[-1].stop)
