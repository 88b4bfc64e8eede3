"""A burst-parallel plan as a JSON file: which layer runs when, on which GPUs, and what has to end before it.

    {"format": "gpumux-burst-plan", "version": 1,
     "units": {"comm": "s", "comp": "s", "sync": "s", "bandwidth": "B/s", "output_bytes": "B a sample",
               "parameter_bytes": "B"},
     "model": "vgg16", "device": "a100", "algorithm": "optimal", "gpus": 8, "batch": 32, "limit": 2.0,
     "network": {"name": "nvswitch", "bandwidth": 3e11, "latency": 1e-05}, "seconds": 0.0086, "single_seconds": 0.054,
     "layers": [{"name": "features.0", "kind": "Conv2d", "output_bytes": 12845056, "parameter_bytes": 7168,
                 "forward": 0.33}, ...],
     "rows": [{"layer": 0, "start": 0.0, "comm": 0.0, "comp": 0.0005, "sync": 2e-05, "first": 0, "gpus": 8,
               "transfer": false, "after": []}, ...],
     "data_parallel": [[...], ...], "fewer": [{"gpus": 4, "rows": [...]}, ...]}

`rows` stand in an order in which they can run: a row starts when the rows that `after` names by their places have
ended. `forward` is the forward pass's part of a layer's computation. `data_parallel` has the rows of the same model
with every layer on one number of GPUs, for each number that the planner was allowed. `fewer` has the plans for those of
these numbers that are smaller than the cluster, by which a job goes on that lost GPUs; older files have none. Nothing
is guessed when a file is read: a missing or unknown key, a value out of range, or rows that contradict each other are a
ConfigError that names the place.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import inf, isfinite
from pathlib import Path
from typing import Any, NamedTuple

from gpumux import files
from gpumux.errors import ConfigError
from gpumux.program import reading

FORMAT = "gpumux-burst-plan"
VERSION = 1
UNITS = {
    "comm": "s", "comp": "s", "sync": "s", "bandwidth": "B/s", "output_bytes": "B a sample", "parameter_bytes": "B",
}  # fmt: skip
MOST_GPUS = 4096
TOLERANCE = 1e-9  # relative: what sums of seconds may differ by
REPLAN = "save it again with `gpumux plan burst MODEL --save FILE`, or mend the file"


@dataclass(frozen=True, slots=True)
class PlanRow:
    """A layer on GPUs `first` to `first + gpus - 1`, for `seconds` from `start` on: `comm` to move its input there,
    then comp, then sync. A transfer into a joining layer has a row of its own, on the sending GPUs, with `transfer`
    True and `layer` the sending layer; one that takes time on no GPU of the plan has `gpus` 0. `after`: the places, in
    the plan's rows, of those that have to end before it starts; it starts when the last of them ends."""

    layer: int
    start: float
    comm: float
    comp: float
    sync: float
    first: int
    gpus: int
    transfer: bool = False
    after: tuple[int, ...] = ()

    @property
    def seconds(self) -> float:
        return self.comm + self.comp + self.sync

    @property
    def end(self) -> float:
        return self.start + self.seconds


class PlannedLayer(NamedTuple):
    """What is known of a layer beside its times: bytes of one sample's output and of its parameters, and the forward
    pass's part of its computation."""

    name: str
    kind: str
    output_bytes: int
    parameter_bytes: int
    forward: float


class SmallerPlan(NamedTuple):
    """The rows of a plan for fewer GPUs."""

    gpus: int
    rows: tuple[PlanRow, ...]


class PlanNetwork(NamedTuple):
    """The network that a plan was made for, in bytes a second and seconds."""

    name: str
    bandwidth: float
    latency: float


