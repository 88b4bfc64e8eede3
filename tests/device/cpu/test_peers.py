"""Collectives between executors: what they compute, what they move, and how they fail."""

from __future__ import annotations

import itertools
import os
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from gpumux.device.base import ProcessGroups, ProgramChecked, ProgramRefused
from gpumux.device.cpu import peers
from gpumux.device.cpu.device import CpuDevice
from gpumux.program.codec import encode
from gpumux.program.ir import DIRECT_BYTES, Collective, Program, ProgramBuilder, Tag, TensorRef
from gpumux.program.memory import footprint, plan, traffic
from gpumux.types import Fault, Gang, JobDied, PieceFailed, ProgramId
from tests.device.cpu.gangs import Rank, gangs, open_ranks, step, summing
from tests.device.cpu.support import CASE
from tests.device.harness import Driver

Sizes = Sequence[tuple[str, tuple[int, ...]]]


@pytest.fixture(scope="module")
def devices(device: CpuDevice) -> Iterator[list[CpuDevice]]:
    second = CpuDevice(threads=1, cores=2)
    second.open()
    yield [device, second]
    second.close()


@pytest.fixture
def drivers(devices: list[CpuDevice]) -> Iterator[list[Driver]]:
    made = [Driver(CASE, device) for device in devices]
    yield made
    for driver in made:
        driver.finish()


def values(rank: int, dtype: str, size: tuple[int, ...]) -> torch.Tensor:
    """The rank's input of this type and size, always the same."""
    generator = torch.Generator().manual_seed(100 + rank)
    if dtype == "int64":
        return torch.randint(-1000, 1000, size, generator=generator)
    return torch.randn(size, generator=generator, dtype=torch.float64).to(getattr(torch, dtype))


def put_values(held: Sequence[Rank], sizes: Sizes, slot: int = 0, seed: int = 0) -> None:
    for rank, one in enumerate(held):
        one.put(*[values(rank + seed, *each) for each in sizes], slot=slot)


