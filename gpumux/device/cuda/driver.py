"""The CUDA driver calls gpumux makes, in one place, behind a protocol that a fake can stand in for.

torch does the computing. What it has no interface for, or only a narrowed one, is called here through
cuda-bindings (an optional dependency, imported when a device is opened): streams over the full range of
priorities, events, pinned memory, counters that the GPU writes into it, green contexts. Every call goes
through `_call`, which turns a result that is not success into a typed error (faults.py).

Handles are plain integers. Addresses are integers, too, sizes bytes, times seconds. All arguments are
positional: cuda-bindings 12 and 13 name some of them differently.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gpumux.device.cuda.faults import fault
from gpumux.errors import ConfigError

NO_DRIVER = "there is no NVIDIA driver on this machine"
NEEDED = "pip install cuda-bindings, or use --device cpu"
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_PORTABLE_MAPPED = 1 | 2  # CU_MEMHOSTALLOC_PORTABLE | DEVICEMAP; the REGISTER flags have the same values
_CREATE_GREEN = 1  # CU_GREEN_CTX_DEFAULT_STREAM: the flag that cuGreenCtxCreate demands
_EXTERNAL = 1  # CU_EVENT_RECORD_EXTERNAL: a node of the graph, not an edge of the capture
GREEN_SINCE = 12040


@dataclass(frozen=True, slots=True)
class Facts:
    """What the driver says of one GPU. `priorities`: least and greatest, smaller runs first."""

    name: str
    memory_bytes: int
    multiprocessors: int
    capability: tuple[int, int]
    driver_version: int
    priorities: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Pinned:
    """Page-locked host memory: its address here and on the device."""

    address: int
    device_address: int
    nbytes: int

    def view(self) -> memoryview:
        return memoryview((ctypes.c_char * self.nbytes).from_address(self.address)).cast("B")


class Driver(Protocol):
    """All of it may raise DeviceLost, AdmissionRefused (no memory) or JobFailed (faults.py)."""

    def open(self, ordinal: int) -> Facts:
        """Take the primary context of GPU `ordinal`, the one torch uses. Raises ConfigError."""

    def enter(self) -> None:
        """Make the context current in the calling thread; once in each that makes calls."""

    def close(self) -> None: ...

    def memory(self) -> tuple[int, int]:
        """Bytes free on the GPU, and in all."""

    def stream(self, priority: int) -> int: ...

    def destroy_stream(self, stream: int) -> None: ...

    def idle(self, stream: int) -> bool:
        """Whether all work of the stream is done."""

    def event(self, *, timed: bool) -> int: ...

    def destroy_event(self, event: int) -> None: ...

    def record(self, event: int, stream: int) -> None: ...

    def mark(self, event: int, stream: int) -> None:
        """While the stream is captured: the graph records the event each time it runs."""

    def reached(self, event: int) -> bool: ...

    def elapsed(self, start: int, end: int) -> float:
        """Seconds between two timed events that were reached (resolution 0.5 us, a float of milliseconds)."""

    def wait(self, stream: int, event: int) -> None:
        """What the stream is given from now on runs after the event."""

    def pin(self, nbytes: int) -> Pinned: ...

    def unpin(self, memory: Pinned) -> None: ...

    def register(self, address: int, nbytes: int) -> None:
        """Page-lock memory that is there already, so that copies of it need no staging."""

    def unregister(self, address: int) -> None: ...

    def copy_in(self, device_address: int, address: int, nbytes: int, stream: int) -> None: ...

    def copy_out(self, address: int, device_address: int, nbytes: int, stream: int) -> None: ...

    def copy_within(self, target: int, source: int, nbytes: int, stream: int) -> None: ...

    def write_value(self, device_address: int, value: int, stream: int) -> None:
        """The GPU stores a 32-bit number when the stream's work so far is done."""

    def upload(self, executable: int, stream: int) -> None:
        """Bring an executable graph to the GPU ahead of its first launch."""

    def launch(self, executable: int, stream: int) -> None:
        """Give the stream an executable graph."""

    def partition(self, multiprocessors: int) -> tuple[int, int]:
        """A green context of at least so many multiprocessors, and how many it has. Raises JobFailed where there are
        none."""

    def confined_stream(self, partition: int, priority: int) -> int:
        """A stream of the partition, used with the primary context current: it brings its multiprocessors along."""

    def destroy_partition(self, partition: int) -> None: ...


