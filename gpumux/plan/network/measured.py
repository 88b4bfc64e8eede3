"""A measured network as a JSON file, and the costs that follow from it. Imports no torch.

    {"format": "gpumux-network", "version": 1, "units": {"nbytes": "B", "median": "s", "low": "s", "high": "s"},
     "backend": "gloo", "device": "cpu", "ranks": 4, "rounds": 5,
     "machines": ["host: Intel Xeon, 2 cores", ...], "versions": {"torch": "2.11.0"}, "recorded_at": "...", "note": "",
     "series": [{"kind": "transfer", "ranks": 2, "points": [[8, 0.00012, 0.00011, 0.0002], ...]}, ...]}

`machines` has one entry for each rank. A series is one operation among so many ranks, over rising sizes. Its points are
[nbytes, median, low, high] over the rounds, in seconds: of a round's repeats the median, on the rank where that is
longest. "transfer": every rank sends nbytes to the next and receives as many from the one before, at the same time.
"all-reduce": nbytes of float32 are summed. The lines are not in the file: they follow from the points. Nothing is
guessed when a file is read: a missing or unknown key, or a value out of range, is a ConfigError that names the place.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from math import exp, isfinite, log, sqrt
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, get_args

from gpumux import files
from gpumux.errors import ConfigError
from gpumux.plan.costs import Network, SumCost
from gpumux.program import reading

FORMAT = "gpumux-network"
VERSION = 1
UNITS = {"nbytes": "B", "median": "s", "low": "s", "high": "s"}
MEASURE = "measure it again with `gpumux plan network -o FILE`, or mend the file"

# The search for a line: its delay in bytes' worth, as a logarithm.
OFFSETS = 14.0  # how far beyond the smallest and the largest size it goes: a factor of a million
SEARCH = 400  # steps of the first pass
NARROW = 1e-12

Kind: TypeAlias = Literal["transfer", "all-reduce"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class Point(NamedTuple):
    """Seconds of one operation on so many bytes: median, least and most of the rounds."""

    nbytes: int
    median: float
    low: float
    high: float


class Line(NamedTuple):
    """`delay` seconds, and `a_byte` seconds for each byte. `residual`: the factor by which points lie above or below
    the line, as a root mean square of logarithms; `worst`: the largest factor. 1 if all lie on it."""

    delay: float
    a_byte: float
    residual: float
    worst: float

    @property
    def bandwidth(self) -> float:
        """Bytes a second."""
        return 1 / self.a_byte


@dataclass(frozen=True, slots=True)
class Series:
    """One operation among `ranks` ranks. Raises ConfigError unless there are points of two sizes and more, rising, with
    times above 0."""

    kind: Kind
    ranks: int
    points: tuple[Point, ...]

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"a series of kind {self.kind!r}", f"choose one of {', '.join(KINDS)}")
        what = f"{self.kind} among {self.ranks} ranks"
        if self.ranks < 2:
            raise ConfigError(what, "give 2 ranks or more")
        sizes = [point.nbytes for point in self.points]
        if len(sizes) < 2 or sizes[0] < 1 or sizes != sorted(set(sizes)):
            raise ConfigError(f"{what} has points for {sizes} bytes", "give two sizes or more, each once, rising")
        for point in self.points:
            if not (isfinite(point.high) and 0 < point.low <= point.median <= point.high):
                raise ConfigError(
                    f"{what} took {list(point[1:])} s for {point.nbytes} bytes",
                    "give median, low and high in seconds, above 0, the median between the others",
                )

    def line(self) -> Line:
        """The straight line with the least squares of the points' distances as ratios, so that twice and half as long
        are equally far. Raises ConfigError if the points do not rise with their size."""
        sizes = [float(point.nbytes) for point in self.points]
        times = [log(point.median) for point in self.points]

        def spread(offset: float) -> tuple[float, float]:
            """(squares, log a_byte) of the best line a_byte * (exp(offset) + n)."""
            apart = [t - log(exp(offset) + n) for n, t in zip(sizes, times, strict=True)]
            level = sum(apart) / len(apart)
            return sum((each - level) ** 2 for each in apart), level

        least, most = log(sizes[0]) - OFFSETS, log(sizes[-1]) + OFFSETS
        steps = [least + (most - least) * i / SEARCH for i in range(SEARCH + 1)]
        place = min(range(SEARCH + 1), key=lambda i: spread(steps[i])[0])
        if place == SEARCH:
            raise ConfigError(
                f"{self.kind} among {self.ranks} ranks takes no longer for more bytes, so it has no bandwidth",
                "something else ran there, or all sizes are small: measure it again, with more --rounds or --largest",
            )
        low, high = steps[max(0, place - 1)], steps[place + 1]
        while high - low > NARROW:
            third = (high - low) / 3
            if spread(low + third)[0] < spread(high - third)[0]:
                high -= third
            else:
                low += third
        squares, level = spread(low)
        a_byte, delay = exp(level), exp(level + low)
        worst = max(abs(t - log(delay + a_byte * n)) for n, t in zip(sizes, times, strict=True))
        return Line(delay, a_byte, exp(sqrt(squares / len(times))), exp(worst))


@dataclass(frozen=True, slots=True)
class MeasuredNetwork:
    """What `gpumux plan network` measured. `machines` names each rank's. `recorded_at` is a UTC date. Raises
    ConfigError unless each kind was measured once for each number of ranks, 2 and all of them included."""

    backend: str
    device: str
    ranks: int
    rounds: int
    machines: tuple[str, ...]
    versions: Mapping[str, str]
    recorded_at: str
    series: tuple[Series, ...]
    note: str = ""

    def __post_init__(self) -> None:
        if self.ranks < 2 or self.rounds < 1:
            raise ConfigError(f"{self.ranks} ranks, {self.rounds} rounds", "give 2 ranks or more, and 1 round or more")
        if len(self.machines) != self.ranks:
            raise ConfigError(f"{len(self.machines)} machines for {self.ranks} ranks", "name one for each rank")
        found = [(each.kind, each.ranks) for each in self.series]
        sizes = {ranks for _, ranks in found} | {2, self.ranks}
        if max(sizes) > self.ranks:
            raise ConfigError(f"a series among {max(sizes)} of {self.ranks} ranks", "give at most all ranks")
        for kind in KINDS:
            for ranks in sorted(sizes):
                if found.count((kind, ranks)) != 1:
                    raise ConfigError(f"{found.count((kind, ranks))} series of {kind} among {ranks} ranks", "give one")

    def of(self, kind: Kind, ranks: int) -> Series:
        """The series of one kind. Raises KeyError for a number of ranks that was not measured."""
        return {(each.kind, each.ranks): each for each in self.series}[kind, ranks]

    def network(self, name: str) -> Network:
        """The costs for a planner: transfers by the line of all ranks, since layers that move may use all of them at
        once; all-reduces by the line of as many ranks as take part. Raises ConfigError if a line does not rise."""
        transfer = self.of("transfer", self.ranks).line()
        sums = sorted((each.ranks, each.line()) for each in self.series if each.kind == "all-reduce")
        return Network(
            name,
            transfer.bandwidth,
            transfer.delay,
            f"measured among {self.ranks} ranks by {self.backend} on {self.device}, {self.recorded_at}",
            tuple(SumCost(ranks, line.delay, line.a_byte) for ranks, line in sums),
        )


# ---- The file.


def save(network: MeasuredNetwork, path: Path) -> None:
    """Write a network, one series a line. Raises ConfigError if the file can't be written."""
    files.write_text(path, dumps(network))


