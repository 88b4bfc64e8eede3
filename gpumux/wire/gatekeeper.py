"""ZeroMQ's authentication questions (ZAP), answered from the daemon's own loop: no extra thread.

Only the tcp socket has a ZAP domain, so only CURVE connections are asked about. A handshake waits
for the answer in ZeroMQ's own thread; nobody else does.
"""

from __future__ import annotations

import logging
from pathlib import Path

import zmq
import zmq.utils.z85

from gpumux.errors import ConfigError
from gpumux.wire.curve import allowed_keys

log = logging.getLogger("gpumux.daemon")
DOMAIN = "gpumux"
_ADDRESS = "inproc://zeromq.zap.01"
_QUESTIONS_PER_POLL = 32


class Gatekeeper:
    """Lets in the clients whose public keys lie in a directory."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], clients: Path) -> None:
        self._clients = clients
        self.socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ADDRESS)
        self.refused = 0
        self._told: set[str] = set()
        self.names: dict[str, str] = {}  # of the key files, by key, as of the newest connection

    def process(self) -> None:
        """Answer the questions that wait, a bounded number at once."""
        for _ in range(_QUESTIONS_PER_POLL):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._answer(frames)

    def _answer(self, frames: list[bytes]) -> None:
        border = frames.index(b"") + 1  # return path, empty frame, question
        version, request = frames[border], frames[border + 1]
        domain, mechanism, credentials = frames[border + 2], frames[border + 5], frames[border + 6 :]
        user = ""
        if version == b"1.0" and domain == DOMAIN.encode() and mechanism == b"CURVE" and len(credentials) == 1:
            key = zmq.utils.z85.encode(credentials[0]).decode()
            self.names = self._allowed()
            if key in self.names:
                user = key
        status, text = (b"200", b"OK") if user else (b"400", b"unknown key")
        self.refused += not user
        self.socket.send_multipart([*frames[:border], b"1.0", request, status, text, user.encode(), b""])

    def _allowed(self) -> dict[str, str]:
        """The keys that count now. What is wrong with one is logged once: its holder is only told that it is unknown."""
        unusable: list[ConfigError] = []
        found = allowed_keys(self._clients, unusable)
        messages = {str(error) for error in unusable}
        for message in sorted(messages - self._told):
            log.warning("a client's key lets nobody in: %s", message)
        self._told = messages
        return found

    def close(self) -> None:
        self.socket.close()