class CudaDriver:
    """The real one. Calls that every piece makes are bound once (`_Hot`): what Python adds to a call is more than the driver's
    own part of it."""

    def __init__(self) -> None:
        self._api: Any = None
        self._hot: Any = None
        self._context: Any = None
        self._device: Any = None
        self._opening = True
        self._partitions: dict[int, Any] = {}

    def open(self, ordinal: int) -> Facts:
        self._api = bindings()
        self._hot = _Hot(self._api)
        try:
            self._call("cuInit", 0)
        except RuntimeError as error:  # cuda-bindings found no libcuda
            raise ConfigError(NO_DRIVER, "install one (nvidia-smi shows it), or use --device cpu") from error
        self._device = self._call("cuDeviceGet", ordinal)
        self._context = self._call("cuDevicePrimaryCtxRetain", self._device)
        self.enter()
        name = bytes(self._call("cuDeviceGetName", 256, self._device)).split(b"\0")[0].decode()
        least, greatest = self._call("cuCtxGetStreamPriorityRange")
        facts = Facts(
            name,
            int(self._call("cuDeviceTotalMem", self._device)),
            self._attribute("MULTIPROCESSOR_COUNT"),
            (self._attribute("COMPUTE_CAPABILITY_MAJOR"), self._attribute("COMPUTE_CAPABILITY_MINOR")),
            int(self._call("cuDriverGetVersion")),
            (int(least), int(greatest)),
        )
        self._opening = False
        return facts

    def enter(self) -> None:
        self._call("cuCtxSetCurrent", self._context)

    def close(self) -> None:
        if self._context is not None:
            self._call("cuDevicePrimaryCtxRelease", self._device)
            self._context = None

    def memory(self) -> tuple[int, int]:
        free, total = self._call("cuMemGetInfo")
        return int(free), int(total)

    def stream(self, priority: int) -> int:
        return int(self._call("cuStreamCreateWithPriority", _NON_BLOCKING, priority))

    def destroy_stream(self, stream: int) -> None:
        self._hot.streams.pop(stream, None)
        self._call("cuStreamDestroy", stream)

    def idle(self, stream: int) -> bool:
        return self._is_ready("cuStreamQuery", stream)

    def event(self, *, timed: bool) -> int:
        return int(self._call("cuEventCreate", 0 if timed else _NO_TIMING))

    def destroy_event(self, event: int) -> None:
        self._hot.events.pop(event, None)
        self._call("cuEventDestroy", event)

    def record(self, event: int, stream: int) -> None:
        hot = self._hot
        (status,) = hot.record(hot.events[event], hot.streams[stream])
        if status is not hot.success:
            check(self._api, "cuEventRecord", status)

    def mark(self, event: int, stream: int) -> None:
        self._call("cuEventRecordWithFlags", event, stream, _EXTERNAL)

    def reached(self, event: int) -> bool:
        hot = self._hot
        (status,) = hot.query(hot.events[event])
        if status is hot.success:
            return True
        if status == hot.not_ready:
            return False
        check(self._api, "cuEventQuery", status)
        return True

    def elapsed(self, start: int, end: int) -> float:
        hot = self._hot
        status, milliseconds = hot.elapsed(hot.events[start], hot.events[end])
        if status is not hot.success:
            check(self._api, "cuEventElapsedTime", status)
        return float(milliseconds) / 1e3

    def wait(self, stream: int, event: int) -> None:
        hot = self._hot
        (status,) = hot.wait(hot.streams[stream], hot.events[event], 0)
        if status is not hot.success:
            check(self._api, "cuStreamWaitEvent", status)

    def pin(self, nbytes: int) -> Pinned:
        address = int(self._call("cuMemHostAlloc", nbytes, _PORTABLE_MAPPED))
        return Pinned(address, int(self._call("cuMemHostGetDevicePointer", address, 0)), nbytes)

    def unpin(self, memory: Pinned) -> None:
        self._call("cuMemFreeHost", memory.address)

    def register(self, address: int, nbytes: int) -> None:
        self._call("cuMemHostRegister", address, nbytes, _PORTABLE_MAPPED)

    def unregister(self, address: int) -> None:
        self._call("cuMemHostUnregister", address)

    def copy_in(self, device_address: int, address: int, nbytes: int, stream: int) -> None:
        self._call("cuMemcpyHtoDAsync", device_address, address, nbytes, stream)

    def copy_out(self, address: int, device_address: int, nbytes: int, stream: int) -> None:
        self._call("cuMemcpyDtoHAsync", address, device_address, nbytes, stream)

    def copy_within(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._call("cuMemcpyDtoDAsync", target, source, nbytes, stream)

    def write_value(self, device_address: int, value: int, stream: int) -> None:
        hot = self._hot
        (status,) = hot.write(hot.streams[stream], device_address, value, 0)
        if status is not hot.success:
            check(self._api, "cuStreamWriteValue32", status)

    def upload(self, executable: int, stream: int) -> None:
        self._call("cuGraphUpload", executable, stream)

    def launch(self, executable: int, stream: int) -> None:
        hot = self._hot
        (status,) = hot.launch(executable, hot.streams[stream])
        if status is not hot.success:
            check(self._api, "cuGraphLaunch", status)

    def partition(self, multiprocessors: int) -> tuple[int, int]:
        api = self._api
        whole = self._call("cuDeviceGetDevResource", self._device, api.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM)
        groups, _, _ = self._call("cuDevSmResourceSplitByCount", 1, whole, 0, multiprocessors)
        description = self._call("cuDevResourceGenerateDesc", [groups[0]], 1)
        context = self._call("cuGreenCtxCreate", description, self._device, _CREATE_GREEN)
        self._partitions[int(context)] = context
        return int(context), int(groups[0].sm.smCount)

    def confined_stream(self, partition: int, priority: int) -> int:
        context = self._partitions[partition]
        return int(self._call("cuGreenCtxStreamCreate", context, _NON_BLOCKING, priority))

    def destroy_partition(self, partition: int) -> None:
        self._call("cuGreenCtxDestroy", self._partitions.pop(partition))

    # ---- the one check

    def _call(self, name: str, *args: Any) -> Any:
        """Make a call; its value, a tuple if it has several, None if it has none."""
        status, *values = getattr(self._api, name)(*args)
        check(self._api, name, status, opening=self._opening)
        return values[0] if len(values) == 1 else tuple(values) or None

    def _is_ready(self, name: str, handle: int) -> bool:
        (status,) = getattr(self._api, name)(handle)
        if status == self._api.CUresult.CUDA_ERROR_NOT_READY:
            return False
        check(self._api, name, status)
        return True

    def _attribute(self, name: str) -> int:
        attribute = getattr(self._api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self._call("cuDeviceGetAttribute", attribute, self._device))


class _Handles(dict[int, Any]):
    """The binding's object for each handle, made when first asked for: it takes a number as well, and makes one each time."""

    def __init__(self, kind: Callable[[int], Any]) -> None:
        super().__init__()
        self._kind = kind

    def __missing__(self, handle: int) -> Any:
        made = self[handle] = self._kind(handle)
        return made


class _Hot:
    """The functions of the calls that pieces make, and what they are called with and compared with."""

    def __init__(self, api: Any) -> None:
        self.record, self.query, self.elapsed = api.cuEventRecord, api.cuEventQuery, api.cuEventElapsedTime
        self.wait, self.write, self.launch = api.cuStreamWaitEvent, api.cuStreamWriteValue32, api.cuGraphLaunch
        self.success = api.CUresult.CUDA_SUCCESS
        self.not_ready = api.CUresult.CUDA_ERROR_NOT_READY
        self.events = _Handles(api.CUevent)
        self.streams = _Handles(api.CUstream)


def bindings() -> Any:
    """The module of driver calls. Raises ConfigError where there is no driver, or cuda-bindings is not installed."""
    try:
        ctypes.CDLL("libcuda.so.1")  # looked for first: without a driver, installing the package would not help
    except OSError as error:
        raise ConfigError(NO_DRIVER, "install one (nvidia-smi shows it), or use --device cpu") from error
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise ConfigError(f"the cuda device needs the package cuda-bindings ({error})", NEEDED) from error
    return driver


def check(api: Any, call: str, status: Any, *, opening: bool = False) -> None:
    """Raises the error that a result stands for, unless it is success."""
    if int(status) == 0:
        return
    name = getattr(status, "name", f"CUDA_ERROR_{int(status)}")
    _, words = api.cuGetErrorString(status)
    said = words.decode() if isinstance(words, bytes) else "no description"
    raise fault(name, call, said, opening=opening)


def scattered(sizes: Sequence[int], align: int = 256) -> tuple[tuple[int, ...], int]:
    """Offsets of pieces laid end to end, each on `align` bytes (what the GPU's allocator promises), and the bytes in all."""
    offsets, at = [], 0
    for nbytes in sizes:
        offsets.append(at)
        at += -(-nbytes // align) * align
    return tuple(offsets), max(at, align)
