"""What can't be captured is refused with the user's own line or tensor, and leaves no trace behind."""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import logging
import random
import re
import time
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpumux import client, errors

X, Y = torch.randn(4, 6), torch.tensor([0, 1, 2, 0])


def submit(step: Callable[..., Any], endpoint: str, *, model: Any, optimizer: Any = None, **options: Any) -> None:
    client.submit(step, example=(X, Y), model=model, optimizer=optimizer, endpoint=endpoint, **options).close()


def line_of(fn: Callable[..., Any], text: str) -> str:
    lines, start = inspect.getsourcelines(fn)
    at = next(i for i, line in enumerate(lines) if text in line)
    return f"{__file__}:{start + at}"


def refusal(
    step: Callable[..., Any], endpoint: str, kind: type[errors.GpumuxError], **given: Any
) -> errors.GpumuxError:
    given.setdefault("model", nn.Linear(6, 3))
    with pytest.raises(kind) as caught:
        submit(step, endpoint, **given)
    assert caught.value.remedy, "every refusal says what to do"
    return caught.value


def test_what_torch_logs_of_a_batch_that_does_not_fit_is_left_out(endpoint: str) -> None:
    """The error says it all; torch would print a traceback of its own insides as well. Nothing else is hidden."""
    model = nn.Linear(5, 3)
    insides = logging.getLogger("torch._subclasses.fake_tensor")
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        insides.error("something else")
        return F.cross_entropy(model(x), y)

    insides.addHandler(handler)
    try:
        error = refusal(step, endpoint, errors.CaptureError, model=model)
        insides.error("failed while attempting to run meta for %s", "a program of the user's own")
    finally:
        insides.removeHandler(handler)
    assert "same reduction dim" in str(error)
    assert found == ["something else", "failed while attempting to run meta for a program of the user's own"]


def test_a_branch_on_data(endpoint: str) -> None:
    model = nn.Linear(6, 3)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        if loss > 1.0:  # the branch
            loss = loss * 2
        return loss

    error = refusal(step, endpoint, errors.DataDependent, model=model)
    assert line_of(step, "the branch") in str(error)


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.sum().item(),
        lambda t: float(t.sum()),
        lambda t: t.detach().tolist(),
        lambda t: t.data.numpy(),
        lambda t: t.nonzero(),
        lambda t: t[t > 0].sum(),
        lambda t: torch.equal(t, t),
    ],
    ids=["item", "float", "tolist", "numpy", "nonzero", "mask", "equal"],
)
def test_reading_values(read: Callable[[torch.Tensor], Any], endpoint: str) -> None:
    model = nn.Linear(6, 3)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        read(model.weight * x.mean())
        return model(x)

    error = refusal(step, endpoint, errors.DataDependent, model=model)
    assert __file__ in str(error)


