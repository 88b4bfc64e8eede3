"""Which ranks each layer of a model runs on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from gpumux.errors import ConfigError
from gpumux.program.saved_plan import PlanRow, SavedPlan
from gpumux.wording import nearest

MOST_RANKS = 64


@dataclass(frozen=True)
class RankPlacement:
    """`layers`: the ranks of each planned layer, by the module's path as named_modules has it ("features.0"; with
    several models "model0.features.0"). A rank at place i holds part i of the batch there. Modules inside a planned one
    belong to it; operators of no planned layer run where most of their input is. Raises ConfigError for ranks that
    can't be."""

    ranks: int
    layers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    default: tuple[int, ...] | None = None  # of modules that are not planned; None: where their input is
    no_modules: frozenset[str] = frozenset()  # of the layers, those that may be operators outside of any module

    def __post_init__(self) -> None:
        if not 1 <= self.ranks <= MOST_RANKS:
            raise ConfigError(f"{self.ranks} ranks", f"give 1 to {MOST_RANKS}")
        # Lists do as well. A copy, since nothing about a placement changes later.
        object.__setattr__(self, "layers", {name: _ranks_of(on) for name, on in self.layers.items()})
        for name, on in (*self.layers.items(), *((("every other layer", self.default),) if self.default else ())):
            if not _possible(on, self.ranks):
                raise ConfigError(
                    f"{name} is on ranks {on}",
                    f"give a tuple that names each rank once, from 0 to {self.ranks - 1}, and at least one",
                )

    def of(self, layer: str | None) -> tuple[int, ...] | None:
        """The ranks of a module, None if neither it nor a module around it is planned."""
        if layer is None:
            return None
        name = layer
        while True:
            found = self.layers.get(name)
            if found is not None:
                return found
            if "." not in name:
                return self.default
            name = name.rpartition(".")[0]

    def check_names(self, models: Sequence[nn.Module]) -> None:
        """Raises ConfigError for layers that these models do not have."""
        known: set[str] = set()
        for i, model in enumerate(models):
            prefix = f"model{i}." if len(models) > 1 else ""
            for named in (model.named_modules(), model.named_parameters(), model.named_buffers()):
                known.update(prefix + name for name, _ in named if name)
        wrong = [name for name in self.layers if name not in known and name not in self.no_modules]
        if wrong:
            near = nearest(wrong[0], known) or min(known, default=None)
            raise ConfigError(
                f"the plan names {', '.join(wrong[:3])}{' and others' if wrong[3:] else ''}, which the"
                f" {'models have' if len(models) > 1 else 'model has'} no module of",
                f"use names of named_modules(){', with model0. and so on before them' if len(models) > 1 else ''}, like"
                f" {near}"
                if near is not None
                else "submit the model that the plan is for",
            )

    @property
    def counts(self) -> list[int]:
        """The different numbers of ranks of layers, rising."""
        found = {len(on) for on in self.layers.values()}
        return sorted(found | {len(self.default)} if self.default else found)


def _ranks_of(given: Any) -> Any:
    return tuple(given) if isinstance(given, list) else given


def _possible(on: Any, ranks: int) -> bool:
    """Whether these are different ranks out of so many."""
    if not isinstance(on, tuple) or not on or any(type(rank) is not int for rank in on):
        return False
    return len(set(on)) == len(on) and all(0 <= rank < ranks for rank in on)


def data_parallel(ranks: int) -> RankPlacement:
    """Every layer on all ranks."""
    return RankPlacement(ranks, default=tuple(range(ranks)))


def folded(placement: RankPlacement, ranks: int) -> RankPlacement:
    """The placement on fewer ranks: what rank i had is on rank i mod `ranks`."""

    def fold(on: Sequence[int]) -> tuple[int, ...]:
        return tuple(dict.fromkeys([rank % ranks for rank in on]))

    return replace(
        placement, ranks=ranks, layers={name: fold(on) for name, on in placement.layers.items()},
        default=None if placement.default is None else fold(placement.default),
    )  # fmt: skip


def rotated(partitions: Sequence[Sequence[str]]) -> RankPlacement:
    """Model-parallel waves (waves/rotation.py) on as many ranks as partitions: every layer is on all ranks, and part j
    of the batch is on rank (j + c) mod N in partition c. `partitions`: the layers of each, in the order they run.
    Raises ConfigError for a layer in two of them."""
    n = len(partitions)
    layers: dict[str, tuple[int, ...]] = {}
    for c, names in enumerate(partitions):
        for name in names:
            if name in layers:
                raise ConfigError(f"{name} is in two partitions", "name each layer once")
            layers[name] = tuple([(part + c) % n for part in range(n)])
    return RankPlacement(n, layers)


def nested(first: int, count: int) -> tuple[int, ...]:
    """`count` ranks from `first` on, in an order of parts in which each rank that is also among fewer of them, or more,
    keeps all samples that it can: doubled ranks split each part in two, and the rank that had it keeps the first. The
    plan's cost model counts on that (plan/costs.py, moved_share)."""
    factor = next((n for n in range(2, count + 1) if count % n == 0), 1)
    if factor == 1:
        return (first,)
    fewer = nested(first, count // factor)
    others = iter(range(first + len(fewer), first + count))
    return tuple([rank for kept in fewer for rank in (kept, *(next(others) for _ in range(factor - 1)))])


def planned(plan: SavedPlan) -> RankPlacement:
    """The placement of a plan that `gpumux plan burst --save` wrote. A layer's ranks are those of its computation.
    Raises ConfigError for a plan whose layers have no names of modules."""
    return _planned(plan, plan.gpus, plan.rows)


def planned_on_fewer(plan: SavedPlan) -> dict[int, RankPlacement]:
    """As `planned`, by the plans for fewer GPUs, by their number."""
    return {gpus: _planned(plan, gpus, rows) for gpus, rows in plan.fewer}


def _planned(plan: SavedPlan, gpus: int, rows: Sequence[PlanRow]) -> RankPlacement:
    layers: dict[str, tuple[int, ...]] = {}
    for row in rows:
        if not row.transfer:
            layers[plan.layers[row.layer].name] = nested(row.first, row.gpus)
    without = frozenset(layer.name for layer in plan.layers if not layer.parameter_bytes)
    return RankPlacement(gpus, layers, no_modules=without)
