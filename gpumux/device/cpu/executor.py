"""The process that runs one job: it holds the job's state and programs, and runs one piece at a time.

It blocks in `recv`, carries out commands in order, and answers. It answers a failure of the job's work with FAILED and
ends, because the job's state is unusable then; a step that it could undo with STEP_FAILED. A crash needs no answer: the
daemon sees the end of the process.

Garbage is not collected between steps, since that would delay a step for tens of milliseconds. Objects of a step are
freed by reference counts alone, so no object that holds a tensor may be part of a cycle
(`tests/device/cpu/test_memory.py` runs steps without the collector).
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import socket
import struct
from collections.abc import Callable
from functools import partial
from time import monotonic, perf_counter
from typing import Any

import torch

from gpumux.device.base import GENERATOR
from gpumux.device.cpu.group import GroupSteps, part_of, unpack_fusion
from gpumux.device.cpu.peers import Moved, Peers
from gpumux.device.cpu.program import LoadedProgram
from gpumux.device.run.graph import turn_off_optimisation
from gpumux.device.run.interpreter import CoreWaits, first_lines
from gpumux.device.run.operands import allocate_state, over
from gpumux.device.run.randomness import move_generator
from gpumux.device.run.schema import CurrentNumerics
from gpumux.device.workers.channel import (
    ANSWER,
    CUT,
    DONE,
    DONE_BODY,
    EXCHANGED,
    FAILED,
    JOIN,
    LAUNCH,
    LAUNCH_HEAD,
    LEAVE,
    LOAD,
    LOADED,
    NICE,
    PAGE_LAUNCH,
    PAGE_LAUNCH_AT,
    PAGE_MEMORY,
    PAGE_MEMORY_AT,
    PAGE_TIMES,
    PAGE_TIMES_AT,
    PROFILE,
    PROFILED,
    RECUT,
    REFUSED,
    STEP_FAILED,
    TRANSFER,
    TRANSFERRED,
    Channel,
    unpack,
)
from gpumux.device.workers.confinement import data_bytes, end_connecting, limit_data
from gpumux.errors import AdmissionRefused, GpumuxError, JobFailed, ProgramError
from gpumux.program.codec import decode
from gpumux.program.ir import ALIGN, Program, aligned
from gpumux.program.profile import dumps
from gpumux.program.validate import refuse_rank, state_slots
from gpumux.types import Gang

# ---- Answering steps directly, without the daemon: the client waits for one process less.


_NUMBER, _SECONDS = struct.Struct(">Q"), struct.Struct(">d")
_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL


class StepAnswers:
    """Measures the running step, and answers it if the client has a channel. `page` is shared with the daemon, which
    reads there that a step was answered before the executor's message about it arrives."""

    def __init__(self, page: mmap.mmap) -> None:
        self._page = page
        self.channel: socket.socket | None = None  # the client's channel
        # When each step under way started, and its device seconds so far: of two waves, two are.
        self._steps: dict[int, tuple[float, float]] = {}

    def earlier_step(self, step: int) -> bool:
        """Whether a step before this one is under way."""
        return any(other < step for other in self._steps)

    def use(self, channel: int, packet: bytes, step_at: int, queue_at: int, device_at: int, total_at: int) -> None:
        """Answer steps on `channel`, which this object closes, by filling `packet` (device.base.AnswerForm)."""
        self.close()
        self.channel = socket.socket(fileno=channel)
        self._packet = bytearray(packet)
        self._step_at, self._queue_at, self._device_at, self._total_at = step_at, queue_at, device_at, total_at

    def ran(
        self, launch: int, step: int, submitted: float, started: float, ended: float, suspended: float, last: bool
    ) -> bool:
        """Record a piece that ran, and was suspended for `suspended` seconds; all times in seconds. `submitted` is -1
        unless the step may be answered. `last`: the piece has ended its step. Returns whether the step was answered."""
        began, device_s = self._steps.get(step, (started, 0.0))
        device_s += max(0.0, ended - started - suspended)
        if not last:
            self._steps[step] = began, device_s
            return False
        self._steps.pop(step, None)
        if submitted < 0.0 or self.channel is None:
            return False
        # Before the answer: the client's next message may reach the daemon before the executor's.
        PAGE_TIMES.pack_into(self._page, PAGE_TIMES_AT, started, ended, suspended)
        PAGE_LAUNCH.pack_into(self._page, PAGE_LAUNCH_AT, launch)
        answered = self.answer(step, began - submitted, device_s, ended - submitted)
        if not answered:
            PAGE_LAUNCH.pack_into(self._page, PAGE_LAUNCH_AT, 0)
        return answered

    def answer(self, step: int, queue_s: float, device_s: float, total_s: float) -> bool:
        """Answer a step. Returns whether the channel took the answer. There must be a channel."""
        packet, channel = self._packet, self.channel
        assert channel is not None
        _NUMBER.pack_into(packet, self._step_at, step)
        _SECONDS.pack_into(packet, self._queue_at, queue_s if queue_s > 0.0 else 0.0)
        _SECONDS.pack_into(packet, self._device_at, device_s)
        _SECONDS.pack_into(packet, self._total_at, total_s)
        try:
            channel.send(packet, _FLAGS)
        except OSError:  # full, or gone: the daemon answers from now on, or answers would change their order
            self.close()
            return False
        return True

    def close(self) -> None:
        """Stop answering. Idempotent."""
        channel, self.channel = self.channel, None
        if channel is not None:
            channel.close()


