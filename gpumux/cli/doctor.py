"""`gpumux doctor`: what this machine offers, what limits it, what is wrong and how to mend it."""

from __future__ import annotations

import argparse
import os
import platform
from dataclasses import asdict
from typing import Any

from gpumux import __version__
from gpumux.cli import checks, place
from gpumux.cli.checks import FAIL, OK, WARN, Finding
from gpumux.cli.control import Control
from gpumux.cli.text import emit, emit_json, size
from gpumux.config import ENV_CONFIG
from gpumux.errors import ConfigError, DaemonGone, GpumuxError
from gpumux.wire import endpoint as endpoints
from gpumux.wire.probe import check_listening


def run(args: argparse.Namespace) -> int:
    findings = examine(args.config, args.endpoint, args.timeout)
    if args.json:
        emit_json([asdict(finding) for finding in findings])
    else:
        emit(describe(findings))
    return 1 if any(finding.level == FAIL for finding in findings) else 0


def examine(path: str | None, endpoint: str | None, timeout: float) -> list[Finding]:
    """All findings, in the order they are shown."""
    valid, config = checks.configuration(path)
    address = endpoint or endpoints.preferred(config.endpoint) or endpoints.default_endpoint(config.gpu)
    findings = [Finding("gpumux", OK, f"{__version__}, Python {platform.python_version()}")]
    findings += [valid, *place.trusted_files(path or os.environ.get(ENV_CONFIG), config)]
    findings += [checks.gpu(), checks.cpu(), checks.torch(), checks.device(config)]
    findings += [checks.core(), place.versions()]
    findings += [*checks.shared_memory(), checks.temp_dir(), *checks.limits(), *checks.cgroup(), checks.memory()]
    findings.append(checks.state_dir(config.state_dir))
    try:
        found = endpoints.parse(address)
    except ConfigError as error:
        return [*findings, Finding("endpoint", FAIL, error.message, error.remedy)]
    if found.path is not None:
        findings += checks.runtime_dir(found.path.parent)
        findings += [place.lock(found.path), place.stale(found.path.parent), *place.sockets(found.path)]
    findings.append(daemon(address, timeout))
    return findings


def daemon(address: str, timeout: float) -> Finding:
    """Whether a daemon answers there, and whether it is of this version."""
    found = endpoints.parse(address)
    if found.path is not None and not found.path.exists():
        return Finding("daemon", OK, f"none at {address} (start one with `gpumux serve`)")
    try:
        check_listening(found, "start one with `gpumux serve`, which clears it away")
    except DaemonGone as error:
        return Finding("daemon", WARN, error.message, error.remedy)
    try:
        with Control(address, timeout) as control:
            body = control.status()
    except DaemonGone as error:  # somebody has the socket, and says nothing
        return Finding("daemon", FAIL if found.is_ipc else WARN, error.message, error.remedy)
    except GpumuxError as error:
        return Finding("daemon", WARN, error.message, error.remedy or "start it with `gpumux serve`")
    version = body["daemon"]["version"]
    detail = f"gpumux {version} at {address}, device {body['device']['name']}"
    if version != __version__:
        return Finding(
            "daemon", WARN, detail, f"this command is {__version__}: restart the daemon or install {version}"
        )
    memory = charged_and_measured(body.get("jobs", []))
    detail = f"{detail}; {memory}" if memory else detail
    if body["device"]["kind"] == "sim":
        return Finding("daemon", WARN, detail, "it computes nothing: jobs there get zeros; start one with --device cpu")
    return Finding("daemon", OK, detail)


def charged_and_measured(jobs: list[dict[str, Any]]) -> str:
    """What each job is charged and what it was measured to hold, "" where nothing was measured."""
    shown = [
        f"{job['short']} is charged {size(job['memory_bytes'])} and holds {size(job['measured_bytes'])}"
        for job in jobs
        if job.get("measured_bytes")
    ]
    return "memory: " + ", ".join(shown) if shown else ""


def describe(findings: list[Finding]) -> str:
    """One line a finding, and a remedy under what isn't well."""
    width = max(len(finding.name) for finding in findings)
    lines: list[str] = []
    for finding in findings:
        lines.append(f"{finding.level:<4}  {finding.name.ljust(width)}  {finding.detail}")
        if finding.remedy:
            lines.append(f"{'':<4}  {'':<{width}}  -> {finding.remedy}")
    counts = {level: sum(f.level == level for f in findings) for level in (WARN, FAIL)}
    lines.append(f"{counts[FAIL]} failed, {counts[WARN]} warnings")
    return "\n".join(lines)
