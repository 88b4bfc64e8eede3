"""A daemon is killed at random moments under several training jobs. What they end with is compared, bit for bit, with
the same loops run without a daemon.

Most blows are SIGKILL to the daemon, some come while it is still bringing jobs back. Between them an executor process
is killed, or the daemon is restarted in order (SIGTERM), about as often as `--others` says. The loops have no line
about any of that.

With `--ranks` each job runs over several daemons. A blow meets one of them, now and then all, and the comparison is
with the same jobs over the same daemons with nothing killed.

Counted per job: turns of its loop, times it came back, steps that ran again, the longest pause between two turns, and
whether every result and every bit of the final state is that of the undisturbed run.
"""

from __future__ import annotations

import logging
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from gpumux import client
from gpumux.client.session import Session
from gpumux.errors import GpumuxError
from microbench import common
from microbench.daemon import GPUMUX
from microbench.killed import TRIALS, Trial, accumulate_adamw, plain
from microbench.soaking import watch

START_S = 180.0
STOP_S = 60.0
SNAPSHOT_S = 0.4
LAST = 20  # turns of each loop after the last blow
ALL = 0.2  # of the kills of daemons meet all ranks
QUICK = 0.25  # of the blows come within QUICK_S of the start, while jobs are being brought back
QUICK_S = 0.3  # the others come this long after a random number of turns, at most
_AGAIN = re.compile(r"job '([^']+)': .* It is back after ([0-9.]+) s, from (.*), and (\d+) steps run again")


