"""A session against a live router: calls, posts, waits, threads, and every way it can end."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq

from gpumux.client.session import Session
from gpumux.client.transport import Connection, handshake, hello
from gpumux.errors import (
    AdmissionRefused,
    ConfigError,
    DaemonGone,
    GpumuxError,
    ProtocolError,
    Refused,
    VersionMismatch,
)
from gpumux.wire import messages as m
from gpumux.wire.codec import encode
from gpumux.wire.limits import Limits
from gpumux.wire.peers import ClientCurve, ServerCurve, make_keys
from gpumux.wire.router import Incoming, Router
from gpumux.wire.shared_memory import Segment
from tests.wire.world import JOB, serving

LONG = 60.0  # seconds; a bound for a broken test


def answer(router: Router, arrival: Incoming) -> None:
    """A daemon of a few lines. Its verbs are abused to make it do what a test needs."""
    session, message = arrival.session, arrival.message
    match message:
        case m.GetStatus():
            router.send(session, m.Report(message.ref, {"pid": arrival.peer.pid}))
        case m.JobStats():
            with Segment.create(8192) as segment:
                segment.view()[:4] = b"data"
                router.send_segment(session, 7, segment.fd, segment.nbytes)
            router.send(session, m.Report(message.ref, {}))
        case m.Step():
            router.send(session, m.StepDone(message.job, message.step, 0.0, 0.0, 0.0, 0))
        case m.OpenJob():
            router.send(session, m.Refusal(message.ref, "admission_refused", "full", "wait"))
        case m.FillTransfer():
            router.send(session, m.Refusal(message.ref, "unknown_job", "no such transfer", ""))
        case m.LoadProgram():
            pass  # never answered
        case m.CloseJob():
            router.send(session, m.Leaving("maintenance"))
        case m.PauseJob():
            router.close_session(session, ProtocolError("we are done with you"))


@pytest.fixture
def endpoint(runtime_dir: Path) -> Iterator[str]:
    with serving(runtime_dir, answer) as (endpoint, _):
        yield endpoint


@pytest.fixture
def session(endpoint: str) -> Iterator[Session]:
    with Session.connect(endpoint, LONG) as session:
        yield session


def test_a_call_is_answered(session: Session):
    assert session.welcome.protocol == m.PROTOCOL_VERSION
    assert not session.inline
    reply, frames = session.call(m.GetStatus(0))
    assert reply.body == {"pid": os.getpid()}
    assert frames == []
    assert session.dead is None


def test_a_refusal_is_its_typed_error_and_the_session_lives(session: Session):
    with pytest.raises(AdmissionRefused, match="full — wait"):
        session.call(m.OpenJob(0, JOB, "n", 0, 1.0, 1.1, None, 2, 0))
    assert session.call(m.GetStatus(0))


def test_no_answer_in_time(session: Session):
    with pytest.raises(DaemonGone, match="did not answer LoadProgram"):
        session.call(m.LoadProgram(0, JOB, 1, [], []), [b"p"], timeout=0.01)
    assert session.call(m.GetStatus(0))


def test_a_caller_hears_now_and_then_that_there_is_no_answer_yet(runtime_dir: Path):
    heard: list[None] = []
    with serving(runtime_dir, answer) as (endpoint, frozen), Session.connect(endpoint, LONG) as session:
        frozen.set()

        def meanwhile() -> float:
            heard.append(None)
            if len(heard) == 3:
                frozen.clear()
                return LONG
            return 0.01

        reply, _ = session.call(m.GetStatus(0), timeout=None, meanwhile=meanwhile)
    assert reply.body == {"pid": os.getpid()}
    assert len(heard) == 3


def test_posts_come_back_to_the_jobs_handler(session: Session):
    done: list[Any] = []
    session.register(JOB, lambda message, frames: done.append(message))
    for step in range(200):
        session.post(m.Step(JOB, step, 1, 0, [], 0))
    assert session.wait(lambda: len(done) == 200, LONG)
    assert [message.step for message in done] == list(range(200))
    session.unregister(JOB)
    session.post(m.Step(JOB, 200, 1, 0, [], 0))
    session.call(m.GetStatus(0))  # answered after the step
    assert len(done) == 200


def test_the_refusal_of_a_posted_request_finds_its_job(session: Session):
    got: list[Any] = []
    session.register(JOB, lambda message, frames: got.append(message))
    session.post(m.FillTransfer(0, JOB, 1, 0))
    assert session.wait(lambda: bool(got), LONG)
    assert got[0].code == "unknown_job"


def test_a_handler_may_post_but_not_wait(session: Session):
    seen: list[int] = []
    errors: list[BaseException] = []

    def handler(message: m.StepDone, frames: list[bytes]) -> None:
        seen.append(message.step)
        if message.step < 5:
            session.post(m.Step(JOB, message.step + 1, 1, 0, [], 0))
        try:
            session.wait(lambda: True)
        except GpumuxError as error:
            errors.append(error)

    session.register(JOB, handler)
    session.post(m.Step(JOB, 0, 1, 0, [], 0))
    assert session.wait(lambda: 5 in seen, LONG)
    assert seen == [0, 1, 2, 3, 4, 5]
    assert len(errors) == 6


def test_a_step_too_long_for_a_packet(session: Session):
    done: list[Any] = []
    session.register(JOB, lambda message, frames: done.append(message.step))
    session.post(m.Step(JOB, 0, 1, 0, [0.5] * 20_000, 0))
    session.post(m.Step(JOB, 1, 1, 0, [], 0))
    assert session.wait(lambda: len(done) == 2, LONG)
    assert done == [0, 1]


def test_channel_and_zeromq_keep_their_order(runtime_dir: Path):
    """A request goes behind the steps posted before it, and JobEnded behind the answers before it."""
    came: list[str] = []

    def record(router: Router, arrival: Incoming) -> None:
        message = arrival.message
        came.append(type(message).__name__)
        if isinstance(message, m.Step):
            router.send(arrival.session, m.StepDone(message.job, message.step, 0.0, 0.0, 0.0, 0))
            if message.step % 2:
                router.send(arrival.session, m.JobEnded(message.job, "", "", ""))
        else:
            router.send(arrival.session, m.Done(message.ref))

    heard: list[str] = []
    with serving(runtime_dir, record) as (endpoint, _), Session.connect(endpoint, LONG) as session:
        session.register(JOB, lambda message, frames: heard.append(type(message).__name__))
        for turn in range(200):
            session.post(m.Step(JOB, 2 * turn, 1, 0, [], 0))
            session.post(m.Step(JOB, 2 * turn + 1, 1, 0, [], 0))
            session.call(m.ResumeJob(0, JOB))
            assert session.wait(lambda expected=3 * turn + 3: len(heard) >= expected, LONG)
    assert came == ["Step", "Step", "ResumeJob"] * 200
    assert heard == ["StepDone", "StepDone", "JobEnded"] * 200


def test_threads_that_send_into_a_full_channel(runtime_dir: Path):
    """The daemon stops reading for a while; every step arrives once, in its thread's order."""
    with serving(runtime_dir, answer) as (endpoint, frozen), Session.connect(endpoint, LONG) as session:
        done: dict[str, list[int]] = {}
        jobs = [f"{number:032x}" for number in range(3)]
        for job in jobs:
            done[job] = []
            session.register(job, lambda message, frames: done[message.job].append(message.step))
        frozen.set()
        thaw = threading.Timer(0.3, frozen.clear)
        thaw.start()

        def post(job: str) -> None:
            for number in range(400):
                session.post(m.Step(job, number, 1, 0, [0.5] * 100, 0))

        threads = [threading.Thread(target=post, args=(job,)) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG)
        thaw.join()
        assert session.wait(lambda: all(len(numbers) == 400 for numbers in done.values()), LONG)
        assert all(numbers == list(range(400)) for numbers in done.values())


