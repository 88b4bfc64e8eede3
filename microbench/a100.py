"""DeepPool's layer times on an A100 (`profile/*.prof` of DeepPoolML/DeepPool, see microbench/deeppool.py) as profiles
to plan with. What the layers are and how they connect comes from the built-in models; their times from the file. What a
file has no times for (concatenations, Inception's last layer) is modelled and marked so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gpumux.device.sim.spec import A100
from gpumux.errors import ConfigError
from gpumux.plan import measure as roofline
from gpumux.plan.layers import ModelProfile, Timing
from gpumux.plan.models import find
from gpumux.plan.trace import trace
from microbench.deeppool import Layer, read

KINDS = {
    "conv2d": "Conv2d", "maxPool2d": "MaxPool2d", "avgPool2d": "AvgPool2d", "adAvgPool2d": "AdaptiveAvgPool2d",
    "linear": "Linear", "ResnetBottleneck": "Bottleneck",
}  # fmt: skip


@dataclass(frozen=True)
class Model:
    """`file` has the times; `shape` is what it was measured at; `whole`: modules that are one line there; `batch`: the
    global batch of the paper's figure 9; `paper`: its table 3, seconds on 8 and 1,024 GPUs; `reported`: what its
    section 7.1 says of burst parallelism without collocation."""

    file: str
    shape: tuple[int, ...]
    whole: tuple[str, ...]
    batch: int
    paper: tuple[float, float]
    reported: str


MODELS = {
    "vgg16": Model("A100_vgg.prof", (3, 224, 224), (), 32, (0.01, 0.05), "improves foreground throughput over DP"),
    "wide_resnet101_2": Model(
        "A100_wrn.prof", (3, 224, 224), ("Bottleneck",), 16, (0.02, 0.11), "improves foreground throughput over DP"
    ),
    "inception_v3": Model("A100_inception.prof", (3, 299, 299), (), 32, (0.22, 3.23), "falls back to DP"),
}


def profile(directory: Path, name: str) -> ModelProfile:
    """One of MODELS. Raises ConfigError where the file is missing, or is not of that model."""
    model = MODELS[name]
    by_batch = read(directory / model.file)
    batches = sorted(by_batch)
    traced = trace(find(name, model.shape), whole=model.whole)
    made = roofline.roofline_profile(traced, A100, batches)
    lines = {batch: _joined(by_batch[batch]) for batch in batches}
    place, layers = 0, []
    for layer in made.layers:
        here = [lines[batch][place] if place < len(lines[batch]) else None for batch in batches]
        if any(line is not None and KINDS.get(line.kind) == layer.kind for line in here):
            times = []
            for batch, line in zip(batches, here, strict=True):
                if line is None or KINDS.get(line.kind) != layer.kind:
                    raise ConfigError(f"{model.file} has other layers at batch {batch}", "name DeepPool's own files")
                times.append(Timing(batch, line.forward_s, line.backward_s))
            layer = replace(layer, times=tuple(times), source="measured")
            place += 1
        layers.append(layer)
    if place != len(lines[batches[0]]):
        raise ConfigError(f"{model.file} is not of {name}: line {place} fits no layer", "name DeepPool's own files")
    return replace(made, layers=tuple(layers), note="measured by DeepPool's authors; the rest modelled")


def _joined(lines: Sequence[Layer]) -> list[Layer]:
    """Rectifiers and flattening belong to the layer before them: a convolution's backward time stands at the former."""
    found: list[Layer] = []
    for line in lines:
        if found and line.kind.startswith(("ReLU", "flatten")):
            last = found[-1]
            found[-1] = replace(
                last, forward_s=last.forward_s + line.forward_s, backward_s=last.backward_s + line.backward_s
            )
        else:
            found.append(line)
    return found
