"""Lanes that somebody else reads for a while: what comes behind them waits, what ends them is noticed."""

from __future__ import annotations

import os
import socket

import pytest

from gpumux.errors import ProtocolError
from gpumux.wire import messages as m
from gpumux.wire.lanereader import GOODBYE
from gpumux.wire.sessions import Closed, Incoming
from tests.wire.world import JOB, packet, step


class Borrower:
    """Has a copy of the daemon's end of a client's lane, as a device does."""

    def __init__(self, world, client):
        self.world = world
        self.session = client.opened.session
        client.say(step(1))  # steps go on the lane
        assert self.steps(1) == [1]
        number = world.router.answering_lane(self.session)
        self.sock = socket.socket(fileno=os.dup(number))
        self.recalled = []
        world.router.recall = self.recalled.append
        assert world.router.lend(self.session)

    def take(self) -> bytes:
        return self.sock.recv(1000)

    def give_back(self, rest: bytes = b"") -> None:
        self.world.router.take_back(self.session, rest, self.world.now)

    def steps(self, count: int) -> list[int]:
        found = self.world.until(lambda found: len(found) >= count)
        return [arrival.message.step for arrival in found]


@pytest.fixture
def lent(world, join):
    client = join(world)
    borrower = Borrower(world, client)
    yield client, borrower
    borrower.sock.close()


def silent(world) -> bool:
    """Nothing arrives, however often one looks."""
    return not any(world.router.receive(world.now) for _ in range(20))


def test_the_router_leaves_a_lent_lane_alone(world, lent):
    client, borrower = lent
    client.say(step(2))
    assert silent(world)
    assert world.router.receive_lanes([(world.router.answering_lane(borrower.session), 1)], world.now) == []
    assert borrower.take() == packet(step(2))
    assert not world.router.lend(borrower.session), "it is lent already"
    borrower.give_back()
    client.say(step(3))
    assert borrower.steps(1) == [3]
    assert borrower.recalled == []


def test_what_was_taken_and_not_used_comes_first(world, lent):
    client, borrower = lent
    client.say(step(2))
    client.say(step(3))
    borrower.give_back(borrower.take())
    assert borrower.steps(2) == [2, 3]


def test_messages_behind_the_lane_wait_for_it_and_keep_their_order(world, lent):
    client, borrower = lent
    client.say(step(2))
    client.say(step(3))
    rest = borrower.take()
    for ref in (1, 2):
        client.client.send(m.GetStatus(ref))
    while len(borrower.recalled) < 2:
        assert world.router.receive(world.now) == []
    assert set(borrower.recalled) == {borrower.session}
    borrower.give_back(rest)
    found = world.until(lambda found: len(found) >= 4)
    said = [(type(a.message), getattr(a.message, "step", None) or a.message.ref) for a in found]
    assert said == [(m.Step, 2), (m.Step, 3), (m.GetStatus, 1), (m.GetStatus, 2)]


def test_heartbeats_pass_and_keep_the_session(world, lent):
    client, borrower = lent
    record = world.router._sessions[borrower.session]
    for _ in range(6):
        world.now += world.router.limits.lease_s / 2
        client.client.send(m.Heartbeat(0.0))
        while record.heard < world.now:
            assert world.router.receive(world.now) == []
        assert world.router.expire(world.now) == []
    assert borrower.recalled == []


def test_steps_that_were_taken_keep_the_session_and_count(make_world, join):
    world = make_world(burst_messages=10.0, messages_per_s=1.0)
    client = join(world)
    borrower = Borrower(world, client)
    world.now += world.router.limits.lease_s - 1
    assert world.router.took(borrower.session, 5, 300, world.now)
    world.now += 2
    assert world.router.expire(world.now) == []
    assert not world.router.took(borrower.session, 50, 3000, world.now)
    assert isinstance(world.next(Closed), Closed)
    assert world.router.counters["flood"] == 1
    assert not world.router.took(borrower.session, 1, 60, world.now)
    borrower.give_back()
    borrower.sock.close()


@pytest.mark.parametrize("word", [True, False])
def test_a_client_that_leaves_is_noticed_and_heard_out(world, lent, word):
    client, borrower = lent
    client.say(step(2))
    if word:
        client.say(m.Goodbye())
    client.lane.close()
    while not borrower.recalled:
        assert world.router.receive(world.now) == []
    assert silent(world)
    borrower.give_back(borrower.take())
    found = world.until(lambda found: any(isinstance(a, Closed) for a in found))
    assert [a.message.step for a in found if isinstance(a, Incoming)] == [2]
    assert found[-1].reason == GOODBYE if word else found[-1].reason != GOODBYE


def test_a_closed_side_channel_ends_the_session_once_the_lane_is_back(world, lent):
    client, borrower = lent
    client.say(step(2))
    client.side.close()
    while not borrower.recalled:
        assert world.router.receive(world.now) == []
    borrower.give_back()
    found = world.until(lambda found: any(isinstance(a, Closed) for a in found))
    assert [a.message.step for a in found if isinstance(a, Incoming)] == [2]


def test_a_session_that_ends_meanwhile_takes_its_lane_with_it(world, lent):
    _, borrower = lent
    world.router.close_session(borrower.session, ProtocolError("ended", "begin again"))
    assert world.next(Closed)
    assert borrower.take() == b""  # shut down for the borrower, too
    borrower.give_back(b"rest")
    assert silent(world)


def test_only_a_lane_at_rest_can_be_lent(world, join):
    client = join(world)
    assert not world.router.lend("nobody")
    client.lane._sock.send(b"\xc1begun")
    assert world.router.receive(world.now) == []
    silent(world)
    assert not world.router.lend(client.opened.session), "a message has begun to arrive"


def fill(world, borrower) -> int:
    """Send answers until one waits for room on the lane; how many."""
    record, count = world.router._sessions[borrower.session], 0
    while not record.held:
        assert world.router.send(borrower.session, m.StepDone(JOB, count, 0.0, 0.0, 0.0, 0))
        count += 1
    return count


@pytest.mark.parametrize("back", [True, False])
def test_an_answer_that_waits_for_room_is_sent_whoever_reads_the_lane(world, lent, back):
    client, borrower = lent
    count = fill(world, borrower)
    if back:
        borrower.give_back()
    heard = []
    for _ in range(10 * count):
        message = client.heard()
        if message is None:
            world.router.receive(world.now)
        else:
            heard.append(message.step)
    assert heard == list(range(count))
    assert not world.router._lanes.poll(), "there is nothing to do"


def test_a_lane_that_fills_when_its_client_has_left_is_nobodys_loss(world, lent, join):
    client, borrower = lent
    client.side.close()
    while not borrower.recalled:
        assert world.router.receive(world.now) == []
    fill(world, borrower)
    borrower.give_back()
    assert world.next(Closed)
    join(world).arrives(1)


@pytest.mark.parametrize("count", [2, 3])
def test_what_waits_for_a_lane_counts_once_and_when_it_comes(make_world, join, count):
    world = make_world(burst_bytes=4000.0, bytes_per_s=1.0)
    client = join(world)
    borrower = Borrower(world, client)
    for _ in range(count):
        client.client.send(m.LoadProgram(1, JOB, 0, [], []), (bytes(1500),))
    if count == 3:
        assert world.next(Closed)
        assert world.router.counters["flood"] == 1
    else:
        while len(borrower.recalled) < count:
            assert world.router.receive(world.now) == []
        borrower.give_back()
        found = world.until(lambda found: len(found) >= count)
        assert [type(a.message) for a in found] == [m.LoadProgram] * count
    borrower.sock.close()