def test_wait_gives_up_in_time_and_sees_what_came(session: Session):
    assert session.wait(lambda: False, 0.0) is False
    assert session.wait(lambda: False, 0.01) is False
    assert session.wait(lambda: True) is True


def test_pump_takes_what_is_there(session: Session):
    done: list[Any] = []
    session.register(JOB, lambda message, frames: done.append(message))
    session.post(m.Step(JOB, 1, 1, 0, [], 0))
    while not done:
        session.pump()


def test_a_segment_is_mapped(session: Session):
    session.call(m.JobStats(0, JOB))
    view = session.segment(7, 8192)
    assert bytes(view[:4]) == b"data"
    assert view.nbytes == 8192
    view.release()
    session.release_segment(7)
    session.release_segment(7)
    with pytest.raises(ProtocolError, match="announced and not passed"):
        session.segment(8, 4096)


def test_a_control_session_takes_no_segments(endpoint: str):
    with Session.connect(endpoint, LONG, role="control") as session:
        assert session.call(m.GetStatus(0))
        with pytest.raises(ConfigError):
            session.segment(1, 4096)


def test_a_payload_the_daemon_would_not_take(runtime_dir: Path):
    limits = Limits(max_message_bytes=1000)
    with serving(runtime_dir, answer, limits=limits) as (endpoint, _), Session.connect(endpoint, LONG) as session:
        with pytest.raises(ProtocolError, match="1001 bytes, the daemon takes 1000"):
            session.post(m.LoadProgram(0, JOB, 1, [], []), [b"x" * 1001])
        assert session.call(m.GetStatus(0))


