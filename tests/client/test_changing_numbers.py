"""Numbers of the batch and of Python variables that change: one Program for all, or one for each decision by them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpumux import client, errors, fuse
from gpumux.capture import step as capture
from gpumux.device.cuda.operators import FORMS
from gpumux.program.operators import NUMBERS_ON_GPU
from tests.client.parity import Work, batches, check

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))
VALUES = [0.5, 1.0, 0.0, -0.0, 2.0, 3.0, -1.5, float("inf"), float("nan"), 1e-300]
INTEGERS = [3, 1, 2, 0, 5, 4, 3]


def work(step: Callable[..., Any], loop: Callable[..., list[Any]], example: Any = (X, 0.25), **options: Any) -> Work:
    return Work([], [], [(step, example)], loop, options)


def programs(job: client.Job) -> int:
    return len(job._remote.programs)


FLOATS: dict[str, Callable[[Any, Any], Any]] = {
    "a product": lambda x, a: a * x + (1 - a) * x.flip(0),
    "in place": lambda x, a: x.clone().mul_(a).add_(a),
    "alpha": lambda x, a: torch.add(x, x, alpha=a),
    "a power": lambda x, a: x**a,
    "a base": lambda x, a: a**x,
    "a bound": lambda x, a: x.clamp(min=a),
    "filled": lambda x, a: torch.full_like(x, a) + torch.full((4, 6), a),
    "a tensor of it": lambda x, a: x * torch.tensor(a),
    "a list of it": lambda x, a: x[:, :2] * torch.tensor([a, 1.0]),
    "a comparison": lambda x, a: (x > a).float(),
    "where": lambda x, a: torch.where(x > 0, x, a),
    "a slope": lambda x, a: F.leaky_relu(x, a),
    "a decision": lambda x, a: x * 2 if a > 0.7 else x,
    "its type": lambda x, a: x * 2 if isinstance(a, float) else x,
    "its text": lambda x, a: x * len(f"{a}"),
    "a key": lambda x, a: x * {0.5: 2.0}.get(a, 3.0),
    "returned": lambda x, a: (x * a, a, a + 1),
    "double": lambda x, a: x.double() * a + x.half().double() * a,
    "integers": lambda x, a: (x > 0).long() * a,
    "a 0-dim tensor": lambda x, a: x.sum() * a,
}
INTS: dict[str, Callable[[Any, Any], Any]] = {
    "a row": lambda x, n: x[n % 4],
    "a slice": lambda x, n: x[:, n:] * 2,
    "a column": lambda x, n: x.narrow(1, n, 1),
    "a shape": lambda x, n: torch.zeros(n, 2) + 1,
    "a range": lambda x, n: torch.arange(n) * 2,
    "a range of steps": lambda x, n: torch.linspace(0, 1, n + 1),
    "a loop": lambda x, n: sum([x * i for i in range(n)], x),
    "a remainder": lambda x, n: x * 2 if n % 2 == 0 else x,
    "a product": lambda x, n: x * n + (x > 0).long() * n,
    "a quotient": lambda x, n: x * (n / 7) + x * (n // 2) + x * 0.9**n,
    "a dimension": lambda x, n: x.sum(n % 2),
    "a shift": lambda x, n: x.roll(n, 0),
    "a key": lambda x, n: x * {0: 2.0, 3: 5.0}.get(n, 3.0),
    "an index of a list": lambda x, n: [x, x * 2, x * 3, x * 4, x * 5, x * 6][n],
}


@pytest.mark.every(7)
@pytest.mark.parametrize("use", FLOATS)
@pytest.mark.parametrize("where", ["batch", "closure"])
def test_a_float_gives_what_the_plain_loop_gives_wherever_it_is_used(use: str, where: str, endpoint: str) -> None:
    _everywhere(FLOATS[use], VALUES, 0.25, where, endpoint)


@pytest.mark.every(7)
@pytest.mark.parametrize("use", FLOATS)
@pytest.mark.parametrize("where", ["batch", "closure"])
def test_a_float_of_numpys_gives_what_the_plain_loop_gives(use: str, where: str, endpoint: str) -> None:
    """numpy's functions (linspace, cos) give numpy.float64, which is a float to Python."""
    _everywhere(FLOATS[use], [numpy.float64(value) for value in VALUES], numpy.float64(0.25), where, endpoint)


