"""The kinds of watches: of a dictionary's entries, a list, a closure cell, a flag, and others."""

from __future__ import annotations

import collections
import collections.abc
import contextvars
import dataclasses
import datetime
import decimal
import fractions
import io
import os
import pickle
import random
import re
import types
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, filterfalse, repeat
from operator import attrgetter, call, is_, itemgetter
from typing import Any

import numpy
import torch

from gpumux.capture.fetching import HOOKS, before_forward
from gpumux.capture.state import ABSENT, UNRETURNED, Reading, Watch
from gpumux.capture.symbols import is_number
from gpumux.errors import CaptureError
from gpumux.program.ir import Numerics, Op, Program, TensorRef
from gpumux.program.validate import leaves, op_args

# ---- process-wide settings that change results without being operators
#
# Torch has two interfaces for the precision of float32 work, `set_float32_matmul_precision` and
# `torch.backends.*.fp32_precision`. Reading the first raises after the second was used, so both are read where torch
# stores them: by backend and kind of operator.


_precision: Callable[[str, str], str] = torch._C._get_fp32_precision_getter
_BACKENDS = ("mkldnn", "cuda")
_MATMUL = {"none": "highest", "ieee": "highest", "tf32": "high", "bf16": "medium"}
_CONV = {"none": "ieee", "ieee": "ieee", "tf32": "tf32"}  # for convolutions and recurrent layers on a GPU
_ON_THE_CPU = ("none", "ieee")
_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "mv", "addmv")
_CONVOLUTIONS = ("convolution", "convolution_backward", "_cudnn_rnn", "_cudnn_rnn_backward")


def precisions() -> Watch:
    """The precision for every backend of this torch and every kind of operator."""
    getters = [partial(_precision, b, kind) for b in _BACKENDS for kind in ("matmul", "conv", "rnn")]
    return Watch(_MODES, partial(map, call, getters), lambda i: _MODES_CHANGED, lambda old: None, content=True)


def numerics_now(device: str = "cpu") -> Numerics:
    """The settings under which a Program for this device type must run. Raises CaptureError for a setting that a
    Program can't contain."""
    tiny = torch.tensor(1e-310, dtype=torch.float64)
    backend = "mkldnn" if device == "cpu" else "cuda"
    return Numerics(
        matmul_precision=_MATMUL[_precision(backend, "matmul")],
        deterministic=torch.are_deterministic_algorithms_enabled(),
        flush_denormal=bool((tiny * 1.0).item() == 0.0),
        mkldnn=bool(torch.backends.mkldnn.enabled),
        default_dtype=str(torch.get_default_dtype()).removeprefix("torch."),
        conv_precision=_of_convolutions(backend),
    )


def uses_tf32(program: Program) -> bool:
    """Whether a GPU rounds float32 to TF32 in a Program. Then algorithms for one operator differ by more than in
    float32."""
    rounded: tuple[str, ...] = _CONVOLUTIONS if program.numerics.conv_precision == "tf32" else ()
    if program.numerics.matmul_precision != "highest":
        rounded += _PRODUCTS
    targets = {f"aten.{name}.default" for name in rounded}
    return any(
        op.target in targets and any(program.views[view].dtype == "float32" for view in _tensors(op))
        for op in program.ops
    )


def _of_convolutions(backend: str) -> str:
    """The precision of convolutions and recurrent layers, for which a GPU has a separate switch."""
    conv, rnn = (_precision(backend, kind) for kind in ("conv", "rnn"))
    if backend == "cuda":
        if _CONV[conv] != _CONV[rnn]:
            raise CaptureError(
                f"torch.backends.cudnn.conv.fp32_precision is {conv!r} and torch.backends.cudnn.rnn.fp32_precision "
                f"{rnn!r}, and jobs take one setting along for both",
                "set both to the same before you submit, as torch.backends.cudnn.allow_tf32 does",
            )
        return _CONV[conv]
    for kind, found in (("conv", conv), ("rnn", rnn)):
        if found not in _ON_THE_CPU:
            name = f"torch.backends.{backend}.{kind}.fp32_precision"
            raise CaptureError(
                f"{name} is {found!r}, itself or by way of torch.backends.fp32_precision, and jobs can't take that"
                " along",
                f"set {name} = {_ON_THE_CPU[-1]!r} before you submit (and in runs you compare with)",
            )
    return Numerics().conv_precision


