"""An NVIDIA GPU as a device: pieces of Programs as CUDA graphs on streams of two priorities.

Start with `device.py` (the daemon's thread), then `engine.py` (the worker's thread) and `program.py` (one loaded
Program). `launches.py` tracks what is in flight. `driver.py` alone calls the driver; `engine.py` and what it imports
use torch. May import `device.run`, `device.workers`, `program` and what is below.
"""
