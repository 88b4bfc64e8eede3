"""A differential fuzzer: random things that a script does between two steps, plainly and with the step in a daemon.

`operations.py` lists what a script can do, `training.py` has models, optimizers and steps, `compare.py` runs a sequence
both ways, `hunt.py` makes sequences from seeds and shrinks those that fail. Start at `compare.py`.
"""