# ---- How much memory the process really takes for its job: the most that it held during a step.
#
# The measure counts memory of the process alone: its anonymous memory, less what it had when it was forked, and shared
# memory mapped since. Linux keeps the highest value (VmHWM in /proc/PID/status), and resets it on request
# (/proc/PID/clear_refs, proc(5)). Where the reset is forbidden, the highest value since the process began is used. A
# measurement takes time, so not every step is measured.


MEASURE_EVERY_S = 0.5
SLACK, SLACK_BYTES = 1.15, 64 << 20  # allowed beyond what is planned, before the heap is trimmed
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
_MMAP_THRESHOLD, _MMAP_MAX = -3, -4  # of mallopt(3)
LARGE_BYTES, MOST_LARGE = 256 << 10, 1 << 16  # a fixed threshold is not raised by what is freed
_BEGIN_ANEW = b"5"


class PeakMemory:
    """Measures this process, and writes the result, in bytes, to the page that it shares with the daemon. `reset`: a
    descriptor of /proc/self/clear_refs, which the process could not open any more, or -1."""

    def __init__(self, page: mmap.mmap, reset: int) -> None:
        self._page, self._reset = page, reset
        anonymous, shared, _, _ = _memory()
        self._base = anonymous + shared
        self._next = 0.0
        self._looking = False

    def begin(self, now: float) -> None:
        """Reset the peak at the start of a step, at most every MEASURE_EVERY_S. `now` in seconds."""
        if now < self._next or self._looking:  # of two waves the other one's step may be under way
            return
        self._next, self._looking = now + MEASURE_EVERY_S, True
        if self._reset >= 0:
            try:
                os.write(self._reset, _BEGIN_ANEW)
            except OSError:
                pass  # some containers forbid it

    def end(self) -> int:
        """Read the peak at the end of a step. Returns bytes, 0 if this step was not measured."""
        if not self._looking:
            return 0
        self._looking = False
        _, _, files, highest = _memory()
        held = max(0, highest - files - self._base)
        PAGE_MEMORY.pack_into(self._page, PAGE_MEMORY_AT, held)
        return held


