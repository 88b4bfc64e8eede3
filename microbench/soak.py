"""A daemon with many clients, some of them hostile: they join, work, pause, change, leave, hang, are killed, or send
garbage.

Up to a few hundred clients: most are light ones that speak the protocol through gpumux's session, twelve in a process,
some train with torch. Beside them an operator pauses, stops and regrades jobs, processes of clients are killed and
stopped for longer than a lease, and hostile clients (soaking/hostile_clients.py) send invalid bytes and messages and
open too many connections; if we are root, one of them runs as another user. All of it is derived from the seed
(soaking/plan.py). The scheduler's invariants are checked meanwhile.

Afterwards: every acknowledged step must have had the right bits (worked out beside it, or by the same loop without a
daemon), and the daemon must hold what it held before: descriptors, shared memory, processes, and memory after the last
round as after the first.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpumux.cli.control import Control
from gpumux.errors import GpumuxError
from microbench import common
from microbench.soaking import plan, watch
from microbench.soaking.counters import FIELDS, SharedCounters
from microbench.soaking.rounds import RoundContext, RunningRound, at_rest

START_S, STOP_S, REST_S = 90.0, 60.0, 60.0
FILES = 4096  # descriptors the daemon may have: below it `gpumux doctor` warns
LARGEST = 4 << 20  # bytes of a frame: hostile clients should not have to send 256 MiB
LOW_NICE = 5  # at the default of 19 any other work on the machine would stop low jobs for minutes
OTHER_USER = 65534
MEMORY_SLACK = 24 << 20
WHY_SLACK = (
    "allocators keep what they were given: the peaks of two rounds differ by the jobs, Programs and hostile clients"
    " that ran at once; a leak of 200 bytes a step would be more"
)
LEAST_CHECKS = 20


class Daemon:
    """A checked daemon (soaking/checked.py) of our own."""

    def __init__(self, directory: Path, clients: int, environment: dict[str, str]) -> None:
        self.endpoint = f"ipc://{directory}/gpumux.sock"
        self.log = directory / "daemon.log"
        self.checks = directory / "checks.json"
        command = [sys.executable, "-m", "microbench.soaking.checked", "serve", "--device", "cpu", "--threads", "1"]
        command += ["--endpoint", self.endpoint, "--metrics-port", "0", "--state-dir", str(directory / "state")]
        settings = {
            "SOAK_CHECKS": self.checks, "SOAK_FILES": FILES, "GPUMUX_MAX_JOBS_PER_USER": clients + 16,
            "GPUMUX_MAX_SESSIONS_PER_USER": 2 * clients + 32, "GPUMUX_MAX_SESSIONS": 3 * clients + 96,
            "GPUMUX_MAX_MESSAGE_BYTES": LARGEST, "GPUMUX_SNAPSHOT_S": 5, "GPUMUX_KEEP_S": 2,
            "GPUMUX_LOW_NICE": LOW_NICE, "GPUMUX_LEASE_S": plan.LEASE_S,
        }  # fmt: skip
        clean = {name: value for name, value in environment.items() if not name.startswith("GPUMUX_")}
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, process_group=0, umask=0,
                env=clean | {name: str(value) for name, value in settings.items()},
            )  # fmt: skip

    def alive(self) -> None:
        """Raises RuntimeError when it is not."""
        if self.process.poll() is not None:
            raise RuntimeError(f"the daemon ended with {self.process.returncode}:\n{self.said()}")

    def said(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]

    def connect(self) -> Control:
        until = time.monotonic() + START_S
        while True:
            self.alive()
            with suppress(GpumuxError):
                return Control(self.endpoint, REST_S)
            if time.monotonic() > until:
                raise RuntimeError(f"the daemon does not answer:\n{self.said()}")
            time.sleep(0.05)

    def stop(self) -> int:
        """Its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def settled(daemon: Daemon, control: Control, before: watch.Holding | None) -> watch.Holding:
    """What it holds at rest: once it holds no more than `before`, or after REST_S. What is on its way out (half-open
    connections have five seconds) is no leak, and its collector runs when nothing else does."""
    until = time.monotonic() + REST_S
    at_rest(control, daemon.alive, REST_S)
    if before is None:
        control.wait(2.0)
    while True:
        control.wait(1.0)
        now = watch.holding(daemon.process.pid)
        if before is None or time.monotonic() > until or not _more(before, now):
            return now


