"""Streams for jobs' pieces, and parts of the multiprocessors that low jobs can be confined to.

A GPU spreads streams over at most 32 hardware queues, and two streams in one queue wait for each other. So there are a
few streams for each priority, for all jobs: a job with work outstanding holds one, and gives it back when it has none.

Parts of the multiprocessors (green contexts, CUDA 12.4) are off unless asked for: what they gain is not measured on a
card yet (docs/gpu-notes.md, `green`). Each part has streams of its own, on which low jobs' pieces are captured and
launched.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from gpumux.device.cuda.driver import GREEN_SINCE, Driver, GpuProperties
from gpumux.device.cuda.jobs import CudaJob
from gpumux.errors import DeviceLost, GpumuxError
from gpumux.types import JobId, Priority

DEFAULT_SHARES = (0.5, 0.25)  # beside the whole
RUN_STREAMS = 2  # of each share, for all jobs
log = logging.getLogger(__name__)


class StreamPool:
    """The streams of each priority, shared by all jobs. `streams`: driver's handles by priority; a priority that has
    none uses the nearest below it. No driver calls."""

    def __init__(self, streams: Mapping[int, Sequence[int]]) -> None:
        if not streams or not all(streams.values()):
            raise ValueError("every class needs a stream")
        self._streams = {number: tuple(handles) for number, handles in sorted(streams.items())}
        self._held: dict[JobId, int] = {}
        self._jobs: dict[int, int] = {handle: 0 for handles in self._streams.values() for handle in handles}

    @property
    def streams(self) -> list[int]:
        return list(self._jobs)

    def acquire(self, job: JobId, priority: int) -> int:
        """The stream that the job holds, of whatever priority; else the one of `priority` that fewest jobs hold."""
        held = self._held.get(job)
        if held is not None:
            return held
        below = [known for known in self._streams if known <= priority]
        handles = self._streams[below[-1] if below else next(iter(self._streams))]
        handle = min(handles, key=self._jobs.__getitem__)
        self._held[job] = handle
        self._jobs[handle] += 1
        return handle

    def release(self, job: JobId) -> None:
        """The job has nothing outstanding. Idempotent."""
        handle = self._held.pop(job, None)
        if handle is not None:
            self._jobs[handle] -= 1


class Partitions:
    """Parts of the GPU's multiprocessors. `wanted`: the parts as fractions, which the hardware rounds up. `shares`: the
    parts there are, largest first, 1.0 always. If the driver or the card has no green contexts, that is logged and 1.0
    is the only share."""

    def __init__(self, driver: Driver, properties: GpuProperties, wanted: Sequence[float], priority: int) -> None:
        self._driver, self._priority = driver, priority
        self._handles: dict[float, int] = {}
        self.pools: dict[float, StreamPool] = {}  # by share
        self._undo: list[Callable[[], None]] = []
        try:
            if wanted and properties.driver_version < GREEN_SINCE:
                log.warning("low jobs can't be confined to parts of the GPU: that takes a driver of CUDA 12.4 or newer")
                return
            for fraction in sorted(wanted, reverse=True):
                self._add(max(1, round(fraction * properties.multiprocessors)), properties.multiprocessors)
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
        """The streams of all shares but the whole."""
        return [stream for pool in self.pools.values() for stream in pool.streams]

    def stream(self, share: float) -> int:
        """A new stream of a share, to capture on. Raises JobFailed."""
        made = self._driver.confined_stream(self._handles[share], self._priority)
        self._undo.append(partial(self._driver.destroy_stream, made))
        return made

    def close(self) -> None:
        """Give everything back. Nothing runs there any more."""
        while self._undo:
            self._undo.pop()()
        self._handles.clear()
        self.pools.clear()

    def _add(self, multiprocessors: int, whole: int) -> None:
        handle, has = self._driver.partition(multiprocessors)
        self._undo.append(partial(self._driver.destroy_partition, handle))
        share = has / whole
        if share >= 1.0 or share in self._handles:
            self._undo.pop()()
            return
        self._handles[share] = handle
        self.pools[share] = StreamPool({int(Priority.LOW): [self.stream(share) for _ in range(RUN_STREAMS)]})


class StreamAssigner:
    """The stream that each job runs on; it may change from one share to another between two pieces. `pool`: the
    streams of the whole GPU."""

    def __init__(self, driver: Driver, pool: StreamPool, partitions: Partitions) -> None:
        self._driver, self._pool, self._partitions = driver, pool, partitions

    def acquire(self, job: CudaJob, priority: int, share: float = 1.0) -> int:
        """A stream of `priority` and of `share`, or of the whole GPU if there is no such share. Work given to it runs
        after what the job has in flight on another stream."""
        pool = self._partitions.pools.get(share, self._pool)
        stream = pool.acquire(job.id, priority)
        if job.stream and stream != job.stream:
            job.order_event = job.order_event or self._driver.event(timed=False)
            self._driver.record(job.order_event, job.stream)
            self._driver.wait(stream, job.order_event)
        job.stream = stream
        return stream

    def release_idle(self, job: CudaJob) -> None:
        """Give the job's streams back if it has nothing outstanding."""
        if job.idle and job.stream:
            self.release(job)
            job.stream = 0

    def release(self, job: CudaJob) -> None:
        for pool in (self._pool, *self._partitions.pools.values()):
            pool.release(job.id)
