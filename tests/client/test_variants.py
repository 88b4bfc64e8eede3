"""Changes that Python makes between calls give a lifted input, another variant, or an error, never a constant."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpumux import client, errors
from gpumux.capture.step import MAX_PHASES
from tests.client.parity import Work, batches, check, simple_loop

X, Y = torch.randn(4, 6), torch.tensor([0, 1, 2, 0])


def training(model: nn.Module, optimizer: Any) -> Any:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def programs(job: Any) -> int:
    return len(job._remote.programs)


def test_a_learning_rate_set_by_hand_needs_no_new_program(endpoint: str) -> None:
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    reference = copy.deepcopy(model)
    ref_opt = torch.optim.SGD(reference.parameters(), lr=0.5)
    plain = training(reference, ref_opt)
    with client.submit(
        training(model, optimizer), example=(X, Y), model=model, optimizer=optimizer, endpoint=endpoint
    ) as job:
        before = programs(job)
        for lr in (0.5, 0.25, 0.125):
            optimizer.param_groups[0]["lr"] = ref_opt.param_groups[0]["lr"] = lr
            job.step(X, Y)
            plain(X, Y)
        assert programs(job) == before
        job.sync()
    assert torch.equal(model.weight, reference.weight)


def test_a_hyperparameter_python_decides_by_selects_another_phase(endpoint: str) -> None:
    """weight_decay 0 takes another path than weight_decay 0.1: same loop, different operators."""

    def make() -> Work:
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        data = batches((4, 6), classes=3)
        count = iter(range(100))

        def each() -> None:
            optimizer.param_groups[0]["weight_decay"] = 0.1 if next(count) % 4 >= 2 else 0.0

        return Work([model], [optimizer], [(training(model, optimizer), data[0])], simple_loop(data, 20, each))

    check(make, endpoint)


def test_a_new_batch_shape_is_a_variant_over_the_same_state(endpoint: str) -> None:
    def make() -> Work:
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        optimizer = torch.optim.Adam(model.parameters())
        data = [*batches((4, 6), classes=3, count=2), *batches((2, 6), classes=3, count=1)]
        return Work([model], [optimizer], [(training(model, optimizer), data[0])], simple_loop(data, 20))

    check(make, endpoint)


def test_flags_requires_grad_and_closure_scalars_select_variants(endpoint: str) -> None:
    def make() -> Work:
        model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scale = 1.0
        config = {"label_smoothing": 0.0}
        data = batches((4, 6), classes=3)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y, label_smoothing=config["label_smoothing"]) * scale
            loss.backward()
            optimizer.step()
            return loss

        def loop(run: Any) -> list[Any]:
            nonlocal scale
            out = [run(*data[0]) for _ in range(4)]
            model.eval()
            out += [run(*data[1]) for _ in range(4)]
            model.train()
            model[0].weight.requires_grad_(False)
            out += [run(*data[2]) for _ in range(4)]
            scale = 2.0
            out += [run(*data[0]) for _ in range(4)]
            config["label_smoothing"] = 0.1
            out += [run(*data[1]) for _ in range(4)]
            return out

        return Work([model], [optimizer], [(step, data[0])], loop, {"max_variants": 5})

    check(make, endpoint)


def test_more_variants_than_allowed_is_an_error_and_the_job_lives(endpoint: str) -> None:
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = training(model, optimizer)
    with client.submit(
        step, example=(X, Y), model=model, optimizer=optimizer, endpoint=endpoint, max_variants=2
    ) as job:
        job.step(X[:2], Y[:2])
        with pytest.raises(errors.TooManyVariants, match="a batch tensor of shape"):
            job.step(X[:3], Y[:3])
        assert job.step(X, Y).result().isfinite()


def test_python_that_decides_by_the_step_count_every_time_is_refused_by_line(endpoint: str) -> None:
    model = nn.Linear(6, 3)

    class Baked(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for p in self.param_groups[0]["params"]:
                state = self.state[p]
                state["n"] = state.get("n", 0) + 1
                p.sub_(p.grad * torch.tensor(float(state["n"])))  # needs a plain number

    optimizer = Baked(model.parameters(), lr=0.1)
    with client.submit(
        training(model, optimizer), example=(X, Y), model=model, optimizer=optimizer, endpoint=endpoint
    ) as job:
        for _ in range(MAX_PHASES):
            job.step(X, Y)
        with pytest.raises(errors.TooManyVariants, match=r"test_variants\.py:\d+"):
            job.step(X, Y)
        job.sync()


def test_radam_goes_through_three_phases(endpoint: str) -> None:
    model = nn.Linear(6, 3)
    optimizer = torch.optim.RAdam(model.parameters())
    with client.submit(
        training(model, optimizer), example=(X, Y), model=model, optimizer=optimizer, endpoint=endpoint
    ) as job:
        assert programs(job) == 2  # the first step, and the warm-up
        for _ in range(8):
            job.step(X, Y)
        assert programs(job) == 3  # rho_t > 5 from the sixth step on
        job.sync()
    assert float(optimizer.state[model.weight]["step"]) == 8.0


def test_sgd_dampening_has_a_first_step_of_its_own(endpoint: str) -> None:
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
    with client.submit(
        training(model, optimizer), example=(X, Y), model=model, optimizer=optimizer, endpoint=endpoint
    ) as job:
        assert programs(job) == 2
        job.sync()
        assert not optimizer.state, "nothing ran yet"
        job.step(X, Y)
        job.sync()
    assert optimizer.state[model.weight]["momentum_buffer"].abs().sum() > 0


def test_a_job_that_begins_with_a_warm_optimizer_goes_on_from_it(endpoint: str) -> None:
    def make() -> Work:
        model = nn.Linear(6, 3)
        optimizer = torch.optim.Adam(model.parameters(), amsgrad=True)
        data = batches((4, 6), classes=3)
        step = training(model, optimizer)
        for i in range(3):
            step(*data[i])
        return Work([model], [optimizer], [(step, data[0])], simple_loop(data, 20))

    check(make, endpoint)


def test_a_configuration_filled_in_by_the_first_call_is_settled(endpoint: str) -> None:
    class Lazy(nn.Linear):
        mode: str | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.mode is None:
                self.mode = "double"
            return super().forward(x) * (2 if self.mode == "double" else 1)

    model = Lazy(6, 3)
    model.mode = None
    with client.submit(lambda x: model(x), example=(X,), model=model, endpoint=endpoint) as job:
        assert torch.equal(job.step(X).result(), F.linear(X, model.weight, model.bias) * 2)
    assert model.mode == "double"


def test_unequal_host_counters_are_kept_apart(endpoint: str) -> None:
    """Two parameters whose step counts differ (one was frozen for a while)."""

    def make() -> Work:
        model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
        optimizer = torch.optim.Adam(model.parameters())
        data = batches((4, 6), classes=3)
        step = training(model, optimizer)
        model[0].weight.requires_grad_(False)
        step(*data[0])
        step(*data[1])
        model[0].weight.requires_grad_(True)
        return Work([model], [optimizer], [(step, data[0])], simple_loop(data, 20))

    check(make, endpoint)


def test_a_learning_rate_that_turns_from_an_int_into_a_float(endpoint: str) -> None:
    def make() -> Work:
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=1)
        data = batches((4, 6), classes=3)

        def each() -> None:
            optimizer.param_groups[0]["lr"] = 0.5

        return Work([model], [optimizer], [(training(model, optimizer), data[0])], simple_loop(data, 20, each))

    check(make, endpoint)


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("mode", "step"),
    [
        (torch.no_grad, lambda x: torch.ones(8, requires_grad=True).mul(2).requires_grad),
        (torch.inference_mode, lambda x: torch.is_inference_mode_enabled()),
        (lambda: _default_dtype(torch.float64), lambda x: x * torch.ones(8)),
        (_deterministic, lambda x: torch.are_deterministic_algorithms_enabled()),
        (
            lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
            lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]),
        ),
    ],
    ids=["no_grad", "inference_mode", "default dtype", "deterministic", "attention kernel"],
)
def test_torchs_modes_around_a_call_select_a_variant(mode: Any, step: Any, endpoint: str) -> None:
    data = torch.randn(3, 6, 8)

    def make() -> Work:
        def loop(run: Any) -> list[Any]:
            out = [run(data[0])]
            with mode():
                out.append(run(data[1]))
            return [*out, run(data[2])]

        return Work([], [], [(step, (data[0],))], loop)

    check(make, endpoint)


def test_an_unused_draw_still_moves_the_stream_on(endpoint: str) -> None:
    def make() -> Work:
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = batches((4, 6), classes=3)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            torch.rand(5)
            loss = F.cross_entropy(F.dropout(model(x), 0.5), y)
            loss.backward()
            optimizer.step()
            return loss

        return Work([model], [optimizer], [(step, data[0])], simple_loop(data, 6))

    check(make, endpoint)
    model = nn.Linear(6, 3)

    def draws(x: torch.Tensor) -> torch.Tensor:
        torch.rand(5)
        return F.dropout(model(x), 0.5)

    with client.submit(draws, example=(X,), model=model, endpoint=endpoint) as job:
        (made,) = [phase.programs for phase in job._functions[0][0]._cases[0].phases]
        (found,) = made.values()
        assert [op.random for op in found.lowered.program.ops if op.random is not None] == [0, 1]


class Attends(torch.nn.Module):
    """Takes another path where query and key are one tensor, which rounds otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.attention(query, key, key)[0]
        return found * (1.0 if query is key else 2.0)


@pytest.mark.parametrize("first", ["same", "different"])
def test_a_tensor_that_is_given_twice_is_one_tensor_in_the_step(first: str, endpoint: str) -> None:
    def make() -> Work:
        model = Attends()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, y = torch.randn(2, 2, 4, 8, generator=torch.Generator().manual_seed(1))

        def step(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(query, key).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        def loop(run: Any) -> list[Any]:
            return [run(x, x), run(x, y), run(query=y, key=y), run(query=y, key=x), run(x, x.clone())]

        return Work([model], [optimizer], [(step, (x, x if first == "same" else y))], loop)

    check(make, endpoint)
