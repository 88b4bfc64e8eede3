"""Ways for two jobs to share a device: taking turns as processes, under NVIDIA's MPS, as streams of one process,
through gpumux. Imports no torch: jobs run in processes of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gpumux import config
from microbench.daemon import running_daemon
from microbench.worker import Task, Worker, WorkerFailed

SOLO, ALONE = "solo", "gpumux alone"
SLICES, MPS, MPS_PRIORITY, STREAMS = "time slicing", "MPS", "MPS with priority", "plain streams"
GPUMUX = tuple(f"gpumux {policy}" for policy in config.POLICIES)
PAIRED = (SLICES, MPS, MPS_PRIORITY, STREAMS, *GPUMUX)
MPS_CONTROL = "nvidia-cuda-mps-control"
MPS_S = 30.0
LOAD = 0.5  # of an inference job: requests a second, over what it answers back to back
PROMISE = 1.05  # what a high job is promised
Stats = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """Where and how long. `settle_s`: both jobs run before anything counts; the guard learns meanwhile."""

    device: str
    size: str
    seconds: float
    settle_s: float

    @property
    def plain(self) -> str:
        """The fastest plain way to run a job alone."""
        return "graph" if self.device == "cuda" else "eager"

    def task(self, job: str, engine: str, priority: Literal["high", "low"], endpoint: str = "") -> Task:
        seed = 0 if priority == "high" else 1
        return Task(job, engine, self.size, self.device, endpoint, priority, PROMISE, seed)


def unavailable(way: str, device: str) -> str:
    """Why the way can't be measured here; empty if it can."""
    if device == "cpu" and way in (MPS, MPS_PRIORITY, STREAMS):
        return f"{way} is of CUDA"
    if way in (MPS, MPS_PRIORITY) and shutil.which(MPS_CONTROL) is None:
        return f"{MPS_CONTROL} is not there"
    return ""


def is_request(job: str) -> bool:
    """Whether the job answers requests instead of training."""
    return job.endswith(":infer")


def solo(setting: Setting, job: str) -> dict[str, Any]:
    """The job alone in a process. For requests, first how many it answers back to back, then half as many, at
    random."""
    with Worker([setting.task(job, setting.plain, "high")]) as worker:
        worker.answer()
        busy = measured(setting, worker)
        if not is_request(job):
            return {"high": busy}
        rate = LOAD / busy["median_s"]
        return {"high": measured(setting, worker, rate), "busy": busy, "asked_per_s": rate}


def alone(setting: Setting, job: str, rate: float | None) -> dict[str, Any]:
    """The job alone in a daemon, as a high one."""
    with Worker() as worker, _daemon("guarded", setting) as endpoint, closing(worker):
        worker.open([setting.task(job, "gpumux", "high", endpoint)])
        worker.answer()
        return {"high": measured(setting, worker, rate)}


def measured(setting: Setting, worker: Worker, rate: float | None = None) -> Stats:
    """What the worker's only job does in a window."""
    return _run(setting, [worker], [[rate]])[0][0]


def together(
    setting: Setting,
    way: str,
    high: str,
    low: str,
    rates: Sequence[float | None],
    after: Callable[[str], None] = lambda endpoint: None,
) -> dict[str, Any]:
    """Both jobs at the same time; `rates` of their requests. `after` is called with the daemon's endpoint while both
    jobs are still there. Raises WorkerFailed."""
    with ExitStack() as stack:
        enter = stack.enter_context
        if way == STREAMS:
            tasks = [setting.task(high, setting.plain, "high"), setting.task(low, setting.plain, "low")]
            worker = enter(Worker(tasks))
            worker.answer()
            first, second = _run(setting, [worker], [list(rates)])[0]
            return {"high": first, "low": second}
        engine, endpoint = setting.plain, ""
        environments: list[Mapping[str, str]] = [{}, {}]
        if way in (MPS, MPS_PRIORITY):
            shared = enter(_mps())
            both = ({"CUDA_MPS_CLIENT_PRIORITY": "0"}, {"CUDA_MPS_CLIENT_PRIORITY": "1"})
            environments = [shared | (own if way == MPS_PRIORITY else {}) for own in both]
        workers = [enter(Worker(environment=environment)) for environment in environments]
        if way in GPUMUX:  # it starts while the workers load their libraries, and is there until they have ended
            engine, endpoint = "gpumux", enter(_daemon(way.removeprefix("gpumux "), setting))
            for worker in workers:
                enter(closing(worker))
        tasks = [setting.task(high, engine, "high", endpoint), setting.task(low, engine, "low", endpoint)]
        for worker, task in zip(workers, tasks, strict=True):
            worker.open([task])
        for worker in workers:
            worker.answer()
        (first,), (second,) = _run(setting, workers, [[rate] for rate in rates])
        if endpoint:
            after(endpoint)
        return {"high": first, "low": second}


def _run(setting: Setting, workers: Sequence[Worker], rates: Sequence[list[float | None]]) -> list[list[Stats]]:
    begin = time.monotonic() + setting.settle_s
    for worker, asked in zip(workers, rates, strict=True):
        worker.run(begin, begin + setting.seconds, asked)
    return [worker.answer() for worker in workers]


@contextmanager
def _daemon(policy: str, setting: Setting) -> Iterator[str]:
    with running_daemon(policy=policy, threads=1, device=setting.device) as daemon:
        yield daemon.endpoint


@contextmanager
def _mps() -> Iterator[dict[str, str]]:
    """An MPS control daemon of our own, with its sockets and logs in a directory of ours. No setting of the card
    changes."""
    directory = Path(tempfile.mkdtemp(prefix="gm-mps-"))
    own = {"CUDA_MPS_PIPE_DIRECTORY": str(directory), "CUDA_MPS_LOG_DIRECTORY": str(directory)}
    said = directory / "said.txt"  # no pipe: the control daemon would keep it open

    def control(*flags: str, told: str = "") -> int:
        with said.open("a") as out:
            return subprocess.run(
                [MPS_CONTROL, *flags],
                env={**os.environ, **own},
                input=told,
                stdout=out,
                stderr=out,
                text=True,
                timeout=MPS_S,
            ).returncode

    try:
        if status := control("-d"):
            raise WorkerFailed(f"{MPS_CONTROL} -d ended with {status}: {said.read_text().strip()}")
        try:
            yield own
        finally:
            control(told="quit\n")
    finally:
        shutil.rmtree(directory, ignore_errors=True)
