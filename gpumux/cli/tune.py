"""`gpumux tune`: hyper-parameter search, trials as arrays, as jobs of a daemon, or one after another."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from gpumux import files, pictures
from gpumux.cli.text import emit, emit_json, printable, table
from gpumux.tune import plot, report, study
from gpumux.tune.report import ProgressReporter
from gpumux.tune.run import Budget, SweepResult, read_space, tune

if TYPE_CHECKING:
    from gpumux.tune.task import Task

EX_FAILED, EX_INTERRUPTED = 1, 130


def run(args: argparse.Namespace) -> int:
    if args.save:
        files.check_writable(Path(args.save))
    if args.plot:
        pictures.check(Path(args.plot))
    space = read_space(Path(args.space))
    budget = Budget(args.algorithm, args.steps, args.trials, args.min_steps, args.eta, args.skip_last)
    budget.make()  # refuses invalid settings before the user's code runs
    import torch

    from gpumux.tune.task import find

    task = find(args.task)
    if args.threads:
        torch.set_num_threads(args.threads)
    progress = ProgressReporter(sys.stderr, time.monotonic, budget.total(), maximize=task.maximize)
    try:
        found = tune(
            task, space, steps=args.steps, trials=args.trials, algorithm=args.algorithm, scheduler=args.scheduler,
            min_steps=args.min_steps, eta=args.eta, skip_last=args.skip_last, sampler=args.sampler, seed=args.seed,
            storage=args.storage, study=args.study, checkpoints=args.checkpoints, concurrent=args.concurrent,
            endpoint=args.endpoint, max_array=args.max_array, memory=int(args.memory) if args.memory else None,
            listener=progress.listener(),
        )  # fmt: skip
    except KeyboardInterrupt:
        progress.end()
        sys.stderr.write(f"gpumux: interrupted; {_after(args, progress.scored)}\n")
        return EX_INTERRUPTED
    _show(found, as_json=args.json)
    if args.plot:
        for path in _pictures(found, task, args):
            sys.stderr.write(f"gpumux: wrote {path}\n")
    if args.save and found.best is not None:
        state = found.state()
        torch.save({**state, "config": dict(found.best.config), "score": found.best.score}, args.save)
    return 0 if found.best is not None else EX_FAILED


def _pictures(found: SweepResult, task: Task, args: argparse.Namespace) -> list[Path]:
    """Draw the sweep; of a stored one, beside that picture, what Optuna draws of its studies. Returns the files."""
    path = Path(args.plot)
    plot.draw(found, path)
    if args.storage is None:
        return [path]
    return [path, *study.pictures(args.storage, args.study or task.name, path)]


def _after(args: argparse.Namespace, scored: int) -> str:
    if args.storage is None:
        return "nothing is kept without --storage"
    return f"{scored} scores of this run are kept in {args.storage}: run the same command again to go on from there"


def _show(found: SweepResult, *, as_json: bool) -> None:
    if as_json:
        emit_json(report.body(found))
        return
    emit(printable_lines(table(report.HEADER, report.rows(found))))
    emit("")
    emit(printable_lines(report.summary(found)))


def printable_lines(text: str) -> str:
    return "\n".join(printable(line) for line in text.split("\n"))
