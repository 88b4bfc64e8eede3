"""An array as one job of a live daemon."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gpumux import client, fuse
from gpumux.client.recovery import open_job
from gpumux.errors import AdmissionRefused, ConfigError, JobClosed, NotFusible, UnknownJob
from microbench.daemon import running_daemon
from tests.client.parity import assert_same
from tests.fuse.serial import Config, batches, configs, relative_difference, training
from tests.threads import one_thread

nn = torch.nn
DATA = batches(6, 5)


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    state = tmp_path_factory.mktemp("state")
    with running_daemon(threads=1, flags=["--state-dir", str(state)]) as daemon:
        yield daemon.endpoint


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 4))


def adam(parameters: Any, config: Config) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=config.lr)


def listed(parameters: Any, config: Config) -> torch.optim.Optimizer:
    """Over lists, which is fewer operators to capture."""
    return torch.optim.Adam(parameters, lr=config.lr, foreach=True)


@pytest.mark.parametrize("per_model", [False, True])
@pytest.mark.every(2)
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
        assert array.stats()["models"] == 3
        for b, config in enumerate(configs()):
            step, model, optimizer = factory(config)
            for i in range(len(DATA)):
                alone = step(*DATA[(i + b) % len(DATA) if per_model else i])
                assert relative_difference(losses[i][b], alone.detach()) < 1e-9
            found = array.state_dict(b)
            for key, value in model.state_dict().items():
                assert relative_difference(found["model"][key], value) < 1e-9
            for key, state in optimizer.state_dict()["state"].items():
                assert relative_difference(found["optimizer"]["state"][key]["exp_avg"], state["exp_avg"]) < 1e-9
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


def test_an_array_that_closes_brings_home_what_it_trained(endpoint: str):
    with one_thread():
        array = fuse.submit_array(training(dropping, adam), configs(), DATA[0], endpoint=endpoint, choose="fused")
        array.step(*DATA[0])
        trained = [array.state_dict(index) for index in range(len(configs()))]
        array.step(*DATA[0])
        array.close()
        home = [array.state_dict(index) for index in range(len(configs()))]
        again = fuse.submit_array(training(dropping, adam), configs(), DATA[0], endpoint=endpoint, choose="fused")
        for _ in range(2):
            again.step(*DATA[0])
        again.sync()
        wanted = [again.state_dict(index) for index in range(len(configs()))]
        again.close()
    assert_same(home, wanted, "state")
    with pytest.raises(AssertionError):
        assert_same(home, trained, "state")


def test_an_array_that_throws_its_state_away_says_that_it_is_gone(endpoint: str, tmp_path: Any):
    factory = training(dropping, adam)
    with one_thread():
        array = fuse.submit_array(factory, configs(), DATA[0], endpoint=endpoint, choose="fused")
        array.step(*DATA[0])
        array.close(sync=False)
        for read in (lambda: array.state_dict(0), array.sync, lambda: array.save(tmp_path / "all.pt")):
            with pytest.raises(JobClosed, match=r"array is closed, .*gone.* — call sync\(\), .* before close"):
                read()
        before = array.job
        for change in (lambda: array.step(*DATA[0]), lambda: array.add(Config(9)), lambda: array.remove(0)):
            with pytest.raises(JobClosed, match=r"array is closed, .* — make another"):
                change()
        assert array.job is before
        with pytest.raises(JobClosed):
            array.stats()


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


def same(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-9) -> None:
    for key, value in expected.items():
        assert relative_difference(found[key], value) <= tolerance, key


def test_models_join_and_leave_a_job_and_change_nothing_for_the_others(endpoint: str):
    """Another job of the same name continues with the models' state, bit for bit. The joining model takes its
    optimizer's first step beside the others' eleventh."""
    data = batches(6, 5, count=24)
    factory, given = training(dropping, adam), configs()
    with one_thread(), fuse.submit_array(factory, given, DATA[0], endpoint=endpoint, choose="fused") as array:
        first = array.job
        for i, batch in enumerate(data):
            if i == 10:
                before = [array.state_dict(b) for b in range(3)]
                assert array.add(Config(9, 0.03)) == 3
                for b in range(3):
                    same(array.state_dict(b)["model"], before[b]["model"], 0.0)
                assert array.job.id != first.id
                assert array.job.name == first.name
            if i == 20:
                joined = array.state_dict(3)
                left = array.remove(1)
            losses = array.step(*batch)
            if i in (10, 20):
                assert len(losses.result()) == len(array) == 4 - (i == 20)
                assert array.runs == (len(array),)
                assert array.stats()["models"] == len(array)
        assert len(array) == 3
        found = [array.state_dict(0), left, array.state_dict(1), array.state_dict(2), joined]
    for config, rows, state in zip(
        [given[0], given[1], given[2], Config(9, 0.03), Config(9, 0.03)],
        [data, data[:20], data, data[10:], data[10:20]], found, strict=True,
    ):  # fmt: skip
        step, model, optimizer = factory(config)
        for batch in rows:
            step(*batch)
        same(state["model"], model.state_dict())
        for key, of in optimizer.state_dict()["state"].items():
            same(state["optimizer"]["state"][key], of)


def test_a_model_that_can_not_join_leaves_the_job_as_it_was(endpoint: str):
    def factory(config: Config) -> Any:
        return training(lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh() if config.seed < 5 else nn.ReLU()))(config)

    with one_thread(), fuse.submit_array(factory, configs(), DATA[0], endpoint=endpoint, choose="fused") as array:
        first = array.job
        array.step(*DATA[0])
        with pytest.raises(NotFusible, match="tanh"):
            array.add(Config(7))
        assert array.job is first
        assert array.step(*DATA[1]).result().shape == (3,)


def test_where_a_changed_array_is_refused_the_old_one_goes_on(endpoint: str, monkeypatch: pytest.MonkeyPatch):
    factory = training(dropping, adam)
    with (
        one_thread(),
        fuse.submit_array(factory, configs(), DATA[0], endpoint=endpoint, choose="fused") as array,
        fuse.submit_array(factory, configs(), DATA[0], endpoint=endpoint, choose="fused") as other,
    ):
        for job in (array, other):
            job.step(*DATA[0])
        real, refusals = open_job, [AdmissionRefused("it is full", "close a job")]

        def refused(*args: Any) -> None:
            if refusals:
                raise refusals.pop()
            real(*args)

        monkeypatch.setattr("gpumux.fuse.job.open_job", refused)
        with pytest.raises(AdmissionRefused, match="full"):
            array.add(Config(9))
        assert len(array) == 3
        assert torch.equal(array.step(*DATA[1]).result(), other.step(*DATA[1]).result())
        refusals += [AdmissionRefused("it is full", "close a job") for _ in range(2)]
        expected = other.state_dict(2)["model"]
        with pytest.raises(AdmissionRefused, match="full"):
            array.remove(0)
        same(array.state_dict(2)["model"], expected, 0.0)  # what was trained is not lost
        with pytest.raises(JobClosed):
            array.step(*DATA[2])


def test_a_job_of_models_that_differ_in_a_block(endpoint: str):
    """Each optimizer's first step is a Program of its own, and so is the first one after a model has left: state of one
    model alone has the same place in all of them."""

    def module(config: Config) -> nn.Module:
        blocks = [nn.Tanh(), nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 8)), nn.Dropout(0.3)]
        return nn.Sequential(nn.Linear(5, 8), blocks[config.seed % 3], nn.Linear(8, 4))

    def factory(config: Config) -> Any:
        return training(lambda: module(config), adam)(config)

    with (
        one_thread(),
        fuse.submit_array(factory, configs(), DATA[0], endpoint=endpoint, choose="fused", partial=True) as array,
    ):
        for i, batch in enumerate(DATA):
            if i == 3:
                left = array.remove(0)
            array.step(*batch).result()
        assert any(r.why.startswith("only model") for r in array.plan().rows)
        found = [left, array.state_dict(0), array.state_dict(1)]
    for config, rows, state in zip(configs(), [DATA[:3], DATA, DATA], found, strict=True):
        step, model, _ = factory(config)
        for batch in rows:
            step(*batch)
        same(state["model"], model.state_dict())


def test_an_array_that_was_kept_goes_on_in_another_program(endpoint: str):
    """State, random streams, step counters and learning rates of each model are resumed; one has just joined and has
    taken no step."""
    factory, more = training(dropping, listed), Config(9, 0.03)
    made: list[Any] = []

    def noted(config: Config) -> Any:
        made.append(factory(config))
        return made[-1]

    def slower(optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] = 0.002

    with one_thread():
        array = fuse.submit_array(noted, configs(), DATA[0], endpoint=endpoint, choose="fused", name="kept")
        for batch in DATA[:2]:
            array.step(*batch)
        slower(made[1][2])
        array.step(*DATA[2])
        array.add(more)
        left = [array.state_dict(b) for b in range(4)]
        array.close(keep=True)
        array.close()
        others = [Config(seed, 0.5) for seed in (5, 6, 7, 8)]  # other initial values, which the snapshot overwrites
        with pytest.raises(ConfigError, match=r"has 4 models, and here are 3 — give configs for as many"):
            fuse.submit_array(factory, others[:3], DATA[0], endpoint=endpoint, choose="fused", resume="kept")
        wider = training(lambda: nn.Sequential(nn.Linear(5, 9), nn.Dropout(0.3), nn.Tanh(), nn.Linear(9, 4)), listed)
        with pytest.raises(ConfigError, match="not the job that was kept: its "):
            fuse.submit_array(wider, others, DATA[0], endpoint=endpoint, choose="fused", resume="kept")
        with fuse.submit_array(factory, others, DATA[0], endpoint=endpoint, choose="fused", resume="kept") as again:
            assert again.resumed_steps == 3
            assert again.job.name == "kept"
            for b in range(4):
                same(again.state_dict(b)["model"], left[b]["model"], 0.0)
            losses = [again.step(*batch).result() for batch in DATA[3:]]
            found = [again.state_dict(b) for b in range(4)]
        with pytest.raises(UnknownJob, match=r"no job called|no whole snapshot"):  # it was finished
            fuse.submit_array(factory, others, DATA[0], endpoint=endpoint, choose="fused", resume="kept")
        for b, config in enumerate([*configs(), more]):
            step, model, optimizer = factory(config)
            for i in range(3 if b == 3 else 0, len(DATA)):
                if i == 2 and b == 1:
                    slower(optimizer)
                alone = step(*DATA[i])
                if i >= 3:
                    assert relative_difference(losses[i - 3][b], alone.detach()) < 1e-9
            same(found[b]["model"], model.state_dict())
            assert found[b]["optimizer"]["param_groups"][0]["lr"] == optimizer.param_groups[0]["lr"]


@pytest.mark.extended
def test_a_job_and_an_array_are_not_resumed_as_each_other(endpoint: str):
    step, model, optimizer = training(dropping, listed)(Config(0))
    with one_thread():
        job = client.submit(
            step, example=DATA[0], model=model, optimizer=optimizer, endpoint=endpoint, name="a job of one model"
        )
        job.step(*DATA[0])
        job.close(keep=True)
        factory = training(dropping, listed)
        with pytest.raises(ConfigError, match=r"is no array — go on with client.submit"):
            fuse.submit_array(factory, configs(), DATA[0], endpoint=endpoint, choose="fused", resume=job.name)
        array = fuse.submit_array(factory, configs(2), DATA[0], endpoint=endpoint, choose="fused", name="of two")
        array.step(*DATA[0])
        array.close(keep=True)
        step, model, optimizer = factory(Config(0))
        with pytest.raises(ConfigError, match="not the job that was kept"):
            client.submit(step, example=DATA[0], model=model, optimizer=optimizer, endpoint=endpoint, resume="of two")
