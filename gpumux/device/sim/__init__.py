"""A simulated GPU on a virtual clock.

Start with `device.py`, the device contract. `gpu.py` is the model of the hardware, `cost.py` what kernels take. May
import `program`, `device.base` and what is below; no torch.
"""
