"""The guard: whether low work may run now beside the high jobs, on which share of the device, and why not.

It sees every launch and its end, and decides by what it measured: solo baselines (`baseline.py`),
what each low program costs each range of each high program (`estimates.py`, `blame.py`), when ranges
and steps come (`lookahead.py`), what each high job may still lose and what that should buy
(`controller.py`), and what was found to hurt (`bans.py`). `admit` changes nothing but a note of its
answer, which `launched` and `settled` take up.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from gpumux.core.bans import PROBE_EVERY, Ban
from gpumux.core.board import Board, PairKey
from gpumux.core.estimates import CREDIBLE, GAP, HighModel, Pair, Spot
from gpumux.core.holds import Hold
from gpumux.core.lookahead import LATE, Cost, overlap_cost
from gpumux.core.queue import Job
from gpumux.core.record import KNOWN, LEAST_SPEED, Answer, Record
from gpumux.core.track import Track
from gpumux.model import Priority

_LOW, _HIGH = Priority.LOW, Priority.HIGH
STRETCH = 1.05  # of a low piece's predicted time: where it is taken to end
RARE = 0.002  # an arrival less probable may cost more than a step may lose
MAX_IDLE = 4  # idle high jobs whose next step is looked out for
LEARNING_STEPS = 200  # in which bans are probed as soon as they expire
HOPELESS = 1.25  # times what a step may lose: a piece that costs more wherever it was tried is not tried again
STARVED = 16  # steps without low work: from then on a ban gives way where the loss is known and bearable
STALE = 128  # steps after which what a launch costs elsewhere is no longer waited for
PINCHING = frozenset(("tail", "price", "budget"))


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


class Guard(Record):
    """What may be done. Asked by the policy for each low job that could launch."""

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
        for share in self.shares if running else self.shares[:1]:  # between steps a smaller one only lasts longer
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
            answer.beside.append(high.track)
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
                if low_out or not self._may_try(high.track, *answer.spots[-1], ban, now):
                    return self._hold(refused, high, cost.piece if ban is None else cost.banned, ban)
                answer.probe, answer.probed, answer.exploring = ban, high.track, high.track
            else:
                answer.expected = max(answer.expected, cost.expected)
        for track in list(self.idle.values())[-MAX_IDLE:] if self.idle else ():
            held = self._between(track, key, operator, answer, seconds, start, board, now)
            if held is None:
                continue
            if held.reason == "calibration" or not self._may_try(track, *answer.spots[-1], None, now):
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

    def _may_try(self, track: Track, pair: Pair, spot: Spot, ban: Ban | None, now: float) -> bool:
        """Whether one launch is let out where it should not, to find out what it costs: where a ban has expired,
        and what is not known while the job is new, or low work starves, or long after it was known."""
        learning = track.steps < LEARNING_STEPS
        if not learning and track.account.tokens < 1.0:
            return False
        if ban is not None:
            return ban.until <= now and not ban.probing
        if learning and (track.account.balance <= 0.0 or track.explored_step >= track.steps):
            return False
        fresh = track.steps - PROBE_EVERY
        known, alike = pair.launches.get(spot), pair.lows.get(spot.low)
        if known is not None and known.seen > fresh:
            return False
        if alike is not None and alike.cell.count >= CREDIBLE and alike.seen > fresh:
            hopeless = alike.peak > HOPELESS * track.account.limit()
            if hopeless:
                return False
        return learning or track.steps - track.fed >= STARVED or track.steps - track.probed >= PROBE_EVERY

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
