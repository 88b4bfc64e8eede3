"""Estimated and actual speed-up of data parallelism for four small networks on 1 to 4 ranks (the guidelines' figure 4).

Ranks are processes of this machine with one thread each, which train with torch's DistributedDataParallel over gloo.
Each has the same number of samples for any number of ranks, so n ranks are at best n times as fast.

A round takes each network in turn: rank 0 times its layers alone; then, for each number of ranks, all of them take
steps that exchange nothing, and steps of DistributedDataParallel; further ranks sleep meanwhile. `crowding` is how many
times as long the former take as on one rank: 1 where each rank has a core. Estimates, from the network that `gpumux
plan network` measures just before:

- planner: what `gpumux plan burst` says of data parallelism, a device for each rank
- crowded: the same with layers' times multiplied by crowding
- one sum: the same with one all-reduce of all gradients, as DistributedDataParallel makes for networks this small,
  where the planner takes one for each layer
- lemma: the guidelines' lemma 3.1, with its overhead from the actual speed-up of 2 ranks
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from clients.models.transformer import transformer
from gpumux.plan import guidelines, measure
from gpumux.plan.costs import Network
from gpumux.plan.graph import reduce
from gpumux.plan.layers import LayerProfile, ModelProfile, Timing, dumps, loads
from gpumux.plan.models import LoadedModel
from gpumux.plan.network import measured, ranks
from gpumux.plan.query import PlanQuery
from microbench import common

ESTIMATES = ("planner", "crowded", "one sum", "lemma")
WARM_STEPS = 2
LOOPBACK = "lo"


class Subject(NamedTuple):
    """A network, the shape of a sample and the samples of each rank."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    samples: int


