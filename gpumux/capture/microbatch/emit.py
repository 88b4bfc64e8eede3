"""Writes the operators of a part's trace for each part of the batch."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

from gpumux.capture.microbatch.classify import MEAN, NLL_BACKWARD, NLL_FORWARD, SUM, OperatorPair, RunLevel, SplitPlan
from gpumux.capture.recorder import RawOp, RawStorage, TraceRecord
from gpumux.program.ir import ITEM_BYTES, Out, Tag, TensorRef, View, contiguous_strides


class PartEmitter:
    """Makes a TraceRecord with the whole trace's storages and views, and additional ones for each part. `shared`:
    storages that part 0 uses in place of its own, because the parts' values are added up in them."""

    def __init__(
        self, pairs: list[OperatorPair], full: TraceRecord, part: TraceRecord, plan: SplitPlan,
        *, count: int, split: set[int], shared: set[int] | None = None, record: TraceRecord | None = None,
    ) -> None:  # fmt: skip
        """`record`: where parts of other numbers are made as well, with the whole trace's storages and views first."""
        self.pairs = pairs
        self.plan = plan
        self.count = count
        self.record = record or TraceRecord(
            list(full.storages), list(full.views), [], full.scalars, full.inputs, full.state_storage
        )  # fmt: skip
        self._part = part
        self._shared = shared or set()
        self._split = split
        self._views = {view: i for i, view in enumerate(self.record.views)}
        self._storages: dict[tuple[int, int], int] = {}
        self._scales: dict[int, int] = {}  # operator -> view of the factor for its result
        self._portions: dict[tuple[int, str], int] = {}  # storage of a count, dtype -> view of a part's even share
        self.extras: list[RawOp] = []  # run once, before the parts; the caller of `emit` moves them
        self._own = {
            s
            for pair, level in zip(pairs, plan.levels, strict=True)
            if level is RunLevel.PART
            for s in pair.full.writes
        }

    @property
    def samples(self) -> int:
        """How many samples the whole batch has; 0 without a batch."""
        return 0 if not self._split else self.record.views[self.record.inputs[min(self._split)]].size[0]

    # ---- storages and views --------------------------------------------------------------------------

    def view(self, view: View) -> int:
        index = self._views.setdefault(view, len(self.record.views))
        if index == len(self.record.views):
            self.record.views.append(view)
        return index

    def fresh(self, dtype: str, size: tuple[int, ...]) -> int:
        """A dense view on a new temporary storage."""
        self.record.storages.append(RawStorage("temp", prod(size) * ITEM_BYTES[dtype], None, dtype))
        return self.view(View(len(self.record.storages) - 1, dtype, size, contiguous_strides(size)))

    def storage(self, storage: int, part: int) -> int:
        """The storage of part `part` for `storage` of a part's trace."""
        mine = self._part.storages[storage]
        whole = self.record.storages[storage]
        if mine.kind == "const":
            part = 0  # the same for every part
            if mine.key == whole.key:
                return storage
        elif mine.kind != "temp" or storage not in self._own or (part == 0 and storage in self._shared):
            return storage
        found = self._storages.get((storage, part))
        if found is None:
            found = self._storages[storage, part] = len(self.record.storages)
            self.record.storages.append(mine)
        return found

    def part_view(self, index: int, part: int) -> int:
        """The view of part `part` for view `index` of a part's trace."""
        v = self._part.views[index]
        offset = v.offset
        mine = self._part.storages[v.storage]
        if mine.kind == "input" and mine.key in self._split:
            batch = self._part.views[self._part.inputs[mine.key]]
            step = part * batch.size[0] * batch.stride[0] * ITEM_BYTES[batch.dtype]
            offset += step // ITEM_BYTES[v.dtype]
        return self.view(View(self.storage(v.storage, part), v.dtype, v.size, v.stride, offset))

    # ---- operators -----------------------------------------------------------------------------------

    def emit(self, j: int, part: int) -> list[RawOp]:
        """Operator `j` for one part. Operators that it needs once for all parts are added to `extras`."""
        op = self._move(self.pairs[j].part, part)
        name = self.pairs[j].name
        if j in self.plan.divided:
            (out, *_) = op.outs
            assert isinstance(out, int)
            portion = self._portion(self.plan.divided[j], self.record.views[out].dtype)
            return [self._again(op, (op.args[0], TensorRef(portion), *op.args[2:]))]
        if name in NLL_FORWARD and j in self.plan.losses.values():
            (out, *_) = op.outs
            assert isinstance(out, int)
            summed = self._again(op, (*op.args[:3], SUM, *op.args[4:]))
            return [summed, self.call("mul_.Tensor", (TensorRef(out), TensorRef(self._scale(j))), out, op.where)]
        if name in NLL_BACKWARD and op.args[4] == MEAN:
            total = self.record.views[self.pairs[j].refs[-1][0]].storage
            grad = op.args[0]
            assert isinstance(grad, TensorRef)
            v = self.record.views[grad.view]
            smaller = self.fresh(v.dtype, ())
            scale = self._scale(self.plan.losses[total])
            product = self.call("mul.Tensor", (grad, TensorRef(scale)), smaller, op.where)
            return [product, self._again(op, (TensorRef(smaller), *op.args[1:4], SUM, *op.args[5:]))]
        return [op]

    def _move(self, op: RawOp, part: int) -> RawOp:
        def arg(value: Any) -> Any:
            if isinstance(value, TensorRef):
                return TensorRef(self.part_view(value.view, part))
            return tuple(arg(v) for v in value) if isinstance(value, tuple) else value

        def out(value: Out) -> Out:
            if isinstance(value, tuple):
                return tuple(self.part_view(v, part) for v in value)
            return None if value is None else self.part_view(value, part)

        return replace(
            op, args=arg(op.args), kwargs=tuple((k, arg(v)) for k, v in op.kwargs), outs=tuple(out(o) for o in op.outs),
            reads=frozenset(self.storage(s, part) for s in op.reads),
            writes=frozenset(self.storage(s, part) for s in op.writes),
        )  # fmt: skip

    def _again(self, op: RawOp, args: tuple[Any, ...]) -> RawOp:
        reads = frozenset(self.record.views[v].storage for v in _refs(args))
        return replace(op, args=args, reads=reads)

    def call(
        self, target: str, args: tuple[Any, ...], out: int, where: str, kwargs: tuple[tuple[str, Any], ...] = ()
    ) -> RawOp:
        reads = frozenset(self.record.views[v].storage for v in _refs(args))
        return RawOp(
            f"aten.{target}", args, kwargs, (out,), reads, frozenset((self.record.views[out].storage,)), None, where
        )

    def _once(
        self, target: str, args: tuple[Any, ...], as_type: str, size: tuple[int, ...], where: str, **kwargs: Any
    ) -> int:
        out = self.fresh(as_type, size)
        self.extras.append(self.call(target, args, out, where, tuple(sorted(kwargs.items()))))
        return out

    def _portion(self, count: int, dtype: str) -> int:
        """View of a count of the whole batch divided by the number of parts, in the type of the quotient that it gives:
        two numbers without dimensions give one of the wider type."""
        if (count, dtype) not in self._portions:
            where = "the step"
            v = next(v for v in self.record.views if v.storage == count and not v.size)
            wide = self._cast(self.view(v), "float64", where)
            share = self._once("div.Scalar", (TensorRef(wide), self.count), "float64", (), where)
            self._portions[count, dtype] = share if dtype == "float64" else self._cast(share, dtype, where)
        return self._portions[count, dtype]

    def _cast(self, view: int, dtype: str, where: str) -> int:
        size = self.record.views[view].size
        tags = {"dtype": Tag("dtype", dtype), "memory_format": Tag("memory_format", "contiguous_format")}
        return self._once("_to_copy.default", (TensorRef(view),), dtype, size, where, **tags)

    def _scale(self, j: int) -> int:
        """View of the number of parts divided by the number (or weight) of all valid labels, for the loss at `j`."""
        if j in self._scales:
            return self._scales[j]
        op = self.pairs[j].full
        where = op.where
        scores, target, weight, _, ignored = op.args[:5]
        assert isinstance(scores, TensorRef)
        assert isinstance(target, TensorRef)
        dtype, size = self.record.views[scores.view].dtype, self.record.views[target.view].size
        target = TensorRef(self._plain(target.view, where))
        counted = self._once("ne.Scalar", (target, ignored), "bool", size, where)
        if weight is None:
            total = self._once("sum.default", (TensorRef(counted),), "int64", (), where)
        else:
            total = self._weight(target, weight, counted, size, where)
        wide = self._cast(total, "float64", where)
        inverse = self._once("reciprocal.default", (TensorRef(wide),), "float64", (), where)
        scale = self._once("mul.Scalar", (TensorRef(inverse), float(self.count)), "float64", (), where)
        self._scales[j] = self._cast(scale, dtype, where)
        return self._scales[j]

    def _plain(self, view: int, where: str) -> int:
        """Labels as a dense int64 tensor."""
        v = self.record.views[view]
        if v.dtype != "int64":
            view = self._cast(view, "int64", where)
        if self.record.views[view].stride == contiguous_strides(v.size):
            return view
        dense = Tag("memory_format", "contiguous_format")
        return self._once("clone.default", (TensorRef(view),), "int64", v.size, where, memory_format=dense)

    def _weight(self, target: TensorRef, weight: Any, counted: int, size: tuple[int, ...], where: str) -> int:
        """The sum of the weights of the labels that count."""
        dtype = self.record.views[weight.view].dtype
        length = prod(size)
        index = self._once("mul.Tensor", (target, TensorRef(counted)), "int64", size, where)
        flat = [self.view(replace(self.record.views[v], size=(length,), stride=(1,))) for v in (index, counted)]
        chosen = self._once("index_select.default", (weight, 0, TensorRef(flat[0])), dtype, (length,), where)
        kept = self._once("mul.Tensor", (TensorRef(chosen), TensorRef(flat[1])), dtype, (length,), where)
        return self._once("sum.default", (TensorRef(kept),), dtype, (), where)


def _refs(args: tuple[Any, ...]) -> list[int]:
    found: list[int] = []
    for arg in args:
        if isinstance(arg, TensorRef):
            found.append(arg.view)
        elif isinstance(arg, tuple):
            found += _refs(arg)
    return found
