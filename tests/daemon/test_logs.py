"""The log: one object a line where asked, with ids as fields, and bounded whatever clients do."""

from __future__ import annotations

import ast
import json
import logging
import re
from pathlib import Path

import pytest

import gpumux
from gpumux.daemon import logs

DAEMON = Path(gpumux.__file__).parent / "daemon"


def record(template: str, *args: object, level: int = logging.INFO, error: BaseException | None = None):
    info = (type(error), error, error.__traceback__) if error is not None else None
    return logging.LogRecord("gpumux.daemon", level, "f.py", 1, template, args, info)


def as_json(*args: object, **more) -> dict:
    text = logs.JsonFormatter().format(record(*args, **more))
    assert "\n" not in text
    return json.loads(text)


def test_a_line_is_an_object_with_the_ids_of_what_it_is_about():
    body = as_json("job %s: step %d failed (%s): %s", "j3", 17, "job_failed", 'two\nlines "and quotes"')
    assert (body["job"], body["step"], body["level"], body["logger"]) == ("j3", 17, "info", "gpumux.daemon")
    assert body["message"] == 'job j3: step 17 failed (job_failed): two\nlines "and quotes"'
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", body["time"])
    body = as_json("session %s: %s of uid %d, pid %d", "abc", "client", 1000, 77)
    assert (body["session"], body["uid"], body["pid"]) == ("abc", 1000, 77)
    assert "job" not in as_json("the %s has a job %s", "x", "y")
    assert as_json("%d%% of job %s", 5, "x")["message"] == "5% of job x"


def test_an_exception_stays_on_its_line():
    try:
        raise ValueError("it broke")
    except ValueError as error:
        body = as_json("internal error", level=logging.CRITICAL, error=error)
    assert "ValueError: it broke" in body["exception"]


def calls() -> list[tuple[str, str]]:
    """(place, template) of every call of the daemon's log."""
    found = []
    for path in sorted(DAEMON.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("log."):
                texts = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
                found += [(f"{path.name}:{node.lineno}", text) for text in texts[:1]]
    return found


def test_lines_about_a_job_or_a_session_say_so_in_the_form_that_makes_fields():
    assert len(calls()) > 20
    for place, text in calls():
        if re.search(r"\b(job|session) %", text):
            assert logs.fields_of(text), f"{place}: {text!r} makes no field"
        if text.startswith(("job ", "session ")):
            assert text.split(" ")[1] == "%s:", f"{place}: {text!r}"


def test_a_flood_of_one_kind_is_thinned_and_counted_and_others_pass():
    now = 100.0
    sparing = logs.Sparing(lambda: now)
    passed = sum(sparing.filter(record("job %s: closed", f"j{n}")) for n in range(10_000))
    assert passed == logs.BURST
    assert sparing.filter(record("another kind"))
    assert sparing.filter(record("job %s: closed", "j", level=logging.ERROR))
    now += 1.0
    later = record("job %s: closed", "j99")
    assert sparing.filter(later)
    assert later.getMessage() == "job j99: closed (and 9500 lines like this that were left out)"
    assert sum(sparing.filter(record("job %s: closed", n)) for n in range(1000)) == logs.LINES_PER_S - 1


def test_kinds_do_not_pile_up():
    sparing = logs.Sparing(lambda: 1.0)
    for n in range(5000):
        assert sparing.filter(record(f"kind {n}"))
    assert len(sparing._kinds) <= logs.KINDS


@pytest.mark.parametrize("style", ["text", "json"])
def test_logging_that_was_set_up_before_is_kept(style):
    root = logging.getLogger()
    before = [(handler, handler.formatter) for handler in root.handlers]
    assert before, "pytest has its own"
    level = root.level
    try:
        logs.set_up("warning", style)
        assert [(handler, handler.formatter) for handler in root.handlers] == before
    finally:
        root.setLevel(level)
