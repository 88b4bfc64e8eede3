"""Jobs with equal Programs as one job of the device: the fused Program is made and proven by a process, and its steps
compute what the jobs' own do."""

from __future__ import annotations

import mmap
import os
import signal
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random

import pytest
import torch

from gpumux.device.base import FusedProgramMade, FusedProgramProven, FusedProgramRefused, Launch, ProgramRefused
from gpumux.device.cpu.device import CpuDevice
from gpumux.device.cpu.group import GroupSteps, StepFusion, unpack_fusion
from gpumux.device.cpu.program import LoadedProgram
from gpumux.errors import ProgramError
from gpumux.fuse.equal import StackedState, fuse_jobs
from gpumux.fuse.proof import in_float64
from gpumux.program.codec import decode, encode
from gpumux.program.ir import Program, ScalarRef, slot_layout
from gpumux.program.validate import state_slots
from gpumux.types import JobDied, LaunchId, ProgramId, ProgramReady, StepId
from tests.device.cpu.support import CASE, children, fork_server
from tests.device.harness import Driver, LoadedJob, SharedMemory
from tests.program import samples

ROWS, COLUMNS, SLOTS = 8, 3, 2
FUSED = ProgramId(1)
_numbers = count(1 << 20)


def program() -> Program:
    """One step of SGD on a line, in float64: state w[3], inputs x[8, 3] and y[8], a learning rate; the loss."""
    wide = in_float64(samples.sgd_linear(ROWS, COLUMNS))
    assert wide is not None
    return wide


@pytest.fixture(scope="module")
def device() -> Iterator[CpuDevice]:
    device = CpuDevice(threads=1, cores=2, fuser="gpumux.fuse.equal:serve")
    device.open()
    yield device
    device.close()


FusingAnswer = FusedProgramMade | FusedProgramProven | FusedProgramRefused


def answer(driver: Driver, request: int) -> FusingAnswer:
    found = driver.wait_for(lambda e: isinstance(e, FusingAnswer) and e.request == request)
    assert isinstance(found, FusingAnswer)
    return found


def make(driver: Driver, program: Program, jobs: int) -> tuple[int, FusedProgramMade]:
    request = next(_numbers)
    driver.device.make_fused(request, encode(program), jobs)  # type: ignore[attr-defined]
    made = answer(driver, request)
    assert isinstance(made, FusedProgramMade), made
    return request, made


def made_for(driver: Driver, jobs: int) -> FusedProgramMade:
    """A fused Program, left unproven: what is computed with it is compared anyway."""
    request, made = make(driver, program(), jobs)
    driver.device.drop_fused(request)  # type: ignore[attr-defined]
    return made


def prove(driver: Driver, request: int) -> None:
    driver.device.prove_fused(request)  # type: ignore[attr-defined]
    proven = answer(driver, request)
    assert isinstance(proven, FusedProgramProven), proven


@dataclass
class Batches:
    """A job's batches and learning rates, alike each time they are asked for."""

    seed: int

    def of(self, step: int) -> tuple[bytes, bytes, float]:
        random = Random(1000 * self.seed + step)
        x = [random.uniform(-1, 1) for _ in range(ROWS * COLUMNS)]
        y = [random.uniform(-1, 1) for _ in range(ROWS)]
        return struct.pack(f"{len(x)}d", *x), struct.pack(f"{ROWS}d", *y), 0.01 * (self.seed + 1) / (1 + step)


@dataclass
class Single:
    """A job by itself, and its loss at each step."""

    loaded: LoadedJob
    batches: Batches
    number: ProgramId
    losses: list[float] = field(default_factory=list)

    @property
    def slot(self) -> int:
        return len(self.losses) % SLOTS

    def fill(self) -> float:
        """Put the next batch into its slot. Returns the learning rate."""
        x, y, rate = self.batches.of(len(self.losses))
        self.loaded.put(self.number, 0, x, self.slot)
        self.loaded.put(self.number, 1, y, self.slot)
        return rate

    def read(self) -> None:
        (loss,) = struct.unpack("d", self.loaded.get(self.number, 0, 8, self.slot))
        self.losses.append(loss)

    def step(self) -> None:
        rate, slot = self.fill(), self.slot
        self.loaded.step(self.number, [rate], slot)
        self.read()

    def state(self) -> bytes:
        return self.loaded.transfer([0], [8 * COLUMNS])[: 8 * COLUMNS]

    def take(self, state: bytes) -> None:
        self.loaded.transfer([0], [8 * COLUMNS], state)


def single(driver: Driver, seed: int) -> Single:
    loaded = driver.open()
    return Single(loaded, Batches(seed), loaded.load(program(), [8 * COLUMNS], slots=SLOTS))


