"""An optimizer's state that is behind the daemon's, and fetches it before it is read."""

from __future__ import annotations

import copy
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from gpumux.client.fetching import Keeper
from gpumux.client.state import Part


class FetchingState(defaultdict[Any, Any]):
    """Stands where `optimizer.state` was: whatever is done with it is done with the real one, up to date."""

    def __init__(self, keeper: Keeper, optimizer: Any) -> None:
        super().__init__(dict)
        self._keeper = keeper
        self._optimizer = weakref.ref(optimizer)
        self.plain = optimizer.state

    def real(self) -> Any:
        optimizer = self._optimizer()
        if optimizer is not None and optimizer.state is self:
            self._keeper.fetch(frozenset({Part.OPTIMIZER}))
            self.plain = optimizer.state
        return self.plain


def _forwarding(name: str) -> Callable[..., Any]:
    def method(self: FetchingState, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.real(), name)(*args, **kwargs)

    method.__name__ = name
    return method


def _forward(names: Iterable[str]) -> None:
    for name in names:
        setattr(FetchingState, name, _forwarding(name))


_forward(
    (
        "__contains__", "__copy__", "__delitem__", "__eq__", "__ge__", "__getitem__", "__gt__", "__ior__", "__iter__", "__le__",
        "__len__", "__lt__", "__missing__", "__ne__", "__or__", "__reduce__", "__reduce_ex__", "__repr__", "__reversed__",
        "__ror__", "__setitem__", "__str__", "clear", "copy", "get", "items", "keys", "pop", "popitem", "setdefault",
        "update", "values",
    )
)  # fmt: skip
FetchingState.__deepcopy__ = lambda self, memo: copy.deepcopy(self.real(), memo)  # type: ignore[attr-defined]
FetchingState.__bool__ = lambda self: bool(self.real())  # type: ignore[attr-defined]
