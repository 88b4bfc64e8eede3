"""The placement's decisions one by one: who goes first, where a job goes, who has to leave, what is said of it."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumux.cluster import events as ev
from gpumux.cluster.costs import UNKNOWN, LearnedCosts
from gpumux.cluster.events import ClusterJob, DeviceChoice, DeviceFacts, DeviceId, JobOutcome, PlacementConfig, Quota
from gpumux.cluster.explain import explain
from gpumux.cluster.placement import ClusterPlacement
from gpumux.cluster.saved import facts_of, job_data, node_data, restore
from gpumux.errors import ConfigError
from gpumux.types import JobId, Priority

GIB = 2**30
HIGH, LOW = Priority.HIGH, Priority.LOW


class Cluster:
    """A placement whose daemons agree to everything at once, on nodes of `gpus` devices of 80 GiB."""

    def __init__(self, *gpus: int, max_jobs: int = 4, **config: object) -> None:
        self.placement = ClusterPlacement(PlacementConfig(**config))  # type: ignore[arg-type]
        self.now = 0.0
        self.answers: dict[str, ev.AnswerJob] = {}
        self.commands: list[ev.ClusterCommand] = []
        for index, count in enumerate(gpus):
            self.feed(ev.NodeJoined(f"n{index}", (DeviceFacts(80 * GIB, max_jobs),) * count))

    def feed(self, *events: ev.ClusterEvent) -> list[ev.ClusterCommand]:
        """Returns all commands that followed."""
        found: list[ev.ClusterCommand] = []
        todo = list(events)
        while todo:
            for command in self.placement.handle(todo.pop(0), self.now):
                found.append(command)
                match command:
                    case ev.ReserveDevice():
                        todo.append(ev.DeviceReserved(command.attempt, command.device))
                    case ev.ConfirmDevice():
                        todo.append(ev.DeviceConfirmed(command.attempt, command.device))
                    case ev.StopRank():
                        todo.append(ev.RankStopped(command.attempt, command.device))
                    case ev.AnswerJob():
                        self.answers[command.job] = command
        return found

    def submit(self, name: str, priority: Priority = LOW, devices: int = 1, gib: int = 10, **rest: object) -> str:
        user = str(rest.pop("user", "ada"))
        job = ClusterJob(JobId(name), user, "group", priority, devices, gib * GIB, **rest)  # type: ignore[arg-type]
        self.feed(ev.JobSubmitted(job))
        return name

    def wait(self, seconds: float) -> list[ev.ClusterCommand]:
        """Let time pass, with everything that is due."""
        found, until = [], self.now + seconds
        while self.placement.due <= until:
            self.now = self.placement.due
            found += self.feed(ev.TimePassed())
        self.now = until
        return found

    def end(self, name: str) -> None:
        self.feed(ev.JobFinished(JobId(name), self.placement.jobs[JobId(name)].attempt))

    def where(self, name: str) -> list[str]:
        return [str(device) for device in self.placement.jobs[JobId(name)].devices]

    def running(self) -> set[str]:
        return {job.id for job in self.placement.jobs.values() if job.holds}

    def said(self, name: str) -> str:
        return " ".join(explain(self.placement, self.placement.jobs[JobId(name)]))


# ---- where a job goes


def learned(cluster: Cluster) -> None:
    """High program h1 suffers from nothing; h2 leaves low work no time."""
    for high, slowdown, speed in (("h1", 1.01, 0.7), ("h2", 1.05, 0.05)):
        cluster.feed(ev.PairMeasured(high, "l", slowdown, speed))


def test_low_jobs_go_where_they_get_most() -> None:
    cluster = Cluster(3)
    learned(cluster)
    cluster.submit("a", HIGH, programs=("h1",))
    cluster.submit("b", HIGH, programs=("h2",))
    cluster.submit("low1", programs=("l",))
    cluster.submit("low2", programs=("l",))
    assert {*cluster.where("low1"), *cluster.where("low2")} == {"n0/2", *cluster.where("a")}
    cluster.submit("low3", programs=("l",))  # half of a free device is better than a twentieth
    assert cluster.where("low3") != cluster.where("b")


@pytest.mark.parametrize(("choice", "together"), [(DeviceChoice.SPREAD, False), (DeviceChoice.PACK, True)])
def test_without_costs_jobs_are_spread_or_packed(choice: DeviceChoice, together: bool) -> None:
    cluster = Cluster(2, 2, choice=choice)
    cluster.submit("a")
    cluster.submit("b")
    assert (cluster.where("a") == cluster.where("b")) is together


def test_a_gang_is_on_one_node_if_one_has_room() -> None:
    cluster = Cluster(2, 4, 3)
    cluster.submit("single", HIGH)
    cluster.submit("gang", HIGH, devices=3)
    assert len({name.partition("/")[0] for name in cluster.where("gang")}) == 1
    cluster.submit("over two", HIGH, devices=5)
    assert len(set(cluster.where("over two"))) == 5


def test_low_jobs_move_when_a_better_device_is_free() -> None:
    cluster = Cluster(2, rebalance_s=60.0)
    learned(cluster)
    cluster.submit("a", HIGH, programs=("h2",))
    cluster.submit("b", HIGH, programs=("h2",))
    cluster.submit("low", programs=("l",))
    beside = cluster.where("low")
    cluster.end("b" if cluster.where("a") == beside else "a")
    commands = cluster.wait(300.0)
    assert cluster.where("low") != beside
    (stop,) = [command for command in commands if isinstance(command, ev.StopRank)]
    assert stop.keep
    (start,) = [command for command in commands if isinstance(command, ev.StartJob)]
    assert start.resumed
    assert cluster.wait(1000.0) == []  # and does not move back


# ---- who goes first


def test_users_have_equal_shares_whatever_they_submit() -> None:
    cluster = Cluster(1, max_jobs=1)
    for number in range(10):
        cluster.submit(f"ada{number}")
    for number in range(10):
        cluster.submit(f"ben{number}", user="ben")
    order = []
    for _ in range(10):
        (name,) = cluster.running()
        order.append(name[:3])
        cluster.wait(100.0)
        cluster.end(name)
    assert order[1:] == ["ben", "ada"] * 4 + ["ben"]


def test_a_weight_gives_a_larger_share() -> None:
    cluster = Cluster(1, max_jobs=1, weights={"ada": 3.0})
    for number in range(30):
        cluster.submit(f"ada{number}")
        cluster.submit(f"ben{number}", user="ben")
    count = 0
    for _ in range(20):
        (name,) = cluster.running()
        count += name.startswith("ada")
        cluster.wait(100.0)
        cluster.end(name)
    assert count == 15


def test_what_was_used_is_not_forgotten_while_others_are_behind() -> None:
    cluster = Cluster(1, max_jobs=1)
    cluster.submit("long")
    cluster.submit("ben0", user="ben")
    cluster.wait(500.0)
    cluster.end("long")
    for number in (1, 2):
        cluster.submit(f"ben{number}", user="ben")
    cluster.submit("again")  # ada had no job for a moment
    cluster.wait(100.0)
    cluster.end("ben0")
    assert cluster.running() == {"ben1"}


def test_urgency_orders_a_users_own_jobs() -> None:
    cluster = Cluster(1, max_jobs=1, urgency_s=100.0)
    cluster.submit("first")
    cluster.submit("second")
    cluster.submit("urgent", urgency=1)
    cluster.end("first")
    assert cluster.running() == {"urgent"}
    cluster.wait(150.0)
    cluster.submit("late", urgency=1)  # a step of urgency is worth less than `second` has waited
    cluster.end("urgent")
    assert cluster.running() == {"second"}


def test_what_was_stopped_comes_first_again() -> None:
    cluster = Cluster(1, max_jobs=1)
    cluster.submit("low1")
    cluster.submit("low2")
    cluster.submit("high", HIGH)
    assert cluster.running() == {"high"}
    assert "goes on from its snapshot" in cluster.said("low1")
    cluster.end("high")
    assert cluster.running() == {"low1"}


def test_low_jobs_that_were_moved_least_leave_first() -> None:
    cluster = Cluster(1, max_jobs=2)
    cluster.submit("low1")
    cluster.submit("low2")
    cluster.submit("high1", HIGH)
    assert cluster.running() == {"low1", "high1"}  # the newer one left
    cluster.end("high1")
    cluster.submit("high2", HIGH)
    assert cluster.running() == {"low2", "high2"}


def test_only_as_many_low_jobs_leave_as_need_to() -> None:
    cluster = Cluster(1)
    for number in range(3):
        cluster.submit(f"low{number}", gib=20)
    cluster.submit("high", HIGH, gib=30)
    assert cluster.running() == {"low0", "low1", "high"}


# ---- gangs that go on with fewer devices


def gang(cluster: Cluster, devices: int, *sizes: int, priority: Priority = HIGH) -> None:
    cluster.submit("gang", priority, devices=devices)
    cluster.feed(ev.SizesKnown(JobId("gang"), sizes))


def test_a_gang_whose_node_is_lost_goes_on_with_what_is_left() -> None:
    cluster = Cluster(2, 2)
    gang(cluster, 4, 1, 2, 3)
    (stop, *_, start) = cluster.feed(ev.NodeLost("n1"))
    assert isinstance(stop, ev.StopRank)
    assert isinstance(start, ev.StartJob)
    assert start.resumed
    assert cluster.where("gang") == ["n0/0", "n0/1"]
    assert "submitted for 4 devices and goes on with 2" in cluster.said("gang")
    cluster.end("gang")
    assert cluster.answers["gang"].outcome is JobOutcome.DONE


def test_it_gets_the_most_that_it_can_run_on() -> None:
    cluster = Cluster(1, 3)
    gang(cluster, 4, 1, 2)
    cluster.feed(ev.NodeLost("n0"))
    assert len(cluster.where("gang")) == 2


@pytest.mark.parametrize(
    ("sizes", "said"), [((), "may not go on with fewer than 4"), ((3,), "goes on with 3 at least")]
)
def test_a_gang_that_may_not_be_so_small_waits_and_says_so(sizes: tuple[int, ...], said: str) -> None:
    cluster = Cluster(2, 2)
    gang(cluster, 4, *sizes)
    cluster.feed(ev.NodeLost("n1"))
    assert cluster.where("gang") == []
    assert "2 of the 4 devices that it was submitted for are left" in cluster.said("gang")
    assert said in cluster.said("gang")
    cluster.feed(ev.NodeJoined("n1", (DeviceFacts(80 * GIB),) * 2))
    assert len(cluster.where("gang")) == 4


def test_a_gang_that_only_waits_for_others_keeps_its_size() -> None:
    cluster = Cluster(2, 2, rebalance_s=1e6)
    gang(cluster, 2, 1, priority=LOW)
    for number in range(4):
        cluster.submit(f"high{number}", HIGH, gib=75)
    assert cluster.where("gang") == []
    cluster.end("high0")
    assert cluster.where("gang") == []
    assert "It needs 2 devices" in cluster.said("gang")
    cluster.end("high1")
    assert len(cluster.where("gang")) == 2


def test_a_gang_that_has_not_run_waits_for_all_of_its_devices() -> None:
    cluster = Cluster(2)
    gang(cluster, 3, 1, 2)
    assert cluster.where("gang") == []
    cluster.feed(ev.NodeJoined("n1", (DeviceFacts(80 * GIB),)))
    assert len(cluster.where("gang")) == 3


def test_what_drains_or_has_too_little_memory_is_not_left() -> None:
    cluster = Cluster(1, 1, 1, 1)
    gang(cluster, 4, 1, 2, 3, priority=LOW)
    cluster.feed(ev.NodeDraining("n0"))
    assert cluster.where("gang") == ["n1/0", "n2/0", "n3/0"]
    cluster.feed(ev.NodeJoined("n0", (DeviceFacts(5 * GIB),)))  # another device than before
    cluster.feed(ev.NodeLost("n1"))
    assert cluster.where("gang") == ["n2/0", "n3/0"]


def test_a_gang_that_outgrows_its_devices_leaves_them() -> None:
    cluster = Cluster(2, 2)
    gang(cluster, 4, 1, 2)
    cluster.feed(ev.NodeLost("n1"))
    assert len(cluster.where("gang")) == 2
    cluster.feed(ev.SizesKnown(JobId("gang"), (1,)))
    assert len(cluster.where("gang")) == 1
    cluster.feed(ev.SizesKnown(JobId("gang"), ()))
    assert cluster.where("gang") == []
    assert "may not go on with fewer than 4" in cluster.said("gang")


def test_a_quota_that_was_made_smaller_bounds_what_is_left() -> None:
    cluster = Cluster(2, 2)
    gang(cluster, 4, 1, 2, 3)
    before = cluster.placement
    kept = [node_data(n) for n in before.nodes.values()], [job_data(j) for j in before.jobs.values()]
    cluster.placement = restore(PlacementConfig(quotas={"ada": Quota(high_devices=2)}), facts_of(before), *kept)
    cluster.feed(ev.NodeLost("n1"))
    cluster.feed(ev.NodeJoined("n1", (DeviceFacts(80 * GIB),) * 2))
    assert len(cluster.where("gang")) == 2


def stopped_to_grow(cluster: Cluster) -> list[ev.RankStopped]:
    """A low gang of four that went on with two is asked to leave them for all four: its answers."""
    gang(cluster, 4, 1, 2, 3, priority=LOW)
    cluster.feed(ev.NodeLost("n1"))
    cluster.feed(ev.NodeJoined("n1", (DeviceFacts(80 * GIB, 4),) * 2))
    stops: list[ev.ClusterCommand] = []
    while not stops:
        cluster.now = cluster.placement.due
        stops = cluster.placement.handle(ev.TimePassed(), cluster.now)
    assert "all of the 4 devices" in cluster.said("gang")
    return [ev.RankStopped(stop.attempt, stop.device) for stop in stops if isinstance(stop, ev.StopRank)]


def test_a_gang_that_was_stopped_to_grow_and_lost_its_devices_to_another_goes_on_with_what_it_had() -> None:
    cluster = Cluster(2, 2, rebalance_s=60.0)
    answers = stopped_to_grow(cluster)
    cluster.submit("high", HIGH, gib=75)
    (taken,) = cluster.where("high")
    cluster.feed(*answers)
    assert len(cluster.where("gang")) == 2
    assert taken not in cluster.where("gang")
    assert "goes on with 2" in cluster.said("gang")
    cluster.end("high")
    cluster.wait(200.0)
    assert len(cluster.where("gang")) == 2  # it lost the race once, and is left alone for longer
    cluster.wait(100.0)
    assert len(cluster.where("gang")) == 4


def test_the_devices_of_a_gang_that_grows_are_kept_for_it_until_it_has_them() -> None:
    cluster = Cluster(2, 2, rebalance_s=60.0)
    answers = stopped_to_grow(cluster)
    cluster.submit("low", user="ben", gib=75)  # whose turn it is before the gang's
    cluster.feed(*answers)
    assert len(cluster.where("gang")) == 4
    assert cluster.where("low") == []


def test_a_gang_that_grows_asks_a_daemon_that_refuses_it_again_before_it_goes_back() -> None:
    """The daemon may still be closing what ran there. One that goes on refusing counts as taken."""
    cluster = Cluster(2, 2, rebalance_s=60.0)
    commands = [command for each in stopped_to_grow(cluster) for command in cluster.placement.handle(each, cluster.now)]
    asked = []
    for _ in range(4):
        reserves = [command for command in commands if isinstance(command, ev.ReserveDevice)]
        asked.append(len(reserves))
        refused = next((each for each in reserves if each.device.node == "n1"), reserves[0])
        commands = cluster.placement.handle(ev.DeviceRefused(refused.attempt, refused.device, "no"), cluster.now)
        while not any(isinstance(command, ev.ReserveDevice) for command in commands):
            cluster.now = cluster.placement.due
            commands = cluster.placement.handle(ev.TimePassed(), cluster.now)
    assert asked == [4, 4, 4, 2]


def test_a_gang_is_whole_again_when_its_devices_are_free() -> None:
    cluster = Cluster(2, 2, rebalance_s=60.0)
    gang(cluster, 4, 1, 2, 3)
    cluster.feed(ev.NodeLost("n1"))
    cluster.feed(ev.NodeJoined("n1", (DeviceFacts(80 * GIB, 4),) * 2))
    cluster.submit("other", HIGH)
    assert cluster.where("other") == ["n1/0"]
    cluster.wait(1000.0)
    assert len(cluster.where("gang")) == 2
    cluster.end("other")
    stopped = [each for each in cluster.wait(120.0) if isinstance(each, ev.StopRank)]
    assert len(stopped) == 2
    assert all(each.keep for each in stopped)
    assert len(cluster.where("gang")) == 4
    assert "goes on with" not in cluster.said("gang")


# ---- quotas, refusals, and what is said


def test_a_quota_holds_jobs_and_says_so() -> None:
    cluster = Cluster(4, quotas={"ada": Quota(devices=2, jobs=3)})
    for name in ("a", "b", "c"):
        cluster.submit(name)
    assert cluster.running() == {"a", "b"}
    assert "user ada holds 2 of 2 devices" in cluster.said("c")
    cluster.submit("d")
    assert cluster.answers["d"].outcome is JobOutcome.REFUSED
    assert "when one of them has ended" in cluster.answers["d"].reason
    cluster.submit("other", user="ben", devices=2)
    assert "other" in cluster.running()
    cluster.end("a")
    assert "c" in cluster.running()


def test_more_than_a_quota_allows_is_refused() -> None:
    cluster = Cluster(4, group_quotas={"group": Quota(high_devices=2)})
    cluster.submit("gang", HIGH, devices=3)
    assert "quota of group group" in cluster.answers["gang"].reason


def test_small_jobs_of_a_user_do_not_keep_its_large_one_from_its_quota() -> None:
    cluster = Cluster(8, quotas={"ada": Quota(devices=2)}, patience_s=100.0)
    cluster.submit("small0")
    cluster.submit("small1")
    cluster.submit("large", devices=2)
    number = 2
    for _ in range(20):
        cluster.submit(f"small{number}")
        number += 1
        cluster.wait(20.0)
        oldest = next(iter(job.id for job in cluster.placement.jobs.values() if job.holds))
        if "large" in cluster.running():
            return
        cluster.end(oldest)
    pytest.fail("the large job never started")


def test_a_waiting_job_is_told_which_devices_can_not_take_it() -> None:
    cluster = Cluster(2, 2)
    cluster.submit("gang", HIGH, devices=3)
    cluster.submit("other", HIGH, devices=2)
    assert "of 4 devices 1 could take it, 3 run a high job" in cluster.said("other")
    cluster.submit("huge", gib=100)
    assert "which the cluster does not have now" in cluster.said("huge")
    cluster.feed(ev.NodeDraining("n0"))
    assert "drain" in cluster.said("other")


def test_a_job_that_no_node_can_take_does_not_hold_others_back() -> None:
    cluster = Cluster(1, max_jobs=1, patience_s=100.0)
    cluster.submit("huge", gib=100, user="ben")
    cluster.submit("a")
    assert cluster.running() == {"a"}
    cluster.wait(1000.0)
    cluster.submit("b")
    cluster.end("a")
    assert cluster.running() == {"b"}


# ---- nodes, leases, bad input


def test_a_gang_goes_on_elsewhere_when_a_node_is_lost() -> None:
    cluster = Cluster(2, 2, 2)
    cluster.submit("gang", HIGH, devices=4)
    lost = cluster.where("gang")[0].partition("/")[0]
    commands = cluster.feed(ev.NodeLost(lost))
    stopped = [command for command in commands if isinstance(command, ev.StopRank)]
    assert len(stopped) == 2
    assert cluster.running() == {"gang"}
    assert lost not in "".join(cluster.where("gang"))
    cluster.submit("fixed", movable=False)
    cluster.feed(ev.NodeLost(cluster.where("fixed")[0].partition("/")[0]))
    assert cluster.answers["fixed"].outcome is JobOutcome.FAILED


def test_a_node_that_drains_says_when_it_is_empty() -> None:
    cluster = Cluster(1, 1)
    cluster.submit("high", HIGH)
    node = cluster.where("high")[0].partition("/")[0]
    assert ev.NodeEmpty(node) not in cluster.feed(ev.NodeDraining(node))
    commands = cluster.feed(ev.JobFinished(JobId("high"), cluster.placement.jobs[JobId("high")].attempt))
    assert commands[-1] == ev.NodeEmpty(node)


def test_a_device_that_does_not_answer_is_left_alone_for_a_while() -> None:
    placement = ClusterPlacement()
    placement.handle(ev.NodeJoined("n", (DeviceFacts(80 * GIB),)), 0.0)
    (first,) = placement.handle(ev.JobSubmitted(ClusterJob(JobId("a"), "ada", "g", LOW, 1, GIB)), 0.0)
    assert isinstance(first, ev.ReserveDevice)
    assert placement.due == placement.config.answer_s
    assert placement.handle(ev.TimePassed(), placement.due) == [
        ev.ReleaseDevice(first.attempt, first.device, first.job)
    ]
    assert placement.handle(ev.DeviceReserved(first.attempt, first.device), placement.now) == []
    (again,) = placement.handle(ev.TimePassed(), placement.due)
    assert isinstance(again, ev.ReserveDevice)
    assert again.attempt > first.attempt


def test_time_does_not_go_back() -> None:
    placement = ClusterPlacement()
    placement.handle(ev.TimePassed(), 1.0)
    with pytest.raises(ValueError, match="after one at"):
        placement.handle(ev.TimePassed(), 0.5)


@pytest.mark.parametrize(
    "make",
    [
        lambda: DeviceFacts(0),
        lambda: ClusterJob(JobId("a"), "ada", "g", LOW, 0, 1),
        lambda: PlacementConfig(lease_s=10.0, answer_s=10.0),
        lambda: PlacementConfig(weights={"ada": 0.0}),
    ],
)
def test_bad_settings_are_refused_with_a_remedy(make: object) -> None:
    with pytest.raises(ConfigError) as error:
        make()  # type: ignore[operator]
    assert error.value.remedy


# ---- whatever comes, in whatever order

NODES, JOBS = st.sampled_from(["n0", "n1"]), st.sampled_from([JobId(f"j{i}") for i in range(6)])
ATTEMPTS = st.integers(0, 12)
DEVICES = st.builds(DeviceId, NODES, st.integers(0, 2))
REQUESTS = st.builds(
    ClusterJob, JOBS, st.sampled_from(["ada", "ben"]), st.just("g"), st.sampled_from(list(Priority)),
    st.integers(1, 3), st.sampled_from([GIB, 30 * GIB]), movable=st.booleans(),
)  # fmt: skip
EVENTS = st.one_of(
    st.builds(
        ev.NodeJoined, NODES, st.sampled_from([(DeviceFacts(40 * GIB, 2),) * 2, (DeviceFacts(40 * GIB, 3),) * 3])
    ),
    st.builds(ev.NodeDraining, NODES),
    st.builds(ev.NodeLost, NODES),
    st.builds(ev.JobSubmitted, REQUESTS),
    st.builds(ev.JobCancelled, JOBS),
    st.builds(ev.JobFinished, JOBS, ATTEMPTS, st.sampled_from(["", "failed"])),
    st.builds(ev.StartFailed, JOBS, ATTEMPTS),
    st.builds(ev.SizesKnown, JOBS, st.sampled_from([(), (1,), (1, 2, 7)])),
    st.builds(ev.RankStopped, ATTEMPTS, DEVICES),
    st.builds(ev.DeviceReserved, ATTEMPTS, DEVICES),
    st.builds(ev.DeviceConfirmed, ATTEMPTS, DEVICES),
    st.builds(ev.DeviceRefused, ATTEMPTS, DEVICES, st.just("no room")),
    st.just(ev.TimePassed()),
)


@settings(deadline=None, max_examples=300)
@given(st.lists(st.tuples(EVENTS, st.sampled_from([0.0, 1.0, 20.0])), max_size=60))
def test_answers_that_were_not_asked_for_do_no_harm(events: list[tuple[ev.ClusterEvent, float]]) -> None:
    """No order of events breaks what holds of devices; a job is answered once for each time that it is new."""
    placement, now = ClusterPlacement(PlacementConfig(patience_s=30.0)), 0.0
    submitted = answered = 0
    for event, passed in [*events, *[(ev.JobCancelled(JobId(f"j{i}")), 0.0) for i in range(6)]]:
        now += passed
        submitted += isinstance(event, ev.JobSubmitted) and event.job.id not in placement.jobs
        commands = placement.handle(event, now)
        answered += sum(isinstance(command, ev.AnswerJob) for command in commands)
        assert answered + len(placement.jobs) == submitted
        assert placement.due > now
        for device in placement.devices.values():
            assert device.used_bytes <= device.facts.memory_bytes
            assert sum(job.high for job in device.jobs.values()) <= 1
            assert all(placement.jobs[job.id] is job for job in device.jobs.values())


PROGRAMS = st.sampled_from(["a", "b", "c"])
MEASURED = st.builds(ev.PairMeasured, PROGRAMS, PROGRAMS, st.floats(0.9, 3.0), st.floats(0.0, 1.0), st.just(1))


@given(st.lists(MEASURED, max_size=30), PROGRAMS, PROGRAMS)
def test_a_pair_is_what_was_measured_last_or_the_mean_of_its_programs(
    measured: list[ev.PairMeasured], high: str, low: str
) -> None:
    costs, newest = LearnedCosts(), {}
    for each in measured:
        costs.learn(each)
        newest[each.high, each.low] = each
    found = costs.between((high,), (low,))
    if (high, low) in newest:
        assert found.low_speed == newest[high, low].low_speed
        return
    means = []
    for which in (0, 1):
        of = [each for key, each in newest.items() if key[which] == (high, low)[which]]
        if of:
            means.append(sum(each.low_speed for each in of) / len(of))
    assert found.low_speed == pytest.approx(sum(means) / len(means) if means else UNKNOWN.low_speed)
    assert len(costs) == len(newest)


def test_low_jobs_do_not_make_room_again_and_again_for_a_job_that_is_refused_then() -> None:
    """Its memory may be used by what the cluster knows nothing of."""
    cluster = Cluster(1)
    cluster.submit("low", gib=60)
    tried: list[float] = []
    ran = 0.0

    def give(event: ev.ClusterEvent) -> None:
        for command in cluster.placement.handle(event, cluster.now):
            match command:
                case ev.ReserveDevice(priority=Priority.HIGH):
                    tried.append(cluster.now)
                    give(ev.DeviceRefused(command.attempt, command.device, "no"))
                case ev.ReserveDevice():
                    give(ev.DeviceReserved(command.attempt, command.device))
                case ev.ConfirmDevice():
                    give(ev.DeviceConfirmed(command.attempt, command.device))
                case ev.StopRank():
                    give(ev.RankStopped(command.attempt, command.device))

    give(ev.JobSubmitted(ClusterJob(JobId("high"), "ben", "group", HIGH, 1, 60 * GIB)))
    while cluster.placement.due <= 3600.0:
        before, cluster.now = cluster.now, cluster.placement.due
        ran += (cluster.now - before) * ("low" in cluster.running())
        give(ev.TimePassed())
    pauses = [b - a for a, b in pairwise(tried)]
    assert pauses[:4] == [5.0, 10.0, 20.0, 40.0]
    assert set(pauses[4:]) == {80.0}
    assert ran > 0.9 * 3600.0
    assert "refused it" in cluster.said("high")


def test_a_device_that_ran_a_job_is_tried_soon_again_when_it_refuses_it_later() -> None:
    """Refusals count as they come in a row, and a run ends the row."""
    cluster = Cluster(1)
    device = DeviceId("n0", 0)
    job = JobId("a")

    def refuse() -> float:
        """Have the device refuse the job; returns the seconds until it is tried there again."""
        refused = cluster.now
        cluster.placement.handle(ev.DeviceRefused(cluster.placement.jobs[job].attempt, device, "no"), cluster.now)
        while not cluster.placement.jobs[job].holds:
            cluster.now = cluster.placement.due
            cluster.placement.handle(ev.TimePassed(), cluster.now)
        return cluster.now - refused

    cluster.placement.handle(ev.JobSubmitted(ClusterJob(job, "ada", "group", LOW, 1, GIB)), 0.0)
    assert [refuse() for _ in range(3)] == [5.0, 10.0, 20.0]
    cluster.feed(ev.DeviceReserved(cluster.placement.jobs[job].attempt, device))
    cluster.feed(ev.NodeDraining("n0"))
    assert not cluster.placement.jobs[job].holds
    cluster.placement.handle(ev.NodeJoined("n0", (DeviceFacts(80 * GIB, 4),)), cluster.now)
    assert refuse() == 5.0
