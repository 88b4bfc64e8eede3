"""The process that writes: asked over a socket, replaced when it dies, alone in its directory."""

from __future__ import annotations

import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpumux.daemon.snapshots import writer
from gpumux.daemon.snapshots.store import places, staged_bytes
from gpumux.daemon.snapshots.writer import DirectoryLock, WriterClient
from gpumux.errors import EndpointBusy, GpumuxError, SnapshotFailed, UnknownJob
from gpumux.types import GENERATOR_BYTES

JOB = "ab" * 16
SIZES = (5, 64, 0, 130)
WAIT_S = 120.0  # generous: the process that writes is the last to get a busy processor


def lock(root: Path, wait_s: float = 10.0) -> DirectoryLock:
    state = os.open(root.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return DirectoryLock(root, state, wait_s)
    finally:
        os.close(state)


class Asker:
    """A WriterClient, and a wait for its answers."""

    def __init__(self, root: Path) -> None:
        self.lock = lock(root)
        self.client = WriterClient(self.lock)
        self.fds: tuple[int, ...] = ()
        self.client.follow(self._watch)

    def _watch(self, fds: Any) -> None:
        self.fds = tuple(fds)

    def ask(self, verb: str, fds: tuple[int, ...] = (), **arguments: Any) -> Any:
        answers: list[Any] = []
        self.client.ask(verb, arguments, fds, answers.append)
        return self.wait(answers)

    def wait(self, answers: list[Any]) -> Any:
        while not answers:
            assert select.select(self.fds, [], [], WAIT_S)[0], "no answer"
            self.client.hear()
        return answers[0]

    def close(self) -> None:
        self.client.close()
        self.lock.close()


def memory(data: bytes) -> int:
    fd = os.memfd_create("test")
    os.write(fd, data)
    return fd


def state(fill: int) -> bytes:
    data = bytearray(staged_bytes(SIZES))
    for at, nbytes in places(SIZES):
        data[at : at + nbytes] = bytes([fill]) * nbytes
    data[-GENERATOR_BYTES:][:8] = bytes(8)
    generator = len(data) - GENERATOR_BYTES
    data[generator : generator + 13] = (5).to_bytes(8, "little") + b"draws"
    return bytes(data)


def save(asker: Asker, number: int, notes: bytes = b"notes", name: str = "sweep", limit: int = 1 << 40) -> Any:
    data = memory(state(number))
    beside = memory(b"".join(n.to_bytes(8, "little") for n in SIZES) + notes)
    try:
        return asker.ask(
            "save", (data, beside), uid=7, job=JOB, number=number, name=name, steps=3, limit=limit, living=[],
            buffers=len(SIZES), notes=len(notes),
        )  # fmt: skip
    finally:
        os.close(data)
        os.close(beside)


@pytest.fixture
def asker(tmp_path: Path) -> Iterator[Asker]:
    made = Asker(tmp_path / "snapshots")
    yield made
    made.close()


def test_what_goes_in_comes_out(asker: Asker):
    assert save(asker, 1) > 0
    assert save(asker, 2, b"") > 0
    assert asker.ask("find", uid=7, name="sweep") == {"job": JOB, "numbers": [2, 1]}
    found = asker.ask("read", uid=7, job=JOB, numbers=[3, 1])
    assert found == {"number": 1, "nbytes": staged_bytes(SIZES) + 5, "notes": 5, "bad": []}
    segment = memory(bytes(found["nbytes"]))
    assert asker.ask("fill", (segment,)) is None
    assert os.pread(segment, 1 << 20, 0) == state(1) + b"notes"
    assert isinstance(asker.ask("fill", (segment,)), SnapshotFailed)  # it held one, and gave it
    os.close(segment)
    assert asker.ask("kept")["jobs"] == 1
    assert asker.ask("expire", before=1e12, living=[[7, JOB]]) == 0
    assert asker.ask("forget", uid=7, job=JOB) is None
    assert isinstance(asker.ask("read", uid=7, job=JOB, numbers=[1]), UnknownJob)


def test_another_user_finds_nothing(asker: Asker):
    save(asker, 1)
    assert isinstance(asker.ask("find", uid=8, name="sweep"), UnknownJob)
    assert isinstance(asker.ask("read", uid=8, job=JOB, numbers=[1]), UnknownJob)


def test_failures_are_answers(asker: Asker):
    assert isinstance(save(asker, 1, limit=10), SnapshotFailed)
    for wrong in ({"uid": 7, "job": "../../etc", "numbers": [1]}, {"uid": 7, "job": "", "numbers": [1]}):
        assert isinstance(asker.ask("read", **wrong), GpumuxError)
    assert save(asker, 1) > 0


def test_a_disk_that_is_full_is_said_and_costs_no_process(asker: Asker):
    """The fault is the kernel's: a limit on the size of files, which the writer got and which nothing but its disk
    knows of."""
    assert save(asker, 1) > 0
    process = asker.client._process
    usual, most = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (64, most))
    for _ in range(3):
        failed = save(asker, 2)
        assert isinstance(failed, SnapshotFailed)
        assert "could not be written" in failed.message
        assert "make room" in failed.remedy
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (usual, most))
    assert save(asker, 2) > 0
    assert asker.client._process is process
    assert process.poll() is None


