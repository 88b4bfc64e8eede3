"""`gpumux cluster run`: devices are asked for under the script's name, the script is started on their node, and its
first submit() takes them (gpumux/client/placed/handover.py).

What holds the devices until then is a job of the coordinator like any other, so quotas, priorities and access rules
count before anything is started. It can't be moved until the script has it. When the script has ended, so has the job.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO, Final

from gpumux.client.placed.handover import Handover
from gpumux.client.session import Session
from gpumux.coordinator.script import STDERR, RunningScript, ScriptCommand, ScriptProcess
from gpumux.errors import AdmissionRefused, ConfigError, DaemonGone, GpumuxError, JobFailed, UnknownJob
from gpumux.wire import messages as msg
from gpumux.wire.endpoint import CLUSTER_ENVIRONMENT, ENVIRONMENT, Endpoint, parse

CONNECT_S: Final = 10.0
ANSWER_S: Final = 60.0
FIRST_S: Final = 2.0  # until the first line about why there are no devices yet
EXPLAIN_S: Final = 30.0  # between two of them

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptRequest:
    """A script, and the devices that its first submit() is to have. priority: 0 (low) or 1 (high); nbytes: memory on
    each of the devices; ship: whether `command.directory` is copied to the node."""

    command: ScriptCommand
    name: str
    priority: int
    devices: int
    nbytes: int
    ship: bool = False


class HeldDevices:
    """A job of the coordinator that has devices until a script takes it."""

    def __init__(self, endpoint: Endpoint, session: Session, request: ScriptRequest) -> None:
        """Ask for devices. Raises what the coordinator refuses with."""
        self.job = uuid.uuid4().hex
        self._endpoint = endpoint
        self._session = session
        self._attempt = 0
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._asks = msg.PlaceJob(
            0, self.job, request.name, request.priority, request.devices, request.nbytes, [], 0, False, 0
        )
        session.register(self.job, lambda message, frames: self._inbox.put(message))
        session.call(self._asks, timeout=ANSWER_S)

    def wait(self, say: Say) -> msg.JobPlaced:
        """Wait for them; `say` is told now and then why there are none. Raises AdmissionRefused or JobFailed if there
        won't be any, and DaemonGone if the coordinator goes."""
        wait_s = min(FIRST_S, EXPLAIN_S)
        while True:
            if not self._session.wait(lambda: not self._inbox.empty(), wait_s):
                wait_s = EXPLAIN_S
                with suppress(UnknownJob):  # it has just been answered
                    body = self._session.call(msg.ExplainJob(0, self.job), timeout=ANSWER_S)[0].body
                    say("waits for devices: " + " ".join(body["sentences"]))
                continue
            message = self._inbox.get()
            if isinstance(message, msg.JobPlaced):
                self._attempt = message.attempt
                return message
            self._answer(message)
            if isinstance(message, msg.JobAnswered):
                text = f"no devices for {self._asks.name!r}, its job was {message.outcome}: {message.reason}"
                if message.outcome == "refused":
                    raise AdmissionRefused(text, "ask for less by --gpus or --memory, or ask the cluster's operator")
                raise JobFailed(text, "run it again")

    def attend(self) -> None:
        """Answer what the coordinator asked since: while no script has the job, it can be cancelled."""
        while not self._inbox.empty():
            self._answer(self._inbox.get())

    def _answer(self, message: Any) -> None:
        if isinstance(message, msg.VacateDevices):
            with suppress(GpumuxError):  # a coordinator that is gone asks again
                self._session.post(msg.DevicesVacated(self.job, message.attempt))

    def end(self, fault: str) -> None:
        """The script has ended, or was not started: so has the job, whichever process had it last. `fault`: why it
        failed, "" if it did not. Raises nothing: a coordinator that is gone notices by itself."""
        try:
            if self._session.dead is not None:  # it was started again meanwhile
                with Session.connect(self._endpoint.text, CONNECT_S, role="control") as fresh:
                    self._end(fresh, fault)
            else:
                self._end(self._session, fault)
        except GpumuxError:  # among them UnknownJob: the job has ended already
            return

    def _end(self, session: Session, fault: str) -> None:
        if self._attempt:
            session.call(replace(self._asks, attempt=self._attempt), timeout=ANSWER_S)  # it may be the script's by now
        session.call(msg.PlacedJobEnded(0, self.job, fault[:250]), timeout=ANSWER_S)


class Interrupts:
    """What the script gets for signals to this process: a second Ctrl-C ends it, a third one at once."""

    def __init__(self) -> None:
        self._interrupts: Iterator[int] = iter((signal.SIGINT, signal.SIGTERM))

    def passed_on(self, number: int) -> int:
        return next(self._interrupts, signal.SIGKILL) if number == signal.SIGINT else number


def run_script(endpoint: Endpoint, request: ScriptRequest) -> int:
    """Run the script beside the devices that the coordinator at `endpoint` chooses, and return its exit code: 128 and
    the signal's number if a signal ended it. Output goes to this process's stdout and stderr.

    Raises ConfigError if the script can't be started there, DaemonGone if the coordinator goes before that, or the
    script's node at any time, and what the coordinator refuses with."""
    with ExitStack() as stack:
        session = stack.enter_context(_joined(endpoint))
        held = HeldDevices(endpoint, session, request)
        fault = "the script was not started"

        def end() -> None:
            held.end(fault)

        stack.callback(end)
        placed = held.wait(_say)
        script = _start(stack, endpoint, session.welcome.device.get("ray", ""), request, held, placed)
        fault = "the script was ended"
        with _passing_on(script, Interrupts()):
            status, taken = follow(script, held.attend, sys.stdout.buffer, sys.stderr.buffer)
        if status == 0 and not taken:
            _say('the script did not use the devices that were held for it: client.submit(..., cluster="auto") does')
        code = status if status >= 0 else 128 - status
        fault = f"the script ended with status {code}" if code else ""
        return code