def test_many_threads_at_once(session: Session):
    """Each waits for its own steps and makes calls in between; no thread gets answers meant for another."""
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            job = f"{number:032x}"
            done: list[int] = []
            session.register(job, lambda message, frames: done.append(message.step))
            for step in range(60):
                session.post(m.Step(job, step, 1, 0, [], 0))
                assert session.wait(lambda expected=step: len(done) > expected, LONG)
                if step % 10 == number:
                    assert session.call(m.GetStatus(0), timeout=LONG)[0].body == {"pid": os.getpid()}
            assert done == list(range(60))
        except BaseException as error:  # noqa: BLE001 - handed to the test's thread
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert session._pump._leader is None


def test_a_sender_wakes_the_leader_for_what_it_received(session: Session):
    """One thread sleeps as leader for a message another thread's send happens to take in."""
    done: list[int] = []
    session.register(JOB, lambda message, frames: done.append(message.step))
    for target in range(50):
        waiter = threading.Thread(target=session.wait, args=(lambda n=target: n in done, LONG))
        waiter.start()
        session.post(m.Step(JOB, target, 1, 0, [], 0))
        session.call(m.GetStatus(0))
        waiter.join(LONG)
        assert not waiter.is_alive()


def test_leaving_ends_everything_at_once(session: Session):
    ended: list[BaseException] = []

    def wait() -> None:
        try:
            session.wait(lambda: False)
        except DaemonGone as error:
            ended.append(error)

    waiters = [threading.Thread(target=wait) for _ in range(3)]
    for waiter in waiters:
        waiter.start()
    session.post(m.CloseJob(0, JOB, True))
    for waiter in waiters:
        waiter.join(LONG)
    assert len(ended) == 3
    assert "maintenance" in str(ended[0])
    assert isinstance(session.dead, DaemonGone)
    for verb in (
        lambda: session.call(m.GetStatus(0)),
        lambda: session.post(m.Heartbeat(0.0)),
        lambda: session.wait(lambda: False, 0.0),
        session.pump,
        lambda: session.segment(1, 1),
    ):
        with pytest.raises(DaemonGone, match="maintenance"):
            verb()
    assert session.wait(lambda: True), "what has arrived can still be looked at"


def test_a_session_the_daemon_ends_raises_what_it_said(session: Session):
    session.post(m.PauseJob(0, JOB))
    with pytest.raises(ProtocolError, match="done with you"):
        session.wait(lambda: False, LONG)


DAEMON = """
import sys, zmq
from pathlib import Path
from gpumux.wire.limits import Limits
from gpumux.wire.router import Router
directory = Path(sys.argv[1])
router = Router([f"ipc://{directory}/g.sock"], directory, Limits(heartbeat_s=120.0, lease_s=240.0))
print("ready", flush=True)
poller = zmq.Poller()
for fd in router.fds():
    poller.register(fd, zmq.POLLIN)
while True:
    poller.poll()
    router.receive(0.0)
"""


