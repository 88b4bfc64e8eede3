"""The whole step and its parts, run side by side on real numbers.

Every value that should be per sample must be what the parts' values make side by side, and every value that
should be accumulated must be their sum or mean, each operator for itself; the first that is not is named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from gpumux.client.ledger import RawOp
from gpumux.client.microbatch.compare import Match, along, total
from gpumux.client.microbatch.emit import Emitter
from gpumux.client.microbatch.machine import Inconclusive, Machine
from gpumux.client.microbatch.pairs import REMEDY, Pair, outs_of, scaled
from gpumux.client.microbatch.tables import NOT_SUMS, UNDEFINED
from gpumux.client.microbatch.values import Kind, Level, Plan
from gpumux.errors import NotSplittable
from gpumux.program.ir import View

_WIDE_TOLERANCE = 1e-8  # float64: what is left of two ways of summing
_NARROW_TOLERANCE = 1e-3  # the step's own types, where it can't be run in float64
_NOISE = 1e-12

Load = Callable[[Machine, bool], None]  # fills state and batch; with True, with numbers of its own making


@dataclass(slots=True)
class Proof:
    """`ratios`: of each storage of shares, what the parts' sum is multiplied by. `joined`: of each result
    that is laid side by side, by its views."""

    ratios: dict[int, float] = field(default_factory=dict)
    joined: dict[tuple[int, int], float] = field(default_factory=dict)


def prove(
    pairs: list[Pair], plan: Plan, make: Callable[[], Emitter], load: Load, results: list[tuple[int, int]]
) -> Proof:
    """`results`: (whole view, part view) of per-sample values the step returns. Raises NotSplittable."""
    reason = ""
    for wide in (True, False):
        for invented in (True, False):
            try:
                with torch.no_grad():
                    return _Run(pairs, plan, make(), wide, results).run(load, invented)
            except Inconclusive as error:
                reason = reason or str(error)
    raise NotSplittable(f"whether the step splits could not be tried out: {reason}", REMEDY)


class _Run:
    def __init__(
        self, pairs: list[Pair], plan: Plan, emitter: Emitter, wide: bool, results: list[tuple[int, int]]
    ) -> None:
        self.pairs, self.plan, self.emitter, self.results = pairs, plan, emitter, results
        self.record = emitter.record
        self.machine = Machine(self.record, wide)
        self.tolerance = _WIDE_TOLERANCE if wide else _NARROW_TOLERANCE
        self.parts = range(emitter.count)
        self._own: dict[int, set[int]] = {}  # storage of the whole -> the parts'
        self._matches: dict[int, Match] = {}

    def run(self, load: Load, invented: bool) -> Proof:
        load(self.machine, invented)
        last = self._last_uses()
        for j, (pair, level) in enumerate(zip(self.pairs, self.plan.levels, strict=True)):
            if level is Level.TAIL:
                continue
            self._whole(pair.full)
            if level is Level.PART:
                self._in_parts(j, pair)
                self._compare(j, pair)
            for storage in last.get(j, ()):
                for one in (storage, *self._own.get(storage, ())):
                    self.machine.forget(one)
        return self._finish()

    def _last_uses(self) -> dict[int, list[int]]:
        """The storages that nobody needs after each operator."""
        kept = self.plan.shares | {self.record.views[a].storage for a, _ in self.results}
        kept |= {s for j in self.plan.losses.values() for s in self.pairs[j].full.reads}
        kept |= set(self.plan.divided.values())
        used: dict[int, int] = {}
        for j, (pair, level) in enumerate(zip(self.pairs, self.plan.levels, strict=True)):
            if level is not Level.TAIL:
                used.update(dict.fromkeys(pair.full.reads | pair.full.writes, j))
        found: dict[int, list[int]] = {}
        for storage, j in used.items():
            if storage not in kept and self.record.storages[storage].kind == "temp":
                found.setdefault(j, []).append(storage)
        return found

    # ---- running -------------------------------------------------------------------------------------

    def _whole(self, op: RawOp) -> None:
        if op.random is not None:
            self.machine.draw(op)
        else:
            self.machine.run(op)

    def _in_parts(self, j: int, pair: Pair) -> None:
        for part in self.parts:
            ops = self.emitter.emit(j, part)
            for extra in self.emitter.extras:
                self.machine.run(extra)
            self.emitter.extras.clear()
            for storage in pair.part.writes:
                self._own.setdefault(storage, set()).add(self.emitter.storage(storage, part))
            if pair.full.random is not None:
                self.machine.put(ops[0], self._drawn(pair, part))
                continue
            for op in ops:
                self.machine.run(op)

    def _drawn(self, pair: Pair, part: int) -> list[torch.Tensor]:
        """The part's piece of what was drawn for the whole."""
        found = []
        for a, b in zip(outs_of(pair.full.outs), outs_of(pair.part.outs), strict=True):
            whole = self.machine.tensor(a)
            dim = scaled(self.record.views[a], self._of_part(b, part), len(self.parts))
            assert dim >= 0, "other draws were refused"
            length = whole.shape[dim] // len(self.parts)
            found.append(whole.narrow(dim, part * length, length))
        return found

    def _of_part(self, view: int, part: int) -> View:
        return self.record.views[self.emitter.part_view(view, part)]

    # ---- comparing -----------------------------------------------------------------------------------

    def _compare(self, j: int, pair: Pair) -> None:
        if pair.name in UNDEFINED or pair.full.random is not None:
            return
        for a, b, kind in self.plan.outs[j]:
            storage = self.record.views[a].storage
            if kind in (Kind.SAMPLE, Kind.DATA):
                whole, parts = self._values(a, b)
                if not (whole.is_floating_point() or whole.is_complex()):
                    continue  # positions within a part are not those within the batch; what they pick is compared
                if self._along(a, b, whole, parts) is None:
                    raise NotSplittable(
                        f"{pair.full.where}: {pair.name} mixes samples: for parts of the batch it gives other values",
                        REMEDY,
                    )
            elif kind is Kind.SHARE and storage in self.plan.shares:
                self._share(storage, a, b, pair)

    def _values(self, a: int, b: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        views = [self.emitter.part_view(b, part) for part in self.parts]
        return self.machine.tensor(a), [self.machine.tensor(v) for v in views]

    def _along(self, a: int, b: int, whole: torch.Tensor, parts: list[torch.Tensor]) -> Match | None:
        dim = scaled(self.record.views[a], self._of_part(b, 0), len(parts))
        return along(whole, parts, dim, self.tolerance)

    def _share(self, storage: int, a: int, b: int, pair: Pair) -> None:
        whole, parts = self._values(a, b)
        if not all(bool(torch.isfinite(t).all()) for t in (whole, *parts)):
            raise Inconclusive(f"{pair.full.where}: {pair.name} gives infinities")
        inputs = [self.machine.tensor(v) for v, _ in pair.refs if self.record.views[v].storage in self.machine]
        largest = max((float(t.abs().max()) for t in inputs if t.is_floating_point() and t.numel()), default=0.0)
        match = total(whole, parts, self.tolerance, _NOISE * largest)
        if match is None or (match.ratio is None and pair.name in NOT_SUMS):
            raise NotSplittable(
                f"{pair.full.where}: what {pair.name} gives for the batch is neither the sum nor the mean of what it gives "
                "for parts of it",
                REMEDY,
            )
        self._matches[storage] = match

    def _finish(self) -> Proof:
        proof = Proof()
        for a, b in self.results:
            whole, parts = self._values(a, b)
            match = self._along(a, b, whole, parts)
            if match is None or match.inner != 1:
                raise NotSplittable(
                    f"a result of shape {tuple(whole.shape)} can't be put together from those of parts",
                    "return per-sample values with the batch first, sums, or means, or submit without microbatches",
                )
            proof.joined[a, b] = 1.0 if match.ratio is None else match.ratio
        known = Counter(m.ratio for s, m in self._matches.items() if m.ratio is not None and self._is_float(s))
        usual = known.most_common(1)[0][0] if known else 1.0
        for storage in self.plan.shares:
            found = self._matches.get(storage)
            ratio = found.ratio if found is not None else None
            proof.ratios[storage] = ratio if ratio is not None else usual if self._is_float(storage) else 1.0
        return proof

    def _is_float(self, storage: int) -> bool:
        return self.record.storages[storage].dtype.startswith(("float", "bfloat", "complex"))