def test_further_lines_that_read_values_are_named_with_the_first(endpoint: str) -> None:
    model = nn.Linear(6, 3)
    seen: list[Any] = []

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = model(x)
        loss = F.cross_entropy(out, y)
        seen.append(loss.item())
        seen.append(out.mean().item())
        seen.extend(out[0].tolist())
        return loss

    def alone(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return model(x).sum() * model(x).mean().item()

    error = refusal(step, endpoint, errors.DataDependent, model=model)
    first = line_of(step, "loss.item()")
    line = int(first.rpartition(":")[2])
    assert error.message.startswith(f"{first} reads a tensor's value in Python")
    assert error.message.endswith(f"; lines {line + 1} and {line + 2} there may, too")
    assert seen == [], "no code runs on with values that are none"
    assert "may, too" not in refusal(alone, endpoint, errors.DataDependent, model=model).message


def test_a_tensor_that_was_not_given_is_named(endpoint: str) -> None:
    model = nn.Linear(6, 3)
    hidden = ContextVar("hidden", default=torch.ones(2))  # held by no variable

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return model(x)[:, :2] * hidden.get()  # uses it

    error = refusal(step, endpoint, errors.UnknownTensor, model=model)
    assert "shape (2,)" in error.message
    assert line_of(step, "uses it") in error.message


def test_an_operator_outside_the_allow_list_is_named(endpoint: str) -> None:
    model = nn.Linear(6, 3)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.quantize_per_tensor(model(x), 0.1, 0, torch.qint8).dequantize()  # this one

    error = refusal(step, endpoint, errors.CaptureError, model=model)
    assert line_of(step, "this one") in error.message
    assert "quantize_per_tensor" in str(error)


def test_a_custom_library_operator_is_named(endpoint: str) -> None:
    model = nn.Linear(6, 3)
    library = torch.library.Library("gpumux_test", "DEF")
    try:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.ops.gpumux_test.twice(model(x).detach())

        error = refusal(step, endpoint, errors.UnsupportedOperator, model=model)
        assert "gpumux_test.twice" in error.message
    finally:
        library._destroy()


def test_an_optimizer_whose_state_cannot_be_kept_is_named(endpoint: str) -> None:
    class Odd(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step()
            self.state[self.param_groups[0]["params"][0]]["helper"] = object()

    model = nn.Linear(6, 3)
    optimizer = Odd(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    error = refusal(step, endpoint, errors.CaptureError, model=model, optimizer=optimizer)
    assert "optimizer0.weight.helper" in error.message


COUNT = ""


def test_a_python_counter_that_is_no_number(endpoint: str) -> None:
    model = nn.Linear(6, 3)
    seen: tuple[int, ...] = ()

    def global_counter(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        global COUNT
        COUNT = COUNT + "i"
        return model(x)

    def closure_counter(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        nonlocal seen
        seen += (1,)
        return model(x) * len(seen)

    error = refusal(global_counter, endpoint, errors.NotRepeatable, model=model)
    assert "COUNT (" in error.message
    assert COUNT == "", "a refused step leaves Python values as they were"
    error = refusal(closure_counter, endpoint, errors.NotRepeatable, model=model)
    assert "seen (" in error.message


def test_a_counter_that_begins_as_an_attribute_of_the_class(endpoint: str) -> None:
    class Counts(nn.Linear):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls = self.calls + 1
            return super().forward(x) * self.calls

    model = Counts(6, 3)  # the first call makes an attribute of the instance
    with client.submit(lambda x, y: model(x), example=(X, Y), model=model, endpoint=endpoint) as job:
        for calls in range(1, 4):
            assert torch.equal(job.step(X, Y).result(), calls * nn.functional.linear(X, model.weight, model.bias))
            assert model.calls == calls


def test_a_growing_list(endpoint: str) -> None:
    history: list[Any] = []
    plain = nn.Linear(6, 3)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        history.append(1.0)
        return plain(x)

    error = refusal(step, endpoint, errors.NotRepeatable, model=plain)
    assert "len(history)" in error.message
    assert history == []


def test_python_numbers_that_differ_between_two_traces(endpoint: str) -> None:
    model = nn.Linear(6, 3)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return model(x) * time.perf_counter()  # varies

    error = refusal(step, endpoint, errors.NotRepeatable, model=model)
    assert line_of(step, "varies") in error.message
    assert "mul" in error.message


def test_another_constant_each_time(endpoint: str) -> None:
    model = nn.Linear(6, 3)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        part = time.perf_counter() % 1  # as a float32, the whole number would stand still for milliseconds
        return model(x) * torch.tensor([part, 1.0, 2.0])  # varies

    error = refusal(step, endpoint, errors.NotRepeatable, model=model)
    assert "constant" in error.message
    assert line_of(step, "varies") in error.message


GENERATOR = numpy.random.default_rng(1)


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (lambda: random.random(), "random"),
        (lambda: numpy.random.rand(), "numpy.random"),
        (lambda: GENERATOR.random(), "GENERATOR"),
    ],
    ids=["random", "numpy", "generator"],
)
def test_a_branch_that_pythons_random_rarely_takes(draw: Callable[[], float], name: str, endpoint: str) -> None:
    """Both traces take the same side, so only the generators' states tell."""
    model = nn.Linear(6, 3)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if draw() > 2.0:
            x = x.flip(1)
        return model(x)

    assert f"from Python's {name}" in refusal(step, endpoint, errors.NotRepeatable, model=model).message


NUMBERS = itertools.cycle([1.0])


def test_an_iterator(endpoint: str) -> None:
    model = nn.Linear(6, 3)
    error = refusal(lambda x, y: model(x) * next(NUMBERS), endpoint, errors.CaptureError, model=model)
    assert "NUMBERS" in error.message


@pytest.mark.parametrize(
    ("use", "word"),
    [
        (lambda: torch.manual_seed(3), "seeds the random generator"),
        (lambda: torch.rand(3, generator=torch.Generator()), "generator of its own"),
        (lambda: torch.set_rng_state(OUTSIDE), "saved outside"),
        (lambda: torch.rand(3, device="meta"), "places a tensor on meta"),
    ],
    ids=["seed", "generator", "state", "device"],
)
def test_random_state_and_devices_of_its_own(use: Callable[[], Any], word: str, endpoint: str) -> None:
    model = nn.Linear(6, 3)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        use()
        return model(x)

    assert word in refusal(step, endpoint, errors.CaptureError, model=model).message


OUTSIDE = torch.get_rng_state()


def test_a_rewound_random_state_that_is_never_restored(endpoint: str) -> None:
    model = nn.Linear(6, 3)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        before = torch.get_rng_state()
        out = F.dropout(model(x), 0.5)
        torch.set_rng_state(before)
        return out

    assert "rewound" in refusal(step, endpoint, errors.CaptureError, model=model).message


def test_the_users_own_error_keeps_its_line_and_kind_and_local_state_survives(endpoint: str) -> None:
    model = nn.Linear(6, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    F.cross_entropy(model(X), Y).backward()
    optimizer.step()
    grad, state, lr = model.weight.grad, optimizer.state, optimizer.param_groups[0]["lr"]
    weight = model.weight.detach().clone()

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        raise KeyError("mine")  # raised here

    error = refusal(step, endpoint, errors.CaptureError, model=model, optimizer=optimizer)
    assert line_of(step, "raised here") in error.message
    assert isinstance(error, KeyError)
    assert model.weight.grad is grad
    assert optimizer.state is state
    assert optimizer.param_groups[0]["lr"] is lr
    assert torch.equal(model.weight, weight)
    assert not model._forward_pre_hooks, "the tripwires are gone"
    model(X)


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"priority": "urgent"}, "priority"),
        ({"weight": 0.0}, "weight"),
        ({"weight": 1001.0}, "weight is 1001.0"),
        ({"max_slowdown": 0.9}, "max_slowdown"),
        ({"max_inflight": 0}, "max_inflight"),
        ({"memory_limit": 0}, "memory_limit"),
        ({"seed": -1}, "seed"),
        ({"model": "resnet"}, "model="),
        ({"optimizer": [1]}, "optimizer="),
        ({"max_variants": 0}, "max_variants"),
        ({"weight": "x"}, "weight is 'x'"),
        ({"weight": float("nan")}, "weight"),
        ({"weight": True}, "weight"),
        ({"max_slowdown": None}, "max_slowdown"),
        ({"memory_limit": "1G"}, "memory_limit is '1G'"),
        ({"memory_limit": 1.5}, "memory_limit"),
        ({"memory_limit": 2**70}, "memory_limit"),
        ({"max_inflight": 2.5}, "max_inflight is 2.5"),
        ({"max_variants": 1.5}, "max_variants"),
        ({"seed": 1.5}, "seed"),
        ({"name": 5}, "name is 5"),
        ({"name": "two\nlines"}, "name"),
        ({"name": "x" * 1000}, "name"),
        ({"endpoint": 5}, "5 is not an endpoint"),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_bad_arguments(given: dict[str, Any], word: str, endpoint: str) -> None:
    where = given.pop("endpoint", endpoint)
    assert word in refusal(lambda x, y: x, where, errors.ConfigError, **given).message


def test_numpys_numbers_are_arguments_too(endpoint: str) -> None:
    given = {"weight": numpy.float32(2), "max_inflight": numpy.int64(3), "seed": numpy.uint64(7)}
    submit(lambda x, y: x * 1, endpoint, model=nn.Linear(6, 3), name=numpy.str_("n"), **given)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: X.to_sparse(), "torch.sparse_coo"),
        (lambda: X.to_sparse_csr(), "torch.sparse_csr"),
        (lambda: X.to("meta"), "meta device"),
        (lambda: torch.nested.nested_tensor([X, X[:2]], layout=torch.jagged), "a nested tensor"),
        (lambda: X.to(torch.float8_e4m3fn), "of type float8_e4m3fn"),
    ],
    ids=["sparse", "compressed", "meta", "nested", "float8"],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested tensors")
