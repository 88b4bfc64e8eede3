"""Process-wide settings of precision: carried to the daemon, or refused by name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpumux import client, errors
from gpumux.client.numerics import numerics_now
from tests.client.parity import Work, batches, check, simple_loop

mkldnn = torch.backends.mkldnn
X = torch.randn(4, 6)


@pytest.fixture(autouse=True)
def defaults() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.fp32_precision = "none"
    for kind in (mkldnn.matmul, mkldnn.conv, mkldnn.rnn):
        kind.fp32_precision = "none"


def work() -> Work:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    data = batches((32, 64))

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        return loss

    return Work([model], [opt], [(step, data[0])], simple_loop(data))


@pytest.mark.parametrize("precision", ["bf16", "tf32"])
def test_torchs_newer_interface(precision: str, endpoint: str) -> None:
    mkldnn.matmul.fp32_precision = precision
    check(work, endpoint)


def test_torchs_older_interface(endpoint: str) -> None:
    torch.set_float32_matmul_precision("medium")
    check(work, endpoint)


def test_a_change_between_steps(endpoint: str) -> None:
    def make() -> Work:
        mkldnn.matmul.fp32_precision = "ieee"
        w = work()
        turns = iter(range(20))

        def each() -> None:
            mkldnn.matmul.fp32_precision = "bf16" if 4 <= next(turns) < 12 else "ieee"

        w.loop = simple_loop(batches((32, 64)), 20, each)
        return w

    check(make, endpoint)


def test_what_is_recorded() -> None:
    for precision, recorded in (("none", "highest"), ("ieee", "highest"), ("tf32", "high"), ("bf16", "medium")):
        mkldnn.matmul.fp32_precision = precision
        assert numerics_now().matmul_precision == recorded
    mkldnn.matmul.fp32_precision = "none"
    for legacy in ("highest", "high", "medium"):
        torch.set_float32_matmul_precision(legacy)
        assert numerics_now().matmul_precision == legacy


@pytest.mark.parametrize("kind", ["conv", "rnn"])
def test_what_programs_do_not_carry_is_refused_by_name(kind: str, endpoint: str) -> None:
    model = nn.Linear(6, 3)
    setting = getattr(mkldnn, kind)
    with client.submit(lambda x: model(x), example=(X,), model=model, endpoint=endpoint) as job:
        setting.fp32_precision = "bf16"
        with pytest.raises(errors.CaptureError, match=rf"torch\.backends\.mkldnn\.{kind}\.fp32_precision is 'bf16'"):
            job.step(X)
        setting.fp32_precision = "none"
        job.step(X).result()


def test_the_setting_for_all_backends_is_seen(endpoint: str) -> None:
    model = nn.Linear(6, 3)
    torch.backends.fp32_precision = "tf32"
    with pytest.raises(errors.CaptureError, match=r"by way of torch\.backends\.fp32_precision"):
        client.submit(lambda x: model(x), example=(X,), model=model, endpoint=endpoint)
