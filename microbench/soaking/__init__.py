"""The parts of microbench/soak.py: the plan, the checked daemon, the clients, the vandals, and what is counted."""
