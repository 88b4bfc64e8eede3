"""A job: captured steps over state that lives in the daemon while the job is open.

`Job` composes the parts of a job. `LocalModel` (local_model.py) keeps the local model and optimizers a copy of the
daemon's state. `Recovery` (recovery.py) holds the session and replaces it when the daemon is gone. `Pending`
(future.py) holds the unanswered steps, `Remote` (remote.py) the Programs and buffers in the daemon,
`BatchSlots` (collate.py) the choice of the slot of a batch.
"""

from __future__ import annotations

import atexit
import logging
import sys
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from types import TracebackType
from typing import Any, Generic, ParamSpec, Protocol, TypeAlias, TypeVar, cast

import torch

from gpumux.capture.batch.checks import warn_of_undone
from gpumux.capture.fetching import without_fetching
from gpumux.capture.generator import ClientGenerator, open_jobs
from gpumux.capture.microbatch.split import TOLERANCE, RankSplitter, check_microbatches
from gpumux.capture.source import fold, folded
from gpumux.capture.state import StateTable
from gpumux.capture.step import Choice, KeepMore, StepFunction, StepProgram
from gpumux.capture.structure import State
from gpumux.capture.symbols import ConstantScalars
from gpumux.capture.tracer import Tracer
from gpumux.client import snapshots
from gpumux.client.arguments import check_compile
from gpumux.client.collate import BatchSlots
from gpumux.client.future import (
    Pending,
    StepFuture,
    future_for,
    generator_after,
    is_answered,
    undone_or_counted,
    wait_answered,
    with_results,
)
from gpumux.client.local_model import LocalModel
from gpumux.client.progress import Progress
from gpumux.client.recovery import JobPlace, Recovery, make_recorder
from gpumux.client.remote import Remote, RemoteProgram
from gpumux.client.replay import ReplayEntry
from gpumux.client.session import Session, Waits
from gpumux.client.snapshots import Counts, SnapshotMetadata
from gpumux.client.transport import Shield
from gpumux.errors import ConfigError, DaemonGone, GpumuxError, JobClosed, SnapshotFailed
from gpumux.notebook import facts_table
from gpumux.program import operators
from gpumux.types import JobSpec, JobStatistics, Priority
from gpumux.waves.steps import Waves
from gpumux.waves.trace import LANES, adds_to_gradients
from gpumux.wire import messages as m

T = TypeVar("T")
log = logging.getLogger("gpumux.client")

_WARM_PHASES = 4  # phases of the optimizer that submit() captures ahead
LEAVE_S = 30.0  # how long closing waits for a step or for state when a `with` block raised or the script ended


class Steppable(Protocol):
    """What a job steps: a captured function (StepFunction), or an array of models (fuse/job.py)."""

    @property
    def name(self) -> str: ...

    @property
    def microbatches(self) -> int: ...

    @property
    def compiled(self) -> bool: ...

    def choose(self, args: tuple[Any, ...], kwargs: dict[str, Any], state: State) -> Choice | KeepMore:
        """What a call made now runs (StepFunction.choose)."""
        ...


# One function of a job with the example arguments it was captured on.
_Function: TypeAlias = tuple[Steppable, tuple[Any, ...], dict[str, Any]]

# Packs the notes of a snapshot, as snapshots.write does.
WriteNotes: TypeAlias = Callable[[StateTable, State, Sequence[int], Counts, ClientGenerator | None], bytes]


def example_arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`example` is the step's arguments as a tuple or list, a dict of named ones, or one tensor."""
    if isinstance(example, (tuple, list)):
        return tuple(example), {}
    if isinstance(example, dict):
        return (), dict(example)
    return (example,), {}


# ---- How close a job's results are to those of the plain run, and why.


# For float32 with TF32: two algorithms for one convolution, both with ten bits of each factor, differ by up to this.
TF32_TOLERANCE = 5e-3
BIT_EQUAL, EQUIVALENT = "bit-equal", "equivalent"


