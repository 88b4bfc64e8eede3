"""The steps of torch's fused optimizers in operators over lists, for hyperparameters that lie in device memory.

torch's fused kernels read the learning rate from memory, and no other number. Where another one changes from step to step (momentum
under OneCycleLR), the same formulas run operator by operator: as exact as the kernels, in the precision they compute in, and slower.

"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Value = Tensor | float | int
Lists = list[Tensor]
LISTS = 6  # of temporaries, as long as the parameters, at most at once; half types need their copies besides


def adam_(
    params: Lists, grads: Lists, averages: Lists, squares: Lists, greatest: Lists, steps: Lists, *, lr: Value, beta1: Value,
    beta2: Value, weight_decay: Value, eps: Value, amsgrad: bool, maximize: bool, decoupled: bool = False,
) -> None:  # fmt: skip
    """Adam, and AdamW if `decoupled`. `steps` are counted up already, as torch does before it calls its kernel."""
    if decoupled:
        torch._foreach_mul_(params, _tensor(1 - lr * weight_decay, params))
        grads = list(torch._foreach_neg(grads) if maximize else grads)
    else:
        grads = _decayed(params, grads, weight_decay, maximize)
    _blend_(averages, grads, beta1)
    _blend_(squares, list(torch._foreach_mul(grads, grads)), beta2)
    if amsgrad:
        torch._foreach_maximum_(greatest, squares)
    count = torch.stack(list(steps)).to(averages[0].dtype)
    first, second = (1 - torch.pow(_tensor(beta, params), count) for beta in (beta1, beta2))
    bottom = list(torch._foreach_sqrt(greatest if amsgrad else squares))
    torch._foreach_div_(bottom, list(second.sqrt().unbind()))
    torch._foreach_add_(bottom, _tensor(eps, params))
    update = torch._foreach_div(averages, bottom)
    torch._foreach_mul_(update, list((_tensor(lr, params) / first).unbind()))
    torch._foreach_sub_(params, update)


def sgd_(
    params: Lists, grads: Lists, buffers: Lists, *, weight_decay: Value, momentum: Value, lr: Value, dampening: Value, nesterov: bool,
    maximize: bool, is_first_step: bool,
) -> None:  # fmt: skip
    """SGD. `buffers` is empty without momentum."""
    grads = _decayed(params, grads, weight_decay, maximize)
    if buffers:
        if is_first_step:
            torch._foreach_copy_(buffers, grads)
        else:
            torch._foreach_mul_(buffers, _tensor(momentum, params))
            torch._foreach_add_(buffers, torch._foreach_mul(grads, _tensor(1 - dampening, params)))
        if nesterov:
            torch._foreach_add_(grads, torch._foreach_mul(buffers, _tensor(momentum, params)))
        else:
            grads = list(buffers)
    torch._foreach_sub_(params, torch._foreach_mul(grads, _tensor(lr, params)))


def _decayed(params: Lists, grads: Lists, weight_decay: Value, maximize: bool) -> Lists:
    """The gradients of the loss that is to become smaller, with weight decay's: a list of its own."""
    decay = torch._foreach_mul(params, _tensor(weight_decay, params))
    (torch._foreach_sub_ if maximize else torch._foreach_add_)(decay, grads)
    return list(decay)


def _blend_(averages: Lists, values: Lists, beta: Value) -> None:
    torch._foreach_mul_(averages, _tensor(beta, averages))
    torch._foreach_add_(averages, torch._foreach_mul(values, _tensor(1 - beta, averages)))


def _tensor(value: Value, beside: Lists) -> Tensor:
    """A number for operators over lists."""
    if isinstance(value, Tensor):
        return value.to(beside[0].dtype)
    return torch.full((), value, dtype=beside[0].dtype, device=beside[0].device)


STEPS: dict[str, Callable[..., None]] = {"_fused_adam_": adam_, "_fused_adamw_": adam_, "_fused_sgd_": sgd_}


def step(name: str, lists: Sequence[Lists], numbers: dict[str, Any]) -> None:
    """A fused operator's step by its name. Half types are computed with in float32, as its kernel does."""
    options = {"decoupled": True} if name == "_fused_adamw_" else {}
    exact = [[x.float() if x.dtype in (torch.float16, torch.bfloat16) else x for x in xs] for xs in lists]
    STEPS[name](*exact, **numbers, **options)
    for mine, computed in zip(lists, exact, strict=True):
        changed = [(x, y) for x, y in zip(mine, computed, strict=True) if x is not y]
        if changed:
            torch._foreach_copy_([x for x, _ in changed], [y for _, y in changed])
