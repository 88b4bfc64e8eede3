"""Processor time of a submit: in the client, and in the daemon, which checks and loads the Programs.

Each model runs in a process of its own with a daemon of its own: the step is submitted, closed and submitted again.
What the daemon takes to get ready after it first answers (it does so whether anything is submitted or not) is waited
for and shown apart, as `start`. In the same process, the step runs once over fake tensors without gpumux (the baseline:
`bare`), and is compiled by torch.compile with the backends "eager" and "aot_eager". Caches of fake results are cleared
before each, so that none profits from another. gpumux's modules are compiled to bytecode before, as an installation
has them. Loops over an LSTM cell show how the time grows with the number of operators. Last, the models of an array
are captured without a daemon: one, and eight that differ in their seeds and learning rates (`array`). Submits and
arrays are measured in several turns, each in new processes: times are medians over the turns, and ratios are those of
each turn: the median, with the least and the largest.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gpumux
from gpumux.capture.watch.reuse import kept_traces
from gpumux.fuse.member import Member
from microbench import common
from microbench.daemon import running_daemon
from microbench.walk import descendants

LOOPS = (10, 40, 160)
MODELS = ("gpt2", "bert-base", "t5-small", "resnet50", *(f"loop-{n}" for n in LOOPS))
CLIENT, AGAIN, DAEMON = 4.0, 0.2, 4.0  # the marks: client over bare, second submit over the first, daemon over bare
MEMBERS, ARRAY = 8, 2.0  # models of an array, and the mark: their capture over that of one
PHASES = 2  # of an optimizer: its first step and all others
QUIET_S, SETTLE_S = 0.5, 60.0  # a daemon is ready that took no processor time for so long; it may take this long


@dataclass(frozen=True)
class Case:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[..., Tensor]
    batch: tuple[Tensor, ...]


def build(name: str) -> Case:
    if name.startswith("loop-"):
        return _loop(int(name.removeprefix("loop-")))
    from microbench.real_models import build as real

    made = real(name)
    return Case(made.model, made.optimizer, made.step, made.batch(0))


def _loop(length: int) -> Case:
    """A loop in Python over an LSTM cell, as written before nn.LSTM is known."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"cell": nn.LSTMCell(32, 64), "out": nn.Linear(64, 1)})
    optimizer = torch.optim.Adam(model.parameters())

    def step(x: Tensor, y: Tensor) -> Tensor:
        hidden = x.new_zeros(x.shape[1], 64), x.new_zeros(x.shape[1], 64)
        for row in x:
            hidden = model["cell"](row, hidden)
        loss = nn.functional.mse_loss(model["out"](hidden[0]), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Case(model, optimizer, step, (torch.randn(length, 16, 32), torch.randn(16, 1)))


def processor_s(pid: int) -> float:
    """Processor time of a process and those below it, those that ended included."""
    total = 0.0
    for one in (pid, *descendants(pid)):
        try:
            total += common.processor_s(one, ended_children=True)
        except OSError:
            continue
    return total


def settle(pid: int) -> float:
    """Wait until a new daemon is ready. Returns the processor time that it took."""
    began, end = processor_s(pid), time.monotonic() + SETTLE_S
    before = -1.0
    while (now := processor_s(pid)) != before:
        if time.monotonic() > end:
            raise RuntimeError(f"the daemon is still busy after {SETTLE_S:.0f} s, though nothing was asked of it")
        before = now
        time.sleep(QUIET_S)
    return now - began


def clear_caches() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    FakeTensorMode.cache_clear()


def submit_part(name: str) -> dict[str, Any]:
    """Processor time of a submit and of another one, in the client and in the daemon, and of one run over fake
    tensors."""
    from gpumux import client

    made = build(name)
    found: dict[str, Any] = {}
    with running_daemon(policy="guarded", threads=1) as daemon:
        found["daemon_start_s"] = settle(daemon.process.pid)
        for which in ("first", "second"):
            server, own, began = processor_s(daemon.process.pid), time.process_time(), time.perf_counter()
            job = client.submit(
                made.step, example=made.batch, model=made.model, optimizer=made.optimizer, name=name,
                endpoint=daemon.endpoint,
            )  # fmt: skip
            found[which] = {
                "client_s": time.process_time() - own,
                "daemon_s": processor_s(daemon.process.pid) - server,
                "wall_s": time.perf_counter() - began,
            }
            found["operators"] = max(len(p.lowered.program.ops) for p in _programs(job))
            found["programs"] = len(_programs(job))
            job.close(sync=False)
    del job, made
    clear_caches()
    found["bare_s"] = bare(name)
    found["bare_warm_s"] = bare(name)
    return found


def array_part(name: str) -> dict[str, Any]:
    """Processor time of capturing one model of an array, and eight of another: until the phases of the optimizer
    repeat."""
    spent = {}
    for models in (1, MEMBERS):
        made = [build(name) for _ in range(models)]
        for i, one in enumerate(made):
            one.optimizer.param_groups[0]["lr"] *= 1 + i / MEMBERS
        clear_caches()
        kept_traces.clear()
        began = time.process_time()
        members = [Member(str(i), one.step, one.model, one.optimizer, max_variants=None) for i, one in enumerate(made)]
        states = [member.state for member in members]
        for _ in range(PHASES):
            choices = [
                member.choose_from(state, one.batch, {}) or member.choose_from(state, one.batch, {})
                for member, state, one in zip(members, states, made, strict=True)
            ]
            states = [c.after(member.state.keep) for c, member in zip(choices, members, strict=True) if c is not None]
        spent[str(models)] = time.process_time() - began
        for member in members:
            member.release()
    return {"array_s": spent}


def _programs(job: Any) -> list[Any]:
    return [
        program for function, _, _ in job._functions for case in function._cases for phase in case.phases
        for program in phase.programs.values()
    ]  # fmt: skip


def bare(name: str) -> float:
    """Processor time of the second run of the step over fake tensors, as far as torch needs it: the optimizer has its
    state."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        made = build(name)
        began = time.process_time()
        made.step(*made.batch)
        return time.process_time() - began


def compile_part(name: str, backend: str) -> dict[str, Any]:
    """Processor time of the first run of the step's forward and backward under torch.compile, less a third run."""
    made = build(name)
    compiled = torch.compile(made.step, backend=backend)
    spent = []
    for _ in range(3):
        began = time.process_time()
        compiled(*made.batch)
        spent.append(time.process_time() - began)
    return {f"compile_{backend}_s": spent[0] - spent[2]}


def measure(name: str, turns: int, compiled: bool) -> dict[str, Any]:
    measured = [_part(name, "submit") | _part(name, "array") for _ in range(turns)]
    found: dict[str, Any] = _medians(measured)
    by_turn = [ratios(turn) for turn in measured]
    found["ratios"] = {what: statistics.median(turn[what] for turn in by_turn) for what in by_turn[0]}
    found["turns"] = {what: [turn[what] for turn in by_turn] for what in by_turn[0]}
    for backend in ("eager", "aot_eager") if compiled else ():
        found |= _part(name, "compile", backend)
    return found


def _part(name: str, *part: str) -> Any:
    command = [sys.executable, "-m", "microbench.capture", "--part", *part, "--models", name]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=600)
    if ended.returncode:
        raise RuntimeError(f"part {' '.join(part)} of {name} ended with {ended.returncode}")
    return json.loads(ended.stdout.splitlines()[-1])


