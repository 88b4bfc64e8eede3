"""Splits a captured step over ranks by a placement: what a StepFunction is given to do so.

A gang of a cluster may have to go on over fewer ranks than it was captured for. Nothing is traced then, since the
script's own thread may be anywhere: the parts that fewer ranks hold are traced at capture, as far as they can be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from gpumux.burst.norms import BatchNorm, check_batch_norm
from gpumux.burst.placement import RankPlacement
from gpumux.burst.programs import InputPart, check_together, narrowed
from gpumux.burst.proof import Proven
from gpumux.burst.split import split_over_ranks
from gpumux.capture.fetching import without_fetching
from gpumux.capture.lower import Lowered, LoweredRank, lower_rank
from gpumux.capture.recorder import RankResult, RankTraces
from gpumux.capture.state import StateTable
from gpumux.capture.tracer import RawTrace
from gpumux.errors import NotSplittable, TooFewRanks


@dataclass(frozen=True, slots=True)
class RankStep:
    """What one rank runs of a step. `inputs`: what it is given of the batch. `lowered`: its Program, and the buffers of
    its state."""

    lowered: LoweredRank
    inputs: tuple[InputPart, ...]


@dataclass(frozen=True, slots=True)
class RankedStep:
    """A step as Programs of all ranks. `results`: by tensor of the step's result, (rank, place among its results) of
    each part, and the dimension along which parts are put together. `homes`: ranks, rising, that hold each of the job's
    buffers; the first one's value counts. `made_of`: what it was made of."""

    ranks: tuple[RankStep, ...]
    results: tuple[tuple[tuple[tuple[int, int], ...], int | None], ...]
    homes: dict[int, tuple[int, ...]]
    made_of: StepOrigin

    def put_together(self, given: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        """The tensors that the step returns, from those that each rank returned."""
        found = []
        for parts, dim in self.results:
            tensors = [given[rank][place] for rank, place in parts]
            found.append(tensors[0] if dim is None else torch.cat(tensors, dim))
        return found


@dataclass(slots=True)
class StepTraces:
    """The traces of a step and of parts of its batch, and how it is split over ranks, by their number."""

    full: RawTrace
    parts: dict[int, RawTrace]
    tensors: list[torch.Tensor]
    table: StateTable
    over: dict[int, RankTraces] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepOrigin:
    """What a RankedStep is made of, over whatever number of ranks. `whole`: the step's Program for one device."""

    raw: RawTrace
    table: StateTable
    keep: frozenset[int]
    whole: Lowered


class BurstSplitter:
    """A RankSplitter (capture/microbatch/split.py) for a placement of layers on ranks (DeepPool, sections 3 and 4).
    `placement`: over which ranks steps are split now."""

    def __init__(
        self, placement: RankPlacement, batch_norm: BatchNorm = "refuse",
        fewer: Mapping[int, RankPlacement] | None = None,
    ) -> None:  # fmt: skip
        """`batch_norm`: what becomes of batch norms in training mode on several ranks (norms.py). `fewer`: placements
        on fewer ranks, by their number, with which the job may go on. Raises ConfigError for another word."""
        check_batch_norm(batch_norm)
        self.placement, self.batch_norm = placement, batch_norm
        self._asked = placement
        self._placements = {**(fewer or {}), placement.ranks: placement}
        self._proven = {ranks: Proven() for ranks in self._placements}

    @property
    def ranks(self) -> int:
        """The most ranks that steps are split over."""
        return self._asked.ranks

    @property
    def counts(self) -> list[int]:
        return _counts(self._asked)

    @property
    def further_counts(self) -> list[int]:
        """In how many parts the batch is traced as well, if it can be: those that fewer ranks would hold."""
        found = {count for ranks, one in self._placements.items() if ranks > 1 for count in _counts(one)}
        return sorted(found - set(self.counts))

    def use(self, ranks: int) -> None:
        """Split over so many ranks, of which there is a placement, from now on."""
        self.placement = self._placements[ranks]

    def fits(self, step: RankedStep) -> list[int]:
        """On which numbers of ranks, rising, there are placements, and parts of the step's batch."""
        traces: StepTraces | None = step.made_of.raw.ranks.made_of
        if traces is None:  # there is one placement
            return [self.ranks]
        return [n for n, one in sorted(self._placements.items()) if n == 1 or set(_counts(one)) <= set(traces.parts)]

    def split(
        self, full: RawTrace, parts: dict[int, RawTrace], tensors: list[torch.Tensor], table: StateTable
    ) -> RankTraces:
        if len(self._placements) == 1:
            return self._split(full, parts, tensors, table, self.placement)
        traces = StepTraces(full, parts, tensors, table)
        self._over(traces, self.ranks)  # to which the job may go back
        over = self._over(traces, self.placement.ranks) or RankTraces(full.record, [], [], [], {})
        return replace(over, made_of=traces)

    def _over(self, traces: StepTraces, ranks: int) -> RankTraces | None:
        """The split over so many ranks; None for a single one. Raises NotSplittable, TooFewRanks if only these are too
        few."""
        if ranks == 1:
            return None
        placement = self._placements[ranks]
        if ranks not in traces.over:
            missing = [count for count in _counts(placement) if count not in traces.parts]
            if missing:
                raise TooFewRanks(
                    f"the batch can't be cut into {missing[0]} equal parts for {ranks} ranks",
                    f"use a batch size that {missing[0]} divides, or min_gpus={self.ranks}",
                )
            parts = {count: traces.parts[count] for count in _counts(placement)}
            try:
                with without_fetching():
                    traces.over[ranks] = self._split(traces.full, parts, traces.tensors, traces.table, placement)
            except NotSplittable as error:
                if ranks == self.ranks:
                    raise
                raise TooFewRanks(error.message, f"{error.remedy}, or min_gpus={self.ranks}") from error
        return traces.over[ranks]

    def _split(
        self, full: RawTrace, parts: dict[int, RawTrace], tensors: list[torch.Tensor], table: StateTable,
        placement: RankPlacement,
    ) -> RankTraces:  # fmt: skip
        proven = self._proven[placement.ranks]
        return split_over_ranks(full, parts, tensors, placement, table, self.batch_norm, proven)

    def again(self, step: RankedStep) -> RankedStep:
        """The step over the ranks of now. Raises NotSplittable."""
        made = step.made_of
        with without_fetching():  # the job may be away, and where its local tensors lie is all that is looked at
            return self.programs(made.raw, made.table, made.keep, made.whole)

    def programs(self, raw: RawTrace, table: StateTable, keep: frozenset[int], whole: Lowered) -> RankedStep:
        origin, traces = StepOrigin(raw, table, keep, whole), raw.ranks
        if traces.made_of is not None:
            traces = self._over(traces.made_of, self.placement.ranks)
        if traces is None:
            return _on_one(origin)
        raw = replace(raw, ranks=traces)
        steps = []
        for rank in range(self.placement.ranks):
            lowered = lower_rank(raw, rank, table, keep, whole)
            program, inputs = narrowed(lowered.program)
            steps.append(RankStep(replace(lowered, program=program), inputs))
        check_together([step.lowered.program for step in steps])
        homes = dict(traces.homes)
        used: dict[int, list[int]] = {}
        for rank, step in enumerate(steps):
            for buffer in step.lowered.binding:
                used.setdefault(buffer, []).append(rank)
        homes |= {buffer: tuple(ranks) for buffer, ranks in used.items() if buffer not in homes}  # made by this step
        self._proven[self.placement.ranks].homes |= homes
        return RankedStep(tuple(steps), _results(traces.results), homes, origin)


def _counts(placement: RankPlacement) -> list[int]:
    several = [count for count in placement.counts if count > 1]
    return several or [2]  # how values depend on the batch is seen in parts of it, also if each layer has one rank


def _on_one(origin: StepOrigin) -> RankedStep:
    """The whole step on a single rank, as a job on one device runs it."""
    whole, program = origin.whole, origin.whole.program
    inputs = tuple([InputPart(position, None) for position in range(len(program.inputs))])
    results = range(len(program.results) - (program.generator is not None))
    return RankedStep(
        (RankStep(LoweredRank(program, whole.binding), inputs),),
        tuple([(((0, place),), None) for place in results]),
        dict.fromkeys(whole.binding, (0,)),
        origin,
    )


def _results(results: list[RankResult]) -> tuple[Any, ...]:
    placed: dict[int, int] = {}
    found = []
    for result in results:
        parts = []
        for rank in result.ranks:
            parts.append((rank, placed.get(rank, 0)))
            placed[rank] = placed.get(rank, 0) + 1
        found.append((tuple(parts), result.dim))
    return tuple(found)
