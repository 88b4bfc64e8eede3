"""Step lanes: order across the two ways, limits, and every way one can end."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import msgpack
import pytest

from gpumux.errors import ProtocolError
from gpumux.wire import messages as m
from gpumux.wire.lane import MORE, PACKET, Lane, pair
from gpumux.wire.lanereader import GOODBYE
from gpumux.wire.sessions import Closed, Incoming
from tests.wire.world import JOB, MOST, packet, step


def done(number: int) -> m.StepDone:
    return m.StepDone(JOB, number, 0.0, 0.0, 0.0, 0)


@pytest.fixture
def ends() -> Iterator[tuple[Lane, Lane]]:
    ours, theirs = (Lane(sock, MOST) for sock in pair())
    yield ours, theirs
    ours.close()
    theirs.close()


# ---- one lane


@pytest.mark.parametrize("size", [1, PACKET, PACKET + 1, 3 * PACKET, MOST - 4])
def test_messages_of_any_size_arrive_whole(ends, size: int):
    ours, theirs = ends
    message = b"\x97" + os.urandom(size - 1)
    assert theirs.receive() is None
    assert ours.send(message)
    assert ours.send(b"\x01next")
    assert theirs.receive() == message
    assert theirs.receive() == b"\x01next"
    assert theirs.receive() is None


def test_a_message_that_is_too_long(ends):
    ours, theirs = ends
    ours.send(b"\x97" + bytes(MOST + 10))
    with pytest.raises(ProtocolError, match=f"{MOST} bytes"):
        theirs.receive()


def test_the_end_of_the_other_end(ends):
    ours, theirs = ends
    ours.send(b"\x01last")
    ours.close()
    assert theirs.receive() == b"\x01last"
    with pytest.raises(EOFError):
        theirs.receive()
    with pytest.raises(OSError, match="pipe"):
        theirs.send(b"\x01")


def test_what_finds_no_room_waits_in_order(ends):
    ours, theirs = ends
    sent = 0
    while ours.send(packet(step(sent))):
        sent += 1
    assert not ours.flush()
    assert not ours.send(packet(step(sent + 1))), "nothing may pass what waits"
    heard = []
    while (message := theirs.receive()) is not None:
        heard.append(message)
        ours.flush()
    assert heard == [packet(step(n)) for n in range(sent + 2)]


# ---- lanes of a router


def test_steps_are_answered_the_way_they_came(world, join):
    client = join(world)
    world.serves(client.client, client.opened.session, 1)  # by ZeroMQ, although it has a lane
    client.arrives(2)
    world.router.send(client.opened.session, done(2))
    world.router.send(client.opened.session, m.StepFailed(JOB, 3, "job_failed", "x" * 16_000, "y" * 16_000))
    assert client.heard() == done(2)
    assert client.heard().remedy == "y" * 16_000
    world.router.send(client.opened.session, m.JobEnded(JOB, "", "", ""))
    assert client.client.receive(m.JobEnded).job == JOB


def test_what_was_on_the_lane_before_a_message_comes_before_it(world, join):
    client = join(world)
    for turn in range(20):
        for number in range(5):
            client.say(step(10 * turn + number))
        client.client.send(m.OpenTransfer(turn + 1, JOB, turn, [], False))
        found = world.until(lambda found: any(isinstance(a.message, m.OpenTransfer) for a in found))
        assert [getattr(a.message, "step", "transfer") for a in found] == [10 * turn + n for n in range(5)] + [
            "transfer"
        ]


def test_what_was_answered_before_a_message_comes_before_it(make_world, join):
    """Also while the lane is full: what comes later waits, on whatever way it goes."""
    world = make_world(send_queue=10_000)
    client = join(world)
    client.arrives(0)
    session = client.opened.session
    for number in range(3000):  # more than a socket takes
        assert world.router.send(session, done(number))
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


def test_who_does_not_read_is_dropped(make_world, join):
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


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff",
        packet(done(1)),
        packet(m.GetStatus(1)),
        packet(step(1)) + b"x",
        packet(m.Step(JOB, 1, 1, 0, [], 0))[:-1] + b"\x01",  # announces a frame
        msgpack.packb([8, JOB, True, 1, 0, [], 0]),
        msgpack.packb([8, JOB, 1, 1, 0, [None], 0]),
        bytes((MORE,)) + bytes(PACKET + 100),
    ],
    ids=range(8),
)
def test_garbage_ends_its_session_only(world, join, garbage: bytes):
    good, bad = join(world), join(world)
    bad.lane._send(garbage)
    assert world.next(Closed).session == bad.opened.session
    assert bad.client.refusal().code == "protocol"
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
                bad.lane._send(bytes(message))
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


def test_lanes_take_turns(world, join):
    clients = [join(world) for _ in range(3)]
    for number in range(4):
        for client in clients:
            client.say(step(number))
    for number in range(4):
        arrivals = world.router.receive(world.now)
        assert [a.message.step for a in arrivals] == [number] * 3
        assert len({a.session for a in arrivals}) == 3


@pytest.mark.parametrize("word", [None, m.Goodbye()], ids=["silently", "with a goodbye"])
def test_a_closed_lane_is_the_clients_end(world, join, word):
    client = join(world)
    client.arrives(1)
    client.say(step(2))
    if word is not None:
        client.say(word)
    client.lane.close()
    found = world.until(lambda found: any(isinstance(a, Closed) for a in found))
    assert found[0].message == step(2)
    assert found[-1].reason == (GOODBYE if word else "the client is gone")


def test_steps_are_signs_of_life(world, join):
    client = join(world)
    for number in range(5):
        world.now += world.router.limits.lease_s - 0.5
        client.arrives(number)
        assert world.router.expire(world.now) == []
    world.now += world.router.limits.lease_s
    assert [a.session for a in world.router.expire(world.now)] == [client.opened.session]


def test_out_of_descriptors_no_lane_no_session(world, make_client, monkeypatch: pytest.MonkeyPatch):
    client = make_client(world)
    opened = world.open(client)

    def fail(record: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(world.router.sockets.lanes, "open", fail)
    side = client.side_channel()
    assert world.next(Closed).session == opened.session
    assert world.router.counters["no_descriptors"] == 1
    side.close()
