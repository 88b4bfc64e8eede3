"""`gpumux plan memory`: what a training step takes in several ways, and which to use."""

from __future__ import annotations

import argparse
import sys
import time
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpumux.cli.advise import DEFAULT_GPU, is_file
from gpumux.cli.text import emit, emit_json, size, table
from gpumux.device.sim.cost import preset
from gpumux.errors import ConfigError

if TYPE_CHECKING:
    from gpumux.plan.memory.ways import MemoryComparison, StepMemory

PROGRESS_S = 1.0
SAID = {
    "whole": "the batch as it is",
    "doubled": "a doubled batch",
    "microbatches": "doubled, microbatches=2",
    "checkpointing": "doubled, checkpointed",
    "waves": "waves=2",
}


def run(args: argparse.Namespace) -> int:
    if is_file(args.model):
        raise ConfigError(
            f"{args.model} has layers' times and no step to capture", "name the model: module:factory, or a built-in"
        )
    if args.plot is not None:
        from gpumux.simulate.result import check

        check(Path(args.plot))
    spec = preset(args.gpu_model or DEFAULT_GPU)
    from gpumux.plan.memory import picture, ways
    from gpumux.plan.models import find

    shown_at = time.monotonic()

    def progress(done: int, whole: int, what: str) -> None:
        nonlocal shown_at
        if time.monotonic() - shown_at >= PROGRESS_S:
            shown_at = time.monotonic()
            sys.stderr.write(f"gpumux: {done} of {whole} steps captured, now {SAID[what]}\n")

    loaded = find(args.model, args.input, device="cpu")
    found = ways.compare(loaded, args.batch, spec, optimizer=args.optimizer, progress=progress)
    if args.plot is not None:
        picture.draw(found, Path(args.plot))
    if args.json:
        emit_json(body(found, args.within))
    else:
        emit(text(found, args.within))
    return 0


def body(found: MemoryComparison, within: float) -> dict[str, Any]:
    """All of it, for scripts: sizes in bytes, times in seconds."""
    return {
        "model": found.model,
        "batch": found.batch,
        "optimizer": found.optimizer,
        "device": found.device,
        "within": within,
        "advice": found.best(within).way,
        "sentence": sentence(found, within),
        "ways": {
            each.way: {
                "samples": each.samples,
                "state_bytes": each.state_bytes,
                "batch_bytes": each.batch_bytes,
                "temporary_bytes": each.temporary_bytes,
                "total_bytes": each.total_bytes,
                "seconds": each.seconds,
                "relative_time": found.relative(each.way),
            }
            for each in found.ways
        },
        "left_out": found.left_out,
        "notes": found.notes,
    }


def text(found: MemoryComparison, within: float) -> str:
    doubled = found.way("doubled").total_bytes
    rows = [
        (SAID[each.way], str(each.samples), size(each.state_bytes), size(each.batch_bytes), size(each.temporary_bytes),
         size(each.total_bytes), f"{each.total_bytes / doubled:.0%}", f"x {found.relative(each.way):.2f}")
        for each in found.ways
    ]  # fmt: skip
    header = ("WAY", "SAMPLES", "STATE", "BATCH", "TEMPORARIES", "TOTAL", "OF DOUBLED", "TIME")
    lines = [
        f"{found.model}, batch {found.batch}, {found.optimizer}; times are modelled for an {found.device}, launches not"
        " included",
        table(header, rows),
        "",
        sentence(found, within),
    ]
    lines += [f"{SAID[way]}: left out, since {why}" for way, why in found.left_out.items()]
    lines += [f"{SAID[way]}: {note}" for way, note in found.notes.items()]
    return "\n".join(lines)


def sentence(found: MemoryComparison, within: float) -> str:
    """Which way to take, in one sentence."""
    best, doubled = found.best(within), found.way("doubled")
    bound = f" within {within:g} times the predicted time of a doubled batch" if isfinite(within) else ""
    fewer = [
        f"{SAID[each.way]} takes {_less(each, best)} at x {found.relative(each.way):.2f}"
        for each in found.ways
        if each.way != "whole" and each.total_bytes < best.total_bytes
    ]
    more = f"; beyond that, {' and '.join(fewer)}" if fewer else ""
    if best is doubled:
        return f"Take the doubled batch as it is: no other way{bound} takes fewer bytes{more}."
    gain = f"{_less(best, doubled)} than a doubled batch"
    if not bound:
        return f"Take {SAID[best.way]}: it takes the fewest bytes of all, {gain}, at x {found.relative(best.way):.2f}."
    return f"Take {SAID[best.way]}: of the ways{bound} it takes the fewest bytes, {gain}{more}."


def _less(each: StepMemory, other: StepMemory) -> str:
    return f"{1 - each.total_bytes / other.total_bytes:.0%} less"
