"""Predicts what sharing gives: the daemon's scheduler on a simulated GPU, on a virtual clock.

Start with `run.py`; `workload.py` is what jobs do, `result.py` what is reported. `cli`, `plan` and `tune` (for
pictures) import it; it may import `scheduler`, `device` and `program`."""
