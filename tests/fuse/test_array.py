"""Features of an array beside stepping: schedules, random streams, joining, leaving, saving."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from gpumux.capture.state import StateTable
from gpumux.errors import ConfigError, LocalWrite, NotFusible
from tests.fuse.serial import Config, array_of, batches, check, configs, relative_difference, training, ways
from tests.threads import one_thread

nn = torch.nn
DATA = batches(6, 5, count=24)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4))


def dropping() -> nn.Module:
    return nn.Sequential(nn.Dropout(0.2), nn.Linear(5, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 8), nn.Dropout(0.5))


def adam(parameters: Any, config: Config) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=config.lr)


def scheduled(config: Config) -> tuple[Any, nn.Module, torch.optim.Optimizer, Any]:
    step, model, optimizer = training(mlp, adam)(config)
    kinds = [
        lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 8),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    ]
    return step, model, optimizer, kinds[config.seed % 3](optimizer)


def test_every_model_keeps_its_own_schedule():
    schedulers = []

    def factory(config: Config) -> Any:
        *made, scheduler = scheduled(config)
        schedulers.append(scheduler)
        return tuple(made)

    with one_thread(), array_of(factory, configs(), DATA[0]) as array:
        losses = []
        for batch in DATA[:10]:
            losses.append(array.step(*batch))
            for scheduler in schedulers:
                scheduler.step()
        for b, config in enumerate(configs()):
            step, model, _, scheduler = scheduled(config)
            for i, batch in enumerate(DATA[:10]):
                assert relative_difference(losses[i][b], step(*batch).detach()) < 1e-9
                scheduler.step()
            for key, value in model.state_dict().items():
                assert relative_difference(array.state_dict(b)["model"][key], value) < 1e-9


def test_dropout_draws_what_each_model_would_draw_alone():
    array = check(training(dropping), batches(6, 5))
    assert ways(array)["aten.bernoulli_.float"] == {"per-model"}
    check(training(dropping), batches(6, 5), per_model=True)


def test_the_random_generator_of_the_process_is_left_alone():
    with array_of(training(dropping), configs(), DATA[0]) as array:
        torch.manual_seed(7)
        expected = torch.rand(3)
        torch.manual_seed(7)
        array.step(*DATA[0])
        assert torch.equal(torch.rand(3), expected)


def test_seeds_give_models_other_draws():
    same = [Config(0, 0.05)] * 2
    with array_of(training(dropping), same, DATA[0]) as array:
        first = array.step(*DATA[0])
    assert torch.equal(first[0], first[1])
    with array_of(training(dropping), same, DATA[0], seeds=[1, 2]) as array:
        other = array.step(*DATA[0])
    assert not torch.equal(other[0], other[1])
    with pytest.raises(ConfigError, match="3 seeds for 2 models"):
        array_of(training(dropping), same, DATA[0], seeds=[1, 2, 3])


@pytest.mark.parametrize("optimizer", [adam, lambda p, c: torch.optim.SGD(p, lr=c.lr, momentum=0.9)])
def test_models_that_join_and_leave_change_nothing_for_the_others(optimizer: Any):
    factory = training(mlp, optimizer)
    with one_thread():
        still = array_of(factory, configs(), DATA[0])
        for batch in DATA:
            still.step(*batch)
        moving = array_of(factory, configs(), DATA[0])
        for i, batch in enumerate(DATA):
            if i == 10:
                assert moving.add(Config(9, 0.03)) == 3
            if i == 20:
                joined = moving.state_dict(3)
                left = moving.remove(1)
            moving.step(*batch)
            assert moving.runs == ((3, 1) if i == 10 else (len(moving),))
        for then, now in ((0, 0), (2, 1)):
            for key, value in still.state_dict(then)["model"].items():
                assert relative_difference(moving.state_dict(now)["model"][key], value) < 1e-9
        for config, data, state in ((Config(9, 0.03), DATA[10:20], joined), (configs()[1], DATA[:20], left)):
            step, model, _ = factory(config)
            for batch in data:
                step(*batch)
            for key, value in model.state_dict().items():
                assert relative_difference(state["model"][key], value) < 1e-9
        still.close()
        moving.close()


def test_a_model_of_another_kind_can_not_join():
    def factory(config: Config) -> Any:
        return training(lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh() if config.seed < 5 else nn.ReLU()))(config)

    with array_of(factory, configs(), DATA[0]) as array:
        array.step(*DATA[0])
        with pytest.raises(NotFusible, match=r"models 0 and 3 are .*tanh"):
            array.add(Config(7))
        assert len(array) == 3
        array.step(*DATA[1])


def test_the_last_model_stays():
    with array_of(training(mlp), configs(1), DATA[0]) as array, pytest.raises(ConfigError, match="last model"):
        array.remove(0)


def test_a_model_that_breaks_breaks_no_other():
    """Each model clips its own gradients: an overflow in one leaves the norms of the others unchanged."""

    def clipped(config: Config) -> Any:
        torch.manual_seed(config.seed)
        model = mlp().double()
        optimizer = adam(model.parameters(), config)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            return loss

        return step, model, optimizer

    check(clipped, batches(6, 5))
    with (
        one_thread(),
        array_of(clipped, configs(), DATA[0]) as array,
        array_of(clipped, configs(), DATA[0]) as other,
    ):
        broken = array.state_dict(1)
        broken["model"]["0.weight"][0, 0] = float("nan")
        array.load(1, broken)
        for batch in DATA[:6]:
            losses, expected = array.step(*batch), other.step(*batch)
            assert losses[1].isnan()
            assert torch.equal(losses[[0, 2]], expected[[0, 2]])
        for b in (0, 2):
            for key, value in other.state_dict(b)["model"].items():
                assert torch.equal(array.state_dict(b)["model"][key], value)


def test_a_checkpoint_brings_back_all_or_one(tmp_path: Path):
    factory = training(dropping, adam)
    with one_thread(), array_of(factory, configs(), DATA[0]) as array:
        for batch in DATA[:3]:
            array.step(*batch)
        array.save(tmp_path / "all.pt")
        array.save(tmp_path / "one.pt", 1)
        expected = [array.step(*batch) for batch in DATA[3:6]]
        array.restore(tmp_path / "all.pt")
        assert all(torch.equal(array.step(*b), e) for b, e in zip(DATA[3:6], expected, strict=True))
    with one_thread(), array_of(factory, configs(), DATA[0]) as fresh:
        fresh.restore(tmp_path / "one.pt", 1)
        again = [fresh.step(*batch) for batch in DATA[3:6]]
        assert all(relative_difference(a[1], e[1]) < 1e-12 for a, e in zip(again, expected, strict=True))
        with pytest.raises(ConfigError, match="holds 1 models, and 3"):
            fresh.restore(tmp_path / "one.pt")
        (tmp_path / "none.pt").write_bytes(b"something else")
        with pytest.raises(ConfigError, match="no checkpoint"):
            fresh.restore(tmp_path / "none.pt")


def test_a_checkpoint_that_does_not_fit_changes_nothing(tmp_path: Path):
    factory = training(dropping, adam)
    with one_thread(), array_of(factory, configs(), DATA[0]) as array:
        array.step(*DATA[0])
        array.save(tmp_path / "all.pt")
        array.step(*DATA[1])
        before = [array.state_dict(b)["model"] for b in range(3)]
        found = torch.load(tmp_path / "all.pt", weights_only=True)
        del found["models"][2]["random"]
        torch.save(found, tmp_path / "damaged.pt")
        with pytest.raises(ConfigError, match="is damaged"):
            array.restore(tmp_path / "damaged.pt")
        found = torch.load(tmp_path / "all.pt", weights_only=True)
        name = next(iter(found["models"][2]["model"]))
        found["models"][2]["model"][name] = torch.zeros(1, 2, 3)
        torch.save(found, tmp_path / "other.pt")
        with pytest.raises(ConfigError, match=rf"does not fit model 2: {name} is \(1, 2, 3\)"):
            array.restore(tmp_path / "other.pt")
        for key, value, said in (
            ("optimizer", {"state": {}, "param_groups": []}, "does not fit model 2: ValueError: .* parameter groups"),
            ("random", torch.zeros(3, dtype=torch.uint8), "no state of a random generator"),
        ):
            found = torch.load(tmp_path / "all.pt", weights_only=True)
            found["models"][2][key] = value
            torch.save(found, tmp_path / "other.pt")
            with pytest.raises(ConfigError, match=said):
                array.restore(tmp_path / "other.pt")
        for b, state in enumerate(before):
            assert all(torch.equal(array.state_dict(b)["model"][key], value) for key, value in state.items())


def test_a_state_that_is_none_is_refused():
    """A model's own dictionary would load nothing, and a number would be every byte of a random state."""
    with one_thread(), array_of(training(dropping, adam), configs(), DATA[0]) as array:
        array.step(*DATA[0])
        for state in ({}, array.state_dict(0)["model"]):
            with pytest.raises(ConfigError, match="has neither 'model' nor 'optimizer' — give"):
                array.load(0, state)
        with pytest.raises(ConfigError, match="is a NoneType"):
            array.load(0, None)  # type: ignore[arg-type]
        before = array.random_state(1)
        for drawn in (3, before[:5], torch.zeros_like(before)):
            with pytest.raises(ConfigError, match=r"no state of a random generator: .* — give what random_state\(\)"):
                array.set_random_state(1, drawn)  # type: ignore[arg-type]
        assert torch.equal(array.random_state(1), before)
        array.load(0, {"model": array.state_dict(1)["model"]})
        assert torch.equal(array.state_dict(0)["model"]["1.weight"], array.state_dict(1)["model"]["1.weight"])


