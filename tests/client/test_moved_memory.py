"""Tensors that a script gives another shape or other memory between two steps, and what goes with them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpumux import client, errors

pytestmark = pytest.mark.usefixtures("one_thread")


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(4, 4, generator=generator), torch.randint(0, 4, (4,), generator=generator)) for _ in range(count)
    ]


def remedied(job: client.Job, *batch: Tensor) -> Any:
    """A step, after what LocalWrite says."""
    try:
        return job.step(*batch).result()
    except errors.LocalWrite:
        job.load_state()
        return job.step(*batch).result()


class Script:
    """A model of square weights, a matrix `read` and a vector `small` that the step reads, a matrix `written` that it
    writes, and a `view`."""

    def __init__(self, view: Callable[[Any], Tensor] | None) -> None:
        torch.manual_seed(0)
        self.model: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.read, self.small, self.written = torch.rand(4, 4), torch.rand(8)[:4], torch.rand(4, 4)
        self.view = torch.ones(4) if view is None else view(self)

    def step(self, x: Tensor, y: Tensor) -> Any:
        self.optimizer.zero_grad()
        out = self.model(x)
        loss = F.cross_entropy(out, y) + (out * self.read).mean() + (out * self.small).mean()
        loss = loss + (out * self.written).mean() + (out * self.view).mean()
        loss.backward()
        self.optimizer.step()
        self.written.mul_(0.5).add_(out.detach())
        return loss


def swapped(a: Tensor, b: Tensor) -> None:
    a.data, b.data = b.data, a.data


def bias(s: Script) -> Any:
    return s.model[0].bias


def mean(s: Script) -> Any:
    return s.model[1].running_mean


def weight(s: Script) -> Any:
    return s.model[0].weight


def set_data(find: Callable[[Script], Any], value: Callable[[Script], Tensor]) -> Callable[[Script], None]:
    def write(s: Script) -> None:
        find(s).data = value(s)

    return write


def transposed(find: Callable[[Script], Any]) -> Callable[[Script], None]:
    def write(s: Script) -> None:
        with torch.no_grad():
            find(s).t_()

    return write


def of_script(name: str) -> Callable[[Script], Any]:
    return lambda s: getattr(s, name)


def both_anew(s: Script) -> None:
    new = torch.rand(4)
    bias(s).data = new
    s.model[1].bias.data = new


def reshaped(s: Script) -> None:
    s.small.unsqueeze_(1)


def later_in_its_memory(s: Script) -> None:
    s.small.set_(s.small.untyped_storage(), 4, (4,), (1,))


READ, WRITTEN, VIEW = map(of_script, ("read", "written", "view"))
MOVES: dict[str, Callable[[Script], None]] = {
    "a weight is transposed by .data": set_data(weight, lambda s: weight(s).data.t()),
    "a weight is transposed in place": transposed(weight),
    "two parameters are tied by .data": set_data(bias, lambda s: s.model[1].bias.data),
    "two parameters are swapped by .data": lambda s: swapped(bias(s), s.model[1].bias),
    "two parameters get the same new memory": both_anew,
    "a parameter is a row of another": set_data(bias, lambda s: weight(s).data[0]),
    "a parameter gets the memory of a tensor outside": set_data(bias, VIEW),
    "a parameter and a tensor outside are swapped": lambda s: swapped(bias(s), s.view),
    "a tensor that steps read is transposed": transposed(READ),
    "a tensor that steps read is transposed by .data": set_data(READ, lambda s: s.read.t()),
    "a tensor that steps read is reshaped": reshaped,
    "a tensor that steps read lies later in its memory": later_in_its_memory,
    "a tensor that steps write is transposed": transposed(WRITTEN),
    "a tensor that steps read gets the memory of a written one": set_data(READ, WRITTEN),
    "a tensor that steps write gets the memory of a read one": set_data(WRITTEN, READ),
    "a read and a written tensor are swapped": lambda s: swapped(s.read, s.written),
    "a tensor that steps read gets a buffer's memory": set_data(VIEW, mean),
    "a tensor that steps read gets a buffer's memory by numpy": set_data(
        VIEW, lambda s: torch.from_numpy(mean(s).numpy())
    ),
}  # fmt: skip
VIEWS: dict[str, tuple[Callable[[Script], Tensor], Callable[[Script], None]]] = {
    "of a weight, given other memory": (lambda s: weight(s).data, set_data(VIEW, lambda s: s.view * 2)),
    "of a weight, transposed": (lambda s: weight(s).data, transposed(VIEW)),
    "of a weight that is given other memory": (
        lambda s: weight(s).data, set_data(weight, lambda s: torch.rand(4, 4))
    ),
    "of a buffer, given another's memory": (
        lambda s: mean(s).detach(), set_data(VIEW, lambda s: s.model[1].running_var)
    ),
    "of a read tensor, given other memory": (lambda s: s.read[0], set_data(VIEW, lambda s: torch.ones(4))),
    "of a read tensor that is given other memory": (lambda s: s.read[0], set_data(READ, lambda s: torch.ones(4, 4))),
    "of a written tensor, given other memory": (lambda s: s.written[0], set_data(VIEW, lambda s: torch.ones(4))),
}  # fmt: skip
CASES = {name: (None, move) for name, move in MOVES.items()} | {f"a view {name}": case for name, case in VIEWS.items()}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.every(5)
def test_a_step_after_it_is_refused(name: str, endpoint: str) -> None:
    """LocalWrite's remedy, job.load_state(), says so too."""
    view, move = CASES[name]
    script = Script(view)
    first, second = batches(2)
    with client.submit(
        script.step, example=first, model=script.model, optimizer=script.optimizer, endpoint=endpoint
    ) as job:
        job.step(*first).result()
        move(script)
        with pytest.raises(errors.CaptureError, match="close the job and submit the step again"):
            remedied(job, *second)
        with pytest.raises(errors.GpumuxError):  # it is not forgotten
            job.step(*second).result()


