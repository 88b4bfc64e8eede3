"""Jobs that may be fused, over a device in memory on a virtual clock: their steps run as one, and each learns what it
would alone, whichever of them straggles, is read, is paused or dies."""

from __future__ import annotations

import os
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from random import Random

import pytest

from gpumux.config import Config
from gpumux.device import base as dev
from gpumux.fuse.equal import FusedJobs, fuse_jobs
from gpumux.program import codec
from gpumux.program.ir import Program, ProgramBuilder, TensorRef, slot_layout
from gpumux.scheduler.fusion.groups import MEASURED_ALONE, FusionRules, RunAlone, WaitOver
from gpumux.types import (
    Fault,
    Footprint,
    JobDied,
    JobId,
    JobReleased,
    PieceDone,
    PieceFailed,
    Priority,
    ProgramId,
    ProgramReady,
    SessionId,
    TransferEnded,
)
from gpumux.wire import messages as msg
from gpumux.wire import router as wire
from gpumux.wire.shared_memory import Segment
from tests.daemon.fakes import INFO, Daemon, FakeDevice, FakeWriter

RULES = FusionRules()
RESTLESS = FusionRules(settle_s=0.001, retry_s=0.0)  # groups end as soon as a larger one is possible
BROKEN = Fault("executor_crashed", "the process died of SIGKILL", "submit it again")


@cache
def adder(factor: int = 1) -> Program:
    """state w float64[1], input x float64[1]: w += x, `factor` times; the result is w."""
    build = ProgramBuilder()
    x, w = build.input("float64", (1,)), build.state("float64", (1,))
    for _ in range(factor):
        build.add_op("aten.add_.Tensor", w, x, outs=(w.view,))
    build.result(TensorRef(w.view))
    return build.build()


@cache
def fused(jobs: int) -> FusedJobs:
    return fuse_jobs(adder(), jobs)


@dataclass
class Loaded:
    segment: Segment
    nbytes: int
    factor: int
    buffer: int = -1  # its state; of the fused one, all of it

    def cell(self, slot: int, offset: int = 0) -> memoryview:
        return self.segment.view()[slot * self.nbytes + offset : slot * self.nbytes + offset + 8].cast("d")


@dataclass
class Job:
    buffers: list[memoryview] = field(default_factory=list)
    programs: dict[ProgramId, Loaded] = field(default_factory=dict)
    members: dict[int, Loaded] = field(default_factory=dict)


