"""The guard: whether low work may run now beside the high jobs, on which share of the device, and why not.

It sees every launch and its end, and decides by what it measured: solo baselines (`baseline.py`),
what each low program costs each range of each high program (`estimates.py`, `blame.py`), when ranges
and steps come (`lookahead.py`), what each high job may still lose and what that should buy
(`controller.py`), and what was found to hurt (`bans.py`). `admit` changes nothing but a note of its
answer, which `launched` and `settled` take up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from gpumux.core import blame
from gpumux.core.bans import PROBE_EVERY, Ban, Bans, Why
from gpumux.core.board import Board, Launch, PairKey
from gpumux.core.config import CoreConfig
from gpumux.core.estimates import CREDIBLE, GAP, HighModel, Pair, Spot
from gpumux.core.holds import Hold, Holds
from gpumux.core.lookahead import LATE, Cost, overlap_cost
from gpumux.core.queue import Job, Program
from gpumux.core.track import Track
from gpumux.model import DeviceInfo, JobId, Priority

_LOW, _HIGH = Priority.LOW, Priority.HIGH
STRETCH = 1.05  # of a low piece's predicted time: where it is taken to end
LEAST_SPEED = 0.05
KNOWN = 3  # ranges of a pair that are measured before the rest is taken to be like them
RARE = 0.002  # an arrival less probable may cost more than a step may lose
STARVED = 16  # steps without low work: from then on a ban gives way where the loss is known and bearable
STALE = 128  # steps after which what a launch costs elsewhere is no longer waited for
PINCHING = frozenset(("tail", "price", "budget"))
ADAPT_EVERY = 16  # steps
MAX_IDLE = 4  # idle high jobs whose next step is looked out for
WORSE = 3.0  # times what other ranges cost: a range that does is banned
LEARNING_STEPS = 200  # in which bans are probed as soon as they expire


@dataclass(slots=True)
class Running:
    """A high job's piece on the device, and what follows it."""

    track: Track
    model: HighModel
    at: int
    began: float
    until: float
    more: bool
    late: float  # seconds it has run over its estimate


@dataclass(slots=True)
class Answer:
    """What `admit` last said of a job."""

    share: float = 0.0
    expected: float = 0.0  # excess high seconds
    seconds: float = 0.0  # the launch is predicted to take
    spots: list[tuple[Pair, Spot]] = field(default_factory=list)
    probe: Ban | None = None
    probed: Track | None = None
    exploring: Track | None = None
    hold: Hold | None = None


