"""Why a job is slow or held, in sentences: which piece, which operators, which neighbour, since when, until when.

What is said is what the core would do at this moment, and what it measured. Times are seconds on the
core's clock; lengths are in milliseconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from math import inf

from gpumux.scheduler.guard.answers import Hold
from gpumux.scheduler.guard.costs import MAX_RATE, Ban, HighModel
from gpumux.scheduler.guard.guard import Guard
from gpumux.scheduler.guard.high_job import Track
from gpumux.scheduler.jobs import Job, Step
from gpumux.scheduler.report import promise, starved_steps, too_long
from gpumux.scheduler.state import CoreState
from gpumux.types import JobId, Priority

# ---- What made a job slower or faster that no other is to be blamed for, in sentences (explain.py).


WILD = 8.0  # times what a step may lose on average
STOOD = 0.1  # of the time its pieces were on the device: for how long they stand still before it is said
NOTEWORTHY = 0.02  # of the steps without low work lose much


def often(times: int) -> str:
    return "once" if times == 1 else f"{times} times"


def by_itself(track: Track, others: Sequence[str]) -> list[str]:
    """What makes it slower or faster and is nobody's to answer for: its own work, noise, and other high jobs, which are
    `others`."""
    model, lines = track.model, []
    drifts = sum([baseline.drifts for baseline in model.steps]) if model is not None else 0
    if drifts:
        lines.append(
            f"What its steps take alone was found to have changed {often(drifts)}: that is its own work, and no job is"
            " blamed for it."
        )
    if (noise := track.account.noise.over) >= NOTEWORTHY:
        said = (
            f"Without low work its steps differ, too: about {100 * noise:.0f} in 100 lose what low work might be blamed"
            " for. "
        )
        lines.append(
            said
            + "That many are charged to nobody, and what seems to cost much is believed to after several times in a"
            " row."
        )
    if track.company and others:
        lines.append(
            f"{track.company} of its {track.steps} steps ran beside {' and '.join(others)}, of high priority, too: high"
            " jobs share the device by weight, and what that costs is no part of the promise."
        )
    return lines


def outlier(track: Track) -> list[str]:
    """A step so slow that what low work is known to cost does not explain it."""
    model, slowest = track.model, max(track.ratios, default=1.0)
    if model is None or slowest <= 1.0 + WILD * track.account.slack:
        return []
    known = max([low.bound for pair in model.pairs.values() for low in pair.lows.values()], default=0.0)
    if known > (slowest - 1.0) / 4 * track.solo_step():
        return []
    ago = len(track.ratios) - 1 - list(track.ratios).index(slowest)
    return [
        f"The slowest of them, {ago} steps ago, took {slowest:.2f} times as long; no low work beside it is known to"
        f" cost more than {known * 1e3:.3f} ms: the cause lay elsewhere, and nobody is held for it."
    ]


def stood_still(job: Job) -> list[str]:
    """Where a device can stop a piece (the CPU): what that kept the job for, which no hold says."""
    stood, out = job.suspended_s, job.suspended_s + job.device_s
    if stood <= STOOD * out:
        return []
    return [
        f"Of {out:.3f} s that its pieces were on the device they stood still for {stood:.3f} s: they gave the device"
        " away to high jobs' or other programs' work, and then went on."
    ]


# ----


MOST_BANS = 8
NAMES = 3  # operators of a range that are named


def explain(core: CoreState, job: Job) -> list[str]:
    """Sentences about a job, the most important first."""
    lines = [_state(core, job), *_longest(core, job), *stood_still(job)]
    guard = core.guard
    if guard is None:
        return [
            *lines,
            f"Policy {core.config.policy} has no guard: nothing is measured and nobody is held for another.",
        ]
    if job.priority is Priority.HIGH:
        lines += _high(core, guard, job)
    else:
        lines += _low(core, guard, job)
    return lines + _bans(core, guard, job)


class Clause:
    """Why a low job was held, put into words only when somebody asks."""

    __slots__ = ("_core", "_hold")

    def __init__(self, core: CoreState, hold: Hold) -> None:
        self._core, self._hold = core, hold

    def __format__(self, spec: str) -> str:
        return held(self._core, self._hold)


def held(core: CoreState, hold: Hold) -> str:
    """Why a low job is held, as a clause."""
    return _REASONS[hold.reason](core, hold)


def _state(core: CoreState, job: Job) -> str:
    who = f"Job {_name(core, job.id)} ({job.priority.name.lower()})"
    blocked, out = job.blocked(), "1 piece" if job.outstanding == 1 else f"{job.outstanding} pieces"
    if blocked == "empty":
        doing = "has nothing queued" + (f", and {out} on the device" if job.outstanding else "")
    elif blocked == "program":
        doing = "waits for its program to be ready"
    elif blocked == "transfer":
        doing = "waits for a transfer of its state"
    elif blocked == "changing":
        doing = "is about to change its priority"
    elif blocked:
        doing = f"is {blocked}"
    else:
        doing = f"has work queued and {out} on the device"
    return f"{who} {doing}; {job.steps_done} steps done."


def _longest(core: CoreState, job: Job) -> list[str]:
    """What a step is made of, and what of it holds the device longest."""
    ready = [program for program in job.programs.values() if program.ready]
    if not ready:
        return []
    step = job.queue[0] if job.queue and isinstance(job.queue[0], Step) else None
    program = step.program if step is not None and step.program.ready else ready[-1]
    model = (
        job.track.model if job.track is not None else None
    )  # of a high job: what was measured, not what the device predicted
    known = (
        model.refs
        if model is not None and (model.key, model.bounds) == (program.key, program.bounds)
        else program.pieces
    )
    seconds, piece = max((each, index) for index, each in enumerate(known))
    return [
        f"A step of it is cut into {len(program.pieces)}; the longest, piece {piece}"
        f" ({_operators(core, job.id, program.bounds[piece : piece + 2], program.key)}), takes {seconds * 1e3:.3f} ms"
        " alone."
    ]


# ---- high jobs


def _high(core: CoreState, guard: Guard, job: Job) -> list[str]:
    track = guard.tracks.get(job.id)
    if track is None or track.model is None:
        return ["No step of it has run yet, so nothing is known of its speed."]
    found = promise(track)
    lines = []
    if found["slowdown"] is None:
        lines.append("Its speed alone is still being measured: low work is held meanwhile.")
    else:
        kept, slack = "kept" if found["kept"] else "broken", track.account.slack
        lines.append(
            f"Its last {found['steps']} steps took {found['slowdown']:.3f} times what they take alone"
            f" ({track.solo_step() * 1e3:.3f} ms), 99 in 100 at most {found['slowdown_p99']:.3f} times; promised are"
            f" {1.0 + slack:.4g}, and {1.0 + 2 * slack:.4g} for 99 in 100: {kept}. {track.over} of all its"
            f" {track.steps} steps took more than what is promised on average."
        )
    if not track.surprise.trusted:
        lines.append(
            "Its steps came when none was expected, and lost too much to low work that was out: the pauses there were"
            " between them are not relied on."
        )
    others = [_name(core, other) for other in guard.tracks if other != job.id and other in core.jobs]
    lines += by_itself(track, others) + outlier(track) + _neighbours(core, guard, track)
    if track.host_wait > 0.0 and track.steps:
        lines.append(
            f"The device waited {track.host_wait * 1e3:.3f} ms in all for the host to hand its pieces over "
            f"({track.host_wait / track.steps * 1e6:.0f} us a step)."
        )
    return lines


def _neighbours(core: CoreState, guard: Guard, track: Track) -> list[str]:
    """What low work costs it, the worst first."""
    model = track.model
    assert model is not None
    lines = []
    for key, pair in sorted(model.pairs.items(), key=lambda item: -item[1].typical.mean):
        if not pair.known or pair.typical.mean <= 0.0:
            continue
        names = [name for j in core.jobs.values() if j.priority is Priority.LOW for name in _running(core, j, key.low)]
        worst, piece = max((cell.mean, piece) for piece, cell in enumerate(pair.cells) if cell.count)
        share = "" if key.share == 1.0 else f" on {key.share:.2f} of the device"
        where = _range(core, track.job.id, model, piece)
        most = f"most in {where}, which {_takes(_ratio(worst))}" if worst > 0.0 else "in no range more than in others"
        lines.append(
            f"Beside {' and '.join(names) or 'a job that is gone'}{share} it loses {pair.typical.mean:.3f} s a second;"
            f" {most}."
        )
    return lines[:MOST_BANS]


def _ratio(rate: float) -> float:
    """How many times as long a range takes that loses `rate` of each second."""
    return 1.0 / (1.0 - min(max(rate, 0.0), MAX_RATE))


def _takes(ratio: float) -> str:
    """A bound is told as what it stands for."""
    if ratio >= 0.999 / (1.0 - MAX_RATE):
        return "all but stands still meanwhile"
    return f"takes {ratio:.2f} times as long beside it"


def _running(core: CoreState, job: Job, key: str) -> list[str]:
    """The job's name for each of its programs that `key` stands for, with the program's number where it has others."""
    name, several = _name(core, job.id), len(job.programs) > 1
    return [f"{name} (its program {p.id})" if several else name for p in job.programs.values() if p.key == key]


# ---- low jobs


def _low(core: CoreState, guard: Guard, job: Job) -> list[str]:
    lines = []
    hold = guard.holds.newest.get(job.id)
    if hold is not None and not job.blocked():
        lines.append(f"It is held since {hold.since:.6f} ({(core.now - hold.since) * 1e3:.3f} ms): {held(core, hold)}.")
    elif not job.blocked():
        lines.append(_turn(core, guard, job))
    totals = guard.holds.of(job, core.now)
    if totals:
        told = ", ".join(f"{reason} {seconds * 1e3:.3f} ms" for reason, seconds in totals.items())
        lines.append(f"Since it opened it was held for {sum(totals.values()) * 1e3:.3f} ms in all: {told}.")
    asked = [program.asked_s for program in job.programs.values() if program.asked_s is not None]
    if asked and guard.cutting.high in core.jobs:
        lines.append(
            f"The device is asked to cut its steps into pieces of about {asked[0] * 1e3:.3f} ms, not"
            f" {guard.cutting.usual_s * 1e3:.3f}: a step of job {_name(core, guard.cutting.high)} could hardly bear"
            " longer ones."
        )
    long = too_long(guard, job)
    if long is not None:
        piece, fits = long
        lines.append(
            f"Its pieces are too long: the next takes {piece * 1e3:.3f} ms alone and could not run for"
            f" {starved_steps(guard, job)} steps; about {fits * 1e3:.3f} ms would fit. Shorter operators (a smaller"
            " batch, or more microbatches) may let it run."
        )
    return lines


def _turn(core: CoreState, guard: Guard, job: Job) -> str:
    """What a low job waits for that is not held itself."""
    before = next(iter(guard.holds.newest.items()), None)
    if before is None or job.outstanding:
        return "It is not held: it runs as soon as it is its turn and the low window has room."
    other, hold = before
    return (
        f"It waits for its turn: those that were asked before it are held ({len(guard.holds.newest)} low jobs), "
        f"{_name(core, other)} since {hold.since:.6f}: {held(core, hold)}."
    )


def _for(core: CoreState, hold: Hold) -> str:
    return f"job {_name(core, hold.high)}"


def _where(core: CoreState, hold: Hold) -> str:
    guard = core.guard
    track = guard.tracks.get(hold.high) if guard is not None else None
    if track is None or track.model is None or not 0 <= hold.piece < len(track.model.refs):
        return f"job {_name(core, hold.high)}"
    return f"{_range(core, hold.high, track.model, hold.piece)} of job {_name(core, hold.high)}"


def _ban(core: CoreState, hold: Hold) -> str:
    ban = hold.ban
    assert ban is not None
    return (
        f"it would run into {_operators(core, ban.high, ban.operators, ban.program)} of job {_name(core, ban.high)}:"
        f" that range {_takes(ban.ratio)} ({ban.samples} samples); banned {_while(core, ban)}"
    )


def _while(core: CoreState, ban: Ban) -> str:
    """Since when, and until when. What has expired stays in force until one launch has shown whether it still hurts."""
    if ban.until > core.now:
        return f"since {ban.since:.6f} until {ban.until:.6f}"
    return f"since {ban.since:.6f}, expired at {ban.until:.6f}: in force until a launch has been tried beside it"


def _gap(core: CoreState, hold: Hold) -> str:
    again = (
        f"asked again at {hold.until:.6f}" if hold.until < inf else "asked again when low work that is out has ended"
    )
    when = "is expected before it could end"
    if not hold.foreseen:
        when = "may come at any time, as steps came when none was expected"
    return f"the next step of {_for(core, hold)} {when}, and would be delayed too long; {again}"


def _tail(core: CoreState, hold: Hold) -> str:
    return (
        f"beside {_where(core, hold)} it would cost the step that runs more than one step may lose{_limit(core, hold)},"
        " until that step ends"
    )


def _next(core: CoreState, hold: Hold) -> str:
    return (
        f"it would outlast the step of {_for(core, hold)} that runs, and cost the next one, which may have come by"
        f" then, more than one step may lose{_limit(core, hold)}"
    )


def _limit(core: CoreState, hold: Hold) -> str:
    track = core.guard.tracks.get(hold.high) if core.guard is not None else None
    return f" ({track.account.limit * 1e3:.3f} ms)" if track is not None else ""


_REASONS: dict[str, Callable[[CoreState, Hold], str]] = {
    "calibration": lambda core, hold: (
        f"{_for(core, hold)} runs a step alone, so that its speed is known; until that ends"
    ),
    "learning": lambda core, hold: (
        f"what it costs {_for(core, hold)} is not known yet, and is tried one launch at a time"
    ),
    "ban": _ban,
    "price": lambda core, hold: (
        f"beside {_where(core, hold)} it costs more than elsewhere; it waits for a cheaper piece"
    ),
    "budget": lambda core, hold: (
        f"{_for(core, hold)} has lost what it may lose on average; it waits for credit beside {_where(core, hold)}"
    ),
    "tail": _tail,
    "next": _next,
    "gap": _gap,
}


# ---- both


def _bans(core: CoreState, guard: Guard, job: Job) -> list[str]:
    mine = [ban for ban in guard.bans.active if job.id in (ban.high, ban.low)]
    lines = [_told(core, ban) for ban in mine[:MOST_BANS]]
    return lines + ([f"And {len(mine) - MOST_BANS} bans more."] if len(mine) > MOST_BANS else [])


def _told(core: CoreState, ban: Ban) -> str:
    share = "" if ban.share == 1.0 else f" on {ban.share:.2f} of the device"
    again = f", renewed {often(ban.failures)}" if ban.failures else ""
    why = "one launch costs more than a step may lose" if ban.why == "tail" else "elsewhere it costs far less"
    return (
        f"Banned: job {_name(core, ban.low)}{share} while {_operators(core, ban.high, ban.operators, ban.program)} of"
        f" job {_name(core, ban.high)} run: that range {_takes(ban.ratio)} ({ban.samples} samples), and {why};"
        f" {_while(core, ban)}{again}."
    )


def _range(core: CoreState, high: JobId, model: HighModel, piece: int) -> str:
    return f"piece {piece} ({_operators(core, high, model.bounds[piece : piece + 2], model.key)})"


def _operators(core: CoreState, job_id: JobId, operators: tuple[int, ...], key: str) -> str:
    """[start, end) of the job's program with that key. Of the names those come first that are rarest in the program:
    they tell the range from the others."""
    start, end = operators
    job = core.jobs.get(job_id) if core.hidden(job_id) is None else None
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


def _name(core: CoreState, job_id: JobId) -> str:
    job, other = core.jobs.get(job_id), core.hidden(job_id)
    if other is not None:
        return other
    if job is None:
        return f"{core.departed[job_id]!r} (gone)" if job_id in core.departed else str(job_id)
    return f"{job.spec.name!r}" if job.spec.name else str(job_id)
