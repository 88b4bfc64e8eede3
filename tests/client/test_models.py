"""Tiny workloads of the HFTA paper through a job: equal to their plain loops bit for bit, under a schedule."""

from __future__ import annotations

import pytest

from tests.client.parity import check
from tests.client.workload_jobs import work


@pytest.mark.every(3)
# The others hold nothing that these or the tests beside this one do not; tests/fuse captures all of them.
@pytest.mark.parametrize("name", ["pointnet_seg", "mobilenet_v3", "transformer"])
def test_equal_to_the_plain_loop(name: str, endpoint: str):
    check(lambda: work(name, foreach=name != "transformer"), endpoint)  # which is fewer operators to capture
