"""Wavelet's waves on simulated V100s beside the paper's figures: speed-ups and memory over time.

Data-parallel waves: every GPU does the same, so one stands for all. It is simulated block by block
(gpumux/device/sim/gpu.py): a forward pass and the other wave's backward pass run at once as far as their kernels leave
multiprocessors free. Sums over GPUs are kernels on it, which take what a ring would.

Model-parallel waves, plain model parallelism and GPipe: the boxes of gpumux/waves/rotation.py on as many simulated
GPUs. Links are coarse: one message at a time in each direction, at their rate, and a latency.

Coarse, too: costs are a roofline's, float32; memory is counted by layers, without what an allocator adds.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from gpumux.device.sim.cost import Kernel, kernel_of
from gpumux.device.sim.gpu import Gpu
from gpumux.device.sim.spec import A100, GpuSpec
from gpumux.program.profile import OpProfile
from gpumux.simulate.workload import ALLREDUCE_BLOCKS, ALLREDUCE_SENSITIVITY, BUCKET_BYTES
from gpumux.waves.rotation import PartitionSchedule, model_parallel, pipelined, rotation
from microbench import charts, common
from microbench.wave_layers import Layer, elementwise, even_parts, layers_of

V100 = replace(
    A100,
    name="v100",
    title="NVIDIA V100-SXM2-32GB",
    sms=80,
    bandwidth=0.9e12,
    memory_bytes=32 << 30,
    flops={"float32": 15.7e12, "float16": 125e12},
    sources={
        **A100.sources,
        "sms": "NVIDIA V100 architecture whitepaper",
        "bandwidth": "NVIDIA V100 datasheet; a peak",
        "memory_bytes": "NVIDIA V100 datasheet; the paper says neither 16 nor 32 GB",
        "flops": "NVIDIA V100 datasheet, peaks",
    },
)
NVLINK = 25e9  # bytes a second of one link in one direction (the paper, section 4.1.1)
ETHERNET = 25e9 / 8  # between two machines (section 4)
RING = {2: 25e9, 4: 50e9, 8: 125e9}  # of an all-reduce by GPUs; guess, next to NCCL's rates on a DGX-1
PCIE = 6e9  # from the host to each GPU when all load at once: two share a switch of 12 GB/s; guess
LATENCY = 20e-6  # of a message or a sum; guess
SOCKET_BLOCKS = 2  # multiprocessors that a sum over Ethernet takes; guess
OPTIMIZER_PASSES, AVERAGE_PASSES = 5.0, 3.0  # SGD with momentum; (g + previous) * 0.5
EAGER_GAP_S = 8e-6  # between two kernels that Python launches; guess
WARM, MEASURED = 4, 12  # steps left out, and counted
MIB = 2**20

PUBLISHED_DATA = {
    "one machine": "up to 1.88, mean 1.4; VGG below 1.2 (figure 11)",
    "two machines": "up to 1.18, many below 1 (figure 12)",
}
PUBLISHED_MODEL = {  # (model, GPUs, machines): over plain model parallelism, over GPipe
    ("VGG-19-BN", 8, 1): (4.7, 4.4),
    ("BERT-base", 8, 1): (6.7, 4.15),
    ("VGG-19-BN", 8, 2): (2.0, 2.0),
    ("BERT-base", 8, 2): (2.0, 2.0),
    ("BERT-base", 16, 2): (6.5, 4.5),
}


# ---- Tasks on simulated GPUs and links, on one virtual clock.


class Task(NamedTuple):
    """Kernels on a stream of a GPU, or so many seconds of a link; `after`: tasks that have to end before. `holds`: what
    it adds to the memory of GPU `where`, less than 0 for what it frees, as (part of its time, bytes by then)."""

    title: str
    where: int | str
    stream: str
    after: tuple[int, ...]
    kernels: tuple[Kernel, ...] = ()
    seconds: float = 0.0
    holds: tuple[tuple[float, float], ...] = ()


class Span(NamedTuple):
    """When a task ran."""

    started: float
    ended: float


class Tasks:
    """A list of tasks that grows in an order in which they can run."""

    def __init__(self) -> None:
        self.all: list[Task] = []

    def add(
        self, title: str, where: int | str, after: Sequence[int | None], *, stream: str = "compute", **rest: Any
    ) -> int:
        self.all.append(Task(title, where, stream, tuple({each for each in after if each is not None}), **rest))
        return len(self.all) - 1


@dataclass(frozen=True)
class Outcome:
    """`spans` of the tasks; `core`: by GPU, the part of the multiprocessors' time that blocks held, over the run."""

    tasks: Sequence[Task]
    spans: Sequence[Span]
    core: Sequence[float]


