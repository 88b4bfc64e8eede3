"""What fusing gives: a Program for all models, and how each operator came into it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeAlias

import torch

from gpumux.program.ir import Program, ScalarRef

# "fused" wherever there is a way, "per-model", or the operators that run once a model.
Choose: TypeAlias = Literal["fused", "per-model"] | frozenset[int]
How: TypeAlias = Literal["alike", "fused", "per-model"]


@dataclass(frozen=True, slots=True)
class Table:
    """Numbers that differ between models, as one more input: `rows` by B, of `dtype`."""

    dtype: str
    rows: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """How one operator of the template runs. `why`: of fused, by what ("rule", "pointwise", "batched"); of per-model,
    the reason. `sizes`: of its operands, in one model. `fused_s`, `each_s`: seconds for all models at once and one after
    another, where measured."""

    op: int
    target: str
    layer: str
    how: How
    why: str = ""
    sizes: str = ""
    fused_s: float | None = None
    each_s: float | None = None


@dataclass(frozen=True, slots=True)
class Fused:
    """`program`'s inputs are the batch (one of all models, or B with `batch_per_model`, as [B, ...]) and then the
    `tables`; its state slots are the template's, each B times as large, models one after another; its results are
    the template's with the model dimension first. `scalars`: of each host scalar, whose it is: (model, index)."""

    program: Program
    models: int
    scalars: tuple[tuple[int, int], ...]
    tables: tuple[Table, ...]
    decisions: tuple[Decision, ...]
    batch_per_model: bool
    slots: tuple[
        tuple[int | None, ...], ...
    ]  # of each state slot, each model's own; None: it has none, and no part in it
    streams: bool  # whether there is one more state slot: the models' random generators, `stream_bytes()` each


def numbers(fused: Fused, values: Sequence[Sequence[float | int]]) -> list[torch.Tensor]:
    """The contents of the tables, [rows, B] of float64 each, for these host scalars of each model."""
    return [
        torch.tensor(
            [[values[b][s.index] if isinstance(s, ScalarRef) else s for b, s in enumerate(row)] for row in table.rows],
            dtype=torch.float64,
        )
        for table in fused.tables
    ]


@cache
def stream_bytes() -> int:
    """Of the state of a random generator on the CPU."""
    return int(torch.default_generator.get_state().numel())
