"""Process-wide settings of precision: carried to the daemon, or refused by name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpumux import client, errors
from gpumux.capture.state import StateTable
from gpumux.capture.watch.watches import numerics_now, precisions
from gpumux.client.job import exactness
from gpumux.fuse.member import Member
from gpumux.program.ir import Numerics
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
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = True


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


def for_a_gpu(model: nn.Module, x: torch.Tensor) -> tuple[StateTable, Numerics]:
    """What a daemon on a GPU is told of a model on the CPU."""
    member = Member("step", lambda x: model(x), [model], [], max_variants=1, devices=("cpu", "cuda"), twice=False)
    try:
        return member.table, member.choose((x,), {}).program.lowered.program.numerics
    finally:
        member.release()


def test_for_a_gpu_the_gpus_switches_are_read_wherever_the_model_lies() -> None:
    model = nn.Linear(6, 3)
    assert for_a_gpu(model, X)[1] == Numerics()
    torch.backends.cuda.matmul.allow_tf32 = True
    assert for_a_gpu(model, X)[1].matmul_precision == "high"
    assert numerics_now().matmul_precision == "highest"  # for the CPU, which has a switch of its own
    torch.backends.cuda.matmul.allow_tf32 = False
    mkldnn.matmul.fp32_precision = "bf16"
    assert for_a_gpu(model, X)[1].matmul_precision == "highest"


@pytest.mark.parametrize("allowed", [True, False])
def test_whether_convolutions_may_be_rounded_goes_with_a_program_for_a_gpu(allowed: bool) -> None:
    torch.backends.cudnn.allow_tf32 = allowed
    table, numerics = for_a_gpu(nn.Conv2d(1, 2, 3), torch.randn(2, 1, 8, 8))
    assert numerics.conv_precision == ("tf32" if allowed else "ieee")
    assert numerics_now().conv_precision == "tf32", "it means nothing on a CPU, and Programs for it stay what they were"
    assert table.tf32 == allowed
    assert exactness(table, {})["tolerance"]["float32"] == (5e-3 if allowed else 1e-4)


def test_products_in_tf32_have_its_tolerance_and_other_types_have_theirs() -> None:
    table, _ = for_a_gpu(nn.Linear(6, 3), X)
    assert exactness(table, {})["tolerance"]["float32"] == 1e-4
    torch.backends.cuda.matmul.allow_tf32 = True
    table, _ = for_a_gpu(nn.Linear(6, 3), X)
    assert exactness(table, {})["tolerance"]["float32"] == 5e-3
    table, _ = for_a_gpu(nn.Linear(6, 3).double(), X.double())
    assert exactness(table, {})["tolerance"]["float32"] == 1e-4


def test_settings_of_a_gpu_that_differ_for_convolutions_and_recurrent_layers_are_refused_by_name() -> None:
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    with pytest.raises(
        errors.CaptureError, match=r"cudnn\.conv\.fp32_precision is 'ieee' and .*rnn\.fp32_precision 'tf32'"
    ):
        numerics_now("cuda")
    torch.backends.cudnn.rnn.fp32_precision = "ieee"
    assert numerics_now("cuda").conv_precision == "ieee"


@pytest.mark.parametrize("switch", ["cudnn", "cuda.matmul"])
def test_a_changed_switch_of_a_gpu_is_seen_between_two_calls(switch: str) -> None:
    owner = torch.backends.cudnn if switch == "cudnn" else torch.backends.cuda.matmul
    before = precisions().read()
    owner.allow_tf32 = not owner.allow_tf32
    assert precisions().read() != before


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