def simulate(tasks: Sequence[Task], gpus: int, spec: GpuSpec) -> Outcome:
    """Run the tasks. A stream and a link are in the order in which their tasks became ready."""
    devices = [Gpu(spec) for _ in range(gpus)]
    spans = [Span(inf, inf)] * len(tasks)
    needs = [len(task.after) for task in tasks]
    readers: list[list[int]] = [[] for _ in tasks]
    for i, task in enumerate(tasks):
        for each in task.after:
            readers[each].append(i)
    free: dict[str, float] = {}  # links
    ends: list[tuple[float, int]] = []  # of tasks on links
    now, left = 0.0, len(tasks)

    def begin(i: int) -> None:
        task = tasks[i]
        if isinstance(task.where, int):
            devices[task.where].launch(i, task.stream, 0, task.kernels, now)
            return
        start = max(now, free.get(task.where, 0.0))
        free[task.where] = start + task.seconds
        spans[i] = Span(start, start + task.seconds)
        heapq.heappush(ends, (spans[i].ended, i))

    for i, count in enumerate(needs):
        if not count:
            begin(i)
    while left:
        at, which = min((device.next_event(), place) for place, device in enumerate(devices))
        done: list[int] = []
        if ends and ends[0][0] <= at:
            now, i = heapq.heappop(ends)
            done = [i]
        else:
            if at == inf:
                raise RuntimeError("nothing will ever happen again: the tasks wait for each other")
            for finished in devices[which].advance_to_finish(at):
                spans[finished.launch] = Span(finished.started, finished.ended)
                done.append(finished.launch)
            now = max(now, devices[which].now)
        for i in done:
            left -= 1
            for reader in readers[i]:
                needs[reader] -= 1
                if not needs[reader]:
                    begin(reader)
    core = []
    for device in devices:
        device.advance(now)
        core.append(sum(device.busy().sm_seconds.values()) / spec.sms / now)
    return Outcome(tasks, spans, core)


def _kernels(layers: Sequence[Layer], direction: str) -> tuple[Kernel, ...]:
    if direction == "forward":
        return tuple(kernel for layer in layers for kernel in layer.forward)
    return tuple(kernel for layer in reversed(layers) for kernel in layer.backward)


def _holds(layers: Sequence[Layer], direction: str, spec: GpuSpec) -> tuple[tuple[float, float], ...]:
    """What a pass adds or frees: a forward pass each layer's bytes when the layer begins, a backward pass when it has
    ended. Parts of the time are those of the layers' times alone."""
    backward = direction == "backward"
    ordered = list(reversed(layers)) if backward else list(layers)
    times = [layer.seconds(spec)[backward] for layer in ordered]
    total, at, held = sum(times), 0.0, 0.0
    points = [(0.0, 0.0)]
    for layer, seconds in zip(ordered, times, strict=True):
        if backward:
            at += seconds
        points.append((at / total, held))
        held += -layer.saved if backward else layer.saved
        points.append((at / total, held))
        if not backward:
            at += seconds
    return (*points, (1.0, held))


def _sum_kernel(nbytes: int, gpus: int, machines: int, spec: GpuSpec) -> Kernel:
    """An all-reduce, as each GPU sees it. Between machines Ethernet is the slowest part of the ring."""
    if machines == 1:
        seconds = LATENCY + 2 * (gpus - 1) / gpus * nbytes / RING[gpus]
        op = OpProfile("nccl.all_reduce", (), seconds, 3 * nbytes, ALLREDUCE_BLOCKS, 1, ALLREDUCE_SENSITIVITY)
    else:
        seconds = LATENCY + 2 * (machines - 1) / machines * nbytes / ETHERNET
        op = OpProfile("nccl.all_reduce", (), seconds, 3 * nbytes, SOCKET_BLOCKS, 1, 1.0)
    return kernel_of(op, spec)


# ---- Data parallelism: one GPU of several.


