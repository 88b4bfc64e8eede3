"""Which launch comes next: events in, commands out; pure. Start with `scheduler.py`; `guard/` decides whether low work
may run now.

It may import `types`, `errors`, `access` and `program`. `RUNS` says whether its modules are Python or compiled.
"""

from gpumux import compiled

RUNS = compiled.choose()
if RUNS.directory is not None:
    __path__.insert(0, str(RUNS.directory))  # before the Python files, which the other modules come from
    compiled.load(RUNS.directory)
