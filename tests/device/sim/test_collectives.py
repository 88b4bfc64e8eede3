"""Collectives on a simulated GPU: they take the time of the rank's own messages, on the virtual clock."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from gpumux.device.base import Launch, ProgramChecked, ProgramRefused
from gpumux.device.sim.device import LINK_BANDWIDTH, LINK_LATENCY_S, SimDevice
from gpumux.program.codec import encode
from gpumux.program.ir import Wave
from gpumux.types import CollectiveEnded, Fault, Gang, JobDied, PieceDone, ProgramId
from tests.device.conftest import Clock
from tests.device.cpu.gangs import open_ranks, step, summing
from tests.device.harness import Case, Driver, SharedMemory

COUNT = 1 << 20
GANG = Gang("ab" * 16, 1, 4, "127.0.0.1:1")


@pytest.fixture
def driver() -> Iterator[Driver]:
    clock = Clock()
    device = SimDevice(clock=clock)
    device.open()
    driver = Driver(Case("sim", lambda: device, lambda: device, clock.wait, computes=False), device)
    yield driver
    driver.finish()
    device.close()


def test_a_collective_takes_the_time_of_its_bytes(driver: Driver) -> None:
    (rank,) = open_ranks([driver], [GANG], [summing(1, 4, [("float32", (COUNT,))])])
    for _ in range(3):
        done = step([rank])[0]
    ended = rank.ended[-1]
    moved = 2 * 3 * COUNT * 4 // 4
    assert ended.moved == tuple((peer, moved // 3, moved // 3) for peer in (0, 2, 3))
    assert ended.ended - ended.started == pytest.approx(moved / LINK_BANDWIDTH + 2 * LINK_LATENCY_S)
    gate = rank.held.gated[rank.program][0]
    assert ended.started == done[gate - 1].ended
    assert done[gate].started >= ended.ended


def test_a_cut_into_one_piece_keeps_the_gates(driver: Driver) -> None:
    (rank,) = open_ranks([driver], [GANG], [summing(1, 4, [("float32", (COUNT,))])])
    driver.device.cut(rank.held.job, rank.program, float("inf"))
    for _ in range(2):
        step([rank])
    assert rank.held.gated[rank.program] == (1,)
    assert len(rank.held.pieces[rank.program]) == 2


def test_a_job_that_waits_is_unloaded_and_says_no_more(driver: Driver) -> None:
    (rank,) = open_ranks([driver], [GANG], [summing(1, 4, [("float32", (COUNT,))])])
    first = rank.held.pieces_of_step(rank.program)[0]
    driver.device.launch(first)
    assert isinstance(driver.wait_for(lambda e: isinstance(e, PieceDone)), PieceDone)
    driver.unload(rank.held.job)
    assert driver.device.due() == float("inf")
    assert not any(isinstance(event, CollectiveEnded) for event in driver.unread)


def test_of_two_waves_the_later_steps_collectives_begin_when_the_earlier_step_has_ended(driver: Driver) -> None:
    """Whatever the speed of the waves, all ranks meet the collectives in the order of the steps."""
    plain = summing(1, 4, [("float32", (COUNT,))])
    (gate_op,) = {one.op for one in plain.collectives}
    waves = [replace(plain, wave=Wave(lane, gate_op)) for lane in (0, 1)]
    (rank,) = open_ranks([driver], [GANG], waves[:1])
    held = rank.held
    programs = [rank.program, held.load(waves[1])]
    earlier, later = (held.pieces_of_step(program) for program in programs)
    (gate,) = held.gated[programs[0]]

    def launch(*pieces: Launch) -> None:
        for piece in pieces:
            driver.device.launch(piece)
            driver.wait_for(lambda e: isinstance(e, PieceDone))

    launch(*earlier[:gate])
    assert driver.until(CollectiveEnded, held.job).step == earlier[0].step
    launch(*later[:gate], *earlier[gate:-1])
    assert driver.device.due() == float("inf")
    launch(earlier[-1])
    assert driver.until(CollectiveEnded, held.job).step == later[0].step


def test_collectives_can_be_ended_from_outside(driver: Driver) -> None:
    (rank,) = open_ranks([driver], [GANG], [summing(1, 4, [("float32", (COUNT,))])])
    fault = Fault("peers_lost", "another rank is gone", "submit again")
    device = driver.device
    assert isinstance(device, SimDevice)
    device.abort(rank.held.job, fault)
    assert driver.until(JobDied, rank.held.job).fault == fault


def test_a_program_of_another_rank_is_refused(driver: Driver) -> None:
    held = driver.open(gang=GANG)
    encoded = encode(summing(2, 4, [("float32", (COUNT,))]))
    driver.device.check(held.job, ProgramId(1), encoded)
    driver.until(ProgramChecked, held.job)
    data = SharedMemory(1 << 24)
    driver.device.load_program(held.job, ProgramId(1), encoded, (), (), data.segment, 1)
    refused = driver.until(ProgramRefused, held.job)
    data.close()
    assert refused.fault.message == "the program is for rank 2 of 4, and the job is rank 1 of 4"
