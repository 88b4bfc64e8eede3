"""What torch does on the GPU: memory, streams, random numbers, captured graphs. Tests replace it by a fake.

One thread makes all captures, one at a time: torch registers the default generator with every capture, and cuBLAS
workspaces belong to a thread and a stream. So each job has a capture stream of its own. Workspaces are dropped before
and after each capture, so that they lie in the job's own pool. The default generator is the job's while its operators
run, and one of its random streams' while an operator runs that names the stream. The generators of streams are
registered with a capture, so that a replay advances each by what its operators draw.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from gpumux.device.cuda.driver import Driver
from gpumux.errors import ConfigError, JobFailed
from gpumux.program.check import schema

_CYCLES_PER_S = 2e9  # about what GPUs clock at; slower ones are occupied for longer


class CapturedGraph(Protocol):
    """A captured piece."""

    def replay(self, stream: int) -> None: ...

    def drop(self) -> None:
        """Give its memory back. Nothing of it may be running."""


class Compute(Protocol):
    """What the device needs of torch. One thread calls all of it but `CapturedGraph.replay`."""

    device: torch.device

    def enter(self) -> None:
        """Prepare a thread; once in every thread that calls anything here."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Zeroed bytes on the device. Raises torch.OutOfMemoryError."""

    def on(self, stream: int) -> AbstractContextManager[None]:
        """Operators called inside go to the stream."""

    def occupy(self, seconds: float) -> None:
        """Keep the current stream busy for about `seconds`, so that operators called next queue up behind."""

    def generator(self, seed: int) -> Any: ...

    def drawing_from(self, generator: Any) -> AbstractContextManager[None]:
        """Operators called inside draw from `generator`."""

    def pool(self) -> Any:
        """A memory pool for one job's first steps and graphs, which never run at once. It lives until `drop_pool`."""

    def allocating(self, pool: Any) -> AbstractContextManager[None]:
        """Operators called inside, outside of a capture, take their memory from the pool. A capture on the same stream
        takes the same blocks again. No step of graphs may be under way: its temporaries lie in the pool."""

    def drop_pool(self, pool: Any) -> None:
        """Release the pool. Its memory is given back by the first `trim` after its last graph was dropped."""

    def capture(
        self, stream: int, pool: Any, body: Callable[[], None], *, draws: bool = True, generators: Sequence[Any] = ()
    ) -> CapturedGraph:
        """Capture the operators that `body` calls as one graph, without running them. `draws`: one of them may draw
        random numbers; `generators`: those from which some draw, beside the one that all are called with. Raises what
        `body` raises, and JobFailed."""

    def kernels(self, call: Callable[..., Any], arguments: Sequence[torch.Tensor]) -> Any:
        """Returns `call(*arguments)`. `call` launches kernels of its own, which torch's dispatch does not see."""

    def supports(self, target: str) -> bool:
        """Whether the device has a kernel for an operator."""

    def reserved(self) -> int:
        """Bytes that torch holds on the device."""

    def trim(self) -> None:
        """Give memory that torch holds unused back to the driver. Waits for the device."""


@dataclass(slots=True, eq=False)
class _Pool:
    """A job's memory pool. `handle`: torch's pool, in whose place another comes once it is `used_up`: then torch takes
    no more captures into it. `graphs`: how many captured ones hold memory of `handle` or of those before."""

    handle: Any
    graphs: int = 0
    used_up: bool = False


class CudaGraph:
    """A torch.cuda.CUDAGraph, whose replay also advances the job's random stream. `executable`: the driver's handle of
    a graph that draws nothing, which is launched without torch; 0 for others, and if torch does not give it."""

    def __init__(
        self, graph: Any, pool: _Pool, on: Callable[[int], AbstractContextManager[None]], driver: Driver,
        *, executable: int = 0,
    ) -> None:  # fmt: skip
        self._graph, self._pool, self._on, self._driver, self._executable = graph, pool, on, driver, executable
        pool.graphs += 1

    def replay(self, stream: int) -> None:
        """Raises DeviceLost, JobFailed."""
        if self._executable:
            self._driver.launch(self._executable, stream)
            return
        try:
            with self._on(stream):
                self._graph.replay()
        except RuntimeError as error:
            self._driver.idle(stream)  # raises DeviceLost if an earlier kernel has ended the context
            raise JobFailed(
                f"a piece can't be launched: {_first_line(error)}", "report it with the daemon's log"
            ) from error

    def drop(self) -> None:
        self._graph.reset()
        self._pool.graphs -= 1
        self._pool.used_up |= not self._pool.graphs


