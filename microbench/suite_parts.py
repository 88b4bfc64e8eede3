"""What the GPU suite runs, by part: the commands, how long they may take, and how their results are read."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TEST, PYTHON = "test", "python"
MARGIN_S = 25.0  # left of the limit by a program that takes one
RESULT = "{out}"
LIMIT = "{limit}"


@dataclass(frozen=True)
class Job:
    """One program. `arguments` may hold RESULT, the file it is to write, and LIMIT, the seconds it has. `least_s`:
    without so much time it is not begun; `most_s`: it is ended then. `resumes`: it finds its earlier file, and says 75
    when it is not done. `expected_s`: what it is thought to take on a Hopper card; of one that resumes, a first useful
    run."""

    name: str
    title: str
    arguments: tuple[str, ...]
    least_s: float = 30.0
    most_s: float = 240.0
    resumes: bool = False
    kind: str = PYTHON
    expected_s: float = 20.0

    def command(self, wrote: Path, within_s: float) -> list[str]:
        filled = {RESULT: str(wrote), LIMIT: f"{max(1.0, within_s - MARGIN_S):.0f}"}
        return [sys.executable, *(filled.get(each, each) for each in self.arguments)]

    def shown(self, output: str, result: Any) -> str:
        """What of its output goes into the readable file."""
        if self.kind == TEST and isinstance(result, dict):
            return tests_text(result)
        return output


def jobs(part: str) -> list[Job]:
    """The part's programs, the most important first."""
    return list(_PARTS[part])


# A hang costs one test and not the file; warnings of versions that were never run together are no errors at first
# contact; the first failures say more than the thirtieth.
_PYTEST = ("-v", "-o", "filterwarnings=default", "--maxfail", "4", "--tb", "short")
HANGS_S = 40  # a test that takes longer
STARTS_S = 100  # one that may have to wait for a daemon, and for its first step


def _tests(name: str, expected_s: float, title: str = "", only: str = "", hangs_s: int = HANGS_S) -> Job:
    """A file of tests is one program: a context that a faulty kernel ended must not fail the next file's. `only`:
    pytest's -k."""
    path = f"tests/gpu/test_{name.partition(' ')[0]}.py"
    chosen = ("-k", only) if only else ()
    # xunit1 is the family that has properties by test.
    written = ("-o", "junit_family=xunit1", "--junitxml", RESULT)
    arguments = ("-m", "pytest", *_PYTEST, "-o", f"timeout={hangs_s}", *written, *chosen, path)
    return Job(name, title or path, arguments, most_s=300.0, kind=TEST, expected_s=expected_s)


def _experiment(name: str, expected_s: float = 15.0, most_s: float = 120.0) -> Job:
    made = import_module(f"microbench.cuda.{name}").EXPERIMENT
    arguments = ("-m", f"microbench.cuda.{name}", "--out", RESULT)
    return Job(name, made.question, arguments, most_s=most_s, expected_s=expected_s)


def _benchmark(
    name: str,
    title: str,
    *rest: str,
    least_s: float = 40.0,
    most_s: float = 180.0,
    resumes: bool = False,
    expected_s: float,
) -> Job:
    arguments = ("-m", f"microbench.{name}", "--device", "cuda", *rest, "--out", RESULT)
    return Job(name, title, arguments, least_s, most_s, resumes, expected_s=expected_s)


