"""`gpumux cluster up|run|status|jobs|explain|cancel|drain|down`."""

from __future__ import annotations

import argparse
import os
import re
import signal
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpumux.cli.control import START_COORDINATOR, Control
from gpumux.cli.text import emit, emit_json, printable, table
from gpumux.errors import ConfigError, DaemonGone, UnknownJob
from gpumux.types import MAX_JOB_NAME
from gpumux.wire import messages as msg
from gpumux.wire.endpoint import Endpoint, check_listening, living_holder, resolve_coordinator

if TYPE_CHECKING:
    from gpumux.coordinator.ray.plan import RaySettings

LEAVE_S = 15.0
GIB = 2**30


def run(args: argparse.Namespace) -> int:
    if args.verb == "up":
        return _up(args)
    if args.verb == "down":
        return _down(args)
    found = resolve_coordinator(args.cluster)
    if args.verb == "run":
        return _run_script(args, found)
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

    ray = _ray_settings(args)
    files = [each for each in args.daemons if "://" not in each]
    for each in files:
        if not Path(each).exists() and re.fullmatch(r"[\w.\-]+:\d+|\[[0-9a-fA-F:]+\]:\d+", each):
            raise ConfigError(f"{each} is neither an endpoint nor a file", f"write tcp://{each}")
    if len(files) > 1 or (files and len(args.daemons) > 1):
        raise ConfigError("a cluster's file beside other daemons", "name all of them in the file, or none")
    if ray is not None and len(files) < len(args.daemons):
        raise ConfigError("--ray beside daemons", "leave out one of them: with --ray, Ray's nodes have the daemons")
    if ray is None and not args.daemons:
        raise ConfigError("no daemons are named", "name their endpoints, a cluster's file, or --ray")
    cluster = load(Path(files[0]), daemons=ray is None) if files else of_endpoints(args.daemons)
    given = {"state_dir": args.state_dir, "endpoint": args.endpoint, "metrics_port": args.metrics_port}
    environ = {key: value for key, value in os.environ.items() if key != "GPUMUX_ENDPOINT"}  # a daemon's
    settings = config.load(given, environ, args.config)
    if ray is not None:
        from gpumux.coordinator.ray.membership import RayCluster

        with closing(RayCluster(args.ray, ray)) as joined:
            return serve(settings, cluster, membership=joined.membership, ray=joined.address)
    return serve(settings, cluster, again=(lambda: load(Path(files[0]))) if files else None)


def _ray_settings(args: argparse.Namespace) -> RaySettings | None:
    """What is said of the daemons on Ray's nodes; None without --ray. Raises ConfigError."""
    from gpumux import config
    from gpumux.coordinator.ray.plan import RaySettings

    given = {
        "device": args.device,
        "daemons_per_node": args.daemons_per_node,
        "resource": args.resource,
        "port": args.port,
        "daemon_config": args.daemon_config,
        "state_dir": args.daemon_state_dir,
    }
    said = {name: value for name, value in given.items() if value is not None}
    if args.ray is None:
        if said:
            flag = "--daemon-state-dir" if "state_dir" in said else "--" + next(iter(said)).replace("_", "-")
            raise ConfigError(f"{flag} is of daemons on Ray's nodes", "write --ray, too, or leave it out")
        return None
    if args.ray.endswith(".toml") or "://" in args.ray.removeprefix("ray://"):
        raise ConfigError(f"{args.ray} is no address of a Ray cluster", "write the cluster's file before --ray")
    if args.ray.startswith("ray://"):
        raise ConfigError(f"{args.ray} is of a Ray client", "name the address of the cluster itself, as HOST:6379")
    if args.daemons_per_node is not None and said.get("device", "cuda") == "cuda":
        raise ConfigError(
            "--daemons-per-node with GPUs, which have one daemon each", "choose --device cpu, or leave it"
        )
    if said.get("daemons_per_node", 1) < 1 or not 1 <= said.get("port", 1) <= 65000:
        raise ConfigError("a number of daemons or a port that can't be", "write 1 or more, and a port below 65000")
    if args.daemon_config is not None:
        found = config.from_file(Path(args.daemon_config))
        if "endpoint" in found:
            raise ConfigError(f"{args.daemon_config} has an endpoint", "leave it out: each daemon has one of its own")
        said["keys"] = bool(found.get("curve_secret_key")) and bool(found.get("curve_client_keys"))
    return RaySettings(**said)