class FusingDevice:
    """Adds. `finish()` completes the oldest launch or transfer, of any job; checks and loads are done at once. A fused
    Program is made and proven at once, but for the one that `refuses` names."""

    def __init__(self) -> None:
        self.jobs: dict[JobId, Job] = {}
        self.work: list = []
        self.events: list = []
        self.launched: Counter[str] = Counter()  # fused, part (on its part of the state), home
        self.refuses = ""
        self.requests: dict[int, bool] = {}
        self.makes = 0
        self.fail_transfers = False
        self.read: list[tuple[JobId, float]] = []  # what transfers that clients asked for have found, in order

    def open(self):
        return INFO

    def filenos(self):
        return []

    def due(self):
        return float("inf")

    def poll(self):
        events, self.events = self.events, []
        return events

    def check(self, job, program, encoded, user=None):
        assert job in self.jobs, "checked before open_job"
        decoded = codec.decode(encoded)
        state = sum(s.nbytes for s in decoded.storages if s.kind == "state")
        footprint = Footprint(state, 64, slot_layout(decoded).nbytes)
        names = tuple(op.target for op in decoded.ops)
        self.events.append(dev.ProgramChecked(job, program, footprint, codec.content_hash(encoded), names, ()))

    def open_job(self, job, spec):
        assert job not in self.jobs
        self.jobs[job] = Job()

    def load_program(self, job, program, encoded, new_buffers, binding, data, slots):
        found, decoded = self.jobs[job], codec.decode(encoded)
        found.buffers += [memoryview(bytearray(n)) for n in new_buffers]
        segment = Segment.adopt(os.dup(data.fd), data.nbytes)
        assert data.nbytes == slots * slot_layout(decoded).nbytes
        found.programs[program] = Loaded(segment, slot_layout(decoded).nbytes, len(decoded.ops), binding[0])
        self.events.append(ProgramReady(job, program, 0, (0.001,), (0, len(decoded.ops))))

    def load_fused(self, job, program, encoded, fusion, state, data):
        self.load_program(job, program, encoded, state, range(len(state)), data, 1)

    def load_member(self, job, program, encoded, fused, place, data, slots):
        found = self.jobs[job]
        line = found.buffers[found.programs[fused].buffer]
        self.load_program(job, program, encoded, (), (len(found.buffers),), data, slots)
        found.buffers.append(line[8 * place : 8 * place + 8])
        found.members[place] = found.programs[program]

    def make_fused(self, request, encoded, jobs):
        assert request not in self.requests
        self.makes += 1
        if self.refuses == "make":
            self.events.append(dev.FusedProgramRefused(request, Fault("not_fusible", "it draws random numbers", "")))
            return
        self.requests[request] = False
        assert codec.decode(encoded) == adder()
        found = fused(jobs)
        encoded = codec.encode(found.fused.program)
        self.events.append(dev.FusedProgramMade(request, encoded, found.layout.fusion.packed(), (8 * jobs,), 1 << 10))

    def prove_fused(self, request):
        self.requests[request] = True
        if self.refuses == "prove":
            self.events.append(dev.FusedProgramRefused(request, Fault("not_fusible", "it comes out otherwise", "")))
        else:
            self.events.append(dev.FusedProgramProven(request))

    def drop_fused(self, request):
        self.requests.pop(request, None)

    def profile(self, job, program):
        raise AssertionError("not asked for here")

    def cut(self, job, program, target_s):
        pass

    def launch(self, launch):
        self.work.append(launch)

    def transfer(self, job, transfer, buffers, segment, into_device):
        adopted = Segment.adopt(os.dup(segment.fd), segment.nbytes)
        self.work.append((job, transfer, list(buffers), adopted, into_device))

    def unload(self, job):
        self._drop(job)
        self.events.append(JobReleased(job))

    def _drop(self, job):
        for work in [w for w in self.work if self._job(w) == job]:
            self.work.remove(work)
            if not isinstance(work, dev.Launch):
                work[3].close()
        found = self.jobs.pop(job, None)
        for loaded in found.programs.values() if found is not None else ():
            loaded.segment.close()

    @staticmethod
    def _job(work):
        return work.job if isinstance(work, dev.Launch) else work[0]

    def kill(self, job):
        """Its process dies."""
        for work in [w for w in self.work if self._job(w) == job]:
            failed = (
                PieceFailed(work.launch, BROKEN)
                if isinstance(work, dev.Launch)
                else TransferEnded(job, work[1], BROKEN)
            )
            self.events.append(failed)
        self._drop(job)
        self.events.append(JobDied(job, BROKEN))

    def finish(self, now, at=0):
        work = self.work.pop(at)
        if isinstance(work, dev.Launch):
            self._run(work)
            self.events.append(PieceDone(work.launch, now, now + 0.001))
            return
        job, transfer, buffers, segment, into_device = work
        fault = BROKEN if self.fail_transfers else None
        if fault is None:
            with segment.view() as view:
                for place, index in enumerate(buffers):
                    buffer, part = self.jobs[job].buffers[index], slice(64 * place, 64 * place + 8)
                    if into_device:
                        buffer[:] = view[part]
                    else:
                        view[part] = buffer
                        if transfer > 0 and not self.jobs[job].members:
                            self.read.append((job, buffer.cast("d")[0]))
        segment.close()
        self.events.append(TransferEnded(job, transfer, fault))

    def _run(self, launch):
        job = self.jobs[launch.job]
        program = job.programs[launch.program]
        if job.members and launch.program == 1:
            self.launched["fused"] += 1
            assert len(launch.scalars) == len(job.members)
            for place, slot in enumerate(launch.scalars):
                self._add(job.members[place], slot, job.buffers[job.members[place].buffer])
        else:
            self.launched["part" if job.members else "home"] += 1
            self._add(program, launch.slot, job.buffers[program.buffer])

    @staticmethod
    def _add(program, slot, state):
        w = state.cast("d")
        w[0] += program.factor * program.cell(slot)[0]
        program.cell(slot, 64)[0] = w[0]

    def memory(self):
        return dev.MemoryFigures(1 << 30, 1 << 30, {})

    def close(self):
        for job in list(self.jobs):
            self.unload(job)
        self.events.clear()


