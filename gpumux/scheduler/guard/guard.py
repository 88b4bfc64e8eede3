"""The guard: may low work run now beside the high jobs, on which share of the device, and if not, why.

It follows every launch and its end, and decides by what it measured. Its parts:

    view        what the device is doing (`device_view.py`)
    costs       what high programs take alone, and lose beside each low program (`costs.py`)
    high_jobs   for each high job: when its steps arrive (`high_job.py`) and its slowdown budget (`budget.py`)
    decisions   why low jobs are held, and until when that stays so (`decisions.py`)
    learner     follows launches, and updates all of these (`learning.py`)

`admit` is the question. It answers by the first of these that applies:

1. No high step is expected before the launch would be over: it may run.
2. The job is held by an earlier decision that is not stale: it stays held.
3. High work runs: `_beside` weighs what the launch costs each running high step, by where in the step it would begin
   and on which share of the device (`timing.py`, `costs.py`).
4. High jobs are idle: `_between_steps` weighs what it costs if a next step arrives while the launch is out.
"""

from __future__ import annotations

from math import inf
from typing import Final

from gpumux.scheduler.config import SchedulerConfig
from gpumux.scheduler.guard.bans import Ban, Bans
from gpumux.scheduler.guard.collectives import cost_of_exchange
from gpumux.scheduler.guard.costs import (
    MIN_SAMPLES,
    MOMENTS,
    LaunchKind,
    LaunchPlan,
    LowCosts,
    on_arrival,
)
from gpumux.scheduler.guard.decisions import (
    MOMENT_LIMITED,
    Decisions,
    Hold,
    LaunchDecision,
    LowWindow,
)
from gpumux.scheduler.guard.device_view import DeviceView, RunningPiece
from gpumux.scheduler.guard.high_job import (
    HELD_LONG_STEPS,
    KNOWN_RANGES,
    LEARNING_STEPS,
    AwaitedSteps,
    CostsByProgram,
    Gate,
    HighJob,
)
from gpumux.scheduler.guard.learning import DEFAULT_TARGET_S, LEAST_SPEED, CostLearner, Cutting
from gpumux.scheduler.guard.timing import (
    OverlapCost,
    expected_arrival,
    exposed_part,
    hold_for_arrival,
    launch_position,
    may_explore,
    may_explore_now,
    may_explore_unknown,
    may_probe,
    next_timed_launch,
    overlap_cost,
)
from gpumux.scheduler.jobs import JobStep, LowKey, LowPiece, ScheduledJob, Span
from gpumux.scheduler.windows import Outstanding, Windows
from gpumux.types import CollectiveEnded, DeviceInfo, JobId, LaunchId, Priority

_HIGH: Final = Priority.HIGH

STRETCH: Final = 1.02  # of a low piece's predicted time: when it is taken to end


