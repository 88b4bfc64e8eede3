"""The parts of microbench/soak.py: the plan, a checked daemon, clients (some hostile), and what is counted."""
