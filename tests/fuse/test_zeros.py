"""A weight decay or a momentum of 0 among others trains what it trains alone, in the same Program as the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gpumux.errors import NotFusible
from gpumux.fuse.zeros import LEAST
from tests.fuse.serial import Config, array_of, batches, check, training

nn, optim = torch.nn, torch.optim


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def factory(make: Callable[..., Any], key: str) -> Callable[[Config], Any]:
    """Optimizers with `key` set to the configuration's extra."""
    return training(mlp, lambda parameters, config: make(parameters, lr=config.lr, **{key: config.extra}))


def extras(*values: float) -> list[Config]:
    return [Config(seed, 0.01 * (seed + 1), value) for seed, value in enumerate(values)]


TORCHS = (
    optim.SGD, optim.Adam, optim.AdamW, optim.RMSprop, optim.Adagrad, optim.Adadelta, optim.Adamax, optim.NAdam,
    optim.RAdam, optim.ASGD,
)  # fmt: skip


@pytest.mark.parametrize("make", TORCHS, ids=lambda make: make.__name__)
@pytest.mark.every(6)
def test_a_weight_decay_of_0(make: Callable[..., Any]):
    found = check(factory(make, "weight_decay"), batches(4, 3), given=extras(0.1, 0, 0.2))
    assert found.runs == (3,), "all ran together"


@pytest.mark.parametrize("make", [optim.SGD, optim.RMSprop])
def test_a_momentum_of_0(make: Callable[..., Any]):
    """Its buffers are in the array's state, and alone it has none: parameters are compared."""
    given, data = extras(0.0, 0.9), batches(4, 3)
    with array_of(factory(make, "momentum"), given, data[0]) as array:
        for batch in data:
            array.step(*batch)
        assert array.runs == (2,)
        step, model, _ = factory(make, "momentum")(given[0])
        for batch in data:
            step(*batch)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(array.state_dict(0)["model"][name], value, rtol=1e-12, atol=1e-14)


def test_where_all_have_0_nothing_stands_for_it():
    made: list[Any] = []

    def kept(config: Config) -> Any:
        made.append(factory(optim.Adam, "weight_decay")(config))
        return made[-1]

    with array_of(kept, extras(0, 0), batches(4, 3)[0]):
        assert [each[2].param_groups[0]["weight_decay"] for each in made] == [0, 0]


def test_the_zeros_are_there_again_wherever_state_is_given_out():
    made: list[Any] = []

    def kept(config: Config) -> Any:
        made.append(factory(optim.SGD, "weight_decay")(config))
        return made[-1]

    def decay(state: dict[str, Any]) -> float:
        return float(state["param_groups"][0]["weight_decay"])

    data = batches(4, 3)
    array = array_of(kept, extras(0.1, 0.0), data[0])
    array.step(*data[0])
    state = array.state_dict(1)
    assert decay(state["optimizer"]) == 0.0
    array.load(1, state)
    array.step(*data[1])
    assert array.runs == (2,)
    made[1][2].param_groups[0]["weight_decay"] = 0.0  # as a schedule would, before each step
    array.step(*data[2])
    assert array.runs == (2,)
    assert array.add(Config(9, 0.03, 0.0)) == 2
    array.step(*data[3])
    removed = array.remove(2)
    assert decay(removed["optimizer"]) == decay(made[2][2].state_dict()) == 0.0
    array.close()
    assert [decay(each[2].state_dict()) for each in made] == [0.1, 0.0, 0.0]


def test_a_model_that_joins_changes_no_zeros_of_those_that_run():
    made: list[Any] = []

    def kept(config: Config) -> Any:
        made.append(factory(optim.SGD, "weight_decay")(config))
        return made[-1]

    data = batches(4, 3)
    with array_of(kept, extras(0.0, 0.0), data[0]) as array:
        array.step(*data[0])
        with pytest.raises(NotFusible, match="are not of one kind"):
            array.add(Config(9, 0.03, 0.1))
        assert [each[2].param_groups[0]["weight_decay"] for each in made] == [0.0, 0.0, 0.1]
        array.step(*data[1])
        assert array.runs == (2,)


def test_what_does_more_than_leave_operators_out_stays_as_it_is():
    """A momentum of 0 ignores the dampening; of an optimizer that is not torch's it is not known what 0 means."""

    def dampened(parameters: Any, config: Config) -> Any:
        return optim.SGD(parameters, lr=config.lr, momentum=config.extra, dampening=0.5)

    class Other(optim.SGD):
        pass

    for make in (dampened, lambda p, c: Other(p, lr=c.lr, weight_decay=c.extra)):
        made: list[Any] = []

        def kept(config: Config, make: Any = make, made: list[Any] = made) -> Any:
            made.append(training(mlp, make)(config))
            return made[-1]

        with pytest.raises(NotFusible, match="models 0 and 1 are not of one kind"):
            array_of(kept, extras(0.9, 0.0), batches(4, 3)[0])
        for key in ("momentum", "weight_decay"):
            assert all(each[2].param_groups[0][key] != LEAST for each in made)


def test_a_step_with_fewer_tensors_is_no_crash():
    def one(config: Config) -> Any:
        return training(mlp if config.extra else lambda: nn.Linear(3, 1))(config)

    for given in (extras(1, 0), extras(0, 1)):
        with pytest.raises(NotFusible, match="are not of one kind"):
            array_of(one, given, batches(4, 3)[0])
