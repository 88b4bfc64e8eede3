"""Where blocks go. Each block needs room on one multiprocessor; a kernel's blocks go, one after the other, to the
multiprocessor that has room for most further ones of them, among equals to the first (rule "most-room": Gilman et al.,
"Demystifying the Placement Policies of the NVIDIA GPU Thread Block Scheduler", 2021).

What every multiprocessor has is kept as *runs* of neighbours that have the same: [(stop, value), ...], the first from
multiprocessor 0 up. Most kernels fill all of them alike, so there are few runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

Runs = list[tuple[int, int]]


def uniform(sms: int, value: int) -> Runs:
    """`value` on each of `sms` multiprocessors."""
    return [(sms, value)]


def total(runs: Runs) -> int:
    """The sum over all multiprocessors."""
    first = sum_ = 0
    for stop, value in runs:
        sum_ += (stop - first) * value
        first = stop
    return sum_


def most(runs: Runs) -> int:
    """The largest value of any multiprocessor."""
    return max(value for _, value in runs)


def add(a: Runs, b: Runs, times: int = 1) -> Runs:
    """a + times * b, on each multiprocessor. Both are of the same number of these."""
    if len(a) == 1 and len(b) == 1:
        return [(a[0][0], a[0][1] + times * b[0][1])]
    sums: Runs = []
    i = j = 0
    last = None
    while i < len(a):
        stop_a, value_a = a[i]
        stop_b, value_b = b[j]
        value = value_a + times * value_b
        stop = min(stop_a, stop_b)
        if value == last:
            sums[-1] = (stop, value)
        else:
            sums.append((stop, value))
            last = value
        i += stop == stop_a
        j += stop == stop_b
    return sums


def together(several: Sequence[Runs]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """(multiprocessors, the value of each of `several`) for each stretch on which none of them changes."""
    places = [0] * len(several)
    first = 0
    end = several[0][-1][0]
    while first < end:
        stop = min(runs[at][0] for runs, at in zip(several, places, strict=True))
        yield stop - first, tuple([runs[at][1] for runs, at in zip(several, places, strict=True)])
        for number, runs in enumerate(several):
            places[number] += runs[places[number]][0] == stop
        first = stop


def place(free: Runs, size: int, blocks: int, limit: int) -> tuple[Runs, int]:
    """Place up to `blocks` blocks of `size` units each on the last `limit` multiprocessors, of which `free` says the
    units that are free. Returns how many went to each multiprocessor, and how many went in all."""
    before = free[-1][0] - limit
    room: Runs = [(before, 0)] if before else []  # blocks that each multiprocessor can take
    room += [(stop, units // size) for stop, units in free if stop > before]
    fits = total(room)
    if fits <= blocks:
        return room, fits
    return _most_room(room, blocks), blocks


def _most_room(room: Runs, blocks: int) -> Runs:
    """`blocks` of fewer than there is room for, each to where most further ones fit."""
    widths: dict[int, int] = {}
    first = 0
    for stop, fit in room:
        widths[fit] = widths.get(fit, 0) + stop - first
        first = stop
    heights = sorted(widths, reverse=True)
    width = 0
    level = rest = 0
    for height, lower in zip(heights, [*heights[1:], 0], strict=True):
        width += widths[height]
        takes = width * (height - lower)
        if blocks < takes:
            each, rest = divmod(blocks, width)
            level = height - each  # at least 1: there is room for more
            break
        blocks -= takes
    # Every multiprocessor is filled down to `level`; the first `rest` of those at it take one more.
    placed: Runs = []
    first = 0
    for stop, fit in room:
        takes = max(fit - level, 0)
        more = min(rest, stop - first) if fit >= level else 0
        if more:
            placed.append((first + more, takes + 1))
            rest -= more
        if first + more < stop:
            placed.append((stop, takes))
        first = stop
    return placed
