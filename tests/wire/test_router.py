"""An error of a client ends its own session and no other."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import msgpack
import pytest
import zmq

from gpumux.errors import ConfigError, EndpointBusy, ProtocolError
from gpumux.wire import listen as listening
from gpumux.wire import messages as m
from gpumux.wire import router as router_module
from gpumux.wire.codec import encode
from gpumux.wire.router import GOODBYE, Closed, Incoming, Opened, Router, _passes_of_a_round
from tests.wire.samples import payload_for
from tests.wire.world import HELLO, JOB, LOCAL_HELLO, WAIT_MS, World

STEP = m.Step(JOB, 1, 1, 0, [], 0)


def test_a_session_knows_its_peer(world, make_client):
    world.router.device = {"kind": "cpu"}
    client = make_client(world)
    opened = world.open(client, LOCAL_HELLO)
    assert (opened.peer.uid, opened.peer.gid, opened.peer.pid) == (os.getuid(), os.getgid(), os.getpid())
    assert opened.inline is False
    assert client.welcome.session == opened.session
    assert client.welcome.device == {"kind": "cpu"}
    assert client.welcome.channel.endswith("g.sock.chan")


def test_hello_again_gets_the_same_welcome(world, make_client):
    client = make_client(world)
    world.open(client)
    client.send(HELLO)
    client.send(STEP)
    world.next(Incoming)
    assert client.receive(m.Welcome) == client.welcome


def test_goodbye(world, make_client):
    client = make_client(world)
    opened = world.open(client)
    client.send(m.Goodbye())
    assert world.next(Closed) == Closed(opened.session, opened.peer, GOODBYE)
    assert not world.router.send(opened.session, m.Done(1))


def test_payload_frames_come_along(world, make_client):
    client = make_client(world)
    world.open(client)
    client.send(m.LoadProgram(3, JOB, 1, [64], [0]), (b"program" * 20_000,))
    assert world.next(Incoming).frames == [b"program" * 20_000]


def test_another_protocol_is_refused_naming_both(world, make_client):
    client = make_client(world)
    client.send_raw([msgpack.packb([1, 99, "from", "the", "future"])])
    world.until(lambda _: world.router.counters["stranger_version_mismatch"] == 1)
    refusal = client.refusal()
    assert refusal.code == "version_mismatch"
    assert "99" in refusal.message
    assert str(m.PROTOCOL_VERSION) in refusal.message


def test_a_client_of_protocol_1_is_refused_by_name(world, make_client):
    """As gpumux 0.1.0 says it, and in the form that it reads: tag 3, four fields."""
    client = make_client(world)
    client.send_raw([msgpack.packb([1, 1, "0.1.0", "client", 7, "2.13.0", False])])
    world.until(lambda _: world.router.counters["stranger_version_mismatch"] == 1)
    assert client.socket.poll(WAIT_MS)
    tag, ref, code, message, remedy = msgpack.unpackb(client.socket.recv_multipart()[0])
    assert (tag, ref, code) == (3, 0, "version_mismatch")
    assert message == "the client speaks protocol 1, the daemon speaks protocol 2"
    assert remedy == "install the same gpumux version on both sides"


@pytest.mark.parametrize(
    ("hello", "code"),
    [
        (m.Hello(m.PROTOCOL_VERSION, "x", "king", 1, "", False), "protocol"),
        (STEP, "daemon_gone"),
        (m.Heartbeat(1.0), "daemon_gone"),
    ],
)
def test_no_session_without_a_proper_hello(world, make_client, hello, code):
    client = make_client(world)
    client.send(hello)
    world.until(lambda _: sum(world.router.counters.values()) == 1)
    assert client.refusal().code == code
    assert world.router.session_count == 0


def test_limits_on_sessions(make_world, make_client):
    world = make_world(max_sessions_per_user=2)
    for _ in range(2):
        world.open(make_client(world))
    third = make_client(world)
    third.send(HELLO)
    world.until(lambda _: world.router.counters["stranger_admission_refused"] == 1)
    assert third.refusal().code == "admission_refused"


@pytest.mark.parametrize(
    "frames", [[b"\xc1"], encode(m.StepDone(JOB, 1, 0.0, 0.0, 0.0, 0)), [*encode(STEP), b"surplus"]], ids=str
)
def test_a_malformed_message_ends_its_session_only(world, make_client, frames):
    good, bad = make_client(world), make_client(world)
    kept, lost = world.open(good), world.open(bad)
    bad.send_raw(frames)
    assert world.next(Closed).session == lost.session
    assert bad.refusal().code == "protocol"
    world.serves(good, kept.session, 1)


def test_thousands_of_mutated_messages(make_world, make_client):
    """4,000 of them, from many connections, inside sessions and outside, while another works."""
    world = make_world(burst_sessionless=1e9)
    good = make_client(world)
    session = world.open(good).session
    chance = random.Random(20)
    seeds = [
        HELLO, STEP, m.OpenJob(1, JOB, "n", 0, 1.0, 1.1, None, 2, 0), m.LoadProgram(1, JOB, 1, [1, 2, 3], [0, 1, 2]),
        m.OpenTransfer(1, JOB, 1, [1, 2], True), m.CloseJob(1, JOB, False), m.GetStatus(1), m.Heartbeat(1.0),
    ]  # fmt: skip
    sent = 0
    for round_number in range(20):
        bad = make_client(world)
        if round_number % 2:
            world.open(bad)
        for _ in range(200):
            seed = chance.choice(seeds)
            frames = [bytearray(frame) for frame in encode(seed, payload_for(seed))]
            for _ in range(chance.randint(1, 5)):
                frame = chance.choice(frames)
                if frame:
                    frame[chance.randrange(len(frame))] = chance.randrange(256)
            if chance.random() < 0.1:
                frames = [*frames[: chance.randrange(len(frames))], bytearray(chance.randbytes(chance.randrange(50)))]
            bad.send_raw([bytes(frame) for frame in frames])
            sent += 1
        world.digest(bad, 1000 + round_number)
        world.serves(good, session, round_number)
        bad.close()
    assert sent == 4_000
    assert sum(world.router.counters.values()) > 3_600  # a few mutations leave a valid message


def test_a_flood_is_cut_off_and_the_others_go_on(make_world, make_client):
    world = make_world(messages_per_s=10.0, burst_messages=50.0)
    good, flooder = make_client(world), make_client(world)
    kept, lost = world.open(good), world.open(flooder)
    monitor = flooder.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    for _ in range(51):
        flooder.send(STEP)
    found = world.until(lambda found: any(isinstance(a, Closed) for a in found))
    assert [a.session for a in found if isinstance(a, Closed)] == [lost.session]
    assert sum(isinstance(a, Incoming) for a in found) == 50
    assert monitor.poll(20_000), "the connection was not cut"
    flooder.socket.disable_monitor()
    monitor.close()
    world.serves(good, kept.session, 1)


def test_bytes_are_limited_too(make_world, make_client):
    world = make_world(bytes_per_s=1000.0, burst_bytes=50_000.0)
    client = make_client(world)
    opened = world.open(client)
    client.send(m.LoadProgram(1, JOB, 1, [], []), (b"x" * 60_000,))
    assert world.next(Closed).session == opened.session


def test_strangers_are_metered_by_user(make_world, make_client):
    world = make_world(burst_sessionless=5.0, sessionless_per_s=1.0)
    client = make_client(world, configure=lambda s: s.setsockopt(zmq.RECONNECT_IVL, -1))
    monitor = client.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    for _ in range(20):
        client.send_raw([b"noise"])
    world.until(lambda _: world.router.counters["flood"] > 0)
    assert world.router.counters["stranger_protocol"] == 5
    assert monitor.poll(20_000)
    client.socket.disable_monitor()
    monitor.close()
    for _ in range(20):  # what came before the cut counts as well, and would leave too few tokens for the next client
        world.router.receive(world.now)
    world.now += 60
    world.router.expire(world.now)  # the meter is full again, so it is forgotten
    world.open(make_client(world))


def test_an_oversized_frame_costs_its_connection(make_world, make_client):
    world = make_world(max_message_bytes=10_000)
    good, bad = make_client(world), make_client(world)
    kept = world.open(good)
    world.open(bad)
    monitor = bad.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    bad.send(m.LoadProgram(1, JOB, 1, [], []), (b"x" * 20_000,))
    assert monitor.poll(20_000)
    bad.socket.disable_monitor()
    monitor.close()
    world.serves(good, kept.session, 1)


def test_one_pass_takes_one_message_of_a_socket(world, make_client):
    client = make_client(world)
    world.open(client)
    for _ in range(25):
        client.send(STEP)
    assert [len(world.until(bool)) for _ in range(25)] == [1] * 25


def test_a_client_that_does_not_read_is_dropped(make_world, make_client):
    world = make_world(send_queue=10)
    good, lazy = make_client(world), make_client(world, configure=lambda s: s.setsockopt(zmq.RCVHWM, 1))
    kept, lost = world.open(good), world.open(lazy)
    report = m.Report(1, {"text": "x" * 16_000})
    sent = 0
    while world.router.send(lost.session, report):
        sent += 1
        assert sent < 10_000
    assert world.router.next_deadline(world.now) == world.now  # Closed waits: don't sleep
    assert [a.session for a in world.router.expire(world.now)] == [lost.session]
    world.serves(good, kept.session, 1)


def test_a_vanished_client_is_found_when_written_to(world, make_client):
    client = make_client(world)
    opened = world.open(client)
    client.close()
    for _ in range(100_000):  # ZeroMQ's own thread has yet to see the connection end
        if not world.router.send(opened.session, m.Done(1)):
            break
        threading.Event().wait(0.001)
    assert world.next(Closed).session == opened.session


SPOOF = """
import sys, zmq
from gpumux.wire import messages as m
from gpumux.wire.codec import decode, encode
with zmq.Context() as context, context.socket(zmq.DEALER) as sock:
    sock.setsockopt(zmq.ROUTING_ID, b"victim")
    sock.setsockopt(zmq.LINGER, 0)
    sock.connect(sys.argv[1])
    sock.send_multipart(encode(m.Step("0" * 32, 666, 1, 0, [], 0)))
    assert sock.poll(20000)
    print(decode(sock.recv_multipart())[0].code)
