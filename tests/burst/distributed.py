"""torch's DistributedDataParallel over gloo, for comparison: one process a rank, each with its part of every batch."""

from __future__ import annotations

import socket
from multiprocessing import get_context
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.burst.subjects import Subject

Arrays = dict[str, numpy.ndarray[Any, Any]]


def train(subject: Subject, batches: list[tuple[torch.Tensor, ...]], ranks: int) -> dict[str, torch.Tensor]:
    """The state of rank 0 after a step on each batch. The model is wrapped as a whole."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with get_context("spawn").Pool(ranks) as pool:
        # As arrays: tensors that are sent between processes leave threads and sockets behind.
        arrays = [[t.numpy() for t in batch] for batch in batches]
        found = pool.starmap(_rank, [(subject.name, arrays, rank, ranks, port) for rank in range(ranks)], chunksize=1)
    return {name: torch.from_numpy(value) for name, value in found[0].items()}


def _rank(name: str, batches: list[list[numpy.ndarray[Any, Any]]], rank: int, ranks: int, port: int) -> Arrays:
    from tests.burst.norms import NORMED

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    subject = NORMED[name]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    try:
        torch.manual_seed(0)
        model = subject.make()
        wrapped: nn.Module = DistributedDataParallel(model)
        _, _, (step,) = subject.build(wrapped)
        for batch in batches:
            step(*[torch.from_numpy(array).tensor_split(ranks)[rank] for array in batch])
        return {name: t.numpy().copy() for name, t in model.state_dict().items()}
    finally:
        dist.destroy_process_group()