class Clients:
    """A daemon, and clients with a fusible job each, which has the state 0 and adds what it is told. `total`: what the
    state has to be; `sums`: what answered steps said, each compared when it comes."""

    def __init__(self, jobs: str = "abc", rules: FusionRules | None = RULES, config: Config | None = None) -> None:
        self.device = FusingDevice()
        self.writer = FakeWriter()
        self.daemon = Daemon(
            config=config,
            device=self.device,  # type: ignore[arg-type]
            writer=self.writer,
            fusion_rules=rules,
        )
        self.total: dict[str, float] = {}
        self.expected: dict[str, dict[int, float]] = {}
        self.next: dict[str, int] = {}
        self.places: dict[tuple[str, int], tuple[int, int, bool]] = {}  # of steps that ran in a group
        self.ended: dict[str, str] = {}
        self.transfers = 0
        for job in jobs:
            self.open(job)

    def id(self, name: str) -> JobId:
        return JobId(f"{ord(name):032x}")

    def open(self, name: str, uid: int = 1000, fusible: bool = True, priority: Priority = Priority.LOW) -> None:
        daemon = self.daemon
        daemon.connect(name, uid)
        opening = msg.OpenFusibleJob if fusible else msg.OpenJob
        daemon.say(name, opening(daemon.ref(), self.id(name), name, int(priority), 1.0, 1.1, None, 2, 0))
        daemon.load(name, self.id(name), adder(), 0, [8], [0])
        assert ProgramId(0) in self.device.jobs[self.id(name)].programs
        self.total[name], self.expected[name], self.next[name] = 0.0, {}, 0

    def step(self, name: str, x: float = 1.0, program: int = 0) -> None:
        number = self.next[name]
        self.next[name] += 1
        loaded = self.device.jobs[self.id(name)].programs[ProgramId(program)]
        loaded.cell(number % 2)[0] = x
        self.total[name] += loaded.factor * x
        self.expected[name][number] = self.total[name]
        self.daemon.router.arrivals.append(
            self._incoming(name, msg.Step(self.id(name), number, program, number % 2, [], 0))
        )
        self.daemon.turn()
        self.hear()

    def _incoming(self, name, message):
        return wire.Incoming(SessionId(name), self.daemon.router.open[SessionId(name)], message, [])

    def hear(self) -> None:
        """Compare the results of answered steps with what they have to be."""
        daemon = self.daemon
        daemon.turn()
        new = daemon.router.sent[daemon.router.read :]
        daemon.router.read = len(daemon.router.sent)
        for name, message, _ in new:
            match message:
                case msg.StepDone(job=job, step=step) | msg.GroupStepDone(job=job, step=step):
                    assert job == self.id(name)
                    if isinstance(message, msg.GroupStepDone):
                        self.places[name, step] = (message.models, message.place, message.fused)
                    expected = self.expected[name].pop(step)
                    if self.id(name) in self.device.jobs:  # its last step may have ended it
                        programs = self.device.jobs[self.id(name)].programs.values()
                        found = [loaded.cell(step % 2, 64)[0] for loaded in programs]
                        assert expected in found, (name, step, expected, found)
                case msg.JobEnded(code=code) | msg.StepFailed(code=code):
                    self.ended[name] = code

    def finish(self, at: int = 0) -> None:
        self.device.finish(self.daemon.now, at)
        self.hear()

    def settle(self) -> None:
        """Complete all work, and let time pass until nothing waits."""
        self.hear()
        for _ in range(1000):
            while self.device.work:
                self.finish()
            if not any(self.expected[name] for name in self.expected if name not in self.ended):
                return
            self.daemon.now += RULES.wait_s
            self.hear()
        raise AssertionError(f"steps are never answered: {self.expected}")

    def rounds(self, count: int, names: str = "abc") -> None:
        """Each makes a step and waits for it."""
        for _ in range(count):
            for name in names:
                self.step(name)
            self.settle()

    def play(self, names: str = "abc") -> None:
        """As clients do: each steps again as soon as its step is answered. No time passes."""
        for _ in range(3):
            for name in names:
                if not self.expected[name]:
                    self.step(name)
            while self.device.work:
                self.finish()

    def together(self, names: str = "abc") -> None:
        """Until their steps run as one."""
        self.rounds(MEASURED_ALONE + 1, names)
        before = self.device.launched["fused"]
        for _ in range(30):
            self.play(names)
            self.daemon.now += RULES.settle_s / 2
            if self.device.launched["fused"] > before:
                break
        self.settle()
        assert self.device.launched["fused"], self.explain(names[0])

    def explain(self, name: str) -> str:
        return self.daemon.loop.fusion.explain(self.id(name))

    def transfer(self, name: str, push: bool) -> int:
        """Ask for one. Returns its number."""
        self.transfers += 1
        opening = msg.OpenTransfer(self.daemon.ref(), self.id(name), self.transfers, [0], push)
        self.daemon.router.arrivals.append(self._incoming(name, opening))
        self.hear()
        return self.transfers

    def read(self, name: str) -> float:
        """The job's state, as its client reads it."""
        self.transfer(name, False)
        self.settle_transfer(name)
        job, found = self.device.read[-1]
        assert job == self.id(name)
        return found

    def write(self, name: str, value: float) -> None:
        """The job's state is this from now on."""
        number = self.transfer(name, True)
        segment = self.daemon.loop.context.records.jobs[self.id(name)].transfers[number].segment  # type: ignore[index]
        assert segment is not None
        segment.write(0, struct.pack("d", value))
        filled = msg.FillTransfer(self.daemon.ref(), self.id(name), number, 0)
        self.daemon.router.arrivals.append(self._incoming(name, filled))
        self.settle_transfer(name)
        self.total[name] = value

    def settle_transfer(self, name: str) -> None:
        before = len(self.daemon.router.sent)
        for _ in range(100):
            self.hear()
            if any(type(m) is msg.TransferDone and s == name for s, m, _ in self.daemon.router.sent[before:]):
                return
            if self.device.work:
                self.finish()
            else:
                self.daemon.now += RULES.wait_s
        raise AssertionError("a transfer never ends")

    def groups(self) -> list[JobId]:
        return [job for job, found in self.device.jobs.items() if found.members]

    def close(self) -> None:
        self.daemon.close()
        self.writer.close()


