"""The local channel: what goes over it, its order beside ZeroMQ, its limits, and every way one can end."""

from __future__ import annotations

import array
import os
import random
import socket
import threading
from collections.abc import Iterator

import msgpack
import pytest

from gpumux.errors import ProtocolError
from gpumux.wire import messages as m
from gpumux.wire.channel import MORE, PACKET, ClientChannel, DaemonChannel
from gpumux.wire.router import GOODBYE, MAX_DESCRIPTORS, Closed, Incoming
from gpumux.wire.shared_memory import Segment
from tests.wire.world import JOB, WAIT_MS, packet, step

MOST = 100_000  # bytes of a message on the daemon's end


def done(number: int) -> m.StepDone:
    return m.StepDone(JOB, number, 0.0, 0.0, 0.0, 0)


def passed(segment: int, nbytes: int) -> bytes:
    return packet(m.SegmentPassed(segment, nbytes))


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


@pytest.fixture
def ends() -> Iterator[tuple[ClientChannel, DaemonChannel]]:
    theirs, ours = pair()
    client, daemon = ClientChannel(theirs), DaemonChannel(ours, MOST)
    yield client, daemon
    client.close()
    daemon.close()


# ---- one channel


@pytest.mark.parametrize("size", [1, PACKET, PACKET + 1, 3 * PACKET, MOST - 4])
def test_messages_of_any_size_arrive_whole(ends, size: int):
    client, daemon = ends
    message = b"\x97" + random.Random(size).randbytes(size - 1)
    assert daemon.receive() is None
    assert client.send(message)
    assert client.send(b"\x01next")
    assert daemon.receive() == message
    assert daemon.receive() == b"\x01next"
    assert daemon.receive() is None


@pytest.mark.parametrize("run", [1, 2, 9])
def test_a_number_that_contains_the_marker_where_a_packet_ends(ends, run: int):
    """Any byte of a packed float may be MORE; the last packet would be taken for one that another follows."""
    client, daemon = ends
    first, marker = PACKET - 1, bytes((MORE,))
    for size in (first + 2, first + PACKET, 2 * first + 2, 3 * PACKET):
        message = bytearray(b"\x97" + bytes(size))
        for cut in range(first, size, first):
            message[cut - run // 2 : cut - run // 2 + run] = marker * run
        assert client.send(bytes(message))
        assert client.send(b"\x01next")
        assert daemon.receive() == message
        assert daemon.receive() == b"\x01next"
        assert daemon.receive() is None


def test_a_message_that_is_too_long(ends):
    client, daemon = ends
    client.send(b"\x97" + bytes(MOST + 10))
    with pytest.raises(ProtocolError, match=f"{MOST} bytes"):
        daemon.receive()


def test_the_client_goes(ends):
    client, daemon = ends
    client.send(b"\x01last")
    client.close()
    assert daemon.receive() == b"\x01last"
    with pytest.raises(EOFError):
        daemon.receive()
    with pytest.raises(OSError, match="pipe"):
        daemon.send(b"\x01")


def test_the_daemon_goes_though_another_process_holds_its_end(ends):
    client, daemon = ends
    held = os.dup(daemon.fileno())
    daemon.send(b"\x01last")
    daemon.close()
    assert client.receive() == b"\x01last"
    with pytest.raises(EOFError):
        client.receive()
    with pytest.raises(OSError, match="pipe"):
        client.send(b"\x01")
    os.close(held)


def test_a_copy_of_the_daemons_end_cannot_have_it_wait(ends):
    """The job's process has one, and whether a socket waits belongs to both."""
    client, daemon = ends
    copy = os.dup(daemon.fileno())
    os.set_blocking(copy, True)
    os.close(copy)
    assert os.get_blocking(daemon.fileno())
    found: list[bytes | None] = []
    reader = threading.Thread(target=lambda: found.append(daemon.receive()))
    reader.start()
    reader.join(20)
    client.send(b"\x01late")  # so that the thread ends in any case
    reader.join()
    assert found == [None]


def test_what_finds_no_room_waits_in_order(ends):
    client, daemon = ends
    sent = 0
    while client.send(packet(step(sent))):
        sent += 1
    assert not client.flush()
    assert not client.send(packet(step(sent + 1))), "nothing may pass what waits"
    heard = []
    while (message := daemon.receive()) is not None:
        heard.append(message)
        client.flush()
    assert heard == [packet(step(n)) for n in range(sent + 2)]


def test_segments_come_in_order_with_answers(ends):
    client, daemon = ends
    with Segment.create(4096) as one, Segment.create(8192) as other:
        one.view()[0], other.view()[0] = 1, 2
        assert daemon.send(passed(7, 4096), one.fd)
        assert daemon.send(packet(done(1)))
        assert daemon.send(passed(2**63 - 1, 8192), other.fd)
        assert client.receive() == packet(done(1))
        assert client.receive() is None
        with client.take(2**63 - 1, 8192) as second, client.take(7, 4096) as first:
            assert (first.view()[0], second.view()[0]) == (1, 2)


def test_segments_that_were_not_taken_are_closed(ends):
    client, daemon = ends
    before = len(os.listdir("/proc/self/fd"))
    with Segment.create(4096) as segment:
        for number in (1, 2, 2):
            assert daemon.send(passed(number, 4096), segment.fd)
        assert client.receive() is None
        client.take(1, 4096).close()
        with pytest.raises(ProtocolError, match="4096 bytes, 5000 were announced"):
            client.take(2, 5000)
        with pytest.raises(ProtocolError, match="announced and not passed"):
            client.take(2, 4096)
        assert daemon.send(passed(3, 4096), segment.fd)
        assert client.receive() is None
    client.close()
    assert len(os.listdir("/proc/self/fd")) == before - 1


def test_the_client_checks_what_it_gets():
    before = len(os.listdir("/proc/self/fd"))
    with Segment.create(4096) as segment:
        for data, fds in (
            (passed(1, 4096), [segment.fd, segment.fd]),
            (passed(1, 4096), [segment.fd] * 9),  # more than it has room for
            (passed(1, 4097), [segment.fd]),
            (packet(done(1)), [segment.fd]),
            (b"short", [segment.fd]),
            (passed(1, 4096) + b"x", [segment.fd]),
        ):
            theirs, ours = pair()
            client = ClientChannel(theirs)
            ours.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])
            with pytest.raises(ProtocolError):
                client.receive()
            client.close()
            ours.close()
    assert len(os.listdir("/proc/self/fd")) == before, "descriptors were left open"


