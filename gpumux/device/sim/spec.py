"""The constants of the GPUs that are simulated, each with its source. Those that were neither measured nor published
are guesses, and have the range that the truth is believed to lie in. Figures with a row name it: `launch-h100` and the
like are ids of a collection of published measurements."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from math import floor, isfinite
from typing import NamedTuple

from gpumux.errors import ConfigError

GUESS = "guess"
LAUNCH_QUEUES = ("stream", "shared")


class Constant(NamedTuple):
    """One constant, for display. `range`: for a guess, the least and the greatest value it may have in truth."""

    name: str
    value: object
    range: tuple[float, float] | None
    source: str


@dataclass(frozen=True)
class GpuSpec:
    """A GPU's constants, in seconds and bytes. `sources` has one sentence for each of them, which begins with "guess"
    if the number was neither measured nor published; `ranges` says for each of those between which two values the
    truth is believed to lie."""

    name: str
    title: str
    sms: int  # multiprocessors
    bandwidth: float  # bytes a second that all kernels together move to and from device memory at most
    saturation: float  # how few multiprocessors reach how much of it (contention.py)
    l2_bytes: int
    l2_bandwidth: float  # bytes a second that all kernels together move to and from L2 at most
    memory_bytes: int
    flops: dict[str, float] = field(hash=False)  # peak operations a second by dtype, no sparsity
    product_efficiency: float  # the part of that peak that large matrix products reach
    call_s: float  # host: launching one kernel by itself
    graph_s: float  # host: launching a graph
    graph_node_s: float  # host: for each kernel of that graph, on top
    transmit_s: float  # from the host's launch to the stream that was idle
    launch_gap_s: float  # device: from the end of one launch of a stream to the first kernel of the next
    node_gap_s: float  # device: from the end of one kernel of a graph to the next
    completion_s: float  # from a launch's end to the host knowing
    launch_queue: str  # "stream": each has a queue; "shared": one for all, DeepPool's speculation
    queue_length: int  # launches in such a queue before the host that launches is blocked
    stream_depth: int  # with a shared queue: launches of one stream the device itself holds, the running one included
    channels: int  # hardware queues that streams are spread over
    shares: tuple[float, ...]  # parts of the multiprocessors that a launch can be confined to
    share_multiple: int  # such a part is a multiple of this many multiprocessors
    sources: dict[str, str] = field(hash=False, repr=False)
    ranges: dict[str, tuple[float, float]] = field(hash=False, repr=False)

    def __post_init__(self) -> None:
        missing = {f.name for f in fields(self)} - set(self.sources) - {"name", "title", "sources", "ranges"}
        if missing:
            raise ConfigError(f"device {self.name!r}: no source for {', '.join(sorted(missing))}", "name it, or guess")
        if {name for name, source in self.sources.items() if source.startswith(GUESS)} != set(self.ranges):
            raise ConfigError(f"device {self.name!r}: ranges of {sorted(self.ranges)}", "each guess has one, no other")
        times = (self.call_s, self.graph_s, self.graph_node_s, self.transmit_s, self.launch_gap_s, self.node_gap_s)
        if not all(isfinite(t) and t >= 0 for t in (*times, self.completion_s)):
            raise ConfigError(f"device {self.name!r}: a time is negative or no number", "times are seconds from 0 up")
        rates = (self.bandwidth, self.saturation, self.l2_bandwidth, self.product_efficiency, *self.flops.values())
        counts = (self.sms, self.l2_bytes, self.memory_bytes, self.queue_length, self.stream_depth, self.channels)
        if self.launch_queue not in LAUNCH_QUEUES:
            raise ConfigError(f"device {self.name!r}: a launch queue {self.launch_queue!r}", f"one of {LAUNCH_QUEUES}")
        if not all(isfinite(n) and n > 0 for n in (*rates, *counts, self.share_multiple)):
            raise ConfigError(f"device {self.name!r}: a size or rate is not positive", "all of them must be")
        if not self.shares or self.shares[0] != 1.0 or list(self.shares) != sorted(set(self.shares), reverse=True):
            raise ConfigError(f"device {self.name!r}: shares {self.shares}", "largest first, beginning with 1.0")
        if self.shares[-1] <= 0:
            raise ConfigError(f"device {self.name!r}: shares {self.shares}", "every share must be above 0")

    def share_sms(self, share: float) -> int:
        """Multiprocessors that a launch of `share` may use: that part of all, rounded down to a multiple of
        `share_multiple`, at least one. Raises ConfigError outside (0, 1]."""
        if share == 1.0:
            return self.sms
        if not 0.0 < share < 1.0:
            raise ConfigError(f"a share of {share}", f"use one of {self.shares}")
        whole = floor(share * self.sms) // self.share_multiple * self.share_multiple
        return max(whole, min(self.share_multiple, self.sms))

    def constants(self) -> Iterator[Constant]:
        """Each constant, for display."""
        for each in fields(self):
            if each.name in self.sources:
                value, source = getattr(self, each.name), self.sources[each.name]
                yield Constant(each.name, value, self.ranges.get(each.name), source)


_LAUNCH = {
    "call_s": "4 to 5 us a kernel launched by itself, asynchronously (forums.developer.nvidia.com/t/68937)",
    "graph_s": (
        "2.5 us a straight-line graph since CUDA 12.6 (NVIDIA's blog, 'Constant Time Launch for Straight-Line "
        "CUDA Graphs')"
    ),
    "graph_node_s": "1 ns a node since CUDA 12.6 (the same blog)",
    "transmit_s": "guess: about half of the 5 us an empty kernel takes from launch to end",
    "launch_gap_s": "guess: back-to-back launches of one stream are about a microsecond apart",
    "node_gap_s": (
        "guess, next to NVIDIA's blog 'Getting Started with CUDA Graphs': 3.4 us a kernel in a graph where the "
        "kernel itself takes 2.9"
    ),
    "completion_s": "guess: a write to pinned host memory and one turn of a polling loop",
    "launch_queue": (
        "each stream has a queue of its own (forums.developer.nvidia.com/t/68937, rule-queue); that all share one is"
        " DeepPool's speculation (section 5), a device of its own here: NAME+shared-queue"
    ),
    "queue_length": (
        "a host that launches without waiting is blocked after about 1,000 launches of one stream (rule-queue; 1,024 in"
        " forums.developer.nvidia.com/t/33866)"
    ),
    "stream_depth": (
        "guess: DeepPool found queues that ignore priorities beyond few outstanding launches, and paces to "
        "2 and 1 (section 5); how deep the device itself queues a stream is published nowhere"
    ),
    "channels": (
        "chosen: gpumux sets CUDA_DEVICE_MAX_CONNECTIONS to 32, the most there are; 8 is the driver's default"
        " (rule-channels: Bakita and Anderson, RTAS 2024, rule R2)"
    ),
    "saturation": (
        "guess, next to copies on 8 to 340 blocks of 170 multiprocessors (membw-saturation-*, an RTX 5090): half of"
        " them reach 0.84 of what all reach; proportional would be 1"
    ),
    "l2_bandwidth": (
        "guess: 2.8 times that of memory, as two copies that no longer fit into L2 together become 4.7 times slower"
        " (interf-l2-32MB, an RTX 5090)"
    ),
}
_RANGES = {
    "transmit_s": (1e-6, 5e-6),
    "launch_gap_s": (0.5e-6, 2.1e-6),  # to what an H100 idles between two kernels of a stream (launch-h100)
    "node_gap_s": (0.5e-6, 1.3e-6),  # to what an H100 idles between two kernels of a graph (launch-h100)
    "completion_s": (1e-6, 20e-6),
    "stream_depth": (1, 1024),
    "saturation": (1.0, 3.5),
}
L2_TIMES = (2.0, 5.0)  # the bandwidth of L2 beside that of memory: the range of the guess, which is 2.8


def _l2(bandwidth: float) -> dict[str, tuple[float, float]]:
    """The range of `l2_bandwidth` for a memory's `bandwidth`."""
    least, most = L2_TIMES
    return {"l2_bandwidth": (least * bandwidth, most * bandwidth)}


