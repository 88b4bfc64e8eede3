"""Which jobs and programs are accepted: by owner, count and memory; and the scheduler's refusals in words.

Memory is charged before it is used. A job is charged the persistent state and the slots of all its programs, and the
largest transient part among them, since its programs never run at once. Jobs that share an arena are charged the
largest transient part of them all, once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from types import MappingProxyType

from gpumux.access import Rule, refuse_submit
from gpumux.errors import (
    AccessDenied,
    AdmissionRefused,
    DaemonGone,
    JobClosed,
    NotOwner,
    ProgramError,
    Refused,
    UnknownJob,
)
from gpumux.scheduler.config import SchedulerConfig
from gpumux.scheduler.jobs import ScheduledJob, SharedArena
from gpumux.scheduler.reservations import Reservation, Reservations
from gpumux.types import (
    MAX_JOB_NAME,
    MOST_LEASE_S,
    WEIGHTS,
    Fault,
    Footprint,
    JobId,
    JobSpec,
    Peer,
    Priority,
    ProgramId,
    SessionId,
    TransferId,
)

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
    reservations: Reservations = field(default_factory=Reservations)  # not in `used` or `bytes_by_uid`
    least: dict[JobId, int] = field(default_factory=dict)  # bytes that jobs which took one up are charged at least
    high_place: JobId | None = None  # the open job that took one of the high place up

    def open_device(self, memory_bytes: int) -> None:
        cap = self.config.memory_bytes
        self.capacity = memory_bytes if cap is None else min(cap, memory_bytes)

    # ---- jobs

    def refuse_job(self, peer: Peer, spec: JobSpec, reservation: Reservation | None = None) -> Fault | None:
        """Why this job can't be opened, or None. `reservation`: the one that it takes up."""
        config, rule = self.config, self.config.access.rule_for(peer)
        fault = refuse_spec(spec, config) or refuse_submit(rule, spec.priority, spec.weight)
        if fault is not None:
            return fault
        if reservation is not None:
            if fault := _refuse_taking(reservation, peer, spec):
                return fault
            if peer.uid == reservation.peer.uid:
                return None  # it was counted when it was reserved
            return self._refuse_count(peer, 1) or self._refuse_bytes(peer, reservation.nbytes, "the job's reservation")
        return self._refuse_count(peer)

    def refuse_reservation(
        self, peer: Peer, job: JobId, priority: Priority, nbytes: int, lease_s: float
    ) -> Fault | None:
        """Why this may not be reserved, or None. A reservation that is there already does not count against itself."""
        if self.capacity is None:
            return admission("the device is not open yet", "try again in a moment")
        if nbytes < 1:
            return refused(f"{nbytes} bytes are to be reserved", "say how many the job will be charged")
        fault = refuse_lease(lease_s) or refuse_submit(self.config.access.rule_for(peer), priority, 1.0)
        if fault is not None:
            return fault
        known = self.reservations.by_job.get(job)
        if known is not None:
            same = known.priority is priority and known.nbytes == nbytes
            if known.peer.uid != peer.uid:
                return Fault(NotOwner.code, f"job {job} was reserved for by another user", "choose a fresh random id")
            return None if same else refused(f"job {job} was reserved for with other numbers", "release that first")
        fault = self._refuse_count(peer) or self._refuse_bytes(peer, nbytes, "the reservation")
        if fault is not None:
            return fault
        free = self.capacity - self.used - self.reservations.total_bytes()
        if nbytes > free:
            return admission(
                f"{size(nbytes)} are to be reserved; {size(free)} of {size(self.capacity)} are free",
                "reserve on another device, or try again later",
            )
        return None

    def refuse_high(self, job: JobId, jobs: Mapping[JobId, ScheduledJob] = MappingProxyType({})) -> Fault | None:
        """Why this job may not have the high place, or be high beside the one that has it; None if it may. It is not
        free either while one of `jobs` is high."""
        reserved, held = self.reservations.high_for(), self.high_place
        if held is None:
            held = next((each.id for each in jobs.values() if each.priority is Priority.HIGH), None)
        for other in (reserved, held):
            if other is not None and other != job:
                return high_taken(other, other == reserved)
        return None

    def take_up(self, job: ScheduledJob) -> None:
        """The job is open now, and charged its reservation."""
        reservation = self.reservations.by_job.pop(job.id)
        self.least[job.id] = reservation.nbytes
        self._add(job.peer.uid, self._held(job, self.charges[job.id]) - _alone(job, self.charges[job.id]))
        if reservation.priority is Priority.HIGH:
            self.high_place = job.id

    def reserved_bytes(self) -> int:
        """Bytes that are held and not used: of reservations, and of jobs that have not loaded all of theirs."""
        return self.reservations.total_bytes() + self.unused_bytes()

    def free_bytes(self) -> int | None:
        """Bytes that are neither used nor held; None until the device is open."""
        return None if self.capacity is None else self.capacity - self.used - self.reservations.total_bytes()

    def unused_bytes(self) -> int:
        """Of what open jobs reserved, the bytes that they have not loaded."""
        return sum([max(0, least - self.charges[job].total) for job, least in self.least.items()])

    def _refuse_count(self, peer: Peer, but: int = 0) -> Fault | None:
        """Why there may not be one job or reservation more, or None. `but`: so many of all others don't count."""
        config, rule, held = self.config, self.config.access.rule_for(peer), self.reservations
        total = len(self.charges) + len(held.by_job) - but
        mine = self.jobs_by_uid.get(peer.uid, 0) + held.count_of(peer.uid)
        if total >= config.max_jobs:
            return admission(
                f"{total} jobs are open, the most this daemon takes is {config.max_jobs}",
                "wait for one to close, or raise max_jobs",
            )
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
        self._add(uid, -self._held(job, self.charges.pop(job.id)))
        self.least.pop(job.id, None)
        if self.high_place == job.id:
            self.high_place = None
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
        more = self._held(job, after) - self._held(job, before)
        if job.arena is not None:
            more += max(0, after.transient - job.arena.nbytes)
        fault = self._refuse_bytes(job.peer, more, f"job {job.id} would hold {describe(after)}; it")
        if fault is not None:
            return fault
        free = self.capacity - self.used - self.reservations.total_bytes()
        if more > free:
            return admission(
                f"the program needs {size(more)} more, job {job.id} would then hold {describe(after)}; "
                f"{size(free)} of {size(self.capacity)} are free",
                f"free {size(more - free)}: close a job, or use a smaller batch, model or max_inflight",
            )
        return None

    def _refuse_bytes(self, peer: Peer, more: int, what: str) -> Fault | None:
        """Why the user may not have so many bytes more, or None. `what` it is, for the message."""
        rule = self.config.access.rule_for(peer)
        most = rule.max_bytes or self.config.max_bytes_per_uid
        mine = self.bytes_by_uid.get(peer.uid, 0) + self.reservations.bytes_of(peer.uid)
        if most is None or mine + more <= most:
            return None
        holder, setting = _limited(rule, rule.max_bytes, "max_bytes", "max_bytes_per_user")
        return admission(
            f"{what} comes to {size(mine + more)} with your other jobs and reservations, and the most {holder} "
            f"may have is {size(most)}",
            f"close a job, use a smaller batch or model, or raise {setting}",
        )

    def _held(self, job: ScheduledJob, charge: Charge) -> int:
        """Bytes that a job is charged besides an arena that it shares: what it reserved, at least."""
        return max(_alone(job, charge), self.least.get(job.id, 0))

    def recharge(self, job: ScheduledJob) -> None:
        """Charge the job for the programs it has now."""
        charge = charge_for(p.footprint for p in job.programs.values())
        self._add(job.peer.uid, self._held(job, charge) - self._held(job, self.charges[job.id]))
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
            bytes_of[job.peer.uid] = bytes_of.get(job.peer.uid, 0) + self._held(job, expected)
        for uid, arena in self.arenas.items():
            assert arena.jobs, f"user {uid} has an arena for no job"
            bytes_of[uid] = bytes_of.get(uid, 0) + arena.nbytes
        assert bytes_of == self.bytes_by_uid, f"bytes by uid {self.bytes_by_uid}, should be {bytes_of}"
        assert by_uid == self.jobs_by_uid, f"jobs by uid {self.jobs_by_uid}, should be {by_uid}"
        assert self.used == sum(bytes_of.values()), f"used {self.used} is not the charges' sum"
        used = self.used + self.reservations.total_bytes()
        assert self.capacity is None or used <= self.capacity, f"{used} bytes used of {self.capacity}"
        assert self.least.keys() <= jobs.keys(), f"jobs {set(self.least)} reserved, open are {set(jobs)}"
        assert self.high_place is None or self.high_place in jobs, f"{self.high_place} has the high place, and is gone"


