"""How a job comes back when its daemon, or the process that ran it, is gone (docs/architecture.md, "Nothing is lost").

Connect, open the job under its id, load its Programs, put back the newest whole snapshot or the state it began with,
and run again what was run since. Steps that were answered are not answered again; futures that wait get their values.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gpumux.capture.fetching import plainly
from gpumux.capture.generator import client_generator
from gpumux.client import snapshots
from gpumux.client.remote import RemoteProgram, lay
from gpumux.client.replay import BEGINNING, Entry, ReplayLog
from gpumux.client.session import CONNECT_S, Session
from gpumux.client.snapshots import Keepsake, Snapshots
from gpumux.errors import (
    AdmissionRefused,
    ConfigError,
    DaemonGone,
    ExecutorCrashed,
    GpumuxError,
    JobClosed,
    JobFailed,
    NotOwner,
    UnknownJob,
)
from gpumux.program.ir import aligned
from gpumux.types import GENERATOR_BYTES, JobSpec
from gpumux.wire import messages as m
from gpumux.wire.messages import MAX_ASKED, FindKept, ReadSnapshot, Replay, SnapshotRead

if TYPE_CHECKING:
    from gpumux.client.job import Job


# ---- What a job's daemon was told, in a form that can be told again: Programs by number, state and batches by copy.
#
# A user may write to a batch's tensors as soon as step() returns, so a copy it must be. Memory for batches is used
# again from step to step: fresh pages would cost more than the copy.


_OVERHEAD = 512  # bytes of an entry beside its tensors, about


@dataclass(frozen=True, slots=True)
class Loaded:
    program: int


@dataclass(frozen=True, slots=True)
class Pushed:
    """Job buffers, and their bytes, each on 64 of them."""

    buffers: tuple[int, ...]
    data: torch.Tensor


@dataclass(frozen=True, slots=True)
class Ran:
    """A step: its Program, host scalars and batch."""

    program: int
    scalars: list[float | int | bool]
    batch: list[torch.Tensor]


class Told:
    """Writes a job's log; the witness of its Remote."""

    def __init__(self, max_bytes: int, max_entries: int) -> None:
        self.log = ReplayLog(max_bytes, max_entries, self._dropped)
        self._spare: defaultdict[int, list[list[torch.Tensor]]] = defaultdict(list)  # batches, by Program
        self._nbytes: dict[int, int] = {}  # of a batch, by Program

    def loaded(self, number: int) -> None:
        self.log.add(Entry(-1, _OVERHEAD, Loaded(number)))

    def pushed(self, buffers: Sequence[int], data: torch.Tensor) -> None:
        self.log.add(Entry(-1, _OVERHEAD + data.nbytes, Pushed(tuple(buffers), data)))

    def step(
        self, step: int, program: RemoteProgram, scalars: list[float | int | bool], batch: Sequence[torch.Tensor]
    ) -> Entry:
        spare = self._spare[program.number]
        copies = spare.pop() if spare else self._fresh(program)
        for copy, source in zip(copies, batch, strict=True):
            lay(copy, source.detach())
        entry = Entry(step, self._nbytes[program.number], Ran(program.number, scalars, copies))
        self.log.add(entry)
        return entry

    def _fresh(self, program: RemoteProgram) -> list[torch.Tensor]:
        views = [program.program.views[v] for v in program.program.inputs]
        made = [torch.empty_strided(v.size, v.stride, dtype=getattr(torch, v.dtype)) for v in views]
        self._nbytes[program.number] = _OVERHEAD + sum(t.untyped_storage().nbytes() for t in made)
        return made

    def _dropped(self, entry: Entry) -> None:
        if isinstance(entry.what, Ran):
            self._spare[entry.what.program].append(entry.what.batch)


# ----


log = logging.getLogger("gpumux.client")

