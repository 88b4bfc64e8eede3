"""Every series the daemon counts where things happen (docs/metrics.md is the contract).

Counters and histograms are touched on the loop's thread only, through children looked up once;
gauges come from a snapshot at scrape time (collector.py). Labels are bounded sets: priorities,
error codes, message types. Anything a client can choose is mapped onto one of those.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from gpumux import errors, model

# 50 us is an empty step, 10 s is a very large one; three buckets a decade.
BUCKETS = (
    50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
PRIORITIES = {priority: priority.name.lower() for priority in model.Priority}
OTHER = "other"


def codes() -> frozenset[str]:
    """Every error code gpumux has: the only values a `reason` label of a refusal or failure takes."""

    def walk(cls: type[errors.GpumuxError]) -> set[str]:
        return {cls.code}.union(*(walk(sub) for sub in cls.__subclasses__()))

    return frozenset(walk(errors.GpumuxError))


class _StepSeries:
    """The children of one priority, looked up once: a label lookup costs more than an observation."""

    __slots__ = ("device", "done", "queue", "total")

    def __init__(self, metrics: Metrics, priority: str) -> None:
        self.done = metrics.steps.labels(priority)
        self.queue = metrics.step_queue.labels(priority)
        self.device = metrics.step_device.labels(priority)
        self.total = metrics.step_total.labels(priority)


class Metrics:
    """The daemon's registry and everything counted directly. One a daemon, never the global one.
    `message_types` are the classes of messages that can arrive."""

    def __init__(self, message_types: Iterable[type]) -> None:
        self.registry = registry = CollectorRegistry(auto_describe=True)
        by_priority = ["priority"]

        def counter(name: str, meaning: str, labels: list[str] | None = None) -> Counter:
            return Counter(name, meaning, labels or [], registry=registry)

        def histogram(name: str, meaning: str) -> Histogram:
            return Histogram(name, meaning, by_priority, registry=registry, buckets=BUCKETS)

        self.steps = counter("gpumux_steps", "Steps answered with results.", by_priority)
        self.step_failures = counter("gpumux_step_failures", "Steps answered with an error.", ["reason"])
        self.step_queue = histogram("gpumux_step_queue_seconds", "From a step's arrival to its first piece's start.")
        self.step_device = histogram("gpumux_step_device_seconds", "Time a step's pieces ran on the device.")
        self.step_total = histogram("gpumux_step_seconds", "From a step's arrival to its answer.")
        self.launches = counter("gpumux_launches", "Pieces handed to the device.", by_priority)
        self.rejections = counter("gpumux_rejections", "Requests refused with a typed error.", ["reason"])
        self.messages = counter("gpumux_messages_received", "Valid messages from clients.", ["type"])
        self.sessions_opened = counter("gpumux_sessions_opened", "Sessions that were opened.")
        self.sessions_lost = counter("gpumux_sessions_lost", "Sessions that ended without a goodbye.")
        self.jobs_opened = counter("gpumux_jobs_opened", "Jobs that were admitted.", by_priority)
        self.job_failures = counter("gpumux_job_failures", "Jobs that ended with an error.", ["reason"])
        self.programs_loaded = counter("gpumux_programs_loaded", "Programs made ready to run.")
        self.transfers = counter("gpumux_transfers", "State transfers that ended well.", ["direction"])
        self.transfer_bytes = counter("gpumux_transfer_bytes", "Bytes of state moved.", ["direction"])
        self.dropped_replies = counter("gpumux_dropped_replies", "Replies a client could not take.")
        self.loop_busy = counter("gpumux_loop_busy_seconds", "Time the dispatch loop worked rather than waited.")
        self.start_time = Gauge("gpumux_daemon_start_time_seconds", "Unix time of the start.", registry=registry)
        self._codes = codes()
        self._steps = {int(priority): _StepSeries(self, name) for priority, name in PRIORITIES.items()}
        self._launches = {int(priority): self.launches.labels(name) for priority, name in PRIORITIES.items()}
        self._messages = {cls: self.messages.labels(cls.__name__) for cls in message_types}
        for direction in ("push", "pull"):
            self.transfers.labels(direction)
            self.transfer_bytes.labels(direction)

    def step_done(self, priority: int, times: model.StepTimes) -> None:
        """A step was answered with results."""
        series = self._steps[priority]
        series.done.inc()
        series.queue.observe(times.queue_s)
        series.device.observe(times.device_s)
        series.total.observe(times.total_s)

    def step_failed(self, code: str) -> None:
        self.step_failures.labels(self._reason(code)).inc()

    def launched(self, priority: int) -> None:
        self._launches[priority].inc()

    def rejected(self, code: str) -> None:
        self.rejections.labels(self._reason(code)).inc()

    def job_opened(self, priority: int) -> None:
        self.jobs_opened.labels(PRIORITIES[model.Priority(priority)]).inc()

    def job_failed(self, code: str) -> None:
        self.job_failures.labels(self._reason(code)).inc()

    def received(self, message: object) -> None:
        """A valid message arrived."""
        self._messages[type(message)].inc()

    def transferred(self, push: bool, nbytes: int) -> None:
        direction = "push" if push else "pull"
        self.transfers.labels(direction).inc()
        self.transfer_bytes.labels(direction).inc(nbytes)

    def _reason(self, code: str) -> str:
        return code if code in self._codes else OTHER
