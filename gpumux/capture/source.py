"""Says which line of the user's code, or which of their tensors, an error is about."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import types
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

from gpumux.errors import DataDependent
from gpumux.program.ir import ROOT, Label

_CONTEXTS = contextlib.__file__


@cache
def _between(path: str) -> bool:
    """Whether a file only stands between the user's line and what it does."""
    if path.startswith("<frozen "):
        return True
    here, torch_home = (
        os.path.join(os.path.dirname(p), "") for p in (os.path.dirname(os.path.abspath(__file__)), _torch_file())
    )
    return path.startswith((here, torch_home)) or path == _CONTEXTS


def _torch_file() -> str:
    import torch

    return str(torch.__file__)


def user_frame(start: types.FrameType | None = None) -> tuple[str, int, str] | None:
    """(file, line, function) of the innermost frame that is neither torch's nor gpumux's own."""
    frame = start or sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not _between(name):
            return name, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back  # type: ignore[assignment]
    return None


def user_line() -> str:
    """ "FILE:LINE" for messages; "an unknown line" when no user frame is on the stack."""
    found = user_frame(sys._getframe(1))
    return f"{found[0]}:{found[1]}" if found else "an unknown line"


def definition(fn: Any) -> str:
    """ "FILE:LINE" where a step is defined."""
    code = getattr(getattr(fn, "__func__", fn), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else type(fn).__name__


def optimizer_inside() -> Any:
    """The optimizer whose step is on the stack, the outermost of them; None where there is none."""
    import torch

    frame: types.FrameType | None = sys._getframe(1)
    found = None
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch.optim.Optimizer):
            found = owner
        frame = frame.f_back
    return found


def by_numbers() -> bool:
    """Whether an optimizer is on the stack that keeps numbers as tensors of its state and reads them in its Python at
    each step."""
    import torch

    return isinstance(optimizer_inside(), torch.optim.ASGD)


def traceback_line(error: BaseException) -> str:
    """ "FILE:LINE" of the innermost user frame an exception passed through."""
    best = "an unknown line"
    tb = error.__traceback__
    while tb is not None:
        name = tb.tb_frame.f_code.co_filename
        if not _between(name):
            best = f"{name}:{tb.tb_lineno}"
        tb = tb.tb_next
    return best


def reachable(fn: Any) -> Iterator[tuple[str, Any]]:
    """(name, value) of what a function's closure and globals hold, by the names its code uses."""
    fn = getattr(fn, "__wrapped__", fn)
    if isinstance(fn, types.MethodType):
        yield "self", fn.__self__
        fn = fn.__func__
    code = getattr(fn, "__code__", None)
    if code is None:
        return
    for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:  # a cell not filled yet
            continue
    seen = set()
    for name in code_names(code):
        if name in fn.__globals__ and name not in seen:
            seen.add(name)
            yield name, fn.__globals__[name]


_BY_STRING = frozenset(("getattr", "hasattr", "attrgetter", "methodcaller", "vars", "__dict__", "globals"))


