"""Fusing with a choice by measurement: three Programs, and the quickest of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpumux.fuse import proof
from gpumux.fuse.align import Template
from gpumux.fuse.choice import END, Timed, cheapest
from gpumux.fuse.emit import Emitter
from gpumux.fuse.fuse import Fuser
from gpumux.fuse.fused import Decision, Fused
from gpumux.fuse.trial import Times, extract, join
from gpumux.program.ir import Program


@dataclass(frozen=True, slots=True)
class Measured:
    """`whole`: seconds of the Program that was taken, and of that which runs every operator once a model."""

    fused: Fused
    whole: tuple[float, float]


def fuse_measured(
    template: Template, values: Sequence[Sequence[float | int]], *, batch_per_model: bool,
    per_model: Collection[str], times: Times,
) -> Measured:  # fmt: skip
    """The Program whose operators run for all models or once a model as is cheapest by `times`, whichever is
    quicker as a whole of that, everything fused, and nothing fused; it is held against the last on invented numbers.
    Raises NotFusible."""

    def made(choose: Any) -> tuple[Fuser, Fused]:
        fuser = Fuser(template, Emitter(template.program.device), values, choose, per_model)
        return fuser, fuser.run(batch_per_model)

    every, each = made("fused"), made("per-model")
    timed = _timed(template.program, every[0], each[0], times)
    reads = list(every[0].reads)
    makers = every[0].makers
    reads += [
        (END, makers[s]) for s in (template.program.views[v].storage for v in template.program.results) if s in makers
    ]
    chosen = cheapest(timed, reads)
    wholes = {"every": times(stateless(every[1].program)), "each": times(stateless(each[1].program))}
    found = every[1] if not chosen else made(chosen)[1]
    best = times(stateless(found.program)) if chosen else wholes["every"]
    if chosen and wholes["every"] < best:
        found, best = every[1], wholes["every"]
    if wholes["each"] < best:
        found, best = each[1], wholes["each"]
    times.save()
    if found is not each[1]:
        proof.check(found, each[1], values)
    return Measured(replace(found, decisions=_with_times(found.decisions, timed)), (best, wholes["each"]))


def stateless(program: Program) -> Program:
    """A Program that draws from no stream, so that it runs on any bytes: for timing it."""
    ops = tuple(replace(op, stream=None) if op.stream is not None else op for op in program.ops)
    return replace(program, ops=ops)


def _timed(program: Program, every: Fuser, each: Fuser, times: Times) -> dict[int, Timed]:
    found: dict[int, Timed] = {}
    for index, decision in enumerate(every.decisions):
        if decision.how == "alike":
            continue
        forced = decision.how == "per-model"
        one = 0.0 if forced else times(extract(each.emitter, *each.slices[index]))
        all_ = None if forced else times(extract(every.emitter, *every.slices[index]))
        born = sum(
            times(join(program.storages[s].nbytes, every.homes.home(s).dtype, every.models))
            for s, maker in every.makers.items()
            if maker == index and program.storages[s].nbytes
        )
        found[index] = Timed(all_, one, born)
    return found


def _with_times(decisions: Sequence[Decision], timed: dict[int, Timed]) -> tuple[Decision, ...]:
    def one(decision: Decision) -> Decision:
        known = timed.get(decision.op)
        if known is None or known.fused is None:
            return decision
        return replace(decision, fused_s=known.fused, each_s=known.each)

    return tuple(map(one, decisions))
