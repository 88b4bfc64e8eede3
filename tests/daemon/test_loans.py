"""Steps that the device takes from the client's lane: when it may, what is known of them, and when that ends."""

from __future__ import annotations

import pytest
from prometheus_client import generate_latest

from gpumux.config import Config
from gpumux.daemon.loans import AFTER_STEPS
from gpumux.device.base import LoanTerms, Recut
from gpumux.scheduler.standing import LONGEST_S
from gpumux.types import Fault
from gpumux.wire import messages as msg
from gpumux.wire.sessions import Incoming
from tests.program import samples

from .fakes import Daemon, LendingDevice
from .test_loop import JOB, only, step

LANE = 77
OTHER = "e" * 32


@pytest.fixture(params=["paced", "guarded"])
def running(request):
    """A session `s` with JOB of two steps at most in flight, high, a loaded program 0, and a lane."""
    daemon = Daemon(Config(policy=request.param), device=LendingDevice())
    daemon.router.lane = LANE
    daemon.connect("s")
    daemon.open_job("s", JOB, inflight=2, priority=1)
    daemon.load("s", JOB, samples.add_one())
    yield daemon
    daemon.close()


def counted(daemon, series='gpumux_steps_total{priority="high"}') -> float:
    lines = generate_latest(daemon.metrics.registry).decode().splitlines()
    return next(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(series))


def run(daemon, first: int, count: int, session: str = "s", job: str = JOB) -> int:
    """Steps through the daemon, one after the other; the next number."""
    for number in range(first, first + count):
        daemon.now += 0.01
        daemon.say(session, msg.Step(job, number, 0, 0, [], 0))
        if not daemon.device.terms:
            daemon.device.finish(daemon.now)
            daemon.turn()
    return first + count


def lend(daemon, first: int = 1) -> int:
    """Have JOB alone until its lane is lent, with a step that then runs; the number of its next step."""
    number = first
    while not daemon.device.terms:
        assert number < first + 3 * AFTER_STEPS
        number = run(daemon, number, 1)
    assert daemon.device.first.step == number - 1
    daemon.device.run(JOB, number - 1, daemon.now)
    daemon.turn()
    return number


def story(daemon, number: int) -> list[str]:
    return [line.split(" ", 1)[1].split(" [")[0] for line in daemon.loop.core.story(JOB, number)]


def test_a_job_that_has_been_alone_for_a_while_gets_its_lane_lent(running):
    following = lend(running)
    assert following > AFTER_STEPS
    assert running.device.terms == {JOB: [LoanTerms(0, 0, 2, ())]}
    assert running.router.lent == ["s"]


def test_what_the_device_ran_is_told_counted_and_timed_as_if_it_had_passed_by(running):
    number = lend(running)
    before, launches = counted(running), counted(running, 'gpumux_launches_total{priority="high"}')
    plain = [line.split()[:1] for line in story(running, number - 1)]
    for turn in range(5):
        running.device.run(JOB, number + turn, running.now + turn * 0.01)
    assert counted(running) == before  # nothing has woken the daemon
    running.now += 1
    running.turn()
    assert counted(running) == before + 5
    assert counted(running, 'gpumux_launches_total{priority="high"}') == launches + 5
    assert running.router.counted == 6  # with the one that came with the lane
    told = story(running, number + 4)
    assert [line.split()[:1] for line in told] == plain
    assert told[-1].endswith("1.000 ms queued, 1.000 ms on the device, 2.000 ms in all")
    (job,) = running.loop.core.snapshot()["jobs"]
    assert job["steps_done"] == number + 4
    assert running.device.terms, "looking does not end it"
    assert running.hear("s") == []  # all were answered


def test_an_answer_that_the_device_could_not_give_is_given_here(running):
    number = lend(running)
    running.device.take(JOB, number, running.now)
    running.device.end(running.now + 0.5, answered=False)
    assert only(running.hear("s")).step == number