_SHARE = "CUDA driver API, Green Contexts (docs.nvidia.com/cuda/cuda-driver-api, 6.35): compute capability "

A100 = GpuSpec(
    name="a100",
    title="NVIDIA A100-SXM4-40GB",
    sms=108,
    bandwidth=1.28e12,
    saturation=2.6,
    l2_bytes=40 << 20,
    l2_bandwidth=2.8 * 1.28e12,
    memory_bytes=40 << 30,
    flops={
        "float64": 19.5e12,
        "float32": 19.5e12,
        "tf32": 156e12,
        "float16": 312e12,
        "bfloat16": 312e12,
        "int8": 624e12,
    },
    product_efficiency=0.81,
    call_s=4.5e-6,
    graph_s=2.5e-6,
    graph_node_s=1e-9,
    transmit_s=2.5e-6,
    launch_gap_s=1e-6,
    node_gap_s=0.5e-6,
    completion_s=5e-6,
    launch_queue="stream",
    queue_length=1000,
    stream_depth=4,
    channels=32,
    shares=(1.0, 0.5, 0.25),
    share_multiple=2,
    sources={
        "sms": "NVIDIA A100 architecture whitepaper",
        "bandwidth": (
            "0.824 of the datasheet's 1,555 GB/s, as on the card of 80 GB (azure-A100-babelstream-copy, -dot)"
        ),
        "l2_bytes": "NVIDIA A100 architecture whitepaper",
        "memory_bytes": "NVIDIA A100 datasheet",
        "flops": "NVIDIA A100 datasheet, peaks without sparsity",
        "product_efficiency": "float16 products (azure-A100-gemm_cublaslt-8192x8192x8192, -6144x12288x12288)",
        **_LAUNCH,
        "shares": "chosen: as many sizes as the guard needs to choose from",
        "share_multiple": _SHARE + "8.x: at least 4, multiples of 2",
    },
    ranges=_RANGES | _l2(1.28e12),
)

