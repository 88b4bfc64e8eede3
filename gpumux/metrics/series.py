"""The series that the daemon counts as events happen (docs/metrics.md is the contract).

Counts of every step are in `Tally`. Counters are touched on the loop's thread only; gauges come from a snapshot at
scrape time (gauges.py). Labels are bounded sets: priorities, error codes, message types. Values that a client can
choose are mapped to one of those.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gpumux import errors, types

# ---- Counts of every step and every turn of the loop: plain numbers on the loop's thread, converted to Prometheus'
# form at a scrape. Prometheus' own counters and histograms take a lock and several calls each, which is a notable part
# of what an empty step costs the daemon.
#
# A scrape on another thread may see a step in one series and not yet in the next.


class Spread:
    """A histogram: the number of observations in each bucket, and their sum. `bounds` are the
    buckets' inclusive upper ends."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """Cumulative counts by upper end, as text, and the sum."""
        ends = [*(repr(float(bound)) for bound in self.bounds), "+Inf"]
        return list(zip(ends, accumulate(self.counts), strict=True)), self.sum


class _Steps:
    __slots__ = ("done", "launches", "spreads")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.done = self.launches = 0
        self.spreads = tuple(Spread(bounds) for _ in types.StepTimes._fields)


class Tally(Collector):
    """Counts of steps and messages. priorities: value and label of each. message_types: all types. bounds: seconds."""

    def __init__(
        self, priorities: Iterable[tuple[int, str]], message_types: Iterable[type], bounds: Sequence[float]
    ) -> None:
        self._names = dict(priorities)
        self._steps = {number: _Steps(bounds) for number in self._names}
        self.received = dict.fromkeys(message_types, 0)  # valid messages from clients, by type
        self.busy_s = 0.0

    def step_done(self, priority: int, times: types.StepTimes) -> None:
        """Count a step that was answered with results."""
        steps = self._steps[priority]
        steps.done += 1
        for spread, seconds in zip(steps.spreads, times, strict=True):
            spread.counts[bisect_left(spread.bounds, seconds)] += 1
            spread.sum += seconds

    def launched(self, priority: int) -> None:
        """A piece was handed to the device."""
        self._steps[priority].launches += 1

    def collect(self) -> Iterable[Metric]:
        by_priority = ["priority"]
        done = CounterMetricFamily("gpumux_steps", "Steps answered with results.", labels=by_priority)
        out = CounterMetricFamily("gpumux_launches", "Pieces handed to the device.", labels=by_priority)
        queue = HistogramMetricFamily(
            "gpumux_step_queue_seconds", "From a step's arrival to its first piece's start.", labels=by_priority
        )
        device = HistogramMetricFamily(
            "gpumux_step_device_seconds", "Time a step's pieces ran on the device.", labels=by_priority
        )
        total = HistogramMetricFamily("gpumux_step_seconds", "From a step's arrival to its answer.", labels=by_priority)
        for number, steps in self._steps.items():
            label = [self._names[number]]
            done.add_metric(label, steps.done)
            out.add_metric(label, steps.launches)
            for family, spread in zip((queue, device, total), steps.spreads, strict=True):
                family.add_metric(label, *spread.buckets())
        messages = CounterMetricFamily("gpumux_messages_received", "Valid messages from clients.", labels=["type"])
        for kind, count in self.received.items():
            messages.add_metric([kind.__name__], count)
        busy = CounterMetricFamily("gpumux_loop_busy_seconds", "Time the dispatch loop worked rather than waited.")
        busy.add_metric([], self.busy_s)
        return [done, queue, device, total, out, messages, busy]


# ---- The registry of all series.


