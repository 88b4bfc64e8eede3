"""The stand-in for libcuda, compiled once a run. Its `inside` and `device` are collected where it is the process'
libcuda alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.stub import build

collect_ignore = [] if os.environ.get(build.INSIDE) else ["inside", "device"]


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return build.libraries(tmp_path_factory.mktemp("stub"))
    except build.Unavailable as error:
        pytest.skip(str(error))
