"""The daemon's log on stderr: text, or one JSON object a line, with a bounded rate for each kind of line.

A line about a job begins with "job %s: ", one about a session with "session %s: ", where %s is the short id or the
session's id; "step %d", "program %d", "request %d", "uid %d" and "pid %d" may follow. In JSON these are fields of their
own, so that `jq 'select(.job == "j3")'` finds a job's life.

Requests of clients are logged, so a client could fill a disk. At most LINES_PER_S of each kind of line (one template of
the code) are written in the long run, and a later line says how many were left out.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, TextIO

TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
LINES_PER_S = 50.0  # lines of one kind
BURST = 500.0
KINDS = 512  # kinds of lines that are tracked; the least recently used are dropped
# StreamHandler is generic from Python 3.11 on, and for type checkers alone.
if TYPE_CHECKING:
    _Handler = logging.StreamHandler[TextIO]
else:
    _Handler = logging.StreamHandler
_FIELD = re.compile(r"\b(job|session|step|program|request|uid|pid) (%[sdg])|(%[-#0-9.]*[a-zA-Z])")
_NUMBERED = ("step", "program", "request", "uid", "pid")


@cache
def fields_of(template: str) -> tuple[tuple[str, int], ...]:
    """The arguments of a template that are fields: (name, position)."""
    found = []
    for position, match in enumerate(_FIELD.finditer(template.replace("%%", ""))):
        name, kind = match[1], match[2]
        at_start = match.start() == 0
        if (name in ("job", "session") and at_start and kind == "%s") or (name in _NUMBERED and kind == "%d"):
            found.append((name, position))
    return tuple(found)


class JsonFormatter(logging.Formatter):
    """Formats a line as one object: time (ISO 8601, UTC), level, logger, message, and job, session, step ... if the
    line is about one."""

    def format(self, record: logging.LogRecord) -> str:
        body: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if isinstance(record.msg, str) and isinstance(record.args, tuple):
            for name, position in fields_of(record.msg):
                if position < len(record.args):
                    body[name] = record.args[position]
        if record.exc_info:
            body["exception"] = self.formatException(record.exc_info)
        return json.dumps(body, default=str, ensure_ascii=False)


class Sparing(logging.Filter):
    """Lets lines of one kind pass at a bounded rate. Errors always pass."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._kinds: dict[str, list[float]] = {}  # tokens, the time of their count, lines left out since

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.ERROR:
            return True
        now = self._clock()
        kind = self._kinds.pop(str(record.msg), None) or [BURST, now, 0.0]
        self._kinds[str(record.msg)] = kind  # the newest last
        if len(self._kinds) > KINDS:
            del self._kinds[next(iter(self._kinds))]
        tokens, since, left_out = kind
        tokens = min(BURST, tokens + (now - since) * LINES_PER_S)
        if tokens < 1.0:
            kind[:] = [tokens, now, left_out + 1]
            return False
        kind[:] = [tokens - 1.0, now, 0.0]
        if left_out:
            text = record.getMessage()
            record.msg, record.args = f"{text} (and {left_out:.0f} lines like this that were left out)", ()
        return True


class Stderr(_Handler):
    """The handler of the log, used unless logging was set up already."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.addFilter(Sparing())


def set_up(level: str, style: str) -> None:
    """Log to stderr from now on: at `level`, as `style` ("text" or "json"). May be called again."""
    root = logging.getLogger()
    if not root.handlers:
        root.addHandler(Stderr())
    for handler in root.handlers:
        if isinstance(handler, Stderr):
            handler.setFormatter(JsonFormatter() if style == "json" else logging.Formatter(TEXT))
    root.setLevel(level.upper())
