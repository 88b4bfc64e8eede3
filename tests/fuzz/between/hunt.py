"""Makes a sequence of operations from a seed, and hunts through many."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from tests.fuzz.between.compare import Run, Work, difference, shrunk, valid
from tests.fuzz.between.operations import (
    GENERATOR,
    GRADIENTS,
    KEPT,
    OPTIMIZER,
    PARAMETERS,
    READS,
    STEPS,
    Operation,
)
from tests.fuzz.between.training import KEEPING, MODELS, OPTIMIZERS
from tests.fuzz.between.training import STEPS as KINDS

GROUPS: dict[str, tuple[Operation, ...]] = {
    "reads": READS, "kept": KEPT, "gradients": GRADIENTS, "parameters": PARAMETERS, "optimizer": OPTIMIZER,
    "generator": GENERATOR,
}  # fmt: skip
ALL = tuple(op for group in GROUPS.values() for op in group)
LONGEST = 24


def sequence(seed: int, keeping: bool = False) -> Work:
    """Each seed prefers some groups of operations, and what a script has kept is used again, so that few meet often."""
    rng = random.Random(seed)
    model = rng.choice(list(MODELS))
    optimizer = rng.choice(list({**OPTIMIZERS, **(KEEPING if keeping else {})}))
    step = rng.choices(list(KINDS), [2, 3, 2])[0]
    count = len(list(MODELS[model]().parameters()))
    liking = [rng.choice([0.2, 1, 3]) for _ in GROUPS]
    chosen = [_step(rng)]
    for _ in range(rng.randrange(4, LONGEST)):
        kept = {name for op in chosen for name in _names(op)}
        again = [op for op in ALL if kept & _names(op)]
        groups = [
            [op for op in group if op.lines.startswith("kept[") or _names(op) <= kept] for group in GROUPS.values()
        ]
        if rng.random() < 0.4:
            chosen.append(_step(rng))
        elif again and rng.random() < 0.3:
            chosen.append(rng.choice(again))
        else:
            chosen.append(rng.choice(rng.choices(groups, liking)[0]))
    return Work(model, optimizer, step, tuple(_lines(op, rng, count) for op in chosen))


def _step(rng: random.Random) -> Operation:
    return rng.choices(STEPS, [op.weight for op in STEPS])[0]


def _names(op: Operation) -> set[str]:
    """What it puts into `kept`, or takes from there."""
    return set(re.findall(r'kept\[?\S*?"(\w[\w ]*)"\]?', op.lines)) | set(re.findall(r'"([\w ]+)" in kept', op.lines))


def _lines(op: Operation, rng: random.Random, count: int) -> str:
    """With its parameter and its number."""
    given = [f"p = params()[{rng.randrange(count)}]"] if re.search(r"\bp\b", op.lines) else []
    given += [f"k = {rng.randrange(1, 6)}"] if re.search(r"\bk\b", op.lines) else []
    # A compound statement can't follow others on their line.
    between = "\n" if re.match(r"(for|if|with)\b", op.lines) else "; "
    return between.join(["; ".join(given), op.lines]) if given else op.lines


@dataclass(frozen=True)
class Found:
    seed: int
    one: Work
    words: str


@dataclass
class Tally:
    sequences: int = 0
    operations: int = 0  # that both runs did
    errors: int = 0  # sequences that ended in one of gpumux's
    remedies: int = 0

    def add(self, one: Work, ours: Run) -> None:
        self.sequences += 1
        self.operations += len(one.lines) if ours.stopped is None else ours.stopped
        self.errors += ours.error is not None
        self.remedies += ours.remedies


def hunt(seeds: range, endpoint: str, tally: Tally, keeping: bool = False, shrink: bool = True) -> Iterator[Found]:
    for seed in seeds:
        one, _ = valid(sequence(seed, keeping))
        words, ours = difference(one, endpoint)
        tally.add(one, ours)
        if words:
            yield Found(seed, *(shrunk(one, endpoint) if shrink else (one, words)))
