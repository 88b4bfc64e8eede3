"""`gpumux cluster up|status|jobs|explain|cancel|drain|down`."""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpumux.cli.control import START_COORDINATOR, Control
from gpumux.cli.text import emit, emit_json, printable, table
from gpumux.errors import ConfigError, DaemonGone, UnknownJob
from gpumux.wire import messages as msg
from gpumux.wire.endpoint import Endpoint, check_listening, living_holder, resolve_coordinator

LEAVE_S = 15.0
GIB = 2**30


def run(args: argparse.Namespace) -> int:
    if args.verb == "up":
        return _up(args)
    if args.verb == "down":
        return _down(args)
    found = resolve_coordinator(args.cluster)
    with Control(found.text, args.timeout, coordinator=True) as control:
        match args.verb:
            case "status":
                body = control.status()
                emit_json(body) if args.json else emit(_status(body))
            case "jobs":
                body = control.status()
                emit_json(body["jobs"]) if args.json else emit(_jobs(body["jobs"]))
            case "explain":
                body = control.explain(_find(control.status()["jobs"], args.job))
                emit_json(body) if args.json else emit("\n".join(printable(line) for line in body["sentences"]))
            case "cancel":
                job = _find(control.status()["jobs"], args.job)
                control.change("stop", job)
                emit(f"job {job[:8]} is cancelled")
            case "drain":
                control.request(msg.DrainNode(0, args.node, not args.undo))
                emit(f"node {printable(args.node)} {'may have jobs again' if args.undo else 'drains'}")
    return 0


def _up(args: argparse.Namespace) -> int:
    from gpumux import config
    from gpumux.coordinator.config import load, of_endpoints
    from gpumux.coordinator.main import run as serve

    files = [each for each in args.daemons if "://" not in each]
    if len(files) > 1 or (files and len(args.daemons) > 1):
        raise ConfigError("a cluster's file beside other daemons", "name all of them in the file, or none")
    cluster = load(Path(files[0])) if files else of_endpoints(args.daemons)
    given = {"state_dir": args.state_dir, "endpoint": args.endpoint, "metrics_port": args.metrics_port}
    environ = {key: value for key, value in os.environ.items() if key != "GPUMUX_ENDPOINT"}  # a daemon's
    again = (lambda: load(Path(files[0]))) if files else None
    return serve(config.load(given, environ, args.config), cluster, again=again)


def _down(args: argparse.Namespace) -> int:
    found = resolve_coordinator(args.cluster)
    if found.path is None:
        raise ConfigError(f"{found.text} may be on another machine", "stop it where it runs")
    pid = living_holder(found.path)
    if pid is None:
        raise DaemonGone(f"no coordinator serves at {found.text}", START_COORDINATOR)
    try:
        os.kill(pid, signal.SIGTERM)
    except PermissionError:
        raise ConfigError(f"the coordinator, process {pid}, is another user's", "ask that user, or root") from None
    until = time.monotonic() + LEAVE_S
    while _listens(found):
        if time.monotonic() > until:
            raise DaemonGone(f"the coordinator, process {pid}, has not stopped in {LEAVE_S:g} s", "see its log")
        time.sleep(0.05)
    emit("the coordinator has stopped; jobs go on where they run")
    return 0


def _listens(endpoint: Endpoint) -> bool:
    try:
        check_listening(endpoint, "")
    except DaemonGone:
        return False
    return True


def _find(jobs: Sequence[dict[str, Any]], text: str) -> str:
    """The whole id of the job that is meant. Raises UnknownJob if none is, or several are."""
    mine = [job for job in jobs if job["mine"]]
    exact = [job for job in mine if text in (job["job"], job["short"], job["name"])]
    found = exact or [job for job in mine if job["job"].startswith(text)]
    if len(found) == 1:
        return str(found[0]["job"])
    if found:
        listed = ", ".join(job["short"] for job in found)
        raise UnknownJob(f"{printable(text)!r} may be {listed}", "write more of the id")
    raise UnknownJob(f"the cluster has no job {printable(text)!r} of yours", "`gpumux cluster jobs` lists them")


def _status(body: dict[str, Any]) -> str:
    nodes = body["nodes"]
    rows = [
        [
            printable(node["name"]), printable(node["host"]), node["state"], str(node["jobs"]),
            _promise(node), f"{node['used_bytes'] / GIB:.1f} of {node['memory_bytes'] / GIB:.1f} GiB",
            printable(node["why"] or node["endpoint"]),
        ]
        for node in nodes
    ]  # fmt: skip
    jobs = body["jobs"]
    waiting = sum(job["state"] == "waiting" for job in jobs)
    running = sum(job["state"] == "running" for job in jobs)
    up = sum(node["state"] == "up" for node in nodes)
    first = f"{up} of {len(nodes)} nodes up, {running} jobs run, {waiting} wait, {body['pairs']} pairs measured"
    if not rows:
        return first
    return first + "\n\n" + table(("NODE", "HOST", "STATE", "JOBS", "HIGH", "MEMORY", "WHERE, OR WHY NOT"), rows)


def _promise(node: dict[str, Any]) -> str:
    """Whether the node has a high job, and how that fares."""
    if not node["high"]:
        return "no"
    return {None: "yes", True: "kept", False: "BROKEN"}[node["kept"]]


def _jobs(jobs: Sequence[dict[str, Any]]) -> str:
    if not jobs:
        return "the cluster has no jobs"
    rows = [
        [
            job["short"], printable(job["name"]) or "(another user's)", printable(job["user"]), job["priority"],
            str(job["devices"]), f"{job['memory_bytes'] / GIB:.1f} GiB", job["state"], f"{job['since_s']:.0f} s",
            printable(job["why"]),
        ]
        for job in jobs
    ]  # fmt: skip
    return table(("JOB", "NAME", "USER", "PRIORITY", "GPUS", "EACH", "STATE", "SINCE", "WHY"), rows)
