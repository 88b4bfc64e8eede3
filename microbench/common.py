"""What the benchmarks share: what ran them and where, medians and spreads, tables and JSON. Imports no torch."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gpumux
from gpumux.scheduler import RUNS

TICKS = os.sysconf("SC_CLK_TCK")
PACKAGES = ("torch", "pyzmq", "msgpack", "numpy")


@dataclass(frozen=True, slots=True)
class Figure:
    """A quantity measured several times: its median, extremes and number of repeats. `spread` is
    (high - low) / median, the honest error bar of a benchmark on a shared machine."""

    median: float
    low: float
    high: float
    spread: float
    repeats: int


def figure(samples: Sequence[float]) -> Figure:
    """Summary of at least one sample."""
    median = statistics.median(samples)
    low, high = min(samples), max(samples)
    return Figure(median, low, high, (high - low) / median if median else 0.0, len(samples))


def percentile(samples: Sequence[float], share: float) -> float:
    """The smallest sample that at least `share` (0..1) of the samples do not exceed."""
    ordered = sorted(samples)
    return ordered[max(0, -(-int(share * 1_000_000) * len(ordered) // 1_000_000) - 1)]


def versions() -> dict[str, str]:
    """Our own version, and those of installed packages, read from their metadata."""
    found = {"python": platform.python_version(), "gpumux": gpumux.__version__}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    """Processor, cores this process may use, load, kernel, versions, and which form of gpumux's core this process (and
    a daemon it starts) runs. Load above the number of cores means that others were measuring, or worse, too."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "load_1min": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "versions": versions(),
        "core": RUNS.kind,
    }


def describe(facts: dict[str, Any]) -> str:
    named = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    return f"{facts['cpu']}, {facts['cores']} cores, load {facts['load_1min']}; {named}; core {facts['core']}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned to the right, the first to the left."""
    widths = [max(len(line[i]) for line in [header, *rows]) for i in range(len(header))]
    rule = ["-" * width for width in widths]

    def line(cells: Sequence[str]) -> str:
        first, *rest = zip(cells, widths, strict=True)
        return "  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)])

    return "\n".join(line(cells) for cells in [header, rule, *rows])


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Arguments every benchmark takes."""
    made = argparse.ArgumentParser(description=(doc or "").strip().splitlines()[0] if doc else None)
    made.add_argument("--out", type=new_file, metavar="FILE.json", help="also write the result here")
    return made


def new_file(text: str) -> Path:
    """The type of an argument that names a file to be written, when all is measured: so it is looked at before."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a directory: name a file")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no directory {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} may not be written")
    return path


def report(name: str, out: Path | None, result: dict[str, Any]) -> None:
    """Write {benchmark, command, when, machine, **result} as JSON, if `out` was given. `result` may
    hold a "machine" measured earlier, and Figures."""
    if out is None:
        return
    body = {
        "benchmark": name,
        "command": " ".join(["python", "-m", f"microbench.{name}", *sys.argv[1:]]),
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine(),
        **result,
    }
    out.write_text(json.dumps(body, indent=2, default=_plain) + "\n")


def processor_s(pid: int, *, ended_children: bool = False) -> float:
    """Seconds of processor time that a process has taken, of all its threads, and of its children that have ended.
    Raises OSError for one that is gone."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11 : 15 if ended_children else 13])) / TICKS


def _plain(value: object) -> object:
    if isinstance(value, Figure):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} does not go into a result file")


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model"))]
    return names[0] if names else platform.machine()
