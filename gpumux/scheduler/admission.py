"""Which jobs and programs are accepted: by owner, count and memory; and the scheduler's refusals in words.

Memory is charged before it is used. A job is charged the persistent state and the slots of all its programs, and the
largest transient part among them, since its programs never run at once. Jobs that share an arena are charged the
largest transient part of them all, once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf

from gpumux.access import Rule, refuse_submit
from gpumux.errors import AdmissionRefused, DaemonGone, JobClosed, NotOwner, ProgramError, Refused, UnknownJob
from gpumux.scheduler.config import SchedulerConfig
from gpumux.scheduler.jobs import ScheduledJob, SharedArena
from gpumux.types import Fault, Footprint, JobId, JobSpec, Peer, Priority, ProgramId, SessionId, TransferId

# ---- Refusals in words: a code from `gpumux.errors`, the numbers, and what to do.


def size(nbytes: int) -> str:
    """Bytes as text, readable and exact: "1.50 GiB (1610612736 bytes)"."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(nbytes) >= scale:
            return f"{nbytes / scale:.2f} {unit} ({nbytes} bytes)"
    return f"{nbytes} bytes"


def admission(message: str, remedy: str) -> Fault:
    return Fault(AdmissionRefused.code, message, remedy)


def refused(message: str, remedy: str) -> Fault:
    return Fault(Refused.code, message, remedy)


def unknown_session(session: SessionId) -> Fault:
    return refused(f"session {session} is not open", "connect again")


def unknown_job(job: JobId) -> Fault:
    return Fault(UnknownJob.code, f"there is no job {job}", "submit it again; it may have been closed or refused")


def taken(job: JobId) -> Fault:
    return Fault(NotOwner.code, f"job {job} belongs to another session", "choose another job id")


def changed(job: JobId) -> Fault:
    return refused(f"job {job} is open with other settings", "close it first, or choose another job id")


def closing(job: JobId) -> Fault:
    return Fault(JobClosed.code, f"job {job} is closing and takes no more work", "submit a new job")


def closed(job: JobId, reason: str) -> Fault:
    return Fault(JobClosed.code, f"job {job} was closed: {reason}", "submit it again if that was not meant")


def leaving(reason: str) -> Fault:
    return Fault(DaemonGone.code, f"the daemon is leaving: {reason}", "submit again once it is back")


def high_waves(job: JobId) -> Fault:
    return refused(
        f"job {job} trains two waves, and the promise to a high job is for steps that follow each other",
        "leave it low, or submit it without waves=2",
    )


def high_in_arena(job: JobId) -> Fault:
    return refused(
        f"job {job} shares memory with other jobs, and a high job waits for none",
        'leave it low, or submit it without memory="shared"',
    )


def unknown_program(job: JobId, program: ProgramId) -> Fault:
    return refused(f"job {job} has no program {program}", "load the program, and wait until it is accepted")


def no_pieces(program: ProgramId) -> Fault:
    return Fault(ProgramError.code, f"the device cut program {program} into no pieces", "report this as a device bug")


def too_many_steps(job: JobId, limit: int) -> Fault:
    return refused(
        f"job {job} has {limit} steps unanswered, its max_inflight",
        f"wait for a step's result first, or open the job with max_inflight above {limit}",
    )


def too_many_transfers(job: JobId, transfer: TransferId, limit: int) -> Fault:
    return refused(
        f"job {job} has {limit} transfers unanswered; transfer {transfer} is one too many",
        "wait for an earlier transfer to end",
    )


# ---- What is charged


WEIGHTS = (1e-3, 1e3)  # beyond these, a device can't keep shares
MAX_NAME = 200  # characters
MAX_MODELS = 1 << 16  # trained by one step


@dataclass(frozen=True, slots=True)
class Charge:
    """Bytes one job is charged. `slots` are its data segments, whole (as Footprint offers them)."""

    state: int = 0
    slots: int = 0
    transient: int = 0

    @property
    def total(self) -> int:
        return self.state + self.slots + self.transient


def charge_for(footprints: Iterable[Footprint]) -> Charge:
    state = slots = transient = 0
    for footprint in footprints:
        state += footprint.state_bytes
        slots += footprint.slot_bytes
        transient = max(transient, footprint.transient_bytes)
    return Charge(state, slots, transient)


