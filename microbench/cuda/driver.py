"""What the experiments need of the CUDA driver: the primary context (the one torch uses), streams of any priority,
kernels of a wanted length, graphs, and a counter in pinned memory that the host can watch.

cuda-bindings rather than ctypes: torch's CUDA builds depend on it, so it is there wherever the experiments can run, and
it has the layouts of the driver's structures (kernel node parameters, resources, memory properties), which are long,
change between versions, and corrupt memory when copied wrongly. It is imported when a Gpu is made: to list the
experiments needs no driver.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

THREADS = 1024  # of a block of `spin`: two of them fill a multiprocessor of 2,048 threads
SOURCE = b"""
extern "C" __global__ void spin(unsigned long long cycles, unsigned long long *stamps) {
    unsigned long long began, ended;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(began));
    long long start = clock64();
    while (clock64() - start < (long long)cycles) {}
    if (stamps && threadIdx.x == 0) {
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ended));
        atomicMin(&stamps[0], began);
        atomicMax(&stamps[1], ended);
    }
}
extern "C" __global__ void move(float4 *to, const float4 *from, unsigned long long count) {
    unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    for (; i < count; i += (unsigned long long)gridDim.x * blockDim.x) to[i] = from[i];
}
"""
PRIMING_S = 0.3  # of work before anything is timed: the clocks rise
WAIT_S = 20.0  # after this much waiting for a counter the device hangs


class NoDevice(RuntimeError):
    """There is no GPU to measure, or no way to reach it. The message says which."""


class DriverError(RuntimeError):
    """A driver call failed. The message has its name and the driver's text."""

    def __init__(self, call: str, name: str, meaning: str) -> None:
        super().__init__(f"{call} failed: {name}: {meaning}")
        self.name = name


def bindings(module: str = "driver") -> Any:
    """`cuda.bindings.driver`, or another module of the package. Raises NoDevice where it is not installed."""
    try:
        return import_module(f"cuda.bindings.{module}")
    except ImportError as error:
        raise NoDevice(
            f"cuda-bindings can't be imported ({error}); it comes with torch's CUDA builds, or `pip install"
            " cuda-bindings`"
        ) from error


class Driver:
    """Every driver call goes through `call`, which turns a status into a DriverError that names the call."""

    def __init__(self, api: Any | None = None) -> None:
        self.api = bindings() if api is None else api

    def call(self, name: str, *args: Any) -> Any:
        """Make a call and check its status. Returns None, one value or a tuple."""
        status, *values = getattr(self.api, name)(*args)
        if int(status):
            raise DriverError(name, *self._meaning(status))
        return values[0] if len(values) == 1 else tuple(values) if values else None

    def _meaning(self, status: Any) -> tuple[str, str]:
        found = [getattr(self.api, each)(status)[1] for each in ("cuGetErrorName", "cuGetErrorString")]
        name, meaning = (text.decode() if isinstance(text, bytes) else str(text) for text in found)
        return name, meaning

    def has(self, name: str) -> bool:
        """Whether the installed binding knows the name. The driver may still refuse it."""
        return hasattr(self.api, name)

    def start(self) -> int:
        """Initialise the driver and return how many devices there are. Raises NoDevice for none."""
        try:
            self.call("cuInit", 0)
            count = int(self.call("cuDeviceGetCount"))
        except DriverError as error:
            raise NoDevice(f"the CUDA driver finds no device: {error}") from error
        except RuntimeError as error:  # the binding's own, when libcuda.so is not there
            raise NoDevice(f"there is no CUDA driver: {error}") from error
        if count == 0:
            raise NoDevice("the CUDA driver is there and has no device (is CUDA_VISIBLE_DEVICES empty?)")
        return count


@dataclass(frozen=True)
class Graph:
    """An executable graph. `nodes`: how many kernels it launches."""

    exec: Any
    nodes: int