def exactness(
    table: StateTable, microbatches: Mapping[str, int], compiled: bool = False, ranks: int = 1, fused: bool = False
) -> dict[str, Any]:
    """The entries of Job.stats() about equality of results.

    `exactness` is "bit-equal" or "equivalent". When "equivalent", `because` holds a sentence for each reason, and
    `tolerance` says by dtype how far a step's results may be from those of the reference run from the same state,
    relative to the largest element of the tensor.

    microbatches: the number of parts of a batch, by function. compiled: whether a function is compiled. ranks: over how
    many devices the job runs. fused: whether its steps may run as one with other jobs'.
    """
    because: list[str] = []
    more: dict[str, Any] = {}
    if table.runs_on == "cuda":
        because.append(
            "the step was traced on the CPU, as torch would run it on a GPU, and is carried out on the daemon's GPU,"
            " with optimizers and the numbers that change from step to step in forms of their own"
        )
    elif table.gpu:
        because.append(f"the local model lies on {table.home}, and the daemon computes on the {table.runs_on}")
    counts = {name: count for name, count in microbatches.items() if count > 1}
    if counts:
        because.append("batches are run in parts")
        more = {"microbatches": counts}
    if ranks > 1:
        because.append(f"batches are run in parts on {ranks} ranks")
    if compiled:
        because.append(
            "the daemon compiles the step, which fuses operators: results are bit-equal to those of any other compiled"
            " run of it with the same torch build on the same kind of machine"
        )
    if fused:
        because.append("its steps may run fused with those of equal jobs, whose batched operators round otherwise")
    if not because:
        return {"exactness": BIT_EQUAL}
    tolerance = {**TOLERANCE, "float32": TF32_TOLERANCE} if table.tf32 else dict(TOLERANCE)
    return {"exactness": EQUIVALENT, "because": because, "tolerance": tolerance, **more}


# ---- the job


Batch = ParamSpec("Batch")  # the arguments of a step
More = ParamSpec("More")  # those of another one over the same state


