"""A unit of a Program compiled by torch's inductor into one function of tensors, for the CPU and CUDA devices.

The checked Program is compiled: its operators, called on fake tensors in the layouts it declares, become one aten
graph, which goes to inductor. None of a client's Python is involved. Each storage that a unit touches is one argument,
a view that its other views lie within. Temporaries that later operators need are returned in their declared layout.
Numbers that change from step to step are arguments in memory (device/cuda/operators.py).

A unit is a range of operators (`program/cut.py`), and pieces are whole units. Nothing is chosen by timing, so a job
computes the same bits however it is cut and however often it is recovered. Operators that draw random numbers, and
those whose views fit no argument, run as they are.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from gpumux.device.cuda import operators
from gpumux.device.cuda.operators import FORMS, NumberTable, takes_numbers
from gpumux.device.run.interpreter import first_lines, outputs
from gpumux.device.run.operands import Liveness
from gpumux.device.run.schema import DTYPES, views_made, views_read, views_written
from gpumux.errors import ProgramError
from gpumux.program import onednn_lstm
from gpumux.program.cut import Unit
from gpumux.program.ir import Op, Program, View

Tensor = torch.Tensor
AS_IT_IS = "submit it without compile=True"


@dataclass(slots=True)
class Compiled:
    """A compiled unit: `call(*bases, *numbers, *live_in)` returns the temporaries `live_out`. `bases`: views of
    storages that outlive the step (not all of them views of the Program). `numbers`: whether it takes the step's
    numbers, as three vectors. `live_in`: storages of temporaries."""

    call: Callable[..., Any]
    bases: tuple[View, ...]
    numbers: bool
    live_in: tuple[int, ...]
    live_out: tuple[int, ...]
    seen: bool = False
    copied: tuple[bool, ...] = ()  # by `live_out`: whether it is copied to its declared layout; set by the first run


def find_compiler(device: str) -> None:
    """Raise ProgramError if what inductor needs is missing: a C++ compiler for the CPU, Triton for a GPU."""
    if device == "cuda" and importlib.util.find_spec("triton") is None:
        raise ProgramError(
            "the daemon can't compile for the GPU: there is no Triton",
            f"pip install triton where it runs, or {AS_IT_IS}",
        )
    name = os.environ.get("CXX", "g++")
    if device == "cpu" and shutil.which(name) is None:
        raise ProgramError(
            f"the daemon can't compile for the CPU: there is no C++ compiler ({name})",
            f"install one on the daemon's machine (Debian: g++) or name it in its environment (CXX=...), or {AS_IT_IS}",
        )


def uncompilable(program: Program, live: Liveness) -> frozenset[int]:
    """Operators that are not compiled: those whose views fit no argument, those that take a number that changes
    from step to step and have no form that reads it from memory, and layers of an LSTM, whose workspace the compiler
    does not know."""
    found = {i for i, op in enumerate(program.ops) if takes_numbers(op) and op.target not in FORMS}
    found |= {i for i, op in enumerate(program.ops) if op.target in onednn_lstm.TARGETS}
    for index, op in enumerate(program.ops):
        by_storage: dict[int, list[int]] = {}
        for v in dict.fromkeys((*views_read(op), *views_made(op))):
            by_storage.setdefault(program.views[v].storage, []).append(v)
        if any(_base(program, live, storage, seen, ()) is None for storage, seen in by_storage.items()):
            found.add(index)
    return frozenset(found)


def compile_unit(
    program: Program, live: Liveness, unit: Unit, device: torch.device, supports: Callable[[str], bool]
) -> Compiled | None:
    """Compile a unit. Returns None if its views of one storage fit no argument. Raises ProgramError."""
    ops = program.ops[unit.start : unit.stop]
    views: dict[int, list[int]] = {}
    written: set[int] = set()
    for op in ops:
        for v in (*views_read(op), *views_made(op)):
            views.setdefault(program.views[v].storage, []).append(v)
        written |= set(views_written(op))
    bases: dict[int, View] = {}
    persistent: list[View] = []
    live_in: list[int] = []
    for storage, seen in views.items():
        born = live.born.get(storage)
        if born is not None and unit.start <= born < unit.stop:
            bases[storage] = live.birth[storage]
        else:
            base = _base(program, live, storage, list(dict.fromkeys(seen)), written)
            if base is None:
                return None
            bases[storage] = base
            if storage not in live.birth:
                persistent.append(base)
            else:
                live_in.append(storage)
    live_out = [s for s, born in live.born.items() if unit.start <= born < unit.stop and live.last[s] >= unit.stop]
    numbers = any(map(takes_numbers, ops))
    body = _body(program, unit, bases, persistent, live_in, live_out, numbers, device, supports)
    with torch.inference_mode(False), FakeTensorMode():  # they take no memory: no job was charged for it
        examples = [_empty(view, device) for view in persistent]
        if numbers:
            count = len(program.scalars)
            examples += [
                torch.empty(count, dtype=d, device=device) for d in (torch.float64, torch.int64, torch.float32)
            ]
        examples += [_empty(bases[storage], device) for storage in live_in]
    where = f"operators {unit.start} to {unit.stop - 1}"
    try:
        call = _compile(body, examples)
    except Exception as error:  # the compiler raises errors of any type
        raise ProgramError(f"{where} can't be compiled: {first_lines(error)}", AS_IT_IS) from error
    return Compiled(call, tuple(persistent), numbers, tuple(live_in), tuple(live_out))


def run(
    unit: Compiled, program: Program, live: Liveness, arguments: Sequence[Tensor], call: Callable[..., Any]
) -> list[Tensor]:
    """Run a compiled unit; returns its live_out. `call(function, arguments)`: how the device calls functions that
    launch kernels of their own."""
    made = list(call(unit.call, arguments))
    if not unit.seen:
        memory = {a.untyped_storage().data_ptr() for a in arguments if a.numel()}
        flags = []
        for storage, tensor in zip(unit.live_out, made, strict=True):
            start = tensor.untyped_storage().data_ptr() if tensor.numel() else 0
            flags.append(start in memory or not _as_declared(tensor, live.birth[storage], program, storage))
            memory.add(start) if start else None
        unit.copied, unit.seen = tuple(flags), True
    for position, storage in enumerate(unit.live_out):
        if unit.copied[position]:
            view = live.birth[storage]
            space = torch.empty(program.storages[storage].nbytes, dtype=torch.uint8, device=made[position].device)
            made[position] = operators.window(space, view).copy_(made[position])
    return made


def _as_declared(made: Tensor, view: View, program: Program, storage: int) -> bool:
    return (
        made.stride() == view.stride
        and made.storage_offset() == view.offset
        and made.untyped_storage().nbytes() >= program.storages[storage].nbytes
    )


def _base(program: Program, live: Liveness, storage: int, seen: Sequence[int], written: Collection[int]) -> View | None:
    """A view, in the type of the views `seen`, that they all lie within: for a temporary the view it is made with; else
    one of `seen`, preferably one that is written; else the whole storage. None if there is none."""
    inner = [program.views[v] for v in seen]
    first = min(view.offset for view in inner)
    end = max(view.offset + _extent(view) for view in inner)

    def covers(view: View) -> bool:
        alike = all(other.dtype == view.dtype for other in inner)
        return alike and view.offset <= first and end <= view.offset + _extent(view)

    birth = live.birth.get(storage)
    if birth is not None:
        return birth if covers(birth) else None
    for index in sorted(seen, key=lambda v: (v not in written, v)):
        if covers(program.views[index]):
            return program.views[index]
    dtype = inner[0].dtype
    flat = View(storage, dtype, (program.storages[storage].nbytes // DTYPES[dtype].itemsize,), (1,))
    return flat if covers(flat) else None


def _extent(view: View) -> int:
    """The number of elements from a view's first to its last."""
    return 1 + sum((n - 1) * s for n, s in zip(view.size, view.stride, strict=True)) if prod(view.size) else 0