class Counter:
    """A number in page-locked host memory that a stream increases when its work so far is done."""

    def __init__(self, gpu: Gpu) -> None:
        flags = gpu.api.CU_MEMHOSTALLOC_PORTABLE | gpu.api.CU_MEMHOSTALLOC_DEVICEMAP
        host = gpu.call("cuMemHostAlloc", 64, flags)
        self._gpu, self._host = gpu, host
        self._device = gpu.call("cuMemHostGetDevicePointer", host, 0)
        self._seen = ctypes.c_uint32.from_address(int(host))
        self._seen.value = 0
        self._last = 0

    @property
    def value(self) -> int:
        return self._seen.value

    def signal(self, stream: Any) -> int:
        """Raise the counter when all that is in `stream` now is done; returns what it will be."""
        self._last += 1
        self._gpu.call("cuStreamWriteValue32", stream, self._device, self._last, 0)
        return self._last

    def wait(self, target: int) -> None:
        """Watch the counter without sleeping. Raises TimeoutError when the device hangs."""
        seen, end = self._seen, time.perf_counter() + WAIT_S
        while seen.value < target:
            if time.perf_counter() > end:
                raise TimeoutError(f"the device did not get there within {WAIT_S:.0f} s")


class Stamps:
    """Device times (nanoseconds of the device's own clock) at which `count` kernels began and ended."""

    def __init__(self, gpu: Gpu, count: int) -> None:
        self._gpu, self.count = gpu, count
        self._host = (ctypes.c_ulonglong * (2 * count))()
        self._device = gpu.call("cuMemAlloc", ctypes.sizeof(self._host))
        self.clear()

    def at(self, index: int) -> int:
        """The addresses to pass to `spin`."""
        return int(self._device) + 16 * index

    def clear(self) -> None:
        for index in range(self.count):
            self._host[2 * index], self._host[2 * index + 1] = 2**64 - 1, 0
        self._gpu.call("cuMemcpyHtoD", self._device, ctypes.addressof(self._host), ctypes.sizeof(self._host))

    def read(self) -> list[tuple[float, float]]:
        """Seconds, each kernel's (began, ended). The device must have finished."""
        self._gpu.call("cuMemcpyDtoH", ctypes.addressof(self._host), self._device, ctypes.sizeof(self._host))
        return [(self._host[2 * i] * 1e-9, self._host[2 * i + 1] * 1e-9) for i in range(self.count)]


