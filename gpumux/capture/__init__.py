"""A Python step becomes a Program: traced on fake tensors, lowered, and watched for what Python may change.

No session and no daemon. May import `program` and what is below it. Start with `step.py` (`StepFunction.choose`: which
Program a call needs), then `tracer.py`, `recorder.py` and `lower.py`; `state.py` says which local tensors are the
job's.
"""
