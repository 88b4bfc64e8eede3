"""What the worker's thread does for jobs. It imports torch.

Methods that take a job run on that thread and may take long. The device starts nothing else of the job until they have
returned. `load_work`, `capture_work` and `instrument_work` run on the daemon's thread and return work for the other.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from time import monotonic
from typing import Any

import torch

from gpumux.device.base import GENERATOR, Launch
from gpumux.device.codecache import VARIABLE, CodeCache
from gpumux.device.cuda.compute import Compute
from gpumux.device.cuda.cuts import HIGH_LEAST_S, HIGH_S, LOW_S, Cuts
from gpumux.device.cuda.driver import Driver
from gpumux.device.cuda.execute import CompiledRunner, OperatorRunner
from gpumux.device.cuda.jobs import Capture, CudaJob
from gpumux.device.cuda.operands import CudaOperands, PinnedSegment
from gpumux.device.cuda.program import WHOLE, CaptureRun, CudaProgram, wait
from gpumux.device.cuda.streams import Partitions
from gpumux.device.cuda.worker import PENDING
from gpumux.device.run.interpreter import first_lines
from gpumux.device.run.randomness import move_generator
from gpumux.device.run.schedule import LoadCommand, TransferCommand
from gpumux.device.run.schema import CurrentNumerics
from gpumux.errors import AdmissionRefused, DeviceLost, GpumuxError, JobFailed, ProgramError
from gpumux.program.codec import decode
from gpumux.program.ir import Numerics, Program, aligned, gates
from gpumux.program.profile import dumps
from gpumux.types import GENERATOR_BYTES, Priority

CHUNK = 4 << 20


class Engine:
    """`priorities`: the driver's number for each priority of jobs. `partitions`: what low jobs can be confined to.
    `copies`: for each stream that pieces run on, the stream that copies batches in. A copy waits until a step has taken
    the last batch from its destination, and later copies on its stream wait behind it: so two streams of pieces share
    none."""

    def __init__(
        self, driver: Driver, compute: Compute, priorities: dict[int, int], partitions: Partitions, *,
        copies: Mapping[int, int],
    ) -> None:  # fmt: skip
        self._partitions = partitions
        self._confined_free: dict[float, list[int]] = {}  # streams to capture on, by share
        self._driver, self._compute, self._priorities = driver, compute, priorities
        self._numerics = CurrentNumerics()
        self._capture_streams: dict[int, list[int]] = {}  # free ones, by class
        self._made_streams: list[int] = []
        self._copies = copies
        self._chunk = driver.pin(CHUNK)
        self._code: CodeCache | None = None
        self.torch_version = str(torch.__version__)

    @contextmanager
    def thread_context(self) -> Iterator[None]:
        """The context that the worker's thread runs in."""
        self._driver.enter()
        self._compute.enter()
        with torch.inference_mode():
            yield

    def load_work(self, job: CudaJob, load: LoadCommand) -> Callable[[], Any]:
        """Work for the worker's thread: `load`, then the compilation of a compiled program, a unit in each part."""
        loaded: CudaProgram | None = None
        kept = len(job.buffers)

        def part() -> Any:
            nonlocal loaded
            if loaded is None:
                loaded = self.load(job, load)
                return loaded if loaded.program.kind == "aten" else PENDING
            try:
                more = not job.ended and loaded.compile_next()
            except GpumuxError:
                loaded.close()
                del job.buffers[kept:]
                raise
            return PENDING if more else loaded

        return part

    def load(self, job: CudaJob, load: LoadCommand) -> CudaProgram:
        """Load a program. Raises AdmissionRefused or ProgramError, and leaves the job's memory as it was."""
        kept = len(job.buffers)
        data: PinnedSegment | None = None
        operands: CudaOperands | None = None
        try:
            self._prepare_job(job)
            program = decode(load.encoded)
            if program.device != "cpu":
                raise ProgramError(
                    f"the program was traced for {program.device!r}, and this daemon takes programs traced on the CPU",
                    "submit from gpumux's own client",
                )
            if program.collectives:
                raise ProgramError(
                    "the program exchanges data with other ranks, which is not proven on a GPU",
                    "run its ranks on daemons with --device cpu",
                )
            if job.spec.arena is not None:
                raise ProgramError(
                    "the job shares memory with other jobs, and on a GPU the graphs of each job keep their own",
                    'submit it without memory="shared", or to a daemon with --device cpu',
                )
            if program.wave is not None:
                raise ProgramError(
                    "the program is for one of a job's two waves, which are not proven on a GPU",
                    "submit it without waves=, or to a daemon with --device cpu",
                )
            if program.generator is not None:
                raise ProgramError(
                    "the program draws from a generator of the CPU, which this device does not have",
                    'submit it with rng="own"',
                )
            with self._compute.on(job.capture_stream):
                job.buffers += [self._compute.allocate(nbytes) for nbytes in load.new_buffers]
                bound = [_buffer(job, index) for index in load.binding]
                data = PinnedSegment(self._driver, load.held.fds[0], load.nbytes)
                operands = CudaOperands(
                    program,
                    bound,
                    data,
                    load.slots,
                    driver=self._driver,
                    compute=self._compute,
                    copies=self._copies,
                )
                streams = _streams(job, program, load.binding, self._compute)
            begins = gates(program)
            high = job.spec.priority is Priority.HIGH
            whole = None
            if program.kind == "compiled":
                self._set_up_compiler()
                runner: OperatorRunner = (compiled := CompiledRunner(program, operands, self._compute, streams))
                whole = compiled.units
            else:
                runner = OperatorRunner(program, operands, self._compute, streams)
            transient = max(load.transient, runner.transient_bytes())
            if transient > load.room:
                raise AdmissionRefused(
                    f"the program's temporaries need {transient} bytes and {load.room} are free on the GPU",
                    "use smaller batches, or wait for other jobs to end",
                )
            cuts = Cuts(
                len(program.ops),
                HIGH_S if high else LOW_S,
                least_s=HIGH_LEAST_S if high else None,
                gates=begins,
                units=whole,
            )
            loaded = CudaProgram(
                program,
                operands,
                driver=self._driver,
                compute=self._compute,
                runner=runner,
                cuts=cuts,
                transient=transient,
            )
            wait(self._driver, job.capture_stream)  # buffers are zeroed before another stream reads them
            return loaded
        except (GpumuxError, RuntimeError, ValueError, IndexError, OSError, MemoryError) as error:
            self._driver.memory()  # raises DeviceLost
            del job.buffers[kept:]
            if operands is not None:
                operands.close()
            elif data is not None:
                data.close()
            raise _refusal(error) from error
        finally:
            load.held.close()

    def run(self, job: CudaJob, launch: Launch, loaded: CudaProgram, stream: int, *, last: bool) -> tuple[float, float]:
        """Run a piece of cut 0, or one that could not be captured; when it started and ended. Pieces of cut 0 run on
        the stream and from the memory pool that their captures will use, so that captures take the same memory again;
        confined ones run on the stream of their share. Raises GpumuxError."""
        self._apply(loaded.program.numerics)
        pool = None
        if not launch.cut and launch.share >= WHOLE:
            stream, pool = self._capture_stream(job), job.pool
            if loaded.cuts.warming and not launch.piece:
                self._make_room(job)
        started = monotonic()
        try:
            if launch.piece == 0:
                loaded.operands.copy_inputs(launch.slot, launch.scalars, stream)
            with self._compute.drawing_from(job.generator):
                loaded.run(launch.cut, launch.piece, stream, pool)
            if last:
                loaded.operands.copy_results(launch.slot, stream)
        except GpumuxError:
            self._driver.idle(stream)  # raises DeviceLost when it was no failure of this job alone
            raise
        wait(self._driver, stream)
        return started, monotonic()

    def capture_work(self, job: CudaJob, capture: Capture, loaded: CudaProgram) -> Callable[[], Any]:
        """Work for the worker's thread, in a part for each piece: the graphs of a new cut, and the bytes that torch
        reserved for them."""

        def begin() -> CaptureRun:
            return CaptureRun(
                loaded,
                capture.bounds,
                stream=self._capture_stream(job),
                pool=job.pool,
                confined=self._confined_streams(job),
            )

        return self._captures(job, loaded, begin, lambda run: run.graphs)

    def instrument_work(self, job: CudaJob, loaded: CudaProgram) -> Callable[[], Any]:
        """Work for the worker's thread, in a part for each piece: the newest cut with events between operators
        (cuts.py), and the bytes that torch reserved for it."""

        def begin() -> CaptureRun:
            bounds = loaded.cuts.bounds(loaded.cuts.newest)
            assert bounds is not None
            return CaptureRun(loaded, bounds, stream=self._capture_stream(job), pool=job.pool, marked=True)

        return self._captures(job, loaded, begin, CaptureRun.instrumented)

    def _captures(
        self, job: CudaJob, loaded: CudaProgram, begin: Callable[[], CaptureRun], made: Callable[[CaptureRun], Any]
    ) -> Callable[[], Any]:
        run: CaptureRun | None = None
        before = 0

        def part() -> Any:
            nonlocal run, before
            if job.ended:
                return run.stop() if run is not None else None
            if run is None:
                self.drop_unused(job)
                run = begin()
                before = self._compute.reserved()
            self._apply(loaded.program.numerics)
            more = None
            try:
                with self._compute.drawing_from(job.generator):
                    more = run.part()
            finally:
                # Before a capture, also one that fails, torch sets the generator's position on the capture's stream;
                # launches set it on others.
                if more is None:
                    for stream in (job.capture_stream, *job.confined.values()):
                        wait(self._driver, stream)
            return more or (made(run), max(0, self._compute.reserved() - before))

        return part

    def move(self, job: CudaJob, move: TransferCommand, stream: int) -> None:
        """Copy buffers to or from shared memory, through page-locked memory: a copy of ordinary memory would hold up
        the driver."""
        try:
            with mmap.mmap(move.held.fds[0], move.nbytes) as memory:
                mapped = (ctypes.c_char * move.nbytes).from_buffer(memory)
                base, at = ctypes.addressof(mapped), 0
                del mapped  # `memory` stays until the end, and can't be closed while this view of it exists
                for index in move.buffers:
                    if index == GENERATOR:  # the host advances it at each launch, so it is up to date
                        self._prepare_job(job)
                        move_generator(job.generator, memory, at, move.nbytes, move.into_device)
                        at += GENERATOR_BYTES
                        continue
                    buffer = _buffer(job, index)
                    if at + buffer.numel() > move.nbytes:
                        raise JobFailed(
                            f"the transfer's segment has {move.nbytes} bytes, too few for its buffers", "make it larger"
                        )
                    self._move(base + at, buffer.data_ptr(), buffer.numel(), stream, move.into_device)
                    _move_streams(job, index, memory, at, move.into_device)
                    at += aligned(buffer.numel())
        finally:
            move.held.close()

    def profile(self, loaded: CudaProgram, device: str) -> bytes:
        return dumps(loaded.profile(device)).encode()

    def release(self, job: CudaJob, stream: int) -> None:
        """Give all of a job's memory back, once nothing of it runs any more. If one part fails, the others are given
        back all the same, and the error is raised."""
        copied = {used for loaded in job.programs.values() for used in loaded.operands.copied_on}
        for used in {stream, job.capture_stream, *job.confined.values(), *copied} - {0}:
            wait(self._driver, used)
        closing = [loaded.close for loaded in job.programs.values()]
        parts: list[Callable[[], None]] = [partial(self.drop_unused, job), *closing]
        if job.order_event:
            parts.insert(0, partial(self._driver.destroy_event, job.order_event))
            job.order_event = 0
        failed: GpumuxError | RuntimeError | None = None
        for part in parts:
            try:
                part()
            except DeviceLost:
                raise
            except (GpumuxError, RuntimeError) as error:  # torch's are RuntimeErrors
                failed = failed or error
        job.programs.clear()
        job.buffers.clear()
        if job.pool is not None:
            self._compute.drop_pool(job.pool)
        job.pool = job.generator = None
        job.streams.clear()
        if job.capture_stream:
            self._capture_streams.setdefault(job.capture_class, []).append(job.capture_stream)
            job.capture_stream = 0
        for share, confined in job.confined.items():
            self._confined_free.setdefault(share, []).append(confined)
        job.confined.clear()
        if failed is not None:
            raise failed

    def drop_unused(self, job: CudaJob) -> None:
        """Drop graphs that no step can use any more. Nothing of the job runs."""
        for graph in job.unused_graphs:
            graph.drop()
        job.unused_graphs.clear()

    def trim(self) -> None:
        """Give memory that torch holds unused back to the driver. Waits for the GPU."""
        self._compute.trim()

    def close(self) -> None:
        for stream in self._made_streams:
            self._driver.destroy_stream(stream)
        self._driver.unpin(self._chunk)
        if self._code is not None:
            self._code.close()

    def _make_room(self, job: CudaJob) -> None:
        """Trim before a program's first step if memory is short. The program was admitted by what jobs hold, and torch
        may hold more; it can't give that back while it allocates from a job's pool."""
        free, _ = self._driver.memory()
        if free < max(job.transients.values(), default=0):
            self._compute.trim()

    def _apply(self, wanted: Numerics) -> None:
        """Set the numerics that a program was captured with, for this thread's operators and captures."""
        self._numerics.apply(wanted)
        torch._C._set_cudnn_allow_tf32(wanted.conv_precision == "tf32")  # for recurrent layers, too

    def _set_up_compiler(self) -> None:
        """Give the compiler its folder, before the first compiled program."""
        if self._code is None:
            self._code = CodeCache()
            os.environ[VARIABLE] = self._code.folder

    def _prepare_job(self, job: CudaJob) -> None:
        self._capture_stream(job)
        if job.pool is None:
            job.generator = self._compute.generator(job.spec.seed)
            job.pool = self._compute.pool()

    def _capture_stream(self, job: CudaJob) -> int:
        """A stream of the job's own, of its priority: kernels get the priority of the stream they are captured on."""
        number = int(job.spec.priority)
        if job.capture_stream and job.capture_class == number:
            return job.capture_stream
        if job.capture_stream:
            self._capture_streams.setdefault(job.capture_class, []).append(job.capture_stream)
        free = self._capture_streams.get(number)
        if free:
            job.capture_stream = free.pop()
        else:
            job.capture_stream = self._driver.stream(self._priorities[number])
            self._made_streams.append(job.capture_stream)
        job.capture_class = number
        return job.capture_stream

    def _confined_streams(self, job: CudaJob) -> dict[float, int]:
        """Streams to capture on, for every share below the whole. High jobs are never confined: {}."""
        if job.spec.priority is not Priority.LOW:
            return {}
        for share in self._partitions.shares[1:]:
            if share not in job.confined:
                free = self._confined_free.get(share)
                job.confined[share] = free.pop() if free else self._partitions.stream(share)
        return job.confined

    def _move(self, memory: int, address: int, nbytes: int, stream: int, into_device: bool) -> None:
        """Copy a buffer to or from shared memory, which is at host address `memory`. ctypes releases the interpreter's
        lock while it copies. A copy between memoryviews does not, so the thread that launches would wait for it."""
        for start in range(0, nbytes, CHUNK):
            size = min(CHUNK, nbytes - start)
            if into_device:
                ctypes.memmove(self._chunk.address, memory + start, size)
                self._driver.copy_in(address + start, self._chunk.address, size, stream)
                wait(self._driver, stream)
            else:
                self._driver.copy_out(self._chunk.address, address + start, size, stream)
                wait(self._driver, stream)
                ctypes.memmove(memory + start, self._chunk.address, size)


