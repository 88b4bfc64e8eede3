"""The nodes of a traced torch model as layers: which node belongs to which, what each reads, and how large it is. Imports torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

CHEAP_MODULES = (
    nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.LeakyReLU, nn.ELU, nn.Hardswish, nn.Softmax, nn.Dropout,
    nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.LayerNorm, nn.GroupNorm,
    nn.Identity,
)  # fmt: skip
VIEW_MODULES = (nn.Flatten, nn.Unflatten)
VIEWS = {
    "view", "reshape", "flatten", "unflatten", "permute", "transpose", "squeeze", "unsqueeze", "getitem", "chunk", "split",
    "unbind", "contiguous", "expand", "t", "movedim", "swapaxes", "narrow", "select", "detach", "to", "float",
}  # fmt: skip
CHEAP = {
    "relu", "relu_", "gelu", "silu", "sigmoid", "tanh", "softmax", "log_softmax", "dropout", "add", "iadd", "sub", "mul",
    "imul", "truediv", "div", "neg", "exp", "sqrt", "rsqrt", "pow", "clamp", "leaky_relu", "layer_norm", "batch_norm",
    "mean", "masked_fill", "radd", "rmul",
}  # fmt: skip


@dataclass
class Traced:
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
    """The name of what a node calls."""
    target = node.target
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


def module_path(node: fx.Node) -> str:
    """The module that a node calls, or runs in: as named_modules has it, "" for the model itself."""
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
    """Puts nodes into layers."""

    def __init__(self, module: fx.GraphModule, batch: int) -> None:
        self.module, self.batch = module, batch
        self.owner: dict[fx.Node, Traced | None] = {}  # None: the model's input
        self.base: dict[fx.Node, fx.Node] = {}  # what a view is a view of
        self.constant: dict[
            fx.Node, list[fx.Node]
        ] = {}  # what is the same for every sample, and the nodes it is made by
        self.found: list[Traced] = []
        self.seen: set[str] = set()
        self.names: set[str] = set()

    def layers(self) -> list[Traced]:
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
            self.constant[node] = made_by  # parameters, shapes, and what follows from them
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
            layer = Traced(self._name(node), self._kind(node), [])
            self.found.append(layer)
        self.base[node], self.owner[node] = node, layer
        self._add(layer, node)
        for each in varying:
            before = self.owner[each]
            if before is not None and before is not layer and before.name not in layer.inputs:
                layer.inputs.append(before.name)
                self._leaves(before)

    def _add(self, layer: Traced, node: fx.Node) -> None:
        made_by = [made for each in node.all_input_nodes for made in self.constant.get(each, [])]
        for each in [*made_by, node]:
            if each not in layer.nodes:
                layer.nodes.append(each)
            layer.parameter_bytes += self._parameters(each)
        layer.flops += node.meta["flops"] / self.batch

    def _parameters(self, node: fx.Node) -> int:
        """Bytes of the parameters a node uses that no node before it used."""
        found: list[tuple[str, Any]] = []
        if node.op == "get_attr":
            owner, _, leaf = str(node.target).rpartition(".")
            found = [(str(node.target), getattr(self.module.get_submodule(owner), leaf))]
        elif node.op == "call_module":
            found = [
                (f"{node.target}.{name}", each)
                for name, each in self.module.get_submodule(str(node.target)).named_parameters()
            ]
        new = [(name, each) for name, each in found if isinstance(each, nn.Parameter) and name not in self.seen]
        self.seen |= {name for name, _ in new}
        return sum(each.numel() * each.element_size() for _, each in new if each.requires_grad)

    def _is_view(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return isinstance(self.module.get_submodule(str(node.target)), VIEW_MODULES)
        return function_name(node) in VIEWS

    def _is_cheap(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return isinstance(self.module.get_submodule(str(node.target)), CHEAP_MODULES)
        return function_name(node) in CHEAP

    def _alone(self, layer: Traced, node: fx.Node) -> bool:
        """Whether nobody else reads what `node` reads of the layer."""

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

    def _leaves(self, layer: Traced) -> None:
        """Count what other layers read of this one."""
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
