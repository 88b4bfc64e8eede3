"""A process that runs one job, or several in threads, and says when each of its steps ended.

It reads what to do from stdin and answers on stdout, a JSON object a line: {"do": "open", "jobs": [...]}, then any
number of {"do": "run", "which": [...], "begin": T, "end": T, "rates": [...]} on the clock that all processes of a
machine share, then end of file. A job is run in a closed loop, or with a rate as requests that arrive at random and are
answered one at a time.
"""

from __future__ import annotations

import json
import logging
import os
import random
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from microbench import common

INFLIGHT = 2  # steps a closed loop keeps asked for
LATE_S = 60.0  # how long after its end a run may still be answered
OPEN_S = 240.0  # building, tracing and capturing a large model
NEAR_S = 300e-6  # a request is waited for without sleeping from here on


@dataclass(frozen=True)
class Task:
    """`engine`: eager, graph or gpumux. `device`: cpu or cuda, where a plain engine runs."""

    job: str
    engine: str
    size: str = "full"
    device: str = "cuda"
    endpoint: str = ""
    priority: Literal["high", "low"] = "low"
    max_slowdown: float = 1.10
    seed: int = 0


class WorkerFailed(RuntimeError):
    """A worker process could not do what it was asked. Carries the end of what it said."""


class Worker:
    """The parent's end. `ask` and `answer` are apart, so that several workers can do things at the same time. Without
    tasks it loads its libraries and waits for `open`."""

    def __init__(self, tasks: Sequence[Task] = (), environment: Mapping[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "microbench.worker"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **(environment or {})}
        )
        self._timer = threading.Timer(0.0, lambda: None)
        if tasks:
            self.open(tasks)

    def open(self, tasks: Sequence[Task]) -> None:
        """Build the jobs, capture them or submit them: answered when all could run."""
        self.ask({"do": "open", "jobs": [asdict(task) for task in tasks]}, OPEN_S)

    def ask(self, what: dict[str, Any], within_s: float) -> None:
        """Begin something that is to be answered `within_s`; the worker is killed if it is not."""
        assert self._process.stdin is not None
        self._timer = threading.Timer(within_s, self._process.kill)
        self._timer.daemon = True
        try:
            self._process.stdin.write(json.dumps(what) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # answer() says how it ended
        self._timer.start()

    def answer(self) -> Any:
        """Wait for the answer. Raises WorkerFailed."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        self._timer.cancel()
        if not line:
            raise WorkerFailed(f"a worker ended with status {self._process.wait()} before it answered")
        said = json.loads(line)
        if "error" in said:
            raise WorkerFailed(said["error"])
        return said["value"]

    def run(self, begin: float, end: float, rates: Sequence[float | None], which: Sequence[int] | None = None) -> None:
        """Run the jobs at these places (all), each at its rate or, with None, as fast as it goes."""
        chosen = range(len(rates)) if which is None else which
        asked = {"do": "run", "which": list(chosen), "begin": begin, "end": end, "rates": list(rates)}
        self.ask(asked, end - time.monotonic() + LATE_S)

    def close(self) -> None:
        """End it, by force if it does not go. Idempotent."""
        self._timer.cancel()
        _end(self._process)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.close()
    except BrokenPipeError:
        pass
    try:
        process.wait(30.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()


@dataclass(frozen=True)
class Stats:
    """Of the steps that ended in the window: seconds of a step (between ends; of a request from its arrival to its
    answer)."""

    median_s: float
    p99_s: float
    rate: float
    steps: int


def stats(times: Sequence[float], window_s: float) -> Stats:
    """Raises WorkerFailed where no step ended."""
    if not times:
        raise WorkerFailed(f"no step ended within {window_s:.1f} s")
    return Stats(common.figure(times).median, common.percentile(times, 0.99), len(times) / window_s, len(times))


# ---- the worker's end


def main() -> int:
    # What libraries print must not get between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # Imports take seconds: they are over when there is something to open.
    from microbench import engines as _engines  # noqa: F401

    logging.getLogger("gpumux.client").setLevel(logging.ERROR)  # the trained state is not needed
    sys.setswitchinterval(1e-4)  # of two jobs in one process, none waits long while the other's thread computes
    engines: list[Any] = []
    try:
        for line in sys.stdin:
            asked = json.loads(line)
            try:
                if asked["do"] == "open":
                    engines = [open_engine(Task(**task)) for task in asked["jobs"]]
                    value: Any = None
                else:
                    chosen = [engines[place] for place in asked["which"]]
                    value = run_all(chosen, asked["begin"], asked["end"], asked["rates"])
                said = {"value": value}
            except Exception as error:  # noqa: BLE001 - the parent decides what a failure means
                said = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(said), file=answers, flush=True)
    finally:
        for engine in engines:
            engine.close()
        answers.close()
    return 0


def open_engine(task: Task) -> Any:
    import torch

    from microbench import engines, jobs

    torch.set_num_threads(1)
    if task.engine == "gpumux":
        built = jobs.build(task.job, task.size, seed=task.seed)
        return engines.Daemon(built, task.endpoint, task.priority, task.max_slowdown, INFLIGHT)
    built = jobs.build(task.job, task.size, device=task.device, seed=task.seed)
    if task.device == "cpu":
        return engines.PlainCpu(built)
    return engines.PlainCuda(built, graph=task.engine == "graph")


@dataclass(frozen=True)
class Clock:
    """The time, and how to let it pass."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


REAL = Clock()


def run_all(
    engines: Sequence[Any], begin: float, end: float, rates: Sequence[float | None], clock: Clock = REAL
) -> list[Any]:
    """Each engine in a thread of its own if there are several."""
    found: list[Any] = [None] * len(engines)

    def one(place: int) -> None:
        engine, rate = engines[place], rates[place]
        try:
            times = closed(engine, begin, end, clock) if rate is None else arriving(engine, begin, end, rate, clock)
            found[place] = asdict(stats(times, end - begin))
        except Exception as error:  # noqa: BLE001 - raised again below, in the thread that answers
            found[place] = error

    threads = [threading.Thread(target=one, args=(place,)) for place in range(1, len(engines))]
    for thread in threads:
        thread.start()
    one(0)
    for thread in threads:
        thread.join()
    for each in found:
        if isinstance(each, Exception):
            raise each
    return found


def closed(engine: Any, begin: float, end: float, clock: Clock = REAL) -> list[float]:
    """Seconds between the ends of steps, from now until `end`; those that ended before `begin` are left out."""
    out: deque[Any] = deque()
    times: list[float] = []
    index, last = 0, clock.now()
    while last < end:
        while len(out) < INFLIGHT:
            out.append(engine.start(index))
            index += 1
        out.popleft()()
        now = clock.now()
        if begin <= now < end:
            times.append(now - last)
        last = now
    while out:
        out.popleft()()
    return times


def arriving(engine: Any, begin: float, end: float, rate: float, clock: Clock = REAL) -> list[float]:
    """Seconds from each request's arrival to its answer. Arrivals are the same for the same rate and times."""
    draws = random.Random(0)
    times: list[float] = []
    arrival, index = clock.now(), 0
    while True:
        arrival += draws.expovariate(rate)
        if arrival >= end:
            return times
        while (ahead := arrival - clock.now()) > 0:
            if ahead > NEAR_S:
                clock.sleep(ahead - NEAR_S)
        engine.start(index)()
        index += 1
        if arrival >= begin:
            times.append(clock.now() - arrival)


if __name__ == "__main__":
    sys.exit(main())
