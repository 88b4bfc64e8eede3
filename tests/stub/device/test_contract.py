"""The contract of every device, asked of the CUDA one on the stand-in: in the order of calls, threads and contexts that
it has on a card."""

from __future__ import annotations

from tests.device.test_contract import *  # noqa: F403
