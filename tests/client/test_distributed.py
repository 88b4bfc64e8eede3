"""DistributedDataParallel with one process in its group trains as the module inside does; others are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.distributed.multi_threaded_pg import _install_threaded_pg, _uninstall_threaded_pg

from gpumux import client, errors
from tests.client.parity import Work, check

# torch's own: newer versions rename an option that older ones lack the new name of.
pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed"),
    pytest.mark.filterwarnings("ignore:`broadcast_buffers` is deprecated"),
]


@contextmanager
def processes(count: int) -> Iterator[None]:
    """A group of so many. The backends are those of torch's own tests, because gloo leaves sockets and threads behind;
    the one for one process copies what it is given, as gloo does. (clients/compatibility has it with gloo.)"""
    if count > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    else:
        _install_threaded_pg()
        dist.init_process_group("threaded", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
        if count == 1:
            _uninstall_threaded_pg()


@pytest.fixture
def alone() -> Iterator[None]:
    with processes(1):
        yield


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


def batches() -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(4)
    return [(torch.randn(6, 8, generator=g), torch.randint(0, 4, (6,), generator=g)) for _ in range(6)]


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return step


def work(*, inside: bool = False, **options: Any) -> Work:
    """`inside`: the job is given the module inside."""
    model = DistributedDataParallel(network(), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def loop(run: Any) -> list[Any]:
        seen = []
        for x, y in batches():
            seen.append(run(x, y))
            model.eval()
            with torch.no_grad():
                seen.append(model(x).sum())  # an evaluation between steps, which broadcasts the buffers
            model.train()
        return seen

    return Work([model.module if inside else model], [optimizer], [(step_of(model, optimizer), batches()[0])], loop)


@pytest.mark.parametrize(
    "options",
    [{}, {"inside": True}, {"gradient_as_bucket_view": True}, {"broadcast_buffers": False}],
    ids=["as it is", "the module inside is given", "buckets", "buffers are not broadcast"],
)
@pytest.mark.usefixtures("alone")
def test_one_process_trains_as_in_the_plain_loop(options: dict[str, Any], endpoint: str) -> None:
    check(lambda: work(**options), endpoint)


@torch.no_grad()
def gathered(tensor: Tensor) -> Tensor:
    """As MoCo gathers keys."""
    found = [torch.ones_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor, async_op=False)
    return torch.cat(found)


def gathered_into(found: Tensor, tensor: Tensor) -> None:
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    getattr(dist, name)(found, tensor)


COLLECTIVES: dict[str, Callable[[Tensor], Any]] = {
    "all_reduce": lambda z: dist.all_reduce(z),
    "its mean": lambda z: dist.all_reduce(z, op=dist.ReduceOp.AVG),
    "asynchronous": lambda z: dist.all_reduce(z, async_op=True).wait(),
    "broadcast": lambda z: (dist.broadcast(z, src=0), dist.barrier()),
    "all_gather": lambda z: z.mul_(gathered(z)),
    "into one tensor": lambda z: (gathered_into(found := torch.empty_like(z[None]), z), found)[1],
}


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.usefixtures("alone")
def test_collectives_of_one_process(name: str, endpoint: str) -> None:
    def make() -> Work:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor, y: Tensor) -> Any:
            optimizer.zero_grad()
            z = model(x)
            found = COLLECTIVES[name](z.detach())
            loss = F.cross_entropy(z, y)
            loss.backward()
            optimizer.step()
            return loss, found if isinstance(found, Tensor) else z

        return Work([model], [optimizer], [(step, batches()[0])], lambda run: [run(x, y) for x, y in batches()[:3]])

    check(make, endpoint)


def test_collectives_of_several_processes_are_refused(endpoint: str) -> None:
    model = network()

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        dist.all_reduce(loss.detach())
        return loss

    with processes(2), pytest.raises(errors.CaptureError, match=r"all_reduce among 2 processes") as caught:
        client.submit(step, example=batches()[0], model=model, endpoint=endpoint)
    assert "one process" in caught.value.remedy


@pytest.mark.usefixtures("alone")
def test_accumulated_gradients_without_sync(endpoint: str) -> None:
    def make() -> Work:
        model = DistributedDataParallel(network())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            with model.no_sync():
                F.cross_entropy(model(x[:3]), y[:3]).backward()
            loss = F.cross_entropy(model(x[3:]), y[3:])
            loss.backward()
            optimizer.step()
            return loss

        return Work([model], [optimizer], [(step, batches()[0])], lambda run: [run(x, y) for x, y in batches()])

    check(make, endpoint)


@pytest.mark.usefixtures("alone")
def test_a_forward_pass_before_the_job_and_plain_steps_after_it(endpoint: str) -> None:
    def make() -> Work:
        model = DistributedDataParallel(network())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = step_of(model, optimizer)
        model(batches()[0][0])  # its reducer now waits for a backward pass
        return Work([model], [optimizer], [(step, batches()[0])], lambda run: [run(x, y) for x, y in batches()])

    check(make, endpoint)
    plain = make()
    step, example = plain.functions[0]
    client.submit(step, example=example, model=plain.models, optimizer=plain.optimizers, endpoint=endpoint).close()
    for x, y in batches():
        step(x, y)  # the reducer is in order


@pytest.mark.usefixtures("alone")
def test_an_evaluation_between_steps_makes_no_further_case(endpoint: str) -> None:
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with client.submit(
        step_of(model, optimizer), example=batches()[0], model=model, optimizer=optimizer, endpoint=endpoint
    ) as job:
        for x, y in batches():
            job.step(x, y)
            programs = len(job._remote.programs)
            model.eval()
            with torch.no_grad():
                model(x)
            model.train()
        assert len(job._remote.programs) == programs


def refusal(model: DistributedDataParallel, endpoint: str) -> errors.CaptureError:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(errors.CaptureError) as caught:
        client.submit(
            step_of(model, optimizer), example=batches()[0], model=model, optimizer=optimizer, endpoint=endpoint
        ).close()
    assert "calls a DistributedDataParallel" in caught.value.message
    assert "test_distributed.py" in caught.value.message
    return caught.value


def test_several_processes_are_refused_by_name(endpoint: str) -> None:
    with processes(2):
        error = refusal(DistributedDataParallel(network()), endpoint)
    assert "over 2 processes" in error.message
    assert "one process" in error.remedy


@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
@pytest.mark.usefixtures("alone")
def test_an_option_that_keeps_tensors_is_refused_by_name(option: str, endpoint: str) -> None:
    error = refusal(DistributedDataParallel(network(), **{option: True}), endpoint)
    assert f"with {option}=" in error.message
    assert "leave that out" in error.remedy


@pytest.mark.usefixtures("alone")
def test_a_communication_hook_is_refused_also_once_a_job_is_open(endpoint: str) -> None:
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = batches()[0]
    with client.submit(
        step_of(model, optimizer), example=(x, y), model=model, optimizer=optimizer, endpoint=endpoint
    ) as job:
        job.step(x, y)
        model.register_comm_hook(None, allreduce_hook)
        with pytest.raises(errors.CaptureError, match="communication hook"):
            job.step(x, y)
