"""What is counted for every step and every turn of the loop: plain numbers on the loop's thread, put into
Prometheus' form when somebody scrapes. Its own counters and histograms take a lock and several calls
each, a tenth of all that an empty step costs the daemon.

A scrape on another thread may see a step in one series and not yet in the next.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gpumux import model


class Spread:
    """A histogram: how many observations fell into each bucket, and their sum. `bounds` are the
    buckets' upper ends, which belong to them."""

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
        self.spreads = tuple(Spread(bounds) for _ in model.StepTimes._fields)


class Tally(Collector):
    """`priorities` and `message_types`: value and label of all there can be. `bounds` in seconds."""

    def __init__(
        self, priorities: Iterable[tuple[int, str]], message_types: Iterable[type], bounds: Sequence[float]
    ) -> None:
        self._names = dict(priorities)
        self._steps = {number: _Steps(bounds) for number in self._names}
        self.received = dict.fromkeys(message_types, 0)  # valid messages from clients, by type
        self.busy_s = 0.0

    def step_done(self, priority: int, times: model.StepTimes) -> None:
        """A step was answered with results."""
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
