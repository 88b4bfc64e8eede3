"""Structural checks of a Program, without torch.

After `validate` every index is in range, every view lies inside its storage, every temporary is made before it is used,
and results of operators lie on storages that they were given or make. Whether results fit their operators is for
`check.check`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import isfinite, prod
from typing import NoReturn

from gpumux.errors import ProgramError
from gpumux.program import operators
from gpumux.program.ir import (
    DEFAULT,
    IR_VERSION,
    ITEM_BYTES,
    STREAM_BYTES,
    Arg,
    Collective,
    Complex,
    Op,
    Out,
    Program,
    ProgramLimits,
    ScalarRef,
    Storage,
    StorageKind,
    Tag,
    TensorRef,
    View,
    extent,
)
from gpumux.types import Gang

DEVICES = frozenset({"cpu", "cuda"})
MATMUL_PRECISIONS = frozenset({"highest", "high", "medium"})
CONV_PRECISIONS = frozenset({"tf32", "ieee"})
DEFAULT_DTYPES = frozenset({"float16", "bfloat16", "float32", "float64"})
MEMORY_FORMATS = frozenset({"contiguous_format", "preserve_format", "channels_last", "channels_last_3d"})
_SUMMED = frozenset(("int64", "float16", "bfloat16", "float32", "float64", "complex64", "complex128"))
_TAG_NAMES = {
    "dtype": frozenset(ITEM_BYTES),
    "layout": frozenset({"strided"}),
    "memory_format": MEMORY_FORMATS,
    "device": frozenset({""}),
}


def validate(program: Program, limits: ProgramLimits = DEFAULT) -> None:
    """Raise ProgramError naming the fault and its place, if there is one."""
    _settings(program)
    _counts(program, limits)
    for index, storage in enumerate(program.storages):
        if not 0 <= storage.nbytes <= limits.storage_bytes:
            _fail(f"storage {index}", f"{storage.nbytes} bytes; the limit is {limits.storage_bytes}")
    for index, view in enumerate(program.views):
        _view(program, index, view, limits)
    _slots(program)
    _inputs(program)
    _consts(program)
    born = _Births(program).run()
    _results(program, born, limits)
    _random(program)
    _generator(program)
    _layers(program, limits)
    _collectives(program, limits)
    _wave(program)


def state_slots(program: Program) -> tuple[int, ...]:
    """Bytes of each state slot, in slot order."""
    return _by_slot(program, "state")


def const_bytes(program: Program) -> int:
    """Bytes of the constants in the Program."""
    return sum(len(data) for data in program.consts)


def written_storages(program: Program) -> frozenset[int]:
    """Storages that some operator changes in place, hidden writes included. Operators that the
    daemon's administrator added to the allow-list count as writing every storage they are given."""
    found: set[int] = set()
    for op in program.ops:
        known = op.target in operators.ALLOWED
        positions = operators.written_args(op.target) if known else range(len(op.args))
        args = [op.args[p] for p in positions if p < len(op.args)]
        if not known:
            args += [value for _, value in op.kwargs]
        found.update(program.views[ref.view].storage for ref in tensor_refs(tuple(args)))
        if op.stream is not None:
            found.add(program.views[op.stream].storage)
    if program.generator is not None:
        found.add(program.views[program.generator].storage)
    return frozenset(found)


def leaves(arg: Arg) -> Iterator[Arg]:
    """The leaves of an argument: tuples are opened at every depth."""
    if isinstance(arg, tuple):
        for item in arg:
            yield from leaves(item)
    else:
        yield arg


def tensor_refs(args: tuple[Arg, ...]) -> list[TensorRef]:
    """The tensors in some arguments, in lists too. A Program has tens of thousands, so this is no generator."""
    found: list[TensorRef] = []
    for arg in args:
        if isinstance(arg, TensorRef):
            found.append(arg)
        elif isinstance(arg, tuple):
            found += tensor_refs(arg)
    return found


def op_args(op: Op) -> tuple[Arg, ...]:
    """All arguments of `op`, keyword ones last."""
    return (*op.args, *[value for _, value in op.kwargs])


def out_views(outs: tuple[Out, ...]) -> Iterator[int]:
    for out in outs:
        if isinstance(out, tuple):
            yield from out
        elif out is not None:
            yield out


