"""Support: ranks of a gang on CPU devices in this process, driven step by step as the scheduler would."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
from torch._C._distributed_c10d import TCPStore

from gpumux.program.ir import ITEM_BYTES, Collective, Program, ProgramBuilder, TensorRef
from gpumux.types import CollectiveEnded, Gang, PieceDone, ProgramId
from tests.device.harness import Driver, LoadedJob

_ids = itertools.count(1)
TIMEOUT_S = 60.0


@contextmanager
def gangs(ranks: int, timeout_s: float = TIMEOUT_S) -> Iterator[list[Gang]]:
    """One Gang for each rank, with a store in this process."""
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=10), wait_for_workers=False)
    number = f"{next(_ids):032x}"
    yield [Gang(number, rank, ranks, f"127.0.0.1:{store.port}", timeout_s) for rank in range(ranks)]
    del store


@dataclass
class Rank:
    """One rank: its job, its program, and what its collectives moved so far (peer, bytes sent, bytes received)."""

    held: LoadedJob
    program: ProgramId
    ended: list[CollectiveEnded] = field(default_factory=list)

    def put(self, *tensors: torch.Tensor, slot: int = 0) -> None:
        for position, tensor in enumerate(tensors):
            self.held.put(
                self.program, position, tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), slot
            )

    def get(self, position: int, slot: int = 0) -> torch.Tensor:
        program = self.held.programs[self.program]
        view = program.views[program.results[position]]
        dtype = getattr(torch, view.dtype)
        count = torch.Size(view.size).numel()
        data = self.held.get(self.program, position, count * ITEM_BYTES[view.dtype], slot)
        return (
            torch.frombuffer(bytearray(data), dtype=dtype).view(view.size)
            if count
            else torch.empty(view.size, dtype=dtype)
        )

    def moved(self) -> dict[int, tuple[int, int]]:
        """By peer: bytes sent and received in the newest step."""
        total: dict[int, tuple[int, int]] = {}
        newest = [one for one in self.ended if one.step == self.ended[-1].step]
        for peer, sent, received in itertools.chain.from_iterable(one.moved for one in newest):
            before = total.get(peer, (0, 0))
            total[peer] = before[0] + sent, before[1] + received
        return total


def open_ranks(
    drivers: Sequence[Driver], gang: Sequence[Gang], programs: Sequence[Program], buffers: Sequence[int] = ()
) -> list[Rank]:
    """Open and load every rank, rank r on driver r modulo their number."""
    held = [drivers[one.rank % len(drivers)].open(gang=one) for one in gang]
    return [Rank(each, each.load(program, buffers)) for each, program in zip(held, programs, strict=True)]


def step(ranks: Sequence[Rank], slot: int = 0, scalars: Sequence[float | int] = ()) -> list[list[PieceDone]]:
    """Run one step on all ranks: what can run before a collective on each of them, then all of them on."""
    todo = [(rank, rank.held.pieces_of_step(rank.program, scalars, slot)) for rank in ranks]
    gated = [rank.held.gated[rank.program] for rank in ranks]
    done: list[list[PieceDone]] = [[] for _ in ranks]
    at = [0] * len(ranks)
    while any(at[i] < len(pieces) for i, (_, pieces) in enumerate(todo)):
        for i, (rank, pieces) in enumerate(todo):
            while at[i] < len(pieces) and (
                at[i] not in gated[i]
                or (len(rank.ended) and (rank.ended[-1].step, rank.ended[-1].piece) == (pieces[0].step, at[i]))
            ):
                rank.held.driver.device.launch(pieces[at[i]])
                done[i].append(rank.held.driver.done(pieces[at[i]].launch))
                at[i] += 1
        for i, (rank, pieces) in enumerate(todo):
            if at[i] < len(pieces):
                rank.ended.append(rank.held.driver.until(CollectiveEnded, rank.held.job))
                assert (rank.ended[-1].step, rank.ended[-1].piece) == (pieces[0].step, at[i])
    return done


def summing(
    rank: int, ranks: int, sizes: Sequence[tuple[str, tuple[int, ...]]], scale: float = 1.0, sequence: int = 0
) -> Program:
    """Inputs of these types and sizes, doubled; all summed over all ranks; the sums are the results."""
    b = ProgramBuilder(rank=rank, ranks=ranks)
    doubled = [b.call("aten.add.Tensor", x := b.input(dtype, size), x, dtype=dtype, size=size) for dtype, size in sizes]
    views = tuple(t.view for t in doubled)
    b.collective(Collective(len(doubled), "all_reduce", sequence, tuple(range(ranks)), views, scale))
    for view, (dtype, size) in zip(views, sizes, strict=True):
        b.result(b.call("aten.clone.default", TensorRef(view), dtype=dtype, size=size))
    return b.build()
