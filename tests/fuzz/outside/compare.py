"""Runs a script of grammar.py plainly and with its functions in a daemon, and says what differs.

The two must agree in every bit: what functions gave, what was noted, all that the script's variables hold in the end.
Or gpumux raises an error of its own: at a step that says LocalWrite its remedy is followed once (`job.load_state()`),
and the script goes on; after any other, what came before is compared, and the script ends.
"""

from __future__ import annotations

import copy
import io
import linecache
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpumux import client
from gpumux.client.future import StepFuture
from gpumux.client.job import Job
from gpumux.errors import GpumuxError, LocalWrite
from tests.fuzz.between.compare import copied, unequal
from tests.fuzz.outside.grammar import Work


@dataclass
class Run:
    """What one run did, until an operation raised."""

    noted: list[tuple[int, str, Any]] = field(default_factory=list)  # with the operation's number
    end: dict[str, Any] = field(default_factory=dict)
    stopped: int | None = None  # at which operation
    error: Exception | None = None
    remedies: int = 0
    done: int = 0


def batch(index: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(4, 6, generator=generator), torch.randint(0, 3, (4,), generator=generator)


class Session:
    """The names that a script uses."""

    def __init__(self, one: Work, endpoint: str | None, kill: Callable[[], None] | None) -> None:
        self.one, self.endpoint, self.kill_daemon = one, endpoint, kill
        self.run, self.index = Run(), -1
        self.jobs: dict[str, Job] = {}
        self.calls: dict[str, Callable[..., Any]] = {}
        self.plain: dict[str, Callable[..., Any]] = {}
        self.given: dict[str, Any] = {}

    def functions(self, **plain: Callable[..., Any]) -> None:
        self.plain = self.calls = plain

    def submitted(self, **given: Any) -> None:
        self.given = given

    def _make(self, which: str) -> Job:
        x, y = batch(0)
        two = "2" if which == "second" else ""
        return client.submit(
            self.plain[which], example=(x, y), model=self.given["model" + two], optimizer=self.given["optimizer" + two],
            endpoint=self.endpoint, max_variants=64,
        )  # fmt: skip

    def begin(self) -> None:
        self.calls = dict(self.plain)
        if self.endpoint is None:
            return
        text = "\n".join(self.one.lines)
        self._main(text)
        if "second" in text:
            self.jobs["second"] = job = self._make("second")
            self.calls["second"] = self._remedied(job, job.step)

    def _main(self, text: str) -> None:
        self.jobs["step"] = job = self._make("step")
        self.calls["step"] = self._remedied(job, job.step)
        if 'run("evaluate"' in text or "run('evaluate'" in text:
            self.calls["evaluate"] = self._remedied(job, job.add(self.plain["evaluate"], example=(batch(0)[0],)))
        if 'run("write"' in text:
            self.calls["write"] = self._remedied(job, job.add(self.plain["write"], example=()))

    def _remedied(self, job: Job, call: Callable[..., Any]) -> Callable[..., Any]:
        def again(*given: Any) -> Any:
            try:
                return call(*given)
            except LocalWrite:
                job.load_state()
                self.run.remedies += 1
                return call(*given)

        return again

    def again(self, kind: str) -> None:
        if self.endpoint is None:
            return
        older = self.jobs["step"]
        if kind == "close first":
            older.close()
        self._main("\n".join(self.one.lines))
        if kind != "close first":
            older.close()

    def kill(self) -> None:
        if self.endpoint is not None and self.kill_daemon is not None:
            self.kill_daemon()

    def call(self, name: str, *given: Any) -> Any:
        result = self.calls[name](*given)
        at = self.index
        self.run.noted.append((at, name, copied(result) if self.endpoint is None else result))
        return result

    def note(self, value: Any) -> None:
        self.run.noted.append((self.index, "noted", _held(value)))

    def wanted(self, index: int) -> bool:
        self.index = index
        self.run.done = index
        return True

    def finish(self, names: Mapping[str, Callable[[], Any]]) -> None:
        self.run.done = len(self.one.lines)
        for job in self.jobs.values():
            job.close()
        self.index = len(self.one.lines)
        values = {}
        for name, get in names.items():
            values[name] = get()
        self.run.end = {name: _held(value) for name, value in values.items()}
        self.run.end["generator"] = torch.get_rng_state()

    def names(self) -> dict[str, Any]:
        return {
            "__name__": "script", "functions": self.functions, "submitted": self.submitted, "begin": self.begin,
            "again": self.again, "kill": self.kill, "run": self.call, "note": self.note, "wanted": self.wanted,
            "finish": self.finish, "batch": batch, "torch": torch, "nn": nn, "F": F, "np": np, "copy": copy, "io": io,
            "SimpleNamespace": SimpleNamespace, "dataclass": dataclass,
        }  # fmt: skip

    def all_lines(self) -> Run:
        torch.manual_seed(7)
        run = self.run
        text = self.one.text()
        name = f"<script {abs(hash(text))}>"
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        module = sys.modules["script"] = ModuleType("script")  # as a program has one: its classes are the user's
        names = vars(module)
        names.update(self.names())
        try:
            exec(compile(text, name, "exec"), names)  # noqa: S102  our own lines
        except Exception as error:  # noqa: BLE001  whatever it is, it is what this run shows
            run.stopped, run.error = self.index, error
        finally:
            for job in self.jobs.values():
                job.close()
            linecache.cache.pop(name, None)
            del sys.modules["script"]
        run.noted = [(i, what, _held(v)) for i, what, v in run.noted]
        return run


def _held(value: Any) -> Any:
    """What a variable holds, as values that nothing changes any more."""
    if isinstance(value, nn.Module):
        state = [(k, _held(v)) for k, v in value.state_dict(keep_vars=True).items()]
        own = {k: _held(v) for k, v in vars(value).items() if not k.startswith("_")}
        return [state, own, [_held(p.grad) for p in value.parameters()]]
    if isinstance(value, torch.optim.Optimizer):
        return [
            [_held(value.state.get(p, {})) for g in value.param_groups for p in g["params"]],
            [{k: v for k, v in g.items() if k != "params"} for g in value.param_groups],
        ]
    if isinstance(value, torch.amp.GradScaler):
        return copied(value.state_dict())
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, (Tensor, StepFuture)):
        return copied(value)
    if isinstance(value, (list, tuple)):
        return [_held(v) for v in value]
    if isinstance(value, dict):
        return {k: _held(v) for k, v in value.items()}
    if isinstance(value, SimpleNamespace) or getattr(value, "__module__", "") == "script":
        return {k: _held(v) for k, v in vars(value).items() if not k.startswith("_")}
    return value


