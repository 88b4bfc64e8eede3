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
from gpumux.core.bans import PROBE_EVERY, Ban
from gpumux.core.board import Board, PairKey
from gpumux.core.cells import CREDIBLE, FLOOR_S, GAP, Spot
from gpumux.core.estimates import Pair
from gpumux.core.holds import Hold
from gpumux.core.lookahead import Cost, overlap_cost
from gpumux.core.lull import Risk, outlasted, wait
from gpumux.core.queue import Job
from gpumux.core.record import KNOWN, LEAST_SPEED, Record
from gpumux.core.scene import Idle, Running, Scene
from gpumux.core.track import LEARNING_STEPS, Track
from gpumux.model import Priority

_LOW = Priority.LOW

STRETCH = 1.02  # of a low piece's predicted time: where it is taken to end
SPOILS = 0.05  # an arrival less probable is no reason to keep the device free for a calibration
HOPELESS = 1.25  # times what a step may lose: a piece that costs more wherever it was tried is not tried again
STARVED = 16  # steps without low work: from then on a ban gives way where the loss is known and bearable
STALE = 128  # steps after which what a launch costs elsewhere is no longer waited for
LEAST_PRICE = 2.0  # low seconds for a high second, where a smaller share would do
LEAST_S = 100e-6  # a launch is taken to last, where shares are compared
EVERYBODY = frozenset(("calibration", "learning"))  # reasons to hold all, where they name no piece
LONG = frozenset(("tail", "gap", "ban"))
PINCHING = frozenset(("tail", "price", "budget"))


class Piece(NamedTuple):
    """The low piece that is asked about."""

    program: str
    operator: int  # it begins with
    seconds: float  # alone


