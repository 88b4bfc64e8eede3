"""What a coordinator reserves is held for its job and no longer than its lease, within the user's limits."""

from __future__ import annotations

import pytest

from gpumux.access import Access, Rule
from gpumux.scheduler import events as cmd
from gpumux.scheduler import events as ev
from gpumux.types import MOST_LEASE_S, Fault, Footprint, JobSpec, Priority
from tests.scheduler.world import GIB, World

MIB = 1 << 20
LOW, HIGH = Priority.LOW, Priority.HIGH


def answer(commands: list[cmd.Command]) -> Fault | None:
    (command,) = commands
    assert isinstance(command, cmd.AnswerReservation)
    assert command.fault is None or command.fault.remedy
    return command.fault


def reserve(
    world: World, job: str, nbytes: int, priority: Priority = LOW, *, lease_s: float = 30.0, session: str = "s"
) -> Fault | None:
    return answer(world.give(ev.ReserveRequested(session, 1, job, priority, nbytes, lease_s)))


def confirm(world: World, job: str, *, lease_s: float = 30.0, session: str = "s") -> Fault | None:
    return answer(world.give(ev.ConfirmRequested(session, 2, job, lease_s)))


def release(world: World, job: str, session: str = "s") -> Fault | None:
    return answer(world.give(ev.ReleaseRequested(session, 3, job)))


def ask(world: World, job: str, priority: Priority = LOW, session: str = "s") -> Fault | None:
    """Open a job; the fault if it is refused."""
    (command,) = world.give(ev.JobRequested(session, job, JobSpec(job, priority)))
    return command.fault if isinstance(command, cmd.RefuseJob) else None


def memory(world: World, part: str = "used") -> int:
    found: int = world.scheduler.snapshot()["memory"][part]
    return found


@pytest.fixture
def world() -> World:
    """A device of 1 GiB, with a session of one user and one of another."""
    made = World()
    made.session("s", uid=1000)
    made.session("t", uid=1001)
    return made


def test_reserved_memory_is_not_given_to_others(world: World) -> None:
    assert reserve(world, "a", 900 * MIB) is None
    assert memory(world, "free") == GIB - 900 * MIB
    assert memory(world, "reserved") == 900 * MIB
    assert "900.00 MiB" not in (reserve(world, "b", 200 * MIB, session="t") or Fault("", "")).message
    assert (reserve(world, "b", 200 * MIB, session="t") or Fault("", "")).code == "admission_refused"
    world.request("other", session="t")
    (refused,) = world.offer("other", 0, Footprint(200 * MIB, 0, 0))
    assert isinstance(refused, cmd.RefuseProgram)
    assert release(world, "a") is None
    assert memory(world) == 0
    world.program("other", 0, (1e-4,), Footprint(200 * MIB, 0, 0))


def test_a_reservation_expires_by_itself(world: World) -> None:
    reserve(world, "a", GIB, lease_s=5.0)
    assert world.wake_at == pytest.approx(world.now + 5.0)
    world.elapse(4.0)
    assert memory(world) == GIB
    world.elapse(1.1)
    assert memory(world) == 0
    assert (confirm(world, "a") or Fault("", "")).code == "refused"


def test_confirming_begins_a_new_lease(world: World) -> None:
    reserve(world, "a", GIB, lease_s=5.0)
    world.elapse(4.0)
    assert confirm(world, "a", lease_s=20.0) is None
    world.elapse(19.0)
    assert memory(world) == GIB
    world.elapse(1.1)
    assert memory(world) == 0


def test_the_job_takes_up_what_was_confirmed(world: World) -> None:
    reserve(world, "a", 900 * MIB)
    assert "not confirmed" in (ask(world, "a") or Fault("", "")).message
    confirm(world, "a", lease_s=1.0)
    world.request("a")
    world.elapse(10.0)
    assert memory(world) == 900 * MIB, "it is the job's, and no lease of it is left"
    world.program("a", 0, (1e-4,), Footprint(800 * MIB, 0, 0))
    assert memory(world) == 900 * MIB
    assert memory(world, "reserved") == 100 * MIB
    world.program("a", 1, (1e-4,), Footprint(200 * MIB, 0, 0))
    assert memory(world) == 1000 * MIB, "what it needs beyond is charged as ever"
    world.close("a")
    world.release("a")
    assert memory(world) == 0