@pytest.fixture
def clients() -> Iterator[Clients]:
    made = Clients()
    yield made
    made.close()


def test_steps_of_equal_jobs_run_as_one_and_each_has_its_own_results(clients: Clients):
    clients.together()
    clients.device.launched.clear()
    clients.rounds(5)
    assert clients.device.launched == {"fused": 5}
    newest = [[clients.places[name, clients.next[name] - n] for n in (1, 2)] for name in "abc"]
    assert sorted(newest) == [[(3, place, True)] * 2 for place in range(3)]
    assert not any(step == 0 for _, step in clients.places)
    assert clients.read("a") == clients.total["a"]


def test_a_straggler_costs_the_others_at_most_the_wait(clients: Clients):
    clients.together()
    clients.device.launched.clear()
    clients.step("a")
    clients.step("b")
    assert not clients.device.work
    clients.daemon.now += RULES.wait_s
    clients.hear()
    clients.settle()
    assert clients.device.launched == {"part": 2}, "each on its part of the state"
    before, alone = (clients.places["b", clients.next["b"] - n] for n in (2, 1))
    assert alone == (*before[:2], False)
    clients.step("c")
    clients.rounds(1, "ab")
    assert clients.device.launched["fused"] == 1


def test_state_that_is_written_is_brought_back_and_what_comes_after_waits_for_it(clients: Clients):
    clients.together()
    clients.step("a")
    clients.step("b")
    clients.write("a", 100.0)
    assert not clients.expected["a"], "the step before it has ended"
    assert clients.groups() == []
    clients.step("c")
    clients.rounds(2)
    for name in "abc":
        assert clients.read(name) == clients.total[name]


def test_a_group_goes_on_over_reads_of_its_members(clients: Clients):
    """As snapshots of each do, whenever they come."""
    clients.together()
    groups = clients.groups()
    clients.device.launched.clear()
    wanted = []
    for turn in range(6):
        for name in "abc":
            clients.step(name)
        name = "abc"[turn % 3]
        clients.transfer(name, False)
        wanted.append((clients.id(name), clients.total[name]))
        for each in "abc":
            clients.step(each)  # which the read does not see
        clients.settle()
    assert clients.device.read == wanted
    assert clients.device.launched == {"fused": 12}
    assert clients.groups() == groups


