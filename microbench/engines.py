"""Ways to run a job's steps: plain, as a hand-captured CUDA graph, through a daemon. Each starts a step and gives a
function that waits for it. Imports torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch

from gpumux import client
from microbench.jobs import Built

Wait = Callable[[], None]
WARM_UP = 3  # plain steps before a capture: libraries choose algorithms and allocate workspaces
DEPTH = 2  # sets of input buffers


class Engine(Protocol):
    def start(self, index: int) -> Wait:
        """Begin the step on the index-th batch. Steps end in the order they began."""

    def close(self) -> None: ...


class PlainCpu:
    """The step, called."""

    def __init__(self, built: Built) -> None:
        self._built = built

    def start(self, index: int) -> Wait:
        self._built.step(*self._built.batch(index))
        return lambda: None

    def close(self) -> None:
        """Nothing is held."""


class PlainCuda:
    """The step on a stream of its own, operator by operator or (`graph`) as one CUDA graph, the way one would write it
    by hand: inputs from pinned memory on a copy stream, two sets of them, so that copies overlap the step before."""

    def __init__(self, built: Built, *, graph: bool) -> None:
        self._built = built
        self._batches = [tuple(tensor.pin_memory() for tensor in batch) for batch in built.batches]
        self._copies, self._stream = torch.cuda.Stream(), torch.cuda.Stream()
        self._inputs = tuple(tensor.cuda() for tensor in built.batch(0))
        self._staged = [tuple(torch.empty_like(tensor) for tensor in self._inputs) for _ in range(DEPTH)]
        self._taken = [torch.cuda.Event() for _ in range(DEPTH)]
        self._arrived = [torch.cuda.Event() for _ in range(DEPTH)]
        self._results: list[torch.Tensor] = []
        self._done: list[torch.cuda.Event] = []
        self._graph: torch.cuda.CUDAGraph | None = None
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UP):
                self._out = built.step(*self._inputs)
        torch.cuda.synchronize()
        if graph:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, stream=self._stream):
                self._out = built.step(*self._inputs)
        for _ in range(DEPTH):
            self._results.append(torch.empty_like(self._out, device="cpu").pin_memory())
            self._done.append(torch.cuda.Event())

    def start(self, index: int) -> Wait:
        place = index % DEPTH
        with torch.cuda.stream(self._copies):
            self._copies.wait_event(self._taken[place])
            for staged, tensor in zip(self._staged[place], self._batches[index % len(self._batches)], strict=True):
                staged.copy_(tensor, non_blocking=True)
            self._arrived[place].record()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._arrived[place])
            for tensor, staged in zip(self._inputs, self._staged[place], strict=True):
                tensor.copy_(staged, non_blocking=True)
            self._taken[place].record()
            if self._graph is None:
                self._out = self._built.step(*self._inputs)
            else:
                self._graph.replay()
            self._results[place].copy_(self._out.detach(), non_blocking=True)
            done = self._done[place]
            done.record()
        return done.synchronize

    def close(self) -> None:
        torch.cuda.synchronize()


class Daemon:
    """The step as a job of a gpumux daemon. The model stays on the CPU: the client needs no context of its own."""

    def __init__(
        self, built: Built, endpoint: str, priority: Literal["high", "low"], max_slowdown: float, inflight: int
    ) -> None:
        self._built = built
        options: dict[str, Any] = {"max_slowdown": max_slowdown} if priority == "high" else {}
        self._job = client.submit(
            built.step,
            example=built.batch(0),
            model=built.model,
            optimizer=built.optimizer,
            priority=priority,
            name=f"{priority} {built.name}",
            endpoint=endpoint,
            max_inflight=inflight,
            **options,
        )

    def start(self, index: int) -> Wait:
        future = self._job.step(*self._built.batch(index))

        def wait() -> None:
            future.result()

        return wait

    def close(self) -> None:
        self._job.close(drain=False)