def in_rank_order(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def killed(one: Rank) -> None:
    """Kill the rank's executor."""
    device = one.held.driver.device
    assert isinstance(device, CpuDevice)
    server = device._fork_server
    assert server is not None
    executor = device._jobs[one.held.job]
    server.kill(executor.token)


# ---- what they compute


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.extended
def test_sums_are_those_of_float64_for_every_type_and_size(drivers: list[Driver], ranks: int):
    sizes: Sizes = [
        ("float64", (7, 3)), ("float32", ()), ("float32", (9000, 3)), ("bfloat16", (129,)), ("int64", (1001,)),
        ("float64", (0, 4)),
    ]  # fmt: skip
    with gangs(ranks) as gang:
        held = open_ranks(drivers, gang, [summing(r, ranks, sizes) for r in range(ranks)])
        put_values(held, sizes)
        for _ in range(3):  # operator by operator, then as graphs
            step(held)
            for one in held:
                program = one.held.programs[one.program]
                assert one.moved() == traffic(program, program.collectives[0])
            for position, (dtype, size) in enumerate(sizes):
                parts = [2 * values(rank, dtype, size) for rank in range(ranks)]
                loose = dtype == "bfloat16"
                for one in held:
                    found = one.get(position)
                    assert torch.equal(found, in_rank_order(parts)), (dtype, size)
                    exact = torch.stack([part.double() for part in parts]).sum(0)
                    assert torch.allclose(
                        found.double(), exact, rtol=0.02 if loose else 1e-5, atol=0.1 if loose else 1e-5
                    )
        assert {one.held.cut[one.program] for one in held} == {1}


def test_the_sum_is_scaled_once(drivers: list[Driver]):
    sizes: Sizes = [("float32", (50_000,)), ("float64", (3,))]
    with gangs(2) as gang:
        held = open_ranks(drivers, gang, [summing(r, 2, sizes, scale=0.25) for r in range(2)])
        put_values(held, sizes)
        step(held)
    for position, each in enumerate(sizes):
        wanted = in_rank_order([2 * values(rank, *each) for rank in range(2)]) * 0.25
        assert all(torch.equal(one.get(position), wanted) for one in held)


def redistributing(rank: int) -> Program:
    """Three ranks. Rank 0 sends its input's columns 0 and 1 (strided) to rank 1, column 2 to rank 2; both send back the
    column times 3 in float64, behind an int8, which leaves them at no multiple of their size. Rank 0's results are the
    columns, side by side, and the ints."""
    b = ProgramBuilder(rank=rank, ranks=3)
    x = b.input("float32", (5, 3))
    doubled = b.call("aten.add.Tensor", x, x, size=(5, 3))
    storage = b.view(doubled.view).storage

    def columns(first: int, count: int) -> int:
        return b.add_view(storage, "float32", (5, count), (3, 1), first)

    if rank == 0:
        sends = ((1, columns(0, 2)), (2, columns(2, 1)))
        b.collective(Collective(1, "exchange", 0, (0, 1, 2), sends=sends))
        b.call("aten.neg.default", x, size=(5, 3))
        back = b.add_storage("temp", 15 * 8)
        parts = [b.add_view(back, "float64", (5, n), (3, 1), first) for first, n in ((0, 2), (2, 1))]
        counts = [b.add_tensor("temp", "int8", ()) for _ in range(2)]
        received = ((1, counts[0]), (1, parts[0]), (2, counts[1]), (2, parts[1]))
        b.collective(Collective(2, "exchange", 4, (0, 1, 2), receives=received))
        whole = b.add_view(back, "float64", (5, 3))
        b.result(b.call("aten.clone.default", TensorRef(whole), dtype="float64", size=(5, 3)))
        for count in counts:
            b.result(b.call("aten.clone.default", TensorRef(count), dtype="int8", size=()))
        return b.build()
    width = 2 if rank == 1 else 1
    got = b.add_tensor("temp", "float32", (5, width))
    b.collective(Collective(1, "exchange", 0, (0, 1, 2), receives=((0, got),)))
    wide = b.call(
        "aten._to_copy.default", TensorRef(got), dtype="float64", size=(5, width),
        kwargs={"dtype": Tag("dtype", "float64")},
    )  # fmt: skip
    tripled = b.call("aten.mul.Scalar", wide, 3, dtype="float64", size=(5, width))
    number = b.call("aten.full.default", (), rank * 11, dtype="int8", size=(), kwargs={"dtype": Tag("dtype", "int8")})
    after = b.call("aten.neg.default", x, size=(5, 3))
    op = 5  # before the operator that follows
    b.collective(Collective(op, "exchange", 4, (0, 1, 2), sends=((0, number.view), (0, tripled.view))))
    b.result(b.call("aten.neg.default", after, size=(5, 3)))
    return b.build()


def test_an_exchange_moves_strided_views_of_several_types_in_one_message(drivers: list[Driver]):
    with gangs(3) as gang:
        held = open_ranks(drivers, gang, [redistributing(rank) for rank in range(3)])
        for seed in range(4):
            put_values(held, [("float32", (5, 3))], seed=seed)
            step(held)
            assert torch.equal(held[0].get(0), 6 * values(seed, "float32", (5, 3)).double())
            assert [held[0].get(1).item(), held[0].get(2).item()] == [11, 22]
        assert held[0].moved() == {1: (5 * 2 * 4, 1 + 5 * 2 * 8), 2: (5 * 4, 1 + 5 * 8)}
        assert held[1].moved() == {0: (1 + 5 * 2 * 8, 5 * 2 * 4)}


def both(rank: int) -> Program:
    """Two ranks: at one operator a sum, an exchange of halves, and a second sum of what was summed."""
    b = ProgramBuilder(rank=rank, ranks=2)
    x = b.input("float32", (4, 6))
    y = b.call("aten.add.Tensor", x, x, size=(4, 6))
    storage = b.view(y.view).storage
    halves = [b.add_view(storage, "float32", (4, 3), (6, 1), 3 * half) for half in range(2)]
    got = b.add_tensor("temp", "float32", (4, 3))
    b.collective(Collective(1, "all_reduce", 0, (0, 1), (y.view,)))
    b.collective(Collective(1, "exchange", 1, (0, 1), sends=((1 - rank, halves[rank]),), receives=((1 - rank, got),)))
    b.collective(Collective(1, "all_reduce", 2, (0, 1), (halves[0],), 0.5))
    b.result(b.call("aten.clone.default", y, size=(4, 6)))
    b.result(b.call("aten.neg.default", TensorRef(got), size=(4, 3)))
    return b.build()


def test_several_collectives_at_one_operator_run_in_order(drivers: list[Driver]):
    with gangs(2) as gang:
        held = open_ranks(drivers, gang, [both(rank) for rank in range(2)])
        assert [one.held.gated[one.program] for one in held] == [(1,), (1,)]
        put_values(held, [("float32", (4, 6))])
        step(held)
    total = in_rank_order([2 * values(rank, "float32", (4, 6)) for rank in range(2)])
    after = total.clone()
    after[:, :3] = (total[:, :3] + total[:, :3]) * 0.5
    for rank, one in enumerate(held):
        assert torch.equal(one.get(0), after)
        assert torch.equal(one.get(1), -total[:, 3 * (1 - rank) : 3 * (1 - rank) + 3])
        assert len(one.ended) == 1


def test_two_runs_and_any_cut_give_the_same_bits(drivers: list[Driver]):
    sizes: Sizes = [("float32", (40_000,)), ("float32", (17,))]
    found = []
    for target_s in (1.0, 1e-9):
        with gangs(4) as gang:
            held = open_ranks(drivers, gang, [summing(r, 4, sizes) for r in range(4)])
            put_values(held, sizes)
            for one in held:
                one.held.driver.device.cut(one.held.job, one.program, target_s)
            for _ in range(4):
                step(held)
                found += [tuple(one.get(i).numpy().tobytes() for i in range(2)) for one in held]
            assert len({len(one.held.pieces[one.program]) for one in held}) == 1
            assert all(one.held.gated[one.program] for one in held)
    assert len(set(found)) == 1


def test_steps_in_several_slots_do_not_mix(drivers: list[Driver]):
    sizes: Sizes = [("float32", (300,))]
    with gangs(2) as gang:
        held = open_ranks(drivers, gang, [summing(r, 2, sizes) for r in range(2)])
        for slot in range(2):
            put_values(held, sizes, slot=slot, seed=10 * slot)
        for _ in range(3):
            for slot in range(2):
                step(held, slot=slot)
        for slot in range(2):
            wanted = in_rank_order([2 * values(rank + 10 * slot, *sizes[0]) for rank in range(2)])
            assert all(torch.equal(one.get(0, slot=slot), wanted) for one in held)


ROWS, COLUMNS, RANKS = 4, 9, 3


class Move(NamedTuple):
    """A collective drawn at random: columns [first, last) of each member's matrix are summed, or sent along `ways`."""

    op: int
    members: tuple[int, ...]
    first: int
    last: int
    scale: float
    ways: tuple[tuple[int, int], ...]  # (from, to); empty for a sum


def drawn(draw: random.Random) -> list[Move]:
    moves = []
    for op in sorted(draw.choices(range(1, 5), k=6)):
        members = tuple(sorted(draw.sample(range(RANKS), draw.choice((2, 3)))))
        first = draw.randrange(COLUMNS)
        pairs = [(a, b) for a in members for b in members if a != b]
        ways = tuple(draw.sample(pairs, draw.randint(1, len(pairs)))) if draw.random() < 0.5 else ()
        moves.append(Move(op, members, first, draw.randint(first + 1, COLUMNS), draw.choice((1.0, 0.5)), ways))
    return moves


def of_rank(rank: int, moves: Sequence[Move]) -> Program:
    """input 0, doubled, goes through all moves; results: the matrix, then what was received, in order."""
    b = ProgramBuilder(rank=rank, ranks=RANKS)
    x = b.input("float64", (ROWS, COLUMNS))
    y = b.call("aten.add.Tensor", x, x, dtype="float64", size=(ROWS, COLUMNS))
    for _ in range(4):  # operators for collectives to stand before
        b.call("aten.neg.default", x, dtype="float64", size=(ROWS, COLUMNS))
    got: list[int] = []
    for number, move in enumerate(moves):
        width = move.last - move.first
        part = b.add_view(b.view(y.view).storage, "float64", (ROWS, width), (COLUMNS, 1), move.first)
        sends = tuple((to, part) for source, to in move.ways if source == rank)
        sources = [source for source, to in move.ways if to == rank]
        if rank not in move.members or (move.ways and not sends and not sources):
            continue
        if not move.ways:
            b.collective(Collective(move.op, "all_reduce", number, move.members, (part,), move.scale))
            continue
        receives = tuple((source, b.add_tensor("temp", "float64", (ROWS, width))) for source in sources)
        got += [view for _, view in receives]
        b.collective(Collective(move.op, "exchange", number, move.members, sends=sends, receives=receives))
    b.result(b.call("aten.clone.default", y, dtype="float64", size=(ROWS, COLUMNS)))
    for view in got:
        size = b.view(view).size
        b.result(b.call("aten.clone.default", TensorRef(view), dtype="float64", size=size))
    return b.build()


def computed(moves: Sequence[Move]) -> list[list[torch.Tensor]]:
    """The results of each rank, without any device."""
    held = [2 * values(rank, "float64", (ROWS, COLUMNS)) for rank in range(RANKS)]
    got: list[list[torch.Tensor]] = [[] for _ in range(RANKS)]
    for move in moves:
        parts = {rank: held[rank][:, move.first : move.last].clone() for rank in move.members}
        for rank in range(RANKS):
            got[rank] += [parts[source] for source, to in move.ways if to == rank]
        if not move.ways:
            total = in_rank_order(list(parts.values())) * move.scale
            for rank in move.members:
                held[rank][:, move.first : move.last] = total
    return [[held[rank], *got[rank]] for rank in range(RANKS)]


@pytest.mark.every(2)
@pytest.mark.parametrize("seed", range(8))
def test_any_collectives_give_what_is_computed_without_a_device(drivers: list[Driver], seed: int):
    moves = drawn(random.Random(seed))
    with gangs(RANKS) as gang:
        held = open_ranks(drivers, gang, [of_rank(rank, moves) for rank in range(RANKS)])
        put_values(held, [("float64", (ROWS, COLUMNS))])
        for _ in range(3):
            step(held)
            for one, wanted in zip(held, computed(moves), strict=True):
                assert all(torch.equal(one.get(position), each) for position, each in enumerate(wanted))


# ---- what they move


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_large_sum_moves_its_bytes_twice_over_the_number_of_members(drivers: list[Driver], ranks: int):
    count = 4 * DIRECT_BYTES
    with gangs(ranks) as gang:
        held = open_ranks(drivers, gang, [summing(r, ranks, [("float32", (count,))]) for r in range(ranks)])
        step(held)
        for rank, one in enumerate(held):
            part = 2 * count * 4 // ranks
            assert one.moved() == {peer: (part, part) for peer in range(ranks) if peer != rank}


def test_an_uneven_sum_moves_what_the_layout_says(drivers: list[Driver]):
    count = DIRECT_BYTES + 3
    edges = [i * count // 3 for i in range(4)]
    parts = [8 * (b - a) for a, b in itertools.pairwise(edges)]
    with gangs(3) as gang:
        held = open_ranks(drivers, gang, [summing(r, 3, [("float64", (count,))]) for r in range(3)])
        step(held)
        for rank, one in enumerate(held):
            both_ways = {peer: parts[rank] + parts[peer] for peer in range(3) if peer != rank}
            assert one.moved() == {peer: (nbytes, nbytes) for peer, nbytes in both_ways.items()}


def test_a_small_sum_goes_to_every_member_whole(drivers: list[Driver]):
    with gangs(4) as gang:
        held = open_ranks(drivers, gang, [summing(r, 4, [("float32", (6,))]) for r in range(4)])
        step(held)
        for rank, one in enumerate(held):
            assert one.moved() == {peer: (24, 24) for peer in range(4) if peer != rank}


def test_memory_for_the_messages_is_part_of_what_a_program_needs():
    small, large = (summing(0, 4, [("float32", (count,))]) for count in (6, 4 * DIRECT_BYTES))
    for program, messages in ((small, 4 * 24), (large, 7 * 4 * DIRECT_BYTES)):
        planned = plan(program)
        assert footprint(program, planned).transient_bytes == planned.peak_bytes + messages


# ---- how they fail


def died(one: Rank) -> Fault:
    """The fault of a job that dies."""
    event = one.held.driver.wait_for(lambda e: isinstance(e, JobDied) and e.job == one.held.job)
    assert isinstance(event, JobDied)
    return event.fault


def begin(one: Rank) -> None:
    """Run what comes before the rank's first collective."""
    first = one.held.pieces_of_step(one.program)[0]
    one.held.driver.device.launch(first)
    one.held.driver.done(first.launch)


def test_a_peer_that_is_killed_in_a_collective_ends_the_others(drivers: list[Driver]):
    with gangs(2) as gang:
        held = open_ranks(drivers, gang, [summing(r, 2, [("float32", (6,))]) for r in range(2)])
        step(held)
        begin(held[0])
        killed(held[1])
        fault = died(held[0])
        assert fault.code == "peers_lost"
        assert "rank 1 is gone" in fault.message
        assert fault.remedy
        assert died(held[1]).code == "executor_crashed"


def test_a_peer_that_never_comes_is_an_error_within_the_time_given(drivers: list[Driver]):
    with gangs(2, timeout_s=1.0) as gang:
        held = open_ranks(drivers, gang[:1], [summing(0, 2, [("float32", (6,))])])
        fault = died(held[0])
        assert fault.code == "peers_lost"
        assert "did not find its peers" in fault.message


def test_a_peer_that_stops_is_an_error_that_names_it(drivers: list[Driver]):
    with gangs(2, timeout_s=2.0) as gang:
        held = open_ranks(drivers, gang, [summing(r, 2, [("float32", (6,))]) for r in range(2)])
        step(held)
        begin(held[1])
        fault = died(held[1])
        assert fault.code == "peers_lost"
        assert "rank 0 did not answer within 2 s, in part 0 of collective 0 of step 1" in fault.message


def other_sequence(rank: int) -> Program:
    return summing(rank, 2, [("float32", (6,))], sequence=3 + rank)


def other_size(rank: int) -> Program:
    return summing(rank, 2, [("float32", (DIRECT_BYTES if rank else 6,))])


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (other_sequence, "rank 1 sent 24 bytes for part 0 of collective 4 of step 0, where rank 0 expects 24 for part"
         " 0 of collective 3"),
        (other_size, "where rank 0 expects 24"),
    ],
)  # fmt: skip
def test_messages_that_do_not_belong_together_are_refused(drivers: list[Driver], make, says: str):
    with gangs(2) as gang:
        held = open_ranks(drivers, gang, [make(rank) for rank in range(2)])
        for one in held:
            begin(one)
        fault = died(held[0])
        assert fault.code == "peers_lost"
        assert says in fault.message
        assert died(held[1]).code == "peers_lost"
        assert not held[0].ended