class Gpu(Driver):
    """Device `index` with its primary context current in this thread. `wave`: how many blocks of `spin` it holds at
    once."""

    def __init__(self, index: int = 0, api: Any | None = None, nvrtc: Any | None = None) -> None:
        super().__init__(api)
        count = self.start()
        if index >= count:
            raise NoDevice(f"there is no GPU {index}: the driver has {count}")
        self.device = self.call("cuDeviceGet", index)
        self.context = self.call("cuDevicePrimaryCtxRetain", self.device)
        self.call("cuCtxSetCurrent", self.context)
        self.name = self.call("cuDeviceGetName", 128, self.device).split(b"\0")[0].decode()
        self.sms = self.attribute("MULTIPROCESSOR_COUNT")
        self.least, self.greatest = (int(each) for each in self.call("cuCtxGetStreamPriorityRange"))
        self._kernels = self._compile(bindings("nvrtc") if nvrtc is None else nvrtc)
        self.wave = self.sms * int(self.call("cuOccupancyMaxActiveBlocksPerMultiprocessor", self._spin, THREADS, 0))
        self.cycles_per_s = 1e9
        self._calibrate()

    def attribute(self, name: str) -> int:
        which = getattr(self.api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self.call("cuDeviceGetAttribute", which, self.device))

    def facts(self) -> dict[str, Any]:
        """The device, driver and versions that figures belong to."""
        return {
            "name": self.name,
            "multiprocessors": self.sms,
            "driver": int(self.call("cuDriverGetVersion")),
            "priorities": [self.least, self.greatest],
            "cycles_per_s": self.cycles_per_s,
        }

    # ---- streams and kernels

    def stream(self, priority: int | None = None) -> Any:
        """A non-blocking stream; `priority` as the driver counts it (lower runs first), default the least."""
        flags = self.api.CUstream_flags.CU_STREAM_NON_BLOCKING
        return self.call("cuStreamCreateWithPriority", flags, self.least if priority is None else priority)

    def spin(self, stream: Any, block_s: float, blocks: int, stamps: int = 0) -> None:
        """A kernel of `blocks` blocks of `block_s` seconds each."""
        values = (round(block_s * self.cycles_per_s), stamps)
        self._launch(self._spin, stream, blocks, values, (ctypes.c_ulonglong, ctypes.c_void_p))

    def full(self, stream: Any, seconds: float, waves: int = 1, stamps: int = 0) -> None:
        """A kernel that fills the device `waves` times over and takes about `seconds` alone."""
        self.spin(stream, seconds / waves, self.wave * waves, stamps)

    def move(self, stream: Any, to: Any, source: Any, nbytes: int) -> None:
        """A kernel that copies `nbytes` of device memory: bound by bandwidth."""
        values = (int(to), int(source), nbytes // 16)
        self._launch(self._move, stream, self.wave, values, (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_ulonglong))

    def _launch(self, kernel: Any, stream: Any, blocks: int, values: tuple[Any, ...], types: tuple[Any, ...]) -> None:
        self.call("cuLaunchKernel", kernel, blocks, 1, 1, THREADS, 1, 1, 0, stream, (values, types), 0)

    # ---- graphs

    def graph(self, body: Callable[[Any], None], priority: int | None = None, *, node_priority: bool = True) -> Graph:
        """What `body` puts into the stream it is given, as a graph: captured on a stream of `priority`, uploaded."""
        stream = self.stream(priority)
        mode = self.api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self.call("cuStreamBeginCapture", stream, mode)
        try:
            body(stream)
        finally:
            graph = self.call("cuStreamEndCapture", stream)
        made = self.instantiate(graph, node_priority=node_priority)
        self.call("cuGraphUpload", made.exec, stream)
        self.sync(stream)
        self.call("cuStreamDestroy", stream)
        return made

    def instantiate(self, graph: Any, *, node_priority: bool = True) -> Graph:
        """`node_priority`: each node keeps the priority of the stream it was captured on."""
        flag = self.api.CUgraphInstantiate_flags.CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY
        nodes = int(self.call("cuGraphGetNodes", graph, 0)[1])
        return Graph(self.call("cuGraphInstantiate", graph, int(flag) if node_priority else 0), nodes)

    def launch(self, graph: Graph, stream: Any) -> None:
        self.call("cuGraphLaunch", graph.exec, stream)

    # ---- times

    def sync(self, stream: Any) -> None:
        self.call("cuStreamSynchronize", stream)

    def events(self, count: int) -> list[Any]:
        return [self.call("cuEventCreate", 0) for _ in range(count)]

    def timed(self, stream: Any, run: Callable[[], None]) -> float:
        """Device seconds of what `run` puts into `stream`, from event to event."""
        first, last = self.events(2)
        self.call("cuEventRecord", first, stream)
        run()
        self.call("cuEventRecord", last, stream)
        self.call("cuEventSynchronize", last)
        took = float(self.call("cuEventElapsedTime", first, last)) * 1e-3
        for event in (first, last):
            self.call("cuEventDestroy", event)
        return took

    def _compile(self, nvrtc: Any) -> Sequence[Any]:
        major, minor = (self.attribute(f"COMPUTE_CAPABILITY_{part}") for part in ("MAJOR", "MINOR"))
        target = f"--gpu-architecture=sm_{major}{minor}"
        program = _rtc(nvrtc, "nvrtcCreateProgram", SOURCE, b"experiments.cu", 0, [], [])
        _rtc(nvrtc, "nvrtcCompileProgram", program, 1, [target.encode()])
        image = b" " * _rtc(nvrtc, "nvrtcGetCUBINSize", program)
        _rtc(nvrtc, "nvrtcGetCUBIN", program, image)
        self._library = self.call("cuLibraryLoadData", image, [], [], 0, [], [], 0)
        found = [self.call("cuLibraryGetKernel", self._library, name) for name in (b"spin", b"move")]
        # A kernel of a library belongs to no context: launched on a green context's stream, it runs there.
        self._spin, self._move = (self.api.CUfunction(int(kernel)) for kernel in found)
        return found

    def _calibrate(self) -> None:
        stream = self.stream()
        end = time.perf_counter() + PRIMING_S
        while time.perf_counter() < end:
            self.full(stream, 5e-3)
            self.sync(stream)
        rates = sorted(
            20e-3 * self.cycles_per_s / self.timed(stream, lambda: self.full(stream, 20e-3)) for _ in range(5)
        )
        self.cycles_per_s = rates[2]
        self.call("cuStreamDestroy", stream)


def _rtc(nvrtc: Any, name: str, *args: Any) -> Any:
    status, *values = getattr(nvrtc, name)(*args)
    if int(status):
        raise DriverError(name, str(status), "the experiments' kernels could not be compiled")
    return values[0] if values else None
