"""Whether a value of the whole batch is what its parts' values make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_POWERS = range(-3, 4)  # a mean loss makes a part's gradients per sample `count` times as large


@dataclass(frozen=True, slots=True)
class Match:
    """`ratio`: whole = ratio x what the parts make; None where all is zero, and any would do.
    `inner`: 1 where parts lie one after the other, else how often they take turns."""

    ratio: float | None
    inner: int = 1


def along(whole: torch.Tensor, parts: Sequence[torch.Tensor], dim: int, tolerance: float) -> Match | None:
    """Per-sample values: parts side by side along `dim`, or within it (time before batch, flattened)."""
    length = parts[0].shape[dim]
    for inner in (n for n in range(1, length + 1) if length % n == 0):
        split = [p.unflatten(dim, (inner, length // inner)) for p in parts]
        joined = torch.cat(split, dim + 1).flatten(dim, dim + 1)
        ratio = _ratio(whole, joined, len(parts), tolerance)
        if ratio is not None:
            return Match(None if ratio == 0 else ratio, inner)
    return None


def total(whole: torch.Tensor, parts: Sequence[torch.Tensor], tolerance: float, noise: float) -> Match | None:
    """A value reduced over the batch: the sum of the parts' times a power of their number. `noise`:
    magnitudes up to it are rounding (a gradient that is zero in exact arithmetic)."""
    if whole.dtype == torch.bool:
        return None
    stacked = torch.stack([p.to(torch.float64) if not p.is_complex() else p for p in parts])
    scale = max((float(p.abs().max()) for p in parts if p.numel()), default=0.0)
    if scale <= noise and whole.numel() and float(whole.abs().max()) <= noise:
        return Match(None)
    ratio = _ratio(whole, stacked.sum(0), len(parts), tolerance, scale)
    if ratio is None or (not whole.is_floating_point() and not whole.is_complex() and ratio not in (0, 1)):
        return None
    return Match(None if ratio == 0 else ratio)


def _ratio(whole: torch.Tensor, made: torch.Tensor, count: int, tolerance: float, scale: float = 0.0) -> float | None:
    """The power of `count` that `made` must be multiplied by; 0 where both are zero; None for no match."""
    if whole.dtype == torch.bool or made.dtype == torch.bool:
        return 1.0 if torch.equal(whole.to(made.dtype), made) else None
    if not (whole.is_floating_point() or whole.is_complex()):
        return 1.0 if torch.equal(whole.to(torch.float64), made.to(torch.float64)) else None
    finite = torch.isfinite(whole)
    if not torch.equal(finite, torch.isfinite(made)):
        return None
    if not bool(finite.all()):  # masks hold infinities
        if not torch.equal(whole[~finite].nan_to_num(), made[~finite].nan_to_num()):
            return None
        whole, made = whole[finite], made[finite]
    whole, made = whole.to(made.dtype), made
    biggest = float(made.abs().max()) if made.numel() else 0.0
    largest = float(whole.abs().max()) if whole.numel() else 0.0
    if biggest == 0.0 and largest == 0.0:
        return 0.0
    for power in _POWERS:
        ratio = float(count) ** power
        bound = tolerance * max(largest, ratio * biggest, ratio * scale)
        if float((whole - ratio * made).abs().max()) <= bound:
            return ratio
    return None
