"""Runs Programs in this process to time their operators and to verify fused Programs.

Times are kept for the process, and in a file under the user's cache directory. Keys are made of the operators'
names, shapes, strides and types, the processor, the number of threads and torch's version.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any, TypeAlias

import torch
from torch import _C

from gpumux.device.cpu.program import LoadedProgram
from gpumux.device.run import gpu_operators
from gpumux.device.run.operands import SlotOperands, allocate
from gpumux.errors import JobFailed, NotFusible, ProgramError
from gpumux.fuse.emit import FusionEmitter
from gpumux.fuse.template import Fused, numbers, stream_bytes
from gpumux.hostmemory import cpu_name
from gpumux.program import onednn_lstm
from gpumux.program.check import schema
from gpumux.program.codec import encode
from gpumux.program.ir import (
    ALIGN,
    ITEM_BYTES,
    Arg,
    Op,
    Program,
    ProgramBuilder,
    ScalarRef,
    Storage,
    Tag,
    TensorRef,
    View,
    slot_layout,
)
from gpumux.program.memory import first_fit, footprint
from gpumux.program.validate import op_args, out_views, state_slots, tensor_refs

# ---- Runs a Program in this process, with the CPU device's own interpreter and graphs.


_ONE_PIECE_S = 1e6  # nothing waits between pieces here, so a step is one piece
_PYTHON_S = 2.5e-6  # extra seconds of calling an operator from Python; only for the profile
_HEAP_BYTES = 31 << 20


class ProgramRunner:
    """Runs one Program on `buffers` (bytes, by state slot). Not thread-safe."""

    def __init__(self, program: Program, buffers: Sequence[torch.Tensor]) -> None:
        _keep_freed_memory()
        layout = slot_layout(program)
        memory = mmap.mmap(-1, max(layout.nbytes, ALIGN))
        self.program = program
        self.loaded = LoadedProgram(
            program, buffers, memory, 1, target_s=_ONE_PIECE_S, python_s=_PYTHON_S, progress=_ignore
        )
        self.slot = whole = torch.frombuffer(memory, dtype=torch.uint8)  # bytes, as `slot_layout` places them
        self._inputs = []
        for at, index in zip(layout.inputs, program.inputs, strict=True):
            view = program.views[index]
            base = torch.empty(0, dtype=getattr(torch, view.dtype))
            offset = at // base.element_size() + view.offset
            self._inputs.append(base.set_(whole.untyped_storage(), offset, view.size, view.stride))
        self._step = 0

    @property
    def inputs(self) -> list[torch.Tensor]:
        """Tensors for a step's batch, to be filled before `run`."""
        return self._inputs

    def run(self, scalars: Sequence[float | int]) -> list[torch.Tensor]:
        """Run one step and return copies of its results. Raises JobFailed, ProgramError."""
        loaded = self.loaded
        with torch.no_grad(), without_graph_optimization():
            for piece in range(len(loaded.bounds) - 1):
                loaded.run(self._step, loaded.newest, piece, 0, scalars if piece == 0 else None)
            loaded.recut()
        self._step += 1
        operands: SlotOperands = loaded.operands.slot(0)
        return [r.clone() for r in operands.results]


@cache
def _keep_freed_memory() -> None:
    """Make glibc keep freed memory. Temporaries of many models are large, and glibc returns large blocks to the kernel,
    so that each step would fault them in again page by page. It keeps blocks smaller than one freed before
    (mallopt(3), M_MMAP_THRESHOLD and M_TRIM_THRESHOLD, which follow). Other allocators are not affected."""
    torch.empty(_HEAP_BYTES, dtype=torch.uint8)


@contextmanager
def without_graph_optimization() -> Iterator[None]:
    """A block in which the graph executor neither fuses nor folds."""
    before = _C._get_graph_executor_optimize()
    _C._set_graph_executor_optimize(False)
    try:
        yield
    finally:
        _C._set_graph_executor_optimize(before)


def _ignore(index: int) -> None:
    """Do nothing: no process reads the progress of a step here."""


# ---- Times of a few operators: a Program of them alone, run a few times on synthetic numbers.


Timer: TypeAlias = Callable[[Program], float]

log = logging.getLogger("gpumux.fuse")
_WARM = 3  # runs: checked, timed operator by operator, first as a graph
_RUNS = 5
_LONG_S = 500e-6  # shorter runs are repeated within one
_MOST = 12
_ENOUGH_S = 0.05  # seconds of timed runs of one Program


