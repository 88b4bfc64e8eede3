"""The simulated GPU beside figures that others published for real ones (microbench/figures), in three tiers.

Mechanisms: what hardware does whatever its constants. Calibration: figures that constants of the simulator may be
chosen by, but for those held out: every second row, by a hash of its id, that no constant names as its source. Rows
that the simulator has no model for count as missed. Collocation, never fitted: Orion's configurations of figures 7 and
10 on its own kernel traces, and XSched's preemption latencies.

Each row runs on the device as it is and at both ends of what its guesses may be: `simulated` is the value on the device
as it is, `least` and `most` those over all of these. A claim about a policy holds only if it does on all of them."""

from __future__ import annotations

import csv
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from math import inf, isfinite
from pathlib import Path
from random import Random
from statistics import mean, median
from typing import Any, NamedTuple

from gpumux.device.sim.cost import OTHER_ISSUE, PRODUCT_ISSUE, Kernel, kernel_of, product, solo_seconds, wave_seconds
from gpumux.device.sim.gpu import Gpu
from gpumux.device.sim.spec import A100, A100_80GB, H200, PRESETS, V100, GpuSpec
from gpumux.program.profile import OpProfile
from gpumux.simulate.run import simulate
from gpumux.simulate.workload import Workload
from gpumux.types import Priority
from microbench import common

FIGURES = Path(__file__).parent / "figures"
NEAR, MEDIAN = 0.20, 0.10  # held-out rows: each within the one, half of them within the other
US = 1e-6
SAMPLES = 200  # preemptions of each kernel time

# ---- the devices: as they are, and at the ends of their guesses

# For rows measured on an RTX 5090: its size from the datasheet, its bandwidth from membw-saturation-340. Without host
# or gaps, as those rows are of kernels that run for long.
RTX5090 = replace(
    A100, name="rtx5090", sms=170, bandwidth=1.2036e12, l2_bytes=96 << 20, l2_bandwidth=2.8 * 1.2036e12,
    flops={**A100.flops, "float32": 104.8e12}, call_s=0.0, graph_s=0.0, graph_node_s=0.0, transmit_s=0.0,
    launch_gap_s=0.0, node_gap_s=0.0, completion_s=0.0,
)  # fmt: skip
Change = Callable[[GpuSpec], GpuSpec]


def _end(name: str, which: int) -> Change:
    def change(spec: GpuSpec) -> GpuSpec:
        bounds = {"l2_bandwidth": (2.0 * spec.bandwidth, 5.0 * spec.bandwidth), **spec.ranges}.get(name)
        if bounds is None or not getattr(spec, name):
            return spec  # measured for this device, or left out
        changed: dict[str, Any] = {name: bounds[which]}
        return replace(spec, **changed)

    return change


ENVELOPE: dict[str, Change] = {
    "as it is": lambda spec: spec,
    "shared queue": lambda spec: replace(spec, launch_queue="shared"),
    **{
        f"{name} {('least', 'most')[which]}": _end(name, which)
        for name in ("node_gap_s", "launch_gap_s", "saturation", "l2_bandwidth", "transmit_s")
        for which in (0, 1)
    },
}


# ---- rows


class Row(NamedTuple):
    """One published figure, as the file has it."""

    id: str
    device: str
    setup: str
    metric: str
    value: Any
    unit: str
    source: str
    uncertainty: str
    grade: str


def read() -> dict[str, Row]:
    """All rows by their id."""
    return {body["id"]: Row(**body) for body in json.loads((FIGURES / "measurements.json").read_text())}


def named_by_constants() -> set[str]:
    """The ids of rows that a constant names as its source."""
    texts = " ".join(text for spec in PRESETS.values() for text in spec.sources.values())
    cost = Path(sys.modules[Kernel.__module__].__file__ or "").read_text()
    ids = set(read())
    found = {one for one in ids if re.search(rf"\b{re.escape(one)}(?![\w-])", texts + cost)}
    # "azure-H200-gemm_cublaslt-1024x1024x1024, -1024x2145x1024": the second shares the first's beginning.
    for stem, others in re.findall(r"([\w]+-[\w]+-[\w]+)-[\w]+((?:, -[\w]+)+)", texts + cost):
        found |= {f"{stem}-{end}" for end in re.findall(r"-(\w+)", others)} & ids
    found |= {one for one in ids for stem in re.findall(r"([\w-]+)-\*", texts) if one.startswith(stem + "-")}
    return found


