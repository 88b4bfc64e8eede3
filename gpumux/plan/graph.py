"""A model as a chain of layers and blocks (DeepPool, section 4.2, "Multi-chain graph reduction"). A block branches at
the layer before it and joins at the layer after it. Blocks may lie inside of branches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import NamedTuple, TypeAlias

from gpumux.plan.layers import LayerProfile, ModelProfile, Timing


@dataclass(frozen=True, slots=True)
class Block:
    """Branches between the layer before it and the layer after it. An empty branch is a skip connection. `number`
    counts the model's blocks."""

    number: int
    branches: tuple[Chain, ...]


Chain: TypeAlias = tuple["int | Block", ...]


@dataclass(frozen=True)
class LayerGraph:
    """`chain` names layers by their index in `layers`. It begins and ends with a layer, and a layer stands between any
    two blocks, so that each block has one that branches and one that joins. `name` and `device` are the profile's."""

    name: str
    device: str
    layers: tuple[LayerProfile, ...]
    chain: Chain
    notes: tuple[str, ...] = ()

    @cached_property
    def blocks(self) -> int:
        """Number of blocks, including those inside of others."""
        return sum(1 for _ in blocks(self.chain))

    @cached_property
    def levels(self) -> tuple[BlockLevel, ...]:
        """The blocks by nesting depth, those without inner blocks first."""
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
    """A branch that has layers: its site and its number there, its layers, and the number of the block before each
    layer (None: none)."""

    site: int
    branch: int
    layers: tuple[int, ...]
    blocks: tuple[int | None, ...]


class BlockLevel(NamedTuple):
    """Blocks that can be processed together, with all their branches, the longest first."""

    sites: tuple[Site, ...]
    ways: tuple[Way, ...]


def _sites(chain: Chain, inner: bool, found: list[list[Site]]) -> int:
    """Sort the chain's blocks by how many levels of blocks they contain; returns the number of levels."""
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


def _level(sites: Sequence[Site]) -> BlockLevel:
    ways = []
    for at, site in enumerate(sites):
        for i, branch in enumerate(site.block.branches):
            if branch:
                ways.append(Way(at, i, *_steps(branch)))
    return BlockLevel(tuple(sites), tuple(sorted(ways, key=lambda way: -len(way.layers))))


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
    """Every block of a chain, including those inside of others, outer ones first."""
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


# ---- From a profile's layers, however they are connected, to a chain of layers and blocks (DeepPool, section 4.2,
# "Multi-chain graph reduction").
#
# Branches that meet before the other branches of their block get a layer of their own to branch from, which takes no
# time. Parts of another form (a skip connection into the middle of a block, more branches than can be searched) are
# merged into one layer, which then runs on one number of GPUs; `LayerGraph.notes` says so.


MAX_BRANCHES = 6  # in one block: all ways to share the GPUs among them are tried, 4,587 for six


def reduce(profile: ModelProfile) -> LayerGraph:
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
            parted = _part(nodes, found)
            if parted is None:
                nodes, note = _merge(nodes, found)
                notes.append(note)
            else:
                nodes = parted
    return LayerGraph(profile.name, profile.device, tuple(nodes), chain, tuple(notes))


def _with_input(nodes: Sequence[LayerProfile]) -> list[LayerProfile]:
    """The graph with one source: several layers that read the model's input branch from a layer that takes no time and
    whose output is everywhere."""
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
    """The layers `inside`, between `first` and `last` (indices), are no block."""

    def __init__(self, first: int, last: int, inside: Sequence[int], why: str) -> None:
        super().__init__(why)
        self.first, self.last, self.inside = first, last, inside


def _dominators(sides: Sequence[Sequence[int]], order: Iterable[int], earlier: Callable[[int, int], bool]) -> list[int]:
    """For each node the nearest one that every path from (or to) it passes; itself if there is none. sides: its
    neighbours in that direction, which come before it in `order`."""
    found = list(range(len(sides)))
    for node in order:
        common: int | None = None
        for each in sides[node]:
            common = each if common is None else _meet(common, each, found, earlier)
        found[node] = node if common is None else common
    return found


def _meet(a: int, b: int, tree: Sequence[int], earlier: Callable[[int, int], bool]) -> int:
    """The nearest common ancestor. earlier(a, b): whether a is further from the root."""
    while a != b:
        if earlier(a, b):
            a = tree[a]
        else:
            b = tree[b]
    return a


