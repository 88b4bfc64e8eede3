"""An array as one job of a live daemon."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gpumux import client, fuse
from gpumux.errors import ConfigError, JobClosed, NotFusible
from microbench.daemon import running_daemon
from tests.fuse.serial import Config, apart, batches, configs, training
from tests.threads import one_thread

nn = torch.nn
DATA = batches(6, 5)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with running_daemon(threads=1) as daemon:
        yield daemon.endpoint


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 4))


def adam(parameters: Any, config: Config) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=config.lr)


@pytest.mark.parametrize("per_model", [False, True])
def test_a_job_of_several_models_trains_each_as_if_alone(endpoint: str, per_model: bool):
    factory = training(dropping, adam)
    with one_thread(), client.submit_array(factory, configs(), DATA[0], endpoint=endpoint, choose="fused") as array:
        futures = []
        for i in range(len(DATA)):
            rows = [DATA[(i + b) % len(DATA)] for b in range(3)]
            batch = [list(each) for each in zip(*rows, strict=True)] if per_model else DATA[i]
            futures.append(array.step(*batch, per_model=per_model))
        losses = [f.result() for f in futures]
        assert array.stats()["exactness"] == "equivalent"
        for b, config in enumerate(configs()):
            step, model, optimizer = factory(config)
            for i in range(len(DATA)):
                alone = step(*DATA[(i + b) % len(DATA) if per_model else i])
                assert apart(losses[i][b], alone.detach()) < 1e-9
            found = array.state_dict(b)
            for key, value in model.state_dict().items():
                assert apart(found["model"][key], value) < 1e-9
            for key, state in optimizer.state_dict()["state"].items():
                assert apart(found["optimizer"]["state"][key]["exp_avg"], state["exp_avg"]) < 1e-9
                assert found["optimizer"]["state"][key]["step"] == state["step"]


def test_state_goes_in_and_out(endpoint: str, tmp_path: Any):
    factory = training(dropping, adam)
    with one_thread(), fuse.submit_array(factory, configs(), DATA[0], endpoint=endpoint, choose="fused") as array:
        array.step(*DATA[0]).result()
        array.save(tmp_path / "all.pt")
        expected = [array.step(*b).result() for b in DATA[1:3]]
        array.restore(tmp_path / "all.pt")
        again = [array.step(*b).result() for b in DATA[1:3]]
        assert all(torch.equal(a, b) for a, b in zip(expected, again, strict=True))
        assert "operators for 3 models" in str(array.plan())
        array.sync()
    with pytest.raises(JobClosed):
        array.step(*DATA[0])


def test_another_kind_is_refused_before_anything_runs(endpoint: str):
    def factory(config: Config) -> Any:
        return training(lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh() if config.seed else nn.ReLU()))(config)

    with pytest.raises(NotFusible, match="layer '1'"):
        fuse.submit_array(factory, configs(), DATA[0], endpoint=endpoint, choose="fused")


def test_a_choice_that_is_none_is_refused_before_anything_is_captured(endpoint: str):
    def factory(config: Config) -> Any:
        pytest.fail("a model was made")

    for make in (fuse.Array, lambda *args, **options: fuse.submit_array(*args, endpoint=endpoint, **options)):
        with pytest.raises(ConfigError, match="choose is 'fast'"):
            make(factory, configs(), DATA[0], choose="fast")
