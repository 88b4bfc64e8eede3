"""A GPU made of host memory. Streams run their work in order when `advance` lets them. Graphs repeat the operators that
were captured, at the same addresses and with the same numbers.

tests/device/cuda/test_driver.py holds the fake driver to the rules that tests/gpu holds the real one to. The fake does
not show how long work takes, kernels that run at once, or memory that a captured graph uses again.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any, ClassVar

import torch
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from gpumux.device.base import Device
from gpumux.device.cuda.device import CudaDevice
from gpumux.device.cuda.driver import Driver, GpuProperties, Pinned, fault
from tests.device.harness import wait_polled

MEMORY = 1 << 34


@dataclass
class Stream:
    priority: int
    partition: int = 0
    work: deque[Callable[[], bool]] = field(default_factory=deque)  # each says whether it is done


@dataclass
class Event:
    timed: bool
    recorded: int = 0
    reached: int = 0
    at: float = 0.0


class FakeDriver:
    """`auto`: the GPU proceeds whenever the driver is queried; else only when `advance` is called."""

    def __init__(self, *, auto: bool = True) -> None:
        self.auto = auto
        self.lock = threading.RLock()
        self.streams: dict[int, Stream] = {}
        self.events: dict[int, Event] = {}
        self.pinned: dict[int, Any] = {}
        self.launched: list[tuple[int, int]] = []  # executable graphs and their streams
        self.registered: dict[int, int] = {}
        self.broken = ""
        self.log: list[tuple[str, int]] = []  # (call, stream), of what goes to streams
        self.opened = False
        self.own_thread = False  # its GPU runs by itself, so that draws of a job could mix with those of another
        self.drawing = 0  # thread that draws numbers: the GPU does nothing but when it waits, then by that thread
        self.green = True
        self.partitions: dict[int, int] = {}  # multiprocessors of each
        self.captured: list[Any] | None = None  # what is captured now
        self._handle = 0

    # ---- the GPU

    def advance(self, count: int = 1 << 30) -> int:
        """Run up to `count` items of work, those of the highest-priority streams first. Returns how many it ran."""
        done = 0
        while done < count and self._one():
            done += 1
        return done

    def _one(self) -> bool:
        with self.lock:
            for stream in sorted(self.streams.values(), key=lambda s: s.priority):
                if stream.work and stream.work[0]():
                    stream.work.popleft()
                    return True
        return False

    def drain(self, handle: int) -> None:
        """Run until a stream is empty."""
        with self.lock:
            while self.streams[handle].work:
                assert self._one(), "the stream waits for something that was never given to the GPU"

    def enqueue(self, call: str, handle: int, work: Callable[[], object]) -> None:
        self._check(call)
        with self.lock:
            self.log.append((call, handle))
            self.streams[handle].work.append(lambda: (work(), True)[1])

    def break_with(self, name: str) -> None:
        """Have every later call fail, as after a kernel that accessed memory out of bounds."""
        self.broken = name

    def _check(self, call: str) -> None:
        if self.broken:
            raise fault(self.broken, call, "the fake was set so")

    def _new(self) -> int:
        self._handle += 1
        return self._handle

    # ---- the protocol

    def open(self, ordinal: int) -> GpuProperties:
        self.opened = True
        return GpuProperties("a GPU of host memory", MEMORY, 132, (9, 0), 13000, (0, -5))

    def enter(self) -> None:
        self._check("enter")

    def close(self) -> None:
        self.opened = False

    def memory(self) -> tuple[int, int]:
        self._check("memory")
        return MEMORY, MEMORY

    def stream(self, priority: int) -> int:
        self._check("stream")
        handle = self._new()
        self.streams[handle] = Stream(priority)
        return handle

    def partition(self, multiprocessors: int) -> tuple[int, int]:
        if not self.green:
            raise fault("CUDA_ERROR_NOT_SUPPORTED", "cuGreenCtxCreate", "the fake was set to have no green contexts")
        has = -(-multiprocessors // 8) * 8  # as on Hopper
        handle = self._new()
        self.partitions[handle] = has
        return handle, has

    def confined_stream(self, partition: int, priority: int) -> int:
        assert partition in self.partitions
        handle = self.stream(priority)
        self.streams[handle].partition = partition
        return handle

    def destroy_partition(self, partition: int) -> None:
        assert not [s for s in self.streams.values() if s.partition == partition], "it has streams yet"
        del self.partitions[partition]

    def destroy_stream(self, stream: int) -> None:
        self._check("destroy_stream")
        del self.streams[stream]

    def idle(self, stream: int) -> bool:
        self._check("idle")
        if self.auto or self.drawing == threading.get_ident():
            self.advance(1)
        return not self.streams[stream].work

    def event(self, *, timed: bool) -> int:
        self._check("event")
        handle = self._new()
        self.events[handle] = Event(timed)
        return handle

    def destroy_event(self, event: int) -> None:
        del self.events[event]

    def record(self, event: int, stream: int) -> None:
        known = self.events[event]
        known.recorded += 1
        version = known.recorded

        def reach() -> None:
            known.reached, known.at = version, monotonic()

        self.enqueue("record", stream, reach)

    def mark(self, event: int, stream: int) -> None:
        assert self.captured is not None, "events are marked in captures alone"
        known = self.events[event]
        known.recorded += 1

        def reach() -> None:
            known.reached, known.at = known.recorded, monotonic()

        self.captured.append(reach)

    def reached(self, event: int) -> bool:
        self._check("reached")
        if self.auto or self.drawing == threading.get_ident():
            self.advance(1)
        known = self.events[event]
        return known.reached == known.recorded

    def elapsed(self, start: int, end: int) -> float:
        a, b = self.events[start], self.events[end]
        assert a.timed
        assert b.timed
        assert a.reached == a.recorded
        assert b.reached == b.recorded
        return b.at - a.at

    def wait(self, stream: int, event: int) -> None:
        self._check("wait")
        known = self.events[event]
        version = known.recorded
        with self.lock:
            self.log.append(("wait", stream))
            self.streams[stream].work.append(lambda: known.reached >= version)

    def pin(self, nbytes: int) -> Pinned:
        self._check("pin")
        memory = (ctypes.c_char * nbytes)()
        address = ctypes.addressof(memory)
        self.pinned[address] = memory
        return Pinned(address, address, nbytes)

    def unpin(self, memory: Pinned) -> None:
        del self.pinned[memory.address]

    def register(self, address: int, nbytes: int) -> None:
        assert address not in self.registered
        self.registered[address] = nbytes

    def unregister(self, address: int) -> None:
        del self.registered[address]

    def copy_in(self, device_address: int, address: int, nbytes: int, stream: int) -> None:
        assert self._locked(address, nbytes), "a copy from memory that is not page-locked"
        self.enqueue("copy_in", stream, lambda: ctypes.memmove(device_address, address, nbytes))

    def copy_out(self, address: int, device_address: int, nbytes: int, stream: int) -> None:
        assert self._locked(address, nbytes), "a copy to memory that is not page-locked"
        self.enqueue("copy_out", stream, lambda: ctypes.memmove(address, device_address, nbytes))

    def copy_within(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self.enqueue("copy_within", stream, lambda: ctypes.memmove(target, source, nbytes))

    def write_value(self, device_address: int, value: int, stream: int) -> None:
        def store() -> None:
            ctypes.c_uint32.from_address(device_address).value = value

        self.enqueue("write_value", stream, store)

    def upload(self, executable: int, stream: int) -> None:
        self._check("upload")

    def launch(self, executable: int, stream: int) -> None:
        self._check("launch")
        self.launched.append((executable, stream))

    def _locked(self, address: int, nbytes: int) -> bool:
        ranges = [*self.registered.items(), *((a, len(m)) for a, m in self.pinned.items())]
        return any(start <= address and address + nbytes <= start + size for start, size in ranges)


HOST_READS = frozenset({"_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero"})
broken_rules: list[str] = []  # what was done in captures and is wrong on a GPU: the tests' fixtures look


class Recording(TorchDispatchMode):
    """Records every operator with its tensors and numbers, and undoes their effects."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []  # (operator, arguments, keywords, what it returned), or something to call
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ in HOST_READS:
            broken_rules.append(
                f"{func.name()} after {[call[0].name() for call in self.calls[-3:] if isinstance(call, tuple)]}"
            )
        for tensor in pytree.tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor) and tensor.numel():
                self._save(tensor)
        out = func(*args, **kwargs)
        for tensor in pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.numel():
                self._made.add(tensor.untyped_storage().data_ptr())
        self.calls.append((func, args, kwargs, out))
        return out

    def _save(self, tensor: torch.Tensor) -> None:
        start = tensor.untyped_storage().data_ptr()
        if start not in self._before and start not in self._made:
            whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            self._before[start] = (whole, whole.clone())

    def undo(self) -> None:
        for whole, before in self._before.values():
            whole.copy_(before)


