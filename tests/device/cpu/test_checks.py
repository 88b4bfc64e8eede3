"""Which processes check what, and that results are remembered by the bytes that were checked."""

from __future__ import annotations

import errno
import os
import resource
import select
import signal
import socket
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest

from gpumux.device.base import ProgramChecked, ProgramRefused
from gpumux.device.workers import checks, fork_server_process
from gpumux.device.workers.channel import CHECK, CHECKED, REFUSED, Channel, pair
from gpumux.device.workers.checks import Check, Checks, digest
from gpumux.device.workers.confinement import Confined
from gpumux.device.workers.fork_server_process import check_program, check_programs, limit_check
from gpumux.errors import ProgramError
from gpumux.hostmemory import memory_file
from gpumux.program.codec import encode
from gpumux.program.ir import ProgramLimits
from gpumux.types import Footprint, JobId, ProgramId
from tests.program import samples

UNKNOWN_UID = -1
ONE, OTHER = JobId("1" * 32), JobId("2" * 32)
USER = 1001


def passed(encoded: bytes, operators: int = 1) -> ProgramChecked:
    return ProgramChecked(ONE, ProgramId(0), Footprint(1, 2, 3), encoded.hex(), ("aten.add.Tensor",) * operators, ())


def of(encoded: bytes) -> Check:
    return Check(ONE, ProgramId(0), encoded, digest(encoded), USER)


@pytest.fixture
def found() -> Checks:
    return Checks(2, ProgramLimits(), (), {})


def test_equal_bytes_are_known_from_any_client(found: Checks):
    assert found.known(ONE, ProgramId(0), b"a", USER) is None
    found._remember(of(b"a"), passed(b"a"))
    found.forget(ONE)
    assert found.footprint(OTHER, ProgramId(7), b"a") is None, "nobody has asked"
    answer = found.known(OTHER, ProgramId(7), b"a", USER)
    assert answer is not None
    assert (answer.job, answer.program, answer.content_hash) == (OTHER, 7, b"a".hex())
    assert found.footprint(OTHER, ProgramId(7), b"a") == Footprint(1, 2, 3)
    assert found.footprint(OTHER, ProgramId(7), b"b") is None
    assert found.known(OTHER, ProgramId(7), b"b", USER) is None


def test_what_one_user_had_checked_is_checked_anew_for_another(found: Checks):
    """The process that checked it may have been taken over by another Program of that user's, and lie."""
    found._remember(of(b"a"), passed(b"a"))
    assert found.known(OTHER, ProgramId(7), b"a", USER + 1) is None
    assert found.known(OTHER, ProgramId(7), b"a", None) is None


def test_those_asked_for_least_recently_go(found: Checks, monkeypatch: Any):
    monkeypatch.setattr(checks, "MAX_KNOWN", 2)
    for encoded in (b"a", b"b"):
        found._remember(of(encoded), passed(encoded))
    assert found.known(ONE, ProgramId(0), b"a", USER) is not None
    found._remember(of(b"c"), passed(b"c"))
    assert [found.known(ONE, ProgramId(0), e, USER) is not None for e in (b"a", b"b", b"c")] == [True, False, True]


def test_large_ones_make_room_for_each_other(found: Checks, monkeypatch: Any):
    monkeypatch.setattr(checks, "MAX_KNOWN_OPERATORS", 10)
    for encoded, operators in ((b"a", 4), (b"b", 4), (b"b", 4), (b"c", 4), (b"d", 11)):
        found._remember(of(encoded), passed(encoded, operators))
    assert [found.known(ONE, ProgramId(0), e, USER) is not None for e in (b"a", b"b", b"c", b"d")] == [
        False,
        True,
        True,
        False,
    ]
    assert found._known_operators == 8


# ---- Processes


class Server:
    """A fork server that forks nothing: the test holds the ends of the processes' channels."""

    def __init__(self) -> None:
        self.ends: list[Channel] = []

    def fork(self, kind: str, settings: dict[str, Any], fds: tuple[int, ...]) -> int:
        assert kind == "checker"
        sock = socket.socket(fileno=fds[0])
        sock.setblocking(False)
        self.ends.append(Channel(sock))
        return len(self.ends) - 1

    def read(self, token: int) -> bytes:
        """The Program that a process was sent."""
        tag, _, (program,) = self.ends[token].receive()
        assert tag == CHECK
        encoded = os.pread(program, 100, 0)
        os.close(program)
        return encoded


class Bench:
    def __init__(self, at_once: int) -> None:
        self.checks = Checks(at_once, ProgramLimits(), (), Confined.choose("auto").of(None))
        self.server = Server()
        self.epoll = select.epoll()

    def submit(self, job: JobId, encoded: bytes, user: int | None = USER) -> None:
        self.checks.submit(job, ProgramId(0), encoded, user)
        self.start()

    def start(self) -> None:
        self.checks.start(self.server, self.epoll)  # type: ignore[arg-type]

    def passes(self, token: int) -> bytes:
        """A process answers that its Program passed. Returns the Program."""
        encoded = self.server.read(token)
        self.server.ends[token].send(CHECKED, [encoded.hex(), [1, 2, 3, 0], ["aten.add.Tensor"], [], [64, 0]])
        assert self.epoll.poll(0)
        (answer,) = self.checks.hear()
        assert isinstance(answer, ProgramChecked)
        assert (answer.content_hash, answer.live) == (encoded.hex(), (64, 0))
        return encoded


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench(2)
    yield made
    made.checks.close()
    made.epoll.close()
    for end in made.server.ends:
        end.close()