def _more(before: watch.Holding, now: watch.Holding) -> bool:
    return now.descriptors > before.descriptors or now.segments > before.segments or now.processes > before.processes


def soak(
    rounds: list[plan.Round], directory: Path, args: argparse.Namespace, say: Callable[[str], None]
) -> dict[str, Any]:
    """Everything there is to report. Raises RuntimeError when the daemon, or a client, does not survive it."""
    clients = args.clients
    mark = f"SOAK_RUN={uuid.uuid4().hex}"
    environment = {**os.environ, **dict([mark.split("=")])}
    other_user = OTHER_USER if os.geteuid() == 0 else 0
    if other_user:
        directory.chmod(0o711)
    counted: Counter[str] = Counter()
    troubles: list[str] = []
    holdings: list[watch.Holding] = []
    curve: list[dict[str, Any]] = []
    peak: dict[str, int] = {"memory": 0, "descriptors": 0, "processes": 0}
    with ExitStack() as stack:
        daemon = Daemon(directory, clients, environment)
        stack.callback(daemon.close)
        control = daemon.connect()
        stack.callback(control._shut)
        at_start = settled(daemon, control, None)
        say(f"at the start: {_words(at_start)}")
        context = RoundContext(daemon.endpoint, directory, environment, LARGEST, other_user, daemon.alive, say)
        refusals: Counter[str] = Counter()
        began = time.monotonic()
        for round_ in rounds:
            (directory / f"counters-{round_.number}").mkdir()
            counters = SharedCounters.create(directory / f"counters-{round_.number}" / "counters", len(round_.slots))
            stack.callback(counters.close)
            running = RunningRound(round_, context, control, counters)
            stack.callback(running.close)

            def tell(at: float, round_: plan.Round = round_, counters: SharedCounters = counters) -> str:
                now = watch.holding(daemon.process.pid)
                for name, value in (
                    ("memory", now.memory),
                    ("descriptors", now.descriptors),
                    ("processes", now.processes),
                ):
                    peak[name] = max(peak[name], value)
                steps = counters.total("right") + counted["right"]
                curve.append(_point(time.monotonic() - began, round_.number, daemon.process.pid, now, steps))
                return (
                    f"round {round_.number + 1}, {at:3.0f} of {round_.seconds:.0f} s: {counters.total('lives')} lives,"
                    f" {counters.total('right')} steps right, {counters.total('wrong')} wrong,"
                    f" {context.done['kill']} kills; {_words(now)}"
                )

            running.run(tell)
            holdings.append(settled(daemon, control, at_start))
            steps = counters.total("right") + counted["right"]
            at = time.monotonic() - began
            curve.append(_point(at, round_.number, daemon.process.pid, holdings[-1], steps) | {"at_rest": True})
            say(f"after round {round_.number + 1}: {_words(holdings[-1])}")
            counted.update({name: counters.total(name) for name in FIELDS})
            troubles += counters.troubles()
            refusals += running.refusals
        seconds = time.monotonic() - began
        shared = control.status()["memory"]["shared_bytes"]
        control.close()
        code = daemon.stop()
        left = watch.marked(mark)
        files = sorted(p.name for p in directory.iterdir() if p.name.startswith("gpumux.sock") and p.suffix != ".lock")
        checks = json.loads(daemon.checks.read_text())
        log = daemon.log.read_text(errors="replace")
    say("running the training loops again, without a daemon")
    from microbench.soaking import trainers  # torch

    verdict = trainers.verify(directory / "results", args.compare, args.seed)
    return {
        "seconds": round(seconds, 1), "counted": dict(counted), "trained": asdict(verdict),
        "happened": dict(context.done), "vandalism": dict(context.vandalism), "operator_refused": dict(refusals),
        "invariants": checks, "peak": peak, "at_start": asdict(at_start), "after_tides": [asdict(h) for h in holdings],
        "curve": curve,
        "checks": _checks(at_start, holdings, shared, code, left, files, counted, troubles, verdict, checks, log),
        "troubles": troubles[:50],
    }  # fmt: skip


def _point(at: float, round_: int, pid: int, now: watch.Holding, steps: int) -> dict[str, Any]:
    """One point of the curve: what the daemon holds `at` seconds after the first round began, and the light clients'
    steps until then. `executors` is the number of processes that run jobs, `jobs_memory` their resident bytes."""
    executors = watch.executors(pid)
    return {
        "at_s": round(at, 1), "round": round_, "steps": steps, "memory": now.memory, "daemon": now.resident["daemon"],
        "descriptors": now.descriptors, "threads": watch.threads(pid), "segments": now.segments,
        "processes": now.processes, "executors": len(executors), "jobs_memory": sum(map(watch.resident, executors)),
    }  # fmt: skip


