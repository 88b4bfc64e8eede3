"""The costs of a model's layers, and how they are connected, as a JSON file.

    {"format": "gpumux-layers", "version": 1,
     "units": {"forward": "s", "backward": "s", "output_bytes": "B a sample", "parameter_bytes": "B",
               "flops": "a sample"},
     "name": "vgg16", "device": "a100", "recorded_at": null, "versions": {}, "note": "...",
     "layers": [{"name": "features.0", "kind": "Conv2d", "inputs": [], "output_bytes": 12845056,
                 "parameter_bytes": 7168, "flops": 1.7e8, "times": [[1, 2.1e-05, 4.0e-05], [2, 3.9e-05, 7.7e-05]],
                 "source": "measured"}, ...]}

Layers are listed in an order in which they can run. `inputs` are the layers whose outputs a layer reads, without the
model's own input. `times` are [samples, forward, backward] on one device. Where convolutions were timed by algorithm,
there is one more key:

     "algorithms": [{"convolution": "features.0", "algorithm": "onednn", "times": [[1, 2.1e-05, 4.0e-05, 0]]}, ...]

whose `times` are [samples, forward, backward, workspace]: bytes beside input, weights, result and gradients, 0 on a
CPU, which does not say. Nothing is guessed when a file is read: a missing or unknown key, or a value out of range, is a
ConfigError that names the place.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from math import isfinite
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from gpumux import files
from gpumux.errors import ConfigError
from gpumux.program import reading
from gpumux.program.profile import FORMAT as STEP_FORMAT

FORMAT = "gpumux-layers"
VERSION = 1
UNITS = {"forward": "s", "backward": "s", "output_bytes": "B a sample", "parameter_bytes": "B", "flops": "a sample"}
UNSTEADY = 1.5
RERECORD = "record it again with `gpumux plan profile MODEL -o FILE`, or mend the file"

Source: TypeAlias = Literal["measured", "model"]


class Timing(NamedTuple):
    """Seconds of one layer for a batch of so many samples on one device."""

    samples: int
    forward: float
    backward: float

    @property
    def seconds(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """One layer. `output_bytes` are those of one sample's output, `flops` those of one sample's forward pass (0 if
    unknown). `times` has at least one entry, by rising batch. `source`: "measured" on the profile's device, or "model"
    for a roofline's times. Raises ConfigError for a value out of range."""

    name: str
    kind: str
    inputs: tuple[str, ...]
    output_bytes: int
    parameter_bytes: int
    times: tuple[Timing, ...]
    flops: float = 0.0
    source: Source = "model"

    def __post_init__(self) -> None:
        what = f"layer {self.name!r}"
        if not self.name:
            raise ConfigError("a layer without a name", RERECORD)
        if not self.times:
            raise ConfigError(f"{what} has no times", RERECORD)
        batches = [timing.samples for timing in self.times]
        if batches[0] < 1 or batches != sorted(set(batches)):
            raise ConfigError(f"{what} has times for {batches} samples", "give each batch once, rising, from 1 up")
        if not all(isfinite(t) and t >= 0 for timing in self.times for t in timing[1:]):
            raise ConfigError(f"{what} has a time that is negative or no number", "times are seconds of 0 or more")
        if self.output_bytes < 0 or self.parameter_bytes < 0 or not (isfinite(self.flops) and self.flops >= 0):
            raise ConfigError(f"{what} has a negative size", "sizes are 0 or more")
        if self.source not in get_args(Source):
            raise ConfigError(f"{what} has source {self.source!r}", f"choose one of {', '.join(get_args(Source))}")

    def at(self, samples: int) -> Timing:
        """The times of a batch of `samples`: as measured, or interpolated linearly between the two timed batches around
        it. A batch larger than all timed ones runs as several of the largest (accumulated gradients), so its time is
        proportional. Raises ConfigError below the smallest timed batch, where nothing is known."""
        batches = [timing.samples for timing in self.times]
        place = bisect_left(batches, samples)
        if place < len(batches) and batches[place] == samples:
            return self.times[place]
        if place == 0:
            raise ConfigError(
                f"layer {self.name!r} has no time for {samples} samples; its smallest batch is {batches[0]}",
                "profile smaller batches, or use fewer GPUs",
            )
        low = self.times[place - 1]
        if place == len(batches):
            share = samples / low.samples
            return Timing(samples, low.forward * share, low.backward * share)
        high = self.times[place]
        share = (samples - low.samples) / (high.samples - low.samples)
        return Timing(
            samples,
            low.forward + share * (high.forward - low.forward),
            low.backward + share * (high.backward - low.backward),
        )


