"""`python -m tests.faults`: run many simulated histories, or one of them again.

--histories N   so many, with seeds from --seed on (default 1,000)
--replay SEED   this one, and say what happened in it
--mistake NAME  put a mistake into the daemon, and stop at the first history that shows it (mistakes.py)
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback

from tests.faults.mistakes import MISTAKES
from tests.faults.world import World

EVERY_S = 10.0


def main() -> int:
    arguments = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    arguments.add_argument("--histories", type=int, default=1000)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--replay", type=int)
    arguments.add_argument("--mistake", choices=MISTAKES)
    args = arguments.parse_args()
    logging.disable(logging.CRITICAL)
    if args.mistake is not None:
        setattr(*MISTAKES[args.mistake])
    if args.replay is not None:
        return replay(args.replay)
    began = said = time.monotonic()
    broken = 0
    for seed in range(args.seed, args.seed + args.histories):
        try:
            World(seed).run()
        except Exception as error:  # noqa: BLE001 - whatever it is, the seed is what matters
            broken += 1
            print(f"seed {seed}: {type(error).__name__}: {error}"[:400], flush=True)
            if args.mistake is not None:
                return 1
        if time.monotonic() - said > EVERY_S:
            said = time.monotonic()
            done = seed - args.seed + 1
            print(f"{done} histories, {broken} broken, {60 * done / (said - began):.0f} a minute", flush=True)
    print(f"{args.histories} histories, {broken} broken, in {time.monotonic() - began:.0f} s")
    return 1 if broken else 0


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
