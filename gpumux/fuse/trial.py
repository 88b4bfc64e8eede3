"""How long a few operators of a fused Program take: a Program of them alone, run a few times on invented numbers.

Times are kept for the process, and in a file under the user's cache directory, by what the operators are:
names, shapes, strides, types, with the processor, the number of threads and torch's version.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any, TypeAlias

import torch

from gpumux.device.cpu.machine import cpu_name
from gpumux.device.cpu.operands import allocate
from gpumux.fuse.emit import Emitter
from gpumux.fuse.runner import Runner
from gpumux.program.builder import ProgramBuilder
from gpumux.program.codec import encode
from gpumux.program.ir import ITEM_BYTES, Op, Program, ScalarRef, Storage, TensorRef, View
from gpumux.program.validate import out_views

Timer: TypeAlias = Callable[[Program], float]

log = logging.getLogger("gpumux.fuse")
_WARM = 3  # runs: checked, timed operator by operator, first as a graph
_RUNS = 5
_LONG_S = 500e-6  # a run that takes as long is long enough; what takes less is repeated within one
_MOST = 12
_ENOUGH_S = 0.05  # of timed runs of one Program


def extract(emitter: Emitter, start: int, stop: int) -> Program:
    """Operators start..stop-1 as a Program of their own: what they find there is its state."""
    part = _Part(emitter)
    ops = tuple(part.op(op) for op in emitter.ops[start:stop])
    return Program(tuple(part.storages), tuple(part.views), ops, (), (), tuple(part.scalars), device=emitter.device)


class _Part:
    def __init__(self, emitter: Emitter) -> None:
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
    """What brings B storages together."""
    build = ProgramBuilder()
    count = nbytes // ITEM_BYTES[dtype]
    parts = tuple(build.state(dtype, (count,)) for _ in range(models))
    build.call("aten.cat.default", parts, dtype=dtype, size=(count * models,))
    return build.build()


def invented(program: Program) -> list[torch.Tensor]:
    """Buffers for a Program's state slots: numbers near one, indices of zero."""
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
    """The Program's operators so often, one after the other, each time with temporaries of their own."""
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
    """The shortest of a few runs of a Program, without what every run costs, however short."""
    once = _shortest(program)
    if once > _LONG_S or program.results:
        return once
    count = min(_MOST, max(2, int(_LONG_S / once)))
    return _shortest(repeated(program, count)) / count


def _shortest(program: Program) -> float:
    runner = Runner(program, invented(program))
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
    """Remembers what `measure` found. `path`: the file, None for this process only."""

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
        """Write what is new, together with what others wrote meanwhile."""
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