@pytest.mark.leaves_runtime_files
@pytest.mark.parametrize("quick", [False, True])
def test_a_killed_daemon_is_noticed_at_once(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch, quick: bool):
    send = Connection.send

    def send_and_let_it_be_answered(connection: Connection, parts: Sequence[bytes | memoryview]) -> None:
        send(connection, parts)
        connection._socket.poll(LONG * 1000)

    command = [sys.executable, "-c", DAEMON, str(runtime_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as daemon:
        assert daemon.stdout is not None
        daemon.stdout.readline()  # it listens
        with monkeypatch.context() as patch:
            if quick:  # the handshake never waits, as there is an answer when it looks
                patch.setattr(Connection, "send", send_and_let_it_be_answered)
            session = Session.connect(f"ipc://{runtime_dir}/g.sock", LONG)
        with session:
            assert session.welcome.heartbeat_s > LONG  # neither the lease nor the background thread tells
            killer = threading.Timer(0.0, daemon.kill)
            killer.start()
            with pytest.raises(DaemonGone, match="is gone"):
                session.wait(lambda: False, LONG)
            killer.join()
        daemon.wait()


def test_a_daemon_that_hangs_loses_its_clients(runtime_dir: Path):
    limits = Limits(heartbeat_s=0.1, lease_s=LONG)
    with (
        serving(runtime_dir, answer, limits=limits) as (endpoint, frozen),
        Session.connect(endpoint, LONG) as session,
    ):
        assert session.call(m.GetStatus(0))
        frozen.set()
        session.welcome = replace(session.welcome, lease_s=0.5)  # not before: a busy machine hangs, too
        with pytest.raises(DaemonGone, match="silent"):
            session.wait(lambda: False, LONG)


def test_heartbeats_keep_an_idle_session(runtime_dir: Path):
    """The background thread alone says so again and again, and hears the daemon. (What that does to a lease:
    tests/wire/test_router.py, on a clock that no busy machine can turn.)"""
    limits = Limits(heartbeat_s=0.02, lease_s=LONG)
    sent, heard, pause = set[float](), set[float](), threading.Event()
    with serving(runtime_dir, answer, limits=limits) as (endpoint, _), Session.connect(endpoint, LONG) as session:
        while min(len(sent), len(heard)) < 20:
            sent.add(session._pump.sent)
            heard.add(session._pump.heard)
            pause.wait(0.01)
        assert session.dead is None
        assert session.call(m.GetStatus(0))


def test_no_daemon_there(runtime_dir: Path):
    with pytest.raises(DaemonGone, match="start gpumux serve"):
        Session.connect(f"ipc://{runtime_dir}/nobody.sock", timeout=0.2)


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        ([b"\x92\x02\x07"], VersionMismatch),
        (encode(m.Refusal(0, "version_mismatch", "this side speaks protocol 9", "")), VersionMismatch),
        (encode(m.Done(1)), ProtocolError),
        ([b"noise"], ProtocolError),
    ],
    ids=["welcome of protocol 7", "refusal", "another message", "noise"],
)
def test_an_unfitting_daemon(runtime_dir: Path, reply: list[bytes], error: type[GpumuxError]):
    with zmq.Context() as context, context.socket(zmq.ROUTER) as fake:
        fake.bind(f"ipc://{runtime_dir}/g.sock")
        raised: list[BaseException] = []

        def connect() -> None:
            try:
                Session.connect(f"ipc://{runtime_dir}/g.sock", LONG).close()
            except GpumuxError as problem:
                raised.append(problem)

        client = threading.Thread(target=connect)
        client.start()
        identity, _ = fake.recv_multipart()
        fake.send_multipart([identity, *reply])
        client.join()
        fake.close(linger=0)
    assert type(raised[0]) is error
    (runtime_dir / "g.sock").unlink()


@pytest.mark.parametrize(
    ("came", "error"),
    [(encode(m.Refusal(0, "admission_refused", "full", "wait")), AdmissionRefused), (None, DaemonGone)],
)
def test_what_a_daemon_said_before_the_connection_broke_counts(came: Any, error: type[GpumuxError]):
    """Also if it came between the look for a message and the look whether the connection is there."""

    class Broken:
        def __init__(self) -> None:
            self.said: list[Any] = []

        def send(self, parts: Any) -> None:
            pass

        def receive(self) -> Any:
            return self.said.pop(0) if self.said else None

        def lost(self) -> GpumuxError:
            self.said.append(came)
            return DaemonGone("it is gone")

    broken: Any = Broken()
    with pytest.raises(error):
        handshake(broken, hello("client", False), LONG)


