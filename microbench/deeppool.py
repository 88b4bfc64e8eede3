"""DeepPool's layer times (`profile/*.prof` of DeepPoolML/DeepPool) as profiles, for the ablation. No such file is part
of gpumux: its path is given on the command line.

One line a layer and batch size: `kind{parameters}[batch][shape]`, total ms, forward us, backward us; `sum:` closes a
batch size. A convolution's backward time stands at the rectifier behind it. What the file lacks is modelled as the
shipped profiles are (gpumux/simulate/workload.py) and marked so: how kernels fill the GPU, the rectifier's part of
its backward time, all-reduces and the optimizer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from gpumux.errors import ConfigError
from gpumux.program.profile import StepProfile
from gpumux.simulate.workload import Tape

_LINE = re.compile(r"^\s*(\w+)(\{.*\})\[(\d+)\](\S+)\s+([\d.]+)\s+(\d+)\s+(\d+)\s*$")


@dataclass(frozen=True)
class Layer:
    """`shape` is one sample's input."""

    kind: str
    parameters: dict[str, int]
    batch: int
    shape: tuple[int, ...]
    forward_s: float
    backward_s: float


def read(path: Path) -> dict[int, list[Layer]]:
    """Layers by batch size, in order. Raises ConfigError when the file is no such profile."""
    found: dict[int, list[Layer]] = {}
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read {path}: {error}", "name one of DeepPool's profile/*.prof") from None
    for line in lines:
        match = _LINE.match(line)
        if match is None:
            continue  # sums, blank lines
        kind, parameters, batch, shape, _, forward, backward = match.groups()
        sizes = tuple(int(n) for n in shape.strip("[]").split(","))
        layer = Layer(kind, json.loads(parameters), int(batch), sizes, float(forward) * 1e-6, float(backward) * 1e-6)
        found.setdefault(int(batch), []).append(layer)
    if not found:
        raise ConfigError(f"{path} holds no layer times", "name one of DeepPool's profile/*.prof")
    return found


def vgg16(layers: Sequence[Layer], *, gpus: int = 1, dense: bool = True) -> StepProfile:
    """A training step of these layers. `gpus` above 1: with all-reduces among as many. `dense` False: the convolutions
    alone, backward first (see analytic.vgg16_burst). Raises ConfigError for layers that are no VGG's."""
    kept = [layer for layer in layers if dense or len(layer.shape) == 3]
    kept = [layer for layer in kept if layer.kind != "flatten"]
    forward, backward = Tape(2), Tape(2)
    for layer in kept:
        _forward(forward, layer)
    for layer, behind in reversed(list(zip(kept, [*kept[1:], None], strict=True))):
        _backward(backward, layer, behind)
        backward.synchronise(gpus)
    backward.flush(gpus)
    backward.parameters = forward.parameters
    optimizer_from = len(backward.ops)
    backward.optimize_each()
    both = [forward.ops, backward.ops[:optimizer_from], backward.ops[optimizer_from:]]
    ops = both[0] + both[1] + both[2] if dense else both[1] + both[2] + both[0]
    batch = layers[0].batch
    name = f"deeppool-vgg16-b{batch}" + ("" if gpus == 1 else "-ddp" if dense else "-burst")
    return StepProfile(name, "a100", tuple(ops), batch=batch, note="layer times measured by DeepPool's authors")


def dense_seconds(layers: Sequence[Layer]) -> float:
    """What the dense layers take forward and backward."""
    return sum(layer.forward_s + layer.backward_s for layer in layers if len(layer.shape) == 1)


def _measured(tape: Tape, seconds: float, parts: int = 1) -> None:
    """The last `parts` operators took `seconds` together, in the proportion the model says."""
    modelled = sum(op.seconds for op in tape.ops[-parts:])
    for index in range(len(tape.ops) - parts, len(tape.ops)):
        op = tape.ops[index]
        tape.ops[index] = replace(op, seconds=max(seconds, 1e-6) * op.seconds / modelled, source="measured")


def _shapes(layer: Layer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The layer's input and output, with the batch."""
    given = (layer.batch, *layer.shape)
    if layer.kind == "conv2d":
        return given, (layer.batch, layer.parameters["out_channels"], *layer.shape[1:])
    if layer.kind == "linear":
        return given, (layer.batch, layer.parameters["out_features"])
    if layer.kind == "maxPool2d":
        return given, (layer.batch, layer.shape[0], layer.shape[1] // 2, layer.shape[2] // 2)
    if layer.kind.startswith("ReLU"):
        return given, given
    raise ConfigError(f"a layer of kind {layer.kind!r}", "use A100_vgg.prof: only VGG-16's layers are known here")


def _product(layer: Layer) -> tuple[int, int, int, tuple[int, ...]]:
    """m, n, k of the forward matrix product, and the weight's shape."""
    if layer.kind == "conv2d":
        cin, cout, taps = layer.shape[0], layer.parameters["out_channels"], layer.parameters["kernel_size"]
        return layer.batch * layer.shape[1] * layer.shape[2], cout, cin * taps**2, (cout, cin, taps, taps)
    cout = layer.parameters["out_features"]
    return layer.batch, cout, layer.shape[0], (layer.shape[0], cout)


def _forward(tape: Tape, layer: Layer) -> None:
    given, made = _shapes(layer)
    if layer.kind in ("conv2d", "linear"):
        m, n, k, weight = _product(layer)
        tape.parameters += [weight, (n,)]
        target = "aten.convolution.default" if layer.kind == "conv2d" else "aten.addmm.default"
        tape.product(target, (given, weight, made), m, n, k)
    else:
        target = "aten.relu.default" if layer.kind.startswith("ReLU") else "aten.max_pool2d_with_indices.default"
        tape.stream(target, (given, made), prod(given), 2)
    _measured(tape, layer.forward_s)


def _backward(tape: Tape, layer: Layer, behind: Layer | None) -> None:
    given, made = _shapes(layer)
    if layer.kind in ("conv2d", "linear"):
        m, n, k, weight = _product(layer)
        relu_s = tape.ops[-1].seconds if behind is not None and behind.kind.startswith("ReLU") else 0.0
        rest = behind.backward_s - relu_s if behind is not None and relu_s else 0.0
        tape.product(
            "aten.mm.input" if layer.kind == "linear" else "aten.convolution_backward.input", (made, given), m, k, n
        )
        tape.product(
            "aten.mm.weight" if layer.kind == "linear" else "aten.convolution_backward.weight", (made, weight), n, k, m
        )
        _measured(tape, max(rest, 0.0) + layer.backward_s, 2)
        tape.gradients += [4 * prod(weight), 4 * n]
    elif layer.kind.startswith("ReLU"):
        tape.stream("aten.threshold_backward.default", (given,) * 3, prod(given), 3)  # modelled: see the convolution
        if tape.ops[-1].seconds > layer.backward_s:
            _measured(tape, layer.backward_s)
    else:
        tape.stream("aten.max_pool2d_with_indices_backward.default", (made, given), prod(given), 2)
        _measured(tape, layer.backward_s)
