"""The core: `machine.py` decides what a device does next. `RUNS` says whether its modules are Python or compiled."""

from gpumux import compiled

RUNS = compiled.choose()
if RUNS.directory is not None:
    __path__.insert(0, str(RUNS.directory))  # before the Python files, which the other modules come from
    compiled.load(RUNS.directory)
