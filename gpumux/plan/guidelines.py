"""Advice of "Distributed training guidelines": numbers of GPUs and of parameter servers (lemmas 3.1 and 3.2), modern
alternatives to servers, mini-batch sizes and convolution algorithms, and the overhead in a trace of a training loop."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf, isfinite, log2, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpumux.device.sim.cost import FLOOR_S, product
from gpumux.device.sim.spec import GpuSpec
from gpumux.errors import ConfigError
from gpumux.program import reading

if TYPE_CHECKING:
    from gpumux.plan.layers import ModelProfile
    from gpumux.plan.trace import TracedModel


SLACK = 1e-9  # keeps rounding from adding a GPU or a server


def efficiency(gpus: int, overhead: float) -> float:
    """Lemma 3.1: alpha = (1 + R_O) / (1 + G R_O), the efficiency of G GPUs: their speed-up over G. `overhead` is R_O,
    the time not hidden behind computation, divided by computation, on one GPU. Raises ConfigError unless G >= 1 and
    R_O >= 0."""
    _check(gpus, overhead)
    return (1 + overhead) / (1 + gpus * overhead)


def speedup(gpus: int, overhead: float) -> float:
    """Speed-up of G GPUs: alpha G."""
    return gpus * efficiency(gpus, overhead)


def tolerable_overhead(gpus: int, wanted: float) -> float:
    """The R_O at which `gpus` GPUs still have the efficiency `wanted` (0 to 1): (1 - alpha) / (alpha G - 1). inf if any
    overhead is tolerable. Raises ConfigError for other values."""
    _check(gpus, 0.0)
    if not 0 < wanted <= 1:
        raise ConfigError(f"an efficiency of {wanted}", "give more than 0 and at most 1")
    return (1 - wanted) / (wanted * gpus - 1) if wanted * gpus > 1 else inf


def gpus_for(wanted: float, overhead: float) -> int | None:
    """The fewest GPUs that are `wanted` times as fast as one. None if no number of GPUs is: the speed-up stays below
    (1 + R_O) / R_O."""
    _check(1, overhead)
    if not (isfinite(wanted) and wanted >= 1):
        raise ConfigError(f"a speed-up of {wanted}", "give 1 or more")
    gained = 1 + overhead - wanted * overhead
    return max(1, ceil(wanted / gained - SLACK)) if gained > 0 else None


def gpus_at(wanted: float, least: float) -> int:
    """The fewest GPUs that are `wanted` times as fast as one at the efficiency `least` (0 to 1). Raises ConfigError
    for other values."""
    _check(1, 0.0)
    if not (isfinite(wanted) and wanted >= 1):
        raise ConfigError(f"a speed-up of {wanted}", "give 1 or more")
    if not 0 < least <= 1:
        raise ConfigError(f"an efficiency of {least}", "give more than 0 and at most 1")
    return max(1, ceil(wanted / least - SLACK))


def most_speedup(overhead: float) -> float:
    """The speed-up that no number of GPUs exceeds."""
    _check(1, overhead)
    return (1 + overhead) / overhead if overhead else inf


def _check(gpus: int, overhead: float) -> None:
    if gpus < 1:
        raise ConfigError(f"{gpus} GPUs", "give 1 or more")
    if not (isfinite(overhead) and overhead >= 0):
        raise ConfigError(f"an overhead ratio of {overhead}", "give a finite number of 0 or more")


def servers(parameter_bytes: float, workers: int, bandwidth: float, compute_s: float) -> int:
    """Lemma 3.2: the fewest parameter servers, each with `bandwidth` bytes a second, that hide pulls and pushes of all
    `workers` behind `compute_s` of computation: ceil(2 S_p N_w / (B_ps T_C)). Raises ConfigError unless all are above
    0."""
    _positive(parameter_bytes=parameter_bytes, workers=workers, bandwidth=bandwidth, compute_s=compute_s)
    return max(1, ceil(2 * parameter_bytes * workers / (bandwidth * compute_s) - SLACK))


@dataclass(frozen=True)
class Exchange:
    """A way to synchronize `workers` without servers. `nbytes`: bytes that each sends (and receives) in an iteration.
    `seconds`: time of that. `hidden`: whether it fits behind the computation. `bandwidth`: the bytes a second at which
    it just fits."""

    name: str
    what: str
    nbytes: float
    seconds: float
    hidden: bool
    bandwidth: float


def exchanges(parameter_bytes: float, workers: int, bandwidth: float, compute_s: float) -> list[Exchange]:
    """The lemma's condition, I/O no longer than computation, for what replaced parameter servers: every worker serves
    1/N_w of the parameters. Raises ConfigError unless all values are above 0."""
    _positive(parameter_bytes=parameter_bytes, workers=workers, bandwidth=bandwidth, compute_s=compute_s)
    part = (workers - 1) / workers * parameter_bytes
    ways = (
        ("all-reduce", "gradients reduce-scattered and gathered (DistributedDataParallel)", 2),
        ("sharded optimizer", "gradients reduce-scattered, parameters gathered (ZeRO 1 and 2)", 2),
        (
            "sharded parameters",
            "parameters gathered for forward and backward, gradients reduce-scattered (ZeRO 3, FSDP)",
            3,
        ),
    )
    return [
        Exchange(name, what, times * part, times * part / bandwidth, times * part / bandwidth <= compute_s,
                 times * part / compute_s)
        for name, what, times in ways
    ]  # fmt: skip


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not (isfinite(value) and value > 0):
            raise ConfigError(f"{name.replace('_', ' ')} {value}", "give a finite number above 0")


# ---- Memory of a convolutional network and of its convolution algorithms ("Distributed training guidelines", equations
# 1 to 5 and table 2). Bytes; the paper counts bits. Reading a torch model imports torch.


FLOAT = 4
TILE, PATCH = 4, 6  # Winograd F(4x4, 3x3): tiles of 4 x 4 results from 6 x 6 inputs
ALGORITHMS = ("gemm", "fft", "winograd")


@dataclass(frozen=True)
class Convolution:
    """One layer, in the paper's letters: input B x H x D, output B' x H' x D', filters of F x F. `kernel`, `stride` and
    `dilation` are (height, width), since filters need not be square. `again`: the layer runs once more with weights
    that an earlier one has counted."""

    name: str
    width: int  # B
    height: int  # H
    depth: int  # D
    out_width: int
    out_height: int
    out_depth: int
    kernel: tuple[int, int]  # F
    stride: tuple[int, int] = (1, 1)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    again: bool = False

    @property
    def parameters(self) -> int:
        """Weights and biases that no other layer has counted."""
        return 0 if self.again else prod(self.kernel) * self.depth // self.groups * self.out_depth + self.out_depth

    def gemm_bytes(self, batch: int) -> float:
        """Table 2's denominator: input and output."""
        given = self.width * self.height * self.depth
        return FLOAT * batch * (given + self.out_width * self.out_height * self.out_depth)

    def fft_bytes(self, batch: int) -> float:
        """Table 2's numerator: half spectra of inputs, outputs and filters, each padded to the input's size: 2 B (H/2 +
        1) values."""
        planes = batch * (self.depth + self.out_depth) + self.depth * self.out_depth // self.groups
        return FLOAT * planes * 2 * self.width * (self.height // 2 + 1)

    def winograd_bytes(self, batch: int) -> float:
        """Transformed inputs, outputs and filters of F(4x4, 3x3)."""
        tiles = batch * ceil(self.out_width / TILE) * ceil(self.out_height / TILE)
        filters = self.depth * self.out_depth // self.groups
        return FLOAT * PATCH**2 * (tiles * (self.depth + self.out_depth) + filters)

    def workspace(self, algorithm: str, batch: int) -> float:
        """M(k, l) of equation 6: the algorithm's memory beyond inputs and outputs, which equation 5 has set aside. An
        implicit GEMM needs none."""
        if algorithm == "gemm":
            return 0.0
        return self.fft_bytes(batch) if algorithm == "fft" else self.winograd_bytes(batch)

    def can(self, algorithm: str) -> bool:
        """Whether the algorithm applies: Winograd's tiles are for 3 x 3 filters without stride or dilation; FFT and
        Winograd are for layers without groups."""
        if algorithm == "gemm":
            return True
        if self.groups > 1:
            return False
        return algorithm == "fft" or (self.kernel == (3, 3) and self.stride == self.dilation == (1, 1))

    def seconds(self, algorithm: str, batch: int, spec: GpuSpec) -> float:
        """T(k, l), forward and backward, modelled: three products of equal work, at the rate of float32 without tensor
        cores for all algorithms, so that they are comparable. FFT and Winograd also transform what they read and
        write."""
        rate = spec.flops["float32"]
        pixels, n = batch * self.out_width * self.out_height, self.out_depth // self.groups
        k = self.depth // self.groups * prod(self.kernel)
        nbytes = int(self.gemm_bytes(batch)) + FLOAT * self.groups * n * k
        if algorithm == "gemm":
            each = product(pixels, n, k, nbytes, rate, spec, self.groups).seconds
            other = product(n, k, pixels, nbytes, rate, spec, self.groups).seconds
            return 2 * each + other
        workspace = self.workspace(algorithm, batch)
        if algorithm == "fft":
            points = self.width * (self.height // 2 + 1)
            multiply = 8 * points * batch * self.depth * self.out_depth  # complex, from real parts
            transform = 5 * log2(max(2, self.width * self.height)) * workspace / FLOAT
        else:
            tiles = batch * ceil(self.out_width / TILE) * ceil(self.out_height / TILE)
            multiply = 2 * PATCH**2 * tiles * self.depth * self.out_depth
            transform = 4 * workspace / FLOAT
        flops_s = (multiply + transform) / (rate * spec.product_efficiency)
        return 3 * max(flops_s, (nbytes + 2 * workspace) / spec.bandwidth, FLOOR_S)


@dataclass(frozen=True)
class Cnn:
    """`convolutions` in order; `maps`: values of one sample's input and of every layer's output in the feature
    extraction part; `dense`: neurons of the classification part, its input first."""

    name: str
    convolutions: tuple[Convolution, ...]
    maps: tuple[int, ...]
    dense: tuple[int, ...]

    def feature_bytes(self, batch: int) -> float:
        """Equation 2: input and outputs of all layers of the feature extraction part."""
        return FLOAT * batch * sum(self.maps)

    def parameter_bytes(self) -> float:
        """Equation 3: weights and biases of the convolutions, three times: for themselves, a sample's gradients and the
        batch's."""
        return 3 * FLOAT * sum(c.parameters for c in self.convolutions)

    def classifier_bytes(self) -> float:
        """Equation 4 as printed: outputs once, weights three times, one bias a layer three times."""
        weights = sum(a * b for a, b in zip(self.dense, self.dense[1:], strict=False))
        return FLOAT * (sum(self.dense) + 3 * weights + 3 * max(0, len(self.dense) - 1))

    def bound(self, batch: int, memory: float) -> float:
        """Equation 5: the rest of a GPU's memory, for the algorithms' workspaces; below 0 if the batch does not
        fit."""
        return memory - self.feature_bytes(batch) - self.parameter_bytes() - self.classifier_bytes()


def read(traced: TracedModel) -> Cnn:
    """The network of a traced torch model: its convolutions and the layers between them are the feature extraction, its
    dense layers the classification. A module that runs again is a layer again, NAME:2. Raises ConfigError for a model
    without 2d convolutions, and for convolutions that can't be recognised: functions, and those inside a module that
    is one layer."""
    from torch import nn

    from gpumux.plan.trace import tensors

    convolutions, maps, dense = [], list[int](), list[int]()
    runs: Counter[str] = Counter()
    for node in traced.module.graph.nodes:
        if node.op == "placeholder":
            maps += [prod(each.shape[1:]) for each in tensors(node.meta["val"])]
        if node.op == "call_function":
            called = getattr(node.target, "__name__", "")
            if "pool" in called:
                maps += [prod(each.shape[1:]) for each in tensors(node.meta["val"])[:1]]
            elif called.startswith("conv"):
                raise ConfigError(
                    f"{traced.name} calls {called} as a function, which doesn't say whose weights these are",
                    "make it a module: torch.nn.Conv2d itself (a class made of it is looked into; --whole CLASS keeps"
                    " it one)",
                )
        if node.op != "call_module":
            continue
        module, name = traced.module.get_submodule(str(node.target)), str(node.target)
        (made,) = tensors(node.meta["val"])[:1]
        (given,) = tensors(node.all_input_nodes[0].meta["val"])[:1]
        if isinstance(module, nn.Conv2d):
            runs[name] += 1
            _, depth, height, width = given.shape
            _, out_depth, out_height, out_width = made.shape
            convolutions.append(
                Convolution(
                    name if runs[name] == 1 else f"{name}:{runs[name]}", width, height, depth, out_width, out_height,
                    out_depth, _pair(module.kernel_size), _pair(module.stride), _pair(module.dilation), module.groups,
                    again=runs[name] > 1,
                )
            )  # fmt: skip
            maps.append(prod(made.shape[1:]))
        elif any(isinstance(each, nn.modules.conv._ConvNd) for each in module.modules()):
            kind = type(module).__name__
            if isinstance(module, nn.modules.conv._ConvNd):
                raise ConfigError(f"{name} is a {kind}", "the guidelines' formulas are for torch.nn.Conv2d alone")
            raise ConfigError(
                f"{name} ({kind}) is taken as one layer, and has convolutions inside",
                f"don't name {kind} with --whole here",
            )
        elif isinstance(module, nn.Linear):
            dense += [module.in_features, module.out_features] if not dense else [module.out_features]
        elif "Pool" in type(module).__name__:
            maps.append(prod(made.shape[1:]))
    if not convolutions:
        raise ConfigError(f"{traced.name} has no 2d convolutions", "`plan batch` is about CNNs")
    return Cnn(traced.name, tuple(convolutions), tuple(maps), tuple(dense))


def _pair(sizes: tuple[int, ...]) -> tuple[int, int]:
    height, width = sizes
    return height, width


# ---- Mini-batch size and convolution algorithms ("Distributed training guidelines", section 3.1.3): for each
# mini-batch an integer program (equation 6) chooses every layer's algorithm within the remaining memory, and the
# mini-batch with the least time a sample is suggested. scipy is an extra (`pip install scipy`), imported when a program
# is solved.


@dataclass(frozen=True)
class Option:
    """One algorithm for one layer: T(k, l) in seconds, M(k, l) in bytes."""

    algorithm: str
    seconds: float
    nbytes: float


@dataclass(frozen=True)
class BatchChoice:
    """A mini-batch and each layer's algorithm. `seconds`: of all convolutions. `workspace`: bytes of all of them, out
    of `bound` available."""

    batch: int
    algorithms: Mapping[str, str]
    seconds: float
    workspace: float
    bound: float

    @property
    def seconds_a_sample(self) -> float:
        return self.seconds / self.batch


def choose(layers: Mapping[str, Sequence[Option]], bound: float) -> dict[str, Option] | None:
    """Equation 6: each layer's algorithm such that their total time is least within `bound` bytes. None if not even the
    smallest fit. Raises ConfigError if scipy is missing."""
    try:
        import numpy as np
        from scipy.optimize import Bounds, LinearConstraint, milp
    except ImportError:
        raise ConfigError("integer programs need scipy", "pip install scipy") from None
    pairs = [(name, option) for name, options in layers.items() for option in options]
    if bound < 0 or not pairs:
        return None if bound < 0 else {}
    scale = max(option.seconds for _, option in pairs) or 1.0
    space = max((option.nbytes for _, option in pairs), default=0.0) or 1.0
    one = np.array([[float(name == each) for each, _ in pairs] for name in layers])
    used = np.array([[option.nbytes / space for _, option in pairs]])
    found = milp(
        np.array([option.seconds / scale for _, option in pairs]),
        constraints=[LinearConstraint(one, 1, 1), LinearConstraint(used, ub=bound / space)],
        integrality=np.ones(len(pairs)),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 0.0},
    )
    if found.status == 2:  # infeasible
        return None
    if found.x is None:
        raise ConfigError(f"HiGHS gave up: {found.message}", "try fewer mini-batches")
    return {name: option for (name, option), x in zip(pairs, found.x, strict=True) if x > 0.5}


def options(cnn: Cnn, batch: int, spec: GpuSpec, algorithms: Sequence[str] = ALGORITHMS) -> dict[str, list[Option]]:
    """Every layer's algorithms with modelled times and sizes."""
    return {
        layer.name: [
            Option(name, layer.seconds(name, batch, spec), layer.workspace(name, batch))
            for name in algorithms
            if layer.can(name)
        ]
        for layer in cnn.convolutions
    }


def measured_options(cnn: Cnn, batch: int, profile: ModelProfile) -> dict[str, list[Option]]:
    """Every layer's algorithms with the times that `gpumux plan profile --algorithms` measured. Raises ConfigError for
    a layer or batch without."""
    found: dict[str, list[Option]] = {}
    for layer in cnn.convolutions:
        name = layer.name.partition(":")[0] if layer.again else layer.name
        found[layer.name] = [
            Option(each.algorithm, timing.forward + timing.backward, timing.workspace)
            for each in profile.algorithms
            if each.convolution == name
            for timing in each.times
            if timing.samples == batch
        ]
        if not found[layer.name]:
            raise ConfigError(
                f"{profile.name} was profiled without algorithms of {name} for a mini-batch of {batch}",
                f"measure them: gpumux plan profile MODEL --algorithms --batches {batch} -o FILE",
            )
    return found


def suggest(
    cnn: Cnn, batches: Sequence[int], memory: float, offered: Callable[[int], Mapping[str, Sequence[Option]]]
) -> list[BatchChoice]:
    """The best choice for each of `batches` that fits into `memory` bytes, the suggested one first. `offered`: every
    layer's algorithms at a batch. Raises ConfigError if none fits."""
    found = []
    for batch in batches:
        if batch < 1:
            raise ConfigError(f"a mini-batch of {batch}", "give 1 or more")
        bound = cnn.bound(batch, memory)
        chosen = choose(offered(batch), bound)
        if chosen is not None:
            seconds = sum(option.seconds for option in chosen.values())
            workspace = sum(option.nbytes for option in chosen.values())
            found.append(
                BatchChoice(
                    batch, {name: option.algorithm for name, option in chosen.items()}, seconds, workspace, bound
                )
            )
    if not found:
        least = min(batches, default=1)
        raise ConfigError(
            f"no mini-batch of {', '.join(map(str, batches))} fits into {_bytes(memory)}",
            f"{least} samples take {_bytes(memory - cnn.bound(least, memory))} before any convolution's workspace: "
            "try fewer, or a GPU with more memory",
        )
    return sorted(found, key=lambda choice: choice.seconds_a_sample)


def _bytes(nbytes: float) -> str:
    """The text in the form that --memory takes."""
    scale, unit = next(((s, u) for s, u in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB")) if nbytes >= s), (1.0, "B"))
    return f"{nbytes / scale:.3g} {unit}"


# ---- R_O of lemma 3.1 from a trace that torch.profiler exported from a user's training loop (`export_chrome_trace`):
# the time in which the device computes nothing, divided by the time in which it computes.


Interval = tuple[float, float]

KERNELS = ("kernel",)
TRANSFERS = ("gpu_memcpy", "gpu_memset")
COLLECTIVES = ("nccl", "c10d::", "gloo")
LOADING = "DataLoader"
RECORD = "record one: torch.profiler.profile over some steps of your loop, then .export_chrome_trace(FILE)"


@dataclass(frozen=True)
class Overhead:
    """Seconds of the traced stretch: `total`, and `compute` of it. `device` is "cuda" if kernels were traced, else
    "cpu". `loading`: seconds of data loading on the CPU (part of the overhead if the device waits meanwhile)."""

    total: float
    compute: float
    loading: float
    device: str

    @property
    def ratio(self) -> float:
        """R_O."""
        return (self.total - self.compute) / self.compute


def load(path: Path) -> Overhead:
    """Read a trace, gzipped or not. Raises ConfigError for other files."""
    if path.suffix == ".gz":
        try:
            text = gzip.decompress(path.read_bytes()).decode()
        except (OSError, EOFError, UnicodeDecodeError) as error:
            raise ConfigError(f"can't read {path}: {error}", RECORD) from None
    else:
        text = reading.read_text(path, "a trace of torch.profiler")
    try:
        return measure(json.loads(text))
    except (ValueError, RecursionError):
        raise ConfigError(f"{path} is no JSON", RECORD) from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}", error.remedy) from None


def measure(trace: Any) -> Overhead:
    """The overhead in a trace, from the first operator to the end of the last. On a GPU, computation is the time in
    which a kernel runs that is no collective; on the CPU, that in which an operator runs other than data loading and
    collectives. Raises ConfigError for other data, and for a trace without computation."""
    events = trace.get("traceEvents") if isinstance(trace, dict) else trace
    if not isinstance(events, list):
        raise ConfigError("this is no trace", RECORD)
    spans: dict[str, list[tuple[str, Interval]]] = {}
    for event in events:
        if isinstance(event, dict) and event.get("ph") == "X" and "dur" in event and "ts" in event:
            begins = float(event["ts"])
            span = (begins * 1e-6, (begins + float(event["dur"])) * 1e-6)
            spans.setdefault(str(event.get("cat", "")), []).append((str(event.get("name", "")), span))
    operators = [each for category in ("cpu_op", "Operator") for each in spans.get(category, [])]
    kernels = [each for category in KERNELS for each in spans.get(category, [])]
    moves = [each for category in TRANSFERS for each in spans.get(category, [])]
    loading = merged(span for some in spans.values() for name, span in some if LOADING in name)
    work = kernels or operators
    busy = merged(span for name, span in work if not name.lower().startswith(COLLECTIVES) and LOADING not in name)
    if not kernels:
        away = merged([*loading, *(span for name, span in work if name.lower().startswith(COLLECTIVES))])
        busy = without(busy, away)
    compute = length(busy)
    if not compute:
        raise ConfigError("the trace shows no computation", RECORD)
    every = [span for _, span in (*operators, *kernels, *moves)] + loading
    total = max(end for _, end in every) - min(begin for begin, _ in every)
    return Overhead(total, compute, length(loading), "cuda" if kernels else "cpu")


def merged(spans: Iterable[Interval]) -> list[Interval]:
    """The same stretches of time, with those that overlap or touch joined."""
    found: list[Interval] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def without(spans: Sequence[Interval], away: Sequence[Interval]) -> list[Interval]:
    """The parts of `spans` outside `away`; both are merged."""
    found = []
    for begin, end in spans:
        for out_begin, out_end in away:
            if out_end <= begin or out_begin >= end:
                continue
            if out_begin > begin:
                found.append((begin, out_begin))
            begin = out_end
            if begin >= end:
                break
        if begin < end:
            found.append((begin, end))
    return found


def length(spans: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in spans)