@dataclass(slots=True, eq=False)
class AdmissionLedger:
    """Bytes and jobs charged to each job and user. `capacity` is known once the device is open."""

    config: SchedulerConfig
    capacity: int | None = None
    used: int = 0
    charges: dict[JobId, Charge] = field(default_factory=dict)
    jobs_by_uid: dict[int, int] = field(default_factory=dict)
    bytes_by_uid: dict[int, int] = field(default_factory=dict)  # of those with jobs
    arenas: dict[int, SharedArena] = field(default_factory=dict)  # by uid, of those with jobs that share one

    def open_device(self, memory_bytes: int) -> None:
        cap = self.config.memory_bytes
        self.capacity = memory_bytes if cap is None else min(cap, memory_bytes)

    # ---- jobs

    def refuse_job(self, peer: Peer, spec: JobSpec) -> Fault | None:
        """Why this job can't be opened, or None."""
        config, mine, total = self.config, self.jobs_by_uid.get(peer.uid, 0), len(self.charges)
        if total >= config.max_jobs:
            return admission(
                f"{total} jobs are open, the most this daemon takes is {config.max_jobs}",
                "wait for one to close, or raise max_jobs",
            )
        rule = config.access.rule_for(peer)
        fault = refuse_spec(spec, config) or refuse_submit(rule, spec.priority, spec.weight)
        if fault is not None:
            return fault
        most = rule.max_jobs or config.max_jobs_per_uid
        if mine >= most:
            holder, setting = _limited(rule, rule.max_jobs, "max_jobs", "max_jobs_per_user")
            return admission(
                f"you have {mine} jobs open, the most {holder} may have is {most}",
                f"close one of them, or raise {setting}",
            )
        return None

    def add_job(self, job: ScheduledJob) -> None:
        self.charges[job.id] = Charge()
        self.jobs_by_uid[job.peer.uid] = self.jobs_by_uid.get(job.peer.uid, 0) + 1
        self.bytes_by_uid.setdefault(job.peer.uid, 0)
        if job.spec.arena is not None:
            job.arena = self.arenas.setdefault(job.peer.uid, SharedArena())
            job.arena.jobs[job.id] = job

    def remove_job(self, job: ScheduledJob) -> None:
        uid, arena = job.peer.uid, job.arena
        self._add(uid, -_alone(job, self.charges.pop(job.id)))
        if arena is not None:
            del arena.jobs[job.id]
            if not arena.jobs:
                self._add(uid, -arena.nbytes)
                del self.arenas[uid]
        self.jobs_by_uid[uid] -= 1
        if not self.jobs_by_uid[uid]:
            del self.jobs_by_uid[uid], self.bytes_by_uid[uid]

    # ---- programs

    def refuse_program(self, job: ScheduledJob, footprint: Footprint) -> Fault | None:
        """Why this program can't be loaded, or None. Charges nothing."""
        if self.capacity is None:
            return admission("the device is not open yet", "try again in a moment")
        if len(job.programs) >= self.config.max_programs_per_job:
            return admission(
                f"job {job.id} has {len(job.programs)} programs, the most a job may have",
                "pad batches to fewer shapes, or raise max_programs_per_job",
            )
        if min(footprint.state_bytes, footprint.transient_bytes, footprint.slot_bytes) < 0:
            return admission(f"the program's sizes are negative: {footprint}", "report this as a device bug")
        if footprint.arena_bytes and job.priority is Priority.HIGH:
            return high_waves(job.id)
        before = self.charges[job.id]
        after = charge_for([*(p.footprint for p in job.programs.values()), footprint])
        if job.spec.memory_limit is not None and after.total > job.spec.memory_limit:
            return admission(
                f"job {job.id} would hold {describe(after)}, above its memory_limit of {size(job.spec.memory_limit)}",
                f"raise memory_limit to at least {after.total}, or use a smaller batch or model",
            )
        more = _alone(job, after) - _alone(job, before)
        if job.arena is not None:
            more += max(0, after.transient - job.arena.nbytes)
        rule = self.config.access.rule_for(job.peer)
        most, mine = rule.max_bytes or self.config.max_bytes_per_uid, self.bytes_by_uid[job.peer.uid]
        if most is not None and mine + more > most:
            holder, setting = _limited(rule, rule.max_bytes, "max_bytes", "max_bytes_per_user")
            return admission(
                f"job {job.id} would hold {describe(after)}; with your other jobs that is "
                f"{size(mine + more)}, and the most {holder} may have is {size(most)}",
                f"close a job, use a smaller batch or model, or raise {setting}",
            )
        if self.used + more > self.capacity:
            free = self.capacity - self.used
            return admission(
                f"the program needs {size(more)} more, job {job.id} would then hold {describe(after)}; "
                f"{size(free)} of {size(self.capacity)} are free",
                f"free {size(more - free)}: close a job, or use a smaller batch, model or max_inflight",
            )
        return None

    def recharge(self, job: ScheduledJob) -> None:
        """Charge the job for the programs it has now."""
        charge = charge_for(p.footprint for p in job.programs.values())
        self._add(job.peer.uid, _alone(job, charge) - _alone(job, self.charges[job.id]))
        self.charges[job.id] = charge
        if job.arena is not None:
            self.resize(job.peer.uid, job.arena)

    def resize(self, uid: int, arena: SharedArena) -> None:
        """Charge a user for an arena: what the largest step of its jobs needs. When the job with that step has left,
        the arena shrinks as what the others hold does."""
        largest = max((self.charges[job].transient for job in arena.jobs), default=0)
        nbytes = largest if largest >= arena.nbytes else max(largest, min(arena.nbytes, arena.held()))
        self._add(uid, nbytes - arena.nbytes)
        arena.nbytes = nbytes

    def _add(self, uid: int, nbytes: int) -> None:
        self.used += nbytes
        self.bytes_by_uid[uid] += nbytes

    def check(self, jobs: Mapping[JobId, ScheduledJob]) -> None:
        """Raise AssertionError unless the sums are the sums of the parts."""
        assert self.charges.keys() == jobs.keys(), f"charged jobs {set(self.charges)} are not {set(jobs)}"
        by_uid: dict[int, int] = {}
        bytes_of: dict[int, int] = {}
        for job in jobs.values():
            expected = charge_for(p.footprint for p in job.programs.values())
            assert self.charges[job.id] == expected, f"job {job.id} charged {self.charges[job.id]}, owes {expected}"
            by_uid[job.peer.uid] = by_uid.get(job.peer.uid, 0) + 1
            bytes_of[job.peer.uid] = bytes_of.get(job.peer.uid, 0) + _alone(job, expected)
        for uid, arena in self.arenas.items():
            assert arena.jobs, f"user {uid} has an arena for no job"
            bytes_of[uid] = bytes_of.get(uid, 0) + arena.nbytes
        assert bytes_of == self.bytes_by_uid, f"bytes by uid {self.bytes_by_uid}, should be {bytes_of}"
        assert by_uid == self.jobs_by_uid, f"jobs by uid {self.jobs_by_uid}, should be {by_uid}"
        assert self.used == sum(bytes_of.values()), f"used {self.used} is not the charges' sum"
        assert self.capacity is None or self.used <= self.capacity, f"{self.used} bytes used of {self.capacity}"


