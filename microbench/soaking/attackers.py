"""Hostile clients that send as much as the daemon takes: changed messages, packets and Programs in valid sessions.

    python -m microbench.soaking.attackers ENDPOINT KIND SEED UID COUNTERS SLOTS SLOT VICTIM

KIND is `messages` or `programs`; UID the user to become (0: this one); COUNTERS, SLOTS and SLOT say where to count
(FIELDS), and slot 0 of them says what to do: 0 rest, 1 attack, 2 leave. VICTIM is the id of another user's job.

A burst of messages is counted once the daemon has answered what came after it in the same session. Each one is valid in
form, or else the last of its session, since a malformed one ends it. A Program is counted when it is refused or loaded.
"""

from __future__ import annotations

import os
import random
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import zmq

from gpumux.errors import ProtocolError
from gpumux.program import codec as programs
from gpumux.program.ir import Program
from gpumux.wire import messages as m
from gpumux.wire.codec import decode, encode
from gpumux.wire.messages import FROM_CLIENT
from microbench.soaking.counters import SharedCounters
from tests.fuzz.mutate import mutate
from tests.fuzz.seeds import JOB, MESSAGES
from tests.program import samples

FIELDS = (
    "order",  # of slot 0: REST, ATTACK or LEAVE
    "daemons",  # of slot 0: how many there have been
    "resting",  # 1 while it does nothing, as ordered
    "sessions",  # that were opened
    "messages",  # valid in form, handled by the daemon
    "malformed",  # the last messages of their sessions
    "packets",  # on a local channel
    "programs",  # refused or loaded
    "loaded",  # of those: they passed the check
    "stepped",  # steps of loaded Programs that were answered
    "cut",  # sessions that the daemon ended, or left, before a burst was answered
)
REST, ATTACK, LEAVE = 0, 1, 2
WAIT_MS, LOOK_MS = 30_000, 200
BURST = 300  # messages of a session, at most
JOBS = 2  # of a session that sends Programs: each has one under way
PROGRAMS_PER_SESSION = 400
LONGEST = 256 << 10
HELLO = m.Hello(m.PROTOCOL_VERSION, "0.1.0", "client", 1, "2", False)
LATER: tuple[tuple[m.Message, int], ...] = (
    (m.PrepareSnapshot(1, JOB), 0), (m.TakeSnapshot(1, JOB, 1, 1, 1), 1), (m.FindKept(1, "name"), 0),
    (m.ReadSnapshot(1, JOB, [0, 1]), 0), (m.Replay(1, JOB, 1, 1), 1),
)  # fmt: skip
SEEDS = [(bytes(encode(s, [b""] * n)[0]), n) for s, n in (*MESSAGES, *LATER) if type(s) in FROM_CLIENT]
VALID = FROM_CLIENT - {m.OpenChannel, m.Step}  # by ZeroMQ, in a session that has a local channel


class Cut(Exception):
    """The daemon ended the session, or is gone."""