def extract(emitter: FusionEmitter, start: int, stop: int) -> Program:
    """Operators start..stop-1 as a Program of their own; the tensors they read are its state."""
    part = _Part(emitter)
    ops = tuple(part.op(op) for op in emitter.ops[start:stop])
    return Program(tuple(part.storages), tuple(part.views), ops, (), (), tuple(part.scalars), device=emitter.device)


class _Part:
    """Copies operators of an emitter, with the storages, views and scalars they use, into a Program of their own."""

    def __init__(self, emitter: FusionEmitter) -> None:
        self._from = emitter
        self.storages: list[Storage] = []
        self.views: list[View] = []
        self.scalars: list[Any] = []
        self._storage: dict[int, int] = {}
        self._view: dict[int, int] = {}
        self._scalar: dict[int, int] = {}
        self._slots = 0

    def op(self, op: Op) -> Op:
        args = self._arg(op.args)
        kwargs = tuple((k, self._arg(v)) for k, v in op.kwargs)
        for view in out_views(op.outs):
            self._place(self._from.views[view].storage, born=True)
        return Op(op.target, args, kwargs, tuple(self._out(o) for o in op.outs))

    def _out(self, out: Any) -> Any:
        return tuple(map(self._out, out)) if isinstance(out, tuple) else None if out is None else self._at(out)

    def _arg(self, arg: Any) -> Any:
        if isinstance(arg, TensorRef):
            return TensorRef(self._at(arg.view))
        if isinstance(arg, ScalarRef):
            at = self._scalar.setdefault(arg.index, len(self._scalar))
            if at == len(self.scalars):
                self.scalars.append(self._from.scalars[arg.index])
            return ScalarRef(at)
        return tuple(self._arg(a) for a in arg) if isinstance(arg, tuple) else arg

    def _at(self, index: int) -> int:
        if index not in self._view:
            view = self._from.views[index]
            at = self._place(view.storage, born=False)
            self._view[index] = len(self.views)
            self.views.append(View(at, view.dtype, view.size, view.stride, view.offset))
        return self._view[index]

    def _place(self, storage: int, born: bool) -> int:
        if storage not in self._storage:
            old = self._from.storages[storage]
            temp = born and old.kind == "temp"
            self._storage[storage] = len(self.storages)
            nbytes = old.nbytes or self._room(storage)
            self.storages.append(Storage("temp" if temp else "state", nbytes, -1 if temp else self._slots))
            self._slots += not temp
        return self._storage[storage]

    def _room(self, storage: int) -> int:
        """Bytes of a storage that is still growing: a table of numbers."""
        from gpumux.program.ir import extent

        return max((extent(v) for v in self._from.views if v.storage == storage), default=0)


def join(nbytes: int, dtype: str, models: int) -> Program:
    """A Program that joins B storages into one."""
    build = ProgramBuilder()
    count = nbytes // ITEM_BYTES[dtype]
    parts = tuple(build.state(dtype, (count,)) for _ in range(models))
    build.call("aten.cat.default", parts, dtype=dtype, size=(count * models,))
    return build.build()


