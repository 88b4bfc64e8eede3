"""Recovery of a job whose daemon, or the process that ran it, is gone (docs/architecture.md, "Nothing is lost").

Connect, open the job under its id, load its Programs, restore the newest whole snapshot or the initial state, and run
the later steps again. Steps that were answered are not answered again; unanswered futures get their values.

A job of a cluster moves to another daemon in the same way, from a copy of its newest snapshot (`JobPlace`).
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

from gpumux.capture.state import StateTable
from gpumux.capture.watch.checksums import Checksums
from gpumux.client.future import Pending
from gpumux.client.remote import Remote, RemoteProgram, StateRead, bytes_of, lay, size_of, snapshot_bytes
from gpumux.client.replay import BEGINNING, ReplayEntry, ReplayLog
from gpumux.client.session import CONNECT_S, Session
from gpumux.client.snapshots import SnapshotCopy, SnapshotMetadata, Snapshots
from gpumux.errors import (
    AdmissionRefused,
    ConfigError,
    DaemonGone,
    ExecutorCrashed,
    GpumuxError,
    InternalError,
    JobClosed,
    JobFailed,
    NotFusible,
    NotOwner,
    PeersLost,
    ProgramError,
    TooFewRanks,
    UnknownJob,
)
from gpumux.types import GroupPlace, JobSpec
from gpumux.wire import messages as m
from gpumux.wire.messages import MAX_ASKED, FindKept, ReadSnapshot

if TYPE_CHECKING:
    from gpumux.fuse.replay import GroupReplay

T = TypeVar("T")
log = logging.getLogger("gpumux.client")


# ---- The record of what was sent to a job's daemon: Programs by number, state and batches as copies.
#
# Batches are copied because the user may write to their tensors as soon as step() returns. The copies' memory is reused
# from step to step, because fresh pages would cost more than the copy.
#
# Parameters that a job begins with are copied only when the local model is about to be overwritten, mostly after the
# first snapshots were saved and nothing needs them any more. Until then the local model itself is the copy. A script
# may not write to it while the job is open (LocalWrite). Checksums find out if it did.


_OVERHEAD = 512  # approximate bytes of an entry besides its tensors


@dataclass(frozen=True, slots=True)
class LoadEntry:
    """A Program was loaded."""

    program: int


class LocalBytes:
    """The bytes of job buffers that lie in local memory, until `keep` copies them."""

    def __init__(self, table: StateTable, buffers: Sequence[int]) -> None:
        self._table = table
        self._buffers = buffers
        self._homes = [list(table.buffers[b].local) for b in buffers]
        self._noted = Checksums()
        self._noted.note(storage for home in self._homes for storage, _ in home)
        self._copy: torch.Tensor | None = None
        self._lost = False

    def keep(self) -> bool:
        """Copy the bytes, because local memory is about to be overwritten. False if it was changed already: the bytes
        are lost then."""
        if self._copy is None and not self.lost():
            self._copy = bytes_of(self._table, self._buffers, self._homes)
        return not self._lost

    def lost(self) -> bool:
        """Whether local memory was changed before the bytes were copied."""
        self._lost = self._lost or (self._copy is None and self._noted.changed())
        return self._lost

    def data(self) -> torch.Tensor:
        """The bytes, if they are not lost."""
        return bytes_of(self._table, self._buffers, self._homes) if self._copy is None else self._copy


@dataclass(frozen=True, slots=True)
class PushEntry:
    """State was pushed: the job buffers, and their bytes, each aligned to 64 bytes."""

    buffers: tuple[int, ...]
    data: torch.Tensor | LocalBytes


@dataclass(slots=True)
class StepEntry:
    """A step was run: its Program, host scalars and batch. `group`: how, once it was answered, if it ran in a group."""

    program: int
    scalars: list[float | int | bool]
    batch: list[torch.Tensor]
    group: GroupPlace | None = None

    def ran_in_group(self, group: GroupPlace) -> None:
        self.group = group


class ReplayRecorder:
    """Records in a ReplayLog what a job sends to its daemon (`remote.SendObserver`)."""

    def __init__(self, table: StateTable, max_bytes: int, max_entries: int) -> None:
        self.log = ReplayLog(max_bytes, max_entries, self._dropped)
        self._table = table
        self._spare: defaultdict[int, list[list[torch.Tensor]]] = defaultdict(
            list
        )  # batch copies for reuse, by Program
        self._nbytes: dict[int, int] = {}  # bytes of an entry with a batch, by Program
        self._local: list[weakref.ref[LocalBytes]] = []  # what is not copied yet

    def loaded(self, number: int) -> None:
        self.log.add(ReplayEntry(-1, _OVERHEAD, LoadEntry(number)))

    def pushed(self, buffers: Sequence[int], data: torch.Tensor | None) -> None:
        what: torch.Tensor | LocalBytes
        if data is None:
            what = LocalBytes(self._table, buffers)
            self._local.append(weakref.ref(what))
        else:
            what = data
        self.log.add(ReplayEntry(-1, _OVERHEAD + size_of(self._table, buffers), PushEntry(tuple(buffers), what)))

    def keep_local(self) -> None:
        """Copy what lies in local memory alone, because that is about to be overwritten."""
        found = [data for ref in self._local if (data := ref()) is not None]
        self._local.clear()
        if not all(data.keep() for data in found):
            self.log.lose_beginning()

    def check_local(self) -> None:
        """Forget the state that the job began with, if the script has overwritten it."""
        if any(data.lost() for ref in self._local if (data := ref()) is not None):
            self._local.clear()
            self.log.lose_beginning()

    def step(
        self, step: int, program: RemoteProgram, scalars: list[float | int | bool], batch: Sequence[torch.Tensor]
    ) -> ReplayEntry:
        """Record a step, with a copy of its batch."""
        spare = self._spare[program.number]
        copies = spare.pop() if spare else self._fresh(program)
        for copy, source in zip(copies, batch, strict=True):
            lay(copy, source.detach())
        entry = ReplayEntry(step, self._nbytes[program.number], StepEntry(program.number, scalars, copies))
        self.log.add(entry)
        return entry

    def _fresh(self, program: RemoteProgram) -> list[torch.Tensor]:
        views = [program.program.views[v] for v in program.program.inputs]
        made = [torch.empty_strided(v.size, v.stride, dtype=getattr(torch, v.dtype)) for v in views]
        self._nbytes[program.number] = _OVERHEAD + sum(t.untyped_storage().nbytes() for t in made)
        return made

    def _dropped(self, entry: ReplayEntry) -> None:
        if isinstance(entry.what, StepEntry):
            self._spare[entry.what.program].append(entry.what.batch)


# ---- a job's session, which recovery replaces


MAX_STEPS = 50_000  # steps that a job keeps for replay
MAX_CRASHES = 2  # crashes of the process that runs the job, or of ranks that lost each other, at the same step
MAX_EARLY = 10  # such crashes before that step was sent again: what ends processes is something else
MAX_ODD = 3  # refusals of requests that were accepted before
DRAIN_S = 30.0  # for steps under way, before a job leaves its daemon; what is not answered then runs again elsewhere
LEAVING_S = 30.0  # from a refusal to the end of the session: a daemon may take so long to leave
SAY_S = 5.0  # how long recovery lasts before it is logged
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 1.0
# Ends that a job may recover from: the daemon is gone, or the process that ran the job, or other ranks of it.
ENDS = frozenset({DaemonGone.code, ExecutorCrashed.code, PeersLost.code, InternalError.code})
# Refusals while the daemon still closes the job's former session, or while other jobs recover as well.
_NOT_YET = (DaemonGone, ExecutorCrashed, PeersLost, InternalError, AdmissionRefused, JobClosed, NotOwner)


def snapshot_interval_s(session: Session) -> float:
    """The daemon's snapshot interval in seconds; 0: it takes no snapshots."""
    return float(session.welcome.device.get("snapshot_s", 0.0))


