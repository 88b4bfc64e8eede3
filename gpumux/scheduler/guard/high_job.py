"""One high job as the guard follows it: what its programs take alone, the step that runs, when its steps arrive, and
what it may lose.

`HighCosts` belongs to one high program under one cut: solo baselines of its pieces and of its whole step, and what it
loses beside each low program (`costs.py`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import ceil, inf
from typing import Final, TypeAlias

from gpumux.scheduler.guard.bans import Ban
from gpumux.scheduler.guard.budget import DECAY, MOST_DELAY_S, PRIOR_SAMPLES, UNSEEN_S, VIOLATION_RATE, SlowdownBudget
from gpumux.scheduler.guard.costs import (
    EXPLORE_ALWAYS,
    EXPLORE_IF_STUCK,
    EXPLORE_NEVER,
    START,
    LaunchCost,
    LowCosts,
    LowPlacement,
    RangeCost,
    on_arrival,
)
from gpumux.scheduler.jobs import JobProgram, JobStep, LowKey, ScheduledJob, Span
from gpumux.types import JobId, StepId

# ---- How long things take when no low work is beside them: solo estimates that notice when the work changed.
#
# A solo sample is rarely wrong but can be noisy (a host that paused, a clock that stepped), so the estimate is a
# median. Two samples in a row that differ from it in the same direction are no noise: the work itself changed (another
# clock rate, other data), and they replace what was known. Where samples always differ (a CPU that other programs use,
# too), the difference that counts grows with the usual difference, since each such finding makes low work wait for a
# calibration. The mean is not the median there either; `late` is the difference.


MEDIAN_OF: Final = 5  # samples: a median of these ignores two bad ones
WORK_CHANGED: Final = 0.10  # relative difference of a sample that may mean that the work changed
NOISY: Final = 3.0  # usual differences that it has to exceed as well
USUAL_PART: Final = 0.1  # weight of the newest difference in the usual one: a change must not pass for noise
ALIKE: Final = 0.05  # relative difference that counts as none
MOST_LATE: Final = 3.0  # times the estimate: what a sample counts for at most
ENOUGH_SAMPLES: Final = 2  # before an estimate is relied on


class Baseline:
    """Seconds without low work. `value` is 0.0 while nothing is known."""

    def __init__(self) -> None:
        self.value = 0.0
        self.count = 0  # samples ever taken
        self.known = False  # there were enough samples
        self.drifts = 0  # how often the work was found to have changed
        self.noise = 0.0  # usual difference between a sample and the estimate, relative to the lesser of the two
        self.samples: list[float] = []
        self.late = 0.0  # seconds by which samples exceed the estimate on average
        self._weight = 0.0  # of the samples in `late`
        self._newest = 0.0  # difference of the newest sample, added to `late` once the next one shows it was no change
        self._suspects = 0  # samples in a row that differ: positive when slower, negative when faster

    @property
    def suspect(self) -> bool:
        """Whether the newest sample differs from the estimate, so that the next one decides."""
        return self._suspects != 0

    def add(self, seconds: float) -> bool:
        """Take a sample. True when it shows that the work changed."""
        value = self.value
        self.samples.append(seconds)
        self.count += 1
        if self.count == ENOUGH_SAMPLES:
            self.known = True
        least, off = min(value, seconds), abs(seconds - value)
        bound = NOISY * self.noise
        if least > 0.0:
            self.noise += USUAL_PART * (min(off / least, 1.0) - self.noise)
        if off <= (bound * least if bound > WORK_CHANGED else WORK_CHANGED * value):
            self._suspects = 0
        elif self.count > ENOUGH_SAMPLES:
            step = 1 if seconds > value else -1
            self._suspects = self._suspects + step if self._suspects * step > 0 else step
            if abs(self._suspects) >= 2:
                del self.samples[:-2]
                self._suspects = 0
                self.drifts += 1
                self.value = min(self.samples)
                self._newest = 0.0
                return True
        self._weight = DECAY * self._weight + 1.0
        if self._newest or self.late:
            self.late = max(0.0, self.late + (self._newest - self.late) / (self._weight + PRIOR_SAMPLES))
        self._newest = 0.0 if off <= ALIKE * value or not value else min(seconds - value, MOST_LATE * value)
        if len(self.samples) > MEDIAN_OF:
            del self.samples[0]
        self.value = sorted(self.samples)[(len(self.samples) - 1) // 2]
        return False


# ---- When a high job's next step arrives: between steps, the pauses seen so far tell how probable that is.


KEPT_INTERVALS: Final = 256  # pauses remembered
ENOUGH_INTERVALS: Final = 8  # pauses none of which was shorter: enough to rely on
ENOUGH_PAUSES: Final = 16  # before their spread says anything
AT_RANDOM: Final = 0.4  # of the usual pause: a short one is less where steps come at random (Poisson process: 0.15)
IDLE_FACTOR: Final = 16.0  # a job that has had no step for so many usual pauses is idle for good


class InterArrivals:
    """The newest pauses between a job's steps. `usual` is the median one, `short` one that nine in ten exceed, `least`
    one that nearly all exceed. Arrivals are `unpredictable` if they are `at_random`, which the spread of pauses tells,
    or if steps came when none was expected. A job that has been without a step for `longest` is idle for good: that is
    the longest pause seen or, if arrivals are predictable, many usual ones. All are 0.0 while no pause is known."""

    def __init__(self, before_steps: bool = True) -> None:
        """`before_steps`: the pauses are between steps. A rank's pauses before an exchange end when its peers come, so
        they are not taken to be at random, however much they differ."""
        self._before_steps = before_steps
        self.sorted: list[float] = []  # by length
        self.longest = self.short = self.usual = self.least = 0.0
        self.unpredictable = self.at_random = self._surprised = False
        self._newest: deque[float] = deque()

    def add(self, seconds: float) -> None:
        """One more pause; the oldest is forgotten."""
        known = self.sorted
        if len(self._newest) == KEPT_INTERVALS:
            del known[bisect_left(known, self._newest.popleft())]
        self._newest.append(seconds)
        insort(known, seconds)
        self.usual, self.short, self.least = known[len(known) // 2], known[len(known) // 10], known[len(known) // 128]
        self._bound()

    def set_predictable(self, predictable: bool) -> None:
        """Whether steps came when they were expected."""
        self._surprised = not predictable
        self._bound()

    def _bound(self) -> None:
        enough = self._before_steps and len(self.sorted) >= ENOUGH_PAUSES
        self.at_random = enough and self.short < AT_RANDOM * self.usual
        self.unpredictable = self._surprised or self.at_random
        most, usual = self.sorted[-1] if self.sorted else 0.0, IDLE_FACTOR * self.usual
        self.longest = (most if self.unpredictable else min(most, usual)) * 1.01

    def earliest(self, passed: int) -> float:
        """The pause after which a step is expected at the earliest, where `passed` of them were no longer than this one
        is already: the next longer one, or half of it where few are longer. 0.0: a step may come at any time."""
        left = len(self.sorted) - passed
        if left >= ENOUGH_INTERVALS:
            return self.sorted[passed]
        return 0.5 * self.sorted[passed] if left else 0.0

    def count_passed(self, waited: float, at_least: int) -> int:
        """How many pauses were no longer than `waited`; `at_least` of them are known to be."""
        return bisect_right(self.sorted, waited, at_least)

    def chance_within(self, passed: int, waited: float, seconds: float) -> float:
        """How probable it is that a job idle for `waited` seconds, which `passed` of the pauses were no longer than,
        gets a step within the next `seconds`."""
        known, until = self.sorted, waited + seconds
        left = len(known) - passed
        if left <= 0:
            return 0.0
        if until >= known[passed]:
            return (self.count_passed(until, passed + 1) - passed) / left
        # None so far does not mean never: the nearest pauses on both sides say how dense they are here.
        before = known[passed - 1] if passed else 0.0
        return min(1.0, seconds / (known[passed] - before)) / (left + 1)


# ---- Whether the pauses seen so far tell when a high job's next step comes.
#
# Low work that should be over before the next step, or that meets one so seldom that it does not count, runs at the
# risk of being wrong. Where steps come at about the same time that is right. Where they come at random (a server's
# requests) there is always a pause after which none came so far. So what steps lose *because they came while low work
# was out* is counted by itself: as for all steps (budget.py), a part of them may lose too much, and on average they may
# lose the credit. What they lose later, beside work that was launched while they ran, does not count here.


ALLOWED_ARRIVAL_VIOLATIONS: Final = 1.0  # steps that may lose too much on arrival, to begin with
MOST_ARRIVAL_DEBT: Final = 4.0  # so that a disturbance is forgotten after some hundred steps
MOSTLY: Final = 0.5  # part of a step's loss: if so much was lost on arrival, the arrival was the reason


class ArrivalTrust:
    """Whether the known pauses are relied on: if `trusted`."""

    def __init__(self) -> None:
        self.violations_left = ALLOWED_ARRIVAL_VIOLATIONS
        self.mean_loss = 0.0  # seconds that steps lose on arrival
        self.capped_loss = 0.0  # the same, where a step counts for no more than it may lose
        self.trusted = True

    def step_ended(self, lost: float, *, excess: float, most: float, credit: float, noise: float) -> None:
        """A step lost `excess` seconds, of which `lost` on arrival. It may lose `most`, and steps no more than `credit`
        on average. `noise`: how probable it is that a step loses more for another reason."""
        left = self.violations_left + VIOLATION_RATE
        if lost > 0.0:
            left += noise
            if excess > most and lost > MOSTLY * excess:
                left -= 1.0
        self.violations_left = left = max(-MOST_ARRIVAL_DEBT, min(left, ALLOWED_ARRIVAL_VIOLATIONS))
        self.mean_loss = DECAY * self.mean_loss + (1.0 - DECAY) * lost
        self.capped_loss = DECAY * self.capped_loss + (1.0 - DECAY) * min(lost, most)
        self.trusted = left >= 0.0 and self.mean_loss <= credit


# ---- The gates of a rank's programs, at which it waits for its peers and then exchanges data with them.


MOST_GATES: Final = 1024  # of a job that are remembered
MOST_LOW: Final = 64  # low programs of which a gate remembers what they cost its exchange


class Gate:
    """What is known of one gate: the gate before `operator` of the program with key `program`. `arrivals`: its pauses,
    from the piece before it to the end of the exchange; `exchange`: what that takes alone once the peers are there."""

    def __init__(self, program: str, operator: int) -> None:
        self.program, self.operator = program, operator
        self.arrivals = InterArrivals(before_steps=False)
        self.exchange = Baseline()
        self._beside: dict[LowKey, RangeCost] = {}

    def beside(self, key: LowKey) -> RangeCost:
        """What the exchange loses in a second beside this low program."""
        found = self._beside.get(key)
        if found is None:
            if len(self._beside) == MOST_LOW:
                del self._beside[next(iter(self._beside))]
            found = self._beside[key] = RangeCost()
        return found

    def known_cost(self, key: LowKey) -> RangeCost | None:
        """The same, None if it never ran beside it."""
        return self._beside.get(key)

    def ban(self, key: LowKey) -> Ban | None:
        """The ban of this low program, if there is one."""
        found = self._beside.get(key)
        if found is None or found.ban is None:
            return None
        if found.ban.lifted:
            found.ban = None
        return found.ban

    @property
    def suffers(self) -> bool:
        """Whether low work was seen to cost the exchange anything: then each launch before it is looked at."""
        return any(cost.mean > 0.0 or cost.ban is not None for cost in self._beside.values())

    def probes_missed(self) -> None:
        """An exchange has ended: a probe that did not run beside it has shown nothing."""
        for cost in self._beside.values():
            if cost.ban is not None:
                cost.ban.probing = False


# ---- The job.


FIRST_SOLO_STEPS: Final = 3  # steps without low work that a job begins with
FIRST_RANKS_STEPS: Final = 6  # the same of a job on several devices
SOLO_EVERY: Final = 64  # steps after which another one without low work is wanted
CALIBRATION_TRIES: Final = 4  # steps a calibration may take: low work that is still out spoils some
HELD_LONG_STEPS: Final = 16  # steps for which low work was held: from then on more may be explored
SPARE_VIOLATIONS: Final = 2.0  # violations left that exploration needs while low work does run
LEAST_PRICE: Final = 2.0  # low seconds for a high second: below it credit is not short
LEARNING_STEPS: Final = 200  # in which unknown launches are explored as long as there is credit
UNSTEADY: Final = 0.3  # of what a step may lose: by how much pauses may differ and still count as equal
RARELY: Final = 0.002  # an arrival less probable than this may cost more than a step may lose
RECENT_STEPS: Final = 256  # steps whose slowdown is reported
OVERLAPPING: Final = 1.3  # seconds a step is delayed at most by each second that a launch outlasts its arrival


class HighJob:
    """What the guard knows of one high job. Times are seconds."""

    def __init__(self, job: ScheduledJob) -> None:
        self.job = job
        self.costs: HighCosts | None = None  # of the newest step launched
        self.step_costs: dict[StepId, HighCosts] = {}  # of each step that has pieces out
        self.budget = SlowdownBudget(job.spec.max_slowdown)
        self.ranks = job.spec.gang.ranks if job.spec.gang is not None else 1
        self.step_arrivals = InterArrivals()
        self.arrivals = self.step_arrivals  # pauses like the one it is in: before steps, or before one collective's end
        self.gates: dict[tuple[str, int], Gate] = {}  # by program and the operator after the gate
        self.gate: Gate | None = None  # at which it waits for its peers
        self.pause_cost = 0.0  # seconds that low launches in this pause are expected to cost the exchange
        self.trust = ArrivalTrust()
        # Decisions to hold low work for this job:
        self.version = 0  # of everything they depend on
        # Between its steps:
        self.idle_since = inf  # inf: it is not idle
        self.earliest_arrival = 0.0  # no step is expected before this time, if it is in the future
        self.passed = 0  # known pauses that are no longer than this one, as of the last look
        self.parked = False  # it is idle in the middle of a step, at `gate`
        self.idle_from = 0.0  # when the job became idle before its newest step came
        self.arrived = 0.0  # when a step last found the job idle
        self.waits_for: ScheduledJob | None = (
            None  # low job whose step `waits_for_step` the client waits for before it steps this
        )
        self.waits_for_step = StepId(-1)
        # The step that runs:
        self.began = 0.0
        self.from_idle = False  # the job was idle when it came
        self.resumed_at = 0  # the newest piece that its peers came to; 0: none
        self.shared = False  # low work ran beside it
        self.beside_high = False  # another high job's work ran beside it
        self.tried = False  # low work was launched to find out what it costs
        self.excess = 0.0
        self.arrival_loss = 0.0  # seconds it lost by coming while low work was out
        # All its steps:
        self.steps = 0
        self.pieces = 0
        self.ended = 0.0  # when its newest piece ended, by the device's clock
        self.shared_steps = 0
        self.steps_beside_high = 0
        self.over = 0  # steps slower than promised on average
        self.ratios: deque[float] = deque(maxlen=RECENT_STEPS)
        self.ratio_sum = 0.0  # of all in `ratios`
        self.tail_over = 0  # those in `ratios` beyond what 99 in 100 are promised
        self.broken_since = inf  # when the steps in `ratios` began to break the promise; inf: they don't
        self.host_wait = 0.0  # seconds the device waited for the host with a piece of the job due
        # Learning:
        self.calibrating = FIRST_SOLO_STEPS if self.ranks == 1 else FIRST_RANKS_STEPS  # steps without low work, wanted
        self.calibration_tries = 0
        self.last_solo_step = 0  # `steps` when there last was one
        self.explored_piece = -9  # `pieces` when an unknown launch was last explored
        self.explored_step = -1  # `steps` when that was
        self.probed_step = -(1 << 30)  # `steps` when a ban was last probed

    # ---- decisions to hold low work

    def changed(self) -> None:
        """Decisions to hold low work for this job are stale."""
        self.version += 1

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

    def learns(self, placement: LowPlacement) -> bool:
        """Whether launches of the low program are still explored freely."""
        return self.steps < LEARNING_STEPS and not placement.explored

    def exploration(self, placement: LowPlacement) -> int:
        """Which untried launches of the low program may be explored although a step may lose too much by them
        (costs.EXPLORE_...)."""
        budget = self.budget
        if self.learns(placement) or (budget.violations_left >= SPARE_VIOLATIONS and budget.price > LEAST_PRICE):
            return EXPLORE_ALWAYS
        held_long = self.steps - placement.last_launch_step >= HELD_LONG_STEPS
        return EXPLORE_IF_STUCK if budget.violations_left >= 1.0 and held_long else EXPLORE_NEVER

    def alone_on_all_ranks(self, step: int) -> bool:
        """Whether no rank runs low work beside this step. Low work of any rank makes the steps of all of them longer,
        and ranks don't tell each other of it, but their steps have the same numbers: so have those in which all learn
        what a step takes alone."""
        return self.ranks == 1 or self.steps < FIRST_RANKS_STEPS or step % SOLO_EVERY == 0

    def holds_all(self) -> str:
        """Why no low work may run beside the job's steps, whatever it is expected to cost; "": some may. What low work
        of other ranks costs the job is not known here, and neither is what this rank's costs those: where ranks have
        lost more than they may, all of them wait until the mean is kept again."""
        if self.calibrating:
            return "calibration"
        return "budget" if self.ranks > 1 and self.budget.balance < 0.0 else ""

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

    def wait_for_peers(self, program: str, operator: int, ended: float) -> None:
        """The step has come to the gate before this operator, and goes on when its peers have. Until then the job is
        idle, and its pauses at this gate tell for how long."""
        gate = self.gates.get((program, operator))
        if gate is None:
            if len(self.gates) == MOST_GATES:
                del self.gates[next(iter(self.gates))]
            gate = self.gates[program, operator] = Gate(program, operator)
        self.gate, self.arrivals, self.parked = gate, gate.arrivals, True
        self.arrivals.set_predictable(self.trust.trusted)
        self.idle_since, self.earliest_arrival, self.passed, self.pause_cost = ended, 0.0, 0, 0.0

    def peers_came(self, piece: int, now: float) -> None:
        """The step goes on with this piece."""
        self.changed()
        self.arrivals.add(now - self.idle_since)
        self.idle_from, self.idle_since, self.arrived = self.idle_since, inf, now
        self.gate, self.arrivals, self.parked, self.resumed_at = None, self.step_arrivals, False, piece

    def end_step(self, step: JobStep, ended: float) -> None:
        """The step's last piece is done: update baselines, budget and arrival trust, and begin a calibration where one
        is due."""
        costs, budget = self.costs, self.budget
        assert costs is not None
        seconds, from_idle, beside_high = ended - self.began, self.from_idle, self.beside_high
        baseline = costs.steps[1 if from_idle else 0]
        # If only steps with low work of its own counted, ranks that take turns would each spend the job's whole credit.
        shared = self.shared or not self.alone_on_all_ranks(step.id)
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
        if self.steps == LEARNING_STEPS:
            budget.end_learning()
            for placement in costs.placements.values():
                placement.explored = True
        self._end_calibration(not shared, baseline, step.id)
        if known and solo > 0.0:
            self.judge(1.0 + lost / solo, ended)
            if self.shared:
                self.shared_steps += 1
        if beside_high:
            self.steps_beside_high += 1
        self.step_costs.pop(step.id, None)
        self.excess, self.arrival_loss, self.shared, self.beside_high, self.tried = 0.0, 0.0, False, False, False
        self.resumed_at = 0

    def judge(self, ratio: float, ended: float) -> None:
        """Add a step's slowdown to the newest ones, and note since when these break the promise: their mean is above
        1 + slack, or more than one in a hundred above 1 + 2 slack."""
        slack, ratios = self.budget.slack, self.ratios
        if len(ratios) == RECENT_STEPS:
            oldest = ratios[0]
            self.ratio_sum -= oldest
            if oldest > 1.0 + 2.0 * slack:
                self.tail_over -= 1
        ratios.append(ratio)
        self.ratio_sum += ratio
        if ratio > 1.0 + slack:
            self.over += 1
        if ratio > 1.0 + 2.0 * slack:
            self.tail_over += 1
        count = len(ratios)
        if self.mean_ratio() <= 1.0 + slack and self.tail_over <= count - ceil(0.99 * count):
            self.broken_since = inf
        elif self.broken_since == inf:
            self.broken_since = ended

    def mean_ratio(self) -> float:
        """Mean slowdown of the newest steps; there has to be one."""
        return self.ratio_sum / len(self.ratios)

    def _update_trust(self, excess: float) -> None:
        trust, budget, before = self.trust, self.budget, self.trust.trusted
        trust.step_ended(
            self.arrival_loss, excess=excess, most=budget.most, credit=budget.credit,
            noise=budget.noise.over,
        )  # fmt: skip
        if trust.trusted is not before:
            self.arrivals.set_predictable(trust.trusted)
            if before:
                budget.restore_tail()

    def _end_calibration(self, solo: bool, baseline: Baseline, step: int) -> None:
        """A step ended, `solo` if without low work: count it, and begin a calibration if it is time."""
        if solo:
            self.last_solo_step = self.steps
        if self.ranks > 1:
            self.calibrating = int(self.alone_on_all_ranks(step + 1))
        elif self.calibrating:
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

    def __init__(self) -> None:
        self.jobs: list[ScheduledJob] = []
        self.waiting: dict[JobId, list[HighJob]] = {}

    def add(self, low: ScheduledJob, step: StepId, high: HighJob) -> None:
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

    def answered(self, low: ScheduledJob, step: StepId) -> None:
        """This step of the low job was answered."""
        if low.id in self.waiting:
            for high in self.waiting[low.id].copy():
                if high.waits_for_step <= step:
                    self.remove(high)

    def forget(self, low: ScheduledJob) -> None:
        """The job is gone, or is a high one now."""
        for high in list(self.waiting.get(low.id, ())):
            self.remove(high)


# ---- One high program under one cut.


MOST_LOW_COSTS: Final = 768  # low programs and shares remembered (256 on three shares): the oldest go first
KNOWN_RANGES: Final = 3  # that are measured before the rest is taken to be like them

Bounds: TypeAlias = "tuple[int, ...]"


class HighCosts:
    """What is known of one high program under one cut. `solo_s` are the best estimates of its pieces' seconds without
    low work, and `total` is their sum."""

    def __init__(self, key: str, bounds: Bounds, predicted: Sequence[float]) -> None:
        self.key = key
        self.bounds = bounds
        self.solo_s = list(predicted)
        self.total = sum(predicted)
        self.steps = [Baseline(), Baseline()]  # whole steps: behind the step before, and from idle
        self.solo = [Baseline() for _ in predicted]
        self._beside_high = [Baseline() for _ in predicted]  # beside other high jobs, without low work
        self.first = Baseline()  # the first piece when the job was idle: nothing hides how long its launch takes
        self.by_low: dict[LowKey, LowCosts] = {}
        self.placements: dict[str, LowPlacement] = {}  # by low program
        self.changes = 0  # how often something was learned of low programs

    # ---- low programs

    def beside(self, key: LowKey) -> LowCosts:
        """The costs of the low program on that share."""
        found = self.by_low.get(key)
        return found if found is not None else self._new(key)

    def placement(self, program: JobProgram, shares: Sequence[float]) -> LowPlacement:
        """Where launches of the low program may begin, on each of these shares."""
        found = self.placements.get(program.key)
        if found is None or len(found.by_share) < len(shares):
            for share in shares:
                found = self.beside(program.low_key(share)).placement
        assert found is not None
        return found

    def arrival_cost(self, key: LowKey, span: Span) -> LaunchCost | None:
        """What is known of launches of the low piece during which a step came, or else of any; None: nothing."""
        low_costs = self.beside(key)
        return low_costs.launches.get(on_arrival(span)) or low_costs.lows.get(span)

    def never_ran(self, low: str, span: Span) -> bool:
        """Whether no launch of the low piece was ever seen beside the program, on any share."""
        placement = self.placements.get(low)
        if placement is None:
            return True
        for low_costs in placement.by_share:
            if span in low_costs.lows or (len(low_costs.ranges), START, span) in low_costs.launches:
                return False
        return not placement.of(span).learned

    def _new(self, key: LowKey) -> LowCosts:
        if len(self.by_low) >= MOST_LOW_COSTS:
            oldest = next(iter(self.by_low)).program
            self.by_low = {other: low_costs for other, low_costs in self.by_low.items() if other.program != oldest}
            self.placements.pop(oldest, None)
        placement = self.placements.setdefault(key.program, LowPlacement())
        found = self.by_low[key] = LowCosts(key, len(self.solo_s), placement)
        placement.by_share.append(found)
        return found

    # ---- without low work

    def step_known(self) -> bool:
        return self.steps[0].known or self.steps[1].known

    def step_seconds(self, from_idle: bool) -> float:
        """What a step takes without low work; `from_idle`: the job was idle when it came."""
        at = 1 if from_idle else 0
        baseline = self.steps[at]
        if not baseline.known:
            baseline = self.steps[1 - at]
        return baseline.value if baseline.known else self.total

    def reference(self, piece: int, beside_high: bool, from_idle: bool) -> Baseline:
        """What the piece's time is to be compared with."""
        if beside_high:
            return self._beside_high[piece]
        if from_idle and piece == 0 and self.first.known:
            return self.first
        return self.solo[piece]

    def learn(self, piece: int, seconds: float, beside_high: bool, from_idle: bool) -> bool:
        """The piece took so long without low work. True when that shows that its work changed."""
        if from_idle and piece == 0 and not beside_high:
            changed = self.first.add(seconds)
            if self.solo[0].known:
                return changed
        if beside_high:
            baseline = self._beside_high[piece]
            changed = baseline.add(seconds)
            if self.solo[piece].known:
                return changed
        else:
            baseline = self.solo[piece]
            changed = baseline.add(seconds)
        self.total += baseline.value - self.solo_s[piece]
        self.solo_s[piece] = baseline.value
        return changed

    # ---- bans and cuts

    def bans(self) -> set[Ban]:
        """Those in force under this cut."""
        banned = [low_costs for low_costs in self.by_low.values() if low_costs.any_ban]
        return {each.ban for low_costs in banned for each in low_costs.ranges if each.ban is not None}

    def drop_lifted_bans(self) -> None:
        for low_costs in self.by_low.values():
            if low_costs.any_ban:
                for piece, range_cost in enumerate(low_costs.ranges):
                    if range_cost.ban is not None and range_cost.ban.lifted:
                        range_cost.ban = None
                        low_costs.publish(piece)

    def recut(self, bounds: Bounds, predicted: Sequence[float]) -> HighCosts:
        """The same program under another cut. What launches of each low piece cost is kept; what its ranges lose is
        learned anew."""
        costs = HighCosts(self.key, bounds, predicted)
        costs.changes = 1
        for key, low_costs in self.by_low.items():
            heir = costs.beside(key)
            heir.known, heir.speed, heir.typical = low_costs.known, low_costs.speed, low_costs.typical
            heir.lows = low_costs.lows.copy()
        return costs


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

    def take_up(self, key: str, cuts: Sequence[HighCosts]) -> None:
        """Begin with what an earlier daemon learned of a program, unless something is known of it already."""
        if key not in self._cuts and cuts and len(self._cuts) < MOST_PROGRAMS:
            self._cuts[key] = {costs.bounds: costs for costs in cuts}

    def programs(self) -> list[str]:
        """The programs of which something is known, the oldest first."""
        return list(self._cuts)

    def by_program(self) -> Iterator[Collection[HighCosts]]:
        """Costs of each program under all its cuts."""
        for cuts in self._cuts.values():
            yield cuts.values()

    def cuts(self, key: str) -> Collection[HighCosts]:
        """Costs of one program under all its cuts."""
        found = self._cuts.get(key)
        return found.values() if found is not None else ()

    def all(self) -> Iterator[HighCosts]:
        for cuts in self.by_program():
            yield from cuts
