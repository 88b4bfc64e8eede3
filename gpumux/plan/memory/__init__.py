"""`gpumux plan memory`: the bytes and the predicted time of a training step, run in several ways.

`ways.py` captures a model's step in each way and computes what each takes; `advice.py` says it; `picture.py` draws live
bytes over the step. Imports torch; nothing is run and no daemon is needed. May import what `plan` may."""
