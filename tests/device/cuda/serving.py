"""A daemon with a GPU of host memory, and a comparison of what it computed."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree

from tests.conftest import PREFIX

START_S = 120.0


@contextmanager
def serving(code: int = 0, keeps: bool = False) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run a daemon, which has to end with exit code `code`. `keeps`: it keeps the state of jobs."""
    with tempfile.TemporaryDirectory(prefix=PREFIX) as directory:
        endpoint = f"ipc://{directory}/gpumux.sock"
        command = [
            sys.executable,
            "-m",
            "tests.device.cuda.fake_daemon",
            "--endpoint",
            endpoint,
            "--metrics-port",
            "-1",
            *(["--state-dir", f"{directory}/state"] if keeps else []),
        ]
        log = Path(directory) / "log"
        with log.open("w") as stderr:
            daemon = subprocess.Popen(command, stderr=stderr)
        try:
            for _ in range(int(START_S * 10)):
                if " serves " in log.read_text() or daemon.poll() is not None:
                    break
                with suppress(subprocess.TimeoutExpired):
                    daemon.wait(0.1)
            assert " serves " in log.read_text(), log.read_text()
            yield endpoint, daemon
        finally:
            daemon.terminate()
            ended = daemon.wait(START_S)
        assert ended == code, log.read_text()
        for path in Path(directory).glob("*.lock"):
            path.unlink()


def close(want: Any, got: Any, tolerance: float) -> None:
    """Assert that two runs agree, but for the random generator: a job on a GPU has its own, and never moves the
    client's."""
    a, b = (
        [leaf for leaf in pytree.tree_leaves(run) if getattr(leaf, "shape", None) != torch.get_rng_state().shape]
        for run in (want, got)
    )
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        if isinstance(x, torch.Tensor):
            torch.testing.assert_close(y, x, rtol=tolerance, atol=tolerance)
        elif isinstance(x, float):
            assert y == pytest.approx(x)
