"""Why a job is slow or held, in sentences: which piece, which operators, which other job, since when, until when.

The sentences say what the scheduler would do now, what it measured, and for how long something has been so; only the
history has seconds on the scheduler's clock. Begin with `explain`, and with `story` for what happened to a job and its
steps. `advice.py` says in brief what matters and what to do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple

from gpumux.scheduler.events import Event
from gpumux.scheduler.guard.bans import Ban
from gpumux.scheduler.guard.costs import MAX_RATE
from gpumux.scheduler.guard.decisions import REASONS, Hold
from gpumux.scheduler.guard.guard import SlowdownGuard
from gpumux.scheduler.guard.high_job import HighCosts, HighJob
from gpumux.scheduler.jobs import JobStep, ScheduledJob
from gpumux.scheduler.report import held_steps, too_long
from gpumux.scheduler.state import Record, SchedulerState
from gpumux.scheduler.verdict import slowdown_figures, verdict
from gpumux.types import JobId, PieceDone, Priority, StepId
from gpumux.wording import age, counted, listed

OUTLIER = 8.0  # times what a step may lose on average
SUSPENDED = 0.1  # part of the time on the device for which pieces stand still before it is mentioned
NOTEWORTHY = 0.02  # part of the steps without low work that lose much before it is mentioned
MOST_BANS = 8
NAMES = 3  # operators of a range that are named


def gone(state: SchedulerState, job: JobId) -> list[str]:
    """Sentences about a job that has ended, or never was: the end of its history."""
    last = story(state, job)[-1:]
    return [f"There is no job {job}.", *[f"The last that is known of it: {line}" for line in last]]


def explain(state: SchedulerState, job: ScheduledJob) -> list[str]:
    """Sentences about a job, the most important first."""
    subject = f"Job {name_of(state, job.id)} ({job.priority.name.lower()})"
    lines = [f"{subject} {doing(state, job)}.", *_longest(state, job), *_peers(job), *suspended(job)]
    guard = state.guard
    if guard is None:
        return [
            *lines,
            f"Policy {state.config.policy} has no guard: nothing is measured and no job is held for another.",
        ]
    if job.priority is Priority.HIGH:
        lines += _high(state, guard, job)
    else:
        lines += _low(state, guard, job)
    return lines + _bans(state, guard, job)


class HoldClause:
    """Why a low job was held, put into words only when the history is read."""

    __slots__ = ("_hold", "_state")

    def __init__(self, state: SchedulerState, hold: Hold) -> None:
        self._state, self._hold = state, hold

    def __format__(self, spec: str) -> str:
        return held(self._state, self._hold)


def held(state: SchedulerState, hold: Hold) -> str:
    """Why a low job is held, as a clause."""
    return _REASONS[hold.reason](state, hold)


def doing(state: SchedulerState, job: ScheduledJob) -> str:
    """What the job does or waits for, as a sentence without its subject and stop."""
    blocked, out = job.blocked(), counted(sum([step.launched - step.done for step in job.steps()]), "piece")
    if blocked == "empty":
        what = "has nothing queued" + (f", and {out} on the device" if job.outstanding else "")
    elif blocked == "program":
        what = "waits for its program to be ready"
    elif blocked == "transfer":
        what = "waits for a transfer of its state"
    elif blocked == "peers":
        what = f"waits for its peers: {_collective(state, job)}" + (
            f"; {out} before it on the device" if job.outstanding else ""
        )
    elif blocked == "wave":
        what = f"waits for its other wave to give memory back, or to end; {out} on the device"
    elif blocked == "memory":
        what = f"waits for memory: {_arena(state, job)}"
    elif blocked == "changing":
        what = "is about to change its priority"
    elif blocked:
        what = f"is {blocked}"
    else:
        what = f"has work queued and {out} on the device"
    return f"{what}; {counted(job.steps_done, 'step')} done"


def _arena(state: SchedulerState, job: ScheduledJob) -> str:
    """What the other jobs hold of the arena that a job shares, and whether one of them stands still."""
    assert job.arena is not None
    holding = [other for other in job.arena.others(job) if other.arena_bytes()]
    who = [
        f"job {name_of(state, other.id)} holds {other.arena_bytes() / 2**20:.0f} MiB"
        + (", and is paused" if other.paused else "")
        for other in holding
    ]
    return f"{' and '.join(who) or 'another job comes first'}, of {job.arena.nbytes / 2**20:.0f} MiB that they share"


def _collective(state: SchedulerState, job: ScheduledJob) -> str:
    """The collective that the job's step comes to, and what it stands before."""
    step = job.head_step()
    after = _operators(state, job.id, step.bounds[step.launched : step.launched + 2], step.program.key)
    return f"collective {step.met + 1} of {len(step.gated)} of its step, before piece {step.launched} ({after})"


