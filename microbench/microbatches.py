"""What `submit(..., microbatches=k)` buys and costs: the longest operator, memory and time of a step by k.

A small convolutional classifier (no batch norm), the same batch each time, alone on the CPU device. An operator is
the shortest thing that can be interrupted, so the longest one bounds how long an important job waits for this
one. Its seconds are what the daemon measured of the operator alone; memory is what the daemon reserves for temporaries.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpumux import client
from gpumux.cli.control import Control
from gpumux.program.memory import first_fit
from gpumux.program.profile import loads
from microbench import common
from microbench.daemon import running_daemon

TARGET = 0.5  # longest operator of 4 parts over that of the whole


def main(argv: list[str] | None = None) -> int:
    arguments = common.parser(__doc__)
    arguments.add_argument("--parts", type=int, nargs="+", default=[1, 2, 4, 8], help="numbers of microbatches")
    arguments.add_argument("--batch", type=int, default=64, help="samples a step")
    arguments.add_argument("--repeats", type=int, default=5, help="jobs for each number")
    arguments.add_argument("--steps", type=int, default=10, help="steps a job")
    args = arguments.parse_args(argv)
    facts = common.machine()
    samples: dict[int, list[dict[str, float]]] = {k: [] for k in args.parts}
    with running_daemon() as daemon:
        for _ in range(args.repeats):
            for k in args.parts:
                samples[k].append(measure(daemon.endpoint, k, args.batch, args.steps))
    parts = {str(k): summary(rows) for k, rows in samples.items()}
    print(common.describe(facts))
    print(show(parts))
    result: dict[str, Any] = {"machine": facts, "batch": args.batch, "parts": parts, "targets": {}}
    if {1, 4} <= samples.keys():
        value = parts["4"]["longest_operator_s"].median / parts["1"]["longest_operator_s"].median
        met = value <= TARGET
        result["targets"]["longest operator, 4 parts over 1"] = {"value": value, "target": TARGET, "met": met}
        print(f"longest operator, 4 parts over 1: {value:.3f}, target {TARGET}: {'met' if met else 'MISSED'}")
    common.report("microbatches", args.out, result)
    return 0


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.GroupNorm(8, 64), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 64, 256), nn.ReLU(), nn.Linear(256, 10),
    )  # fmt: skip


def measure(endpoint: str, k: int, batch: int, steps: int) -> dict[str, float]:
    """Seconds of the longest operator and of a step on the device, bytes of temporaries."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x, y = torch.randn(batch, 3, 32, 32), torch.randint(0, 10, (batch,))

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    with client.submit(
        step, example=(x, y), model=model, optimizer=optimizer, microbatches=k, name="microbatches", endpoint=endpoint
    ) as job:
        futures = [job.step(x, y) for _ in range(steps + 3)]
        for future in futures:
            future.result()
        with Control(endpoint) as control:
            profile = loads(control.profile(job.id).decode())
        memory = max(first_fit(p.program).peak_bytes for p in job._remote.programs.values())
        job.sync()
    device = sorted(f.times.device_s for f in futures[3:])  # the first ones are measured and cut
    longest = max(op.seconds for op in profile.ops)
    return {"longest_operator_s": longest, "step_s": device[len(device) // 2], "temporary_bytes": float(memory)}


def summary(rows: list[dict[str, float]]) -> dict[str, common.Figure]:
    return {key: common.figure([row[key] for row in rows]) for key in rows[0]}


def show(parts: dict[str, dict[str, common.Figure]]) -> str:
    rows = [
        [
            k, f"{m['longest_operator_s'].median * 1e3:.2f} ms", f"{m['step_s'].median * 1e3:.1f} ms",
            f"{m['temporary_bytes'].median / 2**20:.1f} MiB",
        ]
        for k, m in parts.items()
    ]  # fmt: skip
    return common.table(["microbatches", "longest operator", "step on the device", "temporaries"], rows)


if __name__ == "__main__":
    sys.exit(main())
