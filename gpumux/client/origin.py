"""Whose code a file, a function or a class is: the user's, an installed package's, or a library's.

A library is torch, the standard library, numpy, gpumux itself and a few large packages that no model
is written in: its Python is taken to do the same whenever it gets the same arguments. Everything else
may decide what a step computes. Of the user's own code every path is looked at; of installed packages
(transformers has a million lines) the functions that ran while the step was traced.
"""

from __future__ import annotations

import enum
import os
import sys
import sysconfig
import types
from functools import cache
from typing import Any

import numpy
import torch

import gpumux


class Origin(enum.Enum):
    OWN = "own"
    INSTALLED = "installed"
    LIBRARY = "library"


_INSTALLED = tuple(f"{os.sep}{folder}{os.sep}" for folder in ("site-packages", "dist-packages"))
# Packages that run, test, show or store what others compute, or whose arrays a step can't take anyway.
_LARGE = frozenset(
    (
        "scipy",
        "pandas",
        "sklearn",
        "matplotlib",
        "PIL",
        "sympy",
        "networkx",
        "pytest",
        "_pytest",
        "pluggy",
        "hypothesis",
        "tqdm",
        "zmq",
        "msgpack",
        "requests",
        "urllib3",
        "tokenizers",
        "safetensors",
        "huggingface_hub",
        "typing_extensions",
        "jinja2",
        "functorch",
        "torchgen",
        "triton",
    )
)


def _folder(path: str) -> str:
    return os.path.join(os.path.abspath(path), "")


_LIBRARIES = tuple(_folder(os.path.dirname(m.__file__ or "")) for m in (torch, numpy, gpumux))
_STANDARD = tuple(
    {_folder(sysconfig.get_path(kind)) for kind in ("stdlib", "platstdlib")} | {_folder(os.path.dirname(os.__file__))}
)


@cache
def of_path(path: str | None) -> Origin:
    """Of a source file. Code without one ("<stdin>", "<ipython-input-1>", exec) is the user's."""
    if path is None or path.startswith("<frozen ") or path.startswith(_LIBRARIES):
        return Origin.LIBRARY
    for folder in _INSTALLED:
        if folder in path:
            package = path.rsplit(folder, 1)[1].split(os.sep, 1)[0].removesuffix(".py")
            return Origin.LIBRARY if package in _LARGE else Origin.INSTALLED
    return Origin.LIBRARY if path.startswith(_STANDARD) else Origin.OWN


def of_code(code: types.CodeType, space: dict[str, Any] | None = None) -> Origin:
    """Of a function's code; `space`, its globals, says whose it is when it was made by a library
    (a dataclass's `__eq__`, a namedtuple's `__new__`)."""
    if code.co_filename.startswith("<") and space is not None:
        module = sys.modules.get(space.get("__name__", ""))
        if module is not None and getattr(module, "__dict__", None) is space:
            return _of_module(module)
    return of_path(code.co_filename)


def of_class(cls: type) -> Origin:
    module = sys.modules.get(cls.__module__)
    if module is None:  # classes made by exec; types of C say what they like
        return Origin.OWN if any(isinstance(v, types.FunctionType) for v in vars(cls).values()) else Origin.LIBRARY
    return _of_module(module)


def _of_module(module: types.ModuleType) -> Origin:
    if module.__name__ == "__main__":
        return Origin.OWN
    file = getattr(module, "__file__", None)
    if file is None:
        return Origin.LIBRARY if module.__name__ in sys.builtin_module_names else Origin.OWN
    return of_path(file)


def of_module(module: types.ModuleType) -> Origin:
    """Of a module object; namespace packages have no file and nothing of their own."""
    return _of_module(module)
