"""One high job as the guard follows it: the step that runs, when its steps arrive, and what it may lose."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import inf
from typing import Final

from gpumux.scheduler.guard.arrivals import ArrivalTrust, InterArrivals
from gpumux.scheduler.guard.attribution import OVERLAPPING
from gpumux.scheduler.guard.baseline import ENOUGH_SAMPLES, Baseline
from gpumux.scheduler.guard.budget import MOST_DELAY_S, UNSEEN_S, SlowdownBudget
from gpumux.scheduler.guard.costs import EXPLORE_ALWAYS, EXPLORE_IF_STUCK, EXPLORE_NEVER, Bounds, HighCosts
from gpumux.scheduler.jobs import Job, JobStep
from gpumux.types import JobId, StepId

FIRST_SOLO_STEPS: Final = 3  # steps without low work that a job begins with
SOLO_EVERY: Final = 64  # steps after which another one without low work is wanted
CALIBRATION_TRIES: Final = 4  # steps a calibration may take: low work that is still out spoils some
HELD_LONG_STEPS: Final = 16  # steps for which low work was held: from then on more may be explored
SPARE_VIOLATIONS: Final = 2.0  # violations left that exploration needs while low work does run
LEAST_PRICE: Final = 2.0  # low seconds for a high second: below it credit is not short
LEARNING_STEPS: Final = 200  # in which unknown launches are explored as long as there is credit
KNOWN_STEPS: Final = 300  # after which only one step in WATCH_EVERY is learned from
WATCH_AGAIN: Final = 32  # steps that are all learned from after several were slower than known costs explain
WATCH_EVERY: Final = 4
UNSTEADY: Final = 0.3  # of what a step may lose: by how much pauses may differ and still count as equal
RARELY: Final = 0.002  # an arrival less probable than this may cost more than a step may lose
USUALLY: Final = 0.9  # a launch that meets the next step with this probability has that step's loss in its known cost
QUEUED_STEPS: Final = 64  # steps over which it is averaged how many came while another one ran
RECENT_STEPS: Final = 256  # steps whose slowdown is reported


class Version:
    """Version of what decisions depend on. A decision made under an older version is stale."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class HighJob:
    """What the guard knows of one high job. Times are seconds."""

    __slots__ = (
        "arrival_loss", "arrival_programs", "arrivals", "arrived", "began", "beside_high", "budget", "calibrating",
        "calibration_tries", "costs", "earliest_arrival", "ended", "excess", "explored_piece", "explored_step",
        "from_idle", "host_wait", "idle_from", "idle_since", "job", "last_solo_step", "late_steps", "least_need",
        "over", "passed", "pieces", "probed_step", "queued_part", "ratios", "shared", "shared_steps", "step_costs",
        "step_version", "steps", "steps_beside_high", "tried", "trust", "version", "waits_for", "waits_for_step",
        "watched_until", "watching",
    )  # fmt: skip

    def __init__(self, job: Job) -> None:
        self.job = job
        self.costs: HighCosts | None = None  # of the newest step launched
        self.step_costs: dict[StepId, HighCosts] = {}  # of each step that has pieces out
        self.budget = SlowdownBudget(job.spec.max_slowdown)
        self.arrivals = InterArrivals()
        self.trust = ArrivalTrust()
        # Decisions to hold low work for this job:
        self.version = Version()  # of everything they depend on
        self.step_version = Version()  # of those that nothing changes before the step is over
        self.least_need = inf  # they stay as they are in this step while it can't lose this many seconds more
        # Between its steps:
        self.idle_since = inf  # inf: it is not idle
        self.earliest_arrival = 0.0  # no step is expected before this time, if it is in the future
        self.passed = 0  # known pauses that are no longer than this one, as of the last look
        self.idle_from = 0.0  # when the job became idle before its newest step came
        self.arrived = 0.0  # when a step last found the job idle
        self.waits_for: Job | None = (
            None  # low job whose step `waits_for_step` the client waits for before it steps this
        )
        self.waits_for_step = StepId(-1)
        # The step that runs:
        self.began = 0.0
        self.from_idle = False  # the job was idle when it came
        self.shared = False  # low work ran beside it
        self.beside_high = False  # another high job's work ran beside it
        self.tried = False  # low work was launched to find out what it costs
        self.excess = 0.0
        self.arrival_loss = 0.0  # seconds it lost by coming while low work was out
        self.arrival_programs: set[str] = set()  # low programs that relied on it not to come yet
        # All its steps:
        self.steps = 0
        self.pieces = 0
        self.ended = 0.0  # when its newest piece ended, by the device's clock
        self.shared_steps = 0
        self.steps_beside_high = 0
        self.over = 0  # steps slower than promised on average
        self.ratios: deque[float] = deque(maxlen=RECENT_STEPS)
        self.host_wait = 0.0  # seconds the device waited for the host with a piece of the job due
        self.queued_part = 0.0  # part of its steps that come while another one runs
        self.late_steps = 0  # steps in a row beside low work that lost more than they may
        # Learning:
        self.calibrating = FIRST_SOLO_STEPS  # steps without low work still wanted
        self.calibration_tries = 0
        self.last_solo_step = 0  # `steps` when there last was one
        self.watching = True  # launches beside the step that runs are charged, and learned from
        self.watched_until = KNOWN_STEPS
        self.explored_piece = -9  # `pieces` when an unknown launch was last explored
        self.explored_step = -1  # `steps` when that was
        self.probed_step = -(1 << 30)  # `steps` when a ban was last probed

    # ---- decisions to hold low work

    def changed(self) -> None:
        """Decisions to hold low work for this job are stale."""
        self.step_version.count += 1
        self._reconsider()

    def piece_changed(self) -> None:
        """The step went on to another piece: decisions are stale, unless the step can't lose enough in any case."""
        if not self.calibrating and self.budget.used + self.least_need <= self.budget.limit:
            self._reconsider()

    def _reconsider(self) -> None:
        self.version.count += 1
        self.least_need = inf

    # ---- what is known

    def solo_step(self) -> float:
        """Seconds a step takes without low work, as far as is known."""
        costs = self.costs
        if costs is None:
            return 0.0
        return costs.total if self.beside_high else costs.step_seconds(self.from_idle)

    def pause(self) -> float:
        """Seconds between steps, if pauses hardly differ: a launch at the end of a step then costs the next one the
        same every time. 0.0: there are no pauses, or they differ."""
        arrivals = self.arrivals
        steady = OVERLAPPING * (arrivals.usual - arrivals.least) <= UNSTEADY * self.budget.limit
        return arrivals.short if self.from_idle and steady else 0.0

    def may_meet(self, beyond: float) -> float:
        """Seconds of the next step that a launch which outlasts this one by `beyond` meets at times, so that the mean
        cost of such launches does not say what that step loses. 0.0: it meets the next step nearly always or never."""
        if beyond <= 0.0:
            return 0.0
        queued, arrivals = self.queued_part, self.arrivals
        seconds = beyond
        if queued <= RARELY and arrivals.sorted:
            seconds = beyond - arrivals.sorted[0]
            if seconds <= 0.0:
                return 0.0
        chance = queued + (1.0 - queued) * arrivals.chance_within(0, 0.0, beyond)
        return seconds if RARELY < chance < USUALLY else 0.0

    def exploration(self, last_launch_step: int) -> int:
        """Which untried launches may be explored although a step may lose too much by them (costs.EXPLORE_...), of a
        low program that was last launched in step `last_launch_step`."""
        budget = self.budget
        if self.steps < LEARNING_STEPS or (budget.violations_left >= SPARE_VIOLATIONS and budget.price > LEAST_PRICE):
            return EXPLORE_ALWAYS
        held_long = self.steps - last_launch_step >= HELD_LONG_STEPS
        return EXPLORE_IF_STUCK if budget.violations_left >= 1.0 and held_long else EXPLORE_NEVER

    # ---- what happens

    def adopt(self, costs: HighCosts) -> None:
        """The job's next step is one of the program and cut that `costs` are of."""
        if costs is not self.costs:
            self.costs = costs
            if not costs.step_known() and not self.calibrating:
                self.calibrate(ENOUGH_SAMPLES)

    def calibrate(self, steps: int) -> None:
        """Hold low work until so many steps ran without it."""
        self.calibrating, self.calibration_tries = steps, 0

    def step_arrived(self, step: JobStep, delay: float, now: float, low_reported: float) -> None:
        """A step came while the job was idle. The scheduler was given it `delay` seconds late; low work last began or
        ended at `low_reported`."""
        step.from_idle = True
        if delay > 0.0:
            step.arrival_delay = delay
            if now - low_reported <= delay + MOST_DELAY_S:
                step.delay_charged = min(delay, MOST_DELAY_S)
        self.changed()
        self.arrivals.add(now - self.idle_since)
        self.idle_from, self.idle_since, self.arrived = self.idle_since, inf, now

    def end_step(self, step: JobStep, ended: float) -> None:
        """The step's last piece is done: update baselines, budget and arrival trust, and begin a calibration where one
        is due."""
        costs, budget, shared = self.costs, self.budget, self.shared
        assert costs is not None
        seconds, from_idle, beside_high = ended - self.began, self.from_idle, self.beside_high
        baseline = costs.steps[1 if from_idle else 0]
        if not shared and not beside_high:
            if baseline.known:
                budget.solo_step_ended(seconds - baseline.value)
            if baseline.add(seconds):
                budget.noise.changed()
                self.calibrate(ENOUGH_SAMPLES)
        if beside_high:
            solo, excess, known = costs.total, self.excess, True
        else:
            solo, known = costs.step_seconds(from_idle), costs.step_known()
            excess = seconds - solo if known else self.excess
        budget.end_step(
            excess, shared=shared, explored=self.tried, unseen=UNSEEN_S if from_idle else 0.0, late=baseline.late,
            delay=step.delay_charged,
        )  # fmt: skip
        lost = excess + step.arrival_delay  # by the client
        excess += step.delay_charged
        if known and budget.learned:
            self._update_trust(excess)
        self.steps += 1
        if shared:
            self.late_steps = self.late_steps + 1 if excess > budget.limit else 0
            # Launches then cost more than is known, unless steps without low work are as late.
            if self.late_steps >= budget.confirmations:
                self.watched_until = max(self.watched_until, self.steps + WATCH_AGAIN)
        self.watching = self.steps < self.watched_until or self.steps % WATCH_EVERY == 0
        if self.steps == LEARNING_STEPS:
            budget.end_learning()
        self._end_calibration(not shared, baseline)
        if known and solo > 0.0:
            ratio = 1.0 + lost / solo
            self.ratios.append(ratio)
            if shared:
                self.shared_steps += 1
            if ratio > 1.0 + budget.slack:
                self.over += 1
        if beside_high:
            self.steps_beside_high += 1
        if self.steps > 1:  # of the first one it is not known whether it found the job idle
            count = self.steps - 1 if self.steps < QUEUED_STEPS else QUEUED_STEPS
            self.queued_part += ((0.0 if from_idle else 1.0) - self.queued_part) / count
        self.step_costs.pop(step.id, None)
        self.arrival_programs.clear()
        self.excess, self.arrival_loss, self.shared, self.beside_high, self.tried = 0.0, 0.0, False, False, False

    def _update_trust(self, excess: float) -> None:
        trust, budget, before = self.trust, self.budget, self.trust.trusted
        trust.step_ended(
            self.arrival_loss, self.arrival_programs, excess=excess, most=budget.most, credit=budget.credit,
            noise=budget.noise.over,
        )  # fmt: skip
        if trust.trusted is not before:
            self.arrivals.set_predictable(trust.trusted)
            if before:
                budget.restore_tail()

    def _end_calibration(self, solo: bool, baseline: Baseline) -> None:
        """A step ended, `solo` if without low work: count it, and begin a calibration if it is time."""
        if solo:
            self.last_solo_step = self.steps
        if self.calibrating:
            self.calibration_tries += 1
            if solo:
                self.calibrating -= 1
                if not self.calibrating and baseline.suspect:
                    self.calibrating = 1
            if self.calibration_tries >= CALIBRATION_TRIES:
                self.calibrating = 0
                self.last_solo_step = self.steps
        elif self.steps - self.last_solo_step >= SOLO_EVERY:
            self.calibrate(1)


