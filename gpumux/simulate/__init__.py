"""What sharing would give, before it is tried: the daemon's scheduler on a simulated GPU, on a virtual clock. Start
with `run.py`."""
