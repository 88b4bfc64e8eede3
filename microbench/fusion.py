"""Training B models of one kind on one device: one after another, as processes, fused by hand, by vmap, and fused by
gpumux.

Throughput is models' steps a second, over that of the plain loop in the same turn. The models are those of the HFTA
paper (clients/models/workloads.py), each with a learning rate and a seed of its own, on a batch that all share. The
published figures stand beside: other machines, and batches of their own for each model, so they are marks and no
comparison.

    python -m microbench.fusion --workload cnn transformer --models 8

A long measurement may be made in parts: with --add, FILE keeps what it holds, and what it lacks is measured.
microbench.fusionplot draws it.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpumux.cli.arguments import whole
from gpumux.errors import ConfigError
from microbench import common, fusionfile

FLOOR = 0.95  # of the plain loop's throughput: fusing must never cost more than noise
MARKS = {("transformer", 2): 2.6, ("cnn", 4): 1.6}  # by hand, 8 small models on two cores; by workload and batch size
MARKED_MODELS = 8
DRIVER = Path("/dev/nvidiactl")
# Peak throughput over one model after another, however many models: HFTA, table 8 for the first three (the better of
# FP32 and AMP, table 5) and appendix I, which gives a range for the others.
PAPER: dict[str, dict[str, Any]] = {
    "pointnet_cls": {"V100": 5.02, "RTX6000": 4.36, "A100": 11.50},
    "pointnet_seg": {"V100": 4.29, "RTX6000": 3.63, "A100": 9.48},
    "dcgan": {"V100": 4.59, "RTX6000": 6.29, "A100": 4.41},
    **{name: {"V100": (2.42, 3.94)} for name in ("resnet18", "mobilenet_v3", "transformer", "bert_medium")},
}


def main(argv: list[str] | None = None) -> int:
    from clients.models.workloads import RECIPES, SIZES, workload
    from microbench import fusing

    arguments = common.parser(__doc__)
    arguments.add_argument("--workload", nargs="+", choices=RECIPES, default=list(RECIPES), metavar="NAME",
                           help=f"of {', '.join(RECIPES)} (default: all)")  # fmt: skip
    arguments.add_argument(
        "--models", type=whole, nargs="+", default=[1, 2, 4, 8], metavar="B", help="default: 1 2 4 8"
    )
    arguments.add_argument("--batch", type=whole, metavar="N", help="samples a step (default: the workload's)")
    arguments.add_argument(
        "--size", choices=SIZES, help="of the models (default: small on a CPU, else full, the paper's)"
    )
    arguments.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    arguments.add_argument(
        "--threads", type=whole, default=len(os.sched_getaffinity(0)), help="torch's (default: all cores)"
    )
    arguments.add_argument("--seconds", type=float, default=0.4, help="of a turn (default: 0.4)")
    arguments.add_argument("--repeats", type=whole, default=5, help="turns of each way (default: 5)")
    arguments.add_argument("--dropout", type=float, metavar="P", help="instead of the models' own")
    usual = [way for way in fusing.WAYS if way not in fusing.SLOW_TO_MAKE]
    arguments.add_argument("--ways", nargs="+", choices=fusing.WAYS, default=usual, metavar="WAY",
                           help=f"of {', '.join(fusing.WAYS)} (default: all but the compiled ones,"
                           " which take minutes)")  # fmt: skip
    arguments.add_argument("--no-memory", action="store_true", help="leave memory out")
    arguments.add_argument(
        "--no-throughput", action="store_true", help="memory alone, which other load does not change"
    )
    arguments.add_argument("--add", action="store_true",
                           help="to what --out FILE holds: measure what it lacks alone, also after Ctrl-C")  # fmt: skip
    args = arguments.parse_args(argv)
    problem = unusable(args.device, args.ways) or ("--add takes --out" if args.add and args.out is None else "")
    if args.no_memory and args.no_throughput:
        problem = "--no-memory and --no-throughput leave nothing to measure"
    if problem:
        arguments.error(problem)
    ways = [way for way in fusing.WAYS if way in {fusing.SERIAL, *args.ways}]
    size = args.size or ("small" if args.device == "cpu" else "full")
    facts, overhead = common.machine(), fusing.overhead_bytes(args.device)
    settings = {"device": args.device, "size": size, "threads": args.threads, "dropout": args.dropout}
    try:
        measured, earlier = fusionfile.resumed(args.out, facts, settings) if args.add else ({}, [])
        result: dict[str, Any] = {
            "machine": facts, **settings, "overhead_bytes": overhead, "workloads": measured,
            **({"earlier": earlier} if earlier else {}),
        }  # fmt: skip
        clock = Clock([models for _ in args.workload for models in args.models])
        for name in args.workload:
            chosen = workload(name, size, args.batch, device=args.device)
            paper = PAPER.get(name, {})
            found = measured.setdefault(name, {"batch": chosen.batch_size, "models": {}, "paper": paper})
            if found["batch"] != chosen.batch_size:
                raise ConfigError(f"{args.out} holds {name} at batch {found['batch']}", "choose another --out")
            found["paper"] = paper
            for models in args.models:
                setting = fusing.Setting(chosen, models, args.threads, args.seconds, args.repeats, args.dropout)
                before = found["models"].get(str(models), {})
                missing, unweighed = fusionfile.lacking(before, ways, not args.no_memory)
                missing = [] if args.no_throughput else missing
                rates = summary(fusing.throughput(setting, missing), fusing.SERIAL) if missing else {}
                peaks = fusing.memory(setting, unweighed) if unweighed else {}
                now = found["models"][str(models)] = fusionfile.merged(before, rates, peaks)
                clock.tick(models, bool(missing or unweighed))
                print(f"{name}, {models} models: {line(now)}; {clock}", file=sys.stderr, flush=True)
                result["targets"] = targets(measured, size, args.device, fusing.OURS)
                common.report("fusion", args.out, result)  # what is measured is kept, whatever comes next
    except (ConfigError, fusing.FusionFailed) as error:
        print(f"fusion: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        kept = f"; {args.out} keeps what was measured, and --add goes on from there" if args.out is not None else ""
        print(f"fusion: stopped{kept}", file=sys.stderr)
        return 130
    print(common.describe(facts))
    print(show({name: measured[name] for name in args.workload}, ways, max(args.models)))
    for name, target in result["targets"].items():
        print(f"{name}: {target['value']:.2f}, target {target['target']}: {'met' if target['met'] else 'MISSED'}")
    return 0


def unusable(device: str, ways: Sequence[str]) -> str:
    """Why this can't be measured here; empty if it can."""
    if (
        any("compiled" in way for way in ways)
        and device == "cpu"
        and shutil.which("g++") is None
        and shutil.which("clang++") is None
    ):
        return "to compile for the CPU takes a C++ compiler: install g++, or leave that way out"
    if device == "cuda" and not DRIVER.exists():
        return "--device cuda takes an NVIDIA GPU, and there is none here"
    return ""