# ---- the checks ----------------------------------------------------------------------------------


def _fail(where: str, what: str) -> NoReturn:
    raise ProgramError(f"{where}: {what}", "this Program was not made by a gpumux capture, or was changed since")


def _settings(program: Program) -> None:
    n = program.numerics
    known = (
        program.version == IR_VERSION
        and program.kind in ("aten", "compiled")
        and n.matmul_precision in MATMUL_PRECISIONS
        and n.default_dtype in DEFAULT_DTYPES
        and n.conv_precision in CONV_PRECISIONS
        and all(type(flag) is bool for flag in (n.deterministic, n.flush_denormal, n.mkldnn))
    )
    if not known:
        _fail("settings", f"unknown kind, version or numerics: {program.kind!r}, {program.version}, {n}")
    if program.device not in DEVICES:
        _fail("settings", f"traced for device {program.device!r:.40}; known are {', '.join(sorted(DEVICES))}")
    if not all(kind in ("float", "int") for kind in program.scalars):
        _fail("settings", "a host scalar is neither float nor int")


def _counts(program: Program, limits: ProgramLimits) -> None:
    for what, count, limit in (
        ("operators", len(program.ops), limits.ops),
        ("views", len(program.views), limits.views),
        ("storages", len(program.storages), limits.storages),
        ("inputs", len(program.inputs), limits.tensors),
        ("results", len(program.results), limits.tensors),
        ("constants", len(program.consts), limits.tensors),
        ("host scalars", len(program.scalars), limits.tensors),
        ("collectives", len(program.collectives), limits.tensors),
        ("layers", len(program.layers), limits.layers),
        ("spans of layers", len(program.spans), limits.ops),
        ("bytes of constants", const_bytes(program), limits.const_bytes),
    ):
        if count > limit:
            _fail("limits", f"{count} {what}; the limit is {limit}")


def _view(program: Program, index: int, view: View, limits: ProgramLimits) -> None:
    item = ITEM_BYTES.get(view.dtype)
    if item is None:
        _fail(f"view {index}", f"unknown dtype {view.dtype!r:.40}")
    if not 0 <= view.storage < len(program.storages):
        _fail(f"view {index}", f"storage {view.storage} of {len(program.storages)}")
    if len(view.size) != len(view.stride) or len(view.size) > limits.dims:
        _fail(f"view {index}", f"{len(view.size)} sizes, {len(view.stride)} strides; at most {limits.dims}")
    if view.offset < 0 or min(view.size, default=0) < 0 or min(view.stride, default=0) < 0:
        _fail(f"view {index}", "a negative size, stride or offset")
    # An expanded view is small in its storage and large once laid out, as a result is.
    bound = limits.storage_bytes
    if max(view.size, default=0) > bound or prod(view.size) * item > bound or view.offset * item > bound:
        _fail(f"view {index}", f"larger than {bound} bytes laid out densely")
    if max(view.stride, default=0) * item > bound:
        _fail(f"view {index}", f"a stride over {bound} bytes")
    reach = extent(view)
    if reach > program.storages[view.storage].nbytes:
        _fail(f"view {index}", f"reaches byte {reach} of {program.storages[view.storage].nbytes}")


def _slots(program: Program) -> None:
    kinds: tuple[StorageKind, ...] = ("state", "input", "const")
    for kind in kinds:
        slots = sorted(s.slot for s in program.storages if s.kind == kind)
        if slots != list(range(len(slots))):
            _fail(f"{kind} slots", f"not 0..{len(slots) - 1}, each once")
    for index, storage in enumerate(program.storages):
        if storage.kind == "temp" and storage.slot != -1:
            _fail(f"storage {index}", "a temporary with a slot")
        if storage.kind not in ("temp", *kinds):
            _fail(f"storage {index}", f"of unknown kind {storage.kind!r:.40}")