def code_names(code: types.CodeType) -> Iterator[str]:
    """Every name a function's code uses, nested functions included, and in code that looks names up by
    strings (getattr) its strings."""
    for one in codes_in(code):
        yield from one.co_names
        if not _BY_STRING.isdisjoint(one.co_names):
            yield from (c for c in one.co_consts if isinstance(c, str) and c.isidentifier())


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code and that of the functions within it."""
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from codes_in(const)


def name_of(tensor: Any, fn: Any) -> str:
    """A name the user would know the tensor by: a closure or global variable, an item or attribute
    of one, or its shape when it has none."""
    import torch

    storage = tensor.untyped_storage()._cdata

    def same(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.untyped_storage()._cdata == storage

    for name, value in reachable(fn):
        if same(value):
            return f"`{name}`"
        if isinstance(value, (list, tuple)):
            for i, item in enumerate(value):
                if same(item):
                    return f"`{name}[{i}]`"
        elif isinstance(value, dict):
            for key, item in value.items():
                if same(item):
                    return f"`{name}[{key!r}]`"
        elif isinstance(value, torch.nn.Module):
            for path, item in [*value.named_parameters(), *value.named_buffers()]:
                if same(item):
                    return f"`{name}.{path}`"
            for path, module in value.named_modules():
                for attr, item in vars(module).items():
                    if same(item):
                        return f"`{name}.{path + '.' if path else ''}{attr}`"
        else:
            for attr, item in getattr(value, "__dict__", {}).items() if not callable(value) else ():
                if same(item):
                    return f"`{name}.{attr}`"
    return f"a tensor of shape {tuple(tensor.shape)} and type {str(tensor.dtype).removeprefix('torch.')}"


# ---- Which of the user's layers an operator belongs to, while a step is recorded.
#
# Forward, the innermost module whose call is on Python's stack says it. Backward, no call is: there the node that
# autograd evaluates says which operator it belongs to, by its sequence number, which it was given while that operator's
# layer ran. Nothing is hooked, and nothing of the user's is held or changed.


_CALL = nn.Module._call_impl.__code__
_ENGINE = torch.autograd.graph._engine_run_backward.__code__


class Layers:
    """Names the modules of `models` as named_modules does, behind "model0." and so on where there are several. What
    runs in a model itself, in none of its modules, is of the layer ROOT."""

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
        """The layer of the operator that is being dispatched. To be asked once for each, also for views: their nodes
        are counted, too."""
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


# ---- Which functions run while a step is traced.
#
# Reading the step's code says what it may call by name. What Python and torch call by themselves
# (`__getitem__`, a context manager, a metaclass's property, `Function.backward`, a hook) and what is
# called by a computed name shows only when it runs.


Executed = dict[int, tuple[types.CodeType, dict[str, Any]]]  # by id, which the code object keeps from reuse


class Observer:
    """Within `with observer:`, notes every code object that starts in this thread, with its globals, but
    for what starts between `pause` and `resume` (torch's own machinery, which is most of it) and for what an import
    runs: modules, which are made once, and finders that others put in its way. A profiler of the user's pauses."""

    def __init__(self) -> None:
        self.found: Executed = {}
        self._before: Any = None
        self._around: types.FrameType | None = None  # who observes

    def _note(self, frame: types.FrameType, event: str, _: Any) -> None:
        if event == "call":
            code = frame.f_code
            if id(code) not in self.found and not self._importing(frame):
                self.found[id(code)] = (code, frame.f_globals)

    def _importing(self, frame: types.FrameType | None) -> bool:
        """Whether a frame runs for an `import` of what is observed; the program around it may be one, too."""
        while frame is not None and frame is not self._around:
            if frame.f_code.co_filename.startswith("<frozen importlib"):
                return True
            frame = frame.f_back
        return False

    def __enter__(self) -> Observer:
        self._around = sys._getframe(1)
        self._before = sys.getprofile()
        self.resume()
        return self

    def pause(self) -> None:
        sys.setprofile(None)

    def resume(self) -> None:
        sys.setprofile(self._note)

    def __exit__(self, *_: object) -> None:
        self._around = None
        sys.setprofile(self._before if callable(self._before) else None)
        if self._before is not None and not callable(self._before):
            self._before.enable()  # cProfile's, which is no function


# ---- What to do instead of what can't be captured, where there is more to say than in general.


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
    """The error for what reads a tensor's value in Python; an optimizer of torch's own is nothing that a user could
    mend."""
    optimizer = optimizer_inside()
    name = type(optimizer).__name__
    where = "" if optimizer is None else f" (inside {name}.step)"
    remedy = (
        "keep the decision on the device (torch.where, masks), or return the tensor from the step and read it outside"
    )
    if type(optimizer).__module__.split(".")[:2] == ["torch", "optim"]:
        remedy = (
            f"{name} decides so at every step, and gpumux runs a step's Python only when it captures it: use another of"
            " torch.optim (Adam, AdamW, SGD, ...), or train this model without gpumux"
        )
    return DataDependent(
        f"{user_line()}{where} reads a tensor's value in Python (.item(), float(), bool() or a branch on it)", remedy
    )
