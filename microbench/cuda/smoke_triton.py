"""A kernel of Triton's, for smoke.py: imported where Triton is asked for, since it has to be there to define one."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _add_one(source: Any, target: Any, count: Any, BLOCK: tl.constexpr) -> None:
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < count) + 1, mask=at < count)


def add_one(source: Any, target: Any) -> None:
    """target = source + 1, on the current stream."""
    _add_one[(triton.cdiv(source.numel(), 256),)](source, target, source.numel(), BLOCK=256)
