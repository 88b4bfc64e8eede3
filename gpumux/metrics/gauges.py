"""Gauges, and per-job series, made at scrape time from a snapshot of the daemon.

Only the loop's thread may read the scheduler, so a scrape asks it for a snapshot and waits a moment. If the loop
doesn't answer within STALE_S, which is worth seeing, the last snapshot is served again and
`gpumux_snapshot_timestamp_seconds` stands still. Per-job series exist only while the job does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from gpumux.types import DeviceInfo

# ---- Series about the promise to high jobs, and what keeping it costs low ones (docs/metrics.md, "Promises").
#
# They come from the guard through the snapshot. Under a policy without guard (`--policy paced`) the
# families are empty: nothing was measured, and a 0 would read as "no slowdown".


@dataclass(frozen=True, slots=True)
class PromiseFigures:
    """A high job's promise. `slowdown` and `slowdown_p99`: recent steps over the step alone (1.0: as fast as
    alone), None before there is a baseline. `samples`: number of steps alone behind the baseline. `estimates`: number
    of pieces beside low work behind its slowdowns by range. `verdict`: a line of text; `broken_for_s`: how long the
    promise has been broken, 0 unless it is."""

    target: float
    slowdown: float | None
    slowdown_p99: float | None
    kept: bool
    steps_over: int
    solo_step_s: float | None
    samples: int
    estimates: int
    host_wait_s: float
    verdict: str
    broken_for_s: float


@dataclass(frozen=True, slots=True)
class GuardFigures:
    """The guard's actions and knowledge, over all jobs. `held_s`: seconds low jobs waited for it, by every existing
    reason, so that a series begins at 0 and not when its reason first occurs."""

    bans_active: int
    bans: int
    probes: int
    harvested_s: float
    held_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BanFigures:
    """A ban in force: job `low` beside job `high` (labels), the measured `ratio`, the ban's duration, and the time
    left."""

    high: str
    low: str
    ratio: float
    why: str
    since_s: float
    left_s: float


def families() -> dict[str, Any]:
    gauge, counter, per_job = GaugeMetricFamily, CounterMetricFamily, ["job_id"]
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
        "broken": gauge(
            "gpumux_job_promise_broken_seconds",
            "How long a high job's promise has been broken; 0 while it is kept.",
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
        "pairs": gauge(
            "gpumux_interference_pairs", "Pairs of programs whose interference was measured: `gpumux interference`."
        ),
        "worst_pair": gauge(
            "gpumux_interference_worst_ratio", "The most that a high program takes beside one low program, over alone."
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
        ("broken", None if promise.slowdown is None else promise.broken_for_s),
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


@dataclass(frozen=True, slots=True)
class PairFigures:
    """What was measured of two programs, each by the first digits of its content hash: how many times as long the high
    one takes beside the low one on this share of the device, and how fast the low one is there (1.0: as alone)."""

    high: str
    low: str
    share: float
    slowdown: float
    low_speed: float


# ---- Snapshots and the collector.


STALE_S = 1.0  # a scrape waits at most this long for the loop
FRESH_S = 0.1  # scrapes within this time of each other share a snapshot
NAME_CHARS = 64  # of a job's name, in gpumux_job_info


@dataclass(frozen=True, slots=True)
class GangFigures:
    """What a rank of a gang exchanged with the others."""

    waited_s: float
    sent_bytes: int
    received_bytes: int


@dataclass(frozen=True, slots=True)
class JobFigures:
    """One job as the metrics show it. `short` is the daemon's own label for it, e.g. "j17"."""

    short: str
    name: str
    uid: int
    priority: str
    state: str
    queued: int
    outstanding: int
    memory_bytes: int
    device_busy_s: float
    steps_done: int
    promise: PromiseFigures | None = None  # of a high job, if there is a guard
    held: str = ""  # why a low job waits now; "": it is not held
    held_by: str = ""  # the high job for which it does, by its label
    held_for_s: float = 0.0  # for how long
    saved: float = 0.0  # Unix time of its newest state snapshot, 0 if there is none
    saved_bytes: int = 0
    models: int = 1
    gang: GangFigures | None = None  # of a rank of a gang
    measured_bytes: int = 0  # the most it held in a recent step, 0 if not known


