"""A job: captured steps over state that lives in the daemon while the job is open."""

from __future__ import annotations

import logging
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any

from gpumux.client import patience
from gpumux.client.future import StepFuture
from gpumux.client.localstate import dictionaries, install
from gpumux.client.microbatch.split import TOLERANCE, check_microbatches
from gpumux.client.pending import Pending
from gpumux.client.remote import Remote
from gpumux.client.session import Session
from gpumux.client.stale import StaleGuard
from gpumux.client.state import StateTable
from gpumux.client.structure import Structure, from_local
from gpumux.client.trace import Tracer
from gpumux.client.variants import Choice, KeepMore, State, StepFunction
from gpumux.errors import DaemonGone, GpumuxError, JobClosed
from gpumux.model import JobSpec
from gpumux.program import allowlist
from gpumux.wire import messages as m

log = logging.getLogger("gpumux.client")
_WARM_PHASES = 4  # how many phases of the optimizer submit() captures ahead


class Job:
    """Made by `gpumux.client.submit`. Verbs may be called from any thread; steps run in call order."""

    def __init__(self, session: Session, job_id: str, spec: JobSpec, table: StateTable, max_variants: int) -> None:
        self.id = job_id
        self.name = spec.name
        self.seed = spec.seed
        self._spec = spec
        self._session = session
        self._table = table
        self._max_variants = max_variants
        self._lock = threading.RLock()
        self._structures: dict[Structure, Structure] = {}
        self._remote = Remote(session, job_id, table)
        self._pending = Pending(self._remote)
        self._next_step = 0
        self._unsynced = 0
        self._tracer = Tracer(table, allowlist.is_allowed)
        structure, host = from_local(table)
        self._state = State(self._intern(structure), host, frozenset(i for i, _ in structure.kept))
        self._warm_state = self._state
        job = weakref.ref(self)  # the model's hooks hold the guard, which must not hold a job that is dropped
        self._guard = StaleGuard(spec.name, table, lambda: found._state.keep if (found := job()) else frozenset())
        self._functions: list[tuple[StepFunction, tuple[Any, ...], dict[str, Any]]] = []
        session.register(job_id, self._pending.on_message)
        self._closed = False

    def _intern(self, structure: Structure) -> Structure:
        return self._structures.setdefault(structure, structure)

    # ---- capture ---------------------------------------------------------------------------------

    def _capture(self, fn: Callable[..., Any], example: Any, phases: int, microbatches: int) -> StepFunction:
        args, kwargs = example_arguments(example)
        function = StepFunction(
            fn, self._table, self._tracer, self._guard, self._intern, self._max_variants, microbatches
        )
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

    def add(self, fn: Callable[..., Any], *, example: Any, microbatches: int = 1) -> Callable[..., StepFuture]:
        """Capture another step over the same state (evaluation, a GAN's second step, apply after
        accumulate). Returns a callable that runs it in the job's order and gives a StepFuture.
        `microbatches` as in submit(), for this function alone."""
        check_microbatches(microbatches)
        with self._lock:
            self._check_open()
            function = self._capture(fn, example, 1, microbatches)

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
            self._check_open()
            self._guard.check_writes()
            try:
                choice = function.choose(batch, named, self._state)
            except KeepMore as more:
                self._state.keep = more.keep
                choice = function.choose(batch, named, self._state)  # explains what is missing
            number = choice.made.number
            if number is None:
                number = self._upload(choice)
            program = self._remote.programs[number]
            if len(self._pending.steps) >= self._spec.max_inflight:
                self._wait(lambda: len(self._pending) < self._spec.max_inflight, None)
                self._check_open()
            slot = program.free.pop()
            step, future = self._next_step, StepFuture(self._wait)
            try:
                frames = program.fill(slot, choice.tensors)
                self._pending.add(step, future, number, slot, choice)
                scalars = choice.values[: choice.made.lowered.counts[0]]
                self._session.post_step(m.Step(self.id, step, number, slot, scalars, len(frames)), frames)
            except BaseException:
                self._pending.forget(step)
                program.free.add(slot)
                raise
            self._next_step = step + 1
            self._advance(choice)
            return future

    def _advance(self, choice: Choice) -> None:
        """The Python side of the step has happened: counters, hyperparameters it changed, flags."""
        lowered = choice.made.lowered
        self._state = choice.after(self._state.keep)
        scalars, host, _ = lowered.counts
        for (i, j, key, k), value in zip(lowered.groups, choice.values[scalars + host :], strict=False):
            group = self._table.optimizers[i].param_groups[j]
            if k is None:
                group[key] = value
            else:
                items = list(group[key])
                items[k] = value
                group[key] = type(group[key])(items)
        for flag in lowered.flags:
            flag.again()
        for optimizer in self._table.optimizers:
            optimizer._opt_called = True  # learning-rate schedulers ask whether step() ever ran
        self._guard.stale = True
        self._unsynced += 1

    def _wait(self, predicate: Callable[[], bool], timeout: float | None) -> bool:
        """The predicate is about this job's steps: a job that ends answers them all."""
        try:
            return patience.wait(self._session, self.id, predicate, timeout)
        except DaemonGone as gone:
            self._pending.fail(gone)
            if predicate():
                return True
            raise

    def _check_open(self) -> None:
        if self._closed:
            raise JobClosed(f"job {self.name!r} is closed", "submit it again")
        if self._remote.ended is not None:
            raise self._remote.end_error()
        if self._session.dead is not None:
            self._pending.fail(self._session.dead)
            raise self._session.dead

    # ---- state -----------------------------------------------------------------------------------

    def sync(self) -> None:
        """Bring the trained state back into the local models and optimizers. Waits for the steps
        submitted so far. Gradients come back only where a step of the job reads them."""
        with self._lock:
            self._check_open()
            install(self._table, self._state, self._remote.pull)
            self._guard.stale = False
            self._unsynced = 0
            self._guard.settle()

    def state_dict(self) -> dict[str, Any]:
        """The trained state as {"model": ..., "optimizer": ...} of CPU tensors (lists of them when
        several were submitted), leaving the local ones alone. Waits for the steps submitted so far."""
        with self._lock:
            self._check_open()
            with self._guard.quiet():
                return dictionaries(self._table, self._state, self._remote.pull)

    def load_state(self, state: dict[str, Any] | None = None) -> None:
        """Push the local models' and optimizers' state to the daemon; with `state` (as state_dict()
        gives it) load that into them first."""
        with self._lock:
            self._check_open()
            with self._guard.quiet(writes=True):
                if state is not None:
                    _load_local(self._table, state)
                self._table.refresh()
                structure, host = from_local(self._table)
            keep = self._state.keep | frozenset(i for i, _ in structure.kept)
            self._state = State(self._intern(structure), host, keep)
            resident = set(self._remote.resident())
            self._remote.push([b for b in resident if self._table.buffers[b].home])
            self._guard.stale = False
            self._unsynced = 0

    # ---- control ---------------------------------------------------------------------------------

    def pause(self) -> None:
        """Start no further piece of this job until resume(). What runs now finishes. Steps can still be
        submitted, up to max_inflight; whatever waits for them (sync(), a result, one step more) waits until another
        thread or an operator resumes the job, and logs a warning after five seconds."""
        self._check_open()
        self._remote.call(m.PauseJob)

    def resume(self) -> None:
        self._check_open()
        self._remote.call(m.ResumeJob)

    def stats(self) -> dict[str, Any]:
        """What the daemon knows of the job: steps, queue and device seconds, memory, outstanding
        launches. `exactness` is "bit-equal" (README, "Equal results"), or "equivalent" where a function of
        the job runs in microbatches; `tolerance` then says how far results may be from the whole batch's
        (README, "Microbatches")."""
        self._check_open()
        reply, _ = self._remote.call(m.JobStats)
        counts = {f.name: f.microbatches for f, _, _ in self._functions if f.microbatches > 1}
        exact: dict[str, Any] = {"exactness": "bit-equal"}
        if counts:
            exact = {"exactness": "equivalent", "tolerance": dict(TOLERANCE), "microbatches": counts}
        return {**exact, **reply.body}

    @property
    def bytes_copied_in(self) -> int:
        """Bytes copied from batches into shared memory so far (each batch byte once)."""
        return sum(p.copied_in for p in self._remote.programs.values())

    def close(self, drain: bool = True) -> None:
        """End the job; its state in the daemon is gone afterwards. `drain`: let submitted steps finish
        first. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._unsynced and self._table.optimizers and self._remote.ended is None and self._session.dead is None:
                log.warning(
                    "job %r closed with %d steps not synced: call job.sync() before close()", self.name, self._unsynced
                )
            try:
                if self._remote.ended is None and self._session.dead is None:
                    self._remote.call(m.CloseJob, drain)
                    self._wait(lambda: len(self._pending) == 0, None)
            except (DaemonGone, GpumuxError) as error:
                log.info("job %r ended while closing: %s", self.name, error)
            finally:
                self._pending.fail(JobClosed(f"job {self.name!r} is closed", "submit it again"))
                self._guard.remove()
                self._session.unregister(self.id)
                self._remote.release()
                self._session.close()

    def __del__(self) -> None:
        """Dropped while open. The session goes with it, and tells the daemon (keeper.py); nothing waits here."""
        if getattr(self, "_closed", True) or sys.is_finalizing() or self._session.forked:
            return
        self._closed = True
        self._guard.remove()
        lost = f", with {self._unsynced} steps not synced" if self._unsynced and self._table.optimizers else ""
        warnings.warn(
            f"job {self.name!r} was dropped while it was open{lost}: call job.close(), or use it in a with statement",
            ResourceWarning,
            source=self,
            stacklevel=2,
        )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close(drain=kind is None)

    def __repr__(self) -> str:
        return f"<Job {self.name!r} {self.id[:8]} {'closed' if self._closed else 'open'}, {self._next_step} steps>"


def _load_local(table: StateTable, state: dict[str, Any]) -> None:
    for owners, key in ((table.models, "model"), (table.optimizers, "optimizer")):
        given = state.get(key)
        if given is None:
            continue
        for owner, one in zip(owners, given if len(owners) > 1 else [given], strict=True):
            owner.load_state_dict(one)


def example_arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`example` is the step's arguments as a tuple or list, a dict of named ones, or one tensor."""
    if isinstance(example, (tuple, list)):
        return tuple(example), {}
    if isinstance(example, dict):
        return (), dict(example)
    return (example,), {}
