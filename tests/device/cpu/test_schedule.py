"""Which launch goes where next: the rule in gpumux/device/run/schedule.py, without any process."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpumux.device.run.schedule import Schedule
from gpumux.types import JobId

A, B, C = JobId("a"), JobId("b"), JobId("c")


def schedule(parallel: int, *jobs: JobId) -> Schedule[str]:
    made: Schedule[str] = Schedule(parallel)
    for job in jobs:
        made.open(job)
    return made


def handed(s: Schedule[str]) -> list[str]:
    return [what for _, what in s.hand_over()]


def test_one_piece_at_a_time_oldest_first() -> None:
    s = schedule(1, A, B, C)
    for job, what in ((B, "b1"), (C, "c1"), (A, "a1")):
        s.submit(job, what, 0)
    order = []
    for job in (B, C, A):
        order += handed(s)
        s.done(job)
    assert order == ["b1", "c1", "a1"]


def test_a_higher_stream_goes_first() -> None:
    s = schedule(1, A, B, C)
    s.submit(A, "a1", 0)
    assert handed(s) == ["a1"]
    s.submit(B, "b1", 0)
    s.submit(C, "c1", 5)
    s.done(A)
    assert handed(s) == ["c1"]


def test_the_next_piece_is_handed_ahead_and_only_one() -> None:
    s = schedule(1, A)
    for what in ("a1", "a2", "a3"):
        s.submit(A, what, 0)
    assert handed(s) == ["a1", "a2"]
    assert s.pieces_running == 1
    s.done(A)
    assert handed(s) == ["a3"]


def test_nothing_is_handed_ahead_of_a_waiting_launch_of_the_same_priority() -> None:
    s = schedule(1, A, B)
    s.submit(A, "a1", 0)
    assert handed(s) == ["a1"]
    s.submit(B, "b1", 0)
    s.submit(A, "a2", 0)
    assert handed(s) == []
    s.done(A)
    assert handed(s) == ["b1"]


def test_a_higher_priority_job_is_handed_ahead_past_a_lower_one_that_waits() -> None:
    s = schedule(1, A, B)
    s.submit(A, "a1", 1)
    s.submit(B, "b1", 0)
    s.submit(A, "a2", 1)
    assert handed(s) == ["a1", "a2"]


def test_a_low_launch_is_not_handed_ahead_of_a_waiting_high_one() -> None:
    s = schedule(1, A, B)
    s.submit(A, "a1", 0)
    s.submit(A, "a2", 0)
    s.submit(B, "b1", 1)
    assert handed(s) == ["b1"]
    s.done(B)
    assert handed(s) == ["a1", "a2"]


def test_jobs_that_run_do_not_hold_back_each_others_next_piece() -> None:
    s = schedule(2, A, B)
    for job, what in ((A, "a1"), (B, "b1"), (A, "a2"), (B, "b2")):
        s.submit(job, what, 0)
    assert sorted(handed(s)) == ["a1", "a2", "b1", "b2"]
    assert s.pieces_running == 2


def test_a_transfer_waits_for_the_jobs_pieces_and_holds_back_those_behind_it() -> None:
    s = schedule(1, A)
    s.submit(A, "a1", 0)
    s.submit(A, "move", None)
    s.submit(A, "a2", 0)
    assert handed(s) == ["a1"]
    s.done(A)
    assert handed(s) == ["move"]
    assert s.pieces_running == 0
    s.done(A)
    assert handed(s) == ["a2"]


def test_a_dropped_job_gives_its_slot_and_its_commands_back() -> None:
    s = schedule(1, A, B)
    for what in ("a1", "a2", "a3"):
        s.submit(A, what, 0)
    handed(s)
    s.submit(B, "b1", 0)
    assert s.drop(A) == ["a1", "a2", "a3"]
    assert handed(s) == ["b1"]
    assert s.drop(A) == []
    assert s.done(A) is None


def test_with_preemption_a_high_launch_starts_beside_a_low_piece_and_a_low_one_waits() -> None:
    s: Schedule[str] = Schedule(1, preempts=True)
    for job in (A, B, C):
        s.open(job)
    s.submit(A, "a1", 0)
    assert handed(s) == ["a1"]
    assert s.claim(B, "b1", 1)
    s.submit(C, "c1", 0)
    s.submit(B, "b2", 1)
    assert handed(s) == ["b2"], "handed ahead, past the low launch that waits"
    s.done(A)
    assert handed(s) == [], "the high piece holds the slot"
    s.done(B)
    s.done(B)
    assert handed(s) == ["c1"]


def test_without_preemption_a_high_launch_waits_for_a_low_piece() -> None:
    s = schedule(1, A, B)
    assert s.claim(A, "a1", 0)
    assert not s.claim(B, "b1", 1)


def test_with_preemption_a_low_launch_does_not_follow_its_jobs_high_piece_past_the_slots() -> None:
    s: Schedule[str] = Schedule(1, preempts=True)
    s.open(A)
    s.open(B)
    for job, what, stream in ((A, "a1", 0), (B, "b1", 1), (B, "b2", 0)):
        s.submit(job, what, stream)
    assert handed(s) == ["b1"]
    s.done(B)
    assert handed(s) == ["a1"]
    assert handed(s) == []


ACTIONS = st.one_of(
    st.tuples(st.just("submit"), st.sampled_from([A, B, C]), st.sampled_from([None, 0, 0, 1])),
    st.tuples(st.just("done"), st.sampled_from([A, B, C]), st.none()),
    st.tuples(st.just("drop"), st.sampled_from([A, B, C]), st.none()),
)


@given(parallel=st.integers(1, 3), preempts=st.booleans(), actions=st.lists(ACTIONS, max_size=60))
def test_whatever_happens_the_bounds_and_orders_hold(
    parallel: int, preempts: bool, actions: list[tuple[str, JobId, int | None]]
) -> None:
    s: Schedule[tuple[JobId, int, int | None]] = Schedule(parallel, preempts=preempts)
    out: dict[JobId, list[tuple[JobId, int, int | None]]] = {job: [] for job in (A, B, C)}
    waiting: dict[JobId, list[tuple[JobId, int, int | None]]] = {job: [] for job in (A, B, C)}
    for job in out:
        s.open(job)

    for number, (action, job, stream) in enumerate(actions):
        if action == "submit":
            waiting[job].append((job, number, stream))
            s.submit(job, (job, number, stream), stream)
        elif action == "done":
            finished = s.done(job)
            assert finished == (out[job].pop(0) if out[job] else None)
        else:
            assert s.drop(job) == out[job] + waiting[job]
            out[job], waiting[job] = [], []
            s.open(job)
        for owner, what in s.hand_over():
            assert what == waiting[owner].pop(0), "a job's commands keep their order"
            out[owner].append(what)
        running = [queue[0][2] for queue in out.values() if queue and queue[0][2] is not None]

        def in_the_way(stream: int, running: list[int | None] = running) -> int:
            return sum(1 for other in running if other is not None and (not preempts or other >= stream))

        assert s.pieces_running == len(running)
        assert len(running) <= parallel or preempts
        assert all(running.count(stream) <= parallel for stream in (0, 1))
        for queue in out.values():
            assert len(queue) <= 2
            assert len(queue) == 1 or all(stream is not None for _, _, stream in queue)
        idle_launches = [q[0][2] for j, q in waiting.items() if q and not out[j] and q[0][2] is not None]
        for stream in idle_launches:
            assert stream is not None
            assert in_the_way(stream) >= parallel, "a launch waits although a slot is free"
        assert not [q for j, q in waiting.items() if q and not out[j] and q[0][2] is None]