def _longest(state: SchedulerState, job: ScheduledJob) -> list[str]:
    """How a step is cut, and its longest piece."""
    ready = [program for program in job.programs.values() if program.ready]
    if not ready:
        return []
    step = job.queue[0] if job.queue and isinstance(job.queue[0], JobStep) else None
    program = step.program if step is not None and step.program.ready else ready[-1]
    high = state.guard.high_jobs.get(job.id) if state.guard is not None else None
    costs = high.costs if high is not None else None
    known: Sequence[float] = program.pieces  # as the device predicts them
    if costs is not None and (costs.key, costs.bounds) == (program.key, program.bounds):
        known = costs.solo_s  # as they were measured
    seconds, piece = max((each, index) for index, each in enumerate(known))
    return [
        f"A step of it is cut into {len(program.pieces)}; the longest, piece {piece}"
        f" ({_operators(state, job.id, program.bounds[piece : piece + 2], program.key)}), takes {seconds * 1e3:.3f} ms"
        " alone."
    ]


def _peers(job: ScheduledJob) -> list[str]:
    """Which rank of its gang it is, and what waiting for the others took."""
    gang = job.spec.gang
    if gang is None:
        return []
    return [
        f"It is rank {gang.rank} of {gang.ranks}. It waited {job.peers_s:.3f} s for other ranks and their data, beside"
        f" {job.device_s:.3f} s on the device; it sent {job.sent_bytes / 1e6:.1f} MB and received"
        f" {job.received_bytes / 1e6:.1f}."
    ]


# ---- high jobs


def _high(state: SchedulerState, guard: SlowdownGuard, job: ScheduledJob) -> list[str]:
    high = guard.high_jobs.get(job.id)
    if high is None or high.costs is None:
        return ["No step of it has run yet, so nothing is known of its speed."]
    found = slowdown_figures(high)
    lines = []
    if found["slowdown"] is None:
        lines.append("Its speed alone is still being measured: low work is held meanwhile.")
    else:
        lines.append(
            f"Its promise: {verdict(found, state.now)}. A step takes {high.solo_step() * 1e3:.3f} ms alone; the mean is"
            f" over that, and the tail is what 99 in 100 steps stay within. {high.over} of all its"
            f" {counted(high.steps, 'step')} took more than what is promised on average."
        )
    if high.arrivals.at_random:
        lines.append(
            "Its steps come at random: low work runs between them, and what may delay one too much is launched alone,"
            " as long as hardly any step is."
        )
    elif not high.trust.trusted:
        lines.append(
            "Its steps came when none was expected, and lost too much to low work that was out: the pauses there were"
            " between them are not relied on."
        )
    others = [name_of(state, other) for other in guard.high_jobs if other != job.id and other in state.jobs]
    lines += by_itself(high, others) + outlier(high)
    lines += [each.sentence for each in neighbours(state, high)[:MOST_BANS]]
    if high.host_wait > 0.0 and high.steps:
        lines.append(
            f"The device waited {high.host_wait * 1e3:.3f} ms in all for the host to hand its pieces over "
            f"({high.host_wait / high.steps * 1e6:.0f} us a step)."
        )
    return lines


class Neighbour(NamedTuple):
    """What one low program costs a high job: `loss`, high seconds lost in a second of a launch, and a sentence. `jobs`:
    those that have the program now."""

    jobs: tuple[JobId, ...]
    loss: float
    sentence: str


