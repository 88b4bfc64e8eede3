"""Shares within a class: by weight and measured device time, with a bounded wait for everyone."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumux.scheduler.jobs import ScheduledJob
from gpumux.scheduler.windows import MAX_LAG_S, MAX_STALE_ENTRIES, FairQueue
from gpumux.types import JobId, JobSpec, Peer, Priority, SessionId
from tests.scheduler.world import World

WINDOW = 4  # low launches out while no high job is active


INFLIGHT = 8  # steps a job keeps submitted: more than can be out, so that it always has some waiting


class Shares:
    """Jobs that always have steps waiting, on a device that runs what it was given first, first."""

    def __init__(self) -> None:
        self.world = World("paced", low_idle_window_s=1e9)
        self.took: dict[str, float] = {}
        self.served: Counter[str] = Counter()
        self.pieces: Counter[str] = Counter()
        self.next: Counter[str] = Counter()

    def add(
        self, job: str, took: float, fill_unknown: float | None = None, pieces: int = 2, weight: float = 1.0
    ) -> None:
        self.world.job(
            job, "low", (took if fill_unknown is None else fill_unknown,) * pieces, weight=weight, max_inflight=INFLIGHT
        )
        self.took[job] = took

    def submit(self, job: str) -> None:
        self.next[job] += 1
        self.world.step(job, self.next[job])

    def start(self, *jobs: str) -> None:
        for job in jobs:
            for _ in range(INFLIGHT):
                self.submit(job)

    def run_one(self) -> str:
        """The oldest launch ends; its job's client submits again at once if that answered a step."""
        launch = self.world.launches[min(self.world.launches)]
        before = len(self.world.jobs[launch.job].items)
        self.world.done(launch.launch, self.took[launch.job])
        self.served[launch.job] += self.took[launch.job]
        self.pieces[launch.job] += 1
        for _ in range(before - len(self.world.jobs[launch.job].items)):
            self.submit(launch.job)
        return launch.job

    def run(self, pieces: int) -> list[str]:
        return [self.run_one() for _ in range(pieces)]


def test_equal_weights_share_time_not_turns() -> None:
    shares = Shares()
    shares.add("long", 9e-4)
    shares.add("short", 1e-4)
    shares.start("long", "short")
    shares.run(1000)
    assert shares.served["long"] / shares.served["short"] == pytest.approx(1.0, rel=0.03)
    assert shares.pieces["short"] / shares.pieces["long"] == pytest.approx(9.0, rel=0.03)


def test_weights_divide_device_time() -> None:
    shares = Shares()
    shares.add("one", 3e-4, weight=1.0)
    shares.add("three", 1e-4, weight=3.0)
    shares.start("one", "three")
    shares.run(2000)
    assert shares.served["three"] / shares.served["one"] == pytest.approx(3.0, rel=0.03)


def test_measured_time_counts_not_the_guess() -> None:
    shares = Shares()
    shares.add("modest", 2e-4, fill_unknown=8e-4)
    shares.add("boastful", 2e-4, fill_unknown=1e-6)
    shares.start("modest", "boastful")
    shares.run(2000)
    assert shares.served["modest"] / shares.served["boastful"] == pytest.approx(1.0, rel=0.03)


def test_a_returning_job_neither_starves_nor_monopolises() -> None:
    shares = Shares()
    shares.add("busy", 1e-4)
    shares.add("back", 1e-4)
    shares.start("busy")
    shares.run(5000)  # half a second of device time that `back` did not ask for
    shares.start("back")
    ran = shares.run(40)
    assert 15 <= ran.count("back") <= 22
    assert "back" in ran[: WINDOW + 2]
    assert "busy" in ran[WINDOW + 1 : WINDOW + 5]


def test_a_new_job_does_not_wait_for_a_bad_first_guess() -> None:
    shares = Shares()
    shares.add("guessed", 1e-4, fill_unknown=1.0)
    shares.add("new", 1e-4)
    shares.start("guessed")
    shares.run(20)
    shares.start("new")
    ran = shares.run(40)
    assert ran.count("new") >= 15
    # One piece at a time is out while its guess says a second: a quarter of the window, not nothing.
    assert ran[10:].count("guessed") >= 6


def test_a_job_held_back_by_its_guesses_catches_up_a_little_and_no_more() -> None:
    shares = Shares()
    shares.add("guessed", 1e-4, fill_unknown=1.0)
    shares.add("other", 1e-4)
    shares.start("guessed", "other")
    ran = shares.run(2000)
    assert ran.count("guessed") == pytest.approx(500, abs=20), "one of four launches is all its guess lets it have"
    shares.world.ready("guessed", 0, 1, (1e-4, 1e-4))
    catch_up = MAX_LAG_S / 1e-4  # pieces
    ran = shares.run(600)
    assert ran.count("guessed") <= (600 + catch_up) / 2 + 2 * WINDOW
    assert ran.count("guessed") >= 300 - 2 * WINDOW
    assert ran[-100:].count("guessed") == pytest.approx(50, abs=3)