@dataclass(frozen=True)
class Cluster:
    """So many GPUs, evenly on one or two machines."""

    gpus: int
    machines: int = 1

    @property
    def title(self) -> str:
        return f"{self.gpus}" if self.machines == 1 else f"{self.gpus // 2}+{self.gpus // 2}"

    def link(self, source: int, target: int) -> tuple[str, float]:
        """The name and rate of the link between two GPUs. All that crosses machines in one direction shares one."""
        half = self.gpus // self.machines
        if source // half != target // half:
            return f"ethernet {source // half}>{target // half}", ETHERNET
        return f"nvlink {source}>{target}", NVLINK


def gang(layers: Sequence[Layer], cluster: Cluster, spec: GpuSpec, steps: int, *, buckets: bool = False) -> Tasks:
    """Synchronous steps. The sum comes after the backward pass, as the paper draws it, or `buckets`: beside it, as in
    torch's DistributedDataParallel."""
    tasks = Tasks()
    parameters = sum(layer.parameters for layer in layers)
    update = (elementwise("sgd", parameters, OPTIMIZER_PASSES, spec),)
    rises = _holds(layers, "forward", spec)
    parts = list(_buckets(layers)) if buckets else [tuple(layers)]
    before: int | None = None
    for m in range(steps):
        at = tasks.add(f"F{m}", 0, [before], kernels=_kernels(layers, "forward"), holds=rises)
        sums = []
        for part in parts:
            falls = _holds(part, "backward", spec)
            at = tasks.add(f"B{m}", 0, [at], kernels=_kernels(part, "backward"), holds=falls)
            nbytes = sum(layer.parameters for layer in part)
            kernel = _sum_kernel(nbytes, cluster.gpus, cluster.machines, spec)
            sums.append(tasks.add(f"S{m}", 0, [at], stream="sums", kernels=(kernel,)))
        before = tasks.add(f"U{m}", 0, sums, kernels=update)
    return tasks


def _buckets(layers: Sequence[Layer]) -> Sequence[tuple[Layer, ...]]:
    """From the last layer on, as many as have a bucket's bytes of gradients."""
    found: list[tuple[Layer, ...]] = []
    part: list[Layer] = []
    for layer in reversed(layers):
        part.insert(0, layer)
        if sum(each.parameters for each in part) >= BUCKET_BYTES:
            found.append(tuple(part))
            part = []
    return [*found, tuple(part)] if part else found


def data_waves(layers: Sequence[Layer], cluster: Cluster, spec: GpuSpec, batches: int) -> Tasks:
    """Two waves, aligned as appendix B.1.1 says: a forward pass begins when the one before has ended, and a backward
    pass likewise. Gradients are averaged with the last batch's, then summed over GPUs, then applied."""
    tasks = Tasks()
    parameters = sum(layer.parameters for layer in layers)
    average = (elementwise("average", parameters, AVERAGE_PASSES, spec),)
    update = (elementwise("sgd", parameters, OPTIMIZER_PASSES, spec),)
    total = (_sum_kernel(parameters, cluster.gpus, cluster.machines, spec),)
    rises, falls = _holds(layers, "forward", spec), _holds(layers, "backward", spec)
    forward: list[int] = []
    backward: list[int] = []
    updates: list[int] = []
    for m in range(batches):
        wave = f"wave {m % 2}"
        forward.append(
            tasks.add(
                f"F{m}", 0, [*forward[-1:], *updates[m - 2 : m - 1]] if m > 1 else forward[-1:], stream=wave,
                kernels=_kernels(layers, "forward"), holds=rises,
            )
        )  # fmt: skip
        after = [forward[-1], *backward[-1:]]
        backward.append(tasks.add(f"B{m}", 0, after, stream=wave, kernels=_kernels(layers, "backward"), holds=falls))
        mean = tasks.add(f"G{m}", 0, [*backward[-2:]], stream=wave, kernels=average)
        summed = tasks.add(f"S{m}", 0, [mean], stream="sums", kernels=total)
        updates.append(tasks.add(f"U{m}", 0, [summed], stream=wave, kernels=update))
    return tasks


def step_seconds(outcome: Outcome, count: int) -> float:
    """Between the ends of `count` updates, on average, those that warm up left out."""
    ends = [span.ended for task, span in zip(outcome.tasks, outcome.spans, strict=True) if task.title.startswith("U")]
    per = len(ends) // count  # updates a step
    ends = [max(ends[i * per : (i + 1) * per]) for i in range(count)]
    return (ends[-1] - ends[WARM - 1]) / (count - WARM)


