"""Places temporaries in one arena: how high the arena is, and the bytes of it that each piece needs.

`first_fit` places storages in the order of the step, as an allocator does that can't know what comes: it estimates what
a general allocator takes. `plan` sees the whole step before it places anything, and is lower.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, TypeAlias

from gpumux.program.ir import DIRECT_BYTES, ITEM_BYTES, Collective, Program, aligned, slot_layout
from gpumux.program.validate import op_args, out_views, state_slots, tensor_refs
from gpumux.types import Footprint, WavePieces

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# numpy is imported where storages are placed with it: a simulation of jobs without waves starts without it.

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


def first_fit(program: Program) -> ArenaPlan:
    """Offsets such that no two temporaries alive at once overlap: each storage, in the order of the step, at the lowest
    offset where it fits. An operator's outputs are placed while its arguments still hold their memory."""
    live, sizes = _needs(program)
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


def plan(program: Program) -> ArenaPlan:
    """The lowest of all plans of the Program; of equal ones that whose height, averaged over the operators, is the
    least."""
    return min(plans(program).values(), key=lambda each: (each.peak_bytes, sum(heights(each))))


def plans(program: Program) -> dict[str, ArenaPlan]:
    """Plans of one Program by how they are made; in none do two temporaries overlap that are alive at once.

    first fit   storages in the order of the step
    largest     the largest storage first, each at the lowest offset that is free while it lives
    dies last   likewise, beginning with what dies last: the plan sinks early in the backward pass
    longest     always the lowest place that is left, filled with what lives longest there

    Above MOST_PLANNED temporaries only the first is made: the others take time that grows with the square of their
    number."""
    import numpy as np

    first = first_fit(program)
    temps = [storage for storage, size in enumerate(first.sizes) if size]
    if not temps or len(temps) > MOST_PLANNED:
        return {"first fit": first}
    spans = [first.live[storage] for storage in temps]
    births = np.array([span.birth for span in spans if span is not None])
    lasts = np.array([span.last for span in spans if span is not None])
    sizes = np.array([first.sizes[storage] for storage in temps])
    found = {
        "largest": _in_order(np.lexsort((births, -sizes)), births, lasts, sizes),
        "dies last": _in_order(np.lexsort((births, -lasts)), births, lasts, sizes),
        "longest": _lowest_place_first(births, lasts, sizes),
    }
    made = {"first fit": first}
    for name, placed in found.items():
        offsets = [-1 if span is None else 0 for span in first.live]
        for storage, offset in zip(temps, placed.tolist(), strict=True):
            offsets[storage] = offset
        made[name] = ArenaPlan(tuple(offsets), first.sizes, int((placed + sizes).max()), first.live)
    return made


def live_bytes(planned: ArenaPlan) -> list[int]:
    """Bytes of the temporaries alive at each operator, and after the last one those of results. No plan's arena is
    lower than the largest of them."""
    changes = [0] * (_end(planned) + 1)
    for size, span in zip(planned.sizes, planned.live, strict=True):
        if span is not None:
            changes[span.birth] += size
            changes[span.last + 1] -= size
    return list(accumulate(changes))[:-1]


def live_peak(planned: ArenaPlan) -> int:
    """The most bytes of temporaries that are alive at once."""
    return max(live_bytes(planned), default=0)


def heights(planned: ArenaPlan) -> list[int]:
    """At each operator, and after the last one, the end of the highest temporary alive, in bytes from the arena's
    start."""
    import numpy as np

    found = np.zeros(_end(planned), dtype=np.int64)
    for offset, size, span in zip(planned.offsets, planned.sizes, planned.live, strict=True):
        if span is not None and size:
            part = found[span.birth : span.last + 1]
            np.maximum(part, offset + size, out=part)
    return [int(height) for height in found]


