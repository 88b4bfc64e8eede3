"""Tensors and optimizer states that are behind the daemon's, and fetch it before they are read.

While a job's state in the daemon is newer than the local one, each of its tensors has a class of its own: a subclass of the one
it had, whose `__torch_function__` has the newer state fetched and then runs the function. The fetch gives every tensor its class
back first, so the function meets plain tensors and takes the path it takes without gpumux. What only describes a tensor
(its shape, its type) is answered without. A module that is called asks before its forward, as some modules choose their
path by the classes they meet: one global hook, there only while something is behind.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol

import torch

from gpumux.client.state import Part
from gpumux.errors import StaleGradient, StaleState

plainly = torch._C.DisableTorchFunctionSubclass  # with plainly(): nothing is fetched


class Keeper(Protocol):
    """What has newer state than the local tensors."""

    def fetch(self, parts: frozenset[Part]) -> None: ...
    def hold(self, tensor: torch.Tensor, part: Part | None, index: int = -1) -> None: ...
    def gradient(self, index: int) -> torch.Tensor | None: ...
    def gradient_set(self, index: int, value: torch.Tensor | None) -> None: ...
    def gradient_zeroed(self, index: int, value: torch.Tensor) -> None: ...
    def has(self, module: torch.nn.Module) -> bool: ...


@dataclass(frozen=True, slots=True)
class Held:
    """What a tensor that is behind knows. `part` None: a gradient that was not kept. `index`: the parameter that this is, or whose
    gradient; -1 for none. The tensor itself holds it: so a job lives for as long as what it trained can be asked for."""

    plain: type
    keeper: Keeper | weakref.ref[Any]
    part: Part | None
    index: int


_MARK = "_gpumux_held"
_fetching: dict[type, type] = {}  # by the plain class
_lost: dict[type, type] = {}  # by the plain class
_outdated: dict[type, type] = {}  # by the plain class
_plain: dict[type, type] = {}  # by any of them


def held_of(tensor: torch.Tensor) -> Held | None:
    """None for a tensor that is not behind."""
    found: Held | None = tensor.__dict__.get(_MARK) if type(tensor) in _plain else None
    return found


def hold(tensor: torch.Tensor, keeper: Keeper, part: Part | None, index: int = -1) -> None:
    """From now on the tensor is behind."""
    kind = type(tensor)
    plain = _plain.get(kind, kind)
    tensor.__dict__[_MARK] = Held(plain, keeper if part is not None else weakref.ref(keeper), part, index)
    wanted = lost(plain) if part is None else fetching(plain)
    if kind is not wanted:
        object.__setattr__(tensor, "__class__", wanted)


def lose(tensor: torch.Tensor) -> None:
    """The tensor was a gradient, or a window onto one, and its values are nowhere any more."""
    let_go(tensor)
    object.__setattr__(tensor, "__class__", lost(type(tensor)))


def let_go(tensor: torch.Tensor) -> None:
    """The tensor is plain again. Idempotent."""
    plain = _plain.get(type(tensor))
    if plain is not None:
        tensor.__dict__.pop(_MARK, None)
        object.__setattr__(tensor, "__class__", plain)


def fetching(plain: type) -> type:
    """The subclass of a tensor's class that fetches. It goes by the same name, and what is copied or pickled is plain."""
    found = _fetching.get(plain)
    if found is None:
        found = type(plain)(
            plain.__name__,
            (plain,),
            {
                "__module__": plain.__module__,
                "__qualname__": plain.__qualname__,
                "__doc__": plain.__doc__,
                "__torch_function__": classmethod(_torch_function),
                "__deepcopy__": _deepcopy,
                "__reduce_ex__": _reduce_ex,
                "__repr__": lambda self, **kwargs: repr(_ready(self)),
            },
        )
        _fetching[plain] = found
        _plain[found] = plain
        reducer = ForkingPickler._extra_reducers.get(plain)  # type: ignore[attr-defined]
        if reducer is not None:  # as multiprocessing sends tensors
            ForkingPickler.register(found, lambda tensor: reducer(_ready(tensor)))
    return found


def lost(plain: type) -> type:
    """The subclass of a tensor's class for gradients that were not kept: they may be looked at from outside, zeroed, and put
    away; reading them raises StaleGradient."""
    found = _lost.get(plain)
    if found is None:
        found = type(plain)(
            plain.__name__,
            (plain,),
            {
                "__module__": plain.__module__,
                "__torch_function__": classmethod(_lost_torch_function),
                "__deepcopy__": lambda self, memo: _refuse(),
                "__reduce_ex__": lambda self, protocol: _refuse(),
                "__repr__": lambda self, **kwargs: f"<a gradient of size {tuple(self.shape)} that was not kept>",
            },
        )
        _lost[plain] = found
        _plain[found] = plain
    return found


