"""Processes that devices start: the fork server, which forks executors and checkers, and the checker of Programs. Start
with `fork_server.py` (the daemon's side); `fork_server_process.py` is the process."""