def test_a_factory_that_fails_is_named_with_the_configuration():
    def factory(config: Config) -> Any:
        return config.missing  # type: ignore[attr-defined]

    with pytest.raises(AttributeError) as caught:
        array_of(factory, configs(), DATA[0])
    assert caught.value.__notes__ == [f"raised by factory({configs()[0]!r}), for model 0 of array"]


def test_the_local_models_are_fetched_when_they_are_read():
    made = []

    def factory(config: Config) -> Any:
        made.append(training(mlp, adam)(config))
        return made[-1]

    with array_of(factory, configs(), DATA[0]) as array:
        array.step(*DATA[0])
        made[1][1](DATA[0][0])
        assert torch.equal(made[1][1].state_dict()["0.weight"], array.state_dict(1)["model"]["0.weight"])
        with torch.no_grad():
            made[1][1][0].weight.zero_()
        with pytest.raises(LocalWrite):
            array.step(*DATA[0])
        array.load(1, array.state_dict(0))
        array.step(*DATA[0])
    assert torch.equal(made[1][1].state_dict()["0.weight"], array.state_dict(1)["model"]["0.weight"])


@pytest.mark.parametrize("part", [nn.Linear(5, 5).requires_grad_(False), nn.ReLU()])
def test_a_layer_of_two_models_is_refused(part: nn.Module):
    with pytest.raises(ConfigError, match=r"a model whose 0 is that of model 0 too — .*copy\.deepcopy"):
        array_of(training(lambda: nn.Sequential(part, nn.Linear(5, 4))), configs(), DATA[0])
    weight = nn.Parameter(torch.ones(4, 5, dtype=torch.float64))

    def tied() -> nn.Module:
        layer = nn.Linear(5, 4)
        layer.weight = weight
        return layer

    with pytest.raises(ConfigError, match=r"a model whose weight is that of model 0 too"):
        array_of(training(tied), configs(), DATA[0])
    array_of(training(lambda: nn.Sequential(copy.deepcopy(part), nn.Linear(5, 4))), configs(), DATA[0]).close()


def test_what_an_array_can_not_be_made_of():
    with pytest.raises(ConfigError, match="configs is empty"):
        array_of(training(mlp), [], DATA[0])
    with pytest.raises(ConfigError, match="tuple of three"):
        array_of(lambda config: None, [1], DATA[0])
    made = training(mlp)(Config(0))
    with pytest.raises(ConfigError, match="optimizer of another model"):
        array_of(lambda config: made, [1, 2], DATA[0])
    with array_of(training(mlp), configs(), DATA[0]) as array:
        with pytest.raises(ConfigError, match="list of 3"):
            array.step(DATA[0][0], per_model=True)
        with pytest.raises(ConfigError, match="no model 3"):
            array.state_dict(3)


def test_models_on_a_gpu_are_refused_and_the_way_to_train_them_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(StateTable, "gpu", True)
    with pytest.raises(ConfigError, match=r"trains in this process, on the CPU.*by client.submit_array"):
        array_of(training(lambda: nn.Linear(5, 4)), configs(), batches(6, 5)[0])
