"""Models of the Wavelet paper as layers: each one's kernels on a simulated GPU, and the bytes it keeps for its backward
pass. Imports torch, which only works out shapes.

Costs are those of the roofline in gpumux/device/sim/cost.py. A product's backward pass is two products, of the input's
and of the weight's gradient. What a layer keeps is estimated: outputs that an operation reads whose backward pass needs
its input or output, until the layer's own backward pass has ended; attention keeps no scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch
from torch import fx, nn

from gpumux.device.sim.cost import Kernel, KernelCost, kernel_of, product, solo_seconds, stream
from gpumux.device.sim.spec import GpuSpec
from gpumux.plan.models import LoadedModel
from gpumux.plan.trace import function_name, tensors, trace
from gpumux.plan.zoo import VGG, Classifier, Encoder, ResNet, vgg
from gpumux.program.profile import OpProfile

FLOAT = 4
VGG_19 = tuple(each for part in ((64, 64), (128, 128), (256,) * 4, (512,) * 4, (512,) * 4) for each in (*part, "M"))


@dataclass(frozen=True)
class Layer:
    """A layer for one batch. `saved`: bytes kept for its backward pass. `output`: bytes that the next layer reads, as
    many as their gradient has."""

    name: str
    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    saved: int
    output: int
    parameters: int

    def seconds(self, spec: GpuSpec) -> tuple[float, float]:
        """Forward and backward alone on the device."""
        forward, backward = (sum(solo_seconds(k, spec) for k in each) for each in (self.forward, self.backward))
        return forward, backward


def _vgg19_bn() -> nn.Module:
    layers: list[nn.Module] = []
    channels = 3
    for each in VGG_19:
        if isinstance(each, str):
            layers.append(nn.MaxPool2d(2, 2))
        else:
            layers += [nn.Conv2d(channels, each, 3, padding=1), nn.BatchNorm2d(each), nn.ReLU(inplace=True)]
            channels = each
    dense = vgg(max(VGG))
    assert isinstance(dense, Classifier)
    return Classifier(nn.Sequential(*layers), dense.classifier)


_IMAGE, _TOKENS = (3, 224, 224), (384,)
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "ResNet-50": (lambda: ResNet((3, 4, 6, 3), 1), _IMAGE),
    "ResNet-101": (lambda: ResNet((3, 4, 23, 3), 1), _IMAGE),
    "VGG-16": (lambda: vgg(16), _IMAGE),
    "VGG-19-BN": (_vgg19_bn, _IMAGE),
    "BERT-base": (lambda: Encoder(layers=12, width=768, heads=12, length=384, words=30_522), _TOKENS),
}


@cache
def layers_of(model: str, batch: int, spec: GpuSpec) -> tuple[Layer, ...]:
    """A model's layers for a batch on a GPU."""
    make, shape = MODELS[model]
    with torch.device("meta"):
        module = make()
        given = torch.zeros((1, *shape), dtype=torch.int64 if shape is _TOKENS else torch.float32)
    traced = trace(LoadedModel(model, module, [given]), batch=batch)
    made = []
    for layer in traced.layers:
        forward: list[Kernel] = []
        backward: list[Kernel] = []
        saved = 0
        for node in layer.nodes:
            first, second, kept = _kernels(node, traced.module, spec, not layer.inputs)
            forward += first
            backward = second + backward
            saved += kept
        if forward:
            made.append(
                Layer(
                    layer.name,
                    tuple(forward),
                    tuple(backward),
                    saved,
                    layer.output_bytes * batch,
                    layer.parameter_bytes,
                )
            )
    return tuple(made)


_READ_ALONE = {"add", "iadd", "mean", "output"}  # their backward pass needs no values
_VIEWS = {"flatten", "view", "reshape", "transpose", "unflatten", "getattr", "getitem", "contiguous"}


