"""The intermediate form of one captured step: data, never code.

A Program is a sequence of operator calls over *storages*. A storage is a range of bytes; a view
is a typed, strided window onto one (as torch sees a tensor). Pure view operators (transpose,
slice, detach ...) are not operators here: the views they would make are in the view table.

    storage kinds   state   lives in the job, across steps; `slot` indexes the Program's state slots,
                            which the job binds to its own buffers
                    input   one tensor of the batch; `slot` is its position
                    const   bytes carried by the Program; `slot` indexes `consts`
                    temp    made by an operator of this step, gone after it; `slot` is -1

Host scalars are numbers that the client computes for every step (learning rates, bias corrections
from step counters); operators name them by index.

`random` on an operator is its random slot: operators with one slot draw the same numbers (recomputation under
checkpointing); otherwise draws follow the order of the slots. `stream` is a view on a state storage that holds a random
generator's state, as bytes (torch.Generator.get_state). The operator draws from that generator instead of the job's and
updates the bytes. The models of one job thus draw the same numbers as each would alone.

`Program.generator` is a view on an input that holds the state of the random generator, as bytes. If it is given, the
job's generator is set to that state before the first operator. After the last one the bytes are replaced by the
generator's state, so a result may lie on them. A client passes its own generator through a step in this way. Without
it the job's generator continues from step to step.

Everything is frozen and hashable; equal steps give equal Programs, in every process.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Literal, NamedTuple, TypeAlias

IR_VERSION = 1

StorageKind: TypeAlias = Literal["state", "input", "const", "temp"]
CollectiveKind: TypeAlias = Literal["all_reduce", "exchange"]


@dataclass(frozen=True, slots=True)
class Storage:
    """A range of bytes; see the module's table of kinds."""

    kind: StorageKind
    nbytes: int
    slot: int = -1


@dataclass(frozen=True, slots=True)
class View:
    """A strided window: sizes, strides and offset in elements of `dtype` (e.g. "float32")."""

    storage: int
    dtype: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0


@dataclass(frozen=True, slots=True)
class TensorRef:
    """An operator argument that is a tensor: an index into `Program.views`."""

    view: int


@dataclass(frozen=True, slots=True)
class ScalarRef:
    """An operator argument that is a host scalar: an index into `Program.scalars`."""

    index: int


@dataclass(frozen=True, slots=True)
class Tag:
    """A torch constant by name. kind: dtype, layout, memory_format, or device (name "" means the
    device the job runs on; no other is expressible)."""

    kind: Literal["dtype", "layout", "memory_format", "device"]
    name: str


@dataclass(frozen=True, slots=True)
class Complex:
    """A complex number as an argument."""

    re: float
    im: float


Arg: TypeAlias = "bool | int | float | str | TensorRef | ScalarRef | Tag | Complex | tuple[Arg, ...] | None"
# One entry a return of the operator's schema: a view, nothing (None: undefined or unused), or a
# tuple for a list of tensors.
Out: TypeAlias = "int | tuple[int, ...] | None"


@dataclass(frozen=True, slots=True)
class Op:
    """One operator call. `target` is "aten.NAME.OVERLOAD"; `args` are positional in schema order,
    `kwargs` the keyword-only ones that differ from their defaults, sorted by name. An output view
    on an argument's storage is that argument, changed in place or returned again. The first output
    view on a temp storage creates that storage."""

    target: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...] = ()
    outs: tuple[Out, ...] = ()
    random: int | None = None
    stream: int | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """`count` operators from `first` on that belong to layer number `layer` of `Program.layers`: to its forward pass
    or, with `backward`, to its backward pass, recomputation included."""

    first: int
    count: int
    layer: int
    backward: bool = False