class Guard(Record):
    """What may be done. Asked by the policy for each low job that could launch."""

    def new_event(self) -> None:
        self.resting, self.asked = False, None
        if self.answers:
            self.answers.clear()

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
        if self._seen != now or self._seen_version != self.version:
            scene.look(board, now)
            self._seen, self._seen_version, self._calm = now, self.version, scene.calm
        if scene.free_at + self.lag + self.margin + seconds * STRETCH < scene.calm:
            return 1.0
        step = job.head_step()
        standing = self.standing.get(job.id)
        if standing is not None and standing.step is step and standing.stands(self.low_version, now):
            self.answers[job.id] = standing
            return 0.0
        bounds = step.bounds if step.launched else step.program.bounds
        piece = Piece(step.program.key, bounds[step.launched], seconds)
        answer = self._consider(piece, 1.0, scene, now)
        # Between steps a smaller share would only last longer.
        if scene.running and len(self.shares) > 1 and (answer.expected > FLOOR_S or answer.hold is not None):
            answer = self._best_share(piece, answer, scene, now)
        self.answers[job.id] = answer
        if answer.hold is None:
            return answer.share
        answer.step, self.standing[job.id] = step, answer
        if scene.low_out and answer.hold.until == inf:
            answer.low_seen = self.low_version
        return 0.0

    def rests(self, first: Job, entered: int, now: float) -> bool:
        """Whether all who were asked last are still held, and there is nobody else to ask. `entered`: who became ready."""
        rest = self.rest
        if rest is None or not rest.lasts(first, entered, self.low_version, now):
            return False
        self.resting, self.rest_until = True, rest.until
        return True

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

    def holds_all(self, job: Job) -> bool:
        """Whether what holds this job, just asked about, holds every low job."""
        answer = self.answers.get(job.id)
        hold = answer.hold if answer is not None else None
        return hold is not None and hold.piece < 0 and hold.reason in EVERYBODY

    def _consider(self, piece: Piece, share: float, scene: Scene, now: float) -> Answer:
        key, seconds = PairKey(piece.program, share), piece.seconds
        answer = Answer(share, seconds / share)
        for high in scene.running:
            track = high.track
            if track.calibrating:
                return _held(answer, "calibration", track, -1)
            pair = high.model.pair(key)
            answer.beside.append((track, high.model))
            speed = pair.speed
            if share < 1.0 and not pair.known:
                speed = share * high.model.pair(PairKey(piece.program, 1.0)).speed
            alike = pair.lows.get(piece.operator)
            lasts = alike.seconds if alike is not None else seconds / (speed if speed > LEAST_SPEED else LEAST_SPEED)
            answer.seconds = lasts if alike is not None else max(answer.seconds, lasts)
            if pair.known < KNOWN and pair.known < len(pair.cells):
                if track.pieces < track.explored + 2:
                    return _held(answer, "learning", track, high.at)
                if scene.low_out:  # everybody waits, or there would always be somebody out
                    return _held(answer, "learning", track, -1)
                answer.exploring = track
            cost = self._cost(high, pair, piece.operator, scene.free_at, lasts, answer)
            refused, ban = self._refused(high, pair, piece, cost, scene)
            if not refused:
                answer.expected = max(answer.expected, cost.expected)
            elif scene.low_out or not self._may_try(track, *answer.spots[-1], ban, now, answer.exposed):
                return _held(answer, refused, track, cost.piece if ban is None else cost.banned, ban)
            else:
                answer.probe, answer.probed, answer.exploring = ban, track, track
        end = scene.free_at + self.lag + self.margin + seconds * STRETCH
        for idle in scene.idle:
            if end < idle.soonest:
                continue
            held = self._between(idle, key, piece, answer, scene, end, now)
            if held is None:
                continue
            track = idle.track
            learning = held.reason == "gap" and track.steps < LEARNING_STEPS
            if not learning or not self._may_try(track, *answer.spots[-1], None, now):
                return answer.held(held, track)
            answer.probed = answer.exploring = track
        return answer

    def _cost(self, high: Running, pair: Pair, operator: int, start: float, lasts: float, answer: Answer) -> Cost:
        """By the ranges it will meet, or by what launches of the same kind cost, where there were some."""
        refs = high.model.refs
        at, began, until = high.at, high.began, high.until
        while start > until and at + 1 < len(refs):
            at, began, until = at + 1, until, until + refs[at + 1]
        spot = Spot(at, int(2 * (start - began) >= until - began), operator)
        answer.spots.append((pair, spot))
        answer.exposed = _exposed(high, at, until, start, lasts)
        known, part = pair.launches.get(spot), 1.0
        upper = 0.0
        if known is None:
            known, part = pair.lows.get(operator), answer.exposed
            upper = known.worst if known is not None else 0.0
        if known is not None:
            upper = part * max(known.upper, upper)
            if not pair.any_ban:
                return Cost(max(0.0, part * known.cell.mean), max(0.0, upper), at, -1)
        end = start + STRETCH * lasts
        cost = overlap_cost(refs, pair.rates, pair.uppers, pair.banned, high.at, high.until, high.more, start, end)
        if known is not None:
            return cost._replace(expected=max(0.0, part * known.cell.mean), upper=max(0.0, upper))
        answer.exploring = high.track
        whole = high.model.pairs.get(PairKey(pair.key.low, 1.0))
        known = whole.lows.get(operator) if whole is not None else None
        if known is None:
            return cost
        # On a smaller share it costs about as much, but over more steps.
        spread = answer.exposed * (min(1.0, high.model.total / lasts) if lasts > 0.0 else 1.0)
        expected = max(0.0, answer.exposed * known.cell.mean)
        return cost._replace(expected=expected, upper=max(cost.upper, known.upper * spread))

    def _refused(self, high: Running, pair: Pair, piece: Piece, cost: Cost, scene: Scene) -> tuple[str, Ban | None]:
        track = high.track
        if cost.banned >= 0 and track.steps - pair.fed < STARVED:
            return "ban", pair.cells[cost.banned].ban
        if cost.upper <= 0.0:
            return "", None
        best = pair.best(piece.operator, track.steps - STALE)
        avoidable = cost.expected - best if best < cost.expected else 0.0
        pending = scene.pending if scene.pending > high.late else high.late
        return track.account.refuses(cost.expected, cost.upper, avoidable, pending, piece.seconds), None

    def _may_try(self, track: Track, pair: Pair, spot: Spot, ban: Ban | None, now: float, exposed: float = 1.0) -> bool:
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
            hopeless = exposed * alike.peak > HOPELESS * track.account.limit()
            if hopeless:
                return False
        return learning or track.steps - pair.fed >= STARVED or track.steps - track.probed >= PROBE_EVERY

    def _between(
        self, idle: Idle, key: PairKey, piece: Piece, answer: Answer, scene: Scene, end: float, now: float
    ) -> Hold | None:
        """Why a launch that runs until `end` has to wait for an idle job's next step."""
        track, waited, seconds = idle.track, now - idle.since, end - now
        chance, model = track.gaps.arrival(waited, seconds), track.model
        if chance <= 0.0 or model is None:
            return None
        if track.calibrating and chance > SPOILS:
            return _wait("calibration", idle, Risk(seconds, 0.0, inf, 0.0, 0.0, SPOILS), now)
        pair, spot = model.pair(key), Spot(GAP, 0, piece.operator)
        answer.spots.append((pair, spot))
        delay = pair.launches.get(spot) or pair.lows.get(piece.operator)
        if delay is None:
            return None
        # A launch that is over so soon after the step came can't delay it by much more.
        most, mean = outlasted(end, idle.soonest, now), max(0.0, delay.cell.mean)
        answer.expected = max(answer.expected, min(mean, most))
        account = track.account
        worst, room = max(delay.upper, delay.worst), account.limit() - scene.pending
        risk = Risk(seconds, mean, worst, room, account.balance + account.credit)
        if risk.bearable(chance, most):
            return None
        if scene.low_out:  # would it have to wait with nothing before it, too?
            seconds -= scene.free_at - now
            risk = risk._replace(seconds=seconds, room=room + scene.pending)
            chance, most = track.gaps.arrival(waited, seconds), outlasted(now + seconds, idle.soonest, now)
            if now + seconds < idle.soonest or risk.bearable(chance, most):
                return Hold("gap", track.job.id, -1, None, inf)  # until what is out has ended
        return _wait("gap", idle, risk, now)

    def settled(self, now: float) -> float:
        """After an event: note who is held and why. When to look again, at the latest; inf: an event will come."""
        held = [(job, answer.hold) for job, answer in self.answers.items() if answer.hold is not None]
        self.holds.note(held, now)
        if self.asked is not None:
            self.rest = Rest(*self.asked, self.answers.values())
        wake = inf
        for _, hold in held:
            if hold.until < wake:
                wake = hold.until
            if hold.reason in PINCHING:
                self._pinched = True
                if hold.reason == "budget" and hold.high in self.tracks:
                    self.tracks[hold.high].account.short = True
        return wake

    def starved_steps(self, job: Job) -> int:
        """Steps of the high job that holds this low one since it was last launched."""
        hold, since = self.holds.newest.get(job.id), self.holds.since.get(job.id)
        track = self.tracks.get(hold.high) if hold is not None else None
        if track is None or since is None or track.solo_step() <= 0.0:
            return 0
        return int((self._seen - since) / track.solo_step())

    def too_long(self, job: Job) -> tuple[float, float] | None:
        """(seconds of its next piece, seconds that would fit) for a low job whose pieces hinder it from running."""
        hold = self.holds.newest.get(job.id)
        if hold is None or hold.reason not in LONG or job.blocked() or self.starved_steps(job) < STARVED:
            return None
        track = self.tracks.get(hold.high)
        if track is None or track.model is None:
            return None
        step, seconds = job.head_step(), job.next_seconds()
        bounds = step.bounds if step.launched else step.program.bounds
        pair = track.model.pairs.get(PairKey(step.program.key, 1.0))
        known = pair.lows.get(bounds[step.launched]) if pair is not None else None
        fits = track.gaps.short
        if known is not None and known.peak > 0.0:  # what it costs is about in proportion to its length
            fits = max(fits, seconds * track.account.limit() / known.upper)
        return (seconds, fits) if fits < seconds else None


