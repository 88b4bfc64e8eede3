"""Whatever clients say, in whatever order: nothing escapes the loop, every request is answered
once, and when they are gone nothing of them is left."""

from __future__ import annotations

from collections import Counter, deque

from hypothesis import given, settings
from hypothesis import strategies as st

from gpumux.config import Config
from gpumux.program import codec
from gpumux.types import MOST_LEASE_S, Fault
from gpumux.wire import messages as msg
from tests.program import samples

from .fakes import BAD, UNLOADABLE, Daemon

JOBS = ["a" * 32, "b" * 32]
SESSIONS = {"s": (1000, False), "t": (1001, True), "root": (0, False)}
PROGRAMS = [codec.encode(samples.add_one()), codec.encode(samples.empty()), BAD, UNLOADABLE]

sessions = st.sampled_from(sorted(SESSIONS))
jobs = st.sampled_from([*JOBS, "c" * 32])
small = st.integers(0, 4)
sizes = st.lists(st.sampled_from([0, 4, 100, 1 << 47, 1 << 62]), max_size=2)
weights = st.sampled_from([1.0, 1.0, 1.0, -1.0, 1e9])


reserved, leases = st.sampled_from([-1, 0, 100, 1 << 20, 1 << 60]), st.sampled_from([-1.0, 0.0, 1e-3, 5.0, 1e9])


def requests():
    """A message without its ref, as (class, fields, payload frames)."""
    return st.one_of(
        st.tuples(st.sampled_from([msg.OpenJob, msg.OpenFusibleJob]), st.tuples(jobs, st.just("n"),
                  st.sampled_from([0, 1, 9]), weights, st.just(1.1), st.none(), st.integers(0, 3), st.just(0)),
                  st.just([])),
        st.tuples(st.just(msg.LoadProgram), st.tuples(jobs, small, sizes, st.just([])),
                  st.sampled_from(PROGRAMS).map(lambda p: [p])),
        st.tuples(st.just(msg.OpenTransfer), st.tuples(jobs, small, st.lists(small, max_size=2), st.booleans()),
                  st.just([])),
        st.tuples(st.just(msg.FillTransfer), st.tuples(jobs, small, st.just(0)), st.just([])),
        st.tuples(st.just(msg.PauseJob), st.tuples(jobs), st.just([])),
        st.tuples(st.just(msg.ResumeJob), st.tuples(jobs), st.just([])),
        st.tuples(st.just(msg.CloseJob), st.tuples(jobs, st.booleans()), st.just([])),
        st.tuples(st.just(msg.JobStats), st.tuples(jobs), st.just([])),
        st.tuples(st.just(msg.GetStatus), st.tuples(), st.just([])),
        st.tuples(st.just(msg.ExplainJob), st.tuples(jobs), st.just([])),
        st.tuples(st.just(msg.GetInterference), st.tuples(st.sampled_from(["", "n"])), st.just([])),
        st.tuples(st.just(msg.Reserve), st.tuples(jobs, st.sampled_from([0, 1, 9]), reserved, leases), st.just([])),
        st.tuples(st.just(msg.ConfirmReservation), st.tuples(jobs, leases), st.just([])),
        st.tuples(st.just(msg.ReleaseReservation), st.tuples(jobs), st.just([])),
        st.tuples(st.just(msg.PlaceJob), st.tuples(jobs, st.just("n"), st.just(0), small, reserved, st.just([]), small,
                  st.booleans(), small), st.just([])),
        st.tuples(st.just(msg.PlacedJobEnded), st.tuples(jobs, st.just("")), st.just([])),
        st.tuples(st.just(msg.DrainNode), st.tuples(st.just("n"), st.booleans()), st.just([])),
        st.tuples(st.just(msg.ProfileJob), st.tuples(jobs, st.none() | small), st.just([])),
    )  # fmt: skip


steps = st.tuples(
    st.just(msg.Step),
    st.tuples(jobs, st.integers(0, 30), st.sampled_from([1, 1, 1, 2, 3]), st.integers(0, 2), st.just([])),
    st.just([]),
)
owned = st.sampled_from(list(zip(("s", "t"), JOBS, strict=True)))
sensible = st.one_of(  # what an honest client does: numbers rise, jobs are its own
    st.tuples(st.just("step"), owned, st.integers(0, 1)),
    st.tuples(st.just("move"), owned, st.booleans()),
    st.tuples(st.just("load"), owned, st.integers(2, 9)),
    st.tuples(st.just("finish"), st.none(), st.none()),
    st.tuples(st.just("made"), st.none(), st.none()),
)
wild = st.one_of(
    st.tuples(st.just("say"), sessions, requests()),
    st.tuples(st.just("say"), sessions, steps),
)
rare = st.one_of(
    st.tuples(st.just("lose"), jobs, st.none()),
    st.tuples(st.just("reconnect"), sessions, st.none()),
    st.tuples(st.just("stop"), owned, st.booleans()),
    st.tuples(st.just("drain"), st.none(), st.none()),
)
actions = st.lists(
    st.integers(0, 19).flatmap(lambda n: rare if n >= 18 else wild if n % 3 == 2 else sensible), min_size=5, max_size=60
)