def test_a_batch_that_is_no_plain_memory(make: Callable[[], torch.Tensor], word: str, endpoint: str) -> None:
    batch = make()

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return y * 1

    with pytest.raises(errors.CaptureError, match="tensor 1 of the batch") as caught:
        client.submit(step, example=(X, batch), endpoint=endpoint)
    assert word in caught.value.message
    assert caught.value.remedy
    with (
        client.submit(step, example=(X, Y), endpoint=endpoint) as job,
        pytest.raises(errors.CaptureError, match="tensor 1 of the batch"),
    ):
        job.step(X, batch)


def test_a_batch_of_the_wrong_length_names_the_step(endpoint: str) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x * 1

    error = refusal(step, endpoint, errors.CaptureError)
    assert line_of(step, "def step") in error.message
    assert "takes 1 positional argument but 2 were given" in error.message
    assert "example=" in error.remedy


def test_a_batch_of_something_else(endpoint: str) -> None:
    with pytest.raises(errors.CaptureError, match="holds a object"):
        client.submit(lambda x: x, example=(object(),), endpoint=endpoint)


def test_a_batch_of_another_type_costs_nothing(endpoint: str) -> None:
    """Its kernels would refuse it when they run, and the job's state would be lost."""
    model = nn.Linear(3, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    x, y = torch.ones(4, 3, dtype=torch.float64), torch.zeros(4, dtype=torch.long)
    with client.submit(step, example=(x, y), model=model, optimizer=optimizer, endpoint=endpoint) as job:
        first = float(job.step(x, y).result())
        for other, said in (((x.float(), y), "tensors of one type"), ((x, y.int()), "classes in int64")):
            with pytest.raises(errors.CaptureError, match=said):
                job.step(*other).result()
        assert float(job.step(x, y).result()) < first


def test_no_daemon() -> None:
    with pytest.raises(errors.DaemonGone) as caught:
        client.submit(lambda x: x, example=(X,), endpoint="ipc:///tmp/no-gpumux-here.sock")
    assert "gpumux serve" in str(caught.value)


class KeepsHidden(nn.Module):
    """A recurrent habit: the output of one call is used by the next."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.hidden: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layer(x)
        if self.hidden is not None:
            out = out + self.hidden  # reads it
        self.hidden = out.detach()
        return out


def test_a_tensor_kept_in_an_attribute_between_calls_is_named(endpoint: str) -> None:
    model = KeepsHidden()
    error = refusal(lambda x, y: model(x), endpoint, errors.UnknownTensor, model=model)
    assert "uses model.hidden, a tensor that an earlier call of the step left" in error.message
    assert model.hidden is None, "no tensor of the trace is left in the user's model"


@pytest.mark.parametrize("kind", ["LBFGS", "Adafactor"])
def test_an_optimizer_that_branches_on_tensors_is_named(kind: str, endpoint: str) -> None:
    model = nn.Linear(6, 3)
    optimizer = getattr(torch.optim, kind)(model.parameters())

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        return optimizer.step(closure)

    error = refusal(step, endpoint, errors.DataDependent, model=model, optimizer=optimizer)
    assert f"inside {kind}.step" in error.message
    assert error.remedy.startswith(f"{kind} decides so at every step")
    assert "use another of torch.optim (Adam," in error.remedy


def test_an_optimizer_of_the_users_own_can_be_mended(endpoint: str) -> None:
    class Mine(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                if group["params"][0].grad.norm() > 1:
                    group["lr"] *= 0.5
            super().step()

    model = nn.Linear(6, 3)
    optimizer = Mine(model.parameters())

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    error = refusal(step, endpoint, errors.DataDependent, model=model, optimizer=optimizer)
    assert "inside Mine.step" in error.message
    assert error.remedy.startswith("keep the decision on the device")


TOKENS = torch.arange(24).reshape(4, 6) % 9
LENGTHS = torch.tensor([6, 5, 3, 2])
INSTEAD: dict[str, tuple[Any, Any, tuple[Any, ...], str, str]] = {
    "sparse gradients of bags": (lambda: nn.EmbeddingBag(9, 5, sparse=True), lambda m, x: m(x).mean(), (TOKENS,),
                                 "makes a sparse gradient", "sparse=False"),
    "sparse gradients": (lambda: nn.Embedding(9, 5, sparse=True), lambda m, x: m(x).mean(), (TOKENS,),
                         "makes a sparse tensor", "sparse=False"),
    "ctc": (lambda: nn.Linear(5, 4),
            lambda m, x, y, n: F.ctc_loss(m(x).log_softmax(-1), y, n, torch.ones_like(n)),
            (torch.ones(7, 2, 5), TOKENS[:2, :1], LENGTHS[:2]),
            "_ctc_loss", "torch.logaddexp over padded targets"),
    "mask": (lambda: nn.Linear(6, 3), lambda m, x, y: F.cross_entropy(m(x)[y > 0], y[y > 0]),
             (torch.ones(4, 6), torch.tensor([0, 1, 2, 1])), "aten.index", "(loss * mask).sum() / mask.sum()"),
    "least squares": (lambda: nn.Linear(6, 3), lambda m, x: torch.linalg.lstsq(m(x), x).solution.sum(),
                      (torch.ones(4, 6),), "linalg_lstsq", "torch.linalg.solve"),
    "packed": (lambda: nn.GRU(6, 3, batch_first=True),
               lambda m, x, n: m(nn.utils.rnn.pack_padded_sequence(x, n, batch_first=True))[1].mean(),
               (torch.ones(4, 6, 6), LENGTHS), "_pack_padded_sequence", "give the padded batch to the recurrent layer"),
}  # fmt: skip


@pytest.mark.parametrize("what", INSTEAD)
def test_what_to_use_instead_is_said(what: str, endpoint: str) -> None:
    module, loss, example, named, remedy = INSTEAD[what]
    model = module()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(*batch: torch.Tensor) -> torch.Tensor:
        value = loss(model, *batch)
        value.backward()
        optimizer.step()
        return value

    with pytest.raises(errors.CaptureError) as caught:
        client.submit(step, example=example, model=model, optimizer=optimizer, endpoint=endpoint)
    assert isinstance(caught.value, (errors.UnsupportedOperator, errors.DataDependent))
    assert named in caught.value.message
    assert remedy in caught.value.remedy


def test_a_grad_scaler_that_is_off_changes_nothing(endpoint: str) -> None:
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    submit(step, endpoint, model=model, optimizer=optimizer)
    assert torch.amp.GradScaler("cpu").scale(torch.ones(())) == 2.0**16  # elsewhere it is what it was


def test_a_new_parameter_group_after_submit_is_no_secret(endpoint: str) -> None:
    model, extra = nn.Linear(6, 3), nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x) + extra(x), y)
        loss.backward()
        optimizer.step()
        return loss

    both = nn.ModuleList([model, extra])
    with client.submit(step, example=(X, Y), model=both, optimizer=optimizer, endpoint=endpoint) as job:
        before = len(job._remote.programs)
        job.step(X, Y)
        optimizer.add_param_group({"params": list(extra.parameters())})
        job.step(X, Y).result()
        assert len(job._remote.programs) > before, "the group is part of the step from now on"
        job.sync()


def test_an_operator_without_a_shape_rule_is_named_at_capture(endpoint: str) -> None:
    """torch would run its real kernel to see what comes out; the daemon's check never does."""
    weight = nn.Parameter(torch.ones(6))
    given = {"weight_decay": 0.0, "momentum": 0.0, "lr": 0.1, "dampening": 0.0, "nesterov": False, "maximize": False}

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            out = torch.ops.aten._fused_sgd([weight], [x[0]], [], **given, is_first_step=False)  # this one
        return out[0][0]

    error = refusal(step, endpoint, errors.UnsupportedOperator, model=nn.ParameterList([weight]))
    assert line_of(step, "this one") in error.message


# ---- other memory

Body = Callable[[Any, Any], Any]


@torch.no_grad()
def storage_of_its_own(m: Any, o: Any) -> None:
    m[0].weight.set_(m[0].weight * 0.9)


def to_other_memory(tensor: torch.Tensor, value: torch.Tensor) -> None:
    tensor.data = value


def swapped(m: Any, o: Any) -> None:
    m[0].bias.data, m[1].bias.data = m[1].bias.data, m[0].bias.data


def then_an_error(m: Any, o: Any) -> None:
    to_other_memory(m[0].weight, m[0].weight.data * 0.9)
    m[0].weight.sum().item()


def one_value_for_two(m: Any, o: Any) -> None:
    value = m[0].bias * 0.5
    to_other_memory(m[0].bias, value)
    to_other_memory(m[1].bias, value)


def a_gradient_as_value(m: Any, o: Any) -> None:
    to_other_memory(m[0].weight, m[0].weight.grad)


def an_old_view_used(m: Any, o: Any) -> None:
    to_other_memory(m[0].weight, m[0].weight * 0.9)
    m[0].weight.data.sub_(m.views[0])


def a_value_kept(m: Any, o: Any) -> None:
    value = torch.cat([m[0].bias, m[0].bias])
    to_other_memory(m[0].bias, value[:6])
    o.state[m[0].bias]["both"] = value


OUTSIDE = torch.ones(3)
MOVES: dict[str, tuple[Body, str]] = {
    "two swapped": (swapped, r"0\.bias"),
    "one with a window onto another": (lambda m, o: to_other_memory(m[0].bias, m[0].weight.data[0]), r"0\.bias"),
    "the optimizer's": (
        lambda m, o: to_other_memory(
            o.state[m[0].weight]["momentum_buffer"], o.state[m[0].weight]["momentum_buffer"] * 0.5
        ),
        "momentum_buffer",
    ),
    "a stranger": (lambda m, o: to_other_memory(OUTSIDE, m[0].bias[:3].detach().clone()), r"shape \(3,\)"),
    "swap_tensors": (
        lambda m, o: torch.utils.swap_tensors(m[0].weight, nn.Parameter(m[0].weight.detach() * 0.9)), r"0\.weight",
    ),
    "a stranger itself": (lambda m, o: to_other_memory(m[2].bias, OUTSIDE), r"2\.bias"),
    "another shape": (lambda m, o: to_other_memory(m[0].bias, m[0].bias[:3] * 2), r"0\.bias"),
    "another layout": (lambda m, o: to_other_memory(m[0].weight, (m[0].weight * 2).t()), r"0\.weight"),
    "one value for two": (one_value_for_two, r"1\.bias.* shares memory with 0\.bias"),
    "a gradient": (a_gradient_as_value, r"shares memory with grad\.0\.weight"),
    "the optimizer's memory": (
        lambda m, o: to_other_memory(m[0].weight, o.state[m[0].weight]["momentum_buffer"]), r"0\.weight",
    ),
    "a view from before": (an_old_view_used, "over the memory of one whose .data"),
    "a view from before, read first": (
        lambda m, o: to_other_memory(m[2].weight, m[2].weight - m.views[1]), r"views.* shares the memory of 2\.weight",
    ),
    "a value that the optimizer keeps": (a_value_kept, r"0\.bias .*shares memory with .*both"),
    "the batch": (lambda m, o: to_other_memory(m[0].weight, m.batch), r"0\.weight"),
    "an error after it": (then_an_error, "reads a tensor.s value"),
    "a storage filled": (lambda m, o: m[0].weight.untyped_storage().fill_(0), r"0\.weight"),
    "a storage resized": (lambda m, o: m[0].weight.untyped_storage().resize_(0), r"0\.weight"),
    "bytes of a storage": (lambda m, o: m[0].weight.untyped_storage().__setitem__(0, 1), r"0\.weight"),
    "set_": (storage_of_its_own, "set_"),
    "another type": (lambda m, o: m.double(), ""),
    "another parameter": (lambda m, o: setattr(m[0], "weight", nn.Parameter(m[0].weight.detach() * 0.9)), "weight"),
}  # fmt: skip


def test_a_step_that_gives_a_tensor_other_memory_is_refused_by_name_and_nothing_has_changed(endpoint: str) -> None:
    """One after another, over one model: what a refused step leaves would be seen by the next."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    F.cross_entropy(model(X), Y).backward()
    optimizer.step()
    model.views = [model[0].weight.detach(), model[2].weight.detach()]  # type: ignore[assignment]
    classes = {name: type(t) for name, t in model.state_dict(keep_vars=True).items()}

    def tensors() -> list[torch.Tensor]:
        held = [s["momentum_buffer"] for s in optimizer.state.values()]
        return [OUTSIDE, *model.state_dict(keep_vars=True).values(), *held, *(p.grad for p in model.parameters())]  # type: ignore[list-item]

    def lie() -> list[Any]:
        return [(t, t.data_ptr(), t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in tensors()]

    before, values = lie(), [t.detach().clone() for t in tensors()]
    for body, name in MOVES.values():

        def step(x: torch.Tensor, y: torch.Tensor, body: Body = body) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            model.batch = x  # type: ignore[assignment]
            body(model, optimizer)
            optimizer.step()
            return loss

        error = refusal(step, endpoint, errors.CaptureError, model=model, optimizer=optimizer)
        assert re.search(name, error.message), error
        for (old, *was), (new, *now) in zip(before, lie(), strict=True):
            assert old is new
            assert was == now, (name, old)
        for value, tensor in zip(values, tensors(), strict=True):
            assert torch.equal(value, tensor)
    assert {name: type(t) for name, t in model.state_dict(keep_vars=True).items()} == classes
    assert isinstance(torch._C.TensorBase.data, type(torch.Tensor.data)), "torch's own attribute is back"
    F.cross_entropy(model(X), Y).backward()
    optimizer.step()


def test_the_remedy_of_other_memory_works(endpoint: str) -> None:
    """And setting a tensor's own memory changes nothing."""

    def run(by_job: bool) -> tuple[list[torch.Tensor], list[float]]:
        torch.manual_seed(0)
        model = nn.Linear(6, 3)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            model.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(0.1 * p.grad)  # type: ignore[operator]
                    p.data = p.data.to(torch.float32)
                    p.data = p.data.view(p.shape)
            return loss

        if not by_job:
            return list(model.parameters()), [step(X, Y).item() for _ in range(3)]
        with client.submit(step, example=(X, Y), model=model, endpoint=endpoint) as job:
            losses = [job.step(X, Y).item() for _ in range(3)]
        return list(model.parameters()), losses

    plain, ours = run(False), run(True)
    assert plain[1] == ours[1]
    assert all(torch.equal(a, b) for a, b in zip(plain[0], ours[0], strict=True))


def test_a_later_case_that_sets_data_is_refused_and_the_job_goes_on(endpoint: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    moves = False

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if moves:
            model.weight.data = (model.weight.data * 0.5).t()
        return loss

    want = copy.deepcopy(model)
    theirs = torch.optim.SGD(want.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        theirs.zero_grad()
        F.cross_entropy(want(X), Y).backward()
        theirs.step()
    at = model.weight.data_ptr()
    with client.submit(step, example=(X, Y), model=model, optimizer=optimizer, endpoint=endpoint) as job:
        job.step(X, Y)
        moves = True
        for _ in range(2):
            with pytest.raises(errors.CaptureError, match=r"\.data of weight"):
                job.step(X, Y)
        moves = False
        job.step(X, Y)
        job.step(X, Y)
    assert model.weight.data_ptr() == at
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), want.parameters(), strict=True))


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1.0, error_if_nonfinite=True), "clip_grad_norm_"),
        (lambda m: torch.utils.data.random_split(m.weight, [m.weight.grad.sum(), 1]), "random_split"),
    ],
    ids=["a utility", "another"],
)
def test_the_function_of_torch_that_reads_a_value_is_named(
    call: Callable[[nn.Linear], Any], name: str, endpoint: str
) -> None:
    model = nn.Linear(6, 3)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        F.cross_entropy(model(x), y).backward()
        call(model)
        return x

    error = refusal(step, endpoint, errors.DataDependent, model=model)
    assert "test_refusals.py" in error.message
    assert name in error.message


