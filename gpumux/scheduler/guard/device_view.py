"""What the device is doing, as far as a low launch made now is concerned. Worked out once, used by many decisions."""

from __future__ import annotations

from collections import deque
from math import inf
from typing import Final, TypeAlias

from gpumux.scheduler.guard.costs import LaunchKind, LaunchPlan, LowCosts
from gpumux.scheduler.guard.high_job import HighCosts, HighJob
from gpumux.scheduler.jobs import LowKey, LowPiece, ScheduledJob
from gpumux.scheduler.windows import Outstanding, Windows
from gpumux.types import JobId, LaunchId

RECENT: Final = 8  # ended low launches that may still be charged
LATE: Final = 0.05  # of its time: what a piece that should be over is still given
MAX_IDLE: Final = 4  # idle high jobs whose next step is considered: those idle for the shortest time


class LowLaunch:
    """A low launch as the guard follows it, until it is known what it cost. Seconds."""

    ended = 0.0  # 0.0: it is still out
    latest_end = 0.0  # end of any low launch by the time this one was reported done
    due = 0.0  # when it should be over
    expected = 0.0  # excess high seconds it was expected to cost
    charged = 0.0  # excess high seconds it was charged so far
    charged_in_step = 0.0  # of these, in the high step that runs
    peak = 0.0  # the most it was charged in one high step
    exposed = 1.0  # part of it that runs beside high work
    beside_high = False  # a high job ran or was idle when it was launched
    only_launch = False  # nothing else was out when it was launched
    met_arrival = False  # a high step came while it was out
    exploring = False  # it was launched to find out what it costs
    relies_on_arrivals = False  # it was launched because no step of an idle high job was expected
    overlap = 0.0  # seconds beside the high piece that ended last
    weight = 0.0  # its part of that piece's excess, relative to other launches'
    kinds: list[tuple[LowCosts, LaunchKind]] | None = None  # what it is as a launch, beside each high job that ran
    idle_costs: list[HighCosts] | None = None  # of idle high jobs, a step of which may come during it

    def __init__(self, launch: Outstanding, key: LowKey) -> None:
        self.key = key
        self.job, self.step, self.predicted, self.at = launch.job, launch.step, launch.predicted, launch.at
        self.span = launch.step.spans[launch.piece]
        self.began = launch.at

    def close_step(self) -> None:
        """The high step that ran is over: what it is charged from now on is another step's loss."""
        self.peak = max(self.peak, self.charged_in_step)
        self.charged_in_step = 0.0


LowLaunches: TypeAlias = list[LowLaunch]


class RecentLaunches:
    """The newest low launches that ended."""

    def __init__(self) -> None:
        self.launches: deque[LowLaunch] = deque(maxlen=RECENT)
        self.last_end = 0.0
        self.open: LowLaunches = []  # launches that a running high piece may still be charged to

    def add(self, launch: LowLaunch, high_out: bool, parked: bool) -> None:
        """A launch ended. `high_out`: high pieces are out that it may have delayed; later ones it can't delay.
        `parked`: a high job waits for its peers, whose exchange it may have delayed."""
        if high_out or parked:
            self.launches.appendleft(launch)
            self.last_end = max(self.last_end, launch.ended)
            launch.latest_end = self.last_end
        if launch.kinds is not None or (launch.idle_costs is not None and (high_out or launch.met_arrival)):
            self.open.append(launch)

    def end_step(self, out: dict[LaunchId, LowLaunch]) -> None:
        """A high step ended."""
        for launch in (*out.values(), *self.open):
            launch.close_step()


class RunningPiece:
    """A high job's oldest piece on the device. It began at `began` and should end at `until`; `late` is by how many
    seconds it has exceeded its solo time. `more`: another step of the job is queued behind this one."""

    __slots__ = ("at", "began", "costs", "high", "late", "more", "plan", "planned", "position", "until")

    def __init__(
        self, *, high: HighJob, costs: HighCosts, at: int, began: float, until: float, more: bool, late: float
    ) -> None:
        self.high, self.costs, self.at = high, costs, at
        self.began, self.until, self.more, self.late = began, until, more, late
        # Worked out when first needed:
        self.position: tuple[int, bool, int, float] | None = None  # timing.launch_position
        self.planned: LowPiece | None = None  # the low piece that `plan` is for
        self.plan: LaunchPlan | None = None