class Clock:
    """How far a measurement is, and how long the rest may take: as long for each model, and twice that beside, as so
    far."""

    def __init__(self, models: Sequence[int]) -> None:
        self._left, self._count = list(models), len(models)
        self._begin = time.monotonic()
        self._weight = 0

    def tick(self, models: int, worked: bool) -> None:
        self._left.remove(models)
        if worked:
            self._weight += models + 2

    def __str__(self) -> str:
        gone = time.monotonic() - self._begin
        rest = sum(self._left) + 2 * len(self._left)
        soon = f", about {gone / self._weight * rest:.0f} s to go" if self._left and self._weight else ""
        return f"{self._count - len(self._left)} of {self._count} after {gone:.0f} s{soon}"


def summary(rates: dict[str, Any], baseline: str) -> dict[str, Any]:
    """By way: its rate and its rate over the baseline's, turn by turn, with spreads; or why not."""
    found: dict[str, Any] = {}
    base = rates[baseline]["samples"]
    for way, rate in rates.items():
        if "error" in rate:
            found[way] = {"error": rate["error"]}
            continue
        ratios = [mine / its for mine, its in zip(rate["samples"], base, strict=True)]
        found[way] = {
            "models_steps_per_s": common.figure(rate["samples"]), "over_serial": common.figure(ratios),
            "samples": rate["samples"],
        }  # fmt: skip
    return found


def targets(measured: dict[str, Any], size: str, device: str, ours: str) -> dict[str, Any]:
    """What is wanted of us, where it was measured."""
    found: dict[str, Any] = {}
    for name, workload in measured.items():
        for models, ways in workload["models"].items():
            way = ways.get(ours, {"error": ""})
            if "over_serial" not in way:
                continue
            value = way["over_serial"].median
            mark = MARKS.get((name, workload["batch"]))
            wanted = mark if (mark and device == "cpu" and size == "small" and int(models) == MARKED_MODELS) else FLOOR
            said = f"{name} at batch {workload['batch']}, {models} models, fused over serial"
            found[said] = {"value": value, "target": wanted, "met": value >= wanted}
    return found


def line(ways: dict[str, Any]) -> str:
    def said(found: dict[str, Any]) -> str:
        held = _mebibytes(found)
        return " and ".join([_ratio(found), *([f"{held} MiB"] if held else [])])

    return ", ".join(f"{way} {said(found)}" for way, found in ways.items())


def _ratio(found: dict[str, Any] | None) -> str:
    return "-" if found is None or "over_serial" not in found else f"{found['over_serial'].median:.2f}"


def show(measured: dict[str, Any], ways: Sequence[str], most: int) -> str:
    """Over serial, by number of models; then memory at the largest, and why a way is missing."""
    rows, memory, reasons = [], [], []
    for name, workload in measured.items():
        for models, found in workload["models"].items():
            rows.append(
                [f"{name}, batch {workload['batch']}", models, *(_ratio(found.get(w)) for w in ways), _paper(workload)]
            )
            for way, each in found.items():
                if "error" in each:
                    reasons.append(f"{name}, {way}: {each['error']}")
        held = workload["models"][str(most)]
        memory.append([name, str(most), *(_mebibytes(held.get(w, {})) for w in ways), ""])
    head = ["steps a second over serial", "models", *ways, "paper"]
    parts = [common.table(head, rows)]
    if any(cell for row in memory for cell in row[2:]):
        parts.append(common.table(["MiB beside the libraries'", *head[1:-1], ""], memory))
    return "\n\n".join([*parts, *(["\n".join(dict.fromkeys(reasons))] if reasons else [])])


def _mebibytes(found: dict[str, Any]) -> str:
    return f"{found['bytes'] / 2**20:.0f}" if "bytes" in found else ""


def _paper(workload: dict[str, Any]) -> str:
    def one(value: Any) -> str:
        return f"{value[0]}-{value[1]}" if isinstance(value, tuple) else f"{value}"

    return ", ".join(f"{gpu} {one(value)}" for gpu, value in workload["paper"].items()) or "-"


if __name__ == "__main__":
    sys.exit(main())
