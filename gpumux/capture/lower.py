"""Lowers a raw trace to a Program: drops dead operators, gives the state that outlives the step a place, renumbers.

A gradient that the step leaves in `p.grad` is kept in the daemon only if some step of the job reads gradients that it
did not make itself (`keep`). Otherwise a loop that zeroes gradients first would copy all of them at every step for
nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import prod
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree

from gpumux.capture.batch.effects import WrittenInput
from gpumux.capture.generator import STATE_BYTES, words_drawn
from gpumux.capture.recorder import RankTraces, RawCollective, RawOp, RawStorage, TraceRecord
from gpumux.capture.side_effects import LeftNumbers
from gpumux.capture.state import ALL, Part, Place, StateTable
from gpumux.capture.structure import (
    ConstLeaf,
    DeviceLeaf,
    HostLeaf,
    Structure,
    frozen_leaves,
    keeps_gradient,
    map_frozen,
    path_name,
)
from gpumux.capture.symbols import ConstantScalars, Evaluator, Expr, ScalarGuard
from gpumux.capture.tracer import DeviceExit, HostExit, HostResult, RawTrace, SkippedStep, TensorResult, ValueCheck
from gpumux.capture.watch.fingerprint import Change
from gpumux.capture.watch.watches import numerics_now, uses_tf32
from gpumux.errors import CaptureError
from gpumux.program.ir import (
    ITEM_BYTES,
    Arg,
    Collective,
    Op,
    Out,
    Program,
    ScalarRef,
    Storage,
    Tag,
    TensorRef,
    View,
    Wave,
    contiguous_strides,
    extent,
    spans,
)
from gpumux.program.validate import written_storages

# ---- the places of the tensors that a step leaves behind: job buffers, and the copies into them
#
# A tensor that already lies on the job's memory stays there. Any other goes to a buffer of its own, identified by its
# path, so that it has the same place after each step that makes it anew. Tensors that overlap in the memory that the
# step made share one buffer, each at its own offset: a later write to one of them changes the others, as in the plain
# loop. Two tensors that share no memory never get the same place, even if earlier ones shared it.


_ALIGNED = 16  # bytes: the largest element


def place_of(record: TraceRecord, view: int) -> Place | None:
    """The place of a view that lies on a job buffer, else None."""
    v = record.views[view]
    storage = record.storages[v.storage]
    if storage.kind != "state":
        return None
    return Place(storage.key, getattr(torch, v.dtype), v.size, v.stride, v.offset)


@dataclass(slots=True, eq=False)
class _Leaf:
    path: tuple[Any, ...]
    name: str
    view: int
    place: Place | None = None

    @property
    def gradient(self) -> bool:
        return bool(self.path[0] == "grad")


Span = tuple[int, int]  # first byte, and the byte after the last


class _Taken:
    """The parts of buffers that are in use."""

    def __init__(self) -> None:
        self._spans: defaultdict[int, list[Span]] = defaultdict(list)

    def add(self, place: Place) -> None:
        self._spans[place.buffer].append(_span(place))

    def overlaps(self, place: Place) -> bool:
        return place.buffer in self._spans and any(_meet(_span(place), span) for span in self._spans[place.buffer])


class ExitPlaces:
    """The place of each tensor that a step leaves behind. `keep`: the parameters whose gradients the job keeps.

    Raises CaptureError for a module's buffer that shares memory with another tensor that the step leaves behind,
    because the buffer's place is fixed. Raises it also for optimizer state that shares memory with a gradient, because
    a change of that gradient by the script would change the state."""

    def __init__(self, raw: RawTrace, table: StateTable, keep: frozenset[int]) -> None:
        self._record = raw.record
        self._table = table
        self._leaves = {leaf.path: leaf for leaf in self._found(raw)}
        self._copied: list[tuple[_Leaf, list[_Leaf]]] = []  # a leaf that is copied, and the leaves it is copied for
        for leaf in self._leaves.values():
            leaf.place = place_of(self._record, leaf.view) or self._on_moved(leaf, raw)
        self._refuse_shared_buffers(raw)
        self._refuse_shared_gradients()
        fresh = [leaf for leaf in self._leaves.values() if leaf.place is None]
        self._choose_places()
        self.anew = frozenset([*(self.of(leaf.path) for leaf in fresh), *(place for place, _ in raw.replaced)])
        self.kept = self._kept(keep)

    def of(self, path: tuple[Any, ...]) -> Place:
        place = self._leaves[path].place
        assert place is not None
        return place

    def copies(self) -> list[tuple[Place, int]]:
        """(place, view) of the tensors that must be copied to their place. Gradients that are not kept need no copy."""
        wanted = [
            leaf for leaf, users in self._copied
            if any(not one.gradient or one.path[1] in self.kept for one in users)
        ]  # fmt: skip
        return [(self.of(leaf.path), leaf.view) for leaf in wanted]

    def _found(self, raw: RawTrace) -> Iterator[_Leaf]:
        for optimizer in raw.optimizers:
            for _, tree in optimizer:
                for leaf in frozen_leaves(tree):
                    if isinstance(leaf, DeviceExit):
                        yield _Leaf(leaf.path, path_name(leaf.path, self._table), leaf.view)
        for index, view in sorted(raw.gradients.items()):
            yield _Leaf(("grad", index), f"grad.{self._table.param_names[index]}", view)

    def _on_moved(self, leaf: _Leaf, raw: RawTrace) -> Place | None:
        """The place of optimizer state that shares the memory to which the step set a parameter's .data: in that of
        the parameter."""
        v = self._record.views[leaf.view]
        for place, view in () if leaf.gradient else raw.moved_data:
            at = self._record.views[view]
            (start, end), (first, last) = _span_of(at), self._bytes(leaf)
            if at.storage == v.storage and at.dtype == v.dtype and start <= first and last <= end and dense(at):
                return Place(place.buffer, place.dtype, v.size, v.stride, place.offset + v.offset - at.offset)
        return None

    def _choose_places(self) -> None:
        taken = _Taken()
        for _, tensor in self._table.tensors:
            place = self._table.place(tensor)
            if place is not None:
                taken.add(place)
        fresh: defaultdict[int, list[_Leaf]] = defaultdict(list)
        for leaf in self._leaves.values():
            if leaf.place is not None:
                taken.add(leaf.place)
            else:
                fresh[self._record.views[leaf.view].storage].append(leaf)
        groups = {leaf.path: group for found in fresh.values() for group in self._overlapping(found) for leaf in group}
        for leaf in self._leaves.values():  # in this order, because it decides the buffers' numbers
            if leaf.place is None:
                group = groups[leaf.path]
                if len(group) == 1:
                    self._alone(leaf, taken)
                else:
                    self._together(group, taken)

    def _overlapping(self, leaves: list[_Leaf]) -> list[list[_Leaf]]:
        """Leaves on one storage, in groups that share no byte with each other."""
        if len(leaves) == 1:
            return [leaves]
        groups: list[list[_Leaf]] = []
        end = 0
        for start, stop, order in sorted((*self._bytes(leaf), i) for i, leaf in enumerate(leaves)):
            if groups and start < end:
                groups[-1].append(leaves[order])
            else:
                groups.append([leaves[order]])
            end = max(end, stop)
        return [sorted(group, key=leaves.index) for group in groups]

    def _bytes(self, leaf: _Leaf) -> Span:
        view = self._record.views[leaf.view]
        return view.offset * ITEM_BYTES[view.dtype], extent(view)

    def _alone(self, leaf: _Leaf, taken: _Taken) -> None:
        view = self._record.views[leaf.view]
        layout = getattr(torch, view.dtype), view.size, view.stride
        leaf.place = self._free(leaf.path, leaf.name, layout, taken)
        taken.add(leaf.place)
        self._copied.append((leaf, [leaf]))

    def _together(self, group: list[_Leaf], taken: _Taken) -> None:
        spans = [self._bytes(leaf) for leaf in group]
        base = min(start for start, _ in spans) // _ALIGNED * _ALIGNED
        views = [self._record.views[leaf.view] for leaf in group]
        key = tuple(
            (leaf.path, v.dtype, v.size, v.stride, start - base)
            for leaf, v, (start, _) in zip(group, views, spans, strict=True)
        )
        nbytes = max(end for _, end in spans) - base
        whole = self._free(("together", key), group[0].name, (torch.uint8, (nbytes,), (1,)), taken)
        for leaf, view in zip(group, views, strict=True):
            offset = view.offset - base // ITEM_BYTES[view.dtype]
            leaf.place = Place(whole.buffer, getattr(torch, view.dtype), view.size, view.stride, offset)
        taken.add(whole)
        copied: list[tuple[Span, bool]] = []
        for leaf, (start, end) in sorted(zip(group, spans, strict=True), key=lambda one: one[1][0] - one[1][1]):
            view = self._record.views[leaf.view]
            if not any(dense and a <= start and end <= b for (a, b), dense in copied):
                copied.append(((start, end), dense(view)))
                self._copied.append((leaf, group))

    def _free(self, path: tuple[Any, ...], name: str, layout: Any, taken: _Taken) -> Place:
        """The place of this path, or another one while another tensor lies there (a history that is passed on from
        entry to entry)."""
        for turn in count():
            tensor = self._table.placeholder((*path, "turn", turn) if turn else path, name, *layout)
            place = self._table.place(tensor)
            assert place is not None
            if not taken.overlaps(place):
                return place
        raise AssertionError("a new buffer is in no use")

    def _kept(self, keep: frozenset[int]) -> frozenset[int]:
        """The gradients whose values the job has: those in `keep`, and those that share memory with kept state."""
        places = {leaf.path[1]: self.of(leaf.path) for leaf in self._leaves.values() if leaf.gradient}
        kept = keep & places.keys()
        if len(kept) == len(places):
            return kept
        needed = _Taken()
        for _, tensor in self._table.tensors:
            if (place := self._table.place(tensor)) is not None:
                needed.add(place)
        for index in kept:
            needed.add(places[index])
        while True:
            more = {i for i in places.keys() - kept if needed.overlaps(places[i])}
            if not more:
                return kept
            kept |= more
            for index in more:
                needed.add(places[index])

    def _refuse_shared_gradients(self) -> None:
        views = self._record.views
        gradients = {views[leaf.view].storage: leaf for leaf in self._leaves.values() if leaf.gradient}
        for leaf in self._leaves.values():
            other = gradients.get(views[leaf.view].storage)
            if other is not None and not leaf.gradient:
                raise keeps_gradient(leaf.name, other.name.removeprefix("grad."))

    def _refuse_shared_buffers(self, raw: RawTrace) -> None:
        """Raises CaptureError for a module's buffer that shares memory. A buffer keeps its place: the tensor that
        replaces it is copied there, and then shares no memory."""
        if not raw.replaced and not raw.moved_data:
            return
        table, views = self._table, self._record.views
        names = {p: name for name, tensor in table.tensors if (p := table.place(tensor)) is not None}
        left = [(leaf.name, leaf.view) for leaf in self._leaves.values() if self._on_moved(leaf, raw) is None]
        new = [*raw.replaced, *raw.moved_data]
        staying = names.keys() - {place for place, _ in new}
        for at, (place, view) in enumerate(new):
            name, v, lies = names.get(place, "a buffer"), views[view], place_of(self._record, view)
            others = left + [(names.get(p, "a buffer"), w) for p, w in new[:at]]
            shared = [
                one for one, w in others if views[w].storage == v.storage and _meet(_span_of(views[w]), _span_of(v))
            ]
            shared += [
                n for p, n in names.items() if p.buffer == place.buffer and p != place and _meet(_span(p), _span(place))
            ]
            if lies is not None:
                shared += [names[p] for p in staying if p.buffer == lies.buffer and _meet(_span(p), _span(lies))]
            if shared:
                does = "replaces the buffer" if at < len(raw.replaced) else "sets .data of"
                raise CaptureError(
                    f"the step {does} {name} to a tensor that shares memory with {shared[0]}",
                    f"give {name} a copy of its own: .clone()",
                )


def _span(place: Place) -> Span:
    return _span_of(View(0, str(place.dtype).removeprefix("torch."), place.size, place.stride, place.offset))


def _span_of(view: View) -> Span:
    return view.offset * ITEM_BYTES[view.dtype], extent(view)


def _meet(a: Span, b: Span) -> bool:
    return max(a[0], b[0]) < min(a[1], b[1])


def dense(view: View) -> bool:
    """Whether the view covers all bytes of its span, each once."""
    expected = 1
    for stride, size in sorted((s, n) for n, s in zip(view.size, view.stride, strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= size
    return True


# ----


@dataclass(frozen=True, slots=True)
class Lowered:
    program: Program
    binding: tuple[int, ...]  # job buffer of each state slot
    exit: Structure
    evaluator: Evaluator  # -> scalars, exit host values, changed hyperparameters, host results, replayed numbers
    counts: tuple[int, int, int]  # numbers of the evaluator's values of the first three kinds
    groups: tuple[tuple[int, int, str, int | None], ...]
    results: tuple[Any, ...]  # per leaf: ("tensor", i), ("host", i) or ("const", value)
    result_spec: pytree.TreeSpec
    flags: tuple[Change, ...]
    reads_dropped: frozenset[int]  # parameters whose dropped gradient the step reads
    written: tuple[Expr, ...] = ()  # numbers written into the Program as constants
    # 32-bit words that a step takes of the client's generator (generator.py), if its Program has `generator`.
    words: int | None = 0
    # What the last entries of `results` are, which the step does not return.
    further: tuple[ValueCheck | WrittenInput | SkippedStep, ...] = ()
    anew: frozenset[Place] = frozenset()  # places that hold a tensor made by the step after it
    replays: tuple[LeftNumbers, ...] = ()
    replayed: int = 0  # how many numbers they take
    scalars: tuple[int, ...] = ()  # of each of the Program's host scalars, its number in the trace
    lines: tuple[str, ...] = ()  # the user's line of each of the Program's operators, but for copies after the last


@dataclass(frozen=True, slots=True)
class LoweredRank:
    """What one rank of a step runs. It takes the host scalars of the whole step's Program, used or not."""

    program: Program
    binding: tuple[int, ...]  # job buffer of each state slot


