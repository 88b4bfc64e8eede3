"""What must hold after every event. Each check raises AssertionError and says what it found."""

from __future__ import annotations

from collections import Counter
from math import isclose

from gpumux.scheduler.jobs import JobState, JobStep, ScheduledJob
from gpumux.scheduler.state import SchedulerState
from gpumux.scheduler.windows import MIN_COST_S, FairQueue, Outstanding, Window
from gpumux.types import JobId, Priority


def check(state: SchedulerState) -> None:
    _check_sessions(state)
    state.ledger.check(state.jobs)
    for job in state.jobs.values():
        _check_job(job)
    for priority in Priority:
        _check_class(state, priority)
    _check_awaited(state)
    _check_guard(state)
    if state.policy is not None:
        choice = state.policy.choose(state.windows, state.now)
        assert choice is None, f"room was left unused: job {choice.job.id} could launch"


def contradicting(state: SchedulerState) -> list[JobId]:
    """The jobs that fail the checks of a job by itself, or whose next piece can't be told."""
    found = []
    for job in state.jobs.values():
        try:
            _check_job(job)
            if not job.blocked():
                job.next_seconds()
        except Exception:  # noqa: BLE001 - what is inconsistent may fail in any way
            found.append(job.id)
    return found


def _check_sessions(state: SchedulerState) -> None:
    for session in state.sessions.values():
        mine = {job.id for job in state.jobs.values() if job.session == session.id}
        assert session.jobs == mine, f"session {session.id} lists jobs {session.jobs}, owns {mine}"
    for job in state.jobs.values():
        orphan = job.session not in state.sessions and job.state is not JobState.CLOSING
        assert not orphan, f"job {job.id} outlives its session"
        assert state.leaving is None or job.state is JobState.CLOSING, f"job {job.id} is open while leaving"
    assert not state.changed_jobs, "an event left its notes behind"
    for uid, arena in state.ledger.arenas.items():
        ascending = [job.id for job in arena.jobs.values() if job.ascends()]
        assert len(ascending) < 2, f"jobs {ascending} of user {uid} ascend in one arena"
        assert arena.held() <= arena.nbytes, f"jobs of user {uid} hold {arena.held()} bytes of {arena.nbytes}"
        mine = {job.id for job in state.jobs.values() if job.spec.arena is not None and job.peer.uid == uid}
        assert arena.jobs.keys() == mine, f"user {uid} shares an arena among {set(arena.jobs)}, not {mine}"


def _check_job(job: ScheduledJob) -> None:
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
        if isinstance(item, JobStep):
            assert job.programs.get(item.program.id) is item.program, f"{where}: step {item.id} lost its program"
            begun = index <= (item.wave is not None) and 0 < item.launched < len(item.pieces)
            assert item.launched == 0 or begun, f"{where}: step {item.id} began out of turn"
    head = job.queue[0] if job.queue else None
    if isinstance(head, JobStep) and head.gated:
        assert head.met == len(head.gated) or head.launched <= head.gated[head.met], f"{where}: a gate was passed"
        assert head.met == 0 or head.launched >= head.gated[head.met - 1], f"{where}: peers came too early"
    _check_waves(job, where)
    beside = job.transfer is not None and (job.outstanding or job.running)
    assert not beside, f"{where}: a transfer runs beside launches"
    out = sum(step.launched - step.done for step in steps)
    launches = f"{where}: {job.outstanding} launches outstanding, its steps say {out} pieces"
    assert out >= job.outstanding, launches
    assert job.outstanding or not out, launches
    assert job.state is JobState.OPEN or job.busy(), f"{where}: drained but not closed"


def _check_waves(job: ScheduledJob, where: str) -> None:
    """The steps of waves that are under way fit into the arena, and one of them at most has its highest pieces yet to
    come."""
    begun = [(step, step.wave) for step in job.steps() if step.wave is not None and step.launched]
    lanes = [lease.lane for _, lease in begun]
    if len(set(lanes)) < 2:
        return
    (older, ahead), (younger, lease) = begun[:2]
    assert len(begun) == 2, f"{where}: {len(begun)} steps of its waves are under way"
    assert ahead.descends(older.launched), f"{where}: both waves ascend"
    assert younger.launched <= lease.tail, f"{where}: a wave passed its tail before the step before it had ended"
    held = ahead.held(older.launched, older.done) + lease.held(younger.launched, younger.done)
    assert held <= max(ahead.arena, lease.arena), f"{where}: its waves hold {held} bytes of {lease.arena}"


