"""Layer times from steps that gpumux jobs ran: profiles as `gpumux jobs profile` writes them, one for each batch size, put
onto a traced model's layers. Imports torch.

A profile names the module that each operator ran in, as the user's model does; the trace names its layers the same way. What runs
inside of a module that the trace takes for one layer is that layer's. Where several layers have a part in a module (a rectifier
used twice, what a block adds and multiplies itself), its time is shared out as it is modelled. Operators of no module, the
loss and the optimizer, are left out, as they are when layers are measured alone. A step that ran in microbatches says what one
of them takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from torch import fx, nn

from gpumux.device.sim.spec import A100
from gpumux.errors import ConfigError
from gpumux.plan import roofline
from gpumux.plan.grouping import module_path, tensors
from gpumux.plan.layers import LayerProfile, ModelProfile, Timing
from gpumux.plan.trace import TracedModel
from gpumux.program.layers import ROOT
from gpumux.program.profile import OpProfile, StepProfile

SIZED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding)  # one operator makes their output
ACTIVATIONS = frozenset({
    "relu", "gelu", "silu", "mish", "sigmoid", "tanh", "elu", "leaky_relu", "hardtanh", "hardswish", "hardsigmoid", "softplus",
    "log_sigmoid_forward", "_prelu_kernel", "rrelu_with_noise",
})  # fmt: skip
RECORD = "record one of a training step with `gpumux jobs profile NAME -o FILE`, of a job submitted with model="


def profile(traced: TracedModel, steps: Sequence[StepProfile]) -> ModelProfile:
    """The model's layers with the times that `steps` have, one for each batch size, all of one device. Raises ConfigError
    where one is of another model or input, of another device, has no layers or no backward pass."""
    _check(steps)
    shares = _Shares(traced)
    found = sorted([shares.seconds(step) for step in steps], key=lambda each: each.samples)
    batches = [each.samples for each in found]
    twice = [batch for batch in batches if batches.count(batch) > 1]
    if twice:
        raise ConfigError(f"two profiles are of batches of {twice[0]}", "give one for each batch size")
    times: list[list[Timing]] = [[] for _ in traced.layers]
    nowhere = 0.0
    for taken in found:
        for each, (forward, backward) in zip(times, taken.layers, strict=True):
            each.append(Timing(taken.samples, forward, backward))
        step = taken.step
        nowhere += sum(op.seconds for op in step.ops if op.layer is None) / step.seconds if step.seconds else 0.0
    measured = all(op.source == "measured" for step in steps for op in step.ops if op.layer is not None)
    layers = [
        LayerProfile(layer.name, layer.kind, tuple(layer.inputs), layer.output_bytes, layer.parameter_bytes, tuple(timings),
                     layer.flops, "measured" if measured else "model")
        for layer, timings in zip(traced.layers, times, strict=True)
    ]  # fmt: skip
    note = f"from steps of {', '.join(sorted({step.name or 'a job' for step in steps}))}; {nowhere / len(steps):.0%} of them is of no layer"
    parted = [f"{each.samples} of {each.step.batch}" for each in found if each.samples != each.step.batch]
    if parted:
        note += f"; microbatches of {', '.join(parted)} samples"
    if shares.shared:
        note += f"; shared out as modelled: {_some(sorted(shares.shared))}"
    first = found[0].step
    return ModelProfile(traced.name, first.device, tuple(layers), first.versions, first.recorded_at, note)


def _check(steps: Sequence[StepProfile]) -> None:
    """Raises ConfigError unless each is of a training step of a model, and all of one device."""
    if not steps:
        raise ConfigError("no profiles of steps", RECORD)
    for step in steps:
        if step.batch is None:
            raise ConfigError(f"the profile of {step.name!r} does not say how large its batch is", RECORD)
        if all(op.layer is None for op in step.ops):
            raise ConfigError(
                f"the profile of {step.name!r} (batch {step.batch}) does not say whose layer any operator is", RECORD
            )
        if not any(op.layer is not None and op.backward for op in step.ops):
            raise ConfigError(
                f"the profile of {step.name!r} (batch {step.batch}) has no backward pass",
                "name a program that trains with --program when you record it",
            )
    devices = sorted({step.device for step in steps})
    if len(devices) > 1:
        raise ConfigError(f"profiles of several devices: {_some(devices)}", "give those of one")


class _Taken(NamedTuple):
    """What a step's layers took for `samples` of it, (forward, backward): all of its batch, or one microbatch."""

    step: StepProfile
    samples: int
    layers: list[tuple[float, float]]


@dataclass
class _Part:
    """One node that runs in a module: its layer, and what it is modelled to take."""

    layer: int
    node: fx.Node
    forward: float
    backward: float


@dataclass
class _Module:
    """What runs in one module, by its path. `leaf`: the trace takes all inside for one layer."""

    parts: list[_Part] = field(default_factory=list)
    leaf: bool = False


