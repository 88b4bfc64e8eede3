"""`python -m tests.cluster.histories`: run many random histories of a cluster, or one of them again.

--histories N   so many, with seeds from --seed on (default 1,000)
--replay SEED   this one, and say what happened in it
--mistake NAME  put a mistake into the placement, and stop at the first history that shows it (mistakes.py)
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter
from contextlib import nullcontext

from tests.cluster.mistakes import MISTAKES, put_in
from tests.cluster.world import World

EVERY_S = 10.0


def main() -> int:
    arguments = argparse.ArgumentParser(prog="python -m tests.cluster.histories", description=__doc__)
    arguments.add_argument("--histories", type=int, default=1000)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--replay", type=int)
    arguments.add_argument("--mistake", choices=MISTAKES)
    args = arguments.parse_args()
    with nullcontext() if args.mistake is None else put_in(args.mistake):
        return replay(args.replay) if args.replay is not None else search(args)


def search(args: argparse.Namespace) -> int:
    began = said = time.monotonic()
    broken = 0
    met: Counter[str] = Counter()
    for seed in range(args.seed, args.seed + args.histories):
        world = World(seed)
        try:
            world.run()
        except Exception as error:  # noqa: BLE001 - whatever it is, the seed is what matters
            broken += 1
            print(f"seed {seed}, {world.kind}: {type(error).__name__}: {error}"[:400], flush=True)
            if args.mistake is not None:
                return 1
        met.update([world.kind, *world.met])
        if time.monotonic() - said > EVERY_S:
            said = time.monotonic()
            done = seed - args.seed + 1
            print(f"{done} histories, {broken} broken, {60 * done / (said - began):.0f} a minute", flush=True)
    print(f"{args.histories} histories, {broken} broken, in {time.monotonic() - began:.0f} s")
    print("histories with: " + ", ".join(f"{what} {number}" for what, number in sorted(met.items())))
    return 1 if broken else 0


def replay(seed: int) -> int:
    world = World(seed)
    try:
        world.run()
        broken = False
    except Exception:  # noqa: BLE001
        traceback.print_exc()
        broken = True
    print("\n".join(world.happened))
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