def _check_awaited(state: SchedulerState) -> None:
    guard = state.guard
    if guard is None:
        return
    for high in guard.high_jobs.values():
        low = high.waits_for
        if low is not None:
            listed = low in guard.awaited_steps.jobs and high in guard.awaited_steps.waiting.get(low.id, ())
            assert listed, f"job {high.job.id} waits for job {low.id}, which does not know it"
            assert low.priority is Priority.LOW, f"job {high.job.id} waits for job {low.id}, which is no low one"
    for low in guard.awaited_steps.jobs:
        assert state.jobs.get(low.id) is low, f"job {low.id} is awaited, and gone"
        high_jobs = guard.awaited_steps.waiting.get(low.id, [])
        assert high_jobs, f"job {low.id} is awaited by none"
        assert all(high.waits_for is low and guard.high_jobs.get(high.job.id) is high for high in high_jobs), (
            f"job {low.id} is awaited by others"
        )


def _check_guard(state: SchedulerState) -> None:
    """The guard follows exactly the launches and steps there are."""
    guard = state.guard
    if guard is None:
        return
    followed, out = list(guard.view.low_launches), list(state.windows.low.launches)
    assert followed == out, f"the guard follows low launches {followed}, out are {out}"
    for job_id, high in guard.high_jobs.items():
        begun = {step.id for step in state.jobs[job_id].steps() if step.launched}
        assert high.step_costs.keys() == begun, (
            f"job {job_id}: the guard follows steps {set(high.step_costs)}, not {begun}"
        )
        if high.parked:
            assert state.jobs[job_id].parked(), f"job {job_id}: the guard has it wait for peers"
            assert high in guard.view.idle_jobs, f"job {job_id} waits for peers, and is not idle"


def _check_class(state: SchedulerState, priority: Priority) -> None:
    windows, window = state.windows, state.windows.by_class[priority]
    jobs = [job for job in state.jobs.values() if job.priority is priority]
    _check_window(window, jobs)
    active = [j for j in jobs if j.state is not JobState.CLOSING and not j.paused and j.busy() and not j.parked()]
    assert windows.active(priority) == len(active), f"{windows.active(priority)} active, should be {len(active)}"
    windows.ready[priority].check([job for job in jobs if not job.blocked()])
    if isinstance(windows.ready[priority], FairQueue):
        for job in jobs:
            owed = sum(max(la.predicted, MIN_COST_S) for la in window.launches.values() if la.job is job) / job.weight
            assert isclose(job.pending, owed, rel_tol=1e-6, abs_tol=1e-9), f"job {job.id}: {job.pending} not {owed}"


def _check_window(window: Window, jobs: list[ScheduledJob]) -> None:
    launches = list(window.launches.values())
    total = sum(launch.predicted for launch in launches)
    assert isclose(window.seconds, total, rel_tol=1e-6, abs_tol=1e-9), f"window holds {window.seconds}, not {total}"
    counts = Counter(launch.job.id for launch in launches)
    held = {job.id: job.outstanding for job in jobs if job.outstanding}
    assert counts == held, f"launches by job {dict(counts)}, jobs say {held}"
    for job in jobs:
        if job.state is not JobState.CLOSING:
            pieces = sum(launch.pieces for launch in launches if launch.job is job)
            out = sum(step.launched - step.done for step in job.steps())
            assert pieces == out, f"job {job.id}: {pieces} pieces outstanding, its steps say {out}"
    last: dict[tuple[str, int | None], tuple[int, int]] = {}
    for launch in launches:
        _check_room(launch)
        at = (launch.step.id, launch.piece)
        lane = None if launch.step.wave is None else launch.step.wave.lane  # waves take turns
        assert last.get((launch.job.id, lane), (-1, -1)) < at, f"job {launch.job.id}: launched {at} out of order"
        last[launch.job.id, lane] = at


def _check_room(launch: Outstanding) -> None:
    count, seconds, limit = launch.count_before, launch.seconds_before, launch.limit
    assert count < limit.launches, f"launch {launch.id} made with {count} of {limit.launches} out"
    fits = count == 0 or seconds + launch.predicted <= limit.seconds
    assert fits, f"launch {launch.id} made with {seconds} s of {limit.seconds} s out"
