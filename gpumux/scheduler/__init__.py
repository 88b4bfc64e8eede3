"""Which launch comes next: events in, commands out; pure. Start with `scheduler.py`, then `policy.py` (what is launched
next) and `guard/guard.py` (may low work run now). `events.py` lists what comes in and goes out; `state.py`, `jobs.py`
and `windows.py` (fair queues, too) are the state; `explain.py` and `report.py` say what happened and why.

It imports `types`, `errors` and `access` alone. `RUNS` says whether its modules are Python or compiled.
"""

from gpumux import compiled

RUNS = compiled.choose()
if RUNS.directory is not None:
    __path__.insert(0, str(RUNS.directory))  # before the Python files, which the other modules come from
    compiled.load(RUNS.directory)
