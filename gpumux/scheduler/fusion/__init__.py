"""Which jobs with equal Programs train as one, and when. Pure, as all of the scheduler: `groups.py` takes events and
returns commands. It may import `gpumux/types.py` and `gpumux/errors.py` alone."""
