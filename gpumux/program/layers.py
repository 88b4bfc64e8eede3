"""Whose layer each operator of a Program is. Nothing that runs depends on it; profiles and planning do."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from gpumux.program.ir import Program, Span
from gpumux.program.limits import DEFAULT

ROOT = "(model)"  # the layer of what runs in a model itself, in none of its modules


class Label(NamedTuple):
    """`layer`: the module's path in the user's model, as named_modules has it. `backward`: in its backward pass."""

    layer: str
    backward: bool = False


def spans(labels: Iterable[Label | None], first: int = 0) -> tuple[tuple[str, ...], tuple[Span, ...]]:
    """`layers` and `spans` of a Program whose operators from `first` on have these labels. A name that no Program can hold
    is left out, and so are those beyond as many as one can."""
    names: dict[str, int] = {}
    found: list[Span] = []
    at = first
    for label, group in groupby(labels):
        count = sum(1 for _ in group)
        if label is not None and _fits(label.layer, names):
            number = names.setdefault(label.layer, len(names))
            found.append(Span(at, count, number, label.backward))
        at += count
    return tuple(names), tuple(found)


def _fits(name: str, names: Collection[str]) -> bool:
    return 0 < len(name) <= DEFAULT.string and (name in names or len(names) < DEFAULT.layers)


def labels(program: Program) -> Sequence[Label | None]:
    """For each operator its label, None where it belongs to no layer."""
    found: list[Label | None] = [None] * len(program.ops)
    for span in program.spans:
        label = Label(program.layers[span.layer], span.backward)
        found[span.first : span.first + span.count] = [label] * span.count
    return found
