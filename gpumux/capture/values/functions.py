"""Functions of Python numbers that a trace replaces, so that they take symbols: those of `math` and numpy, and `float`.

Python gives `float(n)` the very value of a symbol, and a trace that used it holds for that value alone. The name is
replaced in the modules that were seen to do so, whose source calls `float` or gives it to `isinstance` and does nothing
else with it: for another use (`type(x) is float`) there is no substitute.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy
import torch

from gpumux.capture.source import is_user_code, user_line
from gpumux.capture.swapping import here
from gpumux.capture.symbols import NUMPY, Scope, is_lifted, is_symbol, plain_number
from gpumux.errors import CaptureError

_MATH = ("sqrt", "exp", "log", "cos", "sin", "tanh", "floor", "ceil", "log2", "log10")

# Modules that call float(n), by name, and whether `float` may be replaced in them. Those named here are schedules that
# begin with float(current_step).
_FLOATS: dict[str, bool] = {"transformers.optimization": True, "diffusers.optimization": True}


def swaps(scope: Scope) -> Iterator[tuple[Any, str, Any]]:
    """What is to be replaced for the length of a trace: (owner, name, by what)."""
    yield builtins, "sum", here(sum, _sum)
    yield math, "pow", _pow(scope)
    for name in _MATH:
        yield math, name, _of_math(scope, name)
    for kind in (torch.SymFloat, torch.SymInt):
        yield kind, "__array_ufunc__", _of_numpy
        yield kind, "__array__", _array
        yield kind, "clip", _clip  # numpy.clip(n, low, high) calls the method
        yield kind, "round", _round
    for name, may in _FLOATS.items():
        if may and (module := sys.modules.get(name)) is not None and "float" not in vars(module):
            yield module, "float", _Float
    for kind, method in ((torch.SymFloat, "__float__"), (torch.SymInt, "__index__")):
        yield kind, method, _noting(getattr(kind, method))


def _formula(scope: Scope, op: str, *numbers: Any) -> Any:
    """The symbol of an operation (symbols.OPS) on numbers and symbols of a scope."""
    return scope.symbol(scope.apply(op, *map(scope.lift, numbers)))


def _of_math(scope: Scope, name: str) -> Callable[..., Any]:
    plain = getattr(math, name)
    return lambda *args: _formula(scope, name, *args) if len(args) == 1 and is_symbol(args[0]) else plain(*args)


def _pow(scope: Scope) -> Callable[[Any, Any], Any]:
    plain = math.pow

    def function(a: Any, b: Any) -> Any:
        if is_symbol(a) or is_symbol(b):
            return _formula(scope, "pow", _formula(scope, "float", a), _formula(scope, "float", b))
        return plain(a, b)

    return function


def _sum(iterable: Iterable[Any], /, start: Any = 0) -> Any:
    """Replaces the builtin, which sums floats by themselves more exactly than one after another (Python 3.12)."""
    numbers, rest = [start], iter(iterable)
    for item in rest:
        if not (is_symbol(item) or type(item) in (int, float, bool)) or isinstance(start, torch.Tensor):
            return _SUM(rest, _sum_of_numbers(numbers) + item)
        numbers.append(item)
    return _sum_of_numbers(numbers)


def _sum_of_numbers(numbers: list[Any]) -> Any:
    symbol = next(filter(is_symbol, numbers), None)
    return _SUM(numbers[1:], numbers[0]) if symbol is None else _formula(symbol.node.scope, "sum", *numbers)


_SUM = sum


# Types of numpy that compute with a number as Python's float and int do. To others, as to float32, a number of Python's
# has the other's precision and one of numpy's its own, and a symbol does not say which it is.
_NUMBERS = (int, float, numpy.float64, numpy.int64)


def _of_numpy(self: Any, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
    """What numpy calls for a function of its own with a symbol among its arguments."""
    if method == "__call__" and all(is_symbol(each) or type(each) in _NUMBERS for each in inputs):
        # `number ** n` of a float64 and numpy.power(number, n) are told apart by nothing, and differ in the last bit.
        ambiguous = ufunc is numpy.power and type(inputs[0]) is numpy.float64
        if ufunc.__name__ in NUMPY and not kwargs and not ambiguous:
            return _formula_of_numpys(self, ufunc.__name__, *inputs)
    elif is_lifted(self.node.expr):
        raise TypeError(f"numpy.{ufunc.__name__} of a symbol and other types")
    elif any(getattr(each, "dtype", numpy.float64) != numpy.float64 for each in inputs):
        raise CaptureError(
            f"{user_line()} gives numpy.{ufunc.__name__} a hyperparameter or a step count, and a number or array of"
            " another type than float64",
            "compute with Python's numbers, float(number), or with tensors",
        )
    return getattr(ufunc, method)(*map(plain_number, inputs), **kwargs)


def _formula_of_numpys(self: Any, name: str, *numbers: Any) -> Any:
    # of numpy's own classes are constants alone
    plain = [each.item() if isinstance(each, numpy.generic) else each for each in numbers]
    return _formula(self.node.scope, f"numpy.{name}", *plain)


def _array(self: Any, dtype: Any = None, copy: Any = None) -> Any:
    """An array of the present value. numpy sums an array in an order that no formula has."""
    return numpy.asarray(plain_number(self), dtype=dtype)


def _clip(self: Any, low: Any, high: Any, out: None = None, **kwargs: Any) -> Any:
    if out is None and not kwargs and all(is_symbol(each) or type(each) in _NUMBERS for each in (low, high)):
        return _formula_of_numpys(self, "clip", self, low, high)
    return _array(self).clip(low, high, out=out, **kwargs)


def _round(self: Any, decimals: int = 0, out: None = None) -> Any:
    return _formula_of_numpys(self, "round", self, decimals)


# ---- float


class _FloatType(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, float)


class _Float(metaclass=_FloatType):
    """Replaces `float` in the modules of the user's: it makes a symbol of a symbol, and floats of all else."""

    def __new__(cls, value: Any = 0.0) -> Any:
        return torch.sym_float(value) if is_symbol(value) else float(value)


