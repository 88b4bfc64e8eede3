"""Has fused Programs made and proven, each in a process of its own, one after another. No torch.

Making one takes seconds, and so does proving it, which runs its operators on invented numbers. Between the two the
process waits: what the Program and its proof need is known then, and is charged before it is tried.

What a fused Program is made by is no part of a device: `function`, "module:name", is called in the process
(`gpumux/fuse/equal.py`, `serve`). The Program that comes back is checked as a client's is before it is loaded, since a
kernel that misbehaves may take the process over.
"""

from __future__ import annotations

import logging
import os
import select
from collections import deque
from dataclasses import dataclass
from typing import Any

from gpumux.device.base import FusedProgramMade, FusedProgramProven, FusedProgramRefused
from gpumux.device.workers import channel as wire
from gpumux.device.workers.channel import (
    FUSE,
    FUSED,
    PROVE,
    PROVEN,
    REFUSED,
    Channel,
    MalformedMessage,
    fault,
    integers,
    listed,
    unpack,
)
from gpumux.device.workers.fork_server import ForkServer, ending
from gpumux.hostmemory import memory_file
from gpumux.types import Fault

CPU_S = 240  # limit of a process's CPU time: tens of models of thousands of operators take a minute
WALL_S = 960  # limit of its wall time, waiting for PROVE included; it runs at a higher niceness than jobs
NICE = 10
MOST_BYTES = 1 << 46  # of a proof; a process may send any number
FusingEvent = FusedProgramMade | FusedProgramProven | FusedProgramRefused
_REMEDY = "let its jobs run by themselves"
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Fusing:
    """One request. `channel`: to its process, None once that is to end, or has ended. `made`: the Program was made, and
    its proof is what is left."""

    request: int
    encoded: bytes
    jobs: int
    channel: Channel | None = None
    made: bool = False


class FusedPrograms:
    """Requests for fused Programs. `confinement`: of their processes."""

    def __init__(self, function: str, confinement: dict[str, Any]) -> None:
        self._settings: dict[str, Any] = {
            "function": function, "cpu_s": CPU_S, "wall_s": WALL_S, "nice": NICE, "confinement": confinement,
        }  # fmt: skip
        self._waiting: deque[Fusing] = deque()
        self._token = -1  # of the process that is there
        self._current: Fusing | None = None

    def make(self, request: int, encoded: bytes, jobs: int) -> None:
        """Queue a request -> FusedProgramMade or FusedProgramRefused. Call `start` then."""
        self._waiting.append(Fusing(request, encoded, jobs))

    def prove(self, request: int) -> None:
        """Prove a Program that was made -> FusedProgramProven or FusedProgramRefused. Does nothing if its process has
        ended: a refusal is under way."""
        current = self._current
        assert current is not None
        assert current.request == request
        assert current.made
        if current.channel is not None:
            try:
                current.channel.send(PROVE, [])
            except OSError:
                pass  # `exited` says how it ended

    def drop(self, request: int) -> list[int]:
        """Give up a request, which is not answered any more. Returns the processes to kill. Idempotent."""
        self._waiting = deque(each for each in self._waiting if each.request != request)
        if self._current is None or self._current.request != request:
            return []
        return [self._over()]

    def start(self, server: ForkServer, epoll: select.epoll) -> None:
        """Begin with the next request, if there is one and none is under way. Call `hear` when `epoll` reports its
        channel."""
        if self._current is not None or not self._waiting:
            return
        current = self._current = self._waiting.popleft()
        program = memory_file("gpumux-fuse", [current.encoded])
        try:
            ours, theirs = wire.pair()
            ours.setblocking(False)
            epoll.register(ours, select.EPOLLIN)
            current.channel = Channel(ours, daemons=True)
            current.channel.send(FUSE, [current.jobs], (program,))  # the process reads it when it runs
            self._token = server.fork("fuser", self._settings, (theirs.detach(),))
        finally:
            os.close(program)

    def hear(self) -> list[FusingEvent]:
        """What the process has sent."""
        current = self._current
        if current is None or current.channel is None:
            return []
        try:
            tag, body, _ = current.channel.receive()
            return [self._answer(current, tag, unpack(body))]
        except BlockingIOError:
            return []
        except EOFError:
            _close(current)  # `exited` says how it ended
            return []
        except MalformedMessage as error:
            _log.error("the process that fuses a program sent a malformed message: %s", error)
            return [self._refused(current, "sent a malformed message")]

    def _answer(self, current: Fusing, tag: int, said: Any) -> FusingEvent:
        if tag == FUSED and not current.made:
            encoded, fusion, state, proof_bytes = listed(said, 4)
            if not isinstance(encoded, bytes) or not isinstance(fusion, bytes) or not encoded:
                raise MalformedMessage("a fused program that is no bytes")
            (nbytes,) = integers([proof_bytes])
            current.made = True
            return FusedProgramMade(current.request, encoded, fusion, tuple(integers(state)), min(nbytes, MOST_BYTES))
        if tag == PROVEN and current.made and listed(said, 0) == []:
            self._over()
            return FusedProgramProven(current.request)
        if tag == REFUSED:
            why = fault(said)
            self._over()
            return FusedProgramRefused(current.request, why)
        raise MalformedMessage(f"a message {tag} of a process that fuses")

    def exited(self, token: int, status: int | str) -> list[FusingEvent]:
        """Handle the end of a process. Returns the answer to its request, if it had none yet."""
        current = self._current
        if current is None or token != self._token:
            return []
        answers = self.hear()  # its last message comes before its end
        if self._current is current:
            how = ending(status)
            if "SIGXCPU" in how or "SIGALRM" in how:
                how = f"took longer than {CPU_S} s"
            answers.append(self._refused(current, how))
        return answers

    def _refused(self, current: Fusing, how: str) -> FusedProgramRefused:
        self._over()
        return FusedProgramRefused(current.request, Fault("not_fusible", f"the process that fuses it {how}", _REMEDY))

    def _over(self) -> int:
        """The request under way is over. Returns its process, which ends when its channel is closed."""
        assert self._current is not None
        _close(self._current)
        self._current = None
        token, self._token = self._token, -1
        return token

    @property
    def processes(self) -> list[int]:
        """Tokens of processes whose requests are under way."""
        return [self._token] if self._current is not None else []

    def close(self) -> None:
        """Drop all requests. The processes have ended, or end with the fork server."""
        self._waiting.clear()
        if self._current is not None:
            self._over()


def _close(request: Fusing) -> None:
    channel, request.channel = request.channel, None
    if channel is not None:
        channel.close()