class CudaCompute:
    """Compute on a real GPU. `ordinal`: its number."""

    def __init__(self, driver: Driver, ordinal: int) -> None:
        if not torch.backends.cuda.is_built():
            raise ConfigError(
                f"torch {torch.__version__} is built without CUDA", "install a CUDA build of torch, or use --device cpu"
            )
        if not torch.cuda.is_available():
            raise ConfigError(
                f"torch {torch.__version__} can't use the GPU (it is built for CUDA {torch.version.cuda})",
                "install the torch build that fits the driver (nvidia-smi says which CUDA it has), or use --device cpu",
            )
        torch.cuda.init()  # makes the default generators
        # Kernels of attention that torch would choose are called by name (kernels.py), and cuDNN's is not among them.
        # Without cuDNN's, torch chooses flash where it would choose cuDNN's, also with dropout.
        torch.backends.cuda.enable_cudnn_sdp(False)
        self._driver = driver
        self.device = torch.device("cuda", ordinal)
        self._streams: dict[int, Any] = {}
        self._broken: list[Any] = []  # graphs whose captures could not be ended

    def enter(self) -> None:
        torch.cuda.set_device(self.device)

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=self.device)

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        # The primary context stays current for a stream of a green context, too; the stream keeps its multiprocessors.
        # A green context may be current in one thread only, and both of the device's threads use such streams.
        with torch.cuda.stream(self._stream(stream)):
            yield

    def _stream(self, stream: int) -> Any:
        known = self._streams.get(stream)
        if known is None:
            known = self._streams[stream] = torch.cuda.ExternalStream(stream, device=self.device)
        return known

    def occupy(self, seconds: float) -> None:
        torch.cuda._sleep(int(seconds * _CYCLES_PER_S))

    def generator(self, seed: int) -> Any:
        return torch.Generator(device=self.device).manual_seed(seed)

    @contextmanager
    def drawing_from(self, generator: Any) -> Iterator[None]:
        default = torch.cuda.default_generators[self.device.index]
        before = default.graphsafe_get_state()
        default.graphsafe_set_state(generator)
        try:
            yield
        finally:
            default.graphsafe_set_state(before)

    def pool(self) -> _Pool:
        return _Pool(self._new_handle())

    @contextmanager
    def allocating(self, pool: _Pool) -> Iterator[None]:
        handle = self._usable(pool)
        torch._C._cuda_beginAllocateCurrentThreadToPool(self.device.index, handle)
        try:
            yield
        finally:
            torch._C._cuda_clearCublasWorkspaces()  # else they stay in the pool, and other jobs use them
            torch._C._cuda_endAllocateToPool(self.device.index, handle)
            torch._C._cuda_releasePool(self.device.index, handle)

    def drop_pool(self, pool: _Pool) -> None:
        torch._C._cuda_releasePool(self.device.index, pool.handle)

    def _new_handle(self) -> Any:
        # torch counts the uses of a pool, and takes no pool whose count has fallen to 0, as after a first capture that
        # failed. So one use is held for the job.
        handle = torch.cuda.graph_pool_handle()
        torch._C._cuda_beginAllocateCurrentThreadToPool(self.device.index, handle)
        torch._C._cuda_endAllocateToPool(self.device.index, handle)
        return handle

    def _usable(self, pool: _Pool) -> Any:
        """torch's pool for new memory and captures of the job. Graphs that were captured into an earlier one keep it
        until they are dropped."""
        if pool.used_up:
            before, pool.handle, pool.used_up = pool.handle, self._new_handle(), False
            torch._C._cuda_releasePool(self.device.index, before)
        return pool.handle

    def capture(
        self, stream: int, pool: _Pool, body: Callable[[], None], *, draws: bool = True, generators: Sequence[Any] = ()
    ) -> CapturedGraph:
        # Not the context manager torch.cuda.graph: it synchronises the device and empties the cache first.
        handle = self._usable(pool)
        graph = torch.cuda.CUDAGraph()
        torch._C._cuda_clearCublasWorkspaces()
        try:
            with self.on(stream):
                try:
                    _begin_capture(graph, handle, generators)
                except RuntimeError:
                    self._undo(graph, pool, begun=False)
                    raise
                try:
                    body()
                except BaseException:
                    try:
                        self._end(graph, pool)
                    except RuntimeError:
                        pass  # it says less about the broken capture than the reason
                    else:
                        CudaGraph(graph, pool, self.on, self._driver).drop()
                    raise
                self._end(graph, pool)
        except RuntimeError as error:
            self._driver.idle(stream)  # raises DeviceLost if the context has ended
            raise JobFailed(
                f"a piece can't be captured: {_first_line(error)}", "report the step that made it"
            ) from error
        finally:
            torch._C._cuda_clearCublasWorkspaces()
        executable = _executable(graph)
        if executable:  # else the first replay uploads it
            self._driver.upload(executable, stream)
        return CudaGraph(graph, pool, self.on, self._driver, executable=0 if draws else executable)

    def kernels(self, call: Callable[..., Any], arguments: Sequence[torch.Tensor]) -> Any:
        return call(*arguments)

    def supports(self, target: str) -> bool:
        name = schema(target).overload.name()
        return bool(torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, "CUDA"))

    def reserved(self) -> int:
        return int(torch.cuda.memory_reserved(self.device))

    def trim(self) -> None:
        try:
            torch.cuda.empty_cache()
        except RuntimeError as error:
            self._driver.memory()  # raises DeviceLost if a kernel has ended the context
            raise JobFailed(
                f"memory can't be given back: {_first_line(error)}", "report it with the daemon's log"
            ) from error

    def _end(self, graph: Any, pool: _Pool) -> None:
        """End a capture. One that torch can't end is undone here, as far as torch does not do so itself."""
        try:
            _end_capture(graph)
        except RuntimeError:
            if not _is_captured(graph):
                self._undo(graph, pool, begun=True)
            raise

    def _undo(self, graph: Any, pool: _Pool, *, begun: bool) -> None:
        """Undo what torch leaves of a capture that it can't end, or can't begin:

        - it would go on to take memory for the capture from the pool, and never release it;
        - its allocator of page-locked memory counts the pool as recorded into, and takes no further capture into it.
          It also keeps a function of the graph, so the graph has to stay;
        - before torch 2.13 the generator counts as captured, and draws nothing until a capture ends well. That is one
          of nothing here.
        """
        device = self.device.index
        pool.used_up = True
        self._broken.append(graph)
        recorded = _works(torch._C._cuda_endAllocateToPool, device, pool.handle)  # else torch had done that itself
        if recorded or begun:
            _works(torch._C._cuda_releasePool, device, pool.handle)
        nothing = torch.cuda.CUDAGraph()
        _begin_capture(nothing, None)
        _end_capture(nothing)
        nothing.reset()


def _works(call: Callable[..., object], *arguments: Any) -> bool:
    """Whether a call of torch's allocator succeeds."""
    try:
        call(*arguments)
    except RuntimeError:
        return False
    return True


def _begin_capture(graph: Any, handle: Any | None, generators: Sequence[Any] = ()) -> None:
    # Not in inference mode: there torch before 2.13 makes the memory of a generator's position such that only inference
    # mode may write to it, and the thread that launches is not in it.
    with torch.inference_mode(False):
        for generator in generators:  # the default one, which torch registers itself, is the job's
            graph.register_generator_state(generator)
        graph.capture_begin(pool=handle, capture_error_mode="thread_local")


def _end_capture(graph: Any) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*CUDA Graph is empty")  # a piece may be views alone
        graph.capture_end()


def _executable(graph: Any) -> int:
    """The driver's handle of a graph; 0 if this torch does not give it."""
    read = getattr(graph, "raw_cuda_graph_exec", None)
    return int(read()) if read is not None else 0


def _is_captured(graph: Any) -> bool:
    """Whether torch counts the graph as captured, and so gives its memory back with it."""
    try:
        graph.pool()
    except RuntimeError:
        return False
    return True


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:400]
