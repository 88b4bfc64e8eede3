"""The client, which training programs use: `submit` opens a Job, whose steps return StepFutures; `submit_array` opens
one for many models of one kind.

May import `capture`, `wire` and `program`. Start with `submit.py`, then `job.py`, which composes `local_model.py`,
`recovery.py`, `future.py` and `remote.py`; `session.py` and `transport.py` talk to the daemon.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpumux.client.arguments import SubmitOptions
    from gpumux.client.future import StepFuture
    from gpumux.client.job import Job
    from gpumux.client.submit import submit
    from gpumux.fuse.job import submit_array
    from gpumux.types import JobStatistics


__all__ = ["Job", "JobStatistics", "StepFuture", "SubmitOptions", "submit", "submit_array"]

_HOME = {
    "Job": "gpumux.client.job",
    "JobStatistics": "gpumux.types",
    "StepFuture": "gpumux.client.future",
    "SubmitOptions": "gpumux.client.arguments",
    "submit": "gpumux.client.submit",
    "submit_array": "gpumux.fuse.job",
}


if not TYPE_CHECKING:  # a type checker would take any name from it, misspelt ones too

    def __getattr__(name: str) -> Any:
        # loaded at first use, because torch takes seconds to import
        if name in _HOME:
            import importlib

            found = getattr(importlib.import_module(_HOME[name]), name)
            globals()[name] = found  # importing the submodule `submit` has set this name to the module
            return found
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME} - {"Any", "TYPE_CHECKING", "annotations"})
