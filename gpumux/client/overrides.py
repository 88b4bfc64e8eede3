"""Functions of torch that read or share a tensor's memory and never ask its class (`torch.overrides.get_ignored_functions`).

`__torch_function__` does not hear of them. So from the first job on, each has one in its place that fetches what is behind and then
calls it. They stay when the last job has closed: torch's compilers note functions by identity, whenever they first look.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.jit import _builtins, _freeze, _script

from gpumux.client.fetching import before_forward, fetch_arguments

_lock = threading.Lock()
_installed = False

_SPARSE = ("coo", "csr", "csc", "bsr", "bsc", "compressed")
TORCH = ("tensor", "as_tensor", "asarray", *(f"sparse_{layout}_tensor" for layout in _SPARSE))
_METHODS = ("new", "new_tensor", "as_subclass", "set_")
_TRANSFORMS: tuple[tuple[Any, str], ...] = (  # how an argument of torch.func's transforms is wrapped
    (torch._functorch.eager_transforms, "_wrap_for_grad"),
    (torch._functorch.eager_transforms, "_wrap_functional_tensor"),
    (torch._functorch.vmap, "_add_batch_dim"),
)
_SCRIPTED = (
    "save",
    "save_to_buffer",
    "_save_for_lite_interpreter",
    "_save_to_buffer_for_lite_interpreter",
    "__deepcopy__",
)


def _asking(plain: Callable[..., Any]) -> Callable[..., Any]:
    """`plain`, which fetches its arguments first."""

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        fetch_arguments((*args, *kwargs.values()))
        return plain(*args, **kwargs)

    return call


def _named(function: Callable[..., Any], module: str, name: str) -> Callable[..., Any]:
    """By which pickle finds it again, also in a process without gpumux: a DataLoader's worker gets its collate function so."""
    function.__module__, function.__qualname__ = module, name
    return function


def _of_lists(plain: Callable[..., Any]) -> Callable[..., Any]:
    """`plain`, some of whose arguments are lists of tensors."""

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            fetch_arguments(value if isinstance(value, (list, tuple)) else (value,))
        return plain(*args, **kwargs)

    return call


def _of_scripted(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a TorchScript module, whose parameters only C++ goes through."""

    @functools.wraps(plain)
    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(module, torch.nn.Module):
            before_forward(module, args)
        return plain(module, *args, **kwargs)

    return call


def install() -> None:
    """Idempotent."""
    global _installed
    with _lock:
        if _installed:
            return
        table = _builtins._get_builtin_table()  # torch.jit fills it when first asked, with what stands in `torch` then
        for name in TORCH:
            plain = getattr(torch, name)
            asking = _named(_asking(plain), "torch", name)
            if id(plain) in table:
                _builtins._register_builtin(asking, table[id(plain)])
            setattr(torch, name, asking)
        for name in _METHODS:
            asking = _asking(getattr(torch.Tensor, name))
            setattr(torch.Tensor, name, _named(asking, "torch", f"Tensor.{name}"))
        function = torch.jit.ScriptFunction
        function.__call__ = _asking(function.__call__)  # type: ignore[method-assign]
        for owner, name in _TRANSFORMS:
            setattr(owner, name, _asking(getattr(owner, name)))
        to_dlpack = _named(_asking(torch._C._to_dlpack), "torch._C", "_to_dlpack")
        for module, name in (torch._C, "_to_dlpack"), (torch, "to_dlpack"), (torch.utils.dlpack, "to_dlpack"):
            setattr(module, name, to_dlpack)
        for made, name in ((torch.Tensor, "_make_subclass"), (torch.nn.Parameter, "__new__")):
            setattr(made, name, staticmethod(_asking(getattr(made, name))))
        torch.nested.nested_tensor = _of_lists(torch.nested.nested_tensor)
        torch.autograd._make_grads = _of_lists(torch.autograd._make_grads)  # with which backward() and grad() begin
        for scripted in _script.ScriptModule, _script.RecursiveScriptModule:
            for name in _SCRIPTED:
                if name in vars(scripted):
                    setattr(scripted, name, _of_scripted(vars(scripted)[name]))
        freeze = _of_scripted(_freeze.freeze)
        for owner in (torch.jit, _freeze):
            setattr(owner, "freeze", freeze)  # noqa: B010  mypy knows neither name
        _installed = True
