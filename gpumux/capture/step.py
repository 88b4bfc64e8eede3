"""One captured function of a job: its variants, and which of them a call needs.

A *case* is what the user can change: batch shapes, flags, baked scalars (at most `max_variants`). A
case has *phases* the optimizer goes through by itself: its first step, RAdam's warm-up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.utils._pytree as pytree

from gpumux.capture.fetching import plainly
from gpumux.capture.lower import NOTHING, Lowered, Replaces, lower, place_of, replaces
from gpumux.capture.microbatch.split import first_part, split
from gpumux.capture.recorder import RawOp
from gpumux.capture.source import Executed
from gpumux.capture.staleness import StaleGuard
from gpumux.capture.state import StateTable
from gpumux.capture.structure import Structure
from gpumux.capture.symbols import HyperReader, Number, Steady
from gpumux.capture.tracer import HostResult, RawTrace, Settled, TensorResult, Tracer, refuse_odd_tensors
from gpumux.capture.watch.fingerprint import Change, Fingerprint
from gpumux.errors import CaptureError, NotRepeatable, NotSplittable, TooManyVariants
from gpumux.program.ir import Op
from gpumux.program.validate import written_storages

# ---- Whether two traces of one step are the same, and where they part.


def first_difference(a: RawTrace, b: RawTrace) -> str | None:
    """Why two traces of one step aren't the same, or None when they are."""
    for i, (x, y) in enumerate(zip(a.record.ops, b.record.ops, strict=False)):
        one, other = ((o.target, o.args, o.kwargs, o.outs, o.random) for o in (x, y))
        if one != other and repr(one) != repr(other):  # nan, which equals no other, is written alike
            return f"operator {i} at {x.where}: {_brief(x)} the first time, {_brief(y)} the second"
    if len(a.record.ops) != len(b.record.ops):
        longer = a if len(a.record.ops) > len(b.record.ops) else b
        op = longer.record.ops[min(len(a.record.ops), len(b.record.ops))]
        return (
            f"{len(a.record.ops)} operators the first time, {len(b.record.ops)} the second; {op.target} at {op.where}"
            " is extra"
        )
    for s, t in zip(a.record.storages, b.record.storages, strict=False):
        if (s.kind, s.nbytes, s.key) != (t.kind, t.nbytes, t.key):
            return "a constant made inside the step has another value each time"
    if a.record.views != b.record.views or [str(e) for e in a.record.scalars] != [str(e) for e in b.record.scalars]:
        return "the sizes or the hyperparameter formulas differ"
    if (
        a.result_spec != b.result_spec
        or _results(a) != _results(b)
        or a.gradients != b.gradients
        or a.replaced != b.replaced
    ):
        return "what the step returns or leaves behind differs"
    return None


def _brief(op: RawOp) -> str:
    shown = [a for a in op.args if isinstance(a, (int, float, tuple))]
    return f"{op.target.removeprefix('aten.')}{shown or ''}"


def _results(raw: RawTrace) -> list[str]:
    return [
        f"view{r.view}" if isinstance(r, TensorResult) else str(r.expr) if isinstance(r, HostResult) else repr(r)
        for r in raw.results
    ]


# ----


log = logging.getLogger("gpumux.client")

MAX_PHASES = 8
_PLAIN = frozenset({torch.Tensor})


def layable(tensor: torch.Tensor, position: int) -> torch.Tensor:
    """The tensor itself, if its bytes can be laid into shared memory with the strides it has: kernels
    may choose their order of summation by strides. Raises CaptureError where they can't."""
    if tensor.is_contiguous():
        return tensor
    span, expected = 1, 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride > 0:
            if stride < expected:  # windows that overlap (unfold)
                raise _unlayable(position, "its elements overlap in memory")
            expected = stride * size
            span += (size - 1) * stride
    if span > 8 * max(1, tensor.numel()) and span > 1 << 20:
        raise _unlayable(position, f"it is spread over {span * tensor.element_size()} bytes")
    return tensor


def _unlayable(position: int, why: str) -> CaptureError:
    return CaptureError(
        f"tensor {position} of the batch can't be laid into shared memory as it is: {why}",
        "pass .contiguous() (and do so in runs you compare with)",
    )


