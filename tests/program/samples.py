"""Hand-built small Programs, made of the intermediate form alone, for tests of every layer.

Each says what its inputs, scalars, state and results are. No torch here.
"""

from __future__ import annotations

from dataclasses import replace

from gpumux.program.ir import (
    ITEM_BYTES,
    Arg,
    Numerics,
    Op,
    Out,
    Program,
    ScalarRef,
    Span,
    Storage,
    StorageKind,
    TensorRef,
    View,
)


class _Draft:
    """Collects storages and views: one contiguous view a storage unless asked otherwise."""

    def __init__(self) -> None:
        self.storages: list[Storage] = []
        self.views: list[View] = []
        self.ops: list[Op] = []

    def tensor(self, kind: StorageKind, size: tuple[int, ...], dtype: str = "float32", slot: int = -1) -> int:
        stride: list[int] = []
        count = 1
        for n in reversed(size):
            stride.insert(0, count)
            count *= n
        self.storages.append(Storage(kind, count * ITEM_BYTES[dtype], slot))
        self.views.append(View(len(self.storages) - 1, dtype, size, tuple(stride)))
        return len(self.views) - 1

    def alias(self, view: int, size: tuple[int, ...], stride: tuple[int, ...]) -> int:
        base = self.views[view]
        self.views.append(View(base.storage, base.dtype, size, stride, base.offset))
        return len(self.views) - 1

    def op(
        self,
        target: str,
        *args: Arg,
        out: Out,
        kwargs: tuple[tuple[str, Arg], ...] = (),
        random: int | None = None,
    ) -> None:
        self.ops.append(Op(target, args, kwargs, (out,), random))

    def program(self, **rest: object) -> Program:
        return Program(tuple(self.storages), tuple(self.views), tuple(self.ops), **rest)  # type: ignore[arg-type]


def empty() -> Program:
    """An empty Program: no operators, inputs, state or results."""
    return Program((), (), (), (), ())


def add_one() -> Program:
    """input 0: float32[4] -> result 0: float32[4], the input + 1."""
    d = _Draft()
    x = d.tensor("input", (4,), slot=0)
    y = d.tensor("temp", (4,))
    d.op("aten.add.Scalar", TensorRef(x), 1, out=y)
    return d.program(inputs=(x,), results=(y,))


def counter() -> Program:
    """state slot 0: float32[1], scalar 0: float -> state += scalar; result 0: the state after it."""
    d = _Draft()
    total = d.tensor("state", (1,), slot=0)
    d.op("aten.add_.Scalar", TensorRef(total), ScalarRef(0), out=total)
    return d.program(inputs=(), results=(total,), scalars=("float",))


def sgd_linear(rows: int = 8, columns: int = 3) -> Program:
    """One SGD step of linear regression under mean squared error, written out by hand.

    inputs: x float32[rows, columns], y float32[rows]; state slot 0: w float32[columns];
    scalar 0: the learning rate; result 0: the loss before the step, float32[].
    """
    d = _Draft()
    x = d.tensor("input", (rows, columns), slot=0)
    y = d.tensor("input", (rows,), slot=1)
    w = d.tensor("state", (columns,), slot=0)
    predicted, error, squared = (d.tensor("temp", (rows,)) for _ in range(3))
    loss = d.tensor("temp", ())
    x_transposed = d.alias(x, (columns, rows), (1, columns))
    correlation, grad, update = (d.tensor("temp", (columns,)) for _ in range(3))
    d.op("aten.mv.default", TensorRef(x), TensorRef(w), out=predicted)
    d.op("aten.sub.Tensor", TensorRef(predicted), TensorRef(y), out=error)
    d.op("aten.mul.Tensor", TensorRef(error), TensorRef(error), out=squared)
    d.op("aten.mean.default", TensorRef(squared), out=loss)
    d.op("aten.mv.default", TensorRef(x_transposed), TensorRef(error), out=correlation)
    d.op("aten.mul.Scalar", TensorRef(correlation), 2.0 / rows, out=grad)
    d.op("aten.mul.Scalar", TensorRef(grad), ScalarRef(0), out=update)
    d.op("aten.sub_.Tensor", TensorRef(w), TensorRef(update), out=w)
    return d.program(inputs=(x, y), results=(loss,), scalars=("float",))


def crash_maxpool(derived: bool = False) -> Program:
    """The backward of 2x2 max pooling with the indices as an input: a bad index crashes the kernel.

    inputs: grad float32[1,1,2,2], x float32[1,1,4,4], indices int64[1,1,2,2] (0..15 is legal);
    result 0: float32[1,1,4,4]. `derived` computes the indices used as input * 2**40, so that a
    range check of the input can't see that they are bad (any non-zero input index will be).
    """
    d = _Draft()
    grad = d.tensor("input", (1, 1, 2, 2), slot=0)
    x = d.tensor("input", (1, 1, 4, 4), slot=1)
    indices = d.tensor("input", (1, 1, 2, 2), "int64", slot=2)
    used = indices
    if derived:
        used = d.tensor("temp", (1, 1, 2, 2), "int64")
        d.op("aten.mul.Scalar", TensorRef(indices), 1 << 40, out=used)
    out = d.tensor("temp", (1, 1, 4, 4))
    window = ((2, 2), (2, 2), (0, 0), (1, 1), False)
    d.op(
        "aten.max_pool2d_with_indices_backward.default",
        TensorRef(grad), TensorRef(x), *window, TensorRef(used),
        out=out,
    )  # fmt: skip
    return d.program(inputs=(grad, x, indices), results=(out,))


