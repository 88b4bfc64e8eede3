"""A model as a chain of layers and of blocks that branch at the layer before them and join at the layer behind them
(DeepPool, section 4.2, "Multi-chain graph reduction"). Blocks may lie inside of branches.

What has another form (a skip connection into the middle of a block, more branches than can be searched) is merged into one
layer, which then runs on one number of GPUs; `Graph.notes` says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from gpumux.plan.layers import LayerProfile, ModelProfile, Timing

MAX_BRANCHES = 6  # of one block: all ways to share the GPUs among them are tried, 4,587 for six


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
    def parameter_bytes(self) -> npt.NDArray[np.float64]:
        return np.array([float(layer.parameter_bytes) for layer in self.layers])

    @cached_property
    def output_bytes(self) -> npt.NDArray[np.float64]:
        return np.array([float(layer.output_bytes) for layer in self.layers])

    @cached_property
    def timed(self) -> Timed | None:
        """The layers' times as arrays, where all were timed at the same batches."""
        batches = tuple(timing.samples for timing in self.layers[0].times)
        if any(tuple(timing.samples for timing in layer.times) != batches for layer in self.layers):
            return None
        forward = np.array([[timing.forward for timing in layer.times] for layer in self.layers])
        backward = np.array([[timing.backward for timing in layer.times] for layer in self.layers])
        return Timed(batches, forward + backward, backward)


class Timed(NamedTuple):
    """Seconds [layers, batches]: forward and backward together, and backward alone."""

    batches: tuple[int, ...]
    both: npt.NDArray[np.float64]
    backward: npt.NDArray[np.float64]


def blocks(chain: Chain) -> Iterator[Block]:
    """Every block of a chain, those inside of others included, outer ones first."""
    for each in chain:
        if isinstance(each, Block):
            yield each
            for branch in each.branches:
                yield from blocks(branch)


def neighbours(chain: Chain) -> Iterator[tuple[int, int]]:
    """Every pair of layers inside of blocks of which the second stands right behind the first."""
    for block in blocks(chain):
        for branch in block.branches:
            for first, second in pairwise(branch):
                if isinstance(first, int) and isinstance(second, int):
                    yield first, second


def ends(chain: Chain) -> Iterator[int]:
    """Every layer whose output goes into or out of a block."""
    for first, second in pairwise(chain):
        if isinstance(second, Block) and isinstance(first, int):
            yield first
        if isinstance(first, Block):
            for branch in first.branches:
                yield from (each for each in branch[-1:] if isinstance(each, int))
                yield from ends(branch)


def members(chain: Chain) -> Iterator[int]:
    """Every layer of a chain, in an order in which they can run."""
    for each in chain:
        if isinstance(each, Block):
            for branch in each.branches:
                yield from members(branch)
        else:
            yield each


def reduce(profile: ModelProfile) -> Graph:
    """The profile's layers as a chain of layers and blocks."""
    nodes = list(profile.layers)
    inputs = [layer for layer in nodes if not layer.inputs]
    if len(inputs) > 1:
        nodes = _with_input(nodes)
    read = {name for layer in nodes for name in layer.inputs}
    results = [layer.name for layer in nodes if layer.name not in read]
    if len(results) > 1:
        nodes.append(LayerProfile(_free("outputs", nodes), "outputs", tuple(results), 0, 0, _no_time(nodes)))
    notes: list[str] = []
    while True:
        try:
            chain = _Parser(nodes).parse()
            break
        except _Irregular as found:
            nodes, note = _merge(nodes, found)
            notes.append(note)
    return Graph(profile.name, profile.device, tuple(nodes), chain, tuple(notes))


def _with_input(nodes: Sequence[LayerProfile]) -> list[LayerProfile]:
    """Several layers read the model's input: let them branch from a layer that takes no time, and whose output is
    wherever it is wanted."""
    name = _free("inputs", nodes)
    source = LayerProfile(name, "inputs", (), 0, 0, _no_time(nodes))
    return [source, *(_reading(node, (name,)) if not node.inputs else node for node in nodes)]


def _no_time(nodes: Sequence[LayerProfile]) -> tuple[Timing, ...]:
    return tuple(Timing(timing.samples, 0.0, 0.0) for timing in nodes[0].times)


def _free(name: str, nodes: Sequence[LayerProfile]) -> str:
    taken = {node.name for node in nodes}
    while name in taken:
        name += "_"
    return name


def _reading(node: LayerProfile, inputs: tuple[str, ...]) -> LayerProfile:
    return LayerProfile(
        node.name, node.kind, inputs, node.output_bytes, node.parameter_bytes, node.times, node.flops, node.source
    )


