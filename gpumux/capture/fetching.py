"""Stale tensors and optimizer states, which fetch the daemon's newer state before they are read.

While a job's state in the daemon is newer than the local one, each local tensor has a special class: a subclass of its
own, whose `__torch_function__` fetches the newer state and then runs the function. The fetch first restores the class
of every tensor, so the function gets plain tensors and behaves as without gpumux. Functions that only describe a tensor
(its shape, its type) fetch nothing. A global module hook, set only while something is stale, fetches before a module's
forward, because some modules choose their path by the classes of their tensors.
"""

from __future__ import annotations

import copy
import functools
import gc
import logging
import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, compress, tee
from multiprocessing.reduction import ForkingPickler
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Protocol

import torch
import torch.utils._pytree as pytree
from torch.jit import _builtins, _freeze, _script
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from gpumux.capture.source import folded
from gpumux.capture.state import DESCRIBES, Part
from gpumux.errors import StaleGradient, StaleState

without_fetching = torch._C.DisableTorchFunctionSubclass  # with without_fetching(): nothing is fetched


@contextmanager
def without_modes() -> Iterator[None]:
    """A context for gpumux's own tensor work. Inside, no mode, transform or trace of torch is active in this thread,
    and reading a local tensor fetches nothing."""
    tracing = torch._C._get_tracing_state()
    with ExitStack() as stack:
        stack.enter_context(torch._C.DisableTorchFunction())
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        if torch._C._functorch.peek_interpreter_stack() is not None:
            from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

            stack.enter_context(temporarily_clear_interpreter_stack())
        if tracing is not None:
            torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
        try:
            yield
        finally:
            if tracing is not None:
                torch._C._set_tracing_state(tracing)  # type: ignore[attr-defined]


class ReadHandler(Protocol):
    """The holder of newer state than that of the local tensors. `has_newer`: False for one that has none, and only
    wants to know when they are read; another's mark may take the place of its own."""

    has_newer: bool

    def fetch(self, parts: frozenset[Part]) -> None: ...
    def mark_stale(self, tensor: torch.Tensor, part: Part | None, index: int = -1) -> None: ...
    def gradient(self, index: int) -> torch.Tensor | None: ...
    def gradient_set(self, index: int, value: torch.Tensor | None) -> None: ...
    def gradient_zeroed(self, index: int, value: torch.Tensor) -> None: ...
    def has(self, module: torch.nn.Module) -> bool: ...


@dataclass(frozen=True, slots=True)
class StaleMark:
    """The mark of a stale tensor. `part`: None for a gradient that was not kept. `index`: the parameter that the tensor
    is, or is the gradient of; -1 for none. The tensor holds its mark, so a job lives as long as its state can be
    read."""

    plain: type
    handler: ReadHandler | weakref.ref[Any]
    part: Part | None
    index: int


_MARK = "_gpumux_stale"
_LIVE = "_gpumux_live"
_fetching: dict[type, type] = {}  # by the plain class
_lost: dict[type, type] = {}  # by the plain class
_outdated: dict[type, type] = {}  # by the plain class
_plain: dict[type, type] = {}  # by any of them


def stale_mark(tensor: torch.Tensor) -> StaleMark | None:
    """The mark of a tensor, None if it is not stale."""
    found: StaleMark | None = tensor.__dict__.get(_MARK) if type(tensor) in _plain else None
    return found


def is_stale(tensor: torch.Tensor) -> bool:
    """Whether a job has newer values of the tensor."""
    mark = stale_mark(tensor)
    return mark is not None and (isinstance(mark.handler, weakref.ref) or mark.handler.has_newer)


def mark_stale(tensor: torch.Tensor, handler: ReadHandler, part: Part | None, index: int = -1) -> None:
    """Mark a tensor as stale."""
    kind = type(tensor)
    plain = _plain.get(kind, kind)
    tensor.__dict__[_MARK] = StaleMark(plain, handler if part is not None else weakref.ref(handler), part, index)
    wanted = lost(plain) if part is None else fetching(plain)
    if kind is not wanted:
        object.__setattr__(tensor, "__class__", wanted)