def _empty(view: View, device: torch.device) -> Tensor:
    return torch.empty_strided(view.size, view.stride, dtype=DTYPES[view.dtype], device=device)


def _body(
    program: Program, unit: Unit, bases: dict[int, View], persistent: list[View], live_in: list[int],
    live_out: list[int], numbers: bool, device: torch.device, supports: Callable[[str], bool],
) -> Callable[..., list[Tensor]]:  # fmt: skip
    ops: list[tuple[int, Op]] = list(enumerate(program.ops))[unit.start : unit.stop]
    calls = {index: operators.call(index, op, supports, compiled=True) for index, op in ops}

    def body(*arguments: Tensor) -> list[Tensor]:
        given = list(arguments)
        held: dict[int, Tensor] = {view.storage: given.pop(0) for view in persistent}
        table = NumberTable.of((given.pop(0), given.pop(0), given.pop(0)), program) if numbers else []
        held |= {storage: given.pop(0) for storage in live_in}

        def tensor(index: int) -> Tensor:
            view = program.views[index]
            base, lies = held[view.storage], bases[view.storage]
            if view == lies:
                return base
            # Offsets from the argument's first element: compiled code takes arguments by their addresses.
            return torch.as_strided(base, view.size, view.stride, view.offset - lies.offset)

        for index, op in ops:
            args = [operators.evaluate(arg, tensor, table, device) for arg in op.args]
            keywords = {name: operators.evaluate(arg, tensor, table, device) for name, arg in op.kwargs}
            if operators.takes_device(op):
                keywords["device"] = device
            memory = {_storage(leaf) for leaf in tree_leaves((args, keywords)) if isinstance(leaf, Tensor)}
            for index_out, made in outputs(op, calls[index](*args, **keywords)):
                view = program.views[index_out]
                if view.storage not in held:
                    held[view.storage] = _conforming(made, view, memory)
        return [held[storage] for storage in live_out]

    return body


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _conforming(made: Tensor, view: View, memory: set[int]) -> Tensor:
    """While tracing: a new tensor in its declared layout, which later views use, and in memory of its own."""
    if made.stride() == view.stride and _storage(made) not in memory:
        return made
    return torch.empty_strided(view.size, view.stride, dtype=made.dtype, device=made.device).copy_(made)


def _compile(body: Callable[..., list[Tensor]], examples: Sequence[Tensor]) -> Callable[..., Any]:
    """Compile in this process, with nothing chosen by timing: the same unit becomes the same code in every run."""
    import torch._inductor.config as config
    from torch._inductor import compile as inductor
    from torch.fx.experimental.proxy_tensor import make_fx

    wanted = {"compile_threads": 1, "max_autotune": False, "fallback_random": True, "deterministic": True}
    options = {name: value for name, value in wanted.items() if hasattr(config, name)}
    with torch.inference_mode(False), torch.no_grad(), config.patch(options):
        graph = make_fx(body, tracing_mode="fake")(*examples)
        return inductor(graph, list(examples))  # type: ignore[no-any-return]
