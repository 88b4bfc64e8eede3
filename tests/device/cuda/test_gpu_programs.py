"""Steps traced as a GPU runs them, carried out by a daemon that has one (of host memory, with a GPU's kernels written
out)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from gpumux import client
from gpumux.capture import step as variants
from gpumux.capture.gpu.autocast import autocast_of_a_gpu
from gpumux.capture.gpu.operators import as_on_a_gpu
from gpumux.capture.patches import RngTape
from gpumux.capture.watch.watches import modes
from gpumux.errors import CaptureError
from tests.client.parity import Work, batches, plain, simple_loop, through
from tests.device.cuda.kernels import of_a_gpu
from tests.device.cuda.serving import close

STEPS = 4  # two operator by operator, then captured pieces


def training(
    net: Callable[[], nn.Module],
    shape: tuple[int, ...] = (4, 3, 16),
    dtype: torch.dtype = torch.float64,
    momentum: float = 0.9,
) -> Callable[[], Work]:
    def make() -> Work:
        model = net().to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
        data = [(x.to(dtype), y) for x, y in batches(shape)]

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        return Work([model], [optimizer], [(step, data[0])], simple_loop(data, STEPS))

    return make


class Recurrent(nn.Module):
    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.layers = kind(16, 12, 2, **options)
        self.out = nn.Linear(12 * (2 if options.get("bidirectional") else 1), 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layers(x)[0]
        return self.out(out.mean(1) if self.layers.batch_first else out.mean(0)[:1].expand(x.shape[0], -1))


class Cells(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.lstm, self.gru, self.out = nn.LSTMCell(16, 12, bias), nn.GRUCell(12, 12, bias), nn.Linear(12, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = c = g = x.new_zeros(x.shape[0], 12)
        for row in x.unbind(1):
            h, c = self.lstm(row, (h, c))
            g = self.gru(h, g)
        return self.out(g)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.bare = nn.RMSNorm(16), nn.RMSNorm((3, 16), elementwise_affine=False)
        self.out = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.bare(self.norm(x) + x).mean(1))


class Sampled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.at, self.out = nn.Linear(16, 2), nn.Linear(3, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grid = self.at(x).tanh().unsqueeze(2)
        return self.out(F.grid_sample(x.unsqueeze(1), grid, align_corners=True).flatten(1))


NETS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: Recurrent(nn.LSTM, batch_first=True),
    "lstm, time first": lambda: Recurrent(nn.LSTM),
    "lstm both ways": lambda: Recurrent(nn.LSTM, batch_first=True, bidirectional=True, bias=False),
    "gru": lambda: Recurrent(nn.GRU, batch_first=True),
    "rnn": lambda: Recurrent(nn.RNN, batch_first=True, nonlinearity="relu"),
    "cells": Cells,
    "cells without bias": lambda: Cells(False),
    "rms norm": Normed,
    "grid sample": Sampled,
}


@pytest.mark.parametrize("name", NETS)
@pytest.mark.every(9)
def test_training_is_what_it_is_on_the_cpu(name: str, endpoint: str) -> None:
    make = training(NETS[name])
    want, want_state = plain(make)
    got, got_state = through(make, endpoint)
    close(want, got, 1e-9)
    close(want_state, got_state, 1e-9)


class Dropping(nn.Module):
    def __init__(self, recomputed: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 10)
        self.recomputed = recomputed

    def block(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(torch.tanh(self.second(F.dropout(x, 0.3))), 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.first(x))
        x = checkpoint(self.block, x, use_reentrant=False) if self.recomputed else self.block(x)
        return self.out(x.mean(1))


DROPPING: dict[str, Callable[[], nn.Module]] = {
    "dropout": Dropping,
    "dropout, recomputed": lambda: Dropping(True),
    "between layers": lambda: Recurrent(nn.GRU, batch_first=True, dropout=0.4),
}


@pytest.mark.parametrize("name", DROPPING)
def test_masks_are_those_of_a_run_that_drops_as_a_gpu_does(name: str, endpoint: str) -> None:
    """The reference draws with the same operators, in the same order, from a generator of the same seed; whatever it
    computes beside that is the CPU's."""
    make = training(DROPPING[name])
    with of_a_gpu(), as_on_a_gpu(RngTape(), True):
        want, want_state = plain(make)
    got, got_state = through(make, endpoint)
    close(want, got, 1e-9)
    close(want_state, got_state, 1e-9)
    assert len({float(loss) for loss in want}) == STEPS