def _alone(job: ScheduledJob, charge: Charge) -> int:
    """Bytes that a job is charged besides an arena that it shares."""
    return charge.total - (charge.transient if job.arena is not None else 0)


def _limited(rule: Rule, own: int, setting: str, general: str) -> tuple[str, str]:
    """What a limit applies to, and what sets it: the rule, if it has a limit of its `own`, or the [limits]."""
    return (f"a user under rule {rule.name!r}", f"{setting} in {rule.where}") if own else ("one user", general)


def refuse_spec(spec: JobSpec, config: SchedulerConfig) -> Fault | None:
    """Why these settings make no sense, or None. Written so that a NaN is refused too."""
    if not isinstance(spec.priority, Priority):
        return refused(f"priority is {spec.priority!r}", "choose low (0) or high (1)")
    fault = refuse_weight(spec.weight)
    if fault is not None:
        return fault
    if not 1 <= spec.max_inflight <= config.max_inflight:
        return refused(f"max_inflight is {spec.max_inflight}", f"choose it between 1 and {config.max_inflight}")
    if not 1 <= spec.models <= MAX_MODELS:
        return refused(f"a step trains {spec.models} models", f"say 1 to {MAX_MODELS}")
    if not 1.0 <= spec.max_slowdown < inf:
        return refused(f"max_slowdown is {spec.max_slowdown}", "choose a ratio of 1 or more, such as 1.10")
    if spec.arena is not None and spec.priority is Priority.HIGH:
        return refused("a high job is to share memory with others, and would wait for them", "leave it low, or alone")
    if spec.memory_limit is not None and spec.memory_limit <= 0:
        return refused(f"memory_limit is {spec.memory_limit}", "give it in bytes, or leave it out")
    if len(spec.name) > MAX_NAME:
        return refused(f"the job's name has {len(spec.name)} characters", f"use at most {MAX_NAME}")
    return None


def refuse_weight(weight: float) -> Fault | None:
    """Why no job may have this weight, or None."""
    low, high = WEIGHTS
    if low <= weight <= high:
        return None
    return refused(f"weight is {weight}", f"choose a weight between {low} and {high}")


def describe(charge: Charge) -> str:
    return (
        f"{size(charge.total)} (state {size(charge.state)}, slots {size(charge.slots)}, "
        f"transient {size(charge.transient)})"
    )
