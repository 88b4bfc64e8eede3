"""Two jobs on one device, shared in every way there is: the high one's step or request time over solo, and what both
get done.

Solo is the job alone in a process of its own, captured by hand as one CUDA graph (on the CPU: the plain loop). Measured
pairs are kept in the --out file after each one, so that a run that is cut short goes on where it was, and files of
several runs on the same kind of device merge into one table.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpumux.errors import ConfigError
from microbench import common, ways
from microbench.cuda import probe
from microbench.daemon import DaemonFailed
from microbench.worker import WorkerFailed

FIRST = (
    ("resnet50:train", "vgg16:train"),
    ("bert_base:infer", "resnet50:train"),
    ("resnet50:infer", "gpt2:train"),
    ("inception_v3:train", "inception_v3:train"),
)
REST = (
    ("wide_resnet101_2:train", "resnet50:train"),
    ("vgg16:train", "wide_resnet101_2:train"),
    ("bert_base:infer", "gpt2:train"),
    ("gpt2:infer", "inception_v3:train"),
    ("bert_base:train", "vgg16:train"),
)
PAIRS = FIRST + REST
PLAIN_PAIRS = 2  # so many pairs are also measured as processes of their own
SECONDS, SETTLE_S = 12.0, 4.0
ITEM_S = 45.0  # what one measurement takes until one was made
# Exit statuses: something failed; the time is up, run again (EX_TEMPFAIL); Ctrl-C.
FAILED, OVER, INTERRUPTED = 1, 75, 130


@dataclass(frozen=True)
class Item:
    """One measurement. Alone, `low` is empty."""

    way: str
    high: str
    low: str = ""

    @property
    def key(self) -> str:
        return f"{self.way} | {self.high} | {self.low}".rstrip(" |")


@dataclass(frozen=True)
class Where:
    """What figures must agree in to stand in one table."""

    device: str
    size: str
    card: str


class Book:
    """Measurements by key: for each a list of runs, {"high": …, "low": …} or {"error": …}, oldest first. `missing`:
    ways that could not be measured where it was done, and why."""

    def __init__(
        self, where: Where, runs: dict[str, list[dict[str, Any]]] | None = None, missing: dict[str, str] | None = None
    ) -> None:
        self.where = where
        self.runs: dict[str, list[dict[str, Any]]] = runs or {}
        self.missing: dict[str, str] = missing or {}

    def good(self, item: Item) -> list[dict[str, Any]]:
        return [run for run in self.runs.get(item.key, []) if "error" not in run]

    def error(self, item: Item) -> str:
        """What the last try said, if none succeeded."""
        runs = self.runs.get(item.key, [])
        return "" if self.good(item) or not runs else str(runs[-1]["error"])

    def add(self, item: Item, run: dict[str, Any]) -> None:
        """A success forgets the failures before it, a failure those before it too: one is enough to tell."""
        kept = self.good(item)
        self.runs[item.key] = [*kept, run]

    def merge(self, other: Book) -> None:
        """Take over what the other has and this one lacks. Raises ConfigError where the figures don't belong
        together."""
        if other.where != self.where:
            raise ConfigError(
                f"{other.where} and {self.where} do not go into one table", "merge files of one kind of device"
            )
        self.missing = {**other.missing, **self.missing}
        for key, runs in other.runs.items():
            mine = self.runs.setdefault(key, [])
            mine += [run for run in runs if run not in mine]
            mine.sort(key=lambda run: str(run.get("when", "")))
            if any("error" not in run for run in mine):
                self.runs[key] = [run for run in mine if "error" not in run]

    def save(self, path: Path) -> None:
        """Replace the file atomically: a process that is killed leaves the old one or the new one."""
        body = {
            "benchmark": "collocate", "where": asdict(self.where), "machine": common.machine(), "runs": self.runs,
            "missing": self.unmeasured(),
        }  # fmt: skip
        unready = path.with_suffix(path.suffix + ".new")
        unready.write_text(json.dumps(body, indent=1) + "\n")
        unready.replace(path)

    def unmeasured(self) -> dict[str, str]:
        """Why, by way, of what was measured nowhere."""
        there = {key.partition(" | ")[0] for key, runs in self.runs.items() if runs}
        return {way: why for way, why in self.missing.items() if way not in there}

    @classmethod
    def load(cls, path: Path) -> Book:
        """Raises ConfigError for a file that is none of ours."""
        try:
            body = json.loads(path.read_text())
            runs = {key: list(runs) for key, runs in body["runs"].items()}
            return cls(Where(**body["where"]), runs, dict(body.get("missing", {})))
        except OSError as error:
            raise ConfigError(f"{path} can't be read: {error}", "name a file this program wrote") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path} is no file of this benchmark ({error!r})", "name a file this program wrote"
            ) from error


def plan(pairs: Sequence[tuple[str, str]], chosen: Sequence[str], device: str) -> Iterator[Item]:
    """What to measure, the most telling first. Each job alone comes before the first pair that needs it."""
    seen: set[Item] = set()

    def once(item: Item) -> Iterator[Item]:
        if item not in seen:
            seen.add(item)
            yield item

    order = [
        way for way in (*reversed(ways.GPUMUX), ways.STREAMS, ways.SLICES, ways.MPS, ways.MPS_PRIORITY) if way in chosen
    ]
    for place, (high, low) in enumerate(pairs):
        for job in (high, low):
            yield from once(Item(ways.SOLO, job))
        if set(order) & set(ways.GPUMUX):
            yield from once(Item(ways.ALONE, high))
        for way in order:
            own = way in (ways.SLICES, ways.MPS, ways.MPS_PRIORITY)
            if not ways.unavailable(way, device) and not (own and place >= PLAIN_PAIRS):
                yield from once(Item(way, high, low))


def measure(book: Book, item: Item, setting: ways.Setting) -> dict[str, Any]:
    """Raises WorkerFailed or DaemonFailed, also where a job's solo run is missing that says how many requests it
    gets."""
    if item.way == ways.SOLO:
        return ways.solo(setting, item.high)
    rates = [_rate(book, job) for job in (item.high, item.low) if job]
    if item.way == ways.ALONE:
        return ways.alone(setting, item.high, rates[0])
    return ways.together(setting, item.way, item.high, item.low, rates)


def _rate(book: Book, job: str) -> float | None:
    if not ways.is_request(job):
        return None
    runs = book.good(Item(ways.SOLO, job))
    if not runs:
        raise WorkerFailed(f"{job} alone could not be measured, so nobody knows how many requests it can take")
    return float(runs[0]["asked_per_s"])  # of the first run: what is compared must be asked for alike


# ---- the table


def rows(book: Book, pairs: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """One row for each pair and way that was measured or failed."""
    found = []
    for high, low in pairs:
        alone = Item(ways.ALONE, high)
        for item in [alone, *(Item(way, high, low) for way in ways.PAIRED)]:
            if item.key in book.runs and (row := _row(book, item, f"{high} + {low}")):
                found.append(row)
    return found


def _row(book: Book, item: Item, pair: str) -> dict[str, Any] | None:
    row: dict[str, Any] = {"pair": pair, "way": item.way, "runs": len(book.good(item)), "error": book.error(item)}
    solos = {job: book.good(Item(ways.SOLO, job)) for job in (item.high, item.low) if job}
    if not row["error"] and not all(solos.values()):
        row["error"] = "no solo run to compare with"
    if row["error"]:
        return row
    runs = book.good(item)

    def over(who: str, job: str, what: str) -> float:
        return _median(runs, who, what) / _median(solos[job], "high", what)

    row["high_median"], row["high_p99"] = over("high", item.high, "median_s"), over("high", item.high, "p99_s")
    row["high_rate"] = over("high", item.high, "rate")
    row["low_rate"] = over("low", item.low, "rate") if item.low else 0.0
    row["total"] = row["high_rate"] + row["low_rate"]
    return row


def _median(runs: Sequence[Mapping[str, Any]], who: str, what: str) -> float:
    return statistics.median(float(run[who][what]) for run in runs)


def show(found: Sequence[Mapping[str, Any]]) -> str:
    header = ["pair (high + low)", "way", "runs", "high median", "high p99", "high rate", "low rate", "total"]
    names = ("high_median", "high_p99", "high_rate", "low_rate", "total")
    cells, last = [], ""
    for row in found:
        figures = (
            [f"failed: {row['error'][:60]}", *[""] * 4] if row["error"] else [f"{row[name]:.3f}" for name in names]
        )
        cells.append([row["pair"] if row["pair"] != last else "", row["way"], str(row["runs"]), *figures])
        last = row["pair"]
    return common.table(header, cells)


def targets(found: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Against the best published figures for such pairs (Tally, ASPLOS'25), and our own promise."""
    guarded = [row for row in found if row["way"] == "gpumux guarded" and not row["error"]]
    if not guarded:
        return {}
    p99 = [row["high_p99"] for row in guarded]
    worst, total = max(row["high_median"] for row in guarded), statistics.fmean(row["total"] for row in guarded)

    def target(value: float, mark: float, met: bool) -> dict[str, Any]:
        return {"value": value, "target": mark, "met": met}

    return {
        "high median over solo, worst pair": target(worst, 1.05, worst <= 1.05),
        "high p99 over solo, mean": target(statistics.fmean(p99), 1.05, statistics.fmean(p99) <= 1.05),
        "high p99 over solo, worst pair": target(max(p99), 1.10, max(p99) <= 1.10),
        "total throughput, mean": target(total, 1.44, total >= 1.44),
    }


