"""A short session with a daemon for commands: connect, ask, disconnect. Needs neither torch nor shared memory."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from itertools import count
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import zmq

from gpumux import __version__
from gpumux.errors import ConfigError, DaemonGone, from_code
from gpumux.wire import endpoint as endpoints
from gpumux.wire import messages as msg
from gpumux.wire.codec import decode, encode
from gpumux.wire.endpoint import check_listening, unanswered
from gpumux.wire.grants import with_token
from gpumux.wire.messages import Record, unpack
from gpumux.wire.peers import client_curve, secure_client

Answer = TypeVar("Answer")
AGAIN_S = 1.0  # between two hellos, until the daemon answers
START_IT = "start one with `gpumux serve`, or name another with --endpoint"
START_COORDINATOR = "start one with `gpumux cluster up`, or name another with --cluster or GPUMUX_CLUSTER"


class Recorded(NamedTuple):
    """`seconds` were recorded; `reason` says why they are fewer than asked, "" if they are not."""

    records: list[Record]
    seconds: float
    reason: str


class Control:
    """A session of role "control"; a context manager. `timeout` (seconds) bounds each answer.

    Raises DaemonGone if the daemon does not answer, and the errors with which it refuses.
    """

    def __init__(self, endpoint: str | None, timeout: float = 5.0, *, coordinator: bool = False) -> None:
        found = endpoints.resolve(endpoint)
        self.endpoint = found.text
        self._timeout = timeout
        self._start_it = START_COORDINATOR if coordinator else START_IT
        self._what = "coordinator" if coordinator else "daemon"
        self._refs = count(1)
        self._found = found
        self._payload: list[bytes] = []  # frames of the newest message
        self._spoke = 0.0  # time of the last message sent
        self._heard = 0.0  # time of the last message received while recording
        if found.path is not None:
            endpoints.check_private(found.path.parent)
        check_listening(found, self._start_it, self._what)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        try:
            self._socket.setsockopt(zmq.LINGER, 200)
            if found.path is None:
                secure_client(self._socket, client_curve())
            self._socket.connect(found.text)
            plain = msg.Hello(msg.PROTOCOL_VERSION, __version__, "control", os.getpid(), "", found.path is None)
            hello = with_token(plain)
            self._send(hello)
            # A connection may be cut before it was read (by a daemon flooded by this user, or by the process). libzmq
            # then reconnects silently and drops what it had sent.
            self.welcome = self._receive(msg.Welcome, 0, hello)
            self._check_kind(coordinator)
        except BaseException:
            self._shut()
            raise

    def _check_kind(self, coordinator: bool) -> None:
        """Raises ConfigError if this is a daemon where a coordinator was meant, or the other way round."""
        if (self.welcome.device.get("kind") == "cluster") == coordinator:
            return
        if coordinator:
            raise ConfigError(f"a daemon is at {self.endpoint}, not a coordinator", START_COORDINATOR)
        raise ConfigError(f"a coordinator is at {self.endpoint}, not a daemon", "ask it with `gpumux cluster status`")

    def status(self) -> dict[str, Any]:
        """The daemon's report (daemon/report.py has the fields)."""
        ref = next(self._refs)
        self._send(msg.GetStatus(ref))
        return self._receive(msg.Report, ref).body

    def wait(self, seconds: float, watch: int | None = None) -> bool:
        """Wait, sending heartbeats. True as soon as the descriptor `watch` becomes readable.

        Raises DaemonGone if the daemon says goodbye.
        """
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        if watch is not None:
            poller.register(watch, zmq.POLLIN)
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._send_heartbeat()
            ready = dict(poller.poll(int(min(left, self.welcome.heartbeat_s) * 1000) + 1))
            if self._socket in ready:
                self._take()
            if watch is not None and watch in ready:
                return True
        return False

    def change(self, verb: str, job: str, drain: bool = False) -> None:
        """Pause, resume or stop (`verb`) a job, given by its whole id."""
        requests: dict[str, msg.Message] = {
            "pause": msg.PauseJob(0, job),
            "resume": msg.ResumeJob(0, job),
            "stop": msg.CloseJob(0, job, drain),
        }
        self.request(requests[verb])

    def request(self, message: Any) -> None:
        """Send a request that is answered with Done; its `ref` is filled in here."""
        ref = next(self._refs)
        self._send(replace(message, ref=ref))
        self._receive(msg.Done, ref)

    def regrade(self, job: str, priority: int | None = None, weight: float | None = None) -> None:
        """Change a job's priority (0 low, 1 high) or weight; returns when the change is in force."""
        self.request(msg.ChangeJob(0, job, priority, weight))

    def explain(self, job: str) -> dict[str, Any]:
        """How the job fares, why, and what to do: {job, short, verdict, causes, remedies, sentences, story}, as
        docs/protocol.md has them."""
        ref = next(self._refs)
        self._send(msg.ExplainJob(ref, job))
        return self._receive(msg.Report, ref).body

    def interference(self, program: str = "") -> dict[str, Any]:
        """Which programs slow which others down, as docs/protocol.md has it; `program`: only pairs with this one."""
        ref = next(self._refs)
        self._send(msg.GetInterference(ref, program))
        return self._receive(msg.Report, ref).body

    def profile(self, job: str, program: int | None = None) -> bytes:
        """The text of a profile file of `program` (None: the one the job ran most steps of), with an empty name."""
        ref = next(self._refs)
        self._send(msg.ProfileJob(ref, job, program))
        self._receive(msg.JobProfile, ref)
        return self._payload[0]

    def record(self, seconds: float) -> Recorded:
        """Record what runs for so many seconds. Ctrl-C ends the recording early and keeps it; a second one discards it.
        If the daemon is killed meanwhile, what it had sent is kept.

        Raises AdmissionRefused if another client records, DaemonGone if the daemon goes and has sent nothing."""
        ref = next(self._refs)
        found: list[Record] = []
        began = self._heard = time.monotonic()
        until = began + seconds
        self._send(msg.RecordTrace(ref, seconds))
        early = False
        while True:
            try:
                part = self._part(ref, until + self._timeout)
            except KeyboardInterrupt:
                if early:
                    raise
                early, until = True, time.monotonic()
                self._send(msg.RecordTrace(next(self._refs), 0.0))
                continue
            except DaemonGone as gone:
                if not found:
                    raise
                return Recorded(found, self._heard - began, gone.message)
            found += unpack(self._payload[0])
            if part.last:
                return Recorded(found, part.seconds, part.reason)

    def _part(self, ref: int, deadline: float) -> msg.TracePart:
        while (left := deadline - time.monotonic()) > 0:
            self._send_heartbeat()
            if self._socket.poll(int(min(left, self.welcome.heartbeat_s / 2) * 1000) + 1):
                message = self._take(ref)
                self._heard = time.monotonic()
                if isinstance(message, msg.TracePart) and message.ref == ref:
                    return message
            silent = time.monotonic() - self._heard
            if silent >= self.welcome.lease_s:
                break
            if silent >= 2 * self.welcome.heartbeat_s:  # a heartbeat is overdue
                check_listening(self._found, self._start_it, self._what)
        raise unanswered(self._found, self._start_it, self._what)

    def close(self) -> None:
        """Say goodbye and disconnect."""
        self._send(msg.Goodbye())
        self._shut()

    def __enter__(self) -> Control:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _shut(self) -> None:
        self._socket.close()
        self._context.term()

    def _send(self, message: msg.Message) -> None:
        try:
            self._socket.send_multipart(encode(message), zmq.NOBLOCK)
            self._spoke = time.monotonic()
        except zmq.Again:
            raise unanswered(self._found, self._start_it, self._what) from None

    def _receive(self, kind: type[Answer], ref: int, again: msg.Message | None = None) -> Answer:
        """The next message of `kind` that answers `ref`; heartbeats and others are skipped. again: a message to repeat
        until then."""
        deadline = time.monotonic() + self._timeout
        while True:
            left = max(0.0, deadline - time.monotonic())
            pause = left if again is None else min(left, AGAIN_S)
            if self._socket.poll(int(pause * 1000)):
                message = self._take(ref)
                if isinstance(message, kind) and getattr(message, "ref", 0) == ref:
                    return message
            elif pause == left or again is None:
                raise unanswered(self._found, self._start_it, self._what)
            else:
                self._send(again)

    def _take(self, ref: int = 0) -> msg.Message:
        """The waiting message. Raises the error of a refusal of `ref` or of the session, and DaemonGone."""
        message, self._payload = decode(self._socket.recv_multipart())
        if isinstance(message, msg.Refusal) and message.ref in (0, ref):
            raise from_code(message.code, message.message, message.remedy)
        if isinstance(message, msg.Leaving):
            raise DaemonGone(f"the daemon is leaving: {message.reason}", "wait for the next one")
        return message

    def _send_heartbeat(self) -> None:
        """Send a heartbeat if the last message is long ago."""
        now = time.monotonic()
        if now - self._spoke >= self.welcome.heartbeat_s / 2:
            self._send(msg.Heartbeat(now))
