"""Every queue between a client's message and work: found in the code, bounded by user, forgotten with its session."""

from __future__ import annotations

import ast
import gc
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gpumux
from gpumux.config import Config
from gpumux.daemon import context, requests
from gpumux.daemon.round_robin import RoundRobin
from gpumux.daemon.segments import AT_ONCE_BYTES, Offload
from gpumux.daemon.snapshots import requests as snapshots
from gpumux.errors import AdmissionRefused, DaemonGone, UnknownJob
from gpumux.types import GENERATOR_BYTES, SessionId
from gpumux.wire import messages as msg
from gpumux.wire import router as wire
from gpumux.wire.limits import Limits
from tests.daemon.fakes import Daemon, FakeWriter
from tests.daemon.stepping import only
from tests.program import samples

JOB = "ab" * 16
ROOT = Path(gpumux.__file__).parent

# ---- All queues of the daemon, with what bounds each of them.

BOUNDS: dict[str, tuple[str, float]] = {
    "daemon/context.py CheckQueue._waiting": ("Programs of a user that are not loaded", requests.MAX_UNLOADED),
    "daemon/context.py QuestionQueue.waiting": ("questions of a session", context.MAX_WAITING),
    "daemon/context.py OpeningQueue.waiting": ("jobs of a session that wait to be opened", context.MAX_WAITING),
    "daemon/context.py DaemonContext.events": ("handled before the next message", 1),
    "daemon/records.py JobRecord.waiting": ("Programs of a job", Config().max_programs_per_job),
    "daemon/records.py JobRecord.profiles": ("profiles of a job", requests.MAX_PROFILES),
    "daemon/records.py JobRecord.changes": ("changes of a job", requests.MAX_CHANGES),
    "daemon/round_robin.py RoundRobin.items": ("see each RoundRobin", 0),
    "daemon/loop.py Loop._calls": ("signals and reloads, no messages", 1),
    "daemon/segments.py Offload._waiting": ("transfers of a job, and less", requests.MAX_TRANSFERS),
    "daemon/segments.py Offload._done": ("results of the same", requests.MAX_TRANSFERS),
    "daemon/snapshots/requests.py SnapshotRestorer._reads": ("reads of a user", snapshots.MAX_READS),
    "daemon/snapshots/requests.py SnapshotRequests._finds": ("FindKept of a session", snapshots.MAX_FINDS),
    "daemon/snapshots/writer.py WriterClient._waiting": ("a save of a job, finds of a session", snapshots.MAX_FINDS),
    "wire/router.py Router._arrivals": ("messages of a pass", wire.CHANNELS_A_PASS),
    "wire/router.py RouterSession.unsent": ("messages for a session", Limits().send_queue),
    "wire/router.py RouterSession.held": ("messages behind those on a session's channel", Limits().send_queue),
    "wire/channel.py ClientChannel._unsent": ("the client's own", 0),
    "wire/channel.py DaemonChannel._parts": ("bytes of a message", Limits().max_control_bytes),
    "device/workers/checks.py Checks._waiting": ("places of CheckQueue", 1),
    "device/workers/fork_server.py ForkServer._outbox": ("processes of jobs and checks", Config().max_jobs),
    "device/workers/channel.py Channel._parts": ("bytes of one message of the device's own processes", 1),
    "device/run/schedule.py CommandQueue.waiting": ("launches and transfers that the scheduler granted", 1),
    "device/run/schedule.py CommandQueue.handed": ("of these, those that a process has", 1),
    "device/workers/fusing.py FusedPrograms._waiting": ("groups of jobs, of which there are fewer", Config().max_jobs),
    "daemon/fusion/jobs.py JobFusion.released": ("handled before the next event", 1),
    "daemon/fusion/jobs.py JobFusion._inbox": ("handled before the next event", 1),
    "daemon/fusion/jobs.py _Member.held": ("steps and transfers of a job", Config().max_inflight),
}  # fmt: skip
KINDS = {"deque", "RoundRobin", "SimpleQueue", "Queue", "LifoQueue", "PriorityQueue"}
LISTS = {"_finds", "_arrivals", "_parts"}  # lists that are used as queues


