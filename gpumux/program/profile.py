"""A step's profile: what each of its operators costs, measured on a device or modelled, as a JSON file.

    {"format": "gpumux-profile", "version": 1, "units": {"seconds": "s", "nbytes": "B"},
     "name": "vgg16", "device": "a100", "batch": 8, "recorded_at": null, "versions": {}, "note": "...",
     "ops": [{"target": "aten.mm.default", "shapes": [[8, 4096], [4096, 1000], [8, 1000]], "seconds": 2.1e-05,
              "nbytes": 16547072, "blocks": 8, "per_sm": 2, "sensitivity": 1.0, "source": "model"}, ...]}

An operator's `shapes` are the sizes of its tensor arguments, in order, then of its outputs (`op_shapes`), so
that target and shapes together say which operator it is. Nothing in a profile is code, and nothing in it is guessed
when it is read: a missing or unknown key, or a value out of range, is a ConfigError that names the place.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from math import isfinite
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from gpumux.errors import ConfigError
from gpumux.program.ir import ITEM_BYTES, Arg, Op, Out, Program, TensorRef

FORMAT = "gpumux-profile"
VERSION = 1
UNITS = {"seconds": "s", "nbytes": "B"}
MAX_FILE_BYTES = 256 << 20
RERECORD = "record it again with `gpumux jobs profile NAME -o FILE`, or mend the file"

Shapes: TypeAlias = tuple[tuple[int, ...], ...]
Source: TypeAlias = Literal["measured", "model", "guess"]


@dataclass(frozen=True, slots=True)
class OpProfile:
    """One operator alone on the device. `blocks` and `per_sm` (blocks one multiprocessor holds at once) are None
    where nobody knows. `sensitivity` is the factor on its time while another job has blocks on the device.
    Raises ConfigError for a value out of range."""

    target: str
    shapes: Shapes
    seconds: float
    nbytes: int  # memory traffic
    blocks: int | None = None
    per_sm: int | None = None
    sensitivity: float = 1.0
    source: Source = "guess"

    def __post_init__(self) -> None:
        what = f"operator {self.target!r}"
        if not self.target:
            raise ConfigError("an operator without a target", RERECORD)
        if not (isfinite(self.seconds) and self.seconds >= 0):
            raise ConfigError(f"{what} takes {self.seconds} seconds", "give a finite time of 0 or more")
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
    """A whole step, its operators in captured order. `device` is what the times are of (a preset's name, or what
    the device called itself); `recorded_at` is a UTC date, None for what nobody recorded; `batch` is the number of
    samples, where known. Raises ConfigError when it has no operators."""

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
        """The step's operators one after the other, with nothing between them."""
        return sum(op.seconds for op in self.ops)

    def sources(self) -> dict[str, int]:
        """How many operators are measured, modelled and guessed."""
        found: dict[str, int] = {}
        for op in self.ops:
            found[op.source] = found.get(op.source, 0) + 1
        return found


# ---- what a Program says of its operators ----------------------------------------------------------


def op_shapes(program: Program, op: Op) -> Shapes:
    """Sizes of the operator's tensor arguments, in order, then of its outputs."""
    return tuple([program.views[view].size for view in (*argument_views(op), *output_views(op))])


def op_nbytes(program: Program, op: Op) -> int:
    """Bytes an operator reads and writes at least: each distinct view among its arguments once, each among its
    outputs once. Caches and workspaces are not known here."""

    def moved(views: Iterator[int]) -> int:
        total = 0
        for view in {program.views[index] for index in views}:
            count = ITEM_BYTES[view.dtype]
            for n, stride in zip(view.size, view.stride, strict=True):
                count *= n if stride or n == 0 else 1  # an expanded dimension lies there once
            total += count
        return total

    return moved(argument_views(op)) + moved(output_views(op))


def batch_size(program: Program) -> int | None:
    """Samples in a batch: the first size of the first input that has one."""
    sizes = [program.views[index].size for index in program.inputs]
    return next((size[0] for size in sizes if size and size[0] > 0), None)


