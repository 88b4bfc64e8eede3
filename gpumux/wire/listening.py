"""Binding the daemon's sockets: one ROUTER an endpoint, its lock, its options."""

from __future__ import annotations

from collections.abc import Sequence

import zmq

from gpumux.errors import ConfigError, EndpointBusy
from gpumux.wire.connections import Connections
from gpumux.wire.curve import ServerCurve, secure_server
from gpumux.wire.endpoint import Endpoint, ensure_runtime_dir
from gpumux.wire.gatekeeper import DOMAIN
from gpumux.wire.limits import Limits
from gpumux.wire.lock import EndpointLock, remove_stale

_HANDSHAKE_MS = 5_000  # a connection that has not finished ZeroMQ's handshake by then is closed
_NOBLOCK_MORE = zmq.NOBLOCK | zmq.SNDMORE
FULL = "the client does not read its messages"
_LINGER_MS = 500  # how long a closing daemon tries to say goodbye


class Listening:
    """A bound ROUTER socket. The mode of an ipc socket follows the process's umask."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: Endpoint,
        limits: Limits,
        curve: ServerCurve | None,
    ) -> None:
        self.endpoint = endpoint
        self.lock: EndpointLock | None = None
        self.connections: Connections | None = None
        if endpoint.path is None and curve is None:
            raise ConfigError(
                f"{endpoint.text} needs CURVE keys: anyone who reaches it could run work here",
                "give the daemon a secret key and a directory of client keys, or use an ipc:// endpoint",
            )
        self.socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        try:
            self._set_options(limits)
            if endpoint.path is not None:
                ensure_runtime_dir(endpoint.path.parent)
                self.lock = EndpointLock(endpoint.path)
                remove_stale(endpoint.path)
            elif curve is not None:
                self.socket.setsockopt_string(zmq.ZAP_DOMAIN, DOMAIN)
                self.socket.setsockopt(zmq.IPV6, "[" in endpoint.text)
                secure_server(self.socket, curve)
            self.connections = Connections(context, self.socket, limits)
            self._bind()
            self.connections.watch()
        except BaseException:
            self.close()
            self.release()
            raise

    @property
    def address(self) -> str:
        """The endpoint as bound: a tcp port given as `*` is filled in."""
        return self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def _set_options(self, limits: Limits) -> None:
        options = {
            zmq.LINGER: _LINGER_MS,
            zmq.ROUTER_MANDATORY: 1,  # a peer that is gone or full is an error we see, not a silent drop
            zmq.MAXMSGSIZE: limits.max_message_bytes,
            zmq.SNDHWM: limits.send_queue,
            zmq.RCVHWM: limits.receive_queue,
            zmq.HANDSHAKE_IVL: _HANDSHAKE_MS,
        }
        for option, value in options.items():
            self.socket.setsockopt(option, value)

    def _bind(self) -> None:
        try:
            self.socket.bind(self.endpoint.text)
        except zmq.ZMQError as error:
            if error.errno == zmq.EADDRINUSE:
                raise EndpointBusy(f"{self.endpoint.text} is in use", "choose another --endpoint") from error
            raise ConfigError(f"can't listen on {self.endpoint.text}: {error}", "choose another --endpoint") from error

    def send(self, identity: bytes, parts: Sequence[bytes | memoryview]) -> str:
        """Hand a message to ZeroMQ without waiting. What failed, "" when nothing did."""
        try:
            self.socket.send(identity, _NOBLOCK_MORE)  # whether the message can go is decided here
            for part in parts[:-1]:
                self.socket.send(part, _NOBLOCK_MORE)
            self.socket.send(parts[-1], zmq.NOBLOCK)
        except zmq.Again:
            return FULL
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return "the client's connection is gone"
        return ""

    def close(self) -> None:
        """Close the socket; `release` follows when the context has ended."""
        if self.connections is not None:
            self.connections.close()
        self.socket.close()

    def release(self) -> None:
        """Remove the socket file, then let the next daemon have the endpoint."""
        lock, path = self.lock, self.endpoint.path
        if lock is not None and path is not None:
            remove_stale(path)
            lock.close()
            self.lock = None
