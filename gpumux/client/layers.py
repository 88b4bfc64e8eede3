"""Which of the user's layers an operator belongs to, while a step is recorded.

Forward, the innermost module whose call is on Python's stack says it. Backward, no call is: there the node that autograd
evaluates says which operator it belongs to, by its sequence number, which it was given while that operator's layer ran.
Nothing is hooked, and nothing of the user's is held or changed.
"""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from gpumux.program.layers import ROOT, Label

_CALL = nn.Module._call_impl.__code__
_ENGINE = torch.autograd.graph._engine_run_backward.__code__


class Layers:
    """Names the modules of `models` as named_modules does, behind "model0." and so on where there are several. What runs in a
    model itself, in none of its modules, is of the layer ROOT."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._names: dict[int, str] = {}
        for i, model in enumerate(models):
            prefix = f"model{i}." if len(models) > 1 else ""
            for name, module in model.named_modules():
                self._names.setdefault(id(module), f"{prefix}{name or ROOT}")
        self._thread = threading.get_ident()
        self._next = torch._C._autograd._get_sequence_nr()
        self._nodes: dict[int, str | None] = {}  # sequence number -> layer

    def here(self) -> Label | None:
        """The layer of the operator that is being dispatched. To be asked once for each, also for views: their nodes are
        counted, too."""
        if not self._names:
            return None
        node: Any = torch._C._current_autograd_node()
        layer = self._on_stack(sys._getframe(1))
        if layer is None and node is not None:
            layer = self._nodes.get(node._sequence_nr())
        if threading.get_ident() == self._thread:  # sequence numbers are counted for each thread
            following = torch._C._autograd._get_sequence_nr()
            for number in range(self._next, following):  # nodes are made before their operator runs
                self._nodes[number] = layer
            self._next = following
        return None if layer is None else Label(layer, node is not None)

    def _on_stack(self, frame: types.FrameType | None) -> str | None:
        while frame is not None and frame.f_code is not _ENGINE:
            if frame.f_code is _CALL:
                name = self._names.get(id(frame.f_locals["self"]))
                if name is not None:
                    return name
            frame = frame.f_back
        return None