def test_a_function_of_torch_that_reads_memory_itself_is_data_dependent(endpoint: str) -> None:
    error = refusal(lambda x, y: torch.tensor_split(x, y), endpoint, errors.DataDependent)
    assert "reads the values of a tensor" in error.message
    assert "custom" not in error.message, "torch's text is about compilers"


@pytest.mark.parametrize("around", [False, True], ids=["in the step", "around submit"])
def test_anomaly_mode_is_named(around: bool, endpoint: str) -> None:
    model, check = nn.Linear(6, 3), True

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with contextlib.nullcontext() if around else torch.autograd.detect_anomaly(check_nan=check):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
        return loss

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about anomaly mode
        with torch.autograd.set_detect_anomaly(True) if around else contextlib.nullcontext():
            error = refusal(step, endpoint, errors.DataDependent, model=model)
        assert "anomaly mode" in error.message
        assert line_of(step, "loss.backward()") in error.message
        assert "check_nan=False" in error.remedy
        if not around:
            check = False
            submit(step, endpoint, model=model)  # the remedy


class Counted(list[float]):
    """A list that is iterated over by another order, and counts how often."""

    times = 0

    def __iter__(self) -> Any:
        self.times += 1
        return reversed(self)


class Shut(dict[str, float]):
    def __iter__(self) -> Any:
        raise RuntimeError("not to be iterated over")

    keys = items = values = __iter__