class Connection:
    """A session, spoken by hand."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, daemons: Callable[[], int]) -> None:
        self._daemons = daemons
        self._daemon = daemons()
        self.sock = context.socket(zmq.DEALER)
        self.sock.setsockopt(zmq.LINGER, 0)
        self.sock.setsockopt(zmq.SNDTIMEO, WAIT_MS)
        self.sock.setsockopt(zmq.RECONNECT_IVL, -1)
        self.sock.connect(endpoint)
        self.channel: socket.socket | None = None
        self.say(HELLO)
        self.welcome = self._welcome()

    def say(self, message: m.Message, *frames: bytes) -> None:
        self.sock.send_multipart(encode(message, frames))

    def send(self, data: bytes, frames: list[bytes]) -> None:
        self.sock.send_multipart([data, *frames])

    def hear(self) -> tuple[m.Message, list[bytes]]:
        """Raises Cut if nothing comes, or the daemon is another one."""
        until = time.monotonic() + WAIT_MS / 1000
        while not self.sock.poll(LOOK_MS):
            if self._daemons() != self._daemon or time.monotonic() > until:
                raise Cut
        message, frames = decode(self.sock.recv_multipart())
        return message, [bytes(frame) for frame in frames]

    def _welcome(self, refused: bool = True) -> m.Welcome:
        while True:
            message, _ = self.hear()
            if isinstance(message, m.Welcome):
                return message
            if isinstance(message, m.Leaving) or (refused and ends_session(message)):
                raise Cut

    def all_handled(self, refused: bool = True) -> None:
        """Wait until the daemon has taken all that was sent. Raises Cut if it ended the session. `refused`: a refusal
        without a number says so; not if requests without one were sent."""
        self.say(HELLO)
        if self._welcome(refused).session != self.welcome.session:
            raise Cut

    def open_channel(self) -> socket.socket:
        self.channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel.settimeout(WAIT_MS / 1000)
        self.channel.connect(self.welcome.channel)
        self.channel.send(encode(m.OpenChannel(m.PROTOCOL_VERSION, self.welcome.nonce))[0])
        self.packet()
        return self.channel

    def packet(self) -> m.Message:
        assert self.channel is not None
        packet = self.channel.recv(1 << 16)
        if not packet:
            raise Cut
        return decode((packet,))[0]

    def close(self) -> None:
        self.sock.close()
        if self.channel is not None:
            self.channel.close()


@dataclass
class Attacker:
    endpoint: str
    counters: SharedCounters
    slot: int
    draw: random.Random
    victim: str

    def __post_init__(self) -> None:
        self._context = zmq.Context()

    def count(self, field: str, number: int = 1) -> None:
        self.counters.add(self.slot, field, number)

    @contextmanager
    def session(self) -> Iterator[Connection]:
        connection = Connection(self._context, self.endpoint, lambda: self.counters.get(0, "daemons"))
        try:
            self.count("sessions")
            yield connection
        finally:
            connection.close()

    def run(self, once: Callable[[], None]) -> None:
        """Until the order to leave."""
        while (order := self.counters.get(0, "order")) != LEAVE:
            resting = self.counters.get(self.slot, "resting")
            if (order == REST) != bool(resting):
                self.count("resting", 1 if order == REST else -1)
            if order == REST:
                time.sleep(0.01)
                continue
            try:
                once()
            except (Cut, OSError, zmq.ZMQError, ProtocolError):
                self.count("cut")
                time.sleep(0.02)

    # ---- messages

    def messages(self) -> None:
        if self.draw.random() < 0.1:
            self.packets()
            return
        with self.session() as session:
            own = uuid.UUID(int=self.draw.getrandbits(128)).hex
            session.say(m.OpenJob(1, own, "hostile", 0, 1.0, 1.1, None, 2, 0))
            sent, last = 1, None
            for _ in range(self.draw.randint(1, BURST)):
                data, frames = self._message(own)
                valid = self._is_valid(data, frames)
                if valid:
                    session.send(data, frames)
                    sent += 1
                elif valid is not None:
                    last = data, frames
            session.all_handled(refused=False)
            self.count("messages", sent + 1)
            if last is not None:
                session.send(*last)
                self._refused(session)
                self.count("malformed")

    def _message(self, own: str) -> tuple[bytes, list[bytes]]:
        data, count = self.draw.choice(SEEDS)
        if self.draw.random() < 0.6:
            data = mutate("channel", data, LONGEST, self.draw.randrange(1 << 62), self._bytes)
        job = self.draw.choice([own, own, own, self.victim, f"{self.draw.getrandbits(128):032x}"])
        frames = [self.draw.randbytes(self.draw.choice([0, 1, 40, 4096])) for _ in range(count)]
        return data.replace(JOB.encode(), job.encode()), frames

    def _is_valid(self, data: bytes, frames: list[bytes]) -> bool | None:
        """Whether the session goes on after it. None for Hello and Goodbye, which say so otherwise."""
        try:
            kind = type(decode([data, *frames], LONGEST)[0])
        except ProtocolError:
            return False
        return None if kind in (m.Hello, m.Goodbye) else kind in VALID

    def _refused(self, session: Connection) -> None:
        while not ends_session(session.hear()[0]):
            pass

    def _bytes(self, data: bytes, most: int) -> bytes:
        """One change of bytes, without a thought of what they mean."""
        draw, changed = self.draw, bytearray(data)
        at = draw.randrange(len(changed) + 1)
        kind = draw.randrange(4)
        if kind == 0 and at < len(changed):
            changed[at] ^= draw.randrange(1, 256)
        elif kind == 1:
            del changed[at:]
        elif kind == 2:
            changed[at:at] = draw.randbytes(draw.randint(1, 8))
        else:
            changed += changed[at:]
        return bytes(changed[:most]) or b"\x00"

    def packets(self) -> None:
        """Steps on a session's local channel, changed. The channel is heard before the question that ends a burst."""
        with self.session() as session:
            channel = session.open_channel()
            job = uuid.UUID(int=self.draw.getrandbits(128)).hex
            session.say(m.OpenJob(1, job, "hostile", 0, 1.0, 1.1, None, 2, 0))
            session.say(m.LoadProgram(2, job, 0, [4], [0]), programs.encode(samples.counter()))
            session.all_handled()
            step = bytes(encode(m.Step(job, 1, 0, 0, [1.0], 0))[0])
            for _ in range(self.draw.randint(1, 40)):
                packet = step
                if self.draw.random() < 0.8:
                    packet = mutate("channel", step, 30_000, self.draw.randrange(1 << 62), self._bytes)
                channel.send(packet, socket.MSG_DONTWAIT)
                self.count("packets")
            with suppress(Cut):
                session.all_handled()

    # ---- Programs

    def programs(self) -> None:
        with self.session() as session:
            session.open_channel()
            jobs = [HostileJob(session, self.draw, n) for n in range(JOBS)]
            for job in jobs:
                job.open()
            left = PROGRAMS_PER_SESSION
            while left > 0 and self.counters.get(0, "order") == ATTACK:
                for job in jobs:
                    job.load(self._bytes)
                waiting = {job.ref: job for job in jobs}
                while waiting:
                    message, _ = session.hear()
                    if ends_session(message):
                        raise Cut
                    ref = getattr(message, "ref", -1)
                    if ref not in waiting:
                        continue
                    job = waiting.pop(ref)
                    if isinstance(message, m.Refusal) and message.code in ("unknown_job", "job_failed", "job_closed"):
                        job.open()
                        continue
                    self.count("programs")
                    left -= 1
                    if isinstance(message, m.ProgramLoaded):
                        self.count("loaded")
                        self.count("stepped", job.loaded())


