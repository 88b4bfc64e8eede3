"""A Transformer under a memory limit that two waves of it fit into, and a doubled batch does not.

Digits of scikit-learn as sequences of 64 pixels. Each way first runs without a limit, and says what its process took
at most beside what it had when its Programs were loaded. Then each trains in a cgroup of its own, whose limit lies half
way between the waves and the doubled batch. It needs to be allowed to make cgroups (root, as a rule).
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from clients.data import digits
from gpumux import client
from gpumux.errors import GpumuxError
from microbench import common
from microbench.daemon import RunningDaemon, running_daemon
from microbench.walk import descendants

BATCH = 128
EPOCHS = 30
MEASURED_STEPS = 32
ACCURACY = 0.9
LAYERS = 6
CGROUPS = Path("/sys/fs/cgroup")


class Pixels(nn.Module):
    """Pre-norm encoder layers of width 64 over the 64 pixels of an image. Each place has an embedding of its own, and
    one that its pixel is multiplied by."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.value = nn.Parameter(0.1 * torch.randn(64, 64))
        self.place = nn.Parameter(0.1 * torch.randn(64, 64))
        layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.out = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(x.flatten(1)[..., None] * self.value + self.place)
        found: torch.Tensor = self.out(hidden.mean(1))
        return found


@dataclass(frozen=True)
class Way:
    name: str
    batch: int
    given: dict[str, Any]


WAYS = (
    Way("doubled batch", 2 * BATCH, {}),
    Way("two waves", BATCH, {"waves": 2}),
    Way("doubled batch in two microbatches", 2 * BATCH, {"microbatches": 2}),
)


def submit(
    daemon: RunningDaemon, way: Way, example: tuple[torch.Tensor, torch.Tensor]
) -> tuple[nn.Module, client.Job[Any]]:
    model = Pixels()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    job = client.submit(
        step, example=example, model=model, optimizer=optimizer, endpoint=daemon.endpoint, replay_bytes=0, **way.given
    )
    return model, job


def private_bytes(pid: int) -> int:
    """Private memory that a process holds now."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


def executor_of(daemon: RunningDaemon, before: set[int]) -> int:
    """The process of the only job: of those that are new, the one with the most memory."""
    return max(set(descendants(daemon.process.pid)) - before, key=private_bytes)


class Highest:
    """The most private memory of a process, in bytes, looked at every millisecond inside the context."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self.bytes = private_bytes(pid)

    def _look(self) -> None:
        while not self._over.wait(0.001):
            self.bytes = max(self.bytes, private_bytes(self._pid))

    def __enter__(self) -> Highest:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


@contextmanager
def limited(pid: int, nbytes: int) -> Iterator[None]:
    """Let a process take so many more bytes than it holds: inside, it is in a cgroup, where what it holds already is
    not counted. Raises OSError if no cgroup can be made."""
    first = CGROUPS / "memory"
    group = (first if first.is_dir() else CGROUPS) / f"gpumux-{os.getpid()}"
    group.mkdir()
    try:
        (group / ("memory.limit_in_bytes" if first.is_dir() else "memory.max")).write_text(str(nbytes))
        (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        while True:
            try:
                group.rmdir()
                break
            except OSError:  # its process has not ended yet
                time.sleep(0.1)


def train(way: Way, limit: int | None, steps: int, progress: Callable[[str], None]) -> dict[str, Any]:
    """Train one way for so many steps, in a daemon of its own. limit: bytes that its process may take beside what it
    holds when its Programs are loaded; None: no limit, and what it takes is measured."""
    data = digits()
    batches = data.batches(way.batch, seed=2)
    begun = time.monotonic()
    with ExitStack() as stack:
        daemon = stack.enter_context(running_daemon())
        before = set(descendants(daemon.process.pid))
        model, job = submit(daemon, way, next(batches))
        pid = executor_of(daemon, before)
        base = private_bytes(pid)
        if limit is not None:
            stack.enter_context(limited(pid, limit))
        stack.enter_context(job)
        try:
            with Highest(pid) if limit is None else nullcontext() as highest:
                for number in range(steps):
                    loss = job.step(*next(batches))
                    if number % 50 == 0:
                        progress(f"{way.name}: step {number} of {steps}, loss {float(loss):.3f}")
                float(loss)
            charged = job.stats()["memory_bytes"]
        except GpumuxError as error:
            return {"way": way.name, "failed": f"{type(error).__name__}: {error}", "step": number}
        job.sync()
        with torch.no_grad():
            accuracy = float((model(data.x_test).argmax(1) == data.y_test).float().mean())
    found = {"way": way.name, "charged_bytes": charged, "accuracy": accuracy, "steps": steps}
    found["seconds"] = time.monotonic() - begun
    return found if highest is None else {**found, "grown_bytes": highest.bytes - base}


def main(argv: list[str] | None = None) -> int:
    arguments = common.parser(__doc__)
    arguments.add_argument("--epochs", type=int, default=EPOCHS)
    args = arguments.parse_args(argv)
    torch.set_num_threads(1)

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    free = {way.name: train(way, None, MEASURED_STEPS, say) for way in WAYS}
    grown = {name: one["grown_bytes"] for name, one in free.items()}
    say(", ".join(f"{name} grew by {bytes_ / 2**20:.0f} MiB" for name, bytes_ in grown.items()))
    limit = (grown["two waves"] + grown["doubled batch"]) // 2
    ended = {way.name: train(way, limit, args.epochs * digits().steps_per_epoch(way.batch), say) for way in WAYS}
    rows = []
    for way in WAYS:
        one = ended[way.name]
        how = f"accuracy {one['accuracy']:.3f}" if "accuracy" in one else "killed: out of memory"
        rows.append(
            [
                way.name,
                str(way.batch),
                f"{free[way.name]['charged_bytes'] / 2**20:.0f}",
                f"{grown[way.name] / 2**20:.0f}",
                how,
            ]
        )
    print(common.table(["way", "batch", "charged MiB", "grew by MiB", f"under {limit / 2**20:.0f} MiB"], rows))
    waves, doubled = ended["two waves"], ended["doubled batch"]
    targets = {
        "the doubled batch is killed": {"value": "failed" in doubled, "target": True, "met": "failed" in doubled},
        "accuracy of the waves": {
            "value": waves.get("accuracy", 0.0),
            "target": ACCURACY,
            "met": waves.get("accuracy", 0.0) >= ACCURACY,
        },
    }
    results = {"limit_bytes": limit, "free": free, "limited": ended, "targets": targets}
    common.report("wave_limit", args.out, results)
    return 0 if all(target["met"] for target in targets.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
