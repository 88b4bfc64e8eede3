"""Tensors in caches of functools: what a cached function made at a trace would be met there by the next one.

Python shows no way into such a cache, so that nothing can be put in the place of one tensor. A cache that holds tensors
of a trace is emptied instead, after the trace and before the next: each trace computes them again, and the step
does so each time it runs. That gives what the cache would, as long as they are made from constants alone.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from gpumux.capture import fetching
from gpumux.errors import CaptureError

_Cached = type(functools.lru_cache(len))


class Caches:
    """The caches that were found to hold tensors of a trace. They are kept for as long as the job."""

    def __init__(self) -> None:
        self._known: list[Any] = []

    def found(self, tensor: torch.Tensor) -> bool:
        """Whether a cache, not known yet, holds this tensor of an earlier trace. Empties the cache."""
        new = _holding(tensor)
        for cache in new:
            cache.cache_clear()
        new = [one for one in new if not any(one is known for known in self._known)]
        self._known += new
        return bool(new)

    def empty(self, constant: Callable[[torch.Tensor], bool]) -> None:
        """Empty the caches that hold tensors of the trace that has just ended. Raises CaptureError for a tensor that is
        not made from constants alone (`constant`): the plain loop keeps what its first call computed."""
        for cache in self._known:
            made = [tensor for tensor in _held(cache) if isinstance(tensor, FakeTensor)]
            if not made:
                continue
            changing = not all(map(constant, made))
            cache.cache_clear()
            if changing:
                name = _name(cache)
                raise CaptureError(
                    f"the step keeps a tensor in the cache of {name} (functools), which depends on the batch, the"
                    " model's state or on draws",
                    f"call {name} once before you submit, or leave the cache away and compute it in each step",
                )


def cache_with(tensor: torch.Tensor) -> str | None:
    """The name of a cached function that holds this tensor, None if there is none."""
    found = _holding(tensor)
    return f"the cache of {_name(found[0])}" if found else None


def _holding(tensor: torch.Tensor) -> list[Any]:
    """All caches that hold this tensor."""
    fetching.undo_freeze()
    caches = [one for one in gc.get_objects() if type(one) is _Cached]
    return [one for one in caches if any(each is tensor for each in _held(one))]


def _name(cache: Any) -> str:
    return getattr(cache, "__qualname__", "a function")


def _held(cache: Any) -> Iterator[torch.Tensor]:
    """The tensors in the results that a cache holds, those in containers among them."""
    for each in gc.get_referents(cache):
        if each is not getattr(cache, "__dict__", None):
            yield from _tensors(each)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