class _Exit:
    """The end of a step: the places of the tensors that it leaves behind, and the copies into them."""

    def __init__(self, raw: RawTrace, table: StateTable, keep: frozenset[int]) -> None:
        self.host: list[Expr] = []
        self._vars: dict[int, int] = {}
        self._places = ExitPlaces(raw, table, keep)
        optimizers = tuple(
            tuple((key, map_frozen(tree, self._leaf)) for key, tree in frozen) for frozen in raw.optimizers
        )
        places = [(index, self._places.of(("grad", index))) for index in sorted(raw.gradients)]
        kept = tuple(one for one in places if one[0] in self._places.kept)
        dropped = tuple(one for one in places if one[0] not in self._places.kept)
        self.copies = [*self._places.copies(), *raw.replaced, *raw.moved_data]
        self.anew = self._places.anew
        self.structure = Structure(optimizers, kept, dropped)

    def _leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, HostExit):
            var = self._vars.setdefault(leaf.expr.index, len(self.host))
            if var == len(self.host):
                self.host.append(leaf.expr)
            return HostLeaf(var, leaf.dtype)
        if isinstance(leaf, DeviceExit):
            return DeviceLeaf(self._places.of(leaf.path))
        assert isinstance(leaf, ConstLeaf)
        return leaf


def lower(
    raw: RawTrace, table: StateTable, keep: frozenset[int], device: str = "cpu", clients_generator: bool = False,
    constants: ConstantScalars | None = None,
) -> Lowered:  # fmt: skip
    """The Program of a trace, for a job that keeps the gradients of the parameters in `keep`. `clients_generator`: draw
    from the client's generator (generator.py). `constants`: decides which numbers are written into the Program."""
    end = _Exit(raw, table, keep)
    dropped = {place.buffer: i for i, place in (*raw.entry.dropped, *end.structure.dropped)}
    for buffer in end.structure.buffers(table, ALL):
        dropped.pop(buffer, None)
    numerics = numerics_now("cuda" if table.gpu else device)
    changed = None if constants is None else constants.numbers_of_each_step
    given = (
        end.structure, tuple(end.copies), end.anew, tuple(dropped.items()), device, table.gpu, numerics, changed,
        clients_generator,
    )  # fmt: skip
    if given not in raw.lowered:
        raw.lowered[given] = _lower(raw, end, dropped, table, device, clients_generator, constants)
    found: Lowered = raw.lowered[given]
    return found


