"""Inputs without a copy where that is safe, with one where it is not, and index values checked."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

import pytest
import torch

from gpumux.device.run.operands import Operands, allocate, allocate_state
from gpumux.errors import JobFailed, ProgramError
from gpumux.program.check import check
from gpumux.program.codec import encode
from gpumux.program.indices import index_checks
from gpumux.program.ir import Op, Program, TensorRef, slot_layout
from tests.program import samples

T = TensorRef


def operands(program: Program, slots: int = 2) -> tuple[Operands, mmap.mmap]:
    memory = mmap.mmap(-1, slot_layout(program).nbytes * slots)
    buffers = [allocate(s.nbytes) for s in program.storages if s.kind == "state"]
    return Operands(program, buffers, memory, slots), memory


def address(memory: mmap.mmap) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()


def test_a_plain_input_is_used_where_it_lies() -> None:
    program = samples.add_one()
    made, memory = operands(program)
    layout = slot_layout(program)
    for slot in (0, 1):
        view = made.slot(slot).views[program.inputs[0]]
        assert view is not None
        assert view.data_ptr() == address(memory) + slot * layout.nbytes + layout.inputs[0]
        assert made.slot(slot).copies == []
        assert made.slot(slot).results[0].data_ptr() == address(memory) + slot * layout.nbytes + layout.results[0]


def written_input() -> Program:
    d = samples._Draft()
    x = d.tensor("input", (4,), slot=0)
    d.op("aten.mul_.Scalar", T(x), 2.0, out=x)
    return d.program(inputs=(x,), results=(x,))


def embedding(rows: int = 5) -> Program:
    """input: int64[3] -> rows of the state, a table of float32[rows, 2]."""
    d = samples._Draft()
    table, index = d.tensor("state", (rows, 2), slot=0), d.tensor("input", (3,), "int64", slot=0)
    out = d.tensor("temp", (3, 2))
    d.op("aten.embedding.default", T(table), T(index), out=out)
    return d.program(inputs=(index,), results=(out,))


def nll(ignore_index: int = -100) -> Program:
    d = samples._Draft()
    scores, target = d.tensor("input", (2, 3), slot=0), d.tensor("input", (2,), "int64", slot=1)
    loss, weight = d.tensor("temp", ()), d.tensor("temp", ())
    d.ops.append(Op("aten.nll_loss_forward.default", (T(scores), T(target), None, 1, ignore_index), (), (loss, weight)))
    return d.program(inputs=(scores, target), results=(loss,))


def indexed() -> Program:
    d = samples._Draft()
    x, index = d.tensor("state", (4, 3), slot=0), d.tensor("input", (2,), "int64", slot=0)
    out = d.tensor("temp", (4, 2))
    d.op("aten.index.Tensor", T(x), (None, T(index)), out=out)
    return d.program(inputs=(index,), results=(out,))


@pytest.mark.parametrize("make", [written_input, embedding, nll, indexed, samples.crash_maxpool])
def test_what_is_written_or_holds_indices_is_copied(make) -> None:
    program = make()
    check(encode(program))
    made, memory = operands(program)
    storage = program.views[program.inputs[-1]].storage
    assert made.private_inputs == {storage}
    slot = made.slot(1)
    view = slot.views[program.inputs[-1]]
    assert view is not None
    low = address(memory)
    assert not low <= view.data_ptr() < low + len(memory)
    layout = slot_layout(program)
    at = layout.nbytes + layout.inputs[-1]
    memory[at : at + 16] = bytes([1] + [0] * 7) * 2
    made.begin(slot)
    assert view.contiguous().flatten()[:2].numpy().tobytes() == memory[at : at + 2 * view.dtype.itemsize]


@pytest.mark.parametrize(
    ("make", "position", "good", "bad", "bound"),
    [
        (embedding, 0, [0, 4, 2], [0, 5, 2], "0 to 4"),
        (embedding, 0, [0, 0, 0], [0, -1, 2], "0 to 4"),
        (nll, 1, [2, -100], [3, 0], "0 to 2"),
        (nll, 1, [0, 0], [0, -99], "0 to 2"),
        (indexed, 0, [-3, 2], [-4, 0], "-3 to 2"),
        (indexed, 0, [0, 0], [3, 0], "-3 to 2"),
        (samples.crash_maxpool, 2, [0, 15, 3, 4], [16, 0, 0, 0], "0 to 15"),
    ],
)
def test_an_index_out_of_range_names_input_value_and_bound(
    make, position: int, good: list[int], bad: list[int], bound: str
) -> None:
    program = make()
    made, memory = operands(program)
    at = slot_layout(program).inputs[position]

    def put(values: list[int]) -> None:
        memory[at : at + 8 * len(values)] = struct.pack(f"{len(values)}q", *values)

    put(good)
    made.begin(made.slot(0))
    put(bad)
    culprit = next(value for value in bad if value not in good)
    with pytest.raises(JobFailed, match=f"input {position} holds the index {culprit} .* takes {bound}"):
        made.begin(made.slot(0))


def test_indices_the_program_makes_itself_are_not_checked() -> None:
    assert index_checks(samples.crash_maxpool(derived=True), frozenset()).checks == ()


def test_a_slot_beyond_the_segment_is_refused() -> None:
    made, _ = operands(samples.add_one())
    for slot in (-1, 2):
        with pytest.raises(ProgramError, match="slot"):
            made.slot(slot)


def test_buffers_start_on_64_bytes() -> None:
    assert all(allocate(n).data_ptr() % 64 == 0 for n in (1, 63, 64, 4097, 1 << 20))


def test_state_buffers_are_zero_on_64_bytes_and_share_none() -> None:
    buffers = allocate_state([1, 0, 63, 64, 4097, 1 << 20])
    assert [b.numel() for b in buffers] == [1, 0, 63, 64, 4097, 1 << 20]
    assert all(b.data_ptr() % 64 == 0 and not b.any() for b in buffers)
    for value, buffer in enumerate(buffers, 1):
        buffer.fill_(value)
    assert all((b == value).all() for value, b in enumerate(buffers, 1))
    assert len({b.untyped_storage().data_ptr() for b in buffers if b.numel()}) == 5
    assert [b.numel() for b in allocate_state([0, 0])] == [0, 0]


def test_state_buffers_take_no_memory_before_they_are_written() -> None:
    def held() -> int:
        fields = Path("/proc/self/smaps_rollup").read_text().split()
        return int(fields[fields.index("Anonymous:") + 1]) << 10

    before = held()
    buffers = allocate_state([64 << 20, 64 << 20])
    assert held() - before < 16 << 20
    buffers[1].fill_(1)
    assert held() - before > 48 << 20


def test_a_buffer_too_small_for_its_slot_is_refused() -> None:
    program = samples.counter()
    with pytest.raises(ProgramError, match="2 bytes where the program needs 4"):
        Operands(program, [allocate(2)], mmap.mmap(-1, 4096), 1)