def _kernels(
    node: fx.Node, module: fx.GraphModule, spec: GpuSpec, first: bool
) -> tuple[list[Kernel], list[Kernel], int]:
    """A node's kernels, forward and backward, and the bytes it keeps. `first`: its input needs no gradient."""
    name = function_name(node)
    made = module.get_submodule(str(node.target)) if node.op == "call_module" else None
    kind = type(made).__name__ if made is not None else name
    if node.op not in ("call_module", "call_function", "call_method") or name in _VIEWS or kind == "Flatten":
        return [], [], 0
    sizes = [each.shape for each in tensors(node.meta["val"])]
    elements = sum(each.numel() for each in sizes)
    if not elements:
        return [], [], 0
    kept = FLOAT * elements if _is_saved(node) and not getattr(made, "inplace", False) else 0
    flops = node.meta["flops"]
    if not flops:
        streams = [_kernel(name, stream(elements, passes * FLOAT * elements, spec), spec) for passes in (2, 3)]
        return streams[:1], streams[1:], kept
    n = sizes[0][1] if len(sizes[0]) == 4 and "Conv" in kind else sizes[0][-1]
    m, k = elements // n, max(1, flops // (2 * elements))
    forward, to_input, to_weight = (_product(name, shape, spec) for shape in ((m, n, k), (m, k, n), (n, k, m)))
    return [forward], [to_weight] if first else [to_input, to_weight], kept


def _is_saved(node: fx.Node) -> bool:
    """Whether an operation that reads the node's output needs it for its backward pass."""
    return any(
        _is_saved(user) if (name := function_name(user)) in _VIEWS else name not in _READ_ALONE for user in node.users
    )


def _product(name: str, shape: tuple[int, int, int], spec: GpuSpec) -> Kernel:
    m, n, k = shape
    nbytes = FLOAT * (m * n + m * k + k * n)
    # An implicit convolution reads its image about once, not once for each tap.
    nbytes = min(nbytes, FLOAT * 3 * max(m * n, k * n, m * k // 9))
    return _kernel(name, product(m, n, k, nbytes, spec.flops["float32"], spec), spec)


def _kernel(name: str, cost: KernelCost, spec: GpuSpec) -> Kernel:
    moved = int(cost.seconds * spec.bandwidth * 0.85)
    return kernel_of(OpProfile(f"aten.{name}", (), cost.seconds, moved, cost.blocks, cost.per_sm), spec)


def elementwise(name: str, nbytes: int, passes: float, spec: GpuSpec) -> Kernel:
    """A multi-tensor kernel over `nbytes` of float32, as of an optimizer, that reads or writes them `passes` times."""
    cost = stream(nbytes // FLOAT, int(passes * nbytes), spec, foreach=True)
    return _kernel(name, cost, spec)


def even_parts(layers: Sequence[Layer], parts: int, spec: GpuSpec) -> list[tuple[Layer, ...]]:
    """The layers as so many consecutive parts, with the longest as short as can be."""
    times = [sum(layer.seconds(spec)) for layer in layers]
    low, high = max(times), sum(times)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if len(_filled(times, middle)) <= parts else (middle, high)
    cuts = _filled(times, high)
    while len(cuts) < parts:  # fewer parts would do: split the longest that has several layers
        bounds = [*cuts, len(layers)]
        spans = [(sum(times[a:b]), a, b) for a, b in pairwise(bounds) if b - a > 1]
        _, a, b = max(spans)
        cuts = sorted([*cuts, (a + b) // 2])
    bounds = [*cuts, len(layers)]
    return [tuple(layers[a:b]) for a, b in pairwise(bounds)]


def _filled(times: Sequence[float], most: float) -> list[int]:
    """Where parts begin that take at most so long each."""
    cuts, total = [0], 0.0
    for i, seconds in enumerate(times):
        if total + seconds > most * (1 + 1e-12) and i:
            cuts.append(i)
            total = 0.0
        total += seconds
    return cuts
