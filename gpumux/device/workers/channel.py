"""Messages between the daemon and its CPU processes: SOCK_SEQPACKET, one message a packet.

A packet is a tag byte and a body: msgpack, or a fixed struct for the two messages of the hot path (LAUNCH and DONE).
Only the daemon sends descriptors, and the kernel closes others that are sent to it. A packet of its own announces them,
so that the hot path is a plain recv. A body longer than a packet is sent as several packets.

A kernel that misbehaves may take over an executor or a checker, which then sends anything. The daemon's end bounds a
message's length, and raises MalformedMessage for what the other end does not send; the process is ended then.

    daemon -> fork server   FORK [token, kind, settings] +fds · KILL [token] · RENICE [token, niceness]
    fork server -> daemon   READY {facts} · WARMED [] · EXITED [token, wait status]
    daemon -> executor      LAUNCH struct (+ scalars with a step's first piece; +fd for many) · LOAD [] +fds ·
                            TRANSFER [..] +fd · PROFILE [program] · NICE [niceness] · ANSWER [answer form] +fd ·
                            CUT [program, seconds or None] · JOIN [gang] · LEAVE []
    executor -> daemon      DONE struct · FAILED · LOADED · REFUSED · RECUT · TRANSFERRED · PROFILED · EXCHANGED ·
                            STEP_FAILED
    daemon -> checker       CHECK [] +fd
    checker -> daemon       CHECKED · REFUSED
    daemon -> fuser         FUSE [jobs] +fd · PROVE []
    fuser -> daemon         FUSED · PROVEN · REFUSED
"""

from __future__ import annotations

import itertools
import os
import socket
import struct
import threading
from collections.abc import Sequence
from math import isfinite
from typing import Any

import msgpack

from gpumux.types import Fault

PACKET = 32 * 1024  # well below the least socket buffer Linux grants, so a packet is never refused for its size
MAX_FDS = 4
MAX_BYTES = 64 << 20  # of a message to the daemon: a profile of a large program has tens of MB
MAX_AT_ONCE = 64  # packets of a long message that the daemon reads before it looks at others
MAX_TEXT = 4000  # characters of a fault's text

(
    MORE,
    DESCRIPTORS,
    FORK,
    KILL,
    READY,
    WARMED,
    EXITED,
    LAUNCH,
    LOAD,
    TRANSFER,
    PROFILE,
    ANSWER,
    NICE,
    CUT,
    JOIN,
    LEAVE,
    CHECK,
    RENICE,
    FUSE,
    PROVE,
) = range(20)
(
    DONE,
    FAILED,
    LOADED,
    REFUSED,
    RECUT,
    TRANSFERRED,
    CHECKED,
    PROFILED,
    EXCHANGED,
    FUSED,
    PROVEN,
    STEP_FAILED,
) = range(20, 32)

LAUNCH_HEAD = struct.Struct("<BqqqIIIId")  # tag, launch, step, program, cut, piece, pieces, slot, submitted or -1
DONE_BODY = struct.Struct("<Bqdd?d")  # tag, launch, started, ended, answered, suspended


# An executor's page holds, after the operator it runs (4 bytes), the times and the id of the launch whose step it
# answered last. It writes the id after the times: a reader that finds the id finds the times of that launch. Then the
# bytes that the process held at most in the newest step it measured.
PAGE_TIMES, PAGE_TIMES_AT = struct.Struct("<ddd"), 8  # started, ended, suspended
PAGE_LAUNCH, PAGE_LAUNCH_AT = struct.Struct("<q"), 32
PAGE_MEMORY, PAGE_MEMORY_AT = struct.Struct("<Q"), 40


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def pack(body: object) -> bytes:
    packed: bytes = msgpack.packb(body)
    return packed


class MalformedMessage(Exception):
    """A process has sent what no sound one sends."""


def unpack(data: bytes | memoryview) -> Any:
    """Decode a body. Raises MalformedMessage."""
    try:
        return msgpack.unpackb(data, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise MalformedMessage(f"a body that is no msgpack: {error}"[:200]) from error


def fault(said: Sequence[Any]) -> Fault:
    """The fault of which a process has sent code, message and remedy. Raises MalformedMessage."""
    code, message, remedy = (text(entry) for entry in listed(said, 3))
    return Fault(code, message, remedy)


def text(said: Any) -> str:
    """A text that a process has sent: short, and of one line in a log. Raises MalformedMessage."""
    if not isinstance(said, str):
        raise MalformedMessage(f"a {type(said).__name__} where a text is expected")
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in said[:MAX_TEXT])