def _alone(job: ScheduledJob, charge: Charge) -> int:
    """Bytes that a job is charged besides an arena that it shares."""
    return charge.total - (charge.transient if job.arena is not None else 0)


def _limited(rule: Rule, own: int, setting: str, general: str) -> tuple[str, str]:
    """What a limit applies to, and what sets it: the rule, if it has a limit of its `own`, or the [limits]."""
    if own and rule.share:
        return f"your share of the device ({rule.share})", "the share that is asked for"
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
    if len(spec.name) > MAX_JOB_NAME:
        return refused(f"the job's name has {len(spec.name)} characters", f"use at most {MAX_JOB_NAME}")
    return None


def _refuse_taking(reservation: Reservation, peer: Peer, spec: JobSpec) -> Fault | None:
    """Why this job may not take the reservation up, or None."""
    if peer.uid != reservation.peer.uid and not reservation.for_all:
        return Fault(
            AccessDenied.code,
            f"user {reservation.peer.uid}, as which the cluster's coordinator reserved for this job, is no operator"
            " here, and may not reserve for other users' jobs",
            "have the coordinator's user made one: operator = true in a rule of the daemon's [access.rules]",
        )
    if not reservation.confirmed:
        return refused("the job's reservation is not confirmed", "confirm it on all devices first, or release it")
    if spec.priority is not reservation.priority:
        kind = reservation.priority.name.lower()
        return refused(f"the reservation is for a {kind} job", f"submit it with priority {kind!r}")
    return None


def refuse_lease(lease_s: float) -> Fault | None:
    """Why nothing is held for so long, or None. Written so that a NaN is refused too."""
    if 0.0 < lease_s <= MOST_LEASE_S:
        return None
    return refused(f"a reservation of {lease_s} s", f"reserve for more than 0 and up to {MOST_LEASE_S:g} s")


def high_taken(job: JobId, reserved: bool) -> Fault:
    how = "reserved for" if reserved else "held by"
    return admission(
        f"the device's high place is {how} job {job}", "submit it with priority low, or on another device, or later"
    )


def not_reserved(job: JobId) -> Fault:
    return refused(f"nothing is reserved for job {job}", "its lease is over, or it was never reserved: reserve again")


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
