"""Ways to train several models of one kind on one device, and what each takes: time, in turns, and memory, alone.
Imports torch.

Whatever runs a model runs in a process forked from one that has imported torch and done nothing with it: so peaks of
resident memory are each way's own, and nothing is imported twice.
"""

from __future__ import annotations

import gc
import multiprocessing
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first optimizer of a process imports it: seconds, and memory that is no model's
from torch import Tensor

from clients.models.workloads import Workload
from gpumux import fuse
from gpumux.client import StepFuture
from gpumux.errors import GpumuxError
from microbench.daemon import running_daemon
from microbench.handfused.train import hand_fused, vmapped

# The plain loop, one model after another; gpumux's captured steps, likewise; a process a model, all at once; HFTA's
# way; vmap over gradients, and that through torch.compile; an array of gpumux (on a GPU a job of a daemon there, whose
# batches come from this process), and that compiled.
SERIAL, CAPTURED, PROCESSES = "serial", "captured", "processes"
HAND, VMAP, COMPILED, OURS, OURS_COMPILED = "hand", "vmap", "compiled", "fused", "fused-compiled"
WAYS = (SERIAL, CAPTURED, PROCESSES, HAND, VMAP, COMPILED, OURS, OURS_COMPILED)
SLOW_TO_MAKE = (COMPILED, OURS_COMPILED)
BATCHES = 4
WARM_UP = 14  # steps: a captured program is checked, timed, cut, and cut once more after eight
READY_S = 600.0  # capturing 16 large models, or compiling
PAUSE_S = 0.2  # between "go" and the moment all processes begin at

Train = Callable[[int], Any]  # one step of every model, on the batch of this number
Config = Mapping[str, Any]


class FusionFailed(RuntimeError):
    """A process that was measured did not answer. Says which, and why."""


@dataclass(frozen=True)
class Setting:
    """`seconds`: of a turn. `threads`: torch's, of a way that runs in one process."""

    workload: Workload
    models: int
    threads: int
    seconds: float
    repeats: int
    dropout: float | None = None  # None: the models' own

    @property
    def configs(self) -> list[dict[str, Any]]:
        more = {} if self.dropout is None else {"dropout": self.dropout}
        return [config | more for config in self.workload.configs(self.models)]


def opened(way: str, workload: Workload, configs: Sequence[Config], stack: ExitStack) -> Train:
    """Everything `way` needs, ready to train. Raises GpumuxError where it can't train this workload."""
    served = way == OURS and workload.device != "cpu"
    here = replace(workload, device="cpu") if served else workload
    batches = [here.batch(i) for i in range(BATCHES)]

    def of(run: Callable[..., Any]) -> Train:
        return lambda index: run(*batches[index % BATCHES])

    if way == HAND:
        return of(hand_fused(workload, configs)[0])
    if way in (VMAP, COMPILED):
        return of(vmapped(workload, configs, compiled=way == COMPILED)[0])
    if served:
        endpoint = stack.enter_context(running_daemon(device=workload.device)).endpoint
        job = fuse.submit_array(here.factory, configs, batches[0], endpoint=endpoint)
        return of(stack.enter_context(job).step)
    if way in (OURS, OURS_COMPILED):
        array = fuse.Array(workload.factory, configs, batches[0], times_file=None, compile=way == OURS_COMPILED)
        return of(stack.enter_context(array).step)
    if way == CAPTURED:
        arrays = [stack.enter_context(fuse.Array(workload.factory, [c], batches[0], choose="fused")) for c in configs]
        alone: list[Callable[..., Any]] = [array.step for array in arrays]
    else:
        alone = [workload.factory(config)[0] for config in configs]

    def one_after_another(*batch: Tensor) -> None:
        for step in alone:
            step(*batch)

    return of(one_after_another)


def throughput(setting: Setting, ways: Sequence[str]) -> dict[str, dict[str, Any]]:
    """By way: `samples`, models' steps a second of each turn, or `error`, why there are none. Raises FusionFailed."""
    together = [way for way in ways if way != PROCESSES]
    found: dict[str, dict[str, Any]] = _ask([_Child(_turns, setting, together)])[0]
    if PROCESSES in ways:
        found[PROCESSES] = {"samples": concurrent(setting)[0]}
    return found


def memory(setting: Setting, ways: Sequence[str]) -> dict[str, dict[str, Any]]:
    """By way: `bytes`, the most that training held beyond what the libraries hold, or `error`. Processes: their sum."""
    found: dict[str, dict[str, Any]] = {}
    for way in ways:
        if way == PROCESSES:
            found[way] = {"bytes": concurrent(setting)[1]}
        else:
            found[way] = _ask([_Child(_peak, setting, way)])[0]
    return found


def concurrent(setting: Setting) -> tuple[list[float], int]:
    """One process a model, all at once, each with its part of the threads: models' steps a second of each turn, and the
    sum of what they held. Raises FusionFailed."""
    children = [_Child(_alone, setting, index) for index in range(setting.models)]
    answers = _ask(children, go=True)
    rates = [sum(a["steps"][turn] for a in answers) / setting.seconds for turn in range(setting.repeats)]
    return rates, sum(a["bytes"] for a in answers)


