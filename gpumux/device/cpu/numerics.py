"""Process-wide settings that change results, as the Program recorded them."""

from __future__ import annotations

import torch

from gpumux.device.cpu.schema import DTYPES
from gpumux.errors import ProgramError
from gpumux.program.ir import Numerics


class CurrentNumerics:
    """What is set now, so that steps of one program after the other cost nothing."""

    def __init__(self) -> None:
        self._now: Numerics | None = None

    def apply(self, wanted: Numerics) -> None:
        """Raises ProgramError when this machine can't do what the program asks."""
        if wanted is self._now or wanted == self._now:
            return
        self._now = None
        torch.set_float32_matmul_precision(wanted.matmul_precision)
        # Not torch.use_deterministic_algorithms: that imports the compiler, a second and a thread, to tell it too.
        torch._C._set_deterministic_algorithms(wanted.deterministic, warn_only=False)
        if not torch.set_flush_denormal(wanted.flush_denormal) and wanted.flush_denormal:
            raise ProgramError("this CPU can't flush denormal numbers", "train without torch.set_flush_denormal(True)")
        torch.backends.mkldnn.set_flags(_enabled=wanted.mkldnn)
        torch.set_default_dtype(DTYPES[wanted.default_dtype])
        self._now = wanted
