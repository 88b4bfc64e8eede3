"""Batch norm over the ranks of a layer: each rank normalises its own part of the batch, as in torch's
DistributedDataParallel, or all of them by the statistics of the whole batch, as nn.SyncBatchNorm and one device do.

Statistics over ranks are summed in two steps, the mean before the variance: the difference of two large sums would
lose the digits that a variance has in float32. Both passes then use the kernels for given statistics. What the backward
pass lacks beside those (the statistics depend on the batch) is a batch norm again: of the same input, with the mean
gradients in place of weight and bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal, get_args

from gpumux.capture.microbatch.classify import refs_of
from gpumux.capture.microbatch.emit import PartEmitter
from gpumux.capture.recorder import RawOp
from gpumux.errors import ConfigError, NotSplittable
from gpumux.program.ir import Out, Tag, TensorRef, View

BatchNorm = Literal["refuse", "rank", "sync"]


def check_batch_norm(choice: str) -> None:
    """Raises ConfigError for anything but the three ways."""
    if choice not in get_args(BatchNorm):
        raise ConfigError(
            f"batch_norm is {choice!r}",
            "use 'rank' (each rank normalises its own samples, as DistributedDataParallel does), 'sync' (by the"
            " statistics of the whole batch) or 'refuse'",
        )


def without_running(op: RawOp, storages: frozenset[int]) -> RawOp:
    """The forward pass of a rank that does not update the running statistics, which lie on `storages`."""
    args = (*op.args[:3], None, None, *op.args[5:])
    return replace(op, args=args, reads=op.reads - storages, writes=op.writes - storages)


@dataclass(frozen=True, slots=True)
class Sum:
    """A sum of these views over the ranks of the layer, times `scale`."""

    views: tuple[int, ...]
    scale: float


@dataclass(frozen=True, slots=True)
class Statistics:
    """Views of the mean and the variance of the whole batch, on each rank."""

    mean: int
    variance: int


# What ranks do in turn: each its own operators, by place, or all together a sum.
Stage = list[list[RawOp]] | Sum


class SyncNorm:
    """Writes the batch norms of one number of ranks."""

    def __init__(self, emitter: PartEmitter) -> None:
        self._emitter = emitter

    def forward(self, ops: Sequence[RawOp], samples: int) -> tuple[list[Stage], Statistics]:
        """`ops`: of the ranks, in order. `samples`: values of a channel in the whole batch."""
        op, count = ops[0], len(ops)
        saved = op.outs[1]
        assert isinstance(saved, int)
        dtype, size = self._view(saved).dtype, self._view(saved).size
        found = Statistics(self._emitter.fresh(dtype, size), self._emitter.fresh(dtype, size))
        x = self._view(_view_of(op.args[0]))
        centred, squares = self._emitter.fresh(dtype, x.size), self._emitter.fresh(dtype, x.size)
        dims = tuple(d for d in range(len(x.size)) if d != 1)
        cast = (("dtype", Tag("dtype", dtype)),)

        def first(op: RawOp) -> list[RawOp]:
            return [self._call(op, "mean.dim", (op.args[0], dims, False), found.mean, cast)]

        def second(op: RawOp) -> list[RawOp]:
            c = TensorRef(centred)
            return [
                self._call(op, "sub.Tensor", (op.args[0], self._channels(found.mean, x)), centred),
                self._call(op, "mul.Tensor", (c, c), squares),
                self._call(op, "mean.dim", (TensorRef(squares), dims, False), found.variance),
            ]

        def third(op: RawOp) -> list[RawOp]:
            given = (TensorRef(found.mean), TensorRef(found.variance))
            normed = self._several(op, (*op.args[:3], *given, False, *op.args[6:]), (op.outs[0], None, None))
            return [normed, *self._running(op, found, samples)]

        return [
            [first(op) for op in ops], Sum((found.mean,), 1 / count),
            [second(op) for op in ops], Sum((found.variance,), 1 / count),
            [third(op) for op in ops],
        ], found  # fmt: skip

    def _running(self, op: RawOp, found: Statistics, samples: int) -> list[RawOp]:
        if not isinstance(op.args[3], TensorRef):
            return []
        momentum = op.args[6]
        if not isinstance(momentum, float):
            raise NotSplittable(
                f"{op.where}: batch norm over ranks with a momentum that changes from step to step",
                "give the batch norm a number as its momentum",
            )
        made = []
        unbiased = momentum * samples / max(samples - 1, 1)
        for at, fresh, share in ((3, found.mean, momentum), (4, found.variance, unbiased)):
            running = _view_of(op.args[at])
            made.append(self._call(op, "mul_.Scalar", (TensorRef(running), 1 - momentum), running))
            alpha = (("alpha", share),)
            made.append(self._call(op, "add_.Tensor", (TensorRef(running), TensorRef(fresh)), running, alpha))
        return made

    def backward(self, ops: Sequence[RawOp], samples: int, found: Statistics) -> list[Stage]:
        op = ops[0]
        given = (TensorRef(found.mean), TensorRef(found.variance), None, None, False)
        wanted = op.args[9]
        assert isinstance(wanted, tuple)
        dtype, size = self._view(found.mean).dtype, self._view(found.mean).size
        x = self._view(_view_of(op.args[1]))
        sums = [self._emitter.fresh(dtype, size) for _ in range(2)]  # of the weight's gradients, and the bias's
        spare = [self._emitter.fresh(dtype, size) for _ in range(4)]
        rest = self._emitter.fresh(x.dtype, x.size)

        def first(op: RawOp) -> list[RawOp]:
            outs = tuple(out if out is not None else fresh for out, fresh in zip(op.outs[1:], spare, strict=False))
            made = [self._several(op, (*op.args[:3], *given, op.args[8], (wanted[0], True, True)), (op.outs[0], *outs))]
            for out, into in zip(outs, sums, strict=True):
                assert isinstance(out, int)
                made.append(self._call(op, "mul.Scalar", (TensorRef(out), 1.0), into))
            return made

        def second(op: RawOp) -> list[RawOp]:
            into, eps = _view_of_out(op.outs[0]), op.args[8]
            mean = [TensorRef(view) for view in sums]
            inverse, scale = TensorRef(spare[2]), TensorRef(spare[3])
            made = [
                self._several(
                    op, (op.args[1], *mean, *given[:2], False, 0.0, eps), (rest, None, None), "native_batch_norm"
                ),
                self._call(op, "add.Scalar", (given[0 + 1], eps), spare[3]),
                self._call(op, "rsqrt.default", (scale,), spare[2]),
            ]
            if op.args[2] is not None:
                made.append(self._call(op, "mul_.Tensor", (inverse, op.args[2]), spare[2]))
            factor = self._channels(spare[2], x)
            made.append(self._call(op, "mul_.Tensor", (TensorRef(rest), factor), rest))
            made.append(self._call(op, "sub_.Tensor", (TensorRef(into), TensorRef(rest)), into))
            return made

        if not wanted[0]:
            return [[first(op)[:1] for op in ops]]
        return [[first(op) for op in ops], Sum(tuple(sums), 1 / samples), [second(op) for op in ops]]

    # ---- helpers -------------------------------------------------------------------------------------

    def _view(self, index: int) -> View:
        return self._emitter.record.views[index]

    def _channels(self, index: int, like: View) -> TensorRef:
        """A value of each channel, as it is laid out over a batch."""
        v = self._view(index)
        ones = (1,) * (len(like.size) - 2)
        size, stride = (1, v.size[0], *ones), (v.size[0], 1, *ones)
        return TensorRef(self._emitter.view(View(v.storage, v.dtype, size, stride, v.offset)))

    def _call(
        self, op: RawOp, target: str, args: tuple[Any, ...], out: int, kwargs: tuple[tuple[str, Any], ...] = ()
    ) -> RawOp:
        return replace(self._emitter.call(target, args, out, op.where, kwargs), label=op.label)

    def _several(self, op: RawOp, args: tuple[Any, ...], outs: tuple[Out, ...], name: str = "") -> RawOp:
        views = self._emitter.record.views
        target = f"aten.{name}.default" if name else op.target
        reads = frozenset(views[v].storage for v in refs_of(args))
        writes = frozenset(views[v].storage for v in outs if isinstance(v, int))
        return replace(op, target=target, args=args, outs=outs, reads=reads, writes=writes)


def values_of_a_channel(view: View) -> int:
    return prod(view.size) // view.size[1]


def _view_of(arg: Any) -> int:
    assert isinstance(arg, TensorRef)
    return arg.view


def _view_of_out(out: Out) -> int:
    assert isinstance(out, int)
    return out
