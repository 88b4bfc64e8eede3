"""What follows from each launch: what low work costs, when it is banned, and what high jobs take and may lose.

A low launch is followed until all high pieces beside it are done, and charged for what they were late. From that follow
the costs of low programs (`costs.py`), bans, and each high job's baselines and budget (`high_job.py`).
"""

from __future__ import annotations

from collections.abc import Collection
from math import inf
from typing import Final

from gpumux.scheduler.guard.bans import Ban, Bans, Why
from gpumux.scheduler.guard.budget import TAIL, SlowdownBudget
from gpumux.scheduler.guard.collectives import exchange_ended
from gpumux.scheduler.guard.costs import LEAST_OVERLAP, LaunchKind, LowCosts, RangeCost, on_arrival
from gpumux.scheduler.guard.decisions import LaunchDecision, LowWindow
from gpumux.scheduler.guard.device_view import DeviceView, LowLaunch, LowLaunches, RecentLaunches
from gpumux.scheduler.guard.high_job import OVERLAPPING, CostsByProgram, HighCosts, HighJob
from gpumux.scheduler.jobs import JobState, JobStep, ScheduledJob
from gpumux.scheduler.windows import Outstanding, Windows
from gpumux.types import JobId, LaunchId, Priority

_HIGH: Final = Priority.HIGH

LEAST_SPEED: Final = 0.05  # of low work beside high work
BAN_RATIO: Final = 3.0  # times what other ranges cost: a range that costs more is banned
MOST_LATE_S: Final = 1e-3  # that a low launch is taken to begin or end late
SMOOTHING: Final = 0.1  # part of the newest sample in launch delay and overhead
OVERRUN_FADES: Final = 0.996  # for each step of a high job
ADAPT_EVERY: Final = 16  # steps


# ---- How finely low programs are cut.
#
# Every piece costs a launch and an event, so pieces are as long as the device makes them by itself. Beside a high job
# whose steps are short that is too long: a piece can't be called back, and one that a step can't bear wherever it
# begins is never launched, nor is what comes behind it. So while such a job steps, low programs are cut finer, and as
# before when none has stepped for a while.


DEFAULT_TARGET_S: Final = 500e-6  # piece length, where the device names no target
PIECES: Final = 2.0  # low pieces of the usual length that a step should be able to lose: else they are too long
FINER: Final = 3.0  # times shorter than usual
FINEST: Final = 10.0  # the same where a step may arrive while any piece is out
DEAR: Final = 0.25  # of what steps may lose on average: if they lose more on arrival, low programs are cut finest
AWAY_S: Final = 10.0  # since its newest step, until low programs are no longer cut for a high job


class Cutting:
    """The piece length wanted for low programs. `usual_s` is that which the device makes by itself."""

    def __init__(self, usual_s: float) -> None:
        self.usual_s = usual_s
        self.high: JobId | None = None  # the newest high job for which low programs are cut finer
        self.finest = False
        self.changed = False  # since the device was asked
        self.until = inf  # low programs are cut finer until then, unless another step comes

    @property
    def target_s(self) -> float | None:
        """How long low pieces should be; None: as the device makes them by itself."""
        if self.high is None:
            return None
        return self.usual_s / (FINEST if self.finest else FINER)

    def step_ended(self, high: HighJob, solo_s: float, ended: float) -> None:
        """A step of a high job ended, and the next should take `solo_s` alone."""
        if high.calibrating or TAIL * high.budget.slack * solo_s >= PIECES * self.usual_s:
            return
        trust = high.trust
        at_any_time = high.arrivals.at_random or not trust.trusted
        finest = self.finest or at_any_time or trust.capped_loss > DEAR * high.budget.credit
        self.changed = self.changed or self.high is None or finest is not self.finest
        self.high, self.finest, self.until = high.job.id, finest, ended + AWAY_S

    def reset(self) -> None:
        """It is later than `until`: cut low programs as usual again."""
        self.high, self.finest, self.changed, self.until = None, False, True, inf


# ---- The learner.