@settings(max_examples=150)
@given(actions)
def test_any_conversation_is_answered_and_leaves_nothing(script):
    daemon = Daemon(Config(max_programs_per_job=3))
    daemon.loop._offload.close()
    daemon.loop._offload = daemon.loop.segments._offload = slow_work = HeldWork()
    owed: Counter[tuple[str, int]] = Counter()
    try:
        for name, (uid, inline) in SESSIONS.items():
            daemon.connect(name, uid, inline)
        for who, job in zip(("s", "t"), JOBS, strict=True):  # deep water at once
            daemon.open_job(who, job)
            daemon.load(who, job, PROGRAMS[0], 1, new_buffers=[4, 1 << 20])
        daemon.device.slow = True  # from here on, checks and loads take until the script says
        for action, who, what in script:
            act(daemon, owed, action, who, what)
        while daemon.device.work or slow_work.held:
            slow_work.finish()
            daemon.turn()
            if daemon.device.work:
                daemon.device.finish()
            daemon.turn()
        settle(daemon, owed)
        for name in SESSIONS:
            daemon.disconnect(name)
        daemon.turn()
        daemon.now += MOST_LEASE_S + 1.0  # reservations outlive their sessions
        daemon.turn()
        assert daemon.loop.context.records.jobs == {}
        assert daemon.device.jobs == {}
        assert daemon.loop.scheduler.snapshot()["memory"]["used"] == 0
        assert daemon.loop.segments.used_bytes == 0
    finally:
        daemon.close()


class HeldWork:
    """Stands in for daemon/segments.py: side work is done when the script says so."""

    def __init__(self):
        self.held = deque()

    def submit(self, uid, session, work, then, dropped):
        self.held.append((uid, session, work, then, dropped))

    def forget(self, uid, session):
        dropped = [each for each in self.held if each[:2] == (uid, session)]
        self.held = deque(each for each in self.held if each[:2] != (uid, session))
        for each in dropped:
            each[4]()

    def collect(self):
        """Nothing is finished but by `finish`."""

    def close(self):
        assert not self.held

    def finish(self):
        if self.held:
            _, _, work, then, _ = self.held.popleft()
            then(work())


def act(daemon, owed, action, who, what):
    if action == "say":
        kind, fields, frames = what
        if kind is msg.Step:  # steps have no ref; loop tests hold that each has one answer
            inline = SESSIONS[who][1]
            message, frames = msg.Step(*fields, int(inline)), [bytes(16)] * inline
        else:
            message = kind(daemon.ref(), *fields)
            owed[who, message.ref] += 1
        daemon.say(who, message, *frames)
        daemon.router.read = 0
    elif action == "step":
        (session, job), slot = who, what
        inline = SESSIONS[session][1]
        step = msg.Step(job, daemon.ref() + 100, 1, slot, [], int(inline))
        daemon.say(session, step, *[bytes(16)] * inline)
        daemon.router.read = 0
    elif action == "move":
        (session, job), push = who, what
        inline = SESSIONS[session][1]
        number = daemon.ref()
        owed[session, number] += 1
        daemon.say(session, msg.OpenTransfer(number, job, number + 100, [0, 1] if push else [0], push))
        if push:
            owed[session, ref := daemon.ref()] += 1
            daemon.say(
                session, msg.FillTransfer(ref, job, number + 100, int(inline)), *[bytes(64 + (1 << 20))] * inline
            )
        daemon.router.read = 0
    elif action == "load":
        (session, job), number = who, what
        owed[session, ref := daemon.ref()] += 1
        program = PROGRAMS[number % len(PROGRAMS)]
        daemon.say(session, msg.LoadProgram(ref, job, daemon.ref() + 100, [], []), program)
        daemon.router.read = 0
    elif action == "stop":
        (session, job), drain = who, what
        owed[session, ref := daemon.ref()] += 1
        daemon.say(session, msg.CloseJob(ref, job, drain))
        daemon.router.read = 0
    elif action == "drain":
        daemon.loop.stop("the test says so")
    elif action == "finish" and daemon.device.work:
        daemon.device.finish()
    elif action == "made":
        daemon.loop.segments._offload.finish()
    elif action == "lose" and who in daemon.device.jobs:
        daemon.device.lose(who, Fault("executor_crashed", "gone"))
    elif action == "reconnect":
        daemon.disconnect(who)
        for key in [key for key in owed if key[0] == who]:
            del owed[key]  # no session is left to be answered
        daemon.connect(who, *SESSIONS[who])
    daemon.turn()


def settle(daemon, owed):
    """Every request that was not abandoned has one answer, except pushes that wait for their data:
    FillTransfer is answered by TransferDone."""
    answers = Counter(
        (session, message.ref) for session, message, _ in daemon.router.sent if getattr(message, "ref", None)
    )
    for key in owed:
        assert answers[key] <= 1, f"{key} was answered {answers[key]} times"
    silent = {key for key in owed if not answers[key]}
    fills = [m for _, m, _ in daemon.router.sent if isinstance(m, msg.TransferDone)]
    assert len(silent) <= len(fills), f"never answered: {silent}"
