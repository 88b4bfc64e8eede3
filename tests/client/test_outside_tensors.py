"""Tensors that a step meets by Python variables and that no model of the job holds."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import dlpack

from gpumux import client, errors
from gpumux.capture.watch import checksums

pytestmark = pytest.mark.usefixtures("one_thread")

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))


def product(weights: Any) -> Callable[[Tensor], Tensor]:
    """A step that multiplies by what `weights()` gives."""
    return lambda x: x * weights.value


class Holder:
    """An object of the script's with one tensor."""

    def __init__(self, value: Any) -> None:
        self.value = value


def steps(job: client.Job, holder: Holder) -> None:
    """A step gives what the plain step would."""
    assert torch.equal(job.step(X).result(), X * holder.value)


# ---- written by the script between two steps


def in_place(h: Holder) -> None:
    h.value[0] = 7.0


def by_data(h: Holder) -> None:
    h.value.data.mul_(2.0)


def by_an_older_view(view: Tensor) -> None:
    view.fill_(5.0)


def by_new_memory(h: Holder) -> None:
    h.value.data = torch.full((6,), 3.0)


def by_a_numpy_view(h: Holder) -> None:
    h.value.numpy()[1] = 9.0


def by_dlpack(h: Holder) -> None:
    numpy.from_dlpack(h.value)
    dlpack.from_dlpack(h.value)[2] = 11.0


def by_its_storage(h: Holder) -> None:
    h.value.untyped_storage().copy_(torch.full((6,), 4.0).untyped_storage())


def bound_anew(h: Holder) -> None:
    h.value = torch.full((6,), 2.5)


def of_another_shape(h: Holder) -> None:
    h.value = torch.tensor(1.5)


def of_another_type(h: Holder) -> None:
    h.value = torch.full((6,), 1.5, dtype=torch.float64)


def in_inference_mode(h: Holder) -> None:
    with torch.inference_mode():
        h.value.add_(1.0)


WRITES = [
    in_place, by_data, by_new_memory, by_a_numpy_view, by_dlpack, by_its_storage, bound_anew, of_another_shape,
    of_another_type, in_inference_mode,
]  # fmt: skip


@pytest.mark.parametrize("write", WRITES, ids=[write.__name__ for write in WRITES])
def test_what_the_script_writes_is_in_the_next_step(write: Callable[[Holder], None], endpoint: str) -> None:
    weights = Holder(torch.arange(6.0))
    with client.submit(product(weights), example=(X,), endpoint=endpoint) as job:
        steps(job, weights)
        for _ in range(2):
            write(weights)
            steps(job, weights)
            steps(job, weights)


def test_memory_that_the_script_holds_by_other_means_may_be_written_at_any_time(endpoint: str) -> None:
    """Nothing of Python's touches the tensor when they are."""
    values = {name: torch.arange(6.0) for name in ("numpy", "a capsule", "a view", "its detached twin")}
    array, twin = values["numpy"].numpy(), values["its detached twin"].detach()
    capsule, view = dlpack.from_dlpack(values["a capsule"].__dlpack__()), values["a view"][1:3]
    mine = torch.from_numpy(numpy.arange(6.0, dtype=numpy.float32))

    def step(x: Tensor) -> Tensor:
        return x * values["numpy"] * values["a capsule"] + values["a view"] * values["its detached twin"] + mine

    with client.submit(step, example=(X,), endpoint=endpoint) as job:
        for i in range(5):
            assert torch.equal(job.step(X).result(), step(X)), i
            job.step(X)
            array[i] = 20.0 + i
            job.step(X)
            capsule[i] = 30.0 + i
            job.step(X)
            view[i % 2] = 40.0 + i
            job.step(X)
            twin[i] = 50.0 + i
            job.step(X)
            mine.numpy()[i] = 60.0 + i


