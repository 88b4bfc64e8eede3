"""Processes that devices start: the fork server, which forks executors, and checkers of Programs. Start with
`fork_server.py` (the daemon's side) and `checks.py`; `fork_server_process.py` is the process, with the checker."""