def footprint(program: Program, planned: ArenaPlan, unseen_bytes: int = 0) -> Footprint:
    """What a Program adds to a device: its state slots and constants, each rounded up to 64 bytes; the plan's
    peak, or for a wave the arena of both, `unseen_bytes` that no view names and room for a collective's messages; one
    slot of its data segment.

    `planned` is how the device places temporaries: `first_fit` where a general allocator does it, which is so wherever
    operators allocate what they return, on a CPU and on a GPU; `plan` where they lie at the plan's offsets. For a wave
    it adds to the arena what it is above the plan of the wave, since an allocator keeps no arena tight."""
    state = sum(map(aligned, state_slots(program))) + sum(aligned(len(data)) for data in program.consts)
    transient, arena = planned.peak_bytes, 0
    if program.wave is not None:
        arena, waves = wave_plan(program)
        transient = arena + max(0, planned.peak_bytes - waves.peak_bytes)
    return Footprint(state, transient + unseen_bytes + message_bytes(program), slot_layout(program).nbytes, arena)


def message_bytes(program: Program) -> int:
    """Bytes that a Program's collectives need beside the storages. They run one after the other."""
    return max((_message_bytes(program, one) for one in program.collectives), default=0)


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


def wave_pieces(program: Program, planned: ArenaPlan, bounds: Sequence[int]) -> WavePieces | None:
    """What the scheduler needs of the pieces [bounds[i], bounds[i + 1]) of a wave's Program; None for another one. The
    tail of the Program must be the start of a piece."""
    if program.wave is None:
        return None
    tail = list(bounds).index(program.wave.tail)
    return WavePieces(program.wave.lane, tail, piece_bytes(planned, bounds))


def shared_arenas(
    program: Program, seconds: Sequence[float], half_a_step: bool = False
) -> list[tuple[int, ArenaPlan]]:  # fmt: skip
    """For each plan of the Program the bytes of an arena for two waves (`lock_step_bytes`). `half_a_step`: the second
    wave begins half a step behind the first, or when that one is past its last peak, if that is later."""
    found = []
    for each in plans(program).values():
        high = heights(each)
        last = max((at for at in range(min(len(high), len(seconds))) if high[at] == each.peak_bytes), default=-1)
        behind = max(0.0, sum(seconds) / 2 - sum(seconds[: last + 1])) if half_a_step else 0.0
        found.append((lock_step_bytes(each, seconds, behind), each))
    return found


def wave_plan(program: Program) -> tuple[int, ArenaPlan]:
    """Bytes of the arena that two waves of the Program are charged, and the plan with which they need no more where the
    second begins as soon as the first is past its peak. All operators count as equally long, since none is measured
    yet; waves that need more at other speeds wait for each other."""
    return min(shared_arenas(program, [1.0] * len(program.ops)), key=lambda found: found[0])


def lock_step_bytes(planned: ArenaPlan, op_seconds: Sequence[float], behind_s: float = 0.0) -> int:
    """Bytes of an arena in which two waves of one Program fit that run at equal speed, the second one behind the first.

    Each wave lies as `planned` has it, the first from the arena's bottom up and the second from its top down, so they
    overlap unless the arena is as high as both together. `op_seconds`: the seconds of each operator of the Program.

    The second wave begins `behind_s` after the first has run its last peak: the last operator at which the plan's
    height is its peak. From then on both take as long for an operator as `op_seconds` says. While the second wave runs
    its operator i, up to its own last peak, it has taken the highest byte of its operators 0 to i, and the first wave
    still needs the highest byte of the operators that it has not finished when i begins. The result is the largest sum
    of the two, and at least one wave's peak. Where the first wave has ended before the second is at its peak, it needs
    nothing: its next step begins when the second wave has run its last peak, and the two have changed places. After
    its last peak a wave needs less and less, so that later sums are no larger.

    It says nothing of waves that run at other speeds: only a lease keeps those apart. Raises ValueError if there is not
    a time for each operator at which the plan has temporaries."""
    high = heights(planned)
    if len(op_seconds) < len(high) - 1:  # results live past the last operator, where nothing runs
        raise ValueError(f"{len(op_seconds)} times for {len(high)} operators")
    if not any(high):
        return 0
    peak = max(high[: len(op_seconds)])  # what lives after the last operator lived at it
    last_peak = max(at for at, height in enumerate(high[: len(op_seconds)]) if height == peak)
    high += [0] * (len(op_seconds) - len(high))
    needed = [*accumulate(reversed(high), max)][::-1]
    clock = [0.0, *accumulate(op_seconds)]
    most, first, taken = planned.peak_bytes, last_peak + 1, 0
    for index in range(last_peak + 1):
        now = clock[last_peak + 1] + behind_s + clock[index]
        while first < len(op_seconds) and clock[first + 1] <= now:
            first += 1  # the first wave has finished it
        taken = max(taken, high[index])
        most = max(most, taken + (needed[first] if first < len(needed) else 0))
    return most


