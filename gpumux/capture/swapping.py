"""Functions of whole modules, put in another's place for the length of a trace."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

_ABSENT = object()


def here(plain: Callable[..., Any], new: Callable[..., Any]) -> Callable[..., Any]:
    """`new` in the thread that traces, `plain` in all others."""
    tracing = threading.get_ident()

    def choose(*args: Any, **kwargs: Any) -> Any:
        return (new if threading.get_ident() == tracing else plain)(*args, **kwargs)

    return choose


@contextmanager
def swapped(swaps: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Each attribute (owner, name) is `new` inside."""
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
