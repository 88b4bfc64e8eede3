"""What the guard remembers: every launch and its end, what each cost, and what follows from that.

Solo baselines and estimates (`costs.py`) are learned here, ranges are banned and freed
(`costs.py`), and each high job's account is kept (`high_job.py`). What may be done is asked elsewhere
(`guard.py`).
"""

from __future__ import annotations

from collections.abc import Collection
from math import inf
from typing import Final

from gpumux.scheduler.awaited import Awaited
from gpumux.scheduler.config import CoreConfig
from gpumux.scheduler.guard import attribution
from gpumux.scheduler.guard.answers import Answer, Holds, Rest
from gpumux.scheduler.guard.costs import CREDIBLE, Ban, Bans, HighModel, Why
from gpumux.scheduler.guard.cutting import DEFAULT_TARGET_S, Cutting
from gpumux.scheduler.guard.high_job import Models, Track
from gpumux.scheduler.guard.scene import Scene
from gpumux.scheduler.jobs import Job, JobState, Step
from gpumux.scheduler.windows import Board, Launch
from gpumux.types import DeviceInfo, JobId, Priority

# ---- Whether low work is to be banned beside a range, or freed again: after each step that shows what it cost.


LEAST_SPEED: Final = 0.05
WORSE: Final = 3.0  # times what other ranges cost: a range that does is banned


def judge(bans: Bans, model: HighModel, track: Track, low: Launch, piece: int, now: float) -> None:
    """After a step: is low work of this kind to be banned beside the range, or to be freed again?"""
    pair, account = model.pair(low.key), track.account
    cell = pair.cells[piece]
    ban = cell.ban
    if not cell.to_judge(account.slack):
        return
    now_run = track.model
    if now_run is not None and now_run is not model and now_run.key == model.key:  # under another cut by now
        return
    rate = cell.newest if ban is not None else min(cell.mean, cell.median)
    rate = max(rate, 0.0)
    ratio = 1.0 / (1.0 - rate)
    length = min(min(low.step.pieces) / max(cell.speed, pair.speed, LEAST_SPEED), model.refs[piece] * ratio)
    why: Why | None = None
    if ratio > 1.0 + account.slack and length * rate > account.limit:
        why = "tail"
    elif ratio > 1.0 + account.slack and pair.known > 1 and rate > WORSE * pair.elsewhere(piece) + account.slack:
        why = "price"
    if ban is None:
        if why and cell.count >= CREDIBLE:
            operators = (model.bounds[piece], model.bounds[piece + 1])
            low_id, share = low.job.id, low.key.share
            cell.ban = Ban(track.job.id, low_id, operators, share, ratio, cell.count, why, now, now, program=model.key)
            bans.impose(cell.ban, model.total)
    elif why:
        ban.ratio, ban.samples = ratio, ban.samples + 1
        bans.lengthen(ban, now, model.total)
    else:
        bans.lift(ban)
        cell.ban = None
        cell.restart()
        cell.add(rate)
    pair.restate(piece)


def recut(bans: Bans, high: JobId, model: HighModel, cuts: Collection[HighModel]) -> None:
    """The high job runs `model` from now on, one of `cuts` of the same program. A ban that is none there would never be
    probed."""
    if len(cuts) == 1:
        return
    mine = [ban for ban in bans.active if ban.high == high and ban.program == model.key]
    if mine:
        still = model.bans()
        for ban in mine:
            if ban not in still:
                bans.lift(ban)
    for cut in cuts:
        cut.unban()


# ----


_LOW: Final = Priority.LOW
_HIGH: Final = Priority.HIGH
MOST_MARGIN_S: Final = 1e-3
MOST_REACH_S: Final = 1e-3
REACH_PART: Final = 0.1
MARGIN_FADES: Final = 0.996  # for each step of a high job
ADAPT_EVERY: Final = 16  # steps


