"""Who runs on which stream. Pure.

A GPU spreads streams over at most 32 hardware queues; two streams in one queue wait for each other. So there are
a few streams a class, for all jobs: a job with work outstanding holds one, and gives it back when it has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpumux.model import JobId


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