def test_the_daemon_takes_no_descriptors():
    theirs, ours = pair()
    daemon = DaemonChannel(ours, MOST)
    before = len(os.listdir("/proc/self/fd"))
    with open(os.devnull, "rb") as null:
        socket.send_fds(theirs, [packet(step(1))], [null.fileno()] * 4)
    assert daemon.receive() == packet(step(1))
    assert len(os.listdir("/proc/self/fd")) == before
    daemon.close()
    theirs.close()


# ---- channels of a router


def test_steps_are_answered_on_the_channel_and_all_else_by_zeromq(world, join):
    client = join(world)
    client.arrives(2)
    world.router.send(client.opened.session, done(2))
    world.router.send(client.opened.session, m.JobEnded(JOB, "", "", ""))
    assert client.heard() == done(2)
    assert client.client.receive(m.JobEnded).job == JOB


def test_an_answer_is_one_packet_however_long_its_texts(world, join):
    """The process that runs a step may write to the channel, too, in between packets."""
    client = join(world)
    long = m.StepFailed(JOB, 3, "job_failed", "\U0001f600" * 16_000, "y" * 16_000)
    world.router.send(client.opened.session, long)
    heard = client.heard()
    assert (heard.step, heard.code) == (3, "job_failed")
    assert long.message.startswith(heard.message.removesuffix(" ..."))
    assert long.remedy.startswith(heard.remedy.removesuffix(" ..."))
    assert len(heard.message) > 1000
    fits = m.StepFailed(JOB, 4, "job_failed", "x" * 16_000, "y" * 16_000)
    world.router.send(client.opened.session, fits)
    assert client.heard() == fits


@pytest.mark.parametrize("message", [step(1), m.OpenChannel(m.PROTOCOL_VERSION, b"n")], ids=["step", "opening"])
def test_a_local_session_sends_by_zeromq_what_belongs_on_the_channel(world, join, message):
    client = join(world)
    client.client.send(message)
    assert world.next(Closed).session == client.opened.session
    refusal = client.client.refusal()
    assert refusal.code == "protocol"
    assert refusal.remedy == "send it on the session's channel"


def test_what_was_on_the_channel_before_a_message_comes_before_it(world, join):
    client = join(world)
    for turn in range(20):
        for number in range(5):
            client.say(step(10 * turn + number))
        client.client.send(m.OpenTransfer(turn + 1, JOB, turn, [], False))
        found = world.until(lambda found: any(isinstance(a.message, m.OpenTransfer) for a in found))
        numbers = [10 * turn + n for n in range(5)]
        assert [getattr(a.message, "step", "transfer") for a in found] == [*numbers, "transfer"]