def test_another_jobs_step_is_decided_by_all_that_happened_before(running):
    number = lend(running)
    running.connect("t")  # every event but steps taken ends it
    assert running.device.recalled == [JOB]
    running.device.give_back(JOB)
    running.open_job("t", OTHER, priority=1)
    running.load("t", OTHER, samples.add_one())
    number = lend(running, number)
    running.device.run(JOB, number, running.now)
    running.device.take(JOB, number + 1, running.now + 0.01)
    running.now += 0.02
    running.say("t", msg.Step(OTHER, 1, 0, 0, [], 0))
    assert running.device.recalled == [JOB]
    (adopted,) = running.device.adopted
    assert (adopted.step, adopted.submitted) == (number + 1, pytest.approx(running.now - 0.01))
    done = next(job for job in running.loop.core.snapshot()["jobs"] if job["job"] == JOB)
    assert (done["steps_done"], done["outstanding"]) == (number, 1)
    running.device.end(running.now)
    running.device.give_back(JOB, b"the next")
    running.turn()
    assert running.router.returned[-1] == ("s", b"the next")
    assert story(running, number + 1)[-1].startswith("finished: 1.000 ms queued")
    run(running, number + 2, 1)


def test_jobs_that_take_turns_are_not_lent_to(running):
    running.connect("t")
    running.open_job("t", OTHER, priority=1)
    running.load("t", OTHER, samples.add_one())
    for number in range(1, 3 * AFTER_STEPS):
        run(running, number, 1)
        run(running, number, 1, "t", OTHER)
    assert not running.device.terms


def test_a_job_with_steps_in_flight_always_is_not_lent_to(running):
    running.say("s", step(1, slot=0))
    for number in range(2, 3 * AFTER_STEPS):
        running.say("s", step(number, slot=number % 2 == 0))
        running.device.finish(running.now)
        running.turn()
    assert not running.device.terms


def test_a_client_quicker_than_we_hear_is_lent_to_too(running):
    running.device.quick = True
    for number in range(1, 3 * AFTER_STEPS):
        running.say("s", step(number, slot=number % 2))
        if running.device.terms:
            break
        running.device.finish(running.now)  # answered, and nothing said of it
    assert running.device.terms
    assert running.device.first.step == number


def test_a_program_whose_only_piece_is_long_is_not_lent_to(running):
    """Its client's other messages, and its end, would wait for the piece."""
    running.device.events.append(Recut(JOB, 0, 1, (LONGEST_S * 2,), (0, 1)))
    running.turn()
    run(running, 1, 3 * AFTER_STEPS)
    assert not running.device.terms
    running.device.events.append(Recut(JOB, 0, 2, (LONGEST_S / 2,), (0, 1)))
    running.turn()
    lend(running, 3 * AFTER_STEPS + 1)


def test_steps_that_come_two_at_a_time_are_not_split(running):
    """The second would be handled here, while the device has the first."""
    for number in range(1, 6 * AFTER_STEPS, 2):
        for slot in (0, 1):
            running.router.on_lane.append(Incoming("s", running.router.open["s"], step(number + slot, slot=slot), []))
        running.turn()
        for _ in range(2):
            running.device.finish(running.now)
            running.turn()
    assert not running.device.terms


@pytest.mark.parametrize("why", ["no room for it", "two jobs", "answers"])
def test_a_lane_that_can_not_be_lent_stays_here(running, why):
    if why == "no room for it":
        running.router.lendable = False
    elif why == "two jobs":
        running.open_job("s", OTHER)
    else:
        running.device.decline = True
    run(running, 1, 3 * AFTER_STEPS)
    assert not running.device.terms
    assert running.router.lent == []


def test_a_pause_takes_effect_at_once(running):
    number = lend(running)
    running.device.take(JOB, number, running.now)
    running.connect("operator")
    running.device.end(running.now + 0.01)
    running.now += 0.02
    running.device.give_back(JOB)
    assert isinstance(only(running.say("operator", msg.PauseJob(50, JOB))), msg.Done)
    assert running.say("s", step(number + 1)) == []
    assert running.device.work == type(running.device.work)()
    running.say("operator", msg.ResumeJob(51, JOB))
    assert len(running.device.work) == 1


@pytest.mark.parametrize(
    "asked",
    [msg.PauseJob(50, JOB), msg.CloseJob(50, JOB, False), msg.CloseJob(50, JOB, True), msg.ChangeJob(50, JOB, 0, 2.0)],
)
def test_no_step_starts_once_a_pause_or_an_end_is_answered(running, asked, monkeypatch):
    running.connect("operator")
    lend(running)
    assert not running.device.recalled
    send, recalled = running.router.send, []

    def sent(session, message, frames=()):
        if type(message) is msg.Done:
            recalled.append(JOB in running.device.recalled)
        return send(session, message, frames)

    monkeypatch.setattr(running.router, "send", sent)
    running.say("operator", asked)
    assert recalled == [True]


