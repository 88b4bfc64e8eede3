"""Layer times where nobody measured: the simulator's roofline over tiles (gpumux/device/sim/cost.py) for a named GPU. All
that is made here is marked as modelled. Imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import fx, nn

from gpumux.device.sim.cost import EFFICIENCY, FLOOR_S, product, stream
from gpumux.device.sim.spec import GpuSpec
from gpumux.errors import CaptureError
from gpumux.plan.grouping import VIEW_MODULES, VIEWS, Traced, function_name, tensors
from gpumux.plan.layers import LayerProfile, ModelProfile, Timing
from gpumux.plan.trace import TracedModel

BATCHES = tuple(1 << i for i in range(11))


def profile(traced: TracedModel, spec: GpuSpec, batches: Sequence[int] = BATCHES) -> ModelProfile:
    """Every layer modelled on that GPU, at each of `batches`. Raises CaptureError for one that mixes samples. float32 products run as TF32, as on the simulator."""
    layers = tuple(modelled(traced, layer, spec, batches) for layer in traced.layers)
    note = "Modelled from layer shapes by gpumux.plan.roofline; nothing here was measured."
    return ModelProfile(traced.name, spec.name, layers, note=note)


def modelled(traced: TracedModel, layer: Traced, spec: GpuSpec, batches: Sequence[int]) -> LayerProfile:
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
    """Seconds of one node forward and backward. Backward passes of products are two products, those of the rest read what
    came in and what comes back, and write as much as went in. Modules with parameters inside move those, too."""
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
                f"layer {node.target!r} makes less than one row for each sample of a batch of {traced.batch}: it mixes samples, "
                "or the batch's size is written into the model",
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
        forward = max(flops / (peak * EFFICIENCY), nbytes / spec.bandwidth, FLOOR_S)
        backward = max(2 * flops / (peak * EFFICIENCY), 2 * nbytes / spec.bandwidth, FLOOR_S)
        return forward, backward
    forward = stream(sum(out), nbytes, spec).seconds
    return forward, stream(sum(out), nbytes + item * sum(given), spec).seconds


def _products(
    rows: int, n: int, k: int, taps: int, item: int, peak: float, spec: GpuSpec, groups: int
) -> tuple[float, float]:
    """A layer whose forward pass is [rows, k * taps] x [k * taps, n], `groups` times. What an implicit convolution reads
    more than once stays in caches: it moves its image once, not once a tap."""
    nbytes = item * groups * (rows * k + k * taps * n + rows * n)
    forward = product(rows, n, k * taps, nbytes, peak, spec, groups).seconds
    given = product(rows, k, n * taps, nbytes, peak, spec, groups).seconds
    weight = product(n, k * taps, rows, nbytes, peak, spec, groups).seconds
    return forward, given + weight


def _free(traced: TracedModel, node: fx.Node) -> bool:
    """Views, parameters and what follows from them alone."""
    if node.op in ("get_attr", "placeholder"):
        return True
    if node.op == "call_module":
        return isinstance(traced.module.get_submodule(str(node.target)), (*VIEW_MODULES, nn.Identity))
    return function_name(node) in VIEWS
