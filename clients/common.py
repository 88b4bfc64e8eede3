"""What the client programs share: their flags, their progress lines, what they save, Ctrl-C."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from clients.job import Future
from gpumux.errors import GpumuxError

INTERRUPTED = 130  # the shell's own exit status for a program ended by Ctrl-C


def parser(description: str, *, epochs: int, batch_size: int = 64) -> argparse.ArgumentParser:
    """The flags every client program takes."""
    flags = argparse.ArgumentParser(description=description)
    flags.add_argument("--priority", choices=("high", "low"), default="low", help="the job's class (default: low)")
    flags.add_argument("--endpoint", help="the daemon (default: $GPUMUX_ENDPOINT, or that of GPU 0 on this machine)")
    length = flags.add_mutually_exclusive_group()
    length.add_argument("--epochs", type=positive, default=epochs, help=f"passes over the data (default: {epochs})")
    length.add_argument("--steps", type=positive, help="how many steps, instead of --epochs")
    flags.add_argument("--batch-size", type=positive, default=batch_size, help=f"default: {batch_size}")
    flags.add_argument(
        "--seed", type=int, default=0, help="of weights, batches and the job's random draws (default: 0)"
    )
    flags.add_argument("--size", choices=("tiny", "small", "large"), default="small", help="of the model")
    flags.add_argument(
        "--microbatches", type=positive, default=1, metavar="K",
        help="run each step's batch as K accumulated parts: shorter pieces, equivalent results (default: 1, bit-equal)",
    )  # fmt: skip
    flags.add_argument("--plain", action="store_true", help="run the same loop here, without gpumux")
    flags.add_argument(
        "--threads", type=positive, default=1, help="torch threads with --plain; equal to the daemon's to compare"
    )
    flags.add_argument("--save", type=Path, metavar="FILE", help="write the final state (torch.save)")
    flags.add_argument("--gate", action="store_true", help="say ready before the loop and wait for a line on stdin")
    flags.add_argument("--json", type=Path, metavar="FILE", help="write steps, history, times and the state's hash")
    return flags


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number")
    return value


@dataclass
class Outcome:
    """What a run did. Seconds are sums over its steps; `sha256` is over all of the final state."""

    client: str
    mode: str  # "gpumux" or "plain"
    priority: str
    seed: int
    torch: str = torch.__version__
    steps: int = 0
    began: float = 0.0  # of the loop, on CLOCK_MONOTONIC, which all processes of a machine share
    wall_s: float = 0.0
    queue_s: float = 0.0
    device_s: float = 0.0
    losses: list[float] = field(default_factory=list)  # one a step
    accuracy: list[float] = field(default_factory=list)  # one an epoch, and of the untrained model first
    sha256: str = ""
    extra: dict[str, Any] = field(default_factory=dict)  # what only this client knows

    def count(self, futures: Iterable[Future]) -> None:
        """Wait for these steps and add what they took."""
        for future in futures:
            self.losses.append(float(future))
            self.queue_s += future.times.queue_s
            self.device_s += future.times.device_s
            self.steps += 1


READY = "ready\n"


def gate(args: argparse.Namespace) -> None:
    """Where programs that are to run side by side wait for each other (--gate)."""
    if args.gate:
        print(READY, end="", flush=True)
        sys.stdin.readline()


def outcome(args: argparse.Namespace, client: str) -> Outcome:
    return Outcome(client, "plain" if args.plain else "gpumux", args.priority, args.seed)


def final_state(
    models: Mapping[str, nn.Module], optimizers: Mapping[str, torch.optim.Optimizer] | None = None
) -> dict[str, Tensor]:
    """Every tensor of the trained state under one flat name: `cnn/features.0.weight`,
    `optimizer/0/exp_avg`."""
    state = {f"{name}/{key}": value for name, model in models.items() for key, value in model.state_dict().items()}
    for name, optimizer in (optimizers or {}).items():
        for index, entry in optimizer.state_dict()["state"].items():
            state |= {f"{name}/{index}/{key}": value for key, value in entry.items() if isinstance(value, Tensor)}
    return {key: value.detach().cpu().contiguous() for key, value in sorted(state.items())}


def digest(state: Mapping[str, Tensor]) -> str:
    """sha256 over names, types, shapes and bytes."""
    whole = hashlib.sha256()
    for name, value in sorted(state.items()):
        whole.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        whole.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def finish(args: argparse.Namespace, result: Outcome, state: Mapping[str, Tensor]) -> None:
    """Hash the final state, write the files that were asked for and say the last line."""
    result.sha256 = digest(state)
    if args.save:
        torch.save(dict(state), args.save)
    if args.json:
        args.json.write_text(json.dumps(asdict(result), indent=1) + "\n")
    print(
        f"{result.client}: {result.steps} steps in {result.wall_s:.1f} s,"
        f" {result.queue_s:.2f} s queued, {result.device_s:.2f} s on the device, state {result.sha256[:16]}",
        flush=True,
    )


class Progress:
    """Rewrites one line on a terminal; elsewhere prints the lines that matter (`keep`)."""

    def __init__(self, name: str, total: int) -> None:
        self._name, self._total = name, total
        self._tty = sys.stdout.isatty()
        self._shown = 0.0

    def show(self, done: int, text: str, *, keep: bool = False) -> None:
        now = time.monotonic()
        if not keep and (not self._tty or now - self._shown < 0.1):
            return
        self._shown = now
        bar = "#" * (20 * done // self._total)
        line = f"{self._name} {done:>5}/{self._total} [{bar:<20}] {text}"
        print(f"\r\x1b[K{line}" if self._tty else line, end="\n" if keep or not self._tty else "", flush=True)


def run(work: Callable[[argparse.Namespace], None], flags: argparse.ArgumentParser, argv: Sequence[str] | None) -> int:
    """Parse, work, and turn what a user can expect to happen into an exit status and a sentence."""
    args = flags.parse_args(argv)
    torch.set_num_threads(args.threads)
    try:
        work(args)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED
    except GpumuxError as error:
        print(f"{flags.prog}: {error}", file=sys.stderr)
        return 1
    return 0


def show_demo(name: str, show: Callable[[], None], *failures: type[Exception]) -> int:
    """Run a demo with one torch thread, on which bits depend. Returns the exit status: 1 for one of `failures` or an
    error of gpumux, which is printed."""
    expected: tuple[type[Exception], ...] = (*failures, GpumuxError)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        show()
    except KeyboardInterrupt:
        print("\ninterrupted; everything that was started has been stopped", file=sys.stderr)
        return INTERRUPTED
    except expected as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    finally:
        torch.set_num_threads(before)
    return 0