class Phoenix:
    """A daemon that can be killed and is started again, on one endpoint and one state directory."""

    def __init__(
        self,
        directory: Path,
        threads: int = 1,
        flags: Sequence[str] = (),
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self._settings = {"GPUMUX_SNAPSHOT_S": str(SNAPSHOT_S), **(settings or {})}
        self.endpoint = f"ipc://{directory}/gpumux.sock"
        self.directory = directory
        self._command = [*GPUMUX, "serve", "--device", "cpu", "--threads", str(threads), "--endpoint", self.endpoint]
        self._command += ["--metrics-port", "off", "--state-dir", str(directory / "state"), *flags]
        self._log = (directory / "daemon.log").open("ab")
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("GPUMUX_")}
        environment |= self._settings
        return subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=environment,
            process_group=0,
        )

    def wait_until_ready(self) -> None:
        end = time.monotonic() + START_S
        while True:
            try:
                Session.connect(self.endpoint, 2.0, role="control").close()
                return
            except GpumuxError as error:
                if self.process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"the daemon does not start ({error}):\n{self.said()}") from error
            time.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL, and start another."""
        self.process.kill()
        self.process.wait()
        self.process = self._start()

    def restart(self) -> None:
        """SIGTERM, and start another when it has left. Raises RuntimeError when it does not leave in order."""
        self.stop()
        self.process = self._start()

    def kill_executor(self, draw: random.Random) -> bool:
        """SIGKILL to one of the processes that run jobs; whether there was one."""
        executors = self._executors()
        if not executors:
            return False
        try:
            os.kill(draw.choice(executors), signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True

    def kill_executors(self) -> None:
        """SIGKILL to all processes that run jobs."""
        for pid in self._executors():
            with suppress(ProcessLookupError):  # one of an earlier job may just have ended
                os.kill(pid, signal.SIGKILL)

    def _executors(self) -> list[int]:
        return watch.executors(self.process.pid)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        if self.process.wait(STOP_S):
            raise RuntimeError(f"the daemon ended with {self.process.returncode}:\n{self.said()}")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._log.close()

    def said(self) -> str:
        return (self.directory / "daemon.log").read_text(errors="replace")[-4000:]


class Ranks:
    """Daemons for jobs that have a rank on each. A blow meets one of them, drawn at random, or all (ALL of the kills of
    daemons)."""

    def __init__(self, directory: Path, count: int, draw: random.Random) -> None:
        self._draw = draw
        self._daemons: list[Phoenix] = []
        for rank in range(count):
            place = directory / str(rank)
            place.mkdir()
            self._daemons.append(Phoenix(place))

    @property
    def endpoint(self) -> list[str]:
        return [daemon.endpoint for daemon in self._daemons]

    def wait_until_ready(self) -> None:
        for daemon in self._daemons:
            daemon.wait_until_ready()

    def kill(self) -> None:
        every = self._draw.random() < ALL
        for daemon in self._daemons if every else [self._draw.choice(self._daemons)]:
            daemon.kill()

    def restart(self) -> None:
        self._draw.choice(self._daemons).restart()

    def kill_executor(self, draw: random.Random) -> bool:
        return draw.choice(self._daemons).kill_executor(draw)

    def close(self) -> None:
        for daemon in self._daemons:
            daemon.close()


@dataclass
class Blows:
    """What is done to the daemon, on a thread of its own, until `kills` of it are dead."""

    daemon: Phoenix | Ranks
    kills: int
    most: int  # turns of the loop between two blows
    others: float
    draw: random.Random
    turns: Callable[[], int]  # how many every loop has made
    done: dict[str, int] = field(default_factory=lambda: {"kills": 0, "executors": 0, "restarts": 0})
    error: BaseException | None = None
    _stopped: bool = False

    def stop(self) -> None:
        """Strike no more."""
        self._stopped = True

    def run(self) -> None:
        try:
            while self.done["kills"] < self.kills and not self._stopped:
                self._next()
        except BaseException as error:  # noqa: BLE001 - raised by the thread that joins this one
            self.error = error

    def _next(self) -> None:
        self._wait()
        kind = self.draw.random()
        if kind < self.others / 2:
            self.done["executors"] += self.daemon.kill_executor(self.draw)
        elif kind < self.others:
            self.daemon.restart()
            self.done["restarts"] += 1
        else:
            self.daemon.kill()
            self.done["kills"] += 1

    def _wait(self) -> None:
        self.daemon.wait_until_ready()
        if self.draw.random() >= QUICK:
            until = self.turns() + self.draw.randint(1, self.most)
            while self.turns() < until and not self._stopped:
                time.sleep(0.005)
        time.sleep(self.draw.uniform(0.0, QUICK_S))


class Returns(logging.Handler):
    """Counts what jobs say when they come back."""

    def __init__(self) -> None:
        super().__init__()
        self.returns: dict[str, int] = {}
        self.replayed: dict[str, int] = {}
        self.other: list[str] = []
        self.waits = 0  # of more than a few seconds, which are mentioned

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        found = _AGAIN.search(text)
        if found is None:
            if "waiting for it to come back" in text:
                self.waits += 1
            else:
                self.other.append(text)
            return
        self.returns[found[1]] = self.returns.get(found[1], 0) + 1
        self.replayed[found[1]] = self.replayed.get(found[1], 0) + int(found[4])


@dataclass
class Run:
    """One trial under blows."""

    trial: Trial
    job: client.Job[Any]
    calls: dict[str, Callable[..., client.StepFuture]]
    turns: int = 0
    futures: list[client.StepFuture] = field(default_factory=list)
    results: list[Tensor] = field(default_factory=list)
    longest_s: float = 0.0
    error: BaseException | None = None

    def turn(self) -> None:
        began = time.monotonic()
        for name, batch in self.trial.turn(self.turns):
            self.futures.append(self.calls[name](*batch))
        self.trial.between(self.turns)
        self.turns += 1
        while len(self.futures) > 8:
            self.results.append(self.futures[0].result())
            del self.futures[0]
        self.longest_s = max(self.longest_s, time.monotonic() - began)

    def loop(self, over: threading.Event, pace_s: float) -> None:
        """Turns until `over`, and some with the daemon that is left."""
        try:
            while not over.is_set():
                self.turn()
                time.sleep(pace_s)
            for _ in range(LAST):
                self.turn()
            self.finish()
        except BaseException as error:  # noqa: BLE001 - raised by the thread that joins this one
            self.error = error

    def finish(self) -> None:
        self.results += [future.result() for future in self.futures]
        self.futures.clear()
        self.job.sync()


def _join(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        if thread.ident is not None:
            thread.join()


def submit(
    trial: Trial, endpoint: str | Sequence[str], resume: str | None = None, priority: Literal["high", "low"] = "low",
    rng: Literal["client", "own"] = "own", **options: Any,
) -> Run:  # fmt: skip
    """`endpoint`: the daemon's, or those of several. `rng`: "own", so that trials which run side by side draw as each
    does alone, or "client". `options`: further ones of client.submit."""
    first, *others = trial.functions
    example = {name: batch for i in range(8) for name, batch in trial.turn(i)}
    job = client.submit(
        trial.functions[first], example=example[first], model=trial.models, optimizer=trial.optimizers, name=trial.name,
        seed=trial.seed if rng == "own" else None, rng=rng, resume=resume, priority=priority, **options,
        **({"endpoint": endpoint} if isinstance(endpoint, str) else {"endpoints": endpoint, "batch_norm": "sync"}),
    )  # fmt: skip
    calls: dict[str, Callable[..., client.StepFuture]] = {first: job.step}
    for name in others:
        calls[name] = job.add(trial.functions[name], example=example[name])
    return Run(trial, job, calls)


def differences(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> int:
    """How many of the tensors differ in a bit (a missing one differs)."""
    same = sum(
        a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b) for a, b in zip(ours, theirs, strict=False)
    )
    return max(len(ours), len(theirs)) - same


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def undisturbed(trial: Trial, turns: int, endpoint: str | Sequence[str]) -> list[Tensor]:
    """The results of the trial with nothing killed: without a daemon, or over several of them."""
    if isinstance(endpoint, str):
        return plain(trial, turns)
    run = submit(trial, endpoint)
    try:
        for _ in range(turns):
            run.turn()
        run.finish()
    finally:
        run.job.close()
    return run.results


def measure(
    kills: int, seed: int, *, most: int, others: float, pace_s: float, directory: Path, say: Callable[[str], None],
    ranks: int = 1, strikes: Callable[..., Blows] = Blows,
) -> dict[str, Any]:  # fmt: skip
    """Everything there is to report. `strikes`: what is done to the daemon. Raises what goes wrong."""
    # A step without a batch can't be split over ranks.
    makes = TRIALS if ranks == 1 else tuple(make for make in TRIALS if make is not accumulate_adamw)
    draw = random.Random(seed)
    returns = Returns()
    logger = logging.getLogger("gpumux.client")
    with ExitStack() as stack:
        logger.addHandler(returns)
        stack.callback(logger.removeHandler, returns)
        propagate, logger.propagate = logger.propagate, False
        stack.callback(setattr, logger, "propagate", propagate)
        daemon = Phoenix(directory) if ranks == 1 else Ranks(directory, ranks, draw)
        stack.callback(daemon.close)
        daemon.wait_until_ready()
        runs: list[Run] = []
        for make in makes:
            run = submit(make(seed), daemon.endpoint)
            stack.callback(run.job.close)
            runs.append(run)
        blows = strikes(daemon, kills, most, others, draw, lambda: min(run.turns for run in runs))
        over = threading.Event()
        # Each job has a loop on a thread of its own, as if it were a program: they come back at the same time.
        loops = [threading.Thread(target=run.loop, args=(over, pace_s), name=run.trial.name) for run in runs]
        striker = threading.Thread(target=blows.run, name="blows")
        stack.callback(_join, [*loops, striker])
        stack.callback(over.set)
        stack.callback(blows.stop)
        started = time.monotonic()
        for thread in (*loops, striker):
            thread.start()
        reported = 0
        while striker.is_alive() and all(loop.is_alive() for loop in loops):
            striker.join(0.5)
            if blows.done["kills"] // 5 != reported:
                reported = blows.done["kills"] // 5
                say(f"{blows.done['kills']} kills, {runs[0].turns} turns, {time.monotonic() - started:.0f} s")
        over.set()
        blows.stop()
        _join([striker, *loops])
        for error in (blows.error, *(run.error for run in runs)):
            if error is not None:
                for text in returns.other:
                    say(f"a job said: {text}")
                raise error
        seconds = time.monotonic() - started
        ours = [(run.trial.state(), run.results) for run in runs]
        theirs = []
        for run, make in zip(runs, makes, strict=True):
            run.job.close()
            alone = make(seed)
            expected = undisturbed(alone, run.turns, daemon.endpoint)
            theirs.append((alone.state(), expected))
    rows = []
    for run, (state, results), (expected_state, expected) in zip(runs, ours, theirs, strict=True):
        name = run.trial.name
        rows.append(
            {
                "job": name,
                "turns": run.turns,
                "steps": len(expected),
                "came_back": returns.returns.get(name, 0),
                "steps_run_again": returns.replayed.get(name, 0),
                "longest_pause_s": round(run.longest_s, 3),
                "results_that_differ": differences(results, expected),
                "state_tensors": len(state),
                "state_tensors_that_differ": differences(state, expected_state),
            }
        )
    return {
        "blows": blows.done,
        "seconds": round(seconds, 1),
        "jobs": rows,
        "waits_said": returns.waits,
        "other_messages": returns.other,
    }


def main(argv: list[str] | None = None) -> int:
    parser = common.parser(__doc__)
    parser.add_argument("--kills", type=int, default=50, help="how often the daemon is killed")
    parser.add_argument("--seed", type=int, default=0, help="of the models, the batches and the moments")
    parser.add_argument("--turns", type=int, default=60, help="of the loop between two blows, at most")
    parser.add_argument("--others", type=float, default=0.15, metavar="PART", help="of the blows that are no kill")
    parser.add_argument("--pace", type=float, default=0.02, metavar="SECONDS", help="pause between turns")
    parser.add_argument("--ranks", type=int, default=1, help="daemons over which each job runs")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # the daemon must not be left behind
    facts = common.machine()
    directory = Path(tempfile.mkdtemp(prefix="gm-"))
    try:
        found = measure(
            args.kills, args.seed, most=args.turns, others=args.others, pace_s=args.pace, directory=directory,
            say=lambda text: print(text, file=sys.stderr, flush=True), ranks=args.ranks,
        )  # fmt: skip
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    header = ("job", "turns", "steps", "came back", "run again", "longest pause", "results", "state")
    rows = [
        (
            row["job"], str(row["turns"]), str(row["steps"]), str(row["came_back"]), str(row["steps_run_again"]),
            f"{row['longest_pause_s']:.1f} s", _verdict(row["results_that_differ"], row["steps"]),
            _verdict(row["state_tensors_that_differ"], row["state_tensors"]),
        )
        for row in found["jobs"]
    ]  # fmt: skip
    blows = found["blows"]
    print(
        f"{blows['kills']} kills of the daemon, {blows['executors']} of executors, {blows['restarts']} orderly restarts"
        f" in {found['seconds']:.0f} s, seed {args.seed}"
    )
    print(common.table(header, rows))
    for text in found["other_messages"][:10]:
        print(f"also said: {text}")
    kept = all(not row["results_that_differ"] and not row["state_tensors_that_differ"] for row in found["jobs"])
    print("every bit as undisturbed" if kept else "NOT as undisturbed")
    options = {
        "kills": args.kills, "seed": args.seed, "turns": args.turns, "others": args.others, "pace_s": args.pace,
        "ranks": args.ranks,
    }  # fmt: skip
    common.report("kills", args.out, {"machine": facts, "options": options, **found, "bit_equal": kept})
    return 0 if kept else 1


def _verdict(differing: int, of: int) -> str:
    return f"{of} equal" if not differing else f"{differing} of {of} DIFFER"


if __name__ == "__main__":
    sys.exit(main())