def neighbours(state: SchedulerState, high: HighJob) -> list[Neighbour]:
    """The low programs that cost the job something, the most expensive first."""
    costs = high.costs
    assert costs is not None
    found = []
    for key, low_costs in sorted(costs.by_low.items(), key=lambda item: -item[1].typical.mean):
        sampled = [(each.mean, piece) for piece, each in enumerate(low_costs.ranges) if each.count]
        if not sampled or low_costs.typical.mean <= 0.0:
            continue
        low = [j for j in state.jobs.values() if j.priority is Priority.LOW]
        names = [name for j in low for name in _running(state, j, key.program)]
        worst, piece = max(sampled)
        share = "" if key.share == 1.0 else f" on {key.share:.2f} of the device"
        where = _range(state, high.job.id, costs, piece)
        most = f"most in {where}, which {_takes(_ratio(worst))}" if worst > 0.0 else "in no range more than in others"
        sentence = (
            f"Beside {listed(names) or 'a job that is gone'}{share} it loses"
            f" {low_costs.typical.mean:.3f} s a second;"
            f" {most}."
        )
        jobs = tuple(j.id for j in low if any(each.key == key.program for each in j.programs.values()))
        found.append(Neighbour(jobs, low_costs.typical.mean, sentence))
    return found


def _ratio(rate: float) -> float:
    """How many times as long a range takes that loses `rate` of each second."""
    return 1.0 / (1.0 - min(max(rate, 0.0), MAX_RATE))


def _takes(ratio: float) -> str:
    """In words; the largest ratio that is measured stands for any."""
    if ratio >= 0.999 / (1.0 - MAX_RATE):
        return "all but stands still meanwhile"
    return f"takes {ratio:.2f} times as long beside it"


def _running(state: SchedulerState, job: ScheduledJob, key: str) -> list[str]:
    """The job's name for each of its programs that `key` stands for, with the program's number where it has others."""
    name, several = name_of(state, job.id), len(job.programs) > 1
    return [f"{name} (its program {p.id})" if several else name for p in job.programs.values() if p.key == key]


# ---- low jobs


def _low(state: SchedulerState, guard: SlowdownGuard, job: ScheduledJob) -> list[str]:
    lines = []
    hold = guard.decisions.holds.current.get(job.id)
    if hold is not None and not job.blocked():
        lines.append(f"It has been held for {lasted(state.now - hold.since)}: {held(state, hold)}.")
    elif not job.blocked():
        lines.append(turn(state, guard, job))
    totals = guard.decisions.holds.job_seconds(job, state.now)
    if totals:
        by_reason = ", ".join(f"{reason} {seconds * 1e3:.3f} ms" for reason, seconds in totals.items())
        lines.append(f"Since it opened it was held for {sum(totals.values()) * 1e3:.3f} ms in all: {by_reason}.")
    asked = [program.cut_target_s for program in job.programs.values() if program.cut_target_s is not None]
    if asked and guard.cutting.high in state.jobs:
        lines.append(
            f"The device is asked to cut its steps into pieces of about {asked[0] * 1e3:.3f} ms, not"
            f" {guard.cutting.usual_s * 1e3:.3f}: a step of job {name_of(state, guard.cutting.high)} could hardly bear"
            " longer ones."
        )
    long = too_long(guard, job)
    if long is not None:
        piece, fits = long
        lines.append(
            f"Its pieces are too long: the next takes {piece * 1e3:.3f} ms alone and could not run for"
            f" {counted(held_steps(guard, job), 'step')}; about {fits * 1e3:.3f} ms would fit. Shorter operators (a"
            " smaller batch, or more microbatches) may let it run."
        )
    return lines


def turn(state: SchedulerState, guard: SlowdownGuard, job: ScheduledJob) -> str:
    """What a low job waits for if it is not held itself."""
    before = next(iter(guard.decisions.holds.current.items()), None)
    if before is None or job.outstanding:
        return "It is not held: it runs as soon as it is its turn and the low window has room."
    other, hold = before
    return (
        "It waits for its turn: those that were asked before it are held"
        f" ({len(guard.decisions.holds.current)} low jobs), "
        f"{name_of(state, other)} for {lasted(state.now - hold.since)}: {held(state, hold)}."
    )


