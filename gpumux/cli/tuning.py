"""The arguments of `gpumux tune`. Imports nothing heavy: every --help stays quick."""

from __future__ import annotations

import argparse

from gpumux.cli.planning import size, whole

_TUNE = """\
MODULE:FACTORY is a function of yours, factory(config) -> (step, model, optimizer), the loop body as you would submit it. Its module
also has  batches(config, start)  (training batches from step `start` on),  score(model, config) -> number  on validation
data,  direction = "maximize" or "minimize",  and, for a schedule,  hyperparameters(config, k) -> {"lr": ...}.

--space is TOML (or JSON), a table for each parameter:
  [lr]
  low = 1e-4
  high = 0.1
  log = true
  fusible = true        changes numbers only: models that differ in it train as one array
  [batch_size]
  choices = [32, 64]    infusible: changes operators or shapes, so it parts trials into arrays

--scheduler says how trials are trained: `fused` as arrays, `concurrent` as jobs of a running daemon, `serial` one after another.
It changes what a sweep costs, not what it finds. With --storage a sweep that was ended, or killed, goes on when the same
command is run again; Optuna's dashboard reads it. docs/tuning.md says more.

examples:
  gpumux tune clients.digits_sweep:factory --space clients/digits_sweep.toml --trials 16 --steps 400
  gpumux tune clients.digits_sweep:factory --space clients/digits_sweep.toml --algorithm hyperband --steps 810 --min-steps 30 \\
              --storage sqlite:///digits.db --plot digits.png --save best.pt
  gpumux tune my.sweep:factory --space space.json --trials 64 --steps 5000 --scheduler concurrent --concurrent 8

exit codes: 0 done, 1 a trial or request failed, 64 wrong usage, 78 wrong input, 130 interrupted
"""


def natural(text: str) -> int:
    """A whole number from 0 up."""
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0 up")
    return value


def _two(text: str) -> int:
    if (value := whole(text)) < 2:
        raise argparse.ArgumentTypeError(f"{text!r}: give 2 or more")
    return value


def add(parser: argparse.ArgumentParser) -> None:
    """What belongs to `gpumux tune`."""
    parser.epilog = _TUNE
    flag = parser.add_argument
    flag("task", metavar="MODULE:FACTORY", help="what makes step, model and optimizer of a configuration")
    flag("--space", metavar="FILE", required=True, help="the hyper-parameters, TOML or JSON")
    flag("--steps", metavar="N", type=whole, required=True, help="steps of a trial (at most, with hyperband)")
    flag("--trials", metavar="N", type=whole, help="how many (default with hyperband: one pass over its brackets)")
    flag("--algorithm", choices=("random", "hyperband"), default="random", help="default random")
    flag("--min-steps", metavar="N", type=whole, help="hyperband: of the first rung (default: steps / eta**3)")
    flag("--eta", metavar="N", type=_two, default=3, help="hyperband: one in N goes on to the next rung (default 3)")
    flag("--skip-last", metavar="N", type=natural, default=0, help="hyperband: rungs left out at each bracket's end")
    flag(
        "--sampler", choices=("random", "tpe"), default="random", help="where configurations come from (default random)"
    )
    flag("--scheduler", choices=("serial", "concurrent", "fused"), default="fused", help="default fused")
    flag("--seed", metavar="N", type=int, default=0, help="of configurations, weights and random draws (default 0)")
    flag("--storage", metavar="URL", help="an Optuna storage: sqlite:///FILE (pip install optuna)")
    flag("--study", metavar="NAME", help="the sweep's name in the storage (default: MODULE:FACTORY)")
    flag("--checkpoints", metavar="DIR", help="where trials' states are kept between rungs (default beside --storage)")
    flag("--max-array", metavar="N", type=whole, help="fused: models of an array at most")
    flag("--memory", metavar="SIZE", type=size, help="fused: of an array at most (default: half of what is free)")
    flag("--concurrent", metavar="N", type=whole, default=4, help="concurrent: jobs at a time (default 4)")
    flag(
        "--endpoint",
        metavar="URL",
        help="which daemon (concurrent: default GPUMUX_ENDPOINT, GPU 0; fused: default none)",
    )
    flag("--threads", metavar="N", type=whole, help="serial and fused: torch's threads on the CPU")
    flag("--plot", metavar="FILE.png", help="draw scores over steps and time (pip install matplotlib)")
    flag("--save", metavar="FILE.pt", help="write the best trial's state (torch.save)")
    flag("--json", action="store_true", help="print JSON, for scripts")