def follow(script: RunningScript, attend: Callable[[], None], out: BinaryIO, err: BinaryIO) -> tuple[int, bool]:
    """Copy the script's output until it has ended; its status, and whether it took the devices. `attend` is called in
    between."""
    while True:
        output = script.read()
        for stream, data in output.pieces:
            to = err if stream == STDERR else out
            to.write(data)
            to.flush()
        if output.status is not None:
            return output.status, output.taken
        attend()


@contextmanager
def _joined(endpoint: Endpoint) -> Iterator[Session]:
    remedy = "start one with `gpumux cluster up`, or name another with --cluster or GPUMUX_CLUSTER"
    try:
        session = Session.connect(endpoint.text, CONNECT_S, role="control")
    except DaemonGone:
        raise DaemonGone(f"no coordinator answers at {endpoint.text}", remedy) from None
    with session:
        if session.welcome.device.get("kind") != "cluster":
            raise ConfigError(f"a daemon is at {endpoint.text}, not a coordinator", remedy)
        yield session


def _start(
    stack: ExitStack, endpoint: Endpoint, ray: str, request: ScriptRequest, held: HeldDevices, placed: msg.JobPlaced
) -> RunningScript:  # fmt: skip
    """Start the script on the node of the first device. `stack` ends it. Raises ConfigError and DaemonGone."""
    if not ray:
        beside = dict(zip(placed.nodes, placed.endpoints, strict=True))
        first = parse(placed.endpoints[0])
        if not (endpoint.is_ipc and first.is_ipc):
            raise ConfigError(
                f"{placed.nodes[0]}, which was chosen, is reached by {first.text} and so may be another machine, where"
                " nothing starts scripts for this coordinator",
                'start the script there by yourself, with client.submit(..., cluster="auto") in it and'
                " GPUMUX_CLUSTER set; or have Ray on the machines, and `gpumux cluster up --ray`",
            )
        if request.ship:
            raise ConfigError("--ship copies to nodes of Ray, and the chosen one is this machine", "leave out --ship")
        script: RunningScript = ScriptProcess(_command(endpoint, request, held, beside, placed.nodes[0]))
    else:
        from gpumux.coordinator.ray.script_actor import RayNodes

        nodes = stack.enter_context(closing(RayNodes(ray, request.command.directory if request.ship else "")))
        node = nodes.find(placed.nodes[0])
        if endpoint.is_ipc and not nodes.is_here(node):
            raise ConfigError(
                f"the script would run on {node.host}, from where the coordinator at {endpoint.text} can't be reached",
                "have the coordinator listen on tcp, too (`gpumux cluster up --endpoint tcp://...`, with CURVE keys),"
                " and name that by --cluster",
            )
        beside = nodes.local_endpoints(node, placed.nodes)
        script = nodes.start(node, _command(endpoint, request, held, beside, placed.nodes[0]))
    stack.callback(script.close)
    return script


def _command(
    endpoint: Endpoint, request: ScriptRequest, held: HeldDevices, beside: dict[str, str], node: str
) -> ScriptCommand:  # fmt: skip
    handover = Handover(endpoint.text, held.job, request.priority, request.devices, request.nbytes, beside)
    variables = {CLUSTER_ENVIRONMENT: endpoint.text, ENVIRONMENT: beside[node], **request.command.environment}
    # By tcp a user is known by its key, which the script may have on any machine as any user.
    uid = os.getuid() if endpoint.is_ipc else None
    return replace(request.command, environment=variables, handover=handover.text(), uid=uid)


@contextmanager
def _passing_on(script: RunningScript, interrupts: Interrupts) -> Iterator[None]:
    """Pass SIGINT, SIGTERM and SIGHUP on to the script meanwhile. A thread does it, since a handler may come in the
    middle of any call."""
    asked: queue.SimpleQueue[int] = queue.SimpleQueue()  # its `put` may interrupt its `get`; 0 ends the thread

    def asks(number: int, frame: FrameType | None) -> None:
        asked.put(number)

    def passes() -> None:
        while number := asked.get():
            passed = interrupts.passed_on(number)
            if number == signal.SIGINT and passed == signal.SIGINT:
                _say("the script is interrupted; Ctrl-C again ends it")
            script.signal(passed)

    before = {number: signal.signal(number, asks) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    thread = threading.Thread(target=passes, name="gpumux-signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        asked.put(0)
        thread.join()


def _say(text: str) -> None:
    sys.stderr.write(f"gpumux: {text}\n")
    sys.stderr.flush()


def name_of(script: str) -> str:
    """The name that a script's job has: the file's, without its ending."""
    return Path(script).stem


def environment_of(pairs: Sequence[str]) -> dict[str, str]:
    """The variables of K=V texts. Raises ConfigError for another text."""
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name or not equals or "\0" in pair:
            raise ConfigError(f"--env {pair!r:.60} names no variable with a value", "write --env NAME=VALUE")
        found[name] = value
    return found