class AlgorithmTiming(NamedTuple):
    """Seconds and workspace bytes of one algorithm for a batch of so many samples."""

    samples: int
    forward: float
    backward: float
    workspace: int


@dataclass(frozen=True, slots=True)
class AlgorithmTimes:
    """What one convolution took by one of the algorithms that the device can choose from, at each batch, rising.
    `convolution` is the module's name. Raises ConfigError for a value out of range."""

    convolution: str
    algorithm: str
    times: tuple[AlgorithmTiming, ...]

    def __post_init__(self) -> None:
        what = f"{self.algorithm!r} of convolution {self.convolution!r}"
        batches = [timing.samples for timing in self.times]
        if not batches or batches[0] < 1 or batches != sorted(set(batches)):
            raise ConfigError(f"{what} has times for {batches} samples", "give each batch once, rising, from 1 up")
        if not all(isfinite(each) and each >= 0 for timing in self.times for each in timing[1:]):
            raise ConfigError(
                f"{what} has a value that is negative or no number", "give seconds and bytes of 0 or more"
            )


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """A model's layers in an order in which they can run. `device` is the device of the times (a preset's name, or the
    device's own name). `recorded_at` is a UTC date, None if unknown. `algorithms`: of its convolutions, if they were
    timed. Raises ConfigError if a name occurs twice, or an input is not an earlier layer's."""

    name: str
    device: str
    layers: tuple[LayerProfile, ...]
    versions: Mapping[str, str] = field(default_factory=dict)
    recorded_at: str | None = None
    note: str = ""
    algorithms: tuple[AlgorithmTimes, ...] = ()

    def __post_init__(self) -> None:
        if not self.layers:
            raise ConfigError(f"profile {self.name!r} has no layers", RERECORD)
        pairs = [(each.convolution, each.algorithm) for each in self.algorithms]
        for pair in pairs:
            if pairs.count(pair) > 1:
                raise ConfigError(f"{pair[1]!r} of convolution {pair[0]!r} occurs twice", "give its times once")
        seen: set[str] = set()
        for layer in self.layers:
            if layer.name in seen:
                raise ConfigError(f"two layers are called {layer.name!r}", "give each a name of its own")
            unknown = [name for name in layer.inputs if name not in seen]
            if unknown:
                raise ConfigError(
                    f"layer {layer.name!r} reads {unknown[0]!r}, which is no earlier layer", "list layers as they run"
                )
            seen.add(layer.name)

    @property
    def parameter_bytes(self) -> int:
        return sum(layer.parameter_bytes for layer in self.layers)

    def unsteady(self) -> str:
        """A sentence if a smaller batch took much longer than a larger one, which is a disturbed measurement; else
        ""."""
        smallest = max(layer.times[0].samples for layer in self.layers)
        batches = [timing.samples for timing in self.layers[0].times if timing.samples >= smallest]
        times = [self.seconds(batch) for batch in batches]
        for i, batch in enumerate(batches):
            if times[i] > UNSTEADY * min(times[i:]):
                shortest = times[i:].index(min(times[i:])) + i
                return (
                    f"batches of {batch} took {times[i] / times[shortest]:.1f} times as long as batches of"
                    f" {batches[shortest]}: something else ran there; record it again before you rely on a plan"
                )
        return ""

    def seconds(self, samples: int) -> float:
        """Sum of all layers, forward and backward, on one device."""
        return sum(layer.at(samples).seconds for layer in self.layers)

    def sources(self) -> dict[str, int]:
        """Number of layers that are measured and modelled."""
        found: dict[str, int] = {}
        for layer in self.layers:
            found[layer.source] = found.get(layer.source, 0) + 1
        return found


# ---- files ----------------------------------------------------------------------------------------


def save(profile: ModelProfile, path: Path) -> None:
    """Write a profile, one layer a line. Raises ConfigError if the file can't be written."""
    files.write_text(path, dumps(profile))


def dumps(profile: ModelProfile) -> str:
    """The file's text, one layer a line."""
    head = {
        "format": FORMAT,
        "version": VERSION,
        "units": UNITS,
        "name": profile.name,
        "device": profile.device,
        "recorded_at": profile.recorded_at,
        "versions": dict(profile.versions),
        "note": profile.note,
    }
    text = json.dumps(head, indent=1)[:-2] + f',\n "layers": {_lines(profile.layers)}'
    if profile.algorithms:
        text += f',\n "algorithms": {_lines(profile.algorithms)}'
    return text + "\n}\n"


