"""The protocol between clients and the daemon: messages, their encoding, sessions, and shared memory.

Start with `messages.py`; `router.py` is the daemon's end (sessions, and what each may send), `channel.py` the
connection that a local session's steps go by. May import `types`, `errors` and `hostmemory` alone.
"""