@pytest.mark.every(5)
@pytest.mark.parametrize("use", INTS)
@pytest.mark.parametrize("where", ["batch", "closure"])
def test_an_int_gives_what_the_plain_loop_gives_wherever_it_is_used(use: str, where: str, endpoint: str) -> None:
    _everywhere(INTS[use], INTEGERS, 1, where, endpoint)


def _everywhere(fn: Callable[[Any, Any], Any], values: list[Any], first: Any, where: str, endpoint: str) -> None:
    def make() -> Work:
        number = first

        def by_closure(x: torch.Tensor) -> Any:
            return fn(x, number)

        def loop(run: Any) -> list[Any]:
            nonlocal number
            out = []
            for number in values:
                out.append(run(X, number) if where == "batch" else run(X))
            return out

        return work(fn, loop, (X, first)) if where == "batch" else work(by_closure, loop, (X,))

    check(make, endpoint)


def test_one_program_takes_all_values_of_a_weight(endpoint: str) -> None:
    with client.submit(lambda x, a: x * a, example=(X, 0.5), endpoint=endpoint) as job:
        job.step(X, 0.5)
        assert programs(job) == 1, "a number that never changed is a constant"
        for i in range(40):
            assert torch.equal(job.step(X, 1.0 / (i + 1)).result(), X * (1.0 / (i + 1)))
        assert programs(job) == 2
        job.step(X[:2], 0.125)
        job.step(X[:2], 0.25)
        assert programs(job) == 3, "in another shape it is a number of each step from the start"


@pytest.mark.parametrize("where", ["batch", "closure"])
def test_one_program_takes_all_values_of_a_schedule_of_numpys(where: str, endpoint: str) -> None:
    schedule = numpy.cos(numpy.linspace(0, 1, 40))
    weight = schedule[0]

    def step(x: torch.Tensor, weight: Any = None) -> torch.Tensor:
        return x * weight + (1 - weight)

    def by_closure(x: torch.Tensor) -> torch.Tensor:
        return step(x, weight)

    fn, example = (step, (X, weight)) if where == "batch" else (by_closure, (X,))
    with client.submit(fn, example=example, endpoint=endpoint) as job:
        for weight in schedule:
            found = job.step(X, weight) if where == "batch" else job.step(X)
            assert torch.equal(found.result(), step(X, weight))
        assert programs(job) == 2


def test_a_decision_has_one_program_for_each_outcome(endpoint: str) -> None:
    with client.submit(lambda x, i: x * 2 if i % 4 == 0 else x, example=(X, 0), endpoint=endpoint) as job:
        for i in range(12):
            assert torch.equal(job.step(X, i).result(), X * 2 if i % 4 == 0 else X)
        assert programs(job) <= 3


class Holder(nn.Module):
    shared = 0

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.weight = 1.0
        self.drop = nn.Dropout(0.0)


class Slotted:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


COUNT = 0


def test_numbers_that_the_step_changes_are_changed_at_every_step(endpoint: str) -> None:
    def make() -> Work:
        global COUNT
        COUNT, Holder.shared = 0, 0
        holder, slotted, space = Holder(), Slotted(), SimpleNamespace(decay=1.0)
        entries, items, seen, last = {"n": 0}, [0, 5.0], 0, None

        def step(x: torch.Tensor) -> Any:
            global COUNT
            nonlocal seen, last
            COUNT += 2
            seen = 0 if seen == 3 else seen + 1
            holder.count += 1
            holder.weight *= 0.5
            Holder.shared += 1
            slotted.count -= 1
            space.decay = max(0.3, space.decay * 0.9)
            entries["n"] += seen
            items[0] += 1
            items[1] = items[1] / 2
            last = seen * 2
            total = seen + holder.weight + space.decay + entries["n"] + items[1] + COUNT + slotted.count
            return x * total + Holder.shared, seen, holder.count

        def loop(run: Any) -> list[Any]:
            out: list[Any] = []
            for i in range(12):
                out.append(run(X))
                numbers = (COUNT, seen, holder.count, holder.weight, slotted.count, space.decay, Holder.shared)
                out.append([*numbers, dict(entries), list(items), last])
                if i == 6:
                    holder.count = 100  # by the script
            return out

        return work(step, loop, (X,))

    check(make, endpoint)