def argument_views(op: Op) -> Iterator[int]:
    """Indices of the views an operator is given, in order."""
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
    """Write it, one operator a line. Raises ConfigError when the file can't be written."""
    try:
        path.write_text(dumps(profile))
    except OSError as error:
        raise ConfigError(
            f"can't write {path}: {error.strerror}", "choose a file in a directory you may write"
        ) from None


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
    ops = ",\n  ".join(json.dumps(asdict(op)) for op in profile.ops)
    return json.dumps(head, indent=1)[:-2] + f',\n "ops": [\n  {ops}\n ]\n}}\n'


def load(path: Path) -> StepProfile:
    """Read a profile. Raises ConfigError, which names the file and the place, for whatever is wrong with it."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB", "name a profile")
        text = path.read_text()
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not text", "name a profile") from None
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}", "name a profile that exists") from None
    try:
        return loads(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}", error.remedy) from None


def loads(text: str) -> StepProfile:
    """The profile a file's text says. Raises ConfigError."""
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not JSON: {error}", RERECORD) from None
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise ConfigError("this is no profile", f'a profile says "format": "{FORMAT}"; {RERECORD}')
    if body.get("version") != VERSION:
        raise ConfigError(
            f"a profile of version {body.get('version')!r}, and this gpumux reads {VERSION}",
            "use the gpumux that recorded it, or record it again",
        )
    if body.get("units") != UNITS:
        raise ConfigError(f"units {body.get('units')!r}", f"this gpumux reads {UNITS}")
    names = {f.name for f in fields(StepProfile)}
    _same_keys("the profile", body, names | {"format", "version", "units"})
    ops = _list("ops", body["ops"])
    versions = body["versions"]
    if not isinstance(versions, dict):
        raise ConfigError(f"versions is {versions!r}", "give a map of names to versions")
    return StepProfile(
        name=_text("name", body["name"]),
        device=_text("device", body["device"]),
        ops=tuple([_op(index, op) for index, op in enumerate(ops)]),
        versions={name: _text(f"versions.{name}", value) for name, value in versions.items()},
        recorded_at=None if body["recorded_at"] is None else _text("recorded_at", body["recorded_at"]),
        batch=None if body["batch"] is None else _int("batch", body["batch"]),
        note=_text("note", body["note"]),
    )


def _op(index: int, body: object) -> OpProfile:
    where = f"ops[{index}]"
    if not isinstance(body, dict):
        raise ConfigError(f"{where} is {body!r}", "give a map")
    _same_keys(where, body, {f.name for f in fields(OpProfile)})
    shapes = tuple(
        tuple(_int(f"{where}.shapes", n) for n in _list(f"{where}.shapes", shape))
        for shape in _list(f"{where}.shapes", body["shapes"])
    )
    optional = {
        name: None if body[name] is None else _int(f"{where}.{name}", body[name]) for name in ("blocks", "per_sm")
    }
    source: Any = _text(f"{where}.source", body["source"])
    try:
        return OpProfile(
            target=_text(f"{where}.target", body["target"]),
            shapes=shapes,
            seconds=_number(f"{where}.seconds", body["seconds"]),
            nbytes=_int(f"{where}.nbytes", body["nbytes"]),
            blocks=optional["blocks"],
            per_sm=optional["per_sm"],
            sensitivity=_number(f"{where}.sensitivity", body["sensitivity"]),
            source=source,
        )
    except ConfigError as error:
        raise (
            error if error.message.startswith(where) else ConfigError(f"{where}: {error.message}", error.remedy)
        ) from None


def _same_keys(where: str, body: Mapping[str, object], wanted: set[str]) -> None:
    unknown, missing = sorted(set(body) - wanted), sorted(wanted - set(body))
    if unknown:
        raise ConfigError(f"{where} has the unknown key {unknown[0]!r}", f"its keys are {', '.join(sorted(wanted))}")
    if missing:
        raise ConfigError(f"{where} lacks {missing[0]!r}", RERECORD)


def _text(where: str, value: object) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{where} is {value!r}", "give a string")
    return value


def _int(where: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{where} is {value!r}", "give a whole number")
    return value


def _number(where: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{where} is {value!r}", "give a number")
    try:
        return float(value)
    except OverflowError:
        raise ConfigError(f"{where} is beyond what a float holds", "give a smaller number") from None


def _list(where: str, value: object) -> list[Any]:
    if not isinstance(value, list):
        raise ConfigError(f"{where} is {value!r}", "give a list")
    return value
