"""`gpumux jobs`: list them, or pause, resume, stop, profile, explain or regrade one."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpumux.cli.control import Control
from gpumux.cli.text import duration, emit, emit_json, printable, promise, rank_of, size, table, verdicts
from gpumux.errors import NotOwner, UnknownJob
from gpumux.program.profile import loads, save
from gpumux.types import Priority
from gpumux.wording import counted, nearest

_DONE = {"pause": "paused", "resume": "resumed", "stop": "stopping"}


def run(args: argparse.Namespace) -> int:
    with Control(args.endpoint, args.timeout) as control:
        jobs = control.status()["jobs"]
        if args.verb == "list":
            if args.json:
                emit_json(jobs)
            else:
                emit("\n".join([*_above(jobs), job_table(jobs)]) if jobs else "no jobs")
            return 0
        job = find(jobs, args.job)
        if not job["mine"]:
            raise NotOwner(f"job {job['short']} belongs to user {job['uid']}", "ask its owner, or an operator")
        if args.verb == "profile":
            return _profile(control, job, args)
        if args.verb == "explain":
            return _explain(control, job, args)
        if args.verb in ("priority", "weight"):
            return _regrade(control, job, args)
        control.change(args.verb, job["job"], drain=args.verb == "stop" and args.drain)
    if args.json:
        emit_json({"job": job["job"], "short": job["short"], "verb": args.verb})
    else:
        emit(f"{job['short']} ({printable(job['name'])}) {_DONE[args.verb]}")
    return 0


def _regrade(control: Control, job: dict[str, Any], args: argparse.Namespace) -> int:
    """Give the job another priority or weight."""
    if args.verb == "priority":
        control.regrade(job["job"], priority=int(Priority[args.value.upper()]))
    else:
        control.regrade(job["job"], weight=float(args.value))
    if args.json:
        emit_json({"job": job["job"], "short": job["short"], "verb": args.verb, "value": args.value})
    else:
        emit(f"{job['short']} ({printable(job['name'])}) has {args.verb} {args.value} from now on")
    return 0


def _explain(control: Control, job: dict[str, Any], args: argparse.Namespace) -> int:
    """Say how the job fares, why, and what to do about it."""
    body = control.explain(job["job"])
    if args.json:
        emit_json(body)
    else:
        lines = explanation(job, body, story=args.story, endpoint=args.endpoint)
        if not args.story:
            lines += ["", "--story has all that is known of it, and what happened last"]
        emit("\n".join(printable(line) for line in lines))
    return 0


def explanation(
    job: dict[str, Any], body: dict[str, Any], *, story: bool = False, endpoint: str | None = None
) -> list[str]:
    """The answer to ExplainJob as lines: verdict, causes, and what to do with commands to paste; with `story` also all
    that is known, and what happened last. endpoint: what --endpoint said, which the commands have to say as well."""
    where = "" if endpoint is None else f" --endpoint {shlex.quote(endpoint)}"
    name = f" {job['name'][:32]}" if job["name"] else ""
    lines = [f"{job['short']}{name} ({job['priority']}): {body['verdict']}"]
    if body["causes"]:
        lines += ["", "why", *(f"  {cause}" for cause in body["causes"])]
    if body["remedies"]:
        lines += ["", "what to do"]
        for remedy in body["remedies"]:
            lines += [f"  {remedy['text']}", *([f"    $ {remedy['command']}{where}"] if remedy["command"] else [])]
    if body.get("fusion") is not None:
        lines += ["", "fusion", f"  {body['fusion']['why']}"]
    if story:
        lines += ["", "all that is known", *(f"  {sentence}" for sentence in body["sentences"])]
        lines += ["", "what happened last", *(f"  {line}" for line in body["story"])]
    return lines


def _profile(control: Control, job: dict[str, Any], args: argparse.Namespace) -> int:
    """Write a profile of the job's operators."""
    profile = replace(loads(control.profile(job["job"], args.program).decode()), name=job["name"])
    save(profile, Path(args.out))
    summary = f"{counted(len(profile.ops), 'operator')}, {profile.seconds * 1e3:.2f} ms a step on {profile.device}"
    if args.json:
        emit_json({"job": job["job"], "short": job["short"], "verb": args.verb, "file": args.out})
    else:
        emit(f"{job['short']} ({printable(job['name'])}): {summary}; see it with `gpumux simulate --high {args.out}`")
    return 0


