"""Clients that use gpumux's session and hand-made Programs, without torch, so that many of them fit in a process.

The expected result of each step is computed with numpy in float32 or int64. The operators used here round each element
once, so the result is determined to the bit. A step is right if its StepDone comes and its slot holds these bits.
"""

from __future__ import annotations

import json
import random
import signal
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpumux.client.session import Session
from gpumux.errors import AdmissionRefused, DaemonGone, GpumuxError, JobClosed, UnknownJob
from gpumux.program import codec
from gpumux.program.ir import Program, ProgramBuilder, TensorRef, slot_layout
from gpumux.wire import messages as m
from microbench.soaking.counters import SharedCounters
from microbench.soaking.plan import ENDINGS, ClientSlot

WAIT_S = 600.0  # for one answer, with a hundred other clients on the machine
LOOK = 0.02  # of the steps are followed by a comparison of the state
Array = NDArray[Any]


class Gone(Exception):
    """An operator stopped the client's job, or the daemon ended its session."""


class Work:
    """A Program, and its expected results: `run(batch, scalars)` does the step with numpy."""

    def __init__(self, kind: str, size: int) -> None:
        self.size = size
        self.state: Array = np.zeros(size, np.float32)
        build = ProgramBuilder()
        self.scalars = 0
        if kind == "whole":  # on integers, without state
            x = build.input("int64", [size])
            thrice = build.call("aten.mul.Scalar", x, 3, dtype="int64", size=[size])
            result = build.call("aten.add.Scalar", thrice, 1, dtype="int64", size=[size])
            self.run: Callable[[Array, Sequence[float]], Array] = lambda x, _: x * 3 + 1
        else:
            result = build.state("float32", [size])
            if kind == "mix":
                x = build.input("float32", [size])
                build.add_op("aten.mul_.Scalar", result, build.scalar(), outs=(result.view,))
                build.add_op("aten.add_.Tensor", result, x, outs=(result.view,))
                self.run = self._mix
            else:
                build.add_op("aten.add_.Scalar", result, build.scalar(), outs=(result.view,))
                self.run = self._count
            self.scalars = 1
        self.batch_type: Any = {"whole": np.int64, "mix": np.float32, "counter": None}[kind]
        self.kind = kind
        self.program = _built(build, result)

    def _count(self, batch: Array, scalars: Sequence[float]) -> Array:
        self.state = self.state + np.float32(scalars[0])
        return self.state

    def _mix(self, batch: Array, scalars: Sequence[float]) -> Array:
        self.state = self.state * np.float32(scalars[0]) + batch
        return self.state

    def batch(self, draw: np.random.Generator) -> Array | None:
        if self.batch_type is None:
            return None
        if self.batch_type is np.int64:
            return draw.integers(-(1 << 40), 1 << 40, self.size)
        return draw.standard_normal(self.size, np.float32)


def _built(build: ProgramBuilder, result: TensorRef) -> Program:
    build.result(result)
    return build.build()


