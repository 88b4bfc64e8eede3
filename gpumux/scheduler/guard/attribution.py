"""Which low launch made a high piece late: by how long each ran beside it, and what each is known for."""

from __future__ import annotations

from collections import deque
from typing import Final, TypeAlias

from gpumux.scheduler.guard.budget import Account
from gpumux.scheduler.guard.costs import GAP, Cell, HighModel, Pair
from gpumux.scheduler.jobs import Job
from gpumux.scheduler.windows import Launch
from gpumux.types import LaunchId

RECENT: Final = 8  # low launches that ended, kept to be blamed
UNKNOWN: Final = 0.05  # weight of a launch nothing is known of: what all share equally
OVERLAPPING: Final = 1.3  # seconds a step is delayed at most by each second that a launch outlasts its arrival
DOUBTFUL: Final = 0.5  # of what a step may lose: what a launch has to seem to cost for it to be doubted
LEAST_S: Final = 1e-6  # a piece shorter than this tells nothing
LEAST_OVERLAP: Final = 0.25  # of a piece: what is blamed on less is spread over so much

Found: TypeAlias = list[Launch]  # launches beside a high piece; `overlap` says for how many seconds of it

NOBODY: Final[Found] = []  # and nobody is put into it


class Recent:
    """The newest low launches that ended."""

    __slots__ = ("last_end", "launches", "open")

    def __init__(self) -> None:
        self.launches: deque[Launch] = deque(maxlen=RECENT)
        self.last_end = 0.0
        self.open: list[Launch] = []  # that a high piece still running may be late by

    def add(self, launch: Launch, felt: bool) -> None:
        """One more. `felt`: high pieces are out that may be late by it; none that is still to come can be."""
        if felt:
            self.launches.appendleft(launch)
            if launch.ended > self.last_end:
                self.last_end = launch.ended
            launch.latest = self.last_end
        if launch.spots is not None or (launch.gaps is not None and (felt or launch.caught)):
            self.open.append(launch)

    def settle(self, until: float, step: int, account: Account) -> None:
        """High pieces that began before `until` are done: what launches that ended by then cost is known."""
        still: list[Launch] = []
        doubts, much = account.doubts, DOUBTFUL * account.limit
        for launch in self.open:
            if launch.ended > until:
                still.append(launch)
                continue
            peak, seconds = launch.peak if launch.peak > launch.here else launch.here, launch.ended - launch.began
            if launch.spots is not None:
                for pair, spot in launch.spots:
                    if doubts == 1 or pair.believes(spot, peak, doubts, much):
                        pair.learn(spot, launch.blamed, peak, seconds, step, launch.exposed)
            if launch.caught and launch.gaps is not None:
                for model in launch.gaps:
                    pair = model.pair(launch.key)
                    spot = (GAP, 3, launch.step.spans[launch.piece])
                    if doubts == 1 or pair.believes(spot, peak, doubts, much):
                        pair.learn(spot, launch.blamed, peak, seconds, step, launch.exposed)
        self.open = still

    def end_step(self, out: dict[LaunchId, Launch]) -> bool:
        """A high step ended: what follows is another one's loss. True if it may still be one of a launch that was made
        to find out what it costs."""
        tried = False
        for launch in out.values():
            if launch.here > launch.peak:
                launch.peak = launch.here
            launch.here = 0.0
            if launch.tried:
                tried = True
        for launch in self.open:
            if launch.here > launch.peak:
                launch.peak = launch.here
            launch.here = 0.0
            if launch.tried:
                tried = True
        return tried


def beside(out: dict[LaunchId, Launch], recent: Recent, start: float, end: float) -> Found:
    """Low launches that ran during [start, end), and for how many seconds of it."""
    found: Found = []
    for launch in out.values():
        seconds = end - (start if start > launch.began else launch.began)
        if seconds > 0.0:
            launch.overlap = seconds
            found.append(launch)
    if recent.last_end > start:
        for launch in recent.launches:
            if launch.latest <= start:
                break
            ended = launch.ended
            if ended > start:
                seconds = (ended if ended < end else end) - (start if start > launch.began else launch.began)
                if seconds > 0.0:
                    launch.overlap = seconds
                    found.append(launch)
    return found


