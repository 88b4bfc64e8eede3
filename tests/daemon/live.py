"""A real daemon in a process of its own, and clients that speak to it with hand-built Programs."""

from __future__ import annotations

import os
import re
import signal
import struct
import subprocess
import sys
import threading
import time
import uuid
from contextlib import contextmanager
from pathlib import Path

from gpumux.client.session import Session, open_message
from gpumux.program import codec
from gpumux.program.ir import slot_layout
from gpumux.types import JobSpec, Priority
from gpumux.wire import messages as msg

# Flags for tests of the daemon's own work, which no device has a part in: the simulated one opens in no time (the CPU's
# imports torch in a process of its own), takes any program, and returns zeros. The last --device counts.
QUICK = ("--device", "sim")
SOON_S = 120.0  # generous: how long anything may take on a machine that is busy with other things


class LiveDaemon:
    """`gpumux serve` as a child. Starting waits for READY=1, as a service manager would."""

    def __init__(self, runtime_dir: Path, *flags: str):
        self.endpoint = f"ipc://{runtime_dir}/gpumux.sock"
        self.lines: list[str] = []
        self._ready = threading.Event()
        self._said = threading.Event()
        command = [sys.executable, "-m", "gpumux.cli.main", "serve", "--device", "cpu", "--threads", "1"]
        self.process = subprocess.Popen(
            [*command, "--endpoint", self.endpoint, "--metrics-port", "0", *flags],
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        assert self._ready.wait(SOON_S), "".join(self.lines)
        assert self.process.poll() is None, "".join(self.lines)

    def _read(self):
        for line in self.process.stderr:
            self.lines.append(line)
            self._said.set()
            if " serves " in line:
                self._ready.set()
        self._ready.set()

    def until(self, words: str, after: int = 0) -> str:
        """The first line of its log, but for so many, that has `words`; waited for."""
        end = time.monotonic() + SOON_S
        while time.monotonic() < end:
            found = [line for line in self.lines[after:] if words in line]
            if found:
                return found[0]
            self._said.wait(1.0)
            self._said.clear()
        raise AssertionError(f"never said {words!r}:\n{self.log}")

    @property
    def log(self) -> str:
        return "".join(self.lines)

    @property
    def metrics_url(self) -> str:
        return re.search(r"metrics at (\S+)", self.log)[1]

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Ask it to stop; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(SOON_S)
        self._reader.join(SOON_S)
        self.process.stderr.close()
        return code


@contextmanager
def serving(runtime_dir: Path, *flags: str):
    daemon = LiveDaemon(runtime_dir, *flags)
    try:
        yield daemon
    finally:
        if daemon.process.returncode is None:
            daemon.stop()


class LiveJob:
    """A job over a session, running one Program at a time."""

    def __init__(
        self, session: Session, program, *, new_buffers=(), binding=(), priority=0, name="live", inflight=2, gang=None
    ):
        self.session = session
        self.id = uuid.uuid4().hex
        self.heard: list = []
        self.done: dict[int, object] = {}
        self.transfers: dict[int, object] = {}
        self.saved: dict[int, msg.SnapshotSaved] = {}
        self.ended: list = []
        session.register(self.id, self._hear)
        spec = JobSpec(name, Priority(priority), max_inflight=inflight, gang=gang)
        session.call(open_message(self.id, spec))
        self.steps = 0
        self.moves = 0
        self.program = program
        self.layout = slot_layout(program)
        self.loaded, _ = session.call(
            msg.LoadProgram(0, self.id, 0, list(new_buffers), list(binding)), [codec.encode(program)], SOON_S
        )  # its check is nice to everything else that runs
        self.data = session.segment(self.loaded.segment, self.loaded.slots * self.loaded.slot_bytes)

    def _hear(self, message, frames):
        if isinstance(message, (msg.StepDone, msg.StepFailed)):
            self.done[message.step] = message
        elif isinstance(message, msg.TransferDone):
            self.transfers[message.transfer] = message
        elif isinstance(message, msg.SnapshotSaved):
            self.saved[message.snapshot] = message
        elif isinstance(message, msg.JobEnded):
            self.ended.append(message)

    def post(self, *inputs: bytes, slot=0, scalars=()) -> int:
        """Send one step; its number."""
        self.steps += 1
        base = slot * self.loaded.slot_bytes
        for offset, data in zip(self.layout.inputs, inputs, strict=True):
            self.data[base + offset : base + offset + len(data)] = data
        self.session.post(msg.Step(self.id, self.steps, 0, slot, list(scalars), 0))
        return self.steps

    def wait(self, number: int):
        """The answer to a step."""
        assert self.session.wait(lambda: number in self.done, SOON_S)
        return self.done[number]

    def run(self, *inputs: bytes, slot=0, scalars=()) -> list[memoryview]:
        """One step, waited for; views of where its results begin."""
        answer = self.wait(self.post(*inputs, slot=slot, scalars=scalars))
        assert isinstance(answer, msg.StepDone), answer
        return [self.data[slot * self.loaded.slot_bytes + offset :] for offset in self.layout.results]

    def push(self, buffers: list[int], data: bytes):
        """Fill state buffers with `data`."""
        self.moves += 1
        opened, _ = self.session.call(msg.OpenTransfer(0, self.id, self.moves, buffers, True))
        view = self.session.segment(opened.segment, opened.nbytes)
        view[: len(data)] = data
        view.release()
        self.session.post(msg.FillTransfer(0, self.id, self.moves, 0))
        return self._moved(opened)

    def pull(self, buffers: list[int]) -> bytes:
        """The bytes of state buffers."""
        self.moves += 1
        opened, _ = self.session.call(msg.OpenTransfer(0, self.id, self.moves, buffers, False))
        view = self.session.segment(opened.segment, opened.nbytes)
        assert self.session.wait(lambda: self.moves in self.transfers, SOON_S)
        data = bytes(view)
        view.release()
        self._moved(opened)
        return data

    def _moved(self, opened):
        assert self.session.wait(lambda: self.moves in self.transfers, SOON_S)
        self.session.release_segment(opened.segment)
        assert self.transfers[self.moves].code == "", self.transfers[self.moves]

    def close(self, drain=True):
        self.data.release()
        self.session.call(msg.CloseJob(0, self.id, drain))
        assert self.session.wait(lambda: bool(self.ended), SOON_S)


def floats(*values: float) -> bytes:
    return struct.pack(f"{len(values)}f", *values)


def read_floats(view, count: int) -> tuple[float, ...]:
    values = struct.unpack(f"{count}f", bytes(view[: 4 * count]))
    view.release()
    return values


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def slow(size: int = 1024, products: int = 60):
    """input 0: float32[size, size] -> result 0: its repeated product with itself; seconds of work."""
    from gpumux.program.ir import Op, Program, Storage, TensorRef, View

    nbytes = 4 * size * size
    kinds = ["input", *["temp"] * products]
    storages = tuple(Storage(kind, nbytes, 0 if kind == "input" else -1) for kind in kinds)
    views = tuple(View(i, "float32", (size, size), (size, 1)) for i in range(len(kinds)))
    ops = tuple(Op("aten.mm.default", (TensorRef(i), TensorRef(0)), (), (i + 1,)) for i in range(products))
    return Program(storages, views, ops, (0,), (products,))
