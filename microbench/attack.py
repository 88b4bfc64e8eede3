"""A daemon under attack: changed messages, packets and Programs by two users, as fast as it takes them, and kills of
every kind of process. Other users' jobs are compared, bit for bit, with the same loops run without a daemon.

windows   A job of high priority takes a step every few milliseconds. Windows with and without attackers alternate until
          so many messages and Programs were handled; its 99th percentile in each is compared. The daemon, its
          processes and the job share one core, the attackers have another.
kills     Four training jobs run while one process after another gets SIGKILL: the daemon, its fork server, its writer
          of snapshots, processes of jobs, processes that check Programs, clients that attack.

Run by root, the attackers are users of their own, otherwise this one. With --trusted it is this one that sends
Programs: of the daemon's user it checks as many as come, so 10^5 take a quarter of an hour in place of an hour and a
half.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from microbench import common, kills
from microbench.daemon import running_daemon
from microbench.killed import dropout_adam, plain
from microbench.kills import Blows, Phoenix, Ranks, differences, submit
from microbench.soaking import watch
from microbench.soaking.attackers import ATTACK, FIELDS, LEAVE, REST
from microbench.soaking.counters import SharedCounters

KINDS = ("messages", "programs")
USERS = (60_001, 60_002)
TARGET = 2.0
PACE_S = 0.004  # between an answer and the next step
WARM_STEPS = 200
REST_S = 120.0
STATE = {"GPUMUX_SNAPSHOT_S": "5"}
# How often each kind of process is killed. Attackers and checkers start again in a moment, daemons in seconds.
OFTEN = {"attacker": 0.3, "checker": 0.25, "executor": 0.2, "daemon": 0.1, "fork server": 0.08, "writer": 0.07}


@dataclass
class Attackers:
    """A process for each of KINDS, on `cores`."""

    endpoint: str
    victim: str  # id of a job
    directory: Path
    seed: int
    cores: set[int]
    trusted: bool = False  # the daemon's own user sends Programs, of whom it checks as many as come
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        path = self.directory / "attackers"
        self.counters = SharedCounters.create(path, 1 + len(KINDS), FIELDS)
        if os.geteuid() == 0:
            path.chmod(0o666)
            self.directory.chmod(0o711)
        self._lives = 0
        self.processes = [self._start(n) for n in range(len(KINDS))]

    def _start(self, n: int) -> subprocess.Popen[bytes]:
        self._lives += 1
        own = self.trusted and KINDS[n] == "programs"
        uid = USERS[n] if os.geteuid() == 0 and not own else 0
        command = [sys.executable, "-m", "microbench.soaking.attackers", self.endpoint, KINDS[n]]
        command += [str(1000 * self.seed + self._lives), str(uid), str(self.counters.path)]
        command += [str(self.counters.slots), str(n + 1), self.victim]
        with (self.directory / "attackers.log").open("ab") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0
            )  # fmt: skip
        os.sched_setaffinity(process.pid, self.cores)
        return process

    def order(self, order: int) -> None:
        self.counters.add(0, "order", order - self.counters.get(0, "order"))

    def counted(self) -> dict[str, int]:
        return {name: self.counters.total(name) for name in FIELDS if name not in ("order", "daemons", "resting")}

    def check(self) -> None:
        """Raises RuntimeError if one has ended."""
        if any(process.poll() is not None for process in self.processes):
            raise RuntimeError(f"an attacker ended:\n{self.said()}")

    def rest(self) -> None:
        """Wait until what they have sent is answered."""
        self.order(REST)
        until = time.monotonic() + REST_S
        while self.counters.total("resting") < len(KINDS):
            self.check()
            if time.monotonic() > until:
                raise RuntimeError(f"attackers got no answer within {REST_S:.0f} s:\n{self.said()}")
            time.sleep(0.01)

    def kill(self, draw: random.Random) -> None:
        n = draw.randrange(len(KINDS))
        self.processes[n].kill()
        self.processes[n].wait()
        self.counters.add(n + 1, "resting", -self.counters.get(n + 1, "resting"))
        self.processes[n] = self._start(n)

    def said(self) -> str:
        return (self.directory / "attackers.log").read_text(errors="replace")[-4000:]

    def close(self) -> None:
        self.order(LEAVE)
        for process in self.processes:
            try:
                process.wait(REST_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.counters.close()


# ---- Windows


@dataclass
class Victim:
    """A training job of high priority, and how long its steps take."""

    run: kills.Run

    def window(self, seconds: float) -> list[float]:
        """Seconds of each step in a window."""
        taken = []
        until = time.monotonic() + seconds
        while (began := time.monotonic()) < until:
            self.step()
            taken.append(time.monotonic() - began)
            time.sleep(PACE_S)
        return taken

    def step(self) -> None:
        for name, batch in self.run.trial.turn(self.run.turns):
            self.run.results.append(self.run.calls[name](*batch).result())
        self.run.turns += 1


def windows(args: Any, directory: Path, own: set[int], theirs: set[int]) -> dict[str, Any]:
    """Everything about the windows. Raises RuntimeError when an attacker or the daemon does not live."""
    quiet: list[list[float]] = []
    attacked: list[list[float]] = []
    with ExitStack() as stack:
        daemon = stack.enter_context(
            running_daemon(policy="guarded", cores=own, flags=["--state-dir", str(directory / "state")], settings=STATE)
        )
        opened(daemon.directory)
        victim = Victim(submit(dropout_adam(args.seed), daemon.endpoint, priority="high"))
        stack.callback(victim.run.job.close)
        attackers = Attackers(daemon.endpoint, victim.run.job.id, directory, args.seed, theirs, args.trusted)
        stack.callback(attackers.close)
        for _ in range(WARM_STEPS):
            victim.step()
        began = time.monotonic()
        before = watch.resident(daemon.process.pid)
        while True:
            attackers.rest()
            quiet.append(victim.window(args.window))
            counted = attackers.counted()
            handled = counted["messages"] + counted["malformed"] + counted["packets"]
            say(
                f"{len(attacked)} windows, {time.monotonic() - began:.0f} s: {handled} messages,"
                f" {counted['programs']} Programs; {_ratios(quiet, attacked)}"
            )
            if len(attacked) >= args.least and handled >= args.messages and counted["programs"] >= args.programs:
                break
            attackers.order(ATTACK)
            attacked.append(victim.window(args.attacked))
            attackers.check()
        seconds = time.monotonic() - began
        grown = watch.resident(daemon.process.pid) - before
        counted = attackers.counted()
        status = daemon.status()
        victim.run.finish()
        results, state = victim.run.results, victim.run.trial.state()
        log = daemon.log.read_text(errors="replace")
    alone = dropout_adam(args.seed)
    expected = plain(alone, victim.run.turns)
    return {
        "seconds": round(seconds, 1), "counted": counted, "steps": len(results),
        "results_that_differ": differences(results, expected),
        "state_tensors_that_differ": differences(state, alone.state()),
        "quiet_p99_s": _figure(quiet, 0.99), "attacked_p99_s": _figure(attacked, 0.99),
        "quiet_median_s": _figure(quiet, 0.5), "attacked_median_s": _figure(attacked, 0.5),
        "p99_ratio": common.figure([b / a for a, b in zip(_each(quiet, 0.99), _each(attacked, 0.99), strict=False)]),
        "windows": len(attacked), "daemon_grown_bytes": grown, "internal_errors": log.count("internal error"),
        "jobs_left": len(status["jobs"]),
    }  # fmt: skip


def _each(runs: list[list[float]], share: float) -> list[float]:
    return [common.percentile(run, share) for run in runs]


def _figure(runs: list[list[float]], share: float) -> common.Figure:
    return common.figure(_each(runs, share))


def _ratios(quiet: list[list[float]], attacked: list[list[float]]) -> str:
    if not attacked:
        return "attackers rest"
    before, during = common.percentile(quiet[-2], 0.99), common.percentile(attacked[-1], 0.99)
    return f"p99 {1e3 * before:.1f} ms, attacked {1e3 * during:.1f} ms"


def opened(directory: Path) -> None:
    """Let other users reach a daemon's sockets."""
    if os.geteuid() == 0:
        directory.chmod(0o711)
        for path in directory.glob("gpumux.sock*"):
            if path.suffix != ".lock":
                path.chmod(0o666)