def _noting(plain: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A method by which Python reads the value of a symbol. If code does that by float(n), its module is noted, and the
    next trace replaces `float` there."""

    def method(self: Any) -> Any:
        caller = sys._getframe(1)
        if is_symbol(self) and "float" in caller.f_code.co_names and is_user_code(caller.f_code):
            name = caller.f_globals.get("__name__", "")
            module = sys.modules.get(name)
            if name not in _FLOATS and module is not None and vars(module) is caller.f_globals:
                _FLOATS[name] = _is_called_alone(module)
        return plain(self)

    return method


def _is_called_alone(module: Any) -> bool:
    """Whether a module's source does nothing with `float` but call it, annotate with it, and give it to
    `isinstance` and to a parser of arguments (`type=float`), and whether its source is there."""
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, TypeError, SyntaxError):
        return False  # made by exec, or in a notebook
    nodes = list(ast.walk(tree))
    calls = [n for n in nodes if isinstance(n, ast.Call)]
    called = {id(n.func) for n in calls}
    asked = [
        n.args[1] for n in calls if isinstance(n.func, ast.Name) and n.func.id == "isinstance" and len(n.args) == 2
    ]
    called |= {id(n) for each in asked for n in (each.elts if isinstance(each, ast.Tuple) else (each,))}
    parsed = {id(n.value) for n in nodes if isinstance(n, ast.keyword) and n.arg == "type"}
    notes = [getattr(n, of) for n in nodes for of in ("annotation", "returns") if getattr(n, of, None) is not None]
    annotated = {id(n) for note in notes for n in ast.walk(note)}
    uses = [n for n in nodes if isinstance(n, ast.Name) and n.id == "float"]
    return all(id(n) in called | parsed | annotated for n in uses)
