"""A range of operators as one TorchScript graph, built node by node: no source, no tracing.

Running a graph costs less for each operator than a call from Python. The graph executor's optimisation is off in the
executor process, so it fuses, folds and drops nothing: the same kernels run in the same order on the same bits. Each
node's schema is compared with the operator that the Program names, since a graph picks overloads by argument types. An
operator that has no node raises Inexpressible and runs through Python.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import _C

from gpumux.device.run.schema import constant
from gpumux.program.check import named_arguments, overload
from gpumux.program.ir import Arg, Complex, Op, Program, ScalarRef, Tag, TensorRef, View

_INT = _C.IntType.get()
TENSOR = _C.TensorType.get()
NUMBER = _C.NumberType.get()
GENERATOR = overload("aten.bernoulli_.float")._schema.arguments[-1].type.getElementType()
_ELEMENTS: dict[str, Any] = {
    "int": _INT, "float": _C.FloatType.get(), "bool": _C.BoolType.get(), "number": NUMBER,
    "Tensor": TENSOR, "Optional[Tensor]": _C.OptionalType(TENSOR),
}  # fmt: skip
# A graph holds memory formats as the numbers of c10::MemoryFormat.
_MEMORY_FORMAT = {"contiguous_format": 0, "preserve_format": 1, "channels_last": 2, "channels_last_3d": 3}


class Inexpressible(Exception):
    """This operator call has no equivalent graph node. The message gives the reason."""


@dataclass(frozen=True, slots=True)
class GraphFunction:
    """A compiled graph. `call(*views, *scalars, *temps, *generators)` returns the tensors made here that later
    operators use, as a tuple in the order of `live_out` (None if that is empty). `streams`: the views of the
    generators."""

    call: Callable[..., Any]
    views: tuple[int, ...]
    scalars: tuple[int, ...]
    live_in: tuple[int, ...]
    live_out: tuple[int, ...]
    streams: tuple[int, ...] = ()


class GraphBuilder:
    """Builds one graph. State, inputs and constants are arguments, whose tensors are made once at load."""

    def __init__(self, program: Program, births: dict[int, View]) -> None:
        self.program = program
        self.births = births
        self.graph: Any = _C.Graph()
        self._persistent: dict[int, Any] = {}  # values by view index
        self._scalars: dict[int, Any] = {}
        self._live_in: dict[int, Any] = {}  # values by storage
        self._streams: dict[int, Any] = {}  # values by view index
        self._bases: dict[int, Any] = {}
        self._windows: dict[View, Any] = {}

    def add(self, op: Op) -> None:
        """Append one operator. Raises Inexpressible, after which the builder can't be used."""
        schema = overload(op.target)._schema
        inputs = [
            self._generator(op.stream)
            if op.stream is not None and a.name == "generator"
            else self._argument(a.type, v, a.N)
            for a, v, _ in named_arguments(op)
        ]
        node = self._node(schema.name, inputs, len(schema.returns))
        for output, returned in zip(node.outputs(), schema.returns, strict=True):
            output.setType(returned.type)
        if node.schema() != str(schema):
            raise Inexpressible(f"a graph takes {op.target} for {node.schema()}")
        for out, value in zip(op.outs, node.outputs(), strict=False):
            if isinstance(out, tuple):
                unpacked = self._node("prim::ListUnpack", [value], len(out))
                for view, item in zip(out, unpacked.outputs(), strict=True):
                    item.setType(TENSOR)
                    self._born(view, item)
            elif out is not None:
                self._born(out, value)

    def finish(self, live_out: Sequence[int]) -> GraphFunction:
        """The function. `live_out`: storages made before its end that later operators use."""
        born = tuple(s for s in live_out if s in self._bases and s not in self._live_in)
        if born:
            made = self._node("prim::TupleConstruct", [self._bases[s] for s in born], 1).output()
            made.setType(_C.TupleType([TENSOR] * len(born)))
        else:
            made = self.graph.insertConstant(None)
        self.graph.registerOutput(made)
        views, scalars, live_in = tuple(self._persistent), tuple(self._scalars), tuple(self._live_in)
        streams = tuple(self._streams)
        order = [
            *self._persistent.values(), *self._scalars.values(), *self._live_in.values(), *self._streams.values(),
        ]  # fmt: skip
        place = {value.debugName(): index for index, value in enumerate(self.graph.inputs())}
        self.graph.permuteInputs([place[value.debugName()] for value in order])
        made = _C._create_function_from_graph("piece", self.graph)
        return GraphFunction(made, views, scalars, live_in, born, streams)

    def _node(self, kind: str, inputs: Sequence[Any], outputs: int) -> Any:
        node = self.graph.create(kind, list(inputs), outputs)
        self.graph.appendNode(node)
        return node

    def _input(self, kind: Any) -> Any:
        value = self.graph.addInput()
        value.setType(kind)
        return value

    def _born(self, view_index: int, value: Any) -> None:
        """Name an output, unless it is an argument that the operator returned."""
        view = self.program.views[view_index]
        if view.storage in self.births and view.storage not in self._bases and view == self.births[view.storage]:
            self._bases[view.storage] = value

    def _argument(self, kind: Any, value: Any, count: int | None = None) -> Any:
        text = str(kind)
        if value is None:
            return self.graph.insertConstant(None)
        if text.startswith("Optional[") and text != "Optional[Tensor]":
            return self._argument(kind.getElementType(), value, count)
        if text.startswith("List["):
            return self._list(kind.getElementType(), value, count)
        if isinstance(value, TensorRef):
            return self._tensor(value.view)
        if isinstance(value, ScalarRef):
            return self._scalar(text, value.index)
        return self._constant(text, value)

    def _list(self, element: Any, value: Any, count: int | None) -> Any:
        if not isinstance(value, tuple | list):
            value = (value,) * (count or 1)  # a schema may let one number stand for a list
        text = str(element)
        plain = all(isinstance(item, int | float) for item in value)
        if value and plain and text in ("int", "float", "bool"):
            return self.graph.insertConstant([{"int": int, "float": float, "bool": bool}[text](v) for v in value])
        if text not in _ELEMENTS:
            raise Inexpressible(f"a list of {text}")
        made = self._node("prim::ListConstruct", [self._argument(element, item) for item in value], 1).output()
        made.setType(_C.ListType(_ELEMENTS[text]))
        return made

    def _scalar(self, kind: str, index: int) -> Any:
        given = self.program.scalars[index]
        value = self._scalars.get(index)
        if value is None:
            value = self._scalars[index] = self._input(_ELEMENTS[given])
        if kind in ("number", given):
            return value
        if kind == "float":
            made = self._node("aten::Float", [value], 1).output()
            made.setType(_ELEMENTS["float"])
            return made
        raise Inexpressible(f"a {given} scalar for an argument of type {kind}")

    def _generator(self, stream: int) -> Any:
        if stream not in self._streams:
            self._streams[stream] = self._input(GENERATOR)
        return self._streams[stream]

    def _constant(self, kind: str, value: Arg) -> Any:
        if isinstance(value, Tag):
            plain = _MEMORY_FORMAT[value.name] if value.kind == "memory_format" else constant(value)
            return self.graph.insertConstant(plain)
        if isinstance(value, Complex):
            return self.graph.insertConstant(complex(value.re, value.im))
        if kind == "float" and isinstance(value, int):
            return self.graph.insertConstant(float(value))
        if kind == "number" and isinstance(value, bool):
            # A constant of type Scalar would become the integer; the cast keeps it a bool.
            made = self._node("prim::unchecked_cast", [self.graph.insertConstant(value)], 1).output()
            made.setType(NUMBER)
            return made
        if isinstance(value, bool | int | float | str):
            return self.graph.insertConstant(value)
        raise Inexpressible(f"an argument of type {kind}")

    def _tensor(self, index: int) -> Any:
        view = self.program.views[index]
        if view.storage not in self.births:
            if index not in self._persistent:
                self._persistent[index] = self._input(TENSOR)
            return self._persistent[index]
        base = self._bases.get(view.storage)
        if base is None:
            base = self._bases[view.storage] = self._live_in[view.storage] = self._input(TENSOR)
        if view == self.births[view.storage]:
            return base
        if view not in self._windows:
            self._windows[view] = self._window(base, view)
        return self._windows[view]

    def _window(self, base: Any, view: View) -> Any:
        birth = self.births[view.storage]
        if birth.dtype != view.dtype:
            raise Inexpressible(f"{birth.dtype} read as {view.dtype}: graphs have no such view")
        size, stride = self._list(_INT, view.size, None), self._list(_INT, view.stride, None)
        inputs = [base, size, stride, self.graph.insertConstant(view.offset)]
        made = self._node("aten::as_strided", inputs, 1).output()
        made.setType(TENSOR)
        return made


def expressible(program: Program, births: dict[int, View], op: Op) -> str:
    """Why this operator can't be a graph node; "" if it can."""
    try:
        GraphBuilder(program, births).add(op)
    except (Inexpressible, RuntimeError, TypeError, OverflowError) as error:
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    return ""


def turn_off_optimisation() -> None:
    """Have the graph executor of this process run graphs as they are built."""
    _C._set_graph_executor_optimize(False)
