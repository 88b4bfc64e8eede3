"""Support: the CPU device's case, its processes, and one program loaded in this process."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from gpumux.device.cpu import program as loaded
from gpumux.device.cpu.device import CpuDevice
from gpumux.device.cpu.program import LoadedProgram
from gpumux.device.run.graph import turn_off_optimisation
from gpumux.device.run.operands import allocate
from gpumux.program.ir import Program, slot_layout
from tests.device.harness import Case

SEED = 7
CASE = Case("cpu", wide=lambda: CpuDevice(threads=1, cores=2), narrow=lambda: CpuDevice(threads=1, cores=1))


def children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread of the imports' that has just ended
            found += map(int, (task / "children").read_text().split())
    return found


def fork_server(device: CpuDevice) -> int:
    assert device._fork_server is not None
    return device._fork_server.pid


def executors(device: CpuDevice) -> list[int]:
    """The processes that run jobs, by their names."""
    named = [(pid, Path(f"/proc/{pid}/comm").read_text().strip()) for pid in children(fork_server(device))]
    return [pid for pid, name in named if name == "gpumux-executor"]


@pytest.fixture(scope="module")
def as_in_an_executor() -> Iterator[None]:
    """What an executor process sets for itself, put back afterwards."""
    threads, optimise = torch.get_num_threads(), torch._C._get_graph_executor_optimize()
    turn_off_optimisation()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(threads)
    torch._C._set_graph_executor_optimize(optimise)


class Bench:
    """One program loaded in this process, with chosen cuts."""

    def __init__(self, program: Program, state: list[bytes], inputs: list[bytes]) -> None:
        self.program = program
        self.layout = slot_layout(program)
        self.memory = mmap.mmap(-1, self.layout.nbytes)
        self.buffers = []
        for data in state:
            buffer = allocate(len(data))
            if data:
                buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            self.buffers.append(buffer)
        for offset, data in zip(self.layout.inputs, inputs, strict=True):
            self.memory[offset : offset + len(data)] = data
        self.loaded = LoadedProgram(
            program, self.buffers, self.memory, 1, target_s=1.0, python_s=0.0, progress=lambda op: None
        )
        torch.default_generator.manual_seed(SEED)

    def cut(self, bounds: tuple[int, ...], monkey: pytest.MonkeyPatch) -> None:
        """Cut as graphs at `bounds` from now on."""
        monkey.setattr(loaded, "cut", lambda *args, **kwargs: bounds)
        self.loaded._cut([1e-6] * len(self.program.ops))

    def step(self, scalars: tuple[float | int, ...]) -> None:
        target = self.loaded
        for piece in range(len(target.bounds) - 1):
            target.run(0, target.newest, piece, 0, scalars)

    def outcome(self) -> tuple[bytes, ...]:
        return (self.memory[:], *(bytes(b.numpy().tobytes()) for b in self.buffers))
