"""What a training program uses: `submit`, and the Job and StepFuture it gives; `submit_array` for many models of one
kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpumux.client.future import StepFuture
    from gpumux.client.job import Job
    from gpumux.client.submit import submit
    from gpumux.fuse.job import submit_array


__all__ = ["Job", "StepFuture", "submit", "submit_array"]

_HOME = {
    "Job": "gpumux.client.job",
    "StepFuture": "gpumux.client.future",
    "submit": "gpumux.client.submit",
    "submit_array": "gpumux.fuse.job",
}


def __getattr__(name: str) -> Any:
    # torch takes seconds to import; only who trains pays for it
    if name in _HOME:
        import importlib

        found = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = found  # importing the submodule `submit` has just put that under the function's name
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