@dataclass(frozen=True, slots=True)
class Collective:
    """Data that ranks of a job exchange before operator `op`, with which a piece begins: the step waits there for the
    other members. It never stands before the first operator, so every step begins by itself.

    `sequence` numbers the collectives of a step over all ranks: all members know one by the same number, and a rank
    takes part in those it is a member of in rising order. `members` are ranks, rising, at least two; the Program's own
    rank is one of them.

        all_reduce   each member's `views` are replaced by their sum over all members, added in the order of ranks,
                     times `scale`. Types and sizes of the views, in order, are the same on all members.
        exchange     every (rank, view) of `sends` goes to that rank, every one of `receives` comes from it: between two
                     ranks in the order in which they stand. The first of them on a temp storage creates it.

    What is summed or received lies on temps. Views may have strides."""

    op: int
    kind: CollectiveKind
    sequence: int
    members: tuple[int, ...]
    views: tuple[int, ...] = ()
    scale: float = 1.0
    sends: tuple[tuple[int, int], ...] = ()
    receives: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Wave:
    """Which of a job's two waves the Program is a step of (waves/trace.py), and where it waits for the other one.

    `lane`: 0 or 1. Each wave has its own replica of the state, so a step may run beside the one before it, of the other
    wave. Operators from `tail` on, of which there is at least one, run only after that one has ended. `tail` is above
    0, and a piece begins there."""

    lane: int
    tail: int


@dataclass(frozen=True, slots=True)
class Numerics:
    """Process-wide settings that change results. The device applies them before the first piece. conv_precision: how a
    GPU's convolutions and recurrent layers may round float32, for which torch has a switch of its own; it has no
    meaning on a CPU."""

    matmul_precision: str = "highest"
    deterministic: bool = False
    flush_denormal: bool = False
    mkldnn: bool = True
    default_dtype: str = "float32"
    conv_precision: str = "tf32"


@dataclass(frozen=True, slots=True)
class Program:
    """One captured step. Indices refer to its own tables; see the module."""

    storages: tuple[Storage, ...]
    views: tuple[View, ...]
    ops: tuple[Op, ...]
    inputs: tuple[int, ...]  # view of each batch tensor, in position order
    results: tuple[int, ...]  # views copied out when the step ends; they may lie on any storage
    scalars: tuple[Literal["float", "int"], ...] = ()
    consts: tuple[bytes, ...] = ()
    collectives: tuple[Collective, ...] = ()  # rising in `op` and in `sequence`
    numerics: Numerics = Numerics()
    device: str = "cpu"  # device type the step was traced for
    kind: Literal["aten", "compiled"] = "aten"  # "compiled": its operators may be fused (device/inductor.py)
    version: int = IR_VERSION
    layers: tuple[str, ...] = ()  # the user's names, in order of first use; only profiles and planning read them
    spans: tuple[Span, ...] = ()  # which operators belong to which layer, rising; those of no layer are in no span
    generator: int | None = None  # view on the input with the random generator's state, which the step replaces
    rank: int = 0  # of a job on several devices: which of its `ranks` ranks this Program is for
    ranks: int = 1
    wave: Wave | None = None  # of a job with two waves


ITEM_BYTES: dict[str, int] = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip

STREAM_BYTES = 8192  # upper bound for the state of a random generator


def gates(program: Program) -> list[int]:
    """The operators that a collective stands before, rising: a piece begins at each."""
    return sorted({collective.op for collective in program.collectives})


def piece_starts(program: Program) -> list[int]:
    """The operators with which a piece has to begin, rising: those at gates, and the tail of a wave."""
    tail = () if program.wave is None else (program.wave.tail,)
    return sorted({*gates(program), *tail})


DIRECT_BYTES = 64 << 10  # a sum of no more goes to every member whole (device/cpu/peers.py)
ALIGN = 64  # every buffer starts on this many bytes, as torch's own allocator does


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to ALIGN."""
    return -(-nbytes // ALIGN) * ALIGN


def extent(view: View) -> int:
    """Bytes from the storage's start to the end of the last element of `view` (0 when empty)."""
    if 0 in view.size:
        return 0
    last = view.offset + sum((n - 1) * s for n, s in zip(view.size, view.stride, strict=True))
    return (last + 1) * ITEM_BYTES[view.dtype]


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """Where a step's batch and results lie in its slot of shared memory, offsets in bytes. An
    input occupies its storage's extent, a result that of a packed tensor."""

    inputs: tuple[int, ...]
    results: tuple[int, ...]
    nbytes: int


