"""/metrics, a status page and probes over HTTP, on threads that can't stall the loop of a daemon or a coordinator.

One page is rendered at a time, so that many scrapers cost no more interpreter time than one. Each connection has a
thread of its own, so that a slow one does not delay others. There are MAX_OPEN at most; the next one replaces the
oldest. Rendering yields the interpreter at every `sys.setswitchinterval` that the loop set (daemon/main.py), which
bounds the delay of a step.
"""

from __future__ import annotations

import errno
import json
import re
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict
from functools import cache
from importlib.resources import files
from ipaddress import ip_address
from typing import Any, Protocol
from urllib.parse import parse_qs
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from gpumux import __version__
from gpumux.errors import ConfigError, EndpointBusy
from gpumux.metrics.gauges import Figures, label_text

# ---- The status page at the metrics port: static files (page/), the JSON that it polls every second, and explanations
# of jobs, one when asked for.
#
# The page shows what GetStatus shows any user, and remembers what it has seen while it is open; the daemon keeps no
# history for it. It loads nothing from other servers, and inserts users' text only as text.


Environ = dict[str, Any]
App = Callable[[Environ, Callable[..., Any]], Iterable[bytes]]
Fetch = Callable[[], Figures | None]
Silent = Callable[[], float]
Explain = Callable[[str], dict[str, Any] | None]