def run(one: Work, endpoint: str | None, kill: Callable[[], None] | None = None) -> Run:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Session(one, endpoint, kill).all_lines()


def valid(one: Work) -> Work | None:
    """Without the operations that raise in the plain loop. None where the script itself does."""
    while True:
        plain = run(one, None)
        if plain.stopped is None:
            return one if any(what == "step" for _, what, _ in plain.noted) else None
        if plain.stopped < 0 or plain.stopped >= len(one.lines):
            return None
        one = without(one, plain.stopped, plain.stopped + 1)


def without(one: Work, start: int, end: int) -> Work:
    return replace(one, lines=one.lines[:start] + one.lines[end:])


def difference(one: Work, endpoint: str, kill: Callable[[], None] | None = None) -> tuple[str, Run]:
    """What differs between the two runs, in words; "" where nothing does. `one` is valid."""
    ours = run(one, endpoint, kill)
    until = len(one.lines) if ours.stopped is None else ours.stopped
    if ours.error is not None and not isinstance(ours.error, GpumuxError):
        line = one.lines[until] if 0 <= until < len(one.lines) else "submit" if until < 0 else "the end"
        return f"`{line}` raises {type(ours.error).__name__}: {ours.error}", ours
    plain = run(one, None)
    mine = [entry for entry in ours.noted if entry[0] < until]
    theirs = [entry for entry in plain.noted if entry[0] < until]
    if len(mine) != len(theirs):
        return f"{len(mine)} values, and {len(theirs)} in the plain loop", ours
    for (i, what, a), (_, _, b) in zip(mine, theirs, strict=True):
        if found := unequal(a, b):
            return f"{what} of `{one.lines[i]}`: {found}", ours
    if ours.stopped is None:
        for name, value in ours.end.items():
            if found := unequal(value, plain.end[name]):
                return f"{name} in the end: {found}", ours
    return "", ours


def shrunk(one: Work, endpoint: str, kill: Callable[[], None] | None = None) -> tuple[Work, str]:
    """The shortest that still differs: operations are dropped, large runs of them first; then lines of the setup."""
    words, _ = difference(one, endpoint, kill)
    size = max(1, len(one.lines) // 2)
    while size:
        start, dropped = len(one.lines) - size, False
        while start >= 0:
            smaller = valid(without(one, start, start + size))
            found = difference(smaller, endpoint, kill)[0] if smaller is not None else ""
            if found and smaller is not None:
                one, words, dropped = smaller, found, True
            start = min(start - size, len(one.lines) - size)
        size = size if dropped and size == 1 else size // 2
    return _shorter_setup(one, words, endpoint, kill)


def _shorter_setup(one: Work, words: str, endpoint: str, kill: Callable[[], None] | None) -> tuple[Work, str]:
    again = True
    while again:
        again = False
        rows = one.setup.split("\n")
        for i in reversed(range(len(rows))):
            if not rows[i].startswith("    "):
                continue
            less = replace(one, setup="\n".join(rows[:i] + rows[i + 1 :]))
            try:
                if valid(less) != less:
                    continue
                found, _ = difference(less, endpoint, kill)
            except Exception:  # noqa: BLE001  no script any more
                continue
            if found:
                one, words, again = less, found, True
                rows = one.setup.split("\n")
    return one, words


def main(text: str) -> None:
    """Of a script in a file: `python -m tests.fuzz.outside.compare FILE`, whose operations are parted by `# ---`."""
    from microbench.daemon import running_daemon

    torch.set_num_threads(1)
    head, *lines = text.split("# ---\n")
    inside = "nonlocal " in head or "# inside" in head
    names = frozenset(
        word for word in ("model", "optimizer", "scaler", "result", "held", "array", "model2") if f"{word} =" in head
    ) | {f"{k}{i}" for k in ("t", "a", "b") for i in range(3) if f"{k}{i} =" in head}
    one = Work(head.strip("\n"), tuple(line.strip("\n") for line in lines), inside, frozenset(names))
    with running_daemon(threads=1) as daemon:
        plain = run(one, None)
        print("plain:", repr(plain.error) if plain.error else "runs")
        words, ours = difference(one, daemon.endpoint)
    print("job:", repr(ours.error) if ours.error else "runs", f"(job.load_state() was needed {ours.remedies} times)")
    if ours.error is not None and ours.error.__traceback__ is not None:
        import traceback

        traceback.print_exception(ours.error)
    print(words or "they agree, as far as they went")


if __name__ == "__main__":
    with open(sys.argv[1]) as given:
        main(given.read())