Numbers: TypeAlias = "npt.NDArray[np.int64]"
MOST_PLANNED = 40_000  # temporaries


def _needs(program: Program) -> tuple[tuple[Interval | None, ...], list[int]]:
    """Each storage's interval, and the bytes it takes."""
    live = intervals(program)
    return live, [0 if span is None else aligned(s.nbytes) for s, span in zip(program.storages, live, strict=True)]


def _end(planned: ArenaPlan) -> int:
    """One more than the last index of an operator at which a temporary lives."""
    return max((span.last + 1 for span in planned.live if span is not None), default=0)


def _in_order(order: Numbers, births: Numbers, lasts: Numbers, sizes: Numbers) -> Numbers:
    """Offsets where each storage, in this order, lies as low as those placed before it allow."""
    import numpy as np

    offsets = np.zeros(len(sizes), dtype=np.int64)
    starts, ends, begin, until = (np.empty(len(sizes), dtype=np.int64) for _ in range(4))
    for placed, index in enumerate(order):
        size = sizes[index]
        beside = (begin[:placed] <= lasts[index]) & (until[:placed] >= births[index])
        below = starts[:placed][beside]
        sort = np.argsort(below, kind="stable")
        # Between the highest end so far and the next start is a gap; above all of them there is no bound.
        tops = np.maximum.accumulate(np.append(0, ends[:placed][beside][sort]))
        free = np.append(below[sort], np.iinfo(np.int64).max) - tops
        offset = tops[np.argmax(free >= size)]
        offsets[index] = starts[placed] = offset
        ends[placed], begin[placed], until[placed] = offset + size, births[index], lasts[index]
    return offsets


def _lowest_place_first(births: Numbers, lasts: Numbers, sizes: Numbers) -> Numbers:
    """Offsets by a skyline over the operators: its lowest stretch is filled with the storage that lives longest of
    those that live within it, or, if there is none, raised to its lower neighbour. (Sekiyama et al., "Profile-guided
    memory optimization for deep neural networks", 2018)"""
    import numpy as np

    offsets = np.zeros(len(sizes), dtype=np.int64)
    order = np.lexsort((-sizes, births - lasts))
    begin, until = births[order], lasts[order]
    skyline = np.zeros(int(lasts.max()) + 1, dtype=np.int64)
    for _ in range(len(sizes)):
        while True:
            start = int(skyline.argmin())
            height = skyline[start]
            other = skyline[start:] != height
            end = start + int(other.argmax()) if other.any() else len(skyline)
            fits = (begin >= start) & (until < end)
            found = int(fits.argmax())
            if fits[found]:
                break
            beside = [skyline[at] for at in (start - 1, end) if 0 <= at < len(skyline)]
            skyline[start:end] = min(beside)
        storage = order[found]
        offsets[storage] = height
        skyline[begin[found] : until[found] + 1] = height + sizes[storage]
        begin[found] = -1  # placed
    return offsets


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
