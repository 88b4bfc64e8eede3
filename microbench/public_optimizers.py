"""Optimizers as others publish them: each trains a small network plainly and through a daemon, to the same bits.

    pip install --no-deps pytorch-optimizer torch-optimizer pytorch_ranger adabelief-pytorch tabulate colorama
    python -m microbench.public_optimizers pytorch_optimizer torch_optimizer adabelief_pytorch --out FILE.json

Each is constructed with its defaults. Those that can't be (another optimizer inside, two calls a step) are counted as
"needs more". What is refused is listed with its reason; with --replay NAME one of them runs alone, and says where.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import logging
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpumux import client
from gpumux.errors import GpumuxError
from microbench import common
from microbench.daemon import running_daemon

STEPS = 12
SEED = 3

# Losses of the steps and what is to be equal at the end, for a daemon's endpoint, or plainly.
Train = Callable[[str | None], tuple[list[float], list[Tensor]]]


class Outcome(NamedTuple):
    """kind: "equal", "differs", "refused" or "needs more". why: the error's class and text."""

    name: str
    kind: str
    why: str = ""


def optimizers(module: str) -> dict[str, type[torch.optim.Optimizer]]:
    """The classes that a module offers, by name."""
    found = vars(importlib.import_module(module))
    return {
        name: value
        for name, value in sorted(found.items())
        if inspect.isclass(value) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(SEED)
    for _ in range(STEPS):
        yield torch.randn(4, 3, 8, 8, generator=random), torch.randint(0, 5, (4,), generator=random)


def trained(make: Callable[..., Any], daemon: str | None) -> tuple[list[float], list[Tensor]]:
    """Losses, and the parameters at the end. `daemon`: its endpoint; None trains plainly."""
    torch.manual_seed(SEED)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 16), nn.Tanh(), nn.Linear(16, 5)
    )  # fmt: skip
    try:
        optimizer = make(model.parameters())
    except TypeError:
        optimizer = make(model.parameters(), lr=1e-3)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    losses = losses_of(step, list(batches()), model, optimizer, daemon, seed=SEED)
    return losses, [p.detach() for p in model.parameters()]


def losses_of(
    step: Callable[..., Tensor], data: Sequence[tuple[Any, ...]], model: Any, optimizer: Any, daemon: str | None, *,
    seed: int,
) -> list[float]:  # fmt: skip
    """The losses of a step on these batches, through the daemon at that endpoint; None: plainly. `seed`: of its
    draws."""
    torch.manual_seed(seed)
    if daemon is None:
        return [step(*batch).item() for batch in data]
    with client.submit(step, example=data[0], model=model, optimizer=optimizer, endpoint=daemon, rng="client") as job:
        return [float(job.step(*batch)) for batch in data]


def tried(name: str, train: Train, daemon: str) -> Outcome:
    """How training through the daemon at that endpoint compares with training plainly."""
    try:
        losses, weights = train(None)
    except Exception as error:  # noqa: BLE001 - whatever it wants, it is not what the others want
        return Outcome(name, "needs more", _short(error))
    try:
        got, ours = train(daemon)
    except GpumuxError as error:
        return Outcome(name, "refused", _short(error))
    same = all(torch.equal(a, b) for a, b in zip(weights, ours, strict=True))
    first = next((at for at, (a, b) in enumerate(zip(losses, got, strict=True)) if a != b), len(losses))
    equal = same and first == len(losses)
    return Outcome(name, "equal") if equal else Outcome(name, "differs", f"from step {first}")


def _short(error: Exception) -> str:
    text = str(error.message if isinstance(error, GpumuxError) else error).splitlines() or [""]
    here = re.sub(r"\S*/([^/\s]+/[^/\s]+\.py:\d+)", r"\1", text[0])  # where they are installed is of no interest
    return f"{type(error).__name__}: {here[:200]}"


def main(argv: list[str] | None = None) -> int:
    parser = common.parser(__doc__)
    parser.add_argument("modules", nargs="+", metavar="MODULE", help="with optimizers, such as torch.optim")
    parser.add_argument("--replay", metavar="NAME", help="this one alone, with the whole error")
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    logging.getLogger("gpumux").setLevel(logging.ERROR)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the daemon's executors
    packages: dict[str, Any] = {}
    try:
        with running_daemon() as daemon:
            for module in args.modules:
                found = optimizers(module)
                if args.replay:
                    if args.replay in found:
                        return replay(partial(trained, found[args.replay]), daemon.endpoint)
                    continue
                outcomes = []
                for at, (name, make) in enumerate(found.items(), 1):
                    outcomes.append(tried(name, partial(trained, make), daemon.endpoint))
                    print(f"{module} {at}/{len(found)} {name}: {outcomes[-1].kind}", file=sys.stderr, flush=True)
                packages[module] = packed(module, outcomes)
    finally:
        torch.set_num_threads(threads)
    if args.replay:
        print(f"none of {', '.join(args.modules)} has {args.replay}", file=sys.stderr)
        return 1
    rows = [
        [f"{module} {one['version']}", *(str(len(one[kind])) for kind in ("equal", "differs", "refused", "needs more"))]
        for module, one in packages.items()
    ]
    print(common.table(["optimizers of", "equal", "differs", "refused", "needs more"], rows))
    for one in packages.values():
        for kind in ("differs", "refused"):
            for name, why in one[kind].items():
                print(f"{kind}: {name}: {why}")
    common.report("public_optimizers", args.out, {"steps": STEPS, "packages": packages})
    return 1 if any(one["differs"] for one in packages.values()) else 0


def packed(module: str, outcomes: list[Outcome]) -> dict[str, Any]:
    """The version of the package that a module belongs to, and names by outcome, with the reasons."""
    package = module.partition(".")[0]
    version = "unknown"
    for name in importlib.metadata.packages_distributions().get(package, []):
        version = importlib.metadata.version(name)
    kinds: dict[str, Any] = {"equal": [one.name for one in outcomes if one.kind == "equal"]}
    for kind in ("differs", "refused", "needs more"):
        kinds[kind] = {one.name: one.why for one in outcomes if one.kind == kind}
    return {"version": version, **kinds}


def replay(train: Train, daemon: str) -> int:
    """Print both runs, or the whole error. Returns 1 unless they are equal."""
    want = train(None)
    try:
        got = train(daemon)
    except GpumuxError:
        traceback.print_exc()
        return 1
    print(f"losses plainly:           {want[0]}\nlosses through a daemon:  {got[0]}")
    return int(want[0] != got[0] or not all(map(torch.equal, want[1], got[1])))


if __name__ == "__main__":
    sys.exit(main())
