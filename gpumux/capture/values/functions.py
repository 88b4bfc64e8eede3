"""Functions of Python numbers that a trace replaces, so that they take symbols: those of `math` and numpy, `float` and
`int`.

Python gives `float(n)` the very value of a symbol, and a trace that used it holds for that value alone. The name is
replaced in the modules that were seen to do so, whose source calls `float` or gives it to `isinstance` and does nothing
else with it: for another use (`type(x) is float`) there is no substitute. The same holds for `int`.
"""

from __future__ import annotations

import abc
import ast
import builtins
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental import sym_node

from gpumux.capture.source import is_user_code, user_line
from gpumux.capture.swapping import here
from gpumux.capture.symbols import NUMPY, HostNode, Scope, is_lifted, is_symbol, plain_number
from gpumux.errors import CaptureError

_MATH = ("sqrt", "exp", "log", "cos", "sin", "tanh", "floor", "ceil", "log2", "log10")

# Modules that call float(n) or int(n), each by its name and that of the function, and whether that may be replaced in
# them. Those named here are schedules that begin with float(current_step).
_CALLED: dict[tuple[str, str], bool] = {
    ("transformers.optimization", "float"): True,
    ("diffusers.optimization", "float"): True,
}


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
    yield sym_node, "wrap_node", _known_truth(sym_node.wrap_node)
    for symbols, number in _KINDS.items():
        yield symbols, "__getattribute__", _of_class(number)
    for (name, function), may in _CALLED.items():
        if may and (module := sys.modules.get(name)) is not None and function not in vars(module):
            yield module, function, _TYPES[function]
    for method in ("__float__", "__int__"):
        yield torch.SymFloat, method, _noting(getattr(torch.SymFloat, method))
    for method in ("__index__", "__int__"):
        yield torch.SymInt, method, _noting(getattr(torch.SymInt, method))
    for method in ("guard_float", "guard_int"):  # float(tensor), int(tensor)
        yield HostNode, method, _noting(getattr(HostNode, method))


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


# ---- float and int

_KINDS: dict[type, type] = {torch.SymFloat: float, torch.SymInt: int, torch.SymBool: bool}


def _of_class(number: type) -> Callable[..., Any]:
    """The attributes of a symbol. Its class is that of the number where the user's code asks, and so `isinstance` says
    what it says in the plain step. Torch's own code tells symbols from numbers."""

    def attribute(self: Any, name: str) -> Any:
        found = object.__getattribute__(self, name)
        if name == "__class__" and isinstance(object.__getattribute__(self, "node"), HostNode):
            caller: Any = sys._getframe(1)
            if caller.f_globals is vars(abc):  # isinstance(n, numbers.Number)
                caller = caller.f_back
            return number if is_user_code(caller.f_code) else found
        return found

    return attribute


class _NumberType(type):
    kinds: tuple[type, ...]

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.kinds)


class _Float(metaclass=_NumberType):
    """Replaces `float` in the modules of the user's: it makes a symbol of a symbol, and floats of all else."""

    kinds = (float, torch.SymFloat)

    def __new__(cls, value: Any = 0.0) -> Any:
        value = _number(value)
        return torch.sym_float(value) if is_symbol(value) else float(value)


class _Int(metaclass=_NumberType):
    """Replaces `int` likewise."""

    kinds = (int, torch.SymInt, torch.SymBool)

    def __new__(cls, value: Any = 0, *base: Any, **more: Any) -> Any:
        value = _number(value)
        return _formula(value.node.scope, "int", value) if is_symbol(value) else int(value, *base, **more)


def _known_truth(wrap: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """What makes a symbol of the result of an operator. A comparison gives True or False, on which the trace depends:
    Python decides by `flag is True` without asking a symbol."""

    def function(node: Any) -> Any:
        return node.guard_bool() if isinstance(node, HostNode) and node.is_bool() else wrap(node)

    return function


def _number(value: Any) -> Any:
    """The number of a tracked tensor; all else as it is."""
    real = isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)
    return value.item() if real and value.numel() == 1 and not value.is_complex() else value


_TYPES: dict[str, type] = {"float": _Float, "int": _Int}


def noted() -> int:
    """The number of replacements that were found to be needed. A trace in which it grew has used plain numbers."""
    return sum(_CALLED.values())


def _noting(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A method by which Python reads the value of a symbol. If code does that by float(n) or int(n), its module is
    noted, and the next trace replaces the function there."""

    def method(self: Any, *args: Any) -> Any:
        caller = sys._getframe(1)
        name = caller.f_globals.get("__name__", "")
        for function in _TYPES:
            if (name, function) in _CALLED or function not in caller.f_code.co_names:
                continue
            module = sys.modules.get(name)
            if is_user_code(caller.f_code) and module is not None and vars(module) is caller.f_globals:
                _CALLED[name, function] = _is_called_alone(module, function)
        return plain(self, *args)

    return method


def _is_called_alone(module: Any, function: str) -> bool:
    """Whether a module's source does nothing with `float` or `int` but call it, annotate with it, and give it to
    `isinstance`, to `map` and to a parser of arguments (`type=float`), and whether its source is there."""
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, TypeError, SyntaxError):
        return False  # made by exec, or in a notebook
    nodes = list(ast.walk(tree))
    calls = [n for n in nodes if isinstance(n, ast.Call)]
    named = [(n.func.id, n.args) for n in calls if isinstance(n.func, ast.Name)]
    called = {id(n.func) for n in calls} | {id(args[0]) for name, args in named if name == "map" and args}
    asked = [args[1] for name, args in named if name == "isinstance" and len(args) == 2]
    called |= {id(n) for each in asked for n in (each.elts if isinstance(each, ast.Tuple) else (each,))}
    parsed = {id(n.value) for n in nodes if isinstance(n, ast.keyword) and n.arg == "type"}
    notes = [getattr(n, of) for n in nodes for of in ("annotation", "returns") if getattr(n, of, None) is not None]
    annotated = {id(n) for note in notes for n in ast.walk(note)}
    uses = [n for n in nodes if isinstance(n, ast.Name) and n.id == function]
    return all(id(n) in called | parsed | annotated for n in uses)
