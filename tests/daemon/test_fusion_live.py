"""Jobs that may be fused on the CPU device: their processes, the one that fuses, and the loop; clients in memory."""

from __future__ import annotations

import os
import select
import signal
import struct
from collections.abc import Iterator
from random import Random
from time import monotonic

import pytest
import torch

from gpumux.device.cpu.device import CpuDevice
from gpumux.fuse.proof import in_float64
from gpumux.program.ir import Program, slot_layout
from gpumux.scheduler import events as ev
from gpumux.scheduler.fusion.groups import FusionRules
from gpumux.types import JobId, JobSpec, SessionId
from gpumux.wire import messages as msg
from gpumux.wire import router as wire
from tests.daemon.fakes import Daemon
from tests.device.cpu.support import executors
from tests.program import samples

ROWS, COLUMNS = 8, 3
GIVE_UP_S = 120.0
# Groups as soon as may be, and none is judged by how quick it is: these steps take microseconds.
RULES = FusionRules(wait_s=0.05, gather_s=0.5, settle_s=0.5, retry_s=0.0, samples=1 << 20)


def program() -> Program:
    found = in_float64(samples.sgd_linear(ROWS, COLUMNS))
    assert found is not None
    return found


class RealTime(Daemon):
    """Fakes but for the device and the clock."""

    now = property(lambda self: monotonic(), lambda self, value: None)  # type: ignore[assignment]

    def turn(self) -> None:
        self.loop.turn()
        while self.router.arrivals:
            self.loop.turn()
        self.loop.scheduler.check_invariants()


class Line:
    """A client that fits a line, and what its losses have to be."""

    def __init__(self, daemon: Daemon, number: int) -> None:
        self.daemon, self.name, self.job = daemon, f"client {number}", JobId(f"{number + 1:032x}")
        self.random, self.rate = Random(number), 0.02 * (number + 1)
        self.weight = torch.zeros(COLUMNS, dtype=torch.float64)
        self.step_number, self.waits = 0, False
        self.expected = 0.0
        self.worst = 0.0

    def open(self) -> None:
        daemon = self.daemon
        daemon.connect(self.name)
        spec = JobSpec(self.name, fusible=True)
        daemon.loop.context.records.opening[SessionId(self.name), self.job] = (daemon.ref(), spec)
        daemon.loop.context.feed(ev.JobRequested(SessionId(self.name), self.job, spec))
        daemon.turn()
        daemon.load(self.name, self.job, program(), 0, [8 * COLUMNS], [0])

    @property
    def loaded(self) -> bool:
        found = self.daemon.loop.context.records.jobs[self.job].programs
        return bool(found) and all(each.announced for each in found.values())

    def step(self) -> None:
        x = [self.random.uniform(-1, 1) for _ in range(ROWS * COLUMNS)]
        y = [self.random.uniform(-1, 1) for _ in range(ROWS)]
        record = self.daemon.loop.context.records.jobs[self.job].programs[0]  # type: ignore[index]
        assert record.segment is not None
        layout, slot = slot_layout(program()), self.step_number % 2
        base = slot * layout.nbytes
        record.segment.write(base + layout.inputs[0], struct.pack(f"{len(x)}d", *x))
        record.segment.write(base + layout.inputs[1], struct.pack(f"{len(y)}d", *y))
        batch = torch.tensor(x, dtype=torch.float64).view(ROWS, COLUMNS)
        error = batch @ self.weight - torch.tensor(y, dtype=torch.float64)
        self.expected = float((error * error).mean())
        self.weight -= batch.T @ error * (2 / ROWS) * self.rate
        self.waits = True
        said = msg.Step(self.job, self.step_number, 0, slot, [self.rate], 0)
        self.daemon.router.arrivals.append(
            wire.Incoming(SessionId(self.name), self.daemon.router.open[SessionId(self.name)], said, [])
        )

    def answered(self) -> None:
        record = self.daemon.loop.context.records.jobs[self.job].programs[0]  # type: ignore[index]
        assert record.segment is not None
        layout = slot_layout(program())
        at = (self.step_number % 2) * layout.nbytes + layout.results[0]
        (loss,) = struct.unpack("d", record.segment.read(at, 8))
        self.worst = max(self.worst, abs(loss - self.expected) / abs(self.expected))
        self.step_number, self.waits = self.step_number + 1, False


class Clients:
    def __init__(self, count: int) -> None:
        self.device = CpuDevice(threads=1, cores=2, fuser="gpumux.fuse.equal:serve")
        info = self.device.open()
        self.daemon = RealTime(device=self.device, info=info, fusion_rules=RULES)  # type: ignore[arg-type]
        self.lines = [Line(self.daemon, number) for number in range(count)]
        self.ended: dict[str, str] = {}

    def open(self) -> None:
        for line in self.lines:
            line.open()
        self.until(lambda: all(line.loaded for line in self.lines))

    def until(self, done) -> None:
        """Turns of the loop as events come. Each client steps whenever it waits for nothing, but before `loaded`."""
        end = monotonic() + GIVE_UP_S
        while not done():
            assert monotonic() < end, [self.explain(line) for line in self.lines]
            select.select(self.device.filenos(), [], [], 0.05)
            self.daemon.turn()
            self.hear()

    def hear(self) -> None:
        sent, self.daemon.router.sent = self.daemon.router.sent, []
        for session, message, _ in sent:
            line = next(each for each in self.lines if each.name == session)
            if isinstance(message, msg.StepDone | msg.GroupStepDone):
                line.answered()
            elif isinstance(message, msg.JobEnded | msg.StepFailed):
                self.ended[session] = message.code
        self.daemon.router.read = 0

    def train(self, steps: int, lines: list[Line] | None = None) -> None:
        """So many further steps of each."""
        lines = self.lines if lines is None else lines
        goal = {line.name: line.step_number + steps for line in lines}

        def done() -> bool:
            left = [line for line in lines if line.step_number < goal[line.name]]
            for line in left:
                if not line.waits:
                    line.step()
            return not left

        self.until(done)

    def train_until_fused(self) -> None:
        for _ in range(200):
            self.train(4)
            if all("runs fused" in self.explain(line) for line in self.lines):
                return
        raise AssertionError([self.explain(line) for line in self.lines])

    def explain(self, line: Line) -> str:
        return self.daemon.loop.fusion.explain(line.job)

    def fused_steps(self) -> list[int]:
        return [self.daemon.loop.context.records.jobs[line.job].group_steps for line in self.lines]

    def close(self) -> None:
        self.daemon.close()


@pytest.fixture
def clients() -> Iterator[Clients]:
    made = Clients(3)
    try:
        made.open()
        yield made
    finally:
        made.close()


def test_jobs_of_separate_clients_train_as_one_within_1e_9(clients: Clients):
    clients.train_until_fused()
    clients.train(30)
    assert min(clients.fused_steps()) >= 20
    assert len(executors(clients.device)) == 4, "one a job, and the group's"
    leaver, *others = clients.lines
    clients.daemon.disconnect(leaver.name)
    clients.train(10, others)
    assert max(line.worst for line in clients.lines) <= 1e-9
    assert not clients.ended


@pytest.mark.extended
def test_a_member_whose_process_is_killed_costs_the_others_nothing(clients: Clients):
    clients.train_until_fused()
    clients.train(3)
    victim, *others = clients.lines
    os.kill(executors(clients.device)[0], signal.SIGKILL)  # the oldest is the first job's
    clients.until(lambda: victim.name in clients.ended)
    clients.train(10, others)
    assert max(line.worst for line in others) <= 1e-9
    assert set(clients.ended) == {victim.name}