"""


def test_another_process_can_not_speak_for_a_session(world, make_client):
    """It takes the routing id of a connection that ended. The router looks at the kernel's pid."""
    victim = make_client(world, routing_id=b"victim")
    opened = world.open(victim)
    victim.close()
    with subprocess.Popen(
        [sys.executable, "-c", SPOOF, world.router.addresses[0]], stdout=subprocess.PIPE, text=True
    ) as spoofer:
        found = world.until(lambda found: any(isinstance(a, Closed) for a in found))
        assert not [a for a in found if isinstance(a, Incoming)]
        assert found[-1].session == opened.session
        assert world.router.counters["impostor"] == 1
        assert spoofer.communicate(timeout=20)[0].strip() == "daemon_gone"


def test_leases_on_a_virtual_clock(world, make_client):
    quiet, lively = make_client(world), make_client(world)
    lost, kept = world.open(quiet), world.open(lively)
    lease = world.router.limits.lease_s
    world.now += lease - 0.5
    lively.send(m.Heartbeat(0.0))
    lively.send(STEP)
    world.next(Incoming)
    assert world.router.expire(world.now) == []
    world.now += 0.5
    assert world.router.expire(world.now) == [Closed(lost.session, lost.peer, world_reason(lease))]
    assert quiet.refusal().code == "daemon_gone"
    world.serves(lively, kept.session, 2)


