"""Host scalars: numbers the client computes for every step instead of baking them into a Program.

While a step is traced, each hyperparameter and step counter is a `torch.SymFloat` or `SymInt` over a `HostNode`.
Python arithmetic on it builds an `Expr`. An operator that gets it as an argument takes the expression's value at each
step (an `ir.ScalarRef`). If Python *decides* something by it (`if momentum != 0`, RAdam's `rho_t > 5`), or torch needs
a plain number, a guard is kept: the trace is used only while every guard holds, and another trace is made otherwise.

Values follow Python's own float and int arithmetic, and float32 rounding for 0-dim tensors such as
Adam's `step`, so that operators get exactly the numbers the plain loop would give them.
"""

from __future__ import annotations

import builtins
import ctypes
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy
import torch

from gpumux.errors import CaptureError

Number = float | int | bool


def _f32(x: Number) -> float:
    """Round to float32 as a C cast does (overflow to infinity included)."""
    return ctypes.c_float(x).value


def _rounded(op: Callable[..., Any]) -> Callable[..., float]:
    # Correct in one double operation: +, -, *, / of float32 values rounded twice is the float32 result.
    return lambda *args: _f32(op(*(_f32(a) for a in args)))


def _wrapped(op: Callable[..., int]) -> Callable[..., int]:
    # As numbers of 64 bits overflow.
    return lambda a, b: (op(a, b) + 2**63) % 2**64 - 2**63


def _truediv(a: Number, b: Number) -> float:
    return a / b


# Functions of numpy that a step may apply to numbers. Their values may differ from those of `math` and of Python's
# operators in the last bit, as may their types.
NUMPY = (
    "exp", "exp2", "expm1", "log", "log1p", "log2", "log10", "sqrt", "cos", "sin", "tanh", "rint", "floor", "ceil",
    "absolute", "negative", "sign", "square", "add", "subtract", "multiply", "divide", "floor_divide", "remainder",
    "power", "minimum", "maximum", "clip", "round", "less", "less_equal", "greater", "greater_equal", "equal",
    "not_equal",
)  # fmt: skip


def _of_numpy(name: str) -> Callable[..., Number]:
    function = getattr(numpy, name)
    return lambda *numbers: function(*numbers).item()