class Heap:
    """Returns free heap memory to the kernel if a job takes more than was planned for it: glibc keeps free blocks of
    tens of megabytes for reuse, and those of one batch shape do not fit another's. The next step pays for mapping the
    pages again, so each trim doubles the pause before the next one."""

    def __init__(self) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
        self._set = getattr(ctypes.CDLL(None), "mallopt", None)
        self._planned = 0
        self._largest = 0
        self._next, self._pause = 0.0, FIRST_PAUSE_S

    def loaded(self, kept: int, transient: int) -> None:
        """Plan for another Program. Bytes that it keeps add up; of transient bytes the largest count, because Programs
        never run at once."""
        self._planned += kept
        self._largest = max(self._largest, transient)
        self._next, self._pause = 0.0, FIRST_PAUSE_S

    @property
    def planned(self) -> int:
        """Bytes."""
        return self._planned + self._largest

    def share(self) -> None:
        """Return each large block to the kernel as it is freed: two waves, or two jobs, give memory to each other in
        turns, and blocks that the heap keeps for one of them would not fit what the other needs. Each step pays for
        mapping their pages again. (The fork server has all blocks come from the heap: fork_server.py.)"""
        if self._set is not None:
            self._set(_MMAP_MAX, MOST_LARGE)
            self._set(_MMAP_THRESHOLD, LARGE_BYTES)

    def look(self, held: int, now: float) -> None:
        """Trim the heap if a step held more bytes than planned, and no trim was made recently."""
        if self._trim is None or now < self._next or held <= self.planned * SLACK + SLACK_BYTES:
            return
        self._trim(0)
        self._next, self._pause = now + self._pause, min(LONGEST_PAUSE_S, 2 * self._pause)


def _memory() -> tuple[int, int, int, int]:
    """Resident bytes: anonymous, shared memory, files; and the highest sum of the three."""
    with open("/proc/self/status", "rb") as file:
        lines = (line.split() for line in file)
        found = {words[0]: int(words[1]) << 10 for words in lines if words[0] in _FIELDS}
    return tuple(found.get(name, 0) for name in _FIELDS)  # type: ignore[return-value]


_FIELDS = (b"RssAnon:", b"RssShmem:", b"RssFile:", b"VmHWM:")


# ---- The executor.


_HEAD = LAUNCH_HEAD.size - 1
IDLE_S = 2  # after this long without a message, collect garbage


