"""What oneDNN can do on this machine's CPU."""

from __future__ import annotations

import functools

import pytest
import torch


@functools.cache
def _runs_lstm_in_bfloat16() -> bool:
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        try:
            torch.nn.LSTM(7, 9)(torch.ones(6, 3, 7))
        except RuntimeError:
            return False
    return True


def skip_without_bfloat16_lstm() -> None:
    """Skips a test of oneDNN's LSTM in bfloat16 on a CPU for which it has none: plain torch fails there too."""
    if not _runs_lstm_in_bfloat16():
        pytest.skip("plain torch can't run an LSTM under autocast on this CPU: oneDNN has none in bfloat16 for it")
