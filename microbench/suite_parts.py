"""What the GPU suite runs, by part: the commands, how long they may take, and how their results are read."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import microbench.cuda

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("tests", "experiments", "benchmarks")
EMPTY = {"tests": "tests/gpu has no test files", "experiments": "there are none", "benchmarks": "there are none"}
TEST, PYTHON = "test", "python"
MARGIN_S = 25.0  # what a program that minds the time is told to leave
RESULT = "{out}"
LIMIT = "{limit}"


@dataclass(frozen=True)
class Job:
    """One program. `arguments` may hold RESULT, the file it is to write, and LIMIT, the seconds it has. `least_s`: without so much time it
    is not begun; `most_s`: it is ended then. `resumes`: it finds its earlier file, and says 75 when it is not done."""

    name: str
    title: str
    arguments: tuple[str, ...]
    least_s: float = 30.0
    most_s: float = 240.0
    resumes: bool = False
    kind: str = PYTHON
    environment: Mapping[str, str] = field(default_factory=dict)

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
    if part == "tests":
        return _tests()
    if part == "experiments":
        return [_experiment(name) for name in microbench.cuda.NAMES]
    return list(BENCHMARKS)


def _tests() -> list[Job]:
    """A file of tests is one program: a context that a faulty kernel ended must not fail the next file's."""
    found = sorted((ROOT / "tests" / "gpu").glob("test_*.py"))
    return [
        Job(
            path.stem.removeprefix("test_"),
            f"tests/gpu/{path.name}",
            # xunit1 is the family that has properties by test.
            ("-m", "pytest", "-q", "-o", "junit_family=xunit1", "--junitxml", RESULT, str(path.relative_to(ROOT))),
            kind=TEST,
        )
        for path in found
    ]


def _experiment(name: str) -> Job:
    made = import_module(f"microbench.cuda.{name}").EXPERIMENT
    return Job(name, made.question, ("-m", f"microbench.cuda.{name}", "--out", RESULT), most_s=120.0)


def _benchmark(
    name: str, title: str, *rest: str, least_s: float = 40.0, most_s: float = 180.0, resumes: bool = False
) -> Job:
    module = name.partition(" ")[0]
    arguments = ("-m", f"microbench.{module}", "--device", "cuda", *rest, "--out", RESULT)
    return Job(name, title, arguments, least_s, most_s, resumes)


_PAIRS = "the pairs of models in every way to share a device"
_TECHNIQUES = "each technique's worth (DeepPool, figure 11), beside the simulator's prediction"
_KERNELS = "short and long kernels in pairs (DeepPool, figure 12), beside the simulator's prediction"
_ALONE = "a job alone over a plain hand-captured graph; what a request takes longer"
BENCHMARKS: Sequence[Job] = (
    _benchmark("overhead", _ALONE, "--repeats", "3", least_s=150.0, most_s=220.0),
    _benchmark("collocate", _PAIRS, "--limit", LIMIT, least_s=90.0, most_s=510.0, resumes=True),
    _benchmark("pairwise", _KERNELS, least_s=170.0, most_s=240.0),
    _benchmark("ablation", _TECHNIQUES, least_s=190.0, most_s=300.0),
)


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