@dataclass
class Group:
    """Jobs in one group, as a daemon would run them."""

    driver: Driver
    jobs: Sequence[Single]
    loaded: LoadedJob
    scratch: SharedMemory

    def stack(self) -> None:
        for place, job in enumerate(self.jobs):
            self.loaded.transfer([1 + place], [8 * COLUMNS], job.state())

    def unstack(self) -> None:
        for place, job in enumerate(self.jobs):
            job.take(self.loaded.transfer([1 + place], [8 * COLUMNS])[: 8 * COLUMNS])

    def step(self) -> None:
        """A step of all."""
        given: list[float | int] = []
        for job in self.jobs:
            rate = job.fill()
            given += [job.slot, rate]
        self.loaded.step(FUSED, given)
        for job in self.jobs:
            job.read()

    def step_alone(self, place: int) -> None:
        """A step of one member on its part of the state."""
        job = self.jobs[place]
        rate, slot = job.fill(), job.slot
        self.loaded.step(member(place), [rate], slot)
        job.read()


def member(place: int) -> ProgramId:
    return ProgramId(2 + place)


def try_member(driver: Driver, group: LoadedJob, job: Single, place: int) -> ProgramReady | ProgramRefused:
    """Have a member's own Program checked and loaded."""
    encoded = encode(program())
    driver.device.check(group.job, member(place), encoded)
    driver.wait_for(lambda e: type(e).__name__ == "ProgramChecked" and getattr(e, "job", None) == group.job)
    data = job.loaded.data[job.number].segment
    driver.device.load_member(group.job, member(place), encoded, FUSED, place, data, SLOTS)  # type: ignore[attr-defined]
    return driver.until(ProgramReady | ProgramRefused, group.job)


def open_group(driver: Driver, made: FusedProgramMade, jobs: Sequence[Single], join: int | None = None) -> Group:
    """A group of these jobs, of which the first `join` have joined it; None: all."""
    loaded = driver.open()
    fused = decode(made.encoded)
    driver.device.check(loaded.job, FUSED, made.encoded)
    driver.wait_for(lambda e: type(e).__name__ == "ProgramChecked" and getattr(e, "job", None) == loaded.job)
    scratch = loaded.data[FUSED] = SharedMemory(slot_layout(fused).nbytes)
    loaded.programs[FUSED] = fused
    driver.device.load_fused(loaded.job, FUSED, made.encoded, made.fusion, made.state, scratch.segment)  # type: ignore[attr-defined]
    ready = driver.until(ProgramReady | ProgramRefused, loaded.job)
    assert isinstance(ready, ProgramReady), ready
    loaded.pieces[FUSED], loaded.cut[FUSED] = ready.pieces, 0
    for place, job in enumerate(jobs[:join]):
        ready = try_member(driver, loaded, job, place)
        assert isinstance(ready, ProgramReady), ready
        loaded.pieces[member(place)], loaded.cut[member(place)] = ready.pieces, 0
    return Group(driver, jobs, loaded, scratch)


# ---- What is shown


def test_a_fused_program_is_made_and_then_proven_by_a_process(driver: Driver):
    request, made = make(driver, program(), 3)
    assert made.state == tuple(3 * nbytes for nbytes in state_slots(program()))
    assert made.proof_bytes >= 3 * sum(made.state), "its state, three times"
    fusion = unpack_fusion(made.fusion)
    assert fusion.jobs == 3
    assert decode(made.encoded).ops
    prove(driver, request)


def test_steps_of_a_group_are_its_jobs_steps(driver: Driver):
    """Fused, alone on a part of the state, after unstacking, and in a second group."""
    made = made_for(driver, 3)
    alone, jobs = [single(driver, seed) for seed in range(3)], [single(driver, seed) for seed in range(3)]
    for job in (*alone, *jobs):
        job.take(struct.pack("3d", 0.1, 0.2 * job.batches.seed, -0.3))
        job.step()
    for _ in range(9):
        for job in alone:
            job.step()
    group = open_group(driver, made, jobs)
    group.stack()
    for _ in range(4):  # over the first cut of the fused Program's
        group.step()
    for place in (1, 2, 0):
        group.step_alone(place)
    group.step()
    group.unstack()
    driver.unload(group.loaded.job)
    for job in jobs:
        job.step()
    again = open_group(driver, made, jobs)
    again.stack()
    for _ in range(2):
        again.step()
    again.unstack()
    for mine, its in zip(jobs, alone, strict=True):
        assert mine.losses == pytest.approx(its.losses, rel=1e-9, abs=1e-12)
        assert struct.unpack("3d", mine.state()) == pytest.approx(struct.unpack("3d", its.state()), rel=1e-9)


def test_each_job_draws_from_the_generator_that_came_with_its_step_and_gets_it_back():
    found = samples.given_generator()
    group = fuse_jobs(found, 3)
    state, layout = StackedState(group), slot_layout(found)
    results = slice(layout.results[0], layout.nbytes)  # three masked tensors and the generator

    def load(program: Program, buffers: list[torch.Tensor]) -> tuple[LoadedProgram, mmap.mmap]:
        data = mmap.mmap(-1, slot_layout(program).nbytes)
        return LoadedProgram(program, buffers, data, 1, target_s=1.0, python_s=0.0, progress=lambda op: None), data

    whole, data = load(group.fused.program, state.lines)
    steps = GroupSteps(whole, data, group.layout.fusion)
    x, alone, members = torch.rand(64), [], []
    for place in range(3):
        program, memory = load(found, state.parts(place))
        batch = (x, torch.Generator().manual_seed(place).get_state())
        for _ in range(2):  # the step by itself leaves the generator's new state where the batch's was
            for offset, tensor in zip(layout.inputs, batch, strict=True):
                memory[offset : offset + tensor.nbytes] = tensor.numpy().tobytes()
            if len(alone) == place:
                program.run(0, 0, 0, 0, ())
                alone.append(memory[results])
                memory[results] = bytes(len(alone[place]))
        steps.join(place, program, memory)
        members.append(memory)
    assert len(set(alone)) == 3
    whole.run(0, 0, 0, 0, steps.begin([0, 0, 0]))
    steps.end()
    assert [memory[results] for memory in members] == alone


