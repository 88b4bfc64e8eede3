"""Hostile clients: they send bytes that are not ZeroMQ's, malformed messages, false requests and frames that are too
large, and open connections that send nothing; as another user (if we are root), also more connections than a user may
have.

    python -m microbench.soaking.hostile_clients ENDPOINT SECONDS SEED LARGEST UID

UID is the user to become (0: this one); LARGEST the daemon's max_message_bytes. At the end it prints a line of JSON
with the count of each action.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable

import zmq

from gpumux.wire import messages as m
from gpumux.wire.codec import encode

HELD = 20  # connections that are kept open and send nothing
FLOOD = 400  # connections at once, of another user: more than one may have
PAUSE_S = 0.25  # mean pause between two actions
UNKNOWN_JOB_ID = "f" * 32


class HostileClient:
    def __init__(self, endpoint: str, seed: int, largest: int, other_user: bool) -> None:
        self.endpoint = endpoint
        self.path = endpoint.removeprefix("ipc://")
        self.largest = largest
        self.draw = random.Random(seed)
        self.done: Counter[str] = Counter()
        self._held: list[socket.socket] = []
        self._actions: list[Callable[[], None]] = [
            self.raw_bytes, self.partial_greeting, self.silent_connection, self.random_frames, self.false_requests,
            self.changed_messages, self.channel, self.far_too_large,
        ]  # fmt: skip
        if other_user:
            self._actions.append(self.flood)

    def once(self) -> None:
        """One action. It is no error if the daemon closes the connection."""
        action = self.draw.choice(self._actions)
        try:
            action()
        except (OSError, zmq.ZMQError):
            pass
        self.done[action.__name__] += 1

    def close(self) -> None:
        for held in self._held:
            held.close()

    def _connect(self, path: str, kind: int = socket.SOCK_STREAM) -> socket.socket:
        made = socket.socket(socket.AF_UNIX, kind)
        made.settimeout(2.0)
        try:
            made.connect(path)
        except OSError:
            made.close()
            raise
        return made

    def _hold(self, connection: socket.socket) -> None:
        self._held.append(connection)
        while len(self._held) > HELD:
            self._held.pop(0).close()

    # ---- below ZeroMQ

    def raw_bytes(self) -> None:
        with self._connect(self.path) as connection:
            connection.send(self.draw.randbytes(self.draw.choice([1, 64, 4096, 1 << 20])))

    def partial_greeting(self) -> None:
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(48)
        connection = self._connect(self.path)
        self._hold(connection)
        connection.send(greeting[: self.draw.randrange(1, len(greeting))])

    def silent_connection(self) -> None:
        self._hold(self._connect(self.path))

    def flood(self) -> None:
        """Open as many connections as there are descriptors for, as fast as possible."""
        made: list[socket.socket] = []
        try:
            for _ in range(FLOOD):
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                made.append(connection)
                connection.setblocking(False)
                connection.connect_ex(self.path)
        finally:
            for connection in made:
                connection.close()

    def channel(self) -> None:
        with self._connect(f"{self.path}.chan", socket.SOCK_SEQPACKET) as connection:
            connection.send(self.draw.randbytes(self.draw.choice([1, 32, 64])))

    # ---- messages

    def _dealer(self, context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
        sock = context.socket(zmq.DEALER)
        sock.setsockopt(zmq.LINGER, 200)
        sock.setsockopt(zmq.SNDTIMEO, 200)
        sock.setsockopt(zmq.RECONNECT_IVL, -1)
        sock.connect(self.endpoint)
        return sock

    def random_frames(self) -> None:
        with zmq.Context() as context, self._dealer(context) as sock:
            for _ in range(self.draw.randrange(1, 100)):
                sock.send_multipart(
                    [self.draw.randbytes(self.draw.randrange(64)) for _ in range(self.draw.randrange(1, 4))]
                )

    def far_too_large(self) -> None:
        with zmq.Context() as context, self._dealer(context) as sock:
            sock.send_multipart(
                [*encode(m.Hello(m.PROTOCOL_VERSION, "0.1.0", "client", 1, "2", False)), bytes(self.largest + 1)]
            )

    def false_requests(self) -> None:
        """Open a session, and send requests about others' jobs, with odd numbers."""
        with zmq.Context() as context, self._dealer(context) as sock:
            sock.send_multipart(encode(m.Hello(m.PROTOCOL_VERSION, "0.1.0", "client", 1, "2", False)))
            for _ in range(self.draw.randrange(1, 60)):
                sock.send_multipart(self._request(), zmq.NOBLOCK)

    def changed_messages(self) -> None:
        with zmq.Context() as context, self._dealer(context) as sock:
            sock.send_multipart(encode(m.Hello(m.PROTOCOL_VERSION, "0.1.0", "client", 1, "2", False)))
            for _ in range(self.draw.randrange(1, 60)):
                first, *rest = self._request()
                data = bytearray(first)
                data[self.draw.randrange(len(data))] ^= self.draw.randrange(1, 256)
                sock.send_multipart([bytes(data), *rest], zmq.NOBLOCK)

    def _request(self) -> list[bytes | memoryview]:
        draw = self.draw
        n = draw.choice([0, 1, 2, 7, 1 << 31, (1 << 63) - 1])
        job = draw.choice([UNKNOWN_JOB_ID, f"{draw.getrandbits(128):032x}"])
        choices: list[m.Message] = [
            m.OpenJob(n, job, "hostile", draw.randrange(3), 1.0, 1.1, None, 2, 0),
            m.Step(job, n, n, n, [1.0], 0),
            m.OpenTransfer(n, job, n, [n], True),
            m.FillTransfer(n, job, n, 0),
            m.CloseJob(n, job, False),
            m.PauseJob(n, job),
            m.ChangeJob(n, job, n, 1.0),
            m.JobStats(n, job),
            m.GetStatus(n),
            m.RecordTrace(n, 0.0),
            m.ExplainJob(n, job),
            m.Welcome(1, "x", "x", "", b"", 1.0, 1.0, 1, {}),
        ]
        made = draw.choice(choices)
        return [encode(made)[0], *([draw.randbytes(40)] if draw.random() < 0.2 else [])]


def main(endpoint: str, seconds: str, seed: str, largest: str, uid: str) -> int:
    going = True

    def stop(*_: object) -> None:
        nonlocal going
        going = False

    signal.signal(signal.SIGTERM, stop)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if int(uid):
        os.setgroups([])
        os.setresgid(int(uid), int(uid), int(uid))
        os.setresuid(int(uid), int(uid), int(uid))
    hostile = HostileClient(endpoint, int(seed), int(largest), bool(int(uid)))
    hostile.once()
    print("begun", flush=True)
    until = time.monotonic() + float(seconds)
    while going and time.monotonic() < until:
        hostile.once()
        time.sleep(hostile.draw.uniform(0.0, 2 * PAUSE_S))
    hostile.close()
    print(json.dumps(hostile.done), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
