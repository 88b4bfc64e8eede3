"""One captured function of a job: its variants, and the choice of the variant that a call needs.

A *case* is a combination of what the user can change: batch shapes, flags, Python values (at most `max_variants`). A
case has *phases*, which the optimizer goes through by itself: its first step, RAdam's warm-up.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy
import torch
import torch.utils._pytree as pytree

from gpumux.capture.batch.arrays import layable, tensor_over
from gpumux.capture.batch.checks import BatchCheck
from gpumux.capture.batch.containers import flatten, other_batch
from gpumux.capture.batch.effects import LeftOnBatch, WrittenInput, refuse_gradient, refuse_old_gradient, refuse_shared
from gpumux.capture.fetching import without_fetching
from gpumux.capture.lower import NOTHING, Lowered, Replaces, changes_state, lower, place_of, replaces
from gpumux.capture.microbatch.split import RankSplitter, first_part, refuse_effects, split
from gpumux.capture.outside.met import TraceOver
from gpumux.capture.outside.refused import refuse_held
from gpumux.capture.outside.tensors import COUNTER
from gpumux.capture.side_effects import first_call_differs
from gpumux.capture.source import Executed
from gpumux.capture.staleness import StalenessHooks
from gpumux.capture.state import NUMBERS, StateTable
from gpumux.capture.structure import State, Structure, moves_optimizer
from gpumux.capture.symbols import ConstantScalars, HyperReader, Number, of_python
from gpumux.capture.tracer import (
    FilledIn,
    RawTrace,
    SkippedStep,
    TraceAgain,
    Tracer,
    ValueCheck,
    refuse_odd_tensors,
)
from gpumux.capture.values.comparison import (
    asked_for_types,
    first_difference,
    numbers_of,
    same_but_for_the_optimizer,
    same_effects,
    same_for_these_numbers,
)
from gpumux.capture.watch.fingerprint import Change, Fingerprint, Rebuilt, Variable, without_collection
from gpumux.capture.watch.lifting import MOST, Lift, Moves, Source, batch_name, by_numbers
from gpumux.capture.watch.reuse import (
    FirstCall,
    KeptCase,
    KeptFirst,
    KeptTrace,
    held,
    kept_traces,
    key_of,
    may_be_kept,
    same_numbers,
)
from gpumux.errors import CaptureError, NotRepeatable, NotSplittable, TooManyVariants

# ---- batches

Numbers = tuple[tuple[int, Any], ...]  # (position among the batch's leaves, number or text)

_PLAIN = frozenset({torch.Tensor})
_NUMBERS = NUMBERS | {str}
_ARRAYS = frozenset({numpy.ndarray, numpy.memmap})


def batch_key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[torch.Tensor], Numbers]:
    """(hashable description, tensors in order, (position, value) of the numbers and texts) of a batch. The description
    has the types of numbers and texts alone. Raises CaptureError for a leaf that is neither a tensor nor a plain
    constant."""
    if not kwargs and _PLAIN.issuperset(map(type, args)):
        key: list[Any] = []
        for i, t in enumerate(args):
            if not t.is_contiguous():
                layable(t, i)
            requires_grad = t.requires_grad
            if requires_grad:
                refuse_gradient(t, i)
            key.append((t.dtype, t.shape, t.stride(), requires_grad))
        return (*key, *_repeated(args)), list(args), ()
    leaves, spec = flatten((args, kwargs), hiding=True)
    tensors: list[torch.Tensor] = []
    arrays: dict[int, torch.Tensor] = {}
    parts: list[Any] = [str(spec)]
    numbers: list[tuple[int, Any]] = []
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            tensors.append(layable(leaf, len(tensors)))
            t = tensors[-1]
            if t.requires_grad:
                refuse_gradient(t, len(tensors) - 1)
            parts.append((t.dtype, t.shape, t.stride(), t.requires_grad))
        elif type(leaf) in _NUMBERS:
            parts.append(type(leaf))
            numbers.append((i, leaf))
        elif type(leaf) in _ARRAYS:
            t = arrays.get(id(leaf))
            if t is None:
                t = arrays[id(leaf)] = layable(tensor_over(leaf), len(tensors))
            tensors.append(t)
            parts.append(("array", t.dtype, t.shape, t.stride()))
        elif leaf is None or isinstance(leaf, (bool, int, float, str)):
            parts.append((type(leaf), repr(leaf)))
        else:
            kind = f"numpy.{type(leaf).__name__}" if isinstance(leaf, numpy.generic) else type(leaf).__name__
            raise CaptureError(
                f"the batch holds a {kind}",
                "pass tensors, arrays, Python's own numbers (int(n), float(x)), strings and containers of them",
            )
    return (*parts, *_repeated(tensors)), tensors, tuple(numbers)


def _repeated(tensors: Sequence[torch.Tensor]) -> tuple[tuple[int, ...], ...]:
    """Which tensors of a batch are the same object, because Python tells them apart by `is`, as multi-head attention
    does with query and key. Empty if all are different."""
    if len(set(map(id, tensors))) == len(tensors):
        return ()
    first: dict[int, int] = {}
    return (tuple([first.setdefault(id(t), i) for i, t in enumerate(tensors)]),)


# ---- Programs, cases and their choice

log = logging.getLogger("gpumux.client")
T = TypeVar("T")

MAX_PHASES = 8
_TRIES = 2  # traces with a number as a symbol that may fail
_FEW = 12  # of so many numbers the one that can be no symbol is searched
MAX_TRACES = 32  # traces of one call until nothing new is found
MAX_VARIANTS = 32  # of a function, if no limit is given
MANY_VARIANTS = 5  # so many are worth a warning
_OF_SHAPES = "Pad batches to fewer shapes"
_OF_NUMBERS = (
    "Pass what a number looks up and not the number (step(x, rates[i]) for step(x, i)), and step schedulers in the"
    " loop, after the step"
)
_OF_VARIABLES = (
    "Keep objects and set their attributes, pass what changes as a tensor, or what a number looks up and not the number"
    " (step(x, rates[i]) for step(x, i)), and step schedulers in the loop, after the step"
)


@dataclass(slots=True)
class StepProgram:
    """A Program and its number in the daemon, None until it is uploaded."""

    lowered: Lowered
    number: int | None = None
    remade: frozenset[int] = frozenset()  # parameters whose gradients it replaces by new tensors
    left: Sequence[Callable[[], object]] = ()  # each marks a place where the step leaves a tensor
    replaces: Replaces = NOTHING
    on_batch: Sequence[LeftOnBatch] = ()
    writes: bool = field(init=False)  # whether it changes state
    batch_check: BatchCheck | None = field(init=False)
    leaf: tuple[str, Any] | None = field(init=False)  # the result (as in Lowered.results) if it is no container
    _returned: tuple[Any, ...] = field(init=False)  # the entries of `results` that the step returns
    checks: tuple[tuple[int, ValueCheck], ...] = field(init=False)  # (tensor, what it is) of the others
    written: tuple[tuple[int, int], ...] = field(init=False)  # (tensor, position in the batch) of the others
    skips: tuple[tuple[int, int], ...] = field(init=False)  # (tensor, optimizer whose step is left out) of the others
    ranked: Any = None  # what the ranks run, where the step is split over ranks
    undecided: bool = False  # whether what it leaves behind on the host depends on what it skips

    def __post_init__(self) -> None:
        self.writes = changes_state(self.lowered.program)
        self.leaf = self.lowered.results[0] if self.lowered.result_spec.is_leaf() else None
        results, further = self.lowered.results, self.lowered.further
        self._returned = results[: len(results) - len(further)]
        others = [(i, what) for (_, i), what in zip(results[len(self._returned) :], further, strict=True)]
        self.checks = tuple((i, what) for i, what in others if isinstance(what, ValueCheck))
        self.written = tuple((i, what.position) for i, what in others if isinstance(what, WrittenInput))
        outs = self.lowered.program.results
        check = BatchCheck(self.lowered.program, [(outs[i], what.wrong) for i, what in self.checks])
        self.batch_check = check if check else None
        self.skips = tuple((i, what.optimizer) for i, what in others if isinstance(what, SkippedStep))

    def refuse_batch(self, tensors: Sequence[torch.Tensor], values: Sequence[Number], table: StateTable) -> None:
        """Raises CaptureError, BadBatch or BadValue for a batch that the Program can't run on. `values`: the
        evaluator's, host scalars first."""
        if self.batch_check is not None:
            self.batch_check.run(tensors, values)
        for left in self.on_batch:
            refuse_old_gradient(tensors[left.position], left.position)
        if self.written:
            refuse_shared([position for _, position in self.written], tensors, table)

    def wrong(self, tensors: Sequence[torch.Tensor]) -> str | None:
        """What the first check that failed in the step says, None if there is none."""
        return next((what.wrong for i, what in self.checks if not tensors[i]), None)

    def skipped(self, tensors: Sequence[torch.Tensor]) -> frozenset[int]:
        """The optimizers whose steps were left out in the step."""
        return frozenset(optimizer for i, optimizer in self.skips if tensors[i])

    def value(self, tensors: Sequence[torch.Tensor], host: Sequence[Any]) -> Any:
        """The pytree that the step function returned. `host`: the evaluator's values for the results."""
        leaves = [
            tensors[what] if kind == "tensor" else host[what] if kind == "host" else what
            for kind, what in self._returned
        ]
        return leaves[0] if self.leaf is not None else pytree.tree_unflatten(leaves, self.lowered.result_spec)