def listed(said: Any, length: int | None = None) -> list[Any]:
    """A list that a process has sent, of this length if one is given. Raises MalformedMessage."""
    if not isinstance(said, list) or length not in (None, len(said)):
        raise MalformedMessage(f"a {type(said).__name__} where a list is expected")
    return said


def integers(said: Any, least: int = 0) -> list[int]:
    """A list of integers, each at least `least`. Raises MalformedMessage."""
    if not all(type(n) is int and n >= least for n in listed(said)):
        raise MalformedMessage(f"a list of other things than integers from {least} on")
    return said  # type: ignore[no-any-return]


def number(said: Any) -> float:
    """A finite number, of seconds mostly. Raises MalformedMessage."""
    if type(said) not in (int, float) or not isfinite(said):
        raise MalformedMessage("no finite number")
    return float(said)


def packets(tag: int, body: object, fds: Sequence[int] = ()) -> list[tuple[bytes, Sequence[int]]]:
    """Encode a message as packets, each with its descriptors."""
    packed, room = pack(body), PACKET - 1
    made: list[tuple[bytes, Sequence[int]]] = [(bytes((DESCRIPTORS,)), ())] if fds else []
    while len(packed) > room:
        made.append((bytes((MORE,)) + packed[:room], ()))
        packed = packed[room:]
    made.append((bytes((tag,)) + packed, fds))
    return made


class Channel:
    """One end of a socket pair. The daemon's ends (`daemons`) are non-blocking, its processes' ends block."""

    def __init__(self, sock: socket.socket, *, daemons: bool = False) -> None:
        self.sock = sock
        self._buffer = bytearray(PACKET)
        self._view = memoryview(self._buffer)
        self._parts: list[bytes] = []
        self._length = 0  # of all parts
        self._sending = threading.Lock()  # an executor has two threads that send
        self._daemons = daemons

    def fileno(self) -> int:
        return self.sock.fileno()

    def close(self) -> None:
        self.sock.close()

    def send(self, tag: int, body: object, fds: Sequence[int] = ()) -> None:
        """Send one message. Raises OSError when the peer is gone (or, non-blocking, does not read)."""
        with self._sending:  # no packet of another message between its packets
            for packet, descriptors in packets(tag, body, fds):
                self.send_packet(packet, descriptors)

    def send_packet(self, packet: bytes, fds: Sequence[int] = ()) -> None:
        if fds:
            socket.send_fds(self.sock, [packet], list(fds))
        else:
            self.sock.send(packet)

    def receive(self) -> tuple[int, memoryview, list[int]]:
        """Receive the next message: tag, body (valid until the next call), descriptors (the caller closes them). Raises
        EOFError when the peer is gone, BlockingIOError when there is no message; on the daemon's end MalformedMessage
        for one that is too long or comes with descriptors."""
        for _ in range(MAX_AT_ONCE) if self._daemons else itertools.repeat(None):
            try:
                count = self.sock.recv_into(self._buffer)
            except (ConnectionResetError, BrokenPipeError) as error:
                raise EOFError from error
            if count == 0:
                raise EOFError
            tag = self._buffer[0]
            if tag == MORE:
                self._parts.append(bytes(self._view[1:count]))
                self._length += count
                if self._daemons and self._length > MAX_BYTES:
                    raise MalformedMessage(f"a message of more than {MAX_BYTES} bytes")
                continue
            if tag == DESCRIPTORS:
                if self._daemons:
                    raise MalformedMessage("descriptors")
                return self._receive_described()
            if not self._parts:
                return tag, self._view[1:count], []
            whole = b"".join([*self._parts, self._view[1:count]])
            self._parts.clear()
            self._length = 0
            return tag, memoryview(whole), []
        raise BlockingIOError  # the rest of it waits

    def _receive_described(self) -> tuple[int, memoryview, list[int]]:
        data, fds, _flags, _address = socket.recv_fds(self.sock, PACKET, MAX_FDS)
        if not data:
            raise EOFError
        return data[0], memoryview(data)[1:], list(fds)


# ---- Descriptors that travel with a command to an executor.


class Descriptors:
    """Descriptors of a command, which are closed exactly once: after the command was sent, or when it never will be."""

    def __init__(self, fds: Sequence[int]) -> None:
        self.fds = tuple(fds)

    def close(self) -> None:
        fds, self.fds = self.fds, ()
        for fd in fds:
            os.close(fd)
