"""The check of a batch before its step is sent: values on which an operator of the step would raise.

A plain loop may catch the error of such a batch, and go on with the next one. In a job the error of an operator comes
too late for that: the daemon has begun the step, and later steps were sent. So a client runs the part of the Program
that depends on the batch alone and that an operator with conditions on values needs (labels, targets and
probabilities, converted, shifted or masked), and checks the conditions on it. Values that the model computes can't be
checked ahead: where an operator fails on those, the executor undoes the step (program/indices.py, undo_of).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gpumux.errors import BadBatch, BadValue
from gpumux.program import allowed_ops
from gpumux.program.check import DTYPES, overload, written
from gpumux.program.indices import between_0_and_1, index_uses, raises_on_values
from gpumux.program.ir import ITEM_BYTES, Complex, Op, Program, ScalarRef, Tag, TensorRef, View
from gpumux.program.validate import op_args, out_views, tensor_refs

log = logging.getLogger("gpumux.client")

_RUN = frozenset(
    "aten." + (name if "." in name else f"{name}.default")
    for family in (
        allowed_ops.POINTWISE_UNARY, allowed_ops.POINTWISE_BINARY, allowed_ops.POINTWISE_OTHER, allowed_ops.REDUCTION,
        allowed_ops.MATRIX, allowed_ops.LINEAR_ALGEBRA, allowed_ops.INDEXING, allowed_ops.SHAPE, allowed_ops.VIEW,
        allowed_ops.CREATION,
    )
    for name in family.split()
)  # fmt: skip

_MOST_BYTES = 4 << 20  # that a check may compute, beside four times the bytes of the batch


@dataclass(frozen=True, slots=True)
class _Range:
    """The values of `view` are in low..high, inclusive, or equal `ignored`. `position`: the input that they lie in,
    None for computed ones."""

    view: int
    low: float
    high: float
    ignored: int | None
    target: str
    position: int | None

    def wrong(self, values: torch.Tensor) -> str | None:
        if values.numel() == 0:
            return None
        low, high = torch.aminmax(values)
        if low.item() >= self.low and high.item() <= self.high:  # neither holds for NaN
            return None
        found = ~((values >= self.low) & (values <= self.high))
        if self.ignored is not None:
            found &= values != self.ignored
        bad = values[found]
        if bad.numel() == 0:
            return None
        held = "index" if isinstance(self.low, int) else "value"
        where = "the batch gives" if self.position is None else f"input {self.position} holds"
        return (
            f"{where} the {held} {bad[0].item()} where {self.target} takes {self.low} to {self.high}:"
            " it is out of range"
        )


@dataclass(frozen=True, slots=True)
class _Holds:
    """The view, one boolean, must be true."""

    view: int
    wrong: str


_Action = _Range | _Holds | Op


class BatchCheck:
    """Checks the values of a Program's batches. `required`: views that must be true at the end of a step, and what is
    wrong if one is not; those that the batch does not decide are left to the step."""

    def __init__(self, program: Program, required: Sequence[tuple[int, str]] = ()) -> None:
        self._program = program
        self._inputs = {program.views[v].storage: i for i, v in enumerate(program.inputs) if v != program.generator}
        self._sequence: list[tuple[int, _Action]] = self._direct_and_computed(required)
        self._copied = {  # inputs that the check itself writes
            program.views[ref.view].storage
            for _, op in self._sequence
            if isinstance(op, Op)
            for ref in tensor_refs(tuple(written(op)))
        }

    def __bool__(self) -> bool:
        return bool(self._sequence)

    # ---- what is run ---------------------------------------------------------------------------------

    def _direct_and_computed(self, required: Sequence[tuple[int, str]]) -> list[tuple[int, _Action]]:
        program, views = self._program, self._program.views
        known, varying = set(self._inputs), set(self._inputs)  # of the batch or constants, and of the batch
        unwritten = set(self._inputs)  # inputs whose values are still the batch's
        known.update(i for i, storage in enumerate(program.storages) if storage.kind == "const")
        conditions: dict[int, list[_Range | _Holds]] = {}  # by the operator before which they hold
        made_at: dict[int, int] = {}  # the newest operator that wrote a storage
        runnable: list[int] = []
        last: list[int] = []  # operators that are run for their errors
        for index, op in enumerate(program.ops):
            for view, low, high, ignored in _ranges(op, views):
                storage = views[view].storage
                if storage in varying:
                    position = self._inputs[storage] if storage in unwritten else None
                    conditions.setdefault(index, []).append(_Range(view, low, high, ignored, op.target, position))
            changed = {views[ref.view].storage for ref in tensor_refs(tuple(written(op)))}
            unwritten -= changed
            made = {views[v].storage for v in out_views(op.outs)}
            given = {views[ref.view].storage for ref in tensor_refs(op_args(op))}
            varies = bool(given & varying)
            if varies and given <= known and raises_on_values(op, views):
                last.append(index)
            if given <= known and op.target in _RUN and op.random is None:
                known |= made
                varying |= made if varies else set()
                made_at.update(dict.fromkeys(made, index))
                runnable.append(index)
            else:
                known -= made | changed
                varying &= known
        for view, wrong in required:
            storage = views[view].storage
            if storage in varying and storage in made_at:
                conditions.setdefault(made_at[storage] + 1, []).append(_Holds(view, wrong))
        return self._needed(conditions, runnable, last)

    def _needed(
        self, conditions: dict[int, list[_Range | _Holds]], runnable: list[int], last: list[int]
    ) -> list[tuple[int, _Action]]:
        """The conditions, and the operators that they need, in order. Without those that need operators if these would
        compute more than a check may."""
        program, views = self._program, self._program.views
        wanted = {views[c.view].storage for c in conditions.get(len(program.ops), ())}
        run, nbytes = set(), 0
        able, probed = set(runnable), set(last)
        for index in range(len(program.ops) - 1, -1, -1):
            op = program.ops[index]
            made = {views[v].storage for v in out_views(op.outs)}
            if index in probed or (index in able and made & wanted):
                run.add(index)
                wanted |= {views[ref.view].storage for ref in tensor_refs(op_args(op))}
                nbytes += sum(program.storages[storage].nbytes for storage in made)
            wanted |= {views[c.view].storage for c in conditions.get(index, ())}
        most = _MOST_BYTES + 4 * sum(program.storages[storage].nbytes for storage in self._inputs)
        if nbytes > most:
            direct = [(index, c) for index, found in sorted(conditions.items()) for c in found]
            return [(index, c) for index, c in direct if isinstance(c, _Range) and c.position is not None]
        actions: list[tuple[int, _Action]] = []
        seen: set[_Range] = set()
        for index in range(len(program.ops) + 1):
            for condition in conditions.get(index, ()):
                if isinstance(condition, _Holds) or condition not in seen:
                    actions.append((index, condition))
                if isinstance(condition, _Range) and condition.position is not None:
                    seen.add(condition)
            if index in run:
                actions.append((index, program.ops[index]))
        return actions

    # ---- one batch -----------------------------------------------------------------------------------

    @torch.no_grad()
    def run(self, tensors: Sequence[torch.Tensor], scalars: Sequence[float | int] = ()) -> None:
        """Raises BadBatch or BadValue for the first condition that does not hold. A batch on a GPU is left to the
        device's own check, because reading it here would wait for the GPU."""
        held: dict[int, torch.Tensor] = {}
        for storage, position in self._inputs.items():
            if tensors[position].device.type == "cpu":
                tensor = tensors[position].detach()
                if storage in self._copied:
                    tensor = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype).copy_(tensor)
                held[storage] = tensor
        for index, action in self._sequence:
            try:
                self._check(action, held, scalars)
            except (BadBatch, BadValue) as error:
                warn_of_undone(self._program, index, error.message)
                raise

    def _check(self, action: _Action, held: dict[int, torch.Tensor], scalars: Sequence[float | int]) -> None:
        if isinstance(action, Op):
            self._run(action, held, scalars)
            return
        view = self._program.views[action.view]
        if not self._has(view.storage, held):
            return
        values = _window(held[view.storage], view)
        if isinstance(action, _Holds):
            if not values.all():
                raise BadValue(action.wrong, _NOT_RUN)
        elif (wrong := action.wrong(values)) is not None:
            raise BadBatch(wrong, _NOT_RUN)

    def _has(self, storage: int, held: dict[int, torch.Tensor]) -> bool:
        kept = self._program.storages[storage]
        if storage not in held and kept.kind == "const":
            data = self._program.consts[kept.slot]
            held[storage] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0)
        return storage in held

    def _run(self, op: Op, held: dict[int, torch.Tensor], scalars: Sequence[float | int]) -> None:
        """Run an operator, if all that it needs is there."""
        views = self._program.views
        if not all(self._has(views[ref.view].storage, held) for ref in tensor_refs(op_args(op))):
            return

        def value(arg: Any) -> Any:
            if isinstance(arg, TensorRef):
                view = views[arg.view]
                return _window(held[view.storage], view)
            if isinstance(arg, ScalarRef):
                return scalars[arg.index]
            if isinstance(arg, tuple):
                return [value(item) for item in arg]
            if isinstance(arg, Complex):
                return complex(arg.re, arg.im)
            if isinstance(arg, Tag):
                if arg.kind == "device":
                    return torch.device("cpu")
                return DTYPES[arg.name] if arg.kind == "dtype" else getattr(torch, arg.name)
            return arg

        call = overload(op.target)
        args, kwargs = [value(arg) for arg in op.args], {name: value(arg) for name, arg in op.kwargs}
        if op.random is not None:  # run for its errors alone
            if any(argument.name == "generator" for argument in call._schema.arguments):
                kwargs["generator"] = torch.Generator()
            if written(op):
                args[0] = args[0].clone()
        try:
            returned = call(*args, **kwargs)
        except (RuntimeError, ValueError, IndexError) as error:
            text = str(error).split("\n", 1)[0][:300]
            raise BadBatch(f"{op.target} fails on this batch: {text}", _NOT_RUN) from error
        if op.random is None:
            self._keep(op, returned, held)

    def _keep(self, op: Op, returned: Any, held: dict[int, torch.Tensor]) -> None:
        values = returned if isinstance(returned, (tuple, list)) and len(op.outs) != 1 else (returned,)
        for out, made in zip(op.outs, values, strict=False):
            pairs = zip(out, made, strict=True) if isinstance(out, tuple) else [(out, made)]
            for index, tensor in pairs:
                if index is None:
                    continue
                view = self._program.views[index]
                if view.storage in held:  # an argument, changed in place or returned again
                    continue
                nbytes = self._program.storages[view.storage].nbytes
                fits = tensor.dtype == DTYPES[view.dtype] and tensor.stride() == view.stride
                if fits and tensor.storage_offset() == view.offset and tensor.untyped_storage().nbytes() >= nbytes:
                    held[view.storage] = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
                    continue
                count = -(-nbytes // ITEM_BYTES[view.dtype])
                held[view.storage] = torch.zeros(count, dtype=DTYPES[view.dtype])
                _window(held[view.storage], view).copy_(tensor)


def warn_of_undone(program: Program, failed: int, message: str) -> None:
    """Warn if the plain step has drawn or changed state before operator `failed`, since the job is as before it."""
    draws, writes = _first(program)
    done = ["drew random numbers"] * (draws < failed) + ["changed state"] * (writes < failed)
    if done:
        log.warning("%s: the job is as before the call, where the plain step first %s", message, " and ".join(done))


def _first(program: Program) -> tuple[int, int]:
    """The first operators that draw, and that write state."""
    none = len(program.ops) + 1
    draws = next((i for i, op in enumerate(program.ops) if op.random is not None), none)
    states = {i for i, storage in enumerate(program.storages) if storage.kind == "state"}
    writes = (
        i
        for i, op in enumerate(program.ops)
        if any(program.views[ref.view].storage in states for ref in tensor_refs(tuple(written(op))))
    )
    return draws, next(writes, none)


_NOT_RUN = "the step was not run, and the job's state is as it was: correct the batch, or leave it out"


def _window(base: torch.Tensor, view: View) -> torch.Tensor:
    """`view` of the memory that begins where `base` begins."""
    dtype = DTYPES[view.dtype]
    start = base.storage_offset() * base.element_size() // dtype.itemsize
    return torch.empty(0, dtype=dtype).set_(base.untyped_storage(), start + view.offset, view.size, view.stride)


_Row = tuple[int, float, float, int | None]


def _ranges(op: Op, views: tuple[View, ...]) -> Iterator[_Row]:
    """(view, low, high, ignored) of each condition on the values of an operator's arguments."""
    for use in index_uses(op, views):
        if not views[use.view].dtype.startswith(("float", "bfloat")):
            yield use.view, use.low, use.high, use.ignored
    for view in between_0_and_1(op):
        yield view, 0.0, 1.0, None