def make_recorder(session: Session, table: StateTable, replay_bytes: int) -> ReplayRecorder | None:
    """A recorder for a new job, or None if the job is never recovered."""
    return ReplayRecorder(table, replay_bytes, MAX_STEPS) if snapshot_interval_s(session) and replay_bytes else None


@dataclass(frozen=True, slots=True)
class LeaveOrder:
    """The job has to leave its daemon. `goes_on`: at another one; otherwise it ends. `there`: the daemon is taken to be
    there still, so that steps under way can end and the state can be saved."""

    goes_on: bool
    there: bool
    reason: str


class JobPlace(Protocol):
    """Where a job of a cluster runs, as its coordinator says (gpumux/client/placed). Any thread may call it; `connect`,
    `refused` and `left` under the lock of the job."""

    def attach(self, recovery: Recovery, sizes: list[int]) -> None:
        """The job was submitted: from now on it may be moved. `sizes`: on how many devices it can run, besides those
        that it has."""
        ...

    def order(self) -> LeaveOrder | None:
        """Whether the job has to leave its daemon."""
        ...

    def left(self, forgotten: bool) -> None:
        """The job has left its daemon, as ordered. `forgotten`: that keeps no snapshots of it."""
        ...

    def forget(self) -> None:
        """The job has ended, with all its steps done. Have other daemons forget what they kept of it."""
        ...

    def outgrown(self) -> bool:
        """The job has a step that it can't run over as few devices as it has. Whether it is ordered to leave them now,
        for more, or for fewer that suit."""
        ...

    def connect(self, session: Session, timeout: float) -> Session | None:
        """A session with the daemon where the job runs, or is to run next; None if it got no devices within `timeout`
        seconds. Closes `session`. Raises JobFailed if the job gets none any more, and what connecting raises."""
        ...

    def accepted(self) -> None:
        """The daemon has opened the job: what it refuses from now on is for want of memory."""
        ...

    def opened(self) -> None:
        """The job runs at the daemon that `connect` gave a session with."""
        ...

    def refused(self, session: Session, error: GpumuxError) -> bool:
        """The job could not be opened on this session, or brought back. Whether it waits for other devices now."""
        ...

    def ended(self, fault: str) -> None:
        """The job is over, and holds nothing any more. `fault`: why it failed, "" if it did not. Idempotent."""
        ...


