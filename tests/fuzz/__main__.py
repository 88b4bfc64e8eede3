"""Hunts for what is silently wrong between two steps (between/).

    python -m tests.fuzz --seeds A:B [--keeping] [--out FOLDER]

Runs the sequences of seeds A to B - 1, each plainly and as a job, and prints each that differs, shrunk, as a script
that can be run. `--out` writes them to files as well. The exit code is 1 if there was one. `--keeping` has an optimizer
among the others that keeps `p.grad` in its state, which most steps are refused for (docs/plain-loop.md, row G3).
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from microbench.daemon import running_daemon
from tests.fuzz.between.hunt import Tally, hunt

SAY_S = 60.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", default="0:200", metavar="A:B")
    parser.add_argument("--keeping", action="store_true", help="also an optimizer that keeps p.grad")
    parser.add_argument("--out", type=Path, help="a folder for the scripts")
    args = parser.parse_args()
    first, last = map(int, args.seeds.split(":"))
    torch.set_num_threads(1)
    tally, failed, said = Tally(), False, time.monotonic()
    with running_daemon(threads=1) as daemon:
        for seed in range(first, last):
            for found in hunt(range(seed, seed + 1), daemon.endpoint, tally, args.keeping):
                failed = True
                text = f"# seed {found.seed}: {found.words}\n".replace("\n", " ") + "\n" + found.one.script()
                print(text, flush=True)
                if args.out is not None:
                    args.out.mkdir(parents=True, exist_ok=True)
                    (args.out / f"seed_{found.seed}.py").write_text(text)
            if time.monotonic() - said > SAY_S:
                said = time.monotonic()
                print(f"# up to seed {seed}: {tally}", file=sys.stderr, flush=True)
    print(f"# {tally}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