def test_a_class_is_put_back_without_what_python_alone_sets_of_it(endpoint: str) -> None:
    """A name in the code has its `__dict__` watched as well, which can't be set."""

    def make() -> Work:
        class Counts:
            n = 0

        def step(x: torch.Tensor) -> Any:
            Counts.n += len(Counts.__dict__.keys() & {"n"})
            return x * Counts.n

        return work(step, lambda run: [one for _ in range(4) for one in (run(X), Counts.n)], (X,))

    check(make, endpoint)


def test_a_variable_that_is_set_for_the_first_time_by_the_step(endpoint: str) -> None:
    def make() -> Work:
        holder = SimpleNamespace(n=0, size=None)

        def step(x: torch.Tensor) -> Any:
            if holder.n == 0:
                holder.n = x.shape[0]
            holder.n += 1
            return x * holder.n

        def loop(run: Any) -> list[Any]:
            return [one for _ in range(4) for one in (run(X), holder.n)]

        return work(step, loop, (X,))

    check(make, endpoint)


def test_a_counter_that_can_be_no_symbol_is_refused_by_name(endpoint: str) -> None:
    names = {1: 2.0, 2: 3.0}
    seen = 0

    def step(x: torch.Tensor) -> torch.Tensor:
        nonlocal seen
        seen += 1
        return x * names[seen]

    with pytest.raises(errors.NotRepeatable, match="seen"):
        client.submit(step, example=(X,), endpoint=endpoint)
    assert seen == 0


@functools.lru_cache
def cached(a: float) -> float:
    return 1 - a


def test_a_cache_of_the_script_gets_plain_numbers_only(endpoint: str) -> None:
    cached.cache_clear()
    check(lambda: work(lambda x, a: x * cached(a), lambda run: [run(X, a) for a in VALUES]), endpoint)
    assert type(cached(0.5)) is float
    assert type(cached(1.0)) is float


def test_one_number_that_can_be_no_symbol_keeps_no_other_from_being_one(endpoint: str) -> None:
    names = {0: 2.0, 1: 3.0}
    with client.submit(lambda x, a, n: x * a * names[n], example=(X, 0.5, 0), endpoint=endpoint) as job:
        for i in range(12):
            assert torch.equal(job.step(X, 1 / (i + 1), i % 2).result(), X * (1 / (i + 1)) * names[i % 2])
        assert programs(job) <= 4


TEXTS: dict[str, Callable[[int], Any]] = {
    "an argument": lambda i: f"{i}.png",
    "in a list": lambda i: [f"{i}.png", f"{i + 1}.png"],
    "beside a number": lambda i: {"path": f"{i}.png", "index": i},
}