def test_a_read_sees_no_step_after_it_even_if_the_group_ends_meanwhile(clients: Clients):
    """A group has one segment a member, which the state of a later step goes through as well when it ends."""
    clients.together()
    before = clients.total["a"]
    clients.transfer("a", False)
    clients.finish()  # the group's copy
    for name in "abc":
        clients.step(name)
    in_own_place = [w for w in clients.device.work if not isinstance(w, dev.Launch) and w[0] == clients.id("a")]
    assert len(in_own_place) == 1
    clients.device.work.remove(in_own_place[0])
    clients.daemon.say("b", msg.PauseJob(clients.daemon.ref(), clients.id("b")))
    while clients.device.work:
        clients.finish()
    assert not any(clients.expected.values())
    clients.device.work.append(in_own_place[0])
    clients.settle()
    assert clients.device.read[-1] == (clients.id("a"), before)
    assert clients.groups() == []
    for name in "ac":
        assert clients.read(name) == clients.total[name]


@pytest.mark.parametrize("done", range(5))
@pytest.mark.parametrize("how", ["leaves", "dies", "fails"])
def test_a_member_that_ends_while_it_is_read_costs_the_others_nothing(clients: Clients, done: int, how: str):
    clients.together()
    clients.transfer("b", False)
    for _ in range(done):
        if clients.device.work:
            clients.finish()
    if how == "leaves":
        clients.daemon.disconnect("b")
    elif how == "dies":
        clients.device.kill(clients.id("b"))
    else:
        clients.device.fail_transfers = True
        if clients.device.work:
            clients.finish()
        clients.device.fail_transfers = False
    if how != "fails":
        clients.ended["b"] = "gone"
    clients.settle()
    names = "ac" if "b" in clients.ended else "abc"
    clients.rounds(2, names)
    for name in names:
        assert clients.read(name) == clients.total[name]


@pytest.mark.parametrize("done", range(8))
def test_a_group_that_is_to_end_before_its_state_is_there_ends_all_the_same(clients: Clients, done: int):
    until_stacking(clients)
    for _ in range(done):
        clients.finish()
    assert clients.read("b") == clients.total["b"]
    clients.write("b", 100.0)
    clients.settle()
    clients.rounds(2)
    for name in "abc":
        assert clients.read(name) == clients.total[name]


def test_a_group_is_formed_again_after_a_write(clients: Clients):
    clients.together()
    clients.write("b", 100.0)
    assert clients.groups() == []
    clients.device.launched.clear()
    clients.together()
    assert clients.device.launched["fused"]
    for name in "abc":
        assert clients.read(name) == clients.total[name]


def test_a_group_that_is_formed_again_has_the_program_of_the_first(clients: Clients):
    clients.together()
    made = clients.device.makes
    clients.write("b", 100.0)
    clients.together()
    assert clients.groups()
    assert clients.device.makes == made == 1
    clients.daemon.disconnect("b")
    clients.ended["b"] = "gone"
    clients.settle()
    for _ in range(30):
        clients.play("ac")
        clients.daemon.now += RULES.retry_s / 2
    assert clients.groups()
    assert clients.device.makes == 2, "that for two is another"


def test_the_program_of_one_users_group_is_given_to_no_other_user():
    clients = Clients("ab")
    try:
        clients.together("ab")
        for name in "cd":
            clients.open(name, uid=1001)
        clients.device.launched.clear()
        for _ in range(30):
            clients.play("cd")
            clients.daemon.now += RULES.settle_s / 2
        assert clients.device.launched["fused"]
        assert clients.device.makes == 2
    finally:
        clients.close()


def test_a_member_that_leaves_ends_the_group_and_takes_nothing_along(clients: Clients):
    clients.together()
    for name in "abc":
        clients.step(name)
    clients.daemon.disconnect("b")
    clients.ended["b"] = "gone"
    clients.settle()
    clients.rounds(2, "ac")
    for name in "ac":
        assert clients.read(name) == clients.total[name]
    assert clients.groups() == []


def test_a_member_whose_own_process_dies_ends_alone(clients: Clients):
    clients.together()
    clients.device.kill(clients.id("b"))
    clients.settle()
    assert clients.ended == {"b": BROKEN.code}
    clients.rounds(2, "ac")
    for name in "ac":
        assert clients.read(name) == clients.total[name]


def test_a_group_that_dies_ends_its_members_with_its_fault(clients: Clients):
    """Their state is lost: their clients recover them, as when a job's own process dies."""
    clients.together()
    for name in "abc":
        clients.step(name)
    (group,) = clients.groups()
    clients.device.kill(group)
    clients.settle()
    assert clients.ended == dict.fromkeys("abc", BROKEN.code)
    assert not clients.device.jobs


def ends(clients: Clients) -> list[tuple[str, str]]:
    return [(name, m.code) for name, m, _ in clients.daemon.router.sent if isinstance(m, msg.JobEnded)]