def _lower(
    raw: RawTrace, end: _Exit, dropped: dict[int, int], table: StateTable, device: str, clients_generator: bool,
    constants: ConstantScalars | None,
) -> Lowered:  # fmt: skip
    record = raw.record
    tensors = [r.view for r in raw.results if isinstance(r, TensorResult)]
    program, build = _program(record, record.ops, tensors, end.copies, dropped, table, device, constants)
    # Before dead operators are dropped: adding to a gradient reads it, even if the sum is not used.
    touched = frozenset().union(*(op.reads for op in record.ops))
    entry_dropped = {place.buffer: i for i, place in raw.entry.dropped}
    needs = frozenset(i for b, i in entry_dropped.items() if record.state_storage.get(b) in touched)
    results, host_results = _results(raw)
    table.tf32 = table.tf32 or (table.gpu and uses_tf32(program))
    words = words_drawn(program) if clients_generator else 0
    if words != 0:
        program = with_generator(program)
    groups = tuple((i, j, key, k) for i, j, key, k, _ in raw.groups)
    replayed = [expr for replay in raw.replays for expr in replay.exprs]
    wanted = [*build.scalars, *end.host, *(g[4] for g in raw.groups), *host_results, *replayed]
    written = tuple(build.written.values())
    guards = (*raw.guards, *(ScalarGuard(expr, expr.value, "") for expr in written))
    return Lowered(
        program, tuple(build.binding), end.structure, Evaluator(wanted, guards),
        (len(build.scalars), len(end.host), len(groups)), groups, results, raw.result_spec, tuple(raw.flags), needs,
        written, words, tuple(raw.further), end.anew, tuple(raw.replays), len(replayed), build.numbers, build.lines,
    )  # fmt: skip