def batch_key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[torch.Tensor]]:
    """(hashable description, tensors in order) of a batch. Raises CaptureError for what is neither a
    tensor nor a plain constant."""
    if not kwargs and _PLAIN.issuperset(map(type, args)):
        key: list[Any] = []
        for i, t in enumerate(args):
            if not t.is_contiguous():
                layable(t, i)
            key.append((t.dtype, t.shape, t.stride(), t.requires_grad))
        return tuple(key), list(args)
    leaves, spec = pytree.tree_flatten((args, kwargs))
    tensors: list[torch.Tensor] = []
    parts: list[Any] = [str(spec)]
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            tensors.append(layable(leaf, len(tensors)))
            t = tensors[-1]
            parts.append((t.dtype, t.shape, t.stride(), t.requires_grad))
        elif leaf is None or isinstance(leaf, (bool, int, float, str)):
            parts.append((type(leaf), repr(leaf)))
        else:
            raise CaptureError(
                f"the batch holds a {type(leaf).__name__}", "pass tensors, numbers, strings and containers of them only"
            )
    return tuple(parts), tensors


@dataclass(slots=True)
class Made:
    """A Program and its number in the daemon, None until it is uploaded."""

    lowered: Lowered
    number: int | None = None
    remade: frozenset[int] = frozenset()  # parameters whose gradients it does not write to, but makes anew
    left: Sequence[Callable[[], None]] = ()  # mark the places where the step leaves tensors that it does not return
    replaces: Replaces = NOTHING
    writes: bool = field(init=False)  # whether it changes state

    def __post_init__(self) -> None:
        program = self.lowered.program
        ops = tuple(op for op in program.ops if not _evaluates(op))
        self.writes = any(program.storages[s].kind == "state" for s in written_storages(replace(program, ops=ops)))


def _evaluates(op: Op) -> bool:
    """Whether it is a batch norm that leaves its running statistics alone."""
    return op.target == "aten.native_batch_norm.default" and op.args[5] is False


@dataclass(slots=True)
class Phase:
    """One trace and what was made of it, per set of kept gradients."""

    entry: Structure
    raw: RawTrace
    made: dict[frozenset[int], Made] = field(default_factory=dict)


@dataclass(slots=True)
class Case:
    """One combination of batch shapes and Python values, with the phases of the optimizer in it."""

    key: Any
    prints: Fingerprint
    hyper: HyperReader
    phases: list[Phase] = field(default_factory=list)

    def matches(self, key: Any) -> bool:
        if self.key != key:
            return False
        with plainly():
            return self.prints.holds()

    def difference(self, key: Any) -> str:
        """What sets a call apart from this case, in words."""
        if self.key != key:
            return "another batch shape or type"
        try:
            with plainly():
                return ", ".join(c.name for c in self.prints.changes()[:3])
        except NotRepeatable as gone:
            return gone.message


@dataclass(slots=True)
class State:
    """Where the job's Python side stands between two steps. Structures are compared by identity:
    `Job` interns them."""

    structure: Structure
    host: list[Number]
    keep: frozenset[int] = frozenset()  # parameters whose gradients the job keeps between steps


@dataclass(slots=True)
class Choice:
    """What one call runs: the Program, this call's numbers, and the batch tensors."""

    made: Made
    values: list[Number]
    tensors: list[torch.Tensor]

    def after(self, keep: frozenset[int]) -> State:
        """Where the Python side stands when this call has run."""
        scalars, host, _ = self.made.lowered.counts
        return State(self.made.lowered.exit, self.values[scalars : scalars + host], keep)

    def settle(self, table: StateTable) -> None:
        """What the call changes in local objects, changed: hyperparameters and flags, and where it leaves tensors."""
        lowered = self.made.lowered
        scalars, host, _ = lowered.counts
        for (i, j, key, k), value in zip(lowered.groups, self.values[scalars + host :], strict=False):
            group = table.optimizers[i].param_groups[j]
            if k is None:
                group[key] = value
            else:
                items = list(group[key])
                items[k] = value
                group[key] = type(group[key])(items)
        for flag in lowered.flags:
            flag.again()
        for mark in self.made.left:
            mark()
        for optimizer in table.optimizers:
            optimizer._opt_called = True  # learning-rate schedulers ask whether step() ever ran


