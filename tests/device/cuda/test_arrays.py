"""Arrays of models as one job of a daemon with a GPU (of host memory): traced with a GPU's operators, fused, captured,
and each model's draws from a generator of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from clients.models.workloads import RECIPES, workload
from gpumux import client, fuse
from gpumux.device.run import gpu_operators
from gpumux.errors import ConfigError, JobFailed, NotFusible
from gpumux.fuse import array as arrays
from gpumux.fuse import rules
from microbench import fusing
from tests.device.cuda.serving import serving
from tests.fuse.serial import Config, batches, configs, relative_difference, sgd, training

pytestmark = pytest.mark.usefixtures("one_thread")

SEEDS = [2**64 - 1, 0, 29]
STEPS = 12  # through the first step, the timed ones and the captured ones
DATA = batches(6, 5, count=STEPS)


@pytest.fixture(autouse=True)
def draws() -> Iterator[None]:
    with torch.random.fork_rng():
        yield


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 4), nn.Dropout(0.1))


def adam(parameters: Any, config: Config) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=config.lr)


def made(endpoint: str, factory: Any, given: list[Config] | None = None, **options: Any) -> fuse.ArrayJob:
    options = {"seeds": SEEDS, "example": DATA[0], **options}
    return client.submit_array(factory, given or configs(), endpoint=endpoint, **options)


def alone(factory: Any, config: Config, seed: int, data: Any) -> tuple[list[torch.Tensor], nn.Module, Any]:
    """The plain loop, whose generator begins where the model's own does: what the GPU of host memory draws is what the
    CPU does."""
    step, model, optimizer = factory(config)
    torch.manual_seed(seed)
    return [step(*batch).detach() for batch in data], model, optimizer


@pytest.mark.parametrize("optimizer", [pytest.param(adam, marks=pytest.mark.extended), sgd])
def test_models_that_draw_train_as_each_does_alone(optimizer: Any, endpoint: str) -> None:
    factory = training(dropping, optimizer)
    with made(endpoint, factory) as array:
        losses = [array.step(*batch).result() for batch in DATA]
        assert {d.why for d in array.plan().rows if d.target == "aten.native_dropout.default"} == {
            "it draws random numbers, each model from its own stream"
        }
        for b, config in enumerate(configs()):
            want, model, _ = alone(factory, config, SEEDS[b], DATA)
            for mine, theirs in zip(losses, want, strict=True):
                assert relative_difference(mine[b], theirs) < 1e-9
            found = array.state_dict(b)["model"]
            for key, value in model.state_dict().items():
                assert relative_difference(found[key], value) < 1e-9


@pytest.mark.extended
def test_a_model_that_draws_later_than_the_others_begins_at_its_seed(endpoint: str) -> None:
    """Its generator begins from what lies in the buffer with the others' when a program comes in which it draws."""

    def factory(config: Config) -> Any:
        torch.manual_seed(config.seed)
        model = nn.Linear(5, 4).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=config.lr)

        def step(x: torch.Tensor, noisy: bool) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x + torch.randn_like(x) if noisy or config.seed == 1 else x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        return step, model, optimizer

    data = [(x, i >= 2) for i, (x,) in enumerate(DATA[:4])]
    with made(endpoint, factory, example=data[0], partial=True) as array:
        losses = [array.step(*batch).result() for batch in data]
    for b, config in enumerate(configs()):
        for mine, theirs in zip(losses, alone(factory, config, SEEDS[b], data)[0], strict=True):
            assert relative_difference(mine[b], theirs) < 1e-9