def test_an_array_that_is_made_between_two_steps_may_be_written_later(endpoint: str) -> None:
    weights = Holder(torch.arange(6.0))
    with client.submit(product(weights), example=(X,), endpoint=endpoint) as job:
        steps(job, weights)
        array, capsule = weights.value.detach().numpy(), dlpack.from_dlpack(weights.value.__dlpack__())
        for i in range(4):
            steps(job, weights)
            array[i] += 1.0
            found = job.step(X).result()  # before anything touches the tensor
            assert torch.equal(found, X * weights.value)
            steps(job, weights)
            capsule[i] *= 3.0
            found = job.step(X).result()
            assert torch.equal(found, X * weights.value)


def test_a_write_before_another_step_is_captured_is_not_lost(endpoint: str) -> None:
    weights = Holder(torch.arange(6.0))
    with client.submit(product(weights), example=(X,), endpoint=endpoint) as job:
        steps(job, weights)
        weights.value.mul_(3.0)
        other = job.add(lambda x: x + weights.value, example=(X,))
        steps(job, weights)
        assert torch.equal(other(X).result(), X + weights.value)
        weights.value.mul_(3.0)
        assert torch.equal(job.step(X[:2]).result(), X[:2] * weights.value)  # another case
        steps(job, weights)


def test_a_teacher_may_be_trained_by_the_script_itself(endpoint: str) -> None:
    torch.manual_seed(0)
    student, teacher = nn.Linear(6, 3), nn.Linear(6, 3)
    own = torch.optim.SGD(teacher.parameters(), lr=0.5)

    def step(x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = teacher(x)
        return F.mse_loss(student(x), wanted)

    with client.submit(step, example=(X,), model=student, endpoint=endpoint) as job:
        for _ in range(3):
            assert torch.equal(job.step(X).result(), step(X))
            own.zero_grad()
            teacher(X).pow(2).sum().backward()
            own.step()
            own.zero_grad(set_to_none=True)


@pytest.mark.parametrize("leave", ["gradients", "flags"])
def test_gradients_that_a_teacher_has_and_wants_select_a_case(leave: str, endpoint: str) -> None:
    student, teacher = nn.Linear(6, 3), nn.Linear(6, 3)

    def step(x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = teacher(x)
        known = [p for p in teacher.parameters() if p.requires_grad and p.grad is not None]
        return F.mse_loss(student(x), wanted) + len(known)

    with client.submit(step, example=(X,), model=student, endpoint=endpoint) as job:
        assert torch.equal(job.step(X).result(), step(X))
        if leave == "gradients":
            teacher(X).sum().backward()
        else:
            teacher.requires_grad_(False)
        assert torch.equal(job.step(X).result(), step(X))
        teacher.zero_grad(set_to_none=True)
        teacher.requires_grad_(True)
        assert torch.equal(job.step(X).result(), step(X))


def test_a_teacher_that_gets_gradients_keeps_them(endpoint: str) -> None:
    def through(submit: Callable[..., Any]) -> list[Tensor]:
        torch.manual_seed(0)
        student, teacher = nn.Linear(6, 3), nn.Linear(6, 3)

        def step(x: Tensor) -> Tensor:
            loss = F.mse_loss(student(x), teacher(x))
            loss.backward()
            return loss

        run = submit(step, student)
        found = [run(X), run(X + 1)]
        assert teacher.weight.grad is not None
        found.append(teacher.weight.grad.clone())
        teacher.weight.grad = None
        found += [run(X), *(p.grad * 1 for p in teacher.parameters() if p.grad is not None)]
        return [one.detach().clone() for one in found]

    plain = through(lambda step, model: step)
    with client.submit(lambda x: x, example=(X,), endpoint=endpoint):
        jobs = []

        def submitted(step: Any, model: Any) -> Any:
            jobs.append(client.submit(step, example=(X,), model=model, endpoint=endpoint))
            return lambda x: jobs[0].step(x).result()

        found = through(submitted)
        jobs[0].close()
    assert [i for i, (a, b) in enumerate(zip(plain, found, strict=True)) if not torch.equal(a, b)] == []


def test_a_step_that_adds_to_the_gradient_that_a_teacher_has_is_refused(endpoint: str) -> None:
    student, teacher = nn.Linear(6, 3), nn.Linear(6, 3)
    teacher(X).sum().backward()
    before = [p.grad.clone() for p in teacher.parameters() if p.grad is not None]

    def step(x: Tensor) -> Tensor:
        loss = F.mse_loss(student(x), teacher(x))
        loss.backward()
        return loss

    with pytest.raises(errors.CaptureError, match=r"adds to the gradient that teacher\.(weight|bias) has"):
        client.submit(step, example=(X,), model=student, endpoint=endpoint)
    assert all(torch.equal(p.grad, b) for p, b in zip(teacher.parameters(), before, strict=True) if p.grad is not None)


# ---- bound anew


def test_two_variables_of_one_tensor_of_which_one_is_bound_anew(endpoint: str) -> None:
    first = second = torch.arange(6.0)

    def step(x: Tensor) -> Tensor:
        return x * first + second

    with client.submit(step, example=(X,), endpoint=endpoint) as job:
        assert torch.equal(job.step(X).result(), step(X))
        first = torch.ones(6)
        assert torch.equal(job.step(X).result(), step(X))
        second = torch.full((6,), 2.0)
        assert torch.equal(job.step(X).result(), step(X))
        first, second = second, first
        assert torch.equal(job.step(X).result(), step(X))
        first = second
        assert torch.equal(job.step(X).result(), step(X))
        first.add_(1.0)
        assert torch.equal(job.step(X).result(), step(X))


def test_what_a_variable_held_before_may_be_written_and_come_back(endpoint: str) -> None:
    old, new = torch.arange(6.0), torch.ones(6)
    weights = Holder(old)
    with client.submit(product(weights), example=(X,), endpoint=endpoint, max_variants=1) as job:
        for value in (old, new, old, new):
            weights.value = value
            steps(job, weights)
            old.add_(1.0)
            steps(job, weights)
            new.mul_(2.0)
            steps(job, weights)


def two_holders(first: Tensor, second: Tensor) -> tuple[Holder, Holder, Callable[[], Tensor]]:
    x, y = Holder(first), Holder(second)
    return x, y, lambda: x.value * 2 + y.value


def test_tensors_that_go_from_one_variable_to_another_are_known_where_they_are(endpoint: str) -> None:
    first, second, third = torch.randn(6), torch.randn(6), torch.randn(6)
    x, y, step = two_holders(first, third)
    order = [(0, 2), (1, 2), (1, 0), (0, 0), (0, 2), (1, 0), (2, 2), (0, 1), (2, 0), (1, 1)]
    with client.submit(step, example=(), endpoint=endpoint) as job:
        for i, j in order:
            x.value, y.value = (first, second, third)[i], (first, second, third)[j]
            assert torch.equal(job.step().result(), step()), (i, j)


def test_a_variable_that_keeps_what_another_one_held_last_needs_no_captures(endpoint: str) -> None:
    x, before, step = two_holders(torch.randn(6), torch.randn(6))
    with client.submit(step, example=(), endpoint=endpoint, max_variants=1) as job:
        for _ in range(4):
            before.value, x.value = x.value, torch.randn(6)
            assert torch.equal(job.step().result(), step())


@pytest.mark.parametrize("kept", [False, True], ids=["new tensors", "the same tensors in each epoch"])
def test_a_smaller_last_batch_in_variables_is_captured_once(kept: bool, endpoint: str) -> None:
    batches: list[tuple[Tensor, Tensor]] = []
    x, y, step = two_holders(torch.randn(4, 6), torch.randn(4, 6))
    with client.submit(step, example=(), endpoint=endpoint, max_variants=2) as job:
        for _ in range(4):
            if not (kept and batches):
                batches = [(torch.randn(n, 6), torch.randn(n, 6)) for n in (4, 4, 2)]
            for x.value, y.value in batches:
                x.value[0, 0] += 0.5
                assert torch.equal(job.step().result(), step())


def test_tensors_in_tuples_and_dictionaries_are_followed_where_they_go(endpoint: str) -> None:
    tables: dict[str, Any] = {"a": torch.arange(6.0), "both": (torch.ones(6), [torch.zeros(6)])}

    def step(x: Tensor) -> Any:
        return x * tables["a"] + tables["both"][0] - tables["both"][1][0]

    with client.submit(step, example=(X,), endpoint=endpoint) as job:
        for i in range(3):
            assert torch.equal(job.step(X).result(), step(X)), i
            tables["a"] = tables["a"] + 1
            assert torch.equal(job.step(X).result(), step(X)), i
            tables["both"][1][0] = torch.full((6,), float(i))
            assert torch.equal(job.step(X).result(), step(X)), i
            tables["both"] = (torch.full((6,), 3.0 + i), [tables["both"][0]])
            assert torch.equal(job.step(X).result(), step(X)), i
            tables["a"] = tables["both"][0]
            assert torch.equal(job.step(X).result(), step(X)), i


def test_a_result_that_was_not_taken_is_refused_in_a_variable(endpoint: str) -> None:
    held = Holder(torch.ones(4, 6))
    with client.submit(lambda x: x * held.value + 1, example=(X,), endpoint=endpoint) as job:
        for _ in range(3):
            wanted = X * held.value + 1
            held.value = job.step(X).result()
            assert torch.equal(held.value, wanted)
        held.value = job.step(X)
        with pytest.raises(errors.GpumuxError):
            job.step(X)


# ---- written by the step


class Mean:
    """A running mean in an attribute, by an operator in place or by a new tensor."""

    def __init__(self, anew: bool) -> None:
        self.model = nn.Linear(6, 3)
        self.mean = torch.zeros(3)
        self.anew = anew

    def step(self, x: Tensor) -> Tensor:
        now = self.model(x).detach().mean(0)
        if self.anew:
            self.mean = 0.9 * self.mean + 0.1 * now
        else:
            self.mean.mul_(0.9).add_(now, alpha=0.1)
        return self.mean * 2


def means(anew: bool, run: Callable[[Mean], tuple[Callable[[Tensor], Any], Callable[[], None]]]) -> list[Any]:
    torch.manual_seed(0)
    mean = Mean(anew)
    step, close = run(mean)
    found = []
    with torch.no_grad():
        for i in range(9):
            found.append(step(X + i) * 1)
            if i == 1:
                found.append(mean.mean.clone())
            if i == 2:
                mean.mean.zero_()
            if i == 3:
                mean.mean = torch.ones(3)
            if i == 4:
                mean.mean.data.mul_(3.0)
            if i == 5:
                found.append(copy.deepcopy(mean).mean)
            if i == 6:
                found.append(pickle.loads(pickle.dumps(mean.mean)))  # noqa: S301
            if i == 7:
                mean.mean.numpy()[0] = 4.0
        close()
        found.append(mean.mean)
        assert type(mean.mean) is Tensor
    return [torch.as_tensor(one).clone() for one in found]


@pytest.mark.parametrize("anew", [False, True], ids=["in place", "bound anew"])
def test_what_a_step_writes_the_script_reads_and_overwrites(anew: bool, endpoint: str) -> None:
    def through(mean: Mean) -> tuple[Callable[[Tensor], Any], Callable[[], None]]:
        job = client.submit(mean.step, example=(X,), model=mean.model, endpoint=endpoint)
        return lambda x: job.step(x).result(), job.close

    plain = means(anew, lambda mean: (mean.step, lambda: None))
    found = means(anew, through)
    assert [i for i, (a, b) in enumerate(zip(plain, found, strict=True)) if not torch.equal(a, b)] == []


class Averages:
    """Averages of a model's weights in tensors of its own, and a counter by which the step decides."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(6, 3)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.count = 0
        self.dictionary = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.copy = copy.deepcopy(self.model).requires_grad_(False)

    def step(self, x: Tensor, *, sets_data: bool) -> Tensor:
        loss: Tensor = self.model(x * 2 if self.count % 3 == 2 else x).pow(2).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.count += 1
        for name, p in self.model.named_parameters():
            if sets_data:
                other = self.copy.get_parameter(name)
                other.data = other.data * 0.9 + p.data * 0.1
            else:
                self.dictionary[name] = self.dictionary[name] * 0.9 + p.detach() * 0.1
        return loss.detach()

    def state(self) -> list[Tensor]:
        tensors = [*self.model.parameters(), *self.dictionary.values(), *self.copy.parameters()]
        return [t.detach().clone() for t in tensors]


@pytest.mark.parametrize("sets_data", [False, True], ids=["bound anew", "data set"])
def test_averages_go_on_where_the_step_is_captured_again_for_another_decision(sets_data: bool, endpoint: str) -> None:
    plain, mine = Averages(), Averages()
    example = {"x": X, "sets_data": sets_data}
    with client.submit(
        mine.step, example=example, model=mine.model, optimizer=mine.optimizer, endpoint=endpoint
    ) as job:
        for i in range(7):
            assert torch.equal(job.step(X + i, sets_data=sets_data).result(), plain.step(X + i, sets_data=sets_data))
            if i == 4:
                assert all(map(torch.equal, mine.state(), plain.state()))
    assert all(map(torch.equal, mine.state(), plain.state()))


def test_data_of_one_of_two_tensors_outside_that_share_memory_is_not_set(endpoint: str) -> None:
    whole = torch.ones(2, 3)
    held = {"whole": whole, "same": whole.view(2, 3)}

    def step(x: Tensor) -> Tensor:
        found = x[:2, :3] * held["whole"] + held["same"]
        held["whole"].data = held["whole"].data * 2
        return found

    with pytest.raises(errors.CaptureError, match="share"):
        client.submit(step, example=(X,), endpoint=endpoint)
    assert torch.equal(whole, torch.ones(2, 3))


def test_a_step_that_keeps_the_graph_in_a_variable_is_refused(endpoint: str) -> None:
    model, total = nn.Linear(6, 3), torch.zeros(())

    def step(x: Tensor) -> Any:
        nonlocal total
        total = total + model(x).sum()
        return total.detach()

    with pytest.raises(errors.CaptureError, match="keeps its graph in the place of total"):
        client.submit(step, example=(X,), model=model, endpoint=endpoint)
    assert type(total) is Tensor
    assert total == 0


def test_a_step_that_writes_an_arrays_memory_is_refused(endpoint: str) -> None:
    array = numpy.zeros(6, dtype=numpy.float32)
    mine = torch.from_numpy(array)

    def step(x: Tensor) -> Tensor:
        return mine.add_(x[0])

    with pytest.raises(errors.CaptureError, match="another library"):
        client.submit(step, example=(X,), endpoint=endpoint)
    assert not array.any()


# ---- counters, by which a step's Python decides


def counting(count: Tensor) -> Callable[[Tensor], Any]:
    def step(x: Tensor) -> Any:
        count.add_(1)
        if count == 1:
            return x * 10
        return x * 2 if count % 2 == 0 else x * count

    return step


def test_pythons_decisions_by_a_counter_are_those_of_the_plain_loop(endpoint: str) -> None:
    plain, count = torch.tensor(0), torch.tensor(0)
    wanted = counting(plain)
    with client.submit(counting(count), example=(X,), endpoint=endpoint) as job:
        assert count == 0
        for i in range(9):
            assert torch.equal(job.step(X).result(), wanted(X)), i
            assert torch.equal(count, plain)
            if i == 4:
                for one in (count, plain):
                    one.zero_()
        assert len(job._remote.programs) == 3  # not one for each count
        other = job.add(lambda x: x + count, example=(X,))
        assert torch.equal(other(X).result(), X + plain)
        assert torch.equal(job.step(X).result(), wanted(X))
        assert torch.equal(other(X).result(), X + plain)
    assert type(count) is Tensor


def test_a_counter_that_an_earlier_step_reads_in_the_daemon_stays_there(endpoint: str) -> None:
    count = torch.tensor(3)
    with client.submit(lambda x: x + count, example=(X,), endpoint=endpoint) as job:
        job.step(X)
        with pytest.raises(errors.DataDependent):
            job.add(counting(count), example=(X,))
        assert count == 3
        count.add_(1)
        assert torch.equal(job.step(X).result(), X + 4)


def test_a_counter_that_counts_what_the_daemon_computes_is_refused(endpoint: str) -> None:
    count = torch.tensor(0)

    def step(x: Tensor) -> Tensor:
        count.add_((x > 0).sum())
        return x * 2 if count > 3 else x

    with pytest.raises(errors.CaptureError):
        client.submit(step, example=(X,), endpoint=endpoint)

    def later(x: Tensor) -> Tensor:
        out = x * 2 if count > 3 else x
        count.add_((x > 0).sum())
        return out

    with pytest.raises(errors.CaptureError, match="count"):
        client.submit(later, example=(X,), endpoint=endpoint)
    assert count == 0


def test_a_counter_in_a_split_step_is_refused(endpoint: str) -> None:
    with pytest.raises(errors.DataDependent):
        client.submit(counting(torch.tensor(0)), example=(X,), endpoint=endpoint, microbatches=2)


# ---- whose they are


def test_two_jobs_read_one_tensor(endpoint: str) -> None:
    weights = Holder(torch.arange(6.0))
    with (
        client.submit(product(weights), example=(X,), endpoint=endpoint) as one,
        client.submit(product(weights), example=(X,), endpoint=endpoint) as two,
    ):
        for i in range(3):
            steps(one, weights)
            steps(two, weights)
            weights.value.data[i] = 8.0
            steps(one, weights)
            weights.value.data[i] = 9.0
            steps(two, weights)
            steps(one, weights)
        one.close()
        weights.value.data[0] = 10.0
        steps(two, weights)
        weights.value = torch.ones(6)
        steps(two, weights)


def test_a_teacher_that_another_job_trains(endpoint: str) -> None:
    def through(submit: Callable[..., Any]) -> list[Tensor]:
        torch.manual_seed(0)
        student, teacher = nn.Linear(6, 3), nn.Linear(6, 3)
        own = torch.optim.SGD(teacher.parameters(), lr=0.5)

        def train(x: Tensor) -> Any:
            own.zero_grad()
            loss = teacher(x).pow(2).mean()
            loss.backward()
            own.step()
            return loss

        def distil(x: Tensor) -> Tensor:
            with torch.no_grad():
                wanted = teacher(x)
            return F.mse_loss(student(x), wanted)

        trains = submit(train, teacher, own)
        trains(X)
        distils = submit(distil, student, None)
        found = []
        for _ in range(3):
            found += [distils(X), distils(X), trains(X), distils(X), trains(X), trains(X), teacher.weight.detach() * 1]
            with torch.no_grad():
                found.append(teacher(X))
        return [one.detach().clone() for one in found]

    jobs = []

    def submitted(step: Any, model: Any, optimizer: Any) -> Any:
        given = {"optimizer": optimizer} if optimizer is not None else {}
        jobs.append(client.submit(step, example=(X,), model=model, endpoint=endpoint, **given))
        run = jobs[-1].step
        return lambda x: run(x).result()

    plain = through(lambda step, model, optimizer: step)
    found = through(submitted)
    for job in jobs:
        job.close()
    assert [i for i, (a, b) in enumerate(zip(plain, found, strict=True)) if not torch.equal(a, b)] == []


def test_the_scripts_tensors_are_plain_while_it_touches_them_and_after_the_job(endpoint: str) -> None:
    teacher = nn.Linear(6, 3)
    before = {name: value.clone() for name, value in teacher.state_dict().items()}

    def step(x: Tensor) -> Any:
        with torch.no_grad():
            return teacher(x)

    job = client.submit(step, example=(X,), endpoint=endpoint)
    job.step(X)
    assert isinstance(teacher.weight, nn.Parameter)
    assert all(type(value) is Tensor for value in teacher.state_dict().values())
    job.step(X)
    twin = copy.deepcopy(teacher)
    assert all(type(p) is nn.Parameter for p in [*twin.parameters(), *teacher.parameters()])
    job.step(X)
    loaded = pickle.loads(pickle.dumps(teacher.weight))  # noqa: S301
    assert type(loaded) is nn.Parameter
    job.step(X)
    job.close()
    assert type(teacher.weight) is nn.Parameter
    assert "__class__" not in teacher.weight.__dict__
    assert not [key for key in teacher.weight.__dict__ if "gpumux" in key]
    for name, value in teacher.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_job_that_is_dropped_leaves_the_scripts_tensors_plain(endpoint: str) -> None:
    weights = Holder(torch.arange(6.0))
    job = client.submit(product(weights), example=(X,), endpoint=endpoint)
    job.step(X)
    del job
    with pytest.warns(ResourceWarning):
        gc.collect()
    assert type(weights.value) is Tensor


def test_a_batch_may_lie_in_a_tensor_that_the_step_reads_as_well(endpoint: str) -> None:
    data = torch.randn(8, 6, generator=torch.Generator().manual_seed(4))

    def step(x: Tensor) -> Tensor:
        return x - data.mean(0)

    with client.submit(step, example=(data[:4].clone(),), endpoint=endpoint) as job:
        for rows in (data[:4], data[4:], data[:4]):
            assert torch.equal(job.step(rows.clone()).result(), step(rows))
            assert torch.equal(job.step(rows).result(), step(rows))
    with client.submit(step, example=(data[:4],), endpoint=endpoint) as job:
        assert torch.equal(job.step(data[:4]).result(), step(data[:4]))


def test_a_batch_that_the_step_writes_by_another_name_is_refused(endpoint: str) -> None:
    data = torch.zeros(4, 6)

    def step(x: Tensor) -> Tensor:
        data.add_(1.0)
        return x * 2

    with pytest.raises(errors.CaptureError):
        client.submit(step, example=(data,), endpoint=endpoint)
    assert not data.any()


def test_tensors_made_in_inference_mode(endpoint: str) -> None:
    with torch.inference_mode():
        weights = Holder(torch.arange(6.0))
    with client.submit(product(weights), example=(X,), endpoint=endpoint) as job:
        steps(job, weights)
        in_inference_mode(weights)
        steps(job, weights)


def test_all_that_can_not_be_had_is_named_at_once(endpoint: str) -> None:
    tables = {"shared": torch.ones(6).share_memory_(), "computed": torch.ones(6, requires_grad=True) * 2}
    hidden = ContextVar("hidden", default=torch.ones(6))  # no variable holds it

    def step(x: Tensor) -> Any:
        return x * hidden.get() * tables["computed"] * tables["shared"]

    with pytest.raises(errors.UnknownTensor, match="nor held by a variable") as caught:
        client.submit(step, example=(X,), endpoint=endpoint)
    assert "tables['shared'] lies in memory that processes share" in caught.value.message
    assert "tables['computed'] was computed outside the step" in caught.value.message
    assert "shape (6,)" in caught.value.message


def test_inputs_computed_from_tensors_that_require_grad_have_their_own_remedy(endpoint: str) -> None:
    """As in physics-informed networks: torch.tensor(array, requires_grad=True).float()."""
    x, t = (torch.ones(6, requires_grad=True, dtype=torch.float64).float() for _ in range(2))

    with pytest.raises(errors.CaptureError, match="x was computed outside the step") as caught:
        client.submit(lambda y: y * x * t, example=(X,), endpoint=endpoint)
    assert "t was computed outside the step" in caught.value.message
    assert caught.value.remedy.count("x.detach().requires_grad_()") == 1
    assert "pass it as an argument" not in caught.value.remedy


def test_a_sparse_tensor_is_named(endpoint: str) -> None:
    table = torch.eye(6).to_sparse()
    with pytest.raises(errors.UnknownTensor, match="`table`"):
        client.submit(lambda x: x @ table.to_dense(), example=(X,), endpoint=endpoint)


# ---- made at the first use, and kept


def test_a_tensor_that_is_made_at_its_first_use_is_made_once(endpoint: str) -> None:
    masks: dict[int, Tensor] = {}

    def step(x: Tensor) -> Tensor:
        if len(x) not in masks:
            masks[len(x)] = torch.tril(torch.ones(len(x), len(x)))
        return masks[len(x)] @ x

    with client.submit(step, example=(X,), endpoint=endpoint) as job:
        for rows in (4, 3, 2, 4, 3):
            found = job.step(X[:rows]).result()
            assert torch.equal(found, torch.tril(torch.ones(rows, rows)) @ X[:rows])
        assert sorted(masks) == [2, 3, 4]
        masks[3].zero_()
        masks.pop(2)
        assert not job.step(X[:3]).result().any()
        assert torch.equal(job.step(X[:2]).result(), torch.tril(torch.ones(2, 2)) @ X[:2])
    assert all(type(mask) is Tensor for mask in masks.values())
    assert torch.equal(masks[4], torch.tril(torch.ones(4, 4)))


def test_what_a_refused_step_made_at_its_first_use_is_gone_again(endpoint: str) -> None:
    made: dict[str, Tensor] = {}

    def step(x: Tensor) -> Tensor:
        if "scale" not in made:
            made["scale"] = torch.full((6,), 2.0)
        return x * made["scale"] if x.sum() > 0 else x

    with pytest.raises(errors.DataDependent):
        client.submit(step, example=(X,), endpoint=endpoint)
    assert made == {}


def test_what_depends_on_the_batch_is_not_kept(endpoint: str) -> None:
    made = Holder(None)

    def step(x: Tensor) -> Any:
        if made.value is None:
            made.value = x.mean(0)
        return x - made.value

    with pytest.raises(errors.GpumuxError):
        client.submit(step, example=(X,), endpoint=endpoint)
    assert made.value is None


# ---- what it costs


def test_a_teacher_that_nothing_touches_is_not_read_at_each_step(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    student, teacher = nn.Linear(6, 3), nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3)).eval()
    view = torch.ones(12).view(2, 6)[0]  # whose base is gone
    read: list[int] = []

    def step(x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = teacher(x * view)
        return F.mse_loss(student(x), wanted)

    memory = {t.untyped_storage()._cdata for t in [*teacher.parameters(), view]}
    plain = checksums.sums

    def sums(storage: torch.UntypedStorage) -> Any:
        if storage._cdata in memory:
            read.append(storage._cdata)
        return plain(storage)

    with client.submit(step, example=(X,), model=student, endpoint=endpoint) as job:
        job.step(X)
        gc.collect()  # what the trace left in cycles holds the teacher's tensors, and might change them
        monkeypatch.setattr(checksums, "sums", sums)
        for _ in range(3):
            job.step(X)
        assert read == []
        with torch.no_grad():
            teacher(X)
        assert set(read) == memory  # before it was touched
        assert len(read) == len(memory)
        job.step(X)
        assert len(read) == 2 * len(memory)  # to see that nothing was written
        job.step(X)
        assert len(read) == 2 * len(memory)


def test_weights_that_lie_in_a_mapped_file_are_the_tensors_alone(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save(torch.arange(6.0), tmp_path / "weights")
    weights = Holder(torch.load(tmp_path / "weights", mmap=True))
    read: list[Any] = []
    with client.submit(product(weights), example=(X,), endpoint=endpoint) as job:
        steps(job, weights)
        job.step(X)
        with monkeypatch.context() as patch:
            patch.setattr(checksums, "sums", lambda storage: read.append(storage))
            for _ in range(3):
                job.step(X)
        assert read == []
        weights.value.data[0] = 5.0
        steps(job, weights)