def _program(
    record: TraceRecord, operators: list[RawOp], tensors: list[int], left: list[tuple[Place, int]],
    dropped: Collection[int], table: StateTable, device: str, constants: ConstantScalars | None,
    rank: tuple[int, int] = (0, 1), scalars: Sequence[int] = (),
) -> tuple[Program, _Build]:  # fmt: skip
    """The Program of these operators, which returns `tensors` and leaves `left` in the job's buffers. dropped: buffers
    of gradients that nothing reads after the step, and those of other ranks. rank: which of how many. scalars: numbers
    of the trace that are its host scalars, besides those that its operators use."""
    roots = {record.views[v].storage for v in tensors} | {record.views[v].storage for _, v in left}
    roots |= {s for b, s in record.state_storage.items() if b not in dropped}
    ops = _live(operators, roots)
    build = _Build(record, table, frozenset().union(*(op.writes for op in ops)), constants)
    build.take_scalars(scalars)
    ops, copies = _born_in_place(record, ops, left, build)
    inputs = tuple(build.view(v) for v in record.inputs)
    out_ops: list[Op] = []
    exchanges: list[Collective] = []
    tail: int | None = None
    for op in ops:
        if op.tail and tail is None:
            tail = len(out_ops)
        if op.collective is None:
            out_ops.append(build.op(op))
        else:
            exchanges.append(build.collective(op.collective, len(out_ops)))
    places = [build.view(v) for v in tensors]
    if left:  # results are read before the copies overwrite state
        places = build.spare(places, out_ops)
    out_ops += build.copies(copies)
    if exchanges:  # a collective stands before an operator, and not before the first
        build.prelude.append(build.nothing())
        if exchanges[-1].op == len(out_ops):
            out_ops.append(build.nothing())
    first = len(build.prelude)
    build.lines = ("",) * first + tuple([op.where for op in ops if op.collective is None])
    layers, found = spans((op.label for op in ops if op.collective is None), first)
    program = Program(
        storages=tuple(build.storages), views=tuple(build.views), ops=(*build.prelude, *out_ops), inputs=inputs,
        results=tuple(places), scalars=tuple(build.kinds), consts=tuple(build.consts),
        collectives=tuple([replace(one, op=one.op + first) for one in exchanges]),
        numerics=numerics_now("cuda" if table.gpu else device), device=device, layers=layers, spans=found,
        rank=rank[0], ranks=rank[1], wave=None if tail is None else Wave(0, tail + first),
    )  # fmt: skip
    return program, build


