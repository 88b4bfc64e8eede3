"""A simulated GPU on a virtual clock. Start with `device.py`; `gpu.py` is the model of the hardware, `cost.py` what
kernels take."""
