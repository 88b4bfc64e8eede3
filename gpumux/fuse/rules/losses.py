"""Rules for losses: the kernel's own loss of each sample of all models, reduced over one model's samples each.

No gradient crosses from one model to another, so nothing needs scaling (HFTA, appendix C).
"""

from __future__ import annotations

from typing import Any

import torch

from gpumux.fuse.call import Call, Operand
from gpumux.fuse.rules.table import in_memory_order, rule

NONE, MEAN, SUM = 0, 1, 2  # torch's numbers for reductions

_ELEMENTWISE = ("mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy")


@rule(*_ELEMENTWISE)
def elementwise(call: Call) -> Any:
    reduction, rank = call["reduction"], call["self"].dim
    loss = call.invoke(call.filled(lambda o: o.all(rank)) | {"reduction": NONE})
    return _reduced(loss, reduction)


@rule(*(f"{name}_backward" for name in _ELEMENTWISE))
def elementwise_backward(call: Call) -> Any:
    reduction, x = call["reduction"], call["self"]
    grad = call["grad_output"].all(x.dim)
    if reduction == MEAN:
        grad = grad / max(1, torch.Size(x.size).numel())
    size = (call.models, *x.size)  # some kernels take no gradient that broadcasts
    changes = call.filled(lambda o: o.all(x.dim)) | {"grad_output": grad.expand(size), "reduction": NONE}
    return call.invoke(changes)


def _reduced(loss: torch.Tensor, reduction: int) -> torch.Tensor:
    dims = list(range(1, loss.dim()))
    if reduction == NONE or not dims:
        return loss
    return loss.mean(dims) if reduction == MEAN else loss.sum(dims)


class Samples:
    """The samples of all models as one batch, [B*N, ...], in the order of `x` in memory."""

    def __init__(self, x: Operand) -> None:
        """x: an operand of size [N, C, ...], or [C]."""
        self.single = x.dim == 1
        tensor = self._with_samples(x.all())
        self.x, _, order = in_memory_order(tensor, tensor.dim() - 2)
        self.order = order[:2]
        self._lead = self.x.shape[:2]
        self.x = self.x.flatten(0, 1)

    def _with_samples(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.unsqueeze(1) if self.single else tensor

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """[B, N, ...] -> [B*N, ...]."""
        tensor = self._with_samples(tensor)
        return tensor.permute(*self.order, *range(2, tensor.dim())).flatten(0, 1)

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """[B*N, ...] -> [B, N, ...]."""
        split: torch.Tensor = packed.unflatten(0, self._lead)
        split = split.permute(*self.order, *range(2, split.dim()))  # an order of two is its own inverse
        return split.squeeze(1) if self.single else split


def _weights(call: Call) -> torch.Tensor | None:
    """The weight of each label, [B, N, ...]: that of its class, 0 for ignored labels. None: all weights are 1, and
    labels to ignore are left to the kernel."""
    weight, labels = call["weight"], call["target"].all()
    if weight is None:
        return None
    ignored = labels == call["ignore_index"]
    rows = labels.masked_fill(ignored, 0).reshape(call.models, -1)
    found: torch.Tensor = weight.all().gather(1, rows).view(labels.shape)
    return found.masked_fill(ignored, 0)


@rule("nll_loss_forward", "nll_loss2d_forward")
def nll(call: Call) -> Any:
    """Class weights may differ between models, which one kernel can't take: they scale its results."""
    x, target, reduction = call["self"], call["target"], call["reduction"]
    samples = Samples(x)
    packed, scale = samples.pack(target.all()), _weights(call)
    loss = samples.unpack(call.invoke({"self": samples.x, "target": packed, "weight": None, "reduction": NONE})[0])
    if scale is not None:
        loss = loss * scale
    dims = list(range(1, loss.dim()))
    saved = call.outputs()[1]
    if saved is not None:
        call.placements.notes["labels", saved.storage] = samples.order, packed, scale  # for the gradient's rule
    if reduction == NONE:
        return loss, loss.new_zeros(call.models)
    counts = target.all() != call["ignore_index"] if scale is None else scale
    total = counts.sum(dims, dtype=x.dtype) if dims else counts.to(x.dtype, copy=True)
    made = loss.sum(dims) if dims else loss.clone()
    return (made / total if reduction == MEAN else made), total


@rule("nll_loss_backward", "nll_loss2d_backward")
def nll_backward(call: Call) -> Any:
    x, target, total = call["self"], call["target"], call["total_weight"]
    samples = Samples(x)
    order, packed, scale = call.placements.notes.get(("labels", total.view.storage), (None, None, None))
    if order != samples.order:
        packed, scale = samples.pack(target.all()), _weights(call)
    grad = call["grad_output"].all()
    if call["reduction"] == MEAN:
        grad = grad / total.all()
    grad = grad.view(*grad.shape, *[1] * (1 + target.dim - grad.dim()))
    if scale is not None:
        grad = grad * scale
    changes = {
        "grad_output": samples.pack(grad.expand(call.models, *target.size)), "self": samples.x, "target": packed,
        "weight": None, "reduction": NONE, "total_weight": total.all().select(0, 0),
    }  # fmt: skip
    return samples.unpack(call.invoke(changes))


# ---- margins ---------------------------------------------------------------------------------------


def _labels(call: Call) -> torch.Tensor:
    """The labels: [B, N], or [B, N, C] if a sample has several; [B] of a single sample, whose label may be in a list of
    one."""
    labels: torch.Tensor = call["target"].all()
    return labels.reshape(call.models) if call["self"].dim == 1 and "weight" in call.args else labels


def _scale(call: Call) -> torch.Tensor | None:
    """The weight of each label's class, which scales its loss, [B, N]."""
    weight = call.args.get("weight")
    if weight is None:
        return None
    labels = _labels(call)
    found: torch.Tensor = weight.all().gather(1, labels.reshape(call.models, -1)).view(labels.shape)
    return found


def _margins(call: Call, samples: Samples) -> dict[str, Any]:
    given = {"self": samples.x, "target": samples.pack(_labels(call)), "reduction": NONE}
    return given | ({"weight": None} if "weight" in call.args else {})


@rule("multi_margin_loss", "multilabel_margin_loss_forward")
def margins(call: Call) -> Any:
    samples = Samples(call["self"])
    made = call.invoke(_margins(call, samples))
    loss, scale = samples.unpack(made if isinstance(made, torch.Tensor) else made[0]), _scale(call)
    loss = _reduced(loss if scale is None else loss * scale, call["reduction"])
    return loss if isinstance(made, torch.Tensor) else (loss, samples.unpack(made[1]))


@rule("multi_margin_loss_backward", "multilabel_margin_loss_backward")
def margins_backward(call: Call) -> Any:
    x = call["self"]
    samples, scale = Samples(x), _scale(call)
    grad = call["grad_output"].all(x.dim - 1)
    if call["reduction"] == MEAN and not samples.single:
        grad = grad / x.size[0]
    if scale is not None:
        grad = grad * scale
    changes = _margins(call, samples) | {"grad_output": samples.pack(grad.expand(call.models, *x.size[:-1]))}
    if "is_target" in call.args:
        changes["is_target"] = samples.pack(call["is_target"].all())
    return samples.unpack(call.invoke(changes))
