"""Records of a recording as Chrome trace events, the JSON that Perfetto and chrome://tracing open.

Two groups of tracks: the device, with a track for each job's stream (what ran, by operators), and the jobs, each with
its steps from arrival to answer, within each the wait for its first piece, when it was held and for whom, and the bans
against it. Arrows lead from each wait to the step's pieces, one after another; counters show each job's queue and
memory. Spans that overlap within a track (steps in flight together) get further tracks of the same name. Times are
microseconds since the recording began.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gpumux import __version__, files
from gpumux.cli.control import Control, Recorded
from gpumux.cli.text import emit, emit_json, printable
from gpumux.simulate.comparison import ClusterCase
from gpumux.wire.messages import Happened, JobSeen, LoadSeen, PieceRan, ProgramSeen, Record, StepRan, WasBanned, WasHeld
from gpumux.wording import counted

DEVICE, JOBS = 1, 2  # process ids, which viewers show as groups of tracks
MOST_NAMES = 16  # operators listed with a piece
Event = dict[str, Any]


def trace(records: Iterable[Record], seconds: float, device: str, about: dict[str, Any]) -> dict[str, Any]:
    """The whole file's content. seconds: length of the recording; about: facts that are stored with it."""
    found = list(records)
    jobs = {record.job: record for record in found if isinstance(record, JobSeen)}
    operators = {(r.job, r.program): r.operators for r in found if isinstance(r, ProgramSeen)}
    tracks = _Tracks(seconds * 1e6)
    ordered = sorted(jobs.values(), key=lambda job: (job.priority != "high", _number(job.job)))
    flows = _Flows()
    for job in ordered:
        own = [record for record in found if getattr(record, "job", None) == job.job]
        pieces = [r for r in own if isinstance(r, PieceRan)]
        placed = tracks.add(DEVICE, _label(job), [_piece(r, operators) for r in pieces])
        flows.lead(job.job, placed)
    for job in ordered:
        own = [record for record in found if getattr(record, "job", None) == job.job]
        label = _label(job)
        steps = [_step(r) for r in own if isinstance(r, StepRan)]
        marks = [_mark(r, seconds) for r in own if isinstance(r, Happened)]
        tracks.events += flows.begin(job.job, tracks.add(JOBS, f"{label}: steps", steps, marks))
        tracks.events += [each for r in own if isinstance(r, LoadSeen) for each in _counters(r, seconds)]
        tracks.add(JOBS, f"{label}: held", [_hold(r) for r in own if isinstance(r, WasHeld)])
        bans = [_ban(r) for r in found if isinstance(r, WasBanned) and r.low == job.job]
        tracks.add(JOBS, f"{label}: banned", bans)
    groups = [_name(DEVICE, 0, "process_name", f"device: {device}"), _name(JOBS, 0, "process_name", "jobs")]
    groups += [_order(group, 0, "process_sort_index", group) for group in (DEVICE, JOBS)]
    return {
        "displayTimeUnit": "ms",
        "otherData": {**about, "seconds": seconds},
        "traceEvents": [*groups, *tracks.events, *flows.events()],
    }


class _Tracks:
    """Places spans on tracks, and names these. groups: how many there are."""

    def __init__(self, end_us: float, groups: int = JOBS) -> None:
        self.events: list[Event] = []
        self._end = round(end_us, 3)
        self._made = groups  # a track with its group's number would be called the main thread

    def add(self, group: int, name: str, spans: Sequence[Event], marks: Sequence[Event] = ()) -> list[Event]:
        """Add one track, or as many as overlapping spans need; none if there is nothing to show. Returns the spans as
        they were placed, by time."""
        made = []
        lanes: list[tuple[int, float]] = []  # track, and the end of its newest span
        for span in sorted(spans, key=lambda event: (event["ts"], event["dur"])):
            start, end = self._inside(span["ts"]), self._inside(span["ts"] + span["dur"])
            at = next((i for i, (_, free) in enumerate(lanes) if free <= start), -1)
            if at < 0:
                lanes.append((self._track(group, name), 0.0))
            lanes[at] = lanes[at][0], end
            placed = {"ph": "X", "pid": group, "tid": lanes[at][0], "ts": start, "dur": round(end - start, 3)}
            made.append({**span, **placed})
        self.events += made
        if marks and not lanes:
            lanes.append((self._track(group, name), 0.0))
        self.events += [{**mark, "ph": "i", "s": "t", "pid": group, "tid": lanes[0][0]} for mark in marks]
        return made

    def _inside(self, when: float) -> float:
        """A time within the recording, to a nanosecond: finer differences are rounding errors."""
        return round(min(max(0.0, when), self._end), 3)

    def _track(self, group: int, name: str) -> int:
        self._made += 1
        self.events.append(_name(group, self._made, "thread_name", name))
        self.events.append(_order(group, self._made, "thread_sort_index", self._made))
        return self._made