class Executor:
    """Carries out the daemon's commands for one job. `page` is shared with the daemon."""

    def __init__(self, channel: Channel, settings: dict[str, Any], page: mmap.mmap) -> None:
        self._channel = channel
        self._page = page
        self._answers = StepAnswers(page)
        self._peak = PeakMemory(page, settings["peak"])
        self._connects = settings["connects"]
        self._before = data_bytes()
        self._heap = Heap()
        if settings["shares"]:
            self._heap.share()
        self._target_s: float = settings["target_s"]
        self._progress = progress_on(page)
        self._buffers: list[torch.Tensor] = []
        self._programs: dict[int, LoadedProgram] = {}
        self._groups: dict[int, GroupSteps] = {}  # by the fused program's number
        self._numerics = CurrentNumerics()
        self._newest: LoadedProgram | None = None  # the program that the newest launch ran
        self._python_s = python_cost()
        self._usual = settings["usual"]
        self._waits = CoreWaits() if settings["nice"] else None  # None: it gives way to no other job
        self._peers: Peers | None = None  # of a rank of a gang
        # By step, the program and its next piece, which begins with collectives. Those of a later step are carried out
        # when the earlier one has ended, since all ranks have to meet them in one order.
        self._gates: dict[int, tuple[LoadedProgram, int]] = {}

    def serve(self) -> None:
        """Carry out commands until the job fails. Raises EOFError when the daemon has closed the channel."""
        channel, idle = self._channel, False
        while True:
            try:
                tag, body, fds = channel.receive()
            except BlockingIOError:
                if not idle:
                    gc.collect()
                idle = True
                continue
            idle = False
            if tag == LAUNCH:
                if not self._launch(body, fds):
                    return
            elif tag == LOAD:
                self._load(fds)
            elif tag == ANSWER:
                self._answers.use(fds[0], *unpack(body))
            elif tag == NICE:
                self._renice(unpack(body)[0])
            elif tag == CUT:
                self._aim(*unpack(body))
            elif tag == JOIN:
                self._join(*unpack(body))
            elif tag == LEAVE:
                self._leave()
            elif tag == TRANSFER:
                self._transfer(unpack(body), fds)
            elif tag == PROFILE:
                self._profile(unpack(body)[0])

    def _launch(self, body: memoryview, fds: list[int]) -> bool:
        """Run a piece, or several, and report it. Returns False if the job failed."""
        launch, step, program, cut, piece, pieces, slot, submitted = _LAUNCH_BODY.unpack_from(body)
        scalars = unpack(_take(fds[0]) if fds else body[_HEAD:]) if piece == 0 else None
        waits = self._waits
        before = waits.seconds() if waits is not None else 0.0
        started = monotonic()
        if piece == 0:
            self._peak.begin(started)
        try:
            loaded = self._programs.get(program)
            if loaded is None:
                raise ProgramError(f"no program {program} is loaded", "load a program before launching it")
            if loaded is not self._newest:  # numerics are the process's, not a program's
                self._numerics.apply(loaded.program.numerics)
                self._newest = loaded
            group = self._groups.get(program)
            if group is not None and scalars is not None:
                scalars = group.begin(scalars)
            for each in range(piece, piece + pieces):
                ended_step = loaded.run(step, cut, each, slot, scalars if each == 0 else None)
            if group is not None and ended_step:
                group.end()
        except GpumuxError as error:
            self._channel.send(FAILED, [launch, error.code, error.message, error.remedy])
            return False
        ended = monotonic()
        held = self._peak.end() if ended_step else 0
        suspended = waits.seconds() - before if waits is not None else 0.0
        fault = loaded.fault if ended_step else None
        answered = self._answers.ran(
            launch, step, submitted if fault is None else -1.0, started, ended, suspended, ended_step
        )
        if fault is not None:
            said = [launch, started, ended, suspended, fault.code, fault.message, fault.remedy]
            self._channel.send(STEP_FAILED, said)
            return True
        self._channel.sock.send(DONE_BODY.pack(DONE, launch, started, ended, answered, suspended))
        if self._peers is not None and loaded.waits(cut, piece + pieces):
            self._gates[step] = loaded, piece + pieces
        if self._gates and not self._answers.earlier_step(min(self._gates)):
            self._exchange(min(self._gates), ended)
        if ended_step:
            self._recut(program, loaded)
            if held:
                self._heap.look(held, ended)
        return True

    def _join(self, *gang: Any) -> None:
        """Find the job's peers, in a thread of their own, which carries out collectives from then on."""
        self._peers = Peers(Gang(*gang), self._joined, self._lost)

    def _joined(self) -> None:
        """No connections but those to the peers. Called by the thread of the peers."""
        if self._connects:
            end_connecting()

    def _leave(self) -> None:
        if self._peers is not None:
            self._peers.leave()

    def _exchange(self, step: int, now: float) -> None:
        """Begin the collectives before the next piece of a step."""
        assert self._peers is not None
        loaded, piece = self._gates.pop(step)
        self._peers.begin(loaded.exchange, partial(self._exchanged, step, piece, now))

    def _exchanged(self, step: int, piece: int, started: float, moved: Moved, exchange_s: float) -> None:
        """Report that the collectives before a piece have ended. Called by the thread of the peers."""
        bytes_by_rank = [(rank, *nbytes) for rank, nbytes in moved.items()]
        self._channel.send(EXCHANGED, [step, piece, started, monotonic(), bytes_by_rank, exchange_s])

    def _lost(self, error: GpumuxError) -> None:
        """End the process: the job has lost its peers. Called by the thread of the peers; the main one may run."""
        self._channel.send(FAILED, [-1, error.code, error.message, error.remedy])
        os._exit(0)

    def _renice(self, nice: int) -> None:
        """The fork server has set the niceness of this process."""
        self._waits = CoreWaits() if nice > self._usual else None

    def _aim(self, program: int, target_s: float | None) -> None:
        """Set the target length of a program's pieces, in seconds. Does nothing if the program is not loaded."""
        if program in self._programs:
            self._programs[program].aim(target_s)

    def _recut(self, program: int, loaded: LoadedProgram) -> None:
        pieces = loaded.recut()
        if pieces is not None:
            gc.collect()  # garbage that is frozen would never be freed
            gc.freeze()
            body = [program, loaded.newest, pieces, loaded.bounds, loaded.through_python, loaded.gated, loaded.wave]
            self._channel.send(RECUT, body)

    def _load(self, fds: list[int]) -> None:
        """Load a program. `fds`: the description with the encoded program, and the data segment."""
        description, data_fd = fds
        program = -1
        kept = len(self._buffers)
        try:
            with mmap.mmap(description, 0, prot=mmap.PROT_READ) as memory:
                program, load = _read_load(memory)
                decoded = decode(bytes(memory[load["start"] :]))
            refusal = refuse_rank(decoded, self._peers.gang if self._peers is not None else None)
            if refusal is not None:
                raise refusal
            data = mmap.mmap(data_fd, load["data_bytes"]) if load["data_bytes"] else mmap.mmap(-1, ALIGN)
            more = sum(load["new_buffers"]) + load["data_bytes"] + load["transient_bytes"]
            limit_data(self._before, self._heap.planned + more)
            self._buffers.extend(allocate_state(load["new_buffers"]))
            if load["member"] is None:
                bound = [self._buffer(i) for i in load["binding"]]
            else:
                fused, place = load["member"]
                bound = self._parts(fused, place, decoded)
                self._buffers.extend(bound)
            loaded = LoadedProgram(
                decoded,
                bound,
                data,
                load["slots"],
                target_s=self._target_s,
                python_s=self._python_s,
                progress=self._progress,
                undoes=not load["fusion"],
            )
            if load["member"] is not None:
                self._groups[fused].join(place, loaded, data)
            if load["fusion"]:
                self._groups[program] = GroupSteps(loaded, data, unpack_fusion(load["fusion"]))
        except (GpumuxError, RuntimeError, ValueError, IndexError, OSError, MemoryError) as error:
            del self._buffers[kept:]
            fault = error if isinstance(error, GpumuxError) else _refusal(error)
            self._channel.send(REFUSED, [program, fault.code, fault.message, fault.remedy])
            return
        finally:
            os.close(description)
            os.close(data_fd)
        self._programs[program] = loaded
        if decoded.wave is not None:
            self._heap.share()
        constants = sum(map(len, decoded.consts))
        self._heap.loaded(sum(load["new_buffers"]) + load["data_bytes"] + constants, load["transient_bytes"])
        gc.collect()
        gc.freeze()
        targets = [op.target for op in decoded.ops]
        table = list(dict.fromkeys(targets))
        place = {target: index for index, target in enumerate(table)}
        listing = [
            loaded.guesses(),
            loaded.bounds,
            table,
            [place[target] for target in targets],
            loaded.gated,
            loaded.wave,
        ]
        self._channel.send(LOADED, [program, *listing])

    def _profile(self, program: int) -> None:
        try:
            loaded = self._programs.get(program)
            if loaded is None:
                raise ProgramError(f"no program {program} is loaded", "name one that is")
            text = dumps(loaded.profile()).encode()
        except GpumuxError as error:
            self._channel.send(PROFILED, [b"", error.code, error.message, error.remedy])
            return
        self._channel.send(PROFILED, [text, "", "", ""])

    def _parts(self, fused: int, place: int, program: Program) -> list[torch.Tensor]:
        """A member's part of each buffer of a group's state, by the state slots of the member's own program."""
        loaded = self._programs.get(fused)
        if loaded is None or fused not in self._groups:
            raise ProgramError(f"program {fused} is no fused one", "load the fused program before its members'")
        sizes = state_slots(program)
        lines = [loaded.operands.state(slot) for slot in range(len(sizes))]
        return [part_of(line, place * nbytes, nbytes) for line, nbytes in zip(lines, sizes, strict=True)]

    def _buffer(self, index: int) -> torch.Tensor:
        if not 0 <= index < len(self._buffers):
            raise ProgramError(f"no state buffer {index}", "name buffers by their order of allocation")
        return self._buffers[index]

    def _transfer(self, body: Any, fds: list[int]) -> None:
        transfer, buffers, nbytes, into_device = body
        try:
            # The pages exist. Mapping them all at once makes the copy faster, and the job's steps wait for it.
            with mmap.mmap(fds[0], nbytes, flags=_POPULATED) if nbytes else mmap.mmap(-1, ALIGN) as memory:
                self._copy(memory, buffers, nbytes, into_device)
        except (GpumuxError, RuntimeError, ValueError, IndexError, OSError) as error:
            fault = error if isinstance(error, GpumuxError) else JobFailed(f"the transfer failed: {first_lines(error)}")
            self._channel.send(TRANSFERRED, [transfer, fault.code, fault.message, fault.remedy])
            return
        finally:
            os.close(fds[0])
        self._channel.send(TRANSFERRED, [transfer, "", "", ""])

    def _copy(self, memory: mmap.mmap, buffers: list[int], nbytes: int, into_device: bool) -> None:
        at = 0
        for index in buffers:
            if index == GENERATOR:
                move_generator(torch.default_generator, memory, at, nbytes, into_device)
                return
            buffer = self._buffer(index)
            if at + buffer.numel() > nbytes:
                raise JobFailed(f"the transfer's segment has {nbytes} bytes, too few for its buffers", "make it larger")
            shared = over(memory, at, buffer.numel())
            if into_device:
                buffer.copy_(shared)
            else:
                shared.copy_(buffer)
            at += aligned(buffer.numel())
            del shared  # the mapping can't be closed under a tensor


