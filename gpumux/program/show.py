"""Programs as text, for errors, tools and tests."""

from __future__ import annotations

from collections.abc import Iterator

from gpumux.program.ir import Arg, Complex, Op, Out, Program, ScalarRef, Tag, TensorRef
from gpumux.program.validate import const_bytes, state_slots

_SHORT = {
    "float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64", "complex64": "c64", "complex128": "c128",
    "int8": "i8", "int16": "i16", "int32": "i32", "int64": "i64", "uint8": "u8", "bool": "bool",
}  # fmt: skip


def describe(program: Program, limit: int = 10_000) -> str:
    """A listing: one line for the whole, one for each operator, `limit` of them at most.

    Views read %storage:dtype[sizes], with /strides@offset where they are not dense from the start.
    State, input, constant and temporary storages read %s0 (by slot), %i0, %c0 and %5.
    """
    return "\n".join(_lines(program, limit))


def describe_op(program: Program, index: int) -> str:
    """Operator `index` as one line."""
    op = program.ops[index]
    args = [_arg(program, a) for a in op.args] + [f"{name}={_arg(program, v)}" for name, v in op.kwargs]
    random = "" if op.random is None else f" random {op.random}"
    if op.stream is not None:
        random += f" from {describe_view(program, op.stream)}"
    return f"{index:>5}  {_outs(program, op)} = {op.target}({', '.join(args)}){random}"


def describe_view(program: Program, index: int) -> str:
    view = program.views[index]
    storage = program.storages[view.storage]
    name = f"%{view.storage}" if storage.kind == "temp" else f"%{storage.kind[0]}{storage.slot}"
    text = f"{name}:{_SHORT.get(view.dtype, view.dtype)}[{','.join(map(str, view.size))}]"
    dense, step = True, 1
    for n, stride in zip(reversed(view.size), reversed(view.stride), strict=True):
        dense = dense and (stride == step or n == 1)
        step *= n
    if not dense or view.offset:
        text += f"/{','.join(map(str, view.stride))}@{view.offset}"
    return text


def _lines(program: Program, limit: int) -> Iterator[str]:
    state = state_slots(program)
    yield (
        f"program for {program.device}: {len(program.ops)} ops, {len(state)} state slots ({sum(state)} bytes), "
        f"{len(program.inputs)} inputs, {len(program.results)} results, {len(program.scalars)} scalars, "
        f"{len(program.consts)} constants ({const_bytes(program)} bytes)"
    )
    yield f"  {program.numerics}"
    for position, view in enumerate(program.inputs):
        yield f"  input {position}: {describe_view(program, view)}"
    gates = {gate.op: gate for gate in program.gates}
    begins = {span.first: span for span in program.spans}
    for index in range(min(len(program.ops), limit)):
        if index in begins:
            span = begins[index]
            passed = "backward" if span.backward else "forward"
            yield f"       {program.layers[span.layer]!r}, {passed}, {span.count} ops"
        if index in gates:
            yield f"       {gates[index].kind} {gates[index].name}"
        yield describe_op(program, index)
    if len(program.ops) > limit:
        yield f"       ... {len(program.ops) - limit} more"
    for position, view in enumerate(program.results):
        yield f"  result {position}: {describe_view(program, view)}"


def _outs(program: Program, op: Op) -> str:
    def one(out: Out) -> str:
        if out is None:
            return "_"
        if isinstance(out, tuple):
            return "[" + ", ".join(describe_view(program, view) for view in out) + "]"
        return describe_view(program, out)

    return ", ".join(map(one, op.outs)) or "()"


def _arg(program: Program, arg: Arg) -> str:
    if isinstance(arg, TensorRef):
        return describe_view(program, arg.view)
    if isinstance(arg, ScalarRef):
        return f"scalar{arg.index}"
    if isinstance(arg, Tag):
        return f"{arg.kind}:{arg.name}" if arg.name else arg.kind
    if isinstance(arg, Complex):
        return f"({arg.re}{arg.im:+}j)"
    if isinstance(arg, tuple):
        return "[" + ", ".join(_arg(program, item) for item in arg) + "]"
    return repr(arg)