@dataclass(slots=True)
class Phase:
    """One trace, and the Programs made from it, by the set of kept gradients."""

    entry: Structure
    raw: RawTrace
    programs: dict[frozenset[int], StepProgram] = field(default_factory=dict)
    of_numbers: bool = field(init=False)  # whether it holds for some values of lifted numbers only

    def __post_init__(self) -> None:
        self.of_numbers = by_numbers(self.raw.guards)


@dataclass(slots=True)
class Case:
    """One combination of batch shapes and Python values, with the phases of the optimizer in it."""

    key: Any
    fingerprint: Fingerprint
    hyper: HyperReader
    numbers: Numbers = ()  # of the batch
    lifted: frozenset[int] = frozenset()  # those that are symbols
    phases: list[Phase] = field(default_factory=list)
    read: dict[int, bytes] = field(default_factory=dict)  # what its traces read of the job's buffers in Python
    sought: bool = False  # whether `kept` was searched for
    kept: KeptCase | None = None  # traces of an earlier step that is equal to this one

    def matches(self, key: Any, numbers: Numbers) -> bool:
        if self.key != key or (numbers and self._moved(numbers)):
            return False
        with without_fetching():
            return self.fingerprint.holds()

    def _moved(self, numbers: Numbers) -> list[int]:
        """The numbers of the batch that differ and are no symbols."""
        return [
            i
            for (i, now), (_, old) in zip(numbers, self.numbers, strict=True)
            if now is not old and i not in self.lifted and repr(now) != repr(old)
        ]

    def moving(self, key: Any, numbers: Numbers) -> list[Source]:
        """The numbers and texts that differ in this call, if nothing else does."""
        if self.key != key:
            return []
        try:
            with without_fetching():
                changes = self.fingerprint.changes()
        except NotRepeatable:
            return []
        found = [c.variable for c in changes if c.variable is not None and type(c.old) is type(c.new)]
        return [*self._moved(numbers), *found] if len(found) == len(changes) else []

    def lift(self, sources: Collection[Source]) -> None:
        """Take these numbers, those that there are, as symbols from now on."""
        self.phases.clear()  # they have other symbols, or none
        there = {i for i, _ in self.numbers}
        self.lifted = frozenset(s for s in sources if isinstance(s, int) and s in there)
        variables = [s for s in sources if isinstance(s, Variable)]
        self.fingerprint.lift({v: f"variable.{n}" for n, v in enumerate(variables)})

    @property
    def sources(self) -> list[Source]:
        """The numbers that are symbols."""
        return [*self.lifted, *self.fingerprint.lifted]

    def environment(self, numbers: Numbers, state: State) -> dict[str, Number]:
        """The values of all numbers at a call, by name."""
        env = self.hyper.read()
        for i, value in enumerate(state.host):
            env[f"s{i}"] = value
        if self.lifted:
            env.update({batch_name(i): of_python(value) for i, value in numbers if i in self.lifted})
        env.update(self.fingerprint.numbers())
        return env

    def rebuilt(self, key: Any, numbers: Numbers, fingerprint: Fingerprint) -> Rebuilt | None:
        """How a call differs from this case, if it does by lists, dictionaries and sets that were made anew, and by
        numbers in variables. None if it differs otherwise, or if the traces name such a container."""
        if self.key != key or self._moved(numbers) or not self.phases:
            return None
        with without_fetching():
            found = self.fingerprint.rebuilt(fingerprint)
        if found is None or not found.containers:
            return None
        for raw in [phase.raw for phase in self.phases]:
            if not raw.homes.isdisjoint(found.containers) or any(not flag.flag for flag in raw.flags):
                return None
        return found

    def difference(self, key: Any, numbers: Numbers) -> str:
        """A description of how a call differs from this case."""
        if self.key != key:
            return other_batch(self.key, key)
        moved = self._moved(numbers)
        if moved:
            old, now = dict(self.numbers)[moved[0]], dict(numbers)[moved[0]]
            return f"{now!r:.60} in the batch, where {old!r:.60} was"
        try:
            with without_fetching():
                return ", ".join(c.name for c in self.fingerprint.changes()[:3])
        except NotRepeatable as gone:
            return gone.message