def ends_session(message: m.Message) -> bool:
    return isinstance(message, m.Leaving) or (isinstance(message, m.Refusal) and message.ref == 0)


class HostileJob:
    """A job that loads one changed Program after another."""

    def __init__(self, session: Connection, draw: random.Random, number: int) -> None:
        self._session, self._draw = session, draw
        self._number = number + 1
        self.ref = 0

    def open(self) -> None:
        self._job = uuid.UUID(int=self._draw.getrandbits(128)).hex
        self._buffers = self._program = self._step = 0
        self._session.say(m.OpenJob(1 << 40, self._job, "hostile", 0, 1.0, 1.1, None, 2, 0))

    def load(self, plain: Callable[[bytes, int], bytes]) -> None:
        draw = self._draw
        if self._program > 50:
            self._session.say(m.CloseJob(1 << 40, self._job, False))
            self.open()
        make = draw.choice(list(samples.ALL.values()))
        program = make()
        encoded = mutate("program", programs.encode(program), 1 << 20, draw.randrange(1 << 62), plain)
        self._sizes = state_sizes(program)
        binding = list(range(self._buffers, self._buffers + len(self._sizes)))
        self._program += 1
        self._scalars = len(program.scalars)
        self.ref = self.ref + JOBS if self.ref else self._number
        load = m.LoadProgram(self.ref, self._job, self._program, self._sizes, binding)
        self._session.say(load, encoded)

    def loaded(self) -> int:
        """Run a step of it; returns how many were answered."""
        self._buffers += len(self._sizes)
        self._step += 1
        assert self._session.channel is not None
        step = m.Step(self._job, self._step, self._program, 0, [1.0] * self._scalars, 0)
        self._session.channel.send(encode(step)[0])
        while True:
            answer = self._session.packet()
            if isinstance(answer, (m.StepDone, m.StepFailed)) and answer.job == self._job:
                return 1


def state_sizes(program: Program) -> list[int]:
    """Bytes of each state buffer, in the order of their slots."""
    states = [storage for storage in program.storages if storage.kind == "state"]
    return [storage.nbytes for storage in sorted(states, key=lambda storage: storage.slot)]


def main(endpoint: str, kind: str, seed: str, uid: str, path: str, slots: str, slot: str, victim: str) -> int:
    counters = SharedCounters(Path(path), int(slots), FIELDS)
    if int(uid):
        os.setgroups([])
        os.setresgid(int(uid), int(uid), int(uid))
        os.setresuid(int(uid), int(uid), int(uid))
    attacker = Attacker(endpoint, counters, int(slot), random.Random(int(seed)), victim)
    attacker.run({"messages": attacker.messages, "programs": attacker.programs}[kind])
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