@pytest.mark.parametrize("make", TEXTS.values(), ids=TEXTS)
def test_texts_of_the_batch_that_a_step_does_not_read_need_no_captures(
    endpoint: str, make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with client.submit(lambda x, _: x * 2, example=(X, make(0)), endpoint=endpoint) as job:
        for i in range(8):
            assert torch.equal(job.step(X, make(i)).result(), X * 2)
    assert "combination of batch shapes" not in caplog.text


def test_a_number_that_can_be_no_symbol_is_worth_no_warning(endpoint: str, caplog: pytest.LogCaptureFixture) -> None:
    """The trace with a symbol fails after it drew, and is followed by one without."""
    rates = {0.5: 2.0, 1.0: 3.0}

    def step(x: torch.Tensor, a: float) -> torch.Tensor:
        return F.dropout(x) * rates[a]

    with client.submit(step, example=(X, 0.5), endpoint=endpoint) as job:
        for a in (0.5, 1.0, 0.5):
            job.step(X, a).result()
    assert "as before the call" not in caplog.text


def test_a_zero_that_changes_its_sign_alone_has_changed(endpoint: str) -> None:
    weight = 0.0

    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.copysign(x, torch.full_like(x, weight))

    with client.submit(step, example=(X,), endpoint=endpoint) as job:
        for weight in (0.0, -0.0):
            assert torch.equal(job.step(X).result(), step(X))


def test_many_lengths_in_a_list(endpoint: str) -> None:
    lists = [[i + k for i in range(40)] for k in range(6)]

    def step(x: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        return x.sum() * torch.tensor(lengths)[:, None] * max(lengths)

    with client.submit(step, example=(X, lists[0]), endpoint=endpoint) as job:
        for lengths in [*lists, *lists]:
            assert torch.equal(job.step(X, lengths).result(), step(X, lengths))


def test_dropout_and_smoothing_changed_by_the_script(endpoint: str) -> None:
    def make() -> Work:
        dropout = nn.Dropout(0.1)
        model = nn.Sequential(nn.Linear(6, 8), dropout, nn.Linear(8, 3))
        criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
        optimizer = torch.optim.Adam(model.parameters())
        data = batches((4, 6), classes=3)

        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        def loop(run: Any) -> list[Any]:
            out = []
            for i in range(6):
                dropout.p, criterion.label_smoothing = 0.1 * i, 0.05 * i
                out += [run(*data[0]), run(*data[1])]
            return out

        return Work([model], [optimizer], [(step, data[0])], loop)

    check(make, endpoint)


class Polynomial(torch.optim.lr_scheduler.LRScheduler):
    """A schedule of the user's own, which also keeps its last rates in a list that it replaces."""

    def __init__(self, optimizer: torch.optim.Optimizer, most: int) -> None:
        self.most = most
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        if self.last_epoch >= self.most:
            return self.kept
        self.kept = [base * (1 - self.last_epoch / self.most) ** 0.9 for base in self.base_lrs]
        return self.kept


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 3, 0.5),
    "exponential": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 5),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=40),
    "linear": lambda o: torch.optim.lr_scheduler.LinearLR(o, total_iters=4),
    "cyclic": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "restarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 1 / (n + 1)),
    "the user's own": lambda o: Polynomial(o, 6),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.ConstantLR(o, 0.5, 2), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
}


@pytest.mark.every(3)
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_schedulers_stepped_inside_the_step(kind: str, endpoint: str) -> None:
    def make() -> Work:
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = SCHEDULERS[kind](optimizer)
        data = batches((4, 6), classes=3)

        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step()
            return loss, scheduler.get_last_lr()[0]

        def loop(run: Any) -> list[Any]:
            rates = []  # the lists that the scheduler gives are the script's to keep
            out = []
            for i in range(9):
                out.append(run(*data[i % 3]))
                rates.append(scheduler.get_last_lr())
            return [*out, rates, scheduler.last_epoch]

        return Work([model], [optimizer], [(step, data[0])], loop)

    check(make, endpoint)


def test_a_schedule_of_the_users_own_makes_no_variants(endpoint: str, caplog: pytest.LogCaptureFixture) -> None:
    """It is named in the step, and stepped after it."""
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = Polynomial(optimizer, 20)
    inside = False

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).mean()
        loss.backward()
        optimizer.step()
        if inside:
            scheduler.step()
        return loss

    with client.submit(step, example=(X,), model=model, optimizer=optimizer, endpoint=endpoint) as job:
        for _ in range(6):
            job.step(X)
            scheduler.step()
    assert "combination" not in caplog.text


def test_texts_that_the_step_does_not_read_make_no_variants(endpoint: str, caplog: pytest.LogCaptureFixture) -> None:
    def step(batch: dict[str, Any]) -> torch.Tensor:
        nonlocal count
        count += 1
        return torch.cat([value for value in batch.values() if isinstance(value, torch.Tensor)]) * len(batch["names"])

    count = 0
    with client.submit(step, example=({"x": X, "names": ["a", "b"]},), endpoint=endpoint) as job:
        for i in range(6):
            assert torch.equal(job.step({"x": X, "names": [f"a{i}", f"b{i}"]}).result(), X * 2)
        assert programs(job) == 1
    assert count == 6
    assert "combination" not in caplog.text, "it is not captured for each"