def test_a_writer_that_dies_fails_what_it_was_at_and_is_replaced(asker: Asker):
    assert save(asker, 1) > 0
    process = asker.client._process
    answers: list[Any] = []
    os.kill(process.pid, signal.SIGSTOP)
    asker.client.ask("kept", {}, (), answers.append)
    os.kill(process.pid, signal.SIGKILL)
    assert isinstance(asker.wait(answers), SnapshotFailed)
    assert asker.ask("kept")["jobs"] == 1


def test_one_daemon_a_directory(asker: Asker, tmp_path: Path):
    with pytest.raises(EndpointBusy, match="another daemon"):
        lock(tmp_path / "snapshots", wait_s=0.0)


def test_closing_lets_it_finish_what_it_is_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(writer, "CLOSE_S", WAIT_S)
    asker = Asker(tmp_path)
    data, beside = memory(state(1)), memory(b"".join(n.to_bytes(8, "little") for n in SIZES))
    asker.client.ask(
        "save",
        {
            "uid": 7,
            "job": JOB,
            "number": 1,
            "name": "",
            "steps": 0,
            "limit": 1 << 40,
            "living": [],
            "buffers": 4,
            "notes": 0,
        },
        (data, beside),
        lambda answer: pytest.fail("nobody hears of it any more"),
    )
    os.close(data)
    os.close(beside)
    asker.close()
    assert [path.name[:8] for path in (tmp_path / "7" / JOB).iterdir()] == ["00000001"]


def test_users_take_turns_and_what_a_session_asked_goes_with_it(asker: Asker):
    """The first request is under way while the others are queued."""
    order: list[str] = []

    def ask(uid: int, owner: str, name: str) -> None:
        asker.client.ask(
            "kept", {}, (), lambda answer: order.append(f"{name} {type(answer).__name__}"), uid=uid, owner=owner
        )

    for name in ("a1", "a2", "a3"):
        ask(1, "a", name)
    ask(1, "gone", "g1")
    ask(2, "b", "b1")
    assert (asker.client.count(1, "a"), asker.client.count(1, "gone"), asker.client.count(3, "a")) == (2, 1, 0)
    asker.client.forget(1, "gone")
    assert order == ["g1 DaemonGone"]
    last: list[Any] = []
    asker.client.ask("kept", {}, (), last.append, uid=1, owner="a")
    asker.wait(last)
    assert order[1:] == ["a1 dict", "a2 dict", "b1 dict", "a3 dict"]


def test_a_snapshot_that_was_read_is_dropped(asker: Asker):
    save(asker, 1)
    asker.ask("read", uid=7, job=JOB, numbers=[1])
    assert asker.ask("drop") is None
    segment = memory(bytes(1 << 16))
    assert isinstance(asker.ask("fill", (segment,)), SnapshotFailed)
    os.close(segment)


LOOKED_AT = """
import os, socket, sys
from gpumux.daemon.snapshots import writer
from gpumux.device.workers.confinement import may_be_looked_into
forbidden, root = sys.argv[1] == "True", sys.argv[2]
os.chown(root, 63021, 63021)
parent, (ours, theirs) = os.getpid(), socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
pid = os.fork()
if pid == 0:
    ours.close()
    os.setresuid(63021, 63021, 63021)
    may_be_looked_into(True)  # as after an exec
    if not forbidden:
        writer.may_be_looked_into = lambda allowed: None
    directory = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    sys.argv = ["writer", str(theirs.detach()), str(parent), str(directory), root]
    writer.main()
    os._exit(0)
theirs.close()
ours.send(writer.msgpack.packb(["kept", {}]))
ours.recv(4096)  # it has begun
print(os.stat(f"/proc/{pid}/environ").st_uid)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user: run as root")
@pytest.mark.parametrize("forbidden", [True, False])
def test_processes_of_the_same_user_cannot_look_into_it(forbidden: bool):
    """The kernel says so by the owner of its files in /proc."""
    with tempfile.TemporaryDirectory() as root:
        command = [sys.executable, "-c", LOOKED_AT, str(forbidden), root]
        run = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert run.stdout == ("0\n" if forbidden else "63021\n"), run.stderr
