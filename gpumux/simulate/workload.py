"""What a simulated job does: one step's kernels, how they are cut, and when its client asks for steps."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

from gpumux.core.admission import refuse_spec
from gpumux.core.config import CoreConfig
from gpumux.device.sim.cost import kernels_of
from gpumux.device.sim.kernel import Kernel, checked
from gpumux.device.sim.pieces import Pieces, cut_kernels
from gpumux.device.sim.spec import GpuSpec
from gpumux.errors import ConfigError
from gpumux.model import JobSpec, Priority
from gpumux.program.profile import StepProfile

MAX_AWAY_S = 60.0  # virtual, between steps or before the first: a second takes a few of real time
MAX_RATE = 1e5  # steps a second: each is an event, whether anybody can answer it or not


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
        if not (0.0 <= self.think_s <= MAX_AWAY_S and 0.0 <= self.starts_at <= MAX_AWAY_S):
            raise ConfigError(
                f"job {self.name!r} thinks for {self.think_s:g} s from {self.starts_at:g} s on",
                f"give 0 to {MAX_AWAY_S:g} s: others are simulated for as long as it is away",
            )
        if self.rate is not None and not 1.0 / MAX_AWAY_S <= self.rate <= MAX_RATE:
            raise ConfigError(
                f"job {self.name!r} submits {self.rate:g} steps a second",
                f"give {1.0 / MAX_AWAY_S:.3g} to {MAX_RATE:g}, or no rate for a job that always has steps submitted",
            )
        if self.rate is not None and self.think_s:
            raise ConfigError(f"job {self.name!r} has both a rate and a pause", "give one of them")
        if self.target_s is not None and not self.target_s > 0:
            raise ConfigError(f"job {self.name!r} is cut to {self.target_s} s", "give more than 0, or inf")
        if fault := refuse_spec(self.job_spec, CoreConfig()):
            raise ConfigError(f"job {self.name!r}: {fault.message}", fault.remedy)

    @property
    def job_spec(self) -> JobSpec:
        """What the daemon is told of it."""
        return JobSpec(self.name, self.priority, self.weight, self.max_slowdown, None, self.max_inflight)

    @cached_property
    def content_hash(self) -> str:
        """Equal for equal steps, whoever runs them."""
        return blake2b(repr(self.kernels).encode(), digest_size=16).hexdigest()


def cut_workload(workload: Workload, spec: GpuSpec) -> Pieces:
    """The workload's pieces on a GPU, by what each kernel takes there alone."""
    return cut_kernels(workload.kernels, spec, workload.priority, workload.target_s)


def from_profile(
    profile: StepProfile, spec: GpuSpec, priority: Priority, *, name: str | None = None, **rest: float | int | None
) -> Workload:
    """A job that runs the profiled step. `rest` are Workload's other fields."""
    return Workload(name or profile.name, priority, kernels_of(profile.ops, spec), **rest)  # type: ignore[arg-type]
