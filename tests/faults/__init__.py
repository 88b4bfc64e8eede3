"""A simulated world of one daemon, its clients, its device and its disk, on one virtual clock, with faults from a seed.

    world.py      the clock, the connections, the faults, and what must hold at the end
    client.py     a client, by the protocol: trains, saves, comes back
    parts.py      the device, which computes what shows the order of steps, and the snapshots' writer on the real store
    mistakes.py   mistakes put into the daemon, each of which has to show
    __main__.py   `python -m tests.faults`: many histories, or one again

The daemon's loop, its handlers, queues, scheduler and bookkeeping of snapshots, and the store of snapshots on the disk
are the real ones. Simulated are the wire (messages of a connection keep their order, and are lost only with it), the
device, the client, the process around the store, and what of a disk survives a loss of power.
"""