def synthetic_state(program: Program) -> list[torch.Tensor]:
    """Buffers for a Program's state slots: floats of 0.75, all else 0, so that indices are valid."""
    dtypes: dict[int, str] = {}
    for view in program.views:
        dtypes.setdefault(view.storage, view.dtype)
    found: dict[int, torch.Tensor] = {}
    for index, storage in enumerate(program.storages):
        if storage.kind == "state":
            line = found[storage.slot] = allocate(storage.nbytes)
            dtype = getattr(torch, dtypes.get(index, "uint8"))
            if dtype.is_floating_point:
                line[: storage.nbytes // dtype.itemsize * dtype.itemsize].view(dtype).fill_(0.75)
    return [found[slot] for slot in range(len(found))]


def repeated(program: Program, times: int) -> Program:
    """The Program's operators `times` times in sequence, each time with temporaries of their own."""
    storages, views, ops = list(program.storages), list(program.views), list(program.ops)
    for _ in range(times - 1):
        moved = {
            i: len(storages) + k for k, i in enumerate(i for i, s in enumerate(program.storages) if s.kind == "temp")
        }
        storages += [program.storages[i] for i in moved]
        first = len(views)
        views += [replace(v, storage=moved.get(v.storage, v.storage)) for v in program.views]

        def at(arg: Any, first: int = first) -> Any:
            if isinstance(arg, TensorRef):
                return TensorRef(arg.view + first)
            return tuple(map(at, arg)) if isinstance(arg, tuple) else arg

        def out(value: Any, first: int = first) -> Any:
            return tuple(map(out, value)) if isinstance(value, tuple) else None if value is None else value + first

        ops += [
            replace(o, args=at(o.args), kwargs=tuple((k, at(v)) for k, v in o.kwargs), outs=tuple(map(out, o.outs)))
            for o in program.ops
        ]
    return replace(program, storages=tuple(storages), views=tuple(views), ops=tuple(ops))


def seconds(program: Program) -> float:
    """The shortest of a few runs of a Program, without the fixed cost of a run."""
    once = _shortest(program)
    if once > _LONG_S or program.results:
        return once
    count = min(_MOST, max(2, int(_LONG_S / once)))
    return _shortest(repeated(program, count)) / count


def _shortest(program: Program) -> float:
    runner = ProgramRunner(program, synthetic_state(program))
    scalars = [0.5 if kind == "float" else 1 for kind in program.scalars]
    for _ in range(_WARM):
        runner.run(scalars)
    best, spent = float("inf"), 0.0
    for _ in range(_RUNS):
        began = perf_counter()
        runner.run(scalars)
        took = perf_counter() - began
        best, spent = min(best, took), spent + took
        if spent > _ENOUGH_S:
            break
    return best


class Times:
    """Measures Programs and remembers their times. path: the file; None: only this process."""

    def __init__(self, path: Path | None, measure: Timer = seconds) -> None:
        self._path = path
        self._measure = measure
        self._known: dict[str, float] = {}
        self._read = False
        self._new = 0

    def __call__(self, program: Program) -> float:
        self._load()
        where = f"{cpu_name()}/{torch.get_num_threads()}/{torch.__version__}/"
        key = where + hashlib.sha256(encode(program)).hexdigest()[:32]
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._measure(program)
            self._new += 1
        return found

    def _load(self) -> None:
        if self._read or self._path is None:
            return
        self._read = True
        try:
            found = json.loads(self._path.read_text())
            self._known = {str(k): float(v) for k, v in found.items()} | self._known
        except FileNotFoundError:
            return
        except (OSError, ValueError, AttributeError, TypeError) as error:
            log.warning("measured times in %s can't be read (%s): they are measured again", self._path, error)

    def save(self) -> None:
        """Write new times, merged with those that other processes wrote meanwhile."""
        if self._path is None or not self._new:
            return
        self._read = False
        self._load()
        part = self._path.with_name(f"{self._path.name}.{os.getpid()}.part")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(self._known))
            part.replace(self._path)
            self._new = 0
        except OSError as error:
            log.warning("measured times can't be kept in %s: %s", self._path, error)


def cache_file() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "gpumux" / "fusion-times.json"


# ---- A Program in float64 instead of float32, float16 and bfloat16: differences that two orders of summation make by
# rounding are then far smaller than those of a wrong operator, even if a step is discontinuous (a maximum, a ReLU) or
# divides by a number close to zero (Adam).


_NARROW, _TO = frozenset({"float32", "float16", "bfloat16"}), "float64"


