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
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeVar, cast

import torch
from torch._C._distributed_c10d import TCPStore

from gpumux.burst.ranks import BurstSplitter, RankedStep
from gpumux.capture.lower import Lowered
from gpumux.capture.state import StateTable
from gpumux.client.recovery import snapshot_interval_s
from gpumux.client.remote import Remote, RemoteProgram, SendObserver, StateRead, error_of, snapshot_bytes, to_push
from gpumux.client.session import CONNECT_S, Answer, Asked, Handler, Payload, Session, Waits
from gpumux.client.transport import resolve_endpoint
from gpumux.errors import (
    ConfigError,
    DaemonGone,
    ExecutorCrashed,
    GpumuxError,
    InternalError,
    JobClosed,
    JobFailed,
    NotSplittable,
    PeersLost,
    TooFewRanks,
    UnknownJob,
    from_code,
)
from gpumux.program.ir import aligned
from gpumux.types import GENERATOR_BYTES, Gang, JobSpec
from gpumux.wire import messages as m
from gpumux.wire.messages import Message, Welcome

T = TypeVar("T")
log = logging.getLogger("gpumux.client")

END_S = 60.0  # how long daemons may take to end a job that has ended on one rank
# Ends of a rank that may follow from another rank's, the likelier the later.
_FOLLOWS: Final = (DaemonGone.code, ExecutorCrashed.code, PeersLost.code, InternalError.code)