# What the others have in common with it are the constants of launches, which are the driver's and guesses for all.
A100_80GB = replace(
    A100,
    name="a100-80gb",
    title="NVIDIA A100-SXM4-80GB",
    bandwidth=1.68e12,
    l2_bandwidth=2.8 * 1.68e12,
    memory_bytes=80 << 30,
    sources={
        **A100.sources,
        "bandwidth": (
            "midway between copies and reads (azure-A100-babelstream-copy, -dot): 0.824 of the datasheet's 2,039 GB/s"
        ),
    },
    ranges=_RANGES | _l2(1.68e12),
)

H200 = replace(
    A100,
    name="h200",
    title="NVIDIA H200 SXM 141GB",
    sms=132,
    bandwidth=4.01e12,
    l2_bytes=50 << 20,
    l2_bandwidth=2.8 * 4.01e12,
    memory_bytes=141 * 10**9,
    flops={
        "float64": 67e12,
        "float32": 67e12,
        "tf32": 494.5e12,
        "float16": 989.5e12,
        "bfloat16": 989.5e12,
        "int8": 1979e12,
    },
    product_efficiency=0.67,
    launch_gap_s=2.1e-6,
    node_gap_s=1.3e-6,
    share_multiple=8,
    sources={
        **A100.sources,
        "sms": "NVIDIA H100 architecture whitepaper (SXM5; the H200 has the same multiprocessors)",
        "bandwidth": "copies (azure-H200-babelstream-copy): 0.835 of the datasheet's 4.8 TB/s",
        "l2_bytes": "NVIDIA H100 architecture whitepaper",
        "memory_bytes": "NVIDIA H200 datasheet",
        "flops": "NVIDIA H200 datasheet, half of the figures it gives with sparsity",
        "product_efficiency": "fp8 products (azure-H200-gemm_cublaslt-8192x8192x8192, -6144x12288x12288)",
        "launch_gap_s": (
            "2.1 us from a kernel of a stream to the next (launch-h100: an H100, kernels launched one by one)"
        ),
        "node_gap_s": "1.3 us from a kernel of a graph to the next (launch-h100: an H100)",
        "share_multiple": _SHARE + "9.0 and later: at least 8, multiples of 8",
    },
    ranges={name: bounds for name, bounds in _RANGES.items() if name not in ("launch_gap_s", "node_gap_s")}
    | _l2(4.01e12),
)

