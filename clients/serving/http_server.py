"""A small HTTP server for a model: requests that come together run as one batch.

    python -m clients.serving.http_server --port 8000
    curl --json "{\\"inputs\\": [$(seq -s , 64)]}" http://127.0.0.1:8000/predict

POST /predict with {"inputs": [numbers]} answers {"outputs": [numbers]}: here the scores of ten classes for an image of
64 numbers. A thread of its own takes what has come, at most `rows` requests, or fewer after `wait_s` seconds, fills the
batch up with zeros and runs it as one step. Ctrl-C ends it.
"""

from __future__ import annotations

import argparse
import json
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from torch import Tensor

from clients.common import positive
from clients.data import digits
from clients.digits_inference import practise
from clients.job import open_job
from clients.models.cnn import cnn

MAX_BODY = 1 << 20  # bytes
ANSWER_S = 60.0  # after which a request is answered with 503
Request = tuple[list[float], "Future[list[float]]"]


class Batcher:
    """Runs requests in batches of `rows` by `width` numbers. `predict` maps a batch to one row of numbers each."""

    def __init__(self, predict: Callable[[Tensor], Tensor], rows: int, width: int, wait_s: float = 0.002) -> None:
        self.width = width
        self._predict, self._rows, self._wait_s = predict, rows, wait_s
        self._requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="batcher")
        self._thread.start()

    def ask(self, inputs: list[float]) -> Future[list[float]]:
        """Raises ValueError for another number of inputs than `width`."""
        if len(inputs) != self.width:
            raise ValueError(f"{len(inputs)} inputs where the model takes {self.width}")
        asked: Future[list[float]] = Future()
        self._requests.put((inputs, asked))
        return asked

    def close(self) -> None:
        """Answer what was asked, and end."""
        self._requests.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (first := self._requests.get()) is not None:
            some, ended = self._together(first)
            self._answer(some)
            if ended:
                return

    def _together(self, first: Request) -> tuple[list[Request], bool]:
        some = [first]
        while len(some) < self._rows:
            try:
                following = self._requests.get(timeout=self._wait_s)
            except queue.Empty:
                break
            if following is None:
                return some, True
            some.append(following)
        return some, False

    def _answer(self, some: list[Request]) -> None:
        batch = torch.zeros(self._rows, self.width)
        for row, (inputs, _) in zip(batch, some, strict=False):
            row.copy_(torch.tensor(inputs))
        try:
            outputs = self._predict(batch).tolist()
        except Exception as error:  # noqa: BLE001, each request gets it
            for _, asked in some:
                asked.set_exception(error)
            return
        for (_, asked), found in zip(some, outputs, strict=False):
            asked.set_result(found)


@contextmanager
def serving(batcher: Batcher, port: int = 0) -> Iterator[int]:
    """A server on 127.0.0.1 for as long as a `with` block. The port that it listens on."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # a connection stays open for the next request
        wbufsize = -1  # head and body leave together: a client would delay its acknowledgement of a head alone
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            self._send(200 if self.path == "/healthz" else 404, {})

        def do_POST(self) -> None:
            given = self.headers.get("Content-Length", "0")
            if not (given.isascii() and given.isdigit()):  # then nothing says where the next request begins
                self.close_connection = True
                return self._send(400, {"error": f"Content-Length is {given}"})
            length = int(given)
            if length > MAX_BODY:
                self.close_connection = True
                return self._send(413, {"error": f"at most {MAX_BODY} bytes"})
            body = self.rfile.read(length)
            if self.path != "/predict":
                return self._send(404, {"error": "POST /predict"})
            try:
                asked = batcher.ask([float(x) for x in json.loads(body)["inputs"]])
            except (KeyError, TypeError, ValueError) as error:
                return self._send(400, {"error": f'{{"inputs": [{batcher.width} numbers]}} is asked for: {error}'})
            try:
                self._send(200, {"outputs": asked.result(ANSWER_S)})
            except Exception as error:  # noqa: BLE001, a client is answered whatever happens
                self._send(503, {"error": str(error)})

        def _send(self, status: int, content: dict[str, Any]) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            self.wfile.flush()

        def log_message(self, *_: Any) -> None:
            """Requests are not logged: printing them would be felt in the latencies."""

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = False
    thread = threading.Thread(target=server.serve_forever, name="http")
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def main(argv: Sequence[str] | None = None) -> int:
    flags = argparse.ArgumentParser(description="Serve scores for images of handwritten digits over HTTP.")
    flags.add_argument("--port", type=int, default=8000, help="of 127.0.0.1; 0 picks one (default: 8000)")
    flags.add_argument("--rows", type=positive, default=8, help="requests that run together at most (default: 8)")
    flags.add_argument("--priority", choices=("high", "low"), default="high", help="the job's class (default: high)")
    flags.add_argument("--endpoint", help="the daemon (default: $GPUMUX_ENDPOINT, or that of GPU 0 on this machine)")
    flags.add_argument("--plain", action="store_true", help="run the model here, without gpumux")
    args = flags.parse_args(argv)
    try:
        serve(args)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
    return 0


def serve(args: argparse.Namespace) -> None:
    """Until Ctrl-C."""
    torch.manual_seed(0)
    model = cnn("tiny")
    practise(model, digits(), 0)
    model.eval()

    def predict(x: Tensor) -> Tensor:
        with torch.no_grad():
            out: Tensor = model(x.view(-1, 1, 8, 8))
        return out

    example = (torch.zeros(args.rows, 64),)
    with open_job(
        predict, plain=args.plain, example=example, model=model, optimizer=None, priority=args.priority, name="http",
        seed=0, endpoint=args.endpoint,
    ) as job:  # fmt: skip
        batcher = Batcher(lambda x: job.step(x).result(), args.rows, 64)
        try:
            with serving(batcher, args.port) as port:
                print(f"listening on http://127.0.0.1:{port}", flush=True)
                threading.Event().wait()
        finally:
            batcher.close()


if __name__ == "__main__":
    sys.exit(main())
