"""Support: ranks of a gang on CPU devices in this process, driven step by step as the scheduler would."""

from __future__ import annotations

import itertools
import select
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
from torch._C._distributed_c10d import TCPStore

from gpumux.program.ir import ITEM_BYTES, Collective, Program, ProgramBuilder, TensorRef
from gpumux.types import CollectiveEnded, Gang, JobDied, PieceDone, ProgramId
from tests.device.harness import GIVE_UP_S, Driver, LoadedJob

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
    """Run one step on all ranks: each goes on as soon as its collective has ended, whatever the others wait for."""
    todo = [rank.held.pieces_of_step(rank.program, scalars, slot) for rank in ranks]
    gated = [set(rank.held.gated[rank.program]) for rank in ranks]
    done: list[list[PieceDone]] = [[] for _ in ranks]
    drivers = list({id(rank.held.driver): rank.held.driver for rank in ranks}.values())
    while any(len(ran) < len(pieces) for ran, pieces in zip(done, todo, strict=True)):
        waiting = True
        for rank, pieces, gates, ran in zip(ranks, todo, gated, done, strict=True):
            if len(ran) in gates and _met(rank, pieces[0].step, len(ran)):
                gates.remove(len(ran))
            while len(ran) < len(pieces) and len(ran) not in gates:
                waiting = False
                launch = pieces[len(ran)]
                rank.held.driver.device.launch(launch)
                ran.append(rank.held.driver.done(launch.launch))
        if waiting:
            _wait(drivers)
    return done


def _met(rank: Rank, step: int, piece: int) -> bool:
    """Take the job's CollectiveEnded, if it has come."""
    unread = rank.held.driver.unread
    for index, event in enumerate(unread):
        assert not (isinstance(event, JobDied) and event.job == rank.held.job), event
        if isinstance(event, CollectiveEnded) and event.job == rank.held.job:
            assert (event.step, event.piece) == (step, piece)
            rank.ended.append(event)
            del unread[index]
            return True
    return False


def _wait(drivers: Sequence[Driver]) -> None:
    """Wait until any of the devices has something to say, and hear it."""
    if len(drivers) == 1:
        drivers[0].case.wait(drivers[0].device)
    else:
        ready, _, _ = select.select([fd for each in drivers for fd in each.device.filenos()], [], [], GIVE_UP_S)
        assert ready, "the devices said nothing for too long"
    for driver in drivers:
        driver.poll()


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