@dataclass(slots=True)
class Choice:
    """What one call runs: the Program, the call's numbers, and the batch tensors."""

    program: StepProgram
    values: list[Number]
    tensors: list[torch.Tensor]

    def after(self, keep: frozenset[int]) -> State:
        """The host side of the state after this call."""
        scalars, host, _ = self.program.lowered.counts
        return State(self.program.lowered.exit, self.values[scalars : scalars + host], keep)

    def apply(self, table: StateTable) -> None:
        """Make the call's changes to local objects: hyperparameters, flags, and the places where it leaves tensors."""
        lowered = self.program.lowered
        scalars, host, _ = lowered.counts
        for (i, j, key, k), value in zip(lowered.groups, self.values[scalars + host :], strict=False):
            group = table.optimizers[i].param_groups[j]
            if k is None:
                group[key] = value
            else:
                items = list(group[key])
                items[k] = value
                group[key] = type(group[key])(items)
        if lowered.replays:
            numbers = iter(self.values[len(self.values) - lowered.replayed :])
            for replay in lowered.replays:
                replay.run(numbers)
        for flag in lowered.flags:
            flag.again()
        for mark in self.program.left:
            mark()
        for left in self.program.on_batch:
            left.apply(self.tensors)
        for optimizer in table.optimizers:
            optimizer._opt_called = True  # learning-rate schedulers check whether step() ever ran


@dataclass(frozen=True, slots=True)
class KeepMore:
    """Result of a capture: the job must first keep the gradients of these parameters from step to step."""

    keep: frozenset[int]