def _layers(program: Program, limits: ProgramLimits) -> None:
    for name in program.layers:
        if not 0 < len(name) <= limits.string:
            _fail("layers", f"a name of {len(name)} characters; 1 to {limits.string} may be")
    if len(set(program.layers)) != len(program.layers):
        _fail("layers", "one is named twice")
    end, used = 0, 0
    for number, span in enumerate(program.spans):
        if span.first < end or span.count < 1 or span.first + span.count > len(program.ops):
            _fail(f"span {number}", f"operators {span.first} to {span.first + span.count} of {len(program.ops)}")
        if not 0 <= span.layer <= min(used, len(program.layers) - 1):
            _fail(f"span {number}", f"layer {span.layer} of {len(program.layers)}, or not in order of first use")
        end, used = span.first + span.count, max(used, span.layer + 1)
    if used != len(program.layers):
        _fail("layers", f"{len(program.layers)} named, {used} used")


def _collectives(program: Program, limits: ProgramLimits) -> None:
    if not 1 <= program.ranks <= limits.ranks or not 0 <= program.rank < program.ranks:
        _fail("ranks", f"rank {program.rank} of {program.ranks}; 1 to {limits.ranks} may be")
    at, before = 1, -1
    for one in program.collectives:
        where = f"collective {one.sequence}"
        if not at <= one.op < len(program.ops) or one.sequence <= before:
            _fail(where, f"before operator {one.op} of {len(program.ops)}, out of order, or before the first")
        at, before = one.op, one.sequence
        if len(one.members) < 2 or list(one.members) != sorted(set(one.members)) or program.rank not in one.members:
            _fail(where, f"its members {one.members} are not rising, or rank {program.rank} is not one of them")
        if not one.members[-1] < program.ranks or one.members[0] < 0:
            _fail(where, f"its members {one.members} are not of {program.ranks} ranks")
        if one.kind == "all_reduce":
            _all_reduce(program, one, where)
        elif one.kind == "exchange":
            _exchange(program, one, where)
        else:
            _fail(where, f"of unknown kind {one.kind!r:.40}")


def _wave(program: Program) -> None:
    wave = program.wave
    if wave is not None and not (wave.lane in (0, 1) and 0 < wave.tail < len(program.ops)):
        _fail("wave", f"lane {wave.lane}, and a tail at operator {wave.tail} of {len(program.ops)}")
    if wave is not None and program.generator is None and any(op.random is not None for op in program.ops):
        _fail("wave", "it draws from the job's generator, from which steps of both waves would draw in turns")


def _all_reduce(program: Program, one: Collective, where: str) -> None:
    if not one.views or one.sends or one.receives or not isfinite(one.scale):
        _fail(where, "it sums nothing, has a scale that is not finite, or sends and receives besides")
    types = {program.views[view].dtype for view in one.views}
    if not types <= _SUMMED:
        _fail(where, f"it sums values of type {', '.join(sorted(types - _SUMMED))}")
    if one.scale != 1.0 and "int64" in types:
        _fail(where, f"it scales integers by {one.scale}")


def refuse_rank(program: Program, gang: Gang | None) -> ProgramError | None:
    """Why a job of this gang can't run the program, as far as ranks go, or None."""
    if program.ranks == 1 and not program.collectives:
        return None
    mine = f"the program is for rank {program.rank} of {program.ranks}"
    if gang is None:
        return ProgramError(f"{mine}, and the job is in no gang", "open the job as a rank of a gang")
    if (program.rank, program.ranks) != (gang.rank, gang.ranks):
        return ProgramError(f"{mine}, and the job is rank {gang.rank} of {gang.ranks}", "load each rank's own program")
    return None


def _exchange(program: Program, one: Collective, where: str) -> None:
    if one.views or one.scale != 1.0:
        _fail(where, "it sums besides")
    peers = {rank for rank, _ in (*one.sends, *one.receives)}
    if not peers or not peers <= set(one.members) - {program.rank}:
        _fail(where, f"it exchanges with ranks {sorted(peers)}, which must be members and not rank {program.rank}")
    written = [view for _, view in one.receives]
    if any(0 in program.views[view].stride for view in written if max(program.views[view].size, default=0) > 1):
        _fail(where, "it receives into a view whose elements lie on each other")


def _by_slot(program: Program, kind: StorageKind) -> tuple[int, ...]:
    held: list[Storage] = sorted((s for s in program.storages if s.kind == kind), key=lambda s: s.slot)
    return tuple([s.nbytes for s in held])


