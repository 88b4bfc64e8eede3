"""A torch model's layers and how they are connected, by tracing it symbolically (torch.fx). Imports torch.

torch's own modules are the leaves; code between them (additions, concatenations, attention) is traced operation by
operation. A layer is named after its module in the model. Views cost nothing and belong to the layer that they view.
Activations, norms and other cheap operations belong to the layer before them if nothing else reads its output. A
convolution, its batch norm and its rectifier are thus one layer, as in DeepPool's table 1. The loss and the optimizer
are left out.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import Parameter, signature
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from gpumux.errors import CaptureError, ConfigError
from gpumux.plan.models import BUILT_IN, LoadedModel

# ---- The nodes of a traced torch model as layers: the layer of each node, what each layer reads, and its size. Imports
# torch.


CHEAP_MODULES = (
    nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.LeakyReLU, nn.ELU, nn.Hardswish, nn.Softmax,
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.LayerNorm,
    nn.GroupNorm, nn.Identity,
)  # fmt: skip
VIEW_MODULES = (nn.Flatten, nn.Unflatten)
VIEWS = {
    "view", "reshape", "flatten", "unflatten", "permute", "transpose", "squeeze", "unsqueeze", "getitem", "chunk",
    "split", "unbind", "contiguous", "expand", "t", "movedim", "swapaxes", "narrow", "select", "detach", "to", "float",
}  # fmt: skip
CHEAP = {
    "relu", "relu_", "gelu", "silu", "sigmoid", "tanh", "softmax", "log_softmax", "dropout", "add", "iadd", "sub",
    "mul", "imul", "truediv", "div", "neg", "exp", "sqrt", "rsqrt", "pow", "clamp", "leaky_relu", "layer_norm",
    "batch_norm", "mean", "masked_fill", "radd", "rmul",
}  # fmt: skip


@dataclass
class TracedLayer:
    """One layer: its nodes, in order; the layers it reads; the bytes of one sample's output and of its parameters; the
    floating-point operations of one sample's forward pass."""

    name: str
    kind: str
    nodes: list[fx.Node]
    inputs: list[str] = field(default_factory=list)
    output_bytes: int = 0
    parameter_bytes: int = 0
    flops: float = 0.0


def function_name(node: fx.Node) -> str:
    """The name of the function that a node calls."""
    target = node.target
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


def module_path(node: fx.Node) -> str:
    """The path of the module that a node calls or runs in, as in named_modules; "" for the model itself."""
    if node.op == "call_module":
        return str(node.target)
    stack = list(node.meta.get("nn_module_stack", {}).values())
    return str(stack[-1][0]) if stack else ""