@pytest.mark.extended
def test_arrays_and_jobs_at_the_same_time_draw_each_by_itself(endpoint: str) -> None:
    factory = training(dropping)
    step, model, optimizer = factory(configs()[0])
    with ExitStack() as stack:
        given: list[dict[str, Any]] = [{"priority": "high"}, {"seeds": [5, 6, 7]}]
        first, other = (
            stack.enter_context(made(endpoint, factory, name=f"array {i}", **o)) for i, o in enumerate(given)
        )
        options: dict[str, Any] = {"model": model, "optimizer": optimizer, "endpoint": endpoint, "seed": SEEDS[0]}
        job = stack.enter_context(client.submit(step, example=DATA[0], **options))
        losses = [(first.step(*b).result(), other.step(*b).result(), job.step(*b).result()) for b in DATA]
        futures = [(first.step(*b), other.step(*b), job.step(*b)) for b in DATA]
        losses += [tuple(f.result() for f in each) for each in futures]
    for b, config in enumerate(configs()):
        for which, seed in enumerate((SEEDS[b], 5 + b)):
            for found, want in zip(losses, alone(factory, config, seed, DATA * 2)[0], strict=True):
                assert relative_difference(found[which][b], want) < 1e-9
                assert b or which or relative_difference(found[2], want) < 1e-9


def test_without_seeds_each_model_has_draws_of_its_own_and_has_them_again(endpoint: str) -> None:
    """The factory seeds torch, so that the generator stands at another state for each model."""

    def drawn() -> torch.Tensor:
        with made(endpoint, training(dropping), seeds=None) as array:
            states = [array.random_state(b) for b in range(3)]
            assert {state.numel() for state in states} == {16}
            assert len({bytes(state.tolist()) for state in states}) == 3
            array.step(*DATA[0]).result()
            assert not torch.equal(array.random_state(1), states[1])
            return array.step(*DATA[1]).result()

    assert torch.equal(drawn(), drawn())


class Attention(nn.Module):
    """Self-attention with a mask, or with dropout: a GPU runs it by one kernel in float32."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.project, self.dropout = nn.Linear(8, 48), dropout
        self.register_buffer("mask", torch.arange(25.0).reshape(5, 5).cos())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.project(x.float()).chunk(3, -1))
        mask = None if self.dropout else self.mask
        return F.scaled_dot_product_attention(q, k, v, mask, dropout_p=self.dropout).transpose(1, 2).flatten(2)


def attending(dropout: float) -> Any:
    def factory(config: Config) -> Any:
        torch.manual_seed(config.seed)
        model = Attention(dropout)
        optimizer = torch.optim.SGD(model.parameters(), lr=config.lr)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(x) * model(x).detach().cos()).sum()
            loss.backward()
            optimizer.step()
            return loss

        return step, model, optimizer

    return factory


FORWARD = "aten._scaled_dot_product_efficient_attention.default"
BACKWARD = "aten._scaled_dot_product_efficient_attention_backward.default"


@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_attention_as_a_gpu_runs_it(dropout: float, endpoint: str) -> None:
    data = batches(3, 5, 8, count=STEPS)
    factory = attending(dropout)
    with made(endpoint, factory, example=data[0]) as array:
        losses = [array.step(*batch).result() for batch in data]
        how = {d.target: d.how for d in array.plan().rows}
        assert how[FORWARD] == how[BACKWARD] == ("per-model" if dropout else "fused")
        program = array.programs[0]
        masks = [op.args[3] for op in program.ops if op.target == FORWARD]
        for mask in masks if not dropout else []:
            assert program.views[mask.view].stride[-2] % 4 == 0, "the kernel takes rows that begin at 16 bytes"
    for b, config in enumerate(configs()):
        with made(endpoint, factory, [config], seeds=[SEEDS[b]], example=data[0]) as one:
            for batch, want in zip(data, losses, strict=True):
                # In float32, and the loss is a small sum of large terms: 4e-5 on an AMD EPYC.
                assert relative_difference(one.step(*batch).result()[0], want[b]) < 1e-4


@pytest.mark.extended
@pytest.mark.parametrize("name", RECIPES)
def test_a_workload_trains_each_model_as_an_array_of_it_alone_does(name: str, endpoint: str) -> None:
    """HFTA's workloads with their dropout, convolutions, norms and losses."""
    work = workload(name, dtype=torch.float64)
    given = [config | {"foreach": True} for config in work.configs(2)]
    options = {"example": work.batch(0), "endpoint": endpoint}
    with client.submit_array(work.factory, given, seeds=SEEDS[:2], **options) as array:
        losses = [array.step(*work.batch(i)).result() for i in range(6)]
    for b, config in enumerate(given):
        with client.submit_array(work.factory, [config], seeds=[SEEDS[b]], **options) as one:
            for i, want in enumerate(losses):
                assert relative_difference(one.step(*work.batch(i)).result()[0], want[b]) < 1e-9


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.LSTM(5, 7, batch_first=True), nn.Linear(7, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x[:, None])[0][:, 0])