def _inputs(program: Program) -> None:
    expected = len(_by_slot(program, "input"))
    if len(program.inputs) != expected:
        _fail("inputs", f"{len(program.inputs)} listed, {expected} storages of that kind")
    for position, index in enumerate(program.inputs):
        if not 0 <= index < len(program.views):
            _fail(f"input {position}", f"view {index} of {len(program.views)}")
        view = program.views[index]
        storage = program.storages[view.storage]
        if storage.kind != "input" or storage.slot != position or view.offset != 0:
            _fail(f"input {position}", "its view must start at offset 0 of the input storage with that slot")


def _consts(program: Program) -> None:
    sizes = _by_slot(program, "const")
    if sizes != tuple([len(data) for data in program.consts]):
        _fail("constants", "their bytes and their storages differ in number or size")


class _Births:
    """Walks the operators once and keeps track of the storages that exist so far."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._born = [storage.kind != "temp" for storage in program.storages]

    def run(self) -> list[bool]:
        exchanged: dict[int, list[Collective]] = {}
        for collective in self._program.collectives:
            exchanged.setdefault(collective.op, []).append(collective)
        for index, op in enumerate(self._program.ops):
            for collective in exchanged.get(index, ()):
                self._collective(f"collective {collective.sequence}", collective)
            self._op(f"operator {index}, {op.target}", op)
        missing = [i for i, born in enumerate(self._born) if not born]
        if missing:
            _fail(f"storage {missing[0]}", "a temporary that no operator makes")
        return self._born

    def _op(self, where: str, op: Op) -> None:
        names = [name for name, _ in op.kwargs]
        if names != sorted(set(names)):
            _fail(where, "keyword arguments are not sorted by name, or one is given twice")
        given: set[int] = set()
        for leaf in leaves(op_args(op)):
            if isinstance(leaf, TensorRef):
                given.add(self._storage(where, leaf.view))
            elif isinstance(leaf, ScalarRef):
                if not 0 <= leaf.index < len(self._program.scalars):
                    _fail(where, f"host scalar {leaf.index} of {len(self._program.scalars)}")
            elif isinstance(leaf, Tag) and leaf.name not in _TAG_NAMES.get(leaf.kind, ()):
                _fail(where, f"{leaf.kind!r:.40} {leaf.name!r:.40} can't be named in a Program")
        early = [s for s in given if not self._born[s]]
        if early:
            _fail(where, f"uses storage {early[0]} before any operator makes it")
        made = {self._storage(where, view) for view in out_views(op.outs)}
        for storage in made - given:
            if self._born[storage]:
                _fail(where, f"returns storage {storage}, which it was not given and does not make")
            self._born[storage] = True

    def _collective(self, where: str, collective: Collective) -> None:
        given = [*collective.views, *(view for _, view in collective.sends)]
        changed = [*collective.views, *(view for _, view in collective.receives)]
        early = [view for view in given if not self._born[self._storage(where, view)]]
        if early:
            _fail(where, f"uses view {early[0]} before anything makes it")
        for view in changed:
            storage = self._storage(where, view)
            if self._program.storages[storage].kind != "temp":
                _fail(where, f"writes view {view}, which is on no temporary")
            self._born[storage] = True

    def _storage(self, where: str, view: int) -> int:
        if not 0 <= view < len(self._program.views):
            _fail(where, f"view {view} of {len(self._program.views)}")
        return self._program.views[view].storage


def _results(program: Program, born: list[bool], limits: ProgramLimits) -> None:
    total = 0
    for position, index in enumerate(program.results):
        if not 0 <= index < len(program.views) or not born[program.views[index].storage]:
            _fail(f"result {position}", f"view {index} does not exist, or lies on a storage never made")
        view = program.views[index]
        total += prod(view.size) * ITEM_BYTES[view.dtype]
    if total > limits.storage_bytes:
        _fail("results", f"{total} bytes in all; the limit is {limits.storage_bytes}")


def _random(program: Program) -> None:
    may: Callable[[str], bool] = lambda t: t in operators.RANDOM or t in operators.PERHAPS_RANDOM  # noqa: E731
    targets: list[tuple[str, int | None]] = []
    for index, op in enumerate(program.ops):
        where = f"operator {index}, {op.target}"
        if op.stream is not None:
            _stream(program, op, where)
        if op.random is None:
            if op.target in operators.RANDOM:
                _fail(where, "it draws random numbers and has no random slot")
            continue
        if op.target in operators.ALLOWED and not may(op.target):
            _fail(where, "it draws no random numbers and has a random slot")
        if op.random == len(targets):
            targets.append((op.target, op.stream))
        elif not 0 <= op.random < len(targets):
            _fail(where, f"random slot {op.random} before slot {len(targets)}")
        elif targets[op.random] != (op.target, op.stream):
            _fail(where, f"shares random slot {op.random} with {targets[op.random][0]} or with another random stream")


def _stream(program: Program, op: Op, where: str) -> None:
    if op.random is None:
        _fail(where, "it has a random stream and no random slot")
    _generator_state(program, op.stream, "state", where, "random stream")


def _generator(program: Program) -> None:
    if program.generator is None:
        return
    _generator_state(program, program.generator, "input", "generator", "state")
    storage = program.views[program.generator].storage
    if any(program.views[ref.view].storage == storage for op in program.ops for ref in tensor_refs(op_args(op))):
        _fail("generator", "an operator uses the bytes of its state")


def _generator_state(program: Program, index: int | None, kind: StorageKind, where: str, what: str) -> None:
    """Check that view `index` holds the state of a random generator, on a storage of this kind."""
    if index is None or not 0 <= index < len(program.views):
        _fail(where, f"its {what}, view {index}, does not exist")
    view = program.views[index]
    if program.storages[view.storage].kind != kind or view.dtype != "uint8" or len(view.size) != 1:
        _fail(where, f"its {what} is no line of bytes in the {'job' if kind == 'state' else 'batch'}'s {kind}")
    if view.stride != (1,) or not 0 < view.size[0] <= STREAM_BYTES:
        _fail(where, f"its {what} has gaps, or not 1 to {STREAM_BYTES} bytes")


# ---- Shape rules that torch's fake execution does not check but kernels rely on.
#
# Each of these kernels reads past a buffer if a side argument is shorter than the main one implies
# (measured, or read in the kernel). No torch here.


def check_sizes(program: Program, op: Op) -> None:
    """Raise ProgramError if `op` breaks such a rule. Kinds of arguments were checked before."""
    rule = _RULES.get(op.target)
    if rule is not None:
        rule([program.views[a.view] if isinstance(a, TensorRef) else a for a in op.args])


def _count(view: View) -> int:
    return prod(view.size)


def _same_size(args: list[object], one: int, other: int) -> None:
    a, b = args[one], args[other]
    if isinstance(a, View) and isinstance(b, View) and a.size != b.size:
        raise ProgramError(f"arguments {one} and {other} differ in size: {a.size} and {b.size}")


def _holds(args: list[object], positions: tuple[int, ...], count: int) -> None:
    for position in positions:
        view = args[position] if position < len(args) else None
        if isinstance(view, View) and _count(view) != count:
            raise ProgramError(f"argument {position} has {_count(view)} elements, the kernel reads {count}")


def _same(one: int, other: int) -> Callable[[list[object]], None]:
    return lambda args: _same_size(args, one, other)


def _channels(data: int, stats: tuple[int, ...]) -> Callable[[list[object]], None]:
    """A rule: the tensors at `stats`, if given, hold one number a channel (dimension 1) of `data`."""

    def rule(args: list[object]) -> None:
        view = args[data]
        if isinstance(view, View):
            if len(view.size) < 2:
                raise ProgramError(f"argument {data} has no channels")
            _holds(args, stats, view.size[1])

    return rule


def _layer_norm_backward(args: list[object]) -> None:
    view, normalized = args[1], args[2]
    if isinstance(view, View) and isinstance(normalized, tuple):
        rank = len(normalized)
        if view.size[len(view.size) - rank :] != normalized:
            raise ProgramError(f"the normalized shape {normalized} does not end {view.size}")
        _same_size(args, 0, 1)
        _holds(args, (3, 4), prod(view.size[: len(view.size) - rank]))
        _holds(args, (5, 6), prod(normalized))


def _batch_norm_backward(args: list[object]) -> None:
    _same_size(args, 0, 1)
    training = args[7]
    _channels(1, (2, 5, 6) if training else (2, 3, 4))(args)


def _group_norm_backward(args: list[object]) -> None:
    n, channels, inner, groups = args[5:9]
    if isinstance(n, int) and isinstance(channels, int) and isinstance(inner, int) and isinstance(groups, int):
        _holds(args, (0, 1), n * channels * inner)
        _holds(args, (2, 3), n * groups)
        _holds(args, (4,), channels)


def _group_norm(args: list[object]) -> None:
    n, channels, inner = args[3:6]
    if isinstance(n, int) and isinstance(channels, int) and isinstance(inner, int):
        _holds(args, (0,), n * channels * inner)
        _holds(args, (1, 2), channels)


def _fractional(dims: int) -> Callable[[list[object]], None]:
    """A rule: the output size that the kernel takes from a list is the gradient's."""

    def rule(args: list[object]) -> None:
        _same_size(args, 0, 4)
        view, size = args[0], args[3]
        if isinstance(view, View) and size != view.size[-dims:]:
            raise ProgramError(f"the output size {size} is not the end of the gradient's size {view.size}")

    return rule


