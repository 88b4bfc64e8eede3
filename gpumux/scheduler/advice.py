"""What `gpumux jobs explain` says first: the verdict, its causes, and what to do about it, with commands to paste.

`explain.py` has all that is known; this chooses what matters. A high job is judged by its promise, a low one by whether
it runs. Commands name jobs by their whole id, for which the daemon puts the short one.
"""

from __future__ import annotations

from typing import NamedTuple

from gpumux.scheduler import explain
from gpumux.scheduler.guard.decisions import Hold
from gpumux.scheduler.guard.guard import SlowdownGuard
from gpumux.scheduler.guard.high_job import HighJob
from gpumux.scheduler.jobs import ScheduledJob
from gpumux.scheduler.report import held_steps, too_long
from gpumux.scheduler.state import SchedulerState
from gpumux.scheduler.verdict import slowdown_figures, verdict
from gpumux.types import JobId, Priority
from gpumux.wording import counted, listed

MOST_CULPRITS = 3
HELD_MATTERS = 0.1  # of a low job's life: if it was held for less, that is not why it is slow
LEAST_SHOWN = 0.0005  # high seconds lost in a second: less reads as 0.000
MATTERS = 0.1  # of what a high job may lose beside low work: a low job that costs it less is not the cause


class Remedy(NamedTuple):
    """Something to do, and the command that does it ("": none does)."""

    text: str
    command: str = ""


class Advice(NamedTuple):
    """`verdict`: a line. `causes`: sentences, the most important first. `remedies`: what can be done, the gentlest
    first."""

    verdict: str
    causes: list[str]
    remedies: list[Remedy]


def advise(state: SchedulerState, job: ScheduledJob) -> Advice:
    """How the job fares, why, and what to do about it."""
    guard = state.guard
    if job.paused:
        return Advice("paused", [], [Remedy("let it go on", f"gpumux jobs resume {job.id}")])
    if guard is None:
        why = f"Policy {state.config.policy} has no guard: nothing is measured and no job is held for another."
        better = Remedy("keep promises: restart the daemon with the default policy", "gpumux serve --policy guarded")
        return Advice(explain.doing(state, job), [why], [better] if job.priority is Priority.HIGH else [])
    return _high(state, guard, job) if job.priority is Priority.HIGH else _low(state, guard, job)


# ---- High jobs: is the promise kept, and which neighbour costs most?


def _high(state: SchedulerState, guard: SlowdownGuard, job: ScheduledJob) -> Advice:
    high = guard.high_jobs.get(job.id)
    if high is None or high.costs is None:
        return Advice("no step has run yet, so nothing is known of its speed", [], [])
    figures = slowdown_figures(high)
    line = verdict(figures, state.now)
    if figures["kept"] is not False:
        return Advice(line, [], [])
    known = explain.neighbours(state, high)
    culprits = [each for each in known if each.loss >= MATTERS * high.budget.rate_limit][:MOST_CULPRITS]
    others = [explain.name_of(state, other) for other in guard.high_jobs if other != job.id and other in state.jobs]
    causes = [each.sentence for each in culprits] or [_harmless(high, known)]
    causes += explain.outlier(high) + explain.by_itself(high, others)
    return Advice(line, causes, _against(state, high, list(dict.fromkeys(j for each in culprits for j in each.jobs))))


def _harmless(high: HighJob, known: list[explain.Neighbour]) -> str:
    """That the low jobs of which something is known are not the cause."""
    most = max((each.loss for each in known), default=0.0)
    if most < LEAST_SHOWN:
        return "No low job is known to cost it anything."
    return (
        f"No low job is known to cost it more than {most:.3f} s a second, of the {high.budget.rate_limit:.3f} that it"
        " may lose: the cause lies elsewhere."
    )