@dataclass
class Memory:
    """Bytes on a GPU over time: at rest, on average and at most, and as (seconds, bytes) points."""

    rest: int
    mean: float
    peak: float
    points: list[tuple[float, float]] = field(default_factory=list)

    @property
    def figures(self) -> dict[str, float]:
        return {
            "rest_mib": round(self.rest / MIB),
            "mean_mib": round(self.mean / MIB),
            "peak_mib": round(self.peak / MIB),
            "mean_over_peak": round(self.mean / self.peak, 3),
        }


def memory(outcome: Outcome, gpu: int, rest: int, window: tuple[float, float], samples: int = 400) -> Memory:
    """A GPU's memory in a window of time. A pass that runs beside another is taken as slower by the same everywhere."""
    points = []
    changes = [
        (span, task.holds)
        for task, span in zip(outcome.tasks, outcome.spans, strict=True)
        if task.holds and task.where == gpu
    ]
    for i in range(samples):
        now = window[0] + (window[1] - window[0]) * (i + 0.5) / samples
        held = 0.0
        for span, holds in changes:
            held += _at(holds, (now - span.started) / max(span.ended - span.started, 1e-12))
        points.append((now - window[0], rest + held))
    values = [value for _, value in points]
    return Memory(rest, fmean(values), max(values), points)


def _at(points: Sequence[tuple[float, float]], part: float) -> float:
    """The bytes by that part of the time."""
    if part <= 0.0:
        return 0.0
    if part >= 1.0:
        return points[-1][1]
    return points[bisect_right(points, (part, inf)) - 1][1]


def _window(outcome: Outcome, steps: int, shown: int) -> tuple[float, float]:
    """From the end of the warm-up's updates, `shown` steps long."""
    ends = [span.ended for task, span in zip(outcome.tasks, outcome.spans, strict=True) if task.title.startswith("U")]
    per = len(ends) // steps
    return max(ends[: WARM * per]), max(ends[: (WARM + shown) * per])


# Parameters, gradients and momentum; waves have all of them twice, and share nothing.
STATE = 3


def data_parallel(model: str, batch: int, cluster: Cluster, spec: GpuSpec) -> dict[str, Any]:
    """Throughput and memory of two waves over the same batch's and over the doubled batch's synchronous training."""
    steps = WARM + MEASURED
    layers, doubled = layers_of(model, batch, spec), layers_of(model, 2 * batch, spec)
    parameters = sum(layer.parameters for layer in layers)
    runs = {
        "gang": (simulate(gang(layers, cluster, spec, steps).all, 1, spec), batch, STATE),
        "buckets": (simulate(gang(layers, cluster, spec, steps, buckets=True).all, 1, spec), batch, STATE),
        "doubled": (simulate(gang(doubled, cluster, spec, steps).all, 1, spec), 2 * batch, STATE),
        "waves": (simulate(data_waves(layers, cluster, spec, steps).all, 1, spec), batch, 2 * STATE),
    }
    rates = {name: samples / step_seconds(run, steps) for name, (run, samples, _) in runs.items()}
    held = {
        name: memory(run, 0, state * parameters, _window(run, steps, 4)).figures
        for name, (run, _, state) in runs.items()
    }
    return {
        "model": model,
        "batch": batch,
        "gpus": cluster.title,
        "samples_per_s": {name: round(rate, 2) for name, rate in rates.items()},
        "over_gang": round(rates["waves"] / rates["gang"], 3),
        "over_buckets": round(rates["waves"] / rates["buckets"], 3),
        "over_doubled": round(rates["waves"] / rates["doubled"], 3),
        "core": {name: round(run.core[0], 3) for name, (run, _, _) in runs.items()},
        "memory": held,
    }


# ---- Model parallelism: the schedules' boxes.