def test_a_job_that_waits_for_its_peers_is_unloaded_at_once(drivers: list[Driver]):
    with gangs(2) as gang:
        held = open_ranks(drivers, gang, [summing(r, 2, [("float32", (6,))]) for r in range(2)])
        begin(held[0])
        held[0].held.driver.unload(held[0].held.job)


def test_collectives_can_be_ended_from_outside(drivers: list[Driver]):
    fault = Fault("peers_lost", "another rank's daemon is gone", "submit again")
    with gangs(2) as gang:
        held = open_ranks(drivers, gang, [summing(r, 2, [("float32", (6,))]) for r in range(2)])
        begin(held[0])
        device = held[0].held.driver.device
        assert isinstance(device, ProcessGroups)
        device.abort(held[0].held.job, fault)
        assert died(held[0]) == fault


def test_a_gated_piece_launched_too_early_fails_the_job(drivers: list[Driver]):
    with gangs(2) as gang:
        held = open_ranks(drivers, gang, [summing(r, 2, [("float32", (6,))]) for r in range(2)])
        one = held[0]
        launches = one.held.pieces_of_step(one.program)
        for launch in launches[:2]:
            one.held.driver.device.launch(launch)
        failed = one.held.driver.failed(launches[1].launch)
        assert isinstance(failed, PieceFailed)
        assert "out of order" in failed.fault.message