def lower_rank(raw: RawTrace, rank: int, table: StateTable, keep: frozenset[int], whole: Lowered) -> LoweredRank:
    """The Program of one rank of a step that is split over ranks, with its parts of the results, in order. `whole`: the
    step's Program for one device."""
    ranks: RankTraces = raw.ranks
    end = _Exit(raw, table, keep)
    views = ranks.record.views
    dropped = {place.buffer for _, place in (*raw.entry.dropped, *end.structure.dropped)}
    dropped -= end.structure.buffers(table, ALL)
    here = {b for b, homes in ranks.homes.items() if rank not in homes}
    params = [table.place(param) for param in table.params]
    homes = {b: ranks.homes.get(place.buffer) for i, b in end.structure.of_parameters() if (place := params[i])}
    away = {b for b, there in homes.items() if there is not None and rank not in there}
    left = [
        (place, view) for place, view in end.copies
        if views[view].storage in ranks.held[rank] and place.buffer not in away
    ]  # fmt: skip
    mine = [view for result in ranks.results for r, view in zip(result.ranks, result.views, strict=True) if r == rank]
    program, build = _program(
        ranks.record,
        ranks.ops[rank],
        mine,
        left,
        dropped | here,
        table,
        "cpu",
        None,
        (rank, len(ranks.ops)),
        whole.scalars,
    )
    if whole.words != 0:
        program = with_generator(program)
    return LoweredRank(program, tuple(build.binding))


