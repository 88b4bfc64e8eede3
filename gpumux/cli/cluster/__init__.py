"""`gpumux cluster`: the coordinator of many daemons, and what people ask it. Start with `verbs.py`."""