def test_tcp_with_keys(tmp_path: Path, runtime_dir: Path):
    daemon, alice, mallory = (make_keys(tmp_path / name, name) for name in ("daemon", "alice", "mallory"))
    (tmp_path / "clients").mkdir()
    (tmp_path / "clients/alice.key").write_text(alice[0].read_text())
    curve = ServerCurve(daemon[1], tmp_path / "clients")
    router = Router(["tcp://127.0.0.1:*"], runtime_dir, curve=curve)
    address = router.addresses[0]
    stop = threading.Event()

    def run() -> None:
        poller = zmq.Poller()
        for fd in router.fds():
            poller.register(fd, zmq.POLLIN)
        while not stop.is_set():
            poller.poll(20)
            for arrival in router.receive(0.0):
                if isinstance(arrival, Incoming):
                    answer(router, arrival)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        with pytest.raises(ConfigError, match="CURVE"):
            Session.connect(address, LONG)
        with pytest.raises(Refused, match="key"):
            Session.connect(address, LONG, curve=ClientCurve(mallory[1], daemon[0]))
        with Session.connect(address, LONG, curve=ClientCurve(alice[1], daemon[0])) as session:
            assert session.inline
            assert session.call(m.GetStatus(0))[0].body == {"pid": -1}
    finally:
        stop.set()
        thread.join()
        router.close()


@pytest.fixture
def interrupts() -> Iterator[list[int]]:
    """One entry for each time SIGINT's handler ran; it then raises KeyboardInterrupt. Without the collector:
    Python drops what a handler raises in the middle of a destructor."""
    ran: list[int] = []

    def handler(number: int, frame: Any) -> None:
        ran.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handler)
    gc.collect()
    gc.disable()
    yield ran
    gc.enable()
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_leaves_the_session_whole(session: Session, interrupts: list[int]):
    """Interrupts at any moment of many waits: none is lost, no lock stays held, no message is lost."""
    done: set[int] = set()
    session.register(JOB, lambda message, frames: done.add(message.step))
    me = threading.main_thread().ident
    assert me is not None
    for step in range(200):
        sender = threading.Timer(0.0001 * (step % 10), signal.pthread_kill, (me, signal.SIGINT))
        session.post(m.Step(JOB, step, 1, 0, [], 0))
        try:
            sender.start()
            for _ in range(2000):  # it comes in here, however long the machine takes
                session.wait(lambda: False, 0.01)
        except KeyboardInterrupt:
            pass
        sender.join()
        assert len(interrupts) == step + 1
    posted_last = threading.Thread(target=lambda: session.post(m.Step(JOB, 200, 1, 0, [], 0)))
    posted_last.start()  # another thread can take the lock
    posted_last.join(LONG)
    assert session.wait(lambda: 200 in done, LONG)
    assert done == set(range(201))
    assert session._pump._leader is None


def test_a_forked_child_is_told_so(session: Session):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            session.call(m.GetStatus(0))
        except GpumuxError as error:
            os.write(writer, str(error).encode())
        channel = session._connection.channel
        assert channel is not None
        os.write(writer, f" channel {channel.fileno()}".encode())
        session.close()
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    said = os.read(reader, 1000).decode()
    os.close(reader)
    assert f"belongs to process {os.getpid()}" in said
    assert "channel -1" in said, "the daemon would not see the parent's end"
    assert session.call(m.GetStatus(0)), "the parent's session is none the worse"


def test_close_ends_waits_and_is_idempotent(endpoint: str):
    session = Session.connect(endpoint, LONG)
    ended: list[BaseException] = []
    waiting = threading.Event()

    def predicate() -> bool:
        waiting.set()
        return False

    def wait() -> None:
        try:
            session.wait(predicate)
        except DaemonGone as error:
            ended.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    assert waiting.wait(LONG)
    session.close()
    session.close()
    waiter.join(LONG)
    assert "closed" in str(ended[0])
    with pytest.raises(DaemonGone, match="closed"):
        session.call(m.GetStatus(0))


def test_views_survive_close(session: Session):
    session.call(m.JobStats(0, JOB))
    view = session.segment(7, 8192)
    session.close()
    assert bytes(view[:4]) == b"data"
    del view
    gc.collect()