def outdate(tensor: torch.Tensor) -> None:
    """The tensor was a buffer or optimizer state that a step replaced while it was behind: its values are nowhere any more."""
    let_go(tensor)
    plain: Any = type(tensor)
    found = _outdated.get(plain)
    if found is None:
        found = type(plain)(
            plain.__name__,
            (plain,),
            {
                "__module__": plain.__module__,
                "__torch_function__": classmethod(_outdated_torch_function),
                "__deepcopy__": lambda self, memo: _refuse_outdated(),
                "__reduce_ex__": lambda self, protocol: _refuse_outdated(),
                "__repr__": lambda self, **kwargs: f"<a tensor of size {tuple(self.shape)} that a step replaced>",
            },
        )
        _outdated[plain] = found
        _plain[found] = plain
    object.__setattr__(tensor, "__class__", found)


def _outdated_torch_function(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    if func in _DESCRIBES:
        with plainly():
            return func(*args, **(kwargs or {}))
    return _refuse_outdated()


def _refuse_outdated() -> Any:
    raise StaleState(
        "this tensor has no values here: it was replaced by a step of the job, and not read between the step that gave it its values "
        "and that one",
        "keep a copy when it is there (model.buffer.clone()), or return it from the step",
    )


def is_lost(tensor: torch.Tensor | None) -> bool:
    """Whether it is a gradient that was not kept, or what a step replaced."""
    kind = type(tensor)
    return kind in _plain and (_lost.get(_plain[kind]) is kind or _outdated.get(_plain[kind]) is kind)


def _refuse() -> Any:
    raise StaleGradient(
        "this gradient has no values here: it lived only inside the step that made it, or a later step has made another",
        "return it from the step, or its norm (return loss, model.weight.grad); where it is not wanted, optimizer.zero_grad() first",
    )


def _ready(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, up to date and of its own class."""
    _fetch([tensor])
    return tensor


def _deepcopy(self: torch.Tensor, memo: Any) -> Any:
    return copy.deepcopy(_ready(self), memo)


def _reduce_ex(self: torch.Tensor, protocol: Any) -> Any:
    return _ready(self).__reduce_ex__(protocol)


# ---- torch functions


def _methods(*names: str) -> Iterator[Any]:
    return (getattr(torch.Tensor, name) for name in names if hasattr(torch.Tensor, name))


def _getters(*names: str) -> Iterator[Any]:
    return (getattr(torch.Tensor, name).__get__ for name in names if hasattr(torch.Tensor, name))


_TENSOR: Any = torch.Tensor  # whose attributes are descriptors, when asked of the class

# What only describes a tensor, or is about autograd's hooks.
_DESCRIBES = frozenset(
    (
        *_getters(
            "_backward_hooks", "_post_accumulate_grad_hooks", "_version", "device", "dtype", "grad_fn", "is_cpu", "is_cuda",
            "is_ipu", "is_leaf", "is_maia", "is_meta", "is_mkldnn", "is_mps", "is_mtia", "is_nested", "is_quantized", "is_sparse",
            "is_sparse_csr", "is_vulkan", "is_xla", "is_xpu", "itemsize", "layout", "name", "names", "nbytes", "ndim",
            "output_nr", "requires_grad", "retains_grad", "shape", "volatile",
        ),
        *_methods(
            "__hash__", "__len__", "dim", "element_size", "get_device", "has_names", "is_complex", "is_conj", "is_contiguous",
            "is_floating_point", "is_inference", "is_neg", "is_shared", "is_signed", "ndimension", "nelement", "numel",
            "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad", "size",
            "storage_offset", "stride",
        ),
        _TENSOR.requires_grad.__set__,
        _TENSOR._backward_hooks.__set__,
        torch.is_complex, torch.is_floating_point, torch.numel, torch.is_inference, torch.is_signed,
        torch._has_compatible_shallow_copy_type,
    )
)  # fmt: skip
_GET_GRAD, _SET_GRAD, _DELETE_GRAD = _TENSOR.grad.__get__, _TENSOR.grad.__set__, _TENSOR.grad.__delete__
_ZERO = frozenset((torch.Tensor.zero_, torch.zero_))
_SET_DATA = _TENSOR.data.__set__
# What torch's compilers ask of a gradient to make a fake one like it.
_OUTSIDE = frozenset(
    (
        *_methods("_is_view", "share_memory_", "untyped_storage"),
        _GET_GRAD,
        torch._C._functorch.is_functorch_wrapped_tensor,
    )
)
_MOVES = frozenset(_methods("to", "cpu", "cuda", "float", "double", "half", "bfloat16", "type"))


def _torch_function(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    kwargs = kwargs or {}
    if func in _DESCRIBES:
        with plainly():
            return func(*args, **kwargs)
    if func in (_GET_GRAD, _SET_GRAD, _DELETE_GRAD):
        return _about_gradient(func, args)
    if func in _ZERO or func is torch._foreach_zero_:
        _zeroed(args)
    _fetch((args, kwargs))
    return func(*args, **kwargs)


def _lost_torch_function(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    kwargs = kwargs or {}
    if func in _DESCRIBES or func in _OUTSIDE:
        with plainly():
            return func(*args, **kwargs)
    if func in _ZERO or func is torch._foreach_zero_:
        _zeroed(args)
        return func(*args, **kwargs)
    if func == _SET_DATA or func in _MOVES:  # as model.to() does, whatever to
        with plainly():
            out = func(*args, **kwargs)
        if isinstance(out, torch.Tensor) and out is not args[0]:
            object.__setattr__(out, "__class__", lost(type(out)))
        return out
    return _refuse()


def _zeroed(value: Any) -> None:
    """These are about to be zeros, whatever they are. A gradient need not be fetched for it, unless it shares its memory."""
    for tensor in value if isinstance(value, (tuple, list)) else ():
        if isinstance(tensor, (tuple, list)):
            _zeroed(tensor)
        elif isinstance(tensor, torch.Tensor) and type(tensor) in _plain:
            held = held_of(tensor)
            if held is None or (held.index >= 0 and held.part is not Part.MODEL and _owns_memory(tensor)):
                let_go(tensor)
                keeper = held.keeper if held is not None else None
                keeper = keeper() if isinstance(keeper, weakref.ref) else keeper
                if held is not None and keeper is not None:
                    keeper.gradient_zeroed(held.index, tensor)


def _owns_memory(tensor: torch.Tensor) -> bool:
    with plainly():
        return tensor.untyped_storage().nbytes() == tensor.nbytes


def _about_gradient(func: Any, args: Any) -> Any:
    held = held_of(args[0])
    if held is None or held.index < 0 or held.part is not Part.MODEL or isinstance(held.keeper, weakref.ref):
        with plainly():
            return func(*args)
    if func == _GET_GRAD:
        return held.keeper.gradient(held.index)
    value = args[1] if func == _SET_GRAD else None
    with plainly():
        func(*args)  # which says what is wrong with a value
    held.keeper.gradient_set(held.index, value)
    return None


def _found(value: Any) -> Iterator[torch.Tensor]:
    """The tensors that can be fetched, in arguments of whatever nesting."""
    if isinstance(value, torch.Tensor):
        if type(value) in _plain and not is_lost(value):
            yield value
    elif isinstance(value, (tuple, list, set, frozenset)):
        for item in value:
            yield from _found(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _found(item)


def _fetch(value: Any) -> None:
    wanted: dict[int, tuple[Keeper, set[Part]]] = {}
    for tensor in list(_found(value)):
        held = held_of(tensor)
        if held is not None and held.part is not None and not isinstance(held.keeper, weakref.ref):
            wanted.setdefault(id(held.keeper), (held.keeper, set()))[1].add(held.part)
    for keeper, parts in wanted.values():
        keeper.fetch(frozenset(parts))
    for tensor in list(_found(value)):
        let_go(tensor)  # fetched a moment ago by another thread, or made by the class of one that was behind


def fetch_arguments(values: Iterable[Any]) -> None:
    """Those of these that are behind are brought up to date. Raises StaleGradient for a gradient that was not kept."""
    behind = [value for value in values if type(value) in _plain]
    if behind and torch._C._is_torch_function_enabled():
        _fetch(behind)
        if any(type(value) in _outdated.values() for value in behind):
            _refuse_outdated()
        if any(map(is_lost, behind)):  # or was found to be, by the fetch
            _refuse()


# ---- modules


_behind: list[weakref.ref[Any]] = []
_handle: Any = None
_hooking = threading.RLock()  # a collector may come to `watch_modules` amid it


def before_forward(module: torch.nn.Module, args: Any) -> None:
    """The global hook: fetch before a module decides on its path."""
    for ref in list(_behind):
        keeper = ref()
        if keeper is not None and keeper.has(module):
            keeper.fetch(frozenset({Part.MODEL}))


def watch_modules(keeper: Keeper, on: bool) -> None:
    """Have module calls ask `keeper` first, or no longer. Idempotent."""
    with _hooking:
        _behind[:] = [ref for ref in _behind if ref() is not None and ref() is not keeper]
        if on:
            _behind.append(weakref.ref(keeper, _unwatch))
        _hook()


def _unwatch(gone: weakref.ref[Any]) -> None:
    with _hooking:
        _behind[:] = [ref for ref in _behind if ref is not gone]
        _hook()


def _hook() -> None:
    global _handle
    if _behind and _handle is None:
        _handle = torch.nn.modules.module.register_module_forward_pre_hook(before_forward)
    elif not _behind and _handle is not None:
        _handle.remove()
        _handle = None


HOOKS = torch.nn.modules.module._global_forward_pre_hooks


class OtherHooks:
    """A dictionary of hooks, but for ours: it comes and goes, and no step is another one for it."""

    def __init__(self, hooks: dict[Any, Any]) -> None:
        self._hooks = hooks

    def __iter__(self) -> Iterator[Any]:
        return (hook for hook in self._hooks.values() if hook is not before_forward)

    def __len__(self) -> int:
        return sum(1 for _ in self)
