"""The executor's side of a lent lane (device.contract.Lending): steps taken from the client without the daemon.

A token, an eventfd that holds 1, says whether steps may start. To start one is to take the token, to end
it is to put it back; the daemon ends it all by taking it. What the process is about to do stands on the
shared page before it reaches for the token. So whoever has the token knows what the other did, whatever
the kernel makes of their order, and nobody waits for anybody.

Whatever is out of the ordinary is the daemon's to judge: it gets the lane back, with the packet.
"""

from __future__ import annotations

import gc
import mmap
import os
import select
import socket
from collections.abc import Sequence
from time import monotonic
from typing import Any, NamedTuple

import msgpack

from gpumux.device.cpu.channel import (
    COUNT,
    PACKET,
    RAN_AT,
    READ_AT,
    RING_AT,
    RING_ENTRY,
    RING_STEPS,
    RING_STRIDE,
    TAKEN_AT,
)

TELL_EVERY = 16  # steps between two words to the daemon, which then has so much to catch up on
IDLE_S = 2  # after this long without a message, collect garbage
_SMALL = 4096  # bytes: what a longer one holds is the daemon's to unpack, with its limits
_MAX_INT = 2**63 - 1
_LIST_OF_5 = b"\x95"
_UNPACKABLE = (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException)
_KINDS: dict[str, type] = {"float": float, "int": int}


class Taken(NamedTuple):
    step: int
    program: int
    cut: int
    slot: int
    scalars: Sequence[float | int]
    submitted: float


class LentLane:
    """`lane` and `token` are used, not owned; `channel` is where the daemon may say something."""

    def __init__(
        self,
        channel: int,
        lane: socket.socket,
        token: int,
        page: mmap.mmap,
        head: bytes,
        last: int,
        terms: Any,
        first: bytes,
    ) -> None:
        self.packet = first  # what was taken from the lane and not acted on yet
        self._receive = lane.recv
        self._lane = lane.fileno()
        self._token = token
        self._page = page
        self._head = head
        self._rest = len(head)
        self._last = last
        self._terms = {
            program: (cut, slots, tuple([_KINDS[kind] for kind in kinds])) for program, cut, slots, kinds in terms
        }
        self._count: int = COUNT.unpack_from(page, RAN_AT)[0]
        self._poller = select.poll()
        self._poller.register(channel, select.POLLIN)
        self._poller.register(self._lane, select.POLLIN)

    def ready(self) -> bool:
        """Wait; whether the lane has something, and the daemon has not."""
        if self.packet:
            return True
        events = self._poller.poll(IDLE_S * 1000)
        if not events:
            gc.collect()
            events = self._poller.poll()
        return len(events) == 1 and events[0][0] == self._lane

    def take(self) -> Taken | None:
        """The client's next step, which is to be run and then said to have `ended`. None: the lane goes back."""
        packet = self.packet
        if not packet:
            try:
                packet = self._receive(PACKET + 1, socket.MSG_DONTWAIT)
            except OSError:
                return None
        found = self._read(packet, monotonic())
        if found is not None and self._begin(found):
            self.packet = b""
            return found
        self.packet = packet
        return None

    def _read(self, packet: bytes, submitted: float) -> Taken | None:
        if len(packet) > _SMALL or not packet.startswith(self._head):
            return None
        try:
            step, program, slot, scalars, frames = msgpack.unpackb(_LIST_OF_5 + packet[self._rest :])
        except _UNPACKABLE:
            return None
        if not (type(step) is type(program) is type(slot) is type(frames) is int and type(scalars) is list):
            return None
        terms = self._terms.get(program)
        if terms is None or frames or not (self._last < step <= _MAX_INT and 0 <= slot < terms[1]):
            return None
        if scalars or terms[2]:
            if any(type(value) is int and not -_MAX_INT - 1 <= value <= _MAX_INT for value in scalars):
                return None
            if tuple(map(type, scalars)) != terms[2]:
                return None
        return Taken(step, program, terms[0], slot, scalars, submitted)

    def _begin(self, taken: Taken) -> bool:
        """Say what is about to run, and take the token for it."""
        page, count = self._page, self._count
        if count - COUNT.unpack_from(page, READ_AT)[0] >= RING_STEPS:
            return False  # the daemon has not come to read for long
        at = RING_AT + count % RING_STEPS * RING_STRIDE
        RING_ENTRY.pack_into(page, at, taken.step, taken.program, taken.slot, taken.submitted, 0.0, 0.0, False)
        COUNT.pack_into(page, TAKEN_AT, count + 1)
        try:
            os.eventfd_read(self._token)
        except BlockingIOError:
            COUNT.pack_into(page, TAKEN_AT, count)
            return False
        self._taken = taken
        return True

    def ended(self, started: float, ended: float, answered: bool) -> bool:
        """The step taken last has run. Whether it is time to tell the daemon."""
        page, count, (step, program, _, slot, _, submitted) = self._page, self._count, self._taken
        at = RING_AT + count % RING_STEPS * RING_STRIDE
        RING_ENTRY.pack_into(page, at, step, program, slot, submitted, started, ended, answered)
        self._count = count = count + 1
        COUNT.pack_into(page, RAN_AT, count)
        self._last = step
        os.eventfd_write(self._token, 1)
        return count % TELL_EVERY == 0