class _Opaque:
    """Compiled code in the place of an operator."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def name(self) -> str:
        return "compiled"

    def __call__(self, *arguments: torch.Tensor) -> Any:
        return self._call(*arguments)


_WINDOWS = (torch.ops.aten.empty.memory_format, torch.ops.aten.detach.default)


class FakeGenerator:
    """A generator whose state is, as a GPU's, a seed and how much was drawn. It draws what the CPU's of this seed
    does, also after it is set to a state that a generator of this process has had."""

    _known: ClassVar[dict[tuple[int, int], torch.Tensor]] = {}  # the CPU's states

    def __init__(self, seed: int) -> None:
        self._seed, self._offset = seed, 0
        self._now = self._known.setdefault((seed, 0), torch.Generator().manual_seed(seed).get_state())

    def get_state(self) -> torch.Tensor:
        return torch.frombuffer(bytearray(struct.pack("<Qq", self._seed, self._offset)), dtype=torch.uint8)

    def set_state(self, state: torch.Tensor) -> None:
        seed, offset = struct.unpack("<Qq", state.numpy().tobytes())
        if offset < 0 or offset % 4:
            raise RuntimeError("offset must be a multiple of 4")
        self._seed, self._offset = seed, offset
        other = torch.Generator().manual_seed(seed if offset == 0 else hash((seed, offset)))
        self._now = self._known.setdefault((seed, offset), other.get_state())

    def begin(self) -> None:
        torch.default_generator.set_state(self._now)

    def end(self) -> None:
        """It is not advanced by what was only captured."""
        after = torch.default_generator.get_state()
        if not torch.equal(after, self._now):
            self._offset += 4
            self._now = self._known[self._seed, self._offset] = after


class FakeGraph:
    def __init__(self, compute: FakeCompute, calls: list[Any], generator: Any, partition: int) -> None:
        self._compute, self._calls, self._generator = compute, calls, generator
        self.partition = partition
        self.dropped = False
        self.out = 0  # replays given to a stream and not run

    def replay(self, stream: int) -> None:
        assert not self.dropped
        assert self._compute.driver.streams[stream].partition == self.partition, "not where it was captured"
        self.out += 1
        self._compute.driver.enqueue("graph", stream, self._run)

    def _run(self) -> None:
        self.out -= 1
        assert not self.dropped, "a graph ran that had been dropped"
        with torch.inference_mode(), self._compute.drawing_from(self._generator):
            for call in self._calls:
                if not isinstance(call, tuple):
                    call()
                    continue
                func, args, kwargs, outs = call
                if func in _WINDOWS or "set_" in func.name():
                    continue  # memory and windows onto it are there already
                made = func(*args, **kwargs)
                for old, new in zip(pytree.tree_leaves(outs), pytree.tree_leaves(made), strict=True):
                    if isinstance(old, torch.Tensor) and old.numel() and old.data_ptr() != new.data_ptr():
                        old.copy_(new)

    def drop(self) -> None:
        assert not self.out, "a graph was dropped while a launch of it was out"
        self.dropped = True
        self._calls = []


class FakeCompute:
    def __init__(self, driver: FakeDriver, ordinal: int) -> None:
        self.driver = driver
        self.device = torch.device("cpu")
        self.graphs: list[FakeGraph] = []
        self.pools = 0
        self.held: set[int] = set()  # pools
        self.eager: list[tuple[int, int]] = []  # stream and pool of what ran operator by operator in a pool
        self.occupied: list[float] = []  # seconds
        self.captures: list[tuple[int, int]] = []  # and of what was captured
        self._on = 0
        self.trims = 0
        self.before_capture: Callable[[], None] = lambda: None
        self._thread = threading.local()
        self._capturing_thread = 0
        self._registered: Sequence[FakeGenerator] = ()
        self._capturing = threading.Lock()

    def enter(self) -> None:
        pass

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        self.driver.drain(stream)  # operators called one by one run at once here
        self._on = stream
        yield

    def generator(self, seed: int) -> FakeGenerator:
        return FakeGenerator(seed)

    @contextmanager
    def drawing_from(self, generator: FakeGenerator) -> Iterator[None]:
        captured = self.driver.captured if self._captures() else None
        if captured is None:
            self._enter(generator)
        else:  # a replay draws from it, and not this capture
            if generator not in self._registered:
                broken_rules.append("it draws from a generator that the graph was not told of")
            captured.append(partial(self._enter, generator))
        try:
            yield
        finally:
            if captured is None:
                self._leave()
            else:
                captured.append(self._leave)

    def _enter(self, generator: FakeGenerator) -> None:
        if self.driver.own_thread:  # torch's CPU has one default generator for all threads
            self.driver.lock.acquire()
            self.driver.drawing = threading.get_ident()
        self._entered().append((torch.default_generator.get_state(), generator))
        generator.begin()

    def _leave(self) -> None:
        before, generator = self._entered().pop()
        generator.end()
        torch.default_generator.set_state(before)
        if self.driver.own_thread:
            self.driver.drawing = threading.get_ident() if self._entered() else 0
            self.driver.lock.release()

    def _entered(self) -> list[tuple[torch.Tensor, FakeGenerator]]:
        """The generators that this thread draws from, innermost last, and the state before each."""
        if not hasattr(self._thread, "entered"):
            self._thread.entered = []
        found: list[tuple[torch.Tensor, FakeGenerator]] = self._thread.entered
        return found

    def _captures(self) -> bool:
        return self._capturing_thread == threading.get_ident()

    def pool(self) -> Any:
        self.pools += 1
        self.held.add(self.pools)
        return self.pools

    @contextmanager
    def allocating(self, pool: Any) -> Iterator[None]:
        assert pool in self.held
        self.eager.append((self._on, pool))
        yield

    def drop_pool(self, pool: Any) -> None:
        self.held.remove(pool)

    def capture(
        self, stream: int, pool: Any, body: Callable[[], None], *, draws: bool = True, generators: Sequence[Any] = ()
    ) -> FakeGraph:
        assert self._capturing.acquire(blocking=False), "two captures at once"
        assert pool in self.held
        self.captures.append((stream, pool))
        try:
            self.driver.enqueue("position", stream, lambda: None)  # torch sets the generator's, on this stream
            self.before_capture()
            recording, drawn = Recording(), torch.default_generator.get_state()
            try:
                self.driver.captured, self.recorder, self._registered = recording.calls, recording, generators
                self._capturing_thread = threading.get_ident()
                with recording:
                    body()
                if not draws and not torch.equal(torch.default_generator.get_state(), drawn):
                    broken_rules.append("it draws, and is launched without torch: each replay draws the same")
            finally:
                self.driver.captured, self._capturing_thread = None, 0
                recording.undo()
                torch.default_generator.set_state(drawn)
        finally:
            self._capturing.release()
        graph = FakeGraph(self, recording.calls, self._entered()[-1][1], self.driver.streams[stream].partition)
        self.graphs.append(graph)
        return graph

    def occupy(self, seconds: float) -> None:
        self.occupied.append(seconds)

    def kernels(self, call: Callable[..., Any], arguments: Sequence[torch.Tensor]) -> Any:
        """Dispatch modes do not see what compiled code does, so it is recorded as one call."""
        recording = self.driver.captured
        if recording is None:
            return call(*arguments)
        for tensor in arguments:
            self.recorder._save(tensor)
        made = call(*arguments)
        recording.append((_Opaque(call), tuple(arguments), {}, made))
        return made

    def supports(self, target: str) -> bool:
        return "mkldnn" not in target and "_for_cpu" not in target

    def reserved(self) -> int:
        return 0

    def trim(self) -> None:
        self.trims += 1


def fake_device(*, parallel: int | None = None, auto: bool = True, **options: Any) -> CudaDevice:
    """A CudaDevice on a fake GPU, not opened."""
    return CudaDevice(parallel=parallel, driver=FakeDriver(auto=auto), compute=fake_compute, **options)


def fake_compute(driver: Driver, ordinal: int) -> FakeCompute:
    assert isinstance(driver, FakeDriver)
    return FakeCompute(driver, ordinal)


def poll_wait(device: Device) -> None:
    """Let the fake GPU run its work, and wait for the device."""
    if isinstance(device, CudaDevice) and isinstance(device._driver, FakeDriver) and device._driver.auto:
        device._driver.advance()
    wait_polled(device)
