"""How to notice changes of objects whose code is not walked: a library's containers, buffers, handles.

A step can hold any object of the standard library or of C. Each is watched by its attributes, its bytes
or its pickle; one that shows nothing of what it holds is refused, not passed over.
"""

from __future__ import annotations

import collections.abc
import contextvars
import datetime
import decimal
import fractions
import io
import os
import pickle
import re
import types
import uuid
import weakref
from typing import Any

from gpumux.client import watch
from gpumux.client.reading import Watch
from gpumux.errors import CaptureError

MOST_BYTES = 1 << 20  # read at every call
_FIXED = (
    decimal.Decimal, fractions.Fraction, datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo,
    os.PathLike, re.Pattern, uuid.UUID, range, slice, io.IOBase, types.BuiltinFunctionType,
    types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType, types.GetSetDescriptorType,
    types.MemberDescriptorType, types.ClassMethodDescriptorType, types.CodeType, types.EllipsisType,
    types.NotImplementedType, types.GenericAlias, types.UnionType, BaseException,
)  # fmt: skip
# What decides how a program runs, waits, shows or imports, not what it computes.
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
    """Whether an object holds nothing a step computes with, or can't change."""
    cls = type(value)
    if isinstance(value, _FIXED) or cls is object or cls.__module__ in _LOCKS:
        return True
    return cls.__module__.split(".")[0] in _APPARATUS and cls is not types.SimpleNamespace


def memory(label: str, value: Any) -> Watch | None:
    """A watch of the bytes of anything that shows them."""
    try:
        size = memoryview(value).nbytes
    except TypeError:
        return None
    if size > MOST_BYTES:
        raise _too_large(label)
    return watch.memory(label, value)


def inner(label: str, value: Any, attributes: bool) -> tuple[list[Watch], list[tuple[str, Any]]]:
    """(watches, what to walk on to) of what a library's object holds beside its `attributes`, if it has
    a dictionary of them. Raises CaptureError for one that can't be watched."""
    if isinstance(value, contextvars.ContextVar):
        return [watch.called(label, lambda: value.get(None))], [(label, value.get(None))]
    if isinstance(value, weakref.ref):
        return [watch.called(label, value)], [(label, value())]
    if isinstance(value, types.MappingProxyType):
        mapping = Watch(
            label, lambda: (*value.keys(), *value.values()), lambda i: label, lambda old: None, parts=(value.keys(), value.values())
        )  # fmt: skip
        return [mapping], [(f"{label}[{k!r}]", v) for k, v in value.items()]
    if isinstance(value, collections.abc.Iterator):
        raise CaptureError(
            f"the step draws from the iterator {label}", "draw outside the step and pass what it gave as an argument"
        )
    seen = memory(label, value)
    if seen is not None:
        return [seen], []
    return ([] if attributes else [_pickled(label, value)]), []


def _pickled(label: str, value: Any) -> Watch:
    try:
        size = len(pickle.dumps(value))
    except Exception as error:
        raise CaptureError(
            f"the step reaches {label}, a {type(value).__module__}.{type(value).__name__}, and changes of it can't be noticed",
            "read it outside the step and pass what it gave as an argument",
        ) from error
    if size > MOST_BYTES:
        raise _too_large(label)
    return watch.pickled(label, value, pickle.dumps)


def _too_large(label: str) -> CaptureError:
    return CaptureError(f"{label} is too large to watch for changes", "pass it to the step as a tensor argument")
