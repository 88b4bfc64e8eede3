"""A task of milliseconds: fit a line, in float64. It can send its own process a signal at a score (TOY_SIGNAL=9@3)."""

from __future__ import annotations

import math
import os
from itertools import count

import torch
from torch import nn

direction = "minimize"
scored = [0]
SPACE = """
[lr]
low = 1e-3
high = 0.3
log = true
fusible = true
[batch_size]
choices = [8, 16]
[optimizer]
choices = ["sgd", "adam"]
[momentum]
low = 0.1
high = 0.9
fusible = true
when = { optimizer = "sgd" }
"""


def factory(config):
    width = config.get("width", 8)
    model = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Dropout(0.1), nn.Linear(width, 1)).double()
    if config["optimizer"] == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=config["momentum"])
    else:
        betas = (config.get("beta1", 0.9), 0.999)
        optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"], betas=betas)

    def step(x, y):
        optimizer.zero_grad()
        loss = (model(x).squeeze(1) - y).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step, model, optimizer


def batches(config, start):
    for k in count(start):
        yield data(k, config["batch_size"])


def data(k, size):
    g = torch.Generator().manual_seed(k)
    x = torch.randn(size, 4, generator=g, dtype=torch.float64)
    return x, x.sum(1).tanh()


def score(model, config):
    signal, at = map(int, os.environ.get("TOY_SIGNAL", "0@0").split("@"))
    scored[0] += 1
    if signal and scored[0] == at:
        os.kill(os.getpid(), signal)
    x, y = data(12345, 64)
    return (model(x).squeeze(1) - y).square().mean()


def hyperparameters(config, k):
    return {"lr": config["lr"] * 0.5 ** (k // 10)}


# ---- what users get wrong


def diverges(config):
    step, model, optimizer = factory(config)
    if config["optimizer"] == "sgd":
        with torch.no_grad():
            model[0].weight.fill_(math.nan)
    return step, model, optimizer


def raises(config):
    raise RuntimeError("no such file: weights.pt")


def returns_two(config):
    return factory(config)[:2]
