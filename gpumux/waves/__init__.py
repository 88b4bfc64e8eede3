"""Two waves of one job (Wavelet): steps half a cycle apart, so that one's memory rises where the other's falls.

Start with `trace.py`, which makes the waves' Programs of a captured step. `steps.py` says which one is next, and the
scheduler (`scheduler/leases.py`) grants each wave its part of the arena that they share. `rotation.py` has schedules of
model-parallel waves and of their baselines, as data. May import capture and program.
"""
