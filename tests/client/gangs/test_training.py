"""Jobs on several real daemons train what the plain loop trains."""

from __future__ import annotations

import copy
import os
import random
import signal
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import nn

from gpumux import client, errors
from gpumux.burst.placement import RankPlacement
from microbench.daemon import RunningDaemon
from microbench.soaking.watch import executors
from tests.burst.distributed import train
from tests.burst.emulate import Gang
from tests.burst.norms import NORMED
from tests.burst.subjects import SUBJECTS, apart, random_placement, tensors_of

pytestmark = pytest.mark.usefixtures("in_float64")


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def training(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(3)
    return [(torch.randn(8, 6), torch.randint(0, 3, (8,))) for _ in range(count)]


def until(predicate: Callable[[], bool]) -> None:
    """Ask again until the predicate holds, at most a minute."""
    give_up = time.monotonic() + 60
    while not predicate():
        assert time.monotonic() < give_up
        threading.Event().wait(0.05)


SPLIT = RankPlacement(2, {"0": (0, 1), "2": (1,)})


@pytest.mark.every(4)
@pytest.mark.parametrize("name", SUBJECTS)
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.extended)])
def test_any_placement_trains_what_plain_torch_trains(name: str, ranks: int, endpoints: list[str]) -> None:
    subject = SUBJECTS[name]
    placement = random_placement(subject.layers, ranks, random.Random(ranks))
    torch.manual_seed(0)
    plain = subject.make()
    split = copy.deepcopy(plain)
    data = [subject.batch() for _ in range(4)]
    models, plain_optimizers, steps = subject.build(plain)
    torch.manual_seed(1)
    wanted = [step(*batch) for batch in data for step in steps]
    generator = torch.get_rng_state()
    mine, optimizers, functions = subject.build(split)
    torch.manual_seed(1)
    with client.submit(
        functions[0], example=data[0], model=mine, optimizer=optimizers, plan=placement, endpoints=endpoints[:ranks]
    ) as job:
        others = [job.add(function, example=data[0]) for function in functions[1:]]
        given = [call(*batch) for batch in data for call in (job.step, *others)]
        results = [future.result() for future in given]
        assert job.stats()["exactness"] == "equivalent"
        assert len(job.stats()["ranks"]) == ranks
    assert torch.equal(generator, torch.get_rng_state())
    assert apart(tensors_of(wanted), tensors_of(results)) < 1e-10
    state = [[t for m in each for t in m.state_dict().values()] for each in (models, mine)]
    assert apart(*state) < 1e-10
    state = [pytree.tree_leaves([o.state_dict()["state"] for o in each]) for each in (plain_optimizers, optimizers)]
    assert apart(*[[t for t in each if isinstance(t, torch.Tensor)] for each in state]) < 1e-10
    assert [type(t) for t in state[0]] == [type(t) for t in state[1]]


@pytest.mark.parametrize("name", ["vgg", pytest.param("transformer", marks=pytest.mark.extended)])
def test_four_processes_repeat_their_bits_and_compute_what_ranks_one_after_the_other_do(
    name: str, endpoints: list[str]
) -> None:
    """And they move the bytes that the Programs say, each rank to each other one."""
    subject = SUBJECTS[name]
    placement = random_placement(subject.layers, 4, random.Random(name))
    torch.manual_seed(0)
    begin = subject.make()
    data = [subject.batch() for _ in range(5)]

    def run(over: Callable[[Any, Any, Any], tuple[list[Any], Any]]) -> tuple[list[torch.Tensor], Any]:
        models, optimizers, steps = subject.build(copy.deepcopy(begin))
        torch.manual_seed(1)
        results, facts = over(models, optimizers, steps)
        state = [t.clone() for m in models for t in m.state_dict().values()]
        return [*tensors_of(results), *state], facts

    def processes(models: Any, optimizers: Any, steps: Any) -> tuple[list[Any], Any]:
        with client.submit(
            steps[0], example=data[0], model=models, optimizer=optimizers, plan=placement, endpoints=endpoints
        ) as job:
            results = [job.step(*batch) for batch in data]
            results = [future.result() for future in results]
            return results, [rank["gang"] for rank in job.stats()["ranks"]]

    def one_after_the_other(models: Any, optimizers: Any, steps: Any) -> tuple[list[Any], Any]:
        gang = Gang(models, optimizers, steps, placement)
        results = [gang(*batch) for batch in data]
        gang.sync()
        return results, gang.predicted

    (first, moved), (again, _) = run(processes), run(processes)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    wanted, predicted = run(one_after_the_other)
    assert apart(wanted, first) < 1e-12
    for rank, counted in enumerate(moved):
        assert counted["sent_bytes"] == sum(n for (source, _), n in predicted.items() if source == rank)
        assert counted["received_bytes"] == sum(n for (_, target), n in predicted.items() if target == rank)


