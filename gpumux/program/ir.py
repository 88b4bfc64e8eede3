"""The intermediate form of one captured step: data, never code (DESIGN 2 and 4).

A Program is a straight line of operator calls over *storages*. A storage is a run of bytes; a view
is a typed, strided window onto one (as torch sees a tensor). Pure view operators (transpose,
slice, detach ...) are not operators here: the views they would make are in the view table.

    storage kinds   state   lives in the job, across steps; `slot` indexes the Program's state slots,
                            which the job binds to its own buffers
                    input   one tensor of the batch; `slot` is its position
                    const   bytes carried by the Program; `slot` indexes `consts`
                    temp    made by an operator of this step, gone after it; `slot` is -1

Host scalars are numbers the client computes anew for every step (learning rates, bias corrections
from step counters); operators name them by index. `random` on an operator is its random slot: two
operators with one slot draw the same numbers (recomputation under checkpointing), in the order the
slots are numbered otherwise. `stream` is a view on a state storage that holds a random generator of
its own, as bytes (torch.Generator.get_state): the operator draws from that one instead of the job's,
and leaves it where it stands then. So the models of one job draw what each would draw alone.

`Program.generator` is a view on an input that holds the state of the random generator, as bytes
(torch.Generator.get_state). Where it is given, the job's generator is set to that state before the first
operator, and the same bytes are replaced by its state after the last one, so a result may lie on them. A
client hands its own generator to a step in this way, and takes it back. Without it the job's generator
goes on from step to step.

Everything is frozen and hashable; equal steps give equal Programs, whoever captured them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

IR_VERSION = 1

StorageKind: TypeAlias = Literal["state", "input", "const", "temp"]


@dataclass(frozen=True, slots=True)
class Storage:
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
    on the storage of an argument is that argument changed in place or returned again; an output
    view on a temp storage not seen before is where that storage is born."""

    target: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...] = ()
    outs: tuple[Out, ...] = ()
    random: int | None = None
    stream: int | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """`count` operators from `first` on that belong to layer number `layer` of `Program.layers`: to its forward pass or,
    with `backward`, to its backward pass and what that computes again."""

    first: int
    count: int
    layer: int
    backward: bool = False


@dataclass(frozen=True, slots=True)
class Gate:
    """Something a piece waits for or signals. No ordinary Program has one; the room is kept for
    collectives and waves (DESIGN 2)."""

    op: int
    kind: Literal["wait", "signal"]
    name: str


@dataclass(frozen=True, slots=True)
class Numerics:
    """Process-wide settings that change results. The device applies them before the first piece. `conv_precision`: how
    a GPU's convolutions and recurrent layers may round float32, which torch has a switch of its own for; it means
    nothing on a CPU."""

    matmul_precision: str = "highest"
    deterministic: bool = False
    flush_denormal: bool = False
    mkldnn: bool = True
    default_dtype: str = "float32"
    conv_precision: str = "tf32"


@dataclass(frozen=True, slots=True)
class Program:
    storages: tuple[Storage, ...]
    views: tuple[View, ...]
    ops: tuple[Op, ...]
    inputs: tuple[int, ...]  # view of each batch tensor, in position order
    results: tuple[int, ...]  # views copied out when the step ends; they may lie on any storage
    scalars: tuple[Literal["float", "int"], ...] = ()
    consts: tuple[bytes, ...] = ()
    gates: tuple[Gate, ...] = ()
    numerics: Numerics = Numerics()
    device: str = "cpu"  # device type the step was traced for
    kind: Literal["aten", "compiled"] = "aten"  # "compiled": its operators may be fused (device/inductor.py)
    version: int = IR_VERSION
    layers: tuple[str, ...] = ()  # the user's names, in order of first use; for profiles, nothing runs differently
    spans: tuple[Span, ...] = ()  # whose operators are whose, rising; those of none are in no span
    generator: int | None = None  # view on the input that holds the random generator's state, replaced by the step


ITEM_BYTES: dict[str, int] = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip

STREAM_BYTES = 8192  # at most, of a random generator's state
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
    input or result occupies the extent of its storage / of a packed tensor respectively."""

    inputs: tuple[int, ...]
    results: tuple[int, ...]
    nbytes: int


def slot_layout(program: Program) -> SlotLayout:
    """The layout both ends compute for themselves. Inputs keep their strides (storage bytes are
    copied as they lie); results are written contiguous, in logical order."""
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