def slot_layout(program: Program) -> SlotLayout:
    """The layout, which both ends compute for themselves. Inputs keep their strides (storage bytes are
    copied as they are); results are written contiguous, in logical order."""
    at = 0
    inputs: list[int] = []
    results: list[int] = []

    def place(nbytes: int) -> int:
        nonlocal at
        here = at
        at += aligned(nbytes)
        return here

    for index in program.inputs:
        inputs.append(place(program.storages[program.views[index].storage].nbytes))
    for index in program.results:
        view = program.views[index]
        count = 1
        for n in view.size:
            count *= n
        results.append(place(count * ITEM_BYTES[view.dtype]))
    return SlotLayout(tuple(inputs), tuple(results), max(at, ALIGN))


# ---- Building a Program piece by piece.


def contiguous_strides(size: Iterable[int]) -> tuple[int, ...]:
    """Row-major strides in elements, as torch gives a new tensor (a size of 0 counts as 1)."""
    strides: list[int] = []
    step = 1
    for n in reversed(tuple(size)):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


class ProgramBuilder:
    """Collects the parts of a Program; `build` freezes them. It checks nothing: `validate` checks the result."""

    def __init__(self, device: str = "cpu", numerics: Numerics | None = None, *, rank: int = 0, ranks: int = 1) -> None:
        self.device, self.rank, self.ranks = device, rank, ranks
        self.numerics = numerics or Numerics()
        self._storages: list[Storage] = []
        self._views: list[View] = []
        self._view_index: dict[View, int] = {}
        self._ops: list[Op] = []
        self._inputs: list[int] = []
        self._results: list[int] = []
        self._scalars: list[Literal["float", "int"]] = []
        self._consts: list[bytes] = []
        self._const_storage: dict[bytes, int] = {}
        self._collectives: list[Collective] = []

    def add_storage(self, kind: StorageKind, nbytes: int) -> int:
        """Add a storage and return its index. State and input slots are numbered in the order of the calls."""
        slot = -1 if kind == "temp" else sum(1 for s in self._storages if s.kind == kind)
        self._storages.append(Storage(kind, nbytes, slot))
        return len(self._storages) - 1

    def add_const(self, data: bytes) -> int:
        """Add a constant storage holding `data` and return its index. Equal bytes are kept once."""
        found = self._const_storage.get(data)
        if found is None:
            found = self._const_storage[data] = self.add_storage("const", len(data))
            self._consts.append(data)
        return found

    def add_view(
        self,
        storage: int,
        dtype: str,
        size: Iterable[int],
        stride: Iterable[int] | None = None,
        offset: int = 0,
    ) -> int:
        """Add a view and return its index; an equal view has the same index. `stride` None: row-major."""
        size = tuple(size)
        view = View(storage, dtype, size, contiguous_strides(size) if stride is None else tuple(stride), offset)
        found = self._view_index.get(view)
        if found is None:
            found = self._view_index[view] = len(self._views)
            self._views.append(view)
        return found

    def add_tensor(self, kind: StorageKind, dtype: str, size: Iterable[int]) -> int:
        """Add a dense row-major tensor on a storage of its own and return its view's index."""
        size = tuple(size)
        return self.add_view(self.add_storage(kind, prod(size) * ITEM_BYTES[dtype]), dtype, size)

    def add_op(
        self,
        target: str,
        *args: Arg,
        kwargs: Mapping[str, Arg] | None = None,
        outs: Iterable[Out] = (),
        random: int | None = None,
        stream: int | None = None,
    ) -> int:
        """Add an operator call and return its position."""
        self._ops.append(Op(target, args, tuple(sorted((kwargs or {}).items())), tuple(outs), random, stream))
        return len(self._ops) - 1

    def call(
        self,
        target: str,
        *args: Arg,
        dtype: str = "float32",
        size: Iterable[int],
        kwargs: Mapping[str, Arg] | None = None,
        random: int | None = None,
        stream: int | None = None,
    ) -> TensorRef:
        """Add an operator whose one output is a new dense tensor, and return that tensor."""
        out = self.add_tensor("temp", dtype, size)
        self.add_op(target, *args, kwargs=kwargs, outs=(out,), random=random, stream=stream)
        return TensorRef(out)

    def input(self, dtype: str, size: Iterable[int]) -> TensorRef:
        """Add the next tensor of the batch, dense and row-major."""
        return self.input_view(self.add_tensor("input", dtype, size))

    def input_view(self, view: int) -> TensorRef:
        """Make `view`, on an input storage, the next tensor of the batch."""
        self._inputs.append(view)
        return TensorRef(view)

    def state(self, dtype: str, size: Iterable[int]) -> TensorRef:
        """Add a dense row-major tensor in the next state slot."""
        return TensorRef(self.add_tensor("state", dtype, size))

    def scalar(self, kind: Literal["float", "int"] = "float") -> ScalarRef:
        """Add a host scalar."""
        self._scalars.append(kind)
        return ScalarRef(len(self._scalars) - 1)

    def result(self, view: int | TensorRef) -> int:
        """Copy this view out when the step ends; returns its position among the results."""
        self._results.append(view.view if isinstance(view, TensorRef) else view)
        return len(self._results) - 1

    def collective(self, collective: Collective) -> None:
        """Add a collective; they come in the order of their operators."""
        self._collectives.append(collective)

    def view(self, index: int) -> View:
        return self._views[index]

    def build(self) -> Program:
        return Program(
            tuple(self._storages), tuple(self._views), tuple(self._ops), tuple(self._inputs), tuple(self._results),
            tuple(self._scalars), tuple(self._consts), tuple(self._collectives), self.numerics, self.device,
            rank=self.rank, ranks=self.ranks,
        )  # fmt: skip


