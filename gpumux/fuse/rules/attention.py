"""Attention kernels: models are so many more samples of the batch."""

from __future__ import annotations

from typing import Any

import torch

from gpumux.fuse.call import Call, Operand
from gpumux.fuse.rules.layout import by_memory
from gpumux.fuse.rules.table import rule


class Batch:
    """[B, N, heads, ...] as [B*N, heads, ...], or N and B exchanged where the query lies so in memory."""

    def __init__(self, call: Call) -> None:
        query = call["query"].all()
        self.order = by_memory(query, 3)[2][:2]
        self.lead = (query.shape[self.order[0]], query.shape[self.order[1]])

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Dimensions that only repeat (stride 0) still do so, where a copy must be made."""
        tensor = tensor.permute(*self.order, *range(2, tensor.dim()))
        real = tensor
        for d in range(2, tensor.dim()):
            if tensor.stride(d) == 0:
                real = real.narrow(d, 0, 1)
        return real.flatten(0, 1).expand(-1, *tensor.shape[2:])

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        split: torch.Tensor = packed.unflatten(0, self.lead)
        return split.permute(*self.order, *range(2, split.dim()))

    def mask(self, mask: Operand | None) -> torch.Tensor | None:
        """[L, S], or [N or 1, heads or 1, L, S]."""
        if mask is None or (mask.alike and (mask.dim < 4 or mask.size[0] == 1)):
            return None if mask is None else mask.one()
        tensor = mask.all()
        if mask.dim < 4:
            tensor = tensor.unflatten(0, (-1, *[1] * (4 - mask.dim)))
        return self.pack(tensor.expand(-1, self.lead[1 - self.order.index(0)], *tensor.shape[2:]))


def _merged(call: Call) -> tuple[Batch, dict[str, Any]]:
    batch = Batch(call)
    tensors = {name: v for name, v in call.args.items() if isinstance(v, Operand) and name != "attn_mask"}
    changes: dict[str, Any] = {name: batch.pack(operand.all()) for name, operand in tensors.items()}
    return batch, changes | {"attn_mask": batch.mask(call["attn_mask"])}


@rule("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward")
def flash_for_cpu(call: Call) -> Any:
    batch, changes = _merged(call)
    return tuple(batch.unpack(made) for made in call.invoke(changes))
