"""Numbers of the batch and of variables that a step takes as symbols, because they change from call to call.

A number is written into a trace as a constant until it is seen to change: between two calls, or by the step itself.
Then the step is traced with a symbol in its place, so that operators take its value at each step, and Python decisions
by it are guarded (symbols.py). A second trace with plain numbers must give the same operators with the same values. If
it does not, or if the step can't run with a symbol, the number stays a constant: each value is a variant. A text of the
batch that changes is replaced by an object that can't be read, which shows that the step does not use it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

from gpumux.capture.symbols import Number, ScalarGuard, Scope, is_lifted, is_symbol, of_python
from gpumux.capture.watch.fingerprint import Change, Variable
from gpumux.errors import CaptureError

Source: TypeAlias = "int | Variable"  # a leaf of the batch by its position, or a variable
MOST = 256  # numbers of one step that are symbols


class Moves(Exception):
    """The step changes Python numbers while it is traced. They were restored, and must be symbols in the next trace.
    Never raised to users."""

    def __init__(self, variables: Sequence[Variable]) -> None:
        super().__init__("traced once more")
        self.variables = variables


@dataclass(frozen=True, slots=True)
class Lift:
    """What a trace does with numbers. `batch`: the leaves of the batch that are symbols or unread texts, and with
    `symbols` the lifted variables of the fingerprint are, too. Without `symbols` all are plain. `movable`: whether a
    variable that the step changes may become a symbol, for which Moves is raised. `expected`: names of the variables
    that it changed in the trace with symbols. `switches`: whether a variable that gets a constant where it held none
    is changed at each call, as a flag is. `places`: which slices are at places that change, as the trace with symbols
    found (RawTrace.places)."""

    batch: frozenset[int] = frozenset()
    symbols: bool = False
    movable: Callable[[Variable], bool] = lambda variable: False
    expected: Collection[str] = ()
    switches: bool = False
    places: Collection[int] = ()

    def leaf(self, position: int, value: Any, scope: Scope) -> Any:
        """What the step gets as this leaf of the batch, which is no tensor."""
        if not self.symbols or position not in self.batch:
            return value
        return Unread() if isinstance(value, str) else symbol(scope, batch_name(position), value)

    def moves(self, changes: Sequence[Change]) -> list[Variable]:
        """The numbers among these changes that must be symbols in the next trace."""
        found = [c.variable for c in changes if c.variable is not None and type(c.new) is type(c.old) in (int, float)]
        return [variable for variable in found if self.movable(variable)]


def batch_name(position: int) -> str:
    return f"batch.{position}"


def symbol(scope: Scope, name: str, value: Number) -> Any:
    return scope.symbol(scope.var(name, of_python(value)))


def by_numbers(guards: Sequence[ScalarGuard]) -> bool:
    """Whether a trace holds for some values of lifted numbers only."""
    return any(is_lifted(guard.expr) for guard in guards)


# ---- texts


def _refuse(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
    raise CaptureError("the step reads a text of the batch", "pass what it decides by as a number or a flag")


def _attribute(self: Any, name: str) -> Any:
    if name == "__class__":
        return str  # isinstance tells texts from tensors in many steps
    _refuse(self)


_READS = (
    "eq", "ne", "lt", "le", "gt", "ge", "hash", "len", "iter", "getitem", "contains", "add", "radd", "mul", "rmul",
    "mod", "rmod", "str", "repr", "format", "bool", "reduce_ex", "copy", "deepcopy", "fspath", "bytes", "int",
    "float", "index",
)  # fmt: skip

Unread: Callable[[], Any] = type(
    "Unread", (), {"__getattribute__": _attribute, **{f"__{name}__": _refuse for name in _READS}}
)


# ---- what a trace changed


def moved(changes: Sequence[Change], scope: Scope) -> dict[str, str]:
    """The new values of the variables in which a trace left numbers and other constants, by name. A formula counts as
    its value."""
    found = {}
    for c in changes:
        old, new = (scope.lift(x).value if is_symbol(x) else x for x in (c.old, c.new))
        if not c.flag and (new is None or type(new) in (bool, int, float, str)) and repr(old) != repr(new):
            found[c.name] = repr(new)
    return found
