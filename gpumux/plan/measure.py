"""Layer times: measured on this device, modelled by a roofline, or taken from steps that jobs ran. Imports torch."""

from __future__ import annotations

import contextlib
import copy
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from gpumux.device.sim.cost import FLOOR_S, product, stream
from gpumux.device.sim.spec import A100, GpuSpec
from gpumux.errors import CaptureError, ConfigError
from gpumux.plan.layers import AlgorithmTimes, AlgorithmTiming, LayerProfile, ModelProfile, Timing
from gpumux.plan.models import LoadedModel
from gpumux.plan.trace import VIEW_MODULES, VIEWS, TracedLayer, TracedModel, function_name, module_path, tensors, trace
from gpumux.program.ir import ROOT
from gpumux.program.profile import OpProfile, StepProfile

Progress = Callable[[int, int, str], None]  # layers done, layers in all, what is being measured


def profile(
    loaded: LoadedModel,
    *,
    device: str,
    batches: Sequence[int],
    repeats: int = 5,
    whole: Sequence[str] = (),
    progress: Progress | None = None,
) -> ModelProfile:
    """Every layer's median time over `repeats` runs (after a warm-up) at each of `batches`, rising: forward, then
    backward, each layer alone. The model is on `device` already. Raises CaptureError if it can't be traced or run,
    ConfigError for invalid batches."""
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
                    f"{layer.name} fails at a batch of {batch}: {type(error).__name__}:"
                    f" {(str(error).splitlines() or [''])[0]}",
                    "choose other --batches (too little memory: smaller ones; a batch norm that has but one value:"
                    " larger ones); a batch's size that is written into the model, as in x.view(8, -1), has to come"
                    " from its input",
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
    """The device's own name."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(torch.device(device))
    try:
        with open("/proc/cpuinfo") as file:
            found = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        found = []
    return found[0] if found else platform.machine()


class _Runner:
    """Runs a traced model layer by layer on one batch; each layer gets the results of those before it."""

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

    def layer(self, layer: TracedLayer) -> tuple[float, float]:
        """Median seconds forward and backward. The layer's results are kept for the layers after it."""
        forward, backward = [], []
        for repeat in range(self.repeats + 1):
            ahead, back, values = self._run(layer)
            if repeat:
                forward.append(ahead)
                backward.append(back)
        self.values.update(values)
        self._constants()
        return median(forward), median(backward)

    def _run(self, layer: TracedLayer) -> tuple[float, float, dict[fx.Node, Any]]:
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
        """The same value with an autograd history of its own; a copy, since the layer may write it in place."""
        if isinstance(value, torch.Tensor):
            if not value.is_floating_point():
                return value
            leaf = value.detach().requires_grad_()
            leaves.append(leaf)
            return leaf.clone()
        if isinstance(value, tuple | list):
            return type(value)([self._fresh(each, leaves) for each in value])
        return value

    def _parameters(self, layer: TracedLayer) -> list[torch.Tensor]:
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
        """Compute nodes that belong to no layer once they can be: shapes, and values that follow from them."""
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


# ---- Convolution algorithms: each convolution alone, by each that the device can choose from.


@dataclass(frozen=True)
class Algorithm:
    """A way to compute convolutions that torch can be set to. `fast`: oneDNN on a CPU, cudnn.benchmark on a GPU."""

    name: str
    device: str
    fast: bool
    channels_last: bool

    @contextlib.contextmanager
    def chosen(self) -> Iterator[None]:
        """torch is set to it within the block. Only this setting: torch's own `flags` reset others, too."""
        backend: Any = torch.backends.mkldnn if self.device == "cpu" else torch.backends.cudnn
        setting = "enabled" if self.device == "cpu" else "benchmark"
        before = getattr(backend, setting)
        setattr(backend, setting, self.fast)
        try:
            yield
        finally:
            setattr(backend, setting, before)

    @property
    def layout(self) -> torch.memory_format:
        return torch.channels_last if self.channels_last else torch.contiguous_format


def algorithms(device: str) -> tuple[Algorithm, ...]:
    """Those of "cpu" (oneDNN and torch's own) or "cuda" (cuDNN's by its heuristics or as it times them; never run), in
    both layouts. A CPU without oneDNN has torch's own alone."""
    fast, plain = ("onednn", "native") if device == "cpu" else ("cudnn.benchmark", "cudnn")
    there = device != "cpu" or torch.backends.mkldnn.is_available()
    return tuple(
        Algorithm(name + (" channels-last" if last else ""), device, name == fast, last)
        for name in ((fast, plain) if there else (plain,))
        for last in (False, True)
    )


