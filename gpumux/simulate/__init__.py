"""Predicts what sharing gives: the daemon's scheduler on simulated GPUs, on a virtual clock.

Start with `run.py`, one GPU, and `cluster.py`, a plan on several; `daemon.py` is a daemon with its GPU, `workload.py`
what jobs do, `result.py` and `comparison.py` what is reported. `cli`, `plan` and `tune` (for pictures) import it; it
may import `scheduler`, `device` and `program`."""
