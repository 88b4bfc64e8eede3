"""`make demo`: two real training jobs share one device, and neither can tell.

A daemon starts; a high-priority and a low-priority client train on digits at the same time, each in
its own process. Then each runs again alone, without gpumux, and the final states are compared bit
for bit. At last a high job runs next to a greedy low one, without the guard and with it. Exit status 0
only if all of it held.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clients import promise
from clients.common import INTERRUPTED, READY
from clients.compare import compare
from microbench.daemon import DaemonFailed, running_daemon

THREADS = 1
MIN_RISE = 0.3  # how much accuracy has to rise from the untrained model's to count as learning


class DemoFailed(Exception):
    """Something the demo promises did not hold."""


@dataclass(frozen=True)
class Client:
    """One client program of the demo, run twice: through gpumux and plainly."""

    name: str
    priority: str
    flags: tuple[str, ...]

    def command(self, scratch: Path, *extra: str) -> list[str]:
        mode = "plain" if "--plain" in extra else "gpumux"
        files = ["--json", str(self.json(scratch, mode)), "--save", str(self.saved(scratch, mode))]
        return [sys.executable, "-u", "-m", f"clients.{self.name}", *self.flags, *files, *extra]

    def json(self, scratch: Path, mode: str) -> Path:
        return scratch / f"{self.name}-{mode}.json"

    def saved(self, scratch: Path, mode: str) -> Path:
        return scratch / f"{self.name}-{mode}.pt"

    def outcome(self, scratch: Path, mode: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.json(scratch, mode).read_text())
        return found


def roster(quick: bool) -> list[Client]:
    size = "tiny" if quick else "large"
    cnn, transformer = ("3", "3") if quick else ("24", "8")
    return [
        Client("digits_cnn", "high", ("--size", size, "--epochs", cnn)),
        Client("digits_transformer", "low", ("--size", size, "--epochs", transformer)),
    ]


def run_together(commands: dict[str, list[str]]) -> None:
    """Run programs side by side, their loops started at one moment, and print their lines as they come.

    Raises DemoFailed when one fails. Whatever happens, none is left running.
    """
    children = {
        label: subprocess.Popen(
            [*command, "--gate"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for label, command in commands.items()
    }
    ready = {label: threading.Event() for label in children}
    readers = [threading.Thread(target=_echo, args=(label, c, ready[label])) for label, c in children.items()]
    try:
        for reader in readers:
            reader.start()
        for event in ready.values():
            event.wait()
        for child in children.values():
            _open_gate(child)
        for child in children.values():
            child.wait()
    finally:
        for child in children.values():
            if child.poll() is None:
                child.terminate()
                child.wait()
        for reader in readers:
            reader.join()
        for child in children.values():
            _close(child)
    failed = {label: child.returncode for label, child in children.items() if child.returncode}
    if failed:
        raise DemoFailed("; ".join(f"{label} ended with status {status}" for label, status in failed.items()))


def _echo(label: str, child: subprocess.Popen[str], ready: threading.Event) -> None:
    """Print what a child says. One that ends is as good as ready: nobody waits for it."""
    assert child.stdout is not None
    for line in child.stdout:
        if line == READY:
            ready.set()
        else:
            print(f"[{label}] {line}", end="", flush=True)
    ready.set()


def _open_gate(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    try:
        child.stdin.write("\n")
        child.stdin.flush()
    except BrokenPipeError:  # it has ended; its status says why
        pass


def _close(child: subprocess.Popen[str]) -> None:
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except BrokenPipeError:
                pass


def share(clients: Sequence[Client], scratch: Path) -> None:
    """All clients at once, through one daemon."""
    with running_daemon(device="cpu", threads=THREADS) as daemon:
        device = daemon.status()["device"]
        print(f"gpumux serve: {device['name']} ({device['kind']}), listening on {daemon.endpoint}\n", flush=True)
        commands = {
            f"{c.priority:>4}": c.command(scratch, "--priority", c.priority, "--endpoint", daemon.endpoint)
            for c in clients
        }
        run_together(commands)
    print("\nthe daemon has shut down cleanly; now each job again, without gpumux\n", flush=True)


def alone(clients: Sequence[Client], scratch: Path) -> None:
    """The reference runs, one after the other."""
    for client in clients:
        run_together({"plain": client.command(scratch, "--plain", "--threads", str(THREADS))})


def table(clients: Sequence[Client], scratch: Path) -> str:
    lines = [
        f"{'job':<20}{'priority':<10}{'steps':>6}{'loop s':>9}{'queue s':>9}{'device s':>10}"
        f"{'ms/step queue':>15}{'device':>8}{'plain':>8}  accuracy"
    ]
    for client in clients:
        ours, plain = client.outcome(scratch, "gpumux"), client.outcome(scratch, "plain")
        steps = ours["steps"]
        lines.append(
            f"{client.name:<20}{client.priority:<10}{steps:>6}{ours['wall_s']:>9.2f}"
            f"{ours['queue_s']:>9.2f}{ours['device_s']:>10.2f}{1e3 * ours['queue_s'] / steps:>15.2f}"
            f"{1e3 * ours['device_s'] / steps:>8.2f}{1e3 * plain['device_s'] / steps:>8.2f}"
            f"  {ours['accuracy'][0]:.3f} -> {ours['accuracy'][-1]:.3f}"
        )
    return "\n".join(lines)


def waits(clients: Sequence[Client], scratch: Path) -> str:
    """What the queue times say about priority, in one line: whatever they say."""
    queue: dict[str, float] = {}
    for client in clients:
        ours = client.outcome(scratch, "gpumux")
        queue[client.priority] = 1e3 * ours["queue_s"] / ours["steps"]
    high, low = queue["high"], queue["low"]
    said = f"priority: a step of the high job waited {high:.2f} ms on average, a step of the low job {low:.2f} ms: "
    return said + ("the high job went first" if high < low else "the high job had no advantage in this run")


def complaints(clients: Sequence[Client], scratch: Path) -> list[str]:
    """What did not hold, in words; empty when all did."""
    found = []
    spans = []
    for client in clients:
        ours = client.outcome(scratch, "gpumux")
        for file in (client.saved, client.json):
            found += [f"{client.name}: {line}" for line in compare(file(scratch, "gpumux"), file(scratch, "plain"))]
        rise = ours["accuracy"][-1] - ours["accuracy"][0]
        if rise < MIN_RISE:
            found.append(f"{client.name}: accuracy rose by {rise:.3f} only")
        spans.append((ours["began"], ours["began"] + ours["wall_s"]))
    overlap = min(end for _, end in spans) - max(begin for begin, _ in spans)
    if overlap <= 0:
        found.append("the jobs did not run at the same time")
    else:
        print(f"the jobs shared the device for {overlap:.1f} s")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    flags = argparse.ArgumentParser(description="Two real training jobs share one device, bit for bit.")
    flags.add_argument("--quick", action="store_true", help="tiny models and few epochs, as the tests do")
    args = flags.parse_args(argv)
    clients = roster(args.quick)
    try:
        with tempfile.TemporaryDirectory(prefix="gm-demo-") as name:
            scratch = Path(name)
            share(clients, scratch)
            alone(clients, scratch)
            print(f"\n{table(clients, scratch)}\n{waits(clients, scratch)}\n")
            found = complaints(clients, scratch)
            print("\nnow a high job next to a greedy low one, without the guard and with it\n", flush=True)
            promised = promise.measure(args.quick)
            print(f"{promise.table(promised)}\n{promise.verdict(promised)}\n")
            if not args.quick:  # a handful of steps is no measurement
                found += promise.complaints(promised)
            if found:
                raise DemoFailed("\n  ".join(["this did not hold:", *found]))
    except KeyboardInterrupt:
        print("\ninterrupted; everything that was started has been stopped", file=sys.stderr)
        return INTERRUPTED
    except (DemoFailed, DaemonFailed) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    print("each job's final parameters and optimizer state equal those of its plain run, bit for bit")
    return 0


if __name__ == "__main__":
    sys.exit(main())
