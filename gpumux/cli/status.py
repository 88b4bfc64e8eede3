"""`gpumux status`: the daemon, its device and its jobs."""

from __future__ import annotations

import argparse
from typing import Any

from gpumux.cli.control import Control
from gpumux.cli.jobs import job_table
from gpumux.cli.text import duration, emit, emit_json, size


def run(args: argparse.Namespace) -> int:
    with Control(args.endpoint, args.timeout) as control:
        body = control.status()
    if args.json:
        emit_json(body)
    else:
        emit(describe(body))
    return 0


def _guard(guard: dict[str, Any] | None) -> list[str]:
    """What the guard did so far, the most frequent reason for holding low work first."""
    if guard is None:
        return []
    held = sorted(((s, reason) for reason, s in guard["held_s"].items() if s >= 0.05), reverse=True)
    why = ", ".join(f"{reason} {duration(s)}" for s, reason in held)
    return [
        f"guard    {guard['bans']} bans in force, {guard['bans_total']} ever; low work ran for "
        f"{duration(guard['harvested_s'])} beside high jobs" + (f", held: {why}" if why else "")
    ]


def describe(body: dict[str, Any]) -> str:
    """The report of GetStatus as lines of text."""
    daemon, device, memory = body["daemon"], body["device"], body["memory"]
    metrics = f"http://{daemon['metrics_host']}:{daemon['metrics_port']}/metrics" if daemon["metrics_port"] else "off"
    lines = [
        f"daemon   gpumux {daemon['version']}, pid {daemon['pid']}, up {duration(daemon['uptime_s'])}, "
        f"policy {daemon['policy']}" + (f", core {daemon['core']}" if "core" in daemon else ""),
        f"listens  {', '.join(daemon['endpoints'])}",
        f"metrics  {metrics}",
        f"device   {device['kind']}: {device['name']}, torch {device['torch_version']}"
        + (f", {device['threads']} threads a piece" if device["threads"] else "")
        + (f", {device['parallel']} pieces at once" if device["parallel"] else ""),
        f"memory   {size(memory['free_bytes'])} free of {size(memory['total_bytes'])}, "
        f"{size(memory['shared_bytes'])} shared with clients",
        f"clients  {body['sessions']}",
        *_guard(body["guard"]),
        "",
        job_table(body["jobs"]) if body["jobs"] else "no jobs",
    ]
    return "\n".join(lines)
