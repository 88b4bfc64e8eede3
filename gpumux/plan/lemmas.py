"""How many GPUs and parameter servers ("Distributed training guidelines", lemmas 3.1 and 3.2), and what became of the
second question since."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf, isfinite

from gpumux.errors import ConfigError

SLACK = 1e-9  # so that rounding adds no GPU and no server


def efficiency(gpus: int, overhead: float) -> float:
    """Lemma 3.1: alpha = (1 + R_O) / (1 + G R_O), the part of G-fold speed that G GPUs give. `overhead` is R_O, the time that
    is not hidden behind computation over computation, on one GPU. Raises ConfigError outside of G >= 1, R_O >= 0."""
    _check(gpus, overhead)
    return (1 + overhead) / (1 + gpus * overhead)


def speedup(gpus: int, overhead: float) -> float:
    """alpha G."""
    return gpus * efficiency(gpus, overhead)


def tolerable_overhead(gpus: int, wanted: float) -> float:
    """The R_O at which `gpus` GPUs still have the efficiency `wanted` (0 to 1): (1 - alpha) / (alpha G - 1). inf where any
    overhead would do. Raises ConfigError outside."""
    _check(gpus, 0.0)
    if not 0 < wanted <= 1:
        raise ConfigError(f"an efficiency of {wanted}", "give more than 0 and at most 1")
    return (1 - wanted) / (wanted * gpus - 1) if wanted * gpus > 1 else inf


def gpus_for(wanted: float, overhead: float) -> int | None:
    """The fewest GPUs that are `wanted` times as fast as one; None where no number is: (1 + R_O) / R_O is never reached."""
    _check(1, overhead)
    if not (isfinite(wanted) and wanted >= 1):
        raise ConfigError(f"a speed-up of {wanted}", "give 1 or more")
    gained = 1 + overhead - wanted * overhead
    return max(1, ceil(wanted / gained - SLACK)) if gained > 0 else None


def gpus_at(wanted: float, least: float) -> int:
    """The fewest GPUs that are `wanted` times as fast as one at the efficiency `least` (0 to 1). Raises ConfigError
    outside."""
    _check(1, 0.0)
    if not (isfinite(wanted) and wanted >= 1):
        raise ConfigError(f"a speed-up of {wanted}", "give 1 or more")
    if not 0 < least <= 1:
        raise ConfigError(f"an efficiency of {least}", "give more than 0 and at most 1")
    return max(1, ceil(wanted / least - SLACK))


def most_speedup(overhead: float) -> float:
    """What no number of GPUs exceeds."""
    _check(1, overhead)
    return (1 + overhead) / overhead if overhead else inf


def _check(gpus: int, overhead: float) -> None:
    if gpus < 1:
        raise ConfigError(f"{gpus} GPUs", "give 1 or more")
    if not (isfinite(overhead) and overhead >= 0):
        raise ConfigError(f"an overhead ratio of {overhead}", "give a finite number of 0 or more")


def servers(parameter_bytes: float, workers: int, bandwidth: float, compute_s: float) -> int:
    """Lemma 3.2: the fewest parameter servers, each with `bandwidth` bytes a second, that hide pulls and pushes of all
    `workers` behind `compute_s` of computation: ceil(2 S_p N_w / (B_ps T_C)). Raises ConfigError unless all are above 0."""
    _positive(parameter_bytes=parameter_bytes, workers=workers, bandwidth=bandwidth, compute_s=compute_s)
    return max(1, ceil(2 * parameter_bytes * workers / (bandwidth * compute_s) - SLACK))


@dataclass(frozen=True)
class Exchange:
    """One way to keep `workers` in step without servers. `nbytes`: what each sends in an iteration (and receives);
    `seconds`: what that takes; `hidden`: whether it fits behind the computation; `bandwidth`: bytes a second with which it
    just would."""

    name: str
    what: str
    nbytes: float
    seconds: float
    hidden: bool
    bandwidth: float


def exchanges(parameter_bytes: float, workers: int, bandwidth: float, compute_s: float) -> list[Exchange]:
    """The lemma's condition, I/O no longer than computation, for what replaced parameter servers: every worker is the server
    of 1/N_w of the parameters. Raises ConfigError unless all are above 0."""
    _positive(parameter_bytes=parameter_bytes, workers=workers, bandwidth=bandwidth, compute_s=compute_s)
    part = (workers - 1) / workers * parameter_bytes
    ways = (
        ("all-reduce", "gradients reduce-scattered and gathered (DistributedDataParallel)", 2),
        ("sharded optimizer", "gradients reduce-scattered, parameters gathered (ZeRO 1 and 2)", 2),
        (
            "sharded parameters",
            "parameters gathered for forward and backward, gradients reduce-scattered (ZeRO 3, FSDP)",
            3,
        ),
    )
    return [
        Exchange(name, what, times * part, times * part / bandwidth, times * part / bandwidth <= compute_s,
                 times * part / compute_s)
        for name, what, times in ways
    ]  # fmt: skip


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not (isfinite(value) and value > 0):
            raise ConfigError(f"{name.replace('_', ' ')} {value}", "give a finite number above 0")