H100 = replace(
    H200,
    name="h100",
    title="NVIDIA H100 SXM 80GB",
    bandwidth=2.9e12,
    l2_bandwidth=2.8 * 2.9e12,
    memory_bytes=80 * 10**9,
    sources={
        **H200.sources,
        "bandwidth": "copies (Azure's benchmarks, ND H100 v5): 0.87 of the datasheet's 3.35 TB/s",
        "memory_bytes": "NVIDIA H100 datasheet",
        "flops": "NVIDIA H100 datasheet, half of the figures it gives with sparsity",
    },
    ranges=H200.ranges | _l2(2.9e12),
)

V100 = replace(
    A100,
    name="v100",
    title="NVIDIA V100-SXM2-16GB",
    sms=80,
    bandwidth=0.75e12,
    l2_bytes=6 << 20,
    l2_bandwidth=2.8 * 0.75e12,
    memory_bytes=16 << 30,
    flops={
        "float64": 7.8e12,
        "float32": 15.7e12,
        "tf32": 15.7e12,
        "float16": 125e12,
        "bfloat16": 15.7e12,
        "int8": 62.8e12,
    },
    product_efficiency=0.8,
    share_multiple=2,
    sources={
        **A100.sources,
        "sms": "NVIDIA V100 architecture whitepaper",
        "bandwidth": "guess: 0.83 of the datasheet's 900 GB/s, as other cards (azure-A100-babelstream-*)",
        "l2_bytes": "NVIDIA V100 architecture whitepaper",
        "memory_bytes": "NVIDIA V100 datasheet",
        "flops": "NVIDIA V100 datasheet; it has neither tf32 nor bfloat16, which run as float32, and int8 is four times"
        " float32's (dp4a)",
        "product_efficiency": "guess: as an A100's (azure-A100-gemm_cublaslt-8192x8192x8192)",
        "share_multiple": _SHARE + "7.x: at least 2, multiples of 2",
    },
    ranges=_RANGES | _l2(0.75e12) | {"bandwidth": (0.71e12, 0.8e12), "product_efficiency": (0.6, 0.9)},
)

PRESETS: dict[str, GpuSpec] = {spec.name: spec for spec in (V100, A100, A100_80GB, H100, H200)}
SHARED_QUEUE = "+shared-queue"


def preset(name: str) -> GpuSpec:
    """The preset called `name`; with "+shared-queue" behind it, one whose streams share one queue of launches, which
    DeepPool (section 5) takes for the reason why stream priorities alone do little. Raises ConfigError for another."""
    base = name.removesuffix(SHARED_QUEUE)
    if base not in PRESETS:
        raise ConfigError(
            f"no simulated device is called {name!r}",
            f"use one of {', '.join(PRESETS)}, as it is or with {SHARED_QUEUE} behind it",
        )
    spec = PRESETS[base]
    if base == name:
        return spec
    return replace(spec, name=name, title=f"{spec.title}, shared queue", launch_queue="shared")