def mlp() -> nn.Module:
    """Many parameters and little work: what exchange costs most."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )


def lenet() -> nn.Module:
    """Two convolutions and three dense layers, as LeNet-5."""
    features = [nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
    features += [nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*features, nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10))


def vgg() -> nn.Module:
    """VGG's pattern at 32 pixels: much work for its parameters."""
    found: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 128)):
        found += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
        found += [nn.Conv2d(after, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*found, nn.Flatten(), nn.Linear(2048, 256), nn.ReLU(), nn.Linear(256, 10))


SUBJECTS = {
    "MLP": Subject(mlp, (1, 28, 28), 128),
    "LeNet": Subject(lenet, (1, 28, 28), 128),
    "VGG": Subject(vgg, (3, 32, 32), 16),
    "Transformer": Subject(transformer, (1, 8, 8), 256),
}


class Taken(NamedTuple):
    """Seconds a step in one round on n ranks, of the slowest: without exchange, and with."""

    alone: float
    exchanging: float


# ---- A rank.


def be_rank(rank: int, asked: dict[str, Any], folder: Path) -> None:
    """Take part in all rounds. Rank 0 writes what was measured."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), asked["ranks"])  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=asked["ranks"])
    groups = {n: dist.new_group(list(range(n))) for n in range(1, asked["ranks"] + 1)}
    found: list[dict[str, Any]] = []
    for number in range(asked["rounds"]):
        for name in asked["networks"]:
            subject = SUBJECTS[name]
            torch.manual_seed(0)
            batch = torch.randn(subject.samples, *subject.shape)
            row: dict[str, Any] = {"round": number, "network": name, "ranks": {}}
            if rank == 0:
                loaded = LoadedModel(name, subject.make(), [batch[:1]])
                row["profile"] = dumps(
                    measure.profile(loaded, device="cpu", batches=[subject.samples], repeats=asked["repeats"])
                )
            for n, group in groups.items():
                dist.barrier()
                if rank < n:
                    row["ranks"][str(n)] = _taken(subject, batch, group, asked["seconds"])
            if rank == 0:
                found.append(row)
                print(f"round {number + 1} of {asked['rounds']}: {name}", file=sys.stderr, flush=True)
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        (folder / "found").write_text(json.dumps(found))


def _taken(subject: Subject, batch: torch.Tensor, group: Any, seconds: float) -> Taken:
    model = subject.make()
    labels = torch.arange(subject.samples) % 10
    alone = _step(model, batch, labels)
    exchanging = _step(DistributedDataParallel(subject.make(), process_group=group), batch, labels)
    first = _timed(alone, WARM_STEPS, group)
    steps = max(3, int(seconds / first))  # the same on all ranks: `first` is the slowest's
    _timed(exchanging, WARM_STEPS, group)
    return Taken(_timed(alone, steps, group), _timed(exchanging, steps, group))


def _step(model: nn.Module, batch: torch.Tensor, labels: torch.Tensor) -> Callable[[], None]:
    """Forward and backward; no optimizer, which the planner leaves out, too."""

    def step() -> None:
        model.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(batch), labels).backward()

    return step


def _timed(step: Callable[[], None], steps: int, group: Any) -> float:
    """Seconds a step: the mean over `steps`, since ranks that share a core take turns, of the slowest rank."""
    dist.barrier(group=group)
    began = time.perf_counter()
    for _ in range(steps):
        step()
    taken = torch.tensor((time.perf_counter() - began) / steps, dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX, group=group)
    return float(taken)


# ---- Estimates.


def estimates(profile: ModelProfile, samples: int, n: int, network: Network, crowding: float) -> dict[str, float]:
    """Speed-up on n ranks over one, by all but the lemma."""
    crowd = slower(profile, crowding)
    one = data_parallel(profile, samples, 1, network)
    return {
        "planner": n * one / data_parallel(profile, samples, n, network),
        "crowded": n * one / data_parallel(crowd, samples, n, network),
        "one sum": n * one / data_parallel(together(crowd), samples, n, network),
    }


def data_parallel(profile: ModelProfile, samples: int, n: int, network: Network) -> float:
    """What the planner says of an iteration on n devices with so many samples each."""
    return PlanQuery(reduce(profile), samples * n, n, (n,), network).data_parallel(n).seconds


def slower(profile: ModelProfile, times: float) -> ModelProfile:
    """The profile of a device on which all takes `times` times as long."""
    layers = tuple(
        replace(layer, times=tuple(Timing(t.samples, t.forward * times, t.backward * times) for t in layer.times))
        for layer in profile.layers
    )
    return replace(profile, layers=layers)


def together(profile: ModelProfile) -> ModelProfile:
    """All layers as one, so that their gradients are summed at once."""
    sums = tuple(
        Timing(at[0].samples, sum(t.forward for t in at), sum(t.backward for t in at))
        for at in zip(*(layer.times for layer in profile.layers), strict=True)
    )
    size = sum(layer.parameter_bytes for layer in profile.layers)
    whole = LayerProfile("all", "all", (), profile.layers[-1].output_bytes, size, sums)
    return replace(profile, layers=(whole,))


def overhead(two: float) -> float | None:
    """Lemma 3.1's overhead for a speed-up on 2 ranks: none if there is no speed-up, 0 if it is more than 2."""
    return max(0.0, (2 - two) / (2 * (two - 1))) if two > 1 else None


# ---- All.


def main(argv: Sequence[str] | None = None) -> int:
    arguments = common.parser(__doc__)
    arguments.add_argument("--ranks", type=int, default=4, help="at most (default 4)")
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--repeats", type=int, default=5, help="of each layer in a round")
    arguments.add_argument("--seconds", type=float, default=0.3, help="of each measurement of steps (default 0.3)")
    arguments.add_argument("--networks", nargs="+", choices=list(SUBJECTS), default=list(SUBJECTS))
    arguments.add_argument("--largest", type=int, default=8 << 20, help="bytes, of the network's measurement")
    args = arguments.parse_args(argv)
    machine = common.machine()
    print(common.describe(machine))
    link = ranks.measure_here(ranks.Measurement(args.ranks, largest=args.largest, rounds=args.rounds))
    asked = {"ranks": args.ranks, "rounds": args.rounds, "repeats": args.repeats, "seconds": args.seconds,
             "networks": args.networks}  # fmt: skip
    found = compared(measure_steps(asked), link.network("here"))
    load_after = common.machine()["load_1min"]
    rows = [
        [f"{name}, {n} ranks", f"{at['crowding'].median:.2f}", _ranged(at["actual"]),
         *(_ranged(at["estimates"][each]) if each in at["estimates"] else "-" for each in ESTIMATES),
         *(f"{at['errors'][each].median:.2f}" if each in at["errors"] else "-" for each in ESTIMATES)]
        for name, by_ranks in found.items()
        for n, at in by_ranks.items()
    ]  # fmt: skip
    print(common.table(["", "crowding", "actual", *ESTIMATES, *(f"{each}/actual" for each in ESTIMATES)], rows))
    sums = {str(each.ranks): each.line()._asdict() for each in link.series if each.kind == "all-reduce"}
    common.report(
        "speedup", args.out,
        {"machine": machine, "load_after": load_after, "all_reduce": sums, "network": json.loads(measured.dumps(link)),
         "networks": found},
    )  # fmt: skip
    return 0


def measure_steps(asked: dict[str, Any]) -> list[dict[str, Any]]:
    """Start the ranks, and return what they measured. RuntimeError if one fails."""
    with tempfile.TemporaryDirectory(prefix="gpumux-speedup-") as name, ExitStack() as stack:
        folder = Path(name)
        processes = []
        for rank in range(asked["ranks"]):
            command = [sys.executable, "-m", "microbench.speedup", "--rank", str(rank), json.dumps(asked), name]
            process = subprocess.Popen(command, env={**os.environ, "GLOO_SOCKET_IFNAME": LOOPBACK})
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        ended: list[int | None] = [None]
        while None in ended and not any(ended):
            time.sleep(ranks.POLL_S)
            ended = [each.poll() for each in processes]
        if any(ended):
            raise RuntimeError(f"ranks ended with {ended}")
        rows: list[dict[str, Any]] = json.loads((folder / "found").read_text())
        return rows


def compared(rows: Sequence[dict[str, Any]], network: Network) -> dict[str, dict[str, dict[str, Any]]]:
    """Figures over the rounds, by network and number of ranks. Speed-ups are of one round: what slows a round down
    slows both sides of its ratios."""
    samples: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        name, profile = row["network"], loads(row["profile"])
        takes = {int(n): Taken(*each) for n, each in row["ranks"].items()}
        base = takes[1].alone
        lemma = overhead(2 * base / takes[2].exchanging) if 2 in takes else None
        for n, took in takes.items():
            crowding, actual = took.alone / base, n * base / took.exchanging
            said = estimates(profile, SUBJECTS[name].samples, n, network, crowding)
            if lemma is not None and n > 2:
                said["lemma"] = guidelines.speedup(n, lemma)
            at = samples.setdefault(name, {}).setdefault(str(n), {"estimates": {}, "errors": {}})
            for key, value in (("crowding", crowding), ("actual", actual), ("step_s", took.exchanging)):
                at.setdefault(key, []).append(value)
            at.setdefault("layers_s", []).append(data_parallel(profile, SUBJECTS[name].samples, 1, network))
            for key, value in said.items():
                at["estimates"].setdefault(key, []).append(value)
                at["errors"].setdefault(key, []).append(value / actual)
    return {
        name: {n: {key: _figures(value) for key, value in at.items()} for n, at in by_ranks.items()}
        for name, by_ranks in samples.items()
    }


def _figures(value: Any) -> Any:
    """Figures of lists, also of those in a map."""
    if isinstance(value, dict):
        return {key: common.figure(each) for key, each in value.items()}
    return common.figure(value)


def _ranged(figure: common.Figure) -> str:
    return f"{figure.median:.2f} ({figure.low:.2f}-{figure.high:.2f})"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        be_rank(int(sys.argv[2]), json.loads(sys.argv[3]), Path(sys.argv[4]))
    else:
        sys.exit(main())