def crash_div() -> Program:
    """inputs: int64[4], int64[4] -> result 0: their truncated quotient. INT64_MIN / -1 is SIGFPE."""
    d = _Draft()
    a = d.tensor("input", (4,), "int64", slot=0)
    b = d.tensor("input", (4,), "int64", slot=1)
    out = d.tensor("temp", (4,), "int64")
    d.op("aten.div.Tensor_mode", TensorRef(a), TensorRef(b), kwargs=(("rounding_mode", "trunc"),), out=out)
    return d.program(inputs=(a, b), results=(out,))


def dropout(size: int = 64) -> Program:
    """input 0: float32[size] -> results 0..2: the input under three half-dropout masks. The first
    two share random slot 0, so they are equal; the third draws anew from slot 1."""
    d = _Draft()
    x = d.tensor("input", (size,), slot=0)
    results = []
    for slot in (0, 0, 1):
        mask, out = d.tensor("temp", (size,)), d.tensor("temp", (size,))
        d.op("aten.bernoulli.p", TensorRef(x), 0.5, out=mask, random=slot)
        d.op("aten.mul.Tensor", TensorRef(x), TensorRef(mask), out=out)
        results.append(out)
    return d.program(inputs=(x,), results=tuple(results))


def layered() -> Program:
    """`dropout` as if each mask were a layer of its own, the last two in the backward pass."""
    names = ("drop.0", "drop.1", "drop.2")
    return replace(dropout(), layers=names, spans=tuple(Span(2 * i, 2, i, i > 0) for i in range(3)))


def given_generator(size: int = 64, state_bytes: int = 5056) -> Program:
    """`dropout` drawing from the generator whose state comes with the step as input 1, and leaves as result 3."""
    made = dropout(size)
    storage, view = len(made.storages), len(made.views)
    return replace(
        made,
        storages=(*made.storages, Storage("input", state_bytes, 1)),
        views=(*made.views, View(storage, "uint8", (state_bytes,), (1,))),
        inputs=(*made.inputs, view), results=(*made.results, view), generator=view,
    )  # fmt: skip


def full_precision() -> Program:
    """`add_one` of a client that has turned TF32 off for convolutions, which makes its encoding another version."""
    return replace(add_one(), numerics=Numerics(conv_precision="ieee"))


def lstm(declared: int, used: int | None = None, widths: tuple[int, int] = (3, 3)) -> Program:
    """A layer of an LSTM through oneDNN, of hidden size 4, and a backward pass with its outputs as their gradients.

    inputs: x float32[5, 2, width] of the layer, and of the backward pass (`widths`); state: weights, the backward
    pass's first weight, states; result 0: the gradient of x. `declared`: bytes of the workspace; `used`: bytes of it
    that the backward pass gets, None: all.
    """
    d = _Draft()
    rows, (width, other) = 2, widths
    x, x_back = (d.tensor("input", (5, rows, n), slot=i) for i, n in enumerate(widths))
    weights = [d.tensor("state", size, slot=i) for i, size in enumerate([(16, width), (16, 4), (16,), (16,)])]
    w_back = d.tensor("state", (16, other), slot=4)
    h, c = (d.tensor("state", (rows, 4), slot=i) for i in (5, 6))
    out, hy, cy = d.tensor("temp", (5, rows, 4)), d.tensor("temp", (rows, 4)), d.tensor("temp", (rows, 4))
    workspace = d.tensor("temp", (declared,), "uint8")
    args = [TensorRef(v) for v in (x, *weights, h, c)]
    d.ops.append(
        Op("aten.mkldnn_rnn_layer.default", (*args, False, (), 2, 4, 1, True, False, False, True), (),
           (out, hy, cy, workspace), None)
    )  # fmt: skip
    part = workspace if used is None else d.alias(workspace, (used,), (1,))
    sizes = [(5, rows, other), (16, other), (16, 4), (16,), (16,), (rows, 4), (rows, 4)]
    grads = [d.tensor("temp", size) for size in sizes]
    args = [TensorRef(v) for v in (x_back, w_back, *weights[1:], h, c, out, hy, cy, out)]
    d.ops.append(
        Op("aten.mkldnn_rnn_layer_backward.default",
           (*args, None, None, False, 2, 4, 1, True, True, False, (), False, TensorRef(part)), (), tuple(grads), None)
    )  # fmt: skip
    return d.program(inputs=(x, x_back), results=(grads[0],))


ALL = {
    "empty": empty, "add_one": add_one, "counter": counter, "sgd_linear": sgd_linear,
    "crash_maxpool": crash_maxpool, "crash_div": crash_div, "dropout": dropout,
    "layered": layered, "given_generator": given_generator, "full_precision": full_precision,
}  # fmt: skip


def hungry(size: int = 1200, kernel: int = 31) -> Program:
    """A convolution whose kernel takes 10 GB beside its operands: a column of the image for each position.

    inputs: float64[1, 1, size, size], float64[1, 1, kernel, kernel]; result 0: their convolution.
    """
    d = _Draft()
    x = d.tensor("input", (1, 1, size, size), "float64", slot=0)
    weight = d.tensor("input", (1, 1, kernel, kernel), "float64", slot=1)
    out = d.tensor("temp", (1, 1, size - kernel + 1, size - kernel + 1), "float64")
    how = (None, (1, 1), (0, 0), (1, 1), False, (0, 0), 1)
    d.op("aten.convolution.default", TensorRef(x), TensorRef(weight), *how, out=out)
    return d.program(inputs=(x, weight), results=(out,))