def test_a_view_that_its_variable_no_longer_holds_may_lie_elsewhere(endpoint: str) -> None:
    def through(submit: Callable[..., Any]) -> list[Tensor]:
        script = Script(lambda s: s.model[0].weight.data)
        step = submit(script)
        found = []
        for one in batches(3):
            found.append(step(*one).detach().clone())
            if len(found) == 1:
                old, script.view = script.view, torch.full((4, 4), 5.0)
                old.data = torch.zeros(2)
        return found

    plain = through(lambda script: script.step)
    jobs = []

    def submitted(s: Script) -> Any:
        jobs.append(
            client.submit(s.step, example=batches(1)[0], model=s.model, optimizer=s.optimizer, endpoint=endpoint)
        )
        return lambda *one: jobs[0].step(*one).result()

    found = through(submitted)
    jobs[0].close()
    assert all(map(torch.equal, plain, found))


@pytest.mark.parametrize("of", [bias, mean], ids=["a parameter", "a buffer"])
def test_a_tensor_over_the_models_memory_by_numpy_is_refused(of: Callable[[Script], Any], endpoint: str) -> None:
    script = Script(lambda s: torch.from_numpy(of(s).detach().numpy()))
    with pytest.raises(errors.CaptureError, match=r"view lies in the memory of .* without torch's knowledge"):
        client.submit(
            script.step, example=batches(1)[0], model=script.model, optimizer=script.optimizer, endpoint=endpoint
        )


# ---- tensors that two jobs write


@pytest.mark.parametrize("by", ["its name", "the data of a parameter"])
def test_two_jobs_that_write_one_tensor_go_on_from_each_others_values(by: str, endpoint: str) -> None:
    """In the other job it is a tensor outside as well, or a parameter, of which that job says LocalWrite."""

    def through(submit: Callable[..., Any]) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        shared = model.bias.data if by != "its name" else torch.ones(4)

        def one(x: Tensor) -> Any:
            with torch.no_grad():
                if by == "its name":
                    shared.add_(x.mean(0))
                else:
                    model.bias.add_(x.mean(0))
                return shared.sum() + model(x).sum()

        def two(x: Tensor) -> Any:
            shared.mul_(0.5)
            return shared + x.mean(0)

        first, second = submit(one, model), submit(two, None)
        found = []
        for which, (x, _) in zip((first, first, second, second, first, second, first), batches(7), strict=True):
            found.append(which(x).detach().clone())
        return [*found, shared.clone()]

    jobs = []

    def submitted(step: Any, model: Any) -> Any:
        job = client.submit(step, example=batches(1)[0][:1], model=model, endpoint=endpoint)
        jobs.append(job)

        return lambda x: remedied(job, x)

    plain = through(lambda step, model: step)
    found = through(submitted)
    for job in jobs:
        job.close()
    assert [i for i, (a, b) in enumerate(zip(plain, found, strict=True)) if not torch.equal(a, b)] == []


