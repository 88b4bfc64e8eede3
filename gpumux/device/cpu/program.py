"""A program ready to run in an executor: its pieces, and the measurements that lead from one cut to the next.

    cut 0   A guess: pieces of equal numbers of operators, run one by one through Python. The first step verifies every
            output and warms caches. Two steps are timed, on a core of their own (device/run/interpreter.py), and the
            lesser time of each operator counts.
    cut 1   By measured times of operators; pieces run as graphs. After SETTLE_STEPS steps the times of the pieces are
            compared with the prediction; if they are far from the target, the program is cut again.
    cut 2   By the measured times of cut 1's pieces.

The scheduler may request another length of pieces (`aim`): cut 2 and later ones follow after a step of the newest cut.

A step keeps the cut that it began with, so the cut before the newest is kept.
"""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from statistics import median
from time import gmtime, strftime
from typing import Any, Protocol

import torch

from gpumux import __version__
from gpumux.device import inductor
from gpumux.device.cpu.peers import Messages, all_reduce, exchange
from gpumux.device.run.graph import GraphBuilder, GraphFunction, expressible
from gpumux.device.run.interpreter import Interpreter, Stopwatch, failed, lacks_memory, names
from gpumux.device.run.operands import Context, Frame, Operands, allocate, window
from gpumux.device.run.randomness import RandomStreams, Replays, begin_from, repeated_slots
from gpumux.device.run.schema import takes_generator
from gpumux.errors import BadBatch, BadValue, GpumuxError, JobFailed, ProgramError
from gpumux.hostmemory import cpu_name
from gpumux.program import onednn_lstm
from gpumux.program.cut import GUESSED_OP_SECONDS, Unit, cut, cut_units, gated, piece_seconds, units
from gpumux.program.indices import Undo, undo_of
from gpumux.program.ir import Collective, Program, View, gates, labels, piece_starts
from gpumux.program.memory import wave_pieces, wave_plan
from gpumux.program.profile import OpProfile, StepProfile, batch_size, of_layer, op_nbytes, op_shapes
from gpumux.types import WavePieces

# ---- Compiled programs, which run units instead of operators (program/cut.py, device/inductor.py).


_CPU = torch.device("cpu")


class CompiledProgram:
    """The compiled units of a program. Raises ProgramError if one can't be compiled."""

    def __init__(self, context: Context, interpreter: Interpreter) -> None:
        self._context, self._interpreter = context, interpreter
        program, live = context.program, context.liveness
        inductor.find_compiler("cpu")
        self._compiled: dict[int, inductor.Compiled] = {}  # by their first operator
        found: list[Unit] = []
        for unit in units(program, inductor.uncompilable(program, live)):
            made = inductor.compile_unit(program, live, unit, _CPU, lambda _: True) if unit.compiled else None
            found.append(unit._replace(compiled=made is not None))
            if made is not None:
                self._compiled[unit.start] = made
        self.units = tuple(found)
        count = len(program.scalars)
        self._numbers = tuple(torch.zeros(count, dtype=d) for d in (torch.float64, torch.int64, torch.float32))
        self._step = -1  # the step whose scalars `_numbers` holds

    @property
    def left(self) -> dict[str, str]:
        """Operators that are not compiled, each with the reason."""
        ops = self._context.program.ops
        return {op.target: "not compiled" for u in self.units if not u.compiled for op in ops[u.start : u.stop]}

    def run(self, frame: Frame, start: int, stop: int, *, watch: Stopwatch | None = None) -> list[float]:
        """Run the units between two boundaries. With a watch, returns seconds of each operator; the time of a unit
        counts for its first operator. Raises JobFailed."""
        seconds: list[float] = []
        for unit in self.units:
            if not start <= unit.start < stop:
                continue
            if not unit.compiled:
                seconds += self._interpreter.run(frame, unit.start, unit.stop, watch=watch)
                continue
            if watch is None:
                self._run(frame, unit)
                continue
            watch.start()
            self._run(frame, unit)
            seconds += [watch.stop(), *[0.0] * (unit.stop - unit.start - 1)]
        return seconds

    def _run(self, frame: Frame, unit: Unit) -> None:
        context, compiled = self._context, self._compiled[unit.start]
        program, live = context.program, context.liveness
        arguments = frame.slot.pieces.get(~unit.start)  # graphs' keys are not negative
        if arguments is None:
            found = tuple(self._tensor(frame, view) for view in compiled.bases)
            arguments = frame.slot.pieces[~unit.start] = (*found, *(self._numbers if compiled.numbers else ()))
        if compiled.numbers and frame.step != self._step:
            self._fill(frame)
        temps: list[Any] = [frame.temps[storage] for storage in compiled.live_in]
        try:
            made = inductor.run(compiled, program, live, [*arguments, *temps], lambda call, given: call(*given))  # type: ignore[list-item]
        except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError, MemoryError) as error:
            where = f"one of operators {unit.start} to {unit.stop - 1} ({names(program, unit.start, unit.stop)})"
            raise failed(error, where) from error
        for storage, tensor in zip(compiled.live_out, made, strict=True):
            frame.temps[storage] = tensor
        for storage in compiled.live_in:
            if live.last[storage] < unit.stop:
                frame.temps[storage] = None

    def _tensor(self, frame: Frame, view: View) -> torch.Tensor:
        for index, known in enumerate(self._context.program.views):
            made = frame.slot.views[index]
            if known.storage == view.storage and made is not None:
                return made if known == view else window(made, view)
        raise AssertionError("a unit's argument lies on no storage of the program's")

    def _fill(self, frame: Frame) -> None:
        self._step = frame.step
        for place, value in enumerate(frame.scalars):
            self._numbers[0][place] = self._numbers[2][place] = float(value)
            self._numbers[1][place] = value if isinstance(value, int) else 0


