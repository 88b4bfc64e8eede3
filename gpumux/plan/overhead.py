"""R_O of lemma 3.1 from a trace that torch.profiler exported from somebody's own training loop (`export_chrome_trace`): the
time in which the device computes nothing, over the time in which it computes."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpumux.errors import ConfigError
from gpumux.program import reading

Interval = tuple[float, float]

KERNELS = ("kernel",)
TRANSFERS = ("gpu_memcpy", "gpu_memset")
COLLECTIVES = ("nccl", "c10d::", "gloo")
LOADING = "DataLoader"
RECORD = "record one: torch.profiler.profile over some steps of your loop, then .export_chrome_trace(FILE)"


@dataclass(frozen=True)
class Overhead:
    """Seconds of the traced stretch: `total`, and `compute` of it. `device` is "cuda" where kernels were traced, else "cpu".
    `loading`: seconds of data loading on the CPU (part of the overhead where the device waits meanwhile)."""

    total: float
    compute: float
    loading: float
    device: str

    @property
    def ratio(self) -> float:
        """R_O."""
        return (self.total - self.compute) / self.compute


def load(path: Path) -> Overhead:
    """Read a trace, gzipped or not. Raises ConfigError for what is none."""
    if path.suffix == ".gz":
        try:
            text = gzip.decompress(path.read_bytes()).decode()
        except (OSError, EOFError, UnicodeDecodeError) as error:
            raise ConfigError(f"can't read {path}: {error}", RECORD) from None
    else:
        text = reading.read_text(path, "a trace of torch.profiler")
    try:
        return measure(json.loads(text))
    except (ValueError, RecursionError):
        raise ConfigError(f"{path} is no JSON", RECORD) from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}", error.remedy) from None


def measure(trace: Any) -> Overhead:
    """On a GPU, computation is whenever a kernel runs that is no collective. On the CPU, whenever an operator does, but for
    those of data loading and collectives. The stretch is from the first operator to the end of the last. Raises ConfigError
    for what is no trace, or shows no computation."""
    events = trace.get("traceEvents") if isinstance(trace, dict) else trace
    if not isinstance(events, list):
        raise ConfigError("this is no trace", RECORD)
    spans: dict[str, list[tuple[str, Interval]]] = {}
    for event in events:
        if isinstance(event, dict) and event.get("ph") == "X" and "dur" in event and "ts" in event:
            begins = float(event["ts"])
            span = (begins * 1e-6, (begins + float(event["dur"])) * 1e-6)
            spans.setdefault(str(event.get("cat", "")), []).append((str(event.get("name", "")), span))
    operators = [each for category in ("cpu_op", "Operator") for each in spans.get(category, [])]
    kernels = [each for category in KERNELS for each in spans.get(category, [])]
    moves = [each for category in TRANSFERS for each in spans.get(category, [])]
    loading = merged(span for some in spans.values() for name, span in some if LOADING in name)
    work = kernels or operators
    busy = merged(span for name, span in work if not name.lower().startswith(COLLECTIVES) and LOADING not in name)
    if not kernels:
        away = merged([*loading, *(span for name, span in work if name.lower().startswith(COLLECTIVES))])
        busy = without(busy, away)
    compute = length(busy)
    if not compute:
        raise ConfigError("the trace shows no computation", RECORD)
    every = [span for _, span in (*operators, *kernels, *moves)] + loading
    total = max(end for _, end in every) - min(begin for begin, _ in every)
    return Overhead(total, compute, length(loading), "cuda" if kernels else "cpu")


def merged(spans: Iterable[Interval]) -> list[Interval]:
    """The same stretches of time, none touching another."""
    found: list[Interval] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def without(spans: Sequence[Interval], away: Sequence[Interval]) -> list[Interval]:
    """What of `spans` is in none of `away`; both merged."""
    found = []
    for begin, end in spans:
        for out_begin, out_end in away:
            if out_end <= begin or out_begin >= end:
                continue
            if out_begin > begin:
                found.append((begin, out_begin))
            begin = out_end
            if begin >= end:
                break
        if begin < end:
            found.append((begin, end))
    return found


def length(spans: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in spans)
