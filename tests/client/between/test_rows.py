"""Every row of the list in docs/plain-loop.md, "Between two steps", has a test that names it."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
FILES = [*HERE.glob("test_*.py"), HERE.parent / "test_recovery.py"]
DOCUMENT = HERE.parents[2] / "docs" / "plain-loop.md"
ROW = re.compile(r"^\| ([A-Z]\d+) \|", re.MULTILINE)


def named(text: str) -> set[str]:
    """Rows that tests name: in a function's name (test_m6_m7_...), or in the id of a parameter ("M6 in place")."""
    found = {
        row for name in re.findall(r"def test_((?:[a-z]\d+_)+)", text) for row in name.strip("_").upper().split("_")
    }
    return found | set(re.findall(r'"([A-Z]\d+) ', text))


def test_every_row_has_a_test() -> None:
    rows = set(ROW.findall(DOCUMENT.read_text()))
    assert {row[0] for row in rows} == set("MOGRL")
    tests = {path.name: named(path.read_text()) for path in FILES}
    missing = rows - set().union(*tests.values())
    assert not missing, f"rows without a test: {sorted(missing)}"


def test_no_test_names_a_row_that_is_none() -> None:
    rows = set(ROW.findall(DOCUMENT.read_text()))
    for path in FILES:
        if path.name != Path(__file__).name:
            assert named(path.read_text()) <= rows, path.name
