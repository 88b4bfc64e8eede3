"""Float64 and one thread, so that differences of summation stay far below the bounds."""

import pytest


@pytest.fixture(autouse=True)
def exact(one_thread: None, in_float64: None) -> None:
    pass
