"""Measured networks with known lines."""

from __future__ import annotations

from gpumux.plan.network.measured import KINDS, MeasuredNetwork, Point, Series

SIZES = (8, 64, 512, 4096, 32768, 262144, 2097152)


def on_a_line(delay: float, a_byte: float) -> tuple[Point, ...]:
    return tuple(Point(n, *[delay + a_byte * n] * 3) for n in SIZES)


def measured(ranks: int = 4) -> MeasuredNetwork:
    """Transfers take 100 us and 1 ns a byte, sums 200 us and 3 ns a byte, each times the number of ranks."""
    terms = {"transfer": (1e-4, 1e-9), "all-reduce": (2e-4, 3e-9)}
    series = tuple(
        Series(kind, among, on_a_line(*(among * each for each in terms[kind])))
        for among in sorted({2, ranks})
        for kind in KINDS
    )
    machines = ("machine: some CPU, 8 cores",) * ranks
    return MeasuredNetwork("gloo", "cpu", ranks, 5, machines, {"torch": "2.11.0"}, "2026-01-01T00:00:00Z", series)
