"""The plain-torch reference of data-parallel waves, against what Wavelet states of them, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.waves.reference import WaveReference

NEAR = 1e-12


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 3)).double()


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    made = torch.Generator().manual_seed(5)
    return [
        (torch.randn(8, 6, generator=made, dtype=torch.float64), torch.randint(3, (8,), generator=made))
        for _ in range(count)
    ]


def sgd(lr: float, momentum: float = 0.0) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-2)


def gradients_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """g' of a batch at the replica as it is, whose buffers stay as they are."""
    model = copy.deepcopy(model)
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss_fn(model, batch), parameters), strict=True))


def close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=NEAR)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("optimizer", [sgd(0.1, 0.9), adam], ids=["momentum", "adam"])
def test_every_gradient_is_the_mean_over_ranks_and_the_last_two_batches(ranks: int, optimizer):
    """Lemma 1."""
    waves = WaveReference(model, optimizer, loss_fn, ranks=ranks)
    before: list[dict[str, Tensor]] = []
    data = batches(12 * ranks)
    for m in range(12):
        shards = data[m * ranks : (m + 1) * ranks]
        now = [gradients_of(replica, shard) for replica, shard in zip(waves.replicas[m % 2], shards, strict=True)]
        waves.step(shards if ranks > 1 else shards[0])
        counted = [*now, *before]
        close(waves.gradients, {name: torch.stack([g[name] for g in counted]).mean(0) for name in now[0]})
        before = now
    for wave in waves.replicas:  # all ranks of a wave apply the same
        for rank in wave[1:]:
            assert all(torch.equal(a, b) for a, b in zip(rank.parameters(), wave[0].parameters(), strict=True))


@pytest.mark.parametrize("count", [1, 2, 7, 8, 31, 32])
def test_the_replicas_of_plain_sgd_stay_half_a_step_apart(count: int):
    """tick - tock = -lr/2 (g'_0 - g'_last) after as many batches for both, and -lr/2 (g'_0 + g'_last) after one more
    for tick: the sums telescope."""
    lr, waves = 0.1, WaveReference(model, sgd(0.1), loss_fn)
    raw = []
    for m, batch in enumerate(batches(count)):
        raw.append(gradients_of(waves.replicas[m % 2][0], batch))
        waves.step(batch)
    sign = -1.0 if count % 2 == 0 else 1.0
    tick, tock = (dict(wave[0].named_parameters()) for wave in waves.replicas)
    close(
        {name: (tick[name] - tock[name]).detach() for name in tick},
        {name: -lr / 2 * (raw[0][name] + sign * raw[-1][name]) for name in tick},
    )


def test_only_the_batchs_own_replica_changes_and_is_the_result():
    waves = WaveReference(model, adam, loss_fn)
    for m, batch in enumerate(batches(5)):
        other = copy.deepcopy(waves.replicas[1 - m % 2][0].state_dict())
        mine = copy.deepcopy(waves.replicas[m % 2][0].state_dict())
        waves.step(batch)
        assert all(torch.equal(v, other[k]) for k, v in waves.replicas[1 - m % 2][0].state_dict().items())
        assert not any(torch.equal(v, mine[k]) for k, v in waves.replicas[m % 2][0].state_dict().items())
        assert waves.model is waves.replicas[m % 2][0]
        assert waves.optimizer is waves.optimizers[m % 2][0]
    steps = [optimizer.state_dict()["state"][0]["step"].item() for (optimizer,) in waves.optimizers]
    assert steps == [3, 2]  # step counters by replica
    assert [wave[0].state_dict()["1.num_batches_tracked"].item() for wave in waves.replicas] == [3, 2]


def test_the_norm_is_clipped_of_the_averaged_gradient():
    clip, waves = 0.05, WaveReference(model, sgd(1.0), loss_fn, clip=0.05)
    for m, batch in enumerate(batches(4)):
        before = [p.detach().clone() for p in waves.replicas[m % 2][0].parameters()]
        waves.step(batch)
        norm = torch.cat([g.flatten() for g in waves.gradients.values()]).norm()
        assert norm > clip
        for old, new, g in zip(before, waves.model.parameters(), waves.gradients.values(), strict=True):
            torch.testing.assert_close(old - new, g * (clip / (norm + 1e-6)), rtol=0, atol=NEAR)


@pytest.mark.parametrize("at", [0, 1, 4, 5])
def test_a_run_goes_on_from_its_state_also_in_the_middle_of_a_pair(at: int):
    whole, first = (WaveReference(model, adam, loss_fn, clip=1.0) for _ in range(2))
    data = batches(9)
    losses = [whole.step(batch) for batch in data]
    for batch in data[:at]:
        first.step(batch)
    second = WaveReference(model, adam, loss_fn, clip=1.0)
    saved = first.state_dict()
    first.step(data[at])  # what is saved does not change with the run
    second.load_state_dict(saved)
    assert [second.step(batch) for batch in data[at:]] == losses[at:]
    for mine, theirs in zip(second.replicas, whole.replicas, strict=True):
        assert all(torch.equal(v, theirs[0].state_dict()[k]) for k, v in mine[0].state_dict().items())


def _quadratic(start: float = 1.0) -> nn.Module:
    """Its loss below is weight ** 2 / 2: a curvature of 1, so a learning rate is one times the curvature."""
    made = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(made.weight, start)
    return made


def _half_square(model: nn.Module, batch: None) -> Tensor:
    (weight,) = model.parameters()
    return weight.square().sum() / 2


def _after(momentum: float, rate: float, waves: bool, steps: int = 800) -> float:
    """Distance from the optimum after so many steps, begun at 1."""
    if waves:
        run = WaveReference(_quadratic, sgd(rate, momentum), _half_square)
        for _ in range(steps):
            run.step(None)
        return abs(next(run.model.parameters()).item())
    made = _quadratic()
    optimizer = sgd(rate, momentum)(made)
    for _ in range(steps):
        optimizer.zero_grad()
        _half_square(made, None).backward()
        optimizer.step()
    return abs(next(made.parameters()).item())


@pytest.mark.parametrize(
    ("momentum", "waves", "holds", "diverges"),
    [(0.0, False, 1.95, 2.05), (0.0, True, 1.95, 2.05), (0.9, False, 3.75, 3.85), (0.9, True, 0.37, 0.45)],
)
def test_with_momentum_waves_diverge_at_a_tenth_of_the_learning_rate(
    momentum: float, waves: bool, holds: float, diverges: float
):
    """So they are not synchronous training over twice as many workers."""
    assert _after(momentum, holds, waves) < 2.0  # what is never damped stays
    assert _after(momentum, diverges, waves) > 10.0


def test_what_the_replicas_differ_by_is_never_damped():
    """On a quadratic both stay off the optimum, by rate / (4 + rate) of where they began, on opposite sides: there the
    two gradients cancel. Their mean is at the optimum. `rate`: learning rate times curvature."""
    rate = 0.2
    waves = WaveReference(_quadratic, sgd(rate), _half_square)
    for _ in range(400):
        waves.step(None)
    tick, tock = (next(wave[0].parameters()).item() for wave in waves.replicas)
    assert tick == pytest.approx(-rate / (4 + rate), abs=NEAR)
    assert tock == pytest.approx(rate / (4 + rate), abs=NEAR)
