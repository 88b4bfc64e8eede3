"""Notes of a snapshot: they restore the state that was saved, and change nothing if they do not fit."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
import torch
from torch import nn

from gpumux.capture.state import StateTable, byte_view
from gpumux.capture.structure import State, from_local
from gpumux.client import snapshots
from gpumux.client.snapshots import Counts, SnapshotMetadata
from gpumux.errors import ConfigError
from gpumux.program.ir import aligned
from gpumux.types import GENERATOR_BYTES


def trained(seed: int, make: Any = torch.optim.Adam, steps: int = 2) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    optimizer = make(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 4)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def table_of(model: nn.Module, *optimizers: Any) -> StateTable:
    return StateTable([model], list(optimizers))


def kept(model: nn.Module, *optimizers: Any, resident: Any = None, change: Any = None) -> SnapshotMetadata:
    """A snapshot of the present state, as its reader gets it."""
    table = table_of(model, *optimizers)
    structure, host = from_local(table)
    state = State(structure, host, frozenset(i for i, _ in structure.kept))
    buffers = range(len(table.buffers)) if resident is None else resident(table)
    notes = snapshots.write(table, state, list(buffers), Counts(4, 9))
    if change is not None:
        body = msgpack.unpackb(notes, strict_map_key=False)
        change(body)
        notes = msgpack.packb(body)
    parts = []
    for b in buffers:
        data = torch.zeros(aligned(table.buffers[b].nbytes), dtype=torch.uint8)
        for storage, start in table.buffers[b].home:
            data[start : start + storage.nbytes()] = byte_view(storage)
        parts.append(data)
    parts += [torch.arange(GENERATOR_BYTES).to(torch.uint8), torch.frombuffer(bytearray(notes), dtype=torch.uint8)]
    return SnapshotMetadata(torch.cat(parts), len(notes))


def everything(model: nn.Module, optimizer: Any) -> list[Any]:
    state = [v for entry in optimizer.state_dict()["state"].values() for v in entry.values()]
    grads = [p.grad for p in model.parameters()]
    return [*model.state_dict().values(), *state, *grads, *optimizer.param_groups[0].items()]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)
    if isinstance(a, (tuple, list)) and a and isinstance(a[0], str):  # a hyperparameter; not the parameters themselves
        return a[0] == b[0] and (a[0] == "params" or a[1] == b[1])
    return type(a) is type(b) and a == b


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.RAdam, torch.optim.Adagrad, torch.optim.SGD])
def test_all_of_it_comes_back(make: Any):
    model, optimizer = trained(1, make)
    optimizer.param_groups[0]["lr"] = 0.025  # as a schedule leaves it
    found = kept(model, optimizer)
    assert (found.counts.main, found.counts.all) == (4, 9)
    assert found.generator == bytes(i % 256 for i in range(GENERATOR_BYTES))
    fresh, other = trained(2, make, steps=0)
    found.put_back(table_of(fresh, other))
    wanted, got = everything(model, optimizer), everything(fresh, other)
    assert len(wanted) == len(got)
    assert all(map(same, wanted, got))


def test_tied_weights_stay_tied():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    fresh = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    fresh[1].weight = fresh[0].weight
    kept(model).put_back(table_of(fresh))
    assert torch.equal(fresh[0].weight, model[0].weight)
    assert fresh[1].weight is fresh[0].weight


def test_what_no_step_touches_comes_with_the_notes_or_stays(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    model, _ = trained(1)
    fresh, _ = trained(2)
    kept(model, resident=lambda table: []).put_back(table_of(fresh))
    assert all(map(torch.equal, fresh.state_dict().values(), model.state_dict().values()))
    monkeypatch.setattr(snapshots, "MAX_INLINE", 20)
    other, _ = trained(3)
    before = other[0].weight.clone()
    kept(model, resident=lambda table: []).put_back(table_of(other))
    assert torch.equal(other[0].weight, before)
    assert "0.weight" in caplog.records[-1].getMessage()


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.zeros(2))


def test_another_model_is_refused_and_left_alone():
    model, optimizer = trained(1)
    found = kept(model, optimizer)
    for other in (Wide(), nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 5)), model.double()):
        before = [t.clone() for t in other.state_dict().values()]
        theirs = torch.optim.Adam(other.parameters())
        with pytest.raises(ConfigError, match="not the job that was kept"):
            found.put_back(table_of(other, theirs))
        assert all(map(torch.equal, before, other.state_dict().values()))
        assert not theirs.state
    fresh, _ = trained(2)
    with pytest.raises(ConfigError, match="1 optimizers"):
        found.put_back(table_of(fresh))


def a_place_beyond(body: Any) -> None:
    next(iter(body["tensors"].values()))[4] = 1 << 40


def a_negative_place(body: Any) -> None:
    next(iter(body["tensors"].values()))[4] = -1


def a_buffer_that_is_none(body: Any) -> None:
    next(iter(body["tensors"].values()))[0] = 99


def a_type_that_is_none(body: Any) -> None:
    next(iter(body["tensors"].values()))[1] = "load"


def state_of_no_parameter(body: Any) -> None:
    body["optimizers"][0][0][1] = 77


def no_tensors(body: Any) -> None:
    del body["tensors"]


@pytest.mark.parametrize(
    "change",
    [a_place_beyond, a_negative_place, a_buffer_that_is_none, a_type_that_is_none, state_of_no_parameter, no_tensors],
    ids=lambda change: change.__name__,
)
def test_notes_that_lie_are_refused_and_nothing_is_changed(change: Any):
    model, optimizer = trained(1)
    found = kept(model, optimizer, change=change)
    fresh, other = trained(2, steps=0)
    before = [t.clone() for t in fresh.state_dict().values()]
    with pytest.raises(ConfigError, match="not the job that was kept"):
        found.put_back(table_of(fresh, other))
    assert all(map(torch.equal, before, fresh.state_dict().values()))
    assert not other.state


def another_version(body: Any) -> None:
    body["version"] = 2


def sizes_beyond(body: Any) -> None:
    body["sizes"][-1] = 1 << 30


@pytest.mark.parametrize("change", [another_version, sizes_beyond], ids=lambda change: change.__name__)
def test_a_snapshot_that_is_none_is_refused(change: Any):
    model, optimizer = trained(1)
    with pytest.raises(ConfigError, match="kept snapshot"):
        kept(model, optimizer, change=change)


def test_bytes_that_are_no_notes_are_refused():
    for junk in (b"", b"\xc1", b"\x90", b"\x81\xa1x\x01"):
        data = torch.frombuffer(bytearray(bytes(GENERATOR_BYTES) + junk), dtype=torch.uint8)
        with pytest.raises(ConfigError, match="kept snapshot"):
            SnapshotMetadata(data, len(junk))
