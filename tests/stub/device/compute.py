"""Torch's part on the stand-in: operators run in host memory, as on the fake GPU (tests/device/cuda/fake.py), while
captures, marks, uploads and replays are the driver's own, so that their rules hold for every thread and stream that the
device uses."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, cast

from gpumux.device.cuda.device import CudaDevice
from gpumux.device.cuda.driver import CudaDriver, Driver
from tests.device.cuda.fake import FakeCompute, FakeDriver, FakeGraph, Stream

THREAD_LOCAL, NODE_PRIORITY = 1, 8


class StubDriver(CudaDriver):
    """The real wrapper, and what the fake's torch asks of a driver beside it. The stand-in does at once what it is
    given."""

    def __init__(self) -> None:
        super().__init__()
        self.captured: list[Any] | None = None
        self.streams: dict[int, Stream] = {}
        self.own_thread = False

    def stream(self, priority: int) -> int:
        made = super().stream(priority)
        self.streams[made] = Stream(priority)
        return made

    def confined_stream(self, partition: int, priority: int) -> int:
        made = super().confined_stream(partition, priority)
        self.streams[made] = Stream(priority, partition)
        return made

    def destroy_stream(self, stream: int) -> None:
        super().destroy_stream(stream)
        del self.streams[stream]

    def drain(self, stream: int) -> None:
        assert self.idle(stream)

    def enqueue(self, call: str, stream: int, work: Callable[[], object]) -> None:
        work()


class StubGraph(FakeGraph):
    """Its operators in host memory, and the driver's graph with the events it passes. `wrapper`: what launches it where
    torch has no part in that."""

    def __init__(self, made: FakeGraph, library: Any, executable: int, wrapper: CudaDriver | None) -> None:
        self.__dict__.update(made.__dict__)
        self._library, self._executable, self._wrapper = library, ctypes.c_void_p(executable), wrapper

    def replay(self, stream: int) -> None:
        super().replay(stream)
        if self._wrapper is not None:
            self._wrapper.launch(self._executable.value or 0, stream)
        else:
            assert self._library.cuGraphLaunch(self._executable, ctypes.c_void_p(stream)) == 0

    def drop(self) -> None:
        super().drop()
        assert self._library.cuGraphExecDestroy(self._executable) == 0


class StubCompute(FakeCompute):
    def __init__(self, driver: StubDriver) -> None:
        super().__init__(cast(FakeDriver, driver), 0)
        self._library = ctypes.CDLL("libcuda.so.1")

    def capture(self, stream: int, pool: Any, body: Callable[[], None], *, draws: bool = True) -> FakeGraph:
        library, graph, executable = self._library, ctypes.c_void_p(), ctypes.c_void_p()
        assert library.cuStreamBeginCapture_v2(ctypes.c_void_p(stream), THREAD_LOCAL) == 0
        try:
            made = super().capture(stream, pool, body, draws=draws)
        finally:
            ended = library.cuStreamEndCapture(ctypes.c_void_p(stream), ctypes.byref(graph))
        assert ended == 0
        flags = ctypes.c_ulonglong(NODE_PRIORITY)
        assert library.cuGraphInstantiateWithFlags(ctypes.byref(executable), graph, flags) == 0
        assert library.cuGraphDestroy(graph) == 0
        self.driver.upload(executable.value or 0, stream)
        return StubGraph(made, library, executable.value or 0, None if draws else cast(StubDriver, self.driver))


def stub_device(*, parallel: int | None = None, **options: Any) -> CudaDevice:
    """A CudaDevice on the stand-in, not opened."""

    def compute(driver: Driver, ordinal: int) -> StubCompute:
        assert isinstance(driver, StubDriver)
        return StubCompute(driver)

    return CudaDevice(parallel=parallel, driver=StubDriver(), compute=compute, **options)
