"""What a high program loses beside each low program, and where in a step that is least.

`LowCosts` stand for one low program on one share of the device, beside one high program under one cut (`HighCosts` in
`high_job.py`). They hold what was measured in two ways: for each *range* of the high program's operators (a piece),
excess high seconds in a second of overlap (`RangeCost`); and for each *kind* of launch, excess high seconds of a whole
launch (`LaunchCost`). A new cut keeps what launches of each low piece cost anywhere.

The kind of a launch says where in the high step it began. A launch can't be called back, and it costs what it takes
from the operators it happens to overlap, so the same low piece may cost next to nothing or more than a step may lose.
High steps repeat: a launch that begins together with a high piece overlaps the same operators every time, and costs the
same again. So does one at the end of the step, where the high job pauses between steps. `LowPlacement` keeps, for each
low piece, a `LaunchPlan` of the best share at each such moment. Where no launch was measured its cost is expected to be
in the proportion in which other low pieces' costs differ there from elsewhere, and then taken to be lower than that
(optimism in the face of uncertainty), since otherwise it would never be tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import inf
from typing import Final, TypeAlias

from gpumux.scheduler.guard.bans import Ban, Bans
from gpumux.scheduler.jobs import LowKey, Span

# ---- What low work costs: one measured quantity each.


MEMORY: Final = 10  # samples an estimate is the running mean of
CLIP: Final = 3.0  # deviations by which a sample may differ and still count in full
MIN_SAMPLES: Final = 3  # before an estimate may ban
NOISE_FLOOR_S: Final = 5e-6  # difference between costs of launches that means nothing
RATE_FLOOR: Final = 0.02  # difference between costs of a second beside low work that means nothing
FIRST_SPREAD: Final = 0.15  # of what a first launch cost: by how much the next may differ
TIMED_SPREAD: Final = 0.02  # the same of a launch at a moment that repeats
FORGET: Final = 0.98
REPEAT_FACTOR: Final = 0.94  # of its cost counts for a launch that repeats: the limit has a margin for unknown ones


class RobustMean:
    """A running mean that one outlier can't move far, with its deviation and the newest three samples."""

    __slots__ = ("count", "deviation", "floor", "mean", "newest", "second", "third")

    def __init__(self, floor: float) -> None:
        self.floor = floor  # a difference that means nothing
        self.count = 0
        self.mean = 0.0
        self.deviation = 0.0
        self.newest = self.second = self.third = 0.0  # samples, as far as there were so many

    @property
    def bound(self) -> float:
        """What is seldom exceeded."""
        return self.mean + 2 * self.deviation

    @property
    def median(self) -> float:
        """Of the newest three samples."""
        known = sorted(self._newest_samples())
        return known[len(known) // 2] if known else 0.0

    def _newest_samples(self) -> list[float]:
        return [self.newest, self.second, self.third][: self.count]

    def add(self, sample: float, weight: float = 1.0) -> None:
        self.count += 1
        self.third, self.second, self.newest = self.second, self.newest, sample
        if self.count == 1:
            self.mean, self.deviation = sample, 0.0
            return
        if self.count <= MIN_SAMPLES:  # the mean is their median
            known, total = self._newest_samples(), 0.0
            self.mean = sorted(known)[len(known) // 2]
            for each in known:
                total += abs(each - self.mean)
            self.deviation = total / self.count
            return
        part = weight / min(self.count, MEMORY)
        bound = CLIP * self.deviation + self.floor + 0.1 * abs(self.mean)
        self.mean += part * max(-bound, min(sample - self.mean, bound))
        self.deviation += part * (min(abs(sample - self.mean), 2.0 * bound) - self.deviation)


class RangeCost(RobustMean):
    """What a range of a high program loses in a second beside low work. Forecasts use `rate`, what is expected, and
    `upper_rate`, what is seldom exceeded; both are 0.0 where there is no sample."""

    __slots__ = ("ban", "rate", "upper_rate")

    def __init__(self) -> None:
        super().__init__(RATE_FLOOR)
        self.rate = self.upper_rate = 0.0
        self.ban: Ban | None = None

    def publish(self) -> None:
        """Have forecasts use what was measured."""
        self.rate, self.upper_rate = max(0.0, self.mean), max(0.0, self.bound)

    def to_judge(self, slack: float) -> bool:
        """Whether what the range costs may be a reason to impose a ban or to lift it."""
        if self.ban is not None:
            return self.ban.probing
        return self.count >= MIN_SAMPLES and self.mean * (1.0 + slack) > slack

    @property
    def judged_rate(self) -> float:
        """The loss by which it is judged: what a probe found where there is a ban, and else what samples agree on."""
        return max(self.newest if self.ban is not None else min(self.mean, self.median), 0.0)

    def update_ban(self, bans: Bans, found: Ban | None, step_s: float, now: float) -> None:
        """Impose, lengthen or lift the ban, where the range is `to_judge`. `found`: the ban that there is reason for;
        None: there is none. `step_s`: seconds a step of the high job takes alone."""
        ban, rate = self.ban, self.judged_rate
        if ban is None:
            if found is not None:
                self.ban = found
                bans.impose(found, step_s)
        elif found is not None:
            ban.ratio, ban.samples = found.ratio, ban.samples + 1
            bans.lengthen(ban, now, step_s)
        else:
            bans.lift(ban)
            self.ban = None
            self.count, self.mean, self.deviation = 0, 0.0, 0.0
            self.add(rate)


class LaunchCost(RobustMean):
    """What launches of one kind cost: high seconds in all (the mean), and in the step that lost most by one."""

    __slots__ = ("last_peak", "last_step", "peak", "repeats", "seconds", "upper", "worst")

    def __init__(self, repeats: bool = False) -> None:
        super().__init__(NOISE_FLOOR_S)
        self.repeats = repeats  # they begin at a moment that repeats
        self.peak = 0.0  # what they cost one step
        self.upper = 0.0  # what a step seldom loses more of
        self.worst = 0.0  # the largest peak, slowly forgotten: what a launch at another moment may cost
        self.seconds = 0.0  # a launch took
        self.last_step = 0  # the high job's step when there last was one
        self.last_peak = 0.0

    def add_launch(self, cost: float, peak: float, seconds: float, step: int) -> None:
        """A launch of `seconds` cost so much in all, and `peak` in one step."""
        self.add(cost)
        part = 1.0 / self.count if self.count < 5 else 0.2
        capped = max(0.0, peak)
        if self.count > MIN_SAMPLES:  # one launch may be delayed by something else; two in a row are believed
            capped = min(capped, 2.0 * max(self.peak, self.last_peak) + NOISE_FLOOR_S)
        self.last_peak = peak
        self.peak += part * (capped - self.peak)
        self.worst = max(peak, FORGET * self.worst)
        self.seconds += part * (seconds - self.seconds)
        self.last_step = step
        spread = TIMED_SPREAD if self.repeats else FIRST_SPREAD
        upper = self.peak + (2 * self.deviation if self.count > 1 else spread * self.peak)
        self.upper = REPEAT_FACTOR * upper if self.count >= MIN_SAMPLES and self.repeats else upper

    def may_fit(self, limit: float) -> bool:
        """Whether it would be within the limit if a few more launches cost as much."""
        return self.repeats and self.count < MIN_SAMPLES and REPEAT_FACTOR * self.peak <= limit


# ---- Where in a high step a low piece may begin.


START: Final = 0  # a launch begins together with a high piece
AFTER_START: Final = 1  # as soon as the host was told that the piece began
MIDDLE: Final = 2  # when half of it is over
LATER: Final = 3  # at any other time
MOMENTS: Final = (START, AFTER_START, MIDDLE)  # moments that repeat: what a launch costs there it costs again
ON_ARRIVAL: Final = -1  # stands for the high piece of a launch during which a step came

# A launch as it repeats: the high piece it began beside, or ON_ARRIVAL; its moment, or LATER; and the low piece's span.
LaunchKind: TypeAlias = tuple[int, int, Span]


def on_arrival(low: Span) -> LaunchKind:
    """The kind of a launch of the low piece during which a step came."""
    return ON_ARRIVAL, LATER, low


OPTIMISM: Final = 0.4  # of the expected cost of an untried launch is taken for its cost
WORTH_S: Final = 0.1  # low seconds that a second of a slow launch is worth, where cost is what counts
UNTRIED_WORST: Final = 2.5  # times its expected cost: the worst case of an untried launch
ELSEWHERE_WORST: Final = 1.5  # times the most the piece cost elsewhere: the same
MOST_EFFECT: Final = 4.0
EXPLORE_NEVER: Final = 0  # of untried launches by which a step may lose too much
EXPLORE_IF_STUCK: Final = 1  # only if nothing that was tried will do
EXPLORE_ALWAYS: Final = 2
PLAN_MIN_STEPS: Final = 16  # after which a plan is made anew if the price or the limit has changed
PLAN_MAX_STEPS: Final = 64  # after which it is in any case: other low pieces may have shown something
CHANGED: Final = 0.05  # relative difference that counts as a change
PROBE_EVERY: Final = 250  # steps of the high job after which measured costs are measured again


class LaunchOption:
    """What a launch at one moment of a high step, or at its end, is taken to do. `cost`: high seconds it is expected to
    cost; `upper`: what a step seldom loses more of; `score`: low seconds that stand for both cost and time, the less
    the better; `tried`: it was measured."""

    __slots__ = ("cost", "score", "share", "tried", "upper")

    def __init__(self, share: float, *, cost: float, upper: float, score: float, tried: bool) -> None:
        self.share, self.cost, self.upper, self.score, self.tried = share, cost, upper, score, tried


Options: TypeAlias = list[LaunchOption | None]


class LaunchPlan:
    """Where one low piece may begin: the best option at each moment of each high piece (`at[3 * piece + moment]`) and
    at the end of the step (the last of `at`), or None; the same of those that were tried (`tried`); and the least score
    and cost of all."""

    __slots__ = (
        "_limit", "_price", "_seconds", "_step", "_timed", "at", "cost", "score", "tried", "version",
    )  # fmt: skip

    def __init__(
        self, at: Options, tried: Options, *, seconds: float, version: int, step: int, price: float, limit: float
    ) -> None:
        self.at, self.tried, self.version = at, tried, version
        self.score = self.cost = inf
        for option in at:
            if option is not None:
                self.score, self.cost = min(self.score, option.score), min(self.cost, option.cost)
        self._step, self._seconds, self._price, self._limit = step, seconds, price, limit
        self._timed: dict[int, list[tuple[int, float, float]]] | None = None

    @property
    def timed(self) -> dict[int, list[tuple[int, float, float]]]:
        """By high piece, the options at moments that only a timer marks and that are worth waiting for: the moment,
        what each takes of what a step may lose (-inf: it is untried), and its cost."""
        found = self._timed
        if found is None:
            found = {}
            for index, option in enumerate(self.at):
                if option is not None and index % 3 != AFTER_START and option.score - self.score <= self._seconds:
                    takes = option.upper if option.tried else -inf
                    found.setdefault(index // 3, []).append((index % 3, takes, option.cost))
            self._timed = found
        return found

    def is_current(self, version: int, step: int, price: float, limit: float) -> bool:
        """Whether the plan still holds in the high job's step `step`; `version` is that of what is known of the
        piece."""
        if self.version != version:
            return False
        age = step - self._step
        if age < PLAN_MIN_STEPS:
            return True
        same = abs(price - self._price) <= CHANGED * price and abs(limit - self._limit) <= CHANGED * limit
        return age < PLAN_MAX_STEPS and same


class PieceCosts:
    """What launches of one low piece cost, wherever they began and on whatever share."""

    __slots__ = ("base", "learned", "plans", "version", "worst")

    def __init__(self) -> None:
        self.learned = False  # there was one
        self.base = 0.0  # what they cost
        self.worst = 0.0  # the most one did, slowly forgotten
        self.version = 0  # of what plans are made of
        self.plans: dict[tuple[int, bool], LaunchPlan] = {}  # by exploration, and whether a step may come from idle


class LowPlacement:
    """Where launches of one low program may begin in the steps of one high program under one cut. `by_share` are its
    costs on each share, the whole device first."""

    def __init__(self) -> None:
        self.by_share: list[LowCosts] = []
        self.last_launch_step = 0  # the high job's step in which the low program was last launched
        self.explored = False  # the high program has learned for long enough what the low one costs
        self.pieces: dict[Span, PieceCosts] = {}  # by low piece

    def of(self, low: Span) -> PieceCosts:
        """What is known of launches of the low piece."""
        found = self.pieces.get(low)
        if found is None:
            found = self.pieces[low] = PieceCosts()
        return found

    def learn(self, kind: LaunchKind, effects: dict[int, float], cost: float, count: int, changed: bool) -> None:
        """A launch of this kind, the `count`-th, cost so many seconds. `changed`: it changed what is known of the kind.

        Launches are most often where they cost little. So that this does not pass for what they cost anywhere, each
        kind counts about once."""
        weight, cost = 1.0 / count, max(0.0, cost)
        high_piece, moment, low = kind
        piece_costs = self.of(low)
        base = piece_costs.base
        if not piece_costs.learned:
            piece_costs.learned, piece_costs.base = True, cost
        else:
            if base > NOISE_FLOOR_S and moment in MOMENTS:
                at = 3 * high_piece + moment
                known = effects.get(at, 1.0)
                effects[at] = known + 0.4 * weight * (min(cost / base, MOST_EFFECT) - known)
            piece_costs.base = base + 0.15 * weight * (cost - base)
        piece_costs.worst = max(cost, FORGET**weight * piece_costs.worst)
        if changed or count <= MIN_SAMPLES:
            piece_costs.version += 1

    def expected(self, low: Span, piece: int, moment: int, effects: dict[int, float]) -> float:
        """What an untried launch at that moment is expected to cost."""
        return self.of(low).base * effects.get(3 * piece + moment, 1.0)

    def worst_case(self, low: Span, expected: float) -> float:
        """What an untried launch with that expected cost may cost."""
        return max(UNTRIED_WORST * expected, ELSEWHERE_WORST * self.of(low).worst)

    def plan(
        self, low: Span, seconds: float, *, price: float, limit: float, step: int, exploration: int, from_idle: bool,
        solo_s: Sequence[float], pause: float,
    ) -> LaunchPlan:  # fmt: skip
        """Where the low piece of so many seconds may begin at this price (low seconds for a high second) with no step
        losing more than `limit`, as of the high job's step `step`.

        `exploration`: whether untried launches may cost more (EXPLORE_...). `from_idle`: nothing runs before the high
        step begins that could mark its beginning. `solo_s`: seconds of the high pieces alone. `pause`: seconds for
        which the high job is idle after each step, 0.0 if it is not."""
        piece_costs = self.of(low)
        plan = piece_costs.plans.get((exploration, from_idle))
        if plan is not None and plan.is_current(piece_costs.version, step, price, limit):
            return plan
        worst = ELSEWHERE_WORST * piece_costs.worst
        tried = self._tried(low, limit, price, seconds, pause > 0.0)
        stuck = worst > limit and tried.count(None) == len(tried)
        explores = exploration == EXPLORE_ALWAYS or (exploration == EXPLORE_IF_STUCK and stuck)
        bound = inf if explores else limit  # for the worst case of untried launches
        at = list(tried)
        if worst <= bound:
            left = [*accumulate(reversed(solo_s))][::-1] if stuck else []
            for index, option in self._untried(low, price, bound, limit, step, seconds, left, from_idle):
                other = at[index]
                if other is None or option.score < other.score:
                    at[index] = option
        if pause > 0.0:
            for option in self._untried_at_end(low, price, bound, limit, step, seconds, pause):
                other = at[-1]
                if other is None or option.score < other.score:
                    at[-1] = option
        plan = LaunchPlan(at, tried, seconds=seconds, version=piece_costs.version, step=step, price=price, limit=limit)
        piece_costs.plans[exploration, from_idle] = plan
        return plan

    def _tried(self, low: Span, limit: float, price: float, seconds: float, pauses: bool) -> Options:
        """The best share at each moment of those at which launches were seen to cost no step more than `limit`.
        `pauses`: the end of the step is one of the moments."""
        count = 3 * len(self.by_share[0].ranges) + 1
        found: Options = [None] * count
        for low_costs in self.by_share:
            time = WORTH_S * seconds / low_costs.share
            for index in range(count if pauses else count - 1):
                known = low_costs.launches.get((index // 3, index % 3, low))
                if known is not None and known.upper <= limit:
                    cost = max(0.0, known.mean)
                    score, other = price * cost + time, found[index]
                    if other is None or score < other.score:
                        found[index] = LaunchOption(
                            low_costs.share, cost=cost, upper=known.upper, score=score, tried=True
                        )
        return found

    def _untried(
        self, low: Span, price: float, bound: float, limit: float, step: int, seconds: float, left: Sequence[float],
        from_idle: bool,
    ) -> Iterator[tuple[int, LaunchOption]]:  # fmt: skip
        """Options, by index, that were never tried or long ago, and may be better than those that were: the worst case
        of each is within `bound`. `left`: where no option that was tried will do, seconds from the beginning of each
        high piece to the end of the step."""
        piece_costs = self.of(low)
        base, worst = piece_costs.base, ELSEWHERE_WORST * piece_costs.worst
        # Moments that only a timer marks are explored where the others won't do.
        moments = MOMENTS if left else (START, AFTER_START)
        for low_costs in self.by_share:
            share, effects = low_costs.share, low_costs.effects
            for piece in range(len(low_costs.ranges)):
                for moment in moments:
                    if from_idle and not piece and moment == START:
                        continue
                    index = 3 * piece + moment
                    known = low_costs.launches.get((piece, moment, low))
                    cost, optimism = base * effects.get(index, 1.0), OPTIMISM
                    if known is not None:
                        if known.upper <= limit:
                            continue
                        if known.may_fit(limit):
                            yield index, LaunchOption(share, cost=known.mean, upper=known.peak, score=0.0, tried=False)
                            continue
                        if step - known.last_step < PROBE_EVERY:
                            continue
                        cost, optimism = max(cost, known.mean), 1.0
                    if max(UNTRIED_WORST * cost, worst) > bound:
                        continue
                    score = price * optimism * cost
                    if left:  # what counts is what one step loses: a launch that goes on in the next takes less of each
                        beyond = left[piece + 1] if piece + 1 < len(left) else 0.0
                        ends = 0.5 * (left[piece] + beyond) if moment == MIDDLE else left[piece]
                        part = min(1.0, ends * share / seconds)
                        score *= max(part, 1.0 - part)
                    yield index, LaunchOption(share, cost=optimism * cost, upper=cost, score=score, tried=False)

    def _untried_at_end(
        self, low: Span, price: float, bound: float, limit: float, step: int, seconds: float, pause: float
    ) -> Iterator[LaunchOption]:
        """The same at the end of the step: the next step loses by what lasts longer than the pause."""
        for low_costs in self.by_share:
            share, end = low_costs.share, len(low_costs.ranges)
            known = low_costs.launches.get((end, START, low))
            exposed = max(0.0, 1.0 - pause * share / seconds) if seconds > 0.0 else 0.0
            cost, optimism = exposed * self.expected(low, end, START, low_costs.effects), OPTIMISM
            if known is not None:
                if known.upper <= limit or (step - known.last_step < PROBE_EVERY and not known.may_fit(limit)):
                    continue
                cost, optimism = max(cost, known.mean), 1.0
            if max(UNTRIED_WORST * cost, ELSEWHERE_WORST * exposed * self.of(low).worst) <= bound:
                score = price * optimism * cost
                yield LaunchOption(share, cost=optimism * cost, upper=cost, score=score, tried=False)


# ---- One low program, on one share of the device, beside one high program.


MOST_KINDS: Final = 4096  # of launches remembered
LEAST_EXPOSED: Final = 0.3  # part of a launch: what less of it costs says little about the whole
MAX_RATE: Final = 0.95  # excess seconds in a second of overlap
LEAST_OVERLAP: Final = 0.25  # of a range: a charge for a shorter overlap is spread over this much


class LowCosts:
    """What launches of the low program cost: by kind of launch, by low piece, and by range of the high program."""

    __slots__ = (
        "_unconfirmed", "any_ban", "effects", "key", "known", "launches", "lows", "placement", "ranges", "share",
        "speed", "typical",
    )  # fmt: skip

    def __init__(self, key: LowKey, pieces: int, placement: LowPlacement) -> None:
        self.key, self.share = key, key.share
        self.placement = placement  # of all shares
        self.ranges = [RangeCost() for _ in range(pieces)]
        self.known = 0  # ranges that have a sample, or had one under an earlier cut
        self.any_ban = False
        self.speed = key.share  # solo seconds of low work done in a second
        self.launches: dict[LaunchKind, LaunchCost] = {}
        self.lows: dict[Span, LaunchCost] = {}  # of launches of each low piece beside any high piece
        self.effects: dict[int, float] = {}  # by index: what launches cost there, over what they cost elsewhere
        self.typical = RangeCost()  # high seconds lost in a second of any launch: for people
        self._unconfirmed: dict[Span, int] = {}  # launches in a row that seemed costly and were not believed

    def add(self, piece: int, rate: float, weight: float) -> None:
        """A second of the range beside low work cost `rate`."""
        range_cost = self.ranges[piece]
        if not range_cost.count:
            self.known += 1
        range_cost.add(min(rate, MAX_RATE), weight)
        range_cost.publish()

    def publish(self, piece: int) -> None:
        """The range's cost or ban was changed otherwise than by `add`."""
        self.ranges[piece].publish()
        self.any_ban = any(each.ban is not None for each in self.ranges)

    def confirms(self, kind: LaunchKind, peak: float, needed: int, much: float) -> bool:
        """Whether to learn from a launch that was charged `peak` in a step. One that seems to have cost `much` counts
        only once `needed` of its kind have in a row: steps are that late without low work, too."""
        low = kind[2]
        if peak <= much:
            self._unconfirmed.pop(low, None)
            return True
        seen = self._unconfirmed.get(low, 0) + 1
        self._unconfirmed[low] = seen if seen < needed else 0
        return seen >= needed

    def learn(self, kind: LaunchKind, cost: float, peak: float, seconds: float, step: int, exposed: float) -> None:
        """A launch of `seconds`, a part `exposed` of it beside the high job, was charged `cost`, `peak` in one step."""
        piece, _, low = kind
        launched = self.launches.get(kind)
        if launched is None:
            if len(self.launches) >= MOST_KINDS:
                self.launches.clear()  # `lows` still knows
            launched = self.launches[kind] = LaunchCost(kind[1] in MOMENTS)
        mean, upper = launched.mean, launched.upper
        launched.add_launch(cost, peak, seconds, step)
        if piece != ON_ARRIVAL and (exposed >= LEAST_EXPOSED or piece < len(self.ranges)):
            changed = abs(launched.mean - mean) + abs(launched.upper - upper) > CHANGED * upper + NOISE_FLOOR_S
            whole = max(exposed, LEAST_EXPOSED)
            anywhere = self.lows.get(low)
            if anywhere is None:
                anywhere = self.lows[low] = LaunchCost()
            anywhere.add_launch(cost / whole, peak / whole, seconds, step)
            self.typical.add(max(0.0, cost) / seconds if seconds > 0.0 else 0.0)
            self.placement.learn(kind, self.effects, cost, launched.count, changed)

    def elsewhere(self, piece: int) -> float:
        """What the other ranges cost: the median of those known; inf where there are none."""
        known = sorted([max(0.0, each.mean) for at, each in enumerate(self.ranges) if each.count and at != piece])
        return known[len(known) // 2] if known else inf
