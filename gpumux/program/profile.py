"""A step's profile: what each of its operators costs, measured on a device or modelled, as a JSON file.

    {"format": "gpumux-profile", "version": 1, "units": {"seconds": "s", "nbytes": "B"},
     "name": "vgg16", "device": "a100", "batch": 8, "recorded_at": null, "versions": {}, "note": "...",
     "ops": [{"target": "aten.mm.default", "shapes": [[8, 4096], [4096, 1000], [8, 1000]], "seconds": 2.1e-05,
              "nbytes": 16547072, "blocks": 8, "per_sm": 2, "sensitivity": 1.0, "source": "model",
              "layer": "classifier.6", "backward": false}, ...]}

An operator's `shapes` are the sizes of its tensor arguments, in order, then of its outputs (`op_shapes`), so
that target and shapes together say which operator it is. `layer` and `backward` say which of the model's modules it is
of, and in which pass; operators of none (the loss, the optimizer) have neither. Nothing in a profile is code, and
nothing in it is guessed when it is read: a missing or unknown key, or a value out of range, is a ConfigError that names
the place.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from math import isfinite
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from gpumux import files
from gpumux.errors import ConfigError
from gpumux.program import reading
from gpumux.program.ir import ITEM_BYTES, Arg, Label, Op, Out, Program, TensorRef

FORMAT = "gpumux-profile"
VERSION = 1
UNITS = {"seconds": "s", "nbytes": "B"}
MAX_SECONDS = 86400.0  # an operator of more than a day is a mistake in the file
OF_LAYER = {"layer", "backward"}  # both or neither
RERECORD = "record it again with `gpumux jobs profile NAME -o FILE`, or mend the file"

Shapes: TypeAlias = tuple[tuple[int, ...], ...]
Source: TypeAlias = Literal["measured", "model", "guess"]


@dataclass(frozen=True, slots=True)
class OpProfile:
    """One operator alone on the device. `blocks` and `per_sm` (blocks one multiprocessor holds at once) are None
    if unknown. `sensitivity` is the factor on its time while another job has blocks on the device.
    Raises ConfigError for a value out of range."""

    target: str
    shapes: Shapes
    seconds: float
    nbytes: int  # memory traffic
    blocks: int | None = None
    per_sm: int | None = None
    sensitivity: float = 1.0
    source: Source = "guess"
    layer: str | None = None
    backward: bool = False

    def __post_init__(self) -> None:
        what = f"operator {self.target!r}"
        if not self.target:
            raise ConfigError("an operator without a target", RERECORD)
        if not 0 <= self.seconds <= MAX_SECONDS:  # false for nan, too
            raise ConfigError(f"{what} takes {self.seconds} seconds", f"give a time from 0 to {MAX_SECONDS:g}")
        if self.nbytes < 0:
            raise ConfigError(f"{what} moves {self.nbytes} bytes", "give 0 or more")
        for name in ("blocks", "per_sm"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{what} has {name} {value}", "give 1 or more, or null where it is not known")
        if not (isfinite(self.sensitivity) and self.sensitivity >= 1):
            raise ConfigError(f"{what} has a sensitivity of {self.sensitivity}", "give a finite factor of 1 or more")
        if self.source not in get_args(Source):
            raise ConfigError(f"{what} has source {self.source!r}", f"choose one of {', '.join(get_args(Source))}")
        if any(n < 0 for shape in self.shapes for n in shape):
            raise ConfigError(f"{what} has a negative size in {self.shapes}", RERECORD)


@dataclass(frozen=True, slots=True)
class StepProfile:
    """A whole step, its operators in captured order. device: the device of the times (a preset's name, or the device's
    own name). recorded_at: a UTC date, None if unknown. batch: number of samples, if known. Raises ConfigError if it
    has no operators."""

    name: str
    device: str
    ops: tuple[OpProfile, ...]
    versions: Mapping[str, str] = field(default_factory=dict)
    recorded_at: str | None = None
    batch: int | None = None
    note: str = ""

    def __post_init__(self) -> None:
        if not self.ops:
            raise ConfigError(f"profile {self.name!r} has no operators", RERECORD)
        if self.batch is not None and self.batch < 1:
            raise ConfigError(f"profile {self.name!r} has a batch of {self.batch}", "give 1 or more, or null")

    @property
    def seconds(self) -> float:
        """Sum of the operators' times, without gaps."""
        return sum(op.seconds for op in self.ops)

    def sources(self) -> dict[str, int]:
        """Number of operators that are measured, modelled and guessed."""
        found: dict[str, int] = {}
        for op in self.ops:
            found[op.source] = found.get(op.source, 0) + 1
        return found


# ---- sizes and memory traffic of a Program's operators ---------------------------------------------


def op_shapes(program: Program, op: Op) -> Shapes:
    """Sizes of the operator's tensor arguments, in order, then of its outputs."""
    return tuple([program.views[view].size for view in (*argument_views(op), *output_views(op))])