@dataclass(frozen=True)
class SavedPlan:
    """A plan apart from the planner. gpus: the cluster's size. batch: samples of one iteration, all GPUs together.
    limit: of the amplification, inf for none. single_seconds: one iteration on one GPU. Raises ConfigError for values
    out of range and for rows that contradict each other."""

    model: str
    device: str
    algorithm: str
    gpus: int
    batch: int
    limit: float
    network: PlanNetwork
    seconds: float
    single_seconds: float
    layers: tuple[PlannedLayer, ...]
    rows: tuple[PlanRow, ...]
    data_parallel: tuple[tuple[PlanRow, ...], ...] = ()
    fewer: tuple[SmallerPlan, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.gpus <= MOST_GPUS or self.batch < 1:
            raise ConfigError(
                f"{self.gpus} GPUs and a batch of {self.batch}", f"give 1 to {MOST_GPUS} GPUs and a batch"
            )
        for what, value in (("seconds", self.seconds), ("single_seconds", self.single_seconds)):
            if not (isfinite(value) and value >= 0):
                raise ConfigError(f"{what} is {value}", "times are seconds of 0 or more")
        if not self.limit >= 1:
            raise ConfigError(f"limit is {self.limit}", "give 1 or more, or null for none")
        if not (0 < self.network.bandwidth < inf and 0 <= self.network.latency < inf):
            raise ConfigError(f"the network is {tuple(self.network)}", "give bytes a second above 0, and seconds")
        for layer in self.layers:
            if layer.output_bytes < 0 or layer.parameter_bytes < 0 or not 0 <= layer.forward <= 1:
                raise ConfigError(f"layer {layer.name!r} is {tuple(layer)}", "sizes are 0 or more, forward is a share")
        check_rows("rows", self.rows, len(self.layers), self.gpus)
        for i, rows in enumerate(self.data_parallel):
            check_rows(f"data_parallel[{i}]", rows, len(self.layers), self.gpus)
        for i, each in enumerate(self.fewer):
            if not 1 < each.gpus < self.gpus:
                raise ConfigError(f"fewer[{i}] is for {each.gpus} GPUs", f"give 2 to {self.gpus - 1}")
            check_rows(f"fewer[{i}]", each.rows, len(self.layers), each.gpus)
        ends = max(row.end for row in self.rows)
        if abs(ends - self.seconds) > TOLERANCE * max(ends, self.seconds):
            raise ConfigError(f"seconds is {self.seconds}, and the last row ends at {ends}", REPLAN)


def check_rows(where: str, rows: Sequence[PlanRow], layers: int, gpus: int) -> None:
    """Check that rows can run as they say. Raises ConfigError that names the place."""
    if not rows:
        raise ConfigError(f"{where} is empty", REPLAN)
    last: dict[int, tuple[float, int]] = {}  # of each GPU: when it is free, and after which row
    tolerance = TOLERANCE * max(1e-9, *(row.end for row in rows))
    for place, row in enumerate(rows):
        here = f"{where}[{place}]"
        if not 0 <= row.layer < layers:
            raise ConfigError(f"{here} is of layer {row.layer}", f"there are {layers} layers, counted from 0")
        if not all(isfinite(t) and t >= 0 for t in (row.start, row.comm, row.comp, row.sync)):
            raise ConfigError(f"{here} has a time that is negative or no number", "times are seconds of 0 or more")
        if row.first < 0 or row.gpus < (0 if row.transfer else 1) or row.first + row.gpus > gpus:
            raise ConfigError(f"{here} is on {row.gpus} GPUs from {row.first} on", f"the cluster has {gpus}")
        if not all(0 <= each < place for each in row.after):
            raise ConfigError(f"{here} waits for {row.after}", "rows wait for rows before them")
        ready = max((rows[each].end for each in row.after), default=0.0)
        if abs(row.start - ready) > tolerance:
            raise ConfigError(f"{here} starts at {row.start}, and what it waits for ends at {ready}", REPLAN)
        for gpu in range(row.first, row.first + row.gpus if row.seconds else row.first):
            free, before = last.get(gpu, (0.0, -1))
            if row.start < free - tolerance:
                raise ConfigError(f"{here} starts on GPU {gpu} before {where}[{before}] has ended there", REPLAN)
            last[gpu] = row.end, place


# ---- files


def save(plan: SavedPlan, path: Path) -> None:
    """Write a plan, one row a line. Raises ConfigError if the file can't be written."""
    files.write_text(path, dumps(plan))


def dumps(plan: SavedPlan) -> str:
    """The file's text, one layer or row a line."""
    head: dict[str, Any] = {"format": FORMAT, "version": VERSION, "units": UNITS}
    for each in fields(SavedPlan):
        if each.name not in ("layers", "rows", "data_parallel", "fewer"):
            head[each.name] = getattr(plan, each.name)
    head["limit"] = plan.limit if isfinite(plan.limit) else None
    head["network"] = plan.network._asdict()
    layers = ",\n  ".join(json.dumps(layer._asdict()) for layer in plan.layers)
    others = ",\n".join(_listed(rows, "  ") for rows in plan.data_parallel)
    fewer = ",\n".join(f'  {{"gpus": {gpus}, "rows": {_listed(rows, "  ").lstrip()}}}' for gpus, rows in plan.fewer)
    parts = [
        json.dumps(head, indent=1)[:-2],
        f' "layers": [\n  {layers}\n ]',
        f' "rows": {_listed(plan.rows, " ").lstrip()}',
        f' "data_parallel": [\n{others}\n ]',
        f' "fewer": [\n{fewer}\n ]',
    ]
    return ",\n".join(parts) + "\n}\n"


def _listed(rows: Sequence[PlanRow], indent: str) -> str:
    inside = f",\n{indent} ".join(json.dumps(asdict(row)) for row in rows)
    return f"{indent}[\n{indent} {inside}\n{indent}]"


def load(path: Path) -> SavedPlan:
    """Read a plan. Raises ConfigError, which names the file and the place, for any fault."""
    body = reading.read_text(path, "a plan that `gpumux plan burst --save` wrote")
    try:
        return loads(body)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}", error.remedy) from None