def _against(state: SchedulerState, high: HighJob, low: list[JobId]) -> list[Remedy]:
    """What to do about a broken promise that these low jobs cost."""
    if not low:
        return [
            Remedy("see what ran when its steps were slow", "gpumux trace -o trace.json"),
            Remedy("see what else the machine does, and what limits it", "gpumux doctor"),
        ]
    found = []
    if (program := _hash(high)) and state.hidden(high.job.id) is None:
        found.append(Remedy("see which operators lose most", f"gpumux interference --program {program} --ranges"))
    mine = [each for each in low if state.hidden(each) is None]
    for each in mine[:MOST_CULPRITS]:
        found.append(Remedy(f"hold {explain.name_of(state, each)} back", f"gpumux jobs pause {each}"))
    if more := mine[MOST_CULPRITS:]:
        found.append(Remedy(f"and, if that is not enough, {listed([explain.name_of(state, each) for each in more])}"))
    if others := [explain.name_of(state, each) for each in low if each not in mine]:
        whose, what = ("owners", "them") if len(others) > 1 else ("owner", "it")
        found.append(Remedy(f"have the {whose} of {listed(others)}, or an operator, hold {what} back"))
    found.append(Remedy("have low pieces shorter: submit them with smaller batches or microbatches="))
    return found


def _hash(high: HighJob) -> str:
    """The beginning of the content hash of the program that is judged, as `gpumux interference` takes it; "" if the
    device gives none."""
    assert high.costs is not None
    return next((each.content_hash[:12] for each in high.job.programs.values() if each.key == high.costs.key), "")


# ---- Low jobs: does it run, and if not, for which job is it held?


def _low(state: SchedulerState, guard: SlowdownGuard, job: ScheduledJob) -> Advice:
    hold, often = guard.decisions.holds.current.get(job.id), _held_so_far(state, guard, job)
    if job.blocked() or hold is None:
        line = explain.doing(state, job) if job.blocked() else explain.turn(state, guard, job)
        room = Remedy(
            "give it more room: submit the high job with a max_slowdown that is higher, or this one with a smaller"
            " batch or microbatches="
        )
        return Advice(line, often, [room] if often else [])
    line = f"held for {explain.lasted(state.now - hold.since)}, for job {explain.name_of(state, hold.high_id)}"
    reason = explain.held(state, hold)
    causes = [f"{reason[0].upper()}{reason[1:]}.", *often]
    remedies = _for_held(state, hold)
    long = too_long(guard, job)
    if long is not None:
        piece, fits = long
        causes.append(
            f"Its pieces are too long: the next takes {piece * 1e3:.1f} ms and could not run for"
            f" {counted(held_steps(guard, job), 'step')} of that job; about {fits * 1e3:.1f} ms would fit."
        )
        remedies.insert(0, Remedy("have its pieces shorter: submit it with a smaller batch or microbatches="))
    return Advice(line, causes, remedies)


def _held_so_far(state: SchedulerState, guard: SlowdownGuard, job: ScheduledJob) -> list[str]:
    """For which part of its life the job was held and why, if that is much: at the moment it may just run."""
    totals, life = guard.decisions.holds.job_seconds(job, state.now), state.now - job.opened
    whole = sum(totals.values())
    if whole <= HELD_MATTERS * life:
        return []
    parts = ", ".join(f"{reason} {seconds / life:.0%}" for reason, seconds in list(totals.items())[:MOST_CULPRITS])
    return [f"Since it opened {explain.lasted(life)} ago it was held for {whole / life:.0%} of the time: {parts}."]


def _for_held(state: SchedulerState, hold: Hold) -> list[Remedy]:
    """What to do for a low job that is held."""
    if hold.reason in ("calibration", "learning"):
        return [Remedy("wait: this ends by itself after some steps of the high job")]
    theirs = state.hidden(hold.high_id)
    if theirs is not None:
        return [Remedy(f"ask the owner of {theirs} for a higher max_slowdown, which gives low work more room")]
    return [
        Remedy("see how the job fares that it is held for", f"gpumux jobs explain {hold.high_id}"),
        Remedy("give low work more room: submit that job with a max_slowdown that is higher"),
        Remedy("if that job need not be important, make it low", f"gpumux jobs priority {hold.high_id} low"),
    ]