class _Shares:
    """Which of a trace's layers a module's time goes to. `shared` are modules whose time went to several."""

    def __init__(self, traced: TracedModel) -> None:
        self.traced = traced
        self.shared: set[str] = set()
        self.modules: dict[str, _Module] = {}
        for number, layer in enumerate(traced.layers):
            for node in layer.nodes:
                module = self.modules.setdefault(module_path(node) or ROOT, _Module())
                module.leaf |= node.op == "call_module"
                module.parts.append(_Part(number, node, *roofline.node_seconds(traced, node, A100, traced.batch)))

    def seconds(self, step: StepProfile) -> _Taken:
        """What each layer took. Where the step ran in microbatches, each layer ran once for each of them."""
        what = f"the profile of {step.name!r} (batch {step.batch})"
        ops: dict[str, list[OpProfile]] = {}
        for op in step.ops:
            if op.layer is not None:
                ops.setdefault(op.layer, []).append(op)
        strange = [path for path in ops if self._module(path) is None]
        if strange:
            raise ConfigError(
                f"{what} has layers that {self.traced.name} has not: {_some(strange)}",
                f"name the model that the job trains; {self.traced.name} has {_some([layer.name for layer in self.traced.layers])}",
            )
        found = [[0.0, 0.0] for _ in self.traced.layers]
        seen: set[int] = set()
        self._check_activations(what, ops)
        parts = self._microbatches(what, ops, step.batch or 1)
        for path, those in ops.items():
            module = self._module(path)
            assert module is not None
            for backward in (False, True):
                total = sum(op.seconds for op in those if op.backward == backward)
                for layer, share in self._split(path, module, backward).items():
                    found[layer][backward] += share * total / parts
                    seen.add(layer)
        for number, traced in enumerate(self.traced.layers):
            if number not in seen and (traced.parameter_bytes or traced.flops):
                raise ConfigError(
                    f"{what} has no operator of layer {traced.name!r}", "name the model that the job trains"
                )
        return _Taken(step, (step.batch or 1) // parts, [(forward, backward) for forward, backward in found])

    def _module(self, path: str) -> _Module | None:
        """What the trace has of a module, or of the one around it that it takes for one layer."""
        found = self.modules.get(path)
        while found is None and path not in ("", ROOT):
            path = path.rpartition(".")[0]
            around = self.modules.get(path or ROOT)
            if around is not None and around.leaf:
                found = around
        return found

    def _split(self, path: str, module: _Module, backward: bool) -> dict[int, float]:
        """Shares of the layers that have a part in a module, 1 together."""
        weights: dict[int, float] = {}
        for part in module.parts:
            weights[part.layer] = weights.get(part.layer, 0.0) + (part.backward if backward else part.forward)
        whole = sum(weights.values())
        if not whole:
            weights = dict.fromkeys(weights, 1.0)
            whole = float(len(weights))
        taking = {layer: weight / whole for layer, weight in weights.items() if weight}
        if len(taking) > 1:
            self.shared.add(path)
        return taking

    def _microbatches(self, what: str, ops: Mapping[str, Sequence[OpProfile]], batch: int) -> int:
        """How many microbatches the step ran in: as often as the operator that makes a module's output ran for each time that
        the trace calls the module. Over all samples it has to make as much as the trace's nodes do."""
        found: dict[int, str] = {}
        for path, those in ops.items():
            nodes = [part.node for part in self.modules[path].parts] if path in self.modules else []
            if not nodes or any(node.op != "call_module" for node in nodes):
                continue
            if not isinstance(self.traced.module.get_submodule(path), SIZED):
                continue
            wanted = (
                sum(each.numel() for node in nodes for each in tensors(node.meta["val"])) * batch // self.traced.batch
            )
            made: dict[str, list[int]] = {}
            for op in those:
                if not op.backward and op.shapes:
                    made.setdefault(op.target, []).append(prod(op.shapes[-1]))  # the output's come last
            fitting = [sizes for sizes in made.values() if sum(sizes) == wanted]
            if made and not fitting:
                most = max(sum(sizes) for sizes in made.values())
                raise ConfigError(
                    f"{what} has layer {path!r} make {most // batch} numbers a sample, and {self.traced.name} makes "
                    f"{wanted // batch}",
                    "give the job's model, and --input the size of one of the job's samples",
                )
            for sizes in fitting[:1]:
                parts, odd = divmod(len(sizes), len(nodes))
                if odd or batch % parts or len(set(sizes)) > len({_numel(node) for node in nodes}):
                    raise ConfigError(
                        f"{what} ran layer {path!r} in {len(sizes)} parts that are not equal",
                        "record it without microbatches",
                    )
                found.setdefault(parts, path)
        if len(found) > 1:
            raise ConfigError(
                f"{what} ran {' and '.join(f'layer {path!r} {parts} times' for parts, path in sorted(found.items()))}",
                "give the job's model; record it without microbatches if it is that",
            )
        return next(iter(found), 1)

    def _check_activations(self, what: str, ops: Mapping[str, Sequence[OpProfile]]) -> None:
        """Sizes are the same whatever the activation: that is told by its operator."""
        recorded: dict[int, set[str]] = {}
        for path, those in ops.items():
            names = {_activation(op.target.split(".")[1]) for op in those if not op.backward and op.target.count(".")}
            recorded.setdefault(id(self._module(path)), set()).update(names)
        for path, module in self.modules.items():
            if module.leaf and any(isinstance(m, nn.RNNBase) for m in self.traced.module.get_submodule(path).modules()):
                continue  # one operator, or many, as the device has it
            wanted = {_activation(name) for part in module.parts for name in part.node.meta["operators"]} & ACTIVATIONS
            given = recorded.get(id(module), set()) & ACTIVATIONS
            if wanted != given:
                raise ConfigError(
                    f"{what} has {' and '.join(sorted(given)) or 'no activation'} in {path!r}, and {self.traced.name} has "
                    f"{' and '.join(sorted(wanted)) or 'none'}",
                    "name the model that the job trains",
                )


def _numel(node: fx.Node) -> int:
    return sum(each.numel() for each in tensors(node.meta["val"]))


def _activation(name: str) -> str:
    """An operator's name, whether or not it writes in place."""
    return name.rstrip("_")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