def test_a_process_checks_programs_of_one_user_alone(bench: Bench) -> None:
    for job, encoded in ((ONE, b"a"), (ONE, b"b"), (OTHER, b"c")):
        bench.submit(job, encoded)
        assert bench.passes(0) == encoded
    bench.submit(OTHER, b"d", USER + 1)
    assert bench.passes(1) == b"d"
    assert len(bench.server.ends) == 2


@pytest.mark.parametrize("user", [None, UNKNOWN_UID])
def test_a_process_checks_programs_of_one_job_alone_where_the_user_is_not_known(bench: Bench, user: int | None) -> None:
    for job, token in ((ONE, 0), (ONE, 0), (OTHER, 1)):
        bench.submit(job, b"a", user)
        bench.passes(token)
    assert bench.checks.forget(ONE) == [0], "no other job has a use for its process"


def test_programs_of_one_job_that_come_together_are_checked_side_by_side(bench: Bench) -> None:
    for encoded in (b"a", b"b", b"c"):
        bench.submit(ONE, encoded)
    assert bench.passes(1) == b"b"
    bench.start()
    assert bench.passes(1) == b"c", "the first that is free takes what waits"
    assert bench.passes(0) == b"a"
    assert len(bench.server.ends) == 2


def test_the_process_of_a_refused_program_checks_the_next_one(bench: Bench) -> None:
    bench.submit(ONE, b"a")
    bench.server.read(0)
    bench.server.ends[0].send(REFUSED, ["program", "bad", ""])
    (answer,) = bench.checks.hear()
    assert isinstance(answer, ProgramRefused)
    bench.submit(ONE, b"b")
    assert bench.passes(0) == b"b"


STOPPED = "was stopped by a signal from outside, and was ended therefore"
LOST = "ended with the process that started it, which died of signal 9"


@pytest.mark.parametrize("status", [0, signal.SIGKILL, STOPPED])
def test_a_program_whose_process_ended_of_something_else_goes_to_another(bench: Bench, status: int | str) -> None:
    """The process had waited long enough, or another job of the user's had it stopped."""
    bench.submit(ONE, b"a")
    bench.passes(0)
    bench.submit(OTHER, b"b")  # to the same process
    assert bench.checks.exited(0, status) == []
    bench.start()
    assert bench.passes(1) == b"b"


@pytest.mark.parametrize("status", [STOPPED, LOST])
def test_a_program_that_is_not_what_ended_its_process_is_checked_again(bench: Bench, status: str) -> None:
    """It was refused, with the advice to submit a smaller step."""
    bench.submit(ONE, b"a")
    assert bench.checks.exited(0, status) == []
    bench.start()
    (answer,) = bench.checks.exited(1, status)
    assert isinstance(answer, ProgramRefused)
    assert status in answer.fault.message
    assert answer.fault.remedy == "submit it again, and see the daemon's log"


@pytest.mark.parametrize(("status", "how"), [(0, "exited with status 0"), (STOPPED, STOPPED)])
def test_a_program_that_two_processes_did_not_answer_is_refused(bench: Bench, status: int | str, how: str) -> None:
    bench.submit(ONE, b"a")
    bench.passes(0)
    bench.submit(ONE, b"b")
    assert bench.checks.exited(0, status) == []
    bench.start()
    (answer,) = bench.checks.exited(1, status)
    assert isinstance(answer, ProgramRefused)
    assert how in answer.fault.message
    assert bench.checks.running == []


def test_a_process_that_died_refuses_its_program(bench: Bench) -> None:
    bench.submit(ONE, b"a")
    (answer,) = bench.checks.exited(0, signal.SIGXCPU)
    assert isinstance(answer, ProgramRefused)
    assert f"took longer than {checks.CPU_S} s" in answer.fault.message


def test_a_process_that_is_gone_is_sent_nothing(bench: Bench) -> None:
    bench.submit(ONE, b"a")
    bench.passes(0)
    bench.server.ends[0].close()
    bench.submit(ONE, b"b")
    assert bench.passes(1) == b"b"
    assert bench.checks.exited(0, 0) == []