# 50 us is an empty step, 10 s is a very large one; three buckets a decade.
BUCKETS = (
    50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
PRIORITIES = {priority: priority.name.lower() for priority in types.Priority}
OTHER = "other"


def codes() -> frozenset[str]:
    """Every error code gpumux has: the only values a `reason` label of a refusal or failure takes."""

    def walk(cls: type[errors.GpumuxError]) -> set[str]:
        return {cls.code}.union(*(walk(sub) for sub in cls.__subclasses__()))

    return frozenset(walk(errors.GpumuxError))


class Metrics:
    """The daemon's registry and everything counted directly. One a daemon, never the global one.
    `message_types` are the classes of messages that can arrive."""

    def __init__(self, message_types: Iterable[type]) -> None:
        # Else each counter has a second series, which is not documented.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = CollectorRegistry(auto_describe=True)

        def counter(name: str, meaning: str, labels: list[str] | None = None) -> Counter:
            return Counter(name, meaning, labels or [], registry=registry)

        self.step_failures = counter("gpumux_step_failures", "Steps answered with an error.", ["reason"])
        self.rejections = counter("gpumux_rejections", "Requests refused with a typed error.", ["reason"])
        self.sessions_opened = counter("gpumux_sessions_opened", "Sessions that were opened.")
        self.sessions_lost = counter("gpumux_sessions_lost", "Sessions that fell silent or broke down.")
        self.jobs_opened = counter("gpumux_jobs_opened", "Jobs that were admitted.", ["priority"])
        self.job_failures = counter("gpumux_job_failures", "Jobs that ended with an error.", ["reason"])
        self.outgrown = counter("gpumux_jobs_outgrown", "Jobs that took more memory than they were charged.")
        meaning = "Bugs that ended a job, a session, all jobs, or a report, and not the daemon."
        self.inconsistencies = counter("gpumux_inconsistencies", meaning, ["scope"])
        self.programs_loaded = counter("gpumux_programs_loaded", "Programs made ready to run.")
        self.transfers = counter("gpumux_transfers", "State transfers that ended well.", ["direction"])
        self.transfer_bytes = counter("gpumux_transfer_bytes", "Bytes of state moved.", ["direction"])
        self.dropped_replies = counter("gpumux_dropped_replies", "Replies a client could not take.")
        self.snapshots_saved = counter("gpumux_state_snapshots", "Snapshots of jobs' state that were written.")
        self.snapshot_bytes = counter("gpumux_state_snapshot_bytes", "Bytes of them.")
        self.snapshot_seconds = counter("gpumux_state_snapshot_seconds", "Seconds from asking to the end of writing.")
        self.snapshot_failures = counter("gpumux_state_snapshot_failures", "Snapshots that failed.", ["reason"])
        self.snapshots_read = counter("gpumux_state_snapshots_read", "Snapshots read for clients that came back.")
        self.damaged_snapshots = counter("gpumux_state_snapshots_damaged", "Snapshots found damaged when read.")
        self.restores = counter("gpumux_restores", "Jobs whose clients came back and put their state back.")
        self.replayed_steps = counter("gpumux_replayed_steps", "Steps that ran again after it.")
        self.start_time = Gauge("gpumux_daemon_start_time_seconds", "Unix time of the start.", registry=registry)
        meaning = "Whether the newest configuration that was read is in force."
        self.config_in_force = Gauge("gpumux_config_last_reload_successful", meaning, registry=registry)
        self.config_in_force.set(1)
        self._codes = codes()
        self.tally = Tally(((int(p), name) for p, name in PRIORITIES.items()), message_types, BUCKETS)
        registry.register(self.tally)
        self.step_done, self.launched = self.tally.step_done, self.tally.launched
        for reason in ("snapshot_failed", "admission_refused"):
            self.snapshot_failures.labels(reason)  # from the start, so that an alert sees the first
        for scope in ("job", "session", "device", "report"):
            self.inconsistencies.labels(scope)
        for direction in ("push", "pull"):
            self.transfers.labels(direction)
            self.transfer_bytes.labels(direction)

    def add_gauges(self, gauges: Collector) -> None:
        """Register gauges before the tally: a loop that takes a snapshot has first processed its device's events."""
        self.registry.unregister(self.tally)
        self.registry.register(gauges)
        self.registry.register(self.tally)

    def step_failed(self, code: str) -> None:
        self.step_failures.labels(self._reason(code)).inc()

    def rejected(self, code: str) -> None:
        self.rejections.labels(self._reason(code)).inc()

    def job_opened(self, priority: int) -> None:
        self.jobs_opened.labels(PRIORITIES[types.Priority(priority)]).inc()

    def job_failed(self, code: str) -> None:
        self.job_failures.labels(self._reason(code)).inc()

    def transferred(self, push: bool, nbytes: int) -> None:
        direction = "push" if push else "pull"
        self.transfers.labels(direction).inc()
        self.transfer_bytes.labels(direction).inc(nbytes)

    def snapshot_saved(self, nbytes: int, seconds: float) -> None:
        self.snapshots_saved.inc()
        self.snapshot_bytes.inc(nbytes)
        self.snapshot_seconds.inc(seconds)

    def snapshot_failed(self, code: str) -> None:
        self.snapshot_failures.labels(self._reason(code)).inc()

    def _reason(self, code: str) -> str:
        return code if code in self._codes else OTHER