def _held(answer: Answer, reason: str, track: Track, piece: int, ban: Ban | None = None) -> Answer:
    return answer.held(Hold(reason, track.job.id, piece, ban, inf), track)


def _wait(reason: str, idle: Idle, risk: Risk, now: float) -> Hold:
    """Until the answer may be another one, as long as nothing happens."""
    until = idle.since + wait(idle.track.gaps, now - idle.since, risk)
    return Hold(reason, idle.track.job.id, -1, None, until)


def _exposed(high: Running, at: int, until: float, start: float, lasts: float) -> float:
    """The part of a launch from `start` on, beside piece `at` that ends at `until`, that the high job is there to feel: the rest
    falls between its steps."""
    pause = high.track.gaps.short
    if high.more or pause <= 0.0 or lasts <= 0.0:
        return 1.0
    leaves = until + sum(high.model.refs[at + 1 :])
    beyond = start + lasts - leaves
    if beyond <= 0.0:
        return 1.0
    return min(1.0, (max(0.0, leaves - start) + max(0.0, beyond - pause)) / lasts)


def _worth(piece: Piece, answer: Answer, scene: Scene) -> float:
    """Low seconds gained in a second of the launch; a high second is worth at least two low ones."""
    if answer.hold is not None:
        return -inf
    price = max([LEAST_PRICE, *[high.track.account.price for high in scene.running]])
    return (piece.seconds - price * answer.expected) / max(answer.seconds, LEAST_S)