def test_a_users_own_iteration_is_left_to_the_step(endpoint: str) -> None:
    model, counted, shut = nn.Linear(6, 3), Counted([2.0, 3.0]), Shut(a=5.0)
    times = counted.times

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return model(x) * counted[0] * shut["a"]

    with client.submit(step, example=(X, Y), model=model, endpoint=endpoint) as job:
        for factor in (2.0, 4.0):
            counted[0] = factor
            assert torch.equal(job.step(X, Y).result(), step(X, Y))
        shut["a"] = 7.0
        assert torch.equal(job.step(X, Y).result(), step(X, Y))
    assert counted.times == times


def test_an_iterator_of_the_users_that_counts(endpoint: str) -> None:
    """That `__next__` counts is known only once it has run: the first trace has counted already."""

    class Naturals:
        def __init__(self) -> None:
            self.n = 0

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> int:
            self.n += 1
            return self.n

    naturals = Naturals()
    with client.submit(lambda x, y: x * next(naturals), example=(X, Y), endpoint=endpoint) as job:
        for n in range(1, 4):
            assert torch.equal(job.step(X, Y).result(), X * n)
    assert naturals.n == 3


@pytest.mark.parametrize("remedy", ["put back", "submit again"])
@pytest.mark.parametrize("name", ["running_mean", "weight"])
def test_the_remedies_for_a_tensor_that_was_replaced_by_another_work(name: str, remedy: str, endpoint: str) -> None:
    model = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), y)

    def opened() -> client.Job:
        return client.submit(step, example=(X, Y), model=model, endpoint=endpoint)

    with opened() as job:
        job.step(X, Y).result()
        job.sync()
        old = getattr(model[1], name)
        new = torch.full_like(old, 0.5)
        setattr(model[1], name, nn.Parameter(new) if name == "weight" else new)
        with pytest.raises(errors.LocalWrite) as caught:
            job.step(X, Y)
        assert "another tensor than it had" in caught.value.remedy
        if remedy == "put back":
            setattr(model[1], name, old)
            job.step(X, Y).result()
            return
    with opened() as job:
        assert job.step(X, Y).result().isfinite()
        job.sync()
        assert getattr(model[1], name) is not old