@pytest.mark.parametrize(
    "read",
    [lambda t: t == "on", lambda t: "n" in t, lambda t: bool(t[1:]), lambda t: {"on": True}.get(t, False),
     lambda t: t.startswith("on"), lambda t: f"{t}" == "on", lambda t: "".join([t, ""]) == "on",
     lambda t: len(t) == 2, lambda t: t in ("on", "yes"), lambda t: hash(t) == hash("on"), lambda t: str(t) == "on"],
)  # fmt: skip
def test_texts_that_the_step_reads_decide(read: Callable[[str], bool], endpoint: str) -> None:
    def make() -> Work:
        return work(
            lambda x, t: x * 2 if read(t) else x,
            lambda run: [run(X, t) for t in ("off", "on", "a", "offer", "on")], (X, "on"),
        )  # fmt: skip

    check(make, endpoint)


def test_variants_are_kept_by_use_and_the_fifth_is_worth_a_warning(
    endpoint: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(capture, "MAX_VARIANTS", 6)
    caplog.set_level(logging.WARNING, "gpumux.client")
    shapes = [torch.randn(n + 1, 3) for n in range(9)]
    with client.submit(lambda x: x * 2, example=(shapes[0],), endpoint=endpoint) as job:
        function = job._functions[0][0]
        assert isinstance(function, capture.StepFunction)
        most_used = function._cases[0]
        for i, x in enumerate(shapes):
            job.step(x)
            assert torch.equal(job.step(shapes[0]).result(), shapes[0] * 2)
            assert len(caplog.records) == (i >= 4), "one warning, at the fifth"
        assert len(function._cases) == 6
        assert function._cases[0] is most_used
        assert "a batch tensor of shape" in caplog.records[0].getMessage()
        assert torch.equal(job.step(shapes[1]).result(), shapes[1] * 2), "what made room is captured again"
        assert programs(job) == len(shapes), "and its Program is still there"


def test_a_number_decides_anew_at_every_step_and_old_decisions_make_room(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "MAX_VARIANTS", 3)
    with client.submit(lambda x, n: x[n], example=(X, 0), endpoint=endpoint) as job:
        for n in (0, 1, 2, 3, 0, 1, 3, 2):
            assert torch.equal(job.step(X, n).result(), X[n])


def test_a_split_step_takes_each_value_as_a_variant(endpoint: str) -> None:
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, weight: float) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = (weight * model(x)).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    with client.submit(
        step, example=(X, 0.5), model=model, optimizer=optimizer, endpoint=endpoint, microbatches=2
    ) as job:
        for weight in (0.5, 0.25, 0.125):
            want = (weight * model(X)).square().mean()
            assert torch.allclose(job.step(X, weight).result(), want, rtol=1e-5)


def test_an_array_of_models_takes_numbers_that_change() -> None:
    scale = SimpleNamespace(value=1.0)

    def factory(lr: float) -> Any:
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        holder = SimpleNamespace(count=0)

        def step(x: torch.Tensor) -> torch.Tensor:
            holder.count += 1
            optimizer.zero_grad()
            loss: torch.Tensor = (scale.value * model(x)).square().mean() * holder.count
            loss.backward()
            optimizer.step()
            return loss

        return step, model, optimizer

    rates = [0.1, 0.2]
    plain = [factory(rate)[0] for rate in rates]
    array = fuse.Array(factory, rates, (X,))
    for value in (1.0, 0.5, 0.25, 0.125):
        scale.value = value
        want = torch.stack([step(X).detach() for step in plain])
        assert torch.allclose(array.step(X), want, rtol=1e-4)


def test_the_list_of_operators_that_read_numbers_on_a_gpu_is_complete() -> None:
    assert set(FORMS) == NUMBERS_ON_GPU