def partition_tasks(
    schedule: PartitionSchedule,
    parts: Sequence[Sequence[Layer]],
    cluster: Cluster,
    spec: GpuSpec,
    *,
    steps: int,
    swaps: bool = True,
) -> Tasks:
    """So many optimizer steps of a schedule. A device's boxes follow each other in the schedule's order. `swaps`:
    weights come and go as the schedule says; otherwise all lie on every device that uses them."""
    tasks = Tasks()
    updated: dict[tuple[int, int], int] = {}  # (device, partition): its last update
    last: dict[int, int] = {}  # device: its last box
    weights = [sum(layer.parameters for layer in part) for part in parts]
    kept = {
        (m, direction): _holds(part, direction, spec)
        for m, part in enumerate(parts)
        for direction in ("forward", "backward")
    }
    sums = [
        () if cluster.gpus == 1 else (_sum_kernel(max(nbytes, 4), cluster.gpus, cluster.machines, spec),)
        for nbytes in weights
    ]
    swaps = swaps and any(box.loads is not None for box in schedule.boxes)
    for step in range(steps):
        sent: dict[Any, int] = {}
        loaded: dict[tuple[int, int], int] = {}
        averaged: dict[tuple[int, int], int] = {}
        for cycle in range(schedule.cycles):
            boxes = schedule.in_cycle(cycle)
            began = {box.device: last.get(box.device) for box in boxes}
            for box in boxes:
                m, device = box.partition, box.device
                forward = box.direction == "forward"
                after = [*(sent[each] for each in box.receives), last.get(device), loaded.get((device, m))]
                if forward:
                    after.append(updated.get((device, m)))
                title = f"{box.label} of step {step}"
                kernels = _kernels(parts[m], box.direction)
                last[device] = tasks.add(title, device, after, kernels=kernels, holds=kept[m, box.direction])
                for transfer in box.sends:
                    nbytes = parts[m][-1].output if forward else parts[m - 1][-1].output
                    if transfer.source == transfer.target:
                        sent[transfer] = last[device]
                        continue
                    link, rate = cluster.link(transfer.source, transfer.target)
                    sent[transfer] = tasks.add(
                        f"send of {title}", link, [last[device]], seconds=LATENCY + nbytes / rate
                    )
            if swaps:
                for box in boxes:
                    place = f"pcie {box.device}"
                    ready = began[box.device]
                    if box.stores is not None:  # goes when it is updated
                        ready = tasks.add(
                            f"store {box.stores}", place, [averaged[box.device, box.stores]],
                            seconds=weights[box.stores] / PCIE,
                        )  # fmt: skip
                    if box.loads is not None:
                        loaded[box.device, box.loads] = tasks.add(
                            f"load {box.loads}", place, [ready, updated.get((box.device, box.loads))],
                            seconds=weights[box.loads] / PCIE,
                        )  # fmt: skip
            for reduction in schedule.reductions:
                if reduction.after != cycle:
                    continue
                ends = [last[device] for device in reduction.devices]
                m = reduction.partition
                for device in reduction.devices:
                    at: Sequence[int] = ends
                    if len(reduction.devices) > 1:
                        at = [tasks.add(f"S{m}", device, ends, stream="sums", kernels=sums[m])]
                    update = (elementwise("sgd", max(weights[m], 4), OPTIMIZER_PASSES, spec),)
                    averaged[device, m] = updated[device, m] = tasks.add(
                        f"U{m}", device, at, stream="sums", kernels=update
                    )
    return tasks


