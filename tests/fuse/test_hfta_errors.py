"""Errors of HFTA's library, each with a test: here every model trains as if alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.fuse.serial import (
    MODELS,
    STEPS,
    TOLERANCE,
    Config,
    array_of,
    batches,
    check,
    configs,
    one_thread,
    relative_difference,
    training,
)

LABELLED = batches(6, 5, classes=4)


def test_each_model_has_its_own_schedule():
    """HFTA's StepLR of several step sizes raises."""
    kept: list[tuple[Any, Any]] = []

    def factory(config: Config) -> Any:
        made = training(lambda: nn.Linear(5, 4), lambda p, c: torch.optim.Adam(p, lr=c.lr), nn.CrossEntropyLoss())(
            config
        )
        kept.append(
            (
                made[2],
                torch.optim.lr_scheduler.StepLR(made[2], step_size=1 + config.seed, gamma=0.5 + 0.1 * config.seed),
            )
        )
        return made

    given = configs()
    with one_thread(), array_of(factory, given, LABELLED[0]) as array:
        schedules = [schedule for _, schedule in kept]
        losses = []
        for batch in LABELLED:
            losses.append(array.step(*batch))
            for schedule in schedules:
                schedule.step()
        for b, config in enumerate(given):
            kept.clear()
            step, model, _ = factory(config)
            for i, batch in enumerate(LABELLED):
                assert relative_difference(losses[i][b], step(*batch).detach()) <= TOLERANCE
                kept[0][1].step()
            assert schedules[b].get_last_lr() == kept[0][1].get_last_lr()
            for key, value in model.state_dict().items():
                assert relative_difference(array.state_dict(b)["model"][key], value) <= TOLERANCE
    rates = {schedule.get_last_lr()[0] for schedule in schedules}
    assert len(rates) == MODELS


@pytest.mark.parametrize("slopes", [1, 8])
def test_each_model_has_its_own_slope(slopes: int):
    """HFTA's PReLU shares one between all models."""
    check(
        training(lambda: nn.Sequential(nn.Linear(5, 8), nn.PReLU(slopes), nn.Linear(8, 4)), loss=nn.CrossEntropyLoss()),
        LABELLED,
    )


def tokens(words: int = 9) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(5)
    made = []
    for _ in range(STEPS):
        x = torch.randint(0, words, (4, 6), generator=g)
        x[:, -2:] = 0
        made.append((x, torch.randint(0, words, (4, 6), generator=g)))
    return made


def language(module: Any) -> Any:
    """A factory for models from tokens to logits of tokens; initial values follow the seed."""

    def factory(config: Config) -> Any:
        torch.manual_seed(config.seed)
        model = module().double()
        optimizer = torch.optim.Adam(model.parameters(), lr=config.lr)

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss.backward()
            optimizer.step()
            return loss

        return step, model, optimizer

    return factory


@pytest.mark.parametrize("padding", [0, 3])
def test_padding_is_each_models_own_row(padding: int):
    """HFTA's embedding gives the padding row of one model's table, whichever model it is, no gradient."""
    factory = language(lambda: nn.Sequential(nn.Embedding(9, 5, padding_idx=padding), nn.Linear(5, 9)))
    data = tokens()
    check(factory, data)
    with one_thread(), array_of(factory, configs(), data[0]) as array:
        before = [array.state_dict(b)["model"]["0.weight"].clone() for b in range(MODELS)]
        for batch in data:
            array.step(*batch)
        for b in range(MODELS):
            moved = (array.state_dict(b)["model"]["0.weight"] != before[b]).any(1)
            assert not moved[padding]
            assert moved[[row for row in range(9) if row != padding]].all()


@pytest.mark.parametrize(("norm_first", "dropout"), [(False, 0.1), (True, 0.0)])
@pytest.mark.every(2)
def test_an_encoder_layer_adds_what_it_was_given(norm_first: bool, dropout: float):
    """HFTA's encoder layer takes the wrong residual."""

    def module() -> nn.Module:
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout, batch_first=True, norm_first=norm_first)
        return nn.Sequential(nn.Embedding(9, 8), layer, nn.Linear(8, 9))

    keys = {"1.self_attn.in_proj_bias": slice(8, 16)}  # what all keys have in common, which softmax does not see
    check(language(module), tokens(), noise=keys)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.hidden = nn.Embedding(9, 5), nn.Linear(5, 5)
        self.decoder = nn.Linear(5, 9)
        self.decoder.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.decoder(torch.tanh(self.hidden(self.embed(x))))
        return found


def test_tied_weights_stay_tied():
    """HFTA's two layouts of one weight can't be tied."""
    check(language(Tied), tokens())
    with one_thread(), array_of(language(Tied), configs(), tokens()[0]) as array:
        array.step(*tokens()[0])
        for b in range(MODELS):
            state = array.state_dict(b)["model"]
            assert torch.equal(state["embed.weight"], state["decoder.weight"])


@pytest.mark.parametrize(("bad", "clip"), [(torch.nan, False), (1e200, True)], ids=["nan", "overflow, clipped"])
def test_what_overflows_in_one_model_touches_no_other(bad: float, clip: bool):
    """HFTA scales and clips the gradients of all models together: one that overflows stops them all. Bit for bit, since
    nothing of the others may depend on it."""
    spoiled = 1

    def factory(config: Config) -> Any:
        torch.manual_seed(config.seed)
        model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 4)).double()
        if config.extra is not None:
            with torch.no_grad():
                model[0].weight[0, 0] = config.extra
        optimizer = torch.optim.Adam(model.parameters(), lr=config.lr)

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            return loss

        return step, model, optimizer

    def run(extra: float | None) -> list[dict[str, Any]]:
        given = [Config(c.seed, c.lr, extra if c.seed == spoiled else None) for c in configs()]
        with array_of(factory, given, LABELLED[0]) as array:
            losses = [array.step(*batch) for batch in LABELLED]
            return [
                {"losses": torch.stack([x[b] for x in losses]), **array.state_dict(b)["model"]} for b in range(MODELS)
            ]

    with one_thread():
        well, ill = run(None), run(bad)
    for b in range(MODELS):
        same = all(torch.equal(well[b][key], ill[b][key]) for key in well[b])
        assert same == (b != spoiled)


def test_a_loss_scale_of_each_model_backs_off_alone():
    """What GradScaler does, as state of the model: a step whose gradients overflow is left out and the scale halved,
    for that model alone."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 4)
            self.register_buffer("scale", torch.tensor(2.0**10))

    def factory(config: Config) -> Any:
        torch.manual_seed(config.seed)
        model = Scaled().double()
        if config.seed == 1:
            model.scale.fill_(1e308)
        optimizer = torch.optim.SGD(model.parameters(), lr=config.lr)

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(1e3 * model.layer(x), y)
            (loss * model.scale).backward()
            grads = [p.grad for p in model.parameters()]
            fine = torch.stack([g.isfinite().all() for g in grads]).all()
            for g in grads:
                g.copy_(torch.where(fine, g / model.scale, 0.0))
            model.scale.copy_(torch.where(fine, model.scale, model.scale / 2))
            optimizer.step()
            return loss

        return step, model, optimizer

    check(factory, LABELLED)
    with one_thread(), array_of(factory, configs(), LABELLED[0]) as array:
        for batch in LABELLED:
            array.step(*batch)
        scales = [float(array.state_dict(b)["model"]["scale"]) for b in range(MODELS)]
    assert scales[0] == scales[2] == 2.0**10
    assert scales[1] < 1e308
