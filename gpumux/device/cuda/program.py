"""A program on the GPU: its cuts, its first steps operator by operator, its pieces captured and replayed.

Between pieces a step's temporaries stay in the job's memory pool, at the addresses that the capture gave them. A tensor
that later pieces use is held while those are captured, so that none of them takes its memory, and released after its
last use. Pieces run in the order they were captured in, one step after the other, whatever the program, so later
captures of the same job may use that memory again.

A piece that is captured for several shares of the multiprocessors takes and leaves temporaries at the same addresses in
each of them, so each piece of a step may run on another share (`recapture`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from time import gmtime, sleep, strftime
from typing import Any

import torch

from gpumux import __version__
from gpumux.device.cuda.compute import CapturedGraph, Compute
from gpumux.device.cuda.cuts import Cuts, InstrumentedCut
from gpumux.device.cuda.driver import Driver
from gpumux.device.cuda.execute import CudaFrame, OperatorRunner
from gpumux.device.cuda.operands import CudaOperands
from gpumux.device.cuda.worker import PENDING
from gpumux.errors import DeviceLost, GpumuxError, ProgramError
from gpumux.program.ir import Program, labels
from gpumux.program.profile import OpProfile, StepProfile, batch_size, of_layer, op_nbytes, op_shapes

# ---- The capture of a cut: its pieces in order, each for every share of the multiprocessors it may run on.
#
# A piece that can't be captured (an operator of it waits for the GPU, or a library refuses) runs operator by operator:
# it takes the temporaries that earlier pieces left, and copies those for later pieces to where their graphs expect
# them.


WHOLE = 1.0


@dataclass(frozen=True, slots=True)
class Uncaptured:
    """A piece that runs operator by operator among captured ones. `before`: the temporaries it takes; `after`: those it
    leaves, in the memory where later pieces expect them."""

    before: CudaFrame
    after: CudaFrame


@dataclass(slots=True)
class CapturedCut:
    """The captured pieces of a cut, by share; None for an empty piece and for one in `uncaptured`. `left_out`: first
    and last+1 operator of each of those, and why it could not be captured."""

    by_share: dict[float, list[CapturedGraph | None]] = field(default_factory=dict)
    uncaptured: dict[int, Uncaptured] = field(default_factory=dict)
    left_out: list[tuple[int, int, GpumuxError]] = field(default_factory=list)

    def drop(self) -> None:
        """Drop all graphs. Nothing of them may be running."""
        for graph in [graph for graphs in self.by_share.values() for graph in graphs]:
            if graph is not None:
                graph.drop()
        self.by_share.clear()
        self.uncaptured.clear()


class CaptureRun:
    """Captures all pieces of a cut, in order, one in each call of `part`. `confined`: further shares, and the stream to
    capture on for each. `marked`: with events between operators, for the whole GPU alone."""

    def __init__(
        self, loaded: CudaProgram, bounds: Sequence[int], *, stream: int, pool: Any,
        confined: Mapping[float, int] | None = None, marked: bool = False,
    ) -> None:  # fmt: skip
        self._loaded, self._stream, self._pool = loaded, stream, pool
        self._confined = dict(confined or {})
        self._left = deque(
            (start, stop, share) for start, stop in pairwise(bounds) for share in (WHOLE, *self._confined)
        )
        self._frame = loaded.frame()
        self._before = (
            self._frame
        )  # the temporaries that the piece took; held, so that no capture of it takes that memory
        self.graphs = CapturedCut({share: [] for share in (WHOLE, *self._confined)})
        self.marks: list[list[int]] | None = [] if marked else None

    def part(self) -> object | None:
        """Capture the next piece for one share. Returns PENDING, or None when it was the last. Raises JobFailed, and
        drops all it has captured then."""
        start, stop, share = self._left.popleft()
        try:
            self.graphs.by_share[share].append(self._capture(start, stop, share))
        except BaseException:
            self.stop()
            raise
        return PENDING if self._left else None

    def _capture(self, start: int, stop: int, share: float) -> CapturedGraph | None:
        loaded, pool = self._loaded, self._pool
        piece = len(self.graphs.by_share[share])
        if share != WHOLE:
            if piece in self.graphs.uncaptured:
                return None
            return loaded.recapture(self._before, self._frame, start, stop, self._confined[share], pool)
        self._before = self._frame.copy()
        if self.marks is None:
            try:
                return loaded.capture(self._frame, start, stop, self._stream, pool)
            except DeviceLost:
                raise
            except GpumuxError as error:
                self._leave_out(piece, start, stop, error)
                return None
        graph, marks = loaded.instrument(self._frame, start, stop, self._stream, pool)
        self.marks.append(marks)
        return graph

    def _leave_out(self, piece: int, start: int, stop: int, error: GpumuxError) -> None:
        """Have the piece run operator by operator. Raises `error` if the size of what it leaves is not known."""
        self._loaded.driver.idle(self._stream)  # raises DeviceLost when it was no matter of this capture
        after = self._loaded.outgoing_memory(self._before, start, stop, self._stream)
        if after is None:
            raise error
        self.graphs.uncaptured[piece] = Uncaptured(self._before, after)
        self.graphs.left_out.append((start, stop, error))
        self._frame = after.copy()

    def stop(self) -> None:
        """Give up, and drop what was captured."""
        self.graphs.drop()
        for event in [event for marks in self.marks or () for event in marks]:
            self._loaded.driver.destroy_event(event)
        self.marks = None

    def instrumented(self) -> InstrumentedCut:
        """The instrumented cut. Call it when `part` has returned None."""
        assert self.marks is not None
        return InstrumentedCut(self._loaded.cuts.newest, self.graphs.by_share[WHOLE], self.marks, self._loaded.driver)


# ----


HOST_S = 60e-6  # Python takes at most that to call an operator and to record an event
_BUG = "this is a bug in the daemon: report it"


class CudaProgram:
    """One program bound to its job's buffers. The worker's thread calls its operators and captures its pieces. `check`,
    `share` and `replay` never wait; the daemon's thread calls them."""

    def __init__(
        self,
        program: Program,
        operands: CudaOperands,
        *,
        driver: Driver,
        compute: Compute,
        runner: OperatorRunner,
        cuts: Cuts,
        transient: int,
    ) -> None:
        self.program, self.operands, self.cuts = program, operands, cuts
        self.transient = transient  # bytes its temporaries need, those of forms included
        self.driver, self._compute = driver, compute
        self._runner = runner
        self._frame: CudaFrame | None = None
        self._next: tuple[int, int, int] | None = None  # step, cut and piece that must come next
        self._graphs: dict[int, CapturedCut] = {}  # by cut
        self._known: list[CapturedCut] = []  # all that hold memory
        self._parted: tuple[tuple[int, ...], CapturedCut] | None = (
            None  # bounds and graphs, while there is a whole one beside
        )
        self._whole: tuple[tuple[int, ...], CapturedCut] | None = None
        self.instrumented: InstrumentedCut | None = None  # while its operators are measured
        self._ending: list[InstrumentedCut] = []  # retired in the middle of a step, which goes on through them

    # ---- any thread

    def check(self, step: int, cut: int, piece: int) -> bool:
        """Whether a launch ends its step. Call it before each launch, in order. Raises ProgramError for a piece that is
        not there or out of order."""
        bounds = self.cuts.bounds(cut)
        if bounds is None or not 0 <= piece < len(bounds) - 1:
            raise ProgramError(f"no piece {piece} of cut {cut}", _BUG)
        if piece and self._next != (step, cut, piece):
            raise ProgramError(f"piece {piece} of step {step} is out of order", _BUG)
        last = piece == len(bounds) - 2
        self._next = None if last else (step, cut, piece + 1)
        return last

    def is_captured(self, cut: int, piece: int) -> bool:
        return cut in self._graphs and piece not in self._graphs[cut].uncaptured

    @property
    def partly_captured(self) -> bool:
        """Whether pieces of the newest cut run operator by operator. They use the memory of that cut's graphs, so the
        graphs of an instrumented cut can't run among them."""
        return self.cuts.newest in self._graphs and bool(self._graphs[self.cuts.newest].uncaptured)

    def expected(self, cut: int, piece: int) -> float:
        return self.cuts.seconds(cut)[piece]

    def share(self, step: int, cut: int, piece: int, wanted: float) -> float:
        """The share that a captured piece will run on: `wanted`, or 1.0 if it was not captured for that, or while
        operators are measured."""
        if piece == 0 and self.instrumented is not None:
            self.instrumented.begins(step, cut)
        if self._measured_by(step) is not None:
            return 1.0
        return wanted if wanted in self._graphs[cut].by_share else 1.0

    def replay(self, step: int, cut: int, piece: int, share: float, stream: int) -> None:
        """Launch a captured piece. `share`: as the method `share` returned it."""
        instrumented = self._measured_by(step)
        graph = instrumented.graphs[piece] if instrumented is not None else self._graphs[cut].by_share[share][piece]
        if graph is not None:
            graph.replay(stream)

    def _measured_by(self, step: int) -> InstrumentedCut | None:
        if self.instrumented is None and not self._ending:
            return None
        instrumented_cuts = self._ending if self.instrumented is None else [self.instrumented, *self._ending]
        return next((instrumented for instrumented in instrumented_cuts if instrumented.runs(step)), None)

    def retire(self) -> list[InstrumentedCut]:
        """End the measurement. Returns instrumented cuts that no step can use, to be dropped when nothing of the job
        runs."""
        instrumented, self.instrumented = self.instrumented, None
        if instrumented is None:
            return []
        if not instrumented.under_way:
            return [instrumented]
        self._ending.append(instrumented)
        return []

    def measured(self, step: int) -> list[InstrumentedCut]:
        """A step has ended. Returns what `retire` returns."""
        instrumented = self._measured_by(step)
        if instrumented is None:
            return []
        instrumented.under_way = False
        if instrumented is self.instrumented:
            return []
        self._ending.remove(instrumented)
        return [instrumented]

    # ---- the worker's thread

    def compile_next(self) -> bool:
        """Compile some of the program; whether any of it is left. Raises ProgramError."""
        return self._runner.compile_next()

    def run(self, cut: int, piece: int, stream: int, pool: Any | None) -> None:
        """Run a piece of cut 0, or one that could not be captured, on `stream`, operator by operator. `pool`: pieces of
        cut 0 take their memory from it; None: from the device's. Raises JobFailed."""
        bounds = self.cuts.bounds(cut)
        assert bounds is not None
        start, stop = bounds[piece], bounds[piece + 1]
        if cut:  # not from the pool: captured pieces of the same step have their memory there
            uncaptured = self._graphs[cut].uncaptured[piece]
            frame = uncaptured.before.copy()
            with self._compute.on(stream):
                self._runner.run(frame, start, stop)
                self._runner.copy_outgoing(frame, uncaptured.after)
            return
        if piece == 0 or self._frame is None:
            self._frame = self._runner.frame()
        frame, timing = self._frame, self.cuts.timing
        marks: list[int] = []

        def mark() -> None:
            event = self.driver.event(timed=True)
            marks.append(event)
            self.driver.record(event, stream)

        try:
            own = self._compute.allocating(pool) if pool is not None else nullcontext()
            with self._compute.on(stream), own:
                if timing and not self.cuts.warming:
                    # Python takes longer to call most operators than they run, and would be what events measure.
                    self._compute.occupy(HOST_S * (stop - start))
                self._runner.run(frame, start, stop, mark if timing else None)
            if timing:
                mark()
                wait(self.driver, stream)
                self.cuts.timed(start, [self.driver.elapsed(a, b) for a, b in pairwise(marks)])
        finally:
            for event in marks:
                self.driver.destroy_event(event)
        if stop == len(self.program.ops):
            self._frame = None

    def close(self) -> None:
        """Give everything back. Nothing of the program may be running."""
        for graphs in self._known:
            graphs.drop()
        self._graphs.clear()
        self._known.clear()
        for instrumented in (*self._ending, *([] if self.instrumented is None else [self.instrumented])):
            instrumented.drop()
        self._ending, self.instrumented = [], None
        self._frame = None
        self.operands.close()

    def capture(self, frame: CudaFrame, start: int, stop: int, stream: int, pool: Any) -> CapturedGraph | None:
        """Capture operators start..stop-1 as one piece. Raises JobFailed."""
        if start == stop and not (stop == len(self.program.ops) and self.program.results):
            return None
        return self._captured(start, stop, stream, pool, lambda: self._runner.run(frame, start, stop))

    def instrument(
        self, frame: CudaFrame, start: int, stop: int, stream: int, pool: Any
    ) -> tuple[CapturedGraph | None, list[int]]:
        """As `capture`, with events that the piece records: two at its head, one behind each operator. Raises
        JobFailed."""
        if start == stop:
            return self.capture(frame, start, stop, stream, pool), []
        events = [self.driver.event(timed=True) for _ in range(stop - start + 2)]
        ahead = iter(events)

        def mark() -> None:
            self.driver.mark(next(ahead), stream)

        def body() -> None:
            mark()
            self._runner.run(frame, start, stop, mark)
            mark()

        try:
            return self._captured(start, stop, stream, pool, body), events
        except BaseException:
            for event in events:
                self.driver.destroy_event(event)
            raise

    def recapture(
        self, before: CudaFrame, after: CudaFrame, start: int, stop: int, stream: int, pool: Any
    ) -> CapturedGraph | None:
        """Capture a piece again for another share. It takes the temporaries `before`, and leaves its own where the
        first capture left them, `after`. Raises JobFailed."""
        frame = before.copy()

        def body() -> None:
            self._runner.run(frame, start, stop)
            self._runner.copy_outgoing(frame, after)

        if start == stop and not (stop == len(self.program.ops) and self.program.results):
            return None
        return self._captured(start, stop, stream, pool, body)

    def _captured(self, start: int, stop: int, stream: int, pool: Any, body: Callable[[], None]) -> CapturedGraph:
        draws = any(op.random is not None for op in self.program.ops[start:stop])
        generators = self._runner.generators(start, stop)
        return self._compute.capture(stream, pool, body, draws=draws, generators=generators)

    def frame(self) -> CudaFrame:
        return self._runner.frame()

    def outgoing_memory(self, before: CudaFrame, start: int, stop: int, stream: int) -> CudaFrame | None:
        """See OperatorRunner.outgoing_memory."""
        with self._compute.on(stream):
            return self._runner.outgoing_memory(before, start, stop)

    # ---- the daemon's thread

    def accept(self, bounds: tuple[int, ...], graphs: CapturedCut, *, whole: bool = False) -> list[CapturedCut]:
        """Make the captured pieces the newest cut. `whole`: the cut before stays beside them (`switch`). Returns graphs
        that no step can use any more, to be dropped when nothing of the job runs."""
        before = self.cuts.bounds(self.cuts.newest)
        if whole and before is not None:
            self._parted, self._whole = (before, self._graphs[self.cuts.newest]), (bounds, graphs)
        else:
            self._parted = self._whole = None
        self._known.append(graphs)
        return self._begin(bounds, graphs)

    @property
    def has_whole(self) -> bool:
        return self._whole is not None

    @property
    def merged(self) -> bool:
        """Whether the newest cut is the one of whole steps."""
        return self._whole is not None and self._graphs[self.cuts.newest] is self._whole[1]

    @property
    def parted_bounds(self) -> tuple[int, ...] | None:
        """Bounds of the newest cut that is not whole."""
        return self._parted[0] if self._parted is not None else self.cuts.bounds(self.cuts.newest)

    def switch(self, whole: bool) -> list[CapturedCut]:
        """Make the other of the two cuts the newest, without a capture. Returns what `accept` returns."""
        assert self._whole is not None
        assert self._parted is not None
        return self._begin(*(self._whole if whole else self._parted))

    def _begin(self, bounds: tuple[int, ...], graphs: CapturedCut) -> list[CapturedCut]:
        self.cuts.cut(bounds)
        self._graphs[self.cuts.newest] = graphs
        self._graphs.pop(self.cuts.newest - 2, None)
        used = [*self._graphs.values(), *(kept[1] for kept in (self._parted, self._whole) if kept is not None)]
        gone = [known for known in self._known if not any(known is other for other in used)]
        self._known = [known for known in self._known if not any(known is other for other in gone)]
        return gone

    def profile(self, device: str) -> StepProfile:
        """The measured time of each operator: by the instrumented cut, if a step has run through it, else by the timed
        step. There is a measured cut."""
        program, op_s = self.program, self.cuts.op_s
        note = "by events around each operator, launched one by one: short ones are measured with the gap behind them"
        if self.instrumented is not None and self.instrumented.steps:
            op_s = self.instrumented.op_s()
            note = (
                f"by events between the operators of captured pieces, whose own cost is taken off; median of "
                f"{self.instrumented.steps} steps, beside whatever else ran"
            )
        rows = [
            of_layer(
                OpProfile(op.target, op_shapes(program, op), seconds, op_nbytes(program, op), source="measured"), label
            )
            for op, seconds, label in zip(program.ops, op_s, labels(program), strict=True)
        ]
        return StepProfile(
            name="", device=device, ops=tuple(rows),
            versions={"torch": str(torch.__version__), "gpumux": __version__},
            recorded_at=strftime("%Y-%m-%dT%H:%M:%SZ", gmtime()),
            batch=batch_size(program),
            note=note,
        )  # fmt: skip


def wait(driver: Driver, stream: int) -> None:
    """Wait until the stream's work so far is done, on the worker's thread. It sleeps between queries, so that the locks
    of the interpreter and the driver stay free for the thread that launches."""
    event = driver.event(timed=False)
    try:
        driver.record(event, stream)
        while not driver.reached(event):
            sleep(100e-6)
    finally:
        driver.destroy_event(event)
