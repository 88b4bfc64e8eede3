"""Device names inside a step mean the job's device.

A step says `x.to("cuda")` or `torch.zeros(3, device="cuda")` because that is where it runs without gpumux. It is
traced on the CPU, and the Program names no device (ir.Tag). So while it is traced, such names are turned into the
tracing device's before torch sees them, and nothing of the step makes a context on a GPU. Tensors say that they lie on
the tracing device.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from gpumux.client.blame import user_line
from gpumux.errors import CaptureError

_NAME = re.compile(r"cuda(?::(\d+))?$")


class DeviceNames(TorchFunctionMode):
    """`home`: where the local model lies, if there is one; `here`: where steps are traced."""

    def __init__(self, home: torch.device | None, here: torch.device) -> None:
        super().__init__()
        self._index = home.index if home is not None else None
        self._here = here

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            self._meant(args[1] if len(args) > 1 else kwargs.get("device"))
            return args[0]
        args = tuple(self._here if isinstance(a, torch.device) and self._meant(a) else a for a in args)
        if func is torch.Tensor.to and len(args) > 1 and self._meant(args[1]):
            args = (args[0], self._here, *args[2:])
        if self._meant(kwargs.get("device")):
            kwargs["device"] = self._here
        return func(*args, **kwargs)

    def _meant(self, named: Any) -> bool:
        """Whether this names a GPU. Raises CaptureError when it is another one than the model's."""
        index: int | None
        if isinstance(named, torch.device):
            is_gpu, index = named.type == "cuda", named.index
        elif isinstance(named, str):
            found = _NAME.match(named)
            is_gpu, index = found is not None, int(found[1]) if found and found[1] else None
        else:
            is_gpu = isinstance(named, int) and not isinstance(named, bool)
            index = named if is_gpu else None
        if index is not None and self._index is not None and index != self._index:
            raise CaptureError(
                f"{user_line()} places a tensor on GPU {index}, and the model lies on GPU {self._index}",
                "keep a step on one GPU: each job runs on one device",
            )
        return is_gpu


@contextmanager
def names_of_devices(gpu: bool, home: torch.device | None, here: torch.device) -> Iterator[None]:
    """For the length of a trace. `gpu`: whether one is concerned at all."""
    if not gpu:
        yield
        return
    with torch.device(here), DeviceNames(home, here):  # the first in case of torch.set_default_device("cuda")
        yield
