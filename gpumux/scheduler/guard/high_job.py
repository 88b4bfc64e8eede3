"""One high job as the guard follows it: its step that runs, its account, its promise."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import inf
from typing import Final

from gpumux.scheduler.guard.arrivals import Gaps, Surprise
from gpumux.scheduler.guard.attribution import OVERLAPPING
from gpumux.scheduler.guard.baseline import WANTED, Baseline
from gpumux.scheduler.guard.budget import MOST_WAITED_S, UNSEEN_S, Account
from gpumux.scheduler.guard.costs import ALWAYS, CAREFUL, IF_STUCK, Bounds, HighModel
from gpumux.scheduler.jobs import Job, Step
from gpumux.types import JobId, StepId

FIRST_CLEAN: Final = 3  # steps without low work a program begins with
CLEAN_EVERY: Final = 64  # steps after which another one is wanted
TRIES: Final = 4  # steps a calibration may take at most: low work still out spoils some
STARVED: Final = 16  # steps without low work: from then on a ban gives way where the loss is known and bearable
SPARE: Final = 2.0  # tokens there have to be for a try where low work does not starve
LEAST_PRICE: Final = 2.0  # low seconds for a high second: below it credit is not short
LEARNING_STEPS: Final = 200  # in which what is not known is tried as long as there is credit
KNOWN_STEPS: Final = 300  # after which what low work costs is learned from only
WATCH_AGAIN: Final = 32
WATCH_EVERY: Final = 4  # one step in so many: it is known by then, and learning is what the guard spends its time on
UNSTEADY: Final = 0.3  # of what a step may lose: what pauses may differ by
RARE: Final = 0.002  # an arrival less probable may cost more than a step may lose
COMING: Final = 64  # steps of which is known how many came while another one ran
USUAL: Final = 0.9  # how probable it is that a launch meets the next step where what it costs is known with that
RECENT: Final = 256  # steps whose slowdown is reported


class Turn:
    """How often something changed that holds depend on: whoever was held by another count is asked again."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Track:
    __slots__ = (
        "account",
        "after",
        "after_step",
        "arrived",
        "awaited",
        "began",
        "behind",
        "beside",
        "calibrating",
        "caught",
        "clean_at",
        "company",
        "ended",
        "excess",
        "explored",
        "explored_step",
        "from_idle",
        "gaps",
        "host_wait",
        "idle_since",
        "job",
        "late",
        "left",
        "model",
        "over",
        "pieces",
        "probed",
        "queued",
        "ratios",
        "shared",
        "shared_steps",
        "soonest",
        "steps",
        "surprise",
        "surprised",
        "tried",
        "tries",
        "turn",
        "watched_until",
        "watching",
        "whole",
    )  # fmt: skip

    def __init__(self, job: Job) -> None:
        # What every decision reads lies together, as it is laid out where this is compiled: a line of memory fetched
        # for one is there for the next.
        self.job = job
        self.gaps = Gaps()
        self.model: HighModel | None = None  # of the newest step launched
        self.account = Account(job.spec.max_slowdown)
        self.idle_since = inf  # inf: it is not
        self.soonest = 0.0  # the next step is not expected before this, while it is in the future
        self.behind = 0  # gaps no longer than it has been idle for by now, as of the last look (scene.py)
        self.steps = 0
        self.calibrating = FIRST_CLEAN  # steps without low work still wanted
        self.watching = True  # what low work costs this step is charged to launches, to learn from
        self.surprise = Surprise()
        self.ended = 0.0  # of its newest piece, by the device's word
        self.pieces = 0
        self.turn = Turn()  # of what a hold for its sake depends on
        self.whole = Turn()  # the same of one that nothing lifts before its step is over
        self.awaited = (
            inf  # those held for its sake need not be asked again in this step while it can't lose so much more
        )
        self.after: Job | None = (
            None  # the low job, and its step, for which the client waits before it steps this one (awaited.py)
        )
        self.after_step = StepId(-1)
        self.left = 0.0  # when the job had become idle before its newest step came
        self.arrived = 0.0  # when a step came that found the job idle
        # Of the step that runs:
        self.began = 0.0
        self.from_idle = False  # the job was idle when it came
        self.shared = False  # low work ran beside it
        self.beside = False  # other high work did
        self.tried = False  # low work was let out to find out what it costs
        self.excess = 0.0
        self.caught: set[str] = set()  # low programs that were out when it came, and relied on it not to
        self.surprised = 0.0  # seconds it lost by coming while low work was out
        # Of its life:
        self.shared_steps = 0
        self.company = 0  # steps beside other high work
        self.explored = -9  # `pieces` when an unknown pair was last tried
        self.explored_step = -1  # `steps` when that was
        self.probed = -(1 << 30)  # `steps` when a ban was last probed
        self.host_wait = 0.0  # seconds the device waited for the host with a piece of the job due
        self.over = 0  # steps over the target
        self.ratios: deque[float] = deque(maxlen=RECENT)
        self.watched_until = KNOWN_STEPS
        self.queued = 0.0  # the part of its steps that come while another one runs
        self.late = 0  # steps in a row beside low work that lost more than they may
        self.clean_at = 0  # `steps` when there last was one
        self.tries = 0

    def changed(self) -> None:
        """Whoever is held for its sake is to be asked again."""
        self.whole.count += 1
        self._ask_again()

    def moved(self) -> None:
        """Its step went on to another piece: so is whoever may run beside what is left of it. Nobody is while it
        calibrates."""
        if not self.calibrating and self.account.used + self.awaited <= self.account.limit:
            self._ask_again()

    def _ask_again(self) -> None:
        self.turn.count += 1
        self.awaited = inf

    def adopt(self, model: HighModel) -> None:
        """The job's next step belongs to `model`."""
        if model is not self.model:
            self.model = model
            if not model.step_known() and not self.calibrating:
                self.calibrate(WANTED)

    def calibrate(self, steps: int) -> None:
        self.calibrating, self.tries = steps, 0

    def solo_step(self) -> float:
        """Seconds its step takes without low work, as far as is known."""
        model = self.model
        if model is None:
            return 0.0
        return model.total if self.beside else model.step_seconds(self.from_idle)

    def pause(self) -> float:
        """Seconds between its steps, where each leaves about as many: what begins with the pause then costs the next
        step what it did before. 0.0: there are none, or they differ by more than a step may lose."""
        gaps = self.gaps
        steady = OVERLAPPING * (gaps.usual - gaps.least) <= UNSTEADY * self.account.limit
        return gaps.short if self.from_idle and steady else 0.0

    def came(self, step: Step, waited: float, now: float, low_heard: float) -> None:
        """A step came that found the job idle, having lain unseen for `waited` seconds. `low_heard`: when anything of
        low work last began or ended."""
        step.from_idle = True
        if waited > 0.0:
            step.waited = waited
            if now - low_heard <= waited + MOST_WAITED_S:
                step.charged = min(waited, MOST_WAITED_S)
        self.changed()
        self.gaps.add(now - self.idle_since)
        self.left, self.idle_since, self.arrived = self.idle_since, inf, now

    def may_meet(self, beyond: float) -> float:
        """Seconds of the next step that a launch which outlasts this one by `beyond` meets at times, and at times not:
        what launches cost on average doesn't say what that step loses. 0.0: it meets it nearly always, which is known
        then, or never."""
        if beyond <= 0.0:
            return 0.0
        queued, gaps = self.queued, self.gaps
        if queued <= RARE and gaps.sorted:
            seconds = beyond - gaps.sorted[0]
            if seconds <= 0.0:
                return 0.0
        else:
            seconds = beyond
        chance = queued + (1.0 - queued) * gaps.within(0, 0.0, beyond)
        return seconds if RARE < chance < USUAL else 0.0

    def daring(self, fed: int) -> int:
        """Whether places may be tried where a step may lose more than it should, by low work that was launched last in
        step `fed`."""
        account = self.account
        if self.steps < LEARNING_STEPS or (account.tokens >= SPARE and account.price > LEAST_PRICE):
            return ALWAYS
        return IF_STUCK if account.tokens >= 1.0 and self.steps - fed >= STARVED else CAREFUL

    def end_step(self, step: Step, ended: float) -> None:
        """The last piece of the step is done: settle with the account, and see whether calibration is due."""
        model, account, shared = self.model, self.account, self.shared
        assert model is not None
        seconds, from_idle, beside = ended - self.began, self.from_idle, self.beside
        baseline = model.steps[1 if from_idle else 0]
        if not shared and not beside:
            if baseline.known:
                account.alone(seconds - baseline.value)
            if baseline.add(seconds):
                account.noise.changed()
                self.calibrate(WANTED)
        if beside:
            solo, excess, known = model.total, self.excess, True
        else:
            solo, known = model.step_seconds(from_idle), model.step_known()
            excess = seconds - solo if known else self.excess
        charged = step.charged
        account.end(excess, shared, not self.tried, UNSEEN_S if from_idle else 0.0, baseline.late, charged)
        lost = excess + step.waited  # by the client
        excess += charged
        if known and account.learned:
            surprise, trusted = self.surprise, self.surprise.trusted
            surprise.step(self.surprised, self.caught, excess, account.most, account.credit, account.noise.over)
            if surprise.trusted is not trusted:
                self.gaps.trust(surprise.trusted)
                if trusted:
                    account.relieved()
        self.steps = steps = self.steps + 1
        if shared:
            self.late = late = self.late + 1 if excess > account.limit else 0
            # It is not so well known, then, unless steps are that late without low work, too.
            if late >= account.doubts:
                self.watched_until = max(self.watched_until, steps + WATCH_AGAIN)
        self.watching = steps < self.watched_until or steps % WATCH_EVERY == 0
        if steps == LEARNING_STEPS:
            account.learn_no_more()
        self._calibrated(not shared, baseline)
        if known and solo > 0.0:
            ratio = 1.0 + lost / solo
            self.ratios.append(ratio)
            if shared:
                self.shared_steps += 1
            if ratio > 1.0 + account.slack:
                self.over += 1
        if beside:
            self.company += 1
        if steps > 1:  # nobody saw whether the first one found it idle
            self.queued += ((0.0 if from_idle else 1.0) - self.queued) / (steps - 1 if steps < COMING else COMING)
        if self.caught:
            self.caught.clear()
        self.excess, self.surprised, self.shared, self.beside, self.tried = 0.0, 0.0, False, False, False

    def _calibrated(self, clean: bool, baseline: Baseline) -> None:
        if clean:
            self.clean_at = self.steps
        if self.calibrating:
            self.tries += 1
            if clean:
                self.calibrating -= 1
                if not self.calibrating and baseline.suspect:
                    self.calibrating = 1
            if self.tries >= TRIES:
                self.calibrating = 0
                self.clean_at = self.steps
        elif self.steps - self.clean_at >= CLEAN_EVERY:
            self.calibrate(1)


