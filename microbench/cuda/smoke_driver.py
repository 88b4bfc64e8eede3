"""The assumptions of smoke.py about the driver alone. Needs cuda-bindings, and the run-time compiler
where kernels are needed."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import threading
import time
from collections.abc import Callable
from functools import cached_property
from typing import Any

from gpumux.device.cuda.driver import GREEN_SINCE, CudaDriver, GpuProperties, Pinned
from gpumux.errors import GpumuxError
from microbench.cuda.driver import Driver, Gpu, NoDevice

REACHED_S = 5.0
CYCLES = 20


class Wrong(AssertionError):
    """An assumption does not hold."""


def hold(condition: bool, otherwise: str) -> None:
    if not condition:
        raise Wrong(otherwise)


class Card:
    """One GPU by the driver wrapper that the daemon has (`gpu`), and by the experiments' kernels (`kernels`). Raises
    NoDevice."""

    def __init__(self) -> None:
        self.plain = Driver()
        self.plain.start()
        self.gpu = CudaDriver()
        try:
            self.properties: GpuProperties = self.gpu.open(0)
        except GpumuxError as error:
            raise NoDevice(f"{error.message}; {error.remedy}") from error
        self.least, self.greatest = self.properties.priorities
        self.torch: Any = None
        self._share: tuple[int, int] | None = None

    @property
    def facts(self) -> dict[str, Any]:
        import platform

        import cuda.bindings

        return {
            "name": self.properties.name,
            "driver": self.properties.driver_version,
            "capability": list(self.properties.capability),
            "multiprocessors": self.properties.multiprocessors,
            "memory_bytes": self.properties.memory_bytes,
            "priorities": list(self.properties.priorities),
            "bindings": cuda.bindings.__version__,
            "python": platform.python_version(),
            "torch": str(self.torch.__version__) if self.torch else "",
        }

    def describe(self) -> str:
        facts = self.facts
        return (
            f"{facts['name']}, driver {facts['driver']}, {facts['multiprocessors']} multiprocessors, priorities"
            f" {facts['priorities']}, cuda-bindings {facts['bindings']}, Python {facts['python']}"
        )

    @cached_property
    def kernels(self) -> Gpu:
        return Gpu()

    def green(self) -> int:
        """A green context of about half of the multiprocessors, made once."""
        hold(self.properties.driver_version >= GREEN_SINCE, "green contexts need a driver of CUDA 12.4")
        if self._share is None:
            self._share = self.gpu.partition(self.properties.multiprocessors // 2)
        return self._share[0]

    def until(self, reached: Callable[[], bool]) -> float:
        """Query until it holds. Returns the seconds that took."""
        began = time.perf_counter()
        while not reached():
            if time.perf_counter() - began > REACHED_S:
                raise Wrong(f"not within {REACHED_S:.0f} s")
        return time.perf_counter() - began


class Number:
    """A 32-bit number in page-locked memory that the GPU writes."""

    def __init__(self, card: Card) -> None:
        self._card = card
        self._memory: Pinned = card.gpu.pin(64)
        self._seen = ctypes.c_uint32.from_address(self._memory.address)
        self._seen.value = 0

    @property
    def value(self) -> int:
        return self._seen.value

    def write(self, value: int, stream: int) -> None:
        self._card.gpu.write_value(self._memory.device_address, value, stream)

    def close(self) -> None:
        self._card.gpu.unpin(self._memory)


# ---- contexts, streams, memory


def context(card: Card) -> str:
    mine = card.plain.call("cuCtxGetCurrent")
    primary = card.plain.call("cuDevicePrimaryCtxRetain", card.plain.call("cuDeviceGet", 0))
    card.plain.call("cuDevicePrimaryCtxRelease", card.plain.call("cuDeviceGet", 0))
    hold(int(mine) == int(primary), "the current context is not the primary one")
    free, total = card.gpu.memory()
    return f"{free >> 20} of {total >> 20} MiB free"


def second_thread(card: Card) -> str:
    found: list[str] = []

    def work() -> None:
        try:
            card.gpu.enter()
            stream = card.gpu.stream(card.least)
            card.until(lambda: card.gpu.idle(stream))
            card.gpu.destroy_stream(stream)
        except Exception as error:  # noqa: BLE001  reported below
            found.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(REACHED_S)
    hold(not thread.is_alive(), "the thread does not end")
    hold(not found, found[0] if found else "")
    return "enters, and makes a stream"


def priorities(card: Card) -> str:
    hold(card.least - card.greatest >= 2, f"{card.least} to {card.greatest}: nothing in between")
    for priority in (card.least, card.greatest):
        stream = card.gpu.stream(priority)
        reported = int(card.plain.call("cuStreamGetPriority", stream))
        card.gpu.destroy_stream(stream)
        hold(reported == priority, f"a stream of {priority} says {reported}")
    return f"{card.least} to {card.greatest}"


def counter(card: Card) -> str:
    stream, number, took = card.gpu.stream(card.greatest), Number(card), []
    for value in range(1, CYCLES + 1):
        began = time.perf_counter()
        number.write(value, stream)
        card.until(lambda: number.value == value)  # noqa: B023  asked at once
        took.append(time.perf_counter() - began)
    card.gpu.destroy_stream(stream)
    number.close()
    return f"seen {1e6 * sorted(took)[CYCLES // 2]:.1f} us after the call began, at most {1e6 * max(took):.0f}"


def unrecorded(card: Card) -> str:
    event = card.gpu.event(timed=False)
    hold(card.gpu.reached(event), "an event that was never recorded is waited for")
    card.gpu.destroy_event(event)
    return "it is"


def events(card: Card) -> str:
    """Events of two streams, and one that waits for the other."""
    a, b = card.gpu.stream(card.least), card.gpu.stream(card.greatest)
    first, last = card.gpu.event(timed=True), card.gpu.event(timed=True)
    number = Number(card)
    card.gpu.record(first, a)
    number.write(1, a)
    card.gpu.wait(b, first)
    number.write(2, b)
    card.gpu.record(last, b)
    card.until(lambda: card.gpu.reached(last) and card.gpu.reached(first))
    took = card.gpu.elapsed(first, last)
    hold(took >= 0, f"{1e6 * took:.1f} us from the first to the second")
    for stream in (a, b):
        card.until(lambda: card.gpu.idle(stream))  # noqa: B023
        card.gpu.destroy_stream(stream)
    for event in (first, last):
        card.gpu.destroy_event(event)
    number.close()
    return f"{1e6 * took:.1f} us from the first to the second"


def shared_memory(card: Card) -> str:
    """As a job's segment is: a sealed file in memory, page-locked where it is mapped."""
    nbytes = 8 << 20
    descriptor = os.memfd_create("gpumux-smoke", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, nbytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    page = mmap.mmap(descriptor, nbytes)
    os.close(descriptor)
    half = nbytes // 2
    page[:half] = os.urandom(4096) * (half // 4096)
    first = ctypes.c_char.from_buffer(page)
    address = ctypes.addressof(first)
    began = time.perf_counter()
    card.gpu.register(address, nbytes)
    locked = time.perf_counter() - began
    there = int(card.plain.call("cuMemAlloc", half))
    stream, event = card.gpu.stream(card.least), card.gpu.event(timed=False)
    card.gpu.copy_in(there, address, half, stream)
    card.gpu.copy_out(address + half, there, half, stream)
    card.gpu.record(event, stream)
    card.until(lambda: card.gpu.reached(event))
    card.gpu.destroy_event(event)
    card.gpu.destroy_stream(stream)
    card.plain.call("cuMemFree", there)
    card.gpu.unregister(address)
    same = page[:half] == page[half:]
    del first
    page.close()
    hold(same, "what came back is not what went in")
    return f"{nbytes >> 20} MiB locked in {1e6 * locked:.0f} us, copied both ways"


def same_address(card: Card) -> str:
    from microbench.cuda.same_address import HINTS, Mapped

    mapped = Mapped(card.plain, HINTS[0])
    at = mapped.address
    mapped.fill(0x600D)
    right = mapped.holds(0x600D)
    mapped.release()
    hold(right, "the memory does not hold what was written")
    hold(at == HINTS[0], f"asked for {HINTS[0]:#x}, got {at:#x}")
    return f"at {at:#x}, as asked"


# ---- kernels and graphs


def kernels(card: Card) -> str:
    gpu = card.kernels
    stream = gpu.stream()
    took = gpu.timed(stream, lambda: gpu.full(stream, 1e-3))
    gpu.call("cuStreamDestroy", stream)
    hold(0.8e-3 < took < 1.5e-3, f"a kernel of 1000 us takes {1e6 * took:.0f}")
    return f"a kernel of 1000 us takes {1e6 * took:.0f}, {gpu.wave} blocks at once"


def not_yet(card: Card) -> str:
    """A running kernel is not reported as done."""
    gpu, stream, event = card.kernels, card.gpu.stream(card.least), card.gpu.event(timed=False)
    gpu.full(stream, 20e-3)
    card.gpu.record(event, stream)
    early, idle = card.gpu.reached(event), card.gpu.idle(stream)
    took = card.until(lambda: card.gpu.reached(event))
    card.gpu.destroy_event(event)
    card.gpu.destroy_stream(stream)
    hold(not early and not idle, "a kernel of 20 ms is said to be over at once")
    return f"over {1e3 * took:.1f} ms after it was first asked for"


def overtakes(card: Card) -> str:
    """High work beside a low kernel of many waves."""
    gpu, low, high, number = card.kernels, card.gpu.stream(card.least), card.gpu.stream(card.greatest), Number(card)
    gpu.full(low, 20e-3, waves=200)
    done = card.gpu.event(timed=False)
    card.gpu.record(done, low)
    began = time.perf_counter()
    gpu.full(high, 100e-6)
    number.write(1, high)
    card.until(lambda: number.value == 1)
    took, over = time.perf_counter() - began, card.gpu.reached(done)
    card.until(lambda: card.gpu.reached(done))
    card.gpu.destroy_event(done)
    for stream in (low, high):
        card.gpu.destroy_stream(stream)
    number.close()
    hold(not over, f"the high kernel was seen after {1e6 * took:.0f} us, when the low one of 20 ms was over")
    return f"a high kernel of 100 us is seen after {1e6 * took:.0f}, beside 20 ms of low ones"


def node_priority(card: Card) -> str:
    """A graph captured on a high stream, launched on a low one, with the flag torch sets: does it overtake?"""
    gpu, between = card.kernels, (card.least + card.greatest) // 2
    graph = gpu.graph(lambda stream: gpu.full(stream, 100e-6), card.greatest)
    filler, low, number = card.gpu.stream(between), card.gpu.stream(card.least), Number(card)
    done = card.gpu.event(timed=False)
    gpu.full(filler, 20e-3, waves=200)
    card.gpu.record(done, filler)
    began = time.perf_counter()
    gpu.launch(graph, low)
    number.write(1, low)
    card.until(lambda: number.value == 1)
    took, over = time.perf_counter() - began, card.gpu.reached(done)
    card.until(lambda: card.gpu.reached(done))
    card.gpu.destroy_event(done)
    for stream in (filler, low):
        card.gpu.destroy_stream(stream)
    number.close()
    gpu.call("cuGraphExecDestroy", graph.exec)
    hold(not over, "its nodes have the priority of the stream it was launched on")
    return f"nodes keep the priority they were captured with ({1e6 * took:.0f} us)"


def relaunch(card: Card) -> str:
    """Captured on one stream, uploaded, launched on another."""
    gpu, stream = card.kernels, card.gpu.stream(card.greatest)

    def body(each: Any) -> None:
        for _ in range(10):
            gpu.spin(each, 10e-6, 1)

    graph = gpu.graph(body, card.least)
    card.gpu.upload(int(graph.exec), stream)
    card.until(lambda: card.gpu.idle(stream))
    took = []
    for _ in range(CYCLES):
        began = time.perf_counter()
        gpu.launch(graph, stream)
        took.append(time.perf_counter() - began)
        card.until(lambda: card.gpu.idle(stream))
    gpu.call("cuGraphExecDestroy", graph.exec)
    card.gpu.destroy_stream(stream)
    return f"a launch takes the host {1e6 * sorted(took)[CYCLES // 2]:.1f} us"


def marks(card: Card) -> str:
    """Events that a graph records have times after it ran."""
    gpu = card.kernels
    first, last = card.gpu.event(timed=True), card.gpu.event(timed=True)

    def body(stream: Any) -> None:
        card.gpu.mark(first, int(stream))
        gpu.full(stream, 500e-6)
        card.gpu.mark(last, int(stream))

    graph, stream = gpu.graph(body, card.least), card.gpu.stream(card.least)
    took = []
    for _ in range(2):
        gpu.launch(graph, stream)
        card.until(lambda: card.gpu.idle(stream))
        took.append(card.gpu.elapsed(first, last))
    gpu.call("cuGraphExecDestroy", graph.exec)
    card.gpu.destroy_stream(stream)
    for event in (first, last):
        card.gpu.destroy_event(event)
    hold(
        all(0.4e-3 < each < 1e-3 for each in took),
        f"500 us of kernels are measured as {1e6 * took[0]:.0f} and {1e6 * took[1]:.0f}",
    )
    return f"500 us of kernels are measured as {1e6 * took[0]:.0f} and {1e6 * took[1]:.0f}"


def capture_beside(card: Card) -> str:
    """One thread captures (thread-local), another launches, queries and makes an event."""
    gpu, stream, said = card.kernels, card.gpu.stream(card.greatest), []
    graph = gpu.graph(lambda each: gpu.full(each, 50e-6), card.greatest)

    def body(each: Any) -> None:
        gpu.full(each, 50e-6)
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(REACHED_S)
        gpu.full(each, 50e-6)

    def other() -> None:
        try:
            card.gpu.enter()
            gpu.launch(graph, stream)
            event = card.gpu.event(timed=True)
            card.gpu.record(event, stream)
            card.until(lambda: card.gpu.reached(event))
            card.gpu.destroy_event(event)
            said.append("")
        except Exception as error:  # noqa: BLE001  reported below
            said.append(f"{type(error).__name__}: {error}")

    captured = gpu.graph(body, card.least)
    gpu.launch(captured, stream)
    card.until(lambda: card.gpu.idle(stream))
    for each in (graph, captured):
        gpu.call("cuGraphExecDestroy", each.exec)
    card.gpu.destroy_stream(stream)
    hold(said == [""], f"the other thread: {said[0] if said else 'has not ended'}")
    hold(captured.nodes == 2, f"{captured.nodes} nodes instead of 2")
    return "launches, records and asks while another thread captures"


def gap(card: Card) -> str:
    """Two pieces, the second queued behind the first, as the device queues them: an event on either side, a number
    behind."""
    gpu, stream, number = card.kernels, card.gpu.stream(card.greatest), Number(card)
    graph = gpu.graph(lambda each: gpu.full(each, 200e-6), card.greatest)
    events = [card.gpu.event(timed=True) for _ in range(2 * CYCLES)]
    for index in range(CYCLES):
        card.gpu.record(events[2 * index], stream)
        gpu.launch(graph, stream)
        card.gpu.record(events[2 * index + 1], stream)
        number.write(index + 1, stream)
    card.until(lambda: number.value == CYCLES and card.gpu.idle(stream))
    whole = card.gpu.elapsed(events[0], events[-1])
    inside = sum(card.gpu.elapsed(events[2 * i], events[2 * i + 1]) for i in range(CYCLES))
    for event in events:
        card.gpu.destroy_event(event)
    gpu.call("cuGraphExecDestroy", graph.exec)
    card.gpu.destroy_stream(stream)
    number.close()
    return (
        f"{1e6 * inside / CYCLES:.1f} us a piece of 200, {1e6 * (whole - inside) / (CYCLES - 1):.1f} us from one to the"
        " next"
    )


# ---- shares


def green_event(card: Card) -> str:
    """An event of the primary context on a green context's stream, waited for by an ordinary one."""
    partition = card.green()
    stream, plain = card.gpu.confined_stream(partition, card.least), card.gpu.stream(card.greatest)
    event = card.gpu.event(timed=True)
    card.gpu.record(event, stream)
    card.gpu.wait(plain, event)
    card.until(lambda: card.gpu.reached(event) and card.gpu.idle(plain))
    for each in (stream, plain):
        card.gpu.destroy_stream(each)
    card.gpu.destroy_event(event)
    assert card._share is not None
    return f"{card._share[1]} of {card.properties.multiprocessors} multiprocessors"


def green_launch(card: Card) -> str:
    """A kernel on a green context's stream while the primary one is current, which is how the device launches."""
    gpu, stream = card.kernels, card.gpu.confined_stream(card.green(), card.least)
    took = gpu.timed(stream, lambda: gpu.full(stream, 1e-3))
    card.gpu.destroy_stream(stream)
    assert card._share is not None
    wanted = card.properties.multiprocessors / card._share[1]
    hold(
        took > 0.8e-3 * round(wanted),
        f"work of 1 ms on the whole takes {1e3 * took:.2f} ms on a share: it is not confined",
    )
    return f"work of 1 ms on the whole takes {1e3 * took:.2f} ms on 1/{wanted:.1f} of it"


def green_graph(card: Card) -> str:
    """A graph captured on a green context's stream, launched there and on an ordinary stream."""
    gpu, confined, plain = card.kernels, card.gpu.confined_stream(card.green(), card.least), card.gpu.stream(card.least)
    mode = gpu.api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    gpu.call("cuStreamBeginCapture", confined, mode)
    try:
        gpu.full(confined, 1e-3)
    finally:
        captured = gpu.call("cuStreamEndCapture", confined)
    graph = gpu.instantiate(captured)
    gpu.call("cuGraphDestroy", captured)
    took = [gpu.timed(stream, lambda: gpu.launch(graph, stream)) for stream in (confined, plain)]  # noqa: B023
    gpu.call("cuGraphExecDestroy", graph.exec)
    for stream in (confined, plain):
        card.gpu.destroy_stream(stream)
    where = "captured on" if took[1] > 1.4e-3 else "launched on"
    return f"{1e3 * took[0]:.2f} ms there, {1e3 * took[1]:.2f} ms on an ordinary stream: it runs where it was {where}"


ASSUMPTIONS: tuple[tuple[str, Callable[[Card], str]], ...] = (
    ("the primary context is current", context),
    ("a second thread enters the context", second_thread),
    ("streams of both priorities", priorities),
    ("a number the GPU writes is seen", counter),
    ("an event never recorded counts as reached", unrecorded),
    ("events have times across streams", events),
    ("a job's shared memory is locked and copied", shared_memory),
    ("memory is mapped where it is asked for", same_address),
    ("kernels compile and keep their time", kernels),
    ("what runs is not over", not_yet),
    ("high work overtakes low kernels", overtakes),
    ("a graph's nodes keep their priority", node_priority),
    ("a graph is launched on another stream", relaunch),
    ("events inside a graph have times", marks),
    ("one thread captures, another launches", capture_beside),
    ("pieces follow each other closely", gap),
    ("a share's stream takes ordinary events", green_event),
    ("a share's stream confines kernels", green_launch),
    ("a share's graph runs elsewhere", green_graph),
)
