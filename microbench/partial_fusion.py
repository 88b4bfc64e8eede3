"""How much is left of fusion where models differ in some blocks: ResNet-18s of which fewer and fewer blocks are alike
(HFTA, appendix H.4, figure 17).

    python -m microbench.partial_fusion --out microbench/results/cpu-partial-fusion.json

The paper turns fusion off for one block after another. Here the models really differ there, as those of an
architecture search do: a block that is not alike has another width inside in each model, so nothing of it can run for
several. Each array (`fuse.Array(..., partial=True)`) takes turns with the plain loops of the same models.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpumux import fuse
from gpumux.cli.arguments import whole
from gpumux.cli.text import ProgressLine
from gpumux.plan.zoo import BasicBlock, ResNet
from microbench import common

BLOCKS = 8  # of ResNet-18
WARM_UP = 6  # steps, after which an array has chosen how its operators run
Train = Callable[[Tensor, Tensor], Any]


def main(argv: list[str] | None = None) -> int:
    parser = common.parser(__doc__)
    parser.add_argument("--models", type=whole, default=30, help="default 30, as in the paper")
    parser.add_argument("--channels", type=whole, default=8, help="of the first stage; the paper's model has 64")
    parser.add_argument("--edge", type=whole, default=16, help="pixels of an image's edge; the paper's have 32")
    parser.add_argument("--batch", type=whole, default=4, metavar="SAMPLES")
    parser.add_argument("--alike", type=int, nargs="+", default=list(range(BLOCKS, -1, -1)), choices=range(BLOCKS + 1),
                        metavar="BLOCKS", help="how many blocks are alike (default: 8 down to 0)")  # fmt: skip
    parser.add_argument("--repeats", type=whole, default=5, help="turns of each way")
    parser.add_argument("--steps", type=whole, default=3, help="of a turn")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    draws = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 10, (args.batch,), generator=draws)
    batch = torch.randn(args.batch, 3, args.edge, args.edge, generator=draws) + labels.view(-1, 1, 1, 1) / 5, labels
    line = ProgressLine()
    found = []
    for alike in args.alike:
        line.begin(f"{alike} of {BLOCKS} blocks alike: {args.models} models are captured")
        configs = [{"model": b, "unlike": BLOCKS - alike, "channels": args.channels} for b in range(args.models)]
        found.append({"alike": alike, **compare(configs, batch, args.repeats, args.steps)})
    line.end()
    facts = common.machine()
    print(common.describe(facts))
    rows = [
        (str(each["alike"]), f"{each['ratio'].median:.2f} ({each['ratio'].low:.2f} to {each['ratio'].high:.2f})",
         f"{each['for_all']} of {each['operators']}")
        for each in found
    ]  # fmt: skip
    print(common.table(("blocks alike", "array over plain loops", "operators of the array that run for all"), rows))
    options = {name: value for name, value in vars(args).items() if name != "out"}
    common.report("partial_fusion", args.out, {"machine": facts, "options": options, "found": found})
    return 0


def resnet(config: dict[str, Any]) -> nn.Module:
    """ResNet-18 whose last blocks, `unlike` many, have a width inside that no other model's have."""
    torch.manual_seed(config["model"])
    model = ResNet((2, 2, 2, 2), 0, 10, config["channels"])
    blocks = [block for block in model.modules() if isinstance(block, BasicBlock)]
    for block in blocks[BLOCKS - config["unlike"] :]:
        before, after = block.conv1, block.conv2
        inside = after.out_channels + config["model"] + 1
        block.conv1 = nn.Conv2d(before.in_channels, inside, 3, before.stride[0], padding=1, bias=False)
        block.bn1 = nn.BatchNorm2d(inside)
        block.conv2 = nn.Conv2d(inside, after.out_channels, 3, padding=1, bias=False)
    return model


def factory(config: dict[str, Any]) -> tuple[Train, nn.Module, torch.optim.Optimizer]:
    model = resnet(config)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=0.01 * (1 + config["model"]))

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step, model, optimizer


def compare(
    configs: Sequence[dict[str, Any]], batch: tuple[Tensor, Tensor], repeats: int, steps: int
) -> dict[str, Any]:
    """Models' steps a second of both ways, by turn, their ratio, and how many of the array's operators run for all."""
    alone = [factory(config)[0] for config in configs]

    def one_after_another(x: Tensor, y: Tensor) -> None:
        for step in alone:
            step(x, y)

    with fuse.Array(factory, configs, batch, times_file=None, partial=True) as array:
        ways: dict[str, Train] = {"array": array.step, "plain": one_after_another}
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for train in ways.values():
            for _ in range(WARM_UP):
                train(*batch)
        for repeat in range(repeats):
            for name, train in list(ways.items())[:: -1 if repeat % 2 else 1]:
                rates[name].append(rate(partial(train, *batch), len(configs), steps))
        chosen = [decision.how != "per-model" for decision in array.decisions]
    ratio = common.figure([a / b for a, b in zip(rates["array"], rates["plain"], strict=True)])
    return {"rates": rates, "ratio": ratio, "for_all": sum(chosen), "operators": len(chosen)}


def rate(train: Callable[[], Any], models: int, steps: int) -> float:
    began = time.perf_counter()
    for _ in range(steps):
        train()
    return models * steps / (time.perf_counter() - began)


if __name__ == "__main__":
    sys.exit(main())