# ---- the program


def main(argv: Sequence[str] | None = None) -> int:
    arguments = common.parser(__doc__)
    arguments.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: cuda")
    arguments.add_argument(
        "--size", choices=("full", "tiny"), help="of the models (default: full on cuda, tiny on cpu)"
    )
    arguments.add_argument(
        "--pairs", nargs="+", metavar="HIGH+LOW", help="default: all that --list names, in that order"
    )
    arguments.add_argument(
        "--ways", nargs="+", choices=ways.PAIRED, default=ways.PAIRED, metavar="WAY", help="default: all"
    )
    arguments.add_argument(
        "--seconds", type=float, default=SECONDS, help=f"of each measurement (default: {SECONDS:.0f})"
    )
    arguments.add_argument("--settle", type=float, default=SETTLE_S, help="seconds before it (default: %(default)s)")
    arguments.add_argument(
        "--repeats", type=int, default=1, help="how many runs each measurement is to have (default: 1)"
    )
    arguments.add_argument(
        "--limit", type=float, metavar="SECONDS", help="begin nothing that would take longer in all; status 75"
    )
    arguments.add_argument(
        "--merge", type=Path, nargs="+", default=[], metavar="FILE.json", help="count what these have as measured"
    )
    arguments.add_argument("--show", action="store_true", help="measure nothing: merge, print the table, write --out")
    arguments.add_argument("--list", action="store_true", help="say what would be measured, and measure nothing")
    args = arguments.parse_args(argv)
    size = args.size or ("full" if args.device == "cuda" else "tiny")
    try:
        pairs = chosen(args.pairs)
        items = list(plan(pairs, args.ways, args.device))
        if args.list:
            print("\n".join(item.key for item in items))
            return 0
        books = [Book.load(path) for path in [*([args.out] if args.out and args.out.exists() else []), *args.merge]]
        where = books[0].where if args.show and books else here(args.device, size)
        book = Book(where)
        for other in books:
            book.merge(other)
        if not args.show:
            book.missing = {way: why for way in args.ways if (why := ways.unavailable(way, args.device))}
    except ConfigError as error:
        print(f"{error.message}: {error.remedy}", file=sys.stderr)
        return 78
    status = 0
    if not args.show:
        setting = ways.Setting(args.device, size, args.seconds, args.settle)
        status = run(book, items, setting, args.repeats, args.limit, args.out)
    elif args.out:
        book.save(args.out)
    found = rows(book, pairs)
    print(f"{book.where.card}, {book.where.size} size; times and rates over solo")
    print(show(found))
    for way, why in book.unmeasured().items():
        print(f"{way}: not measured: {why}")
    for name, target in targets(found).items() if book.where.device == "cuda" else ():
        print(f"{name}: {target['value']:.3f} against {target['target']:.2f}: {'met' if target['met'] else 'MISSED'}")
    return status