class GangSession:
    """The sessions with all daemons of a gang, in the order of their ranks, for one job. It has the methods of a
    Session that a job uses. `gang`: what the daemons are told of it, for rank 0.

    When the job ends on one rank, or a daemon is gone, the job is closed on the other ranks: their processes would wait
    for that one until their time is over. `dead` says why the gang ended, once no daemon has the job any more."""

    def __init__(self, sessions: Sequence[Session], timeout_s: float) -> None:
        self.sessions = tuple(sessions)
        self.welcome = _common_welcome(sessions)
        self.remotes: list[Remote] = []
        self.dead: GpumuxError | None = None
        host = _own_address(sessions)
        self._store: TCPStore | None = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self.gang = Gang(uuid.uuid4().hex, 0, len(sessions), f"{host}:{self._store.port}", timeout_s)
        self._changed = threading.Condition(threading.RLock())
        self._job = ""
        self._handler: Handler = _drop
        self._answers: dict[int, dict[int, tuple[m.StepDone, Sequence[Any]]]] = {}  # by step and rank
        self._saved: dict[int, dict[int, m.SnapshotSaved]] = {}  # by snapshot and rank
        self._ends: dict[int, m.JobEnded] = {}  # by rank
        self._refused: list[tuple[int, m.JobEnded]] = []  # ranks that did not run a step, and why, as ends
        self._draining = False  # the job is being closed by its user
        self._ending = False  # it is being closed because a rank has ended
        self._told_to_close: set[int] = set()  # ranks that end because another one did
        stop = threading.Event()
        weakref.finalize(self, stop.set).atexit = False
        for each in self.sessions:
            listen = partial(_listen, each, stop, weakref.ref(self))
            threading.Thread(target=listen, name="gpumux-rank", daemon=True).start()

    @classmethod
    def connect(cls, endpoints: Sequence[str], timeout_s: float, connect_s: float = CONNECT_S) -> GangSession:
        """Open a session with each daemon, each within `connect_s` seconds. Raises what Session.connect raises, and
        ConfigError for daemons that can't be ranks of one job."""
        sessions: list[Session] = []
        try:
            for endpoint in endpoints:
                try:
                    sessions.append(Session.connect(endpoint, connect_s))
                except DaemonGone as gone:
                    start = f"start the daemon of rank {len(sessions)} (gpumux serve --endpoint {endpoint})"
                    raise DaemonGone(gone.message, f"{start}, or name others") from None
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

    def reconnect(self, timeout: float) -> GangSession:
        """Sessions with the same daemons for a new gang, after the job of this one has ended on all of them. Raises
        what `connect` raises."""
        with self._changed:
            self._end()
            self._changed.wait_for(lambda: self.dead is not None)
        return GangSession.connect([session.endpoint for session in self.sessions], self.gang.timeout_s, timeout)

    # ---- what a Session has ----------------------------------------------------------------------

    @property
    def each_daemon(self) -> tuple[Session, ...]:
        return self.sessions

    @property
    def holds_low_work(self) -> bool:
        return self.sessions[0].holds_low_work

    @property
    def forked(self) -> bool:
        return self.sessions[0].forked

    @property
    def endpoint(self) -> str:
        return ",".join(session.endpoint for session in self.sessions)

    @property
    def device_facts(self) -> str:
        return "; ".join(dict.fromkeys([session.device_facts for session in self.sessions]))

    def open_job(self, job: str, spec: JobSpec, timeout: float | None = 60.0) -> None:
        """Open a job's rank at each daemon, or an ordinary job at a single one. Raises what a daemon refuses with; all
        sessions are closed then, so that no daemon keeps the job."""
        try:
            for rank, session in enumerate(self.sessions):
                gang = replace(self.gang, rank=rank) if len(self.sessions) > 1 else None
                session.open_job(job, replace(spec, gang=gang), timeout)
        except BaseException:
            self.close()
            raise

    def register(self, job_id: str, handler: Handler) -> None:
        self._job, self._handler = job_id, handler
        for rank, session in enumerate(self.sessions):
            session.register(job_id, partial(self._on_message, rank))

    def unregister(self, job_id: str) -> None:
        for session in self.sessions:
            session.unregister(job_id)

    def each(self, request: Callable[[int], T]) -> list[T]:
        """The results of a request for each rank. If one fails because the gang has ended, the error is the gang's: the
        rank's own may be a mere consequence."""
        try:
            return [request(rank) for rank in range(len(self.sessions))]
        except GpumuxError as error:
            with self._changed:
                if self.forked or not (self._ends or any(session.dead is not None for session in self.sessions)):
                    raise
                self._draining = False  # not all ranks were told
                self._end()
                self._changed.wait_for(lambda: self.dead is not None)
                raise self._reason() from error

    def call_each(
        self,
        msg: Message,
        frames: Payload = (),
        timeout: float | None = 60.0,
        meanwhile: Callable[[], float] | None = None,
    ) -> list[tuple[Any, list[bytes]]]:
        """Send a request to every rank. Returns their answers."""
        if isinstance(msg, m.CloseJob):
            self._draining = True
        return self.each(lambda rank: self.sessions[rank].call(msg, frames, timeout, meanwhile))

    def call(self, msg: Message, frames: Payload = (), timeout: float | None = 60.0) -> tuple[Any, list[bytes]]:
        """Send a request to every rank, and return the answer of the first."""
        return self.call_each(msg, frames, timeout)[0]

    def ask(self, msg: Message) -> GangAsked:
        """As Session.ask, of every rank."""
        return GangAsked(self.each(lambda rank: self.sessions[rank].ask(msg)))

    def wait_reply(self, asked: GangAsked) -> None:
        self.each(lambda rank: self.sessions[rank].wait_reply(asked.parts[rank]))

    def post(self, msg: Message, frames: Payload = ()) -> None:
        for session in self.sessions:
            session.post(msg, frames)

    def wait(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """As Session.wait."""
        with self._changed:
            if self._changed.wait_for(lambda: predicate() or self.dead is not None, timeout):
                if predicate():
                    return True
                raise self._reason()
            return False

    def close(self) -> None:
        with self._changed:
            self._ending = True
            self.dead = self.dead or DaemonGone("this session is closed", "open another")
            self._changed.notify_all()
        for session in self.sessions:
            session.close()
        self._store = None  # which closes its port

    # ---- messages --------------------------------------------------------------------------------

    def _on_message(self, rank: int, message: Any, frames: list[bytes]) -> None:
        """Handle a message of one rank, in the thread that received it."""
        with self._changed:
            if isinstance(message, m.StepDone):
                self._answered(rank, message, frames)
            elif isinstance(message, m.TransferDone):
                self.remotes[rank].on_transfer(message, frames)
            elif isinstance(message, m.SnapshotSaved):
                self._was_saved(rank, message)
            elif isinstance(message, m.StepFailed):  # the others may have run the step: the gang is of no use now
                self._refused.append((rank, m.JobEnded(message.job, message.code, message.message, message.remedy)))
                self._end()
            elif isinstance(message, m.JobEnded):
                self._ends[rank] = self.remotes[rank].ended = message
                self._end()
                self._decide()
            else:
                self._handler(message, frames)
            self._changed.notify_all()

    def _answered(self, rank: int, done: m.StepDone, frames: list[bytes]) -> None:
        answers = self._answers.setdefault(done.step, {})
        answers[rank] = done, frames
        if len(answers) < len(self.sessions):
            return
        del self._answers[done.step]
        every = [answers[r] for r in range(len(self.sessions))]
        slowest = done._replace(
            queue_s=max(one.queue_s for one, _ in every),
            device_s=max(one.device_s for one, _ in every),
            total_s=max(one.total_s for one, _ in every),
        )
        self._handler(slowest, cast("list[bytes]", [given for _, given in every]))

    def _was_saved(self, rank: int, saved: m.SnapshotSaved) -> None:
        """A snapshot counts when all ranks have saved it: they go back to one step."""
        ranks = self._saved.setdefault(saved.snapshot, {})
        ranks[rank] = saved
        if len(ranks) < len(self.sessions):
            return
        every = self._saved.pop(saved.snapshot)
        failed = next((one for _, one in sorted(every.items()) if one.code), saved)
        self._handler(replace(failed, seconds=max(one.seconds for one in every.values())), [])

    # ---- the end

    def lost(self) -> None:
        """A session has ended."""
        with self._changed:
            self._end()
            self._decide()
            self._changed.notify_all()

    def _end(self) -> None:
        """Begin to close the job on all ranks. From a thread of its own, since one that handles a message must not wait
        for another session's lock. Idempotent. Needs the lock."""
        if not self._draining and not self._ending:
            self._ending = True
            threading.Thread(target=self._close_all, name="gpumux-gang-end", daemon=True).start()

    def _close_all(self) -> None:
        with self._changed:
            self._told_to_close.update(rank for rank in range(len(self.sessions)) if rank not in self._ends)
        for rank in self._told_to_close:
            with suppress(GpumuxError):  # its daemon is gone
                self.sessions[rank].post(m.CloseJob(0, self._job, False))
        with self._changed:
            if not self._changed.wait_for(lambda: self.dead is not None, END_S):
                self._decide(at_once=True)
                self._changed.notify_all()

    def _decide(self, at_once: bool = False) -> None:
        """Find why the gang has ended, if the job has ended on all ranks or their daemons are gone. `at_once`: it has
        as good as ended. Needs the lock."""
        alive = [r for r, session in enumerate(self.sessions) if r not in self._ends and session.dead is None]
        if self.dead is not None or (alive and not at_once):
            return
        gone = next((session.dead for session in self.sessions if session.dead is not None), None)
        if gone is None and alive:
            gone = DaemonGone(f"rank {alive[0]} did not end within {END_S:g} s", "look at gpumux status of its daemon")
        cause = self._cause(gone is not None)
        if cause is not None:
            self._handler(cause, [])
        self.dead = gone if cause is None else error_of(cause)

    def _cause(self, daemon_gone: bool) -> m.JobEnded | None:
        """The end, of those of the ranks, that the others follow from. None: they follow from a daemon's."""
        ends = [(r, end) for r, end in sorted(self._ends.items()) if end.code or r not in self._told_to_close]
        ends += [(r, end) for r, end in self._refused if end.code not in (UnknownJob.code, JobClosed.code)]
        ends = ends or ([] if daemon_gone else [*self._refused, *self._ends.items()])
        if not ends:
            return None
        rank, first = min(ends, key=lambda end: _FOLLOWS.index(end[1].code) if end[1].code in _FOLLOWS else -1)
        if daemon_gone and first.code in _FOLLOWS:
            return None
        return replace(first, message=f"rank {rank}: {first.message}") if first.message else first

    def _reason(self) -> GpumuxError:
        assert self.dead is not None
        return from_code(self.dead.code, self.dead.message, self.dead.remedy)


class GangAsked:
    """A request under way at each rank, as Asked is at one daemon."""

    def __init__(self, parts: Sequence[Asked]) -> None:
        self.parts = tuple(parts)

    def answers(self) -> list[Answer]:
        """As Asked.answers, in the order of the ranks."""
        return [answer for part in self.parts for answer in part.answers()]

    def reply(self) -> Any | None:
        """A Refusal if there is one, else the answer of the first; None while one is missing."""
        replies = [part.reply() for part in self.parts]
        if None in replies:
            return None
        return next((reply for reply in replies if isinstance(reply, m.Refusal)), replies[0])

    def forget(self) -> None:
        for part in self.parts:
            part.forget()


def _drop(message: Any, frames: list[bytes]) -> None:
    return None


def _listen(session: Session, stop: threading.Event, gang: weakref.ref[GangSession]) -> None:
    """Receive one daemon's messages until its session ends or the gang is dropped."""
    with suppress(GpumuxError):
        session.wait(stop.is_set, None)
    found = gang()
    if found is not None:
        found.lost()


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


def _common_welcome(sessions: Sequence[Session]) -> Welcome:
    """The first daemon's, with a snapshot interval only if all of them keep snapshots."""
    first = sessions[0].welcome
    intervals = [snapshot_interval_s(session) for session in sessions]
    if any(intervals) and not all(intervals):
        log.warning(
            "the daemon at %s keeps no snapshots, and others do: the job can't come back if a daemon or a process ends."
            " Start it with --state-dir, too",
            sessions[intervals.index(0.0)].endpoint,
        )
    return replace(first, device={**first.device, "snapshot_s": max(intervals) if all(intervals) else 0.0})


# ---- Programs and state on all ranks.


class GangSlots:
    """The free slots of a step's Programs, with the methods of a set that a job uses. A number stands for a slot of
    each rank. Programs of several steps may be one on some rank (a rank without the optimizer that makes them differ),
    and then share its slots."""

    def __init__(self, parts: Sequence[RemoteProgram]) -> None:
        self._parts = tuple(parts)
        self._taken: dict[int, tuple[int, ...]] = {}

    def __bool__(self) -> bool:
        return all(part.free for part in self._parts)

    def pop(self) -> int:
        """Take a slot on every rank, each of which has to have one."""
        slot = next(n for n in range(len(self._taken) + 1) if n not in self._taken)
        self._taken[slot] = tuple([part.free.pop() for part in self._parts])
        return slot

    def add(self, slot: int) -> None:
        """Give a slot back. Idempotent."""
        for part, mine in zip(self._parts, self._taken.pop(slot, ()), strict=False):
            part.free.add(mine)

    def of_ranks(self, slot: int) -> tuple[int, ...]:
        """The slot of each rank."""
        return self._taken[slot]


class GangProgram:
    """A step's Programs on all ranks, with the attributes of a RemoteProgram that a job uses."""

    def __init__(self, number: int, lowered: Lowered, ranked: RankedStep, parts: Sequence[RemoteProgram]) -> None:
        self.number = number
        self.program = lowered.program
        self.parts = tuple(parts)
        self.home = parts[0].home
        self.free = GangSlots(parts)
        self.device_s: float | None = None
        self._ranked = ranked
        views = [self.program.views[v] for v in self.program.results]
        shapes = [torch.empty(v.size, dtype=getattr(torch, v.dtype), device="meta") for v in views]
        self.slots = [_Shapes(shapes)]
        self.copied_in = 0
        self.fails_alone = False  # ranks would have to undo it together

    def laid(self, slot: int, batch: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The tensors of a batch that lies in a slot: its own, because each rank's slot has a part of them."""
        return batch

    def fill(self, slot: int, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Copy each rank's part of a batch into its slot. Returns the frames to send, by rank."""
        found = []
        for step, part, mine in zip(self._ranked.ranks, self.parts, self.free.of_ranks(slot), strict=True):
            found.append(part.fill(mine, [one.of(tensors[one.position]) for one in step.inputs]))
        self.copied_in = sum(part.copied_in for part in self.parts)
        return found

    def take(self, slot: int, frames: Sequence[Any]) -> list[torch.Tensor]:
        """The tensors that the step returned, put together of the ranks' parts."""
        slots = self.free.of_ranks(slot)
        given = [part.take(mine, some) for part, mine, some in zip(self.parts, slots, frames, strict=True)]
        found = self._ranked.put_together(given)
        return found if self.program.generator is None else [*found, given[0][-1]]

    def release(self) -> None:
        self.slots.clear()


class _Shapes:
    """What a future needs to know of a step's results before they are there."""

    def __init__(self, results: list[torch.Tensor]) -> None:
        self.results = results


@dataclass(frozen=True, slots=True)
class _Upload:
    """A step's Programs. `numbers`: those of its ranks' Programs; `load`: the load after which they are all there."""

    numbers: list[int]
    lowered: Lowered
    ranked: RankedStep
    load: int


class GangRemote:
    """A job's requests to all its daemons, with the methods of a Remote that a job uses.

    A load is what the ranks loaded for one upload. It is counted also when some ranks could not load their Program: the
    others have theirs, and the buffers of later Programs lie behind its buffers.

    A job of a cluster may go on over another number of daemons (`reset`). Its uploads are then split anew by the
    `splitter`, and keep their numbers, and the loads theirs, so that what was recorded of the job still holds."""

    def __init__(
        self, session: GangSession, job: str, table: StateTable, waits: Waits, *, observer: SendObserver | None = None,
        splitter: BurstSplitter | None = None,
    ) -> None:  # fmt: skip
        self.session = session
        self.waits = waits
        self.job = job
        self.ended: m.JobEnded | None = None
        self.programs: dict[int, GangProgram] = {}
        self._observer = observer
        self._splitter = splitter
        self._table = table
        self._loads: list[tuple[int, ...]] = []  # how many Programs each rank has after each load
        self._uploads: list[_Upload] = []  # by number
        self._homes: dict[int, tuple[int, ...]] = {}
        self._sent: set[int] = set()  # buffers whose first values were sent
        self.ranks = self._remotes(session)
        session.remotes = self.ranks

    def _remotes(self, session: GangSession) -> list[Remote]:
        return [Remote(one, self.job, self._table, Waits(self.job, False), observer=None) for one in session.sessions]

    @property
    def give_up_s(self) -> float | None:
        return self.ranks[0].give_up_s

    @give_up_s.setter
    def give_up_s(self, seconds: float | None) -> None:
        for remote in self.ranks:
            remote.give_up_s = seconds

    def stop_observing(self) -> None:
        """Call the observer no more. Idempotent."""
        self._observer = None

    def call(
        self,
        make: Callable[..., Any],
        *args: Any,
        frames: Sequence[bytes] = (),
        meanwhile: Callable[[], float] | None = None,
    ) -> tuple[Any, Sequence[Any]]:
        """Send a request to every rank, and return the answer of the first; of statistics, those of all ranks."""
        answers = self.session.call_each(make(0, self.job, *args), frames, None, meanwhile)
        if make is m.JobStats:
            body = {**answers[0][0].body, "ranks": [reply.body for reply, _ in answers]}
            return replace(answers[0][0], body=body), answers[0][1]
        return answers[0]

    def reset(self, session: GangSession) -> None:
        """Use another gang's session, whose daemons have none of the job's Programs and state. Raises TooFewRanks if
        the job can't run on as many as they are; it is laid out as before then."""
        if len(session.sessions) != len(self.ranks):
            self._lay_out(session)
        self.release()
        self.session = session
        session.remotes = self.ranks
        for remote, one in zip(self.ranks, session.sessions, strict=True):
            remote.reset(one)
        self.ended = None

    def _lay_out(self, session: GangSession) -> None:
        """Split all uploads over the ranks of this session."""
        assert self._splitter is not None, "a job without a splitter is placed on as many devices as it has"
        before = len(self.ranks)
        self._splitter.use(len(session.sessions))
        try:
            steps = [self._splitter.again(upload.ranked) for upload in self._uploads]
            remotes, loads, uploads = self._remotes(session), list[tuple[int, ...]](), list[_Upload]()
            for load in range(len(self._loads)):
                for upload, step in zip(self._uploads, steps, strict=True):
                    if upload.load == load:
                        numbers = [r.add(one.lowered, load=False) for r, one in zip(remotes, step.ranks, strict=True)]
                        uploads.append(replace(upload, numbers=numbers, ranked=step))
                loads.append(tuple([remote.loads for remote in remotes]))
            new = {b for remote in remotes for b in remote.resident()} - set(self.resident())
            if new:
                name = self._table.buffers[min(new)].name
                raise TooFewRanks(f"no rank had {name}, and one of {len(remotes)} needs it", "wait for more devices")
        except BaseException:
            self._splitter.use(before)
            raise
        give_up_s = self.give_up_s
        self.release()
        self.ranks, self._loads, self._uploads = remotes, loads, uploads
        self.give_up_s = give_up_s
        self._homes = {}
        for step in steps:
            self._homes |= step.homes

    def sizes(self) -> list[int]:
        """On how many daemons the job's Programs can run, rising."""
        if self._splitter is None:
            return []
        fits = [set(self._splitter.fits(upload.ranked)) for upload in self._uploads]
        return sorted(set.intersection(*fits)) if fits else []

    # ---- programs

    def upload(self, lowered: Lowered, ranked: RankedStep) -> int:
        """Upload a step's Programs, and the state that they are the first to use. Returns their number. Raises
        NotSplittable for a step that needs a buffer on other ranks than the steps before it."""
        if len(ranked.ranks) != len(self.ranks):  # it was captured before the job was laid out anew
            assert self._splitter is not None
            ranked = self._splitter.again(ranked)
        for buffer, ranks in ranked.homes.items():
            before = self._homes.get(buffer, ranks)
            if before != ranks:
                raise NotSplittable(
                    f"{self._table.buffers[buffer].name} is on ranks {before} for the steps so far, and this one needs"
                    f" it on {ranks}",
                    "let both steps use it in the layer that the plan gives those ranks",
                )
        programs = [cast("Lowered", step.lowered) for step in ranked.ranks]
        try:
            numbers = self.session.each(lambda rank: self.ranks[rank].add(programs[rank]))
        finally:
            counts = tuple([remote.loads for remote in self.ranks])
            if counts != (self._loads[-1] if self._loads else (0,) * len(counts)):
                self._loads.append(counts)
                if self._observer is not None:
                    self._observer.loaded(len(self._loads) - 1)
        self._homes |= ranked.homes
        known = next((number for number, upload in enumerate(self._uploads) if upload.numbers == numbers), None)
        if known is not None:
            return known
        number = len(self._uploads)
        self._uploads.append(_Upload(numbers, lowered, ranked, len(self._loads) - 1))
        self.programs[number] = self._program(number)
        fresh = [b for b in dict.fromkeys(b for one in programs for b in one.binding) if b not in self._sent]
        self._sent.update(fresh)
        self.push([b for b in fresh if self._table.buffers[b].filled], first=True)
        return number

    def _program(self, number: int) -> GangProgram:
        upload = self._uploads[number]
        for other, program in self.programs.items():
            if self._uploads[other].numbers == upload.numbers:  # over fewer ranks they are one, with the same slots
                return program
        parts = [remote.programs[mine] for remote, mine in zip(self.ranks, upload.numbers, strict=True)]
        return GangProgram(number, upload.lowered, upload.ranked, parts)

    def hashes(self) -> list[str]:
        """As Remote.hashes, of all ranks."""
        return list(dict.fromkeys(each for remote in self.ranks for each in remote.hashes()))

    @property
    def loads(self) -> int:
        """How many loads there were."""
        return len(self._loads)

    def load(self, number: int) -> None:
        """Have the daemons load again what they did in the load `number`, after those before it."""

        def load(rank: int) -> None:
            remote = self.ranks[rank]
            for one in range(len(remote.programs), self._loads[number][rank]):
                remote.load(one)

        self.session.each(load)
        for at, upload in enumerate(self._uploads):
            loaded = all(mine in remote.programs for remote, mine in zip(self.ranks, upload.numbers, strict=True))
            if loaded and at not in self.programs:
                self.programs[at] = self._program(at)

    def post_step(self, step: int, number: int, slot: int, scalars: list[Any], frames: Sequence[Any]) -> None:
        numbers, slots = self._uploads[number].numbers, self.programs[number].free.of_ranks(slot)
        for remote, mine, place, some in zip(self.ranks, numbers, slots, frames, strict=True):
            remote.post_step(step, mine, place, scalars, some)

    # ---- state

    def resident(self) -> list[int]:
        """Job buffers that exist in a daemon."""
        return list(dict.fromkeys(b for remote in self.ranks for b in remote.resident()))

    def held(self) -> tuple[tuple[int, ...], ...]:
        """As Remote.held, by rank."""
        return tuple([tuple(remote.resident()) for remote in self.ranks])

    def push(self, buffers: Sequence[int], *, first: bool = False) -> None:
        """Copy local state to all ranks that hold it. `first`: as in Remote.push."""
        for some, data in to_push(self._table, buffers, self._observer, first=first):
            self.put(some, data)

    def put(self, buffers: Sequence[int], data: torch.Tensor | None) -> None:
        """Copy bytes, as Remote.put, to all ranks that hold the buffers."""

        def put(rank: int) -> None:
            held = set(self.ranks[rank].resident())
            mine = [b for b in buffers if b in held]
            self.ranks[rank].put(mine, data if len(mine) == len(buffers) else self._only(mine, buffers, data))

        self.session.each(put)

    def _only(self, mine: Sequence[int], buffers: Sequence[int], data: torch.Tensor | None) -> torch.Tensor | None:
        """The bytes of some of the buffers."""
        if data is None:
            return None
        parts = dict(zip(buffers, data.split([aligned(self._table.buffers[b].nbytes) for b in buffers]), strict=True))
        return torch.cat([parts[b] for b in mine]) if mine else data[:0]

    def pull(self, write: Callable[[int, torch.Tensor], None], wanted: Collection[int] | None = None) -> None:
        """Fetch state (all, or the `wanted` buffers), each buffer from the first rank that holds it."""
        done: set[int] = set()

        def pull(rank: int) -> None:
            mine = [b for b in self.ranks[rank].resident() if b not in done and (wanted is None or b in wanted)]
            done.update(mine)
            self.ranks[rank].pull(write, set(mine))

        self.session.each(pull)

    def read_snapshot(self, numbers: Sequence[int]) -> StateRead:
        """As Remote.read_snapshot: the first one that is whole on all ranks."""
        bad: set[int] = set()
        while True:
            found: list[StateRead] = []
            try:
                self.session.each(lambda rank: found.append(self.ranks[rank].read_snapshot(numbers)))  # noqa: B023
                bad.update(number for one in found for number in one.bad)
                oldest = min(one.snapshot for one in found)
                if all(one.snapshot == oldest for one in found):
                    return StateRead(oldest, sorted(bad), [part for one in found for part in one.parts])
            except BaseException:
                self._forget(found)
                raise
            self._forget(found)
            numbers = [number for number in numbers if number <= oldest]

    def _forget(self, found: Sequence[StateRead]) -> None:
        for remote, one in zip(self.ranks, found, strict=False):
            with suppress(GpumuxError):  # a session that has ended holds nothing
                remote.forget_read(one)

    def restore(self, read: StateRead | None, steps: int) -> None:
        """As Remote.restore, on each rank with its own part; put together anew, if the snapshot was of other ranks."""
        if read is not None and read.held and not self._has_layout(read.held):
            self._restore_whole(read, steps)
            return
        parts = [None] * len(self.ranks) if read is None else [replace(read, parts=[part]) for part in read.parts]
        self.session.each(lambda rank: self.ranks[rank].restore(parts[rank], steps))

    def _has_layout(self, held: Sequence[tuple[int, ...]]) -> bool:
        mine = self.held()
        return len(mine) == len(held) and all(now[: len(then)] == then for now, then in zip(mine, held, strict=True))

    def _restore_whole(self, read: StateRead, steps: int) -> None:
        found: dict[int, torch.Tensor] = {}
        generators = []
        for (one, frames), held in zip(read.parts, read.held, strict=True):
            data, at = snapshot_bytes(self.session.sessions[0], one, frames), 0
            end = data.numel() - GENERATOR_BYTES - one.notes
            for buffer in held:
                if at == end:
                    break
                nbytes = aligned(self._table.buffers[buffer].nbytes)
                found.setdefault(buffer, data[at : at + nbytes])
                at += nbytes
            if at != end:
                raise JobFailed(
                    f"snapshot {read.snapshot} of job {self.job} holds {end} bytes where the job had {at}",
                    "submit the job again",
                )
            generators.append(data[end : end + GENERATOR_BYTES].numpy().tobytes())

        def restore(rank: int) -> None:
            remote = self.ranks[rank]
            mine = [b for b in remote.loaded_buffers() if b in found]
            if mine:
                remote.put(mine, torch.cat([found[b] for b in mine]))
            remote.replay(steps, generators[0])  # ranks draw for the whole batch, so all generators are alike

        self.session.each(restore)

    # ---- the end

    def end_error(self) -> GpumuxError:
        return error_of(self.ended)

    def on_transfer(self, done: m.TransferDone, frames: Sequence[Any]) -> None:
        raise AssertionError("transfers belong to ranks")

    def release(self) -> None:
        for remote in self.ranks:
            remote.release()
        self.programs.clear()