def op_nbytes(program: Program, op: Op) -> int:
    """The least bytes an operator reads and writes: each distinct view among its arguments once, each among its
    outputs once. Caches and workspaces are not included."""

    def moved(views: Iterator[int]) -> int:
        total = 0
        for view in {program.views[index] for index in views}:
            count = ITEM_BYTES[view.dtype]
            for n, stride in zip(view.size, view.stride, strict=True):
                count *= n if stride or n == 0 else 1  # an expanded dimension is stored once
            total += count
        return total

    return moved(argument_views(op)) + moved(output_views(op))


def batch_size(program: Program) -> int | None:
    """Samples in a batch: the first size of the first input that has one."""
    sizes = [program.views[index].size for index in program.inputs]
    return next((size[0] for size in sizes if size and size[0] > 0), None)


def of_layer(op: OpProfile, label: Label | None) -> OpProfile:
    """The operator as one of this layer; None: of no layer."""
    layer, backward = label or (None, False)
    return replace(op, layer=layer, backward=backward)


def argument_views(op: Op) -> Iterator[int]:
    """Indices of an operator's argument views, in order."""
    for arg in (*op.args, *(value for _, value in op.kwargs)):
        yield from _tensors(arg)


def output_views(op: Op) -> Iterator[int]:
    """Indices of the views an operator returns, in order."""
    for out in op.outs:
        yield from _flat(out)


def _tensors(arg: Arg) -> Iterator[int]:
    if isinstance(arg, TensorRef):
        yield arg.view
    elif isinstance(arg, tuple):
        for item in arg:
            yield from _tensors(item)


def _flat(out: Out) -> Iterator[int]:
    if isinstance(out, tuple):
        yield from out
    elif out is not None:
        yield out


# ---- files ----------------------------------------------------------------------------------------


def save(profile: StepProfile, path: Path) -> None:
    """Write a profile, one operator a line. Raises ConfigError if the file can't be written."""
    files.write_text(path, dumps(profile))


def dumps(profile: StepProfile) -> str:
    """The file's text, one operator a line."""
    head = {
        "format": FORMAT,
        "version": VERSION,
        "units": UNITS,
        "name": profile.name,
        "device": profile.device,
        "batch": profile.batch,
        "recorded_at": profile.recorded_at,
        "versions": dict(profile.versions),
        "note": profile.note,
    }
    ops = ",\n  ".join(json.dumps(_entries(op)) for op in profile.ops)
    return json.dumps(head, indent=1)[:-2] + f',\n "ops": [\n  {ops}\n ]\n}}\n'


def _entries(op: OpProfile) -> dict[str, Any]:
    found = asdict(op)
    return found if op.layer is not None else {name: found[name] for name in found if name not in OF_LAYER}


def load(path: Path) -> StepProfile:
    """Read a profile. Raises ConfigError, which names the file and the place, for any fault."""
    body = reading.read_text(path, "a profile")
    try:
        return loads(body)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}", error.remedy) from None


def loads(text: str) -> StepProfile:
    """The profile in a file's text. Raises ConfigError."""
    body = reading.header(text, FORMAT, VERSION, UNITS, RERECORD)
    names = {f.name for f in fields(StepProfile)}
    reading.same_keys("the profile", body, names | {"format", "version", "units"}, RERECORD)
    ops = reading.items("ops", body["ops"])
    return StepProfile(
        name=reading.text("name", body["name"]),
        device=reading.text("device", body["device"]),
        ops=tuple([_op(index, op) for index, op in enumerate(ops)]),
        versions=reading.names("versions", body["versions"]),
        recorded_at=None if body["recorded_at"] is None else reading.text("recorded_at", body["recorded_at"]),
        batch=None if body["batch"] is None else reading.whole("batch", body["batch"]),
        note=reading.text("note", body["note"]),
    )


def _op(index: int, body: object) -> OpProfile:
    where = f"ops[{index}]"
    if not isinstance(body, dict):
        raise ConfigError(f"{where} is {body!r}", "give a map")
    wanted = {f.name for f in fields(OpProfile)}
    reading.same_keys(where, body, wanted if OF_LAYER & set(body) else wanted - OF_LAYER, RERECORD)
    shapes = tuple(
        tuple(reading.whole(f"{where}.shapes", n) for n in reading.items(f"{where}.shapes", shape))
        for shape in reading.items(f"{where}.shapes", body["shapes"])
    )
    optional = {
        name: None if body[name] is None else reading.whole(f"{where}.{name}", body[name])
        for name in ("blocks", "per_sm")
    }
    source: Any = reading.text(f"{where}.source", body["source"])
    try:
        return OpProfile(
            target=reading.text(f"{where}.target", body["target"]),
            shapes=shapes,
            seconds=reading.number(f"{where}.seconds", body["seconds"]),
            nbytes=reading.whole(f"{where}.nbytes", body["nbytes"]),
            blocks=optional["blocks"],
            per_sm=optional["per_sm"],
            sensitivity=reading.number(f"{where}.sensitivity", body["sensitivity"]),
            source=source,
            layer=reading.text(f"{where}.layer", body["layer"]) if "layer" in body else None,
            backward=reading.flag(f"{where}.backward", body["backward"]) if "layer" in body else False,
        )
    except ConfigError as error:
        raise (
            error if error.message.startswith(where) else ConfigError(f"{where}: {error.message}", error.remedy)
        ) from None
