"""A device and a router in memory, for the loop's tests. Both check that they are used by contract."""

from __future__ import annotations

import math
import os
import select
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from gpumux.config import Config
from gpumux.daemon.inconsistencies import CrashReports
from gpumux.daemon.loop import Loop
from gpumux.daemon.report import Identity
from gpumux.daemon.round_robin import DAEMON
from gpumux.daemon.state.learned import LearnedFile
from gpumux.device import base as dev
from gpumux.errors import DaemonGone
from gpumux.metrics.series import Metrics
from gpumux.program import codec
from gpumux.program.ir import slot_layout
from gpumux.scheduler.fusion.groups import FusionRules
from gpumux.types import (
    GENERATOR_BYTES,
    DeviceInfo,
    Fault,
    Footprint,
    JobDied,
    JobId,
    JobReleased,
    Peer,
    PieceDone,
    PieceFailed,
    ProgramId,
    ProgramReady,
    SessionId,
    TransferEnded,
)
from gpumux.wire import messages as msg
from gpumux.wire import router as wire
from gpumux.wire.shared_memory import Segment

INFO = DeviceInfo("fake", "a fake", 1 << 30, 1, 0, "none", {"low": 0.002, "high": 0.002})
BAD = b"bad"  # a Program the fake refuses to check
UNLOADABLE = b"unloadable"  # one it refuses to load
NOT_MEASURED = Fault("program", "nothing is measured yet", "run two steps of it first")
BROKEN = Fault("program", "it is broken", "mend it")


@dataclass
class FakeProgram:
    program: object
    segment: Segment
    slots: int


@dataclass
class FakeJob:
    buffers: list[int] = field(default_factory=list)
    programs: dict[ProgramId, FakeProgram] = field(default_factory=dict)


@dataclass
class Held:
    """A check or a load that waits for `finish()`."""

    job: JobId
    run: Callable[[], None]


