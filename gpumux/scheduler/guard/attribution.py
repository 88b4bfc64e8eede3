"""Which low launches made a high piece late: by how long each ran beside it, and by what each is known to cost."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final, TypeAlias

from gpumux.scheduler.guard.budget import SlowdownBudget
from gpumux.scheduler.guard.costs import ON_ARRIVAL, HighCosts, LaunchKind, LowCosts, RangeCost
from gpumux.scheduler.jobs import Job, LowKey
from gpumux.scheduler.windows import Outstanding
from gpumux.types import LaunchId

RECENT: Final = 8  # ended low launches that may still be charged
UNKNOWN_RATE: Final = 0.05  # added to what each launch is known to cost, so that unknown launches share equally
OVERLAPPING: Final = 1.3  # seconds a step is delayed at most by each second that a launch outlasts its arrival
DOUBTFUL: Final = 0.5  # of what a step may lose: a launch that seems to cost more needs confirmation
LEAST_S: Final = 1e-6  # a shorter high piece tells nothing
LEAST_OVERLAP: Final = 0.25  # of a piece: a charge for a shorter overlap is spread over this much


class LowLaunch:
    """A low launch as the guard follows it, until it is known what it cost. Seconds."""

    ended = 0.0  # 0.0: it is still out
    latest_end = 0.0  # end of any low launch by the time this one was reported done
    due = 0.0  # when it should be over
    speed = 1.0  # solo seconds of it done in a second
    expected = 0.0  # excess high seconds it was expected to cost
    charged = 0.0  # excess high seconds it was charged so far
    charged_in_step = 0.0  # of these, in the high step that runs
    peak = 0.0  # the most it was charged in one high step
    exposed = 1.0  # part of it that runs beside high work
    beside_high = False  # a high job ran or was idle when it was launched
    alone = False  # nothing else was out when it was launched
    met_arrival = False  # a high step came while it was out
    exploring = False  # it was launched to find out what it costs
    relies_on_arrivals = False  # it was launched because no step of an idle high job was expected
    overlap = 0.0  # seconds beside the high piece that ended last
    weight = 0.0  # its part of that piece's excess, relative to other launches'
    kinds: list[tuple[LowCosts, LaunchKind]] | None = None  # what it is as a launch, beside each high job that ran
    idle_costs: list[HighCosts] | None = None  # of idle high jobs, a step of which may come during it
    charged_ranges: list[RangeCost] | None = None  # ranges it was charged for before it ended

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

    __slots__ = ("last_end", "launches", "open")

    def __init__(self) -> None:
        self.launches: deque[LowLaunch] = deque(maxlen=RECENT)
        self.last_end = 0.0
        self.open: LowLaunches = []  # launches that a running high piece may still be charged to

    def add(self, launch: LowLaunch, high_out: bool) -> None:
        """A launch ended. `high_out`: high pieces are out that it may have delayed; later ones it can't delay."""
        if high_out:
            self.launches.appendleft(launch)
            self.last_end = max(self.last_end, launch.ended)
            launch.latest_end = self.last_end
        if launch.kinds is not None or (launch.idle_costs is not None and (high_out or launch.met_arrival)):
            self.open.append(launch)

    def settle(self, until: float, step: int, budget: SlowdownBudget) -> None:
        """All high pieces that began before `until` are done, so what launches that ended by then cost is known."""
        still: LowLaunches = []
        for launch in self.open:
            if launch.ended > until:
                still.append(launch)
                continue
            if launch.kinds is not None:
                for low_costs, kind in launch.kinds:
                    _learn(low_costs, kind, launch, step, budget)
            if launch.met_arrival and launch.idle_costs is not None:
                for costs in launch.idle_costs:
                    _learn(costs.beside(launch.key), (ON_ARRIVAL, 3, launch.span), launch, step, budget)
        self.open = still

    def end_step(self, out: Iterable[LowLaunch]) -> bool:
        """A high step ended. True if the next one may be charged for a launch that was made to find out what it
        costs."""
        exploring = False
        for launch in [*out, *self.open]:
            launch.close_step()
            exploring = exploring or launch.exploring
        return exploring


def _learn(low_costs: LowCosts, kind: LaunchKind, launch: LowLaunch, step: int, budget: SlowdownBudget) -> None:
    peak = max(launch.peak, launch.charged_in_step)
    needed = budget.confirmations
    if needed == 1 or low_costs.confirms(kind, peak, needed, DOUBTFUL * budget.limit):
        low_costs.learn(kind, launch.charged, peak, launch.ended - launch.began, step, launch.exposed)


def beside(out: Iterable[LowLaunch], recent: RecentLaunches, start: float, end: float) -> LowLaunches:
    """Low launches that ran during [start, end). Their `overlap` says for how many seconds of it."""
    found: LowLaunches = []
    for launch in out:
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


def relied_on_arrivals(found: LowLaunches, idle_from: float, arrived: float, programs: set[str]) -> float:
    """The part of the overlap that belongs to launches which relied on a job, idle from `idle_from` on, not to get a
    step as early as it did. The program of the longest one is added to `programs`."""
    relied = total = 0.0
    longest: LowLaunch | None = None
    for launch in found:
        total += launch.overlap
        if launch.relies_on_arrivals and idle_from <= launch.at < arrived:
            relied += launch.overlap
            if longest is None or launch.predicted > longest.predicted:
                longest = launch
    if longest is not None:
        programs.add(longest.step.program.key)
    return relied / total


def other_launches(out: dict[LaunchId, Outstanding], job: Job, before: float) -> bool:
    """Whether any of these launches is another job's and was made before that time."""
    return any(launch.job is not job and launch.at < before for launch in out.values())


def charge(costs: HighCosts, piece: int, excess: float, found: LowLaunches, budget: SlowdownBudget) -> LowLaunches:
    """Charge `excess` seconds of the high piece to the launches beside it. Returns those for which a ban may have to be
    imposed or lifted."""
    least = max(LEAST_OVERLAP * costs.solo_s[piece], LEAST_S)
    beside = [costs.beside(launch.key) for launch in found]
    for low_costs in beside:
        costs.mark_updated(low_costs)
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
    rate = excess / max(seconds, least)
    if low_costs.rate > 0.0:
        rate /= low_costs.relative_rate(launch.span)
    range_cost = low_costs.add(piece, rate, min(seconds / (4 * least) + 0.25, 1.0))
    if launch.ended:
        update_speed(range_cost, launch.speed)
    elif launch.charged_ranges:
        launch.charged_ranges.append(range_cost)
    else:
        launch.charged_ranges = [range_cost]


def update_speed(range_cost: RangeCost, speed: float) -> None:
    """Low work ran at `speed` beside the range."""
    range_cost.speed = range_cost.speed + 0.2 * (speed - range_cost.speed) if range_cost.speed else speed


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
