"""A job: captured steps over state that lives in the daemon while the job is open."""

from __future__ import annotations

import atexit
import logging
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import torch

from gpumux.capture.generator import client_generator
from gpumux.capture.microbatch.split import TOLERANCE, check_microbatches
from gpumux.capture.staleness import StaleGuard, of_job
from gpumux.capture.state import StateTable
from gpumux.capture.step import Choice, KeepMore, State, StepFunction
from gpumux.capture.structure import Structure, from_local
from gpumux.capture.symbols import Steady
from gpumux.capture.tracer import Tracer
from gpumux.client.arguments import check_compile
from gpumux.client.future import StepFuture
from gpumux.client.local_model import LEAVE_S, Cached, JobSource, nothing
from gpumux.client.pending import Pending
from gpumux.client.recovery import Recovery, ended_for_now, notes_of
from gpumux.client.remote import Remote, RemoteProgram, Slotted
from gpumux.client.session import Session, Waits
from gpumux.client.snapshots import Counts, Keepsake
from gpumux.errors import DaemonGone, ExecutorCrashed, GpumuxError, JobClosed, SnapshotFailed, UnknownJob
from gpumux.program import operators
from gpumux.types import JobSpec, Priority
from gpumux.wire import messages as m

# ---- Capture as a job does it: from where it will stand, through the phases its optimizer goes through.


_WARM_PHASES = 4  # how many phases of the optimizer submit() captures ahead


class Capturing:
    """The part of a Job that makes Programs of functions and sends them."""

    _functions: list[tuple[StepFunction, tuple[Any, ...], dict[str, Any]]]
    _clients_generator: bool
    _guard: StaleGuard
    _max_variants: int
    _next_step: int
    _remote: Remote
    _state: State
    _steady: Steady | None
    _structures: dict[Structure, Structure]
    _table: StateTable
    _tracer: Tracer
    _warm_state: State

    def _intern(self, structure: Structure) -> Structure:
        return self._structures.setdefault(structure, structure)

    def _capture(
        self, fn: Callable[..., Any], example: Any, phases: int, microbatches: int, compiled: bool
    ) -> StepFunction:
        args, kwargs = example_arguments(example)
        function = StepFunction(
            fn, self._table, self._tracer, self._guard, self._intern, self._max_variants, microbatches, compiled,
            clients_generator=self._clients_generator, steady=self._steady,
        )  # fmt: skip
        entry = (function, args, kwargs)
        self._functions.append(entry)
        try:
            choices = self._warm(entry, phases)
            for choice in choices:
                self._upload(choice)
        except BaseException:
            self._functions.remove(entry)
            raise
        return function

    def _warm(self, entry: tuple[StepFunction, tuple[Any, ...], dict[str, Any]], phases: int) -> list[Choice]:
        """Capture a function from where the job will stand when it is first called, and on through
        the phases its optimizer goes through. Starts over when that shows that gradients must be kept."""
        while True:
            try:
                if self._next_step == 0 and self._functions[0] is not entry:
                    main, args, kwargs = self._functions[0]
                    self._warm_state = self._walk(main, args, kwargs, self._state, _WARM_PHASES)[1]
                start = self._state if self._next_step or self._functions[0] is entry else self._warm_state
                choices, self._warm_state = self._walk(entry[0], entry[1], entry[2], start, phases)
                return choices
            except KeepMore as more:
                self._state.keep = more.keep
                if self._next_step:
                    return []  # captured at its first call, from a state that has them

    def _walk(
        self, function: StepFunction, args: Any, kwargs: Any, state: State, phases: int
    ) -> tuple[list[Choice], State]:
        choices: list[Choice] = []
        state = State(state.structure, state.host, self._state.keep)
        for _ in range(phases):
            choice = function.choose(args, kwargs, state)
            choices.append(choice)
            after = choice.after(state.keep)
            if after.structure is state.structure:
                break
            state = after
        return choices, state

    def _upload(self, choice: Choice) -> int:
        if choice.made.number is None:
            choice.made.number = self._remote.upload(choice.made.lowered)
        return choice.made.number


def example_arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`example` is the step's arguments as a tuple or list, a dict of named ones, or one tensor."""
    if isinstance(example, (tuple, list)):
        return tuple(example), {}
    if isinstance(example, dict):
        return (), dict(example)
    return (example,), {}


# ---- How near a job's results are to those of the plain run, and why.


TF32_TOLERANCE = (
    5e-3  # of float32: two algorithms for one convolution that keep ten bits of each factor differ by so much
)
BIT_EQUAL, EQUIVALENT = "bit-equal", "equivalent"