@pytest.mark.parametrize("late", [False, True], ids=["at once", "on time"])
def test_a_decision_about_one_member_that_fails_ends_that_one_alone(
    clients: Clients, late: bool, monkeypatch: pytest.MonkeyPatch
):
    """Decisions that were made with it are carried out. On time, none of its events is to blame."""
    clients.together()
    do, victim = clients.daemon.loop.fusion._do, clients.id("a")
    if not late:
        clients.write("b", 5.0)  # the group ends, so that each runs by itself

    def fails(command: object) -> None:
        if isinstance(command, RunAlone) and command.job == victim:
            raise ZeroDivisionError
        do(command)  # type: ignore[arg-type]

    monkeypatch.setattr(clients.daemon.loop.fusion, "_do", fails)
    clients.step("a")
    clients.step("b")
    clients.daemon.now += RULES.wait_s
    clients.settle()
    assert ends(clients) == [("a", "internal")]
    read = clients.daemon.metrics.registry.get_sample_value
    assert read("gpumux_inconsistencies_total", {"scope": "job"}) == 1
    assert read("gpumux_inconsistencies_total", {"scope": "device"}) == 0
    clients.rounds(5, "bc")
    for name in "bc":
        assert clients.read(name) == clients.total[name]


def test_a_decision_about_no_job_that_fails_ends_all_jobs_and_not_the_daemon(
    clients: Clients, monkeypatch: pytest.MonkeyPatch
):
    clients.together()
    clients.step("a")
    handle = clients.daemon.loop.fusion._groups.handle

    def fails(event: object, now: float) -> object:
        if isinstance(event, WaitOver):
            raise ZeroDivisionError
        return handle(event, now)  # type: ignore[arg-type]

    monkeypatch.setattr(clients.daemon.loop.fusion._groups, "handle", fails)
    clients.daemon.now += RULES.wait_s
    clients.settle()
    assert ends(clients) == [(name, "internal") for name in "abc"]
    assert clients.device.jobs == {}


def until_stacking(clients: Clients) -> JobId:
    """Up to the moment when state begins to move. Returns the group."""
    for _ in range(60):
        for name in "abc":
            if not clients.expected[name]:
                clients.step(name)
        while clients.device.work and not clients.groups():
            clients.finish()
        if clients.groups():
            break
        clients.daemon.now += RULES.settle_s / 4
    (group,) = clients.groups()
    return group


@pytest.mark.parametrize("done", range(6))
def test_a_group_that_dies_before_its_first_step_costs_nothing(clients: Clients, done: int):
    group = until_stacking(clients)
    for _ in range(done):
        clients.finish()
    assert not clients.device.launched["fused"]
    clients.device.kill(group)
    clients.settle()
    assert not clients.ended
    clients.rounds(2)
    for name in "abc":
        assert clients.read(name) == clients.total[name]


@pytest.mark.parametrize("done", range(6))
@pytest.mark.parametrize("how", ["leaves", "dies"])
def test_a_member_that_ends_while_state_moves_costs_the_others_nothing(clients: Clients, done: int, how: str):
    until_stacking(clients)
    for _ in range(done):
        clients.finish()
    if how == "leaves":
        clients.daemon.disconnect("b")
    else:
        clients.device.kill(clients.id("b"))
    clients.ended["b"] = "gone"
    clients.settle()
    clients.rounds(2, "ac")
    for name in "ac":
        assert clients.read(name) == clients.total[name]


def test_transfers_that_fail_while_state_moves_in_leave_everyone_at_home(clients: Clients):
    until_stacking(clients)
    clients.device.fail_transfers = True
    while clients.device.work and not isinstance(clients.device.work[0], dev.Launch):
        clients.finish()
    clients.device.fail_transfers = False
    clients.settle()
    assert not clients.ended
    clients.rounds(2)
    for name in "abc":
        assert clients.read(name) == clients.total[name]


@pytest.mark.parametrize("refuses", ["make", "prove"])
def test_what_can_not_be_fused_runs_by_itself_and_says_so(refuses: str):
    clients = Clients()
    try:
        clients.device.refuses = refuses
        clients.rounds(MEASURED_ALONE + 1)
        clients.daemon.now += RULES.retry_s
        clients.rounds(3)
        assert set(clients.device.launched) == {"home"}
        why = "draws random numbers" if refuses == "make" else "comes out otherwise"
        for _ in range(3):
            clients.daemon.now += RULES.retry_s
            clients.rounds(2)
        assert f"its Program can't be fused: it {why}" in clients.explain("a")
        assert len(clients.device.jobs) == 3, "no group is left"
        assert clients.device.makes == 1, "it is not tried again"
    finally:
        clients.close()


