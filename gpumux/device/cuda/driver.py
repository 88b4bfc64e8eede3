"""All calls of the CUDA driver, behind the `Driver` protocol, which tests implement with a fake.

torch does the computing. Calls that torch has no interface for, or a narrower one, go through cuda-bindings (an
optional dependency, imported when a device is opened): streams over the full range of priorities, events, page-locked
memory, numbers that the GPU stores there, green contexts. Every result that is not success becomes a typed error
(`check`).

Handles and addresses are integers, sizes bytes, times seconds. All arguments are positional: cuda-bindings 12 and 13
name some of them differently.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from gpumux.errors import AdmissionRefused, ConfigError, DeviceLost, GpumuxError, JobFailed
from gpumux.types import Fault

# ---- Failed driver calls, as errors with remedies. No torch, no driver.


_LOOK = (
    "look at the kernel's log (dmesg | grep -i xid); `gpumux serve` starts anew, and the jobs can be submitted again"
)

# After one of these every later call in the context fails the same way. Only a new process helps.
STICKY: dict[str, str] = {
    "CUDA_ERROR_ILLEGAL_ADDRESS": "a kernel touched memory out of its bounds",
    "CUDA_ERROR_MISALIGNED_ADDRESS": "a kernel used an address that is not aligned",
    "CUDA_ERROR_INVALID_ADDRESS_SPACE": "a kernel used an address of the wrong kind",
    "CUDA_ERROR_INVALID_PC": "a kernel jumped out of its code",
    "CUDA_ERROR_ILLEGAL_INSTRUCTION": "a kernel ran an instruction the GPU does not know",
    "CUDA_ERROR_HARDWARE_STACK_ERROR": "a kernel's stack was corrupted",
    "CUDA_ERROR_ASSERT": "a kernel found a value it can't take (an index out of range, for instance)",
    "CUDA_ERROR_LAUNCH_FAILED": "a kernel failed",
    "CUDA_ERROR_TENSOR_MEMORY_LEAK": "a kernel ended without giving back the tensor memory it took",
    "CUDA_ERROR_LAUNCH_TIMEOUT": "a kernel ran longer than the display driver lets it",
    "CUDA_ERROR_ECC_UNCORRECTABLE": "the GPU's memory has an error that can't be corrected",
    "CUDA_ERROR_NVLINK_UNCORRECTABLE": "a link between GPUs has an error that can't be corrected",
    "CUDA_ERROR_CONTAINED": "the GPU's memory has an error, contained to this process",
    "CUDA_ERROR_EXTERNAL_DEVICE": "a device beside the GPU failed",
    "CUDA_ERROR_CONTEXT_IS_DESTROYED": "the GPU's context was destroyed",
    "CUDA_ERROR_DEINITIALIZED": "the driver is being shut down",
    "CUDA_ERROR_MPS_CLIENT_TERMINATED": "the MPS server ended this process's work",
    "CUDA_ERROR_MPS_RPC_FAILURE": "the MPS server went away",
    "CUDA_ERROR_UNKNOWN": "the driver reports an error it has no name for",
}

# Errors while the device is opened: the machine or the configuration has to change.
_OPENING: dict[str, tuple[str, str]] = {
    "CUDA_ERROR_NO_DEVICE": (
        "there is no NVIDIA GPU this process may use", "check nvidia-smi and CUDA_VISIBLE_DEVICES",
    ),
    "CUDA_ERROR_INVALID_DEVICE": ("there is no such GPU", "choose another --gpu; nvidia-smi -L lists them"),
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": (
        "the loaded kernel module and the driver's library are of different versions",
        "restart the machine, or reload the module, after a driver update",
    ),
    "CUDA_ERROR_SYSTEM_NOT_READY": (
        "the driver says the system is not ready",
        "start what this machine needs (nvidia-fabricmanager on NVSwitch systems)",
    ),
    "CUDA_ERROR_DEVICE_UNAVAILABLE": (
        "the GPU is held by another process in exclusive mode",
        "end that process, or use: nvidia-smi -c DEFAULT",
    ),
    "CUDA_ERROR_DEVICE_NOT_LICENSED": ("the virtual GPU has no licence", "give it one, or use another GPU"),
    "CUDA_ERROR_STUB_LIBRARY": ("the driver's stub library was loaded", "take cuda/lib64/stubs off LD_LIBRARY_PATH"),
    "CUDA_ERROR_NOT_PERMITTED": ("the process may not use the GPU", "check the rights on /dev/nvidia*"),
    "CUDA_ERROR_OPERATING_SYSTEM": (
        "the operating system refused a call of the driver", "check the rights on /dev/nvidia*",
    ),
    "CUDA_ERROR_MPS_SERVER_NOT_READY": ("the MPS server is not ready", "wait for it, or stop it: gpumux needs none"),
    "CUDA_ERROR_MPS_CONNECTION_FAILED": ("the MPS server can't be reached", "start it, or stop it: gpumux needs none"),
    "CUDA_ERROR_MPS_MAX_CLIENTS_REACHED": (
        "the MPS server has no room", "end other clients, or stop it: gpumux needs none",
    ),
}  # fmt: skip


def as_fault(error: BaseException) -> Fault:
    """The Fault that reports an error to a job."""
    if isinstance(error, GpumuxError):
        return Fault(error.code, error.message, error.remedy)
    known = JobFailed(
        f"an error inside gpumux: {type(error).__name__}: {error}"[:500], "report it with the daemon's log"
    )
    return Fault(known.code, known.message, known.remedy)


def _failed(name: str, call: str, said: str) -> JobFailed:
    """The error of a call that failed alone: the context lives on."""
    remedy = "report it with the daemon's log"
    if name.startswith("CUDA_ERROR_STREAM_CAPTURE"):
        remedy = "an operator of the step can't be captured; find it by submitting parts of the step"
    elif name == "CUDA_ERROR_NOT_SUPPORTED":
        remedy = "update the NVIDIA driver, or turn the feature off"
    return JobFailed(f"{call} failed: {name} ({said})", remedy)


def fault(name: str, call: str, said: str, *, opening: bool = False) -> GpumuxError:
    """The error to raise for a CUresult. `opening`: the device is being opened, so that every failure is a matter of
    the machine or the configuration (ConfigError)."""
    if opening:
        message, remedy = _OPENING.get(name, (f"{call} failed: {name} ({said})", "check nvidia-smi"))
        return ConfigError(f"the GPU can't be used: {message}", f"{remedy}, or use --device cpu")
    if name in STICKY:
        return DeviceLost(f"the GPU's context is lost: {STICKY[name]} ({name}, noticed by {call})", _LOOK)
    if name == "CUDA_ERROR_OUT_OF_MEMORY":
        return AdmissionRefused(f"{call} found no memory", "use smaller batches, or wait for other jobs to end")
    return _failed(name, call, said)


# ---- The driver


NO_DRIVER = "there is no NVIDIA driver on this machine"
NEEDED = "pip install cuda-bindings, or use --device cpu"
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_PORTABLE_MAPPED = 1 | 2  # CU_MEMHOSTALLOC_PORTABLE | DEVICEMAP; the REGISTER flags have the same values
_CREATE_GREEN = 1  # CU_GREEN_CTX_DEFAULT_STREAM: the flag that cuGreenCtxCreate demands
_EXTERNAL = 1  # CU_EVENT_RECORD_EXTERNAL: a node of the graph, not an edge of the capture
GREEN_SINCE = 12040


@dataclass(frozen=True, slots=True)
class GpuProperties:
    """What the driver reports of one GPU. `priorities`: of streams, least and greatest; smaller numbers run first."""

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
    """The driver's calls. Each may raise DeviceLost, AdmissionRefused (no memory) or JobFailed."""

    def open(self, ordinal: int) -> GpuProperties:
        """Take the primary context of GPU `ordinal`, the one torch uses. Raises ConfigError."""

    def enter(self) -> None:
        """Make the context current in the calling thread; call it once in each thread that makes calls."""

    def close(self) -> None: ...

    def memory(self) -> tuple[int, int]:
        """Free bytes on the GPU, and all bytes."""

    def stream(self, priority: int) -> int: ...

    def destroy_stream(self, stream: int) -> None: ...

    def idle(self, stream: int) -> bool:
        """Whether all work of the stream is done. Never waits."""

    def event(self, *, timed: bool) -> int: ...

    def destroy_event(self, event: int) -> None: ...

    def record(self, event: int, stream: int) -> None: ...

    def mark(self, event: int, stream: int) -> None:
        """Record an event in the graph that is captured on the stream: each replay records it."""

    def reached(self, event: int) -> bool:
        """Whether the work recorded by the event is done. Never waits."""

    def elapsed(self, start: int, end: int) -> float:
        """Seconds between two timed events that were reached (resolution 0.5 us, a float of milliseconds)."""

    def wait(self, stream: int, event: int) -> None:
        """Have the stream's later work run after the event."""

    def pin(self, nbytes: int) -> Pinned: ...

    def unpin(self, memory: Pinned) -> None: ...

    def register(self, address: int, nbytes: int) -> None:
        """Page-lock existing memory, so that copies of it need no staging."""

    def unregister(self, address: int) -> None: ...

    def copy_in(self, device_address: int, address: int, nbytes: int, stream: int) -> None: ...

    def copy_out(self, address: int, device_address: int, nbytes: int, stream: int) -> None: ...

    def copy_within(self, target: int, source: int, nbytes: int, stream: int) -> None: ...

    def write_value(self, device_address: int, value: int, stream: int) -> None:
        """Have the GPU store a 32-bit number when the stream's work so far is done."""

    def upload(self, executable: int, stream: int) -> None:
        """Copy an executable graph to the GPU ahead of its first launch."""

    def launch(self, executable: int, stream: int) -> None:
        """Launch an executable graph on the stream."""

    def partition(self, multiprocessors: int) -> tuple[int, int]:
        """A green context of at least so many multiprocessors, and how many it has. Raises JobFailed if the driver or
        the GPU has no green contexts."""

    def confined_stream(self, partition: int, priority: int) -> int:
        """A stream that runs on the partition's multiprocessors. It is used with the primary context current."""

    def destroy_partition(self, partition: int) -> None: ...