def fill(client) -> int:
    """Send steps until the channel takes no more. Returns how many it took."""
    sent = 0
    while client.channel.send(packet(step(sent))):
        sent += 1
    return sent


def test_a_full_channel_before_a_message_is_read_one_message_in_a_pass(world, join):
    """They were taken all at once, 20,000 from a client that went on writing: others' steps waited for that."""
    client, other = join(world), join(world)
    sent = fill(client)
    for ref in (1, 2, 3):
        client.client.send(m.GetStatus(ref))
    found, passes = [], 0
    while [a.message.ref for a in found if isinstance(a.message, m.GetStatus)] != [1, 2, 3]:
        if world.router.next_deadline(world.now) > world.now:
            assert world._poller.poll(WAIT_MS)
        passes += 1
        if passes == 5:
            other.say(step(777))
        arrivals = world.router.receive(world.now)
        assert len(arrivals) <= 3, "of the socket, of each channel, and one that was held"
        assert (other.opened.session in [a.session for a in arrivals]) is (passes == 5)
        found += [a for a in arrivals if a.session == client.opened.session]
        client.channel.flush()
    steps = [a.message.step for a in found if isinstance(a.message, m.Step)]
    kinds = [type(a.message) for a in found]
    assert steps[:sent] == list(range(sent))
    assert kinds[:sent] == [m.Step] * sent, "what was there before comes before"


def test_a_client_that_never_stops_writing_does_not_hold_its_message_back(world, join):
    client = join(world)
    fill(client)
    client.client.send(m.GetStatus(1))
    for _ in range(10_000):
        world.until(lambda _: True)
        client.channel.flush()
        if client.channel.send(packet(step(1))):
            continue
        if any(isinstance(a.message, m.GetStatus) for a in world.router.receive(world.now)):
            return
    raise AssertionError("it never came")


def test_too_many_messages_behind_a_full_channel_end_their_session(make_world, join):
    world = make_world(send_queue=10)
    client = join(world)
    fill(client)
    for ref in range(1, 13):
        client.client.send(m.GetStatus(ref))
    found = world.until(lambda found: any(isinstance(a, Closed) for a in found))
    assert [a.message.step for a in found[:-1]] == list(range(len(found) - 1)), "none of them was delivered"
    assert world.router.counters["flood"] == 1


def test_a_held_message_goes_with_its_session(world, join):
    client = join(world)
    fill(client)
    client.client.send(m.GetStatus(1))
    world.until(lambda _: bool(world.router._holding))
    world.router.close_session(client.opened.session, ProtocolError("enough", ""))
    assert not world.router._holding
    assert world.next(Closed).session == client.opened.session
    assert not world.router.has_news


def test_what_was_answered_before_a_message_comes_before_it(make_world, join):
    """Also while the channel is full: what comes later waits, on whatever way it goes."""
    world = make_world(send_queue=10_000)
    client = join(world)
    client.arrives(0)
    session = client.opened.session
    for number in range(3000):  # more than a socket takes
        assert world.router.send(session, done(number))
    with Segment.create(4096) as segment:
        assert world.router.send_segment(session, 5, segment.fd, segment.nbytes)
    assert world.router.send(session, m.JobEnded(JOB, "", "", ""))
    assert world.router.send(session, done(3000))
    assert not client.client.socket.poll(50)
    heard = []
    while len(heard) < 3000:
        message = client.heard()
        if message is None:
            world.router.receive(world.now)
        else:
            heard.append(message.step)
    assert heard == list(range(3000))
    while not client.client.socket.poll(0):
        world.router.receive(world.now)
    assert client.client.receive(m.JobEnded)
    while (last := client.heard()) is None:
        world.router.receive(world.now)
    assert last == done(3000)
    client.channel.take(5, 4096).close()


def test_a_client_that_does_not_read_is_dropped(make_world, join):
    world = make_world(send_queue=10)
    good, lazy = join(world), join(world)
    lazy.arrives(1)
    sent = 0
    while world.router.send(lazy.opened.session, done(sent)):
        sent += 1
        assert sent < 100_000
    assert world.next(Closed).session == lazy.opened.session
    assert world.router.counters["unreachable"] == 1
    good.arrives(1)


