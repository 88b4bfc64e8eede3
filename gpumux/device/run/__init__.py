"""What devices share to run a Program.

Start with `interpreter.py` (operators one by one) and `graph.py` (pieces as TorchScript graphs). `operands.py` says
where tensors lie, `schema.py` what operators take, `randomness.py` how generators move, `schedule.py` which command
goes next. All but `schedule.py` import torch. May import `program` and what is below.
"""
