"""What a simulated job does: one step's kernels, how they are cut, and when its client asks for steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import pairwise
from math import ceil, inf, isfinite, prod

from gpumux.device.sim.kernel import MIN_BLOCK_S, Kernel, checked, solo_seconds
from gpumux.device.sim.spec import GpuSpec
from gpumux.errors import ConfigError
from gpumux.model import Priority
from gpumux.program.cut import cut
from gpumux.program.profile import OpProfile, StepProfile

TARGET_S = {Priority.HIGH: 400e-6, Priority.LOW: 300e-6}  # how long a piece should run (DESIGN 6)
MIN_HIGH_S = 250e-6  # shorter high pieces are merged (DESIGN 6)

# Where a profile does not know a kernel's blocks. Guesses: a matrix product covers its output with tiles of
# 64 x 64, everything else works on 1,024 elements a block.
PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "convolution", "matmul", "linear", "attention")
TILE_ELEMENTS, TILE_PER_SM = 4096, 4
STREAM_ELEMENTS, STREAM_PER_SM = 1024, 8


@dataclass(frozen=True)
class Workload:
    """One job. Its client keeps up to `max_inflight` steps submitted and pauses `think_s` after each answer
    (then a step is submitted only after the pause), or submits at random moments, `rate` a second on average.
    `target_s`: piece length aimed at, None for the priority's own, inf for whole steps.
    Raises ConfigError for values that make no sense."""

    name: str
    priority: Priority
    kernels: tuple[Kernel, ...]
    think_s: float = 0.0
    rate: float | None = None
    weight: float = 1.0
    max_slowdown: float = 1.10
    max_inflight: int = 2
    starts_at: float = 0.0
    target_s: float | None = None

    def __post_init__(self) -> None:
        if not self.kernels:
            raise ConfigError(f"job {self.name!r} has no kernels", "give it at least one")
        for kernel in self.kernels:
            checked(kernel)
        if not (isfinite(self.think_s) and self.think_s >= 0 and isfinite(self.starts_at) and self.starts_at >= 0):
            raise ConfigError(f"job {self.name!r} thinks for {self.think_s} s from {self.starts_at} s on", "0 or more")
        if self.rate is not None and not (isfinite(self.rate) and self.rate > 0):
            raise ConfigError(f"job {self.name!r} submits {self.rate} steps a second", "give more than 0, or none")
        if self.rate is not None and self.think_s:
            raise ConfigError(f"job {self.name!r} has both a rate and a pause", "give one of them")
        if self.target_s is not None and not self.target_s > 0:
            raise ConfigError(f"job {self.name!r} is cut to {self.target_s} s", "give more than 0, or inf")

    @cached_property
    def content_hash(self) -> str:
        """Equal for equal steps, whoever runs them."""
        return blake2b(repr(self.kernels).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Pieces:
    """A step cut on one GPU: piece i is kernels [bounds[i], bounds[i + 1]) and takes `seconds[i]` alone."""

    bounds: tuple[int, ...]
    seconds: tuple[float, ...]
    kernels: tuple[tuple[Kernel, ...], ...]

    @property
    def step_s(self) -> float:
        return sum(self.seconds)


def cut_workload(workload: Workload, spec: GpuSpec) -> Pieces:
    """The workload's pieces on a GPU, by what each kernel takes there alone."""
    seconds = [solo_seconds(kernel, spec) + spec.node_gap_s for kernel in workload.kernels]
    target = TARGET_S[workload.priority] if workload.target_s is None else workload.target_s
    if target == inf:
        bounds: tuple[int, ...] = (0, len(seconds))
    else:
        low = workload.priority is Priority.LOW
        bounds = cut(seconds, target, min_s=None if low else min(MIN_HIGH_S, target))
    return recut(workload.kernels, bounds, spec)


def recut(kernels: Sequence[Kernel], bounds: tuple[int, ...], spec: GpuSpec) -> Pieces:
    """Pieces of these kernels under given boundaries."""
    parts = tuple([tuple(kernels[a:b]) for a, b in pairwise(bounds)])
    return Pieces(bounds, tuple([piece_seconds(part, spec) for part in parts]), parts)


def piece_seconds(kernels: Sequence[Kernel], spec: GpuSpec) -> float:
    """What a launch of these kernels takes alone on the device, its gaps included."""
    gaps = spec.launch_gap_s + (len(kernels) - 1) * spec.node_gap_s
    return gaps + sum([solo_seconds(kernel, spec) for kernel in kernels])


# ---- from profiles ---------------------------------------------------------------------------------


def kernels_of(profile: StepProfile, spec: GpuSpec) -> tuple[Kernel, ...]:
    """The profile's operators as kernels that take, alone on `spec`, what the profile says. Times are taken as
    they are, whatever device they are of; blocks nobody recorded are guessed from the output's size."""
    made: dict[OpProfile, Kernel] = {}
    for op in profile.ops:
        if op not in made:
            made[op] = kernel_of(op, spec)
    return tuple([made[op] for op in profile.ops])


def kernel_of(op: OpProfile, spec: GpuSpec) -> Kernel:
    """A kernel whose time alone is `op.seconds`. Traffic the bandwidth could not carry in that time came from
    caches and is left out; no time is below the simulator's shortest block."""
    guessed_blocks, guessed_per_sm = _guess(op)
    blocks, per_sm = op.blocks or guessed_blocks, op.per_sm or guessed_per_sm
    seconds = max(op.seconds, MIN_BLOCK_S)
    nbytes = min(op.nbytes, int(seconds * spec.bandwidth))
    at_once = min(blocks, per_sm * spec.sms)
    full, rest = divmod(blocks, at_once)
    wave_moved_s = at_once * nbytes / blocks / spec.bandwidth
    block_s = seconds / (full + (rest > 0))
    if block_s < wave_moved_s:  # full waves are bound by memory; what they leave is the last one's
        block_s = max(seconds - full * wave_moved_s, MIN_BLOCK_S) if rest else wave_moved_s
    return Kernel(op.target.removeprefix("aten."), blocks, max(block_s, MIN_BLOCK_S), per_sm, nbytes, op.sensitivity)


def guesses_blocks(op: OpProfile) -> bool:
    """Whether `kernel_of` has to guess how this operator fills a GPU."""
    return op.blocks is None or op.per_sm is None


def _guess(op: OpProfile) -> tuple[int, int]:
    """(blocks, blocks a multiprocessor) after the size of the largest tensor it returns or takes."""
    elements = max((prod(shape) for shape in op.shapes), default=1)
    name = op.target.removeprefix("aten.").split(".")[0].strip("_")
    if any(name == product or product in name.split("_") for product in PRODUCTS):
        elements = prod(op.shapes[-1]) if op.shapes else 1
        return max(1, ceil(elements / TILE_ELEMENTS)), TILE_PER_SM
    return max(1, ceil(elements / STREAM_ELEMENTS)), STREAM_PER_SM


def from_profile(
    profile: StepProfile, spec: GpuSpec, priority: Priority, *, name: str | None = None, **rest: float | int | None
) -> Workload:
    """A job that runs the profiled step. `rest` are Workload's other fields."""
    return Workload(name or profile.name, priority, kernels_of(profile, spec), **rest)  # type: ignore[arg-type]