class StepFunction:
    def __init__(
        self, fn: Callable[..., Any], table: StateTable, tracer: Tracer, guard: StaleGuard,
        intern: Callable[[Structure], Structure], max_variants: int, microbatches: int = 1, compiled: bool = False,
        *, twice: bool = True, clients_generator: bool = False, steady: Steady | None = None,
    ) -> None:  # fmt: skip
        """`twice`: trace it once more, to see that it does the same again. `clients_generator`: its draws go on from
        the client's generator (generator.py). `steady`: which numbers are written into its Programs."""
        self.fn = fn
        self._twice = twice
        self._clients_generator = clients_generator
        self.microbatches = microbatches
        # The proof of parts runs operators on the CPU, and a compiler knows a GPU's own as little.
        self._by_device = microbatches == 1 and not compiled
        self._steady = steady if self._by_device else None
        self.compiled = compiled
        self.name = getattr(fn, "__qualname__", "step")
        self._table = table
        self._tracer = tracer
        self._guard = guard
        self._intern = intern
        self._max_variants = max_variants
        self._executed: Executed = {}  # user code seen to run in a trace
        self._cases: list[Case] = []  # the one used last comes first
        self._settling: list[Change] | None = None  # None: nothing was traced yet

    def choose(self, args: tuple[Any, ...], kwargs: dict[str, Any], state: State) -> Choice:
        """What a call made now runs. Captures what is missing. Raises CaptureError and its kin, or
        KeepMore; nothing of the job changes then."""
        try:
            return self._choose(args, kwargs, state)
        except Settled as settled:
            self._settling = settled.changes
            self._cases.clear()
        try:
            return self._choose(args, kwargs, state)
        except CaptureError:
            for change in self._settling:
                change.restore()
            self._settling = None
            raise

    def _choose(self, args: tuple[Any, ...], kwargs: dict[str, Any], state: State) -> Choice:
        try:
            key, tensors = batch_key(args, kwargs)
        except (NotImplementedError, RuntimeError):  # torch's own, of tensors that have no strides
            refuse_odd_tensors(pytree.tree_leaves((args, kwargs)))
            raise
        case = self._case(key, tensors)
        env = case.hyper.read()
        for i, value in enumerate(state.host):
            env[f"s{i}"] = value
        for phase in case.phases:
            if phase.entry is state.structure:
                made = phase.made.get(state.keep) or self._made(phase, state)
                values = made.lowered.evaluator.run(env)
                if values is None and self._have_moved(made, env):
                    made = self._made(phase, state)
                    values = made.lowered.evaluator.run(env)
                if values is not None:
                    return Choice(made, values, tensors)
        made = self._capture(case, args, kwargs, state)
        values = made.lowered.evaluator.run(env)
        assert values is not None, "a trace holds for the values it was made with"
        return Choice(made, values, tensors)

    def _case(self, key: Any, tensors: list[torch.Tensor]) -> Case:
        for i, case in enumerate(self._cases):
            if case.matches(key):
                if i:
                    self._cases.insert(0, self._cases.pop(i))
                return case
        if len(self._cases) >= self._max_variants:
            raise TooManyVariants(
                f"{self.name} was captured for {len(self._cases)} combinations of batch shapes and Python values"
                f" already, and this call differs again: {self._cases[0].difference(key)}",
                "keep batches of equal shape (drop the last one or pad it) and changing numbers out of closures; "
                "raise max_variants= if the variety is meant",
            )
        refuse_odd_tensors(tensors)
        self._refuse_state_as_batch(tensors)
        table = self._table
        prints = Fingerprint(self.fn, table.models, table.optimizers, table.params, self._executed, table.identity)
        prints.settle()
        case = Case(key, prints, HyperReader(table.optimizers))
        self._cases.insert(0, case)
        return case

    def _refuse_state_as_batch(self, tensors: list[torch.Tensor]) -> None:
        for i, tensor in enumerate(tensors):
            if self._table.lookup(tensor) is not None:
                raise CaptureError(
                    f"tensor {i} of the batch is part of the model",
                    "let the step reach it by name: a copy would not be trained",
                )
            if tensor.requires_grad:
                raise CaptureError(
                    f"tensor {i} of the batch requires grad, and its gradient would stay in the daemon",
                    "pass x.detach(), and call requires_grad_() inside the step if you need its gradient there",
                )

    def _capture(self, case: Case, args: Any, kwargs: Any, state: State) -> Made:
        phases = case.phases
        if len(phases) >= MAX_PHASES:
            guards = {g.where for p in phases for g in p.raw.guards}
            raise TooManyVariants(
                f"{self.name} takes another path at almost every step (Python decides by a hyperparameter or step count"
                f" at {', '.join(sorted(guards)[:3])})",
                "let the number reach an operator instead of a Python decision, or update it less often",
            )
        try:
            phase = Phase(state.structure, self._trace(case.prints, args, kwargs, state))
        except BaseException:
            if not phases:
                self._cases.remove(case)  # nothing of a refused call counts as a variant
            raise
        case.prints.settle()  # with what the trace found, and with our hooks where they are now
        made = self._made(phase, state)
        phases.append(phase)
        return made

    def _trace(self, prints: Fingerprint, args: Any, kwargs: Any, state: State) -> RawTrace:
        with self._guard.quiet():
            settle = self._settling is None
            self._settling = self._settling or []
            try:
                told = self._by_device
                first = self._tracer.trace(self.fn, args, kwargs, state.structure, state.host, prints, settle, told)
                known = not prints.extend(first.executed)
                if not self._twice:
                    return first
                second = self._tracer.trace(self.fn, args, kwargs, state.structure, state.host, prints, by_device=told)
                part = self._trace_part(prints, args, kwargs, state) if self.microbatches > 1 else None
            finally:
                self._tracer.tidy()
        difference = first_difference(first, second)
        if difference is not None and not known:
            raise Settled([])  # what the first trace changed was not watched yet
        if difference is not None:
            raise NotRepeatable(
                f"{self.name} does not do the same thing twice: {difference}",
                "a Python counter, random or numpy number must not decide what the step computes: pass it in as an"
                " argument tensor",
            )
        if part is None:
            return first
        return split(first, part, batch_key(args, kwargs)[1], self.microbatches, self._table)

    def _trace_part(self, prints: Fingerprint, args: Any, kwargs: Any, state: State) -> RawTrace:
        part_args, part_kwargs = first_part(args, kwargs, self.microbatches)
        try:
            return self._tracer.trace(
                self.fn, part_args, part_kwargs, state.structure, state.host, prints, by_device=self._by_device
            )
        except CaptureError as error:
            raise NotSplittable(
                f"{self.name} works on the whole batch and not on one of {self.microbatches} parts of it:"
                f" {error.message}",
                "let its sizes follow the batch's (x.shape[0]), or submit it without microbatches",
            ) from error

    def _have_moved(self, made: Made, env: dict[str, Number]) -> bool:
        """Whether numbers that are written into the Program are others now: the next has them as numbers of each
        step."""
        if self._steady is None:
            return False
        moved = self._steady.moved(made.lowered.written, env)
        if moved:
            log.info("%s: %s changes, and is a number of each step from now on", self.name, ", ".join(moved))
        return bool(moved)

    def _made(self, phase: Phase, state: State) -> Made:
        with plainly():  # local tensors are asked where they lie
            return self._lower(phase, state)

    def _lower(self, phase: Phase, state: State) -> Made:
        lowered = lower(
            phase.raw, self._table, state.keep, clients_generator=self._clients_generator, steady=self._steady
        )
        if lowered.reads_dropped:
            if lowered.reads_dropped <= state.keep:
                names = ", ".join(self._table.param_names[i] for i in sorted(lowered.reads_dropped)[:3])
                raise CaptureError(
                    f"{self.name} reads gradients ({names}, ...) that the steps run so far did not keep",
                    "job.add(...) every step that uses another one's gradients before the first step, or run that step"
                    " again first",
                )
            raise KeepMore(state.keep | lowered.reads_dropped)
        program = replace(lowered.program, kind="compiled") if self.compiled else lowered.program
        raw = phase.raw
        remade = frozenset(i for i, view in raw.gradients.items() if place_of(raw.record, view) is None)
        made = Made(
            replace(lowered, program=program, exit=self._intern(lowered.exit)), remade=remade,
            left=raw.left,
        )  # fmt: skip
        made.replaces = replaces(raw.record, lowered.anew, lowered.exit, self._table)
        phase.made[state.keep] = made
        return made


class KeepMore(Exception):
    """Capture found that the job must keep these parameters' gradients from step to step."""

    def __init__(self, keep: frozenset[int]) -> None:
        super().__init__("keep more gradients")
        self.keep = keep