class Guard:
    def __init__(self, config: CoreConfig, info: DeviceInfo) -> None:
        self.shares = info.shares
        self.narrow, self.wide = config.low_launches, config.low_idle_launches
        self.width = self.narrow  # low launches outstanding beside a high job
        self.models: dict[str, dict[tuple[int, ...], HighModel]] = {}
        self.tracks: dict[JobId, Track] = {}
        self.idle: dict[JobId, Track] = {}  # high jobs between steps, those longest so first
        self.bans = Bans()
        self.holds = Holds()
        self.recent = blame.Recent()
        self.answers: dict[JobId, Answer] = {}
        self.harvested = 0.0  # device seconds of low work beside high jobs or in their gaps
        self._touched: list[tuple[HighModel, Track, Launch, int]] = []
        self._pinched = False  # low work had to wait for what high work may lose
        self._last_high: tuple[JobId | None, float] = (None, 0.0)  # who ended last, and when
        self._other_high = 0.0  # when somebody else ended last

    # ---- what happened

    def submitted(self, job: Job, now: float) -> None:
        """A step of a high job was queued."""
        track = self.idle.pop(job.id, None)
        if track is not None and track.idle_since is not None:
            track.gaps.add(now - track.idle_since)
            track.idle_since, track.arrived = None, now

    def launched(self, launch: Launch, board: Board, now: float) -> None:
        launch.began = launch.at = now
        if launch.job.priority is _HIGH:
            self._launched_high(launch, board)
            return
        step = launch.step
        answer = self.answers.pop(launch.job.id, None)
        launch.key = PairKey(step.program.key, launch.share)
        busy = bool(board.windows[_HIGH].launches)
        launch.beside_high = busy or bool(self.idle)
        start = self._free_at(board, now, launch)
        launch.due = start + (answer.seconds if answer is not None else launch.predicted / launch.share)
        self.holds.freed(launch.job.id)
        if answer is None:
            return
        launch.expected = answer.expected
        launch.spots = answer.spots
        for track in self.tracks.values() if len(self.tracks) < 4 else ():
            track.fed = track.steps
        if answer.exploring is not None:
            answer.exploring.explored = answer.exploring.pieces
            answer.exploring.explored_step = answer.exploring.steps
            launch.tried = True
        if answer.probed is not None:
            answer.probed.probed = answer.probed.steps
            self.bans.probes += 1
            if answer.probe is not None:
                answer.probe.probing = True

    def _launched_high(self, launch: Launch, board: Board) -> None:
        job, step = launch.job, launch.step
        track = self.tracks.get(job.id)
        if track is None:
            track = self.tracks[job.id] = Track(job)
        if launch.piece == 0:
            model = step.model = self._model(step.program, step.bounds, step.pieces)
            track.adopt(model)
            if job.outstanding == 1:
                track.account.begin(track.solo_step())
        late = launch.at - (track.ended if launch.piece or track.ended > step.submitted else step.submitted)
        if late > 0.0 and len(board.windows[_HIGH].launches) == 1:
            track.host_wait += late

    def _model(self, program: Program, bounds: tuple[int, ...], predicted: tuple[float, ...]) -> HighModel:
        cuts = self.models.setdefault(program.key, {})
        model = cuts.get(bounds)
        if model is None:
            newest = next(reversed(cuts.values())) if cuts else None
            model = newest.recut(bounds, predicted) if newest else HighModel(program.key, bounds, predicted)
            cuts[bounds] = model
        return model

    def done(self, launch: Launch, started: float, ended: float, board: Board) -> None:
        """The launch ran from `started` to `ended`."""
        if launch.job.priority is _HIGH:
            self._done_high(launch, ended, board)
            return
        launch.began = started if started > launch.at else launch.at
        launch.ended = ended
        seconds = ended - launch.began
        if launch.beside_high:
            self.harvested += max(0.0, seconds)
            launch.speed = launch.predicted / seconds if seconds > 0.0 else 1.0
            for cell in launch.touched:
                blame.went(cell, launch.speed)
        self.recent.add(launch)

    def _done_high(self, launch: Launch, ended: float, board: Board) -> None:
        job, step, piece = launch.job, launch.step, launch.piece
        track = self.tracks.get(job.id)
        if track is None:
            return  # the job is closing
        start = track.ended if track.ended > launch.at else launch.at
        track.ended = ended = max(ended, start)
        track.pieces += 1
        if piece == 0:
            track.began = start
            track.from_idle = step.submitted == track.arrived
        model = step.model
        assert model is not None
        beside = self._high_beside(job, start, ended, board)
        low = board.windows[_LOW].launches
        found = []
        if low or self.recent.last_end > start:
            found = blame.beside(low.values(), self.recent, start, ended)
        span = ended - start
        self.recent.settle(start, track.steps)
        if found:
            track.shared = True
            for other, _ in found:
                if other.tried:
                    track.tried = True
            self._shared(track, model, launch, span, found, beside)
        elif model.learn(piece, span, beside, track.from_idle) and not track.calibrating:
            track.calibrate(2)
        if beside:
            track.beside = True
        if piece + 1 == len(step.pieces):
            self._step_done(track, job, ended, board)

    def _high_beside(self, job: Job, start: float, ended: float, board: Board) -> bool:
        """Whether another high job had a launch on the device during [start, ended)."""
        last, when = self._last_high
        if last != job.id:
            other, self._other_high = when, when
        else:
            other = self._other_high
        self._last_high = (job.id, ended)
        if last is not None and other > start:
            return True
        return any(out.job is not job and out.at < ended for out in board.windows[_HIGH].launches.values())

    def _shared(
        self,
        track: Track,
        model: HighModel,
        launch: Launch,
        span: float,
        found: list[tuple[Launch, float]],
        beside: bool,
    ) -> None:
        piece = launch.piece
        baseline = model.reference(piece, beside, track.from_idle)
        if not baseline.count:
            if not track.calibrating:
                track.calibrate(1)
            return
        excess = span - baseline.value
        track.excess += excess
        track.account.used += excess
        if piece == 0 and track.from_idle:
            early = [(low, seconds) for low, seconds in found if low.at < track.arrived]
            if early:
                blame.arrived(excess, early)
                return
        blame.share_out(model, piece, excess, found)
        for low, _ in found:
            self._touched.append((model, track, low, piece))

    def _step_done(self, track: Track, job: Job, ended: float, board: Board) -> None:
        track.end_step(ended)
        self.recent.end_step(board.windows[_LOW].launches.values())
        for touched in self._touched:
            if touched[1] is track:
                self._judge(*touched, ended)
        self._touched = [touched for touched in self._touched if touched[1] is not track]
        track.account.begin(track.solo_step())
        if track.steps % ADAPT_EVERY == 0:
            self._adapt(track)
        if job.inflight == 1:  # the step that just ended
            track.idle_since = ended
            self.idle[job.id] = track

    def _judge(self, model: HighModel, track: Track, low: Launch, piece: int, now: float) -> None:
        """After a step: is low work of this kind to be banned beside the range, or to be freed again?"""
        pair, account = model.pair(low.key), track.account
        cell = pair.cells[piece]
        ban = cell.ban
        if ban is not None and not ban.probing:
            return
        rate = cell.newest[-1] if ban is not None else min(cell.mean, cell.median)
        rate = max(rate, 0.0)
        ratio = 1.0 / (1.0 - rate)
        length = min(min(low.step.pieces) / max(cell.speed, pair.speed, LEAST_SPEED), model.refs[piece] * ratio)
        why: Why | None = None
        if ratio > 1.0 + account.slack and length * rate > account.limit():
            why = "tail"
        elif ratio > 1.0 + account.slack and rate > WORSE * pair.elsewhere(piece) + account.slack:
            why = "price"
        if ban is None:
            if why and cell.count >= CREDIBLE:
                operators = (model.bounds[piece], model.bounds[piece + 1])
                cell.ban = Ban(track.job.id, low.job.id, operators, low.key.share, ratio, cell.count, why, now, now)
                self.bans.impose(cell.ban, model.total)
        elif why:
            ban.ratio, ban.samples = ratio, ban.samples + 1
            self.bans.lengthen(ban, now, model.total)
        else:
            self.bans.lift(ban)
            cell.ban = None
            cell.restart()
            cell.add(rate)
        pair.restate(piece)

    def _adapt(self, track: Track) -> None:
        """Once in a while: what unknown ranges may cost, and how many low launches may be out."""
        model, account = track.model, track.account
        assert model is not None
        for pair in model.pairs.values():
            if KNOWN <= pair.known < len(pair.cells):
                prior = pair.prior()
                for piece, cell in enumerate(pair.cells):
                    if not cell.count:
                        pair.rates[piece] = pair.uppers[piece] = prior
        if self._pinched:
            self.width = max(self.width - 1, self.narrow)
        elif account.full:
            self.width = min(self.width + 1, self.wide)
        self._pinched = False

    def forgotten(self, job: Job) -> None:
        """Nothing of the job is left."""
        self.tracks.pop(job.id, None)
        self.idle.pop(job.id, None)
        self.answers.pop(job.id, None)
        self.holds.freed(job.id)
        for ban in [ban for ban in self.bans.active if job.id in (ban.high, ban.low)]:
            self.bans.lift(ban)
        self._touched = [t for t in self._touched if t[1].job is not job and t[2].job is not job]

    # ---- what may be done

    def admit(self, job: Job, board: Board, now: float) -> float:
        """The share of the device the low job's next piece may be launched with; 0.0: it is held."""
        running = self._running(board, now)
        answer = self.answers.get(job.id)
        if answer is None:
            answer = self.answers[job.id] = Answer()
        if not running and not self.idle:
            answer.share, answer.hold, answer.probe, answer.probed, answer.exploring = 1.0, None, None, None, None
            answer.expected, answer.seconds = 0.0, job.next_seconds()
            return 1.0
        best: Answer | None = None
        for share in self.shares:
            found = self._consider(job, share, running, board, now)
            if found.share and (best is None or not best.share):
                best = found
            best = best or found
            if best.share:
                break
        assert best is not None
        self.answers[job.id] = best
        return best.share

    def _consider(self, job: Job, share: float, running: list[Running], board: Board, now: float) -> Answer:
        step, seconds = job.head_step(), job.next_seconds()
        program = step.program
        operator = (step.bounds if step.launched else program.bounds)[step.launched]
        key = PairKey(program.key, share)
        start = self._free_at(board, now, None)
        low_out = bool(board.windows[_LOW].launches)
        answer = Answer(share=share, seconds=seconds / share)
        for high in running:
            if high.track.calibrating:
                return self._hold("calibration", high, -1, None)
            pair = high.model.pair(key)
            lasts = seconds / max(pair.speed, LEAST_SPEED)
            answer.seconds = max(answer.seconds, lasts)
            if pair.known < KNOWN:
                if low_out or high.track.pieces < high.track.explored + 2:
                    return self._hold("learning", high, high.at, None)
                answer.exploring = high.track
            cost = self._cost(high, pair, operator, start, lasts, answer)
            refused, ban = self._refused(high, pair, operator, cost, seconds, board)
            if refused:
                tried = self._may_try(high.track, answer.spots[-1], ban, now)
                if low_out or not tried:
                    return self._hold(refused, high, cost.piece if ban is None else cost.banned, ban)
                answer.probe, answer.probed = ban, high.track if tried == "probe" else None
                answer.exploring = high.track
            else:
                answer.expected = max(answer.expected, cost.expected)
        for track in list(self.idle.values())[-MAX_IDLE:] if self.idle else ():
            held = self._between(track, key, operator, answer, seconds, start, board, now)
            if held is None:
                continue
            tried = "" if held.reason == "calibration" else self._may_try(track, None, None, now)
            if not tried:
                return Answer(hold=held)
            answer.probed = answer.exploring = track
        return answer

    def _cost(self, high: Running, pair: Pair, operator: int, start: float, lasts: float, answer: Answer) -> Cost:
        """By the ranges it will meet, or by what launches of the same kind cost, where there were some."""
        refs = high.model.refs
        end = start + STRETCH * lasts
        cost = overlap_cost(refs, pair.rates, pair.uppers, pair.banned, high.at, high.until, high.more, start, end)
        at, began, until = high.at, high.began, high.until
        while start > until and at + 1 < len(refs):
            at, began, until = at + 1, until, until + refs[at + 1]
        spot = Spot(at, int(2 * (start - began) >= until - began), operator)
        answer.spots.append((pair, spot))
        known = pair.launches.get(spot) or pair.lows.get(operator)
        if known is not None:
            return cost._replace(expected=max(0.0, known.cell.mean), upper=max(0.0, known.upper))
        answer.exploring = high.track
        whole = high.model.pairs.get(PairKey(pair.key.low, 1.0))
        known = whole.lows.get(operator) if whole is not None else None
        if known is None:
            return cost
        # On a smaller share it costs about as much, but over more steps.
        spread = min(1.0, high.model.total / lasts) if lasts > 0.0 else 1.0
        expected = max(0.0, known.cell.mean)
        return cost._replace(expected=expected, upper=max(cost.upper, known.upper * spread))

    def _refused(
        self, high: Running, pair: Pair, operator: int, cost: Cost, seconds: float, board: Board
    ) -> tuple[str, Ban | None]:
        if cost.banned >= 0 and high.track.steps - high.track.fed < STARVED:
            return "ban", pair.cells[cost.banned].ban
        if cost.upper <= 0.0:
            return "", None
        track = high.track
        pending = 0.0
        for out in board.windows[_LOW].launches.values():
            pending += max(0.0, out.expected - out.blamed)
        best = pair.best(operator, track.steps - STALE)
        avoidable = cost.expected - best if best < cost.expected else 0.0
        pending = max(pending, high.late)
        return track.account.refuses(cost.expected, cost.upper, avoidable, pending, seconds), None

    def _may_try(self, track: Track, spot: tuple[Pair, Spot] | None, ban: Ban | None, now: float) -> str:
        """Whether one launch is let out where it should not, to find out what it costs: while the job is new,
        what is not known and credit is left for; later one in a long while."""
        learning = track.steps < LEARNING_STEPS
        if ban is not None:
            if ban.until > now or ban.probing:
                return ""
            if learning:
                return "probe"
        elif learning and spot is not None and track.account.balance > 0.0 and track.explored_step < track.steps:
            return "explore" if spot[1] not in spot[0].launches else ""
        return "probe" if not learning and track.steps - track.probed >= PROBE_EVERY else ""

    def _between(
        self,
        track: Track,
        key: PairKey,
        operator: int,
        answer: Answer,
        seconds: float,
        start: float,
        board: Board,
        now: float,
    ) -> Hold | None:
        """Why a launch has to wait for an idle job's next step."""
        since, gaps = track.idle_since, track.gaps
        model = track.model
        if since is None or model is None or track.job.paused:
            return None
        waited = now - since
        if waited > gaps.longest:
            return None
        until = since + gaps.calm_at(waited)
        if track.calibrating:
            return Hold("calibration", track.job.id, -1, None, until)
        chance = gaps.arrival(waited, start - now + seconds * STRETCH / key.share)
        pair, spot = model.pair(key), Spot(GAP, 0, operator)
        answer.spots.append((pair, spot))
        delay = pair.launches.get(spot) or pair.lows.get(operator)
        if chance <= 0.0 or delay is None:
            return None
        account, others = track.account, sum([out.expected for out in board.windows[_LOW].launches.values()])
        cost = max(0.0, delay.cell.mean)
        answer.expected = max(answer.expected, cost)
        dear = chance > RARE and others + delay.upper > account.limit()
        if not dear and chance * cost <= max(account.balance, 0.0) + account.credit:
            return None
        return Hold("gap", track.job.id, -1, None, until)

    def _hold(self, reason: str, high: Running, piece: int, ban: Ban | None) -> Answer:
        return Answer(hold=Hold(reason, high.track.job.id, piece, ban, inf))

    def _running(self, board: Board, now: float) -> list[Running]:
        """The oldest piece of each high job on the device, with when it should be over."""
        found: list[Running] = []
        for launch in board.windows[_HIGH].launches.values():
            job = launch.job
            if found and any(high.track.job is job for high in found):
                continue
            model = launch.step.model
            assert model is not None
            track = self.tracks.get(job.id)
            if track is None:
                continue  # it is closing
            began = track.ended if track.ended > launch.at else launch.at
            solo = model.refs[launch.piece]
            late = now - began - solo
            until = began + solo if late < 0.0 else now + LATE * solo
            found.append(
                Running(track, model, launch.piece, began, until, job.inflight > 1, late if late > 0.0 else 0.0)
            )
        return found

    def _free_at(self, board: Board, now: float, but: Launch | None) -> float:
        """When the low launches that are out should be over."""
        latest = now
        for out in board.windows[_LOW].launches.values():
            if out is not but and out.due > latest:
                latest = out.due
        return latest

    def settled(self, now: float) -> float:
        """After an event: note who is held and why. When to look again, at the latest; inf: an event will come."""
        held = [(job, answer.hold) for job, answer in self.answers.items() if answer.hold is not None]
        self.holds.note(held, now)
        for _, hold in held:
            if hold.reason in PINCHING:
                self._pinched = True
                if hold.reason == "budget" and hold.high in self.tracks:
                    self.tracks[hold.high].account.short = True
        return min([hold.until for _, hold in held], default=inf)