MAX_STEPS = 50_000  # that a job keeps for replay
MAX_CRASHES = 2  # of the process that runs the job, at the same step
MAX_ODD = 3  # refusals of what was accepted before
LEAVING_S = 30.0  # from a refusal to the end of the session: a daemon may take so long to leave
SAY_S = 5.0  # how long a wait lasts before it is mentioned
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 1.0
# Of a job that may come back: the daemon went, or what ran the job did.
ENDS = frozenset({DaemonGone.code, ExecutorCrashed.code})
# While our former self is still being put away, or others come back as well.
_NOT_YET = (DaemonGone, ExecutorCrashed, AdmissionRefused, JobClosed, NotOwner)


class Recovery:
    """`interval_s` 0, or `replay_bytes` 0: this job does not come back."""

    def __init__(self, job: Job, replay_bytes: int, reconnect_s: float, last: int) -> None:
        self._interval_s = float(job._session.welcome.device.get("snapshot_s", 0.0))
        self._reconnect_s = reconnect_s
        self._crashed_at = -2  # the newest answered step when the job's process died
        self._crashes = 0  # without any further step being answered
        self._device = _facts(job._session)
        self._opened: Session | None = None  # where an attempt has opened the job, until all of it is back
        self.told: Told | None = None
        self.snapshots: Snapshots | None = None
        if self._interval_s and replay_bytes:
            self.told = job._remote.witness = Told(replay_bytes, MAX_STEPS)
            self.snapshots = Snapshots(
                job.id, job.name, self.told.log, self._interval_s, last, job._pending.news, job._notes
            )

    def ready(self, job: Job) -> None:
        """The job is submitted: from now on it may come back."""
        if self.told is not None:
            job._pending.may_come_back(ENDS)

    def off(self, job: Job) -> None:
        """The job ends, as it is meant to."""
        job._pending.may_come_back(frozenset())
        self.told = self.snapshots = job._remote.witness = None

    def save(self, job: Job) -> bool:
        """Take a snapshot behind all steps so far, and wait until it is written; whether it was."""
        assert self.snapshots is not None
        job._wait(lambda: len(job._pending) == 0, None)
        return self.snapshots.take_now(job._session)

    def come_back(self, job: Job, session: Session, gone: GpumuxError, until: float | None = None) -> bool:
        """Bring the job back, after `gone` was met on `session`. False when it is `until` (time.monotonic) first.
        Raises `gone`, or why not; every waiting future has that error then."""
        if self.told is None:
            job._pending.fail(gone)
            raise gone
        if not job._lock.acquire(timeout=-1 if until is None else max(0.0, until - time.monotonic())):
            return False
        try:
            if job._away is None:
                if job._session is not session and job._session.dead is None and job._remote.ended is None:
                    return True  # another thread was here
                self._check(job, gone)
                if not self._is_over(job, gone, until):
                    return False
                job._away = gone
            started, said, pause, odd = time.monotonic(), False, FIRST_PAUSE_S, 0
            while True:
                try:
                    how = self._attempt(job)
                    break
                except GpumuxError as error:
                    if isinstance(error, _NOT_YET) or ended_for_now(job):
                        self._check(job, error)
                    else:
                        odd += 1  # a Program was accepted before; the process that checks it may have been killed
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
                        log.warning("job %r: %s; waiting for it to come back", job.name, gone.message)
                time.sleep(pause)
                pause = min(pause * 1.5, LONGEST_PAUSE_S)
            log.warning(
                "job %r: %s. It is back after %.1f s, %s", job.name, gone.message, time.monotonic() - started, how
            )
            return True
        except GpumuxError as error:
            job._pending.fail(error)
            if isinstance(error, JobFailed) or (job._away is not None and job._session.dead is None):
                self.off(job)
                job._lost = error
            raise
        finally:
            job._lock.release()

    def _check(self, job: Job, gone: GpumuxError) -> None:
        """Raises `gone` where there is nothing to be done about it."""
        ended = job._remote.ended
        if ended is not None and ended.code not in ENDS:
            raise job._remote.end_error()
        if self.told is None:
            raise gone
        if not self.told.log.recoverable:
            raise JobFailed(
                f"{gone.message}, and job {job.name!r} can't come back: what it would have to run again was more than "
                "it may keep, and no snapshot could be saved",
                "see why (the log says), raise replay_bytes=, and submit it again",
            )
        if isinstance(gone, ExecutorCrashed) and ended is not None:
            newest = job._pending.newest
            self._crashes = self._crashes + 1 if self._crashed_at == newest else 1
            self._crashed_at = newest
            if self._crashes > MAX_CRASHES:
                raise gone  # it is the step

    def _is_over(self, job: Job, gone: GpumuxError, until: float | None) -> bool:
        """Wait for the end of a session that has been told it is coming (a daemon that leaves refuses first). False
        when it is `until` first; raises `gone` when it lives on."""
        if job._session.dead is not None or job._remote.ended is not None:
            return True
        wait_s = LEAVING_S if until is None else max(0.0, min(LEAVING_S, until - time.monotonic()))
        try:
            if job._session.wait(lambda: job._remote.ended is not None, wait_s):
                return True
        except DaemonGone:
            return True
        if until is not None and time.monotonic() >= until:
            return False
        raise gone

    # ---- one attempt

    def _attempt(self, job: Job) -> str:
        """What was done, in words."""
        assert self.told is not None
        assert self.snapshots is not None
        pending, remote = job._pending, job._remote
        pending.hold()
        if (
            job._session.dead is not None or self._opened is job._session
        ):  # half of the job may be there: it goes with it
            fresh = Session.connect(job._session.endpoint, CONNECT_S)
            old, job._session = job._session, fresh
            old.close()
            if _facts(fresh) != self._device:
                log.warning(
                    "job %r: the daemon runs %s now and ran %s before: its results are no longer bit-equal to one run",
                    job.name, _facts(fresh), self._device,
                )  # fmt: skip
                self._device = _facts(fresh)
        session = job._session
        session.unregister(job.id)
        remote.reset(session)
        session.register(job.id, pending.on_message)
        session.call(open_message(job.id, job._spec), timeout=None)
        self._opened = session
        point, lost = self._put_back(job, self.told)
        steps = 0
        for entry in self.told.log.since(point):
            what = entry.what
            if isinstance(what, Ran):
                self._run_again(job, entry.step, what)
                steps += 1
            elif isinstance(what, Loaded):
                remote.load(what.program)
            else:
                remote.put(what.buffers, what.data)
        self.told.log.came_back(point, lost)
        self.snapshots.started_over()
        if job._paused:
            remote.call(m.PauseJob)
        self._opened, job._away = None, None
        begun = f"snapshot {point}" if point != BEGINNING else "its first state"
        return f"from {begun}, and {steps} steps run again"

    def _put_back(self, job: Job, told: Told) -> tuple[int, list[int]]:
        """Load and fill what the best point needs: that point, and those that are no more."""
        candidates = told.log.candidates(min(job._pending.held, default=None))
        numbers = [n for n in candidates if n != BEGINNING]
        read: SnapshotRead | None = None
        frames: list[bytes] = []
        if numbers:
            try:
                read, frames = job._session.call(ReadSnapshot(0, job.id, numbers[:MAX_ASKED]), timeout=None)
            except (UnknownJob, ConfigError) as error:
                if BEGINNING not in candidates:
                    raise JobFailed(
                        f"job {job.name!r} can't come back: {error.message}",
                        "submit it again from a checkpoint of yours",
                    ) from error
                log.warning("job %r: none of its snapshots can be had (%s); it starts over", job.name, error.message)
        elif not candidates:
            raise JobFailed(f"job {job.name!r} can't come back: no snapshot fits", "submit it again")
        point = read.snapshot if read is not None else BEGINNING
        if read is not None and read.bad:
            log.error("job %r: snapshot %s is damaged; %d is used", job.name, ", ".join(map(str, read.bad)), point)
        again = list(told.log.since(point))
        later = {entry.what.program for entry in again if isinstance(entry.what, Loaded)}
        earlier = [number for number in range(len(job._remote.loads)) if number not in later]
        for number in earlier:
            job._remote.load(number)
        generator = b""
        if read is not None:
            generator = self._fill(job, read, frames, sum(job._remote.loads[number] for number in earlier))
        steps = sum(isinstance(entry.what, Ran) for entry in again)
        job._session.call(Replay(0, job.id, steps, 1), [generator], timeout=None)
        return point, [n for n in numbers if n > point]

    def _fill(self, job: Job, read: SnapshotRead, frames: list[bytes], count: int) -> bytes:
        """Push the snapshot's buffers, `count` of them; its generator."""
        data = snapshot_bytes(job._session, read, frames)
        buffers = job._remote.resident()[:count]
        end = sum(aligned(job._table.buffers[b].nbytes) for b in buffers)
        if end + GENERATOR_BYTES + read.notes != data.numel():
            raise JobFailed(
                f"snapshot {read.snapshot} of job {job.name!r} holds {data.numel()} bytes where the job has {end}",
                "somebody else wrote it; submit the job again",
            )
        if buffers:
            job._remote.put(buffers, data[:end])
        generator = data[end : end + GENERATOR_BYTES].numpy().tobytes()
        del data
        job._session.release_segment(read.segment)
        return generator

    def _run_again(self, job: Job, step: int, ran: Ran) -> None:
        program, pending, remote = job._remote.programs[ran.program], job._pending, job._remote
        most = job._spec.max_inflight
        job._session.wait(lambda: remote.ended is not None or (bool(program.free) and len(pending) < most))
        if remote.ended is not None:
            raise remote.end_error()
        slot = program.free.pop()
        frames = program.fill(slot, ran.batch)
        pending.again(step, ran.program, slot)
        job._session.post_step(m.Step(job.id, step, ran.program, slot, ran.scalars, len(frames)), frames)