class Life:
    """One client, from its connection to its end. `expect(text)` records an error."""

    def __init__(
        self, client_slot: ClientSlot, endpoint: str, counters: SharedCounters, leave: threading.Event
    ) -> None:
        number = counters.add(client_slot.number, "lives")
        self.client_slot = client_slot
        self._counters = counters
        self._leave = leave
        self._draw = random.Random(f"{client_slot.number}:{client_slot.kind}:{number}")
        self._numbers = np.random.default_rng(self._draw.randrange(1 << 60))
        self._work = Work(client_slot.kind, client_slot.size)
        self._answers: dict[int, Any] = {}
        self._moved: dict[int, m.TransferDone] = {}
        self._ended: m.JobEnded | None = None
        self._under_way: deque[tuple[int, int, bytes]] = deque()  # step, slot, expected result
        self._step = self._transfer = 0
        self._job = uuid.UUID(int=self._draw.getrandbits(128)).hex
        self._session = Session.connect(endpoint, WAIT_S)

    def live(self) -> None:
        """Run until its time is over, and close the session in any case. Raises Gone if its job is stopped or its
        session ended."""
        ending = self._draw.choice(ENDINGS)
        try:
            self._open()
            until = time.monotonic() + self._draw.uniform(0.2, 1.0) * self.client_slot.life_s
            while time.monotonic() < until and not self._leave.is_set():
                self._turn()
            self._end("close" if self._leave.is_set() else ending)
        except BaseException as error:
            self._cut()
            if isinstance(error, GpumuxError) and self._ended is not None:
                raise Gone from error
            raise
        finally:
            self._session.close()

    def _open(self) -> None:
        client_slot, work, session = self.client_slot, self._work, self._session
        session.register(self._job, self._hear)
        open_job = m.OpenJob(
            0,
            self._job,
            f"soak-{client_slot.number}",
            client_slot.priority,
            client_slot.weight,
            1.1,
            None,
            client_slot.inflight,
            0,
        )
        session.call(open_job, timeout=WAIT_S)
        state = [work.state.nbytes] if work.kind != "whole" else []
        load = m.LoadProgram(0, self._job, 0, state, list(range(len(state))))
        self._loaded, _ = session.call(load, [codec.encode(work.program)], WAIT_S)
        self._layout = slot_layout(work.program)
        self._data = session.segment(self._loaded.segment, self._loaded.slots * self._loaded.slot_bytes)
        self._free = list(range(min(self._loaded.slots, client_slot.inflight)))

    def _hear(self, message: Any, frames: list[bytes]) -> None:
        if isinstance(message, (m.StepDone, m.StepFailed)):
            self._answers[message.step] = message
        elif isinstance(message, m.TransferDone):
            self._moved[message.transfer] = message
        elif isinstance(message, m.JobEnded):
            self._ended = message

    def _turn(self) -> None:
        if not self._free:
            self._collect()
        self._submit()
        chance = self._draw.random()
        if chance < LOOK and self._work.kind != "whole":
            self._look()
        elif chance < 1.5 * LOOK:
            self._rest()
        if self.client_slot.pace_s:
            self._leave.wait(self._draw.uniform(0.0, self.client_slot.pace_s))
            self._check_ended()

    def _submit(self) -> None:
        work, draw = self._work, self._draw
        slot = self._free.pop()
        base = slot * self._loaded.slot_bytes
        batch = work.batch(self._numbers)
        if batch is not None:
            at = base + self._layout.inputs[0]
            self._data[at : at + batch.nbytes] = batch.tobytes()
        scalars: list[float | int] = [draw.choice([0.5, -0.25, 0.1, 1.0, 1e-3]) for _ in range(work.scalars)]
        expected = work.run(batch if batch is not None else work.state, [float(s) for s in scalars]).tobytes()
        self._step += 1
        self._under_way.append((self._step, slot, expected))
        self._session.post_step(m.Step(self._job, self._step, 0, slot, scalars, 0))

    def _collect(self) -> None:
        """Wait for the oldest step, and compare its result with the expected one."""
        step, slot, expected = self._under_way[0]
        self._wait(lambda: step in self._answers)
        answer = self._answers.pop(step)
        if isinstance(answer, m.StepFailed):
            self._wait(lambda: self._ended is not None)
            raise Gone
        at = slot * self._loaded.slot_bytes + self._layout.results[0]
        same = bytes(self._data[at : at + len(expected)]) == expected
        self._counters.add(self.client_slot.number, "right" if same else "wrong")
        if not same:
            self._counters.trouble(self.client_slot.number, f"step {step} of {self._job} has the wrong bits")
        self._under_way.popleft()
        self._free.append(slot)

    def _wait(self, done: Callable[[], bool]) -> None:
        if not self._session.wait(lambda: done() or self._ended is not None, WAIT_S):
            raise RuntimeError(f"no answer in {WAIT_S:g} s")
        if not done():
            raise Gone

    def _check_ended(self) -> None:
        self._session.pump()
        if self._ended is not None:
            raise Gone

    def _look(self) -> None:
        """Pull the whole state, after the steps that are under way, and compare it."""
        self._transfer += 1
        number = self._transfer
        opened, _ = self._session.call(m.OpenTransfer(0, self._job, number, [0], False), timeout=WAIT_S)
        self._wait(lambda: number in self._moved)
        if self._moved.pop(number).code:
            raise Gone
        view = self._session.segment(opened.segment, opened.nbytes)
        expected = self._work.state.tobytes()
        same = bytes(view[: len(expected)]) == expected
        view.release()
        self._session.release_segment(opened.segment)
        self._counters.add(self.client_slot.number, "states_right" if same else "states_wrong")
        if not same:
            self._counters.trouble(self.client_slot.number, f"the state of {self._job} has the wrong bits")

    def _rest(self) -> None:
        """Pause its own job for a moment."""
        self._session.call(m.PauseJob(0, self._job), timeout=WAIT_S)
        self._leave.wait(self._draw.uniform(0.0, 0.3))
        self._session.call(m.ResumeJob(0, self._job), timeout=WAIT_S)

    def _end(self, how: str) -> None:
        if how == "vanish":
            self._cut()
            return
        if how == "close":
            while self._under_way:
                self._collect()
        self._data.release()
        self._session.call(m.CloseJob(0, self._job, how == "close"), timeout=WAIT_S)
        self._wait_end()

    def _wait_end(self) -> None:
        if not self._session.wait(lambda: self._ended is not None, WAIT_S):
            raise RuntimeError("no message said that the job ended")
        assert self._ended is not None
        if self._ended.code:
            raise RuntimeError(f"the job ended with {self._ended.code}: {self._ended.message}")

    def _cut(self) -> None:
        """Disconnect without a message, as a process that dies does."""
        self._session._pump.die(DaemonGone("cut by its client"))
        data = getattr(self, "_data", None)
        if data is not None:
            data.release()


