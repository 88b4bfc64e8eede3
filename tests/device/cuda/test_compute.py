"""The calls made of torch's CUDA graphs, on stand-ins that keep the rules of the real ones."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch

from gpumux.device.cuda.compute import CudaCompute
from gpumux.device.cuda.device import _trimmed
from gpumux.errors import DeviceLost, JobFailed
from tests.device.cuda.fake import FakeDriver

POOL = (0, 7)


class Graph:
    """Its position in the random stream lies in memory made when a capture begins, as in torch; a capture that
    `breaks` can't be ended, and holds no memory then. `pools`: how many captures hold a pool in torch's allocator of
    page-locked memory, which takes none whose count has fallen to 0, and none that one is recorded into, as one that
    can't be ended stays (`recorded`). `drawing`: whether the generator draws outside of captures."""

    breaks = empty = False
    fails = ""
    pools: ClassVar[dict[Any, int]] = {}
    recorded: ClassVar[set[Any]] = set()
    drawing = True

    def __init__(self) -> None:
        self._captured = self._begun = False
        self.generators: list[Any] = []

    def register_generator_state(self, generator: Any) -> None:
        assert not self._begun, "a capture advances those that were registered before it began"
        self.generators.append((generator, torch.empty(1)))  # the memory of its position

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        self._begun = True
        Graph.drawing = False
        self._pool = pool or (id(self), 0)
        if self._pool in Graph.recorded:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        if Graph.pools.get(self._pool) == 0:
            raise RuntimeError("INTERNAL ASSERT FAILED: use_count > 0")
        Graph.recorded.add(self._pool)
        Graph.pools[self._pool] = Graph.pools.get(self._pool, 0) + 1
        self._offset = torch.empty(1)

    def capture_end(self) -> None:
        if self.breaks and self._pool[0] == 0:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        if self.empty:
            warnings.warn("The CUDA Graph is empty. This usually means that ...", UserWarning, stacklevel=1)
        Graph.recorded.remove(self._pool)
        Graph.drawing = self._captured = True

    def pool(self) -> Any:
        if not self._captured:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self._pool

    def reset(self) -> None:
        if self._captured:
            Graph.pools[self._pool] -= 1

    def replay(self) -> None:
        if self.fails:
            raise RuntimeError(self.fails)
        for offset in (self._offset, *(offset for _, offset in self.generators)):
            offset.fill_(1)


@pytest.fixture
def gpu() -> FakeDriver:
    return FakeDriver()


