"""A GradScaler inside a step: what the plain loop leaves out is left out in the daemon, in every bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpumux import client, errors
from gpumux.client.job import Job
from tests.client.between.support import DATA, Script, network, same
from tests.threads import one_thread

BIG = 1e38  # times the logits: the loss is finite, and scaled gradients overflow
OVERFLOWS = (0, 3, 4, 7)

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), 0.05),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), 0.05, momentum=0.9, dampening=0.1),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), 0.01),
    "amsgrad for each tensor": lambda m: torch.optim.Adam(m.parameters(), 0.01, amsgrad=True, foreach=False),
    "fused": lambda m: torch.optim.AdamW(m.parameters(), 0.01, fused=True),
    "radam": lambda m: torch.optim.RAdam(m.parameters(), 0.01),
    "nadam": lambda m: torch.optim.NAdam(m.parameters(), 0.01),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), 0.01, momentum=0.9),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), 0.01),
}


def scaled(model: Any, optimizer: Any) -> Callable[..., Any]:
    """The step of the AMP tutorial, with a third argument by which the logits are multiplied."""
    scaler = model.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=2)

    def step(x: Tensor, y: Tensor, boost: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x).float() * boost, y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss

    return step


def boost(i: int) -> Tensor:
    return torch.tensor(BIG if i in OVERFLOWS else 1.0)


HOW: dict[str, Any] = {"step": scaled, "example": (*DATA[0], boost(1))}


@pytest.mark.parametrize("optimize", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.every(6)
def test_steps_that_overflow_are_left_out_as_in_the_plain_loop(optimize: Any, endpoint: str) -> None:
    def script(one: Script) -> Any:
        losses = [one.step(*DATA[i], boost(i)) for i in range(12)]
        return [loss.item() for loss in losses], one.model.scaler.state_dict(), one.state()

    with one_thread():
        _, scaler, _ = same(script, endpoint, optimize=optimize, **HOW)
    assert scaler["scale"] == 2.0**14 / 2**4 * 2**4  # halved by each, doubled by each two good ones in a row


@pytest.mark.parametrize("optimize", [OPTIMIZERS["momentum"], OPTIMIZERS["adamw"]], ids=["momentum", "adamw"])
def test_what_is_read_after_each_step_is_what_the_plain_loop_has(optimize: Any, endpoint: str) -> None:
    def script(one: Script) -> Any:
        found = []
        for i in range(6):
            one.step(*DATA[i], boost(i))
            found.append((len(one.optimizer.state), one.model.scaler.get_scale(), one.state()))
        return found

    with one_thread():
        found = same(script, endpoint, optimize=optimize, **HOW)
    assert [states for states, _, _ in found[:2]] == [0, 6]  # the first step, left out, makes no state


def test_a_schedule_follows_only_where_the_scale_did_not_fall(endpoint: str) -> None:
    def script(one: Script) -> Any:
        schedule = torch.optim.lr_scheduler.ExponentialLR(one.optimizer, 0.5)
        scaler, rates = one.model.scaler, []
        for i in range(8):
            before = scaler.get_scale()
            one.step(*DATA[i], boost(i))
            if scaler.get_scale() >= before:
                schedule.step()
            rates.append(schedule.get_last_lr()[0])
        return rates

    with one_thread():
        rates = same(script, endpoint, optimize=OPTIMIZERS["adamw"], **HOW)
    assert len(set(rates)) == 8 - len(OVERFLOWS) + 1


def test_one_of_two_optimizers_is_left_out(endpoint: str) -> None:
    def run(submit: bool) -> Any:
        torch.manual_seed(3)
        models = [network(), network()]
        optimizers = [torch.optim.Adam(models[0].parameters(), 0.01), torch.optim.Adam(models[1].parameters(), 0.01)]
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)

        def step(x: Tensor, y: Tensor, first: Tensor, second: Tensor) -> list[Tensor]:
            losses = []
            for model, optimizer, factor in zip(models, optimizers, (first, second), strict=True):
                optimizer.zero_grad()
                losses.append(F.cross_entropy(model(x) * factor, y))
                scaler.scale(losses[-1]).backward()
                scaler.step(optimizer)
            scaler.update()
            return losses

        runs: Callable[..., Any] = step
        batches = [(*DATA[i], boost(i), boost(i - 1)) for i in range(9)]
        if submit:
            job = client.submit(step, example=batches[1], model=models, optimizer=optimizers, endpoint=endpoint)
            runs = job.step
        losses = [[loss.item() for loss in runs(*batch)] for batch in batches]
        left = [o.state_dict() for o in optimizers], [m.state_dict() for m in models], scaler.state_dict()
        if submit:
            job.close()
        return losses, left

    with one_thread():
        plain, ours = run(False), run(True)
    torch.testing.assert_close(ours, plain, rtol=0, atol=0)
    steps = [float(state["state"][0]["step"]) for state in plain[1][0]]
    assert steps == [5.0, 5.0]


def test_a_growth_interval_that_is_changed_between_steps_is_followed(endpoint: str) -> None:
    def script(one: Script) -> Any:
        for i in range(3):
            one.step(*DATA[i], torch.tensor(1.0))
        one.model.scaler.set_growth_interval(1)
        return [one.step(*DATA[i], torch.tensor(1.0)).item() for i in range(3)], one.model.scaler.get_scale()

    with one_thread():
        _, scale = same(script, endpoint, optimize=OPTIMIZERS["sgd"], **HOW)
    assert scale == 2.0**15  # it grew once, and torch's count has passed 1


def test_only_steps_whose_counters_the_client_keeps_wait_for_the_step_before(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[int] = []
    plain = Job._wait

    def wait(self: Job, predicate: Callable[[], bool], timeout: float | None, step: int | None = None) -> bool:
        waited.append(0 if step is None else step)
        return plain(self, predicate, timeout, step)

    monkeypatch.setattr(Job, "_wait", wait)
    found = {}
    for name in ("fused", "adamw"):
        torch.manual_seed(7)
        model = network()
        optimizer = OPTIMIZERS[name](model)
        with client.submit(
            scaled(model, optimizer), example=HOW["example"], model=model, optimizer=optimizer, endpoint=endpoint,
            max_inflight=8,
        ) as job:  # fmt: skip
            waited.clear()
            for i in range(4):
                job.step(*DATA[i], boost(1))
            found[name] = list(waited)
    assert found == {"fused": [], "adamw": [0, 1, 2]}


# ---- refused


def refusal(model: nn.Module, optimizer: Any, step: Callable[..., Any], endpoint: str) -> errors.CaptureError:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(errors.CaptureError) as caught:
        client.submit(step, example=DATA[0], model=model, optimizer=optimizer, endpoint=endpoint)
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    return caught.value


def test_a_scaler_that_is_not_updated_in_the_step_is_refused(endpoint: str) -> None:
    model = network()
    optimizer, scaler = OPTIMIZERS["sgd"](model), torch.amp.GradScaler("cpu")

    def step(x: Tensor, y: Tensor) -> None:
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        scaler.step(optimizer)

    assert "not update()" in refusal(model, optimizer, step, endpoint).message
    assert not scaler._per_optimizer_states


def test_an_optimizer_stepped_twice_is_refused(endpoint: str) -> None:
    model = network()
    optimizer, scaler = OPTIMIZERS["sgd"](model), torch.amp.GradScaler("cpu")

    def step(x: Tensor, y: Tensor) -> None:
        for _ in range(2):
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()

    assert "twice" in refusal(model, optimizer, step, endpoint).message


class Rebinding(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["last"] = p.detach().clone()


def test_an_optimizer_that_replaces_its_state_is_refused_at_its_second_phase(endpoint: str) -> None:
    model = network()
    optimizer, scaler = Rebinding(model.parameters(), 0.1), torch.amp.GradScaler("cpu")

    def step(x: Tensor, y: Tensor) -> None:
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()

    assert "puts other tensors into its state" in refusal(model, optimizer, step, endpoint).message
