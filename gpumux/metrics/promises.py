"""Series about the promise to high jobs, and what keeping it costs low ones (docs/metrics.md, "Promises").

They come from the guard, by way of the snapshot; under a policy without one (`--policy paced`) the
families are there and empty: nothing was measured, and a 0 would read as "no slowdown".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily


@dataclass(frozen=True, slots=True)
class PromiseFigures:
    """A high job's promise. `slowdown` and `slowdown_p99`: recent steps over the step alone (1.0: as if
    alone), None before there is a baseline. `samples`: steps alone the baseline rests on; `estimates`: pieces
    beside low work that its slowdowns by range rest on."""

    target: float
    slowdown: float | None
    slowdown_p99: float | None
    kept: bool
    steps_over: int
    solo_step_s: float | None
    samples: int
    estimates: int
    host_wait_s: float


@dataclass(frozen=True, slots=True)
class GuardFigures:
    """What the guard did and knows, over all jobs. `held_s`: seconds low jobs waited for it, by every reason
    there is, so that a series begins at 0 and not when its reason first happens."""

    bans_active: int
    bans: int
    probes: int
    harvested_s: float
    held_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BanFigures:
    """A ban in force: job `low` beside job `high` (labels), where `ratio` was measured, for how long, and for how long still."""

    high: str
    low: str
    ratio: float
    why: str
    since_s: float
    left_s: float


def families() -> dict[str, Any]:
    gauge, counter, per_job = GaugeMetricFamily, CounterMetricFamily, ["job"]
    return {
        "slowdown": gauge(
            "gpumux_job_slowdown_ratio", "Recent steps of a high job over its step alone.", labels=per_job
        ),
        "slowdown_p99": gauge(
            "gpumux_job_slowdown_p99_ratio", "The same of the slowest of a hundred steps.", labels=per_job
        ),
        "target": gauge("gpumux_job_slowdown_target_ratio", "What a high job was promised.", labels=per_job),
        "kept": gauge(
            "gpumux_job_promise_kept",
            "1 while a high job's slowdown is within its target, and its tail within twice the excess.",
            labels=per_job,
        ),
        "over": counter("gpumux_job_steps_over_target", "Steps slower than the target allows.", labels=per_job),
        "solo": gauge("gpumux_job_solo_step_seconds", "A high job's step alone, as measured.", labels=per_job),
        "baseline": gauge("gpumux_job_baseline_samples", "Steps alone that estimate rests on.", labels=per_job),
        "host_wait": counter(
            "gpumux_job_host_wait_seconds", "Time the device waited for the host in a high job's steps.", labels=per_job
        ),
        "held": counter("gpumux_held_seconds", "Time low jobs were held back for high ones.", labels=["reason"]),
        "bans_active": gauge("gpumux_bans_active", "Bans in force: low work held beside certain operators."),
        "bans": counter("gpumux_bans", "Bans imposed."),
        "probes": counter("gpumux_ban_probes", "Launches let out to see whether a ban is still needed."),
        "harvested": counter(
            "gpumux_harvested_device_seconds", "Device time of low work beside high jobs or in their gaps."
        ),
        "estimates": gauge(
            "gpumux_job_estimate_samples", "Pieces beside low work a high job's estimates rest on.", labels=per_job
        ),
    }


def fill_job(found: dict[str, Any], short: str, promise: PromiseFigures | None) -> None:
    if promise is None:
        return
    for key, value in (
        ("slowdown", promise.slowdown),
        ("slowdown_p99", promise.slowdown_p99),
        ("target", promise.target),
        ("kept", None if promise.slowdown is None else float(promise.kept)),
        ("over", promise.steps_over),
        ("solo", promise.solo_step_s),
        ("baseline", promise.samples),
        ("estimates", promise.estimates),
        ("host_wait", promise.host_wait_s),
    ):
        if value is not None:
            found[key].add_metric([short], value)


def fill_guard(found: dict[str, Any], guard: GuardFigures | None) -> None:
    if guard is None:
        return
    for reason, seconds in guard.held_s.items():
        found["held"].add_metric([reason], seconds)
    for key, value in (
        ("bans_active", guard.bans_active),
        ("bans", guard.bans),
        ("probes", guard.probes),
        ("harvested", guard.harvested_s),
    ):
        found[key].add_metric([], value)