@dataclass(frozen=True, slots=True)
class Figures:
    """The values of the gauges at one moment (`when`: Unix time)."""

    when: float
    device: DeviceInfo
    jobs: tuple[JobFigures, ...]
    sessions: int
    shared_bytes: int
    device_total_bytes: int
    device_free_bytes: int
    protocol_errors: Mapping[str, int]  # by reason, a bounded set
    guard: GuardFigures | None = None
    bans: tuple[BanFigures, ...] = ()  # in force
    pairs: tuple[PairFigures, ...] = ()  # of programs that were measured side by side: those that lose most
    pairs_known: int = 0  # how many there are
    leaving: str = ""  # why the daemon takes no more work, "" while it does


def label_text(name: str) -> str:
    """A user's text as a label value: printable and short."""
    return "".join(c if c.isprintable() else "?" for c in name[:NAME_CHARS])


class SnapshotBox:
    """Passes a snapshot from the loop's thread to a scrape's. `wake` must make the loop call
    `publish` soon and be callable from any thread."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._changed = threading.Condition()
        self._latest: Figures | None = None
        self._at = 0.0
        self._asked = False
        self._asked_at = 0.0  # since when a scrape waits, where one does
        self._closed = False

    def wanted(self) -> bool:
        """Whether a scrape waits. Cheap: the loop asks on every wake-up."""
        return self._asked

    def publish(self, figures: Figures) -> None:
        """Publish a snapshot; called by the loop."""
        with self._changed:
            self._latest, self._at, self._asked = figures, time.monotonic(), False
            self._changed.notify_all()

    def fail(self) -> None:
        """A snapshot can't be made: the scrape that waits gets the last one. Called by the loop."""
        with self._changed:
            self._asked = False
            self._changed.notify_all()

    def close(self) -> None:
        """The loop has ended, and no more snapshots will come."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def fetch(self) -> Figures | None:
        """A snapshot at most FRESH_S old, or the last one if the loop is stuck or gone."""
        with self._changed:
            if self._closed or (self._latest is not None and time.monotonic() - self._at < FRESH_S):
                return self._latest
            if not self._asked:
                self._asked, self._asked_at = True, time.monotonic()
        self._wake()
        with self._changed:
            self._changed.wait_for(lambda: not self._asked or self._closed, timeout=STALE_S)
            return self._latest

    def silent_s(self) -> float:
        """For how long the loop has left a scrape unanswered; 0 if it has answered, or has ended."""
        with self._changed:
            return time.monotonic() - self._asked_at if self._asked and not self._closed else 0.0


class GaugeCollector(Collector):
    """Turns the latest snapshot into metric families."""

    def __init__(self, fetch: Callable[[], Figures | None], version: str) -> None:
        self._fetch = fetch
        self._version = version

    def describe(self) -> Iterable[Metric]:
        """Names only, so that registering doesn't ask the loop for a snapshot."""
        return _families().values()

    def collect(self) -> Iterable[Metric]:
        families = _families()
        families["build"].add_metric([], {"version": self._version})
        figures = self._fetch()
        if figures is not None:
            _fill(families, figures)
        return families.values()