def mark_lost(tensor: torch.Tensor, *, live: bool = False) -> None:
    """Mark a tensor that was a gradient, or a view of one, and whose values exist nowhere. `live`: in the plain loop it
    still is a gradient's memory, so it can't be zeroed either."""
    unmark(tensor)
    if live:
        tensor.__dict__[_LIVE] = True
    object.__setattr__(tensor, "__class__", lost(type(tensor)))


def unmark(tensor: torch.Tensor) -> None:
    """Make the tensor plain again. Idempotent."""
    plain = _plain.get(type(tensor))
    if plain is not None:
        tensor.__dict__.pop(_MARK, None)
        tensor.__dict__.pop(_LIVE, None)
        object.__setattr__(tensor, "__class__", plain)


def fetching(plain: type) -> type:
    """The subclass of a tensor's class that fetches. It has the same name; copies and pickles are plain tensors."""
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
                "__repr__": folded(lambda self, **kwargs: repr(_ready(self))),
            },
        )
        _fetching[plain] = found
        _plain[found] = plain
        reducer = ForkingPickler._extra_reducers.get(plain)  # type: ignore[attr-defined]
        if reducer is not None:  # used by multiprocessing to send tensors
            ForkingPickler.register(found, lambda tensor: reducer(_ready(tensor)))
    return found


def _without_values(plain: Any, function: Callable[..., Any], refuse: Callable[[], Any], what: str) -> type:
    """A subclass of a tensor's class for tensors without values: `function` decides which functions are allowed,
    copying is refused."""

    @folded
    def copied(self: torch.Tensor, memo_or_protocol: Any) -> Any:
        return refuse()

    found: type = type(plain)(
        plain.__name__,
        (plain,),
        {
            "__module__": plain.__module__,
            "__torch_function__": classmethod(function),
            "__deepcopy__": copied,
            "__reduce_ex__": copied,
            "__repr__": lambda self, **kwargs: f"<a {what.format(tuple(self.shape))}>",
        },
    )
    _plain[found] = plain
    return found


def lost(plain: type) -> type:
    """The subclass of a tensor's class for gradients that were not kept. They may be described, zeroed and dropped;
    reading them raises StaleGradient."""
    if plain not in _lost:
        _lost[plain] = _without_values(plain, _lost_torch_function, _refuse, "gradient of size {} that was not kept")
    return _lost[plain]


def mark_replaced(tensor: torch.Tensor) -> None:
    """Mark a tensor that was a buffer or optimizer state and that a step replaced while it was stale: its values exist
    nowhere."""
    unmark(tensor)
    plain: type = type(tensor)
    if plain not in _outdated:
        what = "tensor of size {} that a step replaced"
        _outdated[plain] = _without_values(plain, _outdated_torch_function, _refuse_outdated, what)
    object.__setattr__(tensor, "__class__", _outdated[plain])


