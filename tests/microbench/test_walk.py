"""How many files one step crosses, counted in the processes it runs through."""

from __future__ import annotations

from microbench.walk import crossed, together

LIMIT = 33  # to become 20; it may be lowered, never raised


def test_a_step_crosses_few_files():
    found = crossed()
    assert "client/job.py" in found["client"]
    assert {"daemon/loop.py", "scheduler/scheduler.py"} <= set(found["daemon"])
    assert "device/cpu/executor.py" in found["executor"]
    assert len(together(found)) <= LIMIT, "\n".join(together(found))


def test_a_file_that_two_processes_cross_counts_once():
    assert together({"client": ["wire/codec.py", "a.py"], "daemon": ["wire/codec.py"]}) == ["a.py", "wire/codec.py"]