def test_pieces_that_take_no_time_do_not_shut_others_out() -> None:
    shares = Shares()
    shares.add("empty", 0.0)
    shares.add("real", 1e-6)
    shares.start("empty", "real")
    ran = shares.run(200)
    assert ran.count("real") == pytest.approx(100, abs=5)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    jobs=st.lists(
        st.tuples(
            st.sampled_from((5e-5, 1e-4, 3e-4, 1e-3)),  # measured seconds a piece
            st.sampled_from((0.2, 0.5, 1.0, 1.0, 3.0)),  # its guess, over that
            st.sampled_from((0.5, 1.0, 2.0)),  # weight
            st.integers(1, 5),  # pieces a step
        ),
        min_size=2,
        max_size=6,
    ),
    late=st.integers(0, 3),
)
def test_no_job_waits_beyond_the_bound(jobs: list[tuple[float, float, float, int]], late: int) -> None:
    """While a job has work, no other job's share (device seconds over weight) gets further ahead of
    its own than start-time fair queueing allows: a piece each, and what may be out unmeasured."""
    shares = Shares()
    cost: dict[str, float] = {}
    for index, (took, fill_unknown, weight, pieces) in enumerate(jobs):
        shares.add(f"j{index}", took, took * fill_unknown, pieces, weight)
        cost[f"j{index}"] = took * max(1.0, fill_unknown) / weight
    names = list(cost)
    early, joining = names[: len(names) - min(late, len(names) - 1)], names[len(names) - min(late, len(names) - 1) :]
    shares.start(*early)
    shares.run(30)
    shares.start(*joining)
    begin = Counter(shares.served)
    weight = {f"j{index}": job[2] for index, job in enumerate(jobs)}
    for _ in range(300):
        shares.run_one()
        share = {name: (shares.served[name] - begin[name]) / weight[name] for name in names}
        for behind in names:
            for ahead in names:
                bound = (WINDOW + 1) * (cost[behind] + cost[ahead])
                assert share[ahead] - share[behind] <= bound, f"{ahead} is {share[ahead]} and {behind} {share[behind]}"
    assert all(
        shares.served[name] > begin[name] for name in names if cost[name] * len(names) * 40 < max(share.values())
    )


@pytest.mark.parametrize("order", ["fair", "arrival"])
def test_outdated_heap_entries_do_not_pile_up(order: str) -> None:
    world = World("paced" if order == "fair" else "fifo")
    for name in ("a", "b", "c"):
        world.job(name)
        world.pause(name)
        world.steps(name, 1)
    queue = world.scheduler._state.windows.ready[0]
    job = world.scheduler._state.jobs["a"]
    for _ in range(1000):
        queue.add(job)
        queue.remove(job)
    assert len(queue._heap) <= MAX_STALE_ENTRIES
    queue.check([])


def low_jobs(count: int) -> list[ScheduledJob]:
    names = [str(n) for n in range(count)]
    return [ScheduledJob(JobId(n), SessionId("s"), Peer(0, 0, 0), JobSpec(n), 0.0, Priority.LOW, 1.0) for n in names]


def test_nothing_refers_to_a_job_that_is_forgotten() -> None:
    queue = FairQueue()
    jobs = low_jobs(4)
    for job in jobs:
        queue.add(job)
    first = queue.peek()
    second, third = queue.next_two()
    for job in (second, third):
        queue.purge(job)
        assert not any(job is held for held in (*vars(queue).values(), *(entry[2] for entry in queue._heap)))
    assert first is queue.peek()
    assert len(queue.next_two()) == 1


MOVES = st.tuples(st.sampled_from(["enter", "leave", "charge", "settle"]), st.integers(0, 7), st.floats(0.0, 0.01))


@given(st.lists(MOVES, max_size=80))
def test_the_job_after_the_first_is_found_whatever_is_out_of_date(moves: list[tuple[str, int, float]]) -> None:
    queue = FairQueue()
    jobs = low_jobs(8)
    for move, number, seconds in moves:
        job = jobs[number]
        if move == "enter" and not job.ready_entry:
            queue.add(job)
        elif move == "leave":
            queue.remove(job)
        elif move == "charge":
            queue.charge(job, seconds)
        elif move == "settle":
            queue.correct_charge(job, 0.0, seconds)
        ready = [job for job in jobs if job.ready_entry]
        queue.check(ready)
        first = queue.peek()
        if first is None:
            assert not ready
            continue
        others = [job for job in ready if job is not first]
        assert queue.next_two() == queue.next_two()
        found = queue.next_two()
        assert len(found) == min(2, len(others)) == len({id(job) for job in found})
        assert all(job in others for job in found)
        assert [queue.key(job) for job in found] == sorted(queue.key(job) for job in others)[:2]
        assert queue.peek() is first
