"""One round of a soak: processes of clients are started, killed, stopped for a while and ended, and an operator
changes jobs."""

from __future__ import annotations

import heapq
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from gpumux.cli.control import Control
from gpumux.errors import DaemonGone, GpumuxError
from microbench.soaking.counters import SharedCounters
from microbench.soaking.plan import LEASE_S, Disturbance, Round

CONNECT_S = 600.0  # from the start of the clients until all of them are connected
LEAVE_S = 660.0  # from SIGTERM to the end of a client's process: all are ended at once
PROGRESS_S = 5.0


@dataclass
class RoundContext:
    """What a round needs: the daemon's endpoint, a directory for files, the environment of all processes that it
    starts."""

    endpoint: str
    directory: Path
    environment: dict[str, str]
    largest: int  # frame the daemon takes
    other_user: int  # user id of the second hostile client, 0 for none
    alive: Callable[[], None]  # raises when the daemon is gone
    say: Callable[[str], None]
    done: Counter[str] = field(default_factory=Counter)
    vandalism: Counter[str] = field(default_factory=Counter)


class RunningRound:
    """A round in progress. It must be closed in any case."""

    def __init__(self, round_: Round, context: RoundContext, control: Control, counters: SharedCounters) -> None:
        self.round = round_
        self.context = context
        self.control = control
        self._counters = counters
        self._spec = context.directory / f"round-{round_.number}.json"
        results = context.directory / "results"
        results.mkdir(exist_ok=True)
        spec = {
            "endpoint": context.endpoint, "counters": str(counters.path), "all": len(round_.slots), "lease_s": LEASE_S,
            "round": round_.number, "results": str(results), "slots": [asdict(slot) for slot in round_.slots],
        }  # fmt: skip
        self._spec.write_text(json.dumps(spec))
        self.clients: dict[int, subprocess.Popen[bytes]] = {}
        self._hostile: list[subprocess.Popen[bytes]] = []
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self.refusals: Counter[str] = Counter()

    def run(self, tell: Callable[[float], str]) -> None:
        """Do all that is planned. `tell(seconds)` gives the progress line."""
        for process in self.round.processes:
            self._start(process)
        self._wait_for_clients()
        self._start_hostile_clients()
        began = time.monotonic()
        said = 0.0
        waiting = list(self.round.disturbances)
        while (at := time.monotonic() - began) < self.round.seconds:
            self.context.alive()
            while self._later and self._later[0][0] <= time.monotonic():
                heapq.heappop(self._later)[2]()
            while waiting and waiting[0].at_s <= at:
                self._disturb(waiting.pop(0))
            if at - said >= PROGRESS_S:
                said = at
                self.context.say(tell(at))
            self.control.wait(0.05)
        for late in waiting:  # all of the plan is done, even if the machine was too slow for it
            self._disturb(late)
        self._end_round()

    def _start(self, process: int) -> None:
        kind, *_ = [slot.kind for slot in self.round.of(process)]
        module = "trainers" if kind.startswith("torch") else "light"
        command = [sys.executable, "-m", f"microbench.soaking.{module}", str(self._spec), str(process)]
        log = (self.context.directory / "clients.log").open("ab")
        with log:
            self.clients[process] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.context.environment, process_group=0
            )

    def _wait_for_clients(self) -> None:
        """Wait until each slot has a client. The plan's clock starts then, so that importing torch is no part of it."""
        until = time.monotonic() + CONNECT_S
        while any(not self._counters.get(slot.number, "lives") for slot in self.round.slots):
            self.context.alive()
            gone = [str(client.args) for client in self.clients.values() if client.poll() is not None]
            if gone or time.monotonic() > until:
                raise RuntimeError(f"clients that never connected; gone: {gone}\n{self._said()}")
            self.control.wait(0.05)

    def _start_hostile_clients(self) -> None:
        for uid in {0, self.context.other_user}:
            command = [
                sys.executable,
                "-m",
                "microbench.soaking.hostile_clients",
                self.context.endpoint,
                str(self.round.seconds),
            ]
            command += [str(1000 * self.round.number + uid), str(self.context.largest), str(uid)]
            self._hostile.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    env=self.context.environment,
                    process_group=0,
                )
            )
        for hostile in self._hostile:
            assert hostile.stdout is not None
            while not select.select([hostile.stdout], [], [], 0)[0]:
                self.context.alive()
                self.control.wait(0.05)
            hostile.stdout.readline()  # it has started

    # ---- what happens

    def _disturb(self, what: Disturbance) -> None:
        if what.what in ("kill", "stun"):
            self._disturb_process(what)
            return
        try:
            jobs = [job["job"] for job in self.control.status()["jobs"] if job["job"]]
            if jobs:
                self._change_job(what, jobs[what.which % len(jobs)])
                self.context.done[what.what] += 1
        except DaemonGone:
            raise
        except GpumuxError as error:
            self.refusals[error.code] += 1  # the job has ended meanwhile, or is ending

    def _change_job(self, what: Disturbance, job: str) -> None:
        if what.what == "pause":
            self.control.change("pause", job)
            self._at(what.much, lambda: self._resume(job))
        elif what.what == "stop":
            self.control.change("stop", job)
        elif what.what == "look":
            self.control.explain(job)
        elif what.what == "priority":
            self.control.regrade(job, priority=what.which >> 20 & 1)
        else:
            self.control.regrade(job, weight=what.much)

    def _resume(self, job: str) -> None:
        try:
            self.control.change("resume", job)
        except DaemonGone:
            raise
        except GpumuxError as error:
            self.refusals[error.code] += 1

    def _disturb_process(self, what: Disturbance) -> None:
        process = what.which
        client = self.clients[process]
        if what.what == "kill":
            client.kill()
            client.wait()
            self._start(process)
        else:
            os.kill(client.pid, signal.SIGSTOP)
            self._at(what.much, lambda: self._wake(client))
        self.context.done[what.what] += 1

    def _wake(self, client: subprocess.Popen[bytes]) -> None:
        if client.poll() is None:
            client.send_signal(signal.SIGCONT)

    def _at(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._later, (time.monotonic() + seconds, next(self._order), call))

    # ---- the end

    def _end_round(self) -> None:
        while self._later:
            heapq.heappop(self._later)[2]()
        processes = [*self.clients.values(), *self._hostile]
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        until = time.monotonic() + LEAVE_S
        while any(process.poll() is None for process in processes):
            self.context.alive()
            if time.monotonic() > until:
                late = [str(process.args) for process in processes if process.poll() is None]
                raise RuntimeError(f"still there {LEAVE_S:g} s after they were told to leave: {late}")
            self.control.wait(0.1)
        # A process that was just started again may not handle SIGTERM yet, and dies of it.
        bad = {str(p.args): p.returncode for p in processes if p.returncode not in (0, -signal.SIGTERM)}
        if bad:
            raise RuntimeError(f"ended with other than 0: {bad}\n{self._said()}")
        for hostile in self._hostile:
            assert hostile.stdout is not None
            self.context.vandalism.update(json.loads(hostile.stdout.read() or b"{}"))

    def _said(self) -> str:
        return (self.context.directory / "clients.log").read_text(errors="replace")[-4000:]

    def close(self) -> None:
        """End whatever still runs."""
        for process in [*self.clients.values(), *self._hostile]:
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def at_rest(control: Control, alive: Callable[[], None], within_s: float) -> dict[str, Any]:
    """The daemon's status once this session is the only one, and there is no job. Raises RuntimeError if that does not
    come."""
    until = time.monotonic() + within_s
    while True:
        alive()
        status = control.status()
        if status["sessions"] == 1 and not status["jobs"]:
            return status
        if time.monotonic() > until:
            raise RuntimeError(
                f"{status['sessions']} sessions and {len(status['jobs'])} jobs stay: {status['jobs'][:3]}"
            )
        control.wait(0.1)