def model_parallelism(model: str, batch: int, cluster: Cluster, spec: GpuSpec) -> dict[str, Any]:
    """Throughput and memory of model-parallel waves and what they are compared with. GPipe's batch is cut in as many
    microbatches as GPUs; `pipelined, larger`: its batch has as many times the samples, as the waves have in flight."""
    n, steps = cluster.gpus, WARM + 3
    bounds = _names(even_parts(layers_of(model, batch, spec), n, spec))
    whole = _cut(layers_of(model, batch, spec), bounds)
    small = _cut(layers_of(model, max(1, batch // n), spec), bounds)
    ways: dict[str, tuple[PartitionSchedule, Sequence[Sequence[Layer]], int, bool]] = {
        "plain": (model_parallel(n), whole, batch, False),
        "pipelined": (pipelined(n, n), small, max(1, batch // n) * n, False),
        "pipelined, larger": (pipelined(n, n), whole, batch * n, False),
        "waves": (rotation(n), whole, batch * n, False),
        "waves, swapping": (rotation(n), whole, batch * n, True),
    }
    rates, held, core = {}, {}, {}
    for name, (schedule, parts, samples, swaps) in ways.items():
        run = simulate(partition_tasks(schedule, parts, cluster, spec, steps=steps, swaps=swaps).all, n, spec)
        rates[name] = samples / step_seconds(run, steps)
        sizes = [sum(layer.parameters for layer in part) for part in parts]
        window = _window(run, steps, 2)
        by_gpu = [memory(run, gpu, STATE * _resident(schedule, sizes, gpu, swaps), window).figures for gpu in range(n)]
        held[name] = max(by_gpu, key=lambda each: each["peak_mib"])
        core[name] = round(fmean(run.core), 3)
    return {
        "model": model,
        "batch": batch,
        "gpus": cluster.title,
        "samples_per_s": {name: round(rate, 2) for name, rate in rates.items()},
        "waves_over": {name: round(rates["waves"] / rate, 3) for name, rate in rates.items() if name != "waves"},
        "largest_part": round(max(_shares(whole, spec)) * n, 2),
        "core": core,
        "memory": held,
    }


def _resident(schedule: PartitionSchedule, sizes: Sequence[int], gpu: int, swaps: bool) -> int:
    """Bytes of weights that lie on a GPU at most."""
    phases = [phase for box in schedule.boxes if box.device == gpu for phase in box.resident]
    if swaps:
        return max(sum(sizes[m] for m in phase) for phase in phases)
    return sum(sizes[m] for m in {m for phase in phases for m in phase})


def _names(parts: Sequence[Sequence[Layer]]) -> list[str]:
    return [part[0].name for part in parts]


def _cut(layers: Sequence[Layer], firsts: Sequence[str]) -> list[tuple[Layer, ...]]:
    names = [layer.name for layer in layers]
    bounds = [*(names.index(each) for each in firsts), len(layers)]
    return [tuple(layers[a:b]) for a, b in pairwise(bounds)]


def _shares(parts: Sequence[Sequence[Layer]], spec: GpuSpec) -> list[float]:
    times = [sum(sum(layer.seconds(spec)) for layer in part) for part in parts]
    return [each / sum(times) for each in times]


# ---- The command.

DATA_MODELS = (("VGG-16", 64), ("VGG-19-BN", 64), ("ResNet-50", 64), ("ResNet-101", 64))
SMALL = (("ResNet-50", 4), ("ResNet-50", 1))  # whose kernels leave multiprocessors free
DATA_CLUSTERS = (Cluster(2), Cluster(4), Cluster(8), Cluster(2, 2), Cluster(8, 2), Cluster(16, 2))
MODEL_CASES = (
    ("VGG-19-BN", 64, Cluster(4)),
    ("VGG-19-BN", 64, Cluster(8)),
    ("BERT-base", 16, Cluster(4)),
    ("BERT-base", 16, Cluster(8)),
    ("VGG-19-BN", 64, Cluster(8, 2)),
    ("BERT-base", 16, Cluster(8, 2)),
    ("BERT-base", 16, Cluster(16, 2)),
)


def data_rows() -> list[dict[str, Any]]:
    found = []
    cases = [(model, batch, cluster, V100) for model, batch in DATA_MODELS for cluster in DATA_CLUSTERS]
    eager = replace(V100, node_gap_s=EAGER_GAP_S)
    cases += [(model, batch, Cluster(2), spec) for model, batch in (*DATA_MODELS, *SMALL) for spec in (V100, eager)]
    for model, batch, cluster, spec in dict.fromkeys(cases):
        found.append(
            {"launched": "kernel by kernel" if spec is eager else "as a graph"}
            | data_parallel(model, batch, cluster, spec)
        )
    return found


def data_table(found: Sequence[dict[str, Any]]) -> str:
    header = (
        *("model, batch, GPUs", "over gang", "over buckets", "over doubled", "core gang", "waves"),
        *("MiB gang", "doubled", "waves"),
    )
    lines = []
    for row in found:
        title = f"{row['model']}, {row['batch']}, {row['gpus']}"
        lines.append(
            [
                title + ("" if row["launched"] == "as a graph" else ", eager"),
                *(f"{row[name]:.2f}" for name in ("over_gang", "over_buckets", "over_doubled")),
                *(f"{100 * row['core'][name]:.0f} %" for name in ("gang", "waves")),
                *(f"{row['memory'][name]['peak_mib']:,.0f}" for name in ("gang", "doubled", "waves")),
            ]
        )
    paper = "; ".join(f"{where}: {text}" for where, text in PUBLISHED_DATA.items())
    return f"{common.table(header, lines)}\npublished over gang, {paper}"


def model_table(found: Sequence[dict[str, Any]]) -> str:
    header = (
        *("model, batch, GPUs", "over plain", "paper", "over GPipe", "paper", "over larger", "swapping"),
        *("MiB plain", "GPipe", "larger", "waves", "swapping"),
    )
    lines = []
    for row in found:
        machines = 2 if "+" in row["gpus"] else 1
        gpus = sum(map(int, row["gpus"].split("+")))
        plain, pipe = PUBLISHED_MODEL.get((row["model"], gpus, machines), (None, None))
        over = row["waves_over"]
        peaks = [row["memory"][name]["peak_mib"] for name in row["samples_per_s"]]
        lines.append(
            [
                f"{row['model']}, {row['batch']}, {row['gpus']}",
                f"{over['plain']:.2f}", "" if plain is None else f"{plain:.2f}",
                f"{over['pipelined']:.2f}", "" if pipe is None else f"{pipe:.2f}",
                f"{over['pipelined, larger']:.2f}",
                f"{over['plain'] / over['waves, swapping']:.2f}",
                *(f"{each:,.0f}" for each in peaks),
            ]
        )  # fmt: skip
    return common.table(header, lines)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = common.parser(__doc__)
    arguments.add_argument("--picture", type=common.new_file, metavar="FILE.svg", help="draw memory over time")
    args = arguments.parse_args(argv)
    data = data_rows()
    print(data_table(data))
    print()
    models = [model_parallelism(model, batch, cluster, V100) for model, batch, cluster in MODEL_CASES]
    print(model_table(models))
    shown = over_time()
    result = {"device": V100.title, "data_parallel": data, "model_parallel": models, "memory_over_time": shown}
    common.report("waves", args.out, result)
    if args.picture:
        draw(args.picture, shown)
    return 0


def over_time(samples: int = 60) -> list[dict[str, Any]]:
    """Memory over time, in MiB at evenly spaced moments, by GPU: as figures 1, 2, 16 and 17 (one GPU stands for both)
    and figure 5 show it."""
    steps, found = WARM + 4, []
    layers = layers_of("ResNet-50", 64, V100)
    parameters = sum(layer.parameters for layer in layers)
    for title, tasks, state in (
        ("ResNet-50, two GPUs: synchronous", gang(layers, Cluster(2), V100, steps), STATE),
        ("ResNet-50, two GPUs: two waves", data_waves(layers, Cluster(2), V100, steps), 2 * STATE),
    ):
        run = simulate(tasks.all, 1, V100)
        found.append(_shown(title, run, [state * parameters], _window(run, steps, 3), samples))
    parts = even_parts(layers_of("BERT-base", 16, V100), 4, V100)
    sizes = [sum(layer.parameters for layer in part) for part in parts]
    for title, schedule in (
        ("BERT-base, four GPUs: plain model parallelism", model_parallel(4)),
        ("BERT-base, four GPUs: waves", rotation(4)),
    ):
        run = simulate(partition_tasks(schedule, parts, Cluster(4), V100, steps=steps, swaps=False).all, 4, V100)
        rests = [STATE * _resident(schedule, sizes, gpu, False) for gpu in range(4)]
        found.append(_shown(title, run, rests, _window(run, steps, 2), samples))
    return found


def _shown(title: str, run: Outcome, rests: Sequence[int], window: tuple[float, float], samples: int) -> dict[str, Any]:
    by_gpu = [
        [round(value / MIB) for _, value in memory(run, gpu, rest, window, samples).points]
        for gpu, rest in enumerate(rests)
    ]
    return {"title": title, "seconds": round(window[1] - window[0], 4), "mib": by_gpu}


def draw(path: Path, shown: Sequence[dict[str, Any]]) -> None:
    panels = []
    for each in shown:
        curves = {}
        for gpu, values in enumerate(each["mib"]):
            at = [(i + 0.5) / len(values) * each["seconds"] for i in range(len(values))]
            curves[f"GPU {gpu}"] = [(x, y / 1024, y / 1024, y / 1024) for x, y in zip(at, values, strict=True)]
        panels.append(charts.Panel(each["title"], curves))
    kinds = {f"GPU {gpu}": f"GPU {gpu}" for gpu in range(max((len(each["mib"]) for each in shown), default=0))}
    charts.curves(
        path, "simulated memory over time", panels, kinds, ("time (s)", "memory (GiB)"), columns=2, doubling=False
    )


if __name__ == "__main__":
    raise SystemExit(main())