class CostLearner:
    """Follows launches of both classes. The other parts of the guard are passed in, and updated."""

    def __init__(
        self, *, high_jobs: dict[JobId, HighJob], view: DeviceView, costs: CostsByProgram, bans: Bans,
        low_window: LowWindow, cutting: Cutting,
    ) -> None:  # fmt: skip
        self._high_jobs, self._view, self._costs, self._bans = high_jobs, view, costs, bans
        self._low_window, self._cutting = low_window, cutting
        self.harvested = 0.0  # device seconds of low work beside high jobs or in their pauses
        self.low_reported = 0.0  # when a low launch was last made or ended
        self._to_judge: list[tuple[HighCosts, HighJob, LowLaunch, int]] = []  # with the high piece
        self._last_high: ScheduledJob | None = None  # the high job of which a piece ended last
        self._last_end = 0.0  # when that was
        self._other_end = 0.0  # when a piece of another high job ended last

    # ---- launches

    def low_launched(self, launch: Outstanding, decision: LaunchDecision | None, windows: Windows) -> None:
        """A low launch was made. `decision` is None where none was needed."""
        view, step, now = self._view, launch.step, launch.at
        view.low_version += 1
        self.low_reported = now
        low = LowLaunch(launch, step.program.low_key(launch.share))
        first = not view.low_launches
        low.only_launch = first and not windows.high.launches
        low.beside_high = bool(windows.high.launches or view.idle_jobs)
        start = now if first else max(now, view.low_until)
        low.due = view.low_until = start + (decision.seconds if decision is not None else launch.predicted)
        view.low_launches[launch.id] = low
        if decision is None:
            low.relies_on_arrivals = low.beside_high
            return
        low.relies_on_arrivals, low.expected, low.exposed = (
            decision.relies_on_arrivals, decision.expected, decision.exposed,
        )  # fmt: skip
        low.kinds, low.idle_costs = decision.kinds, decision.idle_costs
        if decision.in_pause_of is not None:
            decision.in_pause_of.pause_cost += decision.pause_cost
        if decision.beside is not None:
            for running in decision.beside:
                placement = running.costs.placements.get(step.program.key)
                if placement is not None:
                    placement.last_launch_step = running.high.steps
        if decision.exploring is not None:
            decision.exploring.explored_piece = decision.exploring.pieces
            decision.exploring.explored_step = decision.exploring.steps
            low.exploring = True
        if decision.probed is not None:
            decision.probed.probed_step = decision.probed.steps
            self._bans.probes += 1
            if decision.probe is not None:
                decision.probe.probing = True

    def high_launched(self, launch: Outstanding, windows: Windows) -> None:
        """A high launch was made."""
        job, step = launch.job, launch.step
        self._view.expect_high_work()  # a step that waited for a transfer, say, was not submitted just now
        high = self._high_jobs.get(job.id)
        if high is None:
            high = self._high_jobs[job.id] = HighJob(job)
        high.changed()
        due = high.ended
        if launch.piece:
            if high.resumed_at:
                due = max(due, high.arrived)
        else:
            self._adopt(high, step)
            if job.outstanding == 1:
                high.budget.begin_step(high.solo_step())
            due = max(due, step.submitted)
        if launch.at > due and len(windows.high.launches) == 1:
            high.host_wait += launch.at - due

    def _adopt(self, high: HighJob, step: JobStep) -> None:
        """A step of the high job begins."""
        before = high.costs
        costs = self._costs.of(step.program.key, step.bounds, step.pieces, self._high_jobs)
        high.step_costs[step.id] = costs
        if before is not costs:
            high.adopt(costs)
            if before is not None:
                recut_bans(self._bans, high.job.id, costs, self._costs.cuts(costs.key))

    # ---- ends of launches

    def low_done(self, launch: Outstanding, started: float, ended: float, seconds: float, windows: Windows) -> None:
        """A low launch ran from `started` to `ended`, of which `seconds` on the device."""
        view = self._view
        low = view.low_launches.pop(launch.id)
        view.low_version += 1
        self.low_reported = ended
        if ended > self._cutting.until:
            self._cutting.reset()
        low.began, low.ended = max(started, low.at), ended
        if not launch.count_before:
            delay = low.began - low.at
            if delay < MOST_LATE_S:
                view.launch_delay += (SMOOTHING if view.launch_delay else 1.0) * (delay - view.launch_delay)
        if low.only_launch and launch.pieces == 1:
            late = ended - low.at - low.predicted
            if late < low.predicted:
                view.launch_overhead += SMOOTHING * (max(0.0, late) - view.launch_overhead)
        if low.beside_high:
            self.harvested += seconds
            if low.kinds is not None:
                speed = low.predicted / (ended - low.began) if ended > low.began else 1.0
                for low_costs, _ in low.kinds:
                    low_costs.speed += 0.2 * (speed - low_costs.speed)
        view.recent.add(low, bool(windows.high.launches), any(high.parked for high in view.idle_jobs))

    def high_done(self, launch: Outstanding, ended: float, windows: Windows) -> None:
        """A high launch ended."""
        job, step, piece = launch.job, launch.step, launch.piece
        high = self._high_jobs.get(job.id)
        if high is None:
            return  # the job is closing
        start = max(high.ended, launch.at)
        ended = max(ended, start)
        high.ended = ended
        high.pieces += 1
        if piece == 0:
            high.began, high.from_idle = start, step.from_idle
        costs = high.step_costs[step.id]
        beside_high = self._beside_high(job, start, ended, windows)
        view = self._view
        recent, seconds = view.recent, ended - start
        found: LowLaunches = []
        if view.low_launches or recent.last_end > start:
            found = beside(view.low_launches, recent, start, ended)
        if recent.open:
            learn_costs(recent, start, high.steps, high.budget)
        if found:
            self._shared(high, costs, piece, seconds, beside_high, found)
        elif costs.learn(piece, seconds, beside_high, high.from_idle) and not high.calibrating:
            high.calibrate(2)
        if beside_high:
            high.beside_high = True
        if piece + 1 == len(step.pieces):
            self._step_done(high, job, step, ended)
        elif job.parked():
            self._park(high, costs.key, step.bounds[piece + 1], ended)
        else:
            high.changed()

    def _beside_high(self, job: ScheduledJob, start: float, ended: float, windows: Windows) -> bool:
        """Whether another high job had a launch on the device since `start`."""
        if self._last_high is not job:
            self._other_end, self._last_high = self._last_end, job
        self._last_end = ended
        if self._other_end > start:
            return True
        out = windows.high.launches
        return len(out) != job.outstanding and other_launches(out, job, ended)

    def _shared(
        self, high: HighJob, costs: HighCosts, piece: int, seconds: float, beside_high: bool, found: LowLaunches
    ) -> None:
        """A high piece of `seconds` ended that ran beside these low launches."""
        high.shared = True
        baseline = costs.reference(piece, beside_high, high.from_idle)
        if any(low.exploring for low in found):
            high.tried = True
        if baseline.count:
            excess = seconds - baseline.value
            high.excess += excess
            excess -= baseline.late
            high.budget.used += excess
            if (high.from_idle or high.resumed_at) and excess > 0.0:
                part = relied_on_arrivals(found, high.idle_from, high.arrived)
                high.arrival_loss += excess * part
            self._charge(high, costs, piece, excess, found)
        elif not high.calibrating:
            high.calibrate(1)

    def _charge(self, high: HighJob, costs: HighCosts, piece: int, excess: float, found: LowLaunches) -> None:
        """The high piece was `excess` seconds late: charge these launches for it."""
        if (high.from_idle and piece == 0) or (high.resumed_at and piece == high.resumed_at):
            before, since = split_by_arrival(found, high.arrived)
            if before:
                self._view.overrun = min(self._view.overrun + overrun(before, high.arrived) / 2, MOST_LATE_S)
                if not since:
                    charge_arrival(excess, before)
                    return
                late = max([(low.ended or high.ended) - high.arrived for low in before])
                part = min(excess, OVERLAPPING * late)
                charge_arrival(part, before)
                found, excess = since, excess - part
        for low in charge(costs, piece, excess, found, high.budget):
            if low.job.state is not JobState.CLOSING:
                self._to_judge.append((costs, high, low, piece))

    def _step_done(self, high: HighJob, job: ScheduledJob, step: JobStep, ended: float) -> None:
        view = self._view
        high.end_step(step, ended)
        high.changed()
        solo_s = high.solo_step()
        self._cutting.step_ended(high, solo_s, ended)
        view.recent.end_step(view.low_launches)
        for costs, other, low, piece in self._to_judge:
            if other is high:
                judge(self._bans, costs, high, low, piece, ended)
        self._to_judge = [each for each in self._to_judge if each[1] is not high]
        high.budget.begin_step(solo_s)
        if high.steps % ADAPT_EVERY == 0:
            self._low_window.adapt(high.budget.full)
        view.overrun *= OVERRUN_FADES
        if job.inflight == 1:  # the step that just ended
            view.expect_high_work()
            high.idle_since, high.earliest_arrival, high.passed = ended, 0.0, 0
            view.became_idle(high)

    def _park(self, high: HighJob, program: str, operator: int, ended: float) -> None:
        """A high job waits for its peers before this operator of a program."""
        self._view.expect_high_work()
        high.wait_for_peers(program, operator, ended)
        self._view.became_idle(high)
        high.changed()

    def exchange_ended(self, high: HighJob, step: int, ended: float, exchange_s: float) -> None:
        """The exchange at the gate where this step of the high job waits ended, and took `exchange_s` once its peers
        were there."""
        view, began = self._view, ended - exchange_s
        found: LowLaunches = []
        if view.low_launches or view.recent.last_end > began:
            found = beside(view.low_launches, view.recent, began, ended)
        if high.gate is not None and exchange_s > 0.0:
            exchange_ended(high, high.gate, self._bans, step, exchange_s, found, ended)
            high.gate.probes_missed()

    def forget(self, job: ScheduledJob) -> None:
        """The job is closing, or changes its class."""
        if self._last_high is job:
            self._last_high = None
        self._to_judge = [each for each in self._to_judge if each[1].job is not job and each[2].job is not job]