class FakeDevice:
    """A device that does nothing by itself: `finish()` completes the oldest launch or transfer, and, when `slow`, the
    oldest check or load, which are done at once otherwise. A program has one piece; running it adds one
    to every float32 of its first input."""

    def __init__(self):
        self.slow = False
        self.unmeasured = False
        self.jobs: dict[JobId, FakeJob] = {}
        self.work: deque = deque()
        self.events: list = []
        self.checked: set = set()
        self.launched: list[dev.Launch] = []

    def open(self):
        return INFO

    def filenos(self):
        return []

    def due(self):
        return math.inf

    def poll(self):
        events, self.events = self.events, []
        return events

    def check(self, job, program, encoded, user=None):
        assert job in self.jobs, "checked before open_job"
        self._begin(job, lambda: self._check(job, program, encoded))

    def _begin(self, job, run):
        if self.slow:
            self.work.append(Held(job, run))
        else:
            run()

    def _check(self, job, program, encoded):
        if encoded == BAD:
            self.events.append(dev.ProgramRefused(job, program, BROKEN))
            return
        decoded = None if encoded == UNLOADABLE else codec.decode(encoded)
        nbytes, scalars = (slot_layout(decoded).nbytes, decoded.scalars) if decoded else (4096, ())
        self.checked.add((job, program, encoded))
        self.events.append(
            dev.ProgramChecked(job, program, Footprint(0, 64, nbytes), "hash", ("aten.add.Tensor",), scalars)
        )

    def open_job(self, job, spec):
        assert job not in self.jobs
        self.jobs[job] = FakeJob()

    def load_program(self, job, program, encoded, new_buffers, binding, data, slots):
        assert (job, program, encoded) in self.checked, "loaded before it was checked"
        if encoded == UNLOADABLE:
            self._begin(job, lambda: self.events.append(dev.ProgramRefused(job, program, BROKEN)))
            return
        decoded = codec.decode(encoded)
        assert data.nbytes == slots * slot_layout(decoded).nbytes
        # Held by the job from now on: it goes with it, loaded or not.
        loaded = FakeProgram(decoded, Segment.adopt(os.dup(data.fd), data.nbytes), slots)
        self.jobs[job].programs[program] = loaded
        self._begin(job, lambda: self._load(job, program, new_buffers))

    def _load(self, job, program, new_buffers):
        self.jobs[job].buffers += new_buffers
        self.events.append(ProgramReady(job, program, 0, (0.001,), (0, 1)))

    def profile(self, job, program):
        assert program in self.jobs[job].programs, "asked for the profile of a program that is not loaded"
        text = b"" if self.unmeasured else b"profile %d" % program
        fault = NOT_MEASURED if self.unmeasured else None
        self._begin(job, lambda: self.events.append(dev.ProgramProfiled(job, program, text, fault)))

    def cut(self, job, program, target_s):
        assert program in self.jobs[job].programs, "asked to cut a program that is not loaded"
        self.jobs[job].programs[program].target_s = target_s

    def launch(self, launch):
        program = self.jobs[launch.job].programs[launch.program]
        assert launch.slot < program.slots
        assert launch.piece == 0
        self.launched.append(launch)
        self.work.append(launch)

    def transfer(self, job, transfer, buffers, segment, into_device):
        sizes = [GENERATOR_BYTES if b == dev.GENERATOR else self.jobs[job].buffers[b] for b in buffers]
        assert segment.nbytes >= sum(sizes)
        self.work.append((job, transfer, Segment.adopt(os.dup(segment.fd), segment.nbytes), into_device))

    def unload(self, job):
        self.work = deque(item for item in self.work if not self._drops(item, job))
        state = self.jobs.pop(job, None)
        for program in state.programs.values() if state else ():
            program.segment.close()
        self.events.append(JobReleased(job))

    def _drops(self, item, job):
        if isinstance(item, dev.Launch | Held):
            return item.job == job
        if item[0] == job:
            item[2].close()
        return item[0] == job

    def lose(self, job, fault):
        """The executor dies."""
        for item in [i for i in self.work if isinstance(i, dev.Launch) and i.job == job]:
            self.events.append(PieceFailed(item.launch, fault))
        for program in self.jobs[job].programs.values():
            program.segment.close()
        self.work = deque(item for item in self.work if not self._drops(item, job))
        del self.jobs[job]
        self.events.append(JobDied(job, fault))

    def finish(self, now=0.0):
        item = self.work.popleft()
        if isinstance(item, dev.Launch):
            self._run(item)
            self.events.append(PieceDone(item.launch, now, now + 0.001))
        elif isinstance(item, Held):
            item.run()
        else:
            job, transfer, segment, into_device = item
            self._move(job, segment, into_device)
            segment.close()
            self.events.append(TransferEnded(job, transfer))

    def _move(self, job, segment, into_device):
        if not into_device:
            with segment.view() as view:
                view[:4] = b"made"

    def _run(self, launch):
        program = self.jobs[launch.job].programs[launch.program]
        layout = slot_layout(program.program)
        if not layout.inputs or not layout.results:
            return
        base = launch.slot * layout.nbytes
        with program.segment.view() as view:
            source = view[base + layout.inputs[0] : base + layout.inputs[0] + 16].cast("f")
            target = view[base + layout.results[0] : base + layout.results[0] + 16].cast("f")
            for i in range(4):
                target[i] = source[i] + 1
            source.release()
            target.release()

    def memory(self):
        return dev.MemoryFigures(1 << 30, 1 << 30, {})

    def close(self):
        for job in list(self.jobs):
            self.unload(job)
        self.events.clear()


