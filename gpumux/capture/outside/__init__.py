"""Tensors that steps meet by Python variables and that belong to no model of the job. Start with `tensors.py`."""