# ---- Whether low work is to be banned beside a range, or a ban to be lifted: after each step that shows what it cost.


def judge(bans: Bans, costs: HighCosts, high: HighJob, low: LowLaunch, piece: int, now: float) -> None:
    """Impose, lengthen or lift the ban of low work of this kind beside the range."""
    low_costs, budget = costs.beside(low.key), high.budget
    range_cost = low_costs.ranges[piece]
    if not range_cost.to_judge(budget.slack):
        return
    newest = high.costs
    if newest is not None and newest is not costs and newest.key == costs.key:
        return  # the program was cut anew
    rate = range_cost.judged_rate
    ratio = 1.0 / (1.0 - rate)
    speed = max(low_costs.speed, LEAST_SPEED)
    overlap = min(min(low.step.pieces) / speed, costs.solo_s[piece] * ratio)
    why: Why | None = None
    if ratio > 1.0 + budget.slack:
        if overlap * rate > budget.limit:
            why = "tail"
        elif rate > BAN_RATIO * low_costs.elsewhere(piece) + budget.slack:
            why = "price"
    ban: Ban | None = None
    if why:
        ban = Ban(
            high=high.job.id, low=low.job.id, operators=(costs.bounds[piece], costs.bounds[piece + 1]),
            program=costs.key, share=low.key.share, ratio=ratio, samples=range_cost.count, why=why, since=now,
        )  # fmt: skip
    range_cost.update_ban(bans, ban, costs.total, now)
    low_costs.publish(piece)


