"""Pieces ready to run: stretches of graph, and of Python where a graph can't say an operator."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from gpumux.device.cpu.frame import Context, Frame
from gpumux.device.cpu.graph import GraphBuilder, GraphFunction, expressible
from gpumux.device.cpu.interp import Interpreter, failed, names
from gpumux.device.cpu.schema import takes_generator

_keys = itertools.count()


class Stretch(Protocol):
    def run(self, frame: Frame) -> None: ...


class GraphStretch:
    """Operators start..stop-1 as one call."""

    def __init__(self, context: Context, function: GraphFunction, start: int, stop: int) -> None:
        self._function = function
        self._call = function.call
        self._scalars = function.scalars
        self._live_in = function.live_in
        self._live_out = function.live_out
        self._context = context
        last = context.liveness.last
        self._dead = tuple(s for s in function.live_in if last[s] < stop)
        self._key = next(_keys)
        self._names = names(context.program, start, stop)
        self._range = f"operators {start} to {stop - 1}"

    def run(self, frame: Frame) -> None:
        slot, temps, scalars = frame.slot, frame.temps, frame.scalars
        views = slot.pieces.get(self._key)
        if views is None:
            views = slot.pieces[self._key] = tuple(slot.views[v] for v in self._function.views)
        context, streams = self._context, self._function.streams
        try:
            generators = [context.streams.of(context.tensor(frame, v)) for v in streams]
            made = self._call(
                *views, *[scalars[i] for i in self._scalars], *[temps[s] for s in self._live_in], *generators
            )
        except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError, MemoryError) as error:
            raise failed(error, f"one of {self._range} ({self._names})") from error
        if self._live_out:
            for storage, tensor in zip(self._live_out, made, strict=True):
                temps[storage] = tensor
        for storage in self._dead:
            temps[storage] = None


class PythonStretch:
    """Operators start..stop-1 one by one."""

    def __init__(self, interpreter: Interpreter, start: int, stop: int) -> None:
        self._interpreter, self._start, self._stop = interpreter, start, stop

    def run(self, frame: Frame) -> None:
        self._interpreter.run(frame, self._start, self._stop)


@dataclass(frozen=True, slots=True)
class Piece:
    start: int
    stop: int
    stretches: tuple[Stretch, ...]

    def run(self, frame: Frame) -> None:
        for stretch in self.stretches:
            stretch.run(frame)


class PieceBuilder:
    """Builds pieces of one program. `through_python` says, by operator, why it can't be in a graph."""

    def __init__(self, context: Context, interpreter: Interpreter) -> None:
        self._context = context
        self._interpreter = interpreter
        self.through_python: dict[str, str] = {}
        self._python = [self._needs_python(index) for index in range(len(context.program.ops))]

    def build(self, start: int, stop: int) -> Piece:
        return Piece(start, stop, tuple(self._stretches(start, stop)))

    def _needs_python(self, index: int) -> bool:
        context, op = self._context, self._context.program.ops[index]
        if op.random is not None and op.random in context.replays.slots:
            return True  # the generator is moved around such an operator
        if op.stream is not None and not takes_generator(op.target):
            return True  # likewise
        reason = expressible(context.program, context.liveness.birth, op)
        if reason:
            self.through_python[op.target] = reason
        return bool(reason)

    def _stretches(self, start: int, stop: int) -> Iterator[Stretch]:
        for python, group in itertools.groupby(range(start, stop), key=self._python.__getitem__):
            indices = list(group)
            first, end = indices[0], indices[-1] + 1
            yield PythonStretch(self._interpreter, first, end) if python else self._graph(first, end)

    def _graph(self, start: int, stop: int) -> GraphStretch:
        context = self._context
        builder = GraphBuilder(context.program, context.liveness.birth)
        for op in context.program.ops[start:stop]:
            builder.add(op)
        live = context.liveness
        live_out = [s for s, born in live.born.items() if start <= born < stop and live.last[s] >= stop]
        return GraphStretch(context, builder.finish(live_out), start, stop)


def sources(context: Context, frame: Frame) -> Sequence[torch.Tensor]:
    """The tensors a step's results are copied from, once its last operator has run."""
    return [context.tensor(frame, view) for view in context.program.results]
