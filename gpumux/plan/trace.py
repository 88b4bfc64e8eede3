"""A torch model's layers and how they are connected, by tracing it symbolically (torch.fx). Imports torch.

torch's own modules are the leaves; what lies between them (additions, concatenations, attention) is traced operation by
operation. A layer is named as its module is in the model. Views cost nothing and belong to what they are a view of.
Activations, norms and other cheap operations belong to the layer before them where nobody else reads that, so a
convolution, its batch norm and its rectifier are one layer, as in DeepPool's table 1. The loss and the optimizer are left out.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from gpumux.errors import CaptureError, ConfigError
from gpumux.plan.grouping import Grouping, Traced, module_path, tensors
from gpumux.plan.models import BUILT_IN, Loaded


@dataclass
class TracedModel:
    """`module` computes what the model does, node by node, for any batch; its nodes carry `meta["val"]`, what they make
    of a batch of `batch` samples."""

    name: str
    module: fx.GraphModule
    layers: list[Traced]
    batch: int


class _Tracer(fx.Tracer):
    def __init__(self, whole: Sequence[str]) -> None:
        super().__init__()
        self.whole = set(whole)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m).__name__ in self.whole or super().is_leaf_module(m, module_qualified_name)


def trace(loaded: Loaded, *, batch: int = 2, whole: Sequence[str] = ()) -> TracedModel:
    """`whole`: class names of modules that are one layer each. Raises CaptureError for a model that can't be traced,
    ConfigError for a class that it has no module of."""
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
    """An error of somebody's own code in one line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _check_classes(loaded: Loaded, whole: Sequence[str]) -> None:
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


def _defaults(loaded: Loaded) -> dict[str, Any]:
    """What the model's further arguments are when nobody gives them, so that it may ask whether one is None. Raises
    CaptureError where an example is for `*args`: how many there are is not known to a trace; and where the examples are
    too few or too many."""
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
    """Notes the names of the operators that are dispatched."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class _Shapes(fx.Interpreter):
    """Runs the graph over fake tensors; each node keeps its result, its floating-point operations and its operators' names."""

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
    """torch counts nothing of its recurrent layers: each weight is used once for every step of every sequence."""
    if not isinstance(module, nn.RNNBase):
        return 0
    wide = (module.proj_size or module.hidden_size) * (2 if module.bidirectional else 1)
    return 2 * sum(each.numel() for each in module.parameters() if each.dim() > 1) * (made[0].numel() // wide)


def _propagate(module: fx.GraphModule, loaded: Loaded, batch: int) -> None:
    """Work out what every node makes of a batch, without computing anything: parameters and buffers stay as they are. Raises
    CaptureError, which names the layer, where it takes no such batch."""
    plain = sdpa_kernel(SDPBackend.MATH)  # as products, which are counted whatever the device
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad(), plain, _quiet():
        shapes = _Shapes(module)
        given = [mode.from_tensor(each) for each in loaded.example(batch)]
        shapes.args_iter = iter(given)
        fused = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)  # attention in one operator that nobody counts
        try:
            for node in module.graph.nodes:  # Interpreter.run would start the thread of a progress bar
                try:
                    shapes.env[node] = shapes.run_node(node)
                except Exception as error:  # whatever the model's own code raises
                    sizes = " and ".join(str(list(each.shape)) for each in given)
                    raise CaptureError(
                        f"{loaded.name} fails on a batch of {batch} (input {sizes}) in {module_path(node) or node.name}: {_said(error)}",
                        _remedy(loaded.name),
                    ) from error
        finally:
            torch.backends.mha.set_fastpath_enabled(fused)


def _remedy(name: str) -> str:
    if name in BUILT_IN:
        return f"leave --input out: {name} takes samples of {','.join(map(str, BUILT_IN[name][1]))}"
    return (
        "check the shape of one sample (--input, or what the factory returns); a batch's size that is written into the model, "
        "as in x.view(8, -1), has to come from its input"
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's own log of what fails on fake tensors: the error says it."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before