def test_a_scheduler_that_looks_its_counter_up_is_refused(endpoint: str) -> None:
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5])

    def step(x: torch.Tensor) -> None:
        model(x).mean().backward()
        optimizer.step()
        scheduler.step()

    with pytest.raises(errors.NotRepeatable, match=r"scheduler\.last_epoch") as caught:
        client.submit(step, example=(X,), model=model, optimizer=optimizer, endpoint=endpoint)
    assert "step schedulers, outside" in caught.value.remedy
    assert (scheduler.last_epoch, scheduler.get_last_lr()) == (0, [0.1])


def test_a_switch_that_the_step_turns_is_turned_at_every_call(endpoint: str) -> None:
    """True and False are no numbers to compute with: each has a capture of its own, and the step leaves the other."""

    def make() -> Work:
        state, model = SimpleNamespace(first=True, turn=False), nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            out = model(x)
            loss = out.square().mean() if state.turn else out.abs().mean()
            state.turn = not state.turn
            if state.first:
                loss = 3 * loss
                state.first = False
            loss.backward()
            optimizer.step()
            return loss

        def loop(run: Any) -> list[Any]:
            seen: list[Any] = []
            for i in range(7):
                if i == 5:
                    state.turn = state.first = True  # the script may turn them too
                seen += [run(X), state.first, state.turn]
            return seen

        return Work([model], [optimizer], [(step, (X,))], loop)

    check(make, endpoint)


def test_switches_are_as_before_where_a_capture_is_refused(endpoint: str) -> None:
    state = SimpleNamespace(on=False)

    def step(x: torch.Tensor) -> torch.Tensor:
        state.on = not state.on
        return x * 2 if x.sum() > 0 else x

    with pytest.raises(errors.DataDependent):
        client.submit(step, example=(X,), endpoint=endpoint)
    assert state.on is False


@pytest.mark.parametrize("lengths", [(5, 5, 5), (3, 4, 3, 5, 5)])
def test_a_step_that_counts_and_caches_a_mask_counts_each_call_once(lengths: tuple[int, ...], endpoint: str) -> None:
    def make() -> Work:
        made: Any = SimpleNamespace(calls=0, masks=0, mask=None)

        def step(x: torch.Tensor) -> torch.Tensor:
            made.calls += 1
            if made.mask is None or len(made.mask) != len(x):
                made.mask = torch.tril(torch.ones(len(x), len(x)))
                made.masks += 1
            found: torch.Tensor = (made.mask @ x) * made.calls
            return found

        def loop(run: Callable[..., Any]) -> list[Any]:
            return [(run(torch.ones(n, 2)), made.calls, made.masks, made.mask.shape) for n in lengths]

        return work(step, loop, (torch.ones(lengths[0], 2),))

    check(make, endpoint)


def test_a_refused_case_of_a_step_that_counts_and_caches_a_mask_leaves_both_as_they_were(endpoint: str) -> None:
    made: Any = SimpleNamespace(calls=0, mask=None)

    def step(x: torch.Tensor) -> torch.Tensor:
        made.calls += 1
        if made.mask is None:
            made.mask = torch.tril(torch.ones(4, 4))
        elif made.calls > 0:
            x = x * float(x.sum())
        found: torch.Tensor = made.mask @ x
        return found

    with client.submit(step, example=(X,), endpoint=endpoint) as job:
        assert (made.calls, made.mask) == (0, None)
        assert torch.equal(job.step(X).result(), torch.tril(torch.ones(4, 4)) @ X)
        mask = made.mask
        with pytest.raises(errors.DataDependent):
            job.step(X)
        assert (made.calls, made.mask) == (1, mask)


def test_a_step_that_makes_one_more_tensor_each_time_leaves_all_of_them(endpoint: str) -> None:
    history: dict[int, torch.Tensor] = {}

    def step(x: torch.Tensor) -> torch.Tensor:
        history[len(history)] = torch.zeros(2)
        return x * 2

    with client.submit(step, example=(X,), endpoint=endpoint) as job:
        assert not history
        for i in range(4):
            assert torch.equal(job.step(X).result(), X * 2)
            assert list(history) == list(range(i + 1))
    assert torch.equal(history[3], torch.zeros(2))