class _Flows:
    """Waits of steps for their first pieces, and arrows from these to the pieces, in the order in which they began.

    Viewers draw an arrow from the end of a span to the beginning of the next. A step's own span ends after its pieces,
    so an arrow from there would lead back in time."""

    def __init__(self) -> None:
        self._pieces: dict[tuple[str, int], list[Event]] = {}
        self._chains: list[list[Event]] = []

    def lead(self, job: str, pieces: Sequence[Event]) -> None:
        for piece in pieces:
            self._pieces.setdefault((job, piece["args"]["step"]), []).append(piece)

    def begin(self, job: str, steps: Sequence[Event]) -> list[Event]:
        """The waits of these steps, each within its step's span. A step without recorded pieces has none, nor has one
        whose first piece began with the recording."""
        waits = []
        for step in steps:
            number = step["args"]["step"]
            chain = [piece for piece in self._pieces.get((job, number), ()) if piece["ts"] >= step["ts"]]
            if chain:
                lasts = round(min(chain[0]["ts"] - step["ts"], step["dur"]), 3)
                if lasts > 0:
                    wait = {**step, "name": f"step {number} waits", "cat": "wait", "dur": lasts}
                    waits.append(wait)
                    chain.insert(0, wait)
            if len(chain) > 1:
                self._chains.append(chain)
        return waits

    def events(self) -> list[Event]:
        """The arrows. One starts and ends at the start of a span, by whose track and time viewers find it."""
        found = []
        for number, spans in enumerate(self._chains):
            for place, span in enumerate(spans):
                phase = "s" if place == 0 else "f" if place == len(spans) - 1 else "t"
                arrow = {"name": "step", "cat": "step", "ph": phase, "id": number}
                found.append({**arrow, **{at: span[at] for at in ("pid", "tid", "ts")}})
                if phase == "f":
                    found[-1]["bp"] = "e"  # it ends at the span around its time, and not at the next one
        return found


def _counters(load: LoadSeen, seconds: float) -> list[Event]:
    """The job's steps without and with a launched piece, and its memory, from a moment on."""
    at = {"cat": "load", "ph": "C", "ts": round(min(load.when, seconds) * 1e6, 3)}
    steps = {"queued": load.queued, "running": load.running}
    return [
        {**at, "name": f"{load.job} steps", "pid": JOBS, "args": steps},
        {**at, "name": f"{load.job} memory (MiB)", "pid": DEVICE, "args": {"charged": load.memory_bytes / 2**20}},
    ]


def _name(group: int, track: int, kind: str, name: str) -> Event:
    return {"name": kind, "ph": "M", "pid": group, "tid": track, "args": {"name": name}}


def _order(group: int, track: int, kind: str, place: int) -> Event:
    return {"name": kind, "ph": "M", "pid": group, "tid": track, "args": {"sort_index": place}}


def _label(job: JobSeen) -> str:
    return " ".join(part for part in (job.job, job.name, f"({job.priority})") if part)


def _number(short: str) -> int:
    return int(short[1:]) if short[1:].isdigit() else 0


def _span(name: str, category: str, since: float, until: float, **args: Any) -> Event:
    return {"name": name, "cat": category, "ts": since * 1e6, "dur": (until - since) * 1e6, "args": args}


def _plain(operator: str) -> str:
    """aten.mm.default -> mm."""
    parts = operator.split(".")
    return parts[1] if len(parts) > 1 else operator


def _titled(names: Sequence[str]) -> str:
    """Operators in a few words."""
    if len(names) < 3:
        return ", ".join(map(_plain, names))
    return f"{_plain(names[0])} ... {_plain(names[-1])} ({counted(len(names), 'operator')})"


def _piece(piece: PieceRan, operators: dict[tuple[str, int], list[str]]) -> Event:
    names = operators.get((piece.job, piece.program), [])[piece.first : piece.end]
    args: dict[str, Any] = {
        "step": piece.step,
        "program": piece.program,
        "piece": piece.piece,
        "waited on the device (ms)": round((piece.started - piece.launched) * 1e3, 6),
    }
    if names:
        args["operators"] = [_plain(name) for name in names[:MOST_NAMES]]
        args["range"] = f"[{piece.first}, {piece.end})"
    if piece.share < 1.0:
        args["share"] = piece.share
    if piece.stream >= 0:
        args["stream"] = piece.stream
    if piece.how != "done":
        args["end"] = {"running": "still ran when the recording ended", "dropped": "the job was unloaded"}.get(
            piece.how, piece.how
        )
    return _span(_titled(names) or f"piece {piece.piece}", "piece", piece.started, piece.ended, **args)