def trusting(found: Found, left: float, arrived: float, programs: set[str]) -> float:
    """The part of the time beside the launches that was beside those which relied on a job idle from `left` on not to
    come when it did. Their programs are added."""
    relied = total = 0.0
    longest: Launch | None = None
    for launch in found:
        total += launch.overlap
        if launch.trusting and left <= launch.at < arrived:
            relied += launch.overlap
            if longest is None or launch.predicted > longest.predicted:
                longest = launch
    if longest is not None:
        programs.add(longest.step.program.key)
    return relied / total


def others(out: dict[LaunchId, Launch], job: Job, before: float) -> bool:
    """Whether any of these launches is another job's and was made before that time."""
    for launch in out.values():  # noqa: SIM110
        if launch.job is not job and launch.at < before:
            return True
    return False


def share_out(model: HighModel, piece: int, excess: float, found: Found, account: Account) -> Found:
    """Charge `excess` seconds of the piece to the launches beside it. Those that may have to be banned for it, or
    freed."""
    least = LEAST_OVERLAP * model.refs[piece]
    if least < LEAST_S:
        least = LEAST_S
    if len(found) == 1:
        launch = found[0]
        pair = model.pair(launch.key)
        if not pair.fresh:
            _learned_of(model, pair)
        return [launch] if _doubtful(_charge(pair, launch, piece, least, excess), account) else NOBODY
    pairs: list[Pair] = []
    total = 0.0
    for launch in found:
        pair = model.pair(launch.key)
        mean = pair.cells[piece].mean
        launch.weight = weight = launch.overlap * (UNKNOWN + mean if mean > 0.0 else UNKNOWN)
        pairs.append(pair)
        if not pair.fresh:
            _learned_of(model, pair)
        total += weight
    part = excess / total
    for place, launch in enumerate(found):
        _charge(pairs[place], launch, piece, least, part * launch.weight)
    return [launch for place, launch in enumerate(found) if _doubtful(pairs[place].cells[piece], account)]


def _learned_of(model: HighModel, pair: Pair) -> None:
    pair.fresh = True
    model.fresh.append(pair)


def _doubtful(cell: Cell, account: Account) -> bool:
    return (cell.ban is not None or cell.mean > account.dear) and cell.to_judge(account.slack)


def _charge(pair: Pair, launch: Launch, piece: int, least: float, mine: float) -> Cell:
    seconds = launch.overlap
    launch.blamed += mine
    launch.here += mine
    rate = mine / (seconds if seconds > least else least)
    if pair.rate > 0.0:
        rate /= pair.harm(launch.step.spans[launch.piece])
    weight = seconds / (4 * least) + 0.25
    cell = pair.add(piece, rate, weight if weight < 1.0 else 1.0)
    if launch.ended:
        went(cell, launch.speed)
    elif launch.touched:
        launch.touched.append(cell)
    else:
        launch.touched = [cell]
    return cell


def went(cell: Cell, speed: float) -> None:
    """Low work ran at `speed` beside the cell's range."""
    cell.speed = cell.speed + 0.2 * (speed - cell.speed) if cell.speed else speed


def early(found: Found, arrived: float) -> tuple[Found, Found]:
    """Those launched before the step came, and those launched since."""
    before: Found = []
    since: Found = []
    for launch in found:
        (before if launch.at < arrived else since).append(launch)
    return before, since


def unforeseen(found: Found, arrived: float) -> float:
    """Seconds for which a launch was out after the step came that was taken to be over before: it took longer than
    predicted."""
    late = 0.0
    for launch in found:
        if launch.due <= arrived and launch.spots is None and launch.gaps is None and launch.ended - arrived > late:
            late = launch.ended - arrived
    return late


def arrived(excess: float, found: Found) -> None:
    """A step came while these low launches were out: its first piece was `excess` seconds late."""
    total = 0.0
    for launch in found:
        total += launch.overlap
    for launch in found:
        launch.caught = True
        launch.blamed += excess * launch.overlap / total
        launch.here += excess * launch.overlap / total