class DeviceView:
    """`running` and `idle` are the high jobs that matter to a low launch made at `now`. `free_at` is when the low
    launches that are out should be over, and `pending` what they are still expected to cost in high seconds. No high
    step is expected before `calm`. All of these are as of the last `refresh`.

    The view also keeps what it is made of: `idle_jobs` (all idle high jobs, the longest idle first), `low_launches`
    (those that are out) and `recent` (those that ended lately).
    """

    def __init__(self) -> None:
        self.version = 0  # changes with everything that decisions depend on, except for time
        self.low_version = 0  # changes when low launches are made or end
        self.idle_jobs: list[HighJob] = []
        self.low_launches: dict[LaunchId, LowLaunch] = {}
        self.recent = RecentLaunches()
        self.low_until = 0.0  # when the newest low launch should be over
        # What the device was measured to do, in seconds:
        self.launch_overhead = 0.0  # by which a low launch with nothing before it takes longer than its piece
        self.launch_delay = 0.0  # from making a low launch to its start
        self.overrun = 0.0  # by which low launches lately missed a predicted end before a high step
        # As of the last refresh:
        self.now = -1.0
        self._looked_version = 0
        self._no_pieces: list[RunningPiece] = []
        self.running = self._no_pieces
        self.idle: list[HighJob] = []
        self.calm = self.free_at = self.pending = 0.0
        self.low_out = False
        # When the idle jobs have to be looked at again:
        self._next_look = 0.0  # their next arrival may be another one
        self._idle_changes = 0.0  # one of `idle` leaves the list
        self._next_arrival = inf

    # ---- what happens

    def changed(self) -> None:
        """Something that decisions depend on changed."""
        self.version += 1

    def expect_high_work(self) -> None:
        """High work may run now: no launch is made without a look at the device."""
        self.calm = 0.0

    def became_idle(self, high: HighJob) -> None:
        """A high job became idle. It may push one that has been idle for longer out of those that are considered, and
        then low work is no longer held for that one."""
        idle = self.idle_jobs
        idle.append(high)
        if len(idle) > MAX_IDLE:
            idle[len(idle) - 1 - MAX_IDLE].changed()
        self.idle_jobs_changed()

    def became_busy(self, high: HighJob) -> None:
        """An idle high job got a step. A job that gets steps often is found near the end."""
        idle = self.idle_jobs
        for at in range(len(idle) - 1, -1, -1):
            if idle[at] is high:
                del idle[at]
                break
        self.idle_jobs_changed()

    def idle_jobs_changed(self) -> None:
        """Other high jobs are idle, or one of them was paused or resumed."""
        self._next_look = self._idle_changes = 0.0

    # ---- looking at the device

    def refresh(self, windows: Windows, high_jobs: dict[JobId, HighJob], now: float) -> None:
        """Look at the device, unless nothing has changed since the last look."""
        if self.now == now and self._looked_version == self.version:
            return
        self.now, self._looked_version = now, self.version
        if now >= self._next_look:
            self._look_at_idle(now)
        if windows.high.launches:
            self.running, self.calm = _running(windows, high_jobs, now), 0.0
        else:
            self.running, self.calm = self._no_pieces, self._next_arrival
        free_at, pending = now, 0.0
        for low in self.low_launches.values():
            free_at = max(free_at, low.due)
            pending += max(0.0, low.expected - low.charged)
        if self.running:  # what ended beside a piece that still runs has not been charged yet
            began = inf
            for running in self.running:
                began = min(began, running.began)
            for low in self.recent.launches:
                if low.ended > began:
                    pending += max(0.0, low.expected - low.charged)
        self.free_at, self.pending, self.low_out = free_at, pending, bool(self.low_launches)

    def _look_at_idle(self, now: float) -> None:
        """When the next step of one of the idle jobs is expected."""
        if now >= self._idle_changes:
            self._choose_idle(now)
        soonest = inf
        for high in self.idle:
            if high.earliest_arrival <= now:
                since, arrivals = high.idle_since, high.arrivals
                high.passed = arrivals.count_passed(now - since, high.passed)
                high.earliest_arrival = since + (0.0 if arrivals.unpredictable else arrivals.earliest(high.passed))
            # Where the exchange may suffer, each launch is looked at.
            suffers = high.gate is not None and (high.holds_all() or high.gate.suffers)
            soonest = min(soonest, now if suffers else high.earliest_arrival)
        self._next_arrival, self._next_look = soonest, min(soonest, self._idle_changes)

    def _choose_idle(self, now: float) -> None:
        """The high jobs idle for no longer than they usually are, newest first."""
        self.idle, self._idle_changes = [], inf
        for high in reversed(self.idle_jobs[-MAX_IDLE:]):
            if high.idle_since == inf or high.job.paused:
                continue
            leaves = high.idle_since + high.arrivals.longest
            if high.gate is not None and high.calibrating:
                leaves = inf  # it comes back, and what it takes alone is to be learned
            if now <= leaves:
                self.idle.append(high)
                self._idle_changes = min(self._idle_changes, leaves)


def _running(windows: Windows, high_jobs: dict[JobId, HighJob], now: float) -> list[RunningPiece]:
    """The oldest piece of each high job on the device, with its predicted end."""
    found: list[RunningPiece] = []
    for launch in windows.high.launches.values():
        job: ScheduledJob = launch.job
        high = high_jobs.get(job.id)
        costs = high.step_costs.get(launch.step.id) if high is not None else None
        if high is None or costs is None or (found and found[0].high is high):
            continue  # the job is closing, or this is not its oldest piece
        began = max(high.ended, launch.at)
        solo = costs.solo_s[launch.piece]
        late = now - began - solo
        found.append(
            RunningPiece(
                high=high, costs=costs, at=launch.piece, began=began, more=job.inflight > 1, late=max(0.0, late),
                until=began + solo if late < 0.0 else now + LATE * solo,
            )
        )  # fmt: skip
    return found
