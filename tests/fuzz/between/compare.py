"""Runs a sequence of operations plainly and with the step in a daemon, and says what differs.

The two must agree in every bit: losses, what was noted, parameters, buffers, gradients, the optimizer's state and
settings, torch's generator, what the script kept. Or gpumux raises an error of its own: at a step that says
LocalWrite, its remedy is followed once (`job.load_state()`), and the sequence goes on; after any other, what came
before is compared, and the sequence ends.
"""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gpumux import client
from gpumux.client.future import StepFuture
from gpumux.client.job import Job
from gpumux.errors import GpumuxError, LocalWrite
from tests.fuzz.between.training import KEEPING, MODELS, OPTIMIZERS, STEPS, batch, predicting, updating


@dataclass(frozen=True)
class Work:
    """What is run: `lines[i]` are the lines of one operation."""

    model: str
    optimizer: str
    step: str
    lines: tuple[str, ...]

    def script(self) -> str:
        """A program that runs it again: `python FILE`, in the root of the repository."""
        body = "\n".join(self.lines)
        return (
            "from tests.fuzz.between.compare import main\n\n"
            f'main("{self.model}", "{self.optimizer}", "{self.step}", """\n{body}\n""")\n'
        )


@dataclass
class Run:
    """What one run did, until an operation raised."""

    noted: list[tuple[int, Any]] = field(default_factory=list)  # with the operation's number
    losses: list[tuple[int, Any]] = field(default_factory=list)
    end: dict[str, Any] = field(default_factory=dict)
    stopped: int | None = None  # at which operation
    error: Exception | None = None
    remedies: int = 0


class Outside:
    """A value that an error took the place of."""


OUTSIDE = Outside()


def copied(value: Any) -> Any:
    """A copy that nothing changes any more. A tensor that raises an error of gpumux is OUTSIDE."""

    def leaf(x: Any) -> Any:
        try:
            if isinstance(x, StepFuture):
                x = x.result()
            if isinstance(x, nn.Module):
                return copied(list(x.state_dict().values()))
            return x.detach().clone() if isinstance(x, Tensor) else x
        except GpumuxError:
            return OUTSIDE

    return pytree.tree_map(leaf, value)


class Script:
    """The names that operations use."""

    def __init__(self, one: Work, endpoint: str | None) -> None:
        torch.manual_seed(7)
        self.one, self.run, self.at, self.index = one, Run(), 0, 0
        self.given: dict[str, Any] = {}
        self.model = MODELS[one.model]()
        self.optimizer = {**OPTIMIZERS, **KEEPING}[one.optimizer](self.model)
        body = STEPS[one.step](self.model, self.optimizer)
        update, predict = updating(self.optimizer), predicting(self.model)
        self.job: Job | None = None
        self.step, self.update, self.predict = body, update, predict
        self.functions, self.endpoint = (body, update, predict), endpoint
        if endpoint is not None:
            self._submit(endpoint)

    def _submit(self, endpoint: str) -> None:
        body, update, predict = self.functions
        example = batch(self.one.model, 0)
        self.job = job = client.submit(
            body, example=example, model=self.model, optimizer=self.optimizer, endpoint=endpoint, max_variants=64
        )
        self.step = self._remedied(job.step)
        lines = "\n".join(self.one.lines)
        if "update()" in lines:  # each takes time
            self.update = self._remedied(job.add(update, example=()))
        if "predict(" in lines:
            self.predict = self._remedied(job.add(predict, example=example[:1]))

    def again(self) -> None:
        """As where a cell of a notebook runs again: the older job is closed once there is a new one."""
        if self.job is not None and self.endpoint is not None:
            older = self.job
            self._submit(self.endpoint)
            older.close()
            self.given["job"] = self.job

    def _remedied(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def again(*batch: Any) -> Any:
            try:
                return call(*batch)
            except LocalWrite:
                assert self.job is not None
                self.job.load_state()
                self.run.remedies += 1
                return call(*batch)

        return again

    def batch(self, index: int) -> tuple[Tensor, Tensor]:
        return batch(self.one.model, index)

    def train(self, count: int, batches: Any = None) -> list[Any]:
        losses = []
        for i in range(count):
            losses.append(self.step(*(self.batch(self.at) if batches is None else batches[i])))
            self.run.losses.append((self.index, losses[-1]))
            self.at += 1
        return losses

    def local_loss(self) -> Tensor:
        x, y = self.batch(99)
        return F.cross_entropy(self.model(x), y)

    def note(self, value: Any) -> None:
        self.run.noted.append((self.index, copied(value)))

    def names(self) -> dict[str, Any]:
        given = {name: getattr(self, name) for name in (
            "model", "optimizer", "job", "train", "batch", "local_loss", "note", "again",
        )}  # fmt: skip
        return {
            **given, "update": lambda: self.update(), "predict": lambda x: self.predict(x),
            "params": lambda: list(self.model.parameters()), "kept": {}, "torch": torch, "nn": nn, "F": F, "copy": copy,
            "io": io, "DataLoader": DataLoader, "TensorDataset": TensorDataset,
        }  # fmt: skip

    def all_lines(self) -> Run:
        names = self.given = self.names()
        run = self.run
        try:
            for self.index, lines in enumerate(self.one.lines):
                try:
                    exec(compile(lines, f"<operation {self.index}>", "exec"), names)  # noqa: S102  our own lines
                except Exception as error:  # noqa: BLE001  whatever it is, it is what this run shows
                    run.stopped, run.error = self.index, error
                    break
        finally:
            if self.job is not None:
                self.job.close()
        run.losses = [(i, copied(loss)) for i, loss in run.losses]
        run.end = {
            "generator": torch.get_rng_state(),
            "gradients": copied([p.grad for p in self.model.parameters()]),
            "optimizer": copied(
                [dict(sorted(self.optimizer.state.get(p, {}).items())) for p in self.model.parameters()]
            ),
            "settings": [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups],
            "model": copied(dict(self.model.state_dict())),
            "kept": copied({k: v for k, v in names["kept"].items() if not hasattr(v, "remove") and k != "schedule"}),
            "training": [m.training for m in self.model.modules()],
        }
        return run


def run(one: Work, endpoint: str | None) -> Run:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own: a scheduler before the first step
        return Script(one, endpoint).all_lines()


def valid(one: Work) -> tuple[Work, Run]:
    """Without the operations that raise in the plain loop; and that loop's run."""
    while True:
        plain = run(one, None)
        if plain.stopped is None:
            return one, plain
        one = _without(one, plain.stopped, plain.stopped + 1)


def _without(one: Work, start: int, end: int) -> Work:
    return Work(one.model, one.optimizer, one.step, one.lines[:start] + one.lines[end:])


def difference(one: Work, endpoint: str) -> tuple[str, Run]:
    """What differs between the two runs, in words; "" where nothing does. `one` is valid."""
    try:
        ours = run(one, endpoint)
    except GpumuxError as error:  # at submit
        return "", Run(stopped=0, error=error)
    until = len(one.lines) if ours.stopped is None else ours.stopped
    if ours.error is not None and not isinstance(ours.error, GpumuxError):
        return f"`{one.lines[until]}` raises {type(ours.error).__name__}: {ours.error}", ours
    plain = run(one, None)
    for what in ("losses", "noted"):
        mine = [(i, v) for i, v in getattr(ours, what) if i < until]
        theirs = [(i, v) for i, v in getattr(plain, what) if i < until]
        if len(mine) != len(theirs):
            return f"{len(mine)} {what}, and {len(theirs)} in the plain loop", ours
        for (i, a), (_, b) in zip(mine, theirs, strict=True):
            if found := unequal(a, b):
                return f"{what} of `{one.lines[i]}`: {found}", ours
    if ours.stopped is None:
        for name, value in ours.end.items():
            if found := unequal(value, plain.end[name]):
                return f"{name} in the end: {found}", ours
    return "", ours


def unequal(ours: Any, plain: Any) -> str:
    """Where an error took a value's place, all is well."""
    a, b = pytree.tree_leaves_with_path(ours), pytree.tree_leaves_with_path(plain)
    if [path for path, _ in a if _ is not OUTSIDE] and len(a) != len(b):
        return (
            f"{[pytree.keystr(path) for path, _ in a]}, and {[pytree.keystr(path) for path, _ in b]} in the plain loop"
        )
    for (path, mine), (_, theirs) in zip(a, b, strict=False):
        if mine is OUTSIDE:
            continue
        if isinstance(theirs, Tensor) and isinstance(mine, Tensor):
            same = mine.dtype == theirs.dtype and mine.shape == theirs.shape and _bits(mine, theirs)
        else:
            same = type(mine) is type(theirs) and (mine == theirs or (mine != mine and theirs != theirs))  # nan
        if not same:
            return f"{pytree.keystr(path)} is {_short(mine)}, and {_short(theirs)} in the plain loop"
    return ""


def _bits(a: Tensor, b: Tensor) -> bool:
    if not a.is_floating_point():
        return torch.equal(a, b)
    return torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) and torch.equal(a.signbit(), b.signbit())  # -0.0


