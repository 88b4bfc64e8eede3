"""The command `gpumux`: one module a verb, each imported when its verb is called. Start with `main.py`; `control.py` is
the session with a daemon that commands have.

May import the daemon and what it stands on, `simulate`, `plan` and `tune`; not `client`, `capture` and `fuse`."""