class Recovery:
    """Holds a job's session, and replaces it when the daemon, or the process that ran the job, is gone.

    A job is recovered only after `ready()` and before `stop()`, and never without a `recorder`: `snapshots` is None
    then.

    notes: see Snapshots. recorder: of `make_recorder`, which observes `remote`. reconnect_s: seconds to try for.
    last_snapshot: number of the job's newest snapshot. place: of a job of a cluster, which may move.
    """

    def __init__(
        self, session: Session, *, remote: Remote, pending: Pending, spec: JobSpec, table: StateTable,
        notes: Callable[[], tuple[bytes, int]], recorder: ReplayRecorder | None, reconnect_s: float, last_snapshot: int,
        place: JobPlace | None = None,
    ) -> None:  # fmt: skip
        self.session = session
        self.place = place
        self.lock = threading.RLock()  # held by each verb of the job, and during recovery
        self.closed = False
        self.closing = False  # the job is about to end, so it moves to no other daemon if it need not
        self.paused = False
        self._id = remote.job
        self._name = spec.name
        self._spec = spec
        self._remote = remote
        self._pending = pending
        self._table = table
        self._away: GpumuxError | None = None  # why the job is not in the daemon, until it is recovered
        self._away_since = 0.0
        self._submitted = False
        self._declined: LeaveOrder | None = None  # the job could not come back; the next order is tried again
        self._lost: GpumuxError | None = None  # why it could not be recovered
        self._raised = ""  # what ended the user's loop
        self._interval_s = snapshot_interval_s(session)
        self._reconnect_s = reconnect_s
        self._crashed_at = -2  # the newest answered step when the job's process died
        self._crashes = self._early = 0  # crashes since then, with no further step answered; before one was sent
        self._sent = True  # whether a step that is not answered was sent to the job's process, or may be
        self._device = session.device_facts
        self._opened: Session | None = None  # where an unfinished attempt has opened the job
        self._group: GroupReplay | None = None  # in which an attempt runs steps again that ran so
        self._by_itself = False  # an attempt runs even those by themselves
        self.recorder = recorder
        self.snapshots: Snapshots | None = None
        self._copy = SnapshotCopy(remote.held) if place is not None else None
        if recorder is not None:
            self.snapshots = Snapshots(
                self._id, spec.name, recorder.log, interval_s=self._interval_s, last=last_snapshot,
                news=pending.news, notes=notes, copy=self._copy,
            )  # fmt: skip

    def ready(self) -> None:
        """The job was submitted: from now on it may be recovered."""
        if self.recorder is not None:
            self._pending.may_come_back(ENDS)
        self._submitted = True
        if self.place is not None:
            self.place.attach(self, self._remote.sizes())

    def programs(self) -> list[str]:
        """The content hashes of the job's Programs. Any thread may ask."""
        return self._remote.hashes()

    def stop(self) -> None:
        """The job is being closed, or is lost: it is not recovered from now on."""
        self._pending.may_come_back(frozenset())
        self.recorder = self.snapshots = None
        self._remote.stop_observing()

    # ---- verbs of the job, across a recovery

    def check_open(self) -> None:
        """Raises JobClosed, or why the job is not in the daemon."""
        if self.closed:
            raise JobClosed(f"job {self._name!r} is closed", "submit it again")
        if self._lost is not None:
            raise self._lost
        if self._away is not None:
            raise self._away
        if self._remote.ended is not None:
            raise self._remote.end_error()
        if self.session.dead is not None:
            raise self.session.dead

    def _attached(self) -> Session | None:
        """The session on which the job is open, None while it is in no daemon: `session` may then be the one on which
        another thread brings it back."""
        session = self.session
        return session if self._away is None else None

    def ensure_open(self) -> None:
        """Recover the job if it has to be. Raises what `persist` raises."""
        self.persist(lambda: None)

    def persist(self, verb: Callable[[], T]) -> T:
        """Call `verb()`, and again after each recovery if the daemon goes during the call."""
        while True:
            if self.place is not None:
                self.leave()
            session = self._attached()
            try:
                self.check_open()
                return verb()
            except TooFewRanks:
                if self.place is None or not self.place.outgrown():
                    raise
            except (DaemonGone, ExecutorCrashed, PeersLost, InternalError, JobClosed, UnknownJob) as gone:
                if isinstance(gone, (JobClosed, UnknownJob)) and not self._ended_for_now():
                    raise
                self._recover(session, gone)

    def wait(self, predicate: Callable[[], bool], timeout: float | None, step: int | None = None) -> bool:
        """Receive until `predicate()` holds; False if `timeout` seconds pass first. The predicate must be about this
        job's steps and hold once `step` is answered (default: the newest), because a job that ends answers all."""
        until = None if timeout is None else time.monotonic() + timeout
        remote = self._remote
        while True:
            session = self._attached()
            left = None if until is None else max(0.0, until - time.monotonic())
            try:
                if session is None:
                    if (away := self._away) is None:
                        continue
                    raise away
                if not remote.waits.wait(session, lambda: predicate() or remote.ended is not None, left, step):
                    return False
                if predicate():
                    return True
                gone = remote.end_error()
            except (DaemonGone, ExecutorCrashed, PeersLost, InternalError) as error:
                gone = error
            try:
                if not self._recover(session, gone, until):
                    return False
            except GpumuxError:
                if predicate():
                    return True
                raise

    def save(self) -> bool:
        """Take a snapshot after all steps so far and wait until it is written. Returns whether it was."""
        assert self.snapshots is not None
        self.wait(lambda: len(self._pending) == 0, None)
        return self.snapshots.take_now(self.session)

    # ---- leaving a daemon, and the end, of a job of a cluster

    def leave(self, patience_s: float = -1.0) -> bool:
        """Leave the daemon if the coordinator has asked for it. Returns False if the job can't leave now, because it
        could not come back, or because a verb of another thread lasts for longer than `patience_s` seconds (-1: no
        limit). If the job can come back, that verb's session is ended then, so that it goes on elsewhere."""
        assert self.place is not None
        order = self.place.order() if self._submitted and not self.closed else None
        if order is None or order is self._declined:
            return order is None
        if not self.lock.acquire(timeout=patience_s):
            recorder = self.recorder
            if recorder is not None and recorder.log.recoverable and self.place.order() is order:
                self.session.close()
            return False
        try:
            forgotten, order = False, None if self.closed else self.place.order()
            if order is None or (self.closing and order.goes_on and order.there and self._away is None):
                return True
            if self._lost is None and not order.goes_on:
                self._lose(JobFailed(f"job {self._name!r} was ended: {order.reason}", "submit it again"))
            elif self._lost is None and self._away is None:
                drained = order.there and self._save_to_leave()
                if not self._can_come_back():
                    if self._declined is None:
                        log.warning(
                            "job %r should leave its device (%s) and stays: its state can't be saved, and without that"
                            " it can't go on elsewhere; give its daemon a --state-dir, and raise replay_bytes",
                            self._name, order.reason,
                        )  # fmt: skip
                    self._declined = order
                    return False
                self._set_away(DaemonGone(f"it had to leave its device ({order.reason})", "wait, or close it"))
                forgotten = self._close_at_daemon(drained)
            self.session.close()
            self.place.left(forgotten)
            return True
        finally:
            self.lock.release()

    def come_back(self, limit: float | None) -> None:
        """Wait for `limit` seconds until a job of a cluster that has left its daemon is at another one. Raises why it
        is not."""
        if self.place is not None and self._away is not None:
            gone = self._away
            if not self._recover(None, gone, None if limit is None else time.monotonic() + limit):
                raise gone

    def loop_raised(self, error: str) -> None:
        """The user's loop has ended by an error of this class: for the coordinator of a cluster, its job has failed."""
        self._raised = error

    def forget_elsewhere(self) -> None:
        """The job has ended, with all its steps done: no daemon needs to keep anything of it."""
        if self.place is not None:
            self.place.forget()

    def end_place(self) -> None:
        """Tell the coordinator that the job is over, if it was submitted: otherwise it may be tried elsewhere.
        Idempotent."""
        if self.place is not None and self._submitted:
            ended = self._remote.ended
            fault = self._lost or (self._remote.end_error() if ended is not None and ended.code else None)
            self.place.ended(self._raised if fault is None else fault.message)

    def _save_to_leave(self) -> bool:
        """Let steps under way end, and take a snapshot. Returns whether all steps were answered."""
        try:
            if self.paused or not self.session.wait(self._is_drained, DRAIN_S):
                return False
            if self.snapshots is not None and self._remote.ended is None:
                self.snapshots.take_now(self.session)
        except GpumuxError as error:  # the newest copy, and the steps since, are here all the same
            log.info("job %r leaves its device, and its state was not saved before: %s", self._name, error)
        return len(self._pending) == 0

    def _is_drained(self) -> bool:
        return len(self._pending) == 0 or self._remote.ended is not None

    def _can_come_back(self) -> bool:
        if self.recorder is None:
            return False
        self.recorder.check_local()
        return self.recorder.log.recoverable

    def _close_at_daemon(self, drained: bool) -> bool:
        """Close the job at a daemon that it leaves. The daemon keeps no snapshots of one that is `drained`. Returns
        whether it keeps none."""
        self.session.unregister(self._id)
        if self.session.dead is None and self._remote.ended is None:
            try:
                self.session.call(m.CloseJob(0, self._id, drained), timeout=CONNECT_S)
                return drained
            except GpumuxError as error:
                log.info("job %r left a device without the daemon's word: %s", self._name, error)
        return False

    def _set_away(self, gone: GpumuxError) -> None:
        self._away, self._away_since = gone, time.monotonic()

    def _lose(self, error: GpumuxError) -> None:
        """The job is over: every unanswered future and every further verb has this error."""
        self._pending.fail(error)
        self.stop()
        self._lost = error

    # ---- recovery

    def _recover(self, session: Session | None, gone: GpumuxError, until: float | None = None) -> bool:
        """Recover the job after `session` raised `gone`; None: it was in no daemon. False if the time `until`
        (time.monotonic) comes first. Raises `gone`, or why the job can't be recovered; every unanswered future has that
        error then."""
        if self.recorder is None:
            self._pending.fail(gone)
            raise self._lost or gone
        if not self.lock.acquire(timeout=-1 if until is None else max(0.0, until - time.monotonic())):
            return False
        try:
            if self._away is None:
                if self.session is not session and self.session.dead is None and self._remote.ended is None:
                    return True  # another thread has recovered the job
                self._check(gone)
                if not self._is_over(gone, until):
                    return False
                self._set_away(gone)
            started, said, pause, odd = time.monotonic(), False, FIRST_PAUSE_S, 0
            while True:
                try:
                    how = self._attempt(until)
                    if how is not None:
                        break
                    if until is not None and time.monotonic() >= until:
                        return False
                    started = time.monotonic()  # waiting for devices of a cluster is no attempt
                    continue
                except GpumuxError as error:
                    if self.place is not None and self.place.refused(self.session, error):
                        continue
                    if isinstance(error, _NOT_YET) or self._ended_for_now():
                        self._check(error)
                    else:
                        odd += 1  # the process that checks a Program may have been killed
                        if odd >= MAX_ODD or isinstance(error, JobFailed):
                            raise
                    now = time.monotonic()
                    if now - started > self._reconnect_s:
                        raise DaemonGone(
                            f"{gone.message}, and could not be had back within {self._reconnect_s:g} s:"
                            f" {error.message}",
                            error.remedy,
                        ) from gone
                    if until is not None and now >= until:
                        return False
                    if now - started > SAY_S and not said:
                        said = True
                        log.warning("job %r: %s; waiting for it to come back", self._name, gone.message)
                time.sleep(pause)
                pause = min(pause * 1.5, LONGEST_PAUSE_S)
            away_s = time.monotonic() - self._away_since
            log.warning("job %r: %s. It is back after %.1f s, %s", self._name, gone.message, away_s, how)
            return True
        except GpumuxError as error:
            self._pending.fail(error)
            if isinstance(error, JobFailed) or (self._away is not None and self.session.dead is None):
                self._lose(error)
                self.end_place()
            raise
        finally:
            self.lock.release()

    def _check(self, gone: GpumuxError) -> None:
        """Raises `gone`, or JobFailed, if the job can't be recovered."""
        ended = self._remote.ended
        if ended is not None and ended.code not in ENDS:
            raise self._remote.end_error()
        if self.recorder is None:
            raise gone
        self.recorder.check_local()
        if not self.recorder.log.recoverable:
            raise JobFailed(
                f"{gone.message}, and job {self._name!r} can't come back: what it would have to run again was more than"
                " it may keep, or the local model was written before the first snapshot, and no snapshot could be saved"
                " since",
                "see why (the log says), raise replay_bytes=, and submit it again",
            )
        if isinstance(gone, (ExecutorCrashed, PeersLost, InternalError)) and ended is not None:
            newest = self._pending.newest
            if self._crashed_at != newest:
                self._crashed_at, self._crashes, self._early = newest, 0, 0
            if self._sent:
                self._crashes += 1
            else:  # it may have ended with the process that starts those of jobs, with a rank, or of memory
                self._early += 1
            if self._crashes > MAX_CRASHES or self._early > MAX_EARLY:
                raise gone  # the step itself crashes the process

    def _is_over(self, gone: GpumuxError, until: float | None) -> bool:
        """Wait until the session or the job has ended, because a daemon that leaves refuses requests before it ends
        its sessions. False if the time `until` comes first. Raises `gone` if the session stays alive."""
        if self.session.dead is not None or self._remote.ended is not None:
            return True
        wait_s = LEAVING_S if until is None else max(0.0, min(LEAVING_S, until - time.monotonic()))
        try:
            if self.session.wait(lambda: self._remote.ended is not None, wait_s):
                return True
        except DaemonGone:
            return True
        if until is not None and time.monotonic() >= until:
            return False
        raise gone

    # ---- one attempt

    def _attempt(self, until: float | None) -> str | None:
        """Make one attempt. Returns a description of it for the log; None if the job has no devices of its cluster,
        which it does not wait for beyond `until`."""
        assert self.recorder is not None
        assert self.snapshots is not None
        pending, remote = self._pending, self._remote
        pending.hold()
        # A session on which an earlier attempt opened the job is closed as well: the daemon then drops what it loaded.
        if self.session.dead is not None or self._opened is self.session:
            fresh = self._connect(until)
            if fresh is None:
                return None
            old, self.session = self.session, fresh
            old.close()
            if fresh.device_facts != self._device:
                log.warning(
                    "job %r: the daemon runs %s now and ran %s before: its results are no longer bit-equal to one run",
                    self._name, fresh.device_facts, self._device,
                )  # fmt: skip
                self._device = fresh.device_facts
        session = self.session
        session.unregister(self._id)
        remote.reset(session)
        self._group, self._by_itself, self._sent = None, False, False
        session.register(self._id, pending.on_message)
        session.open_job(self._id, self._spec, None)
        self._opened = session
        if self.place is not None:
            self.place.accepted()
        point, lost = self._restore(self.recorder.log)
        steps, paused = 0, False
        for entry in self.recorder.log.since(point):
            what = entry.what
            if isinstance(what, StepEntry):
                steps += 1
                if self._ran_in_group(entry.step, what) and self._run_in_group(what):
                    continue
                self._leave_group()
                if self.paused and not paused and entry.step in pending.held:
                    self._pause_again()  # so that no step runs that waited, paused; those before it have to
                    paused = True
                self._run_again(entry.step, what)
                continue
            self._leave_group()
            if isinstance(what, LoadEntry):
                remote.load(what.program)
            else:
                data = what.data
                remote.put(what.buffers, data.data() if isinstance(data, LocalBytes) else data)
        self._leave_group()
        self.recorder.log.recovered(point, lost)
        self.snapshots.restart()
        if self.paused and not paused:
            self._pause_again()
        self._opened, self._away, self._sent = None, None, True
        if self.place is not None:
            self.place.opened()
        begun = f"snapshot {point}" if point != BEGINNING else "its first state"
        return f"from {begun}, and {steps} steps run again"

    def _connect(self, until: float | None) -> Session | None:
        if self.place is None:
            return self.session.reconnect(CONNECT_S)
        wait_s = CONNECT_S if until is None else max(0.0, min(CONNECT_S, until - time.monotonic()))
        return self.place.connect(self.session, wait_s)

    def _restore(self, replay: ReplayLog) -> tuple[int, list[int]]:
        """Load the Programs and restore the state of the best point. Returns that point, and the points that are
        lost."""
        candidates = replay.candidates(min(self._pending.held, default=None))
        numbers = [n for n in candidates if n != BEGINNING]
        read: StateRead | None = None
        if self._copy is not None:
            read = self._copy.read(numbers)
            if read is None and BEGINNING not in candidates:
                raise JobFailed(
                    f"job {self._name!r} can't come back: there is no copy of its state", "submit it from a checkpoint"
                )
        elif numbers:
            try:
                read = self._remote.read_snapshot(numbers[:MAX_ASKED])
            except (UnknownJob, ConfigError) as error:
                if BEGINNING not in candidates:
                    raise JobFailed(
                        f"job {self._name!r} can't come back: {error.message}",
                        "submit it again from a checkpoint of yours",
                    ) from error
                log.warning(
                    "job %r: the daemon has no snapshot of it (%s): all of its steps run again, from its first state",
                    self._name,
                    error.message,
                )
        elif not candidates:
            raise JobFailed(f"job {self._name!r} can't come back: no snapshot fits", "submit it again")
        point = read.snapshot if read is not None else BEGINNING
        if read is not None and read.bad:
            log.error("job %r: snapshot %s is damaged; %d is used", self._name, ", ".join(map(str, read.bad)), point)
        again = list(replay.since(point))
        later = {entry.what.program for entry in again if isinstance(entry.what, LoadEntry)}
        for number in range(self._remote.loads):
            if number not in later:
                self._remote.load(number)
        steps = [entry for entry in again if isinstance(entry.what, StepEntry)]
        self._remote.restore(read, sum(not self._ran_in_group(entry.step, entry.what) for entry in steps))
        return point, [n for n in numbers if n > point]

    def _ended_for_now(self) -> bool:
        """Whether the job ended in a way that it may be recovered from."""
        ended = self._remote.ended
        return ended is not None and ended.code in ENDS

    def _pause_again(self) -> None:
        """Pause the job as soon as the steps sent so far are done, which would hold up the later ones."""
        remote, pending = self._remote, self._pending
        self.session.wait(lambda: remote.ended is not None or not len(pending))
        if remote.ended is not None:
            raise remote.end_error()
        remote.call(m.PauseJob)

    def _ran_in_group(self, step: int, ran: StepEntry) -> bool:
        """Whether a step ran in a group of jobs, and was answered."""
        return ran.group is not None and step not in self._pending.held

    def _run_in_group(self, ran: StepEntry) -> bool:
        """Run a step again in a group like the one that it ran in. Returns False if there can be none: the step is to
        run by itself then, and all later ones."""
        from gpumux.fuse.replay import GroupReplay

        assert ran.group is not None
        if self._by_itself:
            return False
        if self._group is None:
            self._group = GroupReplay(self._remote, self._spec)
        try:
            self._group.enter(ran.program, ran.group)
        except (NotFusible, AdmissionRefused, ProgramError) as error:
            log.warning(
                "job %r: steps that ran as one with those of other jobs run again by themselves (%s): results are"
                " equivalent, and not bit-equal, to those before", self._name, error.message,
            )  # fmt: skip
            self._by_itself = True
            return False
        self._group.run(ran.group.fused, ran.scalars, ran.batch)
        return True

    def _leave_group(self) -> None:
        """Have the job's own buffers hold its state, so that steps run there."""
        if self._group is not None:
            self._group.leave()

    def _run_again(self, step: int, ran: StepEntry) -> None:
        program, pending, remote = self._remote.programs[ran.program], self._pending, self._remote
        most = self._spec.max_inflight
        self.session.wait(lambda: remote.ended is not None or (bool(program.free) and len(pending) < most))
        if remote.ended is not None:
            raise remote.end_error()
        slot = program.free.pop()
        frames = program.fill(slot, ran.batch)
        self._sent |= step in pending.held
        pending.again(step, ran.program, slot)
        remote.post_step(step, ran.program, slot, ran.scalars, frames)


