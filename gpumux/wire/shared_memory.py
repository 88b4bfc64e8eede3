"""Shared-memory segments: how batches, results and state travel without passing through a socket.

The daemon makes each segment at its full size, with every page allocated, and seals it: a client that holds the
descriptor can neither shrink it while the daemon uses it (SIGBUS) nor grow it. Sealing does not prevent hole punching:
a client that punches holes reads zeros, and a new page is charged to the process that touches it, in a segment that is
already charged at full size.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from types import TracebackType

from gpumux import hostmemory
from gpumux.errors import AdmissionRefused, ProtocolError

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
RESERVE_BYTES = 64 << 20  # host memory left free: a memfd has no limit of its own, and the OOM killer would act


class CopyMeter:
    """Counts bytes copied into or out of segments, so that "one copy at most" can be shown."""

    __slots__ = ("copied_bytes",)

    def __init__(self) -> None:
        self.copied_bytes = 0

    def copy(self, target: memoryview, source: bytes | bytearray | memoryview) -> None:
        """Copy `source` to the start of `target`. Raises ValueError when it does not fit."""
        view = memoryview(source).cast("B")
        if view.nbytes > target.nbytes:
            raise ValueError(f"{view.nbytes} bytes do not fit into {target.nbytes}")
        target[: view.nbytes] = view
        self.copied_bytes += view.nbytes


_TOUCHED_BYTES = 1 << 20  # smaller segments are not touched: their page faults take little time


class Segment:
    """One memfd of exactly `nbytes`, owned by this object: `fd` is closed with it.

    `view()` maps it on first use; views handed out keep the mapping alive after `close`, which
    never waits for them.
    """

    __slots__ = ("_map", "fd", "nbytes")

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd = fd
        self.nbytes = nbytes
        self._map: mmap.mmap | None = None

    @classmethod
    def create(cls, nbytes: int, name: str = "gpumux", *, touch: bool = True) -> Segment:
        """Daemon side. Raises AdmissionRefused when host memory can't hold it.

        `touch`: clear every page now, which takes about half a second a gigabyte, without Python's lock held. Otherwise
        the memory is reserved, and the kernel clears a page at its first use.
        """
        if nbytes <= 0:
            raise AdmissionRefused(f"a segment of {nbytes} bytes", "ask for at least one byte")
        free = free_host_bytes()
        if nbytes > free - RESERVE_BYTES:
            raise _no_room(nbytes, f"{max(free - RESERVE_BYTES, 0)} bytes are free")
        try:
            fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise _no_room(nbytes, str(error)) from error
        try:
            os.ftruncate(fd, nbytes)
            os.posix_fallocate(fd, 0, nbytes)
            if touch and nbytes >= _TOUCHED_BYTES:
                _touch(fd, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        except (OSError, OverflowError) as error:
            os.close(fd)
            raise _no_room(nbytes, str(error)) from error
        return cls(fd, nbytes)

    @classmethod
    def adopt(cls, fd: int, nbytes: int) -> Segment:
        """Receiving side: take over `fd` if it is a sealed segment of exactly `nbytes`; otherwise
        close it and raise ProtocolError."""
        try:
            size = os.fstat(fd).st_size
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError as error:
            os.close(fd)
            raise ProtocolError(f"the descriptor is no shared memory: {error.strerror}") from error
        if size != nbytes or seals & SEALS != SEALS:
            os.close(fd)
            raise ProtocolError(f"the segment has {size} bytes and seals {seals:#x}; {nbytes} bytes were announced")
        return cls(fd, nbytes)

    def view(self) -> memoryview:
        """The whole segment as writable bytes. Raises ValueError after `close`."""
        if self.fd < 0:
            raise ValueError("the segment is closed")
        if self._map is None:
            self._map = mmap.mmap(self.fd, self.nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        return memoryview(self._map)

    def write(self, offset: int, data: memoryview) -> None:
        """Copy bytes in without mapping them, which takes no page faults: the fastest way to fill a new segment."""
        while len(data):
            count = os.pwrite(self.fd, data, offset)
            offset, data = offset + count, data[count:]

    def close(self) -> None:
        """Close the descriptor and unmap. Memory still in use through a view or a tensor over it
        is unmapped when the last of those is gone. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
        mapped, self._map = self._map, None
        if mapped is not None:
            try:
                mapped.close()
            except BufferError:
                pass  # views are out: the mapping goes with the last of them

    def __enter__(self) -> Segment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _touch(fd: int, nbytes: int) -> None:
    """Have the kernel clear the file's pages now. After fallocate alone the first write would do it: in a snapshot that
    is the executor's, while the job's next step waits."""
    with mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE) as memory:
        window = (ctypes.c_char * nbytes).from_buffer(memory)
        ctypes.memset(window, 0, nbytes)
        del window  # the mapping can't be closed under it


def _no_room(nbytes: int, why: str) -> AdmissionRefused:
    return AdmissionRefused(
        f"host memory can't hold a segment of {nbytes} bytes: {why}",
        "use a smaller batch or max_inflight, or close other jobs",
    )


def free_host_bytes() -> int:
    """Bytes this process may still allocate."""
    try:
        return hostmemory.free_bytes()
    except OSError as error:
        raise AdmissionRefused(f"nobody says how much memory is free: {error}", "mount /proc") from error