def _lines(entries: Sequence[LayerProfile | AlgorithmTimes]) -> str:
    """A list, one entry a line."""
    return "[\n  " + ",\n  ".join(json.dumps(asdict(each)) for each in entries) + "\n ]"


def load(path: Path) -> ModelProfile:
    """Read a profile. Raises ConfigError, which names the file and the place, for any fault."""
    body = reading.read_text(path, "a profile of layers")
    try:
        return loads(body)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}", error.remedy) from None


def loads(text: str) -> ModelProfile:
    """The profile in a file's text. Raises ConfigError."""
    if f'"format": "{STEP_FORMAT}"' in text[:200]:
        raise ConfigError(
            "this is the profile of a step", "name the model that it trains, and this file with --profile"
        )
    body = reading.header(text, FORMAT, VERSION, UNITS, RERECORD)
    names = {f.name for f in fields(ModelProfile)}
    if "algorithms" not in body:  # only there where they were timed
        body["algorithms"] = []
    reading.same_keys("the profile", body, names | {"format", "version", "units"}, RERECORD)
    return ModelProfile(
        name=reading.text("name", body["name"]),
        device=reading.text("device", body["device"]),
        layers=tuple(_layer(i, each) for i, each in enumerate(reading.items("layers", body["layers"]))),
        versions=reading.names("versions", body["versions"]),
        recorded_at=None if body["recorded_at"] is None else reading.text("recorded_at", body["recorded_at"]),
        note=reading.text("note", body["note"]),
        algorithms=tuple(
            _algorithm(f"algorithms[{i}]", each)
            for i, each in enumerate(reading.items("algorithms", body["algorithms"]))
        ),
    )


def _algorithm(where: str, body: object) -> AlgorithmTimes:
    if not isinstance(body, dict):
        raise ConfigError(f"{where} is {body!r}", "give a map")
    reading.same_keys(where, body, {f.name for f in fields(AlgorithmTimes)}, RERECORD)
    convolution = reading.text(f"{where}.convolution", body["convolution"])
    algorithm = reading.text(f"{where}.algorithm", body["algorithm"])
    times = []
    for i, each in enumerate(reading.items(f"{where}.times", body["times"])):
        at, entries = f"{where}.times[{i}]", reading.items(f"{where}.times[{i}]", each)
        if len(entries) != 4:
            raise ConfigError(f"{at} is {entries!r}", "give [samples, forward, backward, workspace]")
        samples, forward, backward, workspace = entries
        times.append(
            AlgorithmTiming(
                reading.whole(at, samples),
                reading.number(at, forward),
                reading.number(at, backward),
                reading.whole(at, workspace),
            )
        )
    try:
        return AlgorithmTimes(convolution, algorithm, tuple(times))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.message}", error.remedy) from None


def _layer(index: int, body: object) -> LayerProfile:
    where = f"layers[{index}]"
    if not isinstance(body, dict):
        raise ConfigError(f"{where} is {body!r}", "give a map")
    reading.same_keys(where, body, {f.name for f in fields(LayerProfile)}, RERECORD)
    source: Any = reading.text(f"{where}.source", body["source"])
    try:
        return LayerProfile(
            name=reading.text(f"{where}.name", body["name"]),
            kind=reading.text(f"{where}.kind", body["kind"]),
            inputs=tuple(reading.text(f"{where}.inputs", n) for n in reading.items(f"{where}.inputs", body["inputs"])),
            output_bytes=reading.whole(f"{where}.output_bytes", body["output_bytes"]),
            parameter_bytes=reading.whole(f"{where}.parameter_bytes", body["parameter_bytes"]),
            times=tuple(_timing(f"{where}.times", t) for t in reading.items(f"{where}.times", body["times"])),
            flops=reading.number(f"{where}.flops", body["flops"]),
            source=source,
        )
    except ConfigError as error:
        raise (
            error if error.message.startswith(where) else ConfigError(f"{where}: {error.message}", error.remedy)
        ) from None


def _timing(where: str, value: object) -> Timing:
    entries = reading.items(where, value)
    if len(entries) != 3:
        raise ConfigError(f"{where} has {entries!r}", "give [samples, forward, backward]")
    return Timing(reading.whole(where, entries[0]), *(reading.number(where, each) for each in entries[1:]))