_WORKLOADS = "tests/gpu/test_workloads.py: models that lie"
_SMOKE = "what the device takes for granted, a line each"
_PAIRS = "the pairs of models in every way to share a device"
_TECHNIQUES = "each technique's worth (DeepPool, figure 11), beside the simulator's prediction"
_KERNELS = "short and long kernels in pairs (DeepPool, figure 12), beside the simulator's prediction"
_FUSED = "models of one kind as one array, beside one after another, as processes, and by torch.func"
_ALONE = "a job alone over a plain hand-captured graph; what a request takes longer"
# By importance, and so that none needs more than half of its time: the parts of tools/first_contact.sh, and of `make
# gpu`.
_PARTS: dict[str, tuple[Job, ...]] = {
    "smoke": (Job("smoke", _SMOKE, ("-m", "microbench.cuda.smoke", "--out", RESULT), most_s=80.0, expected_s=40.0),),
    "driver": (_tests("driver", 15.0), _tests("forms", 20.0)),
    "design": (
        _experiment("same_address", 25.0),
        _experiment("rebuild", 25.0),
        _experiment("priorities", 10.0),
        _experiment("launch_cost", 15.0),
        _experiment("boundary_gaps", 15.0),
        _experiment("completion", 10.0),
        _experiment("green", 20.0),
        _experiment("capture", 25.0),
    ),
    "contract": (_tests("contract", 90.0), _tests("fused", 20.0), _tests("programs", 90.0, hangs_s=STARTS_S)),
    "models": (
        _tests("workloads from the CPU", 150.0, f"{_WORKLOADS} on the CPU", "CPU", STARTS_S),
        _tests("shares", 30.0),
    ),
    "operators": (_tests("ongpu", 180.0, hangs_s=STARTS_S),),
    "details": (
        _experiment("piece_delay", 20.0),
        _experiment("depth", 30.0),
        _experiment("copies", 25.0),
        _experiment("idle_contexts", 60.0, most_s=180.0),
        _tests("collectives", 25.0),
        _tests("arrays", 60.0, hangs_s=STARTS_S),
    ),
    "compiled": (
        _tests("compiled", 100.0, hangs_s=STARTS_S),
        _tests("workloads from the GPU", 150.0, f"{_WORKLOADS} on the GPU", "not CPU", STARTS_S),
    ),
    "overhead": (_benchmark("overhead", _ALONE, "--repeats", "3", least_s=80.0, most_s=420.0, expected_s=240.0),),
    "collocate": (
        _benchmark("collocate", _PAIRS, "--limit", LIMIT, least_s=90.0, most_s=510.0, resumes=True, expected_s=240.0),
    ),
    "fusion": (
        _benchmark(
            "fusion",
            _FUSED,
            *("--workload", "cnn", "resnet18", "transformer", "--models", "1", "4", "8"),
            *("--ways", "serial", "processes", "vmap", "fused", "--no-memory", "--repeats", "3"),
            least_s=120.0,
            most_s=400.0,
            expected_s=240.0,
        ),
    ),
    "pairwise": (_benchmark("pairwise", _KERNELS, least_s=170.0, most_s=400.0, expected_s=200.0),),
    "ablation": (_benchmark("ablation", _TECHNIQUES, least_s=190.0, most_s=400.0, expected_s=240.0),),
}
PARTS = tuple(_PARTS)


# ---- results


def read(path: Path) -> Any:
    """What the program wrote: JSON, or pytest's XML. None where it wrote nothing that can be read."""
    try:
        text = path.read_text()
    except OSError:
        return None
    try:
        return read_tests(text) if text.lstrip().startswith("<?xml") else json.loads(text)
    except (ValueError, ElementTree.ParseError):
        return None


def read_tests(text: str) -> dict[str, Any]:
    """{counts, tests}: each test's name, outcome, seconds, what it noted and, where it did not pass, the message."""
    tests = []
    for case in ElementTree.fromstring(text).iter("testcase"):
        bad = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        outcome = "passed" if bad is None else {"failure": "failed", "error": "error", "skipped": "skipped"}[bad.tag]
        row: dict[str, Any] = {"name": case.get("name", ""), "outcome": outcome, "seconds": float(case.get("time", 0))}
        if noted := {each.get("name", ""): each.get("value", "") for each in case.iter("property")}:
            row["noted"] = noted
        if bad is not None:
            row["message"] = (bad.get("message") or "").splitlines()[0] if bad.get("message") else ""
        tests.append(row)
    counts: dict[str, int] = {}
    for test in tests:
        counts[str(test["outcome"])] = counts.get(str(test["outcome"]), 0) + 1
    return {"counts": counts, "tests": tests}


def tests_text(result: Mapping[str, Any]) -> str:
    lines = [", ".join(f"{count} {outcome}" for outcome, count in result["counts"].items()) or "no tests ran"]
    for test in result["tests"]:
        if test["outcome"] != "passed":
            lines.append(f"{test['outcome']}: {test['name']}: {test.get('message', '')}")
        lines += [f"{test['name']}: {what}: {value}" for what, value in test.get("noted", {}).items()]
    return "\n".join(lines)