# ---- Kills


class EveryKind(Blows):
    """Kills processes of every kind. `attackers` attack meanwhile."""

    attackers: Attackers

    def _next(self) -> None:
        self._wait()
        assert isinstance(self.daemon, Phoenix)
        opened(self.daemon.directory)
        kind = self.draw.choices(list(OFTEN), list(OFTEN.values()))[0]
        if self._kill(kind, self.daemon):
            self.done["kills"] += 1
            self.done[kind] = self.done.get(kind, 0) + 1

    def _kill(self, kind: str, daemon: Phoenix) -> bool:
        """Whether there was such a process."""
        if kind == "attacker":
            self.attackers.kill(self.draw)
        elif kind == "daemon":
            daemon.kill()
            self.attackers.counters.add(0, "daemons")
        else:
            found = [pid for pid in watch.descendants(daemon.process.pid) if kind_of(pid) == kind]
            if not found:
                return False
            try:
                os.kill(self.draw.choice(found), signal.SIGKILL)
            except ProcessLookupError:
                return False
        return True


def kind_of(pid: int) -> str:
    """What a process of a daemon is: a kind of OFTEN, or "" for others, and those that have ended."""
    try:
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    if b"snapshots.writer" in command:
        return "writer"
    return {"gpumux-executor": "executor", "gpumux-checker": "checker", "gpumux-zygote": "fork server"}.get(name, "")