def tensors(value: object) -> list[torch.Tensor]:
    """The tensors in a node's result."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [each for item in value for each in tensors(item)]
    return [each for item in value.values() for each in tensors(item)] if isinstance(value, dict) else []


class Grouping:
    """Groups nodes into layers."""

    def __init__(self, module: fx.GraphModule, batch: int) -> None:
        self.module, self.batch = module, batch
        self.owner: dict[fx.Node, TracedLayer | None] = {}  # None: the model's input
        self.base: dict[fx.Node, fx.Node] = {}  # view -> the node that it views
        self.constant: dict[fx.Node, list[fx.Node]] = {}  # node equal for every sample -> the nodes that make it
        self.found: list[TracedLayer] = []
        self.seen: set[int] = set()  # ids of parameters; tied ones are one
        self.names: set[str] = set()

    def layers(self) -> list[TracedLayer]:
        for node in self.module.graph.nodes:
            if node.op == "output":
                self._leaving(node)
            elif node.op == "placeholder":
                self.owner[node] = None
            else:
                self._place(node)
        return self.found

    def _place(self, node: fx.Node) -> None:
        varying = [each for each in node.all_input_nodes if each in self.owner]
        if not varying or not tensors(node.meta["val"]):
            made_by = [*(made for each in node.all_input_nodes for made in self.constant.get(each, [])), node]
            self.constant[node] = made_by  # parameters, shapes, and values computed from them
            return
        if self._is_view(node):
            source = varying[0]
            layer = self.owner[source]
            self.base[node] = self.base.get(source, source)
            self.owner[node] = layer
            if layer is not None:
                self._add(layer, node)
            return
        sources = {id(self.owner[each]): self.owner[each] for each in varying}
        (layer,) = sources.values() if len(sources) == 1 else (None,)
        if layer is None or not (self._is_cheap(node) and self._alone(layer, node)):
            layer = TracedLayer(self._name(node), self._kind(node), [])
            self.found.append(layer)
        self.base[node], self.owner[node] = node, layer
        self._add(layer, node)
        for each in varying:
            before = self.owner[each]
            if before is not None and before is not layer and before.name not in layer.inputs:
                layer.inputs.append(before.name)
                self._leaves(before)

    def _add(self, layer: TracedLayer, node: fx.Node) -> None:
        made_by = [made for each in node.all_input_nodes for made in self.constant.get(each, [])]
        for each in [*made_by, node]:
            if each not in layer.nodes:
                layer.nodes.append(each)
            layer.parameter_bytes += self._parameters(each)
        layer.flops += node.meta["flops"] / self.batch

    def _parameters(self, node: fx.Node) -> int:
        """Bytes of the parameters that this node is the first to use."""
        found: list[Any] = []
        if node.op == "get_attr":
            owner, _, leaf = str(node.target).rpartition(".")
            found = [getattr(self.module.get_submodule(owner), leaf)]
        elif node.op == "call_module":
            found = list(self.module.get_submodule(str(node.target)).parameters())
        new = [each for each in found if isinstance(each, nn.Parameter) and id(each) not in self.seen]
        self.seen |= {id(each) for each in new}
        return sum(each.numel() * each.element_size() for each in new if each.requires_grad)

    def _is_view(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return isinstance(self.module.get_submodule(str(node.target)), VIEW_MODULES)
        return function_name(node) in VIEWS

    def _is_cheap(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return isinstance(self.module.get_submodule(str(node.target)), CHEAP_MODULES)
        return function_name(node) in CHEAP

    def _alone(self, layer: TracedLayer, node: fx.Node) -> bool:
        """Whether `node` is the only reader of what it reads of the layer."""

        def readers(each: fx.Node) -> set[fx.Node]:
            found: set[fx.Node] = set()
            for user in each.users:
                found |= readers(user) if user in layer.nodes or self._unplaced_view(user) else {user}
            return found

        own = [each for each in node.all_input_nodes if self.owner.get(each) is layer]
        made = {self.base.get(each, each) for each in own}
        return all(
            reader is node or not tensors(reader.meta.get("val", ())) for each in made for reader in readers(each)
        )

    def _unplaced_view(self, node: fx.Node) -> bool:
        return node.op in ("call_module", "call_method", "call_function") and self._is_view(node)

    def _leaves(self, layer: TracedLayer) -> None:
        """Update the layer's output bytes: those that other layers read."""
        read = {
            self.base[node]
            for node in layer.nodes
            if node in self.base
            for user in node.users
            if user not in layer.nodes and tensors(user.meta.get("val", ()))
        }
        layer.output_bytes = sum(self._nbytes(node) for node in read)

    def _leaving(self, output: fx.Node) -> None:
        for node in output.all_input_nodes:
            layer = self.owner.get(node)
            if layer is not None and not layer.output_bytes:
                layer.output_bytes = self._nbytes(self.base[node])

    def _nbytes(self, node: fx.Node) -> int:
        return sum(each.numel() * each.element_size() for each in tensors(node.meta["val"])) // self.batch

    def _kind(self, node: fx.Node) -> str:
        if node.op == "call_module":
            return type(self.module.get_submodule(str(node.target))).__name__
        return function_name(node)

    def _name(self, node: fx.Node) -> str:
        if node.op == "call_module":
            name = str(node.target)
        else:
            path = module_path(node)
            name = f"{path}.{function_name(node)}" if path else function_name(node)
        unique, number = name, 1
        while unique in self.names:
            number += 1
            unique = f"{name}:{number}"
        self.names.add(unique)
        return unique


# ---- Tracing.


@dataclass
class TracedModel:
    """`module` computes what the model computes, node by node, for any batch. Its nodes carry `meta["val"]`, their
    results for a batch of `batch` samples."""

    name: str
    module: fx.GraphModule
    layers: list[TracedLayer]
    batch: int


class _Tracer(fx.Tracer):
    def __init__(self, whole: Sequence[str]) -> None:
        super().__init__()
        self.whole = set(whole)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m).__name__ in self.whole or super().is_leaf_module(m, module_qualified_name)


def trace(loaded: LoadedModel, *, batch: int = 2, whole: Sequence[str] = ()) -> TracedModel:
    """Trace a model. whole: class names of modules that are one layer each. Raises CaptureError for a model that can't
    be traced, ConfigError for a class of which it has no module."""
    _check_classes(loaded, whole)
    tracer, defaults = _Tracer(whole), _defaults(loaded)
    try:
        graph = tracer.trace(loaded.module, defaults)
    except Exception as error:  # whatever the model's own code raises
        raise CaptureError(
            f"{loaded.name} can't be traced: {_said(error)}",
            "branches on values or shapes can't be; where a module inside of the model has them, name its class with "
            "--whole CLASS, and where the model itself has, move them into such a module",
        ) from error
    module = fx.GraphModule(tracer.root, graph)
    _propagate(module, loaded, batch)
    layers = Grouping(module, batch).layers()
    if not layers:
        raise CaptureError(f"{loaded.name} computes nothing", "give a model that does more than rearrange its input")
    return TracedModel(loaded.name, module, layers, batch)


