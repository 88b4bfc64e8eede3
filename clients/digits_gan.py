"""Train a GAN on handwritten digits: two steps, two optimizers, one job.

    python -m clients.digits_gan

The noise is drawn inside the steps, from the job's own generator. The distance between generated
and real images (Frechet, on pixels) falls as training goes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from clients.common import Progress, final_state, finish, gate, outcome, parser, run
from clients.data import digits
from clients.job import Future, open_job
from clients.models.gan import NOISE, gan

Array = np.ndarray[Any, np.dtype[np.float64]]


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    generator, discriminator = gan(args.size)
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    data = digits()
    batches = data.batches(args.batch_size, args.seed)
    per_epoch = data.steps_per_epoch(args.batch_size)
    total = args.steps or args.epochs * per_epoch

    def discriminate(real: Tensor) -> Tensor:
        d_optimizer.zero_grad()
        fake = generator(torch.randn(len(real), NOISE)).detach()
        loss = F.softplus(-discriminator(real)).mean() + F.softplus(discriminator(fake)).mean()
        loss.backward()
        d_optimizer.step()
        return loss

    def generate() -> Tensor:
        g_optimizer.zero_grad()
        loss = F.softplus(-discriminator(generator(torch.randn(args.batch_size, NOISE)))).mean()
        loss.backward()
        g_optimizer.step()
        return loss

    def sample(noise: Tensor) -> Tensor:
        generator.eval()
        with torch.no_grad():
            images: Tensor = generator(noise)
        generator.train()
        return images

    noise = torch.from_numpy(np.random.default_rng(args.seed).normal(size=(512, NOISE)).astype(np.float32))
    result = outcome(args, "digits-gan")
    distances: list[float] = []
    progress = Progress(result.client, total)
    with open_job(
        discriminate,
        plain=args.plain,
        example=(data.x_train[: args.batch_size],),
        model=[generator, discriminator],
        optimizer=[g_optimizer, d_optimizer],
        priority=args.priority,
        name=result.client,
        seed=args.seed,
        endpoint=args.endpoint,
        microbatches=args.microbatches,
    ) as job:
        generator_step = job.add(generate, example=())
        images = job.add(sample, example=(noise,))
        distances.append(frechet(images(noise).result(), data.x_train))
        pending: list[Future] = []
        gate(args)
        result.began = time.monotonic()
        for done in range(1, total + 1):
            pending += [job.step(next(batches)[0]), generator_step()]
            progress.show(done, f"distance {distances[-1]:.2f}")
            if done % per_epoch == 0 or done == total:
                result.count(pending)
                pending.clear()
                distances.append(frechet(images(noise).result(), data.x_train))
                d_loss, g_loss = result.losses[-2:]
                progress.show(done, f"d {d_loss:.3f}  g {g_loss:.3f}  distance {distances[-1]:.2f}", keep=True)
        result.wall_s = time.monotonic() - result.began
        job.sync()
    result.extra = {"distance": distances}
    state = final_state(
        {"generator": generator, "discriminator": discriminator},
        {"g_optimizer": g_optimizer, "d_optimizer": d_optimizer},
    )
    finish(args, result, state)


def frechet(a: Tensor, b: Tensor) -> float:
    """Distance between two sets of images, each seen as one normal distribution over its pixels."""
    mean_a, cov_a = _moments(a)
    mean_b, cov_b = _moments(b)
    # The trace of a matrix root is the sum of the roots of its eigenvalues: here real, none below zero.
    roots = np.sqrt(np.linalg.eigvals(cov_a @ cov_b).real.clip(min=0))
    return float(((mean_a - mean_b) ** 2).sum() + np.trace(cov_a + cov_b) - 2 * roots.sum())


def _moments(images: Tensor) -> tuple[Array, Array]:
    pixels = images.flatten(1).double().numpy()
    return pixels.mean(0), np.cov(pixels, rowvar=False)


def main(argv: Sequence[str] | None = None) -> int:
    return run(train, parser("Train a GAN on handwritten digits.", epochs=10), argv)


if __name__ == "__main__":
    sys.exit(main())