def _antialiased(source: int, scales: int) -> Callable[[list[object]], None]:
    """A rule: the scales from position `scales` on, if given, do not lead past the image that is resized. Argument
    `source` is that image, or its size. The kernel walks it by 1 / scale for each number of the output, and compares
    that with nothing. A scale that comes with each step is refused, since no value of it was looked at."""

    def rule(args: list[object]) -> None:
        image, made = args[source], args[1]
        size = image.size if isinstance(image, View) else image
        if not isinstance(size, tuple) or not isinstance(made, tuple):
            raise ProgramError("antialiased resizing takes sizes as lists")
        for given, before, after in zip(args[scales : scales + 2], size[-2:], made, strict=False):
            if given is None:
                continue
            if not isinstance(given, (int, float)):
                raise ProgramError("a scale of antialiased resizing that changes from step to step", _SCALES)
            if not given * before * _ROUNDED >= after:
                raise ProgramError(f"a scale of {given} does not make {after} numbers of {before}", _SCALES)

    return rule


_SCALES = "leave the scales out: they follow from the sizes"
_ROUNDED = 1 + 1e-6  # sizes are products of the scales, rounded down


_RULES: dict[str, Callable[[list[object]], None]] = {
    "aten.max_pool2d_with_indices_backward.default": _same(0, 7),
    "aten.max_pool3d_with_indices_backward.default": _same(0, 7),
    "aten.adaptive_max_pool2d_backward.default": _same(0, 2),
    "aten.adaptive_max_pool3d_backward.default": _same(0, 2),
    "aten.fractional_max_pool2d_backward.default": _fractional(2),
    "aten.fractional_max_pool3d_backward.default": _fractional(3),
    "aten.max_unpool2d.default": _same(0, 1),
    "aten.max_unpool3d.default": _same(0, 1),
    "aten.native_layer_norm_backward.default": _layer_norm_backward,
    "aten.native_group_norm.default": _group_norm,
    "aten.native_group_norm_backward.default": _group_norm_backward,
    "aten.native_batch_norm_backward.default": _batch_norm_backward,
    "aten.native_batch_norm.default": _channels(0, (1, 2, 3, 4)),
    "aten._native_batch_norm_legit.default": _channels(0, (1, 2, 3, 4)),
    "aten._native_batch_norm_legit.no_stats": _channels(0, (1, 2)),
    "aten._native_batch_norm_legit_functional.default": _channels(0, (1, 2, 3, 4)),
    "aten._native_batch_norm_legit_no_training.default": _channels(0, (1, 2, 3, 4)),
    "aten._batch_norm_with_update.default": _channels(0, (1, 2, 3, 4)),
    "aten._batch_norm_with_update_functional.default": _channels(0, (1, 2, 3, 4)),
    "aten._batch_norm_no_update.default": _channels(0, (1, 2, 3, 4)),
    "aten.cudnn_batch_norm.default": _channels(0, (1, 2, 3, 4)),
    **{
        f"aten._upsample_{kind}2d_aa{end}.default": _antialiased(source, scales)
        for kind in ("bilinear", "bicubic")
        for end, source, scales in (("", 0, 3), ("_backward", 2, 4))
    },
}