def _tensors(op: Op) -> Iterator[int]:
    return (leaf.view for leaf in leaves(op_args(op)) if isinstance(leaf, TensorRef))


# ---- watches
#
# What is read at every call is read by functions of C alone where that can be (Watch.present): a step of a large model
# has hundreds of watches.


def entries(label: str, space: Any, keys: Sequence[Any], *, flag: bool = False) -> Watch:
    """Some entries of a dictionary (attributes of an object, globals). Reading raises KeyError if one is gone."""
    names = tuple(keys)
    getter = itemgetter(*names) if len(names) > 1 else itemgetter(names[0], names[0])  # always a tuple

    def name(i: int) -> str:
        key = names[i % len(names)]
        return f"{label}.{key}" if label else str(key)

    def restore(old: Reading) -> None:
        for key, value in zip(names, old, strict=False):
            space[key] = value

    def put(i: int, value: Any) -> None:
        space[names[i % len(names)]] = value

    return Watch(label, partial(getter, space), name, restore, flag, put=None if flag else put, home=space)


def listed(label: str, space: dict[str, Any], key: str) -> Watch:
    """The numbers in the list that an attribute holds, which may be another list at the next call."""

    def read() -> Reading:
        held = space[key]
        return tuple(held) if type(held) is list else (held,)

    def restore(old: Reading) -> None:
        if type(space[key]) is list:
            space[key][:] = old
        else:
            space[key] = old[0]

    def put(i: int, value: Any) -> None:
        if type(space[key]) is list:
            space[key][i] = value
        else:
            space[key] = value

    return Watch(label, read, lambda i: f"{label}.{key}[{i}]", restore, put=put, home=space)


def codes(functions: Sequence[types.FunctionType]) -> Watch:
    """The code and the defaults of functions, which a notebook's autoreload replaces in place."""
    get = attrgetter("__code__"), attrgetter("__defaults__"), attrgetter("__kwdefaults__")

    def name(i: int) -> str:
        return f"the code of {functions[i % len(functions)].__qualname__}"

    def restore(old: Reading) -> None:
        for i, fn in enumerate(functions):
            fn.__code__, fn.__defaults__, fn.__kwdefaults__ = old[i :: len(functions)]

    return Watch("functions", partial(map, call, [partial(g, fn) for g in get for fn in functions]), name, restore)


def types_of(objects: Sequence[tuple[str, Any]]) -> Watch:
    """The classes of objects."""
    values = [value for _, value in objects]

    def restore(old: Reading) -> None:
        for value, cls in zip(values, old, strict=True):
            if type(value) is not cls:
                value.__class__ = cls

    return Watch("classes", partial(map, type, values), lambda i: f"the class of {objects[i][0]}", restore)


def dictionaries_of(objects: Sequence[tuple[str, Any]]) -> Watch | None:
    """Which dictionaries hold the attributes of objects: the script may give an object another one. None if no object
    has one."""
    spaces = [(label, value, dictionary_of(value)) for label, value in objects]
    # Not where a class makes one at each reading.
    found = [one for one in spaces if one[2] is not None and dictionary_of(one[1]) is one[2]]
    values = [value for _, value, _ in found]

    def restore(old: Reading) -> None:
        for _, value, space in found:  # their ids are in `old`
            if dictionary_of(value) is not space:
                object.__setattr__(value, "__dict__", space)

    def present() -> Iterator[int]:
        return map(id, map(object.__getattribute__, values, repeat("__dict__")))

    def name(i: int) -> str:
        return f"the dictionary of {found[i][0]}'s attributes"

    return Watch("dictionaries", present, name, restore, content=True, addresses=True) if found else None


def dictionary_of(value: Any) -> dict[str, Any] | None:
    """The dictionary of an object's attributes. Avoids its class's `__getattr__`."""
    try:
        space = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return space if isinstance(space, dict) else None


