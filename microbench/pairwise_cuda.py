"""The pairs on a GPU, measured on a real daemon: kernels of a wanted length, bound by arithmetic or by bandwidth.

Each kind is a matrix product or an addition over a tensor whose rows were grown until it takes so long. One client
holds ten high jobs, another ten low ones, one of each kind; a pair is one of each running, both with two steps asked
for.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from microbench.daemon import running_daemon
from microbench.pairwise import KINDS, STEP_S, Kind
from microbench.ways import Setting
from microbench.worker import Worker

WIDTH = {"cuda": 2048, "cpu": 64}
MEMORY_SHARE = 0.15  # of the device's memory, at most, for one tensor
CALIBRATE_S = 120.0
SECONDS, SETTLE_S = 0.4, 0.1


def measure(setting: Setting, policy: str, kinds: Sequence[Kind] = KINDS) -> list[list[float]]:
    """[high][low]: the high job's steps a second beside the low one, over alone. Raises WorkerFailed, DaemonFailed."""
    names = calibrated(setting.device, kinds)
    with running_daemon(policy=policy, threads=1, device=setting.device) as daemon:

        def held(priority: Literal["high", "low"]) -> Worker:
            return Worker([setting.task(name, "gpumux", priority, daemon.endpoint) for name in names])

        with held("high") as highs, held("low") as lows:
            for worker in (highs, lows):
                worker.answer()
            everyone = range(len(kinds))
            for worker in (highs, lows):  # the device measures and cuts each of them
                for place in everyone:
                    _rate(setting, [(worker, place)])
            alone = [_rate(setting, [(highs, place)]) for place in everyone]
            return [
                [_rate(setting, [(highs, high), (lows, low)]) / alone[high] for low in everyone] for high in everyone
            ]


def _rate(setting: Setting, running: Sequence[tuple[Worker, int]]) -> float:
    """Steps a second of the first."""
    begin = time.monotonic() + setting.settle_s
    for worker, place in running:
        worker.run(begin, begin + setting.seconds, [None], [place])
    found: list[Any] = [worker.answer() for worker, _ in running]
    return float(found[0][0]["rate"])


def calibrated(device: str, kinds: Sequence[Kind]) -> list[str]:
    """A job of each kind by name (jobs.KERNELS), with rows found in a process of their own, whose context is gone
    then."""
    asked = json.dumps([device, [[kind.seconds, kind.intensity] for kind in kinds]])
    command = [sys.executable, "-m", "microbench.pairwise_cuda", asked]
    done = subprocess.run(command, capture_output=True, text=True, timeout=CALIBRATE_S)
    if done.returncode:
        raise RuntimeError(f"the kernels' sizes could not be found: {done.stderr.strip()[-2000:]}")
    rows = json.loads(done.stdout.splitlines()[-1])
    return [
        f"kernels:{kind.intensity}:{count}:{WIDTH[device]}:{max(1, round(STEP_S / kind.seconds))}"
        for kind, count in zip(kinds, rows, strict=True)
    ]


def grown(took: Callable[[int], float], seconds: float, most: int) -> int:
    """The rows with which `took(rows)` is near `seconds`, at most `most`."""
    rows = 16
    while (last := took(rows)) < 0.9 * seconds and rows < most:
        rows = min(most, max(rows + 16, min(4 * rows, int(rows * seconds / last))))
    return rows


def _rows(device: str, seconds: float, intensity: str) -> int:
    import torch

    width = WIDTH[device]
    weight = torch.eye(width, device=device)
    most = 1 << 16
    if device == "cuda":
        most = int(MEMORY_SHARE * torch.cuda.get_device_properties(0).total_memory) // (4 * width)

    def took(rows: int) -> float:
        x = torch.ones(rows, width, device=device)

        def once() -> None:
            _ = x @ weight if intensity == "compute" else x + 1.0

        for _ in range(3):
            once()
        count = max(5, min(200, int(0.02 / seconds)))
        if device == "cuda":
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            for _ in range(count):
                once()
            last.record()
            last.synchronize()
            return float(first.elapsed_time(last)) * 1e-3 / count
        began = time.perf_counter()
        for _ in range(count):
            once()
        return (time.perf_counter() - began) / count

    return grown(took, seconds, most)


if __name__ == "__main__":
    where, wanted = json.loads(sys.argv[1])
    print(json.dumps([_rows(where, seconds, intensity) for seconds, intensity in wanted]))