_POPULATED = mmap.MAP_SHARED | mmap.MAP_POPULATE
_LAUNCH_BODY = struct.Struct("<" + LAUNCH_HEAD.format[2:])  # without the tag


def _take(fd: int) -> bytes:
    """Read the content of a descriptor, and close it."""
    try:
        return os.pread(fd, os.fstat(fd).st_size, 0)
    finally:
        os.close(fd)


def _read_load(memory: mmap.mmap) -> tuple[int, dict[str, Any]]:
    size = int.from_bytes(memory[:8], "little")
    load: dict[str, Any] = unpack(memory[8 : 8 + size])
    load["start"] = 8 + size
    return load["program"], load


def _refusal(error: BaseException) -> GpumuxError:
    text = first_lines(error)
    if isinstance(error, MemoryError) or "allocate memory" in text:
        return AdmissionRefused(f"there is no memory for the program: {text}", "free some, or use smaller batches")
    return ProgramError(f"the program can't be loaded: {text}", "check its state bindings and sizes")


def python_cost() -> float:
    """Measure how many seconds longer an operator takes from Python than in a graph."""
    x, one = torch.zeros(1), torch.ones(1)
    add = torch.ops.aten.add_.Tensor
    samples: list[float] = []
    for _ in range(200):
        began = perf_counter()
        add(x, one)
        samples.append(perf_counter() - began)
    return max(0.0, sorted(samples)[100] - 0.4e-6)


def progress_on(page: mmap.mmap) -> Callable[[int], None]:
    """Return a function that writes the running operator to the page, where the daemon finds it after a crash."""
    numbers = memoryview(page).cast("I")

    def progress(op: int) -> None:
        numbers[0] = op + 1

    return progress


def main(settings: dict[str, Any], fds: list[int]) -> None:
    """Run an executor, in a new fork. `fds`: the channel and the page shared with the daemon."""
    sock = socket.socket(fileno=fds[0])
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", IDLE_S, 0))
    page = mmap.mmap(fds[1], mmap.PAGESIZE)
    os.close(fds[1])
    torch.set_num_threads(settings["threads"])
    turn_off_optimisation()
    torch.default_generator.manual_seed(settings["seed"])
    gc.disable()  # a collection in the middle of a step would stop it for tens of milliseconds
    with torch.inference_mode():
        Executor(Channel(sock), settings, page).serve()
