"""The values of recorded tensors, where they can be computed at capture: `constants.py`."""
