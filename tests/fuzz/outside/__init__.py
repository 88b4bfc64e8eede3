"""A differential fuzzer of what scripts hold beside their model.

`grammar.py` makes scripts from seeds: tensors of no model, numbers and flags, functions that use them, and lines
between their calls. `compare.py` runs a script plainly and with its functions in a daemon, and says what differs.
"""