def test_operators_that_only_a_gpu_has_run_once_a_model_if_that_is_asked_for(endpoint: str) -> None:
    """A fused step could not be verified in this process."""
    factory = training(Recurrent)
    with pytest.raises(NotFusible, match=r'no kernel for aten._cudnn_rnn.default.* choose="per-model"'):
        made(endpoint, factory)
    with made(endpoint, factory, choose="per-model") as array:
        losses = [array.step(*batch).result() for batch in DATA]
    for b, config in enumerate(configs()):
        want, _, _ = alone(factory, config, SEEDS[b], DATA)
        for mine, theirs in zip(losses, want, strict=True):
            assert relative_difference(mine[b], theirs) < 1e-9


def test_a_wrong_backward_of_attention_is_seen_before_anything_trains(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proof runs a GPU's operators on the CPU, and tells one model from another."""
    rule = rules.RULES[BACKWARD]

    def swapped(call: Any) -> Any:
        return tuple(None if tensor is None else tensor.flip(0) for tensor in rule(call))

    monkeypatch.setitem(rules.RULES, BACKWARD, swapped)
    with pytest.raises(NotFusible, match="comes out otherwise"):
        made(endpoint, attending(0.0), example=batches(3, 5, 8)[0])


def test_state_and_draws_go_in_and_out(endpoint: str, tmp_path: Path) -> None:
    with made(endpoint, training(dropping, adam)) as array:
        for batch in DATA[:8]:
            array.step(*batch)
        array.save(tmp_path / "all.pt")
        expected = [array.step(*batch).result() for batch in DATA[8:]]
        array.restore(tmp_path / "all.pt")
        assert all(torch.equal(array.step(*b).result(), want) for b, want in zip(DATA[8:], expected, strict=True)), (
            "captured steps draw from the state that was restored"
        )
        for wrong in (torch.get_rng_state(), torch.full((16,), 3, dtype=torch.uint8), torch.zeros(16), "no state"):
            with pytest.raises(ConfigError, match=r'no state of a random generator.* torch.Generator\(device="cuda"\)'):
                array.set_random_state(0, wrong)  # type: ignore[arg-type]


def test_models_join_and_leave_and_the_others_draw_on(endpoint: str) -> None:
    factory = training(dropping)
    with made(endpoint, factory) as array:
        for i, batch in enumerate(DATA):
            if i == 4:
                array.add(Config(9, 0.03), seed=77)
            if i == 8:
                left = array.remove(1)
            array.step(*batch).result()
        found = [array.state_dict(0), left, array.state_dict(1), array.state_dict(2)]
    for config, seed, data, state in zip(
        [*configs(), Config(9, 0.03)], [*SEEDS, 77], [DATA, DATA[:8], DATA, DATA[4:]], found, strict=True
    ):
        _, model, _ = alone(factory, config, seed, data)
        for key, value in model.state_dict().items():
            assert relative_difference(state["model"][key], value) < 1e-9


@pytest.mark.extended
def test_an_array_that_was_kept_draws_on() -> None:
    factory = training(dropping, adam)
    with serving(keeps=True) as (endpoint, _):
        with made(endpoint, factory) as undisturbed:
            want = [undisturbed.step(*batch).result() for batch in DATA]
        array = made(endpoint, factory, name="kept")
        got = [array.step(*batch).result() for batch in DATA[:7]]
        array.close(keep=True)
        with made(endpoint, factory, resume="kept", seeds=[1, 2, 3]) as again:
            assert again.resumed_steps == 7
            got += [again.step(*batch).result() for batch in DATA[7:]]
    for mine, theirs in zip(got, want, strict=True):
        assert torch.equal(mine, theirs)


def test_bytes_that_are_no_generators_state_end_the_job(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays.arguments, "check_random_state", lambda state, gpu: None)
    array = made(endpoint, training(dropping))
    array.step(*DATA[0]).result()
    with pytest.raises(JobFailed, match="no state of a generator of this GPU"):
        array.set_random_state(0, torch.full((16,), 3, dtype=torch.uint8))
    array.close(sync=False)


def test_times_of_this_process_choose_nothing_for_a_gpu(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="times operators in this process"):
        made(endpoint, training(dropping), choose="measured")


def test_the_benchmark_trains_the_array_on_the_gpu(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusing, "running_daemon", lambda device: nullcontext(SimpleNamespace(endpoint=endpoint)))
    work = workload("cnn", device="cuda")
    with ExitStack() as stack:
        train = fusing.opened(fusing.OURS, work, work.configs(2), stack)
        assert [train(index).result().shape for index in range(3)] == [(2,)] * 3


# ---- What the proof computes in place of a GPU's kernels.


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_of_the_proof_is_what_autograd_makes_of_its_formula(causal: bool, masked: bool) -> None:
    draw = torch.Generator().manual_seed(3)
    q, k, v, grad = (torch.randn(2, 3, 5, 4, generator=draw, dtype=torch.float64) for _ in range(4))
    bias = torch.randn(2, 3, 5, 5, generator=draw, dtype=torch.float64) if masked else None
    leaves = [t.requires_grad_() for t in (q, k, v, *([] if bias is None else [bias]))]
    mask = bias
    if causal:
        hidden = torch.ones(5, 5, dtype=torch.bool).tril().logical_not()
        mask = torch.zeros(5, 5, dtype=torch.float64).masked_fill(hidden, float("-inf")) + (0 if bias is None else bias)
    want = F.scaled_dot_product_attention(q, k, v, mask)
    wanted = torch.autograd.grad(want, leaves, grad)
    with torch.no_grad():
        out, sums, seed, offset = gpu_operators.efficient_attention(q, k, v, bias, True, 0.0, causal)
        made = gpu_operators.efficient_attention_backward(
            grad, q, k, v, bias, out, sums, seed, offset, 0.0, [True, True, True, masked], causal
        )
    assert sums.shape == (2, 3, 32)
    torch.testing.assert_close(out, want)
    for mine, theirs in zip(made, wanted, strict=False):
        torch.testing.assert_close(mine, theirs)


def test_attention_of_the_proof_drops_in_its_backward_what_it_dropped() -> None:
    draw = torch.Generator().manual_seed(3)
    q, k, v, grad = (torch.randn(1, 2, 6, 4, generator=draw, dtype=torch.float64) for _ in range(4))
    out, sums, seed, offset = gpu_operators.efficient_attention(q, k, v, None, True, 0.5)

    def again(*leaves: torch.Tensor) -> torch.Tensor:
        weights = (leaves[0] @ leaves[1].transpose(-2, -1) / 2).softmax(-1)
        return weights * gpu_operators._kept(weights, seed, 0.5) @ leaves[2]

    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    torch.testing.assert_close(again(*leaves), out)
    made = gpu_operators.efficient_attention_backward(
        grad, q, k, v, None, out, sums, seed, offset, 0.5, [True, True, True, False]
    )
    for mine, theirs in zip(made, torch.autograd.grad(again(*leaves), leaves, grad), strict=False):
        torch.testing.assert_close(mine, theirs)