class CudaDriver:
    """The real driver. Functions that every piece calls are bound once (`_HotCalls`), since Python's part of such a
    call takes longer than the driver's."""

    def __init__(self) -> None:
        self._api: Any = None
        self._hot: Any = None
        self._context: Any = None
        self._device: Any = None
        self._opening = True
        self._partitions: dict[int, Any] = {}

    def open(self, ordinal: int) -> GpuProperties:
        self._api = bindings()
        self._hot = _HotCalls(self._api)
        try:
            self._call("cuInit", 0)
        except RuntimeError as error:  # cuda-bindings found no libcuda
            raise ConfigError(NO_DRIVER, "install one (nvidia-smi shows it), or use --device cpu") from error
        self._device = self._call("cuDeviceGet", ordinal)
        self._context = self._call("cuDevicePrimaryCtxRetain", self._device)
        self.enter()
        name = bytes(self._call("cuDeviceGetName", 256, self._device)).split(b"\0")[0].decode()
        least, greatest = self._call("cuCtxGetStreamPriorityRange")
        facts = GpuProperties(
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
        seconds: float = milliseconds / 1e3
        return seconds

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

    # ---- calls

    def _call(self, name: str, *args: Any) -> Any:
        """Make a call and check its result. Returns its value: a tuple of several, None if it has none."""
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
    """The binding's object for each handle, made once: given a number, the binding would make one in each call."""

    def __init__(self, kind: Callable[[int], Any]) -> None:
        super().__init__()
        self._kind = kind

    def __missing__(self, handle: int) -> Any:
        made = self[handle] = self._kind(handle)
        return made


class _HotCalls:
    """The driver's functions that every piece calls, with the objects they take and the results they return."""

    def __init__(self, api: Any) -> None:
        self.record, self.query, self.elapsed = api.cuEventRecord, api.cuEventQuery, api.cuEventElapsedTime
        self.wait, self.write, self.launch = api.cuStreamWaitEvent, api.cuStreamWriteValue32, api.cuGraphLaunch
        self.success = api.CUresult.CUDA_SUCCESS
        self.not_ready = api.CUresult.CUDA_ERROR_NOT_READY
        self.events = _Handles(api.CUevent)
        self.streams = _Handles(api.CUstream)


def bindings() -> Any:
    """The module of driver calls. Raises ConfigError if there is no driver, or cuda-bindings is not installed."""
    try:
        ctypes.CDLL("libcuda.so.1")  # first: without a driver, installing the package would not help
    except OSError as error:
        raise ConfigError(NO_DRIVER, "install one (nvidia-smi shows it), or use --device cpu") from error
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise ConfigError(f"the cuda device needs the package cuda-bindings ({error})", NEEDED) from error
    return driver


def check(api: Any, call: str, status: Any, *, opening: bool = False) -> None:
    """Raise the error that a result stands for, unless it is success."""
    if int(status) == 0:
        return
    name = getattr(status, "name", f"CUDA_ERROR_{int(status)}")
    _, words = api.cuGetErrorString(status)
    said = words.decode() if isinstance(words, bytes) else "no description"
    raise fault(name, call, said, opening=opening)
