"""Devices that run Programs: `cpu/`, `cuda/` and `sim/`.

Start with `base.py`, the contract that all of them keep; `registry.py` makes one by its name, and `nvidia.py` says what
of a GPU this machine has. `run/` and `workers/` are what devices share; `inductor.py` and `codecache.py` compile units
of Programs. May import `program` and what is below.
"""
