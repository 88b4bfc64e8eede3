"""The guard: whether low work may run now beside the high jobs, on which share of the device, and why not.

It sees every launch and its end, and decides by what it measured: solo baselines (`baseline.py`),
what each low program costs each range of each high program (`costs.py`, `attribution.py`), when ranges
and steps come (`arrivals.py`), what each high job may still lose and what that should buy
(`budget.py`), and what was found to hurt (`costs.py`). `admit` changes nothing but a note of its
answer, which `launched` and `settled` take up.
"""

from __future__ import annotations

from math import inf
from typing import Final

from gpumux.scheduler.guard.answers import Answer, Hold, Rest
from gpumux.scheduler.guard.arrivals import Cost, overlap_cost
from gpumux.scheduler.guard.costs import FLOOR_S, GAP, KNOWN, MOMENTS, WORTH_S, Ban, Pair, Place, Plan, Spot
from gpumux.scheduler.guard.high_job import LEARNING_STEPS, LEAST_PRICE, STARVED, Track
from gpumux.scheduler.guard.learning import LEAST_SPEED, Record
from gpumux.scheduler.guard.scene import Running, Scene
from gpumux.scheduler.guard.timing import (
    appointment,
    between,
    exposed,
    foreseen,
    may_look,
    may_risk,
    may_try,
    next_loses,
    where,
)
from gpumux.scheduler.jobs import Job, PairKey, Piece, Span, Step
from gpumux.scheduler.windows import Board
from gpumux.types import Priority

# ---- Who the guard holds, and until when: what it said of a low job's next piece, for as long as that stands.


EVERYBODY: Final = frozenset(("calibration", "learning"))  # reasons to hold all, where they name no piece
PINCHING: Final = frozenset(("tail", "next", "price", "budget"))


class Waiting(Record):
    """What was answered. Nobody is asked again whom nothing new can free."""

    def answer(self, job: Job, now: float) -> Answer | None:
        """What it was told in this event, or before it if that stands."""
        answer = job.held
        if answer is None or answer in self.answers:
            return answer
        return answer if self.resting and answer.stands(self.low_version, now) else None

    def _hold(self, job: Job, answer: Answer) -> None:
        """This is the answer; what the job was told earlier in the event is not."""
        told, before = self.answers, job.held
        job.held = answer
        if told and before is not None:
            for at in range(len(told)):
                if told[at] is before:
                    told[at] = answer
                    return
        told.append(answer)

    def recut(self, job: Job) -> None:
        """A program of the job has come, or is cut another way: what was said of its pieces is of others."""
        if job.held is not None:
            self.unheld(job)
            self.rest = None

    def waits(self, job: Job) -> None:
        """A client waits for a step of the job. Where it is held for the sake of an idle high job that comes only after
        it, that is no longer so; any other answer stands."""
        track = job.held.track if job.held is not None else None
        if track is not None and track.after is job and track.idle_since < inf:
            self.unheld(job)
        self.rest = None  # it may not have been asked at all

    def holds_all(self, job: Job) -> bool:
        """Whether what holds this job, just asked about, holds every low job."""
        answer = job.held
        hold = answer.hold if answer is not None else None
        return hold is not None and hold.piece < 0 and hold.reason in EVERYBODY

    def settled(self, now: float) -> float:
        """After an event: note who is held and why. When to look again, at the latest; inf: an event will come."""
        wake, reason, holds = inf, "", self.holds
        rest: Rest | None = None
        first = self.asked
        if first is not None:
            rest = self._rest
            if rest is None:
                rest = self._rest = Rest(first, self.entered, self.low_version)
            else:
                rest.begin(first, self.entered, self.low_version)
        for answer in self.answers:
            job, hold = answer.job, answer.hold
            assert job is not None
            assert hold is not None
            if job.hold is not hold:
                holds.hold(job, hold, now)
            if hold.until < wake:
                wake = hold.until
            if not reason:
                reason = hold.reason
            if hold.reason in PINCHING:
                self._pinched = True
                if hold.reason == "budget" and answer.track is not None:
                    answer.track.account.short = True
            if rest is not None:
                rest.add(answer)
        holds.note(reason, now)
        if rest is not None:
            rest.until, rest.partial, self.rest = wake, self.partial, rest
        return wake


# ----


_LOW: Final = Priority.LOW

