"""Places temporaries in one arena: first-fit offsets, and the bytes of the arena that each piece needs."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

from gpumux.program.ir import DIRECT_BYTES, ITEM_BYTES, Collective, Program, aligned, slot_layout
from gpumux.program.validate import op_args, out_views, state_slots, tensor_refs
from gpumux.types import Footprint, WavePieces

# ---- The lifetime of each storage. Aliases need no special care: views of one storage are one storage.


@dataclass(frozen=True, slots=True)
class Interval:
    """Operators `birth` to `last`, both inclusive, during which a temporary holds memory. For storages that results
    read, `last` is the number of operators: they are read after the last one has run. What a collective touches lives
    until the operator that it stands before."""

    birth: int
    last: int


def intervals(program: Program) -> tuple[Interval | None, ...]:
    """One entry a storage: its interval, or None for state, inputs and constants, which live through
    the whole step. The Program must have passed `validate`."""
    birth: dict[int, int] = {}
    last: dict[int, int] = {}
    exchanged: dict[int, list[int]] = {}  # by the operator that comes after them
    for one in program.collectives:
        views = [*one.views, *(view for _, view in (*one.sends, *one.receives))]
        exchanged.setdefault(one.op, []).extend(program.views[view].storage for view in views)
    for index, op in enumerate(program.ops):
        used = exchanged.get(index, [])
        used += [program.views[ref.view].storage for ref in tensor_refs(op_args(op))]
        used += [program.views[view].storage for view in out_views(op.outs)]
        for storage in used:
            birth.setdefault(storage, index)
            last[storage] = index
    for view in program.results:
        last[program.views[view].storage] = len(program.ops)
    return tuple(
        [
            Interval(birth[index], last[index]) if storage.kind == "temp" else None
            for index, storage in enumerate(program.storages)
        ]
    )


# ---- Offsets.


@dataclass(frozen=True, slots=True)
class ArenaPlan:
    """`offsets`: bytes from the arena's start, one a storage, multiples of 64; -1 if it is no temporary. `peak_bytes`:
    size of the arena. `live`: the storages' intervals."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]  # bytes kept for each storage, rounded up to 64; 0 where the offset is -1
    peak_bytes: int
    live: tuple[Interval | None, ...]


def plan(program: Program) -> ArenaPlan:
    """Offsets such that no two temporaries alive at once overlap. An operator's outputs are placed
    while its arguments still hold their memory."""
    live = intervals(program)
    sizes = [0 if span is None else aligned(s.nbytes) for s, span in zip(program.storages, live, strict=True)]
    births: dict[int, list[int]] = {}
    deaths: dict[int, list[int]] = {}
    for storage, span in enumerate(live):
        if span is not None:
            births.setdefault(span.birth, []).append(storage)
            deaths.setdefault(span.last, []).append(storage)
    offsets = [-1] * len(sizes)
    arena = _Arena()
    for index in range(len(program.ops)):
        for storage in births.get(index, ()):
            offsets[storage] = arena.take(sizes[storage])
        for storage in deaths.get(index, ()):
            arena.give(offsets[storage], sizes[storage])
    return ArenaPlan(tuple(offsets), tuple(sizes), arena.peak, live)


def footprint(program: Program, planned: ArenaPlan, unseen_bytes: int = 0) -> Footprint:
    """What a Program adds to a device: its state slots and constants, each rounded up to 64 bytes; the plan's
    peak, or for a wave the arena of both, `unseen_bytes` that no view names and room for a collective's messages; one
    slot of its data segment."""
    state = sum(map(aligned, state_slots(program))) + sum(aligned(len(data)) for data in program.consts)
    messages = max((_message_bytes(program, one) for one in program.collectives), default=0)
    arena = arena_bytes(op_heights(planned, len(program.ops))) if program.wave is not None else 0
    transient = max(arena, planned.peak_bytes) + unseen_bytes + messages
    return Footprint(state, transient, slot_layout(program).nbytes, arena)


