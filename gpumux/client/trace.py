"""One trace of a step: set the stage, run the user's function over fake tensors, note how it ends."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor

from gpumux.client import blame
from gpumux.client.autocast import autocast_of_a_gpu, refuse_around
from gpumux.client.executed import Executed, Observer
from gpumux.client.fingerprint import Change, Fingerprint
from gpumux.client.host import Expr, Guard, Number, Scope, is_symbol
from gpumux.client.hyper import hyper_name, hyperparameters
from gpumux.client.layers import Layers
from gpumux.client.ledger import Record
from gpumux.client.leftovers import Leftovers
from gpumux.client.memory import memory_kept
from gpumux.client.ongpu import as_on_a_gpu
from gpumux.client.patches import RngTape, patched
from gpumux.client.placement import names_of_devices
from gpumux.client.quiet import told_once
from gpumux.client.reading import Reading
from gpumux.client.recorder import Recorder
from gpumux.client.refusals import refuse_batch_gradients, refuse_call, refuse_draws, refuse_written_batch
from gpumux.client.state import Place, StateTable
from gpumux.client.structure import ConstLeaf, DeviceLeaf, HostLeaf, Structure, freeze_state, thaw, unusable
from gpumux.errors import CaptureError, GpumuxError, NotRepeatable, UnknownTensor


@dataclass(frozen=True, slots=True)
class DeviceExit:
    """A tensor the step leaves behind: view `view`, on state already (`home` None) or to be copied."""

    view: int
    path: tuple[Any, ...]


@dataclass(frozen=True, slots=True, eq=False)
class HostExit:
    expr: Expr
    dtype: torch.dtype | None


@dataclass(frozen=True, slots=True)
class TensorResult:
    view: int


@dataclass(frozen=True, slots=True, eq=False)
class HostResult:
    expr: Expr


@dataclass(slots=True)
class RawTrace:
    record: Record
    guards: tuple[Guard, ...]
    results: list[Any]  # TensorResult, HostResult or a constant, in pytree order
    result_spec: pytree.TreeSpec
    optimizers: tuple[Any, ...]  # frozen trees with DeviceExit, HostExit and ConstLeaf leaves
    gradients: dict[int, int]  # parameter -> view of the gradient it ends with
    groups: list[tuple[int, int, str, int | None, Expr]]  # hyperparameters the step changes itself
    flags: list[Change]  # training and requires_grad flags the step leaves changed
    entry: Structure
    replaced: list[tuple[Place, int]] = field(default_factory=list)  # buffers, and the views that replace them
    executed: Executed = field(default_factory=dict)  # the Python that ran
    left: list[Callable[[], None]] = field(default_factory=list)  # mark the places where it leaves tensors


_capturing = threading.RLock()  # a trace swaps functions of whole modules: one at a time


class Settled(Exception):
    """The first trace changed Python variables (a lazily filled configuration): they keep their new
    values, and tracing again must change nothing more. Never shown to users."""

    def __init__(self, changes: list[Change]) -> None:
        super().__init__("traced once more")
        self.changes = changes


class Tracer:
    """`by_device`: steps for a GPU are traced as torch would run them there (ongpu.py)."""

    def __init__(
        self, table: StateTable, allowed: Callable[[str], bool], device: str = "cpu", by_device: bool = True
    ) -> None:
        self.table = table
        self._by_device = by_device and table.runs_on == "cuda"
        self._allowed = allowed
        self._device = device
        self._leftovers: list[Callable[[], None]] = []
        self._keys: list[list[frozenset[Any]]] = []  # of the optimizers' groups, while a trace is under way

    def trace(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], entry: Structure,
        host_values: Sequence[Number], prints: Fingerprint, settle: bool = False, by_device: bool = True,
    ) -> RawTrace:  # fmt: skip
        """Run `fn(*args, **kwargs)` once over fake tensors from `entry`. Local state is as before when
        this returns or raises. Raises CaptureError and its kin, and with `settle` Settled."""
        with _capturing, self.table.standing_in(), told_once():
            return self._trace(fn, args, kwargs, entry, host_values, prints, settle, by_device and self._by_device)

    def _trace(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], entry: Structure,
        host_values: Sequence[Number], prints: Fingerprint, settle: bool, by_device: bool,
    ) -> RawTrace:  # fmt: skip
        scope = Scope(blame.user_line)
        tape = RngTape()

        def unknown(tensor: torch.Tensor) -> Exception:
            return UnknownTensor(
                f"{blame.user_line()} uses {blame.name_of(tensor, fn)}, which is neither in the batch nor in the model",
                "pass it as an argument of the step, or make it a buffer of a module and give that module in model= too",
            )

        observer = Observer()
        layers = Layers(self.table.models)
        rec = Recorder(
            scope, tape, self.table.lookup, unknown, self._allowed, observer, self._device, layers, self.table.gpu
        )  # fmt: skip
        refuse_around(self.table.gpu)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        before = prints.read()
        left = Leftovers(prints, rec.is_number)
        position = 0
        fakes: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                fakes.append(rec.input(leaf, position).requires_grad_(leaf.requires_grad))
                position += 1
            else:
                fakes.append(leaf)
        fake_args, fake_kwargs = pytree.tree_unflatten(fakes, spec)
        with self._stage(rec, entry, host_values) as groups:
            torch.clear_autocast_cache()  # it may hold real casts now, and would hold fake ones after
            drawn = prints.random_states()
            try:
                with (
                    patched(scope, tape, self.table.gpu),
                    autocast_of_a_gpu(self.table.gpu, self.table.home),
                    names_of_devices(self.table.gpu, self.table.home, rec.device),
                    as_on_a_gpu(tape, self.table.gpu, by_device),
                    memory_kept(rec, self.table, fn),
                    rec,
                    observer,
                ):
                    out = fn(*fake_args, **fake_kwargs)
                tape.finish()
                refuse_batch_gradients(leaves, fakes)
                refuse_draws(fn, drawn, prints.random_states())
                left.refuse_strangers()
                replaced = left.replaced_buffers()
                changes = prints.changes(before)
                raw = self._finish(rec, scope, entry, out, groups)
                raw.replaced = self._replaced(rec, replaced)
                raw.executed = observer.found
                self._leftovers += left.restorers()
            except BaseException as error:
                left.restore()
                _undo(prints, before)
                if isinstance(error, GpumuxError) or not isinstance(error, Exception):
                    raise
                refuse_call(fn, args, kwargs, error)
                raise CaptureError(
                    f"the step raised {type(error).__name__} while it was captured, at {blame.traceback_line(error)}: {error}",
                    "run the step once without gpumux to see whether it works; a step may not read tensor values in Python",
                ) from error
            finally:
                torch.clear_autocast_cache()
        stuck = [c for c in changes if not c.flag]
        if stuck and settle:
            raise Settled(stuck)
        for change in changes:
            change.restore()
        if stuck:
            names = ", ".join(f"{c.name} ({c.old!r} -> {c.new!r})" for c in stuck[:3])
            raise NotRepeatable(
                f"the step changes Python variables while it runs: {names}",
                "gpumux runs a step's Python only when it captures it: count outside the step, or keep the value in a tensor buffer",
            )
        raw.flags = changes
        raw.left = left.left(self.table.home)
        return raw

    def tidy(self) -> None:
        """Take back the fake tensors that traces left in the user's attributes and variables."""
        for put in reversed(self._leftovers):
            put()
        self._leftovers.clear()

    # ---- the stage ---------------------------------------------------------------------------------

    @contextmanager
    def _stage(self, rec: Recorder, entry: Structure, host_values: Sequence[Number]) -> Iterator[list[Any]]:
        """Gradients, optimizer state and hyperparameters as `entry` says, and the local ones back after."""
        table = self.table
        grads = [p.grad for p in table.params]
        states = [o.state for o in table.optimizers]
        saved = [[dict(g) for g in o.param_groups] for o in table.optimizers]
        self._keys = [[frozenset(g) for g in o.param_groups] for o in table.optimizers]
        keep: list[Any] = []
        try:
            present = dict(entry.gradients)
            for i, p in enumerate(table.params):
                p.grad = table.stand_in(present[i]) if i in present else None
            for o, frozen in zip(table.optimizers, entry.optimizers, strict=True):
                o.state = self._open_state(rec, frozen, host_values, keep)
            yield self._open_groups(rec, keep)
        finally:
            for p, grad in zip(table.params, grads, strict=True):
                p.grad = grad
            for o, state, groups in zip(table.optimizers, states, saved, strict=True):
                o.state = state
                for group, old in zip(o.param_groups, groups, strict=False):
                    for key in [k for k in group if k not in old]:
                        del group[key]
                    group.update(old)

    def _host(self, rec: Recorder, expr: Expr, dtype: torch.dtype | None, keep: list[Any]) -> Any:
        if dtype is None:
            return rec.scope.symbol(expr)
        tensor = torch.tensor(expr.value, dtype=dtype)
        rec.host[tensor.untyped_storage()._cdata] = expr
        keep.append(tensor)
        return tensor

    def _open_state(self, rec: Recorder, frozen: Any, values: Sequence[Number], keep: list[Any]) -> Any:
        def make(leaf: Any) -> Any:
            if isinstance(leaf, DeviceLeaf):
                return self.table.stand_in(leaf.place)
            if isinstance(leaf, HostLeaf):
                return self._host(rec, rec.scope.var(f"s{leaf.var}", values[leaf.var]), leaf.dtype, keep)
            return leaf.value

        state: Any = defaultdict(dict)
        for (kind, key), tree in frozen:
            state[self.table.params[key] if kind == "p" else key] = thaw(tree, make)
        return state

    def _open_groups(self, rec: Recorder, keep: list[Any]) -> list[Any]:
        """Put symbols for every hyperparameter; returns (place, what was put) to compare at the end."""
        put: list[Any] = []
        for i, j, key, k, value in list(hyperparameters(self.table.optimizers)):
            dtype = value.dtype if isinstance(value, torch.Tensor) else None
            number = value.item() if isinstance(value, torch.Tensor) else value
            expr = rec.scope.var(hyper_name(i, j, key, k), number)
            symbol = self._host(rec, expr, dtype, keep)
            group = self.table.optimizers[i].param_groups[j]
            if k is None:
                group[key] = symbol
            else:
                items = list(group[key])
                items[k] = symbol
                group[key] = tuple(items) if isinstance(group[key], tuple) else items
            put.append((i, j, key, k, expr))
        return put

    # ---- the end -----------------------------------------------------------------------------------

    def _finish(self, rec: Recorder, scope: Scope, entry: Structure, out: Any, groups: list[Any]) -> RawTrace:
        refuse_written_batch(rec.record)
        self._refuse_new_keys()
        leaves, spec = pytree.tree_flatten(out)
        results: list[Any] = []
        with torch.no_grad():
            for leaf in leaves:
                results.append(self._result(rec, leaf))
            optimizers = tuple(
                freeze_state(o.state, self.table, lambda v, p: self._exit(rec, v, p), i)
                for i, o in enumerate(self.table.optimizers)
            )
            gradients = {
                i: rec.view_of(rec.to_fake(p.grad)) for i, p in enumerate(self.table.params) if p.grad is not None
            }
            changed = [
                (i, j, key, k, new)
                for i, j, key, k, old in groups
                if (new := self._group(rec, i, j, key, k)) is not old
            ]
        return RawTrace(
            rec.record, tuple(scope.guards.values()), results, spec, optimizers, gradients, changed, [], entry
        )  # fmt: skip

    def _replaced(self, rec: Recorder, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> list[tuple[Place, int]]:
        out = []
        for old, new in pairs:
            place = self.table.place(old)
            if place is None:
                raise CaptureError(
                    "the step replaces a buffer of a module that was not given", "pass the module in model="
                )
            out.append((place, rec.view_of(rec.to_fake(new))))
        names = {place: name for name, tensor in self.table.tensors if (place := self.table.place(tensor)) is not None}
        for place, view in dict(out).items():
            if self.table.holders(place) != out.count((place, view)):
                raise CaptureError(
                    f"the step replaces the buffer {names.get(place, '')} in one place, and modules hold it in several",
                    "replace it in all of them, or give each a copy of its own: .clone()",
                )
        return list(dict(out).items())

    def _refuse_new_keys(self) -> None:
        for i, (optimizer, known) in enumerate(zip(self.table.optimizers, self._keys, strict=True)):
            for j, (group, keys) in enumerate(zip(optimizer.param_groups, known, strict=False)):
                fresh = sorted(str(k) for k in group if k not in keys)
                if fresh or len(optimizer.param_groups) != len(known):
                    raise CaptureError(
                        f"the step adds {', '.join(fresh) or 'a group'} to optimizer {i}'s param_groups[{j}]",
                        "put it there before you submit",
                    )

    def _group(self, rec: Recorder, i: int, j: int, key: str, k: int | None) -> Expr:
        value = self.table.optimizers[i].param_groups[j][key]
        value = value if k is None else value[k]
        if isinstance(value, torch.Tensor):
            return rec.host[value.untyped_storage()._cdata]
        return rec.scope.lift(value)

    def _result(self, rec: Recorder, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return TensorResult(rec.view_of(rec.to_fake(leaf)))
        if is_symbol(leaf):
            return HostResult(rec.scope.lift(leaf))
        if leaf is None or isinstance(leaf, (bool, int, float, complex, str, bytes)):
            return leaf
        raise CaptureError(
            f"the step returns a {type(leaf).__name__}",
            "return tensors, numbers, strings and lists, tuples or dicts of them",
        )

    def _exit(self, rec: Recorder, value: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(value, torch.Tensor):
            key = value.untyped_storage()._cdata
            if not isinstance(value, FakeTensor) and rec.is_host(value):
                return HostExit(rec.host[key], value.dtype)
            return DeviceExit(rec.view_of(rec.to_fake(value)), path)
        if is_symbol(value) or (isinstance(value, (int, float)) and not isinstance(value, bool)):
            return HostExit(rec.scope.lift(value), None)
        if value is None or isinstance(value, (bool, str)):
            return ConstLeaf(value)
        raise unusable(path, value, self.table)


def _undo(prints: Fingerprint, before: list[Reading]) -> None:
    """Put Python values back after a failed trace, as far as they can still be read."""
    try:
        for change in prints.changes(before):
            change.restore()
    except NotRepeatable:
        return