class AnsweringDevice(FakeDevice):
    """A device that answers steps itself if it has the channel, unless `decline` is set. `answered` are those;
    `quick` keeps PieceDone back until `catch_up` is called."""

    def __init__(self):
        super().__init__()
        self.channels: dict[JobId, tuple[int, dev.AnswerForm]] = {}
        self.answered: list = []
        self.late: list = []
        self.quick = self.decline = False

    def answer_on(self, job, channel, form):
        assert job not in self.channels, "one channel a job"
        self.channels[job] = channel, form

    def catch_up(self, job):
        assert job in self.channels
        self.events += self.late
        self.late = []
        return self.poll()

    def finish(self, now=0.0):
        launch = self.work[0]
        if not isinstance(launch, dev.Launch) or launch.submitted is None or self.decline:
            return super().finish(now)
        assert launch.job in self.channels
        self.work.popleft()
        self._run(launch)
        self.answered.append(launch.step)
        done = PieceDone(launch.launch, now, now + 0.001, True)
        return (self.late if self.quick else self.events).append(done)


class FakeSockets:
    """Nothing to wait on."""

    def __init__(self):
        self.epoll = select.epoll()
        self.touched = False

    def descriptors(self):
        return []

    def unread(self):
        return False


class FakeRouter:
    """What clients say is pushed in; what they would hear is kept. Messages pass the real codec's
    checks on the way out, so that a test can't accept what the wire would not carry."""

    def __init__(self):
        self.counters: Counter[str] = Counter()
        self.arrivals: list[wire.Arrival] = []
        self.on_channel: list[wire.Arrival] = []
        self.sent: list[tuple[SessionId, msg.Message, list[bytes]]] = []
        self.segments: dict[tuple[SessionId, int], int] = {}
        self.open: dict[SessionId, Peer] = {}
        self.read = 0
        self.sockets = FakeSockets()

    def use_limits(self, limits):
        self.limits = limits

    has_news = False
    at: SessionId | None = None  # a test sets it
    channel: int | None = None  # of every session

    def channel_of(self, session):
        return self.channel if session in self.open else None

    def receive_channels(self, ready, now):
        arrivals, self.on_channel = self.on_channel, []
        return arrivals

    def receive(self, now):
        arrivals, self.arrivals = self.arrivals, []
        return arrivals

    def expire(self, now):
        return []

    def next_deadline(self, now):
        return float("inf")

    def send(self, session, message, frames=()):
        if session not in self.open:
            return False
        wire.encode(message, frames)
        self.sent.append((session, message, [bytes(f) for f in frames]))
        return True

    def close_session(self, session, error):
        peer = self.open.pop(session, None)
        if peer is not None:
            self.sent.append((session, msg.Refusal(0, error.code, error.message, error.remedy), []))
            self.arrivals.append(wire.Closed(session, peer, error.message))

    def send_segment(self, session, segment, fd, nbytes):
        assert os.fstat(fd).st_size == nbytes
        self.segments[session, segment] = nbytes
        return session in self.open


class FakeWriter:
    """A writer that does nothing by itself: `answer(...)` answers the oldest request."""

    def __init__(self):
        self.owner = ""
        self.asked_at = float("inf")  # on the loop's clock, when the request under way was sent; a test sets it
        self.asked: list = []  # (verb, arguments, bytes of each descriptor)
        self.owners: deque = deque()  # of the requests that wait: (uid, session or job)
        self.waiting: deque = deque()
        self.answers: deque = deque()
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def follow(self, watch):
        watch((self.fd,))

    def ask(self, verb, arguments, fds, then, *, uid=DAEMON, owner=""):
        self.asked.append((verb, arguments, [os.pread(fd, 1 << 20, 0) for fd in fds]))
        self.waiting.append((then, [os.dup(fd) for fd in fds]))
        self.owners.append((uid, owner))

    def waited(self, now):
        return now - self.asked_at if self.waiting else 0.0

    def count(self, uid, owner):
        return list(self.owners)[1:].count((uid, owner))  # the first one is under way

    def forget(self, uid, owner):
        waiting, self.waiting = list(zip(self.waiting, self.owners, strict=True)), deque()
        self.owners.clear()
        for place, ((then, fds), of) in enumerate(waiting):
            if place == 0 or of != (uid, owner):
                self.waiting.append((then, fds))
                self.owners.append(of)
                continue
            for fd in fds:
                os.close(fd)
            then(DaemonGone("its session has ended", "connect again"))

    def answer(self, answer, fill=b""):
        then, fds = self.waiting.popleft()
        _, self.owner = self.owners.popleft()
        for fd in fds:
            if fill:
                os.pwrite(fd, fill, 0)
            os.close(fd)
        self.answers.append((then, answer))

    def hear(self):
        while self.answers:
            then, answer = self.answers.popleft()
            then(answer)

    def close(self):
        while self.waiting:
            self.answer(None)
        os.close(self.fd)


