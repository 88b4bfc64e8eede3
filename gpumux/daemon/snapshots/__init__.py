"""Snapshots of jobs: asked for, written by a process of their own, and read again. Start with `requests.py`; `store.py`
is the disk."""