OPS: dict[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "truediv": _truediv, "neg": operator.neg,
    "floordiv": operator.floordiv, "mod": operator.mod, "pow": operator.pow, "abs": abs, "pos": operator.pos,
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "and": lambda a, b: a and b, "or": lambda a, b: a or b, "not": operator.not_, "max": max, "min": min,
    "sum": lambda start, *rest: sum(rest, start),
    "float": float, "int": int, "sqrt": math.sqrt, "exp": math.exp, "log": math.log, "cos": math.cos, "sin": math.sin,
    "round": round, "trunc": math.trunc, "tanh": math.tanh, "floor": math.floor, "ceil": math.ceil, "log2": math.log2,
    "log10": math.log10, "f32.add": _rounded(operator.add), "f32.sub": _rounded(operator.sub),
    "f32.mul": _rounded(operator.mul), "f32.div": _rounded(operator.truediv), "f32.cast": _f32,
    "i64.add": _wrapped(operator.add), "i64.sub": _wrapped(operator.sub), "i64.mul": _wrapped(operator.mul),
    **{f"numpy.{name}": _of_numpy(name) for name in NUMPY},
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Expr:
    """A number and the formula it is the value of. Hash-consed by its Scope: equal formulas are one object."""

    op: str  # "var", "const", or a key of OPS
    args: tuple[Any, ...]  # Exprs, or the name / the constant
    value: Number
    index: int  # position in the scope, after its arguments

    @property
    def constant(self) -> bool:
        return self.op == "const"

    def __str__(self) -> str:
        if self.op in ("var", "const"):
            return str(self.args[0])
        return f"{self.op}({', '.join(map(str, self.args))})"


@dataclass(frozen=True, slots=True)
class ScalarGuard:
    """`expr` had this value where Python used it; `where` is the user's line."""

    expr: Expr
    value: Number
    where: str


class Scope:
    """All expressions and guards of one trace. Python gets plain numbers, on which the trace depends, in place of
    symbols for the variables whose names begin with one of `plain`."""

    def __init__(self, locate: Callable[[], str], plain: tuple[str, ...] = ()) -> None:
        self._plain = plain
        self._made: dict[tuple[Any, ...], Expr] = {}
        self._locate = locate
        self.exprs: list[Expr] = []
        self.guards: dict[int, ScalarGuard] = {}
        self._numbers: tuple[str, Mapping[str, Any]] = ("", {})

    def _add(self, key: tuple[Any, ...], op: str, args: tuple[Any, ...], value: Number) -> Expr:
        found = self._made.get(key)
        if found is None:
            found = Expr(op, args, value, len(self.exprs))
            self._made[key] = found
            self.exprs.append(found)
        return found

    def var(self, name: str, value: Number) -> Expr:
        return self._add(("var", name), "var", (name,), value)

    def const(self, value: Number) -> Expr:
        # repr tells 0.0 from -0.0 and 1 from 1.0 and True
        return self._add(("const", repr(value)), "const", (value,), value)

    def apply(self, op: str, *args: Expr) -> Expr:
        value = OPS[op](*(a.value for a in args))
        if all(a.constant for a in args):
            return self.const(value)
        return self._add((op, *(a.index for a in args)), op, args, value)

    def guard(self, expr: Expr) -> Number:
        """The plain value, for use by Python. Records that the trace depends on it."""
        if not expr.constant and expr.index not in self.guards:
            self.guards[expr.index] = ScalarGuard(expr, expr.value, self._locate())
        return expr.value

    def symbol(self, expr: Expr) -> Any:
        """What the user's code sees: a torch SymFloat / SymInt / SymBool, or the plain constant."""
        import torch

        if expr.constant:
            return expr.value
        if self._plain and any(name.startswith(self._plain) for name in _variables(expr)):
            return self.guard(expr)
        node = HostNode(self, expr)
        if isinstance(expr.value, bool):
            return torch.SymBool(node)
        return torch.SymInt(node) if isinstance(expr.value, int) else torch.SymFloat(node)

    @contextmanager
    def numbers_of(self, operator: str, symbols: Mapping[str, Any]) -> Iterator[None]:
        """Inside, the operator of this name is called with plain numbers in place of `symbols`, which are by
        argument."""
        self._numbers = (operator, symbols)
        try:
            yield
        finally:
            self._numbers = ("", {})

    def symbols_of(self, operator: str) -> Mapping[str, Any]:
        """The symbols that the numbers in a call of this operator stand for, by argument."""
        name, symbols = self._numbers
        return symbols if name == operator else {}

    def lift(self, value: Any) -> Expr:
        """The expression behind a symbol or a plain number."""
        node = getattr(value, "node", None)
        if isinstance(node, HostNode):
            if node.scope is not self:
                raise _kept()
            return node.expr
        return self.const(of_enumeration(value))


class HostNode:
    """The protocol torch's SymInt, SymFloat and SymBool expect of what they wrap."""

    def __init__(self, scope: Scope, expr: Expr) -> None:
        self.scope = scope
        self.expr = expr

    def is_int(self) -> bool:
        return isinstance(self.expr.value, int) and not self.is_bool()

    def is_float(self) -> bool:
        return isinstance(self.expr.value, float)

    def is_bool(self) -> bool:
        return isinstance(self.expr.value, bool)

    def is_nested_int(self) -> bool:
        return False

    def is_symbolic(self) -> bool:
        return True

    def is_constant(self) -> bool:
        return False

    def maybe_as_int(self) -> None:
        return None

    def maybe_as_float(self) -> None:
        return None

    def maybe_as_bool(self) -> None:
        return None

    def has_hint(self) -> bool:
        return True

    @property
    def hint(self) -> Number:
        return self.expr.value

    def require_hint(self, fallback: Any = None) -> Number:
        return self.expr.value

    def clone(self) -> HostNode:
        return self

    def str(self) -> builtins.str:
        return f"{self.scope.guard(self.expr)}"  # guarded, because Python may decide anything by the text

    def _graph_repr(self) -> builtins.str:
        return self.str()

    def wrap_int(self, value: int) -> HostNode:
        return HostNode(self.scope, self.scope.const(value))

    wrap_float = wrap_int
    wrap_bool = wrap_int

    def guard_int(self, file: Any = None, line: Any = None) -> int:
        return int(self.scope.guard(self.expr))

    def guard_float(self, file: Any = None, line: Any = None) -> float:
        return float(self.scope.guard(self.expr))

    def guard_bool(self, file: Any = None, line: Any = None) -> bool:
        return bool(self.scope.guard(self.expr))

    expect_true = guard_bool
    guard_or_false = guard_bool
    guard_or_true = guard_bool
    statically_known_true = guard_bool
    expect_size = guard_bool
    guard_size_oblivious = guard_bool

    def bool_(self) -> bool:
        return self.guard_bool()

    def int_(self) -> int:
        return self.guard_int()

    def sym_float(self) -> HostNode:
        return self if self.is_float() else self._apply("float")

    def sym_int(self) -> HostNode:
        return self if self.is_int() else self._apply("int")

    def round(self, digits: Any = None) -> HostNode:
        if digits is None:
            return self._apply("round")
        return self._apply("round", self.wrap_int(int(digits)))

    def trunc(self) -> HostNode:
        return self._apply("trunc")

    def _apply(self, op: builtins.str, *others: HostNode) -> HostNode:
        for other in others:
            if other.scope is not self.scope:
                raise _kept()
        return HostNode(self.scope, self.scope.apply(op, self.expr, *(o.expr for o in others)))


def _kept() -> CaptureError:
    return CaptureError(
        "the step uses a number that an earlier trace of it left somewhere (a cache, a library's object)",
        "keep such a number as a plain one, float(number), or in a variable of your own",
    )


_NODE_METHODS = {
    "add": "add", "sub": "sub", "mul": "mul", "truediv": "truediv", "float_truediv": "truediv",
    "int_truediv": "truediv", "floordiv": "floordiv", "int_floordiv": "floordiv", "mod": "mod", "pow": "pow",
    "float_pow": "pow", "pow_by_natural": "pow", "neg": "neg", "pos": "pos", "abs": "abs", "eq": "eq", "ne": "ne",
    "lt": "lt", "le": "le", "gt": "gt", "ge": "ge", "and_": "and", "or_": "or", "sym_and": "and", "sym_or": "or",
    "sym_not": "not", "sym_max": "max", "sym_min": "min", "sqrt": "sqrt", "exp": "exp", "log": "log", "cos": "cos",
    "sin": "sin", "tanh": "tanh", "log2": "log2", "floor": "floor", "ceil": "ceil", "sym_sqrt": "sqrt",
    "sym_log2": "log2",
}  # fmt: skip


def _method(op: str) -> Callable[..., HostNode]:
    def apply(self: HostNode, *others: HostNode) -> HostNode:
        return self._apply(op, *others)

    return apply


for _name, _op in _NODE_METHODS.items():
    setattr(HostNode, _name, _method(_op))


# A number of the batch or of a Python variable has a name that begins with one of these (watch/lifting.py).
LIFTED = ("batch.", "variable.")


def is_lifted(expr: Expr) -> bool:
    """Whether a number of the batch or of a Python variable is in the expression."""
    return any(name.startswith(LIFTED) for name in _variables(expr))


_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def is_symbol(value: Any) -> bool:
    """Whether `value` is a torch symbol over a HostNode."""
    return isinstance(value, _SYMBOLS) and isinstance(value.node, HostNode)


def plain_number(value: Any) -> Any:
    """The value of a torch symbol over a HostNode, on which the trace depends from now on; all else as it is."""
    return value.node.scope.guard(value.node.expr) if is_symbol(value) else value


def _odd(value: Number) -> bool:
    """Whether `==` can't compare the value: a zero has a sign, and a NaN equals nothing."""
    return isinstance(value, float) and (value == 0.0 or value != value)


class Evaluator:
    """Recomputes chosen expressions for new values of the variables, without torch."""

    def __init__(self, wanted: Sequence[Expr], guards: Iterable[ScalarGuard]) -> None:
        self._guards = tuple(guards)
        needed: dict[int, Expr] = {}
        stack = [*wanted, *(g.expr for g in self._guards)]
        while stack:
            expr = stack.pop()
            if expr.index not in needed:
                needed[expr.index] = expr
                if expr.op not in ("var", "const"):
                    stack.extend(expr.args)
        place: dict[int, int] = {}
        self._vars: list[str] = []
        self._types: list[type[Number]] = []
        self._consts: list[Number] = []
        self._steps: list[tuple[Callable[..., Any], tuple[int, ...]]] = []
        for expr in needed.values():
            if expr.op == "var":
                place[expr.index] = len(self._vars)
                self._vars.append(expr.args[0])
                self._types.append(type(expr.value))
        for expr in needed.values():
            if expr.op == "const":
                place[expr.index] = len(self._vars) + len(self._consts)
                self._consts.append(expr.value)
        for index in sorted(needed):
            expr = needed[index]
            if expr.op not in ("var", "const"):
                place[index] = len(self._vars) + len(self._consts) + len(self._steps)
                self._steps.append((OPS[expr.op], tuple(place[a.index] for a in expr.args)))
        self._wanted = [place[e.index] for e in wanted]
        self._checks = [(place[g.expr.index], g.value) for g in self._guards if not _odd(g.value)]
        self._odd_checks = [(place[g.expr.index], repr(g.value)) for g in self._guards if _odd(g.value)]

    def run(self, env: Mapping[str, Number]) -> list[Number] | None:
        """Values of the wanted expressions, or None when a guard does not hold. A formula that raises (a division by
        zero, which the traced code would raise as well) counts as a guard that does not hold."""
        if not (self._wanted or self._guards):
            return []
        try:
            values: list[Any] = list(map(env.__getitem__, self._vars))
            if list(map(type, values)) != self._types:
                return None  # for example, an int learning rate became a float: operators take other arguments
            values += self._consts
            for fn, args in self._steps:
                values.append(fn(*(values[a] for a in args)))
        except (KeyError, ArithmeticError, ValueError):
            return None
        for at, value in self._checks:
            got = values[at]
            if got != value or type(got) is not type(value):
                return None
        if any(repr(values[at]) != value for at, value in self._odd_checks):
            return None
        return list(map(values.__getitem__, self._wanted))


# ---- An optimizer's hyperparameters by name: the numbers of its groups, lifted to host scalars.


def hyperparameters(optimizers: Sequence[Any]) -> Iterator[tuple[int, int, str, int | None, Any]]:
    """(optimizer, group, key, position in a tuple or None, value) for every number of every group. Numbers
    are Python's own. Raises CaptureError for a number that behaves like neither a float nor an int."""
    for i, optimizer in enumerate(optimizers):
        for j, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if key == "params":
                    continue
                place = f"param_groups[{j}][{key!r}]"
                if _is_number(value, place) or _is_host_tensor(value):
                    yield i, j, key, None, of_python(value)
                elif isinstance(value, (tuple, list)):
                    for k, item in enumerate(value):
                        if _is_number(item, f"{place}[{k}]"):
                            yield i, j, key, k, of_python(item)


def _is_number(value: Any, place: str) -> bool:
    """Whether `value` is a float or an int. numpy.float64 is a float to Python. Raises CaptureError for numpy's other
    numbers, which round and overflow by rules of their own."""
    if isinstance(value, numpy.generic) and not isinstance(value, (float, str)):
        kind = "bool" if isinstance(value, numpy.bool_) else "float or int"
        raise CaptureError(f"{place} is a numpy.{type(value).__name__}", f"give it as a Python {kind}")
    return is_number(value)


def is_number(value: Any) -> bool:
    """Whether a value is a float or an int that may be lifted. A member of an enumeration is not: Python decides by
    which one it is, also with `is`."""
    return isinstance(value, (int, float)) and not isinstance(value, (bool, Enum))


def of_enumeration(value: Any) -> Any:
    """The number that a member of an IntEnum or IntFlag is; anything else as it is."""
    return int(value) if isinstance(value, Enum) and isinstance(value, int) else value


def of_python(value: Any) -> Any:
    """The number as a plain float where it is of a subclass of float (numpy.float64), as the wire takes only plain
    ones."""
    return float(value) if isinstance(value, float) else value


def _is_host_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0 and value.device.type == "cpu"


OF_OPTIMIZERS = ("o", "s")  # begin the names of hyperparameters and of numbers in the optimizers' state


def hyper_name(i: int, j: int, key: str, k: int | None) -> str:
    return f"o{i}.g{j}.{key}" if k is None else f"o{i}.g{j}.{key}.{k}"


def may_be_constant(name: str) -> bool:
    """Whether a number is a hyperparameter that schedules rarely change: any but the learning rate."""
    return bool(re.fullmatch(r"o\d+\.g\d+\.(?!lr$).*", name))


class ConstantScalars:
    """Decides which numbers of a step are written into its Program as constants: those computed only from
    hyperparameters that schedules rarely change, which are all but the learning rate and those seen to change. A kernel
    is faster with a constant."""

    def __init__(self) -> None:
        self._changed: set[str] = set()

    def holds(self, expr: Expr) -> bool:
        """Whether an expression contains only such hyperparameters, at least one, and constants."""
        names = set(_variables(expr))
        return bool(names) and all(map(self._is_constant, names))

    @property
    def numbers_of_each_step(self) -> frozenset[str]:
        """The hyperparameters that were seen to change."""
        return frozenset(self._changed)

    def changed(self, exprs: Iterable[Expr], now: Mapping[str, Number]) -> list[str]:
        """The hyperparameters in `exprs` that have changed since the trace. They are numbers of each step from now
        on."""
        found = sorted(
            {name for expr in exprs for name, old in _variables(expr).items() if repr(now.get(name)) != repr(old)}
        )
        self._changed.update(found)
        return found

    def _is_constant(self, name: str) -> bool:
        return name not in self._changed and may_be_constant(name)


def _variables(expr: Expr) -> dict[str, Number]:
    """The variables in an expression, with their values at the trace."""
    if expr.op == "var":
        return {expr.args[0]: expr.value}
    if expr.op == "const":
        return {}
    return {name: value for arg in expr.args for name, value in _variables(arg).items()}


def _read(value: Any, place: str) -> Any:
    return of_python(value) if _is_number(value, place) else value


class HyperReader:
    """Reads the optimizers' numbers at every call, without walking the groups again."""

    def __init__(self, optimizers: list[Any]) -> None:
        self._slots = [
            (hyper_name(i, j, key, k), optimizers[i], j, key, k) for i, j, key, k, _ in hyperparameters(optimizers)
        ]

    def read(self) -> dict[str, Number]:
        out: dict[str, Number] = {}
        for name, optimizer, j, key, k in self._slots:
            value = optimizer.param_groups[j][key]  # looked up each time, as load_state_dict makes new groups
            if k is not None:
                value = value[k]
            kind = type(value)
            if kind is not float and kind is not int:
                value = value.item() if isinstance(value, torch.Tensor) else _read(value, f"param_groups[{j}][{key!r}]")
            out[name] = value
        return out
