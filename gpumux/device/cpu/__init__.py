"""The CPU as a device: an executor process for each job. Start with `device.py`; `executor.py` is that process."""