def test_a_check_that_can_not_be_started_costs_its_own_program(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was lost, its job waited for ever, and the job that had asked for the next one ended."""

    def too_many(name: str, parts: list[bytes]) -> int:
        if parts == [b"a"]:
            raise OSError(errno.ENFILE, "Too many open files in system")
        return memory_file(name, parts)

    monkeypatch.setattr(checks, "memory_file", too_many)
    for job, encoded in ((ONE, b"a"), (OTHER, b"b")):
        bench.checks.submit(job, ProgramId(0), encoded, USER)
    (refused,) = bench.checks.start(bench.server, bench.epoll)  # type: ignore[arg-type]
    assert (refused.job, refused.fault.code) == (ONE, "admission_refused")
    assert "Too many open files" in refused.fault.message
    assert bench.server.read(0) == b"b"


def test_a_process_that_answers_unasked_is_given_nothing_more(bench: Bench) -> None:
    bench.submit(ONE, b"a")
    bench.passes(0)
    bench.server.ends[0].send(CHECKED, ["", [1, 2, 3, 0], [], [], []])
    assert bench.checks.hear() == []
    bench.submit(ONE, b"b")
    assert bench.passes(1) == b"b"


def test_an_answer_that_is_heard_with_the_end_of_its_process_counts(bench: Bench) -> None:
    bench.submit(ONE, b"a")
    bench.server.ends[0].send(CHECKED, ["", [1, 2, 3, 0], [], [], []])
    (answer,) = bench.checks.exited(0, 0)
    assert isinstance(answer, ProgramChecked)


def test_only_so_many_processes_wait_for_another_program(bench: Bench) -> None:
    for user in range(3):
        bench.submit(ONE, b"a", user)
        bench.passes(user)
    with pytest.raises(EOFError):  # the one that has waited longest is told to end
        bench.server.ends[0].receive()
    for end in bench.server.ends[1:]:
        with pytest.raises(BlockingIOError):
            end.receive()


def test_a_job_that_ends_takes_its_check_along_and_leaves_its_users_process(bench: Bench) -> None:
    bench.submit(ONE, b"a")
    bench.submit(OTHER, b"b")
    bench.passes(0)
    assert bench.checks.forget(ONE) == []
    assert bench.checks.forget(OTHER) == [1]
    bench.server.read(1)
    with pytest.raises(EOFError):
        bench.server.ends[1].receive()
    assert bench.checks.hear() == []
    assert bench.checks.running == [1], "it takes a place until it has ended"
    assert bench.checks.exited(1, signal.SIGKILL) == []
    assert bench.checks.footprint(OTHER, ProgramId(0), b"b") is None
    bench.submit(OTHER, b"c")
    assert bench.passes(0) == b"c"


@pytest.mark.parametrize(("breaks_off", "checked"), [(False, 2), (True, 1)])
def test_a_process_checks_so_many_programs(breaks_off: bool, checked: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch remembers of their operators is freed with it."""
    seen: list[int] = []

    def check_one(channel: Channel, settings: dict[str, Any], program: int) -> bool:
        os.close(program)
        seen.append(program)
        return not breaks_off

    monkeypatch.setattr(fork_server_process, "check_program", check_one)
    monkeypatch.setattr(fork_server_process, "limit_check", lambda *_: None)
    ours, theirs = pair()
    with ours:
        for encoded in (b"a", b"b", b"c"):
            program = memory_file("program", [encoded])
            Channel(ours).send(CHECK, [], (program,))
            os.close(program)
        before = signal.getsignal(signal.SIGALRM)
        check_programs({"cpu_s": 60, "wall_s": 240, "idle_s": 10, "most_programs": 2}, [theirs.detach()])
        signal.signal(signal.SIGALRM, before)
    assert len(seen) == checked


@pytest.mark.parametrize(
    ("error", "goes_on"),
    [(None, True), (ProgramError("bad", ""), True), (MemoryError(), False), (RuntimeError("torch"), False)],
)
def test_only_a_check_that_broke_off_ends_its_process(
    error: Exception | None, goes_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is refused by its check is an answer like any other."""

    def broken(*_: Any) -> Any:
        raise error if error is not None else AssertionError

    if error is not None:
        monkeypatch.setattr(fork_server_process, "check", broken)
    settings = {"limits": asdict(ProgramLimits()), "extra_ops": []}
    program = memory_file("program", [encode(samples.counter())])
    ours, theirs = pair()
    with ours, theirs:
        assert check_program(Channel(theirs), settings, program) is goes_on
        tag, _, _ = Channel(ours).receive()
    assert tag == (CHECKED if error is None else REFUSED)


def test_every_check_has_the_whole_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    set_to: list[Any] = []
    monkeypatch.setattr(signal, "alarm", set_to.append)
    monkeypatch.setattr(resource, "setrlimit", lambda what, limits: set_to.append((what, limits)))
    for hard, most in ((resource.RLIM_INFINITY, 67), (64, 64)):
        set_to.clear()
        monkeypatch.setattr(resource, "getrlimit", lambda _, hard=hard: (10, hard))
        used = resource.struct_rusage((5.5, 2.1, *[0] * 14))
        monkeypatch.setattr(resource, "getrusage", lambda _, used=used: used)
        limit_check(60, 240)
        assert set_to == [240, (resource.RLIMIT_CPU, (most, hard))]
