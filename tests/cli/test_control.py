"""A session with a daemon that misses some messages."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import zmq

from gpumux.cli import control
from gpumux.cli.control import Control
from gpumux.wire import messages as m
from gpumux.wire.codec import decode, encode
from gpumux.wire.limits import Limits
from tests.wire.world import RawClient, serving

LONG = 60.0  # seconds; a bound for a broken test


def test_a_hello_that_is_lost_is_said_again(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch):
    """A connection that was cut before the daemon had read it."""
    monkeypatch.setattr(control, "AGAIN_S", 0.05)
    said: list[str] = []

    def serve() -> None:
        while len(said) < 4:
            assert fake.poll(LONG * 1000)
            identity, *parts = fake.recv_multipart()
            message, _ = decode(parts)
            said.append(type(message).__name__)
            if isinstance(message, m.Hello) and len(said) == 3:
                fake.send_multipart(
                    [identity, *encode(m.Welcome(m.PROTOCOL_VERSION, "x", "s", "", b"", LONG, LONG, 1, {}))]
                )

    with zmq.Context() as context, context.socket(zmq.ROUTER) as fake:
        fake.setsockopt(zmq.LINGER, 0)
        fake.bind(f"ipc://{runtime_dir}/g.sock")
        daemon = threading.Thread(target=serve)
        daemon.start()
        with Control(f"ipc://{runtime_dir}/g.sock", LONG) as conversation:
            assert conversation.welcome.session == "s"
            daemon_heard = list(said)
        daemon.join(LONG)
    assert daemon_heard[:3] == ["Hello"] * 3
    (runtime_dir / "g.sock").unlink()


def test_a_command_of_a_user_whose_flood_was_cut_off_gets_in(runtime_dir: Path):
    """Its first hello is taken for more of the flood, and costs its connection."""
    limits = Limits(burst_sessionless=5.0, sessionless_per_s=0.5)
    with serving(runtime_dir, lambda router, arrival: None, limits=limits) as (endpoint, _), zmq.Context() as context:
        flooder = RawClient(context, endpoint)
        monitor = flooder.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        for _ in range(10):
            flooder.send_raw([b"noise"])
        assert monitor.poll(LONG * 1000), "the flood was not cut off"
        flooder.socket.disable_monitor()
        monitor.close()
        flooder.close()
        with Control(endpoint, LONG) as conversation:
            assert conversation.welcome.session
