"""gpumux: one daemon owns one GPU and lets many PyTorch jobs share it.

`gpumux.submit` captures a training step and opens it as a job; `gpumux.submit_array` opens one for many models of one
kind; `gpumux.fuse.Array` trains those in this process. The same names are in `gpumux.client` and `gpumux.fuse`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpumux import client as client
    from gpumux import fuse as fuse

    # each from its own module: mypy may take gpumux.client.submit for the module of that name
    from gpumux.client.future import StepFuture as StepFuture
    from gpumux.client.job import Job as Job
    from gpumux.client.submit import submit as submit
    from gpumux.fuse.job import submit_array as submit_array

__version__ = "0.1.0"

_OF_CLIENT = ("Job", "StepFuture", "submit", "submit_array")
_PACKAGES = ("client", "fuse")


if not TYPE_CHECKING:  # a type checker would take any name from it, misspelt ones too

    def __getattr__(name: str) -> Any:
        # loaded at first use, because torch takes seconds to import
        if name in _OF_CLIENT or name in _PACKAGES:
            import importlib

            found = importlib.import_module(f"gpumux.{name if name in _PACKAGES else 'client'}")
            return found if name in _PACKAGES else getattr(found, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_OF_CLIENT, *_PACKAGES} - {"Any", "TYPE_CHECKING", "annotations"})
