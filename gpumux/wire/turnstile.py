"""A listening socket of libzmq's that hands out one connection at a time, and the next when we say so.

libzmq's I/O thread accepts as fast as clients connect, and ends the whole process at the first `accept` for which there is no
descriptor (an assertion in the listener of ipc sockets). Whatever is told of connections afterwards may come too late. But the
thread is told of a waiting connection by its epoll set, and there a socket can be registered to be reported once (EPOLLONESHOT, epoll(7)):
then it sleeps until it is registered again. So between two connections libzmq waits for us, and knows nothing of it; who comes
meanwhile stands in the kernel's line.

Which set that is, and what libzmq wants to be handed with the report, the kernel says in /proc/self/fdinfo (proc(5)).
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
import select
import time

_TARGET = re.compile(r"^tfd:\s*(\d+)\s+events:\s*([0-9a-f]+)\s+data:\s*([0-9a-f]+)", re.MULTILINE)
_MODIFY = 3  # EPOLL_CTL_MOD: Python's own `modify` would replace libzmq's data by the descriptor's number
_ONCE = int(select.EPOLLIN | select.EPOLLONESHOT)
_LOOK_S = 0.0002  # between two looks for a registration that the I/O thread is about to make
_libc = ctypes.CDLL(None, use_errno=True)


class _Event(ctypes.Structure):
    """struct epoll_event, which has no padding on x86-64."""

    _fields_ = (("events", ctypes.c_uint32), ("data", ctypes.c_uint64))
    if platform.machine() == "x86_64":
        _pack_ = 1
        _layout_ = "ms"


class Turnstile:
    """Of the listening socket `fd`, registered in the epoll set `epoll` with `data`."""

    def __init__(self, fd: int, epoll: int, data: int) -> None:
        self._fd = fd
        self._epoll = epoll
        self._event = _Event(_ONCE, data)

    @classmethod
    def of(cls, fd: int, timeout: float) -> Turnstile | None:
        """Closed from now on, but for one connection. None if nobody waits for `fd` with epoll within `timeout` seconds: another
        libzmq, or no /proc."""
        end = time.monotonic() + timeout
        while (found := _registration(fd)) is None:
            if time.monotonic() >= end:
                return None
            time.sleep(_LOOK_S)
        turnstile = cls(fd, *found)
        turnstile.next()
        return turnstile

    def next(self) -> None:
        """Let one more connection be accepted, now or when it comes."""
        if _libc.epoll_ctl(self._epoll, _MODIFY, self._fd, ctypes.byref(self._event)) == -1:
            error = ctypes.get_errno()
            if error not in (errno.ENOENT, errno.EBADF):  # the socket is being closed
                raise OSError(error, os.strerror(error))


def _registration(fd: int) -> tuple[int, int] | None:
    """The epoll set that waits for `fd` to be readable, and the data it reports with it."""
    try:
        sets = [int(name) for name in os.listdir("/proc/self/fd") if _is_epoll(name)]
    except OSError:
        return None
    for epoll in sets:
        try:
            with open(f"/proc/self/fdinfo/{epoll}") as info:
                targets = _TARGET.findall(info.read())
        except OSError:
            continue  # closed meanwhile
        for target, events, data in targets:
            if int(target) == fd and int(events, 16) & select.EPOLLIN:
                return epoll, int(data, 16)
    return None


def _is_epoll(name: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[eventpoll]"
    except OSError:
        return False