# ---- Low steps that a client waits for before it steps its high jobs again.
#
# One program may step a high job and low jobs in turn. Its high job then looks like any other that pauses between two
# steps, and low work would be held for its next step. That step can't come: it is sent by the thread that waits for the
# low step. The client says so (ClientWaits). Until the low step is answered, it is not held for those high jobs while
# they are idle. Everything else stays: low work is held for other high jobs, other low steps are held for these, and a
# high step that runs is protected as ever.


class AwaitedSteps:
    """Low jobs for one of whose steps a client waits. `jobs` are these, the longest awaited first, and `waiting` the
    high jobs that get no step before, by low job."""

    __slots__ = ("jobs", "waiting")

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.waiting: dict[JobId, list[HighJob]] = {}

    def add(self, low: Job, step: StepId, high: HighJob) -> None:
        """The high job gets no step before this one of the low job is answered."""
        self.remove(high)
        high.waits_for, high.waits_for_step = low, step
        if low.id not in self.waiting:
            self.waiting[low.id] = []
            self.jobs.append(low)
        self.waiting[low.id].append(high)

    def remove(self, high: HighJob) -> None:
        """The high job may get a step at any time again."""
        low = high.waits_for
        if low is None:
            return
        high.waits_for = None
        self.waiting[low.id].remove(high)
        if not self.waiting[low.id]:
            del self.waiting[low.id]
            self.jobs.remove(low)

    def answered(self, low: Job, step: StepId) -> None:
        """This step of the low job was answered."""
        for high in list(self.waiting.get(low.id, ())):
            if high.waits_for_step <= step:
                self.remove(high)

    def forget(self, low: Job) -> None:
        """The job is gone, or is a high one now."""
        for high in list(self.waiting.get(low.id, ())):
            self.remove(high)


