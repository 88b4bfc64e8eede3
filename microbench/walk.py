"""The files of gpumux that one step crosses, in the client, the daemon and the executor.

A one-operator job runs alone in a daemon of its own. When it is warm, each of the three processes counts the calls
into each file while some more steps run (sys.setprofile, started and stopped by signals). A file is crossed if it is
called at least once a step: what runs now and then (heartbeats, garbage collection) is not counted. A file that two
processes cross counts once.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

import gpumux
from gpumux import client
from microbench import common
from microbench.daemon import running_daemon

TARGET = 20
STEPS = 50
WARM_UP = 100
WAIT_S = 60.0
PACKAGE = str(Path(gpumux.__file__).parent) + os.sep

# Imported by the daemon's processes as sitecustomize. A signal handler runs in the main thread, which in the daemon and
# in the executor is the one that handles steps.
HOOK = """
import collections, json, os, signal, sys
calls = collections.Counter()
def count(frame, event, argument):
    if event == "call":
        calls[frame.f_code.co_filename] += 1
def start(*_):
    calls.clear()
    sys.setprofile(count)
def stop(*_):
    sys.setprofile(None)
    path = os.path.join(DIRECTORY, str(os.getpid()))
    with open(path + ".part", "w") as file:
        json.dump(calls, file)
    os.rename(path + ".part", path)
signal.signal(signal.SIGUSR1, start)
signal.signal(signal.SIGUSR2, stop)
"""


def one_operator(x: Tensor) -> Tensor:
    """The smallest step there is: one operator on one number."""
    return x + 1


def crossed(policy: str = "guarded", steps: int = STEPS) -> dict[str, list[str]]:
    """The files each process crosses with every step, by "client", "daemon" and "executor"."""
    with tempfile.TemporaryDirectory(prefix="gm-walk-") as name:
        directory = Path(name)
        (directory / "sitecustomize.py").write_text(f"DIRECTORY = {name!r}\n{HOOK}")
        path = os.pathsep.join(filter(None, [name, str(Path(PACKAGE).parent), os.environ.get("PYTHONPATH")]))
        # Compiled modules call no profiler.
        settings = {"PYTHONPATH": path, "GPUMUX_CORE": "interpreted"}
        with (
            running_daemon(policy=policy, settings=settings) as daemon,
            client.submit(
                one_operator, example=(x := torch.zeros(()),), priority="high", endpoint=daemon.endpoint
            ) as job,
        ):
            for _ in range(WARM_UP):
                job.step(x).result()
            pids = [daemon.process.pid, *descendants(daemon.process.pid)]
            _signal(pids, signal.SIGUSR1)
            mine: Counter[str] = Counter()
            sys.setprofile(lambda frame, event, _: mine.update([frame.f_code.co_filename] if event == "call" else []))
            try:
                for _ in range(steps):
                    job.step(x).result()
            finally:
                sys.setprofile(None)
            _signal(pids, signal.SIGUSR2)
            found = {pid: _read(directory / str(pid)) for pid in pids}
    executors = [pid for pid in pids[1:] if _files(found[pid], steps)]
    if len(executors) != 1:
        raise RuntimeError(f"{len(executors)} processes ran steps, and there is one job")
    return {
        "client": _files(mine, steps),
        "daemon": _files(found[pids[0]], steps),
        "executor": _files(found[executors[0]], steps),
    }


def together(found: dict[str, list[str]]) -> list[str]:
    """Every file once."""
    return sorted({file for files in found.values() for file in files})


def _files(calls: Counter[str], steps: int) -> list[str]:
    # The first and the last steps may be cut off by the signals.
    least = 0.8 * steps
    return sorted(file.removeprefix(PACKAGE) for file, n in calls.items() if file.startswith(PACKAGE) and n >= least)


def descendants(pid: int) -> list[int]:
    """Processes below this one."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found += [child, *descendants(child)]
    return found


def _signal(pids: list[int], number: int) -> None:
    for pid in pids:
        os.kill(pid, number)


def _read(path: Path) -> Counter[str]:
    """What a process has counted, once it has written it."""
    end = time.monotonic() + WAIT_S
    while not path.exists():
        if time.monotonic() > end:
            raise RuntimeError(f"process {path.name} did not say which files it called")
        time.sleep(0.01)
    return Counter(json.loads(path.read_text()))


def main(argv: list[str] | None = None) -> int:
    arguments = common.parser(__doc__)
    arguments.add_argument("--policy", default="guarded", help="of the daemon")
    arguments.add_argument("--steps", type=int, default=STEPS, help="to count")
    args = arguments.parse_args(argv)
    torch.set_num_threads(1)
    found = crossed(args.policy, args.steps)
    for process, files in found.items():
        print(f"{process}: {len(files)}")
        for file in files:
            print(f"    {file}")
    number = len(together(found))
    met = number <= TARGET
    print(f"files that a step crosses: {number}, at most {TARGET}: {'met' if met else 'MISSED'}")
    targets = {"files a step crosses": {"value": number, "target": TARGET, "met": met}}
    common.report("walk", args.out, {"policy": args.policy, "files": found, "targets": targets})
    return 0


if __name__ == "__main__":
    sys.exit(main())
