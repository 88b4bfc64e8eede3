"""Splits a captured step over ranks by a placement: what a StepFunction is given to do so."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from gpumux.burst.norms import BatchNorm, check_batch_norm
from gpumux.burst.placement import RankPlacement
from gpumux.burst.programs import InputPart, check_together, narrowed
from gpumux.burst.proof import Proven
from gpumux.burst.split import split_over_ranks
from gpumux.capture.lower import Lowered, LoweredRank, lower_rank
from gpumux.capture.recorder import RankResult, RankTraces
from gpumux.capture.state import StateTable
from gpumux.capture.tracer import RawTrace


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
    buffers; the first one's value counts."""

    ranks: tuple[RankStep, ...]
    results: tuple[tuple[tuple[tuple[int, int], ...], int | None], ...]
    homes: dict[int, tuple[int, ...]]

    def put_together(self, given: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        """The tensors that the step returns, from those that each rank returned."""
        found = []
        for parts, dim in self.results:
            tensors = [given[rank][place] for rank, place in parts]
            found.append(tensors[0] if dim is None else torch.cat(tensors, dim))
        return found


class BurstSplitter:
    """A RankSplitter (capture/step.py) for a placement of layers on ranks (DeepPool, sections 3 and 4)."""

    def __init__(self, placement: RankPlacement, batch_norm: BatchNorm = "refuse") -> None:
        """`batch_norm`: what becomes of batch norms in training mode on several ranks (norms.py). Raises ConfigError
        for another word."""
        check_batch_norm(batch_norm)
        self.placement, self.batch_norm = placement, batch_norm
        self._proven = Proven()

    @property
    def ranks(self) -> int:
        return self.placement.ranks

    @property
    def counts(self) -> list[int]:
        several = [count for count in self.placement.counts if count > 1]
        return several or [2]  # how values depend on the batch is seen in parts of it, also if each layer has one rank

    def split(
        self, full: RawTrace, parts: dict[int, RawTrace], tensors: list[torch.Tensor], table: StateTable
    ) -> RankTraces:
        return split_over_ranks(full, parts, tensors, self.placement, table, self.batch_norm, self._proven)

    def programs(self, raw: RawTrace, table: StateTable, keep: frozenset[int], whole: Lowered) -> RankedStep:
        assert raw.ranks is not None
        steps = []
        for rank in range(self.placement.ranks):
            lowered = lower_rank(raw, rank, table, keep, whole)
            program, inputs = narrowed(lowered.program)
            steps.append(RankStep(replace(lowered, program=program), inputs))
        check_together([step.lowered.program for step in steps])
        homes = dict(raw.ranks.homes)
        used: dict[int, list[int]] = {}
        for rank, step in enumerate(steps):
            for buffer in step.lowered.binding:
                used.setdefault(buffer, []).append(rank)
        homes |= {buffer: tuple(ranks) for buffer, ranks in used.items() if buffer not in homes}  # made by this step
        self._proven.homes |= homes
        return RankedStep(tuple(steps), _results(raw.ranks.results), homes)


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
