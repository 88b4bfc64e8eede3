"""Memory of a convolutional network and of its convolution algorithms ("Distributed training guidelines", equations 1 to 5
and table 2). Bytes; the paper counts bits. Reading a torch model imports torch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import ceil, log2, prod
from typing import TYPE_CHECKING

from gpumux.device.sim.cost import EFFICIENCY, FLOOR_S, product
from gpumux.device.sim.spec import GpuSpec
from gpumux.errors import ConfigError

if TYPE_CHECKING:
    from gpumux.plan.trace import TracedModel

FLOAT = 4
TILE, PATCH = 4, 6  # Winograd F(4x4, 3x3): tiles of 4 x 4 results from 6 x 6 inputs
ALGORITHMS = ("gemm", "fft", "winograd")


@dataclass(frozen=True)
class Convolution:
    """One layer, in the paper's letters: input B x H x D, output B' x H' x D', filters of F x F; `kernel`, `stride` and
    `dilation` are (height, width), since filters need not be square. `again`: it runs once more with the weights of an
    earlier one."""

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
        """Table 2's numerator: half spectra of inputs, outputs and filters, each padded to the input's size: 2 B (H/2 + 1)
        values."""
        planes = batch * (self.depth + self.out_depth) + self.depth * self.out_depth // self.groups
        return FLOAT * planes * 2 * self.width * (self.height // 2 + 1)

    def winograd_bytes(self, batch: int) -> float:
        """Transformed inputs, outputs and filters of F(4x4, 3x3)."""
        tiles = batch * ceil(self.out_width / TILE) * ceil(self.out_height / TILE)
        filters = self.depth * self.out_depth // self.groups
        return FLOAT * PATCH**2 * (tiles * (self.depth + self.out_depth) + filters)

    def workspace(self, algorithm: str, batch: int) -> float:
        """M(k, l) of equation 6: what the algorithm needs beside inputs and outputs, which equation 5 has set aside already.
        An implicit GEMM needs nothing."""
        if algorithm == "gemm":
            return 0.0
        return self.fft_bytes(batch) if algorithm == "fft" else self.winograd_bytes(batch)

    def can(self, algorithm: str) -> bool:
        """Winograd's tiles are for 3 x 3 filters without stride or gaps; FFT and Winograd are for whole layers."""
        if algorithm == "gemm":
            return True
        if self.groups > 1:
            return False
        return algorithm == "fft" or (self.kernel == (3, 3) and self.stride == self.dilation == (1, 1))

    def seconds(self, algorithm: str, batch: int, spec: GpuSpec) -> float:
        """T(k, l), forward and backward, modelled: three products of the same work, at the rate of float32 without tensor
        cores for all algorithms, so that they compare; FFT and Winograd also transform what they read and write."""
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
        flops_s = (multiply + transform) / (rate * EFFICIENCY)
        return 3 * max(flops_s, (nbytes + 2 * workspace) / spec.bandwidth, FLOOR_S)


@dataclass(frozen=True)
class Cnn:
    """`convolutions` in order; `maps`: values of one sample's input and of every layer's output in the feature extraction
    part; `dense`: neurons of the classification part, its input first."""

    name: str
    convolutions: tuple[Convolution, ...]
    maps: tuple[int, ...]
    dense: tuple[int, ...]

    def feature_bytes(self, batch: int) -> float:
        """Equation 2: input and outputs of all layers of the feature extraction part."""
        return FLOAT * batch * sum(self.maps)

    def parameter_bytes(self) -> float:
        """Equation 3: weights and biases of the convolutions, three times: a sample's gradients and the batch's beside them."""
        return 3 * FLOAT * sum(c.parameters for c in self.convolutions)

    def classifier_bytes(self) -> float:
        """Equation 4 as printed: outputs once, weights three times, one bias a layer three times."""
        weights = sum(a * b for a, b in zip(self.dense, self.dense[1:], strict=False))
        return FLOAT * (sum(self.dense) + 3 * weights + 3 * max(0, len(self.dense) - 1))

    def bound(self, batch: int, memory: float) -> float:
        """Equation 5: what is left of a GPU's memory for the algorithms' workspaces; below 0 where the batch does not fit."""
        return memory - self.feature_bytes(batch) - self.parameter_bytes() - self.classifier_bytes()


def read(traced: TracedModel) -> Cnn:
    """The network of a traced torch model: its convolutions and what lies between are the feature extraction, its dense
    layers the classification. A module that runs again is a layer again, NAME:2. Raises ConfigError for a model without
    2d convolutions, and for one with convolutions that can't be told: functions, and those inside of a module that is one
    layer."""
    from torch import nn

    from gpumux.plan.grouping import tensors

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
                    "make it a module: torch.nn.Conv2d itself (a class made of it is looked into; --whole CLASS keeps it one)",
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