# ---- Programs as text, for errors, tools and tests.


_SHORT = {
    "float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64", "complex64": "c64", "complex128": "c128",
    "int8": "i8", "int16": "i16", "int32": "i32", "int64": "i64", "uint8": "u8", "bool": "bool",
}  # fmt: skip


def describe(program: Program, limit: int = 10_000) -> str:
    """A listing: one line for the whole, one for each operator, `limit` of them at most.

    Views read %storage:dtype[sizes], with /strides@offset where they are not dense from the start.
    State, input, constant and temporary storages read %s0 (by slot), %i0, %c0 and %5.
    """
    return "\n".join(_lines(program, limit))


def describe_op(program: Program, index: int) -> str:
    """Operator `index` as one line."""
    op = program.ops[index]
    args = [_arg(program, a) for a in op.args] + [f"{name}={_arg(program, v)}" for name, v in op.kwargs]
    random = "" if op.random is None else f" random {op.random}"
    if op.stream is not None:
        random += f" from {describe_view(program, op.stream)}"
    return f"{index:>5}  {_outs(program, op)} = {op.target}({', '.join(args)}){random}"


def describe_view(program: Program, index: int) -> str:
    view = program.views[index]
    storage = program.storages[view.storage]
    name = f"%{view.storage}" if storage.kind == "temp" else f"%{storage.kind[0]}{storage.slot}"
    text = f"{name}:{_SHORT.get(view.dtype, view.dtype)}[{','.join(map(str, view.size))}]"
    dense, step = True, 1
    for n, stride in zip(reversed(view.size), reversed(view.stride), strict=True):
        dense = dense and (stride == step or n == 1)
        step *= n
    if not dense or view.offset:
        text += f"/{','.join(map(str, view.stride))}@{view.offset}"
    return text


