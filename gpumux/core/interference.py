"""The guard: whether low work may run now beside the high jobs, on which share of the device, and why not.

It sees every launch and its end, and decides by what it measured: solo baselines (`baseline.py`),
what each low program costs each range of each high program (`estimates.py`, `blame.py`), when ranges
and steps come (`lookahead.py`), what each high job may still lose and what that should buy
(`controller.py`), and what was found to hurt (`bans.py`). `admit` changes nothing but a note of its
answer, which `launched` and `settled` take up.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from gpumux.core.answers import Answer, Rest
from gpumux.core.bans import Ban
from gpumux.core.board import Board
from gpumux.core.cells import FLOOR_S, GAP, Spot
from gpumux.core.estimates import Pair
from gpumux.core.holds import Hold
from gpumux.core.lookahead import Cost, overlap_cost
from gpumux.core.lull import bearable, outlasted, wait
from gpumux.core.moments import appointment, exposed, where
from gpumux.core.places import MOMENTS, WORTH_S, Plan
from gpumux.core.queue import Job, PairKey, Program, Step
from gpumux.core.record import KNOWN, LEAST_SPEED, Record
from gpumux.core.scene import Running, Scene
from gpumux.core.track import LEARNING_STEPS, LEAST_PRICE, STARVED, Track
from gpumux.core.trying import may_try
from gpumux.model import Priority

_LOW = Priority.LOW

STRETCH = 1.02  # of a low piece's predicted time: where it is taken to end
SPOILS = 0.05  # an arrival less probable is no reason to keep the device free for a calibration
STALE = 128  # steps after which what a launch costs elsewhere is no longer waited for
EVERYBODY = frozenset(("calibration", "learning"))  # reasons to hold all, where they name no piece
PLACED = frozenset(("tail", "price", "budget", "ban"))  # what another moment may be free of
ASIDE_S = 50e-6  # after the moment a step is expected, which should not find the core busy
PINCHING = frozenset(("tail", "price", "budget"))


class Piece(NamedTuple):
    """The low piece that is asked about."""

    program: Program
    operator: int  # it begins with
    seconds: float  # alone


class Guard(Record):
    """What may be done. Asked by the policy for each low job that could launch."""

    def answer(self, job: Job, now: float) -> Answer | None:
        """What it was told in this event, or before it if that stands."""
        answer = self.answers.get(job.id)
        if answer is None and self.resting:
            answer = self.standing.get(job.id)
            if answer is not None and not answer.stands(self.low_version, now):
                answer = None
        return answer

    def admit(self, job: Job, board: Board, now: float) -> float:
        """The share of the device the low job's next piece may be launched with; 0.0: it is held."""
        seconds = job.next_seconds()
        start = self._low_until if self._low_until > now and board.windows[_LOW].launches else now
        if start + self.lag + self.margin + seconds * STRETCH < self._calm:
            return 1.0
        scene = self.scene
        if self.seen != now or self._seen_version != self.version:
            scene.look(board, now)
            self.seen, self._seen_version, self._calm = now, self.version, scene.calm
        if scene.free_at + self.lag + self.margin + seconds * STRETCH < scene.calm:
            return 1.0
        step = job.head_step()
        standing = self.standing.get(job.id)
        if standing is not None and standing.step is step and standing.stands(self.low_version, now):
            self.answers[job.id] = standing
            return 0.0
        bounds = step.bounds if step.launched else step.program.bounds
        piece = Piece(step.program, bounds[step.launched], seconds)
        answer = self._place(piece, scene, now) if len(scene.running) == 1 else None
        if answer is None:
            answer = self._consider(piece, 1.0, scene, now)
            # Between steps a smaller share would only last longer.
            if scene.running and len(self.shares) > 1 and (answer.expected > FLOOR_S or answer.hold is not None):
                answer = self._best_share(piece, answer, scene, now)
            if len(scene.running) == 1 and answer.hold is not None and answer.hold.reason in PLACED:
                answer.hold = answer.hold._replace(until=self._appointment(piece, scene, now))
        self.answers[job.id] = answer
        if answer.hold is None:
            return answer.share
        answer.step, self.standing[job.id] = step, answer
        if scene.low_out and answer.hold.until == inf:
            answer.low_seen = self.low_version
        return 0.0

    def _plan(self, high: Running, piece: Piece) -> Plan:
        model, account = high.model, high.track.account
        places = model.places.get(piece.program.key)
        if places is None or len(places.pairs) < len(self.shares):
            for share in self.shares:
                places = model.pair(piece.program.on(share)).places
        assert places is not None
        track = high.track
        daring, idle = track.daring(places.pairs[0].fed), track.from_idle
        return places.plan(piece.operator, piece.seconds, account.price, account.limit(), track.steps, daring, idle)

    def _place(self, piece: Piece, scene: Scene, now: float) -> Answer | None:
        """The answer for a launch that would begin together with a high piece; None if this one would not."""
        high = scene.running[0]
        at, _, moment, _ = where(high, scene, now, self.reach)
        if moment not in MOMENTS:
            return None
        plan = self._plan(high, piece)
        place, tried = plan.at[3 * at + moment], plan.tried[3 * at + moment]
        if place is None:
            waits = self._appointment(piece, scene, now)
            return _held(Answer(1.0, piece.seconds), "tail", high.track, at, until=waits)
        answer = self._consider(piece, place.share, scene, now)
        if answer.hold is not None and not place.tried and tried is not None:
            answer = self._consider(piece, tried.share, scene, now)
        if answer.hold is not None and answer.hold.reason in PLACED:
            answer.hold = answer.hold._replace(until=self._appointment(piece, scene, now))
        return answer

    def _appointment(self, piece: Piece, scene: Scene, now: float) -> float:
        high = scene.running[0]
        return appointment(high, self._plan(high, piece), piece.seconds, scene, now, self.reach)

    def _best_share(self, piece: Piece, whole: Answer, scene: Scene, now: float) -> Answer:
        """The share that gives most low work a second, what it costs taken off; `whole` is the answer for all of it."""
        if whole.hold is not None and whole.hold.piece < 0 and whole.hold.reason in EVERYBODY:
            return whole
        best, most = whole, _worth(piece, whole, scene)
        for share in self.shares[1:]:
            other = self._consider(piece, share, scene, now)
            worth = _worth(piece, other, scene)
            if worth > most:
                best, most = other, worth
        return best

    def promoted(self, job: Job, begun: Step | None, now: float) -> None:
        """A low job, of which nothing is out, is a high one from now on. `begun`: its step of which pieces ran already; the
        whole of it tells nothing, since its beginning had nobody's care."""
        self.version += 1
        track = self.tracks[job.id] = Track(job)
        track.ended = now  # it has waited for the guard, and not for the host
        if begun is not None:
            begun.model = self._model(begun.program, begun.bounds, begun.pieces)
            track.adopt(begun.model)
            track.began, track.shared, track.beside = now, True, True
            track.account.begin(track.solo_step())

    def holds_all(self, job: Job) -> bool:
        """Whether what holds this job, just asked about, holds every low job."""
        answer = self.answers.get(job.id)
        hold = answer.hold if answer is not None else None
        return hold is not None and hold.piece < 0 and hold.reason in EVERYBODY

    def _consider(self, piece: Piece, share: float, scene: Scene, now: float) -> Answer:
        key, seconds = piece.program.on(share), piece.seconds
        answer = Answer(share, seconds / share)
        for high in scene.running:
            track = high.track
            if track.calibrating:
                return _held(answer, "calibration", track, -1)
            pair = high.model.pair(key)
            answer.beside.append((track, high.model))
            speed = pair.speed
            if share < 1.0 and not pair.known:
                speed = share * high.model.pair(piece.program.on(1.0)).speed
            alike = pair.lows.get(piece.operator)
            lasts = alike.seconds if alike is not None else seconds / (speed if speed > LEAST_SPEED else LEAST_SPEED)
            answer.seconds = lasts if alike is not None else max(answer.seconds, lasts)
            if pair.known < KNOWN and pair.known < len(pair.cells):
                if track.pieces < track.explored + 2:
                    return _held(answer, "learning", track, high.at)
                if scene.low_out:  # everybody waits, or there would always be somebody out
                    return _held(answer, "learning", track, -1)
                answer.exploring = track
            cost, ahead = self._cost(high, pair, piece, scene, lasts, answer, now)
            refused, ban = self._refused(high, pair, piece, cost, scene, answer, ahead)
            if not refused:
                answer.expected = max(answer.expected, cost.expected)
            elif scene.low_out or not may_try(
                track, self._plan(high, piece), *answer.spots[-1], ban, now, answer.exposed
            ):
                return _held(answer, refused, track, cost.piece if ban is None else cost.banned, ban)
            else:
                answer.probe, answer.probed, answer.exploring = ban, track, track
        end = scene.free_at + self.lag + self.margin + seconds * STRETCH
        for track in scene.idle:
            if end < track.soonest:
                continue
            held = self._between(track, key, piece, answer, scene, end, now)
            if held is None:
                continue
            learning = held.reason == "gap" and track.steps < LEARNING_STEPS
            if not learning or not may_try(track, None, *answer.spots[-1], None, now):
                return answer.held(held, track)
            answer.probed = answer.exploring = track
        return answer

    def _cost(
        self, high: Running, pair: Pair, piece: Piece, scene: Scene, lasts: float, answer: Answer, now: float
    ) -> tuple[Cost, bool]:
        """By the ranges it will meet, or by what launches of the same kind cost, where there were some; and whether it begins
        with the next step only."""
        refs, start, operator = high.model.refs, scene.free_at, piece.operator
        at, wraps, moment, until = where(high, scene, now, self.reach)
        spot = Spot(at, moment, operator)
        answer.spots.append((pair, spot))
        answer.exposed = 1.0 if wraps else exposed(high, at, until, start, lasts)
        places, expected, upper = pair.places, 0.0, 0.0
        known = pair.launches.get(spot)
        if known is not None:
            expected, upper = max(0.0, known.cell.mean), known.upper
        elif moment in MOMENTS and operator in places.base:
            answer.exploring = high.track
            expected = places.expected(operator, at, moment, pair.key.share)
            return Cost(expected, places.feared(operator, expected), at, -1), wraps
        else:
            known = pair.lows.get(operator)
            if known is not None:
                expected = answer.exposed * max(0.0, known.cell.mean, places.base.get(operator, 0.0))
                upper = answer.exposed * max(known.upper, known.worst, places.worst.get(operator, 0.0))
        if known is not None and (
            not pair.any_ban or (moment in MOMENTS and spot in pair.launches and known.cell.count > 1)
        ):
            return Cost(expected, max(0.0, upper), at, -1), wraps
        end = start + STRETCH * lasts
        cost = overlap_cost(refs, pair.rates, pair.uppers, pair.banned, high.at, high.until, high.more, start, end)
        if known is not None:
            return cost._replace(expected=expected, upper=max(0.0, upper)), wraps
        answer.exploring = high.track
        whole = high.model.pairs.get(piece.program.on(1.0))
        known = whole.lows.get(operator) if whole is not None else None
        if known is None:
            return cost, wraps
        # On a smaller share it costs about as much, but over more steps.
        spread = answer.exposed * (min(1.0, high.model.total / lasts) if lasts > 0.0 else 1.0)
        expected = max(0.0, answer.exposed * known.cell.mean)
        return cost._replace(expected=expected, upper=max(cost.upper, known.upper * spread)), wraps

    def _refused(
        self, high: Running, pair: Pair, piece: Piece, cost: Cost, scene: Scene, answer: Answer, ahead: bool
    ) -> tuple[str, Ban | None]:
        track = high.track
        if cost.banned >= 0 and track.steps - pair.fed < STARVED:
            return "ban", pair.cells[cost.banned].ban
        if cost.upper <= 0.0:
            return "", None
        best, plan, spot = pair.best(piece.operator, track.steps - STALE), self._plan(high, piece), answer.spots[-1][1]
        least = min(best, plan.cost)
        avoidable = cost.expected - least if least < cost.expected else 0.0
        if spot.moment in MOMENTS and (place := plan.at[3 * spot.piece + spot.moment]) is not None:
            if place.share != pair.key.share:
                place = plan.tried[3 * spot.piece + spot.moment] or place
            avoidable = (place.score - plan.score) / track.account.price
        pending = scene.pending if scene.pending > high.late else high.late
        return track.account.refuses(cost.expected, cost.upper, avoidable, pending, piece.seconds, ahead), None

    def _between(
        self, track: Track, key: PairKey, piece: Piece, answer: Answer, scene: Scene, end: float, now: float
    ) -> Hold | None:
        """Why a launch that runs until `end` has to wait for an idle job's next step."""
        gaps, since, seconds, model = track.gaps, track.idle_since, end - now, track.model
        if model is None or since is None:
            return None
        waited = now - since
        chance = gaps.arrival(waited, seconds)
        if chance <= 0.0:
            return None
        if track.calibrating and chance > SPOILS:
            clear = wait(gaps, waited, seconds, 0.0, inf, 0.0, 0.0, SPOILS)
            return Hold("calibration", track.job.id, -1, None, since + clear + ASIDE_S)
        pair, spot = model.pair(key), Spot(GAP, 3, piece.operator)
        answer.spots.append((pair, spot))
        alike = pair.lows.get(piece.operator)
        delay = pair.launches.get(spot) or alike
        if delay is None:
            return None
        worst = max(delay.upper, delay.worst)
        if alike is not None and scene.free_at > now and scene.free_at > track.soonest:
            # It would begin after the step only.
            worst = max(worst, alike.upper, pair.places.worst.get(piece.operator, 0.0))
        # A launch that is over so soon after the step came can't delay it by much more.
        most, mean, account = outlasted(end, track.soonest, now), max(0.0, delay.cell.mean), track.account
        answer.expected = max(answer.expected, min(mean, most))
        room, budget = account.limit() - scene.pending, account.balance + account.credit
        if bearable(chance, most, mean, worst, room, budget):
            return None
        if scene.low_out:  # would it have to wait with nothing before it, too?
            seconds -= scene.free_at - now
            asked, room = now + seconds, room + scene.pending
            chance, most = gaps.arrival(waited, seconds), outlasted(asked, track.soonest, now)
            if asked < track.soonest or bearable(chance, most, mean, worst, room, budget):
                return Hold("gap", track.job.id, -1, None, inf)  # until what is out has ended
        clear = wait(gaps, waited, seconds, mean, worst, room, budget)
        return Hold("gap", track.job.id, -1, None, since + clear + ASIDE_S)

    def settled(self, now: float) -> float:
        """After an event: note who is held and why. When to look again, at the latest; inf: an event will come."""
        held = [(job, answer.hold) for job, answer in self.answers.items() if answer.hold is not None]
        self.holds.note(held, now)
        if self.asked is not None:
            self.rest = Rest(*self.asked, self.low_version, self.answers.values())
        wake = inf
        for _, hold in held:
            if hold.until < wake:
                wake = hold.until
            if hold.reason in PINCHING:
                self._pinched = True
                if hold.reason == "budget" and hold.high in self.tracks:
                    self.tracks[hold.high].account.short = True
        return wake


def _held(answer: Answer, reason: str, track: Track, piece: int, ban: Ban | None = None, until: float = inf) -> Answer:
    return answer.held(Hold(reason, track.job.id, piece, ban, until), track)


def _worth(piece: Piece, answer: Answer, scene: Scene) -> float:
    """Low seconds gained in a second of the launch; a high second is worth at least two low ones."""
    if answer.hold is not None:
        return -inf
    price = max([LEAST_PRICE, *[high.track.account.price for high in scene.running]])
    return piece.seconds - price * answer.expected - WORTH_S * answer.seconds