def killed(args: Any, directory: Path, theirs: set[int]) -> dict[str, Any]:
    """Everything about the kills. Raises what goes wrong."""
    started: list[Attackers] = []

    def strikes(daemon: Phoenix | Ranks, *rest: Any) -> Blows:
        assert isinstance(daemon, Phoenix)
        opened(daemon.directory)
        blows = EveryKind(daemon, *rest)
        blows.attackers = Attackers(daemon.endpoint, "0" * 32, directory, args.seed + 1, theirs)
        started.append(blows.attackers)
        blows.attackers.order(ATTACK)
        return blows

    try:
        found = kills.measure(
            args.kills, args.seed, most=args.turns, others=0.0, pace_s=0.02, directory=directory, say=say,
            strikes=strikes,
        )  # fmt: skip
        return {**found, "counted": started[0].counted()}
    finally:
        for attackers in started:
            attackers.close()


# ---- All of it


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="gm-", ignore_cleanup_errors=True)


def main(argv: list[str] | None = None) -> int:
    parser = common.parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=("windows", "kills"), default=["windows", "kills"])
    parser.add_argument("--messages", type=int, default=1_000_000, help="messages and packets to be handled")
    parser.add_argument("--programs", type=int, default=100_000, help="Programs to be handled")
    parser.add_argument("--window", type=float, default=5.0, metavar="SECONDS", help="of a window without attackers")
    parser.add_argument("--attacked", type=float, default=20.0, metavar="SECONDS", help="of a window with them")
    parser.add_argument("--least", type=int, default=5, help="windows with attackers, at least")
    parser.add_argument("--kills", type=int, default=1000, help="processes to kill afterwards")
    parser.add_argument("--turns", type=int, default=8, help="of the jobs' loops between two kills, at most")
    parser.add_argument("--trusted", action="store_true", help="the daemon's own user sends the Programs")
    parser.add_argument("--seed", type=int, default=0, help="of messages, Programs, jobs and moments")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # nothing must be left behind
    facts = common.machine()
    cores = os.sched_getaffinity(0)
    own, theirs = {min(cores)}, cores - {min(cores)} or cores
    found: dict[str, Any] = {}
    try:
        if "windows" in args.parts:
            os.sched_setaffinity(0, own)
            with folder() as directory:
                found["windows"] = windows(args, Path(directory), own, theirs)
            os.sched_setaffinity(0, cores)
        if "kills" in args.parts:
            with folder() as directory:
                found["kills"] = killed(args, Path(directory), theirs)
    except RuntimeError as error:
        print(f"NOT survived: {error}", file=sys.stderr)
        return 1
    finally:
        os.sched_setaffinity(0, cores)
    print(common.describe(facts))
    targets: dict[str, Any] = {}
    differing = 0
    for row in [*([found["windows"]] if "windows" in found else ()), *found.get("kills", {"jobs": ()})["jobs"]]:
        differing += row["results_that_differ"] + row["state_tensors_that_differ"]
    targets["results and tensors that differ"] = {"value": differing, "target": 0, "met": not differing}
    if "windows" in found:
        value = found["windows"]["p99_ratio"].median
        targets["p99 under attack over p99"] = {"value": value, "target": TARGET, "met": value <= TARGET}
    _show(found)
    options = {name: value for name, value in vars(args).items() if name != "out"}
    common.report("attack", args.out, {"machine": facts, "options": options, **found, "targets": targets})
    return int(bool(differing))


def _show(found: dict[str, Any]) -> None:
    if "windows" in found:
        _show_windows(found["windows"])
    if "kills" in found:
        _show_kills(found["kills"])


def _show_windows(part: dict[str, Any]) -> None:
    counts = ", ".join(f"{value:,} {name}" for name, value in part["counted"].items())
    print(f"windows: {part['seconds']:.0f} s, {part['windows']} with attackers: {counts}")
    rows = [
        (name, *(f"{1e3 * part[f'{way}_{name}_s'].median:.2f}" for way in ("quiet", "attacked")))
        for name in ("median", "p99")
    ]
    print(common.table(("ms a step", "quiet", "attacked"), rows))
    ratio = part["p99_ratio"]
    print(f"p99, attacked over quiet: {ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})")
    print(
        f"{part['steps']} steps: {part['results_that_differ']} results differ; the daemon grew by"
        f" {part['daemon_grown_bytes'] / 2**20:.1f} MiB"
    )


def _show_kills(part: dict[str, Any]) -> None:
    print(f"kills: {part['seconds']:.0f} s: " + ", ".join(f"{n} {kind}" for kind, n in part["blows"].items() if n))
    print("meanwhile: " + ", ".join(f"{value:,} {name}" for name, value in part["counted"].items()))
    rows = [
        (
            row["job"], str(row["steps"]), str(row["came_back"]), str(row["steps_run_again"]),
            str(row["results_that_differ"]), str(row["state_tensors_that_differ"]),
        )
        for row in part["jobs"]
    ]  # fmt: skip
    print(common.table(("job", "steps", "came back", "run again", "results differ", "tensors differ"), rows))
    for text in part["other_messages"][:10]:
        print(f"also said: {text}")


if __name__ == "__main__":
    sys.exit(main())