# ---- The costs of high programs: one HighCosts for each program and cut.


MOST_PROGRAMS: Final = 1024 + 64  # high programs remembered: all that may be in use, and some that were
MOST_CUTS: Final = 4  # of each


class CostsByProgram:
    """What is known of each high program under each of its cuts. The oldest are forgotten first."""

    def __init__(self) -> None:
        self._cuts: dict[str, dict[Bounds, HighCosts]] = {}  # by program

    def of(self, key: str, bounds: Bounds, predicted: Sequence[float], high_jobs: Mapping[JobId, HighJob]) -> HighCosts:
        """Costs of the program under that cut. A new cut inherits from the newest. Programs that none of `high_jobs`
        runs make room."""
        cuts = self._cuts.setdefault(key, {})
        costs = cuts.get(bounds)
        if costs is None:
            newest = next(reversed(cuts.values())) if cuts else None
            costs = newest.recut(bounds, predicted) if newest else HighCosts(key, bounds, predicted)
            cuts[bounds] = costs
            if len(cuts) > MOST_CUTS:
                del cuts[next(iter(cuts))]
            if len(self._cuts) > MOST_PROGRAMS:
                used = {high.costs.key for high in high_jobs.values() if high.costs is not None}
                del self._cuts[next(key for key in self._cuts if key not in used)]
        return costs

    def cuts(self, key: str) -> Collection[HighCosts]:
        """Costs of one program under all its cuts."""
        return self._cuts[key].values()

    def all(self) -> Iterator[HighCosts]:
        for cuts in self._cuts.values():
            yield from cuts.values()
