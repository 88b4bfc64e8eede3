"""/metrics over HTTP, on a thread that can't stall the daemon's loop.

One request is served at a time, so that a crowd of scrapers costs no more interpreter time than one;
a client that dawdles is dropped after SLOW_S. Rendering gives the interpreter up at every
`sys.setswitchinterval` the loop set (daemon/serve.py), which bounds what it costs a step.
"""

from __future__ import annotations

import socketserver
import threading
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from gpumux.errors import ConfigError

SLOW_S = 5.0


class _Handler(WSGIRequestHandler):
    timeout = SLOW_S

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class names it so
        """Scrapes are not worth a line each."""


class _Server(WSGIServer):
    def server_bind(self) -> None:
        """Bind without the reverse name lookup of the base class, which can take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A scraper that hangs up in the middle is its own business."""


class MetricsServer:
    """Serves `registry` until `close()`. `port` is the one in use, also when 0 was asked for."""

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        try:
            self._server = make_server(
                host, port, make_wsgi_app(registry), server_class=_Server, handler_class=_Handler
            )
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"can't serve metrics on {host}:{port}: {error}",
                "choose another --metrics-port, 0 for a free one, or off",
            ) from error
        self.port: int = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, name="gpumux-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving and let go of the port."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
