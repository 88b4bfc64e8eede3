"""Many daemons, one place to submit: which jobs share which GPU of a cluster.

Start with `placement.py`: events in, commands out; pure, like the scheduler of one daemon. `events.py` lists what comes
in and goes out, `jobs.py` what is known of nodes, devices and jobs, `shares.py` is quotas and the fair order between
users, `costs.py` what daemons learned of pairs of programs, `explain.py` why a job waits.

It imports `types` and `errors` alone. What carries the commands to daemons is not built yet (docs/cluster.md).
"""