def in_float64(program: Program) -> Program | None:
    """The Program with float64 wherever it has floats of fewer bits; None where their memory is also read as another
    type, or an operator takes no float64."""
    if any(op.target in onednn_lstm.TARGETS for op in program.ops):
        return None
    dtypes: dict[int, set[str]] = {}
    for view in program.views:
        dtypes.setdefault(view.storage, set()).add(view.dtype)
    changed = {storage: next(iter(found)) for storage, found in dtypes.items() if found & _NARROW}
    if any(len(dtypes[storage]) > 1 for storage in changed):
        return None
    storages, consts = list(program.storages), list(program.consts)
    for index, dtype in changed.items():
        storage = storages[index]
        storages[index] = replace(storage, nbytes=storage.nbytes // ITEM_BYTES[dtype] * ITEM_BYTES[_TO])
        if storage.kind == "const":
            held = bytearray(consts[storage.slot])
            consts[storage.slot] = (
                torch.frombuffer(held, dtype=getattr(torch, dtype)).double().numpy().tobytes() if held else b""
            )
    views = [replace(v, dtype=_TO) if v.dtype in _NARROW else v for v in program.views]
    ops: list[Op] = []
    for op in program.ops:
        wider = replace(op, args=_wider(op.args), kwargs=tuple((name, _wider(value)) for name, value in op.kwargs))
        ops += _of_no_floats(wider, program, storages, views)
    return replace(program, storages=tuple(storages), views=tuple(views), ops=tuple(ops), consts=tuple(consts))


def _wider(arg: Arg) -> Any:
    if isinstance(arg, tuple):
        return tuple(map(_wider, arg))
    return Tag("dtype", _TO) if isinstance(arg, Tag) and arg.kind == "dtype" and arg.name in _NARROW else arg


def _of_no_floats(op: Op, program: Program, storages: list[Storage], views: list[View]) -> list[Op]:
    """An operator of the Program in float64. One that makes floats of no floats (torch.rand, the quotient of whole
    numbers) makes them in torch's default type, whatever its operands' types."""
    made = [view for view in out_views(op.outs) if program.views[view].dtype in _NARROW]
    if len(made) != 1 or op.outs != (made[0],) or storages[program.views[made[0]].storage].kind != "temp":
        return [op]
    if any(getattr(torch, program.views[ref.view].dtype).is_floating_point for ref in tensor_refs(op_args(op))):
        return [op]
    arguments = {argument.name for argument in schema(op.target).overload._schema.arguments if argument.kwarg_only}
    given = dict(op.kwargs)
    if given.get("dtype") is not None:
        return [op]
    if "dtype" in arguments:
        return [replace(op, kwargs=tuple(sorted((given | {"dtype": Tag("dtype", _TO)}).items())))]
    narrow = program.views[made[0]]
    storages.append(program.storages[narrow.storage])
    views.append(replace(narrow, storage=len(storages) - 1))
    widened = Op("aten._to_copy.default", (TensorRef(len(views) - 1),), (("dtype", Tag("dtype", _TO)),), op.outs)
    return [replace(op, outs=(len(views) - 1,)), widened]


# ---- Verifies a fused Program against one that runs every operator once a model, on synthetic numbers, before it is
# used.
#
# A wrong rule would train wrong models silently; one step of each Program on the same bytes shows it.


# Relative to the largest value of a tensor, after one step. Batched products round in another order.
_TOLERANCE = {torch.float64: 1e-7, torch.float32: 5e-3, torch.complex128: 1e-7, torch.complex64: 5e-3}
_LOOSE = 0.1  # for types of fewer bits
_NOISE_FACTOR = 100.0  # multiple of the difference that perturbing the last digits of the inputs makes
PROVEN_MODELS = 3  # a proof holds the state of its models in float64, three times; the third shows mistakes of position
SMALL_BYTES = 32 << 20  # a proof that takes no more is of all models: making Programs of fewer takes longer


def most_bytes(programs: Sequence[Program]) -> int:
    """A bound of what proving one of these Programs by the other takes: three runs' state and results at once, the
    temporaries of one run, and the numbers that one buffer is filled with (`check`)."""
    most = 0
    for program in programs:
        wide = in_float64(program) or program
        needs = footprint(wide, first_fit(wide))
        largest = max(state_slots(wide), default=0)
        most = max(most, 3 * (needs.state_bytes + 2 * needs.slot_bytes + largest) + needs.transient_bytes)
    return most


def check(fused: Fused, each: Fused, values: Sequence[Sequence[float | int]]) -> None:
    """Raise NotFusible unless both do the same to the same state and batch. values: each model's host scalars."""
    wide = [in_float64(f.program) for f in (fused, each)]
    if wide[0] is not None and wide[1] is not None:
        try:
            _compare(replace(fused, program=wide[0]), replace(each, program=wide[1]), values)
        except (ProgramError, JobFailed) as error:
            log.debug("verified in its own types, since it does not run in float64: %s", error)
        else:
            return
    try:
        _compare(fused, each, values)
    except (ProgramError, JobFailed) as error:
        raise NotFusible(
            f"the step does not run on synthetic numbers on the CPU, by which fusing it is verified: {error.message}",
            'fuse nothing: choose="per-model"',
        ) from error


def _compare(fused: Fused, each: Fused, values: Sequence[Sequence[float | int]]) -> None:
    found, wanted = _ran(fused, values), _ran(each, values)
    unsure = {name: (found[name], b) for name, b in wanted.items() if not _same(found[name], b)}
    del found, wanted  # each run holds the state of all models
    if not unsure:
        return
    near = _ran(each, values, perturbed=True)
    for name, (a, b) in unsure.items():
        if not _same(a, b, near[name]):
            rules = sorted({d.target for d in fused.decisions if d.how == "fused"})
            raise NotFusible(
                f"for all models at once, {name} comes out otherwise than for one model after another",
                f"one of these operators is fused wrongly: {', '.join(rules)}. Report it with the step's code; until "
                "then give those of which you think so as per_model_operators=[...]",
            )


def _same(a: torch.Tensor, b: torch.Tensor, near: torch.Tensor | None = None) -> bool:
    """Whether `a` is `b` but for rounding. `near` is `b` computed from inputs perturbed in their last digits: if that
    alone makes a difference (a gradient that is truly zero is only rounding), `a` may differ as much."""
    if torch.equal(a, b):
        return True
    if not (a.dtype.is_floating_point or a.dtype.is_complex):
        return False
    limit = _TOLERANCE.get(a.dtype, _LOOSE)
    wide = torch.complex128 if a.dtype.is_complex else torch.float64
    a, b = a.to(wide), b.to(wide)
    both = torch.isfinite(a) & torch.isfinite(b)
    if not torch.equal(torch.isfinite(a), torch.isfinite(b)):
        return False
    away = _largest((a - b)[both].abs())
    noise = 0.0 if near is None else _largest((near.to(wide) - b)[both & torch.isfinite(near)].abs())
    return away <= limit * max(_largest(b[both].abs()), 1e-30) + _NOISE_FACTOR * noise


def _largest(values: torch.Tensor) -> float:
    return float(values.max()) if values.numel() else 0.0


def _ran(fused: Fused, values: Sequence[Sequence[float | int]], perturbed: bool = False) -> dict[str, torch.Tensor]:
    """Results and state, by name, after a step from synthetic numbers, equal for Programs of equal state. perturbed:
    perturb those numbers in their last digits."""
    program = fused.program
    dtypes = _slot_dtypes(program)
    slots = sorted((s.slot, s.nbytes) for s in program.storages if s.kind == "state")
    unused = max((s for s, _ in slots), default=-1) + 1
    assert len(slots) == unused, "every slot is there"
    generator = torch.Generator().manual_seed(11)
    shake = torch.Generator().manual_seed(12) if perturbed else None
    buffers = [_synthetic_buffer(nbytes, dtypes[slot], generator, shake) for slot, nbytes in slots]
    if fused.streams:
        for model, stream in enumerate(buffers[-1].view(-1, stream_bytes())):  # each draws other numbers
            stream.copy_(torch.Generator().manual_seed(5 + model).get_state())
    runner = ProgramRunner(program, buffers)
    for target, index in zip(runner.inputs, program.inputs, strict=True):
        view = program.views[index]
        target.copy_(_synthetic_tensor(target.shape, getattr(torch, view.dtype), generator, shake))
    batch = len(program.inputs) - len(fused.tables)
    for target, rows in zip(runner.inputs[batch:], numbers(fused, values), strict=True):
        target.copy_(rows)
    with gpu_operators.on_the_cpu(program):
        results = runner.run([values[model][index] for model, index in fused.scalars])
    typed = [_typed(b, dtypes[slot]) for b, (slot, _) in zip(buffers, slots, strict=True)]
    return {f"result {i} of the step": each for i, each in enumerate(results)} | {
        f"tensor {i} of the state": each for i, each in enumerate(typed)
    }


def _slot_dtypes(program: Program) -> dict[int, torch.dtype]:
    found: dict[int, torch.dtype] = {}
    for view in program.views:
        storage = program.storages[view.storage]
        if storage.kind == "state":
            found.setdefault(storage.slot, getattr(torch, view.dtype))
    for storage in program.storages:
        if storage.kind == "state":
            found.setdefault(storage.slot, torch.uint8)
    return found


def _synthetic_tensor(
    size: Sequence[int], dtype: torch.dtype, generator: torch.Generator, shake: torch.Generator | None = None
) -> torch.Tensor:
    """Floats around one, so that variances and denominators are not near zero. Integers are zero, which is a valid
    index of anything."""
    if dtype.is_floating_point:
        made = torch.rand(tuple(size), generator=generator, dtype=torch.float64).add_(0.5)
        if shake is not None:
            step = 8 * torch.finfo(dtype).eps
            made *= 1 + step * torch.rand(tuple(size), generator=shake, dtype=torch.float64)
        return made.to(dtype)
    return torch.zeros(tuple(size), dtype=dtype)


def _synthetic_buffer(
    nbytes: int, dtype: torch.dtype, generator: torch.Generator, shake: torch.Generator | None
) -> torch.Tensor:
    line = allocate(nbytes)
    typed = _typed(line, dtype)
    typed.copy_(_synthetic_tensor(typed.shape, dtype, generator, shake))
    return line


def _typed(line: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return line[: line.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