@pytest.fixture
def given_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The calls of torch's allocator about memory pools."""
    calls: list[Any] = []
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()

    @contextmanager
    def stream(which: Any) -> Iterator[None]:
        yield

    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    for name, value in (
        ("is_available", lambda: True), ("init", lambda: None), ("CUDAGraph", Graph), ("stream", stream),
        ("ExternalStream", lambda handle, device: handle),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    handles = itertools.count(POOL[1])
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, next(handles)))
    for name in ("_cuda_beginAllocateCurrentThreadToPool", "_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(torch._C, name, lambda *args, name=name: calls.append((name, *args)), raising=False)
    yield calls
    torch.backends.cuda.enable_cudnn_sdp(cudnn)


@pytest.fixture
def capture(gpu: FakeDriver, given_back: list[Any]) -> Callable[..., Any]:
    compute = CudaCompute(gpu, 0)
    stream, pool = gpu.stream(0), compute.pool()
    given_back.clear()

    def run(body: Callable[[], None] = lambda: None, **options: Any) -> Any:
        with torch.inference_mode():  # as the worker's thread
            return compute.capture(stream, pool, body, **options)

    return run


@pytest.fixture(autouse=True)
def whole() -> Iterator[None]:
    yield
    Graph.breaks, Graph.empty, Graph.fails, Graph.drawing = False, False, "", True
    Graph.pools.clear()
    Graph.recorded.clear()


def test_torch_leaves_cudnn_out_when_it_chooses_attention(gpu: FakeDriver, given_back: list[Any]) -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    CudaCompute(gpu, 0)
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_a_graph_is_replayed_by_a_thread_that_is_not_in_inference_mode(
    capture: Callable[..., Any], gpu: FakeDriver, given_back: list[Any]
) -> None:
    modes = []
    graph = capture(lambda: modes.append(torch.is_inference_mode_enabled()))
    assert modes == [True]
    graph.replay(next(iter(gpu.streams)))
    assert given_back == []


def test_a_replay_advances_the_generators_that_its_operators_draw_from(
    capture: Callable[..., Any], gpu: FakeDriver
) -> None:
    generators = [object(), object()]
    graph = capture(generators=generators)
    assert [generator for generator, _ in graph._graph.generators] == generators
    graph.replay(next(iter(gpu.streams)))


def test_a_capture_that_cant_be_ended_leaves_torch_as_it_was(
    capture: Callable[..., Any], given_back: list[Any]
) -> None:
    Graph.breaks = True
    with pytest.raises(JobFailed, match="can't be captured"):
        capture()
    assert given_back == [("_cuda_endAllocateToPool", 0, POOL), ("_cuda_releasePool", 0, POOL)]
    given_back.clear()

    def body() -> None:
        raise JobFailed("operator 3 (aten.nonzero.default)")

    with pytest.raises(JobFailed, match="operator 3"):
        capture(body)
    other = (0, POOL[1] + 1)
    assert given_back == [
        ("_cuda_beginAllocateCurrentThreadToPool", 0, other),
        ("_cuda_endAllocateToPool", 0, other),
        ("_cuda_releasePool", 0, POOL),  # the job's own use of the pool before
        ("_cuda_endAllocateToPool", 0, other),
        ("_cuda_releasePool", 0, other),
    ]


def test_after_a_capture_that_cant_be_ended_others_are_and_numbers_are_drawn(capture: Callable[..., Any]) -> None:
    """torch takes no more captures into that pool, and before 2.13 the generator draws nothing until one ends well."""
    Graph.breaks = True
    with pytest.raises(JobFailed, match="can't be captured"):
        capture()
    assert Graph.drawing
    Graph.breaks = False
    first = capture()
    assert first._graph.pool() != POOL
    assert capture()._graph.pool() == first._graph.pool()


def test_a_capture_that_cant_be_begun_releases_nothing_of_the_job(
    capture: Callable[..., Any], given_back: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(device: int, pool: Any) -> None:
        raise RuntimeError("endAllocatePool: not currently recording to mempool_id")

    def fail(self: Graph, pool: Any, capture_error_mode: str) -> None:
        if pool is not None:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Graph, "capture_begin", fail)
    monkeypatch.setattr(Graph, "capture_end", lambda self: None)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", refuse)
    with pytest.raises(JobFailed, match="out of memory"):
        capture()
    assert given_back == []


def test_captures_go_on_after_a_first_one_whose_body_fails_and_that_is_ended(capture: Callable[..., Any]) -> None:
    """As when memory is used up. torch counts the pool as used until the graph is gone."""

    def body() -> None:
        raise JobFailed("the GPU's memory is used up at operator 3")

    with pytest.raises(JobFailed, match="operator 3"):
        capture(body)
    assert Graph.pools == {POOL: 0}
    assert capture()._graph.pool() != POOL


def test_captures_go_on_when_all_graphs_of_a_pool_were_dropped(capture: Callable[..., Any]) -> None:
    first, second = capture(), capture()
    assert first._graph.pool() == second._graph.pool() == POOL
    first.drop()
    third = capture()
    assert third._graph.pool() == POOL
    second.drop()
    third.drop()
    assert capture()._graph.pool() != POOL


def test_a_piece_of_views_alone_is_captured_where_warnings_are_errors(capture: Callable[..., Any]) -> None:
    Graph.empty = True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        capture()


def test_a_jobs_pool_is_in_use_until_it_is_dropped(gpu: FakeDriver, given_back: list[Any]) -> None:
    """torch takes no pool for a capture whose last use has ended, as one would have whose first capture failed."""
    compute = CudaCompute(gpu, 0)
    uses, most = 0, []

    def count() -> int:
        nonlocal uses
        for name, *_ in given_back:
            uses += {"_cuda_beginAllocateCurrentThreadToPool": 1, "_cuda_releasePool": -1}.get(name, 0)
        given_back.clear()
        return uses

    pool = compute.pool()
    assert count() == 1
    with compute.allocating(pool):
        most.append(count())
    assert (most, count()) == ([2], 1)
    with pytest.raises(JobFailed), compute.allocating(pool):
        raise JobFailed("an operator")
    assert count() == 1
    compute.drop_pool(pool)
    assert count() == 0


def test_a_body_that_fails_in_a_whole_capture_gives_nothing_back_twice(
    capture: Callable[..., Any], given_back: list[Any]
) -> None:
    def body() -> None:
        raise JobFailed("operator 3 (aten.nonzero.default)")

    with pytest.raises(JobFailed, match="operator 3"):
        capture(body)
    assert given_back == []


def test_a_launch_that_torch_refuses_is_the_jobs_failure_or_the_devices_end(
    capture: Callable[..., Any], gpu: FakeDriver
) -> None:
    graph, stream = capture(), next(iter(gpu.streams))
    Graph.fails = "CUDA error: invalid argument\nmore of it"
    with pytest.raises(JobFailed, match="can't be launched: CUDA error: invalid argument —"):
        graph.replay(stream)
    gpu.break_with("CUDA_ERROR_ASSERT")
    with pytest.raises(DeviceLost):
        graph.replay(stream)


def test_a_graph_that_draws_nothing_is_launched_by_the_driver_alone(
    capture: Callable[..., Any], gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Graph, "raw_cuda_graph_exec", lambda self: 77, raising=False)
    drawing, other, stream = capture(draws=True), capture(draws=False), next(iter(gpu.streams))
    Graph.fails = "torch was asked"
    other.replay(stream)
    assert gpu.launched == [(77, stream)]
    with pytest.raises(JobFailed, match="torch was asked"):
        drawing.replay(stream)


def test_a_torch_that_does_not_tell_its_graphs_launches_them(capture: Callable[..., Any], gpu: FakeDriver) -> None:
    capture(draws=False).replay(next(iter(gpu.streams)))
    assert gpu.launched == []


def test_what_cant_be_given_back_ends_the_device_where_its_context_is_lost(
    gpu: FakeDriver, given_back: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "empty_cache", fail)
    compute = CudaCompute(gpu, 0)
    with pytest.raises(JobFailed, match="given back"):
        compute.trim()
    gpu.break_with("CUDA_ERROR_ILLEGAL_ADDRESS")
    with pytest.raises(DeviceLost):
        compute.trim()


def test_memory_that_cant_be_given_back_is_logged_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    _trimmed(None, JobFailed("memory can't be given back: no"))
    assert "given back" in caplog.text
    with pytest.raises(DeviceLost):
        _trimmed(None, DeviceLost("gone"))
