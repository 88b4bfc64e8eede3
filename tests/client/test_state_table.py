"""The buffers of a StateTable, and the changes that a fingerprint finds."""

from __future__ import annotations

import sys
import threading
import types

import pytest
import torch
from torch import nn

from gpumux.capture.fetching import search, without_fetching
from gpumux.capture.state import StateTable
from gpumux.capture.watch.fingerprint import Fingerprint
from gpumux.errors import CaptureError, NotRepeatable


def test_tied_weights_are_one_buffer() -> None:
    a, b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    b.weight = a.weight
    table = StateTable([nn.Sequential(a, b)], [])
    assert [buffer.nbytes for buffer in table.buffers] == [64]


def test_storages_that_overlap_in_memory_are_one_buffer() -> None:
    backing = bytearray(64)
    first = torch.frombuffer(backing, dtype=torch.float32, count=8)
    second = torch.frombuffer(backing, dtype=torch.float32, count=8, offset=16)
    assert first.untyped_storage()._cdata != second.untyped_storage()._cdata
    module = nn.Module()
    module.register_buffer("first", first)
    module.register_buffer("second", second)
    table = StateTable([module], [])
    assert len(table.buffers) == 1
    assert table.buffers[0].nbytes == 48
    one, two = table.place(first), table.place(second)
    assert one is not None
    assert two is not None
    assert (one.offset, two.offset) == (0, 4)


def test_views_of_one_storage_keep_their_offsets() -> None:
    flat = torch.zeros(10)
    module = nn.Module()
    module.a, module.b = nn.Parameter(flat[:4]), nn.Parameter(flat[4:])
    table = StateTable([module], [])
    place = table.place(module.b)
    assert place is not None
    assert (place.buffer, place.offset, place.size) == (0, 4, (6,))
    assert table.lookup(torch.zeros(3)) is None


def test_an_optimizers_own_parameters_are_state() -> None:
    extra = nn.Parameter(torch.zeros(3))
    table = StateTable([], [torch.optim.SGD([extra], lr=0.1)])
    assert table.param_names == ["optimizer0.group0.param0"]
    assert table.place(extra) is not None


def test_a_parameter_on_another_device_is_named() -> None:
    with pytest.raises(CaptureError, match=r"weight is a .* tensor on meta"):
        StateTable([nn.Linear(2, 2, device="meta")], [])


def test_a_new_tensor_at_a_known_path_takes_over_its_buffer() -> None:
    table = StateTable([], [])
    old, new = torch.zeros(4), torch.ones(4)
    place = table.adopt((0, "m"), "m", old)
    assert table.adopt((0, "m"), "m", new) == place
    assert len(table.buffers) == 1
    assert table.local(place) is new
    assert table.lookup(old) is None


GLOBAL = 1


def helper(x: float) -> float:
    return x * GLOBAL


def prints(fn: object, model: nn.Module) -> Fingerprint:
    return Fingerprint(fn, [model], [], list(model.parameters()))


def test_a_fingerprint_sees_closures_globals_helpers_modules_and_configurations() -> None:
    global GLOBAL
    model = nn.Sequential(nn.Dropout(0.1), nn.Linear(2, 2))
    scale, config = 2.0, types.SimpleNamespace(depth=3)

    def step(x: float) -> float:
        return helper(x) * scale * config.depth

    made = prints(step, model)
    before = made.read()
    assert made.read() == before
    seen = []

    def changed() -> None:
        seen.append([c.name for c in made.changes(before)])
        for c in made.changes(before):
            c.restore()
        assert made.read() == before

    GLOBAL = 2
    changed()
    scale = 3.0
    changed()
    config.depth = 4
    changed()
    model.eval()
    changed()
    model[0].p = 0.5
    changed()
    model[1].weight.requires_grad_(False)
    changed()
    assert GLOBAL == 1
    assert seen == [
        ["GLOBAL"], ["scale"], ["config.depth"], ["model.training", "model.0.training", "model.1.training"],
        ["model.0.p"], ["requires_grad"],
    ]  # fmt: skip


def test_a_name_that_goes_away_is_an_error() -> None:
    model = nn.Linear(2, 2)
    model.mode = "a"
    made = prints(lambda x: model(x), model)
    del model.mode
    with pytest.raises(NotRepeatable, match="mode"):
        made.read()


def test_looking_for_tensors_disturbs_no_other_thread() -> None:
    """A tuple that a thread is filling must have no second reference when it is complete."""
    failed: list[SystemError] = []
    over = threading.Event()

    def fill() -> None:
        while not over.is_set():
            try:
                tuple(x for x in [None] * 30)
            except SystemError as error:
                failed.append(error)

    weight = torch.ones(3)
    view = weight[1:]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=fill)
    try:
        thread.start()
        with without_fetching():
            for _ in range(20):
                found = search({weight.untyped_storage()._cdata})
    finally:
        over.set()
        thread.join()
        sys.setswitchinterval(before)
    assert not failed
    assert {id(tensor) for tensor, _ in found} == {id(weight), id(view)}
