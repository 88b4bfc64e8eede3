"""Whether two traces of one step are the same, and where they part."""

from __future__ import annotations

from gpumux.client.ledger import RawOp
from gpumux.client.trace import HostResult, RawTrace, TensorResult


def first_difference(a: RawTrace, b: RawTrace) -> str | None:
    """Why two traces of one step aren't the same, or None when they are."""
    for i, (x, y) in enumerate(zip(a.record.ops, b.record.ops, strict=False)):
        one, other = ((o.target, o.args, o.kwargs, o.outs, o.random) for o in (x, y))
        if one != other and repr(one) != repr(other):  # nan, which equals no other, is written alike
            return f"operator {i} at {x.where}: {_brief(x)} the first time, {_brief(y)} the second"
    if len(a.record.ops) != len(b.record.ops):
        longer = a if len(a.record.ops) > len(b.record.ops) else b
        op = longer.record.ops[min(len(a.record.ops), len(b.record.ops))]
        return f"{len(a.record.ops)} operators the first time, {len(b.record.ops)} the second; {op.target} at {op.where} is extra"
    for s, t in zip(a.record.storages, b.record.storages, strict=False):
        if (s.kind, s.nbytes, s.key) != (t.kind, t.nbytes, t.key):
            return "a constant made inside the step has another value each time"
    if a.record.views != b.record.views or [str(e) for e in a.record.scalars] != [str(e) for e in b.record.scalars]:
        return "the sizes or the hyperparameter formulas differ"
    if (
        a.result_spec != b.result_spec
        or _results(a) != _results(b)
        or a.gradients != b.gradients
        or a.replaced != b.replaced
    ):
        return "what the step returns or leaves behind differs"
    return None


def _brief(op: RawOp) -> str:
    shown = [a for a in op.args if isinstance(a, (int, float, tuple))]
    return f"{op.target.removeprefix('aten.')}{shown or ''}"


def _results(raw: RawTrace) -> list[str]:
    return [
        f"view{r.view}" if isinstance(r, TensorResult) else str(r.expr) if isinstance(r, HostResult) else repr(r)
        for r in raw.results
    ]