def test_the_client_can_have_its_lane_back(running):
    number = lend(running)
    running.loop._loans._recall("nobody")
    assert running.device.recalled == []
    running.router.recall("s")
    running.router.recall("s")  # while it is on its way
    assert running.device.recalled == [JOB]
    running.device.give_back(JOB, b"rest")
    running.turn()
    assert running.router.returned == [("s", b"rest")]
    assert lend(running, number) >= number + AFTER_STEPS


def test_a_device_that_returns_the_lane_by_itself(running):
    number = lend(running)
    running.device.run(JOB, number, running.now)
    running.device.give_back(JOB, b"odd")
    running.turn()
    assert running.router.returned == [("s", b"odd")]
    assert story(running, number)[-1].startswith("finished")


def test_a_cut_made_after_steps_that_come_with_the_lane_is_not_theirs(running):
    """As when a process dies: all it said since we looked last is heard at once."""
    number = lend(running)
    running.device.events.append(Recut(JOB, 0, 1, (0.001, 0.001), (0, 1, 2)))
    running.device.run(JOB, number, running.now)
    running.device.forget(JOB)  # the loan ended before we say anything
    running.turn()
    assert story(running, number)[-1].startswith("finished")
    assert [launch.step for launch in running.device.launched][-1] < number


def test_a_job_lost_in_a_step_it_took_fails_that_step(running):
    number = lend(running)
    running.device.run(JOB, number, running.now)
    running.turn()
    running.device.take(JOB, number + 1, running.now)
    running.device.ended.append(running.device.taken)  # as far as it came
    running.device.give_back(JOB)
    running.device.lose(JOB, Fault("executor_crashed", "it died", "try again"))
    said = [message for message, _ in running.hear("s")]
    assert [(m.step, m.code) for m in said if isinstance(m, msg.StepFailed)] == [(number + 1, "executor_crashed")]
    assert [type(m) for m in said].count(msg.JobEnded) == 1
    assert running.router.lent == []


@pytest.mark.parametrize("how", ["close", "session", "drain"])
def test_an_end_from_outside_frees_the_lane(running, how):
    number = lend(running)
    running.device.take(JOB, number, running.now)
    if how == "close":
        running.connect("operator")
        running.say("operator", msg.CloseJob(60, JOB, False))
    elif how == "session":
        running.disconnect("s")
    else:
        running.loop.stop("SIGTERM")
        running.turn()
    assert running.device.adopted
    running.turn()
    assert running.router.lent == []
    assert running.loop.core.snapshot()["jobs"] == []
    if how == "close":
        said = [message for message, _ in running.hear("s")] + [m for s, m, _ in running.router.sent if s == "s"]
        assert number in [m.step for m in said if isinstance(m, msg.StepFailed)]


def test_a_profile_that_is_asked_for_meanwhile_comes_behind_the_step_that_runs(running):
    running.connect("operator")
    number = lend(running)
    running.device.take(JOB, number, running.now)
    running.device.slow = True
    running.say("operator", msg.ProfileJob(50, JOB, None))
    assert running.device.recalled == [JOB]
    assert [launch.step for launch in running.device.adopted] == [number]
    running.device.end(running.now)
    running.device.give_back(JOB)
    running.device.finish()
    assert isinstance(only(running.hear("operator")), msg.JobProfile)


@pytest.mark.parametrize("what", ["a profile", "a load"])
def test_nothing_is_lent_while_the_device_owes_something_else(running, what):
    running.connect("operator")
    run(running, 1, AFTER_STEPS)
    running.device.slow = True
    if what == "a profile":
        running.say("operator", msg.ProfileJob(50, JOB, None))
    else:
        running.load("s", JOB, samples.add_one(), 1)
    held = running.device.work.popleft()
    number = run(running, 1 + AFTER_STEPS, 3 * AFTER_STEPS)
    assert not running.device.terms
    running.device.slow = False
    held.run()
    running.turn()
    lend(running, number)


def test_a_job_under_the_id_of_one_that_ended_is_another(running):
    run(running, 1, AFTER_STEPS + 1)  # its next step would go with the lane
    running.say("s", msg.CloseJob(60, JOB, False))
    running.open_job("s", JOB, priority=1)
    running.load("s", JOB, samples.add_one())
    following = lend(running)
    assert following > AFTER_STEPS
    running.device.run(JOB, following, running.now)
    running.turn()
    assert running.loop.core.snapshot()["jobs"][0]["steps_done"] == following
