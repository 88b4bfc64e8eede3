"""A coordinator's daemons on the nodes of a Ray cluster (extra `cluster`; docs/cluster.md, "Over Ray").

`plan.py` says which daemons a node gets; pure. `daemon_actor.py` is what runs on a node: an actor with `gpumux serve`
as its child. `membership.py` starts the actors, and tells the coordinator which daemons there are. Ray is imported when
a cluster is joined, and not before. Start with `membership.py`.
"""