def held_out(row_id: str, named: set[str]) -> bool:
    """Whether a row of the calibration tier is held out."""
    return hashlib.sha256(row_id.encode()).digest()[0] % 2 == 1 and row_id not in named


@dataclass(frozen=True)
class Compared:
    """A row beside the simulator. `simulated` is None where there is no model for it."""

    id: str
    tier: str
    published: float
    simulated: float | None
    least: float | None
    most: float | None
    held_out: bool

    @property
    def error(self) -> float:
        """Part of the published value; inf where nothing is simulated, or another value than 0."""
        if self.simulated is None or not self.published:
            return 0.0 if self.simulated == self.published else inf
        return abs(self.simulated / self.published - 1.0)

    def figures(self) -> dict[str, Any]:
        return vars(self) | {"error": self.error if isfinite(self.error) else None}


Simulated = Callable[[GpuSpec], float]


def envelope(simulated: Simulated, spec: GpuSpec) -> tuple[float, float, float]:
    """The value as it is, the least and the most over the envelope."""
    values = [simulated(change(spec)) for change in ENVELOPE.values()]
    return values[0], min(values), max(values)


# ---- what is simulated


def ends(spec: GpuSpec, kernels: Sequence[Kernel]) -> list[float]:
    """When each kernel ends, all launched at 0 by streams of equal priority."""
    gpu = Gpu(spec)
    for number, kernel in enumerate(kernels):
        gpu.launch(number, str(number), 0, (kernel,), 0.0)
    found = {done.launch: done.ended for done in gpu.advance(inf)}
    return [found[number] for number in range(len(kernels))]


def both_over_alone(kernel: Kernel, spec: GpuSpec) -> float:
    return max(ends(spec, (kernel, kernel))) / ends(spec, (kernel,))[0]


def slots(blocks: int, spec: GpuSpec) -> float:
    return both_over_alone(Kernel("sleep", blocks * spec.sms, 1e-3, 2, 0), spec)