def recut_bans(bans: Bans, high: JobId, costs: HighCosts, cuts: Collection[HighCosts]) -> None:
    """The high job runs the cut `costs` from now on, one of `cuts` of the same program. Lift its bans that no range of
    that cut has: they would never be probed."""
    if len(cuts) == 1:
        return
    mine = [ban for ban in bans.active if ban.high == high and ban.program == costs.key]
    if mine:
        still = costs.bans()
        for ban in mine:
            if ban not in still and not ban.of_collective:
                bans.lift(ban)
    for cut in cuts:
        cut.drop_lifted_bans()


# ---- Which low launches made a high piece late: by how long each ran beside it, and by what each is known to cost.


UNKNOWN_RATE: Final = 0.05  # added to what each launch is known to cost, so that unknown launches share equally
DOUBTFUL: Final = 0.5  # of what a step may lose: a launch that seems to cost more needs confirmation
LEAST_S: Final = 1e-6  # a shorter high piece tells nothing


def beside(out: dict[LaunchId, LowLaunch], recent: RecentLaunches, start: float, end: float) -> LowLaunches:
    """Low launches that ran during [start, end). Their `overlap` says for how many seconds of it."""
    found: LowLaunches = []
    for launch in out.values():
        seconds = end - max(start, launch.began)
        if seconds > 0.0:
            launch.overlap = seconds
            found.append(launch)
    if recent.last_end > start:
        for launch in recent.launches:
            if launch.latest_end <= start:
                break
            if launch.ended > start:
                seconds = min(launch.ended, end) - max(start, launch.began)
                if seconds > 0.0:
                    launch.overlap = seconds
                    found.append(launch)
    return found