def with_generator(program: Program) -> Program:
    """The Program with the generator's state as an additional input and an additional result."""
    storage, view = len(program.storages), len(program.views)
    return replace(
        program,
        storages=(*program.storages, Storage("input", STATE_BYTES, len(program.inputs))),
        views=(*program.views, View(storage, "uint8", (STATE_BYTES,), (1,))),
        inputs=(*program.inputs, view), results=(*program.results, view), generator=view,
    )  # fmt: skip


def _results(raw: RawTrace) -> tuple[tuple[Any, ...], list[Expr]]:
    out: list[Any] = []
    exprs: list[Expr] = []
    count = 0
    for r in raw.results:
        if isinstance(r, TensorResult):
            out.append(("tensor", count))
            count += 1
        elif isinstance(r, HostResult):
            out.append(("host", len(exprs)))
            exprs.append(r.expr)
        else:
            out.append(("const", r))
    return tuple(out), exprs


def _live(ops: list[RawOp], roots: set[int]) -> list[RawOp]:
    """The operators that a root depends on, and all draws, because dropping one would shift the later ones."""
    live = set(roots)
    kept: list[RawOp] = []
    for op in reversed(ops):
        if op.random is not None or op.collective is not None or op.writes & live:
            live |= op.reads | op.writes
            kept.append(op)
    kept.reverse()
    return kept


_ZEROS = frozenset(("aten.zeros_like.default", "aten.zeros.default", "aten.new_zeros.default"))


def _born_in_place(
    record: TraceRecord, ops: list[RawOp], copies: list[tuple[Place, int]], build: _Build
) -> tuple[list[RawOp], list[tuple[Place, int]]]:
    """Make the state of an optimizer's first step (zeros, or a clone) directly in its buffer. Returns the operators and
    the remaining copies. Otherwise momenta would exist twice in the step that takes the most memory."""
    made: dict[int, int] = {}  # storage -> the first operator that has it as its only output
    for at, op in enumerate(ops):
        if len(op.outs) == 1 and isinstance(op.outs[0], int):
            made.setdefault(record.views[op.outs[0]].storage, at)
    wanted = Counter(record.views[view].storage for _, view in copies)
    targets = Counter(place.buffer for place, _ in copies)
    changed, left = list(ops), []
    for place, view in copies:
        v = record.views[view]
        storage, at = record.storages[v.storage], made.get(v.storage, -1)
        born = ops[at] if at >= 0 and ops[at].outs[0] == view else None
        fits = (
            storage.kind == "temp"
            and wanted[v.storage] == targets[place.buffer] == 1
            and place.buffer not in record.state_storage  # the step does not read the buffer's old content
            and (place.size, place.stride, place.offset, v.offset) == (v.size, v.stride, 0, 0)
            and place.dtype == getattr(torch, v.dtype)
            and build.takes(v.storage, place.buffer)
        )
        if born is None or not fits or v.storage in born.reads or born.target not in (*_ZEROS, "aten.clone.default"):
            left.append((place, view))
            continue
        build.keep_in(v.storage, place.buffer)
        if born.target in _ZEROS:
            changed[at] = replace(born, target="aten.zero_.default", args=(TensorRef(view),), kwargs=())
        else:
            changed[at] = replace(born, target="aten.copy_.default", args=(TensorRef(view), born.args[0]), kwargs=())
    return changed, left