def queues_in(path: Path) -> Iterator[str]:
    """`Class.attribute` of each attribute that holds one of KINDS, or is one of LISTS."""
    for owner in ast.walk(ast.parse(path.read_text())):
        if not isinstance(owner, ast.ClassDef):
            continue
        for node in ast.walk(owner):
            if not isinstance(node, ast.Assign | ast.AnnAssign):
                continue
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            name = (
                target.attr if isinstance(target, ast.Attribute) else target.id if isinstance(target, ast.Name) else ""
            )
            names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
            names |= {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}
            kept = isinstance(target, ast.Attribute) or node in owner.body
            if kept and (names & KINDS or name in LISTS):
                yield f"{owner.name}.{name}"


def test_each_queue_is_in_the_table():
    found = {
        f"{path.relative_to(ROOT)} {queue}"
        for folder in ("daemon", "wire", "device/workers", "device/run")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for queue in queues_in(path)
    }
    assert found == set(BOUNDS)


def test_a_queue_of_a_new_class_is_found(tmp_path: Path):
    path = tmp_path / "new.py"
    path.write_text(
        "class A:\n"
        "    queue: deque[int] = field(default_factory=deque)\n"
        "    def __init__(self):\n        self._more = collections.deque()\n        local = deque()\n"
    )
    assert set(queues_in(path)) == {"A.queue", "A._more"}


# ---- Floods: what one session sends again and again, with a device and a writer that never answer.

Sender = Callable[[int], tuple[msg.Message, list[bytes]]]
NOTES = b"n" * 100
GANG = ("ef" * 16, 0, 2, "127.0.0.1:1", 30.0)
FLOODS: dict[type, Sender] = {
    msg.OpenJob: lambda i: (msg.OpenJob(i, f"{i:032x}", "x", 0, 1.0, 1.1, None, 2, 0), []),
    msg.OpenFusibleJob: lambda i: (msg.OpenFusibleJob(i, f"{i:032x}", "x", 0, 1.0, 1.1, None, 2, 0), []),
    msg.OpenGangJob: lambda i: (msg.OpenGangJob(i, f"{i:032x}", "x", 0, 1.0, 1.1, None, 2, 0, 1, *GANG), []),
    msg.LoadProgram: lambda i: (msg.LoadProgram(i, JOB, i, [], []), [b"x" * 100]),
    msg.Step: lambda i: (msg.Step(JOB, i, 0, i % 2, [], 0), []),
    msg.StepAwaited: lambda i: (msg.StepAwaited(i, JOB, i, [JOB], False), []),
    msg.OpenTransfer: lambda i: (msg.OpenTransfer(i, JOB, i, [0], bool(i % 2)), []),
    msg.FillTransfer: lambda i: (msg.FillTransfer(i, JOB, i, 0), []),
    msg.PauseJob: lambda i: (msg.PauseJob(i, JOB), []),
    msg.ResumeJob: lambda i: (msg.ResumeJob(i, JOB), []),
    msg.CloseJob: lambda i: (msg.CloseJob(i, JOB, True), []),
    msg.ChangeJob: lambda i: (msg.ChangeJob(i, JOB, i % 2, 1.0 + i % 3), []),
    msg.JobStats: lambda i: (msg.JobStats(i, JOB), []),
    msg.GetStatus: lambda i: (msg.GetStatus(i), []),
    msg.ExplainJob: lambda i: (msg.ExplainJob(i, JOB), []),
    msg.GetInterference: lambda i: (msg.GetInterference(i, "x"), []),
    msg.Reserve: lambda i: (msg.Reserve(i, f"{i:032x}", 0, 100, 60.0), []),
    msg.ConfirmReservation: lambda i: (msg.ConfirmReservation(i, f"{i:032x}", 60.0), []),
    msg.ReleaseReservation: lambda i: (msg.ReleaseReservation(i, f"{i:032x}"), []),
    msg.PlaceJob: lambda i: (msg.PlaceJob(i, f"{i:032x}", "x", 0, 1, 100, [], 0, True, 0), []),
    msg.JobNotStarted: lambda i: (msg.JobNotStarted(JOB, i, 0, "why"), []),
    msg.ProgramsKnown: lambda i: (msg.ProgramsKnown(JOB, [f"{i}"]), []),
    msg.GangSizes: lambda i: (msg.GangSizes(JOB, [i]), []),
    msg.DevicesVacated: lambda i: (msg.DevicesVacated(JOB, i), []),
    msg.PlacedJobEnded: lambda i: (msg.PlacedJobEnded(i, JOB, ""), []),
    msg.DrainNode: lambda i: (msg.DrainNode(i, f"n{i}", True), []),
    msg.ProfileJob: lambda i: (msg.ProfileJob(i, JOB, 0), []),
    msg.RecordTrace: lambda i: (msg.RecordTrace(i, 100.0), []),
    msg.PrepareSnapshot: lambda i: (msg.PrepareSnapshot(i, JOB), []),
    msg.TakeSnapshot: lambda i: (msg.TakeSnapshot(i, JOB, i, i, 1), [NOTES]),
    msg.FindKept: lambda i: (msg.FindKept(i, f"name {i}"), []),
    msg.ReadSnapshot: lambda i: (msg.ReadSnapshot(i, f"{i:032x}", [1]), []),
    msg.Replay: lambda i: (msg.Replay(i, JOB, 1, 1), [bytes(GENERATOR_BYTES)]),
}
OF_THE_ROUTER = {msg.Hello, msg.GrantedHello, msg.Heartbeat, msg.Goodbye, msg.OpenChannel}
FEW = 200  # objects more or less, by what is cached and counted


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """A session `s` whose JOB has a Program, and another user's `t`."""
    made = Daemon(Config(), writer=FakeWriter())
    made.connect("s", uid=1000)
    made.connect("t", uid=1001)
    made.open_job("s", JOB)
    made.load("s", JOB, samples.add_one(), new_buffers=[4, 100])
    made.turn()
    made.device.slow = True
    yield made
    writer = made.loop._snapshot_requests._writer
    made.close()
    writer.close()


