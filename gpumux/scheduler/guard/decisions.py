"""Decisions about low pieces: whether each may be launched, why it is held, and for how long that decision is good."""

from __future__ import annotations

from math import inf
from typing import Final

from gpumux.scheduler.guard.bans import Ban
from gpumux.scheduler.guard.costs import LaunchKind, LowCosts
from gpumux.scheduler.guard.device_view import DeviceView, RunningPiece
from gpumux.scheduler.guard.high_job import HighCosts, HighJob
from gpumux.scheduler.jobs import JobStep, ScheduledJob
from gpumux.types import JobId

# Why low work is held:
#
# calibration   a step without low work is wanted, to know what steps take alone
# learning      nothing is known yet of this low work beside that high job: one launch at a time
# ban           it would run into a range it is banned from
# price         other ranges give more low work for what the high job may lose
# budget        the high job has lost what it may lose on average
# tail          the step that runs may not lose more
# gap           it would still run when the high job's next step is expected
REASONS: Final = ("calibration", "learning", "ban", "price", "budget", "tail", "gap")
HOLD_ALL: Final = frozenset(("calibration", "learning"))  # these hold every low job, unless they name a high piece
LOSS_LIMITED: Final = frozenset(("tail", "price", "budget"))  # the high job may not lose more
MOMENT_LIMITED: Final = LOSS_LIMITED | {"ban"}  # a launch at another moment of the high step may be free of these

ANY_VERSION: Final = -1  # the low launches that are out make no difference


class Hold:
    """Why a low job may not launch now: for which high job, at which of its pieces (-1: at none in particular), by
    which ban, and when to reconsider at the latest (inf: an event will come before)."""

    __slots__ = ("arrival_expected", "ban", "high_id", "piece", "reason", "reason_since", "since", "until")

    def __init__(
        self, reason: str, high_id: JobId, *, piece: int = -1, ban: Ban | None = None, until: float = inf
    ) -> None:
        self.reason, self.high_id, self.piece, self.ban, self.until = reason, high_id, piece, ban, until
        self.since = 0.0  # when the job began to be held, for whatever reason
        self.reason_since = 0.0  # when it began to be held for this one
        self.arrival_expected = True  # reason "gap": the next step is expected at `until`, and not at any time


class Holds:
    """Which low jobs are held, since when and why; and for how long the low class was held in all, by reason."""

    def __init__(self) -> None:
        self.current: dict[JobId, Hold] = {}  # the longest held first
        self.started: list[tuple[JobId, Hold]] = []  # by this event
        self.class_reason = ""  # why the first low job is held; "": none is
        self._class_since = 0.0
        self._seconds = dict.fromkeys(REASONS, 0.0)

    def set_class_reason(self, reason: str, now: float) -> None:
        """After an event: why the first low job is held; "": none is."""
        before = self.class_reason
        if reason == before:
            return
        if before:
            self._seconds[before] += now - self._class_since
        self.class_reason, self._class_since = reason, now

    def seconds(self, now: float) -> dict[str, float]:
        """Seconds, by reason, in which low work was ready and had room, but was held."""
        found = dict(self._seconds)
        if self.class_reason:
            found[self.class_reason] += now - self._class_since
        return found

    def set(self, job: ScheduledJob, hold: Hold, now: float) -> None:
        """The job is held now, for this reason."""
        old = self.current.get(job.id)
        if old is hold:
            return
        self.current[job.id] = hold
        if old is None:
            hold.since = hold.reason_since = now
            self.started.append((job.id, hold))
            return
        hold.since = old.since
        if old.reason == hold.reason:
            hold.reason_since = old.reason_since
        else:
            self._add_seconds(job, old, now)
            hold.reason_since = now

    def end(self, job: ScheduledJob, now: float) -> None:
        """The job was launched, or has nothing to launch."""
        if job.id in self.current:
            self._add_seconds(job, self.current.pop(job.id), now)

    def job_seconds(self, job: ScheduledJob, now: float) -> dict[str, float]:
        """Seconds for which the low job was held since it opened, by reason, the longest first."""
        found = dict(job.held_s)
        hold = self.current.get(job.id)
        if hold is not None:
            found[hold.reason] = found.get(hold.reason, 0.0) + now - hold.reason_since
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def _add_seconds(self, job: ScheduledJob, hold: Hold, now: float) -> None:
        job.held_s[hold.reason] = job.held_s.get(hold.reason, 0.0) + (now - hold.reason_since)