def structures(found: Sequence[torch.nn.Module], kinds: Sequence[str]) -> Watch:
    """Which dictionaries of these kinds modules have: `module._forward_hooks = OrderedDict()` drops all hooks."""
    spaces = [vars(module) for module in found]
    get = itemgetter(*kinds)

    def name(i: int) -> str:
        return f"{type(found[i // len(kinds)]).__name__}.{kinds[i % len(kinds)]}"

    def restore(old: Reading) -> None:
        for i, held in enumerate(old):
            spaces[i // len(kinds)][kinds[i % len(kinds)]] = held

    return Watch("structures", lambda: chain.from_iterable(map(get, spaces)), name, restore, addresses=True)


def class_attributes(label: str, cls: type, keys: Sequence[str]) -> Watch:
    """Class attributes, which every instance sees."""
    names = tuple(keys)
    space = cls.__dict__

    def restore(old: Reading) -> None:
        for key, value in zip(names, old, strict=False):
            if space.get(key) is not value:  # `__dict__`, which code may name, can't be set
                setattr(cls, key, value)

    def put(i: int, value: Any) -> None:
        setattr(cls, names[i], value)

    return Watch(
        label, partial(map, space.get, names), lambda i: f"{label}.{names[i]}", restore, put=put, home=cls
    )  # fmt: skip


def values(label: str, space: dict[Any, Any], *, buffers: bool = False) -> Watch:
    """Every entry of a module's parameters, children or hooks, by order."""
    view = space.values()

    def restore(old: Reading, keys: tuple[Any, ...] = tuple(space)) -> None:
        space.clear()
        space.update(zip(keys, old, strict=False))

    def name(i: int) -> str:
        return f"{label}[{list(space)[i]!r}]"

    if space is HOOKS:  # gpumux's own hook comes and goes, and must not make a step another variant
        return Watch(label, partial(filterfalse, partial(is_, before_forward), view), name, restore)
    return Watch(label, partial(tuple, view), name, restore, parts=(view,), buffers=buffers)


def items(label: str, space: dict[Any, Any]) -> Watch:
    """A user's dictionary: its keys, in order, and its values. Entries that a trace or a step adds to it are ignored (a
    hook may collect activations)."""

    # An OrderedDict keeps an order of its own.
    kind: Any = collections.OrderedDict if isinstance(space, collections.OrderedDict) else dict

    own = {k for k, v in kind.items(space) if not isinstance(v, UNRETURNED)}

    def read() -> Reading:
        return tuple([x for k, v in kind.items(space) if k in own or not isinstance(v, UNRETURNED) for x in (k, v)])

    def name(i: int) -> str:
        keys = list(kind.keys(space))
        return f"{label}[{keys[min(i // 2, len(keys) - 1)]!r}]" if keys else label

    def restore(old: Reading) -> None:
        left = {k: v for k, v in kind.items(space) if isinstance(v, UNRETURNED) and k not in own}
        kind.clear(space)
        kind.update(space, left)
        kind.update(space, zip(old[::2], old[1::2], strict=True))

    def put(i: int, value: Any) -> None:
        kind.__setitem__(space, read()[i - 1], value)

    return Watch(
        label, read, name, restore, parts=(kind.keys(space), kind.values(space)), put=put, home=space,
        at=slice(1, None, 2),
    )  # fmt: skip


def appeared(label: str, space: dict[str, Any], wanted: set[str]) -> Watch:
    """Names that the step's code uses and that an object did not have at first, because code may test for an attribute
    (`hasattr`). Only the number of attributes is read as long as it stays the same."""
    known = frozenset(space)

    def read() -> Reading:
        names = [k for k, v in space.items() if k not in known and k in wanted and not isinstance(v, UNRETURNED)]
        return (tuple(sorted(names)),)

    def restore(old: Reading) -> None:
        for name in set(read()[0]) - set(old[0]):
            space.pop(name, None)

    return Watch(label, read, lambda i: f"{label}'s attributes", restore, sized=space)


def optional(label: str, space: dict[Any, Any], keys: Sequence[Any]) -> Watch:
    """Entries that may appear and disappear: attributes that would hide those of the class."""
    names = tuple(keys)

    def restore(old: Reading) -> None:
        for key, value in zip(names, old, strict=True):
            if value is ABSENT:
                space.pop(key, None)
            else:
                space[key] = value

    def put(i: int, value: Any) -> None:
        restore((*read()[:i], value, *read()[i + 1 :]))

    def read() -> Reading:
        return tuple(map(space.get, names, repeat(ABSENT)))

    return Watch(
        label, partial(map, space.get, names, repeat(ABSENT)), lambda i: f"{label}.{names[i]}", restore,
        put=put, home=space,
    )  # fmt: skip


_ELEMENTS: tuple[Any, ...] = (list, set, collections.deque, tuple, frozenset)


def kind_of(items: Any) -> Any:
    """The type of Python's own whose methods show what a container holds. A user's class may iterate over something
    else, and do anything while it does."""
    return next(kind for kind in _ELEMENTS if isinstance(items, kind))


def shows_all(items: Any, kind: Any) -> bool:
    """Whether a container's class shows what it holds as `kind` does."""
    methods = ("__iter__", "__len__", "keys", "items", "values")
    return all(getattr(type(items), name, None) is getattr(kind, name, None) for name in methods)


def sequence(label: str, items: Any) -> Watch:
    """A list, deque or set, element by element."""
    kind = kind_of(items)
    ordered = kind is not set
    plain = type(items).__module__ in ("builtins", "collections")  # other types may override iteration

    def read() -> Reading:
        now = kind.__iter__(items)
        return tuple(now) if ordered else tuple(sorted(now, key=repr))

    def restore(old: Reading) -> None:
        kind.clear(items)
        kind.extend(items, old) if ordered else kind.update(items, old)

    def put(i: int, value: Any) -> None:
        items[i] = value

    return Watch(
        label, read, lambda i: f"{label}[{i}]", restore, parts=(items,) if plain else None,
        put=put if plain and ordered else None, home=items,
    )  # fmt: skip


def array(label: str, data: numpy.ndarray[Any, Any]) -> Watch:
    """A numpy array, by its bytes; an array of objects by their identity."""
    if data.dtype.hasobject:
        return Watch(label, lambda: tuple(data.flat), lambda i: label, lambda old: None)

    def restore(old: Reading) -> None:
        data[...] = numpy.frombuffer(old[0], dtype=data.dtype).reshape(data.shape)

    read = lambda: (data.tobytes(), data.shape, data.dtype)  # noqa: E731
    return Watch(label, read, lambda i: label, restore, content=True)


def memory(label: str, owner: Any) -> Watch:
    """An object with the buffer protocol: bytearray, array.array, ctypes, mmap."""

    def restore(old: Reading) -> None:
        memoryview(owner).cast("B")[:] = old[0]

    return Watch(label, lambda: (memoryview(owner).tobytes(),), lambda i: label, restore, content=True)


def pickled(label: str, owner: Any, dump: Callable[[Any], bytes]) -> Watch:
    """An object of C whose content can only be compared by its pickle. A step's change of it can't be undone."""
    return Watch(label, lambda: (dump(owner),), lambda i: label, lambda old: None, content=True)


def called(label: str, get: Callable[[], Any]) -> Watch:
    """The value that a library's object returns (a context variable's value)."""
    return Watch(label, lambda: (get(),), lambda i: label, lambda old: None)


def cell(label: str, box: types.CellType) -> Watch:
    """A closure variable."""

    def read() -> Reading:
        try:
            return (box.cell_contents,)
        except ValueError:
            return ()

    def restore(old: Reading) -> None:
        if old:
            box.cell_contents = old[0]

    def put(i: int, value: Any) -> None:
        box.cell_contents = value

    return Watch(label, read, lambda i: label, restore, put=put, home=box)


def gradients_wanted(params: Sequence[torch.Tensor]) -> Watch:
    get = attrgetter("requires_grad")

    def restore(old: Reading) -> None:
        for p, value in zip(params, old, strict=True):
            if p.requires_grad != value:
                p.requires_grad_(value)

    return Watch("requires_grad", partial(map, get, params), lambda i: "requires_grad", restore, flag=True)


def gradients_there(tensors: Sequence[torch.Tensor]) -> Watch:
    """Which of these tensors, which are no parameters of the job, have a gradient."""
    get = attrgetter("grad")
    return Watch(
        "gradients", lambda: [get(t) is not None for t in tensors], lambda i: "the gradient of a tensor of no model",
        lambda old: None,
    )  # fmt: skip


def parameter_hooks(params: Sequence[torch.Tensor]) -> Watch:
    """The hooks of the parameters."""
    before, after = attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks")
    id_of = {id(p): f"parameter {i}" for i, p in enumerate(params)}

    def read() -> Reading:
        found = [*map(before, params), *map(after, params)]
        if not any(found):
            return ()
        owners = zip([*params, *params], found, strict=True)
        return tuple([x for p, hooks in owners if hooks for x in (id_of[id(p)], *hooks.values())])

    return Watch("parameter hooks", read, lambda i: "a parameter's hooks", lambda old: None)


def slots(label: str, owner: Any, names: tuple[str, ...]) -> Watch:
    """Attributes of an object without a dictionary."""

    def restore(old: Reading) -> None:
        for name, value in zip(names, old, strict=True):
            setattr(owner, name, value)

    def put(i: int, value: Any) -> None:
        setattr(owner, names[i], value)

    return Watch(
        label, lambda: tuple([getattr(owner, n, None) for n in names]), lambda i: f"{label}.{names[i]}", restore,
        put=put, home=owner,
    )  # fmt: skip


def groups(label: str, optimizer: Any) -> Watch:
    """An optimizer's groups and parameters, its flags, and whether a number is a tensor. The numbers themselves are
    lifted to host scalars."""

    def read() -> Reading:
        out: list[Any] = []
        for group in optimizer.param_groups:
            out += group["params"]
            for key, value in group.items():
                if key != "params":
                    out.append(key)
                    _kinds(value, out)
        return tuple(out)

    return Watch(f"{label}.param_groups", read, lambda i: f"{label}.param_groups", lambda old: None)


def _kinds(value: Any, out: list[Any]) -> None:
    kind = type(value)
    if kind is float or kind is int or kind is torch.SymFloat or kind is torch.SymInt:
        out.append("number")
    elif kind is tuple or kind is list:
        out.append(kind)
        for item in value:
            _kinds(item, out)
        out.append("end")
    elif isinstance(value, torch.Tensor):
        out.append(value.dtype if value.dim() == 0 and value.device.type == "cpu" else value)
    else:
        out.append("number" if is_number(value) else value)


_MODES = "torch's modes"
_MODES_CHANGED = "torch's modes (autocast, grad mode, precision)"


def modes() -> Watch:
    """Torch's settings that decide which operators run. Read below torch's Python functions, because this happens at
    every call."""
    c, autocast, dtype = torch._C, torch.is_autocast_enabled, torch.get_autocast_dtype
    getters = (
        torch.is_grad_enabled, torch.is_inference_mode_enabled, partial(autocast, "cpu"), partial(autocast, "cuda"),
        partial(dtype, "cpu"), partial(dtype, "cuda"), torch.is_autocast_cache_enabled,
        c._get_deterministic_algorithms, torch.get_default_dtype, c._get_mkldnn_enabled, c._get_cudnn_enabled,
        c._get_flash_sdp_enabled, c._get_mem_efficient_sdp_enabled, c._get_math_sdp_enabled,
        partial(getattr, torch.backends.mha, "_is_fastpath_enabled"),
    )  # fmt: skip
    set_grad, set_on, set_dtype = torch.set_grad_enabled, torch.set_autocast_enabled, torch.set_autocast_dtype
    set_cached, set_default = torch.set_autocast_cache_enabled, torch.set_default_dtype

    def restore(old: Reading) -> None:
        """Restore the thread's settings. Precision and the choice of kernels belong to the process and stay."""
        set_grad(old[0])
        set_on("cpu", old[2])
        set_on("cuda", old[3])
        set_dtype("cpu", old[4])
        set_dtype("cuda", old[5])
        set_cached(old[6])
        set_default(old[8])

    return Watch(_MODES, partial(map, call, getters), lambda i: _MODES_CHANGED, restore)


def generator_state(source: Any) -> str:
    """The state of one of Python's or numpy's random generators, as text."""
    if isinstance(source, numpy.random.Generator):
        return repr(source.bit_generator.state)
    if hasattr(source, "getstate"):
        return repr(source.getstate())
    return repr([v.tolist() if isinstance(v, numpy.ndarray) else v for v in source.get_state()])


def random_states(more: Sequence[tuple[str, Any]]) -> list[tuple[str, str]]:
    """(name, state) of Python's and numpy's own generators, and of those in `more`."""
    own: list[tuple[str, Any]] = [("random", random), ("numpy.random", numpy.random)]
    return [(name, generator_state(source)) for name, source in [*own, *more]]


# ---- objects whose code is not walked: a library's containers, buffers, handles
#
# A step can hold any object of the standard library or of C. Each is watched by its attributes, its bytes or its
# pickle. An object that shows none of its content is refused, not ignored.


MOST_BYTES = 1 << 20  # read at every call
_FIXED = (
    decimal.Decimal, fractions.Fraction, datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo,
    os.PathLike, re.Pattern, uuid.UUID, range, slice, io.IOBase, types.BuiltinFunctionType,
    types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType, types.GetSetDescriptorType,
    types.MemberDescriptorType, types.ClassMethodDescriptorType, types.CodeType, types.EllipsisType,
    types.NotImplementedType, types.GenericAlias, types.UnionType, BaseException,
)  # fmt: skip
# Objects that affect how a program runs, waits, shows or imports, but not what it computes.
_APPARATUS = frozenset(
    (
        "logging",
        "threading",
        "_thread",
        "inspect",
        "typing",
        "abc",
        "_abc",
        "socket",
        "subprocess",
        "concurrent",
        "asyncio",
        "queue",
        "_queue",
        "warnings",
        "operator",
        "_operator",
        "contextlib",
        "importlib",
        "_frozen_importlib",
        "_frozen_importlib_external",
        "traceback",
        "time",
        "signal",
        "selectors",
        "tempfile",
        "types",
        "tqdm",
        "matplotlib",
        "zmq",
        "gpumux",
        "pytest",
        "_pytest",
        "pluggy",
    )
)
_LOCKS = ("multiprocessing.synchronize", "multiprocessing.context")


def fixed(value: Any) -> bool:
    """Whether an object can't change, or holds nothing that a step computes with."""
    cls = type(value)
    if isinstance(value, _FIXED) or cls is object or cls.__module__ in _LOCKS:
        return True
    return cls.__module__.split(".")[0] in _APPARATUS and cls is not types.SimpleNamespace


def memory_of_value(label: str, value: Any) -> Watch | None:
    """A watch of the bytes of an object with the buffer protocol; None for any other."""
    try:
        size = memoryview(value).nbytes
    except TypeError:
        return None
    if size > MOST_BYTES:
        raise _too_large(label)
    return memory(label, value)


def inner(label: str, value: Any, attributes: bool) -> tuple[list[Watch], list[tuple[str, Any]]]:
    """(watches, objects to visit next) for the content of a library's object besides its attributes. `attributes`:
    whether it has a dictionary of them. Raises CaptureError for an object that can't be watched."""
    if isinstance(value, contextvars.ContextVar):
        return [called(label, lambda: value.get(None))], [(label, value.get(None))]
    if isinstance(value, weakref.ref):
        return [called(label, value)], [(label, value())]
    if isinstance(value, types.MappingProxyType):
        mapping = Watch(
            label,
            lambda: (*value.keys(), *value.values()),
            lambda i: label,
            lambda old: None,
            parts=(value.keys(), value.values()),
        )
        return [mapping], [(f"{label}[{k!r}]", v) for k, v in value.items()]
    if isinstance(value, dataclasses.Field):  # its metadata can't be pickled
        names = ("default", "default_factory", "metadata")
        return [slots(label, value, names)], [(f"{label}.{name}", getattr(value, name)) for name in names]
    if isinstance(value, collections.abc.Iterator):
        raise CaptureError(
            f"the step draws from the iterator {label}", "draw outside the step and pass what it gave as an argument"
        )
    seen = memory_of_value(label, value)
    if seen is not None:
        return [seen], []
    return ([] if attributes else [_pickled(label, value)]), []


def _pickled(label: str, value: Any) -> Watch:
    try:
        size = len(pickle.dumps(value))
    except Exception as error:
        raise CaptureError(
            f"the step reaches {label}, a {type(value).__module__}.{type(value).__name__}, and changes of it can't be"
            " noticed",
            "read it outside the step and pass what it gave as an argument",
        ) from error
    if size > MOST_BYTES:
        raise _too_large(label)
    return pickled(label, value, pickle.dumps)


def _too_large(label: str) -> CaptureError:
    return CaptureError(f"{label} is too large to watch for changes", "pass it to the step as a tensor argument")
