"""Cases in which a capture could be wrong silently: results, constants, layouts, threads, interrupts."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpumux import client, errors
from tests.client.parity import Work, batches, check, simple_loop

DATA = batches((6, 8), classes=4)
X, Y = DATA[0]


def stepping(model: nn.Module, opt: Any, more: Any) -> Work:
    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        opt.zero_grad()
        out = model(x)
        loss = F.cross_entropy(out, y)
        loss.backward()
        opt.step()
        return loss, more(out, x)

    return Work([model], [opt], [(step, DATA[0])], simple_loop(DATA, 6))


@pytest.mark.parametrize(
    "result",
    [
        lambda out, x: out[:, 0],
        lambda out, x: out.squeeze(1).t(),
        lambda out, x: x.t(),
        lambda out, x: torch.tensor(2.0),
        lambda out, x: torch.tensor([1.0, 2.0])[1:],
        lambda out, x: {"a": [None, 3, "text", out.detach().expand(2, 6, 4)]},
    ],
    ids=["slice", "transposed", "of the batch", "constant", "of a constant", "containers"],
)
def test_results_that_are_views_used_nowhere_else(result: Any, endpoint: str) -> None:
    def make() -> Work:
        model = nn.Linear(8, 4)
        return stepping(model, torch.optim.SGD(model.parameters(), lr=0.1), result)

    check(make, endpoint)


def test_a_result_that_is_state_the_step_then_replaces(endpoint: str) -> None:
    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            old = self.mean
            self.mean = 0.9 * self.mean + x.mean(0)
            return old

    def make() -> Work:
        model = Running()
        return Work([model], [], [(lambda x: model(x), (X,))], lambda run: [run(x) for x, _ in DATA])

    check(make, endpoint)


def test_one_parameter_under_several_names_in_one_operator(endpoint: str) -> None:
    """Views of it that lie alike are one tensor to the capture, and each operator gives back the one it was given."""

    def make() -> Work:
        model = nn.Linear(8, 4)

        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            with torch.no_grad():
                alias, row = model.weight.data, model.weight.data[0]
                model.weight.mul_(1.0 + 0.01 * alias)
                kept = alias.add_(model.weight.detach(), alpha=0.01)
                row.sub_(model.weight[0], alpha=0.5)
                turned = model.weight.data.t()
                turned.copy_(turned.clone().t_().t())
            return F.cross_entropy(model(x), y), kept is alias, row, turned

        return Work([model], [], [(step, DATA[0])], simple_loop(DATA, 4))

    check(make, endpoint)


def test_buffers_that_change_places(endpoint: str) -> None:
    class Swapping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("a", torch.arange(8.0))
            self.register_buffer("b", torch.arange(8.0) * 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.a, self.b = self.b, self.a
            return x + self.a

    def make() -> Work:
        model = Swapping()
        return Work([model], [], [(lambda x: model(x), (X,))], lambda run: [run(x) for x, _ in DATA])

    check(make, endpoint)


def test_constants_that_are_written_and_viewed(endpoint: str) -> None:
    def make() -> Work:
        model = nn.Linear(8, 4)

        def more(out: torch.Tensor, x: torch.Tensor) -> Any:
            c = torch.tensor([0.0, 1.0])
            c += out.sum().detach()
            t = torch.tensor(1.0)
            u = t[None]
            t.mul_(3)
            return c, u + 0, t

        return stepping(model, torch.optim.SGD(model.parameters(), lr=0.1), more)

    check(make, endpoint)


@pytest.mark.parametrize(
    "layout",
    [lambda t: t[:, ::2], lambda t: t[1:, 1:], lambda t: t[:1].expand(6, 8), lambda t: t.t().contiguous().t()],
    ids=["every other column", "inner block", "expanded", "transposed"],
)
def test_batches_that_are_not_dense_keep_their_strides(layout: Any, endpoint: str) -> None:
    def make() -> Work:
        data = [(layout(x),) for x, _ in batches((6, 8))]
        return Work([], [], [(lambda x: (x.sum(), x.mean(1), x.std()), data[0])], lambda run: [run(*d) for d in data])

    check(make, endpoint)


def test_overlapping_windows_are_refused(endpoint: str) -> None:
    with pytest.raises(errors.CaptureError, match="overlap"):
        client.submit(lambda x: x.sum(), example=(torch.arange(8.0).unfold(0, 4, 1),), endpoint=endpoint)


def test_rounding_and_text_made_of_a_hyperparameter(endpoint: str) -> None:
    def make() -> Work:
        model = nn.Linear(8, 4)
        opt = torch.optim.SGD(model.parameters(), lr=0.25)

        def more(out: torch.Tensor, x: torch.Tensor) -> Any:
            lr = opt.param_groups[0]["lr"]
            return out.sum().detach() * round(lr * 10), f"{lr:.3f} {lr}", int(lr * 8), math.floor(lr * 9)

        w = stepping(model, opt, more)

        def loop(run: Any) -> list[Any]:
            first = [run(*DATA[0]), run(*DATA[1])]
            opt.param_groups[0]["lr"] = 0.5
            return [*first, run(*DATA[2]), run(*DATA[0])]

        w.loop = loop
        return w

    check(make, endpoint)


@pytest.mark.parametrize(
    ("batch", "word"),
    [
        (lambda m: m.weight, "part of the model"),
        (lambda m: torch.randn(4, 8, requires_grad=True) * 2, "requires grad"),
    ],
    ids=["parameter", "requires grad"],
)
def test_batches_whose_gradient_would_be_lost(batch: Any, word: str, endpoint: str) -> None:
    model = nn.Linear(8, 4)
    with pytest.raises(errors.CaptureError, match=word):
        client.submit(lambda x: model(x), example=(batch(model),), model=model, endpoint=endpoint)


def test_autocast_around_the_loop(endpoint: str) -> None:
    model = nn.Linear(8, 4)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(errors.CaptureError, match="inside the step"):
        client.submit(lambda x: model(x), example=(X,), model=model, endpoint=endpoint)
    model(X)


def test_settings_switched_inside_the_step(endpoint: str) -> None:
    model = nn.Conv1d(6, 4, 3)

    def step(x: torch.Tensor) -> torch.Tensor:
        torch.backends.mkldnn.enabled = False
        try:
            return model(x)
        finally:
            torch.backends.mkldnn.enabled = True

    with pytest.raises(errors.CaptureError, match=r"torch\.backends"):
        client.submit(step, example=(X,), model=model, endpoint=endpoint)


def test_an_optimizer_inside_an_optimizer_is_named_and_left_alone(endpoint: str) -> None:
    model = nn.Linear(8, 4)
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        base.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        base.step()
        return loss

    with pytest.raises(errors.CaptureError, match=r"base .*not given"):
        client.submit(step, example=(X, Y), model=model, endpoint=endpoint)
    assert not base.state


@pytest.mark.parametrize(
    "write",
    [
        lambda m, o: o.load_state_dict(o.state_dict()),
        lambda m, o: o.state.clear(),
        lambda m, o: o.state[m.weight]["momentum_buffer"].zero_(),
        lambda m, o: setattr(m.weight, "data", torch.zeros(4, 8)),
        lambda m, o: setattr(m, "weight", nn.Parameter(torch.zeros(4, 8))),
        lambda m, o: m.double(),
    ],
    ids=["load_state_dict", "clear", "momentum", ".data", "another parameter", "double"],
)
def test_every_local_write_is_noticed(write: Any, endpoint: str) -> None:
    model = nn.Linear(8, 4)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    w = stepping(model, opt, lambda out, x: None)
    with client.submit(w.functions[0][0], example=DATA[0], model=model, optimizer=opt, endpoint=endpoint) as job:
        job.step(*DATA[0])
        job.sync()
        write(model, opt)
        for verb in (lambda: job.step(*DATA[0]), job.state_dict, lambda: job.add(lambda x: model(x), example=(X,))):
            with pytest.raises(errors.LocalWrite):
                verb()


def test_load_state_follows_new_data_and_new_groups(endpoint: str) -> None:
    model = nn.Linear(8, 4)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    w = stepping(model, opt, lambda out, x: None)
    with client.submit(w.functions[0][0], example=DATA[0], model=model, optimizer=opt, endpoint=endpoint) as job:
        job.step(*DATA[0])
        state = job.state_dict()
        state["optimizer"]["param_groups"][0]["lr"] = 0.0
        job.load_state(state)
        model.weight.data = torch.full((4, 8), 0.5)
        job.load_state()
        job.step(*DATA[1])
        job.sync()
    assert torch.equal(model.weight, torch.full((4, 8), 0.5)), "a learning rate of 0 changes nothing"


def test_two_threads_may_submit_at_once_and_leave_the_process_as_it_was(endpoint: str) -> None:
    plain = (math.sqrt, torch.get_rng_state, torch.manual_seed, torch.Tensor.tolist)
    found: list[BaseException] = []

    def one(seed: int) -> None:
        try:
            model = nn.Linear(8, 4)
            opt = torch.optim.Adam(model.parameters())
            w = stepping(model, opt, lambda out, x: None)
            with client.submit(
                w.functions[0][0], example=DATA[0], model=model, optimizer=opt, endpoint=endpoint, seed=seed
            ) as job:
                assert job.step(*DATA[0]).result()[0].isfinite()
                job.sync()
        except BaseException as error:  # noqa: BLE001 - handed to the test
            found.append(error)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert found == []
    assert (math.sqrt, torch.get_rng_state, torch.manual_seed, torch.Tensor.tolist) == plain


def test_an_interrupt_while_capturing_leaves_nothing_behind(endpoint: str) -> None:
    class Interrupted(nn.Linear):
        seen: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = super().forward(x)
            self.train(False)
            raise KeyboardInterrupt

    model = Interrupted(8, 4)
    with pytest.raises(KeyboardInterrupt):
        client.submit(lambda x: model(x), example=(X,), model=model, endpoint=endpoint)
    assert model.seen is None
    assert model.training
    assert not model._forward_pre_hooks


def test_activations_a_hook_collects_are_harmless(endpoint: str) -> None:
    def make() -> Work:
        model = nn.Linear(8, 4)
        acts: dict[str, Any] = {}
        model.register_forward_hook(lambda m, i, o: acts.__setitem__("out", o.detach()))
        return stepping(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda out, x: None)

    check(make, endpoint)


def test_a_second_job_on_a_model_that_is_behind_begins_with_the_newest_state(endpoint: str) -> None:
    model = nn.Linear(8, 4)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    w = stepping(model, opt, lambda out, x: None)
    with client.submit(w.functions[0][0], example=DATA[0], model=model, optimizer=opt, endpoint=endpoint) as job:
        job.step(*DATA[0])
        with client.submit(lambda x: model(x), example=(X,), model=model, endpoint=endpoint) as other:
            found = other.step(X).result()
        assert torch.equal(found, model(X))
