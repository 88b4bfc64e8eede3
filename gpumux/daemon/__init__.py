"""The daemon's process: sessions, requests, effects, records, and its loop. Never imports torch.

May import `scheduler`, `wire`, `device`, `metrics` and what is below. Start with `main.py`, then `loop.py`;
`requests.py` takes what clients ask, `effects.py` carries out what the scheduler commands.
"""