def world_reason(lease: float) -> str:
    return f"nothing was heard from this client for {lease:g} s"


def test_a_daemon_that_fell_behind_does_not_blame_its_clients(world, make_client, monkeypatch: pytest.MonkeyPatch):
    client = make_client(world)
    opened = world.open(client)
    with monkeypatch.context() as patched:
        patched.setattr(world.router.sockets, "unread", lambda: True)
        world.now += 1000
        world.router.receive(world.now)
        assert world.router.expire(world.now) == []
    world.serves(client, opened.session, 1)


def test_others_that_send_all_the_time_keep_no_silent_client_and_no_stranger(
    world, make_client, monkeypatch: pytest.MonkeyPatch
):
    """Once something of every connection has been read twice, what it has sent was read."""
    quiet = make_client(world)
    opened = world.open(quiet)
    (listening,) = world.router.sockets.listening
    round_passes = _passes_of_a_round(world.router.limits)
    monkeypatch.setattr(world.router.sockets, "unread", lambda: True)
    world.router.receive(world.now)
    world.now += world.router.limits.lease_s
    assert world.router.expire(world.now) == []
    reads, passes, found = listening.connections.reads, 0, []
    while not found:
        world.router.receive(world.now)
        passes += 1
        world.now += world.router.limits.heartbeat_s
        found = world.router.expire(world.now)
        assert passes <= 2 * round_passes
    assert found == [Closed(opened.session, opened.peer, world_reason(world.router.limits.lease_s))]
    assert passes > round_passes, "a message that it sent before may have been the last to be read"
    assert listening.connections.reads == reads + 2


def test_a_round_is_more_than_libzmq_needs_to_read_of_all(make_world, make_client):
    """One client always has messages waiting; a single one of another's comes within a round."""
    world = make_world(max_sessions=4)
    loud, other = make_client(world), make_client(world)
    world.open(loud)
    session = world.open(other).session
    passes = _passes_of_a_round(world.router.limits)
    for _ in range(passes):
        loud.send(STEP)
    other.send(m.GetStatus(1))
    found: list = []
    for _ in range(passes):  # a pass that finds nothing, because libzmq's thread is late, is one of them
        found += world.until(bool)
        if any(a.session == session for a in found):
            break
    assert any(a.session == session for a in found)


