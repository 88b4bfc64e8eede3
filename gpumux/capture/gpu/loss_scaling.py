"""torch.amp.GradScaler in a traced step.

A GradScaler asks the device after each backward pass whether a gradient overflowed, and leaves the optimizer's step out
if so. In the daemon the optimizer runs in any case, and where a gradient overflowed its parameters and state keep their
old values. The client learns from each step what was left out (`SkippedStep`), and puts back the step counters that
Python keeps. Optimizers that take `found_inf` themselves (fused ones) do all of it in their kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils._pytree as pytree

from gpumux.capture.gpu.autocast import refuse_lost_scaling
from gpumux.capture.source import user_line
from gpumux.capture.swapping import here
from gpumux.errors import CaptureError

_SCALER: Any = torch.amp.GradScaler
_LATER = "let one step do all of it: scale(loss).backward(), step(optimizer), update()"

# Called with an optimizer and a tensor of the trace, which says whether the step leaves the optimizer's step out.
Skip = Callable[[torch.optim.Optimizer, torch.Tensor], None]


class Scaling:
    """What GradScaler's methods are replaced by in one trace. `gpu`: whether the step runs on a GPU; `skip`: notes that
    an optimizer's step may be left out; `is_host`: whether a tensor is a number that the client keeps."""

    def __init__(self, gpu: bool, skip: Skip, is_host: Callable[[torch.Tensor], bool]) -> None:
        self._gpu = gpu
        self._skip = skip
        self._is_host = is_host
        self._open: dict[int, Any] = {}  # scalers with gradients that were not followed by update()

    def swaps(self) -> list[tuple[Any, str, Any]]:
        """For `swapped`."""
        new = {"scale": self._plainly, "unscale_": self._unscale, "step": self._step, "update": self._update}
        return [
            *((_SCALER, name, here(getattr(_SCALER, name), self._where_enabled(name, method)))
              for name, method in new.items()),
            (_SCALER, "_maybe_opt_step", here(_SCALER._maybe_opt_step, self._masked_step)),
        ]  # fmt: skip

    @contextmanager
    def cleaned(self) -> Iterator[None]:
        """Inside, a step is traced. Its findings about gradients don't stay in the scalers. Raises CaptureError if the
        step does not update a scaler that it steps with."""
        try:
            yield
            if self._open:
                raise CaptureError("the step calls GradScaler.step() or unscale_(), and not update()", _LATER)
        finally:
            for scaler in self._open.values():
                scaler._per_optimizer_states.clear()
            self._open.clear()

    def _where_enabled(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        plain = getattr(_SCALER, name)

        def chosen(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            if scaler.is_enabled():
                return method(plain, scaler, *args, **kwargs)
            if self._gpu:
                refuse_lost_scaling(f"GradScaler.{name}()")
            return plain(scaler, *args, **kwargs)

        return chosen

    def _plainly(self, plain: Any, scaler: Any, outputs: Any) -> Any:
        return plain(scaler, outputs)

    def _unscale(self, plain: Any, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        self._open[id(scaler)] = scaler
        plain(scaler, optimizer)

    def _step(self, plain: Any, scaler: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        self._open[id(scaler)] = scaler
        return plain(scaler, optimizer, *args, **kwargs)

    def _update(self, plain: Any, scaler: Any, new_scale: Any = None) -> None:
        states = scaler._per_optimizer_states
        plain(scaler, new_scale)
        states.clear()  # update() puts another dictionary in its place, which would be a change from step to step
        scaler._per_optimizer_states = states
        self._open.pop(id(scaler), None)

    def _masked_step(
        self, scaler: Any, optimizer: torch.optim.Optimizer, findings: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """GradScaler._maybe_opt_step with a choice on the device in the place of one in Python."""
        with torch.no_grad():
            skip = sum(findings["found_inf_per_device"].values()) != 0
            before = [(path, tensor, tensor.clone()) for path, tensor in self._tensors(optimizer)]
        result = optimizer.step(*args, **kwargs)
        with torch.no_grad():
            after = dict(self._tensors(optimizer))
            for path, tensor, old in before:
                if after.get(path) is not tensor:
                    raise CaptureError(
                        f"{user_line()} steps {type(optimizer).__name__} under a GradScaler, and it puts other tensors"
                        " into its state, where those of a step that is left out must stay",
                        "write into the state in place (copy_), or use an optimizer of torch.optim",
                    )
                tensor.copy_(torch.where(skip, old, tensor))
        self._skip(optimizer, skip)
        return result

    def _tensors(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[Any, torch.Tensor]]:
        """(path, tensor) of the parameters that have gradients, and of the optimizer's state on the device."""
        stepped = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        for p in stepped:
            yield (id(p),), p
        for key, entry in optimizer.state.items():
            for path, value in pytree.tree_leaves_with_path(entry):
                if isinstance(value, torch.Tensor) and not self._is_host(value):
                    yield (id(key), path), value
