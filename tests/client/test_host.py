"""Host scalars: formulas give exactly the numbers Python and torch would."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpumux.capture.symbols import OPS, Evaluator, Expr, ScalarGuard, Scope

floats = st.floats(allow_nan=False, allow_infinity=False, width=64, min_value=-1e6, max_value=1e6)


def scope() -> Scope:
    return Scope(lambda: "here:1")


def evaluator(made: Scope, *exprs: Expr) -> Evaluator:
    return Evaluator(exprs, made.guards.values())


@given(floats, floats, floats, floats)
def test_a_formula_is_python_arithmetic_on_new_values(a: float, b: float, c: float, d: float) -> None:
    s = scope()
    x, y = s.symbol(s.var("x", a)), s.symbol(s.var("y", b))

    def formula(p: float, q: float) -> float:
        return -(p * 0.5 + 1) - q * q + (2.0 - p) * 3

    run = evaluator(s, s.lift(formula(x, y)))
    assert run.run({"x": a, "y": b}) == [formula(a, b)]
    assert run.run({"x": c, "y": d}) == [formula(c, d)]


@given(st.integers(1, 10_000), st.floats(0.5, 0.99999))
def test_adams_bias_correction(step: int, beta: float) -> None:
    s = scope()
    count, b = s.symbol(s.var("n", 3.0)), s.symbol(s.var("b", 0.9))
    run = evaluator(s, s.lift((1 - b**count) ** 0.5))
    assert run.run({"n": float(step), "b": beta}) == [(1 - beta ** float(step)) ** 0.5]


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div"])
@given(a=floats, b=floats)
def test_float32_rounding_is_torchs(name: str, a: float, b: float) -> None:
    ta, tb = torch.tensor(a, dtype=torch.float32), torch.tensor(b, dtype=torch.float32)
    if name == "div" and tb == 0:
        return
    want = getattr(ta, name)(tb).item()
    got = OPS[f"f32.{name}"](a, b)
    assert got == want or (math.isnan(got) and math.isnan(want))


def test_a_decision_is_a_guard_and_a_broken_guard_gives_nothing() -> None:
    s = scope()
    rho = s.symbol(s.var("rho", 3.0))
    chosen = rho * 2 if rho > 5 else rho + 1
    assert [str(g.expr) for g in s.guards.values()] == ["gt(rho, 5.0)"]
    assert next(iter(s.guards.values())).where == "here:1"
    run = evaluator(s, s.lift(chosen))
    assert run.run({"rho": 4.0}) == [5.0]
    assert run.run({"rho": 6.0}) is None


def test_a_plain_number_is_a_guard_on_its_value() -> None:
    s = scope()
    x = s.symbol(s.var("x", 2.0))
    assert math.cos(float(x)) == math.cos(2.0)
    assert evaluator(s).run({"x": 2.0}) == []
    assert evaluator(s).run({"x": 2.5}) is None


@pytest.mark.parametrize(("value", "others"), [(0.0, [-0.0, 1.0]), (-0.0, [0.0]), (math.nan, [0.0]), (1.0, [math.nan])])
def test_a_guard_knows_the_sign_of_zero_and_what_is_no_number(value: float, others: list[float]) -> None:
    x = scope().var("a", value)
    guarded = Evaluator([], [ScalarGuard(x, value, "here:2")])
    assert guarded.run({"a": value}) == []
    assert [guarded.run({"a": other}) for other in others] == [None] * len(others)


def test_equal_formulas_are_one_and_constants_fold() -> None:
    s = scope()
    x = s.var("x", 2.0)
    one = s.apply("mul", x, s.const(3.0))
    assert s.apply("mul", x, s.const(3.0)) is one
    assert s.apply("mul", s.const(2.0), s.const(3.0)) is s.const(6.0)
    assert s.const(0.0) is not s.const(-0.0)
    assert s.const(1) is not s.const(1.0)


def test_integers_stay_integers_and_a_type_change_breaks_a_guard() -> None:
    s = scope()
    n = s.symbol(s.var("n", 3))
    run = evaluator(s, s.lift(n + 1))
    got = run.run({"n": 7})
    assert got == [8]
    assert isinstance(got[0], int)
    guarded = Evaluator([], [ScalarGuard(s.lift(n), 3, "here:2")])
    assert guarded.run({"n": 3}) == []
    assert guarded.run({"n": 3.0}) is None


def test_a_missing_variable_or_a_division_by_zero_does_not_hold() -> None:
    s = scope()
    x = s.symbol(s.var("x", 2.0))
    run = evaluator(s, s.lift(1.0 / x))
    assert run.run({}) is None
    assert run.run({"x": 0.0}) is None