class _Irregular(Exception):
    """Between `first` and `last` (indices) lies what is no block."""

    def __init__(self, first: int, last: int, why: str) -> None:
        super().__init__(why)
        self.first, self.last, self.why = first, last, why


class _Parser:
    """One reading of a graph with one input and one result. Raises _Irregular at the innermost part that is no block."""

    def __init__(self, nodes: Sequence[LayerProfile]) -> None:
        index = {node.name: i for i, node in enumerate(nodes)}
        self.before = [sorted({index[name] for name in node.inputs}) for node in nodes]
        self.behind: list[list[int]] = [[] for _ in nodes]
        for node, inputs in enumerate(self.before):
            for each in inputs:
                self.behind[each].append(node)
        self.joins = self._post_dominators()
        self.blocks = 0

    def parse(self) -> Chain:
        return self._walk(0, None, None)

    def _post_dominators(self) -> list[int]:
        """For each layer, the first one that every way from it to the end leads through; the last one's is itself."""
        found = list(range(len(self.behind)))
        for node in reversed(range(len(self.behind))):
            common: int | None = None
            for each in self.behind[node]:
                common = each if common is None else self._meet(common, each, found)
            found[node] = node if common is None else common
        return found

    @staticmethod
    def _meet(a: int, b: int, joins: Sequence[int]) -> int:
        while a != b:
            if a < b:
                a = joins[a]
            else:
                b = joins[b]
        return a

    def _walk(self, node: int, stop: int | None, fork: int | None) -> Chain:
        """The chain from `node` up to, and without, `stop`; None: to the end. `fork` is where this branch left."""
        found: list[int | Block] = []
        expected = 0 if fork is None else 1  # ways that lead to the next layer
        while node != stop:
            if len(self.before[node]) != expected:
                assert fork is not None
                assert stop is not None
                raise _Irregular(fork, stop, "ways meet before the block's end")
            found.append(node)
            behind = self.behind[node]
            if not behind:
                break
            expected = 1
            if len(behind) == 1:
                node = behind[0]
                continue
            join = self.joins[node]
            found.append(self._block(node, join))
            if join == stop:
                raise _Irregular(node, join, "a block ends where the one around it does")
            expected = len(self.before[join])
            if expected != len(behind):
                raise _Irregular(node, join, "ways meet before the block's end")
            node = join
        return tuple(found)

    def _block(self, fork: int, join: int) -> Block:
        behind = self.behind[fork]
        number, self.blocks = self.blocks, self.blocks + 1
        branches = tuple(() if each == join else self._walk(each, join, fork) for each in behind)
        if len(behind) > MAX_BRANCHES:
            raise _Irregular(fork, join, f"it has {len(behind)} branches, more than {MAX_BRANCHES}")
        return Block(number, branches)


def _merge(nodes: Sequence[LayerProfile], found: _Irregular) -> tuple[list[LayerProfile], str]:
    """All that lies between the two layers as one layer, and a sentence about it."""
    first, last = nodes[found.first], nodes[found.last]
    inside = [found.first]  # grows: everything behind the fork and before the join, in order
    reached = {first.name}
    for i in range(found.first + 1, found.last):
        if reached & set(nodes[i].inputs):
            reached.add(nodes[i].name)
            inside.append(i)
    merged = [nodes[i] for i in inside[1:]]
    names = {node.name for node in merged}
    leaving = sum(node.output_bytes for node in (first, *merged) if node.name in last.inputs)
    batches = sorted({timing.samples for node in merged for timing in node.times})
    smallest = max(node.times[0].samples for node in merged)
    times = []
    for samples in (each for each in batches if each >= smallest):
        timings = [node.at(samples) for node in merged]
        times.append(Timing(samples, sum(t.forward for t in timings), sum(t.backward for t in timings)))
    layer = LayerProfile(
        f"{merged[0].name}..{merged[-1].name}",
        "merged",
        (first.name,),
        leaving,
        sum(node.parameter_bytes for node in merged),
        tuple(times),
        sum(node.flops for node in merged),
        "measured" if all(node.source == "measured" for node in merged) else "model",
    )
    rest = [node for node in nodes if node.name not in names]
    at = rest.index(last)
    kept = tuple(name for name in last.inputs if name not in names and name != first.name)
    rest[at] = _reading(last, (*kept, layer.name))
    rest.insert(at, layer)
    note = f"{layer.name} ({len(merged)} layers between {first.name} and {last.name}) counts as one layer: {found}"
    return rest, note
