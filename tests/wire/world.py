"""A live router on a virtual clock, and raw clients that say whatever a test wants."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import zmq

from gpumux.wire import messages as m
from gpumux.wire.channel import ClientChannel
from gpumux.wire.codec import decode, encode
from gpumux.wire.router import Arrival, Incoming, Opened, Router

JOB = "0123456789abcdef" * 2
WAIT_MS = 60_000  # a bound for a broken test, never reached by a working one
HELLO = m.Hello(m.PROTOCOL_VERSION, "test", "client", 0, "", True)  # all by ZeroMQ
LOCAL_HELLO = m.Hello(m.PROTOCOL_VERSION, "test", "client", 0, "", False)  # steps by a channel


class World:
    """`now` moves only when a test moves it."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.now = 100.0
        self._poller = zmq.Poller()
        for fd in router.fds():
            self._poller.register(fd, zmq.POLLIN)

    def until(self, done: Callable[[list[Arrival]], bool]) -> list[Arrival]:
        """Turn the loop until `done` is true of all that arrived."""
        found: list[Arrival] = []
        while not done(found):
            due = self.router.next_deadline(self.now) <= self.now
            assert self._poller.poll(0 if due else WAIT_MS) or due, "nothing arrived"
            found += self.router.receive(self.now)
        return found

    def next(self, kind: type[Any] = object) -> Any:
        """The next arrival of a kind; earlier ones of other kinds are passed over."""
        return next(a for a in self.until(lambda found: any(isinstance(a, kind) for a in found)) if isinstance(a, kind))

    def open(self, client: RawClient, hello: m.Hello = HELLO) -> Opened:
        client.send(hello)
        opened = self.next(Opened)
        client.welcome = client.receive(m.Welcome)
        return opened

    def digest(self, client: RawClient, mark: int) -> None:
        """Turn the loop until all that `client` has sent was looked at: its last message, a Hello
        of protocol `mark`, is answered."""
        client.send_raw([msgpack.packb([1, mark])])
        for _ in range(100_000):
            self.router.receive(self.now)
            while client.socket.poll(1):
                message, _ = decode(client.socket.recv_multipart())
                if isinstance(message, m.Refusal) and f"protocol {mark}," in message.message:
                    return
        raise AssertionError("the last message was never answered")

    def serves(self, client: RawClient, session: str, number: int) -> None:
        """Assert that a client's step still arrives and is answered."""
        client.send(m.Step(JOB, number, 1, 0, [], 0))
        self.until(
            lambda found: any(
                isinstance(a, Incoming) and (a.session, a.message.step) == (session, number) for a in found
            )
        )
        assert self.router.send(session, m.StepDone(JOB, number, 0.0, 0.0, 0.0, 0))
        assert client.receive(m.StepDone).step == number


class RawClient:
    """A DEALER socket, no session logic."""

    def __init__(self, context: zmq.Context, endpoint: str, routing_id: bytes = b"", configure: Any = None) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        if routing_id:
            self.socket.setsockopt(zmq.ROUTING_ID, routing_id)
        if configure is not None:
            configure(self.socket)
        self.socket.connect(endpoint)
        self.welcome: m.Welcome | None = None

    def send(self, message: Any, frames: tuple[bytes, ...] = (), flags: int = 0) -> None:
        self.socket.send_multipart(encode(message, frames), flags)

    def send_raw(self, frames: list[bytes]) -> None:
        self.socket.send_multipart(frames)

    def receive(self, kind: type[Any]) -> Any:
        """The next message of a kind; heartbeats and others are passed over."""
        while True:
            assert self.socket.poll(WAIT_MS), f"no {kind.__name__} came"
            message, _ = decode(self.socket.recv_multipart())
            if isinstance(message, kind):
                return message

    def refusal(self) -> m.Refusal:
        return self.receive(m.Refusal)

    def connect_channel(self) -> socket.socket:
        """A connection that has asked for the session's channel."""
        assert self.welcome is not None
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(WAIT_MS / 1000)
        connection.connect(self.welcome.channel)
        connection.send(opening(self.welcome.nonce))
        return connection

    def close(self) -> None:
        self.socket.close()


def packet(message: Any) -> bytes:
    return bytes(encode(message)[0])


def opening(nonce: bytes) -> bytes:
    return packet(m.OpenChannel(m.PROTOCOL_VERSION, nonce))


def step(number: int, scalars: list[float] | None = None) -> m.Step:
    return m.Step(JOB, number, 1, 0, scalars or [], 0)


class LocalClient:
    """A session with its channel."""

    def __init__(self, world: World, client: RawClient, hello: m.Hello = LOCAL_HELLO) -> None:
        self.world = world
        self.client = client
        self.opened = world.open(client, hello)
        self.sock = client.connect_channel()
        while not select.select([self.sock], [], [], 0.01)[0]:
            assert world.router.receive(world.now) == []
        assert self.sock.recv(100) == packet(m.ChannelOpened())
        self.channel = ClientChannel(self.sock)

    def say(self, message: Any) -> None:
        assert self.channel.send(packet(message))

    def heard(self) -> Any:
        received = self.channel.receive()
        return None if received is None else decode((received,))[0]

    def arrives(self, number: int) -> None:
        self.say(step(number))
        arrival = self.world.next(Incoming)
        assert (arrival.session, arrival.message) == (self.opened.session, step(number))

    def close(self) -> None:
        self.channel.close()


@contextmanager
def serving(
    directory: Path, answer: Callable[[Router, Incoming], None], **options: Any
) -> Iterator[tuple[str, threading.Event]]:
    """A router in a thread of its own, on the real clock, that lets `answer` reply. Yields its
    endpoint and an event that freezes it (it then neither reads nor sends)."""
    router = Router([f"ipc://{directory}/gpumux.sock"], directory, **options)
    stop, frozen = threading.Event(), threading.Event()
    wake = os.eventfd(0)

    def run() -> None:
        poller = zmq.Poller()
        for fd in [*router.fds(), wake]:
            poller.register(fd, zmq.POLLIN)
        while not stop.is_set():
            poller.poll(50)
            while frozen.is_set() and not stop.wait(0.01):
                pass
            now = time.monotonic()
            for arrival in router.receive(now) + router.expire(now):
                if isinstance(arrival, Incoming):
                    answer(router, arrival)

    thread = threading.Thread(target=run, name="router")
    thread.start()
    try:
        yield router.addresses[0], frozen
    finally:
        stop.set()
        os.eventfd_write(wake, 1)
        thread.join()
        router.close("the test is over")
        os.close(wake)