def relied_on_arrivals(found: LowLaunches, idle_from: float, arrived: float) -> float:
    """The part of the overlap that belongs to launches which relied on a job, idle from `idle_from` on, not to get a
    step as early as it did."""
    relied = total = 0.0
    for launch in found:
        total += launch.overlap
        if launch.relies_on_arrivals and idle_from <= launch.at < arrived:
            relied += launch.overlap
    return relied / total


def other_launches(out: dict[LaunchId, Outstanding], job: ScheduledJob, before: float) -> bool:
    """Whether any of these launches is another job's and was made before that time."""
    return any(launch.job is not job and launch.at < before for launch in out.values())


def charge(costs: HighCosts, piece: int, excess: float, found: LowLaunches, budget: SlowdownBudget) -> LowLaunches:
    """Charge `excess` seconds of the high piece to the launches beside it. Returns those for which a ban may have to be
    imposed or lifted."""
    least = max(LEAST_OVERLAP * costs.solo_s[piece], LEAST_S)
    beside = [costs.beside(launch.key) for launch in found]
    costs.changes += 1
    if len(found) == 1:
        _charge(beside[0], found[0], piece, least, excess)
    else:
        total = 0.0
        for at, launch in enumerate(found):
            launch.weight = launch.overlap * (UNKNOWN_RATE + max(0.0, beside[at].ranges[piece].mean))
            total += launch.weight
        part = excess / total
        for at, launch in enumerate(found):
            _charge(beside[at], launch, piece, least, part * launch.weight)
    return [launch for at, launch in enumerate(found) if _to_judge(beside[at].ranges[piece], budget)]


def _to_judge(range_cost: RangeCost, budget: SlowdownBudget) -> bool:
    dear = range_cost.ban is not None or range_cost.mean > budget.rate_limit
    return dear and range_cost.to_judge(budget.slack)


def _charge(low_costs: LowCosts, launch: LowLaunch, piece: int, least: float, excess: float) -> None:
    seconds = launch.overlap
    launch.charged += excess
    launch.charged_in_step += excess
    low_costs.add(piece, excess / max(seconds, least), min(seconds / (4 * least) + 0.25, 1.0))


def split_by_arrival(found: LowLaunches, arrived: float) -> tuple[LowLaunches, LowLaunches]:
    """Those launched before the step came, and those launched since."""
    return [each for each in found if each.at < arrived], [each for each in found if each.at >= arrived]


def overrun(found: LowLaunches, arrived: float) -> float:
    """Seconds for which a launch was out after the step came although it should have been over before: it took longer
    than predicted."""
    late = 0.0
    for launch in found:
        if launch.due <= arrived and launch.kinds is None and launch.idle_costs is None:
            late = max(late, launch.ended - arrived)
    return late


def charge_arrival(excess: float, found: LowLaunches) -> None:
    """A step came while these launches were out, and its first piece was `excess` seconds late."""
    total = sum([launch.overlap for launch in found])
    for launch in found:
        launch.met_arrival = True
        launch.charged += excess * launch.overlap / total
        launch.charged_in_step += excess * launch.overlap / total


def learn_costs(recent: RecentLaunches, until: float, step: int, budget: SlowdownBudget) -> None:
    """All high pieces that began before `until` are done: learn what the launches that ended by then cost."""
    still: LowLaunches = []
    for launch in recent.open:
        if launch.ended > until:
            still.append(launch)
            continue
        if launch.kinds is not None:
            for low_costs, kind in launch.kinds:
                _learn(low_costs, kind, launch, step, budget)
        if launch.met_arrival and launch.idle_costs is not None:
            for costs in launch.idle_costs:
                _learn(costs.beside(launch.key), on_arrival(launch.span), launch, step, budget)
    recent.open = still


def _learn(low_costs: LowCosts, kind: LaunchKind, launch: LowLaunch, step: int, budget: SlowdownBudget) -> None:
    peak = max(launch.peak, launch.charged_in_step)
    needed = budget.confirmations
    if needed == 1 or low_costs.confirms(kind, peak, needed, DOUBTFUL * budget.limit):
        low_costs.learn(kind, launch.charged, peak, launch.ended - launch.began, step, launch.exposed)
