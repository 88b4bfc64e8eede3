"""Training as one array changes no model's convergence: ResNet-18 with three learning rates, alone and as one (HFTA,
appendices D and H.2, figure 11).

    python -m microbench.convergence --out microbench/results/cpu-convergence.json --picture convergence.png

Each model is trained by its plain loop, then all as one `fuse.Array`, in double precision, on the same batches. The
paper shows that the curves of losses lie on each other; here losses are compared step by step, and what was learned at
the end. Adadelta and the learning rates are the paper's. Its images are CIFAR-10's and its batch is 1000; ours are
drawn, with labels that follow from them (clients/models/workloads.py), and the batch is one that a CPU trains on.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clients.models.workloads import SIZES, Workload, workload
from gpumux import fuse
from gpumux.cli.arguments import whole
from gpumux.cli.text import ProgressLine
from microbench import common
from microbench.charts import Panel, curves

RATES = (0.0005, 0.001, 0.002)
WITHIN = 1e-9
NAMES = {"alone": "each by its plain loop", "array": "as one array"}


def main(argv: list[str] | None = None) -> int:
    parser = common.parser(__doc__)
    parser.add_argument("--size", choices=SIZES, default="full", help="full: 11 million parameters (default)")
    parser.add_argument("--batch", type=whole, default=8, metavar="SAMPLES", help="default 8")
    parser.add_argument("--steps", type=whole, default=200, help="default 200")
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES), help="learning rates, one model each")
    parser.add_argument("--picture", type=Path, metavar="FILE.png", help="draw the losses")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    found = compare(workload("resnet18", args.size, args.batch, torch.float64), args.rates, args.steps)
    facts = common.machine()
    print(common.describe(facts))
    rows = [
        (f"{each['lr']:g}", f"{each['alone'][0]:.4f}", f"{each['alone'][-1]:.4f}", f"{each['losses']:.1e}",
         f"{each['state']:.1e}")
        for each in found
    ]  # fmt: skip
    print(common.table(("learning rate", "first loss", "last loss", "losses differ by", "state differs by"), rows))
    most = max(max(each["losses"], each["state"]) for each in found)
    targets = {"most that losses or state differ by": {"value": most, "target": WITHIN, "met": most <= WITHIN}}
    options = {name: getattr(args, name) for name in ("size", "batch", "steps", "rates")}
    common.report("convergence", args.out, {"machine": facts, **options, "models": found, "targets": targets})
    if args.picture is not None:
        draw(args.picture, found)
    return int(most > WITHIN)


def compare(of: Workload, rates: Sequence[float], steps: int) -> list[dict[str, Any]]:
    """For each learning rate: the losses of both ways, and the most that they, and parameters, buffers and optimizer
    state at the end, differ by: absolutely below 1, relative to the value above."""
    configs = [{"lr": lr, "seed": seed} for seed, lr in enumerate(rates)]
    line = ProgressLine()
    alone: list[list[float]] = [[] for _ in configs]
    together: list[list[float]] = [[] for _ in configs]
    ends = []
    for config, losses in zip(configs, alone, strict=True):
        step, model, optimizer = of.factory(config)
        for n in range(steps):
            losses.append(step(*of.batch(n)).item())
            line.say(f"learning rate {config['lr']:g} alone: step {n + 1} of {steps}")
        ends.append(_tensors({"model": model.state_dict(), "optimizer": optimizer.state_dict()}))
    with fuse.Array(of.factory, configs, of.batch(0), times_file=None) as array:
        for n in range(steps):
            for losses, loss in zip(together, array.step(*of.batch(n)), strict=True):
                losses.append(loss.item())
            line.say(f"all as one array: step {n + 1} of {steps}")
        states = [_tensors(array.state_dict(n)) for n in range(len(configs))]
    line.end()
    return [
        {
            "lr": lr, "alone": alone[n], "array": together[n],
            "losses": _apart(*(torch.tensor(way[n], dtype=torch.float64) for way in (alone, together))),
            "state": max(_apart(a, b) for a, b in zip(ends[n], states[n], strict=True)),
        }
        for n, lr in enumerate(rates)
    ]  # fmt: skip


def _tensors(state: Any) -> list[Tensor]:
    """All tensors of nested dictionaries and lists, in order."""
    if isinstance(state, Tensor):
        return [state.detach().double().clone()]
    if isinstance(state, dict):
        return [tensor for value in state.values() for tensor in _tensors(value)]
    return [tensor for value in state for tensor in _tensors(value)] if isinstance(state, list | tuple) else []


def _apart(one: Tensor, other: Tensor) -> float:
    return float(((one - other).abs() / one.abs().clamp(min=1.0)).max()) if one.numel() else 0.0


def draw(path: Path, found: Sequence[dict[str, Any]]) -> None:
    panels = [
        Panel(
            f"learning rate {each['lr']:g}",
            {way: [(n + 1, loss, loss, loss) for n, loss in enumerate(each[way])] for way in NAMES},
        )
        for each in found
    ]
    curves(path, "ResNet-18: training loss alone and as one array", panels, NAMES, ("step", "loss"), doubling=False)


if __name__ == "__main__":
    sys.exit(main())