def _step(step: StepRan) -> Event:
    args = {
        "step": step.step,
        "queued (ms)": round(step.queue_s * 1e3, 6),
        "device (ms)": round(step.device_s * 1e3, 6),
    }
    return _span(f"step {step.step}", "step", step.submitted, step.answered, **args)


def _hold(held: WasHeld) -> Event:
    return _span(f"held: {held.reason}", "held", held.since, held.until, **{"for": held.high})


def _ban(ban: WasBanned) -> Event:
    args: dict[str, Any] = {"for": ban.high, "ratio": round(min(ban.ratio, 1e9), 3), "why": ban.why}
    where = ban.high
    if ban.end > ban.first:
        where = f"operators [{ban.first}, {ban.end}) of {ban.high}"
        args["range"] = f"[{ban.first}, {ban.end})"
    elif ban.first:
        where = f"the collective before operator {ban.first} of {ban.high}"
    if ban.share < 1.0:
        args["share"] = ban.share
    return _span(f"banned from {where}", "ban", ban.since, ban.until, **args)


def _mark(happened: Happened, seconds: float) -> Event:
    when = round(min(happened.when, seconds) * 1e6, 3)
    args = {"message": happened.message} if happened.message else {}
    return {"name": happened.what, "cat": "mark", "ts": when, "args": args}


# ---- Launches on the GPUs of a simulated cluster: a group for each GPU of each case, a track for each job.


def cluster_trace(cases: Sequence[ClusterCase], title: str) -> dict[str, Any]:
    """The whole file's content: each case's latest launches, from their beginning on."""
    found = [(case, case.result.timeline) for case in cases if case.result is not None]
    longest = max((row.ended for _, gpus in found for rows in gpus for row in rows), default=0.0)
    tracks = _Tracks(longest * 1e6, sum(len(gpus) for _, gpus in found))
    names: list[Event] = []
    for case, gpus in found:
        for gpu, rows in enumerate(gpus):
            group = len(names) // 2 + 1
            names += [
                _name(group, 0, "process_name", f"{case.name}: GPU {gpu}"),
                _order(group, 0, "process_sort_index", group),
            ]
            plan = [
                _span(f"{row.title} {row.kind}", row.kind, row.started, row.ended) for row in rows if row.kind != "low"
            ]
            tracks.add(group, "plan (high)", plan)
            for job in sorted({row.title for row in rows if row.kind == "low"}):
                some = [row for row in rows if row.kind == "low" and row.title == job]
                spans = [_span(job, "low", row.started, row.ended, share=row.share) for row in some]
                tracks.add(group, f"{job} (low)", spans)
    about = {"gpumux": __version__, "simulated": title}
    return {"displayTimeUnit": "ms", "otherData": about, "traceEvents": [*names, *tracks.events]}


# ---- `gpumux trace`: record what runs, as a file that Perfetto opens.


def run(args: argparse.Namespace) -> int:
    path = Path(args.out)
    files.check_writable(path)
    started = time.time()
    with Control(args.endpoint, args.timeout) as control:
        device = f"{control.welcome.device['kind']}, {control.welcome.device['name']}"
        if sys.stderr.isatty():
            sys.stderr.write(f"recording for {args.seconds:g} s; Ctrl-C ends it early\n")
        made = control.record(args.seconds)
    about = {"gpumux": __version__, "device": device, "started (Unix time)": started, "cut": made.reason}
    content = trace(made.records, made.seconds, printable(device), about)
    files.write_text(path, json.dumps(content, separators=(",", ":")))
    if made.reason:
        sys.stderr.write(f"gpumux: the recording is shorter than asked: {made.reason}\n")
    counts = {
        "pieces": sum(isinstance(record, PieceRan) for record in made.records),
        "held": sum(isinstance(record, WasHeld) for record in made.records),
        "bans": sum(isinstance(record, WasBanned) for record in made.records),
    }
    if args.json:
        emit_json({"file": args.out, "seconds": made.seconds, "cut": made.reason, **counts})
    else:
        emit(describe(made, counts, args.out))
    return 0


def describe(made: Recorded, counts: dict[str, int], out: str) -> str:
    nouns = {"pieces": "piece", "held": "held span", "bans": "ban"}
    what = ", ".join(counted(counts[name], noun) for name, noun in nouns.items())
    return f"{out}: {what} in {made.seconds:.2f} s; open it at https://ui.perfetto.dev"