def chosen(asked: Sequence[str] | None) -> list[tuple[str, str]]:
    """Raises ConfigError for what is no pair."""
    if asked is None:
        return list(PAIRS)
    found = []
    for text in asked:
        high, plus, low = text.partition("+")
        if not plus or not all(job.strip().partition(":")[2] in ("train", "infer") for job in (high, low)):
            raise ConfigError(
                f"{text!r} is no pair", "write MODEL:train or MODEL:infer on both sides of a plus, as --list does"
            )
        found.append((high.strip(), low.strip()))
    return found


def here(device: str, size: str) -> Where:
    """Raises ConfigError where there is no such device."""
    if device == "cpu":
        return Where(device, size, common.machine()["cpu"])
    return Where(device, size, probe.card().card)


def run(
    book: Book, items: Sequence[Item], setting: ways.Setting, repeats: int, limit_s: float | None, out: Path | None
) -> int:
    """Measure what `book` lacks and put it there; the exit status."""
    began, longest, failed = time.monotonic(), 0.0, 0
    todo = [item for item in items for _ in range(repeats - len(book.good(item)))]
    for done, item in enumerate(todo):
        spent = time.monotonic() - began
        if limit_s is not None and spent + (longest or ITEM_S) > limit_s:
            print(f"the time is up: {len(todo) - done} measurements are left for the next run", file=sys.stderr)
            return OVER
        print(f"[{done + 1}/{len(todo)}, {spent:.0f} s] {item.key}", file=sys.stderr, flush=True)
        now = time.monotonic()
        try:
            result = measure(book, item, setting) | {"seconds": setting.seconds}
        except (WorkerFailed, DaemonFailed, subprocess.TimeoutExpired) as error:
            failed += 1
            result = {"error": str(error)}
            print(f"  failed: {error}", file=sys.stderr, flush=True)
        except KeyboardInterrupt:
            print("interrupted; what was measured is kept", file=sys.stderr)
            return INTERRUPTED
        longest = max(longest, time.monotonic() - now)
        book.add(item, result | {"when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())})
        if out:
            book.save(out)
    return FAILED if failed else 0


if __name__ == "__main__":
    sys.exit(main())