def loads(text: str) -> SavedPlan:
    """The plan in a file's text. Raises ConfigError."""
    body = reading.header(text, FORMAT, VERSION, UNITS, REPLAN, "plan")
    names = {f.name for f in fields(SavedPlan)}
    body.setdefault("fewer", [])
    reading.same_keys("the plan", body, names | {"format", "version", "units"}, REPLAN)
    network = _map("network", body["network"], set(PlanNetwork._fields))
    return SavedPlan(
        model=reading.text("model", body["model"]),
        device=reading.text("device", body["device"]),
        algorithm=reading.text("algorithm", body["algorithm"]),
        gpus=reading.whole("gpus", body["gpus"]),
        batch=reading.whole("batch", body["batch"]),
        limit=inf if body["limit"] is None else reading.number("limit", body["limit"]),
        network=PlanNetwork(
            reading.text("network.name", network["name"]),
            reading.number("network.bandwidth", network["bandwidth"]),
            reading.number("network.latency", network["latency"]),
        ),
        seconds=reading.number("seconds", body["seconds"]),
        single_seconds=reading.number("single_seconds", body["single_seconds"]),
        layers=tuple([_layer(f"layers[{i}]", each) for i, each in enumerate(reading.items("layers", body["layers"]))]),
        rows=_rows("rows", body["rows"]),
        data_parallel=tuple(
            [
                _rows(f"data_parallel[{i}]", rows)
                for i, rows in enumerate(reading.items("data_parallel", body["data_parallel"]))
            ]
        ),
        fewer=tuple([_smaller(f"fewer[{i}]", each) for i, each in enumerate(reading.items("fewer", body["fewer"]))]),
    )


def _smaller(where: str, value: object) -> SmallerPlan:
    body = _map(where, value, set(SmallerPlan._fields))
    return SmallerPlan(reading.whole(f"{where}.gpus", body["gpus"]), _rows(f"{where}.rows", body["rows"]))


def _layer(where: str, value: object) -> PlannedLayer:
    body = _map(where, value, set(PlannedLayer._fields))
    return PlannedLayer(
        reading.text(f"{where}.name", body["name"]),
        reading.text(f"{where}.kind", body["kind"]),
        reading.whole(f"{where}.output_bytes", body["output_bytes"]),
        reading.whole(f"{where}.parameter_bytes", body["parameter_bytes"]),
        reading.number(f"{where}.forward", body["forward"]),
    )


def _rows(where: str, value: object) -> tuple[PlanRow, ...]:
    return tuple([_row(f"{where}[{i}]", each) for i, each in enumerate(reading.items(where, value))])


def _row(where: str, value: object) -> PlanRow:
    body = _map(where, value, {f.name for f in fields(PlanRow)})
    return PlanRow(
        layer=reading.whole(f"{where}.layer", body["layer"]),
        start=reading.number(f"{where}.start", body["start"]),
        comm=reading.number(f"{where}.comm", body["comm"]),
        comp=reading.number(f"{where}.comp", body["comp"]),
        sync=reading.number(f"{where}.sync", body["sync"]),
        first=reading.whole(f"{where}.first", body["first"]),
        gpus=reading.whole(f"{where}.gpus", body["gpus"]),
        transfer=reading.flag(f"{where}.transfer", body["transfer"]),
        after=tuple([reading.whole(f"{where}.after", each) for each in reading.items(f"{where}.after", body["after"])]),
    )


def _map(where: str, value: object, keys: set[str]) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where} is {value!r}", "give a map")
    reading.same_keys(where, value, keys, REPLAN)
    return value
