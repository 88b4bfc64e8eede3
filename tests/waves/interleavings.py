"""`python -m tests.waves.interleavings [--count N]`: steps of two waves on a device that runs both at any speed.

Each history has a random step of its own (temporaries with lifetimes and places, cut into pieces), an arena between one
step's height and what `arena_bytes` says, and a random order of launches and ends. After every event no byte may be in
use by both waves: one's temporaries lie at the bottom of the arena, the other's, mirrored, at its top.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from gpumux.program.memory import ArenaPlan, Interval, lock_step_bytes, piece_bytes
from gpumux.scheduler.jobs import JobProgram, JobStep, ScheduledJob
from gpumux.scheduler.leases import WaveLease
from gpumux.types import Footprint, JobSpec, Peer, Priority, WavePieces

STEPS = 6


@dataclass
class Case:
    planned: ArenaPlan
    bounds: tuple[int, ...]
    tail: int  # piece
    arena: int

    @property
    def heights(self) -> tuple[int, ...]:
        return piece_bytes(self.planned, self.bounds)


def random_case(rng: random.Random) -> Case:
    """A step whose forward operators keep something for their backward operators, with others that live shortly."""
    layers = rng.randint(2, 8)
    tail = rng.randint(1, 4)
    ops = 2 * layers + tail
    spans: list[tuple[Interval, int]] = []
    for layer in range(layers):
        last = 2 * layers - 1 - layer + rng.randint(0, tail)
        spans.append((Interval(layer, min(last, ops - 1)), 64 * rng.randint(1, 8)))
    for _ in range(rng.randint(0, 2 * ops)):
        birth = rng.randrange(ops)
        spans.append((Interval(birth, min(ops - 1, birth + rng.randint(0, 3))), 64 * rng.randint(1, 5)))
    offsets: list[int] = []
    for at, (span, size) in enumerate(spans):  # any plan without overlaps will do
        taken = sorted(
            (offsets[i], offsets[i] + spans[i][1])
            for i in range(at)
            if spans[i][0].birth <= span.last and span.birth <= spans[i][0].last
        )
        place = 0
        for start, end in taken:
            if place + size <= start:
                break
            place = max(place, end)
        offsets.append(place)
    sizes = tuple(size for _, size in spans)
    peak = max(offset + size for offset, size in zip(offsets, sizes, strict=True))
    planned = ArenaPlan(tuple(offsets), sizes, peak, tuple(span for span, _ in spans))
    cuts = {0, 2 * layers, ops, *rng.sample(range(1, ops), rng.randint(0, ops - 1))}
    bounds = tuple(sorted(cuts))
    most = lock_step_bytes(planned, [1.0] * ops)
    return Case(planned, bounds, bounds.index(2 * layers), rng.choice((peak, most, rng.randint(peak, most))))


def in_use(case: Case, step: JobStep, lane: int) -> Iterator[tuple[int, int]]:
    """(start, end) in the arena of every temporary that a step holds now: of the pieces that are out, and of those
    before them for those behind them."""
    if step.done == len(step.pieces) or not step.launched:
        return
    first, behind = case.bounds[step.done], case.bounds[step.launched]
    for offset, size, span in zip(case.planned.offsets, case.planned.sizes, case.planned.live, strict=True):
        assert span is not None
        used = span.birth < behind and span.last >= first
        if used and (step.launched > step.done or span.birth < first):
            start = offset if lane == 0 else case.arena - offset - size
            assert start >= 0, "a temporary lies below the arena"
            assert start + size <= case.arena, "a temporary lies above the arena"
            yield start, start + size


def covered(spans: list[tuple[int, int]]) -> int:
    """Bytes that lie in at least one of the spans."""
    total, reached = 0, 0
    for start, end in sorted(spans):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


def run(case: Case, rng: random.Random) -> tuple[int, int]:
    """Run some steps. Returns how often pieces of both waves were out at once, and the most bytes that were in use.
    Raises AssertionError for an overlap or a deadlock."""
    footprint = Footprint(0, case.arena, 0, case.arena)
    programs = []
    for lane in (0, 1):
        program = JobProgram(lane, footprint, cut=0, pieces=(1.0,) * (len(case.bounds) - 1), bounds=case.bounds)
        program.wave = WaveLease(WavePieces(lane, case.tail, case.heights), case.arena)
        programs.append(program)
    job = ScheduledJob("j", "s", Peer(0, 0, 0), JobSpec("j"), 0.0, Priority.LOW, 1.0)
    steps = [JobStep(m, programs[m % 2], 0.0, m) for m in range(STEPS)]
    job.queue.extend(steps)
    both, most, window = 0, 0, rng.choice((1, 2, 5))
    while job.queue or job.running:
        out = [step for step in steps if step.launched > step.done]
        may_launch = bool(job.queue) and not job.blocked() and sum(s.launched - s.done for s in out) < window
        assert may_launch or out, "both waves wait for each other"
        if may_launch and (not out or rng.random() < 0.5):
            job.younger_last = rng.random() < 0.5
            step = job.head_step()
            if not step.launched:
                step.begin()
            step.launched += 1
            if step.launched == len(step.pieces):
                assert job.queue.popleft() is step, "a step passed the one before it"
                job.running[step.id] = step
        else:
            step = rng.choice(out)  # the device runs the waves at any relative speed
            step.done += 1
            if step.done == len(step.pieces):
                assert next(iter(job.running)) == step.id, "a step ended before the one before it"
                del job.running[step.id]
        begun = [s for s in steps if s.launched and s.done < len(s.pieces)]
        assert len(begun) <= 2, "three steps are under way"
        used = [span for s in begun for span in in_use(case, s, s.id % 2)]
        apart = [span for s in begun if s.id % 2 == 0 for span in in_use(case, s, 0)]
        for start, end in [span for s in begun if s.id % 2 for span in in_use(case, s, 1)]:
            assert all(end <= a or b <= start for a, b in apart), "a byte is in use by both waves"
        most = max(most, covered(used))
        both += len({s.id for s in begun if s.launched > s.done}) == 2
    return both, most


def histories(count: int, seed: int = 0) -> tuple[int, int]:
    """Run so many. Returns in how many both waves ran at once, and in how many the arena was below two heights."""
    overlapped = small = 0
    for number in range(seed, seed + count):
        rng = random.Random(number)
        case = random_case(rng)
        both, most = run(case, rng)
        assert most <= case.arena
        overlapped += both > 0
        small += case.arena < 2 * case.planned.peak_bytes
    return overlapped, small


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    begun = time.monotonic()
    overlapped, small = histories(options.count, options.seed)
    print(
        f"{options.count} histories in {time.monotonic() - begun:.0f} s: no overlap, no deadlock; both waves ran at"
        f" once in {overlapped}, the arena was smaller than two steps in {small}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
