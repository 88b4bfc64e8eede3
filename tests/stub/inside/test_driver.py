"""The driver wrapper on the stand-in: names, arguments and results as cuda-bindings has them; every failed call is
noticed; rules that a fake of the wrapper can't see."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from gpumux.device.cuda.driver import STICKY, CudaDriver, Driver, Pinned, bindings
from gpumux.errors import AdmissionRefused, ConfigError, DeviceLost, JobFailed
from tests.device.cuda.driver_rules import *  # noqa: F403  its tests run here on the card below
from tests.device.cuda.driver_rules import Card
from tests.stub.inside.stub import Stub

OUT_OF_MEMORY, ILLEGAL_ADDRESS, NOT_SUPPORTED = 2, 700, 801
LEAST, GREATEST = 0, -5


@pytest.fixture
def card(gpu: CudaDriver, stub: Stub) -> Any:
    stub.hold(True)
    return Card(gpu, lambda: (stub.hold(False), stub.hold(True))[0], (LEAST, GREATEST))


def test_the_facts_are_the_devices() -> None:
    driver = CudaDriver()
    facts = driver.open(0)
    assert facts.name == "Stub GPU"
    assert facts.memory_bytes == 20 << 30
    assert (facts.multiprocessors, facts.capability, facts.driver_version) == (132, (9, 0), 13000)
    assert facts.priorities == (LEAST, GREATEST)
    assert driver.memory() == (10 << 30, 20 << 30)
    driver.close()


def test_a_gpu_that_is_not_there_is_a_matter_of_configuration() -> None:
    with pytest.raises(ConfigError, match="no such GPU") as raised:
        CudaDriver().open(99)
    assert "--gpu" in raised.value.remedy


def test_a_machine_without_a_gpu_is_a_matter_of_configuration(stub: Stub) -> None:
    stub.devices(0)
    try:
        with pytest.raises(ConfigError, match="there is no NVIDIA GPU"):
            CudaDriver().open(0)
    finally:
        stub.devices(1)


def test_every_error_that_only_a_new_process_helps_against_is_known_for_one() -> None:
    """By what this release of the bindings says of each."""
    sticky = {result.name for result in bindings().CUresult if "terminated and relaunched" in (result.__doc__ or "")}
    assert sticky - STICKY.keys() == set()


# ---- every failed call is noticed


@dataclass
class World:
    """The handles that calls take."""

    gpu: CudaDriver
    stream: int
    confined: int
    partition: int
    events: tuple[int, int]
    memory: Pinned
    page: mmap.mmap
    executable: int
    begin: Callable[[int], None]  # captures a stream
    end: Callable[[int], None]
    made: list[int] = field(default_factory=list)  # events

    @property
    def address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self.page))


@pytest.fixture
def world(gpu: CudaDriver) -> Any:
    library = ctypes.CDLL("libcuda.so.1")
    stream = gpu.stream(LEAST)
    partition, _ = gpu.partition(60)
    confined = gpu.confined_stream(partition, LEAST)
    memory, page = gpu.pin(4096), mmap.mmap(-1, 1 << 16)
    graph, executable = ctypes.c_void_p(), ctypes.c_void_p()

    def begin(on: int) -> None:
        assert library.cuStreamBeginCapture_v2(ctypes.c_void_p(on), 1) == 0

    def end(on: int) -> None:
        assert library.cuStreamEndCapture(ctypes.c_void_p(on), ctypes.byref(graph)) == 0

    begin(stream)
    end(stream)
    assert library.cuGraphInstantiateWithFlags(ctypes.byref(executable), graph, ctypes.c_ulonglong(8)) == 0
    library.cuGraphDestroy(graph)
    events = gpu.event(timed=True), gpu.event(timed=True)
    for event in events:
        gpu.record(event, stream)
    found = World(gpu, stream, confined, partition, events, memory, page, executable.value or 0, begin, end)
    yield found
    for event in (*events, *found.made):
        gpu.destroy_event(event)
    for each in (stream, confined):
        gpu.destroy_stream(each)
    library.cuGraphExecDestroy(executable)
    gpu.destroy_partition(partition)
    gpu.unpin(memory)


def _mark(world: World) -> None:
    event = world.gpu.event(timed=True)
    world.made.append(event)
    world.begin(world.stream)
    try:
        world.gpu.mark(event, world.stream)
    finally:
        library, graph = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
        assert library.cuStreamEndCapture(ctypes.c_void_p(world.stream), ctypes.byref(graph)) == 0
        library.cuGraphDestroy(graph)


def _made(make: str, destroy: str, *arguments: Any, **named: Any) -> Callable[[World], None]:
    """Make a handle and destroy it."""

    def act(world: World) -> None:
        handle = getattr(world.gpu, make)(*arguments, **named)
        getattr(world.gpu, destroy)(handle[0] if isinstance(handle, tuple) else handle)

    return act


def _registered(world: World) -> None:
    page = mmap.mmap(-1, 4096)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    world.gpu.register(address, 4096)
    world.gpu.unregister(address)


def _confined(world: World) -> None:
    world.gpu.destroy_stream(world.gpu.confined_stream(world.partition, GREATEST))


# Whatever the wrapper can do, by the methods that this is about.
ACTIONS: dict[str, Callable[[World], Any]] = {
    "enter": lambda w: w.gpu.enter(),
    "memory": lambda w: w.gpu.memory(),
    "stream destroy_stream": _made("stream", "destroy_stream", GREATEST),
    "idle": lambda w: w.gpu.idle(w.stream),
    "event destroy_event": _made("event", "destroy_event", timed=False),
    "record": lambda w: w.gpu.record(w.events[0], w.stream),
    "mark": _mark,
    "reached": lambda w: w.gpu.reached(w.events[0]),
    "elapsed": lambda w: w.gpu.elapsed(*w.events),
    "wait": lambda w: w.gpu.wait(w.stream, w.events[0]),
    "pin unpin": _made("pin", "unpin", 4096),
    "register unregister": _registered,
    "copy_in": lambda w: w.gpu.copy_in(w.memory.device_address, w.address, 64, w.stream),
    "copy_out": lambda w: w.gpu.copy_out(w.address, w.memory.device_address, 64, w.stream),
    "copy_within": lambda w: w.gpu.copy_within(w.memory.device_address + 512, w.memory.device_address, 64, w.stream),
    "write_value": lambda w: w.gpu.write_value(w.memory.device_address, 7, w.stream),
    "upload": lambda w: w.gpu.upload(w.executable, w.stream),
    "launch": lambda w: w.gpu.launch(w.executable, w.stream),
    "partition destroy_partition": _made("partition", "destroy_partition", 32),
    "confined_stream": _confined,
}
BY_HAND = ("cuStreamBeginCapture", "cuStreamEndCapture", "cuGraphDestroy")  # made by the tests themselves
ELSEWHERE = {"open", "close", "within"}  # tested by themselves


def test_every_method_is_among_the_actions() -> None:
    """A method that is new needs an action above, so that its failures are tried."""
    named = {name for names in ACTIONS for name in names.split()}
    assert named >= {name for name in vars(Driver) if not name.startswith("_")} - ELSEWHERE


@pytest.mark.parametrize("name", ACTIONS)
def test_every_call_is_checked(name: str, world: World, stub: Stub) -> None:
    """Each driver call that the method makes fails once, as after a kernel that went out of its bounds: it must not
    pass unnoticed."""
    stub.reset()
    ACTIONS[name](world)
    stub.leaks = True  # what a call that failed was to give back
    mine = {call: count for call, count in stub.called().items() if call not in BY_HAND}
    assert mine
    for call, count in mine.items():
        for after in range(count):
            stub.fail(call, ILLEGAL_ADDRESS, after)
            with pytest.raises(DeviceLost, match=call):
                ACTIONS[name](world)
    stub.reset()


def test_what_a_failure_means_depends_on_which_it_is(gpu: CudaDriver, stub: Stub) -> None:
    stub.fail("cuMemHostAlloc", OUT_OF_MEMORY)
    with pytest.raises(AdmissionRefused, match="cuMemHostAlloc"):
        gpu.pin(4096)
    stub.fail("cuStreamCreateWithPriority", NOT_SUPPORTED)
    with pytest.raises(JobFailed, match=r"CUDA_ERROR_NOT_SUPPORTED.*operation not supported"):
        gpu.stream(LEAST)


def test_every_call_fails_when_a_kernel_has_ended_the_context(world: World, stub: Stub) -> None:
    stub.sticky(ILLEGAL_ADDRESS)
    for action in ("record", "reached", "write_value", "launch", "memory"):
        with pytest.raises(DeviceLost):
            ACTIONS[action](world)
    stub.sticky(0)


# ---- what is not over yet


def test_what_is_not_over_is_told_from_what_failed(world: World, stub: Stub) -> None:
    gpu, (first, last) = world.gpu, world.events
    stub.hold(True)
    gpu.record(last, world.stream)
    assert not gpu.reached(last)
    assert not gpu.idle(world.stream)
    with pytest.raises(JobFailed, match="CUDA_ERROR_NOT_READY"):
        gpu.elapsed(first, last)
    stub.hold(False)
    assert gpu.reached(last)
    assert gpu.idle(world.stream)
    assert gpu.elapsed(first, last) >= 0


# ---- contexts and threads


def in_a_thread(work: Callable[[], Any]) -> None:
    errors: list[Exception] = []

    def run() -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001  raised below
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def test_a_thread_enters_before_it_calls(world: World, stub: Stub) -> None:
    def enters() -> None:
        world.gpu.enter()
        world.gpu.record(world.events[0], world.stream)

    in_a_thread(enters)
    assert stub.violations() == []
    with pytest.raises(JobFailed, match="CUDA_ERROR_INVALID_CONTEXT"):
        in_a_thread(lambda: world.gpu.record(world.events[0], world.stream))
    assert "no context is current" in stub.violations()[0]
    stub.reset()


def test_a_share_takes_work_from_two_threads_at_once(world: World, stub: Stub) -> None:
    """As the device does: one launches, another runs operators, on streams of one share, with events of the primary
    context."""
    gpu = world.gpu

    def work() -> None:
        gpu.enter()
        gpu.wait(world.confined, world.events[0])
        gpu.write_value(world.memory.device_address, 3, world.confined)
        gpu.record(world.events[1], world.confined)

    work()
    in_a_thread(work)
    assert stub.violations() == []


def test_a_green_context_in_two_threads_is_seen(world: World, stub: Stub) -> None:
    """The rule that makes the test above one: the stand-in notices what the documentation forbids."""
    api = bindings()
    green = api.cuCtxFromGreenCtx(api.CUgreenCtx(world.partition))[1]
    api.cuCtxPushCurrent(green)

    def work() -> None:
        world.gpu.enter()
        api.cuCtxPushCurrent(green)
        api.cuCtxPopCurrent()

    in_a_thread(work)
    assert "a green context is made current in a second thread" in stub.violations()[0]
    api.cuCtxPopCurrent()
    stub.reset()


# ---- rules of handles and captures


def test_a_handle_that_was_destroyed_is_of_no_use(world: World, stub: Stub) -> None:
    event = world.gpu.event(timed=True)
    world.gpu.destroy_event(event)
    for call in (lambda: world.gpu.record(event, world.stream), lambda: world.gpu.destroy_event(event)):
        with pytest.raises(JobFailed, match="CUDA_ERROR_INVALID_HANDLE"):
            call()
    assert all("destroyed" in each for each in stub.violations())
    stub.reset()


def test_an_event_is_marked_in_captures_alone(world: World, stub: Stub) -> None:
    with pytest.raises(JobFailed, match="CUDA_ERROR_INVALID_VALUE"):
        world.gpu.mark(world.events[0], world.stream)
    stub.reset()


def test_a_marked_event_has_a_time_when_the_graph_has_run(gpu: CudaDriver, stub: Stub) -> None:
    library, graph, executable = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_void_p()
    stream, first, last = gpu.stream(LEAST), gpu.event(timed=True), gpu.event(timed=True)
    assert library.cuStreamBeginCapture_v2(ctypes.c_void_p(stream), 1) == 0
    gpu.mark(first, stream)
    gpu.mark(last, stream)
    assert library.cuStreamEndCapture(ctypes.c_void_p(stream), ctypes.byref(graph)) == 0
    assert library.cuGraphInstantiateWithFlags(ctypes.byref(executable), graph, ctypes.c_ulonglong(8)) == 0
    gpu.upload(executable.value or 0, stream)
    assert library.cuGraphLaunch(executable, ctypes.c_void_p(stream)) == 0
    assert gpu.elapsed(first, last) >= 0
    for event in (first, last):
        gpu.destroy_event(event)
    library.cuGraphExecDestroy(executable)
    library.cuGraphDestroy(graph)
    gpu.destroy_stream(stream)


def test_a_stream_that_is_captured_is_not_asked(world: World, stub: Stub) -> None:
    world.begin(world.stream)
    with pytest.raises(JobFailed, match="STREAM_CAPTURE_UNSUPPORTED"):
        world.gpu.idle(world.stream)
    library, graph = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    assert library.cuStreamEndCapture(ctypes.c_void_p(world.stream), ctypes.byref(graph)) == 901
    stub.reset()


def test_a_share_of_nothing_is_refused(gpu: CudaDriver, stub: Stub) -> None:
    with pytest.raises(JobFailed, match="cuDevSmResourceSplitByCount"):
        gpu.partition(1000)
    stub.reset()
