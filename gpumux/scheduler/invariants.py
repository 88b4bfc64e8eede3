"""What must hold after every event. Each check raises AssertionError and says what it found."""

from __future__ import annotations

from collections import Counter
from math import isclose

from gpumux.scheduler.fair_queue import MIN_COST_S, FairQueue
from gpumux.scheduler.jobs import Job, JobState, Step
from gpumux.scheduler.state import CoreState
from gpumux.scheduler.windows import Launch, Window
from gpumux.types import Priority


def check(core: CoreState) -> None:
    _check_sessions(core)
    core.ledger.check(core.jobs)
    for job in core.jobs.values():
        _check_job(job)
    for priority in Priority:
        _check_class(core, priority)
    _check_awaited(core)
    if core.policy is not None:
        choice = core.policy.choose(core.board, core.now)
        assert choice is None, f"room was left unused: job {choice.job.id} could launch"


def _check_sessions(core: CoreState) -> None:
    for session in core.sessions.values():
        mine = {job.id for job in core.jobs.values() if job.session == session.id}
        assert session.jobs == mine, f"session {session.id} lists jobs {session.jobs}, owns {mine}"
    for job in core.jobs.values():
        orphan = job.session not in core.sessions and job.state is not JobState.CLOSING
        assert not orphan, f"job {job.id} outlives its session"
        assert core.leaving is None or job.state is JobState.CLOSING, f"job {job.id} is open while leaving"
    assert not core.touched, "an event left its notes behind"


def _check_job(job: Job) -> None:
    where = f"job {job.id}"
    steps = list(job.steps())
    ids = [step.id for step in steps]
    assert ids == sorted(set(ids)), f"{where}: steps out of order {ids}"
    assert not ids or ids[-1] <= job.last_step, f"{where}: step {ids[-1]} is newer than the newest"
    assert job.inflight == len(steps) <= job.spec.max_inflight, f"{where}: {job.inflight} in flight, has {len(steps)}"
    assert job.transfers == len(job.all_transfers()), f"{where}: counts {job.transfers} transfers"
    if job.state is JobState.CLOSING:
        assert not job.busy(), f"{where}: closing with work unanswered"
        return
    for step in job.running.values():
        assert step.done < step.launched == len(step.pieces), f"{where}: step {step.id} is not running"
    for index, item in enumerate(job.queue):
        if isinstance(item, Step):
            assert job.programs.get(item.program.id) is item.program, f"{where}: step {item.id} lost its program"
            begun = index == 0 and 0 < item.launched < len(item.pieces)
            assert item.launched == 0 or begun, f"{where}: step {item.id} began out of turn"
    beside = job.transfer is not None and (job.outstanding or job.running)
    assert not beside, f"{where}: a transfer runs beside launches"
    out = sum(step.launched - step.done for step in steps)
    assert out == job.outstanding, f"{where}: {job.outstanding} outstanding, its steps say {out}"
    assert job.state is JobState.OPEN or job.busy(), f"{where}: drained but not closed"


def _check_awaited(core: CoreState) -> None:
    guard = core.guard
    if guard is None:
        return
    for track in guard.tracks.values():
        low = track.after
        if low is not None:
            listed = low in guard.awaited.jobs and track in (low.awaited_by or ())
            assert listed, f"job {track.job.id} waits for job {low.id}, which does not know it"
            assert low.priority is Priority.LOW, f"job {track.job.id} waits for job {low.id}, which is no low one"
    for low in guard.awaited.jobs:
        assert core.jobs.get(low.id) is low, f"job {low.id} is awaited, and gone"
        tracks = low.awaited_by or []
        assert tracks, f"job {low.id} is awaited by none"
        assert all(t.after is low and guard.tracks.get(t.job.id) is t for t in tracks), (
            f"job {low.id} is awaited by others"
        )


def _check_class(core: CoreState, priority: Priority) -> None:
    board, window = core.board, core.board.windows[priority]
    jobs = [job for job in core.jobs.values() if job.priority is priority]
    _check_window(window, jobs)
    active = [j for j in jobs if j.state is not JobState.CLOSING and not j.paused and j.busy()]
    assert board.active(priority) == len(active), f"{board.active(priority)} active, should be {len(active)}"
    board.ready[priority].check([job for job in jobs if not job.blocked()])
    if isinstance(board.ready[priority], FairQueue):
        for job in jobs:
            owed = sum(max(la.predicted, MIN_COST_S) for la in window.launches.values() if la.job is job) / job.weight
            assert isclose(job.pending, owed, rel_tol=1e-6, abs_tol=1e-9), f"job {job.id}: {job.pending} not {owed}"


def _check_window(window: Window, jobs: list[Job]) -> None:
    launches = list(window.launches.values())
    total = sum(launch.predicted for launch in launches)
    assert isclose(window.seconds, total, rel_tol=1e-6, abs_tol=1e-9), f"window holds {window.seconds}, not {total}"
    counts = Counter(launch.job.id for launch in launches)
    held = {job.id: job.outstanding for job in jobs if job.outstanding}
    assert counts == held, f"launches by job {dict(counts)}, jobs say {held}"
    last: dict[str, tuple[int, int]] = {}
    for launch in launches:
        _check_room(launch)
        at = (launch.step.id, launch.piece)
        assert last.get(launch.job.id, (-1, -1)) < at, f"job {launch.job.id}: launched {at} out of order"
        last[launch.job.id] = at


def _check_room(launch: Launch) -> None:
    count, seconds, limit = launch.count_before, launch.seconds_before, launch.limit
    assert count < limit.launches, f"launch {launch.id} made with {count} of {limit.launches} out"
    fits = count == 0 or seconds + launch.predicted <= limit.seconds
    assert fits, f"launch {launch.id} made with {seconds} s of {limit.seconds} s out"
