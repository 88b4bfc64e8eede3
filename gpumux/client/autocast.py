"""One autocast for a step that is traced for a GPU: the GPU's, by whatever name.

A step says `torch.autocast("cuda")`, or names the device of a tensor. Traced, its tensors say that they lie on the CPU, so for
the length of a trace both names mean the same state, as both mean the job's device elsewhere (placement.py). Torch
turns `autocast("cuda")` off where it sees no GPU; here it stays on. What is cast, casts.py says.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from gpumux.client import casts
from gpumux.client.blame import user_line
from gpumux.client.swapping import here, swapped
from gpumux.errors import CaptureError

_Autocast = torch.amp.autocast_mode.autocast
_common = torch.cuda.amp.common
_missing: Callable[[], bool] = _common.amp_definitely_not_available


def refuse_around(gpu: bool) -> None:
    """A step that begins under autocast would find its cache of casted weights, and leave its own. Raises CaptureError."""
    on = torch.is_autocast_enabled("cpu") or (gpu and torch.is_autocast_enabled("cuda"))
    if on and torch.is_autocast_cache_enabled() and torch.is_grad_enabled():
        raise CaptureError(
            "autocast is active around the step, where its cache of casted weights would outlive the step",
            "enter torch.autocast inside the step",
        )


@contextmanager
def autocast_of_a_gpu(gpu: bool, home: torch.device | None) -> Iterator[None]:
    """For the length of a trace, in the thread that traces. `gpu`: whether one is concerned; `home`: where the local model lies."""
    if not gpu:
        yield
        return
    casts.begin()
    on_gpu = home is not None and home.type == "cuda"
    with (
        _around(on_gpu),
        swapped([(owner, name, here(getattr(owner, name), new)) for owner, name, new in _swaps(on_gpu)]),
    ):
        try:
            yield
        finally:
            casts.begin()


@contextmanager
def _around(on_gpu: bool) -> Iterator[None]:
    """Autocast of the CPU around the step is the job's, unless the model lies on a GPU: there it casts nothing."""
    cpu, cuda = torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")
    if not cpu:
        yield
        return
    dtype = torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cpu", False)
    if not cuda and not on_gpu:
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", torch.get_autocast_dtype("cpu"))
    try:
        yield
    finally:
        torch.set_autocast_enabled("cpu", True)
        torch.set_autocast_enabled("cuda", cuda)
        torch.set_autocast_dtype("cuda", dtype)


def _swaps(on_gpu: bool) -> list[tuple[Any, str, Callable[..., Any]]]:
    made: weakref.WeakSet[Any] = weakref.WeakSet()
    begin: Any = _Autocast.__init__
    enter: Any = _Autocast.__enter__
    leave: Any = _Autocast.__exit__
    cast: Any = torch.amp.autocast_mode._cast
    dtype, forget = torch.get_autocast_dtype, torch.clear_autocast_cache

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        made.add(self)

    def on_entry(self: Any) -> Any:
        if self.device == "cuda" and not self._enabled and self not in made and not casts.enabled() and _missing():
            warnings.warn(
                f"{user_line()} enters an autocast that was made outside the step, where torch saw no GPU and turned it off: "
                "nothing is cast. Make it inside the step",
                stacklevel=3,
            )
        with _as_cuda(self):
            return enter(self)

    def on_exit(self: Any, *raised: Any) -> Any:
        with _as_cuda(self):
            return leave(self, *raised)

    def get_dtype(device_type: str) -> torch.dtype:
        """Not yet cast to: what a run without gpumux would take, where the model lies."""
        return dtype("cuda" if device_type == "cpu" and (on_gpu or casts.enabled()) else device_type)

    def clear() -> None:
        casts.current.forget()
        forget()

    def where_they_lie(value: Any, device: str, to: torch.dtype) -> Any:
        return cast(value, "cpu" if device == "cuda" else device, to)

    is_on, set_on, set_dtype = (
        _named(each) for each in (torch.is_autocast_enabled, torch.set_autocast_enabled, torch.set_autocast_dtype)
    )
    return [
        (_Autocast, "__init__", init), (_Autocast, "__enter__", on_entry), (_Autocast, "__exit__", on_exit),
        (torch, "is_autocast_enabled", is_on), (torch, "set_autocast_enabled", set_on),
        (torch, "get_autocast_dtype", get_dtype), (torch, "set_autocast_dtype", set_dtype),
        (torch, "is_autocast_cpu_enabled", casts.enabled), (torch, "get_autocast_cpu_dtype", partial(get_dtype, "cpu")),
        (torch, "set_autocast_cpu_enabled", partial(set_on, "cpu")),
        (torch, "set_autocast_cpu_dtype", partial(set_dtype, "cpu")),
        (torch, "clear_autocast_cache", clear),
        (torch.amp.autocast_mode, "_cast", where_they_lie),
        (_common, "amp_definitely_not_available", lambda: False),
        (torch.cuda, "is_bf16_supported", lambda *_, **__: True),
    ]  # fmt: skip


@contextmanager
def _as_cuda(autocast: Any) -> Iterator[None]:
    named = autocast.device
    autocast.device = "cuda" if named == "cpu" else named
    try:
        yield
    finally:
        autocast.device = named


def _named(plain: Callable[..., Any]) -> Callable[..., Any]:
    """One of torch's functions of a device's autocast; without a device, as they once were, they mean a GPU's."""

    def of_the_job(*told: Any, **named: Any) -> Any:
        if "cpu" in (named.get("device_type"), *told[:1]):
            told, named = ("cuda", *told[1:]), {k: v for k, v in named.items() if k != "device_type"}
        return plain(*told, **named)

    return of_the_job


def refuse_lost_scaling(method: str) -> None:
    """A scaler that is off, in a step that casts to float16: torch turns one off where it sees no GPU. Raises CaptureError."""
    if torch.float16 in casts.current.lowered and _missing():
        raise CaptureError(
            f"{user_line()} calls {method} of a scaler that is off, as torch has it where it sees no GPU, and the step casts to "
            "float16: its gradients would not be scaled",
            "torch.autocast with bfloat16 needs no scaling; for float16 keep the scale in a buffer of the model (docs/fusion.md, "
            "Loss scaling); or leave the scaler out of the step",
        )
