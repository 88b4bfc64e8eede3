"""Single things watched for change: a dictionary's entries, a list, a closure cell, a flag."""

from __future__ import annotations

import random
import types
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any

import numpy
import torch

from gpumux.client.fetching import HOOKS, OtherHooks
from gpumux.client.numerics import precisions
from gpumux.client.reading import ABSENT, Reading, Watch
from gpumux.client.unreturned import UNRETURNED


def entries(label: str, space: Any, keys: Sequence[Any], *, flag: bool = False) -> Watch:
    """Chosen entries of a dictionary (attributes of an object, globals). Reading raises KeyError for
    one that has gone."""
    names = tuple(keys)
    getter = itemgetter(*names) if len(names) > 1 else itemgetter(names[0], names[0])  # always a tuple

    def name(i: int) -> str:
        key = names[i % len(names)]
        return f"{label}.{key}" if label else str(key)

    def restore(old: Reading) -> None:
        for key, value in zip(names, old, strict=False):
            space[key] = value

    return Watch(label, partial(getter, space), name, restore, flag)


def class_attributes(label: str, cls: type, keys: Sequence[str]) -> Watch:
    """Class attributes, which every instance sees."""
    names = tuple(keys)
    space = cls.__dict__

    def restore(old: Reading) -> None:
        for key, value in zip(names, old, strict=False):
            setattr(cls, key, value)

    return Watch(
        label, lambda: tuple([space.get(k) for k in names]), lambda i: f"{label}.{names[i]}", restore
    )  # fmt: skip


def values(label: str, space: dict[Any, Any]) -> Watch:
    """Every entry of a module's parameters, children or hooks, by order."""
    view = OtherHooks(space) if space is HOOKS else space.values()

    def restore(old: Reading, keys: tuple[Any, ...] = tuple(space)) -> None:
        space.clear()
        space.update(zip(keys, old, strict=False))

    return Watch(label, partial(tuple, view), lambda i: f"{label}[{list(space)[i]!r}]", restore, parts=(view,))


def items(label: str, space: dict[Any, Any]) -> Watch:
    """A user's dictionary: its keys, in order, and values. What a trace or a step left in it doesn't count (a
    hook may collect activations)."""

    def read() -> Reading:
        return tuple([x for k, v in dict.items(space) if not isinstance(v, UNRETURNED) for x in (k, v)])

    def name(i: int) -> str:
        keys = list(dict.keys(space))
        return f"{label}[{keys[min(i // 2, len(keys) - 1)]!r}]" if keys else label

    def restore(old: Reading) -> None:
        left = {k: v for k, v in dict.items(space) if isinstance(v, UNRETURNED)}
        dict.clear(space)
        dict.update(space, left)
        dict.update(space, zip(old[::2], old[1::2], strict=True))

    return Watch(label, read, name, restore, parts=(dict.keys(space), dict.values(space)))


def appeared(label: str, space: dict[str, Any], wanted: set[str]) -> Watch:
    """Names that the step's code uses and an object did not have at first: an attribute that appears later
    decides too (`hasattr`). Only how many attributes there are is read as long as that stays."""
    known = frozenset(space)

    def read() -> Reading:
        names = [k for k, v in space.items() if k not in known and k in wanted and not isinstance(v, UNRETURNED)]
        return (tuple(sorted(names)),)

    def restore(old: Reading) -> None:
        for name in set(read()[0]) - set(old[0]):
            space.pop(name, None)

    return Watch(label, read, lambda i: f"{label}'s attributes", restore, sized=space)


def optional(label: str, space: dict[Any, Any], keys: Sequence[Any]) -> Watch:
    """Entries that may come and go: an attribute that would hide one of the class."""
    names = tuple(keys)

    def restore(old: Reading) -> None:
        for key, value in zip(names, old, strict=True):
            if value is ABSENT:
                space.pop(key, None)
            else:
                space[key] = value

    return Watch(
        label, lambda: tuple([space.get(k, ABSENT) for k in names]), lambda i: f"{label}.{names[i]}", restore
    )  # fmt: skip


def sequence(label: str, items: Any) -> Watch:
    """A list, deque or set, element by element."""
    ordered = not isinstance(items, set)
    plain = type(items).__module__ in ("builtins", "collections")  # iterates as it says

    def read() -> Reading:
        return tuple(items) if ordered else tuple(sorted(items, key=repr))

    def restore(old: Reading) -> None:
        items.clear()
        items.extend(old) if ordered else items.update(old)

    return Watch(label, read, lambda i: f"{label}[{i}]", restore, parts=(items,) if plain else None)


