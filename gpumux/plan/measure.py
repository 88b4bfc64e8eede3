"""Layer times by running the layers: forward, then backward, each alone on this device. Imports torch."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import fx

from gpumux.errors import CaptureError, ConfigError
from gpumux.plan.grouping import Traced, tensors
from gpumux.plan.layers import LayerProfile, ModelProfile, Timing
from gpumux.plan.models import Loaded
from gpumux.plan.trace import TracedModel, trace

Progress = Callable[[int, int, str], None]  # layers done, layers in all, what is being measured


def profile(
    loaded: Loaded,
    *,
    device: str,
    batches: Sequence[int],
    repeats: int = 5,
    whole: Sequence[str] = (),
    progress: Progress | None = None,
) -> ModelProfile:
    """Every layer's median time over `repeats` runs (after one that warms up) at each of `batches`, rising. The model is on
    `device` already. Raises CaptureError where it can't be traced or run, ConfigError for batches that make no sense."""
    if not batches or list(batches) != sorted(set(batches)) or batches[0] < 1:
        raise ConfigError(f"batches {list(batches)}", "give whole numbers from 1 up, rising")
    if repeats < 1:
        raise ConfigError(f"{repeats} repeats", "give 1 or more")
    traced = trace(loaded, whole=whole)
    times: dict[str, list[Timing]] = {layer.name: [] for layer in traced.layers}
    for step, batch in enumerate(batches):
        runner = _Runner(traced, loaded.example(batch), device, repeats)
        for place, layer in enumerate(traced.layers):
            if progress is not None:
                done = step * len(traced.layers) + place
                progress(done, len(batches) * len(traced.layers), f"{layer.name} at {batch}")
            try:
                times[layer.name].append(Timing(batch, *runner.layer(layer)))
            except Exception as error:  # whatever the model's own code raises
                raise CaptureError(
                    f"{layer.name} fails at a batch of {batch}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}",
                    "choose other --batches (too little memory: smaller ones; a batch norm that has but one value: larger ones); "
                    "a batch's size that is written into the model, as in x.view(8, -1), has to come from its input",
                ) from error
    return ModelProfile(
        loaded.name,
        device_name(device),
        tuple(
            LayerProfile(
                layer.name,
                layer.kind,
                tuple(layer.inputs),
                layer.output_bytes,
                layer.parameter_bytes,
                tuple(times[layer.name]),
                layer.flops,
                "measured",
            )
            for layer in traced.layers
        ),
        versions={"python": platform.python_version(), "torch": torch.__version__},
        recorded_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        note=f"medians of {repeats}, each layer alone, {torch.get_num_threads()} threads" if device == "cpu" else
        f"medians of {repeats}, each layer alone",
    )  # fmt: skip


def device_name(device: str) -> str:
    """What the device calls itself."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(torch.device(device))
    try:
        with open("/proc/cpuinfo") as file:
            found = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        found = []
    return found[0] if found else platform.machine()


class _Runner:
    """Runs a traced model layer by layer on one batch; each layer gets what those before it made."""

    def __init__(self, traced: TracedModel, arguments: Sequence[torch.Tensor], device: str, repeats: int) -> None:
        self.traced, self.device, self.repeats = traced, torch.device(device), repeats
        self.interpreter = fx.Interpreter(traced.module)
        placeholders = [node for node in traced.module.graph.nodes if node.op == "placeholder"]
        given = [each.to(self.device) for each in arguments]
        self.values: dict[fx.Node, Any] = dict(zip(placeholders, given, strict=False))
        for node in placeholders[len(given) :]:
            self.values[node] = node.args[0] if node.args else None
        self.placed = {node for layer in traced.layers for node in layer.nodes}
        self._constants()

    def layer(self, layer: Traced) -> tuple[float, float]:
        """Median seconds forward and backward. What the layer makes is kept for those behind it."""
        forward, backward = [], []
        for repeat in range(self.repeats + 1):
            ahead, back, values = self._run(layer)
            if repeat:
                forward.append(ahead)
                backward.append(back)
        self.values.update(values)
        self._constants()
        return median(forward), median(backward)

    def _run(self, layer: Traced) -> tuple[float, float, dict[fx.Node, Any]]:
        needed = {each for node in layer.nodes for each in node.all_input_nodes if each not in layer.nodes}
        env: dict[fx.Node, Any] = {}
        leaves: list[torch.Tensor] = []
        for node in needed:
            env[node] = self._fresh(self.values[node], leaves)
        wanted = [*leaves, *self._parameters(layer)]
        self._wait()
        began = time.perf_counter()
        for node in layer.nodes:
            env[node] = self._node(node, env)
        self._wait()
        ahead = time.perf_counter() - began
        outputs = [
            each
            for node in layer.nodes
            if any(user not in layer.nodes for user in node.users)
            for each in tensors(env[node])
            if each.requires_grad
        ]
        back = 0.0
        if outputs and wanted:
            gradients = [torch.ones_like(each) for each in outputs]
            self._wait()
            began = time.perf_counter()
            torch.autograd.grad(outputs, wanted, gradients, allow_unused=True)
            self._wait()
            back = time.perf_counter() - began
        return ahead, back, {node: _detached(env[node]) for node in layer.nodes}

    def _fresh(self, value: Any, leaves: list[torch.Tensor]) -> Any:
        """The same value, with a history of its own; a copy, since the layer may write to it in place."""
        if isinstance(value, torch.Tensor):
            if not value.is_floating_point():
                return value
            leaf = value.detach().requires_grad_()
            leaves.append(leaf)
            return leaf.clone()
        if isinstance(value, tuple | list):
            return type(value)([self._fresh(each, leaves) for each in value])
        return value

    def _parameters(self, layer: Traced) -> list[torch.Tensor]:
        found: dict[int, torch.Tensor] = {}
        for node in layer.nodes:
            if node.op == "call_module":
                for each in self.traced.module.get_submodule(str(node.target)).parameters():
                    found[id(each)] = each
            elif node.op == "get_attr":
                value = self._node(node, {})
                if isinstance(value, torch.nn.Parameter):
                    found[id(value)] = value
        return [each for each in found.values() if each.requires_grad]

    def _node(self, node: fx.Node, env: dict[fx.Node, Any]) -> Any:
        self.interpreter.env = {**self.values, **env}
        args, kwargs = self.interpreter.fetch_args_kwargs_from_env(node)
        return getattr(self.interpreter, node.op)(node.target, args, kwargs)

    def _constants(self) -> None:
        """Work out what belongs to no layer as soon as it can be: shapes, and what follows from them."""
        for node in self.traced.module.graph.nodes:
            ready = node not in self.values and node not in self.placed and node.op not in ("placeholder", "output")
            if ready and all(each in self.values for each in node.all_input_nodes):
                self.values[node] = self._node(node, {})

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, tuple | list):
        return type(value)([_detached(each) for each in value])
    return value
