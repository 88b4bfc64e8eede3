"""What a step made is free when the step is done: by reference counts alone, since executors collect no cycles between
steps."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gpumux.device.cpu.device import CpuDevice
from gpumux.device.cpu.jobs import OWN_BYTES
from gpumux.device.run.interpreter import Interpreter, outputs
from gpumux.program.ir import Op, Program, TensorRef
from tests.device.cpu.support import Bench, executors, fork_server
from tests.device.harness import Driver
from tests.program import samples

T = TensorRef


@pytest.fixture(autouse=True)
def without_collector() -> Iterator[None]:
    optimise = torch._C._get_graph_executor_optimize()
    torch._C._set_graph_executor_optimize(False)
    gc.collect()
    gc.disable()
    with torch.inference_mode():
        yield
    gc.enable()
    torch._C._set_graph_executor_optimize(optimise)


def several_outputs() -> Program:
    """input: float32[8, 4] -> the sum of parts, of a normalisation and of what a list of tensors holds."""
    d = samples._Draft()
    x = d.tensor("input", (8, 4), slot=0)
    weight = d.tensor("state", (4,), slot=0)
    normed, mean, scale = d.tensor("temp", (8, 4)), d.tensor("temp", (8, 1)), d.tensor("temp", (8, 1))
    d.ops.append(Op("aten.native_layer_norm.default", (T(x), (4,), T(weight), None, 1e-5), (), (normed, mean, scale)))
    doubled = (d.tensor("temp", (8, 4)), d.tensor("temp", (8, 1)))
    d.ops.append(Op("aten._foreach_add.Scalar", ((T(normed), T(mean)), 1.0), (), (doubled,)))
    total = d.tensor("temp", ())
    d.op("aten.sum.default", T(doubled[0]), out=total)
    return d.program(inputs=(x,), results=(total,))


def tensors_alive() -> int:
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def test_outputs_are_held_only_by_their_caller() -> None:
    op = several_outputs().ops[1]
    made = [torch.ones(3), torch.ones(2)]
    refs = [weakref.ref(tensor) for tensor in made]
    found = outputs(op, made)
    assert len(found) == 2
    assert all(tensor is original for (_, tensor), original in zip(found, made, strict=True))
    del made, found
    assert [ref() for ref in refs] == [None, None]


@pytest.mark.parametrize("cuts", [0, 1], ids=["operator by operator", "as graphs"])
def test_a_step_leaves_no_tensor_behind(cuts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    program = several_outputs()
    bench = Bench(program, [b"\0" * 16], [b"\1" * 128])
    bench.step(())  # makes what is made once
    if cuts:
        bench.cut((0, 2, len(program.ops)), monkeypatch)
        bench.step(())
    gc.collect()
    before = tensors_alive()
    for _ in range(3):
        bench.step(())
    assert tensors_alive() == before
    assert gc.collect() == 0


def test_what_dies_with_an_operator_is_free_when_the_next_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """An output that nothing names must not lie beside what the next operator makes."""
    bench = Bench(several_outputs(), [b"\0" * 16], [b"\1" * 128])
    returned: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []
    call = Interpreter._call

    def watched(*args: object) -> object:
        alive.append(any(ref() is not None for ref in returned[-1:]))
        made = call(*args)  # type: ignore[arg-type]
        returned.extend(weakref.ref(t) for t in (made[2:] if isinstance(made, tuple) else ()))
        return made

    monkeypatch.setattr(Interpreter, "_call", watched)
    bench.step(())
    assert returned
    assert alive == [False, False, False]


def wide(rows: int) -> Program:
    """input: float32[1] -> the sum of `rows` rows of it, by way of several temporaries of 256 KiB a row."""
    d = samples._Draft()
    x = d.tensor("input", (1,), slot=0)
    size = (rows, 65536)
    first, second, third, total = (
        d.tensor("temp", size),
        d.tensor("temp", size),
        d.tensor("temp", size),
        d.tensor("temp", ()),
    )
    d.op("aten.expand_copy.default", T(x), size, out=first)
    d.op("aten.exp.default", T(first), out=second)
    d.op("aten.add.Tensor", T(second), T(second), out=third)
    d.op("aten.sum.default", T(third), out=total)
    return d.program(inputs=(x,), results=(total,))


def test_batches_of_many_shapes_leave_nothing_of_each_other_behind(driver: Driver, device: CpuDevice) -> None:
    others = set(executors(device))
    job = driver.open()
    largest = 0
    for rows in (100, 120, 140, 160, 180):
        program = job.load(wide(rows))
        for _ in range(4):  # operator by operator, then as graphs
            job.step(program)
        largest = rows << 18
    (executor,) = set(executors(device)) - others
    before = resident(fork_server(device))
    # Two temporaries of the largest are alive at once; all that was made is 30 times as much.
    assert resident(executor) - before < 3 * largest + (96 << 20)


def test_the_device_says_what_a_step_took(driver: Driver, device: CpuDevice) -> None:
    job = driver.open()
    assert device.memory().measured[job.job] == 0
    rows = 256
    program = job.load(wide(rows))
    job.step(program)
    measured = device.memory().measured[job.job]
    # Two of the three temporaries are alive at once, and gone by now; the heap may or may not put the third in the
    # first's place.
    assert 1.9 * (rows << 18) <= measured <= 3.2 * (rows << 18)
    charged = device.memory().by_job[job.job]
    assert charged >= max(2 * (rows << 18), measured - OWN_BYTES)


def resident(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS:")), 0)
