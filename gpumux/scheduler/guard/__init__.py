"""May low work run now, beside or between what high jobs do? Start with `guard.py`. For the scheduler alone."""

from gpumux.scheduler import RUNS

if RUNS.directory is not None:
    __path__.insert(0, str(RUNS.directory / "guard"))