# ---- The models of high programs: one for each program and cut, the newest of what was ever seen.


MOST_MODELS: Final = 1024 + 64  # high programs remembered: all that may be in use, and some that were
MOST_CUTS: Final = 4  # of each


class Models:
    def __init__(self) -> None:
        self._cuts: dict[str, dict[Bounds, HighModel]] = {}  # by program

    def of(self, key: str, bounds: Bounds, predicted: Sequence[float], tracks: Mapping[JobId, Track]) -> HighModel:
        """The program's under that cut. A new cut inherits from the newest; what no track runs makes room."""
        cuts = self._cuts.setdefault(key, {})
        model = cuts.get(bounds)
        if model is None:
            newest = next(reversed(cuts.values())) if cuts else None
            model = newest.recut(bounds, predicted) if newest else HighModel(key, bounds, predicted)
            cuts[bounds] = model
            if len(cuts) > MOST_CUTS:
                del cuts[next(iter(cuts))]
            if len(self._cuts) > MOST_MODELS:
                used = {track.model.key for track in tracks.values() if track.model is not None}
                del self._cuts[next(key for key in self._cuts if key not in used)]
        return model

    def cuts(self, key: str) -> Collection[HighModel]:
        """All of one program."""
        return self._cuts[key].values()

    def all(self) -> Iterator[HighModel]:
        for cuts in self._cuts.values():
            yield from cuts.values()
