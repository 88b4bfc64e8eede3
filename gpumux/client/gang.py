"""One job on several daemons: each has a rank of it, and here they are one session and one remote job to `Job`.

A step is sent to all ranks and is answered when all have answered. Messages of each daemon are received by a thread of
its own, since the caller would wait for one daemon while another one ends.
"""

from __future__ import annotations

import logging
import socket
import threading
import uuid
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch._C._distributed_c10d import TCPStore

from gpumux.burst.ranks import RankedStep
from gpumux.capture.lower import Lowered
from gpumux.capture.state import StateTable
from gpumux.client.remote import Remote, RemoteProgram
from gpumux.client.session import Handler, Payload, Session, Waits, open_message
from gpumux.client.transport import resolve_endpoint
from gpumux.errors import ConfigError, GpumuxError, NotSplittable
from gpumux.types import Gang, JobSpec
from gpumux.wire import messages as m
from gpumux.wire.messages import Message, Welcome

log = logging.getLogger("gpumux.client")


class GangSession:
    """The sessions with all daemons of a gang, in the order of their ranks. It has the methods of a Session that a job
    uses. `gang`: what the daemons are told of it, for rank 0."""

    def __init__(self, sessions: Sequence[Session], timeout_s: float) -> None:
        self.sessions = tuple(sessions)
        self.remotes: list[Remote] = []
        host = _own_address(sessions)
        self._store: TCPStore | None = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self.gang = Gang(uuid.uuid4().hex, 0, len(sessions), f"{host}:{self._store.port}", timeout_s)
        self.on_end: Callable[[], None] = _nothing  # called when one rank has ended
        self._changed = threading.Condition(threading.RLock())
        self._answers: dict[tuple[str, int], dict[int, tuple[m.StepDone, Sequence[Any]]]] = {}
        stop = threading.Event()
        weakref.finalize(self, stop.set).atexit = False
        for session in self.sessions:
            listen = partial(_listen, session, stop, weakref.ref(self))
            threading.Thread(target=listen, name="gpumux-rank", daemon=True).start()

    @classmethod
    def connect(cls, endpoints: Sequence[str], timeout_s: float) -> GangSession:
        """Open a session with each daemon. Raises what Session.connect raises, and ConfigError for daemons that can't
        be ranks of one job."""
        sessions: list[Session] = []
        try:
            for endpoint in endpoints:
                sessions.append(Session.connect(endpoint))
            kinds = [str(session.welcome.device["kind"]) for session in sessions]
            if len(set(kinds)) > 1:
                raise ConfigError(
                    f"the daemons' devices are of different kinds: {', '.join(kinds)}", "use daemons of one kind"
                )
            return cls(sessions, timeout_s)
        except BaseException:
            for session in sessions:
                session.close()
            raise

    # ---- what a Session has ----------------------------------------------------------------------

    @property
    def welcome(self) -> Welcome:
        return self.sessions[0].welcome

    @property
    def holds_low_work(self) -> bool:
        return self.sessions[0].holds_low_work

    @property
    def forked(self) -> bool:
        return self.sessions[0].forked

    @property
    def dead(self) -> GpumuxError | None:
        """The error that ended one of the sessions, None while all are open."""
        return next((session.dead for session in self.sessions if session.dead is not None), None)

    @property
    def endpoint(self) -> str:
        return ",".join(session.endpoint for session in self.sessions)

    def register(self, job_id: str, handler: Handler) -> None:
        for rank, session in enumerate(self.sessions):
            session.register(job_id, partial(self._on_message, rank, handler))

    def unregister(self, job_id: str) -> None:
        for session in self.sessions:
            session.unregister(job_id)

    def call(
        self,
        msg: Message,
        frames: Payload = (),
        timeout: float | None = 60.0,
        meanwhile: Callable[[], float] | None = None,
    ) -> tuple[Any, list[bytes]]:
        """Send a request to every rank, and return the answer of the first."""
        answers = [session.call(msg, frames, timeout, meanwhile) for session in self.sessions]
        return answers[0]

    def post(self, msg: Message, frames: Payload = ()) -> None:
        for session in self.sessions:
            session.post(msg, frames)

    def wait(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """As Session.wait."""
        with self._changed:
            if self._changed.wait_for(lambda: predicate() or self.dead is not None, timeout):
                if predicate():
                    return True
                assert self.dead is not None
                raise self.dead
            return False

    def close(self) -> None:
        for session in self.sessions:
            session.close()
        self._store = None  # which closes its port

    # ---- messages --------------------------------------------------------------------------------

    def open_job(self, job: str, spec: JobSpec) -> None:
        """Open a job's rank at each daemon. Raises what a daemon refuses with; none of them keeps the job then."""
        for rank, session in enumerate(self.sessions):
            session.call(open_message(job, replace(spec, gang=replace(self.gang, rank=rank))))

    def _on_message(self, rank: int, handler: Handler, message: Any, frames: list[bytes]) -> None:
        """Handle a message of one rank, in the thread that received it."""
        with self._changed:
            if isinstance(message, m.StepDone):
                self._answered(rank, handler, message, frames)
            elif isinstance(message, m.TransferDone):
                self.remotes[rank].on_transfer(message, frames)
            else:
                if isinstance(message, m.JobEnded):
                    self.remotes[rank].ended = message
                handler(message, frames)
                if isinstance(message, m.JobEnded):
                    self.on_end()
            self._changed.notify_all()

    def _answered(self, rank: int, handler: Handler, done: m.StepDone, frames: list[bytes]) -> None:
        key = done.job, done.step
        answers = self._answers.setdefault(key, {})
        answers[rank] = done, frames
        if len(answers) < len(self.sessions):
            return
        del self._answers[key]
        every = [answers[r] for r in range(len(self.sessions))]
        slowest = done._replace(
            queue_s=max(one.queue_s for one, _ in every),
            device_s=max(one.device_s for one, _ in every),
            total_s=max(one.total_s for one, _ in every),
        )
        handler(slowest, cast("list[bytes]", [given for _, given in every]))

    def notify(self) -> None:
        """A session has ended: wake whatever waits."""
        with self._changed:
            self._changed.notify_all()
        self.on_end()


def _nothing() -> None:
    return None


def _listen(session: Session, stop: threading.Event, gang: weakref.ref[GangSession]) -> None:
    """Receive one daemon's messages until its session ends or the gang is dropped."""
    with suppress(GpumuxError):
        session.wait(stop.is_set, None)
    found = gang()
    if found is not None:
        found.notify()


def _own_address(sessions: Sequence[Session]) -> str:
    """The address at which the daemons reach this process: that of this machine towards the first one on another
    machine, or loopback."""
    for session in sessions:
        endpoint = resolve_endpoint(session.endpoint)
        if endpoint.is_ipc:
            continue
        host, _, port = endpoint.text.removeprefix("tcp://").rpartition(":")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # nothing is sent: it finds the route
            probe.connect((host, int(port)))
            return str(probe.getsockname()[0])
    return "127.0.0.1"


# ---- Programs and state on all ranks.


class GangProgram:
    """A step's Programs on all ranks, with the attributes of a RemoteProgram that a job uses. A slot is the slot of
    this number on every rank."""

    def __init__(self, number: int, lowered: Lowered, ranked: RankedStep, parts: Sequence[RemoteProgram]) -> None:
        self.number = number
        self.program = lowered.program
        self.parts = tuple(parts)
        self.home = parts[0].home
        self.free = set(range(min(len(part.slots) for part in parts)))
        self.device_s: float | None = None
        self._ranked = ranked
        views = [self.program.views[v] for v in self.program.results]
        shapes = [torch.empty(v.size, dtype=getattr(torch, v.dtype), device="meta") for v in views]
        self.slots = [_Shapes(shapes)]
        self.copied_in = 0

    def fill(self, slot: int, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Copy each rank's part of a batch into its slot. Returns the frames to send, by rank."""
        found = []
        for step, part in zip(self._ranked.ranks, self.parts, strict=True):
            found.append(part.fill(slot, [one.of(tensors[one.position]) for one in step.inputs]))
        self.copied_in = sum(part.copied_in for part in self.parts)
        return found

    def take(self, slot: int, frames: Sequence[Any]) -> list[torch.Tensor]:
        """The tensors that the step returned, put together of the ranks' parts."""
        given = [part.take(slot, some) for part, some in zip(self.parts, frames, strict=True)]
        found = self._ranked.put_together(given)
        return found if self.program.generator is None else [*found, given[0][-1]]

    def release(self) -> None:
        self.slots.clear()


class _Shapes:
    """What a future needs to know of a step's results before they are there."""

    def __init__(self, results: list[torch.Tensor]) -> None:
        self.results = results
        self.inputs: list[torch.Tensor] = []


class GangRemote:
    """A job's requests to all its daemons, with the methods of a Remote that a job uses."""

    def __init__(
        self, session: GangSession, job: str, table: StateTable, waits: Waits, *, observer: Any | None = None
    ) -> None:
        self.session = session
        self.waits = waits
        self.job = job
        self.ended: m.JobEnded | None = None
        self.programs: dict[int, GangProgram] = {}
        self._table = table
        self._numbers: list[list[int]] = []  # of each step's Programs, on each rank
        self._homes: dict[int, tuple[int, ...]] = {}
        self.ranks = [Remote(one, job, table, Waits(job, False), observer=None) for one in session.sessions]
        self._closing = False
        session.remotes = self.ranks
        session.on_end = self._end_others

    @property
    def give_up_s(self) -> float | None:
        return self.ranks[0].give_up_s

    @give_up_s.setter
    def give_up_s(self, seconds: float | None) -> None:
        for remote in self.ranks:
            remote.give_up_s = seconds

    def stop_observing(self) -> None:
        return None

    def call(
        self,
        make: Callable[..., Any],
        *args: Any,
        frames: Sequence[bytes] = (),
        meanwhile: Callable[[], float] | None = None,
    ) -> tuple[Any, Sequence[Any]]:
        """Send a request to every rank, and return the answer of the first; of statistics, those of all ranks."""
        answers = [remote.call(make, *args, frames=frames, meanwhile=meanwhile) for remote in self.ranks]
        if make is m.JobStats:
            body = {**answers[0][0].body, "ranks": [reply.body for reply, _ in answers]}
            return replace(answers[0][0], body=body), answers[0][1]
        return answers[0]

    def upload(self, lowered: Lowered, ranked: RankedStep) -> int:
        """Upload a step's Programs. Returns their number. Raises NotSplittable for a step that needs a buffer on other
        ranks than the steps before it."""
        for buffer, ranks in ranked.homes.items():
            before = self._homes.get(buffer, ranks)
            if before != ranks:
                raise NotSplittable(
                    f"{self._table.buffers[buffer].name} is on ranks {before} for the steps so far, and this one needs"
                    f" it on {ranks}",
                    "let both steps use it in the layer that the plan gives those ranks",
                )
        numbers = [
            remote.upload(cast("Lowered", step.lowered)) for remote, step in zip(self.ranks, ranked.ranks, strict=True)
        ]
        self._homes |= ranked.homes
        if numbers in self._numbers:
            return self._numbers.index(numbers)
        number = len(self._numbers)
        parts = [remote.programs[mine] for remote, mine in zip(self.ranks, numbers, strict=True)]
        self._numbers.append(numbers)
        self.programs[number] = GangProgram(number, lowered, ranked, parts)
        return number

    def post_step(self, step: int, number: int, slot: int, scalars: list[Any], frames: Sequence[Any]) -> None:
        for remote, mine, some in zip(self.ranks, self._numbers[number], frames, strict=True):
            remote.post_step(step, mine, slot, scalars, some)

    # ---- state

    def resident(self) -> list[int]:
        """Job buffers that exist in a daemon."""
        return list(dict.fromkeys(b for remote in self.ranks for b in remote.resident()))

    def push(self, buffers: Sequence[int], *, first: bool = False) -> None:
        """Copy local state to all ranks that hold it."""
        for remote in self.ranks:
            mine = set(remote.resident())
            remote.push([b for b in buffers if b in mine], first=first)

    def pull(self, write: Callable[[int, torch.Tensor], None], wanted: Collection[int] | None = None) -> None:
        """Fetch state (all, or the `wanted` buffers), each buffer from the first rank that holds it."""
        done: set[int] = set()
        for remote in self.ranks:
            mine = [b for b in remote.resident() if b not in done and (wanted is None or b in wanted)]
            done.update(mine)
            remote.pull(write, set(mine))

    def end_error(self) -> GpumuxError:
        ended = next((remote for remote in self.ranks if remote.ended is not None), self.ranks[0])
        return ended.end_error()

    def on_transfer(self, done: m.TransferDone, frames: Sequence[Any]) -> None:
        raise AssertionError("transfers belong to ranks")

    def release(self) -> None:
        for remote in self.ranks:
            remote.release()
        self.programs.clear()

    # ---- the end

    def _end_others(self) -> None:
        """Close the job on the other ranks when one has ended: their processes would wait for that one until their time
        is over. From a thread of its own, since a thread that receives messages can't wait for an answer."""
        if not self._closing:
            self._closing = True
            threading.Thread(target=self._close_others, name="gpumux-gang-end", daemon=True).start()

    def _close_others(self) -> None:
        for remote, session in zip(self.ranks, self.session.sessions, strict=True):
            if remote.ended is None and session.dead is None:
                with suppress(GpumuxError):
                    remote.call(m.CloseJob, False)
