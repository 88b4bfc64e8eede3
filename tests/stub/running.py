"""Processes whose libcuda is the stand-in, with one release of cuda-bindings."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.stub import build

NEWEST = build.RELEASES[-1]
TORCHS = "13.0.3"  # what torch 2.11 for CUDA 13.0 asks for
RUN_S = 400.0


def bindings(version: str) -> Path:
    try:
        return build.release(version)
    except build.Unavailable as error:
        pytest.skip(str(error))


def run(arguments: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=build.ROOT, capture_output=True, text=True, timeout=RUN_S
    )