def array(label: str, data: numpy.ndarray[Any, Any]) -> Watch:
    """A numpy array, by its bytes; one of objects by what they are."""
    if data.dtype.hasobject:
        return Watch(label, lambda: tuple(data.flat), lambda i: label, lambda old: None)

    def restore(old: Reading) -> None:
        data[...] = numpy.frombuffer(old[0], dtype=data.dtype).reshape(data.shape)

    read = lambda: (data.tobytes(), data.shape, data.dtype)  # noqa: E731
    return Watch(label, read, lambda i: label, restore, content=True)


def memory(label: str, owner: Any) -> Watch:
    """Anything that shows its bytes: bytearray, array.array, ctypes, mmap."""

    def restore(old: Reading) -> None:
        memoryview(owner).cast("B")[:] = old[0]

    return Watch(label, lambda: (memoryview(owner).tobytes(),), lambda i: label, restore, content=True)


def pickled(label: str, owner: Any, dump: Callable[[Any], bytes]) -> Watch:
    """An object of C whose content can only be told by pickling it. A step that changes it can't be undone."""
    return Watch(label, lambda: (dump(owner),), lambda i: label, lambda old: None, content=True)


def called(label: str, get: Callable[[], Any]) -> Watch:
    """What a library's object gives when asked (a context variable's value)."""
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

    return Watch(label, read, lambda i: label, restore)


def gradients_wanted(params: Sequence[torch.Tensor]) -> Watch:
    get = attrgetter("requires_grad")

    def restore(old: Reading) -> None:
        for p, value in zip(params, old, strict=True):
            if p.requires_grad != value:
                p.requires_grad_(value)

    return Watch("requires_grad", lambda: tuple(map(get, params)), lambda i: "requires_grad", restore, flag=True)


def parameter_hooks(params: Sequence[torch.Tensor]) -> Watch:
    """Which hooks the parameters have, wherever one was added or removed."""
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

    return Watch(
        label, lambda: tuple([getattr(owner, n, None) for n in names]), lambda i: f"{label}.{names[i]}", restore
    )


def groups(label: str, optimizer: Any) -> Watch:
    """Which groups and parameters an optimizer has, its flags, and whether a number is a tensor (the
    numbers themselves are lifted to host scalars)."""

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
        out.append("number" if isinstance(value, (int, float)) and kind is not bool else value)


def modes() -> Watch:
    """Torch's own settings that decide which operators run, asked below torch's Python functions: they
    are read at every call."""
    c, mha = torch._C, torch.backends.mha
    grad, inference, autocast, dtype = (
        torch.is_grad_enabled, torch.is_inference_mode_enabled, torch.is_autocast_enabled, torch.get_autocast_dtype
    )  # fmt: skip
    cached = torch.is_autocast_cache_enabled
    deterministic, default = c._get_deterministic_algorithms, torch.get_default_dtype
    mkldnn, cudnn, flash, efficient, plain = (
        c._get_mkldnn_enabled, c._get_cudnn_enabled, c._get_flash_sdp_enabled, c._get_mem_efficient_sdp_enabled,
        c._get_math_sdp_enabled,
    )  # fmt: skip

    def read() -> Reading:
        return (
            grad(), inference(), autocast("cpu"), autocast("cuda"), dtype("cpu"), dtype("cuda"), cached(), deterministic(), default(),
            mkldnn(), cudnn(), flash(), efficient(), plain(), mha._is_fastpath_enabled, *precisions(),
        )  # fmt: skip

    set_grad, set_on, set_dtype = torch.set_grad_enabled, torch.set_autocast_enabled, torch.set_autocast_dtype
    set_cached, set_default = torch.set_autocast_cache_enabled, torch.set_default_dtype

    def restore(old: Reading) -> None:
        """What is a switch of the thread's; precision and the choice of kernels are the process's, and left alone."""
        set_grad(old[0])
        set_on("cpu", old[2])
        set_on("cuda", old[3])
        set_dtype("cpu", old[4])
        set_dtype("cuda", old[5])
        set_cached(old[6])
        set_default(old[8])

    return Watch("torch's modes", read, lambda i: "torch's modes (autocast, grad mode, precision)", restore)


def generator_state(source: Any) -> str:
    """Where one of Python's or numpy's random generators stands."""
    if isinstance(source, numpy.random.Generator):
        return repr(source.bit_generator.state)
    if hasattr(source, "getstate"):
        return repr(source.getstate())
    return repr([v.tolist() if isinstance(v, numpy.ndarray) else v for v in source.get_state()])


def random_states(more: Sequence[tuple[str, Any]]) -> list[tuple[str, str]]:
    """Where Python's and numpy's own generators stand, and `more`."""
    own: list[tuple[str, Any]] = [("random", random), ("numpy.random", numpy.random)]
    return [(name, generator_state(source)) for name, source in [*own, *more]]