# ---- Pieces: ranges of operators as graphs, and through Python for operators that graphs can't express.


_keys = itertools.count()  # of graphs: a slot keeps the arguments of each


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
        self._range, self._last = f"operators {start} to {stop - 1}", stop - 1

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
            frame.failed_at = None if lacks_memory(error) else self._last
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
class GraphPiece:
    start: int
    stop: int
    stretches: tuple[Stretch, ...]

    def run(self, frame: Frame) -> None:
        for stretch in self.stretches:
            stretch.run(frame)


class PieceBuilder:
    """Builds pieces of one program. `through_python`: by operator, why it can't be in a graph. A graph ends at operator
    `end`, so that it is known whether an operator behind it has run."""

    def __init__(self, context: Context, interpreter: Interpreter, end: int | None = None) -> None:
        self._context = context
        self._end = len(context.program.ops) if end is None else end
        self._interpreter = interpreter
        self.through_python: dict[str, str] = {}
        self._python = [self._needs_python(index) for index in range(len(context.program.ops))]

    def build(self, start: int, stop: int) -> GraphPiece:
        return GraphPiece(start, stop, tuple(self._stretches(start, stop)))

    def _needs_python(self, index: int) -> bool:
        context, op = self._context, self._context.program.ops[index]
        if op.random is not None and op.random in context.replays.slots:
            return True  # the generator is moved around such an operator
        if op.stream is not None and not takes_generator(op.target):
            return True  # likewise
        if onednn_lstm.for_training(op):
            self.through_python[op.target] = "it needs gradients on, and graphs run without"
            return True
        reason = expressible(context.program, context.liveness.birth, op)
        if reason:
            self.through_python[op.target] = reason
        return bool(reason)

    def _stretches(self, start: int, stop: int) -> Iterator[Stretch]:
        for (python, _), group in itertools.groupby(range(start, stop), key=lambda i: (self._python[i], i > self._end)):
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


# ---- Undoing a step in which an operator has refused its values.


class StepUndo:
    """Puts state and generator back to where they were when a step began."""

    def __init__(self, undo: Undo, operands: Operands, draws: bool) -> None:
        self.undo = undo
        self._state = [operands.base(storage) for storage in undo.copied]
        self._copies = [torch.empty_like(base) for base in self._state]
        self._draws, self._generator = draws, torch.empty(0)

    def begin(self) -> None:
        for copy, base in zip(self._copies, self._state, strict=True):
            copy.copy_(base)
        if self._draws:
            self._generator = torch.default_generator.get_state()

    def run(self) -> None:
        for copy, base in zip(self._copies, self._state, strict=True):
            base.copy_(copy)
        if self._draws:
            torch.default_generator.set_state(self._generator)


# ---- Programs of an executor.


_UNDONE = "the job's state is as before the step: look at the values that reach the operator, or leave the batch out"
SETTLE_STEPS = 8
FAR = 1.5  # the program is cut again if its pieces are this many times longer or shorter than the target