class StepFunction:
    """One captured function of a job, with its cases."""

    def __init__(
        self, fn: Callable[..., Any], table: StateTable, tracer: Tracer, staleness: StalenessHooks,
        *, intern: Callable[[Structure], Structure], max_variants: int | None = None, microbatches: int = 1,
        compiled: bool = False, twice: bool = True, clients_generator: bool = False,
        constants: ConstantScalars | None = None, over: RankSplitter | None = None,
    ) -> None:  # fmt: skip
        """`max_variants`: cases of which one more raises TooManyVariants; None: MAX_VARIANTS are kept, by use. `twice`:
        trace each step twice, to check that it does the same again. `clients_generator`: draw from the
        client's generator (generator.py). `constants`: decides which numbers are written into the Programs. `over`:
        splits the step over ranks."""
        self.fn = fn
        self._over = over
        # In how many parts of the batch the step is traced as well, to be split in time or over ranks.
        self._parts = tuple(over.counts) if over is not None else (microbatches,) if microbatches > 1 else ()
        self._whole = "to one daemon" if over is not None else "without microbatches"
        self._twice = twice
        self._clients_generator = clients_generator
        self.microbatches = microbatches
        self._proofs: dict[Any, Any] = {}  # of splits into microbatches
        # The proof of a split runs operators on the CPU, and the compiler doesn't know a GPU's own operators either.
        self._by_device = not self._parts and not compiled
        self._constants = constants if self._by_device else None
        self.compiled = compiled
        self.name = getattr(fn, "__qualname__", "step")
        self._table = table
        self._tracer = tracer
        self._staleness = staleness
        self._intern = intern
        self._max_variants = max_variants
        # Traces without a second one, and what makes it; None outside of `confirmed`.
        self._unconfirmed: list[tuple[RawTrace, Callable[[], RawTrace]]] | None = None
        self._executed: Executed = {}  # user code seen to run in a trace
        self._names: frozenset[str] = frozenset()  # in the step's code, as the last fingerprint found
        self._cases: list[Case] = []  # most recently used first
        self._moving: dict[Source, None] = {}  # numbers seen to change, which are symbols in new cases
        self._failures: Counter[Source] = Counter()  # of traces in which they were symbols
        self._late: set[Variable] = set()  # numbers that no trace had watched before it ran
        self._warned = False
        self._first_changes: list[Change] | None = None  # None before the first trace
        self._again: TraceAgain | None = None  # of the present call: a trace that changed what later ones find changed
        self._switches = False  # whether constants that it puts where there were none are replayed, as flags are
        self._kept: dict[Variable, Change] = {}  # of the present call: what traces changed that were made once more
        self._to_undo: list[Callable[[], None]] = []  # of the present call, if it is refused
        self._new: list[tuple[Case, KeptTrace]] = []  # traces that are kept once they are confirmed
        self._first: FirstCall | None = None  # kept with them

    def choose(self, args: tuple[Any, ...], kwargs: dict[str, Any], state: State) -> Choice | KeepMore:
        """What a call made now runs, or the gradients that the job must keep first. Captures the variant if it is
        missing. Raises CaptureError or a subclass. Does not change the job."""
        undo = self._to_undo = []
        self._kept.clear()
        first = self._first_changes is None
        self._again = None
        for _ in range(MAX_TRACES):
            try:
                return self._choose(args, kwargs, state)
            except TraceAgain as again:
                self._again = self._again or again
                self._first_changes = [*(self._first_changes or ()), *again.changes]
                undo += [change.restore for change in again.changes]
            except TraceOver as over:
                if isinstance(over, FilledIn):
                    self._again = self._again or over.again
                if over.counts and self._parts and over.__cause__ is not None:
                    raise over.__cause__ from None
                undo += over.undo
                for change in over.changes:
                    if change.variable is not None:
                        self._kept.setdefault(change.variable, change)
                over.apply()
                if first and not self._first_changes and not over.changes:
                    self._first_changes = None  # the next trace finds everything as this one did
            except CaptureError as error:
                self._undo(undo)
                undo.clear()
                if self._again is None or self._switches or not isinstance(error, NotRepeatable):
                    raise
                self._again, self._switches = None, True
            self._cases.clear()
            self._new.clear()
            if self._unconfirmed is not None:
                self._unconfirmed.clear()  # no later trace is to be as those were
        self._undo(undo)
        raise NotRepeatable(
            f"{self.name} makes tensors that it keeps anew each time it is traced",
            "make them before you submit, or in each step without keeping them",
        )

    def put_back(self) -> None:
        """Restore what the first trace changed for good, for a step that is refused after all, at a later phase."""
        self._undo([change.restore for change in self._first_changes or ()])

    def _undo(self, undo: Sequence[Callable[[], None]]) -> None:
        if undo:
            self._first_changes = None
        for restore in reversed(undo):
            restore()

    @without_collection()
    def confirmed(self, capture: Callable[[], T]) -> T:
        """`capture()`, which captures the phases of one case. Every trace must be confirmed by another one, because a
        step must do the same each time. Phases that differ only inside torch's own optimizers confirm each other. A
        single phase is traced a second time at the end. Otherwise all is captured anew, each trace followed by its
        second."""
        if any(type(o).__module__.split(".")[:2] != ["torch", "optim"] for o in self._table.optimizers):
            return capture()  # their phases differ in code that may do anything
        self._unconfirmed = []
        try:
            found = capture()
            alone = self._unconfirmed
        except BaseException:
            self._new.clear()  # nothing confirmed them
            raise
        finally:
            self._unconfirmed = None
        try:
            if not alone or (len(alone) == 1 and first_difference(alone[0][0], alone[0][1]()) is None):
                self._keep()
                return found
        except (CaptureError, TraceAgain, Moves):
            pass  # raised again, or taken up, by what follows
        self._cases.clear()
        self._new.clear()
        return capture()

    def _choose(self, args: tuple[Any, ...], kwargs: dict[str, Any], state: State) -> Choice | KeepMore:
        try:
            key, tensors, numbers = batch_key(args, kwargs)
        except (NotImplementedError, RuntimeError):  # from torch, for tensors that have no strides
            refuse_odd_tensors(flatten((args, kwargs))[0])
            raise
        case = self._case(key, tensors, numbers)
        env = self._environment(case, numbers, state)
        for at, phase in enumerate(case.phases):
            if phase.entry is state.structure:
                found = phase.programs.get(state.keep) or self._program(phase, state)
                if isinstance(found, KeepMore):
                    return found
                values = found.lowered.evaluator.run(env)
                if values is None and self._constants_changed(found, env):
                    found = self._program(phase, state)
                    if isinstance(found, KeepMore):
                        return found
                    values = found.lowered.evaluator.run(env)
                if values is not None:
                    if at and phase.of_numbers:
                        case.phases.insert(0, case.phases.pop(at))
                    found.refuse_batch(tensors, values, self._table)
                    return Choice(found, values, tensors)
        case.numbers = numbers  # those that are no symbols are the same, or will be constants of the trace
        found = self._capture(case, args, kwargs, state)
        if isinstance(found, KeepMore):
            return found
        env = self._environment(case, numbers, state)
        values = found.lowered.evaluator.run(env)
        assert values is not None, "a trace holds for the values it was made with"
        found.refuse_batch(tensors, values, self._table)
        return Choice(found, values, tensors)

    def _environment(self, case: Case, numbers: Numbers, state: State) -> dict[str, Number]:
        """The values of all numbers at a call, by name."""
        env = case.environment(numbers, state)
        if self._table.counters and self._tracer.outside is not None:
            env.update(self._tracer.outside.numbers())
        return env

    def _case(self, key: Any, tensors: list[torch.Tensor], numbers: Numbers) -> Case:
        for i, case in enumerate(self._cases):
            if case.matches(key, numbers) and (not case.read or self._tracer.held.same(case.read)):
                if i:
                    self._cases.insert(0, self._cases.pop(i))
                return case
        for case in self._cases:
            moving = case.moving(key, numbers)
            if moving:
                self._moving.update(dict.fromkeys(moving))
                break
        refuse_odd_tensors(tensors)
        fingerprint = self._fingerprint(key, numbers)
        for i, case in enumerate(self._cases):
            rebuilt = case.rebuilt(key, numbers, fingerprint)
            if rebuilt is not None and rebuilt.moved:
                self._moving.update(dict.fromkeys(rebuilt.moved))
            elif rebuilt is not None and (not case.read or self._tracer.held.same(case.read)):
                self._follow(case, fingerprint, rebuilt)
                self._cases.insert(0, self._cases.pop(i))
                return case
        if self._cases:
            self._make_room(key, numbers)
        self._refuse_state_as_batch(tensors)
        fingerprint.watch_also([])  # what another case watches besides
        fingerprint.remember()
        self._table.recordings.add(fingerprint)
        case = Case(key, fingerprint, HyperReader(self._table.optimizers), numbers)
        if not self._parts:
            case.lift([source for source in self._moving if self._failures[source] < _TRIES][:MOST])
        self._cases.insert(0, case)
        return case

    def _follow(self, case: Case, fingerprint: Fingerprint, rebuilt: Rebuilt) -> None:
        """Have the case's traces for the containers that took the place of those they were made with."""
        fingerprint.take_place_of(case.fingerprint, rebuilt)
        if self._tracer.outside is not None:
            self._tracer.outside.note_views(fingerprint, case.fingerprint)
        self._table.recordings.discard(case.fingerprint)
        self._table.recordings.add(fingerprint)
        case.fingerprint = fingerprint
        new = rebuilt.variables
        self._moving = {new.get(source, source): None for source in self._moving}
        self._failures = Counter({new.get(source, source): n for source, n in self._failures.items()})

    def _fingerprint(self, key: Any, numbers: Numbers) -> Fingerprint:
        table = self._table
        make = partial(
            Fingerprint, self.fn, table.models, table.optimizers, table.params, executed=self._executed,
            identity=table.identity, names=self._names,
        )  # fmt: skip
        kept = kept_traces.executed(self.fn, key_of(key, numbers))
        more = {i: found for i, found in kept.items() if i not in self._executed}
        self._executed.update(more)  # so that the fingerprint is made once
        try:
            fingerprint = make()
        except CaptureError:
            if not more:
                raise
            for i in more:  # code of an earlier step, which this one may not run
                del self._executed[i]
            fingerprint = make()
        self._names = fingerprint.names
        return fingerprint

    def _make_room(self, key: Any, numbers: Numbers) -> None:
        """Prepare for one more case. Raises TooManyVariants if there are as many as were allowed."""
        # Of several, one with batches of this shape shows what else differs.
        like = next((case for case in self._cases if case.key == key), self._cases[0])
        count, difference = len(self._cases), like.difference(key, numbers) or "values of the model's state"
        if self._max_variants is not None and count >= self._max_variants:
            raise TooManyVariants(
                f"{self.name} was captured for {count} combinations of batch shapes and Python values"
                f" already, and this call differs again: {difference}",
                "keep batches of equal shape (drop the last one or pad it); pass a number that changes as a tensor"
                " argument, torch.tensor(value), instead of a Python number or a closure's; raise max_variants=, or"
                " leave it away, if the variety is meant",
            )
        self._warn_of_many(count + 1, difference, _OF_SHAPES if like.key != key else _OF_VARIABLES)
        if count >= MAX_VARIANTS and self._max_variants is None:
            del self._cases[MAX_VARIANTS - 1 :]

    def _warn_of_many(self, count: int, difference: str, remedy: str) -> None:
        if count >= MANY_VARIANTS and not self._warned:
            self._warned = True
            log.warning(
                "%s is captured for the %dth combination of batch shapes and Python values (%s): each takes the time of"
                " a capture, and memory in the daemon. %s.", self.name, count, difference, remedy,
            )  # fmt: skip

    def _refuse_state_as_batch(self, tensors: list[torch.Tensor]) -> None:
        read = self._tracer.outside.buffers() if self._tracer.outside is not None else frozenset()
        for i, tensor in enumerate(tensors):
            found = self._table.lookup(tensor)
            if found is not None and found[0] not in read:
                raise CaptureError(
                    f"tensor {i} of the batch is part of the model, or of what steps write:"
                    f" {self._table.buffers[found[0]].name}",
                    "let the step reach it by name, as a copy would not be trained or written; or give a .clone()",
                )

    @without_collection()
    def _capture(self, case: Case, args: Any, kwargs: Any, state: State) -> StepProgram | KeepMore:
        phases = case.phases
        if sum(not phase.of_numbers for phase in phases) >= MAX_PHASES:
            guards = {g.where for p in phases for g in p.raw.guards}
            raise TooManyVariants(
                f"{self.name} takes another path at almost every step (Python decides by a hyperparameter or step count"
                f" at {', '.join(sorted(guards)[:3])})",
                "let the number reach an operator instead of a Python decision, or update it less often",
            )
        raw = self._reused(case, state)
        try:
            phase = Phase(state.structure, raw or self._trace(case, args, kwargs, state))
        except BaseException as error:
            if isinstance(error, TraceAgain):
                self._first = self._first_call(case, state, error)
            if not phases:
                self._cases.remove(case)  # a refused call counts as no variant
            raise
        new: KeptTrace | None = None  # kept if the step is not refused below
        if raw is None and self._depends_on_code_alone(case) and may_be_kept(phase.raw):
            new = KeptTrace(held(self._table, state.structure), case.hyper.read(), phase.raw, self._twice)
        if self._tracer.outside is not None:
            self._tracer.outside.note(case.fingerprint)
        case.read |= {buffer: one.data for buffer, one in phase.raw.read_values.items()}
        case.fingerprint.remember()  # with what the trace found, and with the hooks that are set now
        found = self._program(phase, state)
        if not isinstance(found, KeepMore):
            self._refuse_state_as_batch(batch_key(args, kwargs)[1])  # now that it is known what the step writes
            anew = {place.buffer for place in found.lowered.anew}
            refuse_held(self._table, case.fingerprint, anew, {place.buffer for place, _ in phase.raw.moved_data})
            phases.insert(0, phase) if phase.of_numbers else phases.append(phase)
            variants = [one for one in phases if one.of_numbers]
            if len(variants) > 1:
                places = sorted({guard.where for guard in phase.raw.guards})
                where = f"Python decides by a number at {', '.join(places[:3])}"
                self._warn_of_many(len(variants), where, _OF_NUMBERS)
            for least in variants[MAX_VARIANTS:]:
                phases.remove(least)
            if new is not None:
                self._new.append((case, new))
            if self._unconfirmed is None:
                self._keep()
        return found

    # ---- traces of other jobs

    def _depends_on_code_alone(self, case: Case) -> bool:
        """Whether a trace of this case depends on nothing but the code and what it reads (reuse.py)."""
        table = self._table
        of_the_job = self._parts or case.sources or self._switches or self._tracer.warned
        return not (of_the_job or table.only_read or table.written or table.counters or table.gpu)

    def _reused(self, case: Case, state: State) -> RawTrace | None:
        """The trace of an earlier step equal to this one, whose numbers take the same way. None if there is none."""
        alone, again = self._depends_on_code_alone(case), self._again
        if alone and not case.sought:
            case.sought = True
            key = key_of(case.key, case.numbers)
            case.kept, first = kept_traces.find(self.fn, key, case.fingerprint, self._table)
            if first is not None and not self._repeat(first, case, state):
                case.kept = None
            again = self._again
        if case.kept is None or not alone:
            return None

        def holds(one: KeptTrace) -> bool:
            now = self._numbers_in(one, case, state)
            return now is not None and (
                again is None or same_effects(again.trace, one.trace, again.made, self._table, now, again.numbers)
            )

        found: RawTrace | None = case.kept.of(held(self._table, state.structure), holds)
        self._again = again if found is None else None
        if found is not None and self._first is not None:
            self._add(case, [])
        return found

    def _numbers_in(self, one: KeptTrace, case: Case, state: State) -> Mapping[int, Number] | None:
        """The values of a kept trace's formulas in this step, None if it does not hold for it."""
        written = self._constants is None or same_numbers(case.hyper.read(), one.numbers)
        if not (written and (one.confirmed or not self._twice) and self._tracer.allows(one.trace)):
            return None
        return numbers_of(one.trace, case.environment(case.numbers, state))

    def _first_call(self, case: Case, state: State, again: TraceAgain) -> FirstCall | None:
        """What to keep of a first call, None if it is no such one, or is not known as a whole."""
        known = bool(again.changes) and not self._first_changes and self._depends_on_code_alone(case)
        if not known or not may_be_kept(again.trace, {change.name for change in again.changes}):
            return None
        trace = KeptTrace(held(self._table, state.structure), case.hyper.read(), again.trace, self._twice)
        return FirstCall(trace, again.changes)

    def _repeat(self, first: KeptFirst, case: Case, state: State) -> bool:
        """Change what the first call of an equal step changed, if this is such a call. Later traces must be as its."""
        numbers = self._numbers_in(first.trace, case, state)
        other = self._first_changes is not None or first.trace.began != held(self._table, state.structure)
        if numbers is None or other:
            return False
        before = case.fingerprint.read()
        case.fingerprint.put_constants(first.filled)
        self._first_changes = case.fingerprint.changes(before)
        self._to_undo += [change.restore for change in self._first_changes]
        self._again = TraceAgain(self._first_changes, first.trace.trace, numbers=numbers)
        return True

    def _keep(self) -> None:
        """Keep the new traces for later jobs."""
        for case in {id(case): case for case, _ in self._new}.values():
            self._add(case, [one for of, one in self._new if of is case])
        self._new.clear()

    def _add(self, case: Case, traces: Sequence[KeptTrace]) -> None:
        first, self._first = self._first, None
        kept_traces.add(self.fn, key_of(case.key, case.numbers), case.fingerprint, self._table, traces, first)

    def _trace(self, case: Case, args: Any, kwargs: Any, state: State) -> RawTrace:
        if self._tracer.outside is not None:
            self._tracer.outside.prepare(case.fingerprint)
        with self._staleness.suspended():
            may_change = self._first_changes is None
            self._first_changes = self._first_changes or []
            while True:
                try:
                    found = self._trace_case(case, args, kwargs, state, may_change)
                    again = self._again
                    if again is not None and not same_effects(
                        again.trace, found, again.made, self._table, numbers_first=again.numbers
                    ):
                        raise first_call_differs(again.changes)
                    self._again = None
                    return found
                except Moves as moves:
                    for variable in moves.variables:
                        if variable in self._kept:  # it was counted already
                            case.fingerprint.put(variable, self._kept.pop(variable).old)
                    self._moving.update(dict.fromkeys(moves.variables))
                    case.lift([*case.sources, *moves.variables])
                finally:
                    self._tracer.tidy()

    def _trace_case(self, case: Case, args: Any, kwargs: Any, state: State, may_change: bool) -> RawTrace:
        """The trace, with numbers in buffers and optimizers as symbols. If the step can't run with one kind of them, or
        does something else with plain numbers, it is traced with plain ones of that kind from now on."""
        tracer, refused = self._tracer, None
        before = tracer.plain
        try:
            found = self._trace_numbers(case, args, kwargs, state, may_change)
            differ = self._plain_differ(case, args, kwargs, state, found)
            if not differ:
                return found
        except CaptureError as error:
            if not self._table.counters or COUNTER in before:
                raise
            refused, differ = error, (COUNTER,)
        tracer.tidy()
        tracer.plain = (*before, *differ)
        try:
            return self._trace_numbers(case, args, kwargs, state, may_change)
        except CaptureError:
            if refused is None:
                raise
        tracer.plain = before
        raise refused

    def _plain_differ(self, case: Case, args: Any, kwargs: Any, state: State, found: RawTrace) -> tuple[str, ...]:
        """The kinds of numbers whose types the user's code asks for, and with which as plain ones the step differs."""
        before, differ = self._tracer.plain, []
        for kind in asked_for_types(found, bool(self._table.counters)):
            if kind not in before:
                self._tracer.plain = (*before, kind)
                try:
                    plain = self._trace_once(case, args, kwargs, state, expected=found.moved, places=found.places)
                finally:
                    self._tracer.plain = before
                if not same_for_these_numbers(found, plain):
                    differ.append(kind)
        return tuple(differ)

    def _trace_numbers(self, case: Case, args: Any, kwargs: Any, state: State, may_change: bool) -> RawTrace:
        found = self._trace_lifted(case, args, kwargs, state, may_change) if case.sources else None
        return found or self._trace_plainly(case, args, kwargs, state, may_change)

    def _trace_lifted(self, case: Case, args: Any, kwargs: Any, state: State, may_change: bool) -> RawTrace | None:
        """The trace with the numbers of `case.sources` as symbols, of which those that can't be are removed. None if
        none remains."""
        attempt = partial(self._attempt, case, args, kwargs, state, may_change)
        wanted = case.sources
        found = attempt()
        if found is not None:
            return found
        for without in wanted if 1 < len(wanted) <= _FEW else ():
            case.lift([one for one in wanted if one != without])
            try:
                found = attempt()
            except Moves:
                continue
            if found is not None:
                self._failures[without] += 1
                return found
        self._failures.update(wanted)
        case.lift([])
        return None

    def _attempt(self, case: Case, args: Any, kwargs: Any, state: State, may_change: bool) -> RawTrace | None:
        """The trace with symbols, None if it fails or if the one with plain numbers does something else. What the first
        leaves in variables stays there until the end of the other one, because the step's next call may read it."""
        try:
            return self._attempt_untidied(case, args, kwargs, state, may_change)
        finally:
            self._tracer.tidy()

    def _attempt_untidied(self, case: Case, args: Any, kwargs: Any, state: State, may_change: bool) -> RawTrace | None:
        fingerprint = case.fingerprint
        try:
            with_symbols = self._trace_once(case, args, kwargs, state, may_change, symbols=True)
        except CaptureError as error:
            log.debug("%s: its numbers stay constants: %s", self.name, error)
            return None
        known = not self._extend(fingerprint, with_symbols.executed)
        plain = self._trace_once(case, args, kwargs, state, expected=with_symbols.moved, places=with_symbols.places)
        if same_for_these_numbers(with_symbols, plain):
            return with_symbols
        if not known:
            raise TraceAgain([], with_symbols)  # the first trace may have changed what was not yet watched
        log.debug("%s: its numbers stay constants: the step does something else with symbols", self.name)
        return None

    def _trace_plainly(self, case: Case, args: Any, kwargs: Any, state: State, may_change: bool) -> RawTrace:
        fingerprint = case.fingerprint
        first = self._trace_once(case, args, kwargs, state, may_change)
        known = not self._extend(fingerprint, first.executed)
        again = partial(self._trace_again, case, args, kwargs, state)
        if not self._twice or self._needs_no_second(first, case, again):
            return first
        second = self._trace_once(case, args, kwargs, state)
        parts = {count: self._trace_part(case, args, kwargs, state, count) for count in self._parts}
        for count in () if self._over is None else self._over.further_counts:
            with suppress(NotSplittable):
                parts[count] = self._trace_part(case, args, kwargs, state, count)
        difference = first_difference(first, second)
        if difference is not None and not known:
            raise TraceAgain([], first)  # the first trace may have changed what was not yet watched
        if difference is not None:
            raise NotRepeatable(
                f"{self.name} does not do the same thing twice: {difference}",
                "a Python counter, random or numpy number must not decide what the step computes: pass it in as an"
                " argument tensor",
            )
        if not parts:
            return first
        refuse_effects(first, self.name, self._whole)
        tensors = batch_key(args, kwargs)[1]
        self._tracer.splits = True
        try:
            if self._over is not None:
                return replace(first, ranks=self._over.split(first, parts, tensors, self._table))
            return split(first, parts[self.microbatches], tensors, self.microbatches, self._table, self._proofs)
        finally:
            self._tracer.splits = False

    def _extend(self, fingerprint: Fingerprint, executed: Executed) -> bool:
        """`fingerprint.extend`. The trace may have changed what was not watched, which nothing has put back: the next
        trace shows it."""
        before = fingerprint.variables()
        with self._tracer.put_away():  # an attribute that only the trace has is not there later
            fresh = fingerprint.extend(executed)
        if fresh:
            self._late |= fingerprint.variables() - before
        return fresh

    def _needs_no_second(self, trace: RawTrace, case: Case, again: Callable[[], RawTrace]) -> bool:
        """Whether another phase confirms a trace, or `confirmed` will. A step that leaves tensors behind is traced
        again before they are removed, because its next call may read them."""
        if self._parts or trace.left:
            return False
        twin = next((phase.raw for phase in case.phases if same_but_for_the_optimizer(phase.raw, trace)), None)
        if self._unconfirmed is None:
            return twin is not None
        if twin is None:
            self._unconfirmed.append((trace, again))
        else:
            self._unconfirmed = [one for one in self._unconfirmed if one[0] is not twin]
        return True

    def _trace_once(
        self, case: Case, args: Any, kwargs: Any, state: State, may_change: bool = False, symbols: bool = False,
        expected: Collection[str] = (), places: Collection[int] = (),
    ) -> RawTrace:  # fmt: skip
        lifted = case.fingerprint.lifted
        # What the first trace changed for good may be such a number, which would be counted once too often.
        settled = not self._parts and not self._first_changes
        out = lifted | self._late
        movable = lambda v: settled and v not in out and self._failures[v] < _TRIES  # noqa: E731
        found = self._tracer.trace(
            self.fn, args, kwargs, state.structure, state.host, case.fingerprint, may_change, self._by_device,
            Lift(case.lifted, symbols, movable, expected, self._switches, places),
        )  # fmt: skip
        self._late.clear()  # what this trace did not change, the one before it did not either
        return found

    def _trace_again(self, case: Case, args: Any, kwargs: Any, state: State) -> RawTrace:
        with self._staleness.suspended():
            try:
                return self._trace_once(case, args, kwargs, state)
            finally:
                self._tracer.tidy()

    def _trace_part(self, case: Case, args: Any, kwargs: Any, state: State, count: int) -> RawTrace:
        part_args, part_kwargs = first_part(args, kwargs, count, self._over is not None)
        try:
            return self._trace_once(case, part_args, part_kwargs, state)
        except CaptureError as error:
            raise NotSplittable(
                f"{self.name} works on the whole batch and not on one of {count} parts of it: {error.message}",
                f"let its sizes follow the batch's (x.shape[0]), or submit it {self._whole}",
            ) from error

    def _constants_changed(self, program: StepProgram, env: dict[str, Number]) -> bool:
        """Whether constants of the Program have other values now. In the next Program they are numbers of each step."""
        if self._constants is None:
            return False
        changed = self._constants.changed(program.lowered.written, env)
        if changed:
            log.info("%s: %s changes, and is a number of each step from now on", self.name, ", ".join(changed))
        return bool(changed)

    def _program(self, phase: Phase, state: State) -> StepProgram | KeepMore:
        with without_fetching():  # looking up where local tensors lie must not fetch them
            return self._lower(phase, state)

    def _lower(self, phase: Phase, state: State) -> StepProgram | KeepMore:
        if self._tracer.outside is not None:
            self._tracer.settle(phase.raw, self._tracer.outside)
        lowered = lower(
            phase.raw, self._table, state.keep, clients_generator=self._clients_generator, constants=self._constants
        )
        if lowered.reads_dropped:
            if lowered.reads_dropped <= state.keep:
                names = ", ".join(self._table.param_names[i] for i in sorted(lowered.reads_dropped)[:3])
                raise CaptureError(
                    f"{self.name} reads gradients ({names}, ...) that the steps run so far did not keep",
                    "where their old values are not wanted, clear them before this call: model.zero_grad(); where they"
                    " are, job.add(...) every step that uses another one's gradients before the first step, or run that"
                    " step again first",
                )
            return KeepMore(state.keep | lowered.reads_dropped)
        program = replace(lowered.program, kind="compiled") if self.compiled else lowered.program
        raw = phase.raw
        remade = frozenset(i for i, view in raw.gradients.items() if place_of(raw.record, view) is None)
        found = StepProgram(
            replace(lowered, program=program, exit=self._intern(lowered.exit)), remade=remade,
            left=raw.left, on_batch=raw.on_batch,
        )  # fmt: skip
        found.replaces = replaces(raw.record, lowered.anew, lowered.exit, self._table)
        found.undecided = any(
            isinstance(what, SkippedStep) and moves_optimizer(raw.entry, found.lowered.exit, what.optimizer)
            for what in raw.further
        )
        if self._over is not None:
            found.ranked = self._over.programs(raw, self._table, state.keep, lowered)
        phase.programs[state.keep] = found
        return found