def test_the_loop_around_it_is_the_same_as_ever(endpoints: list[str]) -> None:
    """Another step for evaluation, state_dict, reading and loading the model between steps, a scheduler."""
    data = batches(6)
    torch.manual_seed(0)
    plain = mlp()
    split = copy.deepcopy(plain)
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (plain, split)]
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in optimizers]
    step = training(plain, optimizers[0])
    wanted = []
    for batch in data:
        wanted.append(step(*batch).detach())
        schedulers[0].step()
    with torch.no_grad():
        scores = plain(data[0][0])
    with client.submit(
        training(split, optimizers[1]), example=data[0], model=split, optimizer=optimizers[1], plan=SPLIT,
        endpoints=endpoints[:2],
    ) as job:  # fmt: skip
        evaluate = job.add(torch.no_grad()(lambda x: split(x)), example=(data[0][0],))
        losses = []
        for i, batch in enumerate(data):
            losses.append(job.step(*batch))
            schedulers[1].step()
            if i == 3:
                job.load_state(job.state_dict())
            if i == 4:
                assert apart([split[0].weight], [job.state_dict()["model"]["0.weight"]]) == 0
        assert apart([scores], [evaluate(data[0][0]).result()]) < 1e-10
        assert apart(wanted, [loss.result() for loss in losses]) < 1e-10
    assert apart(list(plain.parameters()), list(split.parameters())) < 1e-10


def test_the_jobs_of_each_daemon_say_their_rank(daemons: list[RunningDaemon]) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (batch,) = batches(1)
    with client.submit(
        training(model, optimizer), example=batch, model=model, optimizer=optimizer, name="gang",
        endpoints=[daemon.endpoint for daemon in daemons[:2]],
    ) as job:  # fmt: skip
        job.step(*batch).result()
        for rank, daemon in enumerate(daemons[:2]):
            (found,) = [one for one in daemon.status()["jobs"] if one["name"] == "gang"]
            assert (found["job"], found["gang"]["rank"], found["gang"]["ranks"]) == (job.id, rank, 2)


def test_steps_that_are_one_on_some_rank_do_not_share_a_slot_there(daemons: list[RunningDaemon]) -> None:
    """Both steps under way run the same Program on the first rank, with other batches, while the second one's process
    stands still: neither's batch or result takes the place of the other's."""
    model = mlp()
    x, other = (torch.randn(8, 6) for _ in range(2))

    def hidden_and(scores: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], Any]:
        def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            with torch.no_grad():
                hidden = model[:2](x)
                return hidden, scores(model[2](hidden))

        return step

    steps = [hidden_and(lambda scores: scores.argmax(1)), hidden_and(lambda scores: scores.softmax(1))]
    wanted = [steps[0](x), steps[1](other)]
    before = set(executors(daemons[1].process.pid))
    with client.submit(
        steps[0], example=(x,), model=model, plan=RankPlacement(2, {"0": (0,), "2": (1,)}),
        endpoints=[daemon.endpoint for daemon in daemons[:2]],
    ) as job:  # fmt: skip
        added = job.add(steps[1], example=(x,))
        job.step(x).result(), added(x).result()  # both are loaded
        (executor,) = set(executors(daemons[1].process.pid)) - before
        os.kill(executor, signal.SIGSTOP)
        try:
            given = [job.step(x), added(other)]
            daemons[0].status()  # it has been sent both
        finally:
            os.kill(executor, signal.SIGCONT)
        results = [future.result() for future in given]
    assert apart(tensors_of(wanted), tensors_of(results)) < 1e-12


def test_a_rank_that_dies_fails_the_steps_that_wait_and_leaves_no_job_behind(daemons: list[RunningDaemon]) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (batch,) = batches(1)
    job = client.submit(
        training(model, optimizer), example=batch, model=model, optimizer=optimizer, name="dies", plan=SPLIT,
        endpoints=[daemon.endpoint for daemon in daemons[:2]],
    )  # fmt: skip
    job.step(*batch).result()
    (executor,) = executors(daemons[1].process.pid)
    os.kill(executor, signal.SIGKILL)
    with pytest.raises(errors.JobFailed) as error:
        job.step(*batch).result(60)
    assert error.value.remedy
    job.close(drain=False)
    for daemon in daemons[:2]:
        until(lambda daemon=daemon: all(one["name"] != "dies" for one in daemon.status()["jobs"]))