# ---- Random streams: generators whose states are part of the job's state, one for each model of an array.
#
# While the job runs, the state of a stream is that of its generator, which the host advances at each launch. It comes
# from the buffer when a program is loaded that names it for the first time, and with every transfer of that buffer to
# the GPU; transfers from there take it along. Kernels never touch these bytes.


def _streams(job: CudaJob, program: Program, binding: Sequence[int], compute: Compute) -> dict[int, Any]:
    """The generators of a program's random streams, by the view of their state. Raises ProgramError, JobFailed."""
    found: dict[int, Any] = {}
    for index in dict.fromkeys(op.stream for op in program.ops if op.stream is not None):
        view = program.views[index]
        key = binding[program.storages[view.storage].slot], view.offset
        if key not in job.streams:
            generator = compute.generator(0)
            nbytes = int(generator.get_state().numel())
            if view.size[0] < nbytes:
                raise ProgramError(
                    f"a random stream has {view.size[0]} bytes, and a generator's state on this GPU has {nbytes}",
                    "submit from gpumux's own client",
                )
            _set_state(generator, _buffer(job, key[0])[view.offset : view.offset + nbytes].cpu())
            job.streams[key] = generator
        found[index] = job.streams[key]
    return found


def _move_streams(job: CudaJob, buffer: int, memory: mmap.mmap, at: int, into_device: bool) -> None:
    """What a transfer of a buffer, which lies at `at` of its segment, means for the streams whose states it holds."""
    for (index, offset), generator in job.streams.items():
        if index != buffer:
            continue
        state, start = generator.get_state(), at + offset
        if into_device:
            _set_state(generator, torch.frombuffer(bytearray(memory[start : start + state.numel()]), dtype=torch.uint8))
        else:
            memory[start : start + state.numel()] = state.numpy().tobytes()


def _set_state(generator: Any, state: torch.Tensor) -> None:
    try:
        generator.set_state(state)
    except (RuntimeError, TypeError, ValueError) as error:
        raise JobFailed(
            f"these bytes are no state of a generator of this GPU: {first_lines(error)}",
            "set what random_state() of an array on a GPU returned",
        ) from error


def _buffer(job: CudaJob, index: int) -> torch.Tensor:
    if not 0 <= index < len(job.buffers):
        raise ProgramError(f"no state buffer {index}", "name buffers by their order of allocation")
    buffer: torch.Tensor = job.buffers[index]
    return buffer


def _refusal(error: BaseException) -> GpumuxError:
    if isinstance(error, GpumuxError):
        return error
    text = first_lines(error)
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate" in text:
        return AdmissionRefused(f"there is no memory for the program: {text}", "free some, or use smaller batches")
    return ProgramError(f"the program can't be loaded: {text}", "check its state bindings and sizes")
