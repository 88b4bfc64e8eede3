"""Arguments of arrays: invalid ones are refused with a remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gpumux import fuse
from gpumux.errors import ConfigError, JobClosed
from tests.fuse.serial import array_of, batches, configs, steady

nn = torch.nn
DATA = batches(6, 5)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4))


def by_key(config: Any) -> Any:
    return steady(mlp)(config["config"])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"lr": 0.1}, r"configs is one mapping.* — give a list of them"),
        (3, "configs is 3 — give a list"),
        ("ab", "configs is 'ab' — give a list"),
        (b"ab", "configs is b'ab' — give a list"),
        (None, "configs is None — give a list"),
        (iter([{"lr": 0.1}]), "configs is a list_iterator — give a list"),
        ({1, 2}, "configs is a set — give a list"),
        ([], "configs is empty — give one configuration"),
        ((), "configs is empty — give one configuration"),
        ([1, 2], r"factory\(1\) raised TypeError: .* — each of configs is what factory is called with"),
        (["config"], r"factory\('config'\) raised TypeError: "),
        ([None], r"factory\(None\) raised TypeError: "),
        ([[0.1]], r"factory\(a list\) raised TypeError: "),
    ],
)
def test_configs_that_are_none_are_refused(given: Any, said: str):
    with pytest.raises(ConfigError, match=said) as caught:
        array_of(by_key, given, DATA[0])
    assert caught.value.remedy


def test_a_type_error_that_is_not_the_configurations_stays_what_it_is():
    def deeper(config: Any) -> Any:
        return steady(mlp)(config).missing

    def broken(config: Any) -> Any:
        return int([])  # type: ignore[call-overload]

    for factory, given in ((deeper, [1]), (broken, [{"lr": 0.1}])):
        with pytest.raises((TypeError, AttributeError)) as caught:
            array_of(factory, given, DATA[0])
        assert caught.value.__notes__ == [f"raised by factory({given[0]!r}), for model 0 of array"]


@pytest.mark.parametrize("seed", [2**64, -1, True, 1.5, "1", None])
def test_seeds_that_are_none_are_refused(seed: Any):
    """torch accepts some of them, each as another number than it looks."""
    with pytest.raises(ConfigError, match=r"seeds\[1\] is .* — use a whole number from 0 to"):
        array_of(steady(mlp), configs(), DATA[0], seeds=[1, seed, 2])
    if seed is not None:
        with (
            array_of(steady(mlp), configs(), DATA[0]) as array,
            pytest.raises(ConfigError, match=r"seed is .* — use a whole number from 0 to"),
        ):
            array.add(configs()[0], seed)


@pytest.mark.parametrize("seeds", [3, "123", {1: 2}, iter([1, 2, 3])])
def test_seeds_come_as_a_list(seeds: Any):
    with pytest.raises(ConfigError, match=r"seeds is .* — give a list"):
        array_of(steady(mlp), configs(), DATA[0], seeds=seeds)


def test_any_whole_number_is_a_seed():
    import numpy

    for seeds in ([0, 2**64 - 1, 7], range(3), numpy.arange(3), [numpy.int64(4)] * 3):
        array_of(steady(mlp), configs(), DATA[0], seeds=seeds).close()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mm", "'mm', which no step can hold — use aten.mm.default"),
        ("aten.mm", "'aten.mm', .* use aten.mm.default"),
        ("torch.ops.aten.tahn.default", "use aten.tan.default or .*aten.tanh.default"),
        ("aten.conv2d.default", "which no step can hold — print.array.plan"),
        ("aten.tan.default", "aten.tan.default, and no model's step has it — use aten.tanh.default; print"),
        ("aten.convolution.default", "no model's step has it — print"),
        (3, "per_model_operators holds 3 — use names"),
    ],
)
def test_an_operator_that_is_none_is_not_passed_over(name: Any, said: str):
    with pytest.raises(ConfigError, match=said):
        array_of(steady(mlp), configs(), DATA[0], per_model_operators=["aten.tanh.default", name])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"per_model_operators": "aten.tanh.default"}, r"give a list, such as \['aten.tanh.default'\]"),
        ({"per_model_operators": 3}, "per_model_operators is 3 — give a list"),
        ({"max_variants": 0}, "max_variants is 0"),
        ({"partial": "yes"}, "partial is 'yes' — use True or False"),
        ({"times_file": 3}, "times_file is 3 — give a path"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=said):
        array_of(steady(mlp), configs(), DATA[0], **options)


def test_a_factory_is_a_function():
    refused = pytest.raises(ConfigError, match="factory is of type int — pass a function")
    with refused:
        array_of(3, configs(), DATA[0])  # type: ignore[arg-type]
    with refused:
        fuse.submit_array(3, configs(), DATA[0], endpoint="ipc:///nowhere")  # type: ignore[arg-type]


def test_an_array_in_a_cluster_is_refused():
    with pytest.raises(ConfigError, match="not placed by a coordinator — say endpoint="):
        fuse.submit_array(steady(mlp), configs(), DATA[0], cluster="auto")


@pytest.mark.parametrize("model", [3, -1, "0", 0.0, True, None])
def test_a_model_is_named_by_its_number(model: Any):
    with (
        array_of(steady(mlp), configs(), DATA[0]) as array,
        pytest.raises(ConfigError, match=r"there is no model .* among 3 — count from 0"),
    ):
        array.state_dict(model)


def test_a_closed_array_trains_no_more_and_is_read_still(tmp_path: Path):
    array = array_of(steady(mlp), configs(), DATA[0])
    array.step(*DATA[0])
    array.save(tmp_path / "before.pt")
    states, random = [array.state_dict(b) for b in range(3)], array.random_state(0)
    array.close()
    changes = [
        lambda: array.step(*DATA[1]), lambda: array.add(configs()[0]), lambda: array.remove(0),
        lambda: array.load(0, states[0]), lambda: array.set_random_state(0, random),
        lambda: array.restore(tmp_path / "before.pt"),
    ]  # fmt: skip
    for change in changes:
        with pytest.raises(JobClosed, match=r"array is closed, .* — make another array"):
            change()
    array.close()
    array.save(tmp_path / "after.pt")
    with array_of(steady(mlp), configs(), DATA[0]) as other:
        other.restore(tmp_path / "after.pt")
        for b in range(3):
            for key, value in states[b]["model"].items():
                assert torch.equal(array.state_dict(b)["model"][key], value)
                assert torch.equal(other.state_dict(b)["model"][key], value)


def test_sync_after_close_brings_the_trained_state():
    made = []

    def factory(config: Any) -> Any:
        made.append(steady(mlp)(config))
        return made[-1]

    with array_of(factory, configs(), DATA[0]) as array:
        array.step(*DATA[0])
    array.sync()
    for b, (_, model, _) in enumerate(made):
        assert torch.equal(model[0].weight, array.state_dict(b)["model"]["0.weight"])
