"""Operators that treat every channel of every sample alike and by itself: pooling, resampling, padding by what is there.

Models go among the samples or among the channels, whichever the operands lie ready for.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from gpumux.fuse.call import Call, Operand
from gpumux.fuse.emit import Declined
from gpumux.fuse.rules.layout import parts
from gpumux.fuse.rules.table import rule

_UPSAMPLING = (
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d",
    "upsample_bicubic2d", "upsample_trilinear3d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa",
)  # fmt: skip
_POOLING = (
    "max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d",
    "_adaptive_avg_pool3d", "adaptive_max_pool2d", "adaptive_max_pool3d",
)  # fmt: skip
_PADDING = (*(f"{kind}_pad{d}d" for kind in ("reflection", "replication") for d in (1, 2, 3)),)
_BOTH = _UPSAMPLING + _POOLING + _PADDING


@rule(*_BOTH, *(f"{name}_backward" for name in _BOTH), "max_unpool2d", "max_unpool3d")
def by_channel(call: Call) -> Any:
    operands = {name: v for name, v in call.args.items() if isinstance(v, Operand)}
    found = re.search(r"([123])d", call.name)
    assert found is not None
    leading = min(o.dim for o in operands.values()) - int(found[1])  # samples and channels, or channels
    if leading not in (1, 2):
        raise Declined("an operand without channels")
    dim = max(range(leading), key=lambda d: sum(o.mergeable(d) for o in operands.values()))
    changes: dict[str, Any] = {name: o.merged(dim) for name, o in operands.items()}
    if "input_size" in call.args:
        changes["input_size"] = [n * call.models if d == dim else n for d, n in enumerate(call["input_size"])]
    made = call.invoke(changes)
    if isinstance(made, torch.Tensor):
        return parts([(made, dim)], call.models)[0]
    return parts([(t, dim) for t in made], call.models)


_BY_SAMPLE = ("fractional_max_pool2d", "fractional_max_pool3d", "affine_grid_generator")


@rule(*_BY_SAMPLE, *(f"{name}_backward" for name in _BY_SAMPLE))
def by_sample(call: Call) -> Any:
    """Models are so many more samples."""
    operands = {name: v for name, v in call.args.items() if isinstance(v, Operand)}
    found = re.search(r"([23])d", call.name)
    if found is not None and call["self"].dim != int(found[1]) + 2:
        raise Declined("an operand without samples")
    changes: dict[str, Any] = {name: o.merged(0) for name, o in operands.items()}
    if "size" in call.args:
        changes["size"] = [call.models * call["size"][0], *call["size"][1:]]
    made = call.invoke(changes)
    if isinstance(made, torch.Tensor):
        return parts([(made, 0)], call.models)[0]
    return parts([(t, 0) for t in made], call.models)
