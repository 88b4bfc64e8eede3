"""Whether low work is to be banned beside a range, or freed again: after each step that shows what it cost."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from gpumux.core.bans import Ban, Bans, Why
from gpumux.core.board import Launch
from gpumux.core.cells import CREDIBLE
from gpumux.core.estimates import HighModel
from gpumux.core.track import Track
from gpumux.model import JobId

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
    """The high job runs `model` from now on, one of `cuts` of the same program. A ban that is none there would never be probed."""
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