def _for(state: SchedulerState, hold: Hold) -> str:
    return f"job {name_of(state, hold.high_id)}"


def _where(state: SchedulerState, hold: Hold) -> str:
    guard = state.guard
    high = guard.high_jobs.get(hold.high_id) if guard is not None else None
    if high is None or high.costs is None or not 0 <= hold.piece < len(high.costs.solo_s):
        return f"job {name_of(state, hold.high_id)}"
    return f"{_range(state, hold.high_id, high.costs, hold.piece)} of job {name_of(state, hold.high_id)}"


def _ban(state: SchedulerState, hold: Hold) -> str:
    ban = hold.ban
    assert ban is not None
    return (
        f"it would run into {_banned_range(state, ban)} of job {name_of(state, ban.high)}:"
        f" that range {_takes(ban.ratio)} ({counted(ban.samples, 'sample')}); banned {_while(state, ban)}"
    )


def _while(state: SchedulerState, ban: Ban) -> str:
    """For how long, and for how long still. An expired ban stays in force until a launch has shown whether the pair
    still hurts."""
    so_far = f"for {lasted(state.now - ban.since)} so far"
    if ban.until > state.now:
        return f"{so_far} and {lasted(ban.until - state.now)} more"
    gone = lasted(state.now - ban.until)
    return f"{so_far}, expired {gone} ago: in force until a launch has been tried beside it"


def lasted(seconds: float) -> str:
    """A time that has passed or will: milliseconds below a second."""
    return f"{seconds * 1e3:.1f} ms" if seconds < 1.0 else age(seconds)


def _gap(state: SchedulerState, hold: Hold) -> str:
    again = (
        f"asked again {lasted(hold.until - hold.since)} after it began to be held"
        if hold.until < inf
        else "asked again when low work that is out has ended"
    )
    when = "is expected before it could end"
    if not hold.arrival_expected:
        high = state.guard.high_jobs.get(hold.high_id) if state.guard is not None else None
        at_random = high is not None and high.step_arrivals.at_random
        when = f"may come at any time, as steps came {'at random' if at_random else 'when none was expected'}"
    return f"the next step of {_for(state, hold)} {when}, and would be delayed too long; {again}"


def _tail(state: SchedulerState, hold: Hold) -> str:
    return (
        f"beside {_where(state, hold)} it would cost the step that runs more than one step may lose"
        f"{_limit(state, hold)}, until that step ends"
    )


def _limit(state: SchedulerState, hold: Hold) -> str:
    high = state.guard.high_jobs.get(hold.high_id) if state.guard is not None else None
    return f" ({high.budget.limit * 1e3:.3f} ms)" if high is not None else ""


_REASONS: dict[str, Callable[[SchedulerState, Hold], str]] = {
    "calibration": lambda state, hold: (
        f"{_for(state, hold)} runs a step alone, so that its speed is known; until that ends"
    ),
    "learning": lambda state, hold: (
        f"what it costs {_for(state, hold)} is not known yet, and is tried one launch at a time"
    ),
    "ban": _ban,
    "price": lambda state, hold: (
        f"beside {_where(state, hold)} it costs more than elsewhere; it waits for a cheaper piece"
    ),
    "budget": lambda state, hold: (
        f"{_for(state, hold)} has lost what it may lose on average; it waits for credit beside {_where(state, hold)}"
    ),
    "tail": _tail,
    "gap": _gap,
}


# ---- What made a job slower that is not low work


def often(times: int) -> str:
    return "once" if times == 1 else f"{times} times"


def by_itself(high: HighJob, others: Sequence[str]) -> list[str]:
    """Its own work, noise, and other high jobs, the names of which are `others`."""
    costs, lines = high.costs, []
    drifts = sum([baseline.drifts for baseline in costs.steps]) if costs is not None else 0
    if drifts:
        lines.append(
            f"What its steps take alone was found to have changed {often(drifts)}: that is its own work, and no job is"
            " blamed for it."
        )
    if (noise := high.budget.noise.over) >= NOTEWORTHY:
        said = (
            f"Without low work its steps differ, too: about {100 * noise:.0f} in 100 lose what low work might be blamed"
            " for. "
        )
        lines.append(
            said
            + "That many are charged to no job, and what seems to cost much is believed to after several times in a"
            " row."
        )
    if high.steps_beside_high and others:
        lines.append(
            f"{high.steps_beside_high} of its {high.steps} steps ran beside {listed(others)}, of high priority,"
            " too: high jobs share the device by weight, and what that costs is no part of the promise."
        )
    return lines