def test_a_daemon_that_is_not_there_leaves_no_job_on_the_others(daemons: list[RunningDaemon]) -> None:
    model = mlp()
    (batch,) = batches(1)
    with pytest.raises(errors.DaemonGone):
        client.submit(
            lambda x: model(x), example=(batch[0],), model=model, name="alone",
            endpoints=[daemons[0].endpoint, f"ipc://{daemons[0].directory}/none.sock"],
        )  # fmt: skip
    assert all(one["name"] != "alone" for one in daemons[0].status()["jobs"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"endpoints": []}, "endpoints is"),
        ({"endpoints": "ipc:///a"}, "endpoints is"),
        ({"endpoints": ["ipc:///a", "ipc:///a"]}, "different ones"),
        ({"endpoints": ["ipc:///a"], "endpoint": "ipc:///b"}, "all say where"),
        ({"devices": 0}, "devices is"),
        ({"plan": RankPlacement(2)}, "one daemon"),
        ({"plan": RankPlacement(3), "endpoints": ["ipc:///a", "ipc:///b"]}, "3 devices"),
        ({"plan": 3, "endpoints": ["ipc:///a", "ipc:///b"]}, "plan is a int"),
        ({"microbatches": 2, "endpoints": ["ipc:///a", "ipc:///b"]}, "microbatches= is given"),
        ({"resume": "x", "endpoints": ["ipc:///a", "ipc:///b"]}, "resume= is given"),
        ({"peers_timeout_s": 0, "endpoints": ["ipc:///a", "ipc:///b"]}, "peers_timeout_s is"),
        ({"batch_norm": "group", "endpoints": ["ipc:///a", "ipc:///b"]}, "batch_norm is"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(arguments: dict[str, Any], said: str) -> None:
    model = mlp()
    with pytest.raises(errors.ConfigError, match=said) as error:
        client.submit(lambda x: model(x), example=(torch.zeros(2, 6),), model=model, **arguments)
    assert error.value.remedy


def test_a_batch_norm_is_refused_unless_one_way_is_chosen(endpoints: list[str]) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    plain = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    data = batches(3)
    with pytest.raises(errors.NotSplittable, match="batch norm"):
        client.submit(
            training(model, optimizers[1]), example=data[0], model=model, optimizer=optimizers[1],
            endpoints=endpoints[:2],
        )  # fmt: skip
    step = training(plain, optimizers[0])
    wanted = [step(*batch).detach() for batch in data]
    with client.submit(
        training(model, optimizers[1]), example=data[0], model=model, optimizer=optimizers[1], batch_norm="sync",
        endpoints=endpoints[:2],
    ) as job:  # fmt: skip
        given = [job.step(*batch).result() for batch in data]
    assert apart(wanted, given) < 1e-10
    assert apart(list(plain.state_dict().values()), list(model.state_dict().values())) < 1e-10


@pytest.mark.extended
@pytest.mark.parametrize("name", ["convolutions", "flat"])
@pytest.mark.every(2)
def test_statistics_of_each_rank_are_those_of_distributed_data_parallel(name: str, endpoints: list[str]) -> None:
    """The running statistics are sent from the first rank to the other: an exchange of state alone."""
    subject = NORMED[name]
    torch.manual_seed(0)
    model = subject.make()
    data = [subject.batch() for _ in range(4)]
    wanted = train(subject, data, 2)
    _, optimizers, (step,) = subject.build(model)
    with client.submit(
        step, example=data[0], model=model, optimizer=optimizers, batch_norm="rank", endpoints=endpoints[:2]
    ) as job:
        for batch in data:
            job.step(*batch)
    found = model.state_dict()
    assert apart(list(wanted.values()), [found[key] for key in wanted]) <= 1e-12


def test_a_list_of_one_daemon_is_that_daemon(endpoints: list[str]) -> None:
    """Nothing is split: any batch and any batch norm will do."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    alone = copy.deepcopy(plain)
    data = [(torch.randn(size, 6), torch.randint(0, 3, (size,))) for size in (8, 8, 7)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (plain, alone)]
    step = training(plain, optimizers[0])
    wanted = [step(*batch).detach() for batch in data]
    with client.submit(
        training(alone, optimizers[1]), example=data[0], model=alone, optimizer=optimizers[1], endpoints=endpoints[:1]
    ) as job:
        given = [job.step(*batch).result() for batch in data]
        assert job.stats()["exactness"] == "bit-equal"
    # Not to the bit, because the plain loop may use threads.
    assert apart([*wanted, *plain.parameters()], [*given, *alone.parameters()]) < 1e-12


def test_a_batch_that_ranks_do_not_divide_is_refused_in_the_words_of_ranks(endpoints: list[str]) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (x, y), *_ = batches(1)
    with client.submit(
        training(model, optimizer), example=(x, y), model=model, optimizer=optimizer, endpoints=endpoints[:2]
    ) as job:
        with pytest.raises(
            errors.NotSplittable, match="7 samples can't be cut into 2 equal parts for ranks"
        ) as refusal:
            job.step(x[:7], y[:7])
        assert "drop_last=True" in refusal.value.remedy
        assert torch.isfinite(job.step(x, y).result())  # the job goes on


def test_a_batch_of_expanded_tensors_is_split(endpoints: list[str]) -> None:
    """Labels that are one for all samples, and a mask that is the same for each."""
    torch.manual_seed(0)
    plain = mlp()
    split = copy.deepcopy(plain)
    data = [(torch.randn(8, 6), torch.randint(0, 3, (1,)).expand(8), torch.rand(1, 6).expand(8, 6)) for _ in range(3)]

    def masked(model: nn.Module) -> tuple[Any, torch.optim.Optimizer]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = training(model, optimizer)
        return lambda x, y, mask: step(x * mask, y), optimizer

    step, _ = masked(plain)
    wanted = [step(*batch).detach() for batch in data]
    step, optimizer = masked(split)
    with client.submit(
        step, example=data[0], model=split, optimizer=optimizer, plan=SPLIT, endpoints=endpoints[:2]
    ) as job:
        given = [job.step(*batch).result() for batch in data]
    assert apart([*wanted, *plain.parameters()], [*given, *split.parameters()]) < 1e-10


@pytest.mark.parametrize("plan", [None, RankPlacement(2, {"0": (0, 1), "2": (1,)})], ids=["data parallel", "a plan"])
def test_an_update_that_takes_no_batch_follows_accumulated_gradients(
    plan: RankPlacement | None, endpoints: list[str]
) -> None:
    data = batches(6)
    torch.manual_seed(0)
    plain = mlp()
    split = copy.deepcopy(plain)

    def steps(model: nn.Module) -> tuple[Any, Any, torch.optim.Optimizer]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        def accumulate(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = F.cross_entropy(model(x), y) / 2
            loss.backward()
            return loss

        def update() -> torch.Tensor:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            return norm

        return accumulate, update, optimizer

    def loop(accumulate: Any, update: Any) -> list[torch.Tensor]:
        found = []
        for i, batch in enumerate(data):
            found.append(accumulate(*batch))
            if i % 2:
                found.append(update())
        return found

    wanted = [value.detach() for value in loop(*steps(plain)[:2])]
    accumulate, update, optimizer = steps(split)
    with client.submit(
        accumulate, example=data[0], model=split, optimizer=optimizer, plan=plan, endpoints=endpoints[:2]
    ) as job:
        given = [value.result() for value in loop(job.step, job.add(update, example=()))]
    assert apart([*wanted, *plain.parameters()], [*given, *split.parameters()]) < 1e-10


def test_a_plan_of_other_layers_is_refused_with_a_name_that_would_do(endpoints: list[str]) -> None:
    model = nn.Sequential(OrderedDict(body=nn.Linear(6, 16), head=nn.Linear(16, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (batch,) = batches(1)
    with pytest.raises(errors.ConfigError, match="haed") as refusal:
        client.submit(
            training(model, optimizer), example=batch, model=model, optimizer=optimizer, endpoints=endpoints[:2],
            plan=RankPlacement(2, {"body": (0, 1), "haed": (1,)}),
        )  # fmt: skip
    assert "like head" in refusal.value.remedy


def test_one_daemon_by_two_names_is_refused(daemons: list[RunningDaemon]) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (batch,) = batches(1)
    one = daemons[0].endpoint
    directory, _, name = one.rpartition("/")
    with pytest.raises(errors.ConfigError, match="two of the endpoints are one daemon"):
        client.submit(
            training(model, optimizer), example=batch, model=model, optimizer=optimizer,
            endpoints=[one, f"{directory}/./{name}"],
        )  # fmt: skip