def find(jobs: list[dict[str, Any]], wanted: str) -> dict[str, Any]:
    """The job that `wanted` names. Raises UnknownJob if none or several match."""
    for exact in ("job", "short"):
        for job in jobs:
            if job[exact] == wanted:
                return job
    named = [job for job in jobs if job["name"] == wanted]
    found = named or [job for job in jobs if job["job"].startswith(wanted)]
    if len(found) == 1:
        return found[0]
    if not found:
        known = [job[name] for job in jobs for name in ("name", "short") if job[name]]
        near = nearest(wanted, known)
        remedy = f"did you mean {printable(near)}? " if near else ""
        raise UnknownJob(f"no job {wanted!r}", remedy + "`gpumux jobs` lists them")
    short = ", ".join(job["short"] for job in found)
    raise UnknownJob(f"{wanted!r} stands for {len(found)} jobs", f"name one of {short}")


def _state(job: dict[str, Any]) -> str:
    """The job's state; both words for a draining job that is paused."""
    if job["paused"] and job["state"] != "paused":
        return f"{job['state']}, paused"
    gang = job.get("gang")
    return f"{job['state']}, waits for peers" if gang and gang["waits"] else str(job["state"])


def _promise(job: dict[str, Any]) -> str:
    """A high job's slowdown and whether that is within its promise, or the reason why a low job is held."""
    if job["priority"] == "low" and job["promise"] and job["promise"]["held"]:
        return f"held: {job['promise']['held']}"
    return promise(job)


def _name(job: dict[str, Any]) -> str:
    models = f" ({job['models']} models)" if job["models"] > 1 else ""
    return printable(job["name"])[:32] + models + rank_of(job)


def _above(jobs: list[dict[str, Any]]) -> list[str]:
    """A line for each promise, and an empty one, if there are promises."""
    lines = verdicts(jobs)
    return [*lines, ""] if lines else []


def job_table(jobs: list[dict[str, Any]]) -> str:
    """The table that `jobs` and `status` print."""
    header = ("JOB", "NAME", "UID", "PRIORITY", "STATE", "STEPS", "FAILED", "QUEUED", "DEVICE", "MEMORY", "PROMISE")
    rows = [
        (
            job["short"],
            _name(job),
            str(job["uid"]),
            job["priority"],
            _state(job),
            str(job["steps_done"]),
            str(job["steps_failed"]),
            str(job["queued"]),
            duration(job["device_busy_s"]),
            size(job["memory_bytes"]),
            _promise(job),
        )
        for job in jobs
    ]
    return table(header, rows)


# ---- `gpumux status`: the daemon, its device and its jobs.


def run_status(args: argparse.Namespace) -> int:
    with Control(args.endpoint, args.timeout) as control:
        body = control.status()
    if args.json:
        emit_json(body)
    else:
        emit(describe(body))
    return 0


def _guard(guard: dict[str, Any] | None) -> list[str]:
    """The guard's actions so far, with the most frequent reason for holding low work first."""
    if guard is None:
        return []
    held = sorted(((s, reason) for reason, s in guard["held_s"].items() if s >= 0.05), reverse=True)
    why = ", ".join(f"{reason} {duration(s)}" for s, reason in held)
    return [
        f"guard    {counted(guard['bans'], 'ban')} in force, {guard['bans_total']} ever; low work ran for "
        f"{duration(guard['harvested_s'])} beside high jobs" + (f", held: {why}" if why else "")
    ]


def describe(body: dict[str, Any]) -> str:
    """The report of GetStatus as lines of text."""
    daemon, device, memory = body["daemon"], body["device"], body["memory"]
    metrics = f"http://{daemon['metrics_host']}:{daemon['metrics_port']}/metrics" if daemon["metrics_port"] else "off"
    lines = [
        *verdicts(body["jobs"]),
        f"daemon   gpumux {daemon['version']}, pid {daemon['pid']}, up {duration(daemon['uptime_s'])}, "
        f"policy {daemon['policy']}" + (f", core {daemon['core']}" if "core" in daemon else ""),
        f"listens  {', '.join(daemon['endpoints'])}",
        f"metrics  {metrics}",
        f"device   {device['kind']}: {device['name']}, torch {device['torch_version']}"
        + (f", {counted(device['threads'], 'thread')} a piece" if device["threads"] else "")
        + (f", {counted(device['parallel'], 'piece')} at once" if device["parallel"] else ""),
        f"memory   {size(memory['free_bytes'])} free of {size(memory['total_bytes'])}, "
        f"{size(memory['shared_bytes'])} shared with clients",
        f"clients  {body['sessions']}",
        *_guard(body["guard"]),
        "",
        job_table(body["jobs"]) if body["jobs"] else "no jobs",
    ]
    return "\n".join(lines)
