"""What sharing would give, before anybody shares: the daemon's core on a simulated GPU, on a virtual clock."""
