"""May low work run now, beside or between the steps of high jobs? For the scheduler alone. Start with `guard.py`.

`device_view.py` is what the device does now, `costs.py` what was measured (baselines, costs of low work), `high_job.py`
when high steps come, `budget.py` what they may lose, `timing.py` when a launch may be made, `decisions.py` why low jobs
are held and how low programs are cut, `learning.py` what follows from each launch, `collectives.py` what follows from
the exchanges of a rank, `bans.py` what is done about costs.
"""

from gpumux.scheduler import RUNS

if RUNS.directory is not None:
    __path__.insert(0, str(RUNS.directory / "guard"))
