"""What it costs a job that its process is confined: round trips and steps of a daemon with confine = auto, over those
of one with confine = off, in turns in one run.

    empty        a step without operators: every system call on its way passes the filter
    transformer  a training step of 25 M parameters: memory, threads
"""

from __future__ import annotations

import sys
from contextlib import ExitStack

import torch
import torch.nn.functional as F
from torch import Tensor

from gpumux import client
from microbench import common
from microbench.daemon import running_daemon
from microbench.draws import transformer
from microbench.rtt import empty, timed, turns

TARGET = 1.03
WORK = transformer


def main(argv: list[str] | None = None) -> int:
    arguments = common.parser(__doc__)
    arguments.add_argument("--repeats", type=int, default=9, help="turns of each")
    arguments.add_argument("--trips", type=int, default=500, help="empty steps a turn")
    arguments.add_argument("--steps", type=int, default=4, help="training steps a turn")
    args = arguments.parse_args(argv)
    torch.set_num_threads(1)
    facts = common.machine()
    empties, trainings = {}, {}
    with ExitStack() as stack:
        for confine in ("auto", "off"):
            daemon = stack.enter_context(running_daemon(threads=1, settings={"GPUMUX_CONFINE": confine}))
            bare = stack.enter_context(client.submit(empty, example=(), name="empty", endpoint=daemon.endpoint))
            empties[confine] = timed(lambda job=bare: job.step().result())  # type: ignore[misc]
            job, batch = training(stack, daemon.endpoint)
            trainings[confine] = timed(lambda job=job, batch=batch: job.step(*batch).result())  # type: ignore[misc]
        samples = {
            "empty": turns(empties, args.repeats, args.trips),
            "transformer": turns(trainings, args.repeats, args.steps),
        }
    print(common.describe(facts))
    rows, result, targets = [], {}, {}
    for name, ways in samples.items():
        medians = {way: [common.percentile(run, 0.5) for run in runs] for way, runs in ways.items()}
        ratio = common.figure([on / off for on, off in zip(medians["auto"], medians["off"], strict=True)])
        figures = {way: common.figure(values) for way, values in medians.items()}
        result[name] = {"seconds": figures, "ratio": ratio}
        targets[name] = {"value": ratio.median, "target": TARGET, "met": ratio.median <= TARGET}
        rows.append(
            [
                name,
                *(f"{1e3 * figures[way].median:.3f}" for way in ("auto", "off")),
                f"{ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})",
            ]
        )
    print(common.table(["ms a step", "confined", "not", "ratio"], rows))
    common.report("confinement", args.out, {"machine": facts, "steps": result, "targets": targets})
    return 0


def training(stack: ExitStack, endpoint: str) -> tuple[client.Job[[Tensor, Tensor]], tuple[Tensor, Tensor]]:
    """The job and its batch."""
    torch.manual_seed(0)
    model, batch = WORK()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    job = client.submit(step, model=model, optimizer=optimizer, example=batch, endpoint=endpoint)
    return stack.enter_context(job), batch


if __name__ == "__main__":
    sys.exit(main())
