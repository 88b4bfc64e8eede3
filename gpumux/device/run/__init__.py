"""What devices share to run a Program.

In the daemon: start with `device_base.py` (what devices repeat of their contract); `schedule.py` says which command
goes next. Where a job runs: start with `interpreter.py` (operators one by one) and `graph.py` (a range of operators as
a TorchScript graph); `operands.py` says where tensors lie, `schema.py` what operators take, `randomness.py` how
generators move. These import torch. May import `program` and what is below.
"""