class Job(Generic[Batch]):
    """A training or inference job, opened by `gpumux.client.submit`. Verbs may be called from any thread; steps run in
    call order. To type checkers it has the arguments of its step: `Job[[Tensor, Tensor]]`."""

    def __init__(
        self, session: Session, job_id: str, spec: JobSpec, table: StateTable, *, max_variants: int | None,
        replay_bytes: int = 0, reconnect_s: float = 0.0, kept: SnapshotMetadata | None = None, last_snapshot: int = 0,
        generator: ClientGenerator | None = None, counts: Counts | None = None,
        write_notes: WriteNotes = snapshots.write, over: RankSplitter | None = None,
        make_remote: Callable[..., Remote] = Remote, waves: Waves | None = None, place: JobPlace | None = None,
    ) -> None:  # fmt: skip
        """`kept`: the snapshot that the job goes on from; `last_snapshot`: the number of its newest one; `generator`:
        of this process, from which its steps draw; `counts`: the steps that its state is the result of, if that is
        another number than the snapshot's; `over`: splits its steps over ranks, or for two `waves`; `make_remote`:
        makes what sends requests; `place`: of a job of a cluster. The other arguments are those of submit(). `capture`
        or `attach` gives the job its step, and then `start` must be called."""
        self.id = job_id
        self.name = spec.name
        self.seed = spec.seed
        self._spec = spec
        self._table = table
        self._max_variants = max_variants
        self._generator = generator
        recorder = make_recorder(session, table, replay_bytes)
        waits = Waits(job_id, spec.priority is Priority.HIGH)
        self._remote = make_remote(session, job_id, table, waits, observer=recorder)
        self._over = over
        self._waves = waves
        self._pending = Pending(self._remote)
        self._next_step = 0
        self._progress = Progress(spec.name)
        self._tracer = Tracer(table, operators.is_allowed, begun=self._show_tracing, replicas=waves is not None)
        self._constants = ConstantScalars() if table.runs_on == "cuda" else None
        recovery = Recovery(
            session, remote=self._remote, pending=self._pending, spec=spec, table=table,
            notes=partial(_notes_of, weakref.ref(self)), recorder=recorder, reconnect_s=reconnect_s,
            last_snapshot=last_snapshot, place=place,
        )  # fmt: skip
        self._lock = recovery.lock
        self._check_open = recovery.check_open
        self._local = LocalModel(
            self, name=spec.name, table=table, remote=self._remote, pending=self._pending, recovery=recovery,
            load=partial(_load_outside, kept.others(table) if kept is not None else {}), waves=waves,
        )  # fmt: skip
        self._tracer.outside = self._local.outside
        self._batch_slots: BatchSlots | None = None  # until `collate` is called, no batch can lie in a slot
        self._warm_state = self._local.state
        self._staleness = self._local.staleness
        self._functions: list[_Function] = []
        session.register(job_id, self._pending.on_message)
        self._kept = kept
        self.resumed_steps = kept.counts.main if kept is not None else 0
        self._counts = counts or (kept.counts if kept is not None else Counts(0, 0))
        self._write_notes = write_notes
        self._recovery = recovery  # from here on __del__ closes the job
        open_jobs.add(self)
        _open.add(self)

    def start(self) -> None:
        """Begin the job, whose step was captured: where its snapshot ended, if it is resumed. From now on it may be
        recovered."""
        if self._kept is not None:
            self._remote.go_on(self._kept.generator)
        self._recovery.ready()
        if self._kept is not None:
            self._local.go_on(self._kept)
            self._kept = None

    @folded
    def add(
        self, fn: Callable[More, Any], *, example: Any, microbatches: int = 1, compile: bool = False,  # noqa: A002
    ) -> Callable[More, StepFuture]:  # fmt: skip
        """Capture another step over the same state (evaluation, a GAN's second step, apply after
        accumulate). Returns a callable that runs it in the job's order and gives a StepFuture.
        `microbatches` and `compile` as in submit(), for this function alone."""
        check_microbatches(microbatches)
        check_compile(compile)
        with self._lock:
            function = self._persist(lambda: self.capture(fn, example, 1, microbatches, compile))

        @folded
        def call(*batch: More.args, **named: More.kwargs) -> StepFuture:
            return self._run(function, batch, named)

        call.__name__ = getattr(fn, "__name__", "step")
        call.__doc__ = fn.__doc__
        return call

    # ---- what the parts hold ---------------------------------------------------------------------

    @property
    def _session(self) -> Session:
        return self._recovery.session

    @property
    def _state(self) -> State:
        return self._local.state

    @property
    def _closed(self) -> bool:
        return self._recovery.closed

    @property
    def paused(self) -> bool:
        """Whether pause() was called last, and not resume()."""
        return self._recovery.paused

    @property
    def counts(self) -> Counts:
        """The steps that the job's state is the result of."""
        return self._counts

    def _persist(self, verb: Callable[[], T]) -> T:
        return self._recovery.persist(verb)

    def _wait(self, predicate: Callable[[], bool], timeout: float | None, step: int | None = None) -> bool:
        """`Recovery.wait`. A method of the job, because a StepFuture that holds it keeps the job open."""
        return self._recovery.wait(predicate, timeout, step)

    # ---- capture ---------------------------------------------------------------------------------

    def attach(self, steppable: Steppable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Let `step` run this. It was captured on these arguments, and its Programs are uploaded."""
        self._functions.append((steppable, args, kwargs))

    def capture(
        self, fn: Callable[..., Any], example: Any, phases: int, microbatches: int, compiled: bool
    ) -> StepFunction:
        """Capture a function on `example` in so many phases of the optimizer, and upload its Programs."""
        args, kwargs = example_arguments(example)
        function = StepFunction(
            fn, self._table, self._tracer, self._staleness, intern=self._local.intern,
            max_variants=self._max_variants, microbatches=microbatches, compiled=compiled,
            clients_generator=self._generator is not None, constants=self._constants, over=self._over,
        )  # fmt: skip
        entry = (function, args, kwargs)
        self._functions.append(entry)
        try:
            for at, choice in enumerate(function.confirmed(lambda: self._warm(entry, phases))):
                ahead = [choice.program]
                if self._waves is not None:
                    ahead = self._waves.ahead(choice.program, at == 0, function is self._functions[0][0])
                for program in ahead:
                    self.upload(program)
                if self._waves is not None and at == 0:
                    self._waves.warn(choice.program, self.name)
        except BaseException:
            self._functions.remove(entry)
            function.put_back()
            raise
        finally:
            self._progress.end()
        return function

    def _show_tracing(self) -> None:
        self._progress.stage(lambda: self._tracer.doing)

    def _warm(self, entry: _Function, phases: int) -> list[Choice]:
        """Capture a function from the state in which the job will first call it, through the phases of its optimizer.
        Starts over when the capture shows that more gradients must be kept."""
        while True:
            start = self._state
            if self._next_step == 0 and self._functions[0] is not entry:  # start where the first function ends
                main, args, kwargs = self._functions[0]
                if self._walk(main, args, kwargs, self._state, _WARM_PHASES) is None:
                    continue
                start = self._warm_state
            choices = self._walk(entry[0], entry[1], entry[2], start, phases)
            if choices is not None:
                return choices
            if self._next_step:
                return []  # captured at its first call, when the state has the gradients

    def _walk(self, function: Steppable, args: Any, kwargs: Any, state: State, phases: int) -> list[Choice] | None:
        """The choices of consecutive calls from `state` on; `_warm_state` is the state after them. None when more
        gradients must be kept than were; they are kept from now on."""
        choices: list[Choice] = []
        state = State(state.structure, state.host, self._state.keep)
        for _ in range(phases):
            choice = function.choose(args, kwargs, state)
            if isinstance(choice, KeepMore):
                self._state.keep = choice.keep
                return None
            choices.append(choice)
            after = choice.after(state.keep)
            if after.structure is state.structure:
                break
            state = after
        self._warm_state = state
        return choices

    def upload(self, program: StepProgram) -> int:
        """The number of a Program in the daemon, where it is uploaded if it is not there yet."""
        if program.number is None:
            operators = len(program.lowered.program.ops)
            self._progress.stage(
                lambda: f"the daemon checks and loads {operators} operator{'' if operators == 1 else 's'}"
            )
            program.number = self._remote.upload(program.lowered, program.ranked)
        return program.number

    # ---- steps -----------------------------------------------------------------------------------

    def step(self, *batch: Batch.args, **named: Batch.kwargs) -> StepFuture:
        """Run the submitted step on a batch. Returns at once while fewer than `max_inflight` steps
        are unanswered, else waits for the oldest. Raises CaptureError, LocalWrite, JobFailed,
        JobClosed or DaemonGone; the job is unchanged then."""
        try:  # not `folded`, which every step would pay for
            return self._run(self._functions[0][0], batch, named)
        except GpumuxError as error:
            fold(error)
            raise

    def _run(self, function: Steppable, batch: tuple[Any, ...], named: dict[str, Any]) -> StepFuture:
        if named or any(type(one) is not torch.Tensor for one in batch):
            batch, named = with_results((batch, named))
        with self._lock:
            try:
                return self._persist(lambda: self._submit_step(function, batch, named))
            except BaseException:
                self._progress.end()
                raise

    def collate(self, samples: Sequence[Any]) -> Any:
        """A `collate_fn` for torch.utils.data.DataLoader: stacks samples as torch's does, but straight into the shared
        memory that step() hands to the device, so that step() copies nothing. The batch is the step's once step() was
        called with it: don't read it afterwards. In worker processes (`num_workers`), over tcp, with max_inflight=1,
        and for the first batches of a shape it makes ordinary batches. Raises JobClosed, JobFailed or DaemonGone as
        step() does."""
        if self._over is not None and self._over.ranks > 1:
            return torch.utils.data.default_collate(list(samples))  # each rank is given its part of it
        if self._batch_slots is None:
            self._batch_slots = BatchSlots(self._remote, self._recovery)
        return self._batch_slots.collate(samples)

    def _submit_step(self, function: Steppable, batch: tuple[Any, ...], named: dict[str, Any]) -> StepFuture:
        if self._pending.wrong:
            self._pending.raise_wrong()
        self._local.follow_outside()
        self._staleness.check_writes(bytes_too=True)
        self._local.take_gradients()
        choice = self._choose(function, batch, named)
        number = choice.program.number
        if number is None:
            if self._waves is None:
                choice = self._keeping(function, batch, named, choice)
            number = self.upload(choice.program)
            self._progress.end()
        snapshots = self._recovery.snapshots
        if snapshots is not None:
            snapshots.tick(self._session)
        if len(self._pending.steps) >= self._spec.max_inflight:
            oldest = min(tuple(self._pending.steps), default=None)
            self._wait(lambda: len(self._pending) < self._spec.max_inflight, None, oldest)
            self._check_open()
        # Only now, because the job may have been recovered during the wait, with other slots.
        slot: int | None = None
        if self._batch_slots is None:
            program, filled = self._remote.programs[number], False
        else:
            program, slot, filled = self._batch_slots.pick(number, choice.tensors)
        if program.fails_alone:
            future = self._see_step(function, choice, program, slot, filled)
        elif program.program.generator is None:
            with Shield():  # a step that was sent and not counted would leave the local state between two steps
                future = self._send_step(function, choice, program, slot, filled, None)
        else:
            future = self._send_drawing_step(function, choice, program, slot, filled)
        if choice.program.written:
            _answered(future)  # the script may read what the step wrote into its batch
        return future

    def _choose(self, function: Steppable, batch: tuple[Any, ...], named: dict[str, Any]) -> Choice:
        """What this call runs."""
        if self._waves is not None:
            return self._choose_of_waves(self._waves, function, batch, named)
        choice = function.choose(batch, named, self._state)
        if isinstance(choice, KeepMore):
            self._local.keep_gradients(choice.keep)
            choice = function.choose(batch, named, self._state)  # raises where the gradients' values are gone
            assert isinstance(choice, Choice)
        return choice

    def _choose_of_waves(
        self, waves: Waves, function: Steppable, batch: tuple[Any, ...], named: dict[str, Any]
    ) -> Choice:  # fmt: skip
        main = function is self._functions[0][0]
        choice = function.choose(batch, named, waves.state(self._state) if main else self._state)
        if main and isinstance(choice, Choice) and not waves.trains(choice.program):
            choice = function.choose(batch, named, self._state)  # it runs on the newest replica
        if isinstance(choice, KeepMore):
            raise adds_to_gradients()
        choice.program = waves.program(choice.program, main)
        return choice

    def _keeping(self, function: Steppable, batch: tuple[Any, ...], named: dict[str, Any], choice: Choice) -> Choice:
        """A choice just captured, with the gradients kept that it leaves first and that it would read if it were called
        again. A loop that steps the optimizer at every fourth batch, the first among them, adds to them from the second
        on."""
        entry, after = self._state.structure, choice.after(self._state.keep)
        if not after.structure.dropped or entry.gradients or not isinstance(function, StepFunction):
            return choice
        again = function.choose(batch, named, after)
        if isinstance(again, Choice):
            return choice
        self._local.keep_gradients(again.keep)
        found = function.choose(batch, named, self._state)
        assert isinstance(found, Choice)
        return found

    def _send_drawing_step(
        self, function: Steppable, choice: Choice, program: RemoteProgram, slot: int | None, filled: bool
    ) -> StepFuture:
        """Send a step that draws from a generator of the client, and advance that as the step does."""
        source = self._generator
        assert source is not None
        words = choice.program.lowered.words  # how many the step draws, None if unknown
        future, moved = None, False
        with source.lock:
            try:
                with Shield():
                    future = self._send_step(function, choice, program, slot, filled, source.state())
                    if words is not None and (self.paused or not source.waits(words, program.device_s)):
                        source.skip(words)
                        moved = True
                if not moved:
                    state = generator_after(future) if _answered(future) else None
                    if state is not None:
                        source.set_state(state)
            except BaseException:  # an interrupt
                if future is not None and not moved and words is not None:
                    source.skip(words)
                raise
        return future

    def _see_step(
        self, function: Steppable, choice: Choice, program: RemoteProgram, slot: int | None, filled: bool
    ) -> StepFuture:
        """Send a step that may fail alone, and wait for it. It counts unless it did. Raises BadBatch and BadValue."""
        source = self._generator if program.program.generator is not None else None
        with source.lock if source is not None else nullcontext():
            with Shield():
                state = source.state() if source is not None else None
                future, entry = self._post_step(choice, program, slot, filled, state)
            try:
                _answered(future)
            finally:  # also after an interrupt, when the step counts whatever becomes of it
                with Shield():
                    undone = undone_or_counted(future)
                    if undone is None:
                        self._count_step(function, choice, future)
                        if source is not None and (state := generator_after(future)) is not None:
                            source.set_state(state)
                    elif entry is not None and (recorder := self._recovery.recorder) is not None:
                        recorder.log.remove_newest(entry)
            if undone is not None:
                error, operator = undone
                warn_of_undone(program.program, operator, error.message)
                raise error.with_traceback(None)
        return future

    def _send_step(
        self, function: Steppable, choice: Choice, program: RemoteProgram, slot: int | None, filled: bool,
        generator: torch.Tensor | None,
    ) -> StepFuture:  # fmt: skip
        """`slot`: None for a free one; `filled`: the batch already lies in it. `generator`: the state of a generator of
        the client, for a step that draws from it."""
        future, _ = self._post_step(choice, program, slot, filled, generator)
        self._count_step(function, choice, future)
        return future

    def _post_step(
        self, choice: Choice, program: RemoteProgram, slot: int | None, filled: bool, generator: torch.Tensor | None
    ) -> tuple[StepFuture, ReplayEntry | None]:
        """`_send_step` without what counts the step."""
        step, number, recorder = self._next_step, program.number, self._recovery.recorder
        slot = program.free.pop() if slot is None else slot
        future = future_for(choice, program, self._wait, step)
        entry = None
        try:
            if filled and generator is not None:
                program.give_generator(slot, generator)
            inputs = choice.tensors if generator is None else [*choice.tensors, generator]
            frames = [] if filled else program.fill(slot, inputs)
            scalars = choice.values[: choice.program.lowered.counts[0]]
            if recorder is not None:
                entry = recorder.step(step, program, scalars, program.laid(slot, inputs))
            self._pending.add(
                step, future, number, slot, choice, entry.what.ran_in_group if entry is not None else None
            )
            self._remote.post_step(step, number, slot, scalars, frames)
        except BaseException:
            self._pending.forget(step)
            program.free.add(slot)
            if recorder is not None and entry is not None:
                recorder.log.remove_newest(entry)
            raise
        self._next_step = step + 1
        self._remote.waits.thread.stepped(step)
        return future, entry

    def _count_step(self, function: Steppable, choice: Choice, future: StepFuture) -> None:
        """Make the local state that after the step."""
        main = function is self._functions[0][0]
        self._counts = Counts(self._counts.main + main, self._counts.all + 1)
        self._local.advance(choice, future)
        if self._waves is not None:
            self._waves.stepped(self._state)

    # ---- state -----------------------------------------------------------------------------------

    @folded
    def sync(self) -> None:
        """Copy the trained state into the local models and optimizers, over any change made to them meanwhile. Waits
        for the steps submitted so far. Reading a local tensor fetches what the read needs; this fetches all state."""
        self._local.sync()

    def state_dict(self) -> dict[str, Any]:
        """The trained state as {"model": ..., "optimizer": ...} of CPU tensors (lists of them when several were
        submitted). The local objects stay as they are. Waits for the steps submitted so far."""
        return self._local.state_dict()

    def load_state(self, state: dict[str, Any] | None = None) -> None:
        """Push the state of the local models and optimizers to the daemon. With `state` (as state_dict() returns it),
        load that into them first."""
        self._local.load_state(state)

    # ---- control ---------------------------------------------------------------------------------

    def pause(self) -> None:
        """Start no further piece of this job until resume(). The piece that runs now finishes. Steps can still be
        submitted, up to max_inflight. Calls that wait for them (sync(), a result, one more step) wait until another
        thread or an operator resumes the job, and log a warning after five seconds."""
        self._persist(lambda: self._remote.call(m.PauseJob))
        self._recovery.paused = True

    def resume(self) -> None:
        self._persist(lambda: self._remote.call(m.ResumeJob))
        self._recovery.paused = False

    def stats(self) -> JobStatistics:
        """The daemon's figures for the job: steps, queue and device seconds, memory in bytes, outstanding launches.
        `rng` says which random generator the job draws from (submit()). `exactness` is "bit-equal" (README,
        "Equal results") or "equivalent": then `because` gives the reasons, and `tolerance` how far a step's results may
        be from the reference run's, relative to the largest element of the tensor (README, "Microbatches"). `fusion`,
        of a job submitted with fusible=True: whether it runs as one with others now, and if not, why."""
        reply, _ = self._persist(lambda: self._remote.call(m.JobStats))
        functions = [f for f, _, _ in self._functions]
        compiled = any(f.compiled for f in functions)
        rng = {"rng": "own" if self._generator is None or self._generator.own is not None else "client"}
        ranks = 1 if self._over is None else self._over.ranks
        fusion = reply.body.get("fusion")  # a daemon from before jobs were fused says nothing
        fused = fusion is not None and fusion["possible"]
        waves = {} if self._waves is None else {"waves": len(LANES)}
        same = exactness(self._table, {f.name: f.microbatches for f in functions}, compiled, ranks, fused) | waves
        return cast(JobStatistics, {**same, **rng, **reply.body})

    @property
    def bytes_copied_in(self) -> int:
        """Bytes copied from batches into shared memory so far (each batch byte once)."""
        return sum(p.copied_in for p in self._remote.programs.values())

    def close(self, drain: bool = True, *, sync: bool = True, keep: bool = False) -> None:
        """End the job. The trained state is copied into the local models and optimizers, and the daemon frees its
        own. Idempotent.

        sync: False discards the training since the local models were last up to date. drain: False waits for no
        unanswered step and copies nothing back. keep: save the state after the last step, for
        `submit(..., resume=name)`. Raises SnapshotFailed when it can't be saved, and ConfigError for a job over several
        daemons; the job then stays open."""
        self._close(drain, sync, keep, None)

    def _close(self, drain: bool, sync: bool, keep: bool, limit: float | None) -> None:
        with self._lock:
            if self._closed:
                return
            if keep:
                self._keep()
            self._recovery.closing = True
            fetched = not (sync and drain)  # or its state is not wanted
            try:
                if sync and drain:
                    fetched = self._local.fetch_at_close(limit)
                elif drain and len(self._pending) and self._recovery.recorder is not None:
                    with suppress(GpumuxError):  # the futures have the error
                        self._wait(lambda: len(self._pending) == 0, limit)
            finally:
                self._recovery.closed = True
                open_jobs.discard(self)
                self._recovery.stop()
                try:
                    if self._remote.ended is None and self._session.dead is None:
                        # The daemon keeps no state of a job that its client closed with its steps drained. What could
                        # not be fetched stays there, to be resumed.
                        finished = drain and not keep and fetched and (limit is None or not len(self._pending))
                        self._remote.call(m.CloseJob, finished)
                        self._wait(lambda: len(self._pending) == 0, None)
                        if finished:
                            self._recovery.forget_elsewhere()
                except (DaemonGone, GpumuxError) as error:
                    log.info("job %r ended while closing: %s", self.name, error)
                finally:
                    self._pending.fail(JobClosed(f"job {self.name!r} is closed", "submit it again"))
                    self._staleness.remove()
                    self._local.outside.remove()
                    self._session.unregister(self.id)
                    self._remote.waits.thread.forget()
                    self._remote.release()
                    self._session.close()
                    self._recovery.end_place()

    def _keep(self) -> None:
        self._recovery.ensure_open()
        if self._over is not None and self._over.ranks > 1:
            raise ConfigError(
                "a job over several daemons can't be resumed, so keep=True would keep its state in vain",
                "save job.state_dict() and the steps so far",
            )
        if self._recovery.snapshots is None:
            raise SnapshotFailed("this daemon keeps no snapshots", "start it with --state-dir")
        if not self._persist(self._recovery.save):
            raise SnapshotFailed(f"the state of job {self.name!r} could not be saved", "the log says why")

    def __del__(self) -> None:
        """Warn of a job that was dropped while open. Its session is dropped with it, and the session's background
        thread closes the job at the daemon (session.py), so that the collector waits for nothing here."""
        recovery: Recovery | None = getattr(self, "_recovery", None)  # None when the constructor raised
        if recovery is None or recovery.closed or sys.is_finalizing() or recovery.session.forked:
            return
        recovery.closed = True
        self._staleness.remove()
        self._local.outside.remove()
        warnings.warn(
            f"job {self.name!r} was dropped while it was open: call job.close(), or use it in a with statement",
            ResourceWarning,
            source=self,
            stacklevel=2,
        )

    def __enter__(self) -> Job[Batch]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is not None and not (isinstance(error, SystemExit) and not error.code):
            self._recovery.loop_raised(kind.__name__)
        self._close(True, True, False, None if kind is None else LEAVE_S)

    def _repr_html_(self) -> str:
        """What a notebook shows. Nothing is asked of the daemon."""
        priority = "high" if self._spec.priority is Priority.HIGH else "low"
        if priority == "high":
            priority += f", mean slowdown at most {self._spec.max_slowdown:g}"
        state = "closed" if self._closed else "paused" if self.paused else "open"
        return facts_table(
            f"gpumux job {self.name}",
            # others may have changed the priority since
            {"id": self.id[:8], "state": state, "steps": f"{self._next_step:,}", "submitted with priority": priority},
        )

    def __repr__(self) -> str:
        return f"<Job {self.name!r} {self.id[:8]} {'closed' if self._closed else 'open'}, {self._next_step} steps>"


def _answered(future: StepFuture) -> bool:
    """Wait for a step. Whether it was answered without an error, which the future has: raised here, the step would be
    submitted again."""
    try:
        wait_answered(future)
    except GpumuxError:
        if not is_answered(future):
            raise  # of a signal handler
        return False
    return True


def _load_outside(kept: dict[str, torch.Tensor], name: str, tensor: torch.Tensor) -> None:
    """Give a tensor of no model, which steps write, the value that it had in the snapshot. One that is not there was
    not written by a step until then."""
    value = kept.pop(name, None)
    if value is None:
        return
    if (value.shape, value.dtype) != (tensor.shape, tensor.dtype):
        raise ConfigError(
            f"the kept job's {name} was {value.dtype} {tuple(value.shape)}, and is {tensor.dtype}"
            f" {tuple(tensor.shape)} now",
            "submit the same step over tensors of the same shapes as then",
        )
    tensor.copy_(value)


def _notes_of(ref: weakref.ref[Job[Any]]) -> tuple[bytes, int]:
    """The notes of a snapshot taken now, and the number of steps before it."""
    job = ref()
    assert job is not None, "a job that is gone takes no snapshots"
    with without_fetching():
        notes = job._write_notes(job._table, job._state, job._remote.resident(), job._counts, job._generator)
    return notes, job._counts.all


_open: weakref.WeakSet[Job[Any]] = weakref.WeakSet()


def _leave() -> None:
    """Close the jobs that are open when the script ends."""
    for job in list(_open):
        if not job._closed and not job._session.forked:
            job._close(True, True, False, LEAVE_S)


atexit.register(_leave)
