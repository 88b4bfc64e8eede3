"""The loop of the two classifiers: pipelined steps, an evaluation each epoch, the result written."""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

from clients.common import Progress, final_state, finish, gate, outcome
from clients.data import Digits
from clients.job import Future, Step, open_job


def fit(
    args: argparse.Namespace,
    name: str,
    data: Digits,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    train_step: Step,
    count_correct: Step,
) -> None:
    """Train on `data`, plainly or as a gpumux job, as `args` says. Nothing waits for a loss inside
    an epoch, so that the next batch is ready before the device asks for it."""
    batches = data.batches(args.batch_size, args.seed)
    first = next(data.batches(args.batch_size, args.seed))
    per_epoch = data.steps_per_epoch(args.batch_size)
    total = args.steps or args.epochs * per_epoch
    result = outcome(args, name)
    progress = Progress(name, total)

    with open_job(
        train_step,
        plain=args.plain,
        example=first,
        model=model,
        optimizer=optimizer,
        priority=args.priority,
        name=name,
        seed=args.seed,
        endpoint=args.endpoint,
        microbatches=args.microbatches,
    ) as job:
        test = (data.x_test, data.y_test)
        correct = job.add(count_correct, example=test)
        result.accuracy.append(float(correct(*test)) / len(data.y_test))
        pending: list[Future] = []
        gate(args)
        result.began = time.monotonic()
        for done in range(1, total + 1):
            pending.append(job.step(*next(batches)))
            progress.show(done, f"accuracy {result.accuracy[-1]:.3f}")
            if done % per_epoch == 0 or done == total:
                result.count(pending)
                pending.clear()
                result.accuracy.append(float(correct(*test)) / len(data.y_test))
                progress.show(done, f"loss {result.losses[-1]:.4f}  accuracy {result.accuracy[-1]:.3f}", keep=True)
        result.wall_s = time.monotonic() - result.began
        job.sync()
    finish(args, result, final_state({name: model}, {"optimizer": optimizer}))
