"""A CUDA driver without a device, as far as the experiments call it: memory is host memory, kernels take virtual time
and nothing else, streams run what they are given at once. It refuses what it does not know, as the real one does."""

from __future__ import annotations

import ctypes
from enum import IntEnum, IntFlag
from types import SimpleNamespace
from typing import Any

CYCLES_PER_S = 2e9
SMS, BLOCKS_PER_SM = 132, 2


class Status(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_INVALID_HANDLE = 400
    CUDA_ERROR_NOT_SUPPORTED = 801


class Attribute(IntEnum):
    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76


class EventFlags(IntFlag):
    CU_EVENT_DEFAULT = 0
    CU_EVENT_BLOCKING_SYNC = 1
    CU_EVENT_DISABLE_TIMING = 2


class FakeDriver:
    """`green`: whether it has green contexts."""

    CUresult = Status
    CUdevice_attribute = Attribute
    CUevent_flags = EventFlags
    CUfunction = int
    CU_MEMHOSTALLOC_PORTABLE, CU_MEMHOSTALLOC_DEVICEMAP = 1, 2
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL=1)
    CUgraphInstantiate_flags = SimpleNamespace(CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY=8)
    CUgreenCtxCreate_flags = SimpleNamespace(CU_GREEN_CTX_DEFAULT_STREAM=1)
    CUdevResourceType = SimpleNamespace(CU_DEV_RESOURCE_TYPE_SM=1)

    def __init__(self, *, devices: int = 1, green: bool = True) -> None:
        self._devices, self._green = devices, green
        self._handles = iter(range(1, 10**9))
        self._clock = 0.0
        self._memory: dict[int, Any] = {}
        self._events: dict[int, float] = {}
        self._graphs: dict[int, list[float]] = {}
        self._streams: dict[int, list[float] | None] = {}

    def _new(self) -> int:
        return next(self._handles)

    # ---- device

    def cuInit(self, flags: int) -> Any:
        return (Status.CUDA_SUCCESS,)

    def cuGetErrorName(self, status: Status) -> Any:
        return Status.CUDA_SUCCESS, status.name.encode()

    cuGetErrorString = cuGetErrorName

    def cuDeviceGetCount(self) -> Any:
        return Status.CUDA_SUCCESS, self._devices

    def cuDeviceGet(self, index: int) -> Any:
        return Status.CUDA_SUCCESS, index

    def cuDevicePrimaryCtxRetain(self, device: int) -> Any:
        return Status.CUDA_SUCCESS, 1

    def cuCtxSetCurrent(self, context: int) -> Any:
        return (Status.CUDA_SUCCESS,)

    cuCtxPushCurrent = cuCtxSetCurrent

    def cuCtxPopCurrent(self) -> Any:
        return Status.CUDA_SUCCESS, 1

    def cuDeviceGetName(self, length: int, device: int) -> Any:
        return Status.CUDA_SUCCESS, b"Fake GPU".ljust(length, b"\0")

    def cuDeviceGetAttribute(self, which: Attribute, device: int) -> Any:
        return Status.CUDA_SUCCESS, {Attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: SMS}.get(which, 9)

    def cuDriverGetVersion(self) -> Any:
        return Status.CUDA_SUCCESS, 13000

    def cuCtxGetStreamPriorityRange(self) -> Any:
        return Status.CUDA_SUCCESS, 0, -5

    def cuMemGetInfo(self) -> Any:
        return Status.CUDA_SUCCESS, 10 << 30, 20 << 30

    # ---- kernels

    def cuLibraryLoadData(self, image: bytes, *rest: Any) -> Any:
        return Status.CUDA_SUCCESS, self._new()

    def cuLibraryGetKernel(self, library: int, name: bytes) -> Any:
        return Status.CUDA_SUCCESS, {b"spin": 7, b"move": 8}[name]

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, kernel: int, threads: int, shared: int) -> Any:
        return Status.CUDA_SUCCESS, BLOCKS_PER_SM

    def cuLaunchKernel(self, kernel: int, x: int, *rest: Any) -> Any:
        stream, (values, types), _ = rest[-3:]
        assert len(values) == len(types)
        waves = max(1, x / (SMS * BLOCKS_PER_SM))
        seconds = waves * values[0] / CYCLES_PER_S if kernel == 7 else 1e-4
        captured = self._streams[int(stream)]
        if captured is None:
            self._clock += seconds
        else:
            captured.append(seconds)
        return (Status.CUDA_SUCCESS,)

    # ---- streams, events, graphs

    def cuStreamCreateWithPriority(self, flags: int, priority: int) -> Any:
        if not -5 <= priority <= 0:
            return Status.CUDA_ERROR_INVALID_VALUE, None
        made = self._new()
        self._streams[made] = None
        return Status.CUDA_SUCCESS, made

    def cuStreamDestroy(self, stream: int) -> Any:
        del self._streams[stream]
        return (Status.CUDA_SUCCESS,)

    def cuStreamSynchronize(self, stream: int) -> Any:
        return (Status.CUDA_SUCCESS if stream in self._streams else Status.CUDA_ERROR_INVALID_HANDLE,)

    cuStreamQuery = cuStreamSynchronize

    def cuStreamWriteValue32(self, stream: int, address: int, value: int, flags: int) -> Any:
        ctypes.c_uint32.from_address(address).value = value
        return (Status.CUDA_SUCCESS,)

    def cuStreamBeginCapture(self, stream: int, mode: int) -> Any:
        self._streams[stream] = []
        return (Status.CUDA_SUCCESS,)

    def cuStreamEndCapture(self, stream: int) -> Any:
        captured, self._streams[stream] = self._streams[stream], None
        assert captured is not None
        made = self._new()
        self._graphs[made] = captured
        return Status.CUDA_SUCCESS, made

    def cuGraphGetNodes(self, graph: int, count: int = 0) -> Any:
        return Status.CUDA_SUCCESS, [], len(self._graphs[graph])

    def cuGraphInstantiate(self, graph: int, flags: int) -> Any:
        return Status.CUDA_SUCCESS, graph

    def cuGraphUpload(self, graph: int, stream: int) -> Any:
        return (Status.CUDA_SUCCESS,)

    def cuGraphLaunch(self, graph: int, stream: int) -> Any:
        if stream not in self._streams:
            return (Status.CUDA_ERROR_INVALID_HANDLE,)
        self._clock += sum(self._graphs[graph])
        return (Status.CUDA_SUCCESS,)

    def cuGraphExecDestroy(self, graph: int) -> Any:
        del self._graphs[graph]
        return (Status.CUDA_SUCCESS,)

    def cuEventCreate(self, flags: int) -> Any:
        made = self._new()
        self._events[made] = 0.0
        return Status.CUDA_SUCCESS, made

    def cuEventRecord(self, event: int, stream: int) -> Any:
        self._events[event] = self._clock
        return (Status.CUDA_SUCCESS,)

    def cuEventSynchronize(self, event: int) -> Any:
        return (Status.CUDA_SUCCESS if event in self._events else Status.CUDA_ERROR_INVALID_HANDLE,)

    cuEventQuery = cuEventSynchronize

    def cuEventElapsedTime(self, first: int, last: int) -> Any:
        return Status.CUDA_SUCCESS, 1e3 * max(1e-9, self._events[last] - self._events[first])

    def cuEventDestroy(self, event: int) -> Any:
        del self._events[event]
        return (Status.CUDA_SUCCESS,)

    # ---- memory

    def cuMemAlloc(self, nbytes: int) -> Any:
        made = ctypes.create_string_buffer(min(nbytes, 1 << 16))
        self._memory[ctypes.addressof(made)] = made
        return Status.CUDA_SUCCESS, ctypes.addressof(made)

    def cuMemHostAlloc(self, nbytes: int, flags: int) -> Any:
        return self.cuMemAlloc(nbytes)

    def cuMemHostGetDevicePointer(self, address: int, flags: int) -> Any:
        return Status.CUDA_SUCCESS, address

    def cuMemcpyHtoDAsync(self, to: int, source: int, nbytes: int, stream: int) -> Any:
        self._clock += nbytes / 50e9
        return (Status.CUDA_SUCCESS,)

    # ---- green contexts

    def cuDeviceGetDevResource(self, device: int, kind: int) -> Any:
        if not self._green:
            return Status.CUDA_ERROR_NOT_SUPPORTED, None
        return Status.CUDA_SUCCESS, SimpleNamespace(sm=SimpleNamespace(smCount=SMS))

    def cuDevSmResourceSplitByCount(self, groups: int, whole: Any, flags: int, least: int) -> Any:
        part = SimpleNamespace(sm=SimpleNamespace(smCount=-(-least // 8) * 8))
        return Status.CUDA_SUCCESS, [part], groups, whole

    def cuDevResourceGenerateDesc(self, resources: list[Any], count: int) -> Any:
        assert len(resources) == count
        return Status.CUDA_SUCCESS, self._new()

    def cuGreenCtxCreate(self, described: int, device: int, flags: int) -> Any:
        return Status.CUDA_SUCCESS, self._new()

    def cuGreenCtxStreamCreate(self, green: int, flags: int, priority: int) -> Any:
        return self.cuStreamCreateWithPriority(flags, priority)

    def cuCtxFromGreenCtx(self, green: int) -> Any:
        return Status.CUDA_SUCCESS, self._new()

    def cuGreenCtxDestroy(self, green: int) -> Any:
        return (Status.CUDA_SUCCESS,)


class FakeCompiler:
    def nvrtcCreateProgram(self, source: bytes, *rest: Any) -> Any:
        assert b"spin" in source
        return 0, 1

    def nvrtcCompileProgram(self, program: int, count: int, options: list[bytes]) -> Any:
        assert options == [b"--gpu-architecture=sm_99"]
        return (0,)

    def nvrtcGetCUBINSize(self, program: int) -> Any:
        return 0, 4

    def nvrtcGetCUBIN(self, program: int, image: bytes) -> Any:
        return (0,)