class Record:
    """What happened. Told by the machine, for every launch of either class."""

    # A dict of more than 30 attributes has no fast way to them.
    __slots__ = (
        "_calm", "_last_end", "_last_high", "_low_heard", "_low_until", "_other_high", "_pinched", "_rest", "_seen_version", "_touched", "admitted",
        "answers", "asked", "asking", "awaited",
        "bans", "cutting", "entered", "harvested", "holds", "idle", "lag", "low_version", "margin", "models",
        "narrow", "partial", "reach", "recent", "rest", "resting", "scene", "seen", "shares", "tracks", "version", "wide", "width",
    )  # fmt: skip

    def __init__(self, config: CoreConfig, info: DeviceInfo) -> None:
        self.shares = info.shares
        self.narrow, self.wide = config.low_launches, config.low_idle_launches
        self.width = self.narrow  # low launches outstanding beside a high job
        self.cutting = Cutting(info.piece_target_s.get("low", DEFAULT_TARGET_S))
        self.models = Models()
        self.tracks: dict[JobId, Track] = {}
        self.idle: list[Track] = []  # high jobs between steps, those longest so first
        self.bans = Bans()
        self.holds = Holds()
        self.recent = attribution.Recent()
        self.awaited = Awaited()
        self.asking: Job | None = None  # the job the newest question was about
        self.answers: list[Answer] = []  # of this event: who is held, and why
        self.admitted: Answer | None = None  # of the launch that is being made, where there was a question
        self.harvested = 0.0  # device seconds of low work beside high jobs or in their gaps
        self._touched: list[tuple[HighModel, Track, Launch, int]] = []
        self.lag = 0.0  # seconds from launching a low piece to its start, with nothing before it
        self.reach = 0.0  # seconds from launching a low piece to the moment the device begins with it
        self.margin = 0.0  # seconds by which launches that should have ended before a step did not, lately
        self.version = 0  # of what an answer depends on, but for the time
        self.low_version = 0  # of low launches that are out
        self.scene = Scene(self.idle, self.recent.launches)  # of the version and time `seen`
        self.seen, self._seen_version = -1.0, 0
        self.asked: Job | None = None  # the first of those who were all asked in this event, and held
        self.entered, self.partial = 0, False  # who was ever ready by then; low work was out, so nobody else was asked
        self.rest: Rest | None = None
        self._rest: Rest | None = None  # the same, to be used again
        self.resting = False  # who was held before this event still is, and nobody was asked
        self._calm = 0.0  # until then a low launch meets no high work, as long as none comes
        self._low_until = 0.0  # when the newest low launch should be over
        self._low_heard = 0.0  # when anything last began or ended of it
        self._pinched = False  # low work had to wait for what high work may lose
        self._last_high: Job | None = None  # who ended last
        self._last_end = 0.0  # and when
        self._other_high = 0.0  # when somebody else ended last

    def submitted(self, job: Job, step: Step, waited: float, now: float) -> None:
        """A step of a high job was queued, having lain unseen for `waited` seconds."""
        self.version += 1
        self._calm = 0.0
        track = job.track
        if track is not None and track.idle_since < inf:
            self.scene.came(track)
            track.came(step, waited, now, self._low_heard)

    def paused(self, job: Job, now: float) -> None:
        """The job was paused or resumed."""
        self.holds.freed(job, now)
        track = job.track
        if track is not None:
            self.version += 1
            self._calm = 0.0
            track.changed()
            self.scene.changed()

    def unheld(self, job: Job) -> None:
        """What was said of its next piece is no longer so."""
        if self.answers and job.held in self.answers:
            self.answers.remove(job.held)
        job.held = None

    def launched(self, launch: Launch, board: Board, now: float) -> None:
        self.version += 1
        launch.began = launch.at = now
        if launch.job.priority is _HIGH:
            self._launched_high(launch, board)
            return
        low, high = board.low, board.high
        job, step = launch.job, launch.step
        self.low_version += 1
        self._low_heard = now
        answer, self.admitted = self.admitted, None
        if job.held is not None:
            self.unheld(job)
        launch.key = step.program.on(launch.share)
        first = len(low.launches) == 1
        launch.alone = first and not high.launches
        launch.beside_high = bool(high.launches or self.idle)
        start = now if first or self._low_until < now else self._low_until
        launch.due = self._low_until = start + (answer.seconds if answer is not None else launch.predicted)
        if job.hold is not None:
            self.holds.freed(job, now)
        launch.trusting = launch.beside_high if answer is None else answer.trusting
        if answer is None:
            return
        launch.expected = answer.expected
        launch.spots, launch.gaps, launch.exposed = answer.spots, answer.gaps, answer.exposed
        if answer.beside is not None:
            for high_job in answer.beside:
                places = high_job.model.places.get(step.program.key)
                if places is not None:
                    places.fed = high_job.track.steps
        if answer.exploring is not None:
            answer.exploring.watching = True
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
        self._calm = 0.0  # steps that waited for a transfer, say, weren't submitted just now
        track = job.track
        if track is None:
            track = job.track = self.tracks[job.id] = Track(job)
        due = track.ended
        if launch.piece:
            if track.awaited < inf:
                track.moved()
        else:
            if not track.calibrating:
                track.changed()
            before = track.model
            model = step.model = self.models.of(step.program.key, step.bounds, step.pieces, self.tracks)
            if before is not model:
                track.adopt(model)
                if before is not None:
                    recut(self.bans, job.id, model, self.models.cuts(model.key))
            if job.outstanding == 1:
                track.account.begin(track.solo_step())
            if due < step.submitted:
                due = step.submitted
        if launch.at > due and len(board.high.launches) == 1:
            track.host_wait += launch.at - due

    def done(self, launch: Launch, started: float, ended: float, board: Board) -> None:
        """The launch ran from `started` to `ended`."""
        self.version += 1
        if launch.job.priority is _HIGH:
            self._done_high(launch, ended, board)
            return
        self.low_version += 1
        self._low_heard = ended
        if ended > self.cutting.until:
            self.cutting.over()
        at, predicted = launch.at, launch.predicted
        launch.began = began = started if started > at else at
        launch.ended = ended
        if not launch.count_before:
            reach = began - at
            if reach < MOST_REACH_S:
                self.reach += (REACH_PART if self.reach else 1.0) * (reach - self.reach)
        if launch.alone:
            late = ended - at - predicted
            if late < predicted:
                self.lag += 0.1 * ((late if late > 0.0 else 0.0) - self.lag)
        if launch.beside_high:
            seconds = ended - began
            if seconds > 0.0:
                launch.speed = predicted / seconds
            if launch.spots is not None:
                for pair, _ in launch.spots:
                    pair.speed += 0.2 * (launch.speed - pair.speed)
            if launch.touched is not None:
                for cell in launch.touched:
                    attribution.went(cell, launch.speed)
        self.recent.add(launch, bool(board.high.launches))

    def _done_high(self, launch: Launch, ended: float, board: Board) -> None:
        job, step, piece = launch.job, launch.step, launch.piece
        track = job.track
        if track is None:
            return  # the job is closing
        start = track.ended if track.ended > launch.at else launch.at
        if ended < start:
            ended = start
        track.ended = ended
        track.pieces += 1
        if piece == 0:
            track.began = start
            track.from_idle = step.from_idle
        model = step.model
        assert model is not None
        low, high = board.low, board.high
        if self._last_high is not job:
            self._other_high, self._last_high = self._last_end, job
        self._last_end = ended
        # Whether another high job had a launch on the device, too. Mostly all that are out are its own.
        beside = self._other_high > start or (
            len(high.launches) != job.outstanding and attribution.others(high.launches, job, ended)
        )
        recent, span = self.recent, ended - start
        if low.launches or recent.last_end > start:
            found = attribution.beside(low.launches, recent, start, ended)
        else:
            found = attribution.NOBODY
        if found and not track.watching:  # what low work costs is well known, and this step only pays for it
            for out in found:
                out.spots = out.gaps = None
        if recent.open:
            recent.settle(start, track.steps, track.account)
        if found:
            track.shared = True
            baseline = model.reference(piece, beside, track.from_idle) if beside or not piece else model.solo[piece]
            if track.watching:
                for out in found:
                    if out.tried:
                        track.tried = True
            if baseline.count:
                excess = span - baseline.value
                track.excess += excess
                excess -= baseline.late
                track.account.used += excess
                if track.from_idle and excess > 0.0:
                    track.surprised += excess * attribution.trusting(found, track.left, track.arrived, track.caught)
                if track.watching:
                    self._blame(track, model, launch, ended, excess, found)
            elif track.watching and not track.calibrating:
                track.calibrate(1)
        elif model.learn(piece, span, beside, track.from_idle) and not track.calibrating:
            track.calibrate(2)
        if beside:
            track.beside = True
        if piece + 1 == len(step.pieces):
            self._step_done(track, job, step, ended, board)
        elif job.paused:  # what is left of its step comes who knows when
            track.changed()
        elif track.awaited < inf:
            track.moved()

    def _blame(
        self, track: Track, model: HighModel, launch: Launch, ended: float, excess: float, found: attribution.Found
    ) -> None:
        """The launch ended `excess` seconds late: these are what it was late by, and are learned of."""
        piece = launch.piece
        if piece == 0 and track.from_idle:
            early, later = attribution.early(found, track.arrived)
            if early:
                self.margin = min(self.margin + attribution.unforeseen(early, track.arrived) / 2, MOST_MARGIN_S)
                if not later:
                    attribution.arrived(excess, early)
                    return
                late = max([(low.ended or ended) - track.arrived for low in early])
                part = min(excess, attribution.OVERLAPPING * late)
                attribution.arrived(part, early)
                found, excess = later, excess - part
        for low in attribution.share_out(model, piece, excess, found, track.account):
            if low.job.state is not JobState.CLOSING:
                self._touched.append((model, track, low, piece))

    def _step_done(self, track: Track, job: Job, step: Step, ended: float, board: Board) -> None:
        track.end_step(step, ended)
        track.changed()
        solo_s = track.solo_step()
        self.cutting.stepped(track, solo_s, ended)
        if self.recent.end_step(board.low.launches):
            track.watching = True
        if self._touched:
            others = []
            for touched in self._touched:
                model, whose, low, piece = touched
                if whose is track:
                    judge(self.bans, model, track, low, piece, ended)
                else:
                    others.append(touched)
            self._touched = others
        track.account.begin(solo_s)
        if track.steps % ADAPT_EVERY == 0:
            self._adapt(track)
        self.margin *= MARGIN_FADES
        if job.inflight == 1:  # the step that just ended
            self._calm = 0.0
            track.idle_since, track.soonest, track.behind = ended, 0.0, 0
            self.scene.left(track)

    def _adapt(self, track: Track) -> None:
        """Once in a while: what unknown ranges may cost, and how many low launches may be out."""
        model, account = track.model, track.account
        assert model is not None
        model.guess()
        if self._pinched:
            self.width = max(self.width - 1, self.narrow)
        elif account.full:
            self.width = min(self.width + 1, self.wide)
        self._pinched = False

    def forgotten(self, job: Job, now: float) -> None:
        """Nothing of the job is left."""
        self.version += 1
        track = self.tracks.pop(job.id, None)
        job.track = None
        if track is not None:
            track.changed()
            if track.idle_since < inf:
                self.scene.came(track)
            self.awaited.remove(track)
        if job.awaited_by is not None:
            self.awaited.forget(job)
        if self.asking is job:
            self.asking = None
        self.unheld(job)
        if self._last_high is job:
            self._last_high = None
        self.rest = self._rest = self.asked = None
        self._calm = 0.0  # one that was idle for longer may be looked out for again
        self.holds.freed(job, now)
        if self.bans.forget(job.id):
            for model in self.models.all():
                model.unban()
        self._touched = [t for t in self._touched if t[1].job is not job and t[2].job is not job]
