"""The tensors of no model that one trace meets: adopted into the job, or refused all together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gpumux.capture import source
from gpumux.capture.outside.tensors import Outside
from gpumux.capture.recorder import TraceRecord
from gpumux.capture.state import UNRETURNED, Reading, StateTable, has_memory
from gpumux.capture.values.caches import cache_with
from gpumux.capture.values.held import counts
from gpumux.capture.watch.fingerprint import Change, Fingerprint
from gpumux.errors import CaptureError, UnknownTensor


class Met:
    """The tensors outside the job's state that one trace meets. `outside`: None where all are refused. `before`: what
    the step's variables held when the trace began."""

    def __init__(
        self, table: StateTable, outside: Outside | None, *, fn: Any, fingerprint: Fingerprint, before: list[Reading]
    ) -> None:  # fmt: skip
        self._table = table
        self._outside = outside
        self._fn = fn
        self._fingerprint = fingerprint
        self._before = before
        self._named: list[tuple[str, torch.Tensor]] | None = None
        self._refused: dict[int, tuple[torch.Tensor, CaptureError | None, str]] = {}
        self._adopted: list[torch.Tensor] = []
        self._grads: list[torch.Tensor] = []
        self._buffers: list[tuple[torch.Tensor, bool]] = []  # of the models, and whether each requires grad
        if outside is not None:
            self._grads += [t for _, t in table.only_read if t.requires_grad]
            buffers = [t for _, t in table.tensors if table.param_index(t) is None and t.is_floating_point()]
            self._buffers += [(t, t.requires_grad) for t in buffers if t.grad is None]

    @property
    def adopted(self) -> bool:
        """Whether tensors were adopted in this trace."""
        return bool(self._adopted)

    def names(self, tensor: torch.Tensor) -> list[str]:
        """The names by which the step's variables hold this object."""
        return [name for name, held in self._all_named() if held is tensor]

    def _all_named(self) -> list[tuple[str, torch.Tensor]]:
        if self._named is None:
            self._named = [(name, t) for name, t, _ in self._fingerprint.named_tensors(self._before)]
        return self._named

    def lookup(self, tensor: torch.Tensor) -> tuple[int, int, int] | None:
        """StateTable.lookup, after the tensor was adopted."""
        found = self._table.lookup(tensor)
        if found is None and self._outside is not None and has_memory(tensor):
            self._adopt(tensor, self._outside)
            found = self._table.lookup(tensor)
        return found

    def _adopt(self, tensor: torch.Tensor, outside: Outside) -> None:
        storage = tensor.untyped_storage()._cdata
        if storage in self._refused:
            return
        owner = next((t for t in self._grads if t.grad is tensor), None)
        if owner is not None:
            self._refused[storage] = tensor, _has_gradient(self._name(owner)), source.user_line()
            return
        held = [(name, t) for name, t in self._all_named() if t.untyped_storage()._cdata == storage]
        if not held:
            name = cache_with(tensor)
            if name is None:
                return
            held = [(name, tensor)]
        named = next((t for _, t in held if t is tensor), held[0][1])
        try:
            outside.adopt(named, [name for name, t in held if t is named])
        except CaptureError as error:
            self._refused[storage] = (tensor, error, source.user_line())
            return
        self._adopted.append(named)
        if named.requires_grad:
            self._grads.append(named)

    def _name(self, tensor: torch.Tensor) -> str:
        return next((name for name, t in self._table.only_read if t is tensor), source.name_of(tensor, self._fn))

    def refuse(self, tensor: torch.Tensor) -> None:
        """Note a tensor that is no state of the job."""
        self._refused.setdefault(tensor.untyped_storage()._cdata, (tensor, None, source.user_line()))

    def trained(self) -> list[torch.Tensor]:
        """Tensors that steps only read so far, and buffers of the models, that got a gradient in this trace."""
        there = [*self._grads, *(t for t, _ in self._buffers)]
        return [t for t in there if isinstance(t.grad, UNRETURNED) and self._table.param_index(t) is None]

    def over(self) -> TraceOver:
        """The exception that has the step traced anew, with these tensors as parameters. Clears their gradients."""
        found = self.trained()
        for tensor in found:
            tensor.grad = None
        for tensor, before in self._buffers:
            if tensor.requires_grad != before:  # which nothing watches yet
                tensor.requires_grad_(before)
        outside = self._outside
        assert outside is not None
        return TraceOver(lambda: outside.trained(found))

    def counted(
        self, record: TraceRecord, view: int, of_models: Callable[[int], torch.Tensor | None]
    ) -> TraceOver | None:
        """The exception that has the step traced anew with flags and integers as numbers of each step, if a value that
        Python reads depends on such and on constants alone. They must be new to the job, because Programs may read the
        others. `of_models`: the one on a buffer of the models."""
        buffers = _sources(record, view) or set()
        news = [t for _, t in self._table.only_read if any(t is one for one in self._adopted)]
        found = [t for t in news if (place := self._table.lookup(t)) is not None and place[0] in buffers]
        found += [t for buffer in sorted(buffers) if (t := of_models(buffer)) is not None]
        alone = all(counts(t) for t in found) and len(found) == len(buffers)
        outside = self._outside
        return TraceOver(lambda: outside.count(found), counts=True) if found and alone and outside is not None else None

    def error(self) -> CaptureError | None:
        """The error for all refused tensors, None if there are none."""
        if not self._refused:
            return None
        found = list(self._refused.values())
        known = [error for _, error, _ in found if error is not None]
        if len(known) == len(found):
            said = [error.message for error in known]
            more = f"; and {len(said) - 8} more" if len(said) > 8 else ""
            return CaptureError("; ".join(said[:8]) + more, "; ".join(dict.fromkeys(error.remedy for error in known)))
        said = [
            f"{line} uses {source.name_of(t, self._fn)}" if error is None else error.message for t, error, line in found
        ]
        return UnknownTensor(
            "; ".join(said[:8])
            + (f"; and {len(said) - 8} more" if len(said) > 8 else "")
            + (", which is" if len(said) == 1 else ": these are")
            + " neither in the batch nor in the model, nor held by a variable that the step's code names",
            "pass it as an argument of the step, or make it a buffer of a module and give that module in model= too",
        )


def _has_gradient(name: str) -> CaptureError:
    return CaptureError(
        f"the step adds to the gradient that {name} has already, and {name} is in no model of the job",
        "give its module in model=, or clear the gradient before the step: .grad = None",
    )


def _sources(record: TraceRecord, view: int) -> set[int] | None:
    """The job's buffers that the present content of a view depends on, None if it depends on more than such and
    constants."""
    needed = {record.views[view].storage}
    for op in reversed(record.ops):
        if op.writes & needed:
            if op.random is not None:
                return None
            needed |= op.reads | op.writes
    storages = [record.storages[index] for index in needed]
    if any(one.kind not in ("temp", "const", "state") for one in storages):
        return None
    return {one.key for one in storages if one.kind == "state"}


class TraceOver(Exception):
    """The step must be traced anew, after `apply()`. `undo`: restores what the trace left, if the step can't be
    captured. `counts`: tensors become numbers of each step. `changes`: what the trace changed in variables, which keep
    their new values. Never raised to users."""

    def __init__(
        self, apply: Callable[[], object], undo: Sequence[Callable[[], None]] = (), *, counts: bool = False,
        changes: Sequence[Change] = (),
    ) -> None:  # fmt: skip
        super().__init__("traced once more")
        self.apply = apply
        self.undo = [*undo, *(change.restore for change in changes)]
        self.counts = counts
        self.changes = changes