def _message_bytes(program: Program, one: Collective) -> int:
    """Bytes that a collective needs beside the storages: a copy of what it sends and receives. A sum needs one of all
    its views, and one of the part that each other member sends."""
    summed, members = sum(_nbytes(program, view) for view in one.views), len(one.members)
    part = summed if members == 2 or summed <= DIRECT_BYTES else -(-summed // members)
    return summed + (members - 1) * part + sum(_nbytes(program, view) for _, view in (*one.sends, *one.receives))


def _nbytes(program: Program, view: int) -> int:
    return prod(program.views[view].size) * ITEM_BYTES[program.views[view].dtype]


def traffic(program: Program, one: Collective) -> dict[int, tuple[int, int]]:
    """For each peer of a collective, the bytes of data that the program's rank sends to it and receives from it.
    Headers are not counted. The formula is that of device/cpu/peers.py."""
    moved = {rank: [0, 0] for rank in one.members if rank != program.rank}
    for way, parts in enumerate((one.sends, one.receives)):
        for rank, view in parts:
            moved[rank][way] += _nbytes(program, view)
    counts: dict[str, int] = {}
    for view in one.views:
        counts[program.views[view].dtype] = counts.get(program.views[view].dtype, 0) + prod(program.views[view].size)
    members = len(one.members)
    for dtype, count in counts.items():
        item = ITEM_BYTES[dtype]
        for rank in moved:
            if count * item <= DIRECT_BYTES:
                both = count * item
            else:  # each sends the other its part, and later the sum of its own
                places = (one.members.index(rank), one.members.index(program.rank))
                both = sum(((at + 1) * count // members - at * count // members) * item for at in places)
            moved[rank][0] += both
            moved[rank][1] += both
    return {rank: (sent, received) for rank, (sent, received) in moved.items()}


def piece_bytes(planned: ArenaPlan, boundaries: Sequence[int]) -> tuple[int, ...]:
    """Bytes of the arena, from its start, that each piece [boundaries[i], boundaries[i+1]) uses or
    must preserve: the end of the highest temporary alive in it."""
    pieces = len(boundaries) - 1
    highest = [0] * pieces
    for offset, size, span in zip(planned.offsets, planned.sizes, planned.live, strict=True):
        if span is None or size == 0:
            continue
        first = max(bisect_left(boundaries, span.birth + 1) - 1, 0)
        for piece in range(first, pieces):
            if boundaries[piece] > span.last:
                break
            highest[piece] = max(highest[piece], offset + size)
    return tuple(highest)


# ---- Two waves in one arena (Wavelet, section 3.2.1): steps of equal Programs over two replicas of the state, one half
# a cycle behind the other. One wave's temporaries lie at the arena's bottom, the other's, mirrored, at its top.
#
# The *height* of an operator or piece is the end of the highest temporary that is alive in it: a wave that runs it
# needs that many bytes from its end of the arena. A wave *ascends* until it has reached the last of its highest pieces,
# and *descends* from then on: it never needs more again than the highest piece that is left.


def op_heights(planned: ArenaPlan, operators: int) -> tuple[int, ...]:
    """The height of each operator, in bytes."""
    return piece_bytes(planned, range(operators + 1))


def wave_pieces(program: Program, planned: ArenaPlan, bounds: Sequence[int]) -> WavePieces | None:
    """What the scheduler needs of the pieces [bounds[i], bounds[i + 1]) of a wave's Program; None for another one. The
    tail of the Program must be the start of a piece."""
    if program.wave is None:
        return None
    tail = list(bounds).index(program.wave.tail)
    return WavePieces(program.wave.lane, tail, piece_bytes(planned, bounds))


def arena_bytes(heights: Sequence[int], seconds: Sequence[float] | None = None) -> int:
    """Bytes that two waves need if the second begins when the first has ended the last of its highest operators, and
    both then run at the same speed: at each operator of the second wave, what it has needed so far, and what the first
    one needs from there to its end. At least the height of one wave. `seconds`: of each operator; None: all take the
    same time. A wave that is ahead of that waits; it needs no more than its own height to come to its end."""
    if not heights:
        return 0
    peak = max(heights)
    after = len(heights) - heights[::-1].index(peak)  # the first operator behind the last of the highest
    rising = list(accumulate(heights, max))
    falling = [*list(accumulate(reversed(heights), max))[::-1], 0]
    clock = [0.0, *accumulate(seconds if seconds is not None else [1.0] * len(heights))]
    most = peak
    for operator, needs in enumerate(rising):
        at = max(bisect_right(clock, clock[after] + clock[operator]) - 1, after)
        if at >= len(heights):
            break
        most = max(most, needs + falling[at])
    return most


class _Arena:
    """Free gaps below the high-water mark, by offset; the lowest that is large enough is taken."""

    def __init__(self) -> None:
        self._gaps: list[tuple[int, int]] = []  # (offset, bytes), apart from each other
        self._top = 0
        self.peak = 0

    def take(self, size: int) -> int:
        if size == 0:
            return 0
        for index, (offset, free) in enumerate(self._gaps):
            if free >= size:
                if free == size:
                    del self._gaps[index]
                else:
                    self._gaps[index] = (offset + size, free - size)
                return offset
        offset = self._top
        self._top += size
        self.peak = max(self.peak, self._top)
        return offset

    def give(self, offset: int, size: int) -> None:
        if size == 0:
            return
        at = bisect_left(self._gaps, (offset, 0))
        if at < len(self._gaps) and self._gaps[at][0] == offset + size:
            size += self._gaps.pop(at)[1]
        if at > 0 and sum(self._gaps[at - 1]) == offset:
            before, free = self._gaps.pop(at - 1)
            offset, size = before, size + free
        if offset + size == self._top:
            self._top = offset
        else:
            insort(self._gaps, (offset, size))