# ---- numbers beside tensors that are made at their first use


@pytest.mark.parametrize("kind", ["a counter", "a counter that decides", "a length", "a length and a counter"])
def test_numbers_beside_a_tensor_made_at_its_first_use(kind: str, endpoint: str) -> None:
    """The trace that makes the tensor is no step: what it counted does not count."""

    def through(submit: Callable[..., Any]) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        own: Any = SimpleNamespace(mask=None, count=0, most=0)

        def step(x: Tensor, y: Tensor) -> Any:
            if "length" in kind:
                if len(x) > own.most:
                    own.most = len(x)
                    own.mask = torch.arange(own.most * 4).view(-1, 4).cos()
            elif own.mask is None:
                own.mask = torch.ones(4, 4).cumsum(0)
            loss = F.cross_entropy(model(x * own.mask[: len(x)]), y)
            if "counter" in kind:
                own.count += 1
                loss = loss / own.count
            loss.backward()
            if kind != "a counter that decides" or own.count % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
            return loss

        run = submit(step, model, optimizer)
        return [(float(run(*one).detach()), own.count, own.most) for one in batches(5)]

    jobs = []

    def submitted(step: Any, model: Any, optimizer: Any) -> Any:
        jobs.append(client.submit(step, example=batches(1)[0], model=model, optimizer=optimizer, endpoint=endpoint))
        return jobs[0].step

    found = through(submitted)
    jobs[0].close()
    assert found == through(lambda step, model, optimizer: step)


# ---- another object over the memory of one that a step binds anew


@pytest.mark.every(3)
@pytest.mark.parametrize("same", [Tensor.detach, lambda t: t.data, lambda t: t[:], lambda t: t.view_as(t)])
@pytest.mark.parametrize("anew", [True, False])
def test_a_written_tensor_may_become_another_object_over_its_memory(same: Any, anew: bool, endpoint: str) -> None:
    """As in `running = running.detach()`: the variable is followed to it."""

    def through(submit: Callable[..., Any]) -> list[Tensor]:
        own: Any = SimpleNamespace(mean=torch.zeros(4))

        def step(x: Tensor) -> Any:
            if anew:
                own.mean = 0.5 * own.mean + x.mean(0)
            else:
                own.mean.mul_(0.5).add_(x.mean(0))
            return own.mean.sum()

        run = submit(step)
        found = []
        for x, _ in batches(5):
            found.append(run(x).detach().clone())
            first, own.mean = own.mean, same(own.mean)
            found += [first.clone(), own.mean.clone()]
        return [*found, own.mean.clone()]

    jobs = []

    def submitted(step: Any) -> Any:
        jobs.append(client.submit(step, example=batches(1)[0][:1], endpoint=endpoint))
        return lambda x: jobs[0].step(x).result()

    found = through(submitted)
    jobs[0].close()
    plain = through(lambda step: step)
    assert [i for i, (a, b) in enumerate(zip(plain, found, strict=True)) if not torch.equal(a, b)] == []


def test_a_view_of_the_model_that_is_moved_is_seen_where_no_tensor_of_no_model_is_met(endpoint: str) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    view, x = model.bias.detach(), torch.ones(2, 3)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach() + view.sum()

    with client.submit(step, example=(x,), model=model, optimizer=optimizer, endpoint=endpoint) as job:
        job.step(x).result()
        view.data = torch.full((3,), 7.0)
        with pytest.raises(errors.CaptureError, match="view"):
            job.step(x)