def _words(holding: watch.Holding) -> str:
    return (
        f"{holding.memory / 2**20:.0f} MiB, {holding.descriptors} descriptors, {holding.segments} segments, "
        f"{holding.processes} processes"
    )


def _checks(
    at_start: watch.Holding, holdings: list[watch.Holding], shared: int, code: int, left: list[int], files: list[str],
    counted: Counter[str], troubles: list[str], verdict: Any, checks: dict[str, int], log: str,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Name -> {value, limit, met} and, where there is a tolerance, its reason."""
    first, last = holdings[0], holdings[-1]
    found: dict[str, dict[str, Any]] = {}

    def most(name: str, value: float, limit: float, why: str = "") -> None:
        found[name] = {"value": value, "limit": limit, "met": value <= limit} | ({"why": why} if why else {})

    most("steps with wrong bits", counted["wrong"] + verdict.results_wrong, 0)
    most("states with wrong bits", counted["states_wrong"] + verdict.states_wrong, 0)
    most("what should not have been", len(troubles), 0)
    most("internal errors in the daemon's log", log.count("internal error"), 0)
    most("exit code of the daemon", code, 0)
    most("descriptors more than at the start", last.descriptors - at_start.descriptors, 0)
    most("segments more than at the start", last.segments - at_start.segments, 0)
    most("shared bytes still charged", shared, 0)
    most("processes more than at the start", last.processes - at_start.processes, 0)
    most("memory more than after the first round", last.memory - first.memory, MEMORY_SLACK, WHY_SLACK)
    most("processes left behind", len(left), 0)
    most("files left behind", len(files), 0)
    done = checks["checks"]
    found["checks of the invariants"] = {"value": done, "limit": LEAST_CHECKS, "met": done >= LEAST_CHECKS}
    right = counted["right"] + verdict.acknowledged
    found["steps acknowledged"] = {"value": right, "limit": 1, "met": right >= 1}
    return found


def main(argv: list[str] | None = None) -> int:
    parser = common.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=300.0, help="of all rounds together")
    parser.add_argument("--clients", type=int, default=100, help="at a time")
    parser.add_argument("--seed", type=int, default=0, help="of all that happens")
    parser.add_argument("--rounds", type=int, default=2, help="how often all clients connect and leave")
    parser.add_argument(
        "--compare", type=float, default=600.0, help="seconds to run training loops again in, to compare their results"
    )
    args = parser.parse_args(argv)
    try:
        rounds = plan.make(args.seed, args.seconds, args.clients, args.rounds)
    except ValueError as error:
        parser.error(str(error))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # nothing must be left behind
    facts = common.machine()
    directory = Path(tempfile.mkdtemp(prefix="gm-"))
    try:
        found = soak(rounds, directory, args, lambda text: print(text, file=sys.stderr, flush=True))
    except RuntimeError as error:
        print(f"NOT survived: {error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    _show(found, args)
    met = all(check["met"] for check in found["checks"].values())
    options = {name: getattr(args, name) for name in ("seconds", "clients", "seed", "rounds", "compare")} | {
        "plan": plan.digest(rounds)
    }
    common.report("soak", args.out, {"machine": facts, "options": options, **found, "met": met})
    return 0 if met else 1


def _show(found: dict[str, Any], args: Any) -> None:
    counted, trained = found["counted"], found["trained"]
    print(
        f"{args.clients} clients for {found['seconds']:.0f} s, seed {args.seed}: {counted['lives']} lives,"
        f" {counted['right']} light and {trained['acknowledged']} training steps acknowledged"
        f" ({trained['results']} of these compared),"
        f" {counted['states_right'] + trained['states']} states compared"
    )
    for name in ("happened", "vandalism", "operator_refused", "invariants"):
        print(f"{name.replace('_', ' ')}: " + ", ".join(f"{value} {key}" for key, value in sorted(found[name].items())))
    rows = [
        (name, f"{check['value']:,}", f"{check['limit']:,}", "ok" if check["met"] else "BROKEN")
        for name, check in found["checks"].items()
    ]
    print(common.table(("", "found", "limit", ""), rows))
    for text in found["troubles"][:10]:
        print(f"trouble: {text}")


if __name__ == "__main__":
    sys.exit(main())