# ---- in a forked process ---------------------------------------------------------------------------


def _turns(pipe: Connection, setting: Setting, ways: Sequence[str]) -> None:
    torch.set_num_threads(setting.threads)
    found: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        trains: dict[str, Train] = {}
        for way in ways:
            try:
                train = opened(way, setting.workload, setting.configs, stack)
                for index in range(WARM_UP):
                    train(index)
            except GpumuxError as error:
                found[way] = {"error": str(error)}
                continue
            trains[way], found[way] = train, {"samples": []}
        gc.collect()
        # a collection that visits all that was captured takes as long as a turn, and would count for one of them
        gc.freeze()
        for repeat in range(setting.repeats):
            for way, train in list(trains.items())[:: -1 if repeat % 2 else 1]:
                found[way]["samples"].append(setting.models * _rate(setting, train))
    pipe.send(found)


def _rate(setting: Setting, train: Train) -> float:
    """Steps a second over about a turn, at least two."""
    done, began = 0, time.perf_counter()
    while done < 2 or time.perf_counter() - began < setting.seconds:
        last = train(done)
        done += 1
    _settled(setting)
    if isinstance(last, StepFuture):
        last.result()
    return done / (time.perf_counter() - began)


def _settled(setting: Setting) -> None:
    if setting.workload.device != "cpu":
        torch.cuda.synchronize()


def _peak(pipe: Connection, setting: Setting, way: str) -> None:
    torch.set_num_threads(setting.threads)
    before = _held(setting)
    with ExitStack() as stack:
        try:
            train = opened(way, setting.workload, setting.configs, stack)
            for index in range(WARM_UP):
                train(index)
        except GpumuxError as error:
            pipe.send({"error": str(error)})
            return
        _settled(setting)
        pipe.send({"bytes": _most(setting) - before})


def _alone(pipe: Connection, setting: Setting, index: int) -> None:
    """One model, in as many turns as are asked for, all of which begin when the others' do."""
    torch.set_num_threads(max(1, setting.threads // setting.models))
    before = _held(setting)
    with ExitStack() as stack:
        train = opened(SERIAL, setting.workload, [setting.configs[index]], stack)
        for number in range(WARM_UP):
            train(number)
        pipe.send("ready")
        began: float = pipe.recv()
        steps = []
        for turn in range(setting.repeats):
            while time.monotonic() < began + turn * setting.seconds:
                time.sleep(0.001)
            end, done = began + (turn + 1) * setting.seconds, 0
            while time.monotonic() < end:
                train(done)
                _settled(setting)
                done += 1
            steps.append(done)
    pipe.send({"steps": steps, "bytes": _most(setting) - before})


def _held(setting: Setting) -> int:
    """Bytes held now; from here on `_most` counts anew."""
    if setting.workload.device != "cpu":
        return 0  # what the context takes is not the models'
    Path("/proc/self/clear_refs").write_text("5")
    return _most(setting)


def _most(setting: Setting) -> int:
    """The most bytes that were held: resident, or reserved on the GPU by torch's allocator."""
    if setting.workload.device != "cpu":
        return torch.cuda.max_memory_reserved()
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def _context(pipe: Connection) -> None:
    torch.zeros(1, device="cuda")
    free, total = torch.cuda.mem_get_info()
    pipe.send(total - free - torch.cuda.memory_reserved())


# ---- the parent's end --------------------------------------------------------------------------------


class _Child:
    def __init__(self, work: Callable[..., None], *arguments: Any) -> None:
        fork = multiprocessing.get_context("fork")
        self.pipe, theirs = fork.Pipe()
        self.name = work.__name__.strip("_")
        self.process = fork.Process(target=work, args=(theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()

    def answer(self) -> Any:
        if not self.pipe.poll(READY_S):
            raise FusionFailed(f"a process ({self.name}) did not answer within {READY_S:.0f} s")
        try:
            return self.pipe.recv()
        except EOFError:
            self.process.join()
            raise FusionFailed(f"a process ({self.name}) ended with {self.process.exitcode}") from None


def _ask(children: Sequence[_Child], go: bool = False) -> list[Any]:
    """The children's answers. With `go`, all of them begin at once, when all are ready."""
    try:
        if go:
            for child in children:
                child.answer()
            begin = time.monotonic() + PAUSE_S
            for child in children:
                child.pipe.send(begin)
        return [child.answer() for child in children]
    finally:
        for child in children:
            if child.process.is_alive():
                child.process.join(5.0)
            if child.process.is_alive():
                child.process.kill()
            child.process.join()
            child.pipe.close()


def overhead_bytes(device: str) -> int:
    """What a process holds that has trained nothing, and each of `PROCESSES` holds again: resident (in part shared), or
    on the GPU a context, if no other process uses the card."""
    if device == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return int(_ask([_Child(_context)])[0])