class LaunchDecision:
    """Whether the next piece of `step` may be launched, and what has to be noted when it is. Seconds."""

    exposed = 1.0  # part of the launch that runs beside high work
    expected = 0.0  # excess high seconds
    beside: list[RunningPiece] | None = None  # high pieces that run
    kinds: list[tuple[LowCosts, LaunchKind]] | None = None  # what the launch would be, beside each of those
    idle_costs: list[HighCosts] | None = None  # of idle high jobs, a step of which may come during it
    probe: Ban | None = None  # the expired ban it would probe
    probed: HighJob | None = None  # the high job for which it would otherwise be held
    exploring: HighJob | None = None  # the high job beside which it would show something new
    relies_on_arrivals = False  # it is allowed because no step of an idle high job is expected
    unknown = False  # the piece has never run beside a high job that runs
    in_pause_of: HighJob | None = None  # a high job that waits for its peers, whose exchange it may run beside
    pause_cost = 0.0  # what it is expected to cost that one
    # Why the piece is held, and what that depends on:
    hold: Hold | None = None
    high: HighJob | None = None  # the job it is held for
    version = 0  # of that job
    low_version = ANY_VERSION  # DeviceView.low_version, where the low launches that are out made a difference

    def __init__(self, job: ScheduledJob, step: JobStep, share: float, seconds: float) -> None:
        self.job, self.step, self.share = job, step, share
        self.seconds = seconds  # the launch is predicted to take

    def hold_for(self, high: HighJob, hold: Hold) -> LaunchDecision:
        self.hold, self.high = hold, high
        self.version = high.version
        return self

    def is_current(self, low_version: int, now: float) -> bool:
        """Whether what held the piece still does. Low launches that ended since can only have made it easier."""
        hold, high = self.hold, self.high
        assert hold is not None
        assert high is not None
        return now < hold.until and self.version == high.version and self.low_version in (ANY_VERSION, low_version)


class LowWindow:
    """How many low launches may be out beside a high job: fewer while low work is held for what high jobs may lose."""

    def __init__(self, narrow: int, wide: int) -> None:
        self.narrow, self.wide = narrow, wide
        self.width = narrow
        self.loss_limited = False  # low work was held for what a high job may lose, since the width was last adapted

    def adapt(self, credit_left: bool) -> None:
        if self.loss_limited:
            self.width = max(self.width - 1, self.narrow)
        elif credit_left:
            self.width = min(self.width + 1, self.wide)
        self.loss_limited = False


# ---- The decisions themselves, and how long they hold.


class Decisions:
    """Cached decisions. A held job is reconsidered only after an event that could change its decision."""

    def __init__(self, view: DeviceView, low_window: LowWindow) -> None:
        self._view, self._low_window = view, low_window
        self._by_job: dict[JobId, LaunchDecision] = {}  # why each low job was held when it was last considered
        self.held_now: list[LaunchDecision] = []  # decisions of this event that hold a job
        self.admitted: LaunchDecision | None = None  # of the launch that is made next, where one was needed
        self.holds = Holds()

    # ---- one event

    def begin_event(self) -> None:
        self.held_now.clear()

    def end_event(self, now: float) -> float:
        """Note which jobs are held and why. Returns when to reconsider at the latest; inf: an event will come."""
        until, class_reason = inf, ""
        for decision in self.held_now:
            hold = decision.hold
            assert hold is not None
            self.holds.set(decision.job, hold, now)
            until = min(until, hold.until)
            class_reason = class_reason or hold.reason
            if hold.reason in LOSS_LIMITED:
                self._low_window.loss_limited = True
                if hold.reason == "budget" and decision.high is not None:
                    decision.high.budget.exhausted = True
        self.holds.set_class_reason(class_reason, now)
        return until

    # ---- one job

    def cached(self, job: ScheduledJob, step: JobStep, now: float) -> LaunchDecision | None:
        """The decision that still holds the job's step, or None."""
        found = self._by_job.get(job.id)
        if found is None or found.step is not step or not found.is_current(self._view.low_version, now):
            return None
        return found

    def current(self, job: ScheduledJob) -> LaunchDecision | None:
        """The decision that holds the job as of this event, or None."""
        found = self._by_job.get(job.id)
        return found if found in self.held_now else None

    def hold(self, decision: LaunchDecision) -> None:
        """The job is held. The decision replaces one made earlier in the event."""
        before = self._by_job.get(decision.job.id)
        if before is decision:  # it still holds
            if decision not in self.held_now:
                self.held_now.append(decision)
            return
        self._by_job[decision.job.id] = decision
        if before is not None and before in self.held_now:
            self.held_now[self.held_now.index(before)] = decision
        else:
            self.held_now.append(decision)

    def holds_all(self, job: ScheduledJob) -> bool:
        """Whether what holds this job, just considered, holds every low job."""
        decision = self._by_job.get(job.id)
        hold = decision.hold if decision is not None else None
        return hold is not None and hold.piece < 0 and hold.reason in HOLD_ALL

    def forget(self, job: ScheduledJob) -> None:
        """The job's next piece is another one, or is decided about anew."""
        if job.id in self._by_job:
            decision = self._by_job.pop(job.id)
            if decision in self.held_now:
                self.held_now.remove(decision)

    def awaited(self, job: ScheduledJob) -> None:
        """A client waits for a step of the job. Where it is held for an idle high job that gets a step only after that,
        it is decided about anew."""
        decision = self._by_job.get(job.id)
        high = decision.high if decision is not None else None
        if high is not None and high.waits_for is job and high.idle_since < inf:
            self.forget(job)

    def job_gone(self, job: ScheduledJob, now: float) -> None:
        """The job is closing, or changes its class."""
        self.forget(job)
        self.holds.end(job, now)
