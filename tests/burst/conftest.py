"""Float64 and one thread, so that differences of summation stay far below the bounds."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)