def convolutions(
    loaded: LoadedModel,
    *,
    device: str,
    batches: Sequence[int],
    repeats: int = 5,
    progress: Progress | None = None,
) -> tuple[AlgorithmTimes, ...]:
    """Every Conv2d of a model by every algorithm: median seconds over `repeats` runs, after a warm-up, forward and
    backward at each of `batches`. Changing the layout of input and result is not in them. A convolution that runs
    several times is timed for its first call."""
    found: dict[tuple[str, str], list[AlgorithmTiming]] = {}
    choices = algorithms(device)
    for step, batch in enumerate(batches):
        inputs = _convolution_inputs(loaded, batch, device)
        for place, (name, given) in enumerate(inputs.items()):
            for number, algorithm in enumerate(choices):
                if progress is not None:
                    done = (step * len(inputs) + place) * len(choices) + number
                    whole = len(batches) * len(inputs) * len(choices)
                    progress(done, whole, f"{name} by {algorithm.name} at {batch}")
                module = loaded.module.get_submodule(name)
                timing = AlgorithmTiming(batch, *_convolution(module, given, algorithm, repeats))
                found.setdefault((name, algorithm.name), []).append(timing)
    return tuple(AlgorithmTimes(name, algorithm, tuple(times)) for (name, algorithm), times in found.items())


def _convolution_inputs(loaded: LoadedModel, batch: int, device: str) -> dict[str, torch.Tensor]:
    """What each convolution gets first, by its name."""
    found: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(module: nn.Module, given: tuple[Any, ...]) -> None:
            found.setdefault(name, given[0].detach().clone())

        return hook

    hooks = [
        module.register_forward_pre_hook(keep(name))
        for name, module in loaded.module.named_modules()
        if isinstance(module, nn.Conv2d)
    ]
    try:
        with torch.no_grad():
            loaded.module(*[each.to(device) for each in loaded.example(batch)])
    finally:
        for each in hooks:
            each.remove()
    return found


def _convolution(
    module: nn.Module, given: torch.Tensor, algorithm: Algorithm, repeats: int
) -> tuple[float, float, int]:
    """Median seconds forward and backward, and the most bytes of workspace."""
    on_card = given.device.type == "cuda"
    layer: nn.Module = copy.deepcopy(module).to(memory_format=algorithm.layout)  # type: ignore[call-overload]
    leaf = given.to(memory_format=algorithm.layout, copy=True).requires_grad_()
    wanted = [leaf, *(each for each in layer.parameters() if each.requires_grad)]
    forward, backward, workspace = [], [], 0

    def timed(run: Callable[[], Any]) -> tuple[float, int, Any]:
        """Seconds, workspace and result."""
        before = 0
        if on_card:
            torch.cuda.synchronize(given.device)
            torch.cuda.reset_peak_memory_stats(given.device)
            before = torch.cuda.memory_allocated(given.device)
        began = time.perf_counter()
        made = run()
        if not on_card:
            return time.perf_counter() - began, 0, made
        torch.cuda.synchronize(given.device)
        seconds = time.perf_counter() - began
        kept = sum(each.nbytes for each in tensors(made))
        return seconds, max(0, torch.cuda.max_memory_allocated(given.device) - before - kept), made

    with algorithm.chosen():
        for repeat in range(repeats + 1):
            ahead, used, made = timed(lambda: layer(leaf))
            gradient = torch.ones_like(made)
            back, also, _ = timed(partial(torch.autograd.grad, made, wanted, gradient))
            if repeat:
                forward.append(ahead)
                backward.append(back)
                workspace = max(workspace, used, also)
    return median(forward), median(backward), workspace


# ---- Modelled layer times: the simulator's roofline over tiles (gpumux/device/sim/cost.py) for a named GPU. All
# results are marked as modelled. Imports torch.


BATCHES = tuple(1 << i for i in range(11))


def roofline_profile(traced: TracedModel, spec: GpuSpec, batches: Sequence[int] = BATCHES) -> ModelProfile:
    """Every layer modelled on that GPU, at each of `batches`. Raises CaptureError for one that mixes samples. float32
    products run as TF32, as on the simulator."""
    layers = tuple(modelled(traced, layer, spec, batches) for layer in traced.layers)
    note = "Modelled from layer shapes by gpumux.plan.measure; nothing here was measured."
    return ModelProfile(traced.name, spec.name, layers, note=note)


def modelled(traced: TracedModel, layer: TracedLayer, spec: GpuSpec, batches: Sequence[int]) -> LayerProfile:
    """One layer by the roofline."""
    times = []
    for batch in batches:
        costs = [node_seconds(traced, node, spec, batch) for node in layer.nodes]
        times.append(Timing(batch, sum(forward for forward, _ in costs), sum(backward for _, backward in costs)))
    return LayerProfile(
        layer.name,
        layer.kind,
        tuple(layer.inputs),
        layer.output_bytes,
        layer.parameter_bytes,
        tuple(times),
        layer.flops,
        "model",
    )


