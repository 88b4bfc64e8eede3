"""Devices that run Programs. `base.py` is the contract that all of them keep; `registry.py` finds one by its name.

`cpu/`, `cuda/` and `sim/` are the devices, `run/` and `workers/` what they share. May import `program` and what is
below.
"""