def _run_script(args: argparse.Namespace, endpoint: Endpoint) -> int:
    from gpumux.coordinator.run_script import ScriptRequest, environment_of, name_of, run_script
    from gpumux.coordinator.script import ScriptCommand

    name = args.name or name_of(args.script)
    if len(name) > MAX_JOB_NAME or not name.isprintable():
        raise ConfigError(f"the name {name!r:.60}", f"use at most {MAX_JOB_NAME} printable characters: --name NAME")
    command = ScriptCommand(
        script=args.script,
        arguments=tuple(args.arguments),
        directory=os.path.abspath(args.cwd or "."),
        python=args.python,
        environment=environment_of(args.env),
    )
    request = ScriptRequest(
        command=command,
        name=name,
        priority=int(args.priority == "high"),
        devices=args.gpus,
        nbytes=int(args.memory),
        ship=args.ship,
    )
    return run_script(endpoint, request)


def _down(args: argparse.Namespace) -> int:
    found = resolve_coordinator(args.cluster)
    if found.path is None:
        raise ConfigError(f"{found.text} may be on another machine", "stop it where it runs")
    pid = living_holder(found.path)
    if pid is None and _listens(found):
        raise ConfigError(f"the coordinator at {found.text} is another user's", "ask that user, or root")
    if pid is None:
        raise DaemonGone(f"no coordinator at {found.text}", START_COORDINATOR)
    with Control(found.text, args.timeout, coordinator=True):
        pass  # raises for a daemon, which has jobs
    try:
        os.kill(pid, signal.SIGTERM)
    except PermissionError:
        raise ConfigError(f"the coordinator, process {pid}, is another user's", "ask that user, or root") from None
    until = time.monotonic() + LEAVE_S
    while _listens(found):
        if time.monotonic() > until:
            raise DaemonGone(f"the coordinator, process {pid}, has not stopped in {LEAVE_S:g} s", "see its log")
        time.sleep(0.05)
    emit("the coordinator has stopped; jobs go on where they run, and daemons that it started over Ray have ended")
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
    page = body["cluster"].get("page", "")
    if page:
        first += f"\nstatus page: {printable(page)}/"
    if not rows:
        return first
    return first + "\n\n" + table(("NODE", "HOST", "STATE", "JOBS", "HIGH", "MEMORY", "WHERE, OR WHY NOT"), rows)


def _promise(node: dict[str, Any]) -> str:
    """Whether the node has a high job, and how that fares."""
    if not node["high"]:
        return "no"
    return {None: "yes", True: "kept", False: "BROKEN"}[node["kept"]]


def _devices(job: dict[str, Any]) -> str:
    """How many it has or waits for, "3 of 4" of a gang that goes on with fewer than it was submitted for."""
    count, asked = job["devices"], job.get("asked", job["devices"])
    return str(count) if count == asked else f"{count} of {asked}"


def _jobs(jobs: Sequence[dict[str, Any]]) -> str:
    if not jobs:
        return "the cluster has no jobs"
    rows = [
        [
            job["short"], printable(job["name"]) or "(another user's)", printable(job["user"]), job["priority"],
            _devices(job), f"{job['memory_bytes'] / GIB:.1f} GiB", job["state"], f"{job['since_s']:.0f} s",
            printable(job["why"]),
        ]
        for job in jobs
    ]  # fmt: skip
    return table(("JOB", "NAME", "USER", "PRIORITY", "GPUS", "EACH", "STATE", "SINCE", "WHY"), rows)
