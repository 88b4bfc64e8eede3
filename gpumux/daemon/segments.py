"""The daemon's shared memory: data segments of programs and staging segments of transfers.

Every segment is counted against `max_shared_bytes` before it is made and until it is closed. Making a
large one touches every page of it, about 0.3 s a gigabyte, so that happens on a thread of its own
(daemon/segments.py) while the loop goes on launching other jobs' pieces.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Any

from gpumux.errors import AdmissionRefused, GpumuxError
from gpumux.wire.shared_memory import Segment

# ---- Work that would hold the loop up, on one thread of its own; what follows runs on the loop again.


_Job = tuple[Callable[[], Any], Callable[[Any], None]]


class Offload:
    """`wake` must make the loop call `collect` soon and be callable from any thread."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._done: deque[tuple[Callable[[Any], None], Any, BaseException | None]] = deque()
        self._thread = threading.Thread(target=self._work, name="gpumux-offload", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], Any], then: Callable[[Any], None]) -> None:
        """Run `work` on the thread, then `then(result)` on the loop's. In the order submitted."""
        self._jobs.put((work, then))

    def collect(self) -> None:
        """Run what follows finished work. An exception in `work` is a bug and ends the loop here."""
        while self._done:
            then, result, error = self._done.popleft()
            if error is not None:
                raise error
            then(result)

    def close(self) -> None:
        """Finish what was submitted and end the thread. Results nobody collected yet are collected,
        so that whoever owns them gets to release them."""
        self._jobs.put(None)
        self._thread.join()
        self.collect()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, then = job
            try:
                result, error = work(), None
            except BaseException as caught:  # noqa: BLE001 - carried to the loop, which raises it
                result, error = None, caught
            self._done.append((then, result, error))
            self._wake()


# ----


AT_ONCE_BYTES = 1 << 18  # made in well under a tenth of a millisecond; a thread would cost more


class SharedSegment:
    """A segment the daemon owns, under the number clients know it by."""

    __slots__ = ("_release", "_segment", "number")

    def __init__(self, number: int, segment: Segment, release: Callable[[int], None]) -> None:
        self.number = number
        self._segment = segment
        self._release = release

    @property
    def fd(self) -> int:
        return self._segment.fd

    @property
    def nbytes(self) -> int:
        return self._segment.nbytes

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Put a client's bytes in (inline sessions only: others write for themselves)."""
        with self._segment.view() as view:
            view[offset : offset + len(data)] = data

    def read(self, offset: int, nbytes: int) -> bytes:
        """Take bytes out, for a client that can't."""
        with self._segment.view() as view:
            return bytes(view[offset : offset + nbytes])

    def close(self) -> None:
        """Give the memory back, as far as the daemon is concerned. Idempotent."""
        if self._segment.fd >= 0:
            nbytes = self._segment.nbytes
            self._segment.close()
            self._release(nbytes)


class Segments:
    """Makes segments within a limit in bytes for all, and one for each user."""

    def __init__(self, limit_bytes: int, offload: Offload, user_limit_bytes: int | None = None) -> None:
        self.limit = limit_bytes
        self.user_limit = user_limit_bytes
        self._offload = offload
        self._numbers = count(1)
        self.used_bytes = 0
        self.used_by: dict[int, int] = {}  # bytes, by uid

    def create(self, uid: int, nbytes: int, name: str, then: Callable[[SharedSegment | GpumuxError], None]) -> None:
        """Make a segment of `nbytes` for a user and call `then` with it, or with why there is none; at once
        when it is small, else on a later pass of the loop. Raises AdmissionRefused over a limit."""
        mine = self.used_by.get(uid, 0)
        if self.user_limit is not None and mine + nbytes > self.user_limit:
            raise AdmissionRefused(
                f"{nbytes} bytes of shared memory on top of your {mine} would pass the {self.user_limit} one user may"
                " have",
                "use smaller batches or fewer in flight, or raise max_shared_bytes_per_user",
            )
        if self.used_bytes + nbytes > self.limit:
            raise AdmissionRefused(
                f"{nbytes} bytes of shared memory on top of {self.used_bytes} would pass the daemon's {self.limit}",
                "use smaller batches or fewer in flight, or raise max_shared_bytes",
            )
        self.used_bytes += nbytes
        self.used_by[uid] = mine + nbytes
        if nbytes <= AT_ONCE_BYTES:
            self._made(uid, nbytes, then, *_attempt(nbytes, name))
        else:
            self._offload.submit(lambda: _attempt(nbytes, name), lambda made: self._made(uid, nbytes, then, *made))

    def _made(
        self,
        uid: int,
        nbytes: int,
        then: Callable[[SharedSegment | GpumuxError], None],
        segment: Segment | None,
        error: GpumuxError | None,
    ) -> None:
        if segment is None:
            self._released(uid, nbytes)
            assert error is not None  # _attempt returns one of the two
            then(error)
        else:
            then(SharedSegment(next(self._numbers), segment, lambda size: self._released(uid, size)))

    def _released(self, uid: int, nbytes: int) -> None:
        self.used_bytes -= nbytes
        self.used_by[uid] -= nbytes
        if not self.used_by[uid]:
            del self.used_by[uid]


def _attempt(nbytes: int, name: str) -> tuple[Segment | None, GpumuxError | None]:
    try:
        return Segment.create(nbytes, name), None
    except GpumuxError as error:
        return None, error