class Daemon:
    """A loop over the fakes, and clients' words to it."""

    def __init__(
        self,
        config: Config | None = None,
        shared_limit: int = 1 << 30,
        device: FakeDevice | None = None,
        writer: FakeWriter | None = None,
        crashes: CrashReports | None = None,
        learned: LearnedFile | None = None,
        info: DeviceInfo | None = None,
        fusion_rules: FusionRules | None = None,
    ):
        self.now = 100.0
        self.consistent = True  # False while a test has spoilt the scheduler's state
        self.device, self.router = device or FakeDevice(), FakeRouter()
        self.metrics = Metrics(msg.FROM_CLIENT)
        identity = Identity(config or Config(), ["ipc:///fake"], info or INFO, 0.0)
        self.loop = Loop(
            identity,
            self.router,
            self.device,
            metrics=self.metrics,
            shared_limit=shared_limit,
            clock=lambda: self.now,
            writer=writer,
            crashes=crashes,
            learned=learned,
            fusion_rules=fusion_rules,
        )
        self.refs = 0

    def close(self):
        self.device.close()
        self.loop.close()
        self.router.sockets.epoll.close()

    def turn(self):
        """Turns until nothing is left to do but what the fake device holds back."""
        while True:
            self.loop.turn(channels=[(0, 1)] if self.router.on_channel else ())
            if self.consistent:
                self.loop.scheduler.check_invariants()
            if not (
                self.device.events
                or self.router.arrivals
                or self.router.on_channel
                or self.loop.context.events
                or self.loop.context.questions.waiting.items
            ):
                return

    def connect(self, name: str, uid: int = 1000, inline: bool = False, role: str = "client") -> str:
        peer = Peer(uid, uid, 1)
        self.router.open[name] = peer
        hello = msg.Hello(msg.PROTOCOL_VERSION, "0", role, 1, "", inline)
        self.router.arrivals.append(wire.Opened(SessionId(name), peer, hello, inline))
        self.turn()
        return name

    def disconnect(self, name: str, reason: str = "gone"):
        peer = self.router.open.pop(name)
        self.router.arrivals.append(wire.Closed(SessionId(name), peer, reason))
        self.turn()

    def say(self, session: str, message: msg.Message, *frames: bytes):
        """One message, and everything that comes of it at once: [(message, frames)] to that session."""
        by_channel = self.router.channel is not None and type(message) is msg.Step
        arrivals = self.router.on_channel if by_channel else self.router.arrivals
        arrivals.append(wire.Incoming(SessionId(session), self.router.open[session], message, list(frames)))
        return self.hear(session)

    def hear(self, session: str):
        """What the session has been sent since the last call."""
        self.turn()
        new = self.router.sent[self.router.read :]
        self.router.read = len(self.router.sent)
        return [(message, frames) for to, message, frames in new if to == session]

    def ref(self) -> int:
        self.refs += 1
        return self.refs

    def open_job(self, session: str, job: str, inflight: int = 2, priority: int = 0, name: str = "a job"):
        answer = self.say(session, msg.OpenJob(self.ref(), job, name, priority, 1.0, 1.1, None, inflight, 0))
        assert [type(m) for m, _ in answer] == [msg.JobOpened], answer
        return job

    def load(self, session: str, job: str, program, number: int = 0, new_buffers=(), binding=()):
        encoded = program if isinstance(program, bytes) else codec.encode(program)
        return self.say(session, msg.LoadProgram(self.ref(), job, number, list(new_buffers), list(binding)), encoded)