def node_seconds(traced: TracedModel, node: fx.Node, spec: GpuSpec, batch: int) -> tuple[float, float]:
    """Seconds of one node forward and backward. The backward pass of a product is two products. That of other nodes
    reads the inputs and the gradients, and writes as much as the inputs. Modules with parameters move those, too."""
    made = tensors(node.meta["val"])
    if not made or _free(traced, node):
        return 0.0, 0.0
    item = made[0].element_size()
    module = traced.module.get_submodule(str(node.target)) if node.op == "call_module" else None
    out = [batch * each.numel() // traced.batch for each in made]
    given = [
        batch * each.numel() // traced.batch for source in node.all_input_nodes for each in tensors(source.meta["val"])
    ]
    if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
        wide = module.out_features if isinstance(module, nn.Linear) else module.out_channels
        if out[0] < wide:
            raise CaptureError(
                f"layer {node.target!r} makes less than one row for each sample of a batch of {traced.batch}: it mixes"
                " samples, or the batch's size is written into the model",
                "plan a model that keeps samples apart, with the batch in dimension 0 of all that its layers take",
            )
    peak = spec.flops["tf32" if item == 4 else "float16" if item == 2 else "float32"]
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        taps = prod(module.kernel_size)
        pixels, n = out[0] // module.out_channels, module.out_channels // module.groups
        return _products(pixels, n, module.in_channels // module.groups, taps, item, peak, spec, module.groups)
    if isinstance(module, nn.Linear):
        return _products(out[0] // module.out_features, module.out_features, module.in_features, 1, item, peak, spec, 1)
    flops = node.meta["flops"] * batch / traced.batch
    weights = 0 if module is None else sum(each.numel() * each.element_size() for each in module.parameters())
    nbytes = item * (sum(given) + sum(out)) + weights
    if flops:
        forward = max(flops / (peak * spec.product_efficiency), nbytes / spec.bandwidth, FLOOR_S)
        backward = max(2 * flops / (peak * spec.product_efficiency), 2 * nbytes / spec.bandwidth, FLOOR_S)
        return forward, backward
    forward = stream(sum(out), nbytes, spec).seconds
    return forward, stream(sum(out), nbytes + item * sum(given), spec).seconds


def _products(
    rows: int, n: int, k: int, taps: int, item: int, peak: float, spec: GpuSpec, groups: int
) -> tuple[float, float]:
    """A layer whose forward pass is [rows, k * taps] x [k * taps, n], `groups` times. An implicit convolution moves its
    image once, not once a tap: repeated reads are served by caches."""
    nbytes = item * groups * (rows * k + k * taps * n + rows * n)
    forward = product(rows, n, k * taps, nbytes, peak, spec, groups).seconds
    given = product(rows, k, n * taps, nbytes, peak, spec, groups).seconds
    weight = product(n, k * taps, rows, nbytes, peak, spec, groups).seconds
    return forward, given + weight


def _free(traced: TracedModel, node: fx.Node) -> bool:
    """Whether a node takes no time: views, parameters and values that follow from them alone."""
    if node.op in ("get_attr", "placeholder"):
        return True
    if node.op == "call_module":
        return isinstance(traced.module.get_submodule(str(node.target)), (*VIEW_MODULES, nn.Identity))
    return function_name(node) in VIEWS


# ---- Layer times from steps that gpumux jobs ran: profiles as `gpumux jobs profile` writes them, one for each batch
# size, mapped to a traced model's layers. Imports torch.
#
# A profile names the module that each operator ran in, as the user's model does; the trace names its layers the same
# way. Operators inside a module that the trace treats as one layer belong to that layer. If several layers have a part
# in a module (a rectifier used twice, additions and products of a block itself), its time is divided in proportion to
# the modelled times. Operators of no module, the loss and the optimizer, are left out, as when layers are measured
# alone. A step that ran in microbatches gives the times of one microbatch.


SIZED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding)  # one operator makes their output
ACTIVATIONS = frozenset({
    "relu", "gelu", "silu", "mish", "sigmoid", "tanh", "elu", "leaky_relu", "hardtanh", "hardswish", "hardsigmoid",
    "softplus", "log_sigmoid_forward", "_prelu_kernel", "rrelu_with_noise",
})  # fmt: skip
RECORD = "record one of a training step with `gpumux jobs profile NAME -o FILE`, of a job submitted with model="


def steps_profile(traced: TracedModel, steps: Sequence[StepProfile]) -> ModelProfile:
    """The model's layers with the times that `steps` have, one step for each batch size, all of one device. Raises
    ConfigError for a step of another model, input or device, or one without layers or backward pass."""
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
        LayerProfile(layer.name, layer.kind, tuple(layer.inputs), layer.output_bytes, layer.parameter_bytes,
                     tuple(timings),
                     layer.flops, "measured" if measured else "model")
        for layer, timings in zip(traced.layers, times, strict=True)
    ]  # fmt: skip
    note = (
        f"from steps of {', '.join(sorted({step.name or 'a job' for step in steps}))}; {nowhere / len(steps):.0%} of"
        " them is of no layer"
    )
    parted = [f"{each.samples} of {each.step.batch}" for each in found if each.samples != each.step.batch]
    if parted:
        note += f"; microbatches of {', '.join(parted)} samples"
    if shares.shared:
        note += f"; shared out as modelled: {_some(sorted(shares.shared))}"
    first = found[0].step
    return ModelProfile(traced.name, first.device, tuple(layers), first.versions, first.recorded_at, note)


def _check(steps: Sequence[StepProfile]) -> None:
    """Raise ConfigError unless each is of a training step of a model, and all of one device."""
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
    """Seconds of a step's layers, (forward, backward), for `samples` of it: all of its batch, or one microbatch."""

    step: StepProfile
    samples: int
    layers: list[tuple[float, float]]


@dataclass
class _Part:
    """One node that runs in a module: its layer, and its modelled time."""

    layer: int
    node: fx.Node
    forward: float
    backward: float


@dataclass
class _Module:
    """The nodes that run in one module, by its path. `leaf`: the trace treats the module as one layer."""

    parts: list[_Part] = field(default_factory=list)
    leaf: bool = False


class _Shares:
    """Assigns a module's time to a trace's layers. `shared` are modules whose time went to several."""

    def __init__(self, traced: TracedModel) -> None:
        self.traced = traced
        self.shared: set[str] = set()
        self.modules: dict[str, _Module] = {}
        for number, layer in enumerate(traced.layers):
            for node in layer.nodes:
                module = self.modules.setdefault(module_path(node) or ROOT, _Module())
                module.leaf |= node.op == "call_module"
                module.parts.append(_Part(number, node, *node_seconds(traced, node, A100, traced.batch)))

    def seconds(self, step: StepProfile) -> _Taken:
        """Time of each layer. If the step ran in microbatches, each layer ran once for each of them."""
        what = f"the profile of {step.name!r} (batch {step.batch})"
        ops: dict[str, list[OpProfile]] = {}
        for op in step.ops:
            if op.layer is not None:
                ops.setdefault(op.layer, []).append(op)
        strange = [path for path in ops if self._module(path) is None]
        if strange:
            raise ConfigError(
                f"{what} has layers that {self.traced.name} has not: {_some(strange)}",
                f"name the model that the job trains; {self.traced.name} has"
                f" {_some([layer.name for layer in self.traced.layers])}",
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
        """The trace's entry of a module, or of the module around it that it treats as one layer."""
        found = self.modules.get(path)
        while found is None and path not in ("", ROOT):
            path = path.rpartition(".")[0]
            around = self.modules.get(path or ROOT)
            if around is not None and around.leaf:
                found = around
        return found

    def _split(self, path: str, module: _Module, backward: bool) -> dict[int, float]:
        """Shares of the layers that have a part in a module; they sum to 1."""
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
        """Number of microbatches of the step: how often the operator that makes a module's output ran for each time
        that the trace calls the module. Over all samples it has to make as much as the trace's nodes do."""
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
                    made.setdefault(op.target, []).append(prod(op.shapes[-1]))  # the output's shape is last
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
        """Compare activations by their operators, since sizes do not depend on the activation."""
        recorded: dict[int, set[str]] = {}
        for path, those in ops.items():
            names = {_activation(op.target.split(".")[1]) for op in those if not op.backward and op.target.count(".")}
            recorded.setdefault(id(self._module(path)), set()).update(names)
        for path, module in self.modules.items():
            if module.leaf and any(isinstance(m, nn.RNNBase) for m in self.traced.module.get_submodule(path).modules()):
                continue  # one operator or many, depending on the device
            wanted = {_activation(name) for part in module.parts for name in part.node.meta["operators"]} & ACTIVATIONS
            given = recorded.get(id(module), set()) & ACTIVATIONS
            if wanted != given:
                raise ConfigError(
                    f"{what} has {' and '.join(sorted(given)) or 'no activation'} in {path!r}, and {self.traced.name}"
                    f" has {' and '.join(sorted(wanted)) or 'none'}",
                    "name the model that the job trains",
                )


def _numel(node: fx.Node) -> int:
    return sum(each.numel() for each in tensors(node.meta["val"]))


def _activation(name: str) -> str:
    """An operator's name without the underscore of in-place variants."""
    return name.rstrip("_")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
