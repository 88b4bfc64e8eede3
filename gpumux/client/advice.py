"""What to do instead of what can't be captured, where there is more to say than in general."""

from __future__ import annotations

from gpumux.client.blame import optimizer_inside, user_line
from gpumux.errors import DataDependent

_BAG = "use torch.nn.Embedding and reduce what it gives, with .sum(1), .mean(1) or .amax(1)"
_CTC = (
    "its kernels read the lengths in Python: train this model without gpumux, or write the loss's recursion "
    "with torch.logaddexp over padded targets and masks"
)
_PACKED = "give the padded batch to the recurrent layer as it is, and mask its results beyond each sequence's length"

_INSTEAD = {
    "_embedding_bag_backward": _BAG,
    "_ctc_loss": _CTC,
    "_pack_padded_sequence": _PACKED,
}


def instead_of(target: str, general: str) -> str:
    """The remedy for an operator ("aten.NAME.OVERLOAD"); `general` where nothing better is known."""
    return _INSTEAD.get(target.split(".")[1], general)


def value_read() -> DataDependent:
    """The error for what reads a tensor's value in Python; an optimizer of torch's own is nothing that a user could mend."""
    optimizer = optimizer_inside()
    name = type(optimizer).__name__
    where = "" if optimizer is None else f" (inside {name}.step)"
    remedy = (
        "keep the decision on the device (torch.where, masks), or return the tensor from the step and read it outside"
    )
    if type(optimizer).__module__.split(".")[:2] == ["torch", "optim"]:
        remedy = (
            f"{name} decides so at every step, and gpumux runs a step's Python only when it captures it: use another of "
            "torch.optim (Adam, AdamW, SGD, ...), or train this model without gpumux"
        )
    return DataDependent(
        f"{user_line()}{where} reads a tensor's value in Python (.item(), float(), bool() or a branch on it)", remedy
    )