class _Build:
    """Renumbers storages, views and scalars in order of first use."""

    def __init__(
        self, record: TraceRecord, table: StateTable, written: frozenset[int], constants: ConstantScalars | None = None
    ) -> None:
        self._constants = constants
        self.written: dict[int, Expr] = {}  # numbers of the record that are constants in operators
        self._record = record
        self._table = table
        self._written = written
        self.prelude: list[Op] = []  # copies of constants that the step writes into
        self.lines: tuple[str, ...] = ()  # the user's line of each operator
        self.storages: list[Storage] = []
        self.views: list[View] = []
        self.consts: list[bytes] = []
        self.binding: list[int] = []
        self.scalars: list[Expr] = []
        self.kinds: list[Any] = []
        self._storage: dict[int, int] = {}
        self._views: dict[View, int] = {}
        self._buffers: dict[int, int] = {}
        self._scalar: dict[int, int] = {}

    def storage(self, raw: int) -> int:
        if raw not in self._storage:
            s = self._record.storages[raw]
            if s.kind == "state":
                self._storage[raw] = self._state(s.key)
            elif s.kind == "const":
                self._storage[raw] = self._const(s, raw in self._written)
            else:
                self._storage[raw] = self._put(
                    Storage("input" if s.kind == "input" else "temp", s.nbytes, s.key if s.kind == "input" else -1)
                )
        return self._storage[raw]

    def takes(self, raw: int, buffer: int) -> bool:
        """Whether a temporary storage is as large as a job buffer."""
        return self._record.storages[raw].nbytes == self._table.buffers[buffer].nbytes

    def keep_in(self, raw: int, buffer: int) -> None:
        """Put a temporary storage on a job buffer."""
        self._storage[raw] = self._state(buffer)

    def _const(self, s: RawStorage, written: bool) -> int:
        const = self._put(Storage("const", len(s.key), len(self.consts)))
        self.consts.append(s.key)
        if not written:
            return const
        size = (len(s.key) // ITEM_BYTES[s.dtype],)
        source = self._view(View(const, s.dtype, size, (1,)))
        fresh = self._put(Storage("temp", len(s.key)))
        target = self._view(View(fresh, s.dtype, size, (1,)))
        self.prelude.append(Op("aten.clone.default", (TensorRef(source),), (), (target,)))
        return fresh

    def spare(self, places: list[int], ops: list[Op]) -> list[int]:
        """Views of results; those that lie on state are cloned by operators added to `ops`."""
        spared = []
        for view in places:
            if self.storages[self.views[view].storage].kind == "state":
                op, view = self._clone(view)
                ops.append(op)
            spared.append(view)
        return spared

    def _clone(self, view: int) -> tuple[Op, int]:
        v = self.views[view]
        fresh = self._put(Storage("temp", ITEM_BYTES[v.dtype] * prod(v.size)))
        clone = self._view(View(fresh, v.dtype, v.size, contiguous_strides(v.size)))
        tag = (("memory_format", Tag("memory_format", "contiguous_format")),)
        return Op("aten.clone.default", (TensorRef(view),), tag, (clone,)), clone

    def _put(self, storage: Storage) -> int:
        self.storages.append(storage)
        return len(self.storages) - 1

    def _state(self, buffer: int) -> int:
        if buffer not in self._buffers:
            self._buffers[buffer] = self._put(Storage("state", self._table.buffers[buffer].nbytes, len(self.binding)))
            self.binding.append(buffer)
        return self._buffers[buffer]

    def view(self, raw: int) -> int:
        v = self._record.views[raw]
        return self._view(View(self.storage(v.storage), v.dtype, v.size, v.stride, v.offset))

    def _view(self, view: View) -> int:
        if view not in self._views:
            self._views[view] = len(self.views)
            self.views.append(view)
        return self._views[view]

    def _arg(self, arg: Arg) -> Arg:
        if isinstance(arg, TensorRef):
            return TensorRef(self.view(arg.view))
        if isinstance(arg, ScalarRef):
            expr = self._record.scalars[arg.index]
            if arg.index in self.written or (self._constants is not None and self._constants.holds(expr)):
                self.written[arg.index] = expr
                return expr.value
            self.take_scalars((arg.index,))
            return ScalarRef(self._scalar[arg.index])
        if isinstance(arg, tuple):
            return tuple(self._arg(a) for a in arg)
        return arg

    def take_scalars(self, numbers: Iterable[int]) -> None:
        """Make these numbers of the trace host scalars, those that are none yet."""
        for number in numbers:
            if number not in self._scalar:
                expr = self._record.scalars[number]
                self._scalar[number] = len(self.scalars)
                self.scalars.append(expr)
                self.kinds.append("float" if isinstance(expr.value, float) else "int")

    @property
    def numbers(self) -> tuple[int, ...]:
        """The number in the trace of each host scalar."""
        return tuple(self._scalar)

    def op(self, op: RawOp) -> Op:
        args = tuple(self._arg(a) for a in op.args)
        kwargs = tuple((k, self._arg(a)) for k, a in op.kwargs)
        return Op(op.target, args, kwargs, tuple(self._out(o) for o in op.outs), op.random)

    def _out(self, out: Out) -> Out:
        if out is None:
            return None
        return tuple(self.view(v) for v in out) if isinstance(out, tuple) else self.view(out)

    def collective(self, one: RawCollective, at: int) -> Collective:
        """What ranks exchange before operator `at`."""
        pairs = [tuple([(rank, self.view(view)) for rank, view in each]) for each in (one.sends, one.receives)]
        views = tuple([self.view(view) for view in one.views])
        return Collective(at, one.kind, one.sequence, one.members, views, one.scale, *pairs)

    def nothing(self) -> Op:
        """An operator that only makes a number, for a collective to stand behind or before."""
        fresh = self._put(Storage("temp", ITEM_BYTES["int64"]))
        kwargs = (("dtype", Tag("dtype", "int64")),)
        return Op("aten.zeros.default", ((),), kwargs, (self._view(View(fresh, "int64", (), ())),))

    def copies(self, wanted: list[tuple[Place, int]]) -> list[Op]:
        """Operators that copy the tensors that the step leaves behind to their buffers. A source on state is cloned
        first, in case another copy overwrites it."""
        first: list[Op] = []
        then: list[Op] = []
        for place, raw in wanted:
            source = self.view(raw)
            if self.storages[self.views[source].storage].kind == "state":
                op, source = self._clone(source)
                first.append(op)
            target = self._view(
                View(
                    self._state(place.buffer),
                    str(place.dtype).removeprefix("torch."),
                    place.size,
                    place.stride,
                    place.offset,
                )
            )
            then.append(Op("aten.copy_.default", (TensorRef(target), TensorRef(source)), (), (target,)))
        return first + then


# ---- buffers and optimizer state that a step replaces by new tensors
#
# The script may hold the old tensors. In the plain loop these keep their values. So the places get other local memory,
# and the old tensors become plain tensors of the script's. Reading them raises StaleState if their last values were
# never fetched.


class Replaces(NamedTuple):
    """The job buffers in which one Program replaces tensors. `written`: all buffers that it writes in place, kept or
    not. `beside`: buffers with replaced state in which other state stays."""

    model: frozenset[int]
    optimizer: frozenset[int]
    written: frozenset[int]
    beside: frozenset[int]


NOTHING = Replaces(frozenset(), frozenset(), frozenset(), frozenset())


def replaces(record: TraceRecord, anew: Iterable[Place], after: Structure, table: StateTable) -> Replaces:
    """The replacements that a trace makes. `anew`: the places of the tensors it made; `after`: the structure after
    it."""
    places = set(anew)
    storages = frozenset[int]().union(*(op.writes for op in record.ops))
    written = frozenset(buffer for buffer, storage in record.state_storage.items() if storage in storages)
    if not places:
        return NOTHING._replace(written=written)
    buffers = {place.buffer for place in places}
    model = after.buffers(table, {Part.MODEL}) & buffers
    optimizer = after.buffers(table, {Part.OPTIMIZER}) & buffers - model
    beside = {place.buffer for place in after.places() if place.buffer in optimizer and place not in places}
    return Replaces(frozenset(model), frozenset(optimizer), written, frozenset(beside))


def changes_state(program: Program) -> bool:
    """Whether a Program changes state of the job. A batch norm that evaluates does not, though it could."""
    ops = tuple([op for op in program.ops if not _evaluates(op)])
    return any(program.storages[s].kind == "state" for s in written_storages(replace(program, ops=ops)))


def _evaluates(op: Op) -> bool:
    return op.target == "aten.native_batch_norm.default" and op.args[5] is False