def test_the_same_steps_of_a_group_give_the_same_bits_again(driver: Driver):
    made = made_for(driver, 2)
    found = []
    for _ in range(2):
        jobs = [single(driver, seed) for seed in range(2)]
        group = open_group(driver, made, jobs)
        group.stack()
        for n in range(6):
            group.step()
            if n == 3:
                group.step_alone(1)
        group.unstack()
        found.append([(job.losses, job.state()) for job in jobs])
        driver.unload(group.loaded.job)
    assert found[0] == found[1]


def test_a_members_segment_and_state_are_charged_once(driver: Driver, device: CpuDevice):
    made = made_for(driver, 2)
    jobs = [single(driver, seed) for seed in range(2)]
    group = open_group(driver, made, jobs)
    held = device.memory().by_job[group.loaded.job]
    transient = max(device._jobs[group.loaded.job].transients.values())
    assert held == sum(made.state) + group.scratch.segment.nbytes + transient


@pytest.mark.parametrize(
    ("found", "jobs", "why"),
    [(samples.dropout(), 2, "draws random numbers"), (samples.sgd_linear(), 1, "is no group")],
)
def test_what_can_not_be_fused_is_refused_with_the_reason(driver: Driver, found: Program, jobs: int, why: str):
    request = next(_numbers)
    driver.device.make_fused(request, encode(found), jobs)  # type: ignore[attr-defined]
    refused = answer(driver, request)
    assert isinstance(refused, FusedProgramRefused)
    assert why in refused.fault.message
    assert refused.fault.remedy


def fusers(device: CpuDevice) -> list[int]:
    named = [(pid, Path(f"/proc/{pid}/comm").read_text().strip()) for pid in children(fork_server(device))]
    return [pid for pid, name in named if name == "gpumux-fuser"]


def test_a_process_that_dies_refuses_its_request_alone(driver: Driver, device: CpuDevice):
    first, _ = make(driver, program(), 2)
    second = next(_numbers)
    device.make_fused(second, encode(program()), 2)
    (pid,) = fusers(device)  # the second one waits for its turn
    os.kill(pid, signal.SIGKILL)
    refused = answer(driver, first)
    assert isinstance(refused, FusedProgramRefused)
    assert "SIGKILL" in refused.fault.message
    assert isinstance(answer(driver, second), FusedProgramMade)
    prove(driver, second)


def test_a_dropped_request_makes_room_for_the_next(driver: Driver, device: CpuDevice):
    first, _ = make(driver, program(), 2)
    second, third = next(_numbers), next(_numbers)
    device.make_fused(second, encode(program()), 2)
    device.make_fused(third, encode(program()), 2)
    device.drop_fused(second)
    device.drop_fused(first)
    device.drop_fused(first)
    assert isinstance(answer(driver, third), FusedProgramMade)
    prove(driver, third)


def test_without_what_fuses_nothing_is_fused():
    device = CpuDevice(threads=1, cores=2)
    device.open()
    try:
        device.make_fused(1, encode(program()), 2)
        refused = answer(Driver(CASE, device), 1)
        assert isinstance(refused, FusedProgramRefused)
    finally:
        device.close()


def test_a_group_that_is_not_complete_or_not_one_fails_and_says_so(driver: Driver):
    made = made_for(driver, 2)
    jobs = [single(driver, seed) for seed in range(2)]
    group = open_group(driver, made, jobs, join=1)
    for place in (0, 2):
        refused = try_member(driver, group.loaded, jobs[1], place)
        assert isinstance(refused, ProgramRefused)
    launch = Launch(LaunchId(next(_numbers)), group.loaded.job, StepId(0), FUSED, 0, 0, 0, (0, 0.1, 0, 0.1), 0)
    driver.device.launch(launch)
    assert "1 of 2 jobs" in driver.failed(launch.launch).fault.message
    lost = driver.wait_for(lambda e: isinstance(e, JobDied) and e.job == group.loaded.job)
    assert isinstance(lost, JobDied)
    jobs[0].step()


def test_a_description_of_a_fused_step_keeps_its_numbers():
    fusion = StepFusion(2, ((0, 1), (1, 0)), (((ScalarRef(0), ScalarRef(0)), (0.5, 3)),))
    assert unpack_fusion(fusion.packed()) == fusion
    for broken in (b"", b"\xc1", b"\x93\x01\x02\x03"):
        with pytest.raises(ProgramError):
            unpack_fusion(broken)