def run_slot(
    client_slot: ClientSlot,
    endpoint: str,
    counters: SharedCounters,
    leave: threading.Event,
    was_suspended: Callable[[], bool],
) -> None:
    """Run one client after the other in a client slot, until SIGTERM."""
    while not leave.is_set():
        try:
            Life(client_slot, endpoint, counters, leave).live()
        except Gone:
            counters.add(client_slot.number, "stopped")
        except AdmissionRefused:
            counters.add(client_slot.number, "refused")
            leave.wait(0.5)
        except (DaemonGone, UnknownJob, JobClosed) as error:
            if was_suspended():
                counters.add(client_slot.number, "cut")
            elif isinstance(error, DaemonGone):
                counters.trouble(client_slot.number, f"{type(error).__name__}: {error}")
            else:
                counters.add(
                    client_slot.number, "stopped"
                )  # an operator stopped it, and the message about that has not arrived
        except Exception as error:  # noqa: BLE001 - every other error is recorded
            counters.trouble(client_slot.number, f"{type(error).__name__}: {error}")
        leave.wait(0.05)


class SuspensionMonitor:
    """Whether this process was stopped for long a short while ago: then its sessions may be lost."""

    BEAT_S = 0.5

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._last = time.monotonic()
        self._suspended = -1e9
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            time.sleep(self.BEAT_S)
            now = time.monotonic()
            if now - self._last > 0.5 * self._lease_s:
                self._suspended = now
            self._last = now

    def __call__(self) -> bool:
        now = time.monotonic()
        return now - self._last > 0.5 * self._lease_s or now - self._suspended < 2 * self._lease_s


def main(path: str, process: str) -> int:
    """`path`: a JSON file {endpoint, counters, all: number of client slots, lease_s, slots}; `process`: its number."""
    spec = json.loads(Path(path).read_text())
    counters = SharedCounters(Path(spec["counters"]), spec["all"])
    leave = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: leave.set())
    client_slots = [
        ClientSlot(**client_slot) for client_slot in spec["slots"] if client_slot["process"] == int(process)
    ]
    was_suspended = SuspensionMonitor(spec["lease_s"])
    threads = [
        threading.Thread(
            target=run_slot,
            args=(client_slot, spec["endpoint"], counters, leave, was_suspended),
            name=f"client slot {client_slot.number}",
        )
        for client_slot in client_slots
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():  # a join without a timeout would delay the signal's handler
            thread.join(0.2)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
