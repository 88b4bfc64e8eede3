"""Two low jobs that take turns with memory for temporaries (`memory="shared"`), beside the same two without: what they
are charged, the most that both processes hold at once, and how long their steps take.

Each way runs in a daemon of its own, in turns, so that a machine that slows down slows both.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from gpumux import client
from microbench import common
from microbench.daemon import running_daemon
from microbench.real_models import RealModel, build
from microbench.walk import descendants
from microbench.wave_limit import private_bytes

MODELS = ("resnet50", "gpt2")
STEPS, WARM, ROUNDS = 6, 3, 3
WAYS: tuple[Literal["own"], Literal["shared"]] = ("own", "shared")


class HighestTogether:
    """The most private memory of some processes together, in bytes, looked at every few milliseconds inside."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self.bytes = self._now()

    def _now(self) -> int:
        return sum(private_bytes(pid) for pid in self._pids)

    def _look(self) -> None:
        while not self._over.wait(0.003):
            self.bytes = max(self.bytes, self._now())

    def __enter__(self) -> HighestTogether:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def largest(model: RealModel) -> int:
    """The length of its largest batch, so that temporaries weigh beside state."""
    return max(model.batches)


def executors(pid: int) -> set[int]:
    return {each for each in descendants(pid) if "executo" in Path(f"/proc/{each}/comm").read_text()}


def train(way: Literal["own", "shared"], models: Sequence[str], size: str, steps: int) -> dict[str, Any]:
    """Both jobs for so many steps each. Returns the bytes that the device counts for both, the most private memory that
    their processes held together, and the seconds of a pair of steps."""
    with running_daemon(threads=1) as daemon:
        jobs: list[client.Job[Any]] = []
        made = [build(name, size) for name in models]
        try:
            for name, one in zip(models, made, strict=True):
                jobs.append(
                    client.submit(
                        one.step, example=one.batch(0, largest(one)), model=one.model, optimizer=one.optimizer,
                        name=name, endpoint=daemon.endpoint, replay_bytes=0, memory=way,
                    )
                )  # fmt: skip
            for index in range(WARM):
                for job, one in zip(jobs, made, strict=True):
                    float(job.step(*one.batch(index, largest(one))))
            memory = daemon.status()["memory"]
            with HighestTogether(sorted(executors(daemon.process.pid))) as highest:
                begun = time.monotonic()
                for index in range(steps):
                    futures = [job.step(*one.batch(index, largest(one))) for job, one in zip(jobs, made, strict=True)]
                for future in futures:
                    float(future)
                seconds = (time.monotonic() - begun) / steps
        finally:
            for job in jobs:
                job.close(drain=False)
    charged = memory["total_bytes"] - memory["free_bytes"]
    return {"charged": charged, "held": highest.bytes, "seconds": seconds}


def main(argv: list[str] | None = None) -> int:
    arguments = common.parser(__doc__)
    arguments.add_argument("--models", nargs=2, default=MODELS, help="two of microbench.real_models")
    arguments.add_argument("--size", default="full", choices=("full", "tiny"))
    arguments.add_argument("--rounds", type=int, default=ROUNDS)
    arguments.add_argument("--steps", type=int, default=STEPS)
    args = arguments.parse_args(argv)
    torch.set_num_threads(1)
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for number in range(args.rounds):
        for way in WAYS if number % 2 == 0 else WAYS[::-1]:
            found[way].append(train(way, args.models, args.size, args.steps))
    rows = []
    for named, runs in found.items():
        seconds = common.figure([run["seconds"] for run in runs])
        charged, held = (statistics.median(run[key] for run in runs) / 2**20 for key in ("charged", "held"))
        rows.append(
            [named, f"{charged:.0f}", f"{held:.0f}", f"{seconds.median:.2f} ({seconds.low:.2f}-{seconds.high:.2f})"]
        )
    print(f"{' and '.join(args.models)} ({args.size}), {args.steps} steps each, {args.rounds} rounds")
    print(common.table(["memory", "charged MiB", "held MiB", "seconds a pair of steps"], rows))
    common.report("shared_memory", args.out, {"models": list(args.models), "size": args.size, "runs": found})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