def ended_for_now(job: Job) -> bool:
    """The job ended in a way it may come back from."""
    ended = job._remote.ended
    return ended is not None and ended.code in ENDS


def notes_of(ref: weakref.ref[Job]) -> tuple[bytes, int]:
    """What goes with a snapshot taken now, and how many steps are behind it."""
    job = ref()
    assert job is not None, "a job that is gone takes no snapshots"
    generator = client_generator.state() if job._clients_generator else None
    with plainly():
        notes = snapshots.write(job._table, job._state, job._remote.resident(), job._counts, generator)
    return notes, job._counts.all


def open_message(job: str, spec: JobSpec) -> m.OpenJob:
    """The request to open a job."""
    return m.OpenJob(
        0, job, spec.name, int(spec.priority), spec.weight, spec.max_slowdown, spec.memory_limit, spec.max_inflight,
        spec.seed, spec.models,
    )  # fmt: skip


def snapshot_bytes(session: Session, read: SnapshotRead, frames: list[bytes]) -> torch.Tensor:
    """The bytes of a snapshot that was read, over the segment they came in."""
    memory = session.segment(read.segment, read.nbytes) if read.segment else bytearray(frames[0])
    return torch.frombuffer(memory, dtype=torch.uint8)


def _facts(session: Session) -> str:
    """What results depend on."""
    device = session.welcome.device
    return f"{device['kind']} {device['name']}, torch {device['torch_version']}, {device['threads']} threads"


# ---- A program that goes on with a job whose client is gone: find what was kept, and open the job under its id.


PUT_AWAY_S = 10.0  # how long the daemon may take to notice that the job's client is gone, and to let go of it
_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class KeptJob:
    """`newest`: the number of its newest snapshot, whether or not that is the one that was whole."""

    job: str
    newest: int
    keepsake: Keepsake


def find_kept(session: Session, name: str) -> KeptJob:
    """Raises UnknownJob when nothing of that name was kept, AdmissionRefused when the job is still open."""
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
    keepsake = Keepsake(data, read.notes)
    del data
    session.release_segment(read.segment)
    return KeptJob(found.job, max(found.snapshots), keepsake)


def open_job(session: Session, message: m.OpenJob, returning: bool) -> None:
    """`returning`: the daemon may still be putting away what the job was before."""
    give_up = time.monotonic() + PUT_AWAY_S
    while True:
        try:
            session.call(message)
            return
        except (JobClosed, NotOwner):
            if not returning or time.monotonic() > give_up:
                raise
        time.sleep(_PAUSE_S)