def test_jobs_of_other_users_and_jobs_that_did_not_ask_are_never_fused():
    clients = Clients("a")
    try:
        clients.open("b", uid=1001)
        clients.open("c", fusible=False)
        clients.open("d", fusible=False)
        for _ in range(6):
            clients.daemon.now += RULES.retry_s
            clients.rounds(2, "abcd")
        assert set(clients.device.launched) == {"home"}
        assert not clients.device.requests
    finally:
        clients.close()


def test_users_that_agree_are_fused_with_each_other_and_with_no_other():
    clients = Clients("", FusionRules(agreed=(frozenset({1000, 1001}),)))
    try:
        for name, uid in (("a", 1000), ("b", 1001), ("c", 1002)):
            clients.open(name, uid)
        for _ in range(6):
            clients.play()
            clients.daemon.now += RULES.settle_s / 2
        assert clients.device.launched["fused"]
        fused = {job["name"]: job["fusion"]["jobs"] for job in clients.daemon.loop.status()["jobs"]}
        assert fused == {"a": 2, "b": 2, "c": 1}
    finally:
        clients.close()


def test_the_status_says_with_how_many_a_job_runs_and_others_learn_no_reason(clients: Clients):
    clients.together()
    clients.open("z", uid=1001, fusible=False)
    for name, sentence in (("a", "runs fused with 2 other jobs: results are equivalent, not equal"), ("z", "")):
        (answer,) = [m for m, _ in clients.daemon.say(name, msg.GetStatus(7)) if type(m) is msg.Report]
        entries = {job["short"]: job["fusion"] for job in answer.body["jobs"]}
        steps = clients.daemon.loop.context.records.jobs[clients.id("a")].group_steps
        assert entries["j1"] == {"possible": True, "jobs": 3, "steps": steps, "why": sentence}
        assert entries["j4"] is None
    (answer,) = [m for m, _ in clients.daemon.say("a", msg.ExplainJob(8, clients.id("a"))) if type(m) is msg.Report]
    assert answer.body["fusion"]["why"].startswith("runs fused with 2 other jobs")


def test_a_daemon_that_fuses_nothing_takes_such_jobs_and_says_so():
    clients = Clients("ab", None, Config(fuse_most=1))
    try:
        for _ in range(6):
            clients.play("ab")
            clients.daemon.now += RULES.settle_s / 2
        assert set(clients.device.launched) == {"home"}
        for job in clients.daemon.loop.status()["jobs"]:
            assert job["fusion"]["possible"] is False
            assert "fuse_most" in job["fusion"]["why"]
    finally:
        clients.close()
    daemon = Daemon(device=FakeDevice())
    try:
        daemon.connect("a")
        daemon.say("a", msg.OpenFusibleJob(1, "ab" * 16, "a", 0, 1.0, 1.1, None, 2, 0))
        (job,) = daemon.loop.status()["jobs"]
        assert job["fusion"] == {
            "possible": False, "jobs": 1, "steps": 0, "why": "runs by itself: this daemon's device does not fuse jobs",
        }  # fmt: skip
    finally:
        daemon.close()


def test_a_job_that_may_be_fused_shares_no_memory(clients: Clients):
    clients.daemon.connect("z")
    refused = clients.daemon.say("z", msg.OpenFusibleJob(1, "ab" * 16, "a", 0, 1.0, 1.1, None, 2, 0, 1, True))
    assert [m.code for m, _ in refused] == ["protocol"]


def test_steps_that_a_recovered_job_runs_again_are_never_fused(clients: Clients):
    clients.daemon.say("a", msg.Replay(9, clients.id("a"), 8, 1), b"")
    record = clients.daemon.loop.context.records.jobs[clients.id("a")]
    for _ in range(8):
        clients.play()
        clients.daemon.now += RULES.settle_s
        if record.replays:
            assert not record.group_steps
    assert clients.device.launched["fused"], "of the others"
    for _ in range(30):
        clients.play()
        clients.daemon.now += RULES.retry_s / 2
    assert record.group_steps


