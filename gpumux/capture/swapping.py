"""Replacing attributes of modules and classes for the length of a trace."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

_ABSENT = object()


def here(plain: Callable[..., Any], new: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls `new` in the present thread, `plain` in all others."""
    tracing = threading.get_ident()

    def choose(*args: Any, **kwargs: Any) -> Any:
        return (new if threading.get_ident() == tracing else plain)(*args, **kwargs)

    return choose


@contextmanager
def swapped(swaps: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Inside, the attribute `name` of each `owner` is `new`, for (owner, name, new) in `swaps`."""
    before = [(owner, name, vars(owner).get(name, _ABSENT)) for owner, name, _ in swaps]
    try:
        for owner, name, new in swaps:
            setattr(owner, name, new)
        yield
    finally:
        for owner, name, old in before:
            if old is _ABSENT:
                delattr(owner, name)  # it was inherited
            else:
                setattr(owner, name, old)
