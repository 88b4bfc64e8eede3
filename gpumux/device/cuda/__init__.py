"""An NVIDIA GPU as a device: pieces of Programs as CUDA graphs on streams of two priorities.

Start with `device.py` (the daemon's thread), then `engine.py` (the worker's thread) and `program.py` (one loaded
Program). `driver.py` is the only module that calls the driver, `compute.py` and those it uses the only ones that import
torch.
"""
