"""Jobs of a cluster: a coordinator says at which daemons a job runs, and the client opens it there, moves it, and
brings it back elsewhere when a node is lost.

`state.py` is what the messages mean, without threads; `link.py` is the session with the coordinator; `submit.py` is
what `submit(..., cluster=)` does. Imports the modules of `client`; only `client/submit.py` imports it.
"""