def dumps(network: MeasuredNetwork) -> str:
    """The file's text."""
    head = {"format": FORMAT, "version": VERSION, "units": UNITS} | {
        name: value for name, value in asdict(network).items() if name != "series"
    }
    series = ",\n  ".join(json.dumps(asdict(each)) for each in network.series)
    return json.dumps(head, indent=1)[:-2] + f',\n "series": [\n  {series}\n ]\n}}\n'


def load(path: Path) -> MeasuredNetwork:
    """Read a network. Raises ConfigError, which names the file and the place, for any fault."""
    body = reading.read_text(path, "a network that `gpumux plan network` measured")
    try:
        return loads(body)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}", error.remedy) from None


def loads(text: str) -> MeasuredNetwork:
    """The network in a file's text. Raises ConfigError."""
    body = reading.header(text, FORMAT, VERSION, UNITS, MEASURE, "measured network")
    names = {each.name for each in fields(MeasuredNetwork)}
    reading.same_keys("the network", body, names | {"format", "version", "units"}, MEASURE)
    return MeasuredNetwork(
        backend=reading.text("backend", body["backend"]),
        device=reading.text("device", body["device"]),
        ranks=reading.whole("ranks", body["ranks"]),
        rounds=reading.whole("rounds", body["rounds"]),
        machines=tuple(reading.text("machines", each) for each in reading.items("machines", body["machines"])),
        versions=reading.names("versions", body["versions"]),
        recorded_at=reading.text("recorded_at", body["recorded_at"]),
        series=tuple(_series(f"series[{i}]", each) for i, each in enumerate(reading.items("series", body["series"]))),
        note=reading.text("note", body["note"]),
    )


def _series(where: str, body: object) -> Series:
    if not isinstance(body, dict):
        raise ConfigError(f"{where} is {body!r}", "give a map")
    reading.same_keys(where, body, {each.name for each in fields(Series)}, MEASURE)
    kind = reading.text(f"{where}.kind", body["kind"])
    given = reading.items(f"{where}.points", body["points"])
    points = tuple(_point(f"{where}.points[{i}]", each) for i, each in enumerate(given))
    ranks = reading.whole(f"{where}.ranks", body["ranks"])
    try:
        return Series(kind, ranks, points)  # type: ignore[arg-type]  # Series checks the kind
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.message}", error.remedy) from None


def _point(where: str, value: object) -> Point:
    entries = reading.items(where, value)
    if len(entries) != 4:
        raise ConfigError(f"{where} is {entries!r}", "give [nbytes, median, low, high]")
    return Point(reading.whole(where, entries[0]), *(reading.number(where, each) for each in entries[1:]))