def _said(error: Exception) -> str:
    """An error of the user's code in one line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _check_classes(loaded: LoadedModel, whole: Sequence[str]) -> None:
    inside = {type(module).__name__ for module in loaded.module.modules() if module is not loaded.module}
    unknown = [each for each in whole if each not in inside]
    if unknown and unknown[0] == type(loaded.module).__name__:
        raise ConfigError(
            f"{unknown[0]} is {loaded.name} itself: as one layer it would have nothing to plan",
            f"name a class of modules inside: {', '.join(sorted(inside)) or 'there is none'}",
        )
    if unknown:
        raise ConfigError(
            f"{loaded.name} has no module of class {unknown[0]!r}", f"its classes are {', '.join(sorted(inside))}"
        )


def _defaults(loaded: LoadedModel) -> dict[str, Any]:
    """The default values of the model's further arguments, so that it may test whether one is None. Raises CaptureError
    if there are too few or too many examples, or one is for `*args`, whose number a trace does not know."""
    given = len(loaded.example(1))
    parameters = list(signature(loaded.module.forward).parameters.values())
    placed = [each for each in parameters if each.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)]
    if any(each.kind is Parameter.VAR_POSITIONAL for each in parameters[:given]):
        raise CaptureError(f"{loaded.name} takes *args", "name each tensor that forward() takes")
    if given > len(placed):
        raise CaptureError(
            f"{loaded.name} has {given} example arguments, and its forward() takes {len(placed)} by position",
            "return as many as it takes",
        )
    missing = [each for each in parameters if each not in placed[:given] and each.default is Parameter.empty]
    missing = [each for each in missing if each.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)]
    keywords = [each.name for each in missing if each.kind is Parameter.KEYWORD_ONLY]
    if keywords:
        raise CaptureError(
            f"{loaded.name}'s forward() needs {', '.join(keywords)} by keyword, and examples are given by position",
            "give what it needs a default, or let the factory return a module whose forward() takes it by position",
        )
    if missing:
        raise CaptureError(
            f"{loaded.name}'s forward() needs {', '.join(each.name for each in missing)}, too",
            "let the factory return the module and an example of each: return model, (x, mask)",
        )
    return {
        each.name: each.default
        for each in parameters
        if each not in placed[:given] and each.default is not Parameter.empty
    }


class _Operators(TorchDispatchMode):
    """Records the names of dispatched operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class _Shapes(fx.Interpreter):
    """Runs the graph over fake tensors. Each node keeps its result, its floating-point operations and its operators'
    names."""

    def run_node(self, n: fx.Node) -> Any:
        with FlopCounterMode(display=False) as counter, _Operators() as operators:
            result = super().run_node(n)
        n.meta["operators"] = operators.names
        flops = counter.get_total_flops()
        if n.op == "call_module":
            flops = max(flops, _recurrent(self.module.get_submodule(str(n.target)), tensors(result)))
        n.meta["val"], n.meta["flops"] = result, flops
        return result


def _recurrent(module: nn.Module, made: Sequence[torch.Tensor]) -> int:
    """Operations of a recurrent layer, which torch does not count: each weight is used once a step of each sequence."""
    if not isinstance(module, nn.RNNBase):
        return 0
    wide = (module.proj_size or module.hidden_size) * (2 if module.bidirectional else 1)
    return 2 * sum(each.numel() for each in module.parameters() if each.dim() > 1) * (made[0].numel() // wide)


def _propagate(module: fx.GraphModule, loaded: LoadedModel, batch: int) -> None:
    """Infer every node's result for a batch, without computing: parameters and buffers stay as they are. Raises
    CaptureError, which names the layer, if it can't take such a batch."""
    plain = sdpa_kernel(SDPBackend.MATH)  # as products, which are counted on every device
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad(), plain, _quiet():
        shapes = _Shapes(module)
        given = [mode.from_tensor(each) for each in loaded.example(batch)]
        shapes.args_iter = iter(given)
        fused = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)  # its single operator for attention is not counted
        try:
            for node in module.graph.nodes:  # Interpreter.run would start the thread of a progress bar
                try:
                    shapes.env[node] = shapes.run_node(node)
                except Exception as error:  # whatever the model's own code raises
                    sizes = " and ".join(str(list(each.shape)) for each in given)
                    raise CaptureError(
                        f"{loaded.name} fails on a batch of {batch} (input {sizes}) in"
                        f" {module_path(node) or node.name}: {_said(error)}",
                        _remedy(loaded.name),
                    ) from error
        finally:
            torch.backends.mha.set_fastpath_enabled(fused)


def _remedy(name: str) -> str:
    if name in BUILT_IN:
        return f"leave --input out: {name} takes samples of {','.join(map(str, BUILT_IN[name][1]))}"
    return (
        "check the shape of one sample (--input, or what the factory returns); a batch's size that is written into the"
        " model, as in x.view(8, -1), has to come from its input"
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """A block without torch's log of failures on fake tensors: the error says it."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before