class Attending(nn.Module):
    def __init__(self, mask: str = "", dropout: float = 0.0, heads: int = 2) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 10)
        self.mask, self.dropout, self.heads = mask, dropout, heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mask = None
        if self.mask:
            allowed = torch.ones(8, 8, dtype=torch.bool, device=x.device).tril()
            mask = allowed if self.mask == "bool" else torch.zeros(8, 8, device=x.device).masked_fill(~allowed, -1e9)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=self.dropout if self.training else 0.0)
        return self.out(out.transpose(1, 2).flatten(2).mean(1))


class Grouped(nn.Module):
    """Four heads of queries on two of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 64), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(2, (-1, 8)).transpose(1, 2) for part in self.qkv(x).split((32, 16, 16), 2))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(out.transpose(1, 2).flatten(2).mean(1))


def test_attention_in_groups_goes_through_a_fused_operator(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As products it would keep the scores of all pairs."""
    make = training(Grouped, (4, 8, 32), torch.float32, momentum=0.0)
    want, want_state = plain(make)
    targets: set[str] = set()
    lower = variants.lower

    def noted(*args: Any, **options: Any) -> Any:
        made = lower(*args, **options)
        targets.update(op.target for op in made.program.ops)
        return made

    monkeypatch.setattr(variants, "lower", noted)
    got, got_state = through(make, endpoint)
    close(want, got, 1e-5)
    close(want_state, got_state, 1e-5)
    assert any("_scaled_dot_product_flash_attention" in target for target in targets), sorted(targets)


@pytest.mark.parametrize(
    ("mask", "dropout", "heads"),
    [("bool", 0.0, 2), ("float", 0.0, 1), ("", 0.3, 2), ("bool", 0.2, 2), ("bool", 0.2, 4)],
)
def test_attention_with_a_mask_or_dropout_goes_through_the_fused_operator(
    mask: str, dropout: float, heads: int, endpoint: str
) -> None:
    """In float32, as no fused kernel takes float64. Four heads leave rows of 4, which none takes either."""
    make = training(lambda: Attending(mask, dropout, heads), (4, 8, 16), torch.float32, momentum=0.0)
    with of_a_gpu(), as_on_a_gpu(RngTape(), True):
        want, want_state = plain(make)
    got, got_state = through(make, endpoint)
    close(want, got, 1e-5)
    close(want_state, got_state, 1e-5)
    if not dropout:
        without, _ = plain(make)
        close(without, got, 1e-5)


# ---- under torch.autocast("cuda"); what is cast, tests/client/test_casts.py holds against torch

CLOSE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}
X = torch.ones(2, 4)


class Layered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(checkpoint(self.layer, x, use_reentrant=False).mean(1))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.GroupNorm(2, 6),
        nn.Flatten(),
        nn.Linear(54, 10),
    )


CAST_NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], torch.dtype]] = {
    "transformer": (Layered, (4, 8, 16), torch.bfloat16),
    "convolutions": (convolutional, (4, 1, 8, 8), torch.float16),
    "lstm": (lambda: Recurrent(nn.LSTM, batch_first=True), (4, 3, 16), torch.float16),
}


def under_autocast(net: Callable[[], nn.Module], shape: tuple[int, ...], dtype: torch.dtype) -> Callable[[], Work]:
    def make() -> Work:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        data = batches(shape)

        def step(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype):
                out = model(x)
                loss = F.cross_entropy(out, y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            return loss, out

        return Work([model], [optimizer], [(step, data[0])], simple_loop(data, STEPS - 1))

    return make


@pytest.mark.parametrize("name", CAST_NETS)
@pytest.mark.every(2)
def test_training_is_that_of_a_run_that_casts_as_a_gpu_does(name: str, endpoint: str) -> None:
    net, shape, dtype = CAST_NETS[name]
    make = under_autocast(net, shape, dtype)
    with of_a_gpu(), autocast_of_a_gpu(True, None), as_on_a_gpu(RngTape(), True):
        want, want_state = plain(make)
    got, got_state = through(make, endpoint)
    close(want, got, CLOSE[dtype])
    close(want_state, got_state, CLOSE[dtype])
    assert {out.dtype for _, out in got} == {dtype}
    assert {loss.dtype for loss, _ in got} == {torch.float32}
    assert {value.dtype for value in got_state[0].values()} <= {torch.float32, torch.int64}


def test_casts_are_those_one_would_write_by_hand(endpoint: str) -> None:
    """Products in the lower type, norm, softmax and loss in float32, gradients of weights in float32."""
    dtype = torch.bfloat16

    class Net(nn.Module):
        def __init__(self, by_hand: bool) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 10)
            self.by_hand = by_hand

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.by_hand:
                return self.last(F.relu(self.norm(self.first(x)))).softmax(-1)
            x = F.linear(x.to(dtype), self.first.weight.to(dtype), self.first.bias.to(dtype))
            x = F.relu(F.layer_norm(x.float(), (32,), self.norm.weight, self.norm.bias))
            x = F.linear(x.to(dtype), self.last.weight.to(dtype), self.last.bias.to(dtype))
            return x.float().softmax(-1)

    def make(by_hand: bool) -> Work:
        model = Net(by_hand)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        data = batches((4, 16))

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype, enabled=not by_hand):
                loss = F.mse_loss(model(x), F.one_hot(y, 10).to(torch.float32))
            loss.backward()
            optimizer.step()
            return loss

        return Work([model], [optimizer], [(step, data[0])], simple_loop(data, STEPS - 1))

    by_hand, state_by_hand = through(lambda: make(True), endpoint)
    got, got_state = through(lambda: make(False), endpoint)
    close(by_hand, got, 0.0)
    close(state_by_hand, got_state, 0.0)


