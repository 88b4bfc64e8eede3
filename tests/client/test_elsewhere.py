"""Models on a GPU, tested without one: CPU tensors count as tensors of another device, which a trace must not use.
tests/gpu tests with a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpumux import client
from gpumux.capture import state as state_module
from gpumux.capture import tracer as trace_module
from gpumux.capture.gpu.devices import DeviceNames, Twins, names_of_devices
from gpumux.capture.state import StateTable
from gpumux.errors import CaptureError
from tests.client import parity
from tests.client.parity import Work, batches, simple_loop


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """All local tensors count as lying on a GPU."""
    monkeypatch.setattr(state_module, "elsewhere", lambda device: True)
    monkeypatch.setattr(StateTable, "gpu", True)


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(216, 10))


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-2, foreach=False),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_is_bit_equal_and_state_comes_home(apart: None, name: str, endpoint: str) -> None:
    """Two jobs one after the other, so that the second begins with optimizer state on the other device."""

    def make() -> Work:
        model = net()
        optimizer = OPTIMIZERS[name](model.parameters())
        flat = model[4].weight.data[:2]  # another reference to the model's memory
        data = batches((4, 1, 8, 8))

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            x, y = x.to("cuda", non_blocking=True), y.cuda()
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y) + 1e-3 * flat.pow(2).sum() + torch.zeros((), device="cuda:0")
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            return loss

        return Work([model], [optimizer], [(step, data[0])], simple_loop(data, 6))

    def without_names(make: Any) -> tuple[list[Any], list[Any]]:
        with DeviceNames(None, torch.device("cpu")):
            return parity.plain(make)

    want, want_states = without_names(make)
    got, got_states = parity.through(make, endpoint)
    parity.assert_same(want, got, "results")
    parity.assert_same(want_states, got_states, "state")


def test_a_trace_meets_none_of_the_local_memory_and_leaves_it_as_it_was(
    apart: None, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = batches((4, 1, 8, 8))[0]
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    local = {name: (t.data_ptr(), t.grad) for name, t in tensors.items()}
    momenta = {id(s["momentum_buffer"]) for s in optimizer.state.values()}
    traced: list[dict[str, int]] = []

    def look(*args: Any) -> Any:
        traced.append({name: t.data_ptr() for name, t in tensors.items()})
        return names_of_devices(*args)

    monkeypatch.setattr(trace_module, "names_of_devices", look)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    with client.submit(step, example=(x, y), model=model, optimizer=optimizer, endpoint=endpoint) as job:
        assert len(traced) >= 2
        for seen in traced:
            assert not set(seen.values()) & {address for address, _ in local.values()}
        assert local == {name: (t.data_ptr(), t.grad) for name, t in tensors.items()}
        assert {id(s["momentum_buffer"]) for s in optimizer.state.values()} == momenta
        stats = job.stats()
        job.step(x, y).result()
        job.sync()
    assert stats["exactness"] == "equivalent"
    assert "local model lies" in stats["because"][0]
    assert {id(s["momentum_buffer"]) for s in optimizer.state.values()} == momenta  # written in place


def test_twins_stand_in_for_views_of_one_memory_and_leave_when_a_trace_fails() -> None:
    flat = torch.arange(10.0)
    a, b = nn.Parameter(flat[:4]), nn.Parameter(flat[4:])
    a.grad = torch.ones(4)
    twins = Twins()
    with pytest.raises(ZeroDivisionError), twins.in_place_of([a, b]):  # noqa: PT012  what holds inside is the test
        assert a.untyped_storage()._cdata == b.untyped_storage()._cdata
        assert twins.real(a.untyped_storage()._cdata) == flat.untyped_storage()._cdata
        assert (b.storage_offset(), tuple(b.shape)) == (4, (6,))
        assert a.grad is None
        assert twins.of(a.data).untyped_storage()._cdata == a.untyped_storage()._cdata
        raise ZeroDivisionError
    assert a.data_ptr() == flat.data_ptr()
    assert torch.equal(b, flat[4:])
    assert torch.equal(a.grad, torch.ones(4))


def test_gpu_names_mean_the_jobs_device_wherever_torch_takes_one() -> None:
    here = torch.device("cpu")
    x = torch.ones(2)
    with DeviceNames(torch.device("cuda", 0), here):
        for made in (
            torch.zeros(3, device="cuda"), torch.arange(3, device=torch.device("cuda:0")), x.new_ones(2, device="cuda"),
            torch.tensor([1.0], device=0), x.to("cuda:0"), x.to(torch.device("cuda"), torch.float64),
            x.to(device="cuda"), x.cuda(), x.cuda(0), torch.empty_like(x, device="cuda"), x.to(x.device),
            x.to(torch.float16), x.to(x),
        ):  # fmt: skip
            assert made.device == here
        for other in (lambda: torch.zeros(3, device="cuda:1"), lambda: x.cuda(1), lambda: x.to("cuda:2")):
            with pytest.raises(CaptureError, match="lies on GPU 0"):
                other()
    with DeviceNames(None, here):  # the device of the plain run is unknown
        assert torch.zeros(3, device="cuda:3").device == here


def test_a_step_may_name_the_gpu_only_where_one_is_concerned(endpoint: str) -> None:
    """The plain run fails here, so the capture must, too."""
    with pytest.raises(CaptureError, match="CUDA"):
        client.submit(lambda x: x + torch.ones(3, device="cuda"), example=(torch.ones(3),), endpoint=endpoint)


def test_a_model_spread_over_devices_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fake:  # what the table reads of a tensor's device
        type, index = "cuda", 1

        def __str__(self) -> str:
            return "cuda:1"

    model = nn.Linear(2, 2)
    table = StateTable([model], [])
    monkeypatch.setattr(state_module, "elsewhere", lambda device: True)
    table.home = Fake()  # type: ignore[assignment]
    with pytest.raises(CaptureError, match="lies on cpu, and weight on cuda:1"):
        table._take("extra", torch.zeros(1), set(), False)
    with pytest.raises(CaptureError, match="when the job was submitted"):
        table.refresh()


def test_what_capturable_optimizers_ask_of_a_device_holds_while_tracing(apart: None, endpoint: str) -> None:
    """Their step counters are tensors on the device."""
    model = nn.Linear(8, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, capturable=True)
    x, y = batches((4, 8), classes=3)[0]

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    with client.submit(step, example=(x, y), model=model, optimizer=optimizer, endpoint=endpoint) as job:
        losses = [float(job.step(x, y)) for _ in range(4)]
        job.sync()
    assert losses == sorted(losses, reverse=True)
    assert all(float(s["step"]) == 4 for s in optimizer.state.values())


def test_tensors_of_no_model_are_read_written_and_followed(apart: None, endpoint: str) -> None:
    """Each is met by one trace, and has a twin in the next. One made at its first use is made anew in each step."""

    def make() -> Work:
        model, teacher = net(), net().eval()
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        average = [p.detach().clone() for p in model.parameters()]
        held = {"weights": torch.rand(10), "mean": torch.zeros(10)}
        data = batches((4, 1, 8, 8))

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            out = model(x)
            with torch.no_grad():
                wanted = teacher(x).softmax(-1)
            loss = F.cross_entropy(out, y, weight=held["weights"]) + (out.softmax(-1) - wanted).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            held["mean"] = 0.9 * held["mean"] + out.detach().mean(0)
            with torch.no_grad():
                for old, new in zip(average, model.parameters(), strict=True):
                    old.lerp_(new, 0.1)
            return loss

        def loop(step: Any) -> list[Any]:
            found = []
            for i in range(6):
                found.append(step(*data[i % len(data)]))
                if i == 1:
                    held["weights"].mul_(2.0)
                if i == 2:
                    teacher.load_state_dict(model.state_dict())
                if i == 3:
                    held["weights"] = torch.full((10,), 0.5)
            return [*found, held["mean"].clone(), *(one.clone() for one in average)]

        return Work([model], [optimizer], [(step, data[0])], loop)

    parity.check(make, endpoint)
