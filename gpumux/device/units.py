"""How a Program that is to be compiled falls into units: what is compiled together, and never cut.

Kernels that are fused round otherwise than kernels one by one, so where units begin must not hang on measured times:
it follows from the Program alone, and two runs of it compute the same bits however they are cut into pieces. A unit is
short, so that pieces can still be near what is aimed at: pieces are whole units. Pure: no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from gpumux.program.cut import cut
from gpumux.program.ir import Program

OPERATORS = 48  # of a unit at most
HEAVY = 4  # of these at most: each may take as long as a piece should
_HEAVY = frozenset(
    (
        "mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward",
        "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward",
    )
)  # fmt: skip


class Unit(NamedTuple):
    """Operators start..stop-1. Not `compiled`: they run as they are."""

    start: int
    stop: int
    compiled: bool


def units(program: Program, apart: Collection[int] = ()) -> tuple[Unit, ...]:
    """All operators of a Program, in order. `apart`: those that can't be compiled. One that draws random numbers is not
    either: the generator's position is part of what a job promises."""
    found: list[Unit] = []
    gates = {gate.op for gate in program.gates}
    start, heavy = 0, 0
    for index, op in enumerate(program.ops):
        alone = index in apart or op.random is not None or op.stream is not None
        weight = op.target.split(".")[1] in _HEAVY
        full = index - start >= OPERATORS or heavy + weight > HEAVY
        if index > start and (alone or full or index in gates):
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
    """Like program.cut.cut, between units only: boundaries in operators."""
    if not found:
        return (0, 0)
    seconds = [sum(op_s[unit.start : unit.stop]) for unit in found]
    at = [index for index, unit in enumerate(found) if unit.start in gates]
    bounds = cut(seconds, target_s, least_s, at)
    return (*(found[b].start for b in bounds[:-1]), found[-1].stop)
