"""Parts of the multiprocessors that low work can be confined to (green contexts, CUDA 12.4).

Off unless asked for: what they buy has not been seen on a card yet (docs/gpu-notes.md, `green`). Each share has streams
of its own, on which a low job's pieces for that share are captured and launched.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from gpumux.device.cuda.driver import GREEN_SINCE, Driver, Facts
from gpumux.device.cuda.jobs import CudaJob
from gpumux.errors import DeviceLost, GpumuxError
from gpumux.types import JobId, Priority

# ---- Who runs on which stream. Pure.
#
# A GPU spreads streams over at most 32 hardware queues; two streams in one queue wait for each other. So there are
# a few streams a class, for all jobs: a job with work outstanding holds one, and gives it back when it has none.


class Turns:
    """`streams`: those of each class, by its number. A class that has none uses the nearest below it."""

    def __init__(self, streams: Mapping[int, Sequence[int]]) -> None:
        if not streams or not all(streams.values()):
            raise ValueError("every class needs a stream")
        self._streams = {number: tuple(handles) for number, handles in sorted(streams.items())}
        self._held: dict[JobId, int] = {}
        self._jobs: dict[int, int] = {handle: 0 for handles in self._streams.values() for handle in handles}

    @property
    def streams(self) -> list[int]:
        return list(self._jobs)

    def take(self, job: JobId, number: int) -> int:
        """The stream the job holds, whatever its class; else one of class `number` that fewest jobs hold."""
        held = self._held.get(job)
        if held is not None:
            return held
        below = [known for known in self._streams if known <= number]
        handles = self._streams[below[-1] if below else next(iter(self._streams))]
        handle = min(handles, key=self._jobs.__getitem__)
        self._held[job] = handle
        self._jobs[handle] += 1
        return handle

    def leave(self, job: JobId) -> None:
        """The job has nothing outstanding."""
        handle = self._held.pop(job, None)
        if handle is not None:
            self._jobs[handle] -= 1


# ----


WANTED = (0.5, 0.25)  # beside the whole
RUN_STREAMS = 2  # of each share, for all jobs
log = logging.getLogger(__name__)


class Partitions:
    """`wanted`: parts of the GPU, as fractions. `shares` are those there are, largest first, 1.0 always; hardware
    rounds them up. Where driver or card have no such thing, that is logged and there is the whole alone."""

    def __init__(self, driver: Driver, facts: Facts, wanted: Sequence[float], priority: int) -> None:
        self._driver, self._priority = driver, priority
        self._handles: dict[float, int] = {}
        self.turns: dict[float, Turns] = {}
        self._undo: list[Callable[[], None]] = []
        try:
            if wanted and facts.driver_version < GREEN_SINCE:
                log.warning("low jobs can't be confined to parts of the GPU: that takes a driver of CUDA 12.4 or newer")
                return
            for fraction in sorted(wanted, reverse=True):
                self._add(max(1, round(fraction * facts.multiprocessors)), facts.multiprocessors)
        except DeviceLost:
            raise
        except GpumuxError as error:
            self.close()
            log.warning("low jobs can't be confined to parts of the GPU: %s", error)

    @property
    def shares(self) -> tuple[float, ...]:
        return (1.0, *sorted(self._handles, reverse=True))

    @property
    def run_streams(self) -> list[int]:
        """Of all shares, but for the whole."""
        return [stream for turns in self.turns.values() for stream in turns.streams]

    def stream(self, share: float) -> int:
        """A new stream of a share, to capture on. Raises JobFailed for one there is not."""
        made = self._driver.confined_stream(self._handles[share], self._priority)
        self._undo.append(partial(self._driver.destroy_stream, made))
        return made

    def close(self) -> None:
        """Nothing runs there any more."""
        while self._undo:
            self._undo.pop()()
        self._handles.clear()
        self.turns.clear()

    def _add(self, multiprocessors: int, whole: int) -> None:
        handle, has = self._driver.partition(multiprocessors)
        self._undo.append(partial(self._driver.destroy_partition, handle))
        share = has / whole
        if share >= 1.0 or share in self._handles:
            self._undo.pop()()
            return
        self._handles[share] = handle
        self.turns[share] = Turns({int(Priority.LOW): [self.stream(share) for _ in range(RUN_STREAMS)]})


# ---- Which stream a job runs on, when it may change from one share of the multiprocessors to another between two
# pieces.


class Running:
    """`turns` are those of the whole GPU's streams."""

    def __init__(self, driver: Driver, turns: Turns, partitions: Partitions) -> None:
        self._driver, self._turns, self._partitions = driver, turns, partitions

    def take(self, job: CudaJob, number: int, share: float = 1.0) -> int:
        """A stream of class `number`, of a share there is (else of the whole). What the job has in the air runs before
        what it is given there."""
        turns = self._partitions.turns.get(share, self._turns)
        stream = turns.take(job.id, number)
        if job.stream and stream != job.stream:
            job.order = job.order or self._driver.event(timed=False)
            self._driver.record(job.order, job.stream)
            self._driver.wait(stream, job.order)
        job.stream = stream
        return stream

    def rest(self, job: CudaJob) -> None:
        """Give its streams back if it has nothing outstanding."""
        if job.quiet and job.stream:
            self.leave(job)
            job.stream = 0

    def leave(self, job: CudaJob) -> None:
        for turns in (self._turns, *self._partitions.turns.values()):
            turns.leave(job.id)