@pytest.mark.parametrize("sets_data", [False, True])
@pytest.mark.parametrize("read", [lambda a: torch.from_numpy(a).sum(), lambda a: float(a[0])], ids=["tensor", "number"])
def test_an_array_over_a_weight_that_the_step_reads_is_named(
    read: Callable[[Any], Any], sets_data: bool, endpoint: str
) -> None:
    """It shows what the weight was when the script last fetched it."""
    model = nn.Linear(6, 3)
    arrays = {"bias": model.bias.detach().numpy()}

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = model(x).sum() * read(arrays["bias"])
        if sets_data:
            model.bias.data = 0.5 * model.bias.data
        return loss

    error = refusal(step, endpoint, errors.CaptureError, model=model)
    assert "arrays['bias'], a numpy array over the memory of bias" in error.message
    assert "clone" in error.remedy


def test_the_scale_of_a_scaler_is_compared_in_the_loop(endpoint: str) -> None:
    model, scaler = nn.Linear(6, 3), torch.amp.GradScaler("cpu")

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = scaler.scale(model(x).sum())
        found = loss * 2 if scaler.get_scale() > 1 else loss
        scaler.update(0.5)
        return found

    error = refusal(step, endpoint, errors.DataDependent, model=model)
    assert "GradScaler.get_scale reads a tensor's value" in error.message
    assert "in the loop" in error.remedy
    assert "before = scaler.get_scale()" in error.remedy


def test_a_sparse_matrix_met_in_the_step_is_refused_as_such(endpoint: str) -> None:
    model, adjacency = nn.Linear(4, 3), torch.eye(4).to_sparse()
    with pytest.raises(errors.CaptureError, match=r"uses `adjacency`, a tensor laid out as sparse_coo — keep it dense"):
        client.submit(
            lambda x: torch.sparse.mm(adjacency, model(x)), example=(torch.rand(4, 4),), model=model, endpoint=endpoint
        )


def test_an_action_read_in_the_step_is_to_be_chosen_in_the_loop(endpoint: str) -> None:
    model, taken = nn.Linear(4, 3), []

    def step(x: torch.Tensor) -> torch.Tensor:
        action = model(x).argmax()
        taken.append(action.item())
        return model(x).sum()

    with pytest.raises(errors.DataDependent, match="act in the loop, with the local model"):
        client.submit(step, example=(torch.rand(4),), model=model, endpoint=endpoint)