def test_other_users_can_neither_use_nor_change_it(world: World) -> None:
    reserve(world, "a", 100 * MIB)
    confirm(world, "a")
    denied = ask(world, "a", session="t")
    assert denied is not None
    assert denied.code == "access_denied"
    assert "operator = true" in denied.remedy  # it may be the user of a cluster whose coordinator is no operator here
    for fault in (
        reserve(world, "a", 100 * MIB, session="t"),
        confirm(world, "a", session="t"),
        release(world, "a", session="t"),
    ):
        assert fault is not None
        assert fault.code == "not_owner"
    assert memory(world) == 100 * MIB


def test_what_an_operator_reserved_is_for_any_user_that_knows_the_id() -> None:
    world = World(access=Access((Rule("coordinators", users=frozenset({1000}), operator=True),)), max_bytes_per_uid=200)
    world.session("s", uid=1000)
    world.session("t", uid=1001)
    reserve(world, "a", 150)
    confirm(world, "a")
    assert ask(world, "a", session="t") is None
    assert memory(world) == 150
    reserve(world, "b", 100)
    confirm(world, "b")
    assert "with your other jobs" in (ask(world, "b", session="t") or Fault("", "")).message


def test_the_same_again_begins_the_lease_anew_and_other_numbers_are_refused(world: World) -> None:
    reserve(world, "a", GIB, lease_s=5.0)
    world.elapse(4.0)
    assert reserve(world, "a", GIB, lease_s=5.0) is None
    world.elapse(4.0)
    assert memory(world) == GIB
    assert "other numbers" in (reserve(world, "a", 100) or Fault("", "")).message


def test_the_high_place_is_one_jobs(world: World) -> None:
    assert reserve(world, "a", MIB, HIGH) is None
    assert "high place is reserved" in (reserve(world, "b", MIB, HIGH, session="t") or Fault("", "")).message
    assert "high place is reserved" in (ask(world, "b", HIGH, session="t") or Fault("", "")).message
    assert ask(world, "low", LOW, session="t") is None
    assert world.scheduler.refuse_high("low") is not None
    confirm(world, "a")
    world.request("a", "high")
    assert "high place is held" in (ask(world, "b", HIGH, session="t") or Fault("", "")).message
    world.close("a")
    world.release("a")
    assert ask(world, "b", HIGH, session="t") is None
    assert "high place is held" in (reserve(world, "c", MIB, HIGH) or Fault("", "")).message


def test_a_reservation_is_for_a_class(world: World) -> None:
    reserve(world, "a", MIB, HIGH)
    confirm(world, "a")
    assert "for a high job" in (ask(world, "a", LOW) or Fault("", "")).message


def test_reservations_count_as_jobs_and_bytes_of_their_user() -> None:
    world = World(max_jobs_per_uid=2, max_bytes_per_uid=1000)
    world.session("s", uid=1000)
    assert reserve(world, "a", 600) is None
    assert "with your other jobs" in (reserve(world, "b", 600) or Fault("", "")).message
    assert reserve(world, "b", 100) is None
    assert "2 jobs open" in (reserve(world, "c", 100) or Fault("", "")).message
    assert "2 jobs open" in (ask(world, "d") or Fault("", "")).message
    confirm(world, "a")
    assert ask(world, "a") is None, "it counts itself once"


@pytest.mark.parametrize("lease_s", [0.0, -1.0, MOST_LEASE_S * 1.01, float("inf"), float("nan")])
def test_leases_are_bounded(world: World, lease_s: float) -> None:
    assert (reserve(world, "a", 1, lease_s=lease_s) or Fault("", "")).code == "refused"
    reserve(world, "b", 1)
    assert (confirm(world, "b", lease_s=lease_s) or Fault("", "")).code == "refused"


def test_what_makes_no_sense_is_refused(world: World) -> None:
    assert (reserve(world, "a", 0) or Fault("", "")).code == "refused"
    assert (reserve(world, "a", 1, session="nobody") or Fault("", "")).code == "refused"
    world.request("open")
    assert (reserve(world, "open", 1) or Fault("", "")).code == "not_owner"
    assert release(world, "never") is None
    world.give(ev.DrainRequested("it ends"))
    assert (reserve(world, "a", 1) or Fault("", "")).code == "daemon_gone"


def test_a_session_that_ends_leaves_its_reservations_to_the_users_next(world: World) -> None:
    reserve(world, "a", MIB)
    world.give(ev.SessionClosed("s", "the coordinator was started again"))
    world.session("again", uid=1000)
    assert confirm(world, "a", session="again") is None
    assert ask(world, "a", session="again") is None
