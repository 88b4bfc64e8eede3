"""`python -m tests.faults`: run many simulated histories, or one of them again.

--histories N   so many, with seeds from --seed on (default 1,000)
--processes N   in so many processes (default 1)
--out FILE      write what was run as JSON
--replay SEED   this one, and say what happened in it
--mistake NAME  put a mistake into the daemon, and stop at the first history that shows it (mistakes.py)
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tests.faults.mistakes import MISTAKES
from tests.faults.world import World

EVERY_S = 10.0
AT_ONCE = 50  # histories that a process runs before it says what it found


def main() -> int:
    arguments = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    arguments.add_argument("--histories", type=int, default=1000)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--processes", type=int, default=1)
    arguments.add_argument("--out", type=Path)
    arguments.add_argument("--replay", type=int)
    arguments.add_argument("--mistake", choices=MISTAKES)
    args = arguments.parse_args()
    logging.disable(logging.CRITICAL)
    if args.mistake is not None:
        setattr(*MISTAKES[args.mistake])
    if args.replay is not None:
        return replay(args.replay)
    began = said = time.monotonic()
    broken: list[int] = []
    done = 0
    last = args.seed + args.histories
    starts = range(args.seed, last, AT_ONCE)
    with parts(partial(run, last=last), starts, args.processes) as found:
        for errors in found:
            done = min(done + AT_ONCE, args.histories)
            for seed, error in errors:
                broken.append(seed)
                print(f"seed {seed}: {error}", flush=True)
            if args.mistake is not None and broken:
                return 1
            if time.monotonic() - said > EVERY_S:
                said = time.monotonic()
                print(f"{done} histories, {len(broken)} broken, {60 * done / (said - began):.0f} a minute", flush=True)
    seconds = time.monotonic() - began
    print(f"{args.histories} histories, {len(broken)} broken, in {seconds:.0f} s")
    if args.out is not None:
        what = {"histories": args.histories, "first_seed": args.seed, "broken": sorted(broken)}
        args.out.write_text(
            json.dumps({**what, "seconds": round(seconds), "processes": args.processes}, indent=1) + "\n"
        )
    return 1 if broken else 0


def run(first: int, last: int) -> list[tuple[int, str]]:
    """The seeds of broken histories, of AT_ONCE before `last`, and their errors."""
    errors = []
    for seed in range(first, min(first + AT_ONCE, last)):
        try:
            World(seed).run()
        except Exception as error:  # noqa: BLE001 - whatever it is, the seed is what matters
            errors.append((seed, f"{type(error).__name__}: {error}"[:400]))
    return errors


@contextmanager
def parts(
    call: partial[list[tuple[int, str]]], starts: range, processes: int
) -> Iterator[Iterator[list[tuple[int, str]]]]:
    """What `call` gives for each start, in any order."""
    if processes == 1:
        yield map(call, starts)
        return
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        yield pool.imap_unordered(call, starts)


def replay(seed: int) -> int:
    world = World(seed)
    try:
        digest = world.run()
    except Exception:  # noqa: BLE001
        traceback.print_exc()
        digest = ""
    print("\n".join(world.happened))
    for client in world.clients:
        ended = "finished" if client.finished else "dead"
        print(f"{client.name} of user {client.uid}: {ended}, {len(client.batches)} steps, {client.lives} recoveries")
    print(digest or "broken")
    return 0 if digest else 1


if __name__ == "__main__":
    sys.exit(main())