STRETCH: Final = 1.02  # of a low piece's predicted time: where it is taken to end
STALE: Final = 128  # steps after which what a launch costs elsewhere is no longer waited for
PLACED: Final = frozenset(("tail", "next", "price", "budget", "ban"))  # what another moment may be free of


class Guard(Waiting):
    """What may be done. Asked by the policy for each low job that could launch."""

    def admit(self, job: Job, board: Board, now: float) -> float:
        """The share of the device the low job's next piece may be launched with; 0.0: it is held."""
        step = job.head_step()
        at, program = step.launched, step.program
        seconds, span = (step.pieces[at], step.spans[at]) if at else (program.pieces[0], program.spans[0])
        takes = self.lag + self.margin + seconds * STRETCH
        start = self._low_until if self._low_until > now and board.low.launches else now
        if start + takes < self._calm:
            return 1.0
        held = job.held
        if held is not None and (held.step is not step or not held.stands(self.low_version, now)):
            held = None
        if held is not None and now < held.soonest:  # nor does it end before that step by now
            self._hold(job, held)
            return 0.0
        self.asking = job
        scene = self.scene
        if self.seen != now or self._seen_version != self.version:
            scene.look(board, now)
            self.seen, self._seen_version, self._calm = now, self.version, scene.calm
        end = scene.free_at + takes
        if end < scene.calm:
            return 1.0
        if held is not None:
            self._hold(job, held)
            return 0.0
        if scene.running:
            answer = self._beside(program.piece(span, seconds), scene, now)
        else:
            answer = Answer(1.0, seconds)
            if scene.idle:
                self._between(answer, program.whole, span, scene, end, now)
        if answer.hold is None:
            self.admitted = answer
            return answer.share
        answer.job, answer.step = job, step
        self._hold(job, answer)
        track = answer.track
        assert track is not None
        if answer.need < track.awaited:
            track.awaited = answer.need
        if scene.low_out and answer.hold.until == inf:
            answer.low_seen = self.low_version
        return 0.0

    def _beside(self, piece: Piece, scene: Scene, now: float) -> Answer:
        """The answer while high work runs."""
        for high in scene.running:
            if not may_risk(high.track) and high.model.never(piece.program.key, piece.span):
                return Answer(1.0, piece.seconds).untried(high.track, high.at)
        alone = scene.running[0] if len(scene.running) == 1 else None
        answer = self._place(alone, piece, scene, now) if alone is not None else None
        if answer is None:
            answer = self._consider(piece, 1.0, scene, now)
            # Between steps a smaller share would only last longer.
            if len(self.shares) > 1 and (answer.expected > FLOOR_S or answer.hold is not None):
                answer = self._best_share(piece, answer, scene, now)
            if alone is not None and answer.hold is not None and answer.hold.reason in PLACED:
                answer.hold.until = appointment(alone, self._plan(alone, piece), scene, now, self.reach)
        return answer

    def _between(self, answer: Answer, key: PairKey, span: Span, scene: Scene, end: float, now: float) -> None:
        """Whether what runs until `end` has to wait for the next step of a job that is idle."""
        latest: Hold | None = None
        for track in scene.idle:
            if track.after is not None and self._comes_after(track):
                continue
            soonest = foreseen(track, key)
            if end < soonest:
                answer.trusting = True
                continue
            held = between(track, key, span, answer, scene, end, soonest, now)
            if held is None:
                continue
            learning = held.reason == "gap" and track.steps < LEARNING_STEPS and may_look(track)
            model = track.model
            if learning and model is not None and may_try(track, None, model.pair(key), (GAP, 3, span), None, now):
                answer.probed = answer.exploring = track
            elif latest is None or held.until > latest.until:  # before that it would be asked in vain
                latest = held
                answer.held(held, track)
                answer.soonest = 0.0 if track.gaps.erratic else soonest

    def _comes_after(self, track: Track) -> bool:
        """Whether the idle job's next step comes only after the low step that is asked about."""
        job = self.asking
        return job is not None and track.after is job and job.head_step().id <= track.after_step

    def _plan(self, high: Running, piece: Piece) -> Plan:
        if high.asked is piece:
            assert high.plan is not None
            return high.plan
        model, account = high.model, high.track.account
        places = model.places.get(piece.program.key)
        if places is None or len(places.pairs) < len(self.shares):
            for share in self.shares:
                places = model.pair(piece.program.on(share)).places
        assert places is not None
        track = high.track
        daring, idle = track.daring(places.fed), track.from_idle
        plan = places.plan(
            piece.span, piece.seconds, account.price, account.limit, track.steps, daring, idle, model.refs, track.pause(),
        )  # fmt: skip
        high.asked, high.plan = piece, plan
        return plan

    def _place(self, high: Running, piece: Piece, scene: Scene, now: float) -> Answer | None:
        """The answer for a launch that would begin together with a high piece; None if this one would not."""
        at, wraps, moment, _ = high.where or where(high, scene, now, self.reach)
        if moment not in MOMENTS:
            return None
        plan, index = self._plan(high, piece), 3 * at + moment
        place = plan.at[index]
        if place is None or (place.tried and not wraps and self._spent(high, place, piece, scene)):
            until = appointment(high, plan, scene, now, self.reach)
            at_end = at == len(high.model.refs)
            reason, beside = ("gap", -1) if at_end else ("tail", at)
            answer = Answer(1.0, piece.seconds).refused(reason, high.track, beside, None, until)
        else:
            tried = plan.tried[index]
            answer = self._consider(piece, place.share, scene, now)
            if answer.hold is not None and not place.tried and tried is not None:
                answer = self._consider(piece, tried.share, scene, now)
            if answer.hold is None or answer.hold.reason not in PLACED:
                return answer
            until = appointment(high, plan, scene, now, self.reach)
            if until < inf:
                answer.hold.until = until
        if until == inf and not wraps:
            answer.need = plan.rest(index)
        return answer

    def _spent(self, high: Running, place: Place, piece: Piece, scene: Scene) -> bool:
        """Whether what the step may still lose is less than a launch at the place was seen to cost, and nothing else
        matters."""
        track = high.track
        pending = scene.pending if scene.pending > high.late else high.late
        if track.account.used + pending + place.upper <= track.account.limit or track.calibrating:
            return False
        return not high.model.pair(piece.program.on(place.share)).any_ban

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
        """A low job, of which nothing is out, is a high one from now on. `begun`: its step of which pieces ran already;
        the whole of it tells nothing, since its beginning had nobody's care."""
        self.version += 1
        track = job.track = self.tracks[job.id] = Track(job)
        track.ended = now  # it has waited for the guard, and not for the host
        if begun is not None:
            begun.model = self.models.of(begun.program.key, begun.bounds, begun.pieces, self.tracks)
            track.adopt(begun.model)
            track.began, track.shared, track.beside = now, True, True
            track.account.begin(track.solo_step())

    def _consider(self, piece: Piece, share: float, scene: Scene, now: float) -> Answer:
        key, seconds = piece.program.on(share), piece.seconds
        answer = Answer(share, seconds / share)
        answer.beside = scene.running
        for high in scene.running:
            track, model = high.track, high.model
            if track.calibrating:
                return answer.refused("calibration", track, -1)
            pair = model.pair(key)
            speed = pair.speed
            if share < 1.0 and not pair.known:
                speed = share * model.pair(piece.program.whole).speed
            alike = pair.lows.get(piece.span)
            lasts = alike.seconds if alike is not None else seconds / (speed if speed > LEAST_SPEED else LEAST_SPEED)
            answer.seconds = lasts if alike is not None else max(answer.seconds, lasts)
            if pair.known < KNOWN and pair.known < len(pair.cells):
                if track.pieces < track.explored + 2:
                    return answer.refused("learning", track, high.at)
                if scene.low_out:  # everybody waits, or there would always be somebody out
                    return answer.refused("learning", track, -1)
                answer.exploring = track
            cost, ahead, spot = self._cost(high, pair, piece, scene, lasts, answer, now)
            if answer.unknown and not may_risk(track):
                return answer.untried(track, high.at)
            refused, ban = self._refused(high, pair, piece, cost, scene, spot, ahead)
            start = scene.free_at
            if not refused and next_loses(high, pair.cells, start, start + STRETCH * lasts) > track.account.limit:
                refused = "next"
            if not refused:
                answer.expected = max(answer.expected, cost.expected)
            elif scene.low_out or not may_try(track, self._plan(high, piece), pair, spot, ban, now, answer.exposed):
                return answer.refused(refused, track, cost.piece if ban is None else cost.banned, ban)
            else:
                answer.probe, answer.probed, answer.exploring = ban, track, track
        if scene.idle:
            self._between(
                answer, key, piece.span, scene, scene.free_at + (self.lag + self.margin + seconds * STRETCH), now
            )
        return answer

    def _cost(
        self, high: Running, pair: Pair, piece: Piece, scene: Scene, lasts: float, answer: Answer, now: float
    ) -> tuple[Cost, bool, Spot]:
        """By the ranges it will meet, or by what launches of the same kind cost, where there were some; whether it
        begins with the next step only; and where."""
        refs, start, span = high.model.refs, scene.free_at, piece.span
        at, wraps, moment, until = high.where or where(high, scene, now, self.reach)
        spot = (at, moment, span)
        if answer.spots is None:
            answer.spots = [(pair, spot)]
        else:
            answer.spots.append((pair, spot))
        answer.exposed = 1.0 if wraps and at < len(refs) else exposed(high, at, until, start, lasts)
        places, expected, upper = pair.places, 0.0, 0.0
        known = pair.launches.get(spot)
        if known is not None:
            expected, upper = max(0.0, known.mean), known.upper
        elif moment in MOMENTS and places.of(span).learned:
            answer.exploring = high.track
            expected = places.expected(span, at, moment, pair.effects) * (answer.exposed if at == len(refs) else 1.0)
            return Cost(expected, places.feared(span, expected), at, -1), wraps, spot
        else:
            known = pair.lows.get(span)
            if known is not None:
                expected = answer.exposed * max(0.0, known.mean, places.of(span).base)
                upper = answer.exposed * max(known.upper, known.worst, places.of(span).worst)
        if known is not None and (
            not pair.any_ban or (moment in MOMENTS and spot in pair.launches and known.count > 1)
        ):
            return Cost(expected, max(0.0, upper), at, -1), wraps, spot
        end = start + STRETCH * lasts
        cost = overlap_cost(refs, pair.cells, high.at, high.until, high.more, start, end)
        if known is not None:
            cost.expected, cost.upper = expected, max(0.0, upper)
            return cost, wraps, spot
        answer.exploring = high.track
        whole = high.model.pairs.get(piece.program.whole)
        known = whole.lows.get(span) if whole is not None else None
        if known is None:
            answer.unknown = True
            return cost, wraps, spot
        # On a smaller share it costs about as much, but over more steps.
        spread = answer.exposed * (min(1.0, high.model.total / lasts) if lasts > 0.0 else 1.0)
        expected = max(0.0, answer.exposed * known.mean)
        cost.expected, cost.upper = expected, max(cost.upper, known.upper * spread)
        return cost, wraps, spot

    def _refused(
        self, high: Running, pair: Pair, piece: Piece, cost: Cost, scene: Scene, spot: Spot, ahead: bool
    ) -> tuple[str, Ban | None]:
        track = high.track
        if cost.banned >= 0 and track.steps - pair.places.fed < STARVED:
            return "ban", pair.cells[cost.banned].ban
        if cost.upper <= 0.0:
            return "", None
        account, pending = track.account, scene.pending if scene.pending > high.late else high.late
        if (cost.upper if ahead else account.used + pending + cost.upper) > account.limit:
            return "tail", None  # as `refuses` would say: nothing else matters then
        best, plan = pair.best(piece.span, track.steps - STALE), self._plan(high, piece)
        at, moment, _ = spot
        least = min(best, plan.cost)
        avoidable = cost.expected - least if least < cost.expected else 0.0
        if moment in MOMENTS and (place := plan.at[3 * at + moment]) is not None:
            if place.share != pair.share:
                place = plan.tried[3 * at + moment] or place
            avoidable = (place.score - plan.score) / account.price
        return account.refuses(cost.expected, cost.upper, avoidable, pending, piece.seconds, ahead), None


def _worth(piece: Piece, answer: Answer, scene: Scene) -> float:
    """Low seconds gained in a second of the launch; a high second is worth at least two low ones."""
    if answer.hold is not None:
        return -inf
    price = max([LEAST_PRICE, *[high.track.account.price for high in scene.running]])
    return piece.seconds - price * answer.expected - WORTH_S * answer.seconds
