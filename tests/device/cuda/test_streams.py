"""Which stream a job gets."""

from __future__ import annotations

import pytest

from gpumux.device.cuda.streams import StreamPool
from gpumux.types import JobId


def job(number: int) -> JobId:
    return JobId(f"{number:032x}")


def test_active_jobs_share_few_streams() -> None:
    pool = StreamPool({0: [10, 11], 1: [20]})
    assert pool.acquire(job(1), 0) == 10
    assert pool.acquire(job(2), 0) == 11
    assert pool.acquire(job(3), 0) in (10, 11)  # all are held: it shares one
    assert pool.acquire(job(4), 1) == 20
    assert pool.acquire(job(1), 0) == 10  # kept while it has work outstanding
    pool.release(job(2))
    pool.release(job(2))
    pool.release(job(3))
    assert pool.acquire(job(5), 0) == 11


def test_a_class_without_streams_uses_the_one_below() -> None:
    pool = StreamPool({0: [10], 1: [20]})
    assert pool.acquire(job(1), 7) == 20
    assert pool.acquire(job(2), -3) == 10
    with pytest.raises(ValueError, match="every class"):
        StreamPool({0: []})