def _lines(program: Program, limit: int) -> Iterator[str]:
    state = state_slots(program)
    yield (
        f"program for {program.device}: {len(program.ops)} ops, {len(state)} state slots ({sum(state)} bytes), "
        f"{len(program.inputs)} inputs, {len(program.results)} results, {len(program.scalars)} scalars, "
        f"{len(program.consts)} constants ({const_bytes(program)} bytes)"
    )
    yield f"  {program.numerics}"
    for position, view in enumerate(program.inputs):
        yield f"  input {position}: {describe_view(program, view)}"
    gates: dict[int, list[Collective]] = {}
    for collective in program.collectives:
        gates.setdefault(collective.op, []).append(collective)
    begins = {span.first: span for span in program.spans}
    for index in range(min(len(program.ops), limit)):
        if index in begins:
            span = begins[index]
            passed = "backward" if span.backward else "forward"
            yield f"       {program.layers[span.layer]!r}, {passed}, {span.count} ops"
        for collective in gates.get(index, ()):
            yield f"       {collective.kind} {collective.sequence} with ranks {', '.join(map(str, collective.members))}"
        yield describe_op(program, index)
    if len(program.ops) > limit:
        yield f"       ... {len(program.ops) - limit} more"
    for position, view in enumerate(program.results):
        yield f"  result {position}: {describe_view(program, view)}"


def _outs(program: Program, op: Op) -> str:
    def one(out: Out) -> str:
        if out is None:
            return "_"
        if isinstance(out, tuple):
            return "[" + ", ".join(describe_view(program, view) for view in out) + "]"
        return describe_view(program, out)

    return ", ".join(map(one, op.outs)) or "()"


def _arg(program: Program, arg: Arg) -> str:
    if isinstance(arg, TensorRef):
        return describe_view(program, arg.view)
    if isinstance(arg, ScalarRef):
        return f"scalar{arg.index}"
    if isinstance(arg, Tag):
        return f"{arg.kind}:{arg.name}" if arg.name else arg.kind
    if isinstance(arg, Complex):
        return f"({arg.re}{arg.im:+}j)"
    if isinstance(arg, tuple):
        return "[" + ", ".join(_arg(program, item) for item in arg) + "]"
    return repr(arg)