def outlier(high: HighJob) -> list[str]:
    """A step slower than known costs of low work explain."""
    costs, slowest = high.costs, max(high.ratios, default=1.0)
    if costs is None or slowest <= 1.0 + OUTLIER * high.budget.slack:
        return []
    known = max([low.bound for low_costs in costs.by_low.values() for low in low_costs.lows.values()], default=0.0)
    if known > (slowest - 1.0) / 4 * high.solo_step():
        return []
    ago = len(high.ratios) - 1 - list(high.ratios).index(slowest)
    return [
        f"The slowest of them, {counted(ago, 'step')} ago, took {slowest:.2f} times as long; no low work beside it is"
        f" known to cost more than {known * 1e3:.3f} ms: the cause lay elsewhere, and no job is held for it."
    ]


def suspended(job: ScheduledJob) -> list[str]:
    """How long its pieces stood still, on a device that can suspend them (the CPU)."""
    stood, out = job.suspended_s, job.suspended_s + job.device_s
    if stood <= SUSPENDED * out:
        return []
    return [
        f"Of {out:.3f} s that its pieces were on the device they stood still for {stood:.3f} s: they gave the device"
        " away to high jobs' or other programs' work, and then went on."
    ]


# ---- Bans, ranges and names


def _bans(state: SchedulerState, guard: SlowdownGuard, job: ScheduledJob) -> list[str]:
    mine = [ban for ban in guard.bans.active if job.id in (ban.high, ban.low)]
    lines = [_banned(state, ban) for ban in mine[:MOST_BANS]]
    return lines + ([f"And {counted(len(mine) - MOST_BANS, 'ban')} more."] if len(mine) > MOST_BANS else [])


def _banned(state: SchedulerState, ban: Ban) -> str:
    share = "" if ban.share == 1.0 else f" on {ban.share:.2f} of the device"
    again = f", renewed {often(ban.failures)}" if ban.failures else ""
    why = "one launch costs more than a step may lose" if ban.why == "tail" else "elsewhere it costs far less"
    return (
        f"Banned: job {name_of(state, ban.low)}{share} while {_banned_range(state, ban)} of job"
        f" {name_of(state, ban.high)}"
        f" {'runs' if ban.of_collective else 'run'}: that range {_takes(ban.ratio)} ({counted(ban.samples, 'sample')}),"
        f" and {why}; {_while(state, ban)}{again}."
    )


def _banned_range(state: SchedulerState, ban: Ban) -> str:
    if not ban.of_collective:
        return _operators(state, ban.high, ban.operators, ban.program)
    operator = ban.operators[0]
    return f"the collective before {_operators(state, ban.high, (operator, operator + 1), ban.program)}"


def _range(state: SchedulerState, high: JobId, costs: HighCosts, piece: int) -> str:
    return f"piece {piece} ({_operators(state, high, costs.bounds[piece : piece + 2], costs.key)})"


def _operators(state: SchedulerState, job_id: JobId, operators: tuple[int, ...], key: str) -> str:
    """Operators [start, end) of the job's program with that key. Names that are rarest in the program come first, since
    they tell the range from others."""
    start, end = operators
    job = state.jobs.get(job_id) if state.hidden(job_id) is None else None
    names: list[str] = []
    everywhere: Counter[str] = Counter()
    for program in job.programs.values() if job is not None else ():
        if program.key == key:
            names, everywhere = list(program.operators[start:end]), Counter(program.operators)
    text = f"operator {start}" if end - start == 1 else f"operators {start} to {end - 1}"
    if names:
        shown = sorted(dict.fromkeys(names), key=everywhere.__getitem__)
        text += f": {', '.join(shown[:NAMES])}" + (" and others" if len(shown) > NAMES else "")
    return text


