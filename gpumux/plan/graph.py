"""A model as a chain of layers and of blocks that branch at the layer before them and join at the layer behind them
(DeepPool, section 4.2, "Multi-chain graph reduction"). Blocks may lie inside of branches. `reduction.py` makes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

from gpumux.plan.layers import LayerProfile


@dataclass(frozen=True, slots=True)
class Block:
    """Branches between the layer before it and the layer behind it. An empty branch is a skip connection. `number`
    counts the model's blocks."""

    number: int
    branches: tuple[Chain, ...]


Chain: TypeAlias = tuple["int | Block", ...]


@dataclass(frozen=True)
class Graph:
    """`chain` names layers by their index in `layers`; it begins and ends with a layer, and a layer stands between any
    two blocks, so that each block has one that branches and one that joins. `name` and `device` are the profile's."""

    name: str
    device: str
    layers: tuple[LayerProfile, ...]
    chain: Chain
    notes: tuple[str, ...] = ()

    @cached_property
    def blocks(self) -> int:
        """How many blocks there are, those inside of others included."""
        return sum(1 for _ in blocks(self.chain))

    @cached_property
    def levels(self) -> tuple[Level, ...]:
        """The blocks, those first that have no others inside."""
        found: list[list[Site]] = []
        _sites(self.chain, False, found)
        return tuple([_level(sites) for sites in found])


class Site(NamedTuple):
    """A block, the layers that branch and join, and whether it lies inside of another one."""

    block: Block
    fork: int
    join: int
    inner: bool


class Way(NamedTuple):
    """A branch that has layers: which one of which site, its layers, and the number of the block before each (None: none)."""

    site: int
    branch: int
    layers: tuple[int, ...]
    blocks: tuple[int | None, ...]


class Level(NamedTuple):
    """Blocks that can be looked at together, with all their branches, the longest first."""

    sites: tuple[Site, ...]
    ways: tuple[Way, ...]


def _sites(chain: Chain, inner: bool, found: list[list[Site]]) -> int:
    """Sort the chain's blocks by how deep others lie in them; returns the number of levels that takes."""
    levels = 0
    for place, each in enumerate(chain):
        if isinstance(each, Block):
            inside = [branch for branch in each.branches if Block in map(type, branch)]
            level = max([_sites(branch, True, found) for branch in inside], default=0)
            while len(found) <= level:
                found.append([])
            fork, join = chain[place - 1], chain[place + 1]
            assert isinstance(fork, int)
            assert isinstance(join, int)
            found[level].append(Site(each, fork, join, inner))
            levels = max(levels, level + 1)
    return levels


def _level(sites: Sequence[Site]) -> Level:
    ways = []
    for at, site in enumerate(sites):
        for i, branch in enumerate(site.block.branches):
            if branch:
                ways.append(Way(at, i, *_steps(branch)))
    return Level(tuple(sites), tuple(sorted(ways, key=lambda way: -len(way.layers))))


def _steps(branch: Chain) -> tuple[tuple[int, ...], tuple[int | None, ...]]:
    """A branch's layers, and the number of the block before each."""
    layers: list[int] = []
    before: list[int | None] = []
    number = None
    for each in branch:
        if isinstance(each, Block):
            number = each.number
        else:
            layers.append(each)
            before.append(number)
            number = None
    return tuple(layers), tuple(before)


def blocks(chain: Chain) -> Iterator[Block]:
    """Every block of a chain, those inside of others included, outer ones first."""
    for each in chain:
        if isinstance(each, Block):
            yield each
            for branch in each.branches:
                yield from blocks(branch)


def members(chain: Chain) -> Iterator[int]:
    """Every layer of a chain, in an order in which they can run."""
    for each in chain:
        if isinstance(each, Block):
            for branch in each.branches:
                yield from members(branch)
        else:
            yield each