def test_a_client_that_takes_no_descriptors_is_dropped(world, join):
    good, lazy = join(world), join(world)
    session = lazy.opened.session
    before = len(os.listdir("/proc/self/fd"))
    with Segment.create(4096) as segment:
        sent = 0
        while world.router.send_segment(session, 5, segment.fd, segment.nbytes):
            sent += 1
            assert sent < 100_000
    assert sent > MAX_DESCRIPTORS
    assert world.next(Closed).reason == "the client does not take its descriptors"
    assert len(os.listdir("/proc/self/fd")) == before - 1, "its channel is closed, and all that waited"
    good.arrives(1)


def test_a_segment_for_a_session_without_a_channel(world, make_client):
    client = make_client(world)
    opened = world.open(client)
    with Segment.create(4096) as segment:
        assert not world.router.send_segment(opened.session, 5, segment.fd, segment.nbytes)
    assert "its channel is not open" in client.refusal().message
    assert world.next(Closed).session == opened.session
    with Segment.create(4096) as segment:
        assert not world.router.send_segment(opened.session, 5, segment.fd, segment.nbytes)


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff",
        packet(done(1)),
        packet(m.GetStatus(1)),
        packet(m.OpenChannel(m.PROTOCOL_VERSION, b"again")),
        packet(m.OpenChannel(1, b"of protocol 1")),
        packet(step(1)) + b"x",
        packet(m.Step(JOB, 1, 1, 0, [], 0))[:-1] + b"\x01",  # announces a frame
        msgpack.packb([8, JOB, True, 1, 0, [], 0]),
        msgpack.packb([8, JOB, 1, 1, 0, [None], 0]),
        bytes((MORE,)) + bytes(PACKET + 100),
    ],
    ids=range(10),
)
def test_garbage_ends_its_session_only(world, join, garbage: bytes):
    good, bad = join(world), join(world)
    bad.sock.send(garbage)
    assert world.next(Closed).session == bad.opened.session
    assert bad.client.refusal().code in ("protocol", "version_mismatch")
    assert world.router.counters["malformed"] == 1
    with pytest.raises(EOFError):
        bad.heard()
    good.arrives(1)


def test_mutated_messages(world, join):
    chance = random.Random(3)
    good = join(world)
    seed = packet(step(7, [1.0, 2.0, 3]))
    for number in range(40):
        bad = join(world)
        for _ in range(50):
            message = bytearray(seed)
            for _ in range(chance.randint(1, 3)):
                message[chance.randrange(len(message))] = chance.randrange(256)
            try:
                bad.sock.send(bytes(message))
            except OSError:
                break  # the session is over
            world.router.receive(world.now)
        good.arrives(number)
        bad.close()


def test_a_flood_ends_its_session_only(make_world, join):
    world = make_world(messages_per_s=10.0, burst_messages=50.0)
    good, flooder = join(world), join(world)
    for number in range(60):
        flooder.say(step(number))
    found = world.until(lambda found: any(isinstance(a, Closed) for a in found))
    assert found[-1].session == flooder.opened.session
    assert sum(isinstance(a, Incoming) for a in found) == 50
    assert world.router.counters["flood"] == 1
    good.arrives(1)


def test_channels_take_turns(world, join):
    clients = [join(world) for _ in range(3)]
    for number in range(4):
        for client in clients:
            client.say(step(number))
    for number in range(4):
        arrivals = world.router.receive(world.now)
        assert [a.message.step for a in arrivals] == [number] * 3
        assert len({a.session for a in arrivals}) == 3


@pytest.mark.parametrize("word", [None, m.Goodbye()], ids=["silently", "with a goodbye"])
def test_a_closed_channel_is_the_clients_end(world, join, word):
    client = join(world)
    client.arrives(1)
    client.say(step(2))
    if word is not None:
        client.say(word)
    client.channel.close()
    found = world.until(lambda found: any(isinstance(a, Closed) for a in found))
    assert found[0].message == step(2)
    assert found[-1].reason == (GOODBYE if word else "the client is gone")


def test_a_client_that_is_gone_is_noticed_while_it_is_written_to(world, join):
    client = join(world)
    client.arrives(1)
    client.close()
    assert not world.router.send(client.opened.session, done(1))
    assert world.next(Closed).reason == "the client is gone"


def test_steps_are_signs_of_life(world, join):
    client = join(world)
    for number in range(5):
        world.now += world.router.limits.lease_s - 0.5
        client.arrives(number)
        assert world.router.expire(world.now) == []
    world.now += world.router.limits.lease_s
    assert [a.session for a in world.router.expire(world.now)] == [client.opened.session]