def test_a_flag_that_turns_autocast_on_selects_another_program(endpoint: str) -> None:
    model = nn.Linear(4, 3)
    model.cast = False

    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=model.cast):
            return model(x)

    with client.submit(step, example=(X,), model=model, endpoint=endpoint) as job:
        seen = []
        for model.cast in (False, True, False, True):
            seen.append(job.step(X).result().dtype)
    assert seen == [torch.float32, torch.bfloat16] * 2


def test_microbatches_are_cast_too(endpoint: str) -> None:
    model = nn.Linear(4, 3)

    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return model(x).exp()

    with client.submit(step, example=(X,), model=model, endpoint=endpoint, microbatches=2) as job:
        got = job.step(X).result()
    with torch.no_grad():
        want = F.linear(X.bfloat16(), model.weight.bfloat16(), model.bias.bfloat16()).float().exp()
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


def test_autocast_around_a_step_with_its_cache_is_refused(endpoint: str) -> None:
    model = nn.Linear(4, 3)
    torch.set_autocast_enabled("cuda", True)  # torch.autocast("cuda") would be turned off here
    try:
        with pytest.raises(CaptureError, match="inside the step"):
            client.submit(lambda x: model(x), example=(X,), model=model, endpoint=endpoint)
    finally:
        torch.set_autocast_enabled("cuda", False)


@pytest.mark.parametrize("how", ["raises", "leaves it on"])
def test_a_step_that_is_refused_leaves_torchs_autocast_as_it_was(how: str, endpoint: str) -> None:
    model = nn.Linear(4, 3)

    def step(x: torch.Tensor) -> torch.Tensor:
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        if how == "raises":
            torch.set_grad_enabled(False)
            raise ValueError("in the middle")
        return model(x)

    before = modes().read()
    with pytest.raises(CaptureError):
        client.submit(step, example=(X,), model=model, endpoint=endpoint)
    assert modes().read() == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch turns none off where it sees a GPU")
def test_a_scaler_that_torch_turned_off_is_not_taken_for_one(endpoint: str) -> None:
    model = nn.Linear(4, 3)
    with pytest.warns(UserWarning, match="GradScaler is enabled, but CUDA is not available"):
        scaler = torch.amp.GradScaler("cuda")

    def step(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        with torch.autocast("cuda", dtype):
            loss = model(x).sum()
        scaler.scale(loss).backward()
        return loss

    with pytest.raises(CaptureError, match="would not be scaled") as raised:
        client.submit(lambda x: step(x, torch.float16), example=(X,), model=model, endpoint=endpoint)
    assert 'GradScaler("cpu")' in raised.value.remedy
    client.submit(lambda x: step(x, torch.bfloat16), example=(X,), model=model, endpoint=endpoint).close()


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_leaves_out_the_steps_that_overflow(fused: bool, endpoint: str) -> None:
    def make() -> Work:
        model = nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 10))
        optimizer = torch.optim.AdamW(model.parameters(), 0.01, fused=fused)
        scaler = model.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=2)  # type: ignore[assignment]
        factors = [1e38 if i % 3 == 0 else 1.0 for i in range(9)]
        data = [(x, y, torch.tensor(factor)) for (x, y), factor in zip(batches((4, 16), count=9), factors, strict=True)]

        def step(x: torch.Tensor, y: torch.Tensor, factor: torch.Tensor) -> tuple[torch.Tensor, ...]:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x) * factor, y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            return loss, scaler._scale.clone()  # type: ignore[union-attr]

        return Work([model], [optimizer], [(step, data[1])], simple_loop(data, len(data)))

    want, want_state = plain(make)
    got, got_state = through(make, endpoint)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(got_state[:2], want_state[:2])
    assert [float(scale) for _, scale in got[:4]] == [2.0**13, 2.0**13, 2.0**14, 2.0**13]