def copies_in_l2(megabytes: int, spec: GpuSpec) -> float:
    """Two copies on half of the multiprocessors each, that read and write as much and go over it again and again."""
    cached = 2 * megabytes << 20
    bandwidth = spec.bandwidth if cached > spec.l2_bytes else spec.l2_bandwidth
    reached = 1.0 - 0.5**spec.saturation
    return both_over_alone(Kernel("copy", spec.sms // 2, cached / (reached * bandwidth), 1, 0, cached=cached), spec)


def copy_of(spec: GpuSpec) -> Kernel:
    """A copy that reaches all of the bandwidth with two blocks on each multiprocessor, for a long time."""
    return Kernel("copy", 40 * spec.sms, 1e-3, 2, int(20 * 1e-3 * spec.bandwidth))


def saturation(blocks: int, spec: GpuSpec) -> float:
    """GB/s of that many blocks, one on each multiprocessor while there are enough: these reach all there is."""
    kernel = Kernel("copy", spec.sms, 1e-3, 2, int(1e-3 * spec.bandwidth))
    at_once = min(blocks, spec.sms)
    return kernel.nbytes / spec.sms * at_once / wave_seconds(kernel, spec, at_once) / 1e9


def half(spec: GpuSpec) -> float:
    return solo_seconds(copy_of(spec), spec) / solo_seconds(copy_of(spec), spec, 0.5)


def halves_both(spec: GpuSpec) -> float:
    """What each of two copies has on its half beside the other, over what it had there alone. The simulator's shares
    overlap: the other half is what a kernel of half as many blocks leaves free."""
    one = copy_of(spec)
    alone = wave_seconds(one, spec, spec.sms)
    return alone / wave_seconds(one, spec, 2 * spec.sms)


def neighbours(one: float, other: float, spec: GpuSpec) -> float:
    pair = [Kernel("k", spec.sms, 1e-3, 2, 0, issue=issue) for issue in (one, other)]
    return max(ends(spec, pair)) / 1e-3


def product_beside(size: int, spec: GpuSpec) -> float:
    cost = product(size, size, size, 12 * size * size, spec.flops["float32"], spec)
    mm = kernel_of(OpProfile("aten.mm", ((size, size),), cost.seconds, 12 * size * size, cost.blocks, 2), spec)
    fma = Kernel("fma", spec.sms, 1.0, 2, 0, issue=PRODUCT_ISSUE)
    gpu = Gpu(spec)
    gpu.launch(0, "fma", 0, (fma,), 0.0)
    gpu.launch(1, "mm", 0, (mm,), 1e-3)
    (done,) = [each for each in gpu.advance(0.9) if each.launch == 1]
    return (done.ended - done.started) / solo_seconds(mm, spec)


def products(sizes: tuple[int, int, int], dtype: str, item: int, spec: GpuSpec) -> float:
    """TFLOPS."""
    m, n, k = sizes
    cost = product(m, n, k, item * (m * k + k * n) + 2 * m * n, spec.flops[dtype], spec)
    return 2 * m * n * k / cost.seconds / 1e12


def bandwidth(spec: GpuSpec) -> float:
    """TB/s."""
    return spec.bandwidth / 1e12


def waits_with_room(spec: GpuSpec) -> float:
    """RTSS 2017, figure 8: 1.0 if the low kernel runs ahead of a high one that waits for room; otherwise 0."""
    two = replace(spec, sms=2, shares=(1.0,))
    gpu = Gpu(two)
    gpu.launch(0, "k1", 0, (Kernel("k1", 2, 1e-3, 2, 0),), 0.0)
    gpu.launch(1, "k8", 1, (Kernel("k8", 1, 1e-4, 1, 0),), 1e-4)
    gpu.launch(2, "k9", 0, (Kernel("k9", 1, 1e-4, 2, 0),), 2e-4)
    found = {done.launch: done.ended for done in gpu.advance(inf)}
    return float(found[2] < 1e-3)


def channels(spec: GpuSpec) -> float:
    """Streams that run at once, of 40, on a device with the driver's default number of channels."""
    gpu = Gpu(replace(spec, channels=8, graph_s=0.0))
    for number in range(40):
        gpu.launch(number, str(number), 0, (Kernel("a", 1, 1e-3, 1, 0), Kernel("b", 1, 1e-3, 1, 0)), 0.0)
    first = [done.ended for done in gpu.advance(inf)]
    return float(sum(ended <= first[0] + 5e-4 for ended in first))


def launches_before_blocked(spec: GpuSpec) -> float:
    gpu = Gpu(replace(spec, graph_s=1e-9, graph_node_s=0.0))
    for number in range(3000):
        gpu.launch(number, "a", 0, (Kernel("k", 10, 190 * US, 1, 0),), 0.0)
    gpu.advance(100 * US)
    return round(gpu.busy().launching_s / 1e-9)


def preemption(outstanding: int, kernel_us: float, spec: GpuSpec) -> float:
    """Microseconds, on average, until a low stream that had `outstanding` launches in flight has stopped."""
    random = Random(0)
    kernel = (Kernel("low", spec.sms, kernel_us * US, 1, 0),)
    waits = []
    for _ in range(SAMPLES):
        gpu, number = Gpu(spec), 0
        for number in range(outstanding):
            gpu.launch(number, "low", 0, kernel, 0.0)
        at = random.uniform(20, 30) * kernel_us * US
        while gpu.next_event() < at:
            for _ in gpu.advance_to_finish(at):
                number += 1
                gpu.launch(number, "low", 0, kernel, gpu.now)
        gpu.advance(at)
        last = [done.ended for done in gpu.advance(inf)]
        waits.append(max(0.0, (last[-1] if last else at) - at) / US)
    return mean(waits)


MODELS: dict[str, tuple[str, Callable[[re.Match[str]], Simulated], GpuSpec]] = {
    # pattern of ids -> (tier, what is simulated, the device)
    r"rule-A2": ("mechanism", lambda _: waits_with_room, A100),
    r"rule-channels": ("mechanism", lambda _: channels, A100),
    r"rule-queue": ("mechanism", lambda _: launches_before_blocked, A100),
    r"interf-slots-(\d+)": ("mechanism", lambda m: partial(slots, int(m[1])), RTX5090),
    r"interf-l2-(\d+)MB": ("calibration", lambda m: partial(copies_in_l2, int(m[1])), RTX5090),
    r"interf-ipc": ("calibration", lambda _: partial(neighbours, PRODUCT_ISSUE, OTHER_ISSUE), RTX5090),
    r"interf-pipe": ("calibration", lambda _: partial(neighbours, PRODUCT_ISSUE, PRODUCT_ISSUE), RTX5090),
    r"interf-mm-(\d+)": ("calibration", lambda m: partial(product_beside, int(m[1])), RTX5090),
    r"membw-saturation-(\d+)": ("calibration", lambda m: partial(saturation, int(m[1])), RTX5090),
    r"membw-half": ("calibration", lambda _: half, RTX5090),
    r"membw-halves-both": ("calibration", lambda _: halves_both, RTX5090),
    r"azure-A100-gemm_cublaslt-(\d+)x(\d+)x(\d+)": (
        "calibration", lambda m: partial(products, (int(m[1]), int(m[2]), int(m[3])), "float16", 2), A100_80GB
    ),
    r"azure-H200-gemm_cublaslt-(\d+)x(\d+)x(\d+)": (
        "calibration", lambda m: partial(products, (int(m[1]), int(m[2]), int(m[3])), "int8", 1), H200
    ),
    r"azure-A100-babelstream-.*": ("calibration", lambda _: bandwidth, A100_80GB),
    r"azure-H200-babelstream-.*": ("calibration", lambda _: bandwidth, H200),
    r"xsched-preempt-lv1-(\d+)us": ("collocation", lambda m: partial(preemption, 8, float(m[1])), V100),
    r"xsched-preempt-lv2-(\d+)us": ("collocation", lambda m: partial(preemption, 1, float(m[1])), V100),
}  # fmt: skip
# In the tiers above, and with no model in the simulator: they count as missed.
NOT_SIMULATED = {
    r"interf-l1-.*|placement-.*": "calibration",
    r"azure-.*-nvbandwidth-.*": "calibration",
    r"xsched-preempt-lv3-.*": "collocation",
}


def published_value(row: Row) -> float:
    """The one figure of a row that is compared."""
    value = row.value
    if isinstance(value, dict):
        value = value.get("avg", value.get("bw", value.get("colocated")))
    return 0.0 if value == "no" else float(value)


def compare(rows: dict[str, Row]) -> Iterator[Compared]:
    """All rows of the tiers, those without a model too."""
    named = named_by_constants()
    for name, row in rows.items():
        for pattern, (tier, make, spec) in MODELS.items():
            if found := re.fullmatch(pattern, name):
                value, least, most = envelope(make(found), spec)
                held = tier == "calibration" and held_out(name, named)
                yield Compared(name, tier, published_value(row), value, least, most, held)
        for pattern, tier in NOT_SIMULATED.items():
            if re.fullmatch(pattern, name):
                held = tier == "calibration" and held_out(name, named)
                yield Compared(name, tier, published_value(row), None, None, None, held)


# ---- Orion's configurations


class Configuration(NamedTuple):
    """One of figures 7 and 10: an inference job at random moments, `rate` a second, beside a job that is always busy
    (figure 7: it trains) or gets `low_rate` requests a second (figure 10)."""

    figure: int
    high: str
    rate: float
    low: str
    low_rate: float | None


_HIGH = {"resnet50_4_fwd": 15.0, "mobilenetv2_4_fwd": 40.0}  # figure 7's rates
_TRAIN = ("resnet50_32_fb1", "mobilenetv2_64_fb1", "resnet101_32_fb1", "bert_8_fb1", "transformer_xl_8_fb1")
_INFER = {"resnet50_4_fwd": 80.0, "mobilenetv2_4_fwd": 100.0, "resnet101_4_fwd": 40.0, "bert_2_fwd": 8.0,
          "transformer_xl_4_fwd": 20.0}  # fmt: skip
TRACE_RATE = 1 / 48e-3  # figure 10's high job follows a trace of this mean; here it comes at random moments
CONFIGURATIONS = (
    *(Configuration(7, high, rate, low, None) for high, rate in _HIGH.items() for low in _TRAIN),
    *(Configuration(10, high, TRACE_RATE, low, rate) for high in _HIGH for low, rate in _INFER.items()),
)
POLICIES = ("fifo", "streams", "paced", "guarded")
LEARNING, WARM_UP = 200, 20  # high steps left out: in which the guard learns, and of the others
PER_SM = 4  # any: SM_usage says how many multiprocessors the blocks fill
TRACE_INTENSITY = 0.8  # part of the bandwidth of a kernel that Orion calls memory-bound; others 0.1: guesses


@cache
def trace(name: str, spec: GpuSpec, neighbours: float) -> tuple[Kernel, ...]:
    """A workload's kernels. `neighbours`: the part of what they need of a multiprocessor that counts."""
    made = []
    with (FIGURES / "orion-v100" / f"{name}.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            seconds = max(int(row["Duration"]) * 1e-9, US)
            memory = row["Profile"] == "0"
            nbytes = int(seconds * spec.bandwidth * (TRACE_INTENSITY if memory else 0.1))
            blocks = max(1, int(row["SM_usage"])) * PER_SM
            profiled = OpProfile(row["Name"][:40], (), seconds, nbytes, blocks, PER_SM, source="model")
            issue = (PRODUCT_ISSUE if row["Profile"] == "1" else OTHER_ISSUE) * neighbours
            made.append(kernel_of(profiled, spec)._replace(name="k", issue=issue))
    return tuple(made)


ORION_ENVELOPE: dict[str, tuple[Change, float]] = {
    "as it is": (ENVELOPE["as it is"], 1.0),
    "shared queue": (ENVELOPE["shared queue"], 1.0),
    "saturation least": (ENVELOPE["saturation least"], 1.0),
    "gaps most": (lambda spec: replace(spec, node_gap_s=1.3e-6, launch_gap_s=2.1e-6), 1.0),
    "no neighbours": (ENVELOPE["as it is"], 0.0),
}


def orion(
    one: Configuration, corner: str, steps: int, guarded: int, policies: Sequence[str] = POLICIES
) -> dict[str, Any]:
    """What each policy makes of it: the high job's p99 and the low one's throughput, over those alone. `guarded`: high
    steps under that policy, instead of `steps`."""
    change, neighbours = ORION_ENVELOPE[corner]
    spec = change(V100)
    high = Workload("high", Priority.HIGH, trace(one.high, spec, neighbours), rate=one.rate, max_slowdown=1.05)
    low = Workload("low", Priority.LOW, trace(one.low, spec, neighbours), rate=one.low_rate)
    found: dict[str, Any] = {"figure": one.figure, "high": one.high, "low": one.low, "corner": corner}
    for policy in policies:
        measured, warm_up = (guarded, LEARNING) if policy == "guarded" else (steps, WARM_UP)
        result = simulate([high, low], spec, policy, steps=measured, warmup_steps=warm_up)
        found[policy] = {
            "p99": result.job("high").p99_slowdown,
            "mean": result.job("high").mean_slowdown,
            "low": result.job("low").relative_throughput,
        }
    return found


def claims(found: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Orderings, and of how many configurations they hold at every corner of the envelope."""

    def holds(better: str, worse: str, slack: float) -> list[bool]:
        by: dict[tuple[Any, ...], list[bool]] = {}
        for each in found:
            key = (each["figure"], each["high"], each["low"])
            by.setdefault(key, []).append(each[better]["p99"] <= each[worse]["p99"] * slack)
        return [all(corners) for corners in by.values()]

    said = {}
    for better, worse in pairwise(reversed(POLICIES)):
        kept = holds(better, worse, 1.01)
        said[f"the high job's p99 is no higher under {better} than under {worse}"] = {
            "holds": sum(kept), "of": len(kept)
        }  # fmt: skip
    within: dict[tuple[Any, ...], bool] = {}
    for each in found:
        key = (each["figure"], each["high"], each["low"])
        within[key] = within.get(key, True) and each["guarded"]["p99"] <= 1.15
    said["under guarded it stays within 1.15 of alone (Orion: 1.14)"] = {
        "holds": sum(within.values()), "of": len(within)
    }  # fmt: skip
    return said


# ---- what is shown


def main(argv: list[str] | None = None) -> int:
    parser = common.parser(__doc__)
    parser.add_argument("--steps", type=int, default=150, help="high steps of each of Orion's configurations")
    # A promise about 99 steps of 100 is kept over many: of the six in 1,000 that may lose too much several may be near.
    parser.add_argument("--guarded-steps", type=int, default=1000, help="the same under guarded")
    parser.add_argument("--configurations", type=int, default=len(CONFIGURATIONS), help="how many of these")
    parser.add_argument("--corners", nargs="+", choices=ORION_ENVELOPE, default=list(ORION_ENVELOPE))
    args = parser.parse_args(argv)
    if min(args.steps, args.guarded_steps) < 1 or not 0 <= args.configurations <= len(CONFIGURATIONS):
        parser.error(f"both numbers of steps are at least 1, --configurations 0 to {len(CONFIGURATIONS)}")
    facts = common.machine()
    print(common.describe(facts))
    rows = read()
    compared = list(compare(rows))
    for tier in ("mechanism", "calibration", "collocation"):
        print(f"\n{tier}\n" + _table([one for one in compared if one.tier == tier]))
    held = [one for one in compared if one.held_out]
    targets: dict[str, dict[str, Any]] = {
        "held-out rows within 20 %": {
            "value": sum(one.error <= NEAR for one in held), "target": len(held),
            "met": all(one.error <= NEAR for one in held),
        },
        "median error of held-out rows": {
            "value": median(one.error for one in held), "target": MEDIAN,
            "met": median(one.error for one in held) <= MEDIAN,
        },
    }  # fmt: skip
    orions = []
    for number, one in enumerate(CONFIGURATIONS[: args.configurations]):
        for corner in args.corners:
            orions.append(orion(one, corner, args.steps, args.guarded_steps))
        print(f"configuration {number + 1} of {args.configurations}", file=sys.stderr, flush=True)
    said = claims(orions)
    if orions:
        print("\nOrion's configurations: the high job's p99 over alone, least to most over the envelope")
        print(_orion_table(orions))
    for claim, counted in said.items():
        if counted["of"]:
            print(f"{claim}: {counted['holds']} of {counted['of']}, at every corner")
    for name, target in targets.items():
        print(f"{name}: {target['value']:.3g}, wanted {target['target']}: {'met' if target['met'] else 'MISSED'}")
    without = sum(one.simulated is None for one in compared)
    print(f"{len(rows)} rows in all; {len(compared)} in these tiers, {without} of them not simulated")
    common.report(
        "published", args.out,
        {
            "machine": facts, "rows": [one.figures() for one in compared], "targets": targets, "orion": orions,
            "claims": said, "envelope": {"rows": list(ENVELOPE), "orion": args.corners},
        },
    )  # fmt: skip
    return 0


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _table(rows: Sequence[Compared]) -> str:
    return common.table(
        ("row", "published", "simulated", "least", "most", "error", ""),
        [
            (
                one.id, _number(one.published), _number(one.simulated), _number(one.least), _number(one.most),
                f"{one.error:.0%}" if isfinite(one.error) else "",
                "held out" if one.held_out else "",
            )
            for one in rows
        ],
    )  # fmt: skip


def _orion_table(found: Sequence[dict[str, Any]]) -> str:
    by: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for each in found:
        by.setdefault((each["figure"], each["high"], each["low"]), []).append(each)
    lines = []
    for (figure, high, low), corners in by.items():
        cells = []
        for policy in POLICIES:
            values = [each[policy]["p99"] for each in corners]
            cells.append(f"{min(values):.2f}-{max(values):.2f}")
        lows = [each["guarded"]["low"] for each in corners]
        lines.append((str(figure), high, low, *cells, f"{min(lows):.2f}-{max(lows):.2f}"))
    return common.table(("figure", "high", "low", *POLICIES, "low, guarded"), lines)


if __name__ == "__main__":
    sys.exit(main())
