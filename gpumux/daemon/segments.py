"""The daemon's shared memory: data segments of programs and staging segments of transfers.

Every segment is counted against `max_shared_bytes` before it is made and until it is closed. Making a large one touches
every page of it, which takes long, so a thread of its own makes it (`Offload`) while the loop launches other jobs'
pieces.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

from gpumux.daemon.round_robin import RoundRobin
from gpumux.errors import AdmissionRefused, DaemonGone, GpumuxError
from gpumux.wire.shared_memory import Segment

# ---- Long work on a thread of its own, with callbacks on the loop's thread.


@dataclass(frozen=True, slots=True)
class _Work:
    """`run` is called on the thread, and `then` on the loop's with its result. `dropped` is called on the loop's thread
    if the work is dropped before it begins."""

    session: str
    run: Callable[[], Any]
    then: Callable[[Any], None]
    dropped: Callable[[], None]


class Offload:
    """A thread for work that would delay the loop. Users take turns, and the sessions of each user. `wake` is callable
    from any thread, and makes the loop call `collect` soon. `failed` is called on the loop's thread with the session
    and the exception if work, or what follows it, raises: that is a bug."""

    def __init__(self, wake: Callable[[], None], failed: Callable[[str, Exception], None]) -> None:
        self._wake = wake
        self._failed = failed
        self._changed = threading.Condition()  # its lock guards the two fields that follow
        self._waiting: RoundRobin[_Work] = RoundRobin()
        self._closing = False
        self._done: deque[tuple[_Work, Any, Exception | None]] = deque()
        self._thread = threading.Thread(target=self._work, name="gpumux-offload", daemon=True)
        self._thread.start()

    def submit(
        self, uid: int, session: str, work: Callable[[], Any], then: Callable[[Any], None], dropped: Callable[[], None]
    ) -> None:
        """Run `work` on the thread, then `then(result)` on the loop's thread; or `dropped`, if the session is forgotten
        before. Work of one session is done in the order submitted."""
        with self._changed:
            self._waiting.add(uid, session, _Work(session, work, then, dropped))
            self._changed.notify()

    def forget(self, uid: int, session: str) -> None:
        """Drop the work of a session that has not begun. Idempotent."""
        with self._changed:
            dropped = self._waiting.forget(uid, session)
        for work in dropped:
            work.dropped()

    def collect(self) -> None:
        """Call `then` for finished work."""
        while self._done:
            work, result, error = self._done.popleft()
            try:
                if error is not None:
                    raise error
                work.then(result)
            except Exception as bug:  # noqa: BLE001
                self._failed(work.session, bug)

    def close(self) -> None:
        """Finish the submitted work and end the thread. Collects its results, so that they are released."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        self.collect()

    def _work(self) -> None:
        while (work := self._next()) is not None:
            try:
                result, error = work.run(), None
            except Exception as caught:  # noqa: BLE001 - carried to the loop
                result, error = None, caught
            self._done.append((work, result, error))
            self._wake()

    def _next(self) -> _Work | None:
        """Wait for work. Returns None when there is none left and the thread is to end."""
        with self._changed:
            while (found := self._waiting.next()) is None:
                if self._closing:
                    return None
                self._changed.wait()
            return found[1]


# ---- Segments.


_SESSION_ENDED = DaemonGone("its session has ended", "connect again")
AT_ONCE_BYTES = 1 << 18  # segments up to this size are made on the loop: a thread would cost more


class SharedSegment:
    """A segment that the daemon owns, with the number by which clients know it."""

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
        """Write a client's bytes (inline sessions only: other clients write to the segment themselves)."""
        with self._segment.view() as view:
            view[offset : offset + len(data)] = data

    def read(self, offset: int, nbytes: int) -> bytes:
        """Read bytes for an inline client."""
        with self._segment.view() as view:
            return bytes(view[offset : offset + nbytes])

    def close(self) -> None:
        """Close the daemon's descriptor and release its charge. Idempotent."""
        if self._segment.fd >= 0:
            nbytes = self._segment.nbytes
            self._segment.close()
            self._release(nbytes)


class Segments:
    """Makes segments within a limit in bytes for all users, and a limit for each user."""

    def __init__(self, limit_bytes: int, offload: Offload, user_limit_bytes: int | None = None) -> None:
        self.limit = limit_bytes
        self.user_limit = user_limit_bytes
        self._offload = offload
        self._numbers = count(1)
        self.used_bytes = 0
        self.used_by: dict[int, int] = {}  # bytes, by uid

    def create(
        self, uid: int, session: str, nbytes: int, name: str, then: Callable[[SharedSegment | GpumuxError], None], *,
        touch: bool = True,
    ) -> None:  # fmt: skip
        """Make a segment of `nbytes` for a user's session, and call `then` with it, or with the error: at once for a
        small one, else in a later turn of the loop, or when the session ends. `touch`: see
        wire.shared_memory.Segment.create. Raises AdmissionRefused over a limit."""
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
            self._made(uid, nbytes, then, *_attempt(nbytes, name, touch))
        else:
            self._offload.submit(
                uid,
                session,
                lambda: _attempt(nbytes, name, touch),
                lambda made: self._made(uid, nbytes, then, *made),
                lambda: self._made(uid, nbytes, then, None, _SESSION_ENDED),
            )

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
            made = SharedSegment(next(self._numbers), segment, lambda size: self._released(uid, size))
            try:
                then(made)
            except BaseException:
                made.close()
                raise

    def _released(self, uid: int, nbytes: int) -> None:
        self.used_bytes -= nbytes
        self.used_by[uid] -= nbytes
        if not self.used_by[uid]:
            del self.used_by[uid]


def _attempt(nbytes: int, name: str, touch: bool) -> tuple[Segment | None, GpumuxError | None]:
    try:
        return Segment.create(nbytes, name, touch=touch), None
    except GpumuxError as error:
        return None, error