def test_a_bug_is_about_the_session_that_was_looked_after(world, make_client, monkeypatch: pytest.MonkeyPatch):
    good, bad = make_client(world), make_client(world)
    kept, hurt = world.open(good), world.open(bad)

    def fails(*_: object) -> None:
        raise ZeroDivisionError

    bad.send(STEP)
    world._poller.poll(WAIT_MS)
    with monkeypatch.context() as patched:
        patched.setattr(router_module, "decode", fails)
        with pytest.raises(ZeroDivisionError):
            world.until(bool)
    assert world.router.at == hurt.session
    world.serves(good, kept.session, 1)


def test_a_bug_about_a_message_of_no_session_is_passed_on(world, make_client, monkeypatch: pytest.MonkeyPatch):
    good, bad = make_client(world), make_client(world)
    kept, found = world.open(good), []

    def fails(*_: object) -> None:
        raise ZeroDivisionError

    world.router.failed = found.append
    bad.send(HELLO)
    with monkeypatch.context() as patched:
        patched.setattr(router_module, "check_hello", fails)
        while not found:
            assert world._poller.poll(WAIT_MS)
            assert world.router.receive(world.now) == []
    assert [type(error) for error in found] == [ZeroDivisionError]
    world.serves(good, kept.session, 1)


def test_heartbeats_are_sent_when_due(world, make_client):
    client = make_client(world)
    world.open(client)
    world.router.expire(world.now)
    due = world.router.next_deadline(world.now)
    assert world.now < due <= world.now + world.router.limits.heartbeat_s
    world.now += world.router.limits.heartbeat_s
    world.router.expire(world.now)
    assert client.receive(m.Heartbeat).sent == world.now


def test_close_says_leaving(make_world, make_client, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(listening, "_LINGER_MS", WAIT_MS)  # libzmq's thread may not get its turn within the usual time
    world = make_world()
    client = make_client(world)
    world.open(client)
    world.router.close("maintenance")
    assert client.receive(m.Leaving).reason == "maintenance"
    assert {path.suffix for path in runtime_dir.iterdir()} == {".lock"}
    world.router.close()


def test_close_session(world, make_client):
    client = make_client(world)
    opened = world.open(client)
    world.router.close_session(opened.session, ProtocolError("enough", "stop that"))
    assert client.refusal() == m.Refusal(0, "protocol", "enough", "stop that")
    assert world.next(Closed).reason == "enough"


def test_a_message_that_does_not_fit_the_protocol_is_our_error(world, make_client):
    opened = world.open(make_client(world))
    with pytest.raises(ProtocolError):
        world.router.send(opened.session, m.StepDone("short", 1, 0.0, 0.0, 0.0, 0))
    assert world.router.session_count == 1


def test_one_daemon_an_endpoint(world, runtime_dir: Path):
    with pytest.raises(EndpointBusy, match=str(os.getpid())):
        Router([f"ipc://{runtime_dir}/g.sock"], runtime_dir)


def test_several_daemons_share_a_directory(world, make_client, runtime_dir: Path):
    """Each has channels of its own: a client's nonce would mean nothing to the other one."""
    router = Router([f"ipc://{runtime_dir}/h.sock"], runtime_dir)
    other = World(router)
    try:
        assert world.router.sockets.channels.path == runtime_dir / "g.sock.chan"
        assert router.sockets.channels.path == runtime_dir / "h.sock.chan"
        for each in (world, other, world):
            assert isinstance(each.open(make_client(each)), Opened)
        assert (world.router.session_count, router.session_count) == (2, 1)
    finally:
        router.close()


@pytest.mark.leaves_runtime_files
def test_a_killed_daemon_leaves_nothing_in_the_way(runtime_dir: Path, make_client):
    code = f"""
import os
from pathlib import Path
from gpumux.wire.router import Router
Router(["ipc://{runtime_dir}/g.sock"], Path("{runtime_dir}"))
os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert (runtime_dir / "g.sock").is_socket()
    router = Router([f"ipc://{runtime_dir}/g.sock"], runtime_dir)
    world = World(router)
    assert isinstance(world.open(make_client(world)), Opened)
    router.close()


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:*", "ipc://relative.sock", "udp://x:1"])
def test_endpoints_that_are_refused(endpoint: str, runtime_dir: Path):
    with pytest.raises(ConfigError):
        Router([endpoint], runtime_dir)


def test_a_file_in_the_way_is_not_removed(runtime_dir: Path):
    path = runtime_dir / "g.sock"
    path.write_text("precious")
    with pytest.raises(ConfigError, match="no socket"):
        Router([f"ipc://{path}"], runtime_dir)
    assert path.read_text() == "precious"
    path.unlink()