@folded
def _outdated_torch_function(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    if func in _DESCRIBES:
        with without_fetching():
            return func(*args, **(kwargs or {}))
    return _refuse_outdated()


def _refuse_outdated() -> Any:
    raise StaleState(
        "this tensor has no values here: it was replaced by a step of the job, and not read between the step that gave"
        " it its values and that one",
        "keep a copy when it is there (model.buffer.clone()), or return it from the step",
    )


def is_lost(tensor: torch.Tensor | None) -> bool:
    """Whether the tensor is a gradient that was not kept, or was replaced by a step."""
    kind = type(tensor)
    return kind in _plain and (_lost.get(_plain[kind]) is kind or _outdated.get(_plain[kind]) is kind)


def _refuse() -> Any:
    raise StaleGradient(
        "this gradient has no values here: it lived only inside the step that made it, or a later step has made"
        " another",
        "return it from the step, or its norm (return loss, model.weight.grad); where it is not wanted,"
        " optimizer.zero_grad() first",
    )


def _ready(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, fetched and of its own class."""
    _fetch([tensor])
    return tensor


@folded
def _deepcopy(self: torch.Tensor, memo: Any) -> Any:
    return copy.deepcopy(_ready(self), memo)


@folded
def _reduce_ex(self: torch.Tensor, protocol: Any) -> Any:
    return _ready(self).__reduce_ex__(protocol)


# ---- torch functions


def _methods(*names: str) -> Iterator[Any]:
    return (getattr(torch.Tensor, name) for name in names if hasattr(torch.Tensor, name))


def _getters(*names: str) -> Iterator[Any]:
    return (getattr(torch.Tensor, name).__get__ for name in names if hasattr(torch.Tensor, name))


_TENSOR: Any = torch.Tensor  # its attributes, read from the class, are descriptors

# Functions that only describe a tensor, or concern autograd's hooks.
_DESCRIBES = DESCRIBES | frozenset(
    (
        *_getters(
            "_backward_hooks", "_post_accumulate_grad_hooks", "_version", "grad_fn", "is_ipu", "is_leaf", "is_maia",
            "is_mkldnn", "is_mtia", "is_sparse_csr", "is_vulkan", "is_xla", "name", "names", "output_nr",
            "retains_grad", "volatile",
        ),
        *_methods(
            "has_names", "is_shared", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_",
            "retain_grad", "storage_offset",
        ),
        _TENSOR.requires_grad.__set__,
        _TENSOR._backward_hooks.__set__,
        torch.is_inference, torch._has_compatible_shallow_copy_type,
    )
)  # fmt: skip
_GET_GRAD, _SET_GRAD, _DELETE_GRAD = _TENSOR.grad.__get__, _TENSOR.grad.__set__, _TENSOR.grad.__delete__
_ZERO = frozenset((torch.Tensor.zero_, torch.zero_))
_SET_DATA = _TENSOR.data.__set__
# Functions that torch's compilers call on a gradient to make a fake tensor like it.
_OUTSIDE = frozenset(
    (
        *_methods("_is_view", "share_memory_", "untyped_storage"),
        _GET_GRAD,
        torch._C._functorch.is_functorch_wrapped_tensor,
    )
)
_MOVES = frozenset(_methods("to", "cpu", "cuda", "float", "double", "half", "bfloat16", "type"))


@folded
def _torch_function(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    kwargs = kwargs or {}
    if func in _DESCRIBES:
        with without_fetching():
            return func(*args, **kwargs)
    if func in (_GET_GRAD, _SET_GRAD, _DELETE_GRAD):
        return _about_gradient(func, args)
    if func in _ZERO or func is torch._foreach_zero_:
        _zeroed(args)
    _fetch((args, kwargs))
    return func(*args, **kwargs)


@folded
def _lost_torch_function(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    kwargs = kwargs or {}
    if func in _DESCRIBES or func in _OUTSIDE:
        with without_fetching():
            return func(*args, **kwargs)
    if func in _ZERO or func is torch._foreach_zero_:
        _zeroed(args)
        return func(*args, **kwargs)
    if func == _SET_DATA or func in _MOVES:  # model.to() uses them
        with without_fetching():
            out = func(*args, **kwargs)
        if isinstance(out, torch.Tensor) and out is not args[0]:
            object.__setattr__(out, "__class__", lost(type(out)))
        return out
    return _refuse()


def _zeroed(value: Any) -> None:
    """Prepare tensors that are about to be zeroed. A gradient need not be fetched for that, unless it shares memory."""
    for tensor in value if isinstance(value, (tuple, list)) else ():
        if isinstance(tensor, (tuple, list)):
            _zeroed(tensor)
        elif isinstance(tensor, torch.Tensor) and type(tensor) in _plain:
            if _LIVE in tensor.__dict__:
                _refuse()
            held = stale_mark(tensor)
            if held is None or (held.index >= 0 and held.part is not Part.MODEL and _owns_memory(tensor)):
                unmark(tensor)
                handler = held.handler if held is not None else None
                handler = handler() if isinstance(handler, weakref.ref) else handler
                if held is not None and handler is not None:
                    handler.gradient_zeroed(held.index, tensor)


def _owns_memory(tensor: torch.Tensor) -> bool:
    with without_fetching():
        return tensor.untyped_storage().nbytes() == tensor.nbytes


def _about_gradient(func: Any, args: Any) -> Any:
    held = stale_mark(args[0])
    if held is None or held.index < 0 or held.part is not Part.MODEL or isinstance(held.handler, weakref.ref):
        with without_fetching():
            return func(*args)
    if func == _GET_GRAD:
        return held.handler.gradient(held.index)
    value = args[1] if func == _SET_GRAD else None
    with without_fetching():
        func(*args)  # raises torch's own error for an invalid value
    held.handler.gradient_set(held.index, value)
    return None


def _found(value: Any) -> Iterator[torch.Tensor]:
    """The stale tensors in nested arguments."""
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
    wanted: dict[int, tuple[ReadHandler, set[Part]]] = {}
    for tensor in list(_found(value)):
        held = stale_mark(tensor)
        if held is not None and held.part is not None and not isinstance(held.handler, weakref.ref):
            wanted.setdefault(id(held.handler), (held.handler, set()))[1].add(held.part)
    for handler, parts in wanted.values():
        handler.fetch(frozenset(parts))
    for tensor in list(_found(value)):
        unmark(tensor)  # fetched meanwhile by another thread, or made with the class of a stale tensor


def fetch_arguments(values: Iterable[Any]) -> None:
    """Fetch the stale tensors among these. Raises StaleGradient for a gradient that was not kept."""
    behind = [value for value in values if type(value) in _plain]
    if behind and torch._C._is_torch_function_enabled():
        _fetch(behind)
        if any(type(value) in _outdated.values() for value in behind):
            _refuse_outdated()
        if any(map(is_lost, behind)):  # or the fetch found that it is lost
            _refuse()


# ---- modules


_behind: list[weakref.ref[Any]] = []
_handle: Any = None
_hooking = threading.RLock()  # reentrant, because the collector may call `watch_modules` inside it


@folded
def before_forward(module: torch.nn.Module, args: Any) -> None:
    """The global hook: fetch before a module chooses its path. In what torch.compile traces it does nothing:
    `_before_compiled` has fetched."""
    if torch.compiler.is_compiling():
        return
    for ref in list(_behind):
        handler = ref()
        if handler is not None and handler.has(module):
            handler.fetch(frozenset({Part.MODEL}))


def watch_modules(handler: ReadHandler, on: bool) -> None:
    """Set or remove `handler` as one that fetches before module calls. Idempotent."""
    with _hooking:
        _behind[:] = [ref for ref in _behind if ref() is not None and ref() is not handler]
        if on:
            _behind.append(weakref.ref(handler, _unwatch))
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
    if _behind:
        _watch_compiled()


# ---- calls of what torch.compile has compiled
#
# Dynamo can't trace a fetch. So what a compiled function may read is fetched before it runs: torch asks at each call,
# before it looks for compiled code, which compiler is to be used (`_callback_from_stance`), and that question is
# answered after a fetch.


_MOST_LOOKED_AT = 500  # objects; of a function that leads to more, all is taken to be read
_PLAIN_VALUES = (
    bool, int, float, complex, str, bytes, type(None), type, ModuleType, BuiltinFunctionType, torch.dtype, torch.device,
)  # fmt: skip


def _watch_compiled() -> None:
    """Have compiled functions fetch first, once there can be some. Idempotent."""
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    asked = getattr(frames, "_callback_from_stance", None)
    if asked is None or hasattr(asked, "fetches"):
        return

    def answer(callback: Any) -> Any:
        if _behind and callback not in (False, None):
            called = sys._getframe(1).f_locals
            _before_compiled([called.get("fn"), called.get("args"), called.get("kwargs")])
        return asked(callback)

    answer.fetches = True  # type: ignore[attr-defined]
    frames._callback_from_stance = answer


def _before_compiled(called: list[Any]) -> None:
    """Fetch what a compiled function and its arguments lead to: closures, globals that are named, attributes, items."""
    modules, tensors, whole = _reached(called)
    _fetch([tensor for tensor in tensors if type(tensor) in _plain])
    for ref in list(_behind):
        handler = ref()
        if handler is not None and (not whole or any(map(handler.has, modules))):
            handler.fetch(frozenset({Part.MODEL}))


def _reached(called: list[Any]) -> tuple[list[torch.nn.Module], list[torch.Tensor], bool]:
    """The modules and tensors that these objects lead to, and whether those are all."""
    modules: list[torch.nn.Module] = []
    tensors: list[torch.Tensor] = []
    seen: set[int] = set()
    waiting = called
    while waiting:
        value = waiting.pop()
        if isinstance(value, _PLAIN_VALUES) or id(value) in seen:
            continue
        seen.add(id(value))
        if max(len(seen), len(waiting)) > _MOST_LOOKED_AT:
            return modules, tensors, False
        if isinstance(value, torch.nn.Module):
            modules.append(value)
        elif isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
            named = [value.__globals__[name] for name in _names(value.__code__) if name in value.__globals__]
            waiting += [*cells, *named, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
            waiting.append(vars(value))
        elif isinstance(value, (dict, list, tuple, set, frozenset)):
            if len(value) > _MOST_LOOKED_AT:
                return modules, tensors, False
            waiting += value.values() if isinstance(value, dict) else value
        elif isinstance(value, MethodType):
            waiting += [value.__self__, value.__func__]
        else:
            waiting.append(getattr(value, "__dict__", None))
    return modules, tensors, True


def _names(code: CodeType) -> list[str]:
    """The names of globals and attributes in a function, and in those that are defined in it."""
    inner = [name for const in code.co_consts if isinstance(const, CodeType) for name in _names(const)]
    return [*code.co_names, *inner]


HOOKS = torch.nn.modules.module._global_forward_pre_hooks


# ---- functions of torch that read or share a tensor's memory and bypass `__torch_function__`
# (`torch.overrides.get_ignored_functions`)
#
# From the first job on, each of them is replaced by a function that fetches stale tensors and then calls the original.
# The replacements stay after the last job has closed, because torch's compilers remember functions by identity.


_lock = threading.Lock()
_installed = False

_SPARSE = ("coo", "csr", "csc", "bsr", "bsc", "compressed")
TORCH = ("tensor", "as_tensor", "asarray", *(f"sparse_{layout}_tensor" for layout in _SPARSE))
_METHODS = ("new", "new_tensor", "as_subclass", "set_")
_TRANSFORMS: tuple[tuple[Any, str], ...] = (  # functions that wrap the arguments of torch.func's transforms
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
    """A function that fetches the arguments of `plain` first."""

    @folded
    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        fetch_arguments((*args, *kwargs.values()))
        return plain(*args, **kwargs)

    return call


def _named(function: Callable[..., Any], module: str, name: str) -> Callable[..., Any]:
    """Give a function the name by which pickle finds the original, also in a process without gpumux: a DataLoader's
    worker gets its collate function in that way."""
    function.__module__, function.__qualname__ = module, name
    return function


def _of_lists(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A function that fetches the arguments of `plain`, some of which are lists of tensors."""

    @folded
    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            fetch_arguments(value if isinstance(value, (list, tuple)) else (value,))
        return plain(*args, **kwargs)

    return call


def _of_nested(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A function that fetches the arguments of `plain` first, also those in lists, tuples and dictionaries."""

    @folded
    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        fetch_arguments(pytree.tree_leaves((args, kwargs)))
        return plain(*args, **kwargs)

    return call


def _of_scripted(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A function that fetches the parameters of a TorchScript module first, because only C++ code reads them."""

    @folded
    @functools.wraps(plain)
    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(module, torch.nn.Module):
            before_forward(module, args)
        return plain(module, *args, **kwargs)

    return call


def _then_watched(compiles: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile, which imports its compiler at the first call."""

    @functools.wraps(compiles)
    def call(*args: Any, **kwargs: Any) -> Any:
        made = compiles(*args, **kwargs)
        if _behind:
            _watch_compiled()
        return made

    return call


def install() -> None:
    """Put the replacements in place. Idempotent."""
    global _installed
    with _lock:
        if _installed:
            return
        table = (
            _builtins._get_builtin_table()
        )  # torch.jit fills it at its first use, with the functions that `torch` has then
        for name in TORCH:
            plain = getattr(torch, name)
            asking = _named(_asking(plain), "torch", name)
            if id(plain) in table:
                _builtins._register_builtin(asking, table[id(plain)])
            setattr(torch, name, asking)
        torch.compile = _then_watched(torch.compile)
        for name in _METHODS:
            asking = _asking(getattr(torch.Tensor, name))
            setattr(torch.Tensor, name, _named(asking, "torch", f"Tensor.{name}"))
        function = torch.jit.ScriptFunction
        function.__call__ = _of_nested(function.__call__)  # type: ignore[method-assign]
        for owner, name in _TRANSFORMS:
            setattr(owner, name, _asking(getattr(owner, name)))
        to_dlpack = _named(_asking(torch._C._to_dlpack), "torch._C", "_to_dlpack")
        for module, name in (torch._C, "_to_dlpack"), (torch, "to_dlpack"), (torch.utils.dlpack, "to_dlpack"):
            setattr(module, name, to_dlpack)
        for made, name in ((torch.Tensor, "_make_subclass"), (torch.nn.Parameter, "__new__")):
            setattr(made, name, staticmethod(_asking(getattr(made, name))))
        torch.nested.nested_tensor = _of_lists(torch.nested.nested_tensor)
        torch.autograd._make_grads = _of_lists(torch.autograd._make_grads)  # backward() and grad() call it first
        for scripted in _script.ScriptModule, _script.RecursiveScriptModule:
            for name in _SCRIPTED:
                if name in vars(scripted):
                    setattr(scripted, name, _of_scripted(vars(scripted)[name]))
        freeze = _of_scripted(_freeze.freeze)
        for owner in (torch.jit, _freeze):
            setattr(owner, "freeze", freeze)  # noqa: B010  mypy knows neither name
        _installed = True


# ---- the script's own tensors over a job's storages: `p.data`, detached views, windows onto a flat buffer


log = logging.getLogger("gpumux.client")
_use_count = torch._C._storage_Use_Count


class Aliases:
    """Finds other tensors over a job's storages.

    A storage counts its references: tensors, and one for its Python handle. If there are more than are known, tensors
    are searched: among the newest objects of the process, and if these are not all, among all of them, which takes
    about a tenth of a second. References without a Python object (a DLPack capsule, a graph that autograd keeps) are
    not found. They cause another search each time, because a tensor may have taken the place of one."""

    def __init__(self) -> None:
        self._found: list[weakref.ref[torch.Tensor]] = []
        self._in_vain = 0

    def of(self, tensors: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, int]]:
        """Other tensors over the storages of `tensors`, each with the `_cdata` of its storage. Must be called with
        torch functions disabled."""
        mine = set(map(id, tensors))
        storages = {s._cdata: s for s in (t.untyped_storage() for t in tensors)}
        known: dict[int, int] = dict.fromkeys(storages, 1)  # the handle in `storages`
        for tensor in {id(t): t for t in tensors}.values():
            known[tensor.untyped_storage()._cdata] += 1
        found = [
            (t, key)
            for r in self._found
            if (t := r()) is not None and id(t) not in mine and (key := _over(t, storages))
        ]
        alive = list[tuple[torch.Tensor, int]]()
        for generation in (0, 1, None):
            alive += found
            for tensor, key in found:
                known[key] += not is_traceable_wrapper_subclass(tensor)  # whose inner tensor has the reference
            if all(_use_count(key) <= known[key] for key in storages):
                break
            found = search(storages, mine.union(id(t) for t, _ in alive), generation)
        else:
            alive += found
            self._tell(sum(known.values()) + len(found) < sum(map(_use_count, storages)))
        self._found = [weakref.ref(t) for t, _ in alive]
        return alive

    def _tell(self, in_vain: bool) -> None:
        self._in_vain += in_vain
        if in_vain and self._in_vain == _OFTEN:
            log.warning(
                "what was computed from a job's local model, or from other tensors of its step, keeps a graph of"
                " autograd from step to step, which costs a search of all objects (about 0.1 s) at each step: evaluate"
                " under torch.no_grad(), or del it before the next step"
            )


_OFTEN = 10  # searches in vain, after which a warning says what they cost


def search(
    storages: Container[int], mine: Container[int] = (), generation: int | None = None
) -> list[tuple[torch.Tensor, int]]:
    """All tensors over these storages that Python objects hold, except those whose ids are in `mine`, each with the
    `_cdata` of its storage. `generation`: of the garbage collector, the only one searched. Must be called with torch
    functions disabled."""
    return [(t, key) for t in _all_tensors(generation) if id(t) not in mine and (key := _over(t, storages))]


def _all_tensors(generation: int | None) -> list[torch.Tensor]:
    """All tensors that the garbage collector knows, or those of a generation.

    `gc.freeze()` takes objects off its lists. That is undone: it only saves time, and tensors that were missed would be
    read as they were before the job's steps.

    In a single call of C code, during which no other thread runs, and which clears the collector's list. If another
    thread is filling a tuple (`tuple(x for x in y)`), that list has a reference to the unfinished tuple, for which the
    thread would get a SystemError."""
    kinds = set[type]()
    found = [torch.Tensor]
    while found:
        kinds.update(found)
        found = [kind for base in found for kind in type.__subclasses__(base) if kind not in kinds]
    if generation is None:
        undo_freeze()
    first, second, third = tee(map(gc.get_objects, (generation,)), 3)  # the same list, three times
    chosen = map(partial(map, kinds.__contains__), map(partial(map, type), second))
    tensors = chain.from_iterable(map(compress, first, chosen))
    return list(chain(tensors, map(list.clear, third)))[:-1]  # without the result of clear()


def undo_freeze() -> None:
    """Have the collector list all objects again, if the script has called `gc.freeze()`."""
    if gc.get_freeze_count():
        gc.unfreeze()


def _over(tensor: torch.Tensor, storages: Container[int]) -> int:
    """The storage among these over which the tensor, or the values of a sparse or nested tensor, lies; 0 for none."""
    if is_traceable_wrapper_subclass(tensor):
        inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        return next((key for part in inner if (key := _over(part, storages))), 0)
    try:
        if tensor.layout is not torch.strided:
            tensor = tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()
        key = tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # a tensor without a storage
        return 0
    return key if key in storages else 0


# ---- an optimizer's stale state, which fetches before it is read


class FetchingState(defaultdict[Any, Any]):
    """Takes the place of `optimizer.state`. Every operation fetches and is then made on the real dictionary."""

    def __init__(self, handler: ReadHandler, optimizer: Any) -> None:
        super().__init__(dict)
        self._handler = handler
        self._optimizer = weakref.ref(optimizer)
        self.plain = optimizer.state

    def is_of(self, handler: ReadHandler) -> bool:
        return self._handler is handler

    def real(self) -> Any:
        optimizer = self._optimizer()
        if optimizer is not None and optimizer.state is self:
            self._handler.fetch(frozenset({Part.OPTIMIZER}))
            self.plain = optimizer.state
        return self.plain

    @folded
    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(self.real(), memo)

    @folded
    def __bool__(self) -> bool:
        return bool(self.real())


def plain_state(state: Any) -> Any:
    """An optimizer's state as its own dictionary, without a fetch."""
    return state.plain if isinstance(state, FetchingState) else state


def _forwarding(name: str) -> Callable[..., Any]:
    @folded
    def method(self: FetchingState, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.real(), name)(*args, **kwargs)

    method.__name__ = name
    return method


def _forward(names: Iterable[str]) -> None:
    for name in names:
        setattr(FetchingState, name, _forwarding(name))


_forward(
    (
        "__contains__", "__copy__", "__delitem__", "__eq__", "__ge__", "__getitem__", "__gt__", "__ior__", "__iter__",
        "__le__", "__len__", "__lt__", "__missing__", "__ne__", "__or__", "__reduce__", "__reduce_ex__", "__repr__",
        "__reversed__", "__ror__", "__setitem__", "__str__", "clear", "copy", "get", "items", "keys", "pop", "popitem",
        "setdefault", "update", "values",
    )
)  # fmt: skip
