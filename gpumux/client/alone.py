"""A context for gpumux's own tensor work, free of the calling thread's torch modes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.utils._python_dispatch import _disable_current_modes


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Inside, no mode, transform or trace of torch is active in this thread, and reading a local tensor fetches
    nothing."""
    tracing = torch._C._get_tracing_state()
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch._C.DisableTorchFunction())
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        if torch._C._functorch.peek_interpreter_stack() is not None:
            from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

            stack.enter_context(temporarily_clear_interpreter_stack())
        if tracing is not None:
            torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
        try:
            yield
        finally:
            if tracing is not None:
                torch._C._set_tracing_state(tracing)  # type: ignore[attr-defined]