def exactness(table: StateTable, microbatches: Mapping[str, int], compiled: bool = False) -> dict[str, Any]:
    """For Job.stats(): `exactness`, and where results are not bit-equal `because`, a sentence for each reason, and
    `tolerance`, how far a step's results may be from the reference run's of the same state, relative to the largest
    element of the tensor, by the type they are in. `microbatches`: by function, into how many parts its batch is cut;
    `compiled`: whether one is."""
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
    if compiled:
        because.append(
            "the daemon compiles the step, which fuses operators: results are bit-equal to those of any other compiled"
            " run of it with the same torch build on the same kind of machine"
        )
    if not because:
        return {"exactness": BIT_EQUAL}
    tolerance = {**TOLERANCE, "float32": TF32_TOLERANCE} if table.tf32 else dict(TOLERANCE)
    return {"exactness": EQUIVALENT, "because": because, "tolerance": tolerance, **more}


# ----


T = TypeVar("T")
log = logging.getLogger("gpumux.client")


class Job(Capturing, Cached, Slotted):
    """Made by `gpumux.client.submit`. Verbs may be called from any thread; steps run in call order."""

    def __init__(
        self, session: Session, job_id: str, spec: JobSpec, table: StateTable, max_variants: int,
        replay_bytes: int = 0, reconnect_s: float = 0.0, kept: Keepsake | None = None, last_snapshot: int = 0,
        clients_generator: bool = False,
    ) -> None:  # fmt: skip
        self.id = job_id
        self.name = spec.name
        self.seed = spec.seed
        self._spec = spec
        self._session = session
        self._table = table
        self._max_variants = max_variants
        self._clients_generator = clients_generator
        self._lock = threading.RLock()
        self._structures: dict[Structure, Structure] = {}
        self._remote = Remote(session, job_id, table, Waits(job_id, spec.priority is Priority.HIGH))
        self._pending = Pending(self._remote)
        self._next_step = 0
        self._tracer = Tracer(table, operators.is_allowed)
        self._steady = Steady() if table.runs_on == "cuda" else None
        structure, host = from_local(table)
        self._state = State(self._intern(structure), host, frozenset(i for i, _ in structure.kept))
        self._warm_state = self._state
        self._start_caching()
        self._guard = StaleGuard(of_job(spec.name), table, JobSource(self))
        self._functions: list[tuple[StepFunction, tuple[Any, ...], dict[str, Any]]] = []
        session.register(job_id, self._pending.on_message)
        self._closed = False
        self._paused = False
        self._away: GpumuxError | None = None  # what happened, until the job is back
        self._lost: GpumuxError | None = None  # why it could not come back
        self._counts = kept.counts if kept is not None else Counts(0, 0)
        self.resumed_steps = self._counts.main
        self._notes = partial(notes_of, weakref.ref(self))
        self._recovery = Recovery(self, replay_bytes, reconnect_s, last_snapshot)
        client_generator.jobs.add(self)
        _open.add(self)

    def add(
        self, fn: Callable[..., Any], *, example: Any, microbatches: int = 1, compile: bool = False,  # noqa: A002
    ) -> Callable[..., StepFuture]:  # fmt: skip
        """Capture another step over the same state (evaluation, a GAN's second step, apply after
        accumulate). Returns a callable that runs it in the job's order and gives a StepFuture.
        `microbatches` and `compile` as in submit(), for this function alone."""
        check_microbatches(microbatches)
        check_compile(compile)
        with self._lock:
            function = self._persist(lambda: self._capture(fn, example, 1, microbatches, compile))

        def call(*batch: Any, **named: Any) -> StepFuture:
            return self._run(function, batch, named)

        call.__name__ = getattr(fn, "__name__", "step")
        call.__doc__ = fn.__doc__
        return call

    # ---- steps -----------------------------------------------------------------------------------

    def step(self, *batch: Any, **named: Any) -> StepFuture:
        """Run the submitted step on a batch. Returns at once while fewer than `max_inflight` steps
        are unanswered, else waits for the oldest. Raises CaptureError, LocalWrite, JobFailed,
        JobClosed or DaemonGone; the job is unchanged then."""
        return self._run(self._functions[0][0], batch, named)

    def _run(self, function: StepFunction, batch: tuple[Any, ...], named: dict[str, Any]) -> StepFuture:
        with self._lock:
            return self._persist(lambda: self._submit_step(function, batch, named))

    def _submit_step(self, function: StepFunction, batch: tuple[Any, ...], named: dict[str, Any]) -> StepFuture:
        self._guard.check_writes(bytes_too=True)
        self._take_gradients()
        try:
            choice = function.choose(batch, named, self._state)
        except KeepMore as more:
            self._keep_gradients(more.keep)
            choice = function.choose(batch, named, self._state)  # explains what is missing
        number = choice.made.number
        if number is None:
            number = self._upload(choice)
        snapshots = self._recovery.snapshots
        if snapshots is not None:
            snapshots.tick(self._session)
        if len(self._pending.steps) >= self._spec.max_inflight:
            oldest = min(tuple(self._pending.steps), default=None)
            self._wait(lambda: len(self._pending) < self._spec.max_inflight, None, oldest)
            self._check_open()
        # Only now: the job may have come back meanwhile.
        program, slot, filled = self._pick_slot(number, choice.tensors)
        if program.program.generator is None:
            return self._send_step(function, choice, program, slot, filled, None)
        with client_generator.lock:
            state = client_generator.state()
            future = self._send_step(function, choice, program, slot, filled, state)
            self._move_generator(future, program, choice.made.lowered.words)
        return future

    def _send_step(
        self, function: StepFunction, choice: Choice, program: RemoteProgram, slot: int, filled: bool,
        generator: torch.Tensor | None,
    ) -> StepFuture:  # fmt: skip
        """`filled`: the batch lies in the slot already. `generator`: its state, for a step that draws from the
        client's."""
        step, number, told = self._next_step, program.number, self._recovery.told
        future = StepFuture(self._wait, step)
        entry = None
        try:
            if filled and generator is not None:
                program.give_generator(slot, generator)
            given = choice.tensors if generator is None else [*choice.tensors, generator]
            frames = [] if filled else program.fill(slot, given)
            self._pending.add(step, future, number, slot, choice)
            scalars = choice.values[: choice.made.lowered.counts[0]]
            if told is not None:
                entry = told.step(step, program, scalars, program.slots[slot].inputs)  # the batch may be on a GPU
            self._session.post_step(m.Step(self.id, step, number, slot, scalars, len(frames)), frames)
        except BaseException:
            self._pending.forget(step)
            program.free.add(slot)
            if told is not None and entry is not None:
                told.log.take_back(entry)
            raise
        self._next_step = step + 1
        self._remote.waits.turns.stepped(step)
        main = function is self._functions[0][0]
        self._counts = Counts(self._counts.main + main, self._counts.all + 1)
        self._advance(choice)
        return future

    def _move_generator(self, future: StepFuture, program: RemoteProgram, words: int | None) -> None:
        """Bring the client's generator to where the step leaves it."""
        if words is not None and (self._paused or not client_generator.waits(words, program.device_s)):
            client_generator.skip(words)
            return
        try:
            self._wait(future._answered, None, future._step)
        except GpumuxError:
            return  # the job is lost, as the future says; raised here, the step would be submitted again
        except BaseException:  # an interrupt
            if words is not None:
                client_generator.skip(words)
            raise
        if future._generator is not None:
            client_generator.take_back(future._generator)

    def _advance(self, choice: Choice) -> None:
        """The Python side of the step has happened: counters, hyperparameters it changed, flags."""
        before, self._state = self._state, choice.after(self._state.keep)
        choice.settle(self._table)
        self._unread += 1
        changed = self._state.structure is not before.structure or self._state.host != before.host
        self._guard.replaced(choice.made.replaces, before.structure, self._state.structure)
        if choice.made.writes or changed or choice.made.remade & self._guard.gradients.given:
            self._newer(choice.made, before.structure)

    def _wait(self, predicate: Callable[[], bool], timeout: float | None, step: int | None = None) -> bool:
        """The predicate is about this job's steps, and holds once `step` is answered (default: the newest): a job that
        ends answers them all."""
        until = None if timeout is None else time.monotonic() + timeout
        remote = self._remote
        while True:
            session = self._session
            left = None if until is None else max(0.0, until - time.monotonic())
            try:
                if self._away is not None:
                    raise self._away
                if not remote.waits.wait(session, lambda: predicate() or remote.ended is not None, left, step):
                    return False
                if predicate():
                    return True
                gone = remote.end_error()
            except (DaemonGone, ExecutorCrashed) as error:
                gone = error
            try:
                if not self._recovery.come_back(self, session, gone, until):
                    return False
            except GpumuxError:
                if predicate():
                    return True
                raise

    def _persist(self, verb: Callable[[], T]) -> T:
        """`verb()`, once more if the daemon goes meanwhile and the job comes back."""
        while True:
            session = self._session
            try:
                self._check_open()
                return verb()
            except (DaemonGone, ExecutorCrashed, JobClosed, UnknownJob) as gone:
                if isinstance(gone, (JobClosed, UnknownJob)) and not ended_for_now(self):
                    raise
                self._recovery.come_back(self, session, gone)

    def _check_open(self) -> None:
        if self._closed:
            raise JobClosed(f"job {self.name!r} is closed", "submit it again")
        if self._lost is not None:
            raise self._lost
        if self._away is not None:
            raise self._away
        if self._remote.ended is not None:
            raise self._remote.end_error()
        if self._session.dead is not None:
            raise self._session.dead

    # ---- control ---------------------------------------------------------------------------------

    def pause(self) -> None:
        """Start no further piece of this job until resume(). What runs now finishes. Steps can still be
        submitted, up to max_inflight; whatever waits for them (sync(), a result, one step more) waits until another
        thread or an operator resumes the job, and logs a warning after five seconds."""
        self._persist(lambda: self._remote.call(m.PauseJob))
        self._paused = True

    def resume(self) -> None:
        self._persist(lambda: self._remote.call(m.ResumeJob))
        self._paused = False

    def stats(self) -> dict[str, Any]:
        """What the daemon knows of the job: steps, queue and device seconds, memory, outstanding
        launches. `rng` says whose random generator its draws come from (submit()). `exactness` is "bit-equal" (README,
        "Equal results"), or "equivalent": `because` then says why, and `tolerance` how far a step's results may be from
        the reference run's, relative to the largest element of the tensor (README, "Microbatches")."""
        reply, _ = self._persist(lambda: self._remote.call(m.JobStats))
        functions = [f for f, _, _ in self._functions]
        compiled = any(f.compiled for f in functions)
        rng = {"rng": "client" if self._clients_generator else "own"}
        return {**exactness(self._table, {f.name: f.microbatches for f in functions}, compiled), **rng, **reply.body}

    @property
    def bytes_copied_in(self) -> int:
        """Bytes copied from batches into shared memory so far (each batch byte once)."""
        return sum(p.copied_in for p in self._remote.programs.values())

    def close(self, drain: bool = True, *, sync: bool = True, keep: bool = False) -> None:
        """End the job; its state in the daemon is gone afterwards, and what was trained is in the local models and
        optimizers. Idempotent.

        sync: False throws away what was trained since the local models were last up to date. drain: False waits for no
        step that is under way; nothing is brought back then. keep: save the state behind the steps, for
        `submit(..., resume=name)`; raises SnapshotFailed when that can't be done, and the job is open still."""
        self._close(drain, sync, keep, None)

    def _close(self, drain: bool, sync: bool, keep: bool, limit: float | None) -> None:
        with self._lock:
            if self._closed:
                return
            if keep:
                self._keep()
            try:
                if sync and drain:
                    self._come_home(limit)
                elif drain and len(self._pending) and self._recovery.told is not None:
                    with suppress(GpumuxError):  # which the futures have
                        self._wait(lambda: len(self._pending) == 0, limit)
            finally:
                self._closed = True
                client_generator.jobs.discard(self)
                self._recovery.off(self)
                try:
                    if self._remote.ended is None and self._session.dead is None:
                        # What its client closes when its work is done is not kept.
                        self._remote.call(m.CloseJob, drain and not keep and (limit is None or not len(self._pending)))
                        self._wait(lambda: len(self._pending) == 0, None)
                except (DaemonGone, GpumuxError) as error:
                    log.info("job %r ended while closing: %s", self.name, error)
                finally:
                    self._pending.fail(JobClosed(f"job {self.name!r} is closed", "submit it again"))
                    self._guard.remove()
                    self._session.unregister(self.id)
                    self._remote.waits.turns.forget()
                    self._remote.release()
                    self._session.close()

    def _keep(self) -> None:
        self._persist(nothing)
        if self._recovery.snapshots is None:
            raise SnapshotFailed("this daemon keeps no snapshots", "start it with --state-dir")
        if not self._persist(lambda: self._recovery.save(self)):
            raise SnapshotFailed(f"the state of job {self.name!r} could not be saved", "the log says why")

    def __del__(self) -> None:
        """Dropped while open, with nothing left that could ask for what it trained. The session goes with it, and tells
        the daemon (session.py); nothing waits here."""
        if getattr(self, "_closed", True) or sys.is_finalizing() or self._session.forked:
            return
        self._closed = True
        self._guard.remove()
        warnings.warn(
            f"job {self.name!r} was dropped while it was open: call job.close(), or use it in a with statement",
            ResourceWarning,
            source=self,
            stacklevel=2,
        )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._close(True, True, False, None if kind is None else LEAVE_S)

    def __repr__(self) -> str:
        return f"<Job {self.name!r} {self.id[:8]} {'closed' if self._closed else 'open'}, {self._next_step} steps>"


_open: weakref.WeakSet[Job] = weakref.WeakSet()


def _leave() -> None:
    """The script ends."""
    for job in list(_open):
        if not job._closed and not job._session.forked:
            job._close(True, True, False, LEAVE_S)


atexit.register(_leave)
