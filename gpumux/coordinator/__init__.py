"""The coordinator: the process that many daemons' jobs are submitted to, and that decides where each one runs.

`core.py` turns messages of clients and news of daemons into events of `gpumux/cluster` and its commands into messages;
pure. `loop.py` runs it: `daemons.py` talks to each daemon in a thread of its own, `journal.py` keeps what must survive
a restart, `main.py` starts and stops it. Start with `core.py`.
"""