def test_a_job_that_has_left_its_gang_ends_at_its_next_collective(drivers: list[Driver]):
    with gangs(2) as gang:
        held = open_ranks(drivers, gang, [summing(r, 2, [("float32", (6,))]) for r in range(2)])
        put_values(held, [("float32", (6,))])
        step(held)
        for one in held:
            device = one.held.driver.device
            assert isinstance(device, ProcessGroups)
            device.leave(one.held.job)
            device.leave(one.held.job)
        begin(held[0])
        assert died(held[0]).message == "the job has left its gang"


def refusal(driver: Driver, program: Program, gang: Gang | None) -> Fault:
    held = driver.open(gang=gang)
    number = held.try_load(program)
    event = driver.wait_for(lambda e: isinstance(e, ProgramRefused) and e.job == held.job)
    assert isinstance(event, ProgramRefused)
    assert event.program == number
    return event.fault


def test_a_program_of_another_rank_is_refused(drivers: list[Driver]):
    program = summing(1, 2, [("float32", (6,))])
    alone = refusal(drivers[0], program, None)
    assert (alone.code, alone.message) == ("program", "the program is for rank 1 of 2, and the job is in no gang")
    with gangs(2, timeout_s=60.0) as gang:
        other = refusal(drivers[0], program, gang[0])
        assert other.message == "the program is for rank 1 of 2, and the job is rank 0 of 2"