class _Parser:
    """Parses a graph with one input and one result into blocks. Raises _Irregular at the innermost part that is no
    block."""

    def __init__(self, nodes: Sequence[LayerProfile]) -> None:
        index = {node.name: i for i, node in enumerate(nodes)}
        self.before = [sorted({index[name] for name in node.inputs}) for node in nodes]
        self.behind: list[list[int]] = [[] for _ in nodes]
        for node, inputs in enumerate(self.before):
            for each in inputs:
                self.behind[each].append(node)
        last = len(nodes) - 1
        self.joins = _dominators(self.behind, reversed(range(last + 1)), lambda a, b: a < b)
        self.forks = _dominators(self.before, range(last + 1), lambda a, b: a > b)
        self.blocks = 0

    def parse(self) -> Chain:
        return self._walk(0, None, None)

    def _irregular(self, fork: int, why: str) -> _Irregular:
        """The smallest part from `fork` on that is entered only through its first layer and left only through its
        last."""
        while True:
            join = self.joins[fork]
            inside, first = {fork}, fork
            for node in range(fork + 1, join):
                if inside & set(self.before[node]):
                    inside.add(node)
                    for each in self.before[node]:
                        if each not in inside:
                            first = _meet(first, each, self.forks, lambda a, b: a > b)
            if first == fork:
                return _Irregular(fork, join, sorted(inside - {fork}), why)
            fork = first

    def _walk(self, node: int, stop: int | None, fork: int | None) -> Chain:
        """The chain from `node` up to, but without, `stop`; None: to the end. fork: the layer this branch began at."""
        found: list[int | Block] = []
        expected = 0 if fork is None else 1  # number of inputs of the next layer
        while node != stop:
            if len(self.before[node]) != expected:
                raise self._irregular(self.forks[node], "ways meet before the block's end")
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
                raise self._irregular(node, "a block ends where the one around it does")
            expected = len(self.before[join])
            if expected != len(behind):
                raise self._irregular(node, "ways meet before the block's end")
            node = join
        return tuple(found)

    def _block(self, fork: int, join: int) -> Block:
        behind = self.behind[fork]
        number, self.blocks = self.blocks, self.blocks + 1
        branches = tuple(() if each == join else self._walk(each, join, fork) for each in behind)
        if len(behind) > MAX_BRANCHES:
            raise self._irregular(fork, f"it has {len(behind)} branches, more than {MAX_BRANCHES}")
        return Block(number, branches)


def _part(nodes: Sequence[LayerProfile], found: _Irregular) -> list[LayerProfile] | None:
    """Let branches that meet before the others do branch from a new layer, which takes no time and passes its input
    on. None if no branches meet so. In attention, written as products, queries and keys meet first, and the values join
    them later."""
    fork = nodes[found.first]
    inside = {nodes[i].name: nodes[i] for i in found.inside}
    readers = [node for node in nodes if fork.name in node.inputs]
    for meeting in inside.values():
        if len(meeting.inputs) < 2:
            continue
        some, waiting = {meeting.name}, [meeting.name]
        while waiting:
            for name in inside[waiting.pop()].inputs:
                if name in inside and name not in some:
                    some.add(name)
                    waiting.append(name)
        closed = all(node.name in some for node in nodes for name in node.inputs if name in some - {meeting.name})
        own = all(name in some or name == fork.name for each in some for name in inside[each].inputs)
        moved = [node.name for node in readers if node.name in some]
        if closed and own and 2 <= len(moved) < len(readers):
            parting = LayerProfile(
                _free(f"{fork.name}.parting", nodes), "parting", (fork.name,), fork.output_bytes, 0, _no_time(nodes)
            )
            rest = []
            for node in nodes:
                swapped = node.name in moved
                inputs = tuple([parting.name if swapped and each == fork.name else each for each in node.inputs])
                rest.append(_reading(node, inputs) if swapped else node)
                if node is fork:
                    rest.append(parting)
            return rest
    return None


def _merge(nodes: Sequence[LayerProfile], found: _Irregular) -> tuple[list[LayerProfile], str]:
    """All that lies between the two layers as one layer, and a sentence about it."""
    first, last = nodes[found.first], nodes[found.last]
    merged = [nodes[i] for i in found.inside]
    names = {node.name for node in merged}
    rest = [node for node in nodes if node.name not in names]
    leaving = sum(node.output_bytes for node in (first, *merged) if node.name in last.inputs)
    batches = sorted({timing.samples for node in merged for timing in node.times})
    smallest = max(node.times[0].samples for node in merged)
    times = []
    for samples in (each for each in batches if each >= smallest):
        timings = [node.at(samples) for node in merged]
        times.append(Timing(samples, sum(t.forward for t in timings), sum(t.backward for t in timings)))
    layer = LayerProfile(
        _free(_together([node.name for node in merged]), rest),
        "merged",
        (first.name,),
        leaving,
        sum(node.parameter_bytes for node in merged),
        tuple(times),
        sum(node.flops for node in merged),
        "measured" if all(node.source == "measured" for node in merged) else "model",
    )
    at = rest.index(last)
    kept = tuple(name for name in last.inputs if name not in names and name != first.name)
    rest[at] = _reading(last, (*kept, layer.name))
    rest.insert(at, layer)
    note = f"{layer.name} ({len(merged)} layers between {first.name} and {last.name}) counts as one layer: {found}"
    return rest, note


def _together(names: Sequence[str]) -> str:
    """A name for several layers: the module that all of them are in, else the first and the last."""
    common = names[0].split(".")[:-1]
    for name in names:
        common = [a for a, b in takewhile(lambda pair: pair[0] == pair[1], zip(common, name.split("."), strict=False))]
    return ".".join(common) or f"{names[0]}..{names[-1]}"