@pytest.mark.parametrize("running", [False, True])
def test_a_paused_member_leaves_the_group_and_its_steps_wait(clients: Clients, running: bool):
    clients.together()
    if running:
        for name in "abc":
            clients.step(name)
    clients.daemon.say("a", msg.PauseJob(clients.daemon.ref(), clients.id("a")))
    clients.hear()
    clients.step("a")
    for name in "bc":
        clients.step(name)
    for _ in range(20):
        if clients.device.work:
            clients.finish()
    assert list(clients.expected["a"]), "it waits"
    assert not clients.expected["b"]
    clients.daemon.say("a", msg.ResumeJob(clients.daemon.ref(), clients.id("a")))
    clients.settle()
    for name in "abc":
        assert clients.read(name) == clients.total[name]


def test_a_member_that_becomes_high_leaves_the_group(clients: Clients):
    clients.together()
    clients.device.launched.clear()
    clients.daemon.say("a", msg.ChangeJob(clients.daemon.ref(), clients.id("a"), 1, None))
    for _ in range(4):
        clients.daemon.now += RULES.retry_s
        clients.rounds(2)
    assert clients.device.launched["home"] >= 8
    assert "high" in clients.explain("a") or "by itself" in clients.explain("a")
    for name in "abc":
        assert clients.read(name) == clients.total[name]


def test_closing_with_drain_answers_every_step_first(clients: Clients):
    clients.together()
    for name in "ab":
        clients.step(name)
    clients.daemon.router.arrivals.append(
        clients._incoming("a", msg.CloseJob(clients.daemon.ref(), clients.id("a"), True))
    )
    clients.settle()
    assert not clients.expected["a"]
    clients.rounds(2, "bc")
    assert clients.id("a") not in clients.device.jobs


def test_a_groups_memory_is_charged_and_given_back_and_no_client_sees_it():
    clients = Clients()
    try:
        before = clients.daemon.loop.scheduler.snapshot()["memory"]["free"]
        clients.together()
        during = clients.daemon.loop.scheduler.snapshot()["memory"]["free"]
        assert during < before
        status = clients.daemon.loop.status()
        assert len(status["jobs"]) == 3
        assert status["sessions"] == 3
        done = {job["name"]: job["steps_done"] for job in status["jobs"]}
        assert done == {name: clients.next[name] for name in "abc"}
        clients.write("a", 100.0)
        clients.settle()
        assert clients.daemon.loop.scheduler.snapshot()["memory"]["free"] == before
    finally:
        clients.close()


def test_a_daemon_that_leaves_ends_groups_and_members(clients: Clients):
    clients.together()
    for name in "ab":
        clients.step(name)
    clients.daemon.loop.stop("the end")
    clients.daemon.turn()
    clients.hear()
    assert not clients.device.jobs
    assert set(clients.ended) == set("abc")


@pytest.mark.parametrize("seed", [*range(12), *(pytest.param(n, marks=pytest.mark.extended) for n in range(12, 60))])
def test_whatever_happens_every_step_of_a_job_that_lives_is_its_own(seed: int):
    random = Random(seed)
    clients = Clients("abcd", RESTLESS if seed % 2 else RULES)
    alive = list("abcd")
    try:
        clients.rounds(MEASURED_ALONE, "abcd")
        for _ in range(300):
            what = random.random()
            name = random.choice(alive)
            if what < 0.45:
                for each in alive if random.random() < 0.8 else [name]:
                    if len(clients.expected[each]) < 2:
                        clients.step(each, random.randint(1, 9))
            elif what < 0.90:
                if clients.device.work:
                    first = clients.device.work[0]
                    mine = [w for w in clients.device.work if clients.device._job(w) == clients.device._job(first)]
                    clients.finish(clients.device.work.index(mine[0]))
            elif what < 0.95:
                clients.daemon.now += random.choice((RULES.wait_s / 2, RULES.wait_s, RULES.retry_s))
                clients.hear()
            elif what < 0.96:
                assert clients.read(name) == clients.total[name]
            elif what < 0.965:
                clients.write(name, float(random.randint(1, 9)))
            elif what < 0.975 and len(alive) > 2:
                alive.remove(name)
                clients.ended[name] = "gone"
                clients.daemon.disconnect(name) if random.random() < 0.5 else clients.device.kill(clients.id(name))
            elif what < 0.98 and clients.groups() and not clients.device.launched["fused"]:
                clients.device.kill(clients.groups()[0])
        clients.settle()
        for name in alive:
            assert name not in clients.ended
            assert clients.read(name) == clients.total[name]
    finally:
        clients.close()