def test_a_sum_of_integers_is_not_scaled(drivers: list[Driver]):
    held = drivers[0].open()
    drivers[0].device.check(held.job, ProgramId(1), encode(summing(0, 2, [("int64", (6,))], scale=0.5)))
    refused = drivers[0].until(ProgramChecked | ProgramRefused, held.job)
    assert isinstance(refused, ProgramRefused)
    assert "scales integers" in refused.fault.message


def test_traffic_of_an_exchange_is_what_both_ends_say():
    programs = [redistributing(rank) for rank in range(3)]
    for number in range(2):
        moved = [
            {peer: nbytes for one in (program.collectives[number],) for peer, nbytes in traffic(program, one).items()}
            for program in programs
        ]
        for rank, mine in enumerate(moved):
            for peer, (sent, received) in mine.items():
                assert moved[peer][rank] == (received, sent)


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="there is no C++ compiler on this machine"
)
@pytest.mark.extended
def test_compiled_programs_see_what_was_exchanged(drivers: list[Driver]):
    with gangs(3) as gang:
        held = open_ranks(drivers, gang, [replace(redistributing(rank), kind="compiled") for rank in range(3)])
        for seed in range(4):
            put_values(held, [("float32", (5, 3))], seed=seed)
            step(held)
            assert torch.equal(held[0].get(0), 6 * values(seed, "float32", (5, 3)).double())
            assert [held[0].get(1).item(), held[0].get(2).item()] == [11, 22]


