"""An executor answers its job's steps itself, past the daemon: a client then waits for one process less."""

from __future__ import annotations

import mmap
import socket
import struct

from gpumux.device.cpu.channel import PAGE_LAUNCH, PAGE_LAUNCH_AT, PAGE_TIMES, PAGE_TIMES_AT

_NUMBER, _SECONDS = struct.Struct(">Q"), struct.Struct(">d")
_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL


class Answers:
    """Keeps the times of the step that runs, and answers it if there is a lane. `page` is shared with the
    daemon, which finds there that a step was answered even before it is told."""

    def __init__(self, page: mmap.mmap) -> None:
        self._page = page
        self.lane: socket.socket | None = None  # where steps are answered
        self._started = self._device_s = 0.0

    def use(self, lane: int, packet: bytes, step_at: int, queue_at: int, device_at: int, total_at: int) -> None:
        """Answer on `lane`, which is taken over, by filling `packet` (device.contract.AnswerForm)."""
        self.close()
        self.lane = socket.socket(fileno=lane)
        self._packet = bytearray(packet)
        self._step_at, self._queue_at, self._device_at, self._total_at = step_at, queue_at, device_at, total_at

    def ran(
        self, launch: int, step: int, piece: int, submitted: float, started: float, ended: float, suspended: float
    ) -> bool:
        """A piece ran, and stood still for `suspended` seconds. `submitted` is -1 unless it ends its step and the step may be
        answered. Whether it was."""
        if piece == 0:
            self._started, self._device_s = started, 0.0
        self._device_s += max(0.0, ended - started - suspended)
        if submitted < 0.0 or self.lane is None:
            return False
        # Before the answer: its client's next message may reach the daemon before we tell.
        PAGE_TIMES.pack_into(self._page, PAGE_TIMES_AT, started, ended, suspended)
        PAGE_LAUNCH.pack_into(self._page, PAGE_LAUNCH_AT, launch)
        answered = self.answer(step, self._started - submitted, self._device_s, ended - submitted)
        if not answered:
            PAGE_LAUNCH.pack_into(self._page, PAGE_LAUNCH_AT, 0)
        return answered

    def answer(self, step: int, queue_s: float, device_s: float, total_s: float) -> bool:
        """Answer a step; whether it was. There must be a lane."""
        packet, lane = self._packet, self.lane
        assert lane is not None
        _NUMBER.pack_into(packet, self._step_at, step)
        _SECONDS.pack_into(packet, self._queue_at, queue_s if queue_s > 0.0 else 0.0)
        _SECONDS.pack_into(packet, self._device_at, device_s)
        _SECONDS.pack_into(packet, self._total_at, total_s)
        try:
            lane.send(packet, _FLAGS)
        except OSError:  # full, or gone: the daemon's business, from now on, or answers would change their order
            self.close()
            return False
        return True

    def close(self) -> None:
        """Answer nothing any more. Idempotent."""
        lane, self.lane = self.lane, None
        if lane is not None:
            lane.close()