class LoadedProgram:
    """One program bound to its job's buffers. `python_s` is how many seconds longer an operator takes through Python
    than in a graph; it is subtracted from the measured times. `undoes`: whether a step may fail alone. Then `fault` is
    the error of the newest step, whose other pieces are left out, and the state is as before it."""

    def __init__(
        self,
        program: Program,
        buffers: Sequence[torch.Tensor],
        data: mmap.mmap,
        slots: int,
        *,
        target_s: float,
        python_s: float,
        progress: Callable[[int], None],
        undoes: bool = False,
    ) -> None:
        self.program = program
        self.fault: GpumuxError | None = None
        self._own_s = self._target_s = self._wanted_s = target_s
        self._python_s = python_s
        self._progress = progress
        self.operands = Operands(program, buffers, data, slots)
        self._replays = Replays(repeated_slots(program))
        self._streams = RandomStreams()
        self._draws = any(op.random is not None or op.stream is not None for op in program.ops)
        self._context = Context(program, self.operands, self._replays, self._streams)
        self._interpreter = Interpreter(self._context, progress)
        undo = undo_of(program) if undoes else None
        self._undo = StepUndo(undo, self.operands, self._draws) if undo is not None else None
        self._builder: PieceBuilder | None = None
        self._frame: Frame | None = None
        self._steps = 0  # whole steps run with the newest cut
        self._watch = Stopwatch()
        self._op_s = [inf] * len(program.ops)
        self._piece_s: list[list[float]] = []
        self.newest = 0
        self._gates, self._starts = gates(program), piece_starts(program)
        self._plan = wave_plan(program)[1] if program.wave is not None else None
        # Draws of a wave's step follow each other as if no other step ran between its pieces.
        self._sets_generator = program.wave is not None and program.generator is not None
        self._collectives: dict[int, list[Collective]] = {}  # by the operator they stand before
        for one in program.collectives:
            self._collectives.setdefault(one.op, []).append(one)
        compiled = program.kind == "compiled"
        self._compiled = CompiledProgram(self._context, self._interpreter) if compiled else None
        self._bounds = {0: self._boundaries([GUESSED_OP_SECONDS] * len(program.ops))}
        self._gated = {0: gated(self._bounds[0], self._gates)}
        self._pieces: dict[int, list[GraphPiece]] = {}

    @property
    def bounds(self) -> tuple[int, ...]:
        """The first operator of each piece of the newest cut, and the number of operators at the end."""
        return self._bounds[self.newest]

    @property
    def gated(self) -> tuple[int, ...]:
        """The pieces of the newest cut that begin with a collective."""
        return self._gated[self.newest]

    @property
    def wave(self) -> WavePieces | None:
        """What the scheduler needs of the newest cut, if the program is for one of two waves."""
        return wave_pieces(self.program, self._plan, self.bounds) if self._plan is not None else None

    def guesses(self) -> tuple[float, ...]:
        """Guessed seconds of the pieces of cut 0."""
        return piece_seconds([GUESSED_OP_SECONDS] * len(self.program.ops), self._bounds[0])

    def run(self, step: int, cut: int, piece: int, slot: int, scalars: Sequence[float | int] | None) -> bool:
        """Run one piece. Returns whether it ended its step. `scalars` come with piece 0 and are kept for the step.
        Raises JobFailed and ProgramError."""
        bounds = self._bounds.get(cut)
        if bounds is None or not 0 <= piece < len(bounds) - 1:
            raise ProgramError(f"no piece {piece} of cut {cut}", "this is a bug in the daemon: report it")
        frame = self._begin(step, cut, slot, scalars) if piece == 0 else self._frame
        waits = frame is not None and bounds[piece] in self._collectives and frame.met != piece
        if frame is None or waits or (frame.step, frame.cut, frame.next_piece) != (step, cut, piece):
            raise ProgramError(
                f"piece {piece} of step {step} is out of order", "this is a bug in the daemon: report it"
            )
        if frame.generator is not None:
            torch.default_generator.set_state(frame.generator)
        if self.fault is None:
            try:
                self._carry_on(frame, cut, piece, bounds)
            except JobFailed as error:
                self.fault = self._undone(frame, error)
                if self.fault is None:
                    raise
        frame.next_piece += 1
        if frame.next_piece < len(bounds) - 1:
            if self._sets_generator:
                frame.generator = torch.default_generator.get_state()
            return False
        if self.fault is None:
            self._finish(frame)
        self._frame = None
        return True

    def _carry_on(self, frame: Frame, cut: int, piece: int, bounds: Sequence[int]) -> None:
        """Run one piece of a step."""
        if cut == 0:
            start, stop = bounds[piece], bounds[piece + 1]
            watch = self._watch if self.newest == 0 else None
            if self._compiled is not None:
                seconds = self._compiled.run(frame, start, stop, watch=watch)
            else:
                verify = watch is not None and self._steps == 0
                seconds = self._interpreter.run(frame, start, stop, verify=verify, watch=watch)
            if watch is not None:
                self._op_s[start:stop] = map(min, self._op_s[start:stop], seconds)
        elif self._settling(cut):
            self._watch.start()
            self._run_piece(frame, cut, piece)
            self._piece_s[piece].append(self._watch.stop())
        else:
            self._run_piece(frame, cut, piece)

    def _undone(self, frame: Frame, error: JobFailed) -> GpumuxError | None:
        """Undo a step, if an operator has refused its values before more of the state was written than can be put back.
        Returns the step's error."""
        undo, failed_at = self._undo, frame.failed_at
        if undo is None or failed_at is None or failed_at > undo.undo.last:
            return None
        undo.run()
        if self._pieces:  # a graph does not say which of its operators failed: they tell when they run one by one
            again = self._begin(frame.step, frame.cut, frame.slot_index, frame.scalars)
            try:
                self._interpreter.run(again, 0, undo.undo.last + 1)
            except JobFailed as found:
                error = found
            undo.run()
            self._frame = frame
        frame.temps.clear()
        kind = BadBatch if isinstance(error.__cause__, IndexError) else BadValue
        return kind(error.message, _UNDONE)

    def waits(self, cut: int, piece: int) -> bool:
        """Whether this piece of a cut begins with a collective, which `exchange` carries out."""
        return self._bounds[cut][piece] in self._collectives if piece < len(self._bounds[cut]) - 1 else False

    def exchange(self, messages: Messages) -> None:
        """Carry out the collectives before the next piece of the step. For the thread of the peers, while no piece
        runs. Raises PeersLost and JobFailed."""
        frame = self._frame
        assert frame is not None
        at = self._bounds[frame.cut][frame.next_piece]
        torch.set_flush_denormal(self.program.numerics.flush_denormal)  # a thread's own
        for one in self._collectives[at]:
            try:
                self._carry_out(messages, frame, one)
            except (RuntimeError, MemoryError) as error:
                raise failed(error, f"collective {one.sequence}") from error
        for storage in self._context.liveness.exchanged[at]:
            frame.temps[storage] = None
        frame.met = frame.next_piece

    def _carry_out(self, messages: Messages, frame: Frame, one: Collective) -> None:
        if one.kind == "all_reduce":
            all_reduce(messages, one, frame.step, [self._context.tensor(frame, view) for view in one.views])
            return
        for _, view in one.receives:
            storage = self.program.views[view].storage
            if frame.temps[storage] is None:
                base = allocate(self.program.storages[storage].nbytes)
                frame.temps[storage] = window(base, self._context.liveness.birth[storage])
        sends = [self._context.tensor(frame, view) for _, view in one.sends]
        receives = [self._context.tensor(frame, view) for _, view in one.receives]
        exchange(messages, one, frame.step, sends, receives)

    def aim(self, target_s: float | None) -> None:
        """Set the target length of pieces, in seconds; None: the first one. `recut` applies it."""
        self._wanted_s = self._own_s if target_s is None else target_s

    def _run_piece(self, frame: Frame, cut: int, piece: int) -> None:
        if self._compiled is not None:
            self._compiled.run(frame, *self._bounds[cut][piece : piece + 2])
        else:
            self._pieces[cut][piece].run(frame)

    def _boundaries(self, op_s: list[float]) -> tuple[int, ...]:
        if self._compiled is not None:
            return cut_units(self._compiled.units, op_s, self._target_s, None, self._starts)
        return cut(op_s, self._target_s, gates=self._starts)

    def recut(self) -> tuple[float, ...] | None:
        """Cut the program again after a whole step, if there is reason. Returns the predicted seconds of each piece of
        the new cut (`newest`), or None."""
        if self.newest == 0:
            self._target_s = self._wanted_s
            return self._cut([max(0.2e-6, s - self._python_s) for s in self._op_s]) if self._steps == 2 else None
        if self._wanted_s != self._target_s and self._steps:
            self._target_s, op_s = self._wanted_s, self._scaled()
            return self._cut(op_s) if self._boundaries(op_s) != self.bounds else None
        if self.newest == 1 and self._steps == SETTLE_STEPS:
            return self._cut_again()
        return None

    def profile(self) -> StepProfile:
        """The measured seconds of each operator. Raises ProgramError before the first measured cut."""
        if self.newest == 0:
            raise ProgramError("the program's operators are not measured yet", "run two steps of it first")
        program = self.program
        return StepProfile(
            name="",
            device=cpu_name(),
            ops=tuple(
                [
                    of_layer(
                        OpProfile(
                            op.target, op_shapes(program, op), seconds, op_nbytes(program, op), source="measured"
                        ),
                        label,
                    )
                    for op, seconds, label in zip(program.ops, self._op_s, labels(program), strict=True)
                ]
            ),
            versions={"torch": str(torch.__version__), "gpumux": __version__},
            recorded_at=strftime("%Y-%m-%dT%H:%M:%SZ", gmtime()),
            batch=batch_size(program),
            note=(
                f"run operator by operator with {torch.get_num_threads()} threads, Python's own time taken off"
                if self._compiled is None
                else "compiled: the time of operators that were fused is put down to the first of them"
            ),
        )

    @property
    def through_python(self) -> dict[str, str]:
        """Operators that a graph can't express, each with the reason; empty before the first measured cut."""
        if self._compiled is not None:
            return self._compiled.left
        return self._builder.through_python if self._builder else {}

    def _settling(self, cut: int) -> bool:
        return cut == 1 and self.newest == 1 and self._steps < SETTLE_STEPS

    def _begin(self, step: int, cut: int, slot: int, scalars: Sequence[float | int] | None) -> Frame:
        if scalars is None or len(scalars) != len(self.program.scalars):
            given = "none" if scalars is None else len(scalars)
            raise ProgramError(f"{given} scalars where the program takes {len(self.program.scalars)}", "send one each")
        operands = self.operands.slot(slot)
        self.fault = None
        if self._undo is not None:
            self._undo.begin()
        self._frame = Frame(operands, slot, scalars, [None] * len(self.program.storages), step, cut)
        if self._draws:
            self._replays.begin()
            self._streams.begin()
        self._progress(-1)
        self.operands.begin(operands)
        if self.program.generator is not None:
            begin_from(self._context.tensor(self._frame, self.program.generator))
        return self._frame

    def _finish(self, frame: Frame) -> None:
        if self.program.generator is not None:
            self._context.tensor(frame, self.program.generator).copy_(torch.default_generator.get_state())
        self.operands.finish(frame.slot, self._context.results(frame))
        if self._draws:
            self._streams.finish()
        if frame.cut == self.newest:
            self._steps += 1

    def _cut(self, op_s: list[float]) -> tuple[float, ...]:
        bounds = self._boundaries(op_s)
        pieces: list[GraphPiece] = []
        if self._compiled is None:
            end = self._undo.undo.last if self._undo is not None else None
            self._builder = self._builder or PieceBuilder(self._context, self._interpreter, end)
            pieces = [self._builder.build(start, stop) for start, stop in pairwise(bounds)]
        self._bounds.pop(self.newest - 1, None)
        self._gated.pop(self.newest - 1, None)
        self._pieces.pop(self.newest - 1, None)
        self.newest += 1
        self._bounds[self.newest], self._pieces[self.newest] = bounds, pieces
        self._gated[self.newest] = gated(bounds, self._gates)
        self._op_s, self._steps = op_s, 0
        self._piece_s = [[] for _ in bounds[1:]]
        return piece_seconds(op_s, bounds)

    def _cut_again(self) -> tuple[float, ...] | None:
        op_s = self._scaled()
        real = piece_seconds(op_s, self._bounds[1])
        long = max(real, default=0.0) > FAR * self._target_s
        short = len(real) > 1 and sum(real) / len(real) < self._target_s / FAR
        again = self._boundaries(op_s)
        return self._cut(op_s) if (long or short) and again != self._bounds[1] else None

    def _scaled(self) -> list[float]:
        """Each operator's seconds, scaled by the ratio of its piece's measured time to the prediction, if measured."""
        op_s = list(self._op_s)
        for (start, stop), samples in zip(pairwise(self.bounds), self._piece_s, strict=True):
            predicted = sum(op_s[start:stop])
            if samples and predicted > 0:
                factor = median(samples) / predicted
                op_s[start:stop] = [s * factor for s in op_s[start:stop]]
        return op_s