class Slow:
    """Message i is complete so many seconds after it is waited for, on a clock of its own."""

    def __init__(self, seconds: Sequence[float]) -> None:
        self.now = 0.0
        self._seconds = list(seconds)

    def clock(self) -> float:
        return self.now

    def post(self, data: torch.Tensor, rank: int, tag: int) -> Slow:
        return self

    def wait(self) -> None:
        self.now += self._seconds.pop(0)


def test_waiting_for_a_peer_is_told_from_the_exchange_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The packet of peer 1 comes after 5 s, that of peer 2 after 2 s more; the data take 1 s and 3 s, and what is sent
    none."""
    slow = Slow([5.0, 2.0, 1.0, 3.0, 0.0, 0.0, 0.0, 0.0])
    monkeypatch.setattr(peers.dist, "isend", slow.post)
    monkeypatch.setattr(peers.dist, "irecv", slow.post)
    monkeypatch.setattr(peers, "check", lambda *packet: None)
    messages = peers.Messages(0, 1.0, slow.clock)
    slow.now = 100.0
    messages.begin()
    data = {rank: torch.zeros(2 * peers.INLINE_BYTES, dtype=torch.uint8) for rank in (1, 2)}
    messages.swap(peers.MessageId(0, 0, 0), data, {rank: torch.zeros_like(each) for rank, each in data.items()})
    assert slow.now == 111.0
    assert messages.exchange_s == 4.0
    messages.begin()
    assert messages.exchange_s == 0.0


def test_an_exchange_takes_no_longer_than_the_wait_for_it(drivers: list[Driver]) -> None:
    with gangs(2) as gang:
        held = open_ranks(drivers, gang, [summing(rank, 2, [("float32", (1 << 16,))]) for rank in range(2)])
        put_values(held, [("float32", (1 << 16,))])
        step(held)
        for one in held:
            (ended,) = one.ended
            assert 0.0 < ended.exchange_s <= ended.ended - ended.started