_HEADERS = [
    ("Cache-Control", "no-store"),
    ("X-Content-Type-Options", "nosniff"),
    (
        "Content-Security-Policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    ),
]
_HTML, _JSON, _PLAIN = "text/html; charset=utf-8", "application/json", "text/plain; charset=utf-8"
_SCRIPT, _STYLE = "text/javascript; charset=utf-8", "text/css; charset=utf-8"
SHARED_FILES = {
    "/elements.js": ("elements.js", _SCRIPT),
    "/chart.js": ("chart.js", _SCRIPT),
    "/looks.js": ("looks.js", _SCRIPT),
    "/page.css": ("page.css", _STYLE),
    "/uplot.js": ("uplot/uPlot.iife.min.js", _SCRIPT),
    "/uplot.css": ("uplot/uPlot.min.css", _STYLE),
}
FILES = {"/": ("index.html", _HTML), "/page.js": ("page.js", _SCRIPT), **SHARED_FILES}
CLUSTER_FILES = {"/": ("cluster.html", _HTML), "/cluster.js": ("cluster.js", _SCRIPT), **SHARED_FILES}
EXPLAIN_EVERY_S = 0.1  # the loop is asked for explanations no more often, however many ask


def body(figures: Figures, version: str, started: float) -> dict[str, Any]:
    """The data of the page, as plain data; times in seconds, sizes in bytes, counters since the start. started: Unix
    time, by which the page tells a daemon from the one before."""
    device = figures.device
    return {
        "version": version,
        "started": started,
        "host": socket.gethostname(),
        "when": figures.when,
        "leaving": figures.leaving,
        "device": {"kind": device.kind, "name": label_text(device.name)},
        "memory": {"total_bytes": figures.device_total_bytes, "free_bytes": figures.device_free_bytes},
        "sessions": figures.sessions,
        "jobs": [{**asdict(job), "name": label_text(job.name)} for job in figures.jobs],
        "guard": None if figures.guard is None else asdict(figures.guard),
        "bans": [asdict(ban) for ban in figures.bans],
        "pairs": [asdict(pair) for pair in figures.pairs],
        "pairs_known": figures.pairs_known,
    }


# ---- Health, for probes: is the dispatch loop alive, and does the daemon take work.


STUCK_S = 30.0  # the loop has left a question unanswered for so long: as the watchdog of the systemd unit has it
PLACES = "there is nothing here: see /, /metrics, /healthz and /readyz\n"


def health(figures: Figures | None, silent_s: float) -> tuple[bool, str]:
    """Whether the daemon lives (/healthz), in a word or sentence: its loop turns, or it is still starting. silent_s:
    for how long the loop has left a question unanswered. The age of the figures does not tell, since they are as old as
    the last question is long ago."""
    if silent_s > 0.0:
        return silent_s < STUCK_S, f"the dispatch loop has not turned for {silent_s:.0f} s"
    return True, "starting" if figures is None else "ok"


def readiness(figures: Figures | None, silent_s: float) -> tuple[bool, str]:
    """Whether the daemon takes work (/readyz), in a word or sentence; `silent_s` as for `health`."""
    if figures is None:
        return False, "starting"
    if figures.leaving:
        return False, f"leaving: {figures.leaving}"
    return health(figures, silent_s)


Answer = tuple[str, str, bytes]  # the HTTP status, the type of the content, and the content


class PageSource(Protocol):
    """What a server shows beside /metrics. `process`: whose page it is, a daemon's or a coordinator's; `files`: of the
    page, by path: the name in page/ and the type of the content."""

    @property
    def process(self) -> str: ...
    @property
    def files(self) -> Mapping[str, tuple[str, str]]: ...
    def status(self) -> dict[str, Any] | None:
        """The data of the page; None while there is none."""

    def health(self) -> tuple[bool, str]:
        """Whether the process lives, and a word or sentence about it."""

    def readiness(self) -> tuple[bool, str]:
        """Whether the process takes work, and a word or sentence about it."""

    def explain(self, short: str) -> dict[str, Any] | None:
        """What there is to say about a job, by its short id; None if there is no such job. Raises TimeoutError."""


def _status(source: PageSource) -> Answer:
    found = source.status()
    if found is None:
        error = {"error": f"the {source.process} is starting, or does not answer"}
        return "503 Service Unavailable", _JSON, json.dumps(error).encode()
    return "200 OK", _JSON, json.dumps(found, allow_nan=False).encode()


def _probe(answer: tuple[bool, str]) -> Answer:
    well, said = answer
    return "200 OK" if well else "503 Service Unavailable", _PLAIN, f"{said}\n".encode()


class _Explanations:
    """Explains jobs, as often as the loop's time allows."""

    def __init__(self, source: PageSource) -> None:
        self._source = source
        self._next = 0.0

    def answer(self, query: str) -> Answer:
        """Explain the job with the short id that `query` names ("job=j3")."""
        short = parse_qs(query).get("job", [""])[0]
        if time.monotonic() < self._next:
            return "429 Too Many Requests", _JSON, b'{"error":"explanations are asked for too often: try again"}'
        self._next = time.monotonic() + EXPLAIN_EVERY_S
        try:
            found = self._source.explain(short)
        except TimeoutError:
            error = {"error": f"the {self._source.process} does not answer; its log may say why"}
            return "503 Service Unavailable", _JSON, json.dumps(error).encode()
        if found is None:
            text = f"no job is called {label_text(short)!r}: it has ended, or this is no short id"
            return "404 Not Found", _JSON, json.dumps({"error": text}).encode()
        return "200 OK", _JSON, json.dumps(found, allow_nan=False).encode()


def with_page(metrics: App, source: PageSource) -> App:
    """`metrics` at /metrics, with the page at / and its data at /status.json, explanations of jobs at
    /explain.json?job=j3, and /healthz and /readyz for probes; 404 for anything else."""
    page = files("gpumux.metrics").joinpath("page")
    static = {path: (kind, page.joinpath(name).read_bytes()) for path, (name, kind) in source.files.items()}
    probes = {"/healthz": source.health, "/readyz": source.readiness}
    explanations = _Explanations(source)

    def serve(environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if path == "/metrics":
            return metrics(environ, start_response)
        if environ.get("REQUEST_METHOD", "GET") not in ("GET", "HEAD"):
            start_response("405 Method Not Allowed", [("Allow", "GET, HEAD"), ("Content-Length", "0")])
            return []
        if path in static:
            status, (kind, content) = "200 OK", static[path]
        elif path == "/status.json":
            status, kind, content = _status(source)
        elif path == "/explain.json":
            status, kind, content = explanations.answer(environ.get("QUERY_STRING", ""))
        elif path in probes:
            status, kind, content = _probe(probes[path]())
        else:
            status, kind, content = "404 Not Found", _PLAIN, PLACES.encode()
        start_response(status, [("Content-Type", kind), ("Content-Length", str(len(content))), *_HEADERS])
        return [] if environ.get("REQUEST_METHOD") == "HEAD" else [content]

    return serve


# ---- The names by which the server may be asked for.
#
# A page of another site may have its own name resolve to this machine (DNS rebinding), after which a browser lets it
# read what this server answers. Such a request carries that site's name.


_AUTHORITY = re.compile(r"(?:\[([0-9a-f:.]+)\]|([\w.-]+))(?::\d+)?", re.ASCII | re.IGNORECASE)  # host[:port]


@cache
def _names_of_machine() -> frozenset[str]:
    return frozenset({socket.gethostname().lower(), socket.getfqdn().lower()})


def is_allowed(authority: str, allowed: Collection[str]) -> bool:
    """Whether a request to `authority` (the Host header) is meant for this machine: an address, a name without a dot,
    below localhost, or of this machine, or one of `allowed` (in lower case)."""
    found = _AUTHORITY.fullmatch(authority)
    host = (found[1] or found[2]).lower().removesuffix(".") if found else ""
    if not host:
        return False
    try:
        ip_address(host)
        return True
    except ValueError:
        pass
    return "." not in host or host.endswith(".localhost") or host in allowed or host in _names_of_machine()


def for_allowed_hosts(app: App, allowed: Collection[str]) -> App:
    """`app`, for requests by an allowed name, and of pages that this server served. A request without a Host header
    comes from no browser."""
    names = frozenset(name.lower().removesuffix(".") for name in allowed)

    def serve(environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        host, origin = environ.get("HTTP_HOST"), environ.get("HTTP_ORIGIN")
        if host is not None and not is_allowed(host, names):
            said = b"this host name is not this machine's: use its address, or name it in [access] allowed_hosts\n"
            status = "421 Misdirected Request"
        elif origin is not None and (host is None or origin.partition("://")[2].lower() != host.lower()):
            status, said = "403 Forbidden", b"pages of other sites may not ask this server\n"
        else:
            return app(environ, start_response)
        start_response(status, [("Content-Type", "text/plain"), ("Content-Length", str(len(said))), *_HEADERS])
        return [] if environ.get("REQUEST_METHOD") == "HEAD" else [said]

    return serve


# ---- The server.


SLOW_S = 5.0  # a client is dropped after so long without a byte from or to it
MAX_OPEN = 16


class _Handler(WSGIRequestHandler):
    timeout = SLOW_S

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class names it so
        """Log nothing: scrapes are not worth a line each."""


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    def __init__(self, *args: Any) -> None:
        self._open: dict[socket.socket, None] = {}  # oldest first
        self._change = threading.Lock()
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._change:
            while len(self._open) >= MAX_OPEN:
                self._hang_up(next(iter(self._open)))
            self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._change:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def hang_up(self) -> None:
        """End every connection, and with it its thread."""
        with self._change:
            for request in list(self._open):
                self._hang_up(request)

    def _hang_up(self, request: socket.socket) -> None:
        del self._open[request]
        try:
            request.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the client has closed it

    def server_bind(self) -> None:
        """Bind without the reverse name lookup of the base class, which can take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore scrapers that hang up in the middle."""


def _one_at_a_time(app: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
    rendering = threading.Lock()

    def serve(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        with rendering:
            return list(app(environ, start_response))

    return serve


def _nothing_yet() -> None:
    """Figures of a daemon that is starting: none."""


def _never_silent() -> float:
    return 0.0


def _no_job(short: str) -> None:
    """A daemon that is starting has no job to explain."""


class PageServer:
    """Serves `registry` and the pages of `source` until `close()`. `port` is the one in use, also if 0 was asked for.
    Requests by a host name that is neither this machine's nor in `allowed_hosts` are refused. Raises EndpointBusy if
    another process has the port, ConfigError if it can't be had at all."""

    def __init__(
        self, registry: CollectorRegistry, source: PageSource, *, host: str, port: int,
        allowed_hosts: Collection[str] = (),
    ) -> None:  # fmt: skip
        try:
            app = _one_at_a_time(with_page(make_wsgi_app(registry), source))
            app = for_allowed_hosts(app, [host, *allowed_hosts])
            self._server = make_server(host, port, app, server_class=_Server, handler_class=_Handler)
        except (OSError, OverflowError) as error:
            # Another process (such as a previous daemon) may release the port; other errors are permanent.
            kind = EndpointBusy if isinstance(error, OSError) and error.errno == errno.EADDRINUSE else ConfigError
            raise kind(
                f"can't serve metrics on {host}:{port}: {error}",
                "choose another --metrics-port, 0 for a free one, or off",
            ) from error
        self.port: int = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, name="gpumux-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving and release the port."""
        self._server.shutdown()
        self._thread.join()
        self._server.hang_up()
        self._server.server_close()


class DaemonSource:
    """The page of a daemon, of which there are no figures until `watch`."""

    process = "daemon"
    files = FILES

    def __init__(self) -> None:
        self._fetch: Fetch = _nothing_yet
        self._silent_s: Silent = _never_silent
        self._explain: Explain = _no_job
        self._started = time.time()

    def watch(self, fetch: Fetch, silent_s: Silent, explain: Explain) -> None:
        self._fetch, self._silent_s, self._explain = fetch, silent_s, explain

    def status(self) -> dict[str, Any] | None:
        figures = self._fetch()
        return None if figures is None else body(figures, __version__, self._started)

    def health(self) -> tuple[bool, str]:
        figures = self._fetch()
        return health(figures, self._silent_s())

    def readiness(self) -> tuple[bool, str]:
        figures = self._fetch()
        return readiness(figures, self._silent_s())

    def explain(self, short: str) -> dict[str, Any] | None:
        return self._explain(short)


class MetricsServer(PageServer):
    """A daemon's: serves `registry` until `close()`, and the page's figures from `watch` on."""

    def __init__(
        self, registry: CollectorRegistry, host: str, port: int, allowed_hosts: Collection[str] = ()
    ) -> None:  # fmt: skip
        self._source = DaemonSource()
        super().__init__(registry, self._source, host=host, port=port, allowed_hosts=allowed_hosts)

    def watch(self, fetch: Fetch, silent_s: Silent | None = None, explain: Explain | None = None) -> None:
        """Set the source of the page's figures. silent_s: for how long it has left a question unanswered. explain: what
        it says of one job, by its short id; None if there is no such job; it may raise TimeoutError."""
        self._source.watch(fetch, silent_s or _never_silent, explain or _no_job)