def name_of(state: SchedulerState, job_id: JobId) -> str:
    """What a job is called in a sentence: its name in quotes, its id without one, or what a reader may know of it."""
    job, other = state.jobs.get(job_id), state.hidden(job_id)
    if other is not None:
        return other
    if job is None:
        return f"{state.departed[job_id]!r} (gone)" if job_id in state.departed else str(job_id)
    return f"{job.spec.name!r}" if job.spec.name else str(job_id)


# ---- What happened to a job: the history's records in lines.


TEMPLATES: dict[str, str] = {
    "opened": "job opened: priority {0}, weight {1}",
    "reserved": "reserved for it: {1} bytes, priority {0}, for {2:g} s",
    "refused": "refused: {0}",
    "queued": "queued behind {0} unanswered steps, program {1}",
    "awaited": "its client waits for it, and gives a step to {0} only then: it is not held for that step's sake",
    "waits:paused": "waits: the job is paused",
    "waits:changing": "waits: the job is about to change its priority",
    "waits:program": "waits: program {0} is not ready",
    "waits:transfer": "waits: a transfer of state comes first",
    "waits:window": (
        "waits: the {0} window is full ({1} of {2} launches, {3:.3f} of {4:.3f} ms); its oldest launch is "
        "{5}, piece {6} of step {7} of job {8}"
    ),
    "waits:turn": "waits: job {0} comes first in the {1} class",
    **{f"waits:held:{reason}": f"held ({reason}): {{0}}" for reason in REASONS},
    "waits:wave": "waits: the other wave's step has not given enough memory back, or not ended",
    "waits:memory": "waits: other jobs have the memory that it shares with them",
    "waits:peers": "waits for its peers: collective {0} of {1}, before piece {2}",
    "met": "the collective before piece {0} has ended: {1:.3f} ms after the piece before",
    "launched": "{0} of {1} launched as {2} on stream {3}, cut {4}",
    "done": "{0} done on the device after {1:.3f} ms",
    "finished": "finished: {0:.3f} ms queued, {1:.3f} ms on the device, {2:.3f} ms in all",
    "failed": "failed ({0}): {1}",
    "program": "program {0} ready, cut {1} of {2} pieces",
    "cut": (
        "the device is asked to cut program {0} into pieces of about {1:.3f} ms: a step of a high job could hardly bear"
        " longer ones"
    ),
    "uncut": "the device is asked to cut program {0} as it does by itself",
    "transfer": "transfer {0} started",
    "transferred": "transfer {0} ended: {1}",
    "paused": "job paused",
    "resumed": "job resumed",
    "weighs": "weight is {0:g} from now on",
    "changes": "priority is {0} from now on",
    "draining": "job takes no more work and closes when all is answered: {0}",
    "closing": "job closing: {0}",
    "forgotten": "job gone from the device",
}


def story(state: SchedulerState, job: JobId, step: StepId | None = None, newest: int | None = None) -> list[str]:
    """Lines about the job, oldest first, the `newest` so many at most; with `step`, those of that step and of what
    happened to its job while it was unanswered. Times are seconds on the scheduler's clock."""
    records = [r for r in state.history if r[1] == job]
    if step is not None:
        own = [i for i, r in enumerate(records) if r[2] == step]
        between = range(own[0], own[-1] + 1) if own else range(0)
        records = [records[i] for i in between if records[i][2] in (step, None)]
    if newest is not None:
        records = records[-newest:]
    return [_line(r, step is None) for r in records]


def _line(record: Record, name_step: bool) -> str:
    now, _, step, kind, detail, cause = record
    which = f"step {step}: " if name_step and step is not None else ""
    return f"{now:.6f} {which}{TEMPLATES[kind].format(*detail)} [{_cause(cause)}]"


def _cause(event: Event) -> str:
    """The event in a few words: its name and the ids it carries."""
    name = type(event).__name__
    if isinstance(event, PieceDone):
        return f"{name} {event.launch}"
    ids = [f"{k} {getattr(event, k)}" for k in ("launch", "step", "program", "transfer") if hasattr(event, k)]
    return " ".join([name, *ids])