def _short(value: Any) -> str:
    text = repr(value.flatten()[:6].tolist() if isinstance(value, Tensor) else value)
    return text if len(text) < 200 else text[:200] + "..."


def shrunk(one: Work, endpoint: str) -> tuple[Work, str]:
    """The shortest that still differs, found by dropping operations: large runs of them first."""
    words, _ = difference(one, endpoint)
    size = max(1, len(one.lines) // 2)
    while size:
        start = len(one.lines) - size
        dropped = False
        while start >= 0:
            try:
                smaller, _ = valid(_without(one, start, start + size))
                found, _ = difference(smaller, endpoint)
            except GpumuxError:  # the daemon's, and no answer to this question
                found = ""
            if found:
                one, words, dropped = smaller, found, True
            start = min(start - size, len(one.lines) - size)
        size = size if dropped and size == 1 else size // 2
    return one, words


def main(model: str, optimizer: str, step: str, lines: str, endpoint: str = "") -> None:
    """Of a script that a hunt printed: run it both ways, with a daemon of its own."""
    from microbench.daemon import running_daemon

    torch.set_num_threads(1)
    operations: Sequence[str] = _operations(lines)
    one = Work(model, optimizer, step, tuple(operations))
    plain = run(one, None)
    print("plain:", plain.error or "runs")
    with running_daemon(threads=1) as daemon:
        words, ours = difference(one, daemon.endpoint)
    print("job:", repr(ours.error) if ours.error else "runs", f"(job.load_state() was needed {ours.remedies} times)")
    print(words or "they agree, as far as they went")


def _operations(lines: str) -> list[str]:
    """Statements by themselves, with those that go with one line before."""
    import ast

    text = lines.strip("\n")
    rows = text.split("\n")
    return ["\n".join(rows[node.lineno - 1 : node.end_lineno]) for node in _one_a_line(ast.parse(text).body)]


def _one_a_line(body: list[Any]) -> list[Any]:
    """Of several statements on one line, a node that spans them."""
    found: list[Any] = []
    for node in body:
        if found and found[-1].end_lineno >= node.lineno:
            found[-1].end_lineno = max(found[-1].end_lineno, node.end_lineno)
        else:
            found.append(node)
    return found
