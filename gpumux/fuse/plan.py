"""What an array does with each operator, as a table to print."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gpumux.fuse.fused import Decision


@dataclass(frozen=True, slots=True)
class Plan:
    """`rows`: one an operator of the step, in order. `whole_s`: seconds of the step as it runs, and with every operator
    run once a model; None where it was not measured."""

    models: int
    rows: tuple[Decision, ...]
    whole_s: tuple[float, float] | None = None

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        counts = {how: sum(r.how == how for r in self.rows) for how in ("alike", "fused", "per-model")}
        yield (
            f"{len(self.rows)} operators for {self.models} models: {counts['fused']} run for all at once, "
            f"{counts['per-model']} once a model, {counts['alike']} once for all alike"
        )
        if self.whole_s is not None:
            yield f"a step takes {_time(self.whole_s[0])}, and {_time(self.whole_s[1])} one model after another"
        table = [("operator", "sizes", "layer", "choice", "fused", "per model")]
        table += [(_name(r), r.sizes, r.layer, _choice(r), _time(r.fused_s), _time(r.each_s)) for r in self.rows]
        widths = [max(len(row[i]) for row in table) for i in range(6)]
        for row in table:
            yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _name(row: Decision) -> str:
    return row.target.removeprefix("aten.").removesuffix(".default")


def _choice(row: Decision) -> str:
    return f"{row.how} ({row.why})" if row.why else row.how


def _time(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"
