"""The result file of `microbench.fusion`: what is in it, and what a run would add. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpumux.errors import ConfigError
from microbench.common import Figure

SERIAL = "serial"  # what all else is measured against, in the same turns
SAME = ("device", "size", "threads", "dropout")  # of everything in a file
_FIGURES = ("models_steps_per_s", "over_serial")

Ways = dict[str, dict[str, Any]]


def read(path: Path) -> dict[str, Any]:
    """A result as `microbench.fusion` wrote it, with Figures. Raises ConfigError for what is none."""
    try:
        body = json.loads(path.read_text())
        if body["benchmark"] != "fusion":
            raise ValueError(f"a result of {body['benchmark']}")
        for workload in body["workloads"].values():
            for ways in workload["models"].values():
                for way in ways.values():
                    way.update({key: Figure(**way[key]) for key in _FIGURES if key in way})
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}", "give a file that microbench.fusion wrote") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is no result of this benchmark: {error}", "give another file") from error
    return dict(body)


def resumed(path: Path, facts: dict[str, Any], settings: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The workloads of a file and the commands that made it; nothing where there is none yet. Raises ConfigError for
    one that was measured otherwise."""
    if not path.exists():
        return {}, []
    body = read(path)
    then, now = body["machine"], facts
    pairs = [(key, body.get(key), settings[key]) for key in SAME]
    pairs += [("processor", then["cpu"], now["cpu"]), ("cores", then["cores"], now["cores"])]
    pairs += [("torch", then["versions"].get("torch"), now["versions"].get("torch"))]
    for key, old, new in pairs:
        if old != new:
            raise ConfigError(f"{path} was measured with {key} {old}, not {new}", "choose another --out")
    return body["workloads"], [*body.get("earlier", []), body["command"]]


def lacking(found: Ways, ways: Sequence[str], memory: bool) -> tuple[list[str], list[str]]:
    """Of these ways, those whose throughput a file lacks (with SERIAL, if there are any), and those whose memory."""
    rates = [way for way in ways if not {"samples", "error"} & found.get(way, {}).keys()]
    if rates and SERIAL not in rates:
        rates.insert(0, SERIAL)
    return rates, [way for way in ways if memory and not {"bytes", "error"} & found.get(way, {}).keys()]


def merged(found: Ways, rates: Ways, peaks: Ways) -> Ways:
    """What there was and what is new: ratios stay with the turns that they are of."""
    ways = {way: dict(each) for way, each in found.items()}
    for way, rate in rates.items():
        if "samples" not in ways.get(way, {}):
            ways[way] = {**ways.get(way, {}), **rate}
    for way, peak in peaks.items():
        ways[way] = {**peak, **ways.get(way, {})}
    return ways
