"""The status page at the metrics port: one static file, and the JSON it asks for every second.

The page shows what GetStatus shows anybody, and remembers what it has seen while it is open; the daemon keeps no history for
it. It loads nothing from anywhere else, and puts no text of a user's into the page but as text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from importlib.resources import files
from typing import Any

from gpumux.metrics.collector import Figures, label_text

Environ = dict[str, Any]
App = Callable[[Environ, Callable[..., Any]], Iterable[bytes]]

_HEADERS = [
    ("Cache-Control", "no-store"),
    ("X-Content-Type-Options", "nosniff"),
    (
        "Content-Security-Policy",
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
        "frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    ),
]


def body(figures: Figures, version: str) -> dict[str, Any]:
    """What the page is drawn from, as plain data; times in seconds, sizes in bytes, counters since the start."""
    device = figures.device
    return {
        "version": version,
        "when": figures.when,
        "device": {"kind": device.kind, "name": label_text(device.name)},
        "memory": {"total_bytes": figures.device_total_bytes, "free_bytes": figures.device_free_bytes},
        "sessions": figures.sessions,
        "jobs": [{**asdict(job), "name": label_text(job.name)} for job in figures.jobs],
        "guard": None if figures.guard is None else asdict(figures.guard),
        "bans": [asdict(ban) for ban in figures.bans],
    }


def with_page(metrics: App, fetch: Callable[[], Figures | None], version: str) -> App:
    """`metrics`, with the page at / and its data at /status.json."""
    page = files("gpumux.metrics").joinpath("page.html").read_bytes()

    def serve(environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if path not in ("/", "/status.json"):
            return metrics(environ, start_response)
        if environ.get("REQUEST_METHOD", "GET") not in ("GET", "HEAD"):
            start_response("405 Method Not Allowed", [("Allow", "GET, HEAD"), ("Content-Length", "0")])
            return []
        kind, content, status = "text/html; charset=utf-8", page, "200 OK"
        if path == "/status.json":
            figures = fetch()
            kind = "application/json"
            if figures is None:
                status, content = "503 Service Unavailable", b'{"error":"the daemon is starting, or does not answer"}'
            else:
                content = json.dumps(body(figures, version), allow_nan=False).encode()
        start_response(status, [("Content-Type", kind), ("Content-Length", str(len(content))), *_HEADERS])
        return [] if environ.get("REQUEST_METHOD") == "HEAD" else [content]

    return serve
