"""The values of recorded tensors, where they are known at capture: of constants (`constants.py`), of state that no step
writes (`held.py`), or of step counts and hyperparameters (`host.py`); gradients that depend on values (`products.py`);
values under a mask that are written into the same places of another tensor (`selected.py`); and whether two traces
compute the same (`comparison.py`)."""