# ---- resuming a job whose client is gone: find its snapshot, and open the job under its id


PUT_AWAY_S = 10.0  # how long the daemon may take to notice that the job's client is gone, and to close the job
_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class KeptJob:
    """A job whose state the daemon kept. `newest`: the number of its newest snapshot, whole or not; `snapshot`: the
    newest whole one."""

    job: str
    newest: int
    snapshot: SnapshotMetadata


def find_kept(session: Session, name: str) -> KeptJob:
    """Find the kept job of this name and read its newest whole snapshot. Raises UnknownJob when no state of that name
    was kept, AdmissionRefused when the job is still open."""
    give_up = time.monotonic() + PUT_AWAY_S
    while True:
        try:
            found, _ = session.call(FindKept(0, name))
            break
        except AdmissionRefused:
            if time.monotonic() > give_up:
                raise
        time.sleep(_PAUSE_S)
    read, frames = session.call(ReadSnapshot(0, found.job, found.snapshots[:MAX_ASKED]), timeout=None)
    data = snapshot_bytes(session, read, frames)
    try:
        snapshot = SnapshotMetadata(data, read.notes)
    finally:
        del data
        session.release_segment(read.segment)
    return KeptJob(found.job, max(found.snapshots), snapshot)


def open_job(session: Session, job: str, spec: JobSpec, returning: bool) -> None:
    """Open a job. `returning`: the daemon may still be closing the same job of an earlier client, so try again for
    PUT_AWAY_S seconds. Raises what the daemon refuses with."""
    give_up = time.monotonic() + PUT_AWAY_S
    while True:
        try:
            session.open_job(job, spec)
            return
        except (JobClosed, NotOwner):
            if not returning or time.monotonic() > give_up:
                raise
        time.sleep(_PAUSE_S)