def _medians(turns: Sequence[Any]) -> Any:
    """The median of each number that all turns have, in the same nested dictionaries."""
    if isinstance(turns[0], dict):
        return {key: _medians([turn[key] for turn in turns]) for key in turns[0]}
    return statistics.median(turns)


def ratios(found: dict[str, Any]) -> dict[str, float]:
    return {
        "client over bare": found["first"]["client_s"] / found["bare_s"],
        "second over first": found["second"]["client_s"] / found["first"]["client_s"],
        "daemon over bare": found["first"]["daemon_s"] / found["bare_s"],
        "eight models over one": found["array_s"][str(MEMBERS)] / found["array_s"]["1"],
    }


def spread(found: dict[str, Any], what: str) -> str:
    turns = found["turns"][what]
    return f"{found['ratios'][what]:.2f} ({min(turns):.2f} to {max(turns):.2f})"


def main(argv: list[str] | None = None) -> int:
    arguments = common.parser(__doc__)
    arguments.add_argument("--models", nargs="+", default=MODELS, help=f"some of {', '.join(MODELS)}")
    arguments.add_argument("--turns", type=int, default=3, help="measure submits and arrays so often (default: 3)")
    arguments.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    arguments.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    args = arguments.parse_args(argv)
    torch.set_num_threads(1)
    if args.part:
        what, *rest = args.part
        run: Any = {"submit": submit_part, "array": array_part, "compile": compile_part}[what]
        print(json.dumps(run(args.models[0], *rest)))
        return 0
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    compileall.compile_dir(Path(gpumux.__file__).parent, quiet=1)
    facts = common.machine()
    print(common.describe(facts))
    models = {}
    for name in args.models:
        models[name] = measure(name, args.turns, not args.no_compile)
        print(f"{name}: {json.dumps(models[name])}", flush=True)
    marks = {
        "client over bare": CLIENT, "second over first": AGAIN, "daemon over bare": DAEMON,
        "eight models over one": ARRAY,
    }  # fmt: skip
    targets = {
        f"{name}: {what}": {"value": round(value, 2), "target": marks[what], "met": value <= marks[what]}
        for name, model in models.items()
        for what, value in model["ratios"].items()
    }
    rows = [
        [name, str(f["operators"]), *(f"{f[k][p]:.2f}" for k in ("first", "second") for p in ("client_s", "daemon_s")),
         f"{f['daemon_start_s']:.2f}", f"{f['bare_s']:.2f}", *(spread(f, what) for what in marks),
         *(f"{f[k]:.1f}" if k in f else "-" for k in ("compile_eager_s", "compile_aot_eager_s"))]
        for name, f in models.items()
    ]  # fmt: skip
    header = ["model", "operators", "client s", "daemon s", "again", "daemon", "start s", "bare s", *marks]
    header += ["eager s", "aot s"]
    print(common.table(header, rows))
    common.report("capture", args.out, {"machine": facts, "turns": args.turns, "models": models, "targets": targets})
    return 0


if __name__ == "__main__":
    sys.exit(main())