class SlowdownGuard:
    """Decides about low launches so that high jobs keep their max_slowdown."""

    def __init__(self, config: SchedulerConfig, info: DeviceInfo) -> None:
        self.shares = info.shares
        self.high_jobs: dict[JobId, HighJob] = {}
        self.view = DeviceView()
        self.costs = CostsByProgram()
        self.bans = Bans()
        self.awaited_steps = AwaitedSteps()
        self.cutting = Cutting(info.piece_target_s.get("low", DEFAULT_TARGET_S))
        self.low_window = LowWindow(config.low_launches, config.low_idle_launches)
        self.decisions = Decisions(self.view, self.low_window)
        self.learner = CostLearner(
            high_jobs=self.high_jobs, view=self.view, costs=self.costs, bans=self.bans, low_window=self.low_window,
            cutting=self.cutting,
        )  # fmt: skip

    # ---- the question

    def admit(self, job: ScheduledJob, windows: Windows, now: float) -> float:
        """The share of the device the low job's next piece may be launched with; 0.0: it is held. Changes nothing but
        what is noted about the decision."""
        view, decisions = self.view, self.decisions
        step = job.head_step()
        at, program = step.launched, step.program
        seconds, span = (step.pieces[at], step.spans[at]) if at else (program.pieces[0], program.spans[0])
        takes = view.launch_overhead + view.overrun + seconds * STRETCH
        view.refresh(windows, self.high_jobs, now)
        end = view.free_at + takes
        if end < view.calm:
            return 1.0
        cached = decisions.cached(job, step, now)
        if cached is not None:
            decisions.hold(cached)
            return 0.0
        if view.running:
            decision = self._beside(job, step, program.low_piece(span, seconds))
        else:
            decision = LaunchDecision(job, step, 1.0, seconds)
            if view.idle:
                self._between_steps(decision, program.whole_key, span, end)
        if decision.hold is None:
            decisions.admitted = decision
            return decision.share
        decisions.hold(decision)
        if view.low_out and decision.hold.until == inf:
            decision.low_version = view.low_version
        return 0.0

    # ---- while high work runs

    def _beside(self, job: ScheduledJob, step: JobStep, piece: LowPiece) -> LaunchDecision:
        """The decision while high pieces run."""
        view = self.view
        for running in view.running:
            if not may_explore_unknown(running.high) and running.costs.never_ran(piece.program.key, piece.span):
                hold = Hold("learning", running.high.job.id, piece=running.at)
                return LaunchDecision(job, step, 1.0, piece.seconds).hold_for(running.high, hold)
        only = view.running[0] if len(view.running) == 1 else None
        if only is not None:
            planned = self._planned(only, job, step, piece)
            if planned is not None:
                return planned
        decision = self._consider(job, step, piece, 1.0)
        if only is not None and decision.hold is not None and decision.hold.reason in MOMENT_LIMITED:
            decision.hold.until = next_timed_launch(only, self._plan(only, piece), view)
        return decision

    def _planned(
        self, running: RunningPiece, job: ScheduledJob, step: JobStep, piece: LowPiece
    ) -> LaunchDecision | None:
        """The decision for a launch that would begin at a moment of the high step that repeats; None if this one would
        not, or if another moment is no better."""
        view = self.view
        at, _, moment, _ = launch_position(running, view)
        if moment not in MOMENTS:
            return None
        plan, index = self._plan(running, piece), 3 * at + moment
        option = plan.at[index]
        if option is None:
            until = next_timed_launch(running, plan, view)
            reason, high_piece = ("gap", -1) if at == len(running.costs.solo_s) else ("tail", at)
            hold = Hold(reason, running.high.job.id, piece=high_piece, until=until)
            return LaunchDecision(job, step, 1.0, piece.seconds).hold_for(running.high, hold)
        tried = plan.tried[index]
        decision = self._consider(job, step, piece, option.share)
        if decision.hold is not None and not option.tried and tried is not None:
            decision = self._consider(job, step, piece, tried.share)
        if decision.hold is not None and decision.hold.reason in MOMENT_LIMITED:
            until = next_timed_launch(running, plan, view)
            if until < inf:
                decision.hold.until = until
        return decision

    def _plan(self, running: RunningPiece, piece: LowPiece) -> LaunchPlan:
        """Where the low piece may begin in the high step that runs."""
        if running.plan is not None and running.planned is piece:
            return running.plan
        high, costs = running.high, running.costs
        placement = costs.placement(piece.program, self.shares)
        plan = placement.plan(
            piece.span, piece.seconds, price=high.budget.price, limit=high.budget.limit, step=high.steps,
            exploration=high.exploration(placement), from_idle=high.from_idle, solo_s=costs.solo_s,
            pause=high.pause(),
        )  # fmt: skip
        running.planned, running.plan = piece, plan
        return plan

    def _consider(self, job: ScheduledJob, step: JobStep, piece: LowPiece, share: float) -> LaunchDecision:
        """The decision for a launch on this share now, beside each of the high pieces that run."""
        view = self.view
        key, seconds = piece.program.low_key(share), piece.seconds
        decision = LaunchDecision(job, step, share, seconds / share)
        decision.beside = view.running
        for running in view.running:
            high, costs = running.high, running.costs
            if reason := high.holds_all():
                return decision.hold_for(high, Hold(reason, high.job.id))
            low_costs = costs.beside(key)
            speed = low_costs.speed
            if share < 1.0 and not low_costs.known:
                speed = share * costs.beside(piece.program.whole_key).speed
            alike = low_costs.lows.get(piece.span)
            lasts = alike.seconds if alike is not None else seconds / max(speed, LEAST_SPEED)
            decision.seconds = lasts if alike is not None else max(decision.seconds, lasts)
            if low_costs.known < min(KNOWN_RANGES, len(low_costs.ranges)):
                if high.pieces < high.explored_piece + 2:
                    return decision.hold_for(high, Hold("learning", high.job.id, piece=running.at))
                if view.low_out:  # all low jobs wait, or some low launch would always be out
                    return decision.hold_for(high, Hold("learning", high.job.id))
                decision.exploring = high
            cost, next_step, kind = self._cost(running, low_costs, piece, lasts, decision)
            if decision.unknown and not may_explore_unknown(high):
                return decision.hold_for(high, Hold("learning", high.job.id, piece=running.at))
            refused, ban = self._refused(running, low_costs, piece, cost, kind, next_step)
            if not refused:
                decision.expected = max(decision.expected, cost.expected)
            elif view.low_out or not may_explore(
                high, self._plan(running, piece), low_costs, kind, ban, view.now, decision.exposed
            ):
                hold = Hold(refused, high.job.id, piece=cost.piece if ban is None else cost.banned, ban=ban)
                return decision.hold_for(high, hold)
            else:
                decision.probe, decision.probed, decision.exploring = ban, high, high
        if view.idle:
            end = view.free_at + (view.launch_overhead + view.overrun + seconds * STRETCH)
            self._between_steps(decision, key, piece.span, end)
        return decision

    def _cost(
        self, running: RunningPiece, low_costs: LowCosts, piece: LowPiece, lasts: float, decision: LaunchDecision
    ) -> tuple[OverlapCost, bool, LaunchKind]:
        """What the launch costs the high job: as launches of the same kind did, or else by the ranges it will overlap;
        whether only the next step loses by it; and its kind."""
        view = self.view
        solo_s, start, span = running.costs.solo_s, view.free_at, piece.span
        at, next_step, moment, until = launch_position(running, view)
        kind = (at, moment, span)
        if decision.kinds is None:
            decision.kinds = []
        decision.kinds.append((low_costs, kind))
        decision.exposed = 1.0 if next_step and at < len(solo_s) else exposed_part(running, at, until, start, lasts)
        placement, expected, upper = low_costs.placement, 0.0, 0.0
        known = low_costs.launches.get(kind)
        if known is not None:
            expected, upper = max(0.0, known.mean), known.upper
        elif moment in MOMENTS and placement.of(span).learned:
            decision.exploring = running.high
            part = decision.exposed if at == len(solo_s) else 1.0
            expected = placement.expected(span, at, moment, low_costs.effects) * part
            return OverlapCost(expected, placement.worst_case(span, expected), at, -1), next_step, kind
        else:
            known = low_costs.lows.get(span)
            if known is not None:
                anywhere = placement.of(span)
                expected = decision.exposed * max(0.0, known.mean, anywhere.base)
                upper = decision.exposed * max(known.upper, known.worst, anywhere.worst)
        if known is not None and (
            not low_costs.any_ban or (moment in MOMENTS and kind in low_costs.launches and known.count > 1)
        ):
            return OverlapCost(expected, max(0.0, upper), at, -1), next_step, kind
        end = start + STRETCH * lasts
        cost = overlap_cost(solo_s, low_costs.ranges, running.at, running.until, running.more, start, end)
        if known is not None:
            cost.expected, cost.upper = expected, max(0.0, upper)
            return cost, next_step, kind
        decision.exploring = running.high
        whole = running.costs.by_low.get(piece.program.whole_key)
        known = whole.lows.get(span) if whole is not None else None
        if known is None:
            decision.unknown = True
            return cost, next_step, kind
        # On a smaller share it costs about as much, but over more steps.
        spread = decision.exposed * (min(1.0, running.costs.total / lasts) if lasts > 0.0 else 1.0)
        cost.expected, cost.upper = max(0.0, decision.exposed * known.mean), max(cost.upper, known.upper * spread)
        return cost, next_step, kind

    def _refused(
        self, running: RunningPiece, low_costs: LowCosts, piece: LowPiece, cost: OverlapCost, kind: LaunchKind,
        next_step: bool,
    ) -> tuple[str, Ban | None]:  # fmt: skip
        """Why a launch with this cost has to wait, and the ban if there is one; "": it has not."""
        high = running.high
        if cost.banned >= 0 and high.steps - low_costs.placement.last_launch_step < HELD_LONG_STEPS:
            return "ban", low_costs.ranges[cost.banned].ban
        if cost.upper <= 0.0:
            return "", None
        budget, pending = high.budget, max(self.view.pending, running.late)
        if (cost.upper if next_step else budget.used + pending + cost.upper) > budget.limit:
            return "tail", None
        plan = self._plan(running, piece)
        at, moment, _ = kind
        avoidable = max(0.0, cost.expected - plan.cost)
        if moment in MOMENTS and (option := plan.at[3 * at + moment]) is not None:
            if option.share != low_costs.share:
                option = plan.tried[3 * at + moment] or option
            avoidable = (option.score - plan.score) / budget.price
        refused = budget.refuses(
            cost.expected, cost.upper, avoidable=avoidable, pending=pending, gain=piece.seconds, next_step=next_step
        )
        return refused, None

    # ---- while high jobs are idle

    def _between_steps(self, decision: LaunchDecision, key: LowKey, span: Span, end: float) -> None:
        """Hold the launch, which is over at `end`, where it has to wait for the next step of an idle high job."""
        view = self.view
        latest: Hold | None = None
        for high in view.idle:
            if high.waits_for is decision.job and decision.step.id <= high.waits_for_step and not high.parked:
                continue  # its next step comes only after this low step
            ban = high.gate.ban(key) if high.gate is not None else None
            if ban is not None:
                if view.low_out or not may_probe(high, ban, view.now):
                    until = ban.until if ban.until > view.now else inf
                    decision.hold_for(high, Hold("ban", high.job.id, ban=ban, until=until))
                    return
                decision.probe, decision.probed, decision.exploring = ban, high, high
            elif high.gate is not None:
                hold = self._before_exchange(decision, high, high.gate, key, end - view.free_at)
                if hold is not None:
                    decision.hold_for(high, hold)
                    return
            arrival = expected_arrival(high)
            if end < arrival:
                decision.relies_on_arrivals = True
                continue
            hold = hold_for_arrival(high, key, span, decision, view, end, arrival)
            if hold is None:
                continue
            costs = high.costs
            new = hold.reason == "gap" and high.steps < LEARNING_STEPS and may_explore_now(high)
            if new and costs is not None:
                low_costs, kind = costs.beside(key), on_arrival(span)
                if may_explore(high, None, low_costs, kind, None, view.now):
                    decision.probed = decision.exploring = high
                    continue
            if latest is None or hold.until > latest.until:  # before that it would be held in any case
                latest = hold
                decision.hold_for(high, hold)

    def _before_exchange(
        self, decision: LaunchDecision, high: HighJob, gate: Gate, key: LowKey, seconds: float
    ) -> Hold | None:
        """Why a launch of `seconds` in a pause of the high job has to wait for the exchange that ends it; None: it has
        not."""
        if reason := high.holds_all():
            return Hold(reason, high.job.id)
        if not gate.exchange.known:
            return None
        cost = gate.known_cost(key)
        if cost is None or cost.count < MIN_SAMPLES:
            if not may_explore_unknown(high):
                return Hold("learning", high.job.id)
            decision.exploring = high
            return None
        expected, upper = cost_of_exchange(gate, cost, seconds)
        refused = high.budget.refuses(
            expected, upper, avoidable=expected, pending=high.pause_cost, gain=seconds, next_step=False
        )
        if refused:
            return Hold(refused, high.job.id)
        decision.in_pause_of, decision.pause_cost = high, expected
        return None

    # ---- what happens

    def begin_event(self) -> None:
        if self.decisions.held_now:
            self.decisions.begin_event()

    def end_event(self, now: float) -> float:
        """When to reconsider held jobs at the latest; inf: an event will come."""
        decisions = self.decisions
        return decisions.end_event(now) if decisions.held_now or decisions.holds.class_reason else inf

    def step_submitted(self, job: ScheduledJob, step: JobStep, delay: float, now: float) -> None:
        """A step of a high job was queued. The scheduler was given it `delay` seconds after it came."""
        self.view.changed()
        self.view.expect_high_work()
        high = self.high_jobs.get(job.id)
        if high is not None and high.idle_since < inf and not high.parked:
            self.view.became_busy(high)
            high.step_arrived(step, delay, now, self.learner.low_reported)

    def peers_came(self, job: ScheduledJob, event: CollectiveEnded, now: float) -> None:
        """The collective before this piece of the job's step has ended."""
        self.view.changed()
        high = self.high_jobs.get(job.id)
        if high is not None and high.parked:
            self.learner.exchange_ended(high, event.step, event.ended, event.exchange_s)
            self.view.expect_high_work()
            self.view.became_busy(high)
            high.peers_came(event.piece, now)

    def client_waits(self, job: ScheduledJob, step: JobStep, before: list[HighJob]) -> None:
        """A client waits for this step of the low job, and gives these high jobs a step only after it."""
        for high in before:
            self.awaited_steps.add(job, step.id, high)
        self.decisions.awaited(job)

    def launched(self, launch: Outstanding, windows: Windows) -> None:
        self.view.changed()
        if launch.job.priority is _HIGH:
            self.learner.high_launched(launch, windows)
            return
        decisions = self.decisions
        decision, decisions.admitted = decisions.admitted, None
        decisions.forget(launch.job)
        decisions.holds.end(launch.job, launch.at)
        self.learner.low_launched(launch, decision, windows)

    def done(self, launch: Outstanding, started: float, ended: float, seconds: float, windows: Windows) -> None:
        """The launch ran from `started` to `ended`, of which `seconds` on the device."""
        self.view.changed()
        if launch.job.priority is _HIGH:
            self.learner.high_done(launch, ended, windows)
        else:
            self.learner.low_done(launch, started, ended, seconds, windows)

    def lost(self, launch: LaunchId) -> None:
        """The launch will not end: it failed, or the device lost its job."""
        self.view.low_launches.pop(launch, None)

    def paused(self, job: ScheduledJob, now: float) -> None:
        """The job was paused or resumed."""
        self.decisions.holds.end(job, now)
        high = self.high_jobs.get(job.id)
        if high is not None:
            self.view.changed()
            self.view.expect_high_work()
            high.changed()
            self.view.idle_jobs_changed()

    def promoted(self, job: ScheduledJob, begun: JobStep | None, now: float) -> None:
        """A low job with no piece out is a high one from now on. `begun`: its step of which pieces ran already. That
        step tells nothing as a whole, since its beginning was not protected."""
        self.view.changed()
        high = self.high_jobs[job.id] = HighJob(job)
        high.ended = now  # it waited for the guard, and not for the host
        if begun is not None:
            costs = self.costs.of(begun.program.key, begun.bounds, begun.pieces, self.high_jobs)
            high.step_costs[begun.id] = costs
            high.adopt(costs)
            high.began, high.shared, high.beside_high = now, True, True
            high.budget.begin_step(high.solo_step())

    def forget(self, job: ScheduledJob, now: float) -> None:
        """The job is closing, or changes its class."""
        self.view.changed()
        self.view.expect_high_work()  # a job that was idle for longer may be considered again
        high = self.high_jobs.pop(job.id, None)
        if high is not None:
            high.changed()
            if high.idle_since < inf:
                self.view.became_busy(high)
            self.awaited_steps.remove(high)
        self.awaited_steps.forget(job)
        self.decisions.job_gone(job, now)
        self.learner.forget(job)
        if self.bans.forget(job.id):
            for costs in self.costs.all():
                costs.drop_lifted_bans()
