"""NCCL in a group of one, between captured graphs and inside of one: what jobs over several GPUs would rest on. The sum
over one rank is that rank's value, so this shows that NCCL runs there and keeps the order of a stream, not that ranks
meet."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

COUNT = 1 << 20
TURNS = 5


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, timeout=timedelta(seconds=20))
    try:
        dist.all_reduce(torch.ones(1, device="cuda"))  # the communicator is made at its first use
        torch.cuda.synchronize()
        yield
    finally:
        dist.destroy_process_group()


def doubling(value: torch.Tensor, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        value.mul_(2.0)
    return graph


def test_a_sum_between_two_graphs_keeps_their_order() -> None:
    stream = torch.cuda.Stream()
    value = torch.ones(COUNT, device="cuda")
    torch.cuda.synchronize()
    first, second = doubling(value, stream), doubling(value, stream)
    with torch.cuda.stream(stream):
        value.fill_(1.0)
        for _ in range(TURNS):
            first.replay()
            dist.all_reduce(value)
            second.replay()
    torch.cuda.synchronize()
    assert torch.equal(value, torch.full_like(value, 4.0**TURNS))


def test_a_sum_inside_a_graph_runs_at_each_replay() -> None:
    stream = torch.cuda.Stream()
    value = torch.ones(COUNT, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        value.mul_(2.0)
        dist.all_reduce(value)
        value.add_(1.0)
    with torch.cuda.stream(stream):
        value.fill_(1.0)
        for _ in range(TURNS):
            graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(value, torch.full_like(value, 2.0 ** (TURNS + 1) - 1.0))
