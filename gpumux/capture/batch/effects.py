"""What a step does to the tensors of its batch: it writes into them, makes them require grad, leaves gradients on them.

The daemon works on a copy of the batch. What a step writes into a tensor is a further result of its Program, which is
copied into the script's tensor when the step is answered; its caller waits for that, because a read of the tensor can't
be noticed. A gradient left on a tensor stays in the daemon, and an `Unreturned` stands for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from gpumux.capture.batch.containers import flatten
from gpumux.capture.recorder import Recorder, TraceRecord
from gpumux.capture.state import StateTable, Unreturned
from gpumux.errors import CaptureError


@dataclass(frozen=True, slots=True)
class WrittenInput:
    """A further result of a step: what the tensor at this position of its batch holds after it."""

    position: int


@dataclass(frozen=True, slots=True)
class LeftOnBatch:
    """What a step leaves on a tensor of its batch: whether it requires grad, and whether it has a gradient."""

    position: int
    requires_grad: bool
    gradient: bool

    def apply(self, tensors: Sequence[torch.Tensor]) -> None:
        tensor = tensors[self.position]
        tensor.requires_grad_(self.requires_grad)
        if self.gradient:
            tensor.grad = Unreturned.at(
                f"x.grad (of tensor {self.position} of the batch)", tensor.shape, tensor.stride(), tensor.dtype,
                tensor.device, False,
            )  # fmt: skip


# ---- in a trace


def puts_into_objects(given: Sequence[Any], batch: Any) -> bool:
    """Whether the step put something else into the containers and objects of its batch, whose leaves were `given`."""
    known = set(map(id, given))
    leaves, _ = flatten(batch, hiding=True)
    return any(id(leaf) not in known for leaf in leaves)


def written_inputs(record: TraceRecord) -> list[int]:
    """The tensors of the batch into which the step writes. Raises CaptureError for one whose elements overlap."""
    found: set[int] = set()
    for op in record.ops:
        for storage in op.writes:
            entry = record.storages[storage]
            if entry.kind != "input" or entry.key in found:
                continue
            found.add(entry.key)
            view = record.views[record.inputs[entry.key]]
            if any(stride == 0 and size > 1 for size, stride in zip(view.size, view.stride, strict=True)):
                raise CaptureError(
                    f"{op.where} writes into tensor {entry.key} of the batch, whose elements share memory"
                    f" ({op.target.removeprefix('aten.')})",
                    "clone it first, or use the operator that returns a new tensor",
                )
    return sorted(found)


def left_on_batch(batch: Sequence[Any], fakes: Sequence[Any], rec: Recorder) -> list[LeftOnBatch]:
    """What the step leaves on tensors of its batch. Raises CaptureError for what no step in the daemon can leave."""
    found = []
    seen: set[int] = set()
    tensors = [(g, f) for g, f in zip(batch, fakes, strict=True) if isinstance(g, (torch.Tensor, numpy.ndarray))]
    for position, (given, fake) in enumerate(tensors):
        if not isinstance(given, torch.Tensor) or id(fake) in seen:
            continue  # tensors made of an array are the step's own
        seen.add(id(fake))
        if rec.view_of(fake) != rec.record.inputs[position]:
            where = rec.reshaped.get(id(fake))
            raise CaptureError(
                f"{where or 'the step'} changes the shape of tensor {position} of the batch"
                f"{'' if where else ', or sets its .data'}",
                "make a view or a new tensor instead: x = x.transpose(0, 1), x = x / 255",
            )
        if not fake.is_leaf:
            raise CaptureError(
                f"the step makes tensor {position} of the batch part of a graph, by writing into it in place",
                "clone it first, or use the operator that returns a new tensor",
            )
        if fake.grad is not None or fake.requires_grad != given.requires_grad:
            found.append(LeftOnBatch(position, fake.requires_grad, fake.grad is not None))
    return found


# ---- at a call, and after it


def refuse_gradient(tensor: torch.Tensor, position: int) -> None:
    """Raises CaptureError for a tensor of the batch that requires grad, unless it is a leaf without a gradient."""
    if not tensor.is_leaf:
        raise CaptureError(
            f"tensor {position} of the batch requires grad and is computed from others, which would get no gradient",
            "pass x.detach(), and call requires_grad_() inside the step if you need its gradient there",
        )
    refuse_old_gradient(tensor, position)


def refuse_old_gradient(tensor: torch.Tensor, position: int) -> None:
    if tensor.grad is not None:
        raise CaptureError(
            f"tensor {position} of the batch has a gradient from before the step, which the step would not see",
            "set x.grad = None before the step, or pass x.detach()",
        )


def refuse_shared(written: Sequence[int], tensors: Sequence[torch.Tensor], table: StateTable) -> None:
    """Raises CaptureError if a tensor that the step writes shares memory with another tensor of its batch, or with the
    job's state: the daemon's copies share none."""
    for position in written:
        mine = _span(tensors[position])
        for other, tensor in enumerate(tensors):
            if tensor is not tensors[position] and _meet(mine, _span(tensor)):
                raise CaptureError(
                    f"the step writes into tensor {position} of the batch, which shares memory with tensor {other}",
                    "clone one of them before the step",
                )
        if table.lookup(tensors[position]) is not None:
            raise CaptureError(
                f"the step writes into tensor {position} of the batch, which shares memory with a tensor that the job"
                " holds (of the model, or one that a step reads by a variable)",
                "clone it before the step, or let the step reach that tensor by its name",
            )


def _span(tensor: torch.Tensor) -> tuple[torch.device, int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return tensor.device, start, start + (last + 1) * tensor.element_size() if tensor.numel() else start


def _meet(a: tuple[torch.device, int, int], b: tuple[torch.device, int, int]) -> bool:
    return a[0] == b[0] and max(a[1], b[1]) < min(a[2], b[2])


def write_back(targets: Sequence[tuple[torch.Tensor, int]], results: Sequence[torch.Tensor]) -> None:
    """Copy what a step wrote into the tensors of its batch: (tensor, number of the result)."""
    for tensor, index in targets:
        with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
            tensor.copy_(results[index])
