"""Says which line of the user's code, or which of their tensors, an error is about."""

from __future__ import annotations

import contextlib
import os
import sys
import types
from collections.abc import Iterator
from functools import cache
from typing import Any

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
    """Whether an optimizer is on the stack that keeps numbers as tensors of its state and reads them in its Python at each step."""
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