def writer_of(daemon: Daemon) -> FakeWriter:
    return daemon.loop._snapshot_requests._writer


def send(daemon: Daemon, session: str, make: Sender, numbers: range) -> None:
    for at in range(numbers.start, numbers.stop, 50):
        for i in range(at, min(at + 50, numbers.stop)):
            message, frames = make(i)
            peer = daemon.router.open[session]
            daemon.router.arrivals.append(wire.Incoming(SessionId(session), peer, message, frames))
        daemon.turn()
    daemon.router.sent.clear()
    daemon.router.read = 0


def kept(daemon: Daemon) -> int:
    """Objects that exist, without the scheduler's history, which is a ring, and the fakes' own records."""
    daemon.loop.scheduler._state.history.clear()
    writer_of(daemon).asked.clear()
    gc.collect()
    return len(gc.get_objects())


@pytest.fixture
def _unlogged() -> Iterator[None]:
    """pytest keeps what is logged, if another test has set the level so low: that would count as the daemon's."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_every_message_is_in_a_flood():
    assert set(FLOODS) | OF_THE_ROUTER == msg.FROM_CLIENT


@pytest.mark.usefixtures("_unlogged")
@pytest.mark.parametrize("kind", FLOODS, ids=lambda kind: kind.__name__)
@pytest.mark.every(3)
def test_a_flood_of_one_kind_is_kept_within_bounds(daemon: Daemon, kind: type):
    """The first thousand may fill every queue there is; two thousand more must leave nothing."""
    send(daemon, "s", FLOODS[kind], range(1, 1001))
    before = kept(daemon)
    send(daemon, "s", FLOODS[kind], range(1001, 3001))
    assert kept(daemon) - before < FEW


def test_a_flood_is_forgotten_with_its_session(daemon: Daemon):
    for kind, make in FLOODS.items():
        if kind not in (msg.CloseJob, msg.PauseJob):
            send(daemon, "s", make, range(1, 101))
    daemon.disconnect("s")
    while daemon.device.work:
        daemon.device.finish()
        daemon.turn()
    requests_of = daemon.loop._snapshot_requests
    assert not daemon.loop.context.questions.waiting.items
    assert not daemon.loop.context.openings.waiting.items
    assert not daemon.loop.context.checks._waiting.items
    assert not daemon.loop._offload._waiting.items
    assert not requests_of._finds
    assert not requests_of._restoring._reads.items
    assert "s" not in [owner for _, owner in list(writer_of(daemon).owners)[1:]]


# ---- Users take turns.


def test_notes_of_one_user_do_not_lock_another_out(daemon: Daemon, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(snapshots, "MAX_NOTES_BYTES_PER_USER", 250)
    monkeypatch.setattr(snapshots, "MAX_NOTES_BYTES", 250)
    charge = daemon.loop._snapshot_requests._charge_notes
    charge(1000, 100)
    charge(1000, 100)
    with pytest.raises(AdmissionRefused, match="200 bytes of notes of your jobs"):
        charge(1000, 100)
    charge(1001, 100)  # in all there are too many, but none of this user's
    with pytest.raises(AdmissionRefused, match="100 bytes of notes of your jobs"):
        charge(1001, 1)


def test_reads_of_one_user_do_not_lock_another_out(daemon: Daemon):
    for i in range(snapshots.MAX_READS + 3):
        daemon.connect(f"s{i}", uid=1000)
        daemon.say(f"s{i}", msg.ReadSnapshot(1, f"{i:032x}", [1]))
    assert only(daemon.say("s", msg.ReadSnapshot(1, JOB, [1]))).code == "admission_refused"
    assert daemon.say("t", msg.ReadSnapshot(1, JOB, [1])) == []
    writer = writer_of(daemon)
    for _ in range(2):  # the one under way, and the next one in turn, which is of the other user
        writer.answer(UnknownJob("there is no whole snapshot of this job", "start the job anew"))
        daemon.turn()
    assert [asked["uid"] for _, asked, _ in writer.asked[:3]] == [1000, 1000, 1001]


def test_a_read_whose_session_ends_frees_the_place(daemon: Daemon):
    daemon.say("s", msg.ReadSnapshot(1, JOB, [1]))
    daemon.say("t", msg.ReadSnapshot(1, JOB, [1]))
    daemon.disconnect("s")
    writer = writer_of(daemon)
    writer.answer({"number": 1, "nbytes": 100, "notes": 10, "bad": []})
    daemon.turn()
    assert [(verb, asked.get("uid")) for verb, asked, _ in writer.asked] == [
        ("read", 1000),
        ("drop", None),
        ("read", 1001),
    ]


def test_the_offload_takes_users_in_turn_and_forgets_sessions():
    """The first piece of work keeps the thread until all others are submitted."""
    begun, go = threading.Event(), threading.Event()
    order: list[str] = []
    offload = Offload(lambda: None, lambda session, error: None)

    def submit(uid: int, session: str, name: str) -> None:
        offload.submit(uid, session, lambda: order.append(name), lambda _: None, lambda: order.append(f"no {name}"))

    offload.submit(1, "a", lambda: (begun.set(), go.wait()), lambda _: None, lambda: None)
    assert begun.wait(30)
    for name in ("a1", "a2", "a3"):
        submit(1, "a", name)
    submit(1, "gone", "g1")
    submit(2, "b", "b1")
    submit(2, "b", "b2")
    offload.forget(1, "gone")
    assert order == ["no g1"]
    go.set()
    offload.close()
    assert order[1:] == ["a1", "b1", "a2", "b2", "a3"]


def test_a_large_segment_of_a_session_that_ends_is_not_made(daemon: Daemon):
    begun, held = threading.Event(), threading.Event()
    daemon.loop._offload.submit(7, "x", lambda: (begun.set(), held.wait()), lambda _: None, lambda: None)
    assert begun.wait(30)
    made: list[Any] = []
    before = daemon.loop.segments.used_bytes
    daemon.loop.segments.create(1000, "s", AT_ONCE_BYTES + 1, "large", made.append)
    daemon.disconnect("s")
    held.set()
    assert [type(each) for each in made] == [DaemonGone]
    assert daemon.loop.segments.used_bytes <= before


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from("abc")), max_size=60),
    st.lists(st.integers(0, 3), max_size=60),
)
def test_nothing_waits_longer_than_one_round(puts: list[tuple[int, str]], more: list[int]):
    """Between two items of a user that waits, no other user has more than one."""
    queue: RoundRobin[int] = RoundRobin()
    for number, (uid, owner) in enumerate(puts):
        queue.add(uid, f"{uid}{owner}", number)
    assert sum(queue.count_of(uid) for uid in range(4)) == len(puts)
    since: dict[int, Counter[int]] = {uid: Counter() for uid in queue.items}
    taken = []
    while (found := queue.next()) is not None:
        uid, number = found
        taken.append(number)
        for other, seen in since.items():
            seen[uid] += 1
            assert other == uid or not queue.count_of(other) or seen[uid] <= 1
        since[uid] = Counter()
        if more:
            new = more.pop()
            queue.add(new, f"{new}a", len(puts) + len(taken))
            since.setdefault(new, Counter())
            if queue.count_of(new) == 1:
                since[new] = Counter()
    assert len(taken) == len(set(taken))
    assert not queue.items