def _families() -> dict[str, Any]:
    gauge, per_job = GaugeMetricFamily, ["job_id"]
    return {
        "build": InfoMetricFamily("gpumux_build", "Which gpumux this is."),
        "device": InfoMetricFamily("gpumux_device", "Which device the daemon owns."),
        "jobs": gauge("gpumux_jobs", "Open jobs.", labels=["priority", "state"]),
        "queue": gauge("gpumux_queue_depth", "Steps that wait for their first piece.", labels=["priority"]),
        "out": gauge("gpumux_outstanding_launches", "Pieces handed over and not completed.", labels=["priority"]),
        "sessions": gauge("gpumux_sessions", "Open client connections."),
        "shared": gauge("gpumux_shared_memory_bytes", "Shared memory for batches, results and transfers."),
        "total": gauge("gpumux_device_memory_bytes", "Memory the device has."),
        "free": gauge("gpumux_device_memory_free_bytes", "Memory of the device no job holds."),
        "when": gauge("gpumux_snapshot_timestamp_seconds", "Unix time of the snapshot the gauges come from."),
        "errors": CounterMetricFamily(
            "gpumux_protocol_errors", "What clients sent that made no sense.", labels=["reason"]
        ),
        "info": InfoMetricFamily("gpumux_job", "What a job_id stands for.", labels=per_job),
        "memory": gauge("gpumux_job_memory_bytes", "Device memory charged to a job.", labels=per_job),
        "measured": gauge(
            "gpumux_job_memory_measured_bytes", "Memory a job held at most in a recent step.", labels=per_job
        ),
        "busy": CounterMetricFamily("gpumux_job_device_busy_seconds", "Device time of a job's pieces.", labels=per_job),
        "steps": CounterMetricFamily("gpumux_job_steps", "Steps of a job answered with results.", labels=per_job),
        "models": gauge("gpumux_job_models", "Models that a step of the job trains.", labels=per_job),
        "peers": CounterMetricFamily(
            "gpumux_peers_wait_seconds", "Time a job of a gang waited for other ranks and their data.", labels=per_job
        ),
        "exchanged": CounterMetricFamily(
            "gpumux_collective_bytes",
            "Bytes a job of a gang exchanged with other ranks.",
            labels=["job_id", "direction"],
        ),
        "saved": gauge(
            "gpumux_job_state_snapshot_timestamp_seconds", "When a job's state was last saved.", labels=per_job
        ),
        "saved_bytes": gauge("gpumux_job_state_snapshot_bytes", "Size of that snapshot.", labels=per_job),
        **families(),
    }


def _fill(families: dict[str, Any], figures: Figures) -> None:
    device = figures.device
    families["device"].add_metric(
        [], {"kind": device.kind, "name": device.name, "threads": str(device.threads), "torch": device.torch_version}
    )
    simple = {
        "sessions": figures.sessions,
        "shared": figures.shared_bytes,
        "total": figures.device_total_bytes,
        "free": figures.device_free_bytes,
        "when": figures.when,
    }
    for key, value in simple.items():
        families[key].add_metric([], value)
    for reason, number in sorted(figures.protocol_errors.items()):
        families["errors"].add_metric([reason], number)
    counts: dict[tuple[str, str], int] = {}
    queued, out = {"low": 0, "high": 0}, {"low": 0, "high": 0}
    for job in figures.jobs:
        counts[job.priority, job.state] = counts.get((job.priority, job.state), 0) + 1
        queued[job.priority] += job.queued
        out[job.priority] += job.outstanding
        who = {"name": label_text(job.name), "uid": str(job.uid), "priority": job.priority}
        families["info"].add_metric([job.short], who)
        families["memory"].add_metric([job.short], job.memory_bytes)
        if job.measured_bytes:
            families["measured"].add_metric([job.short], job.measured_bytes)
        families["busy"].add_metric([job.short], job.device_busy_s)
        families["steps"].add_metric([job.short], job.steps_done)
        families["models"].add_metric([job.short], job.models)
        if job.gang is not None:
            families["peers"].add_metric([job.short], job.gang.waited_s)
            families["exchanged"].add_metric([job.short, "sent"], job.gang.sent_bytes)
            families["exchanged"].add_metric([job.short, "received"], job.gang.received_bytes)
        if job.saved:
            families["saved"].add_metric([job.short], job.saved)
            families["saved_bytes"].add_metric([job.short], job.saved_bytes)
        fill_job(families, job.short, job.promise)
    fill_guard(families, figures.guard)
    if figures.guard is not None:
        families["pairs"].add_metric([], figures.pairs_known)
        if figures.pairs:
            families["worst_pair"].add_metric([], figures.pairs[0].slowdown)
    for (priority, state), count in counts.items():
        families["jobs"].add_metric([priority, state], count)
    for priority in queued:
        families["queue"].add_metric([priority], queued[priority])
        families["out"].add_metric([priority], out[priority])
