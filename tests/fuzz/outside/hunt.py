"""`python -m tests.fuzz.outside.hunt FIRST LAST [--kills]`: run the scripts of these seeds, print those that differ."""

from __future__ import annotations

import argparse
import faulthandler
import logging
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

import torch

from gpumux.errors import GpumuxError
from microbench.kills import Phoenix
from tests.fuzz.outside import compare, grammar


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int)
    parser.add_argument("--kills", action="store_true")
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--shrink", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    daemon = Phoenix(Path(tempfile.mkdtemp(prefix="gf-")))
    errors: Counter[str] = Counter()
    began, ran, ops, rem = time.monotonic(), 0, 0, 0
    try:
        daemon.wait_until_ready()
        for seed in range(args.first, args.last):
            if time.monotonic() - began > args.seconds:
                break
            faulthandler.dump_traceback_later(120, exit=True)
            print("seed", seed, flush=True, file=sys.stderr)
            one = compare.valid(grammar.script(seed, args.kills))
            if one is None:
                errors["not valid"] += 1
                continue
            words, ours = compare.difference(one, daemon.endpoint, daemon.kill_executors)
            ran += 1
            ops += ours.done
            rem += ours.remedies
            if isinstance(ours.error, GpumuxError) and ours.stopped is not None:
                where = "submit" if ours.stopped < 0 else "a later line"
                errors[f"{type(ours.error).__name__} at {where}"] += 1
                print(f"{seed}, line {ours.stopped}: {ours.error!r}", file=sys.stderr)
            if words:
                if args.shrink:
                    faulthandler.dump_traceback_later(400, exit=True)
                    one, words = compare.shrunk(one, daemon.endpoint, daemon.kill_executors)
                print(f"==== seed {seed}: {words}\n# {'inside' if one.inside else 'global'}\n{one.setup}")
                for line in one.lines:
                    print("# ---\n" + line)
                if ours.error is not None and not isinstance(ours.error, GpumuxError):
                    print("".join(traceback.format_exception(ours.error)[-6:]))
                sys.stdout.flush()
    finally:
        print(ran, "scripts", ops, "operations", rem, "remedies", dict(errors), f"{time.monotonic() - began:.0f} s")
        daemon.close()


if __name__ == "__main__":
    main()