# ---- ProgramLimits on the size of a Program. They are checked before anything is allocated for a client's Program.


@dataclass(frozen=True, slots=True)
class ProgramLimits:
    """Upper bounds, inclusive. Sizes in bytes; `body_bytes` is the encoding without its constants."""

    ops: int = 200_000
    views: int = 1_000_000
    storages: int = 500_000
    names: int = 4_096  # distinct operator targets and keyword names
    layers: int = 4_096  # names of the user's layers
    tensors: int = 65_536  # inputs, results, constants, host scalars, collectives: each
    const_bytes: int = 64 << 20
    body_bytes: int = 32 << 20
    string: int = 256  # characters of a string
    depth: int = 4  # tuples within tuples in one argument
    dims: int = 64  # of one view; torch has the same bound
    ranks: int = 4_096
    storage_bytes: int = 1 << 46  # of one storage, and of one view laid out densely


DEFAULT = ProgramLimits()


# ---- The layer of each operator of a Program. Only profiles and planning depend on it.


ROOT = "(model)"  # the layer of operators that run in a model itself, in none of its modules


class Label(NamedTuple):
    """`layer`: the module's path in the user's model, as named_modules has it. `backward`: in its backward pass."""

    layer: str
    backward: bool = False


def spans(labels: Iterable[Label | None], first: int = 0) -> tuple[tuple[str, ...], tuple[Span, ...]]:
    """`layers` and `spans` of a Program whose operators from `first` on have these labels. Omits names that a Program
    can't hold, and those beyond its limit."""
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
    """The label of each operator, None if it belongs to no layer."""
    found: list[Label | None] = [None] * len(program.ops)
    for span in program.spans:
        label = Label(program.layers[span.layer], span.backward)
        found[span.first : span.first + span.count] = [label] * span.count
    return found
