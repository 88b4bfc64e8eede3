"""The two example services: decoded words are the plain loop's, and requests that come together are one batch."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

from clients.serving import latency
from clients.serving.decoder import Decoder, Size, example, generate, step_of
from clients.serving.http_server import Batcher, serving
from gpumux import client
from tests.threads import one_thread

SMALL = Size(layers=2, width=16, heads=2, words=32, length=12, rows=2)


def test_a_job_decodes_the_words_of_the_plain_loop(endpoint: str) -> None:
    torch.manual_seed(0)
    model = Decoder(SMALL).eval()
    prompt = torch.randint(0, SMALL.words, (SMALL.rows, 3))
    with one_thread():
        plain, _ = generate(step_of(model), prompt, 9)
        cache = model.state_dict()["layers.0.attention.keys"].clone()
        with client.submit(step_of(model), example=example(SMALL), model=model, endpoint=endpoint) as job:
            for _ in range(2):  # the cache is written anew
                made, latencies = generate(job.step, prompt, 9)
                assert torch.equal(made, plain)
        assert len(latencies) == 9
        assert torch.equal(model.state_dict()["layers.0.attention.keys"], cache)


class Model:
    """Answers each row with its sum, and notes its batches. Waits where a test says so."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.asked = threading.Semaphore(0)

    def __call__(self, batch: Tensor) -> Tensor:
        self.asked.release()
        assert self.may_answer.wait(60)
        self.rows.append(int((batch.sum(1) != 0).sum()))
        if (batch < 0).any():
            raise ValueError("a negative number")
        return batch.sum(1, keepdim=True)


@contextmanager
def batching(model: Any, rows: int = 4, wait_s: float = 60.0) -> Iterator[Batcher]:
    batcher = Batcher(model, rows, 2, wait_s)
    try:
        yield batcher
    finally:
        batcher.close()


def test_requests_that_wait_together_run_as_one_batch() -> None:
    model = Model()
    with batching(model, rows=2) as batcher:
        model.may_answer.clear()
        asked = [batcher.ask([1.0, 2.0 + i]) for i in range(4)]
        assert model.asked.acquire(timeout=60)
        model.may_answer.set()
        assert [one.result(60) for one in asked] == [[3.0], [4.0], [5.0], [6.0]]
    assert model.rows == [2, 2]


def test_a_batch_that_is_not_full_runs_after_its_wait() -> None:
    model = Model()
    with batching(model, wait_s=0.0) as batcher:
        assert batcher.ask([1.0, 1.0]).result(60) == [2.0]
    assert model.rows == [1]


def test_closing_answers_what_was_asked() -> None:
    model = Model()
    with batching(model) as batcher:
        asked = batcher.ask([1.0, 1.0])
    assert asked.result(0) == [2.0]


def answer(
    port: int, method: str, path: str, body: str | None = None, headers: Mapping[str, str] = MappingProxyType({})
) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, body, dict(headers))
        found = connection.getresponse()
        return found.status, json.loads(found.read())
    finally:
        connection.close()


def test_http_answers_and_refusals() -> None:
    with batching(Model(), wait_s=0.0) as batcher, serving(batcher) as port:
        assert answer(port, "GET", "/healthz") == (200, {})
        assert answer(port, "POST", "/predict", '{"inputs": [1, 2.5]}') == (200, {"outputs": [3.5]})
        for body in ("", "[]", '{"inputs": 3}', '{"inputs": [1]}', '{"inputs": ["x", 2]}'):
            status, content = answer(port, "POST", "/predict", body)
            assert status == 400
            assert "2 numbers" in content["error"]
        assert answer(port, "POST", "/predict", '{"inputs": [-1, 2]}') == (503, {"error": "a negative number"})
        assert answer(port, "GET", "/other")[0] == 404
        assert answer(port, "POST", "/other", "{}")[0] == 404
        for length in ("-5", "x", "1_0"):
            status, content = answer(port, "POST", "/predict", "{}", {"Content-Length": length})
            assert (status, content) == (400, {"error": f"Content-Length is {length}"})


@pytest.mark.slow
@pytest.mark.extended
def test_the_server_runs_by_itself_until_ctrl_c(endpoint: str) -> None:
    command = [sys.executable, "-m", "clients.serving.http_server", "--port", "0", "--endpoint", endpoint]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline().rpartition(":")[2])
        status, content = answer(port, "POST", "/predict", json.dumps({"inputs": [0.5] * 64}))
        assert status == 200
        assert len(content["outputs"]) == 10
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60)[1] == "stopped\n"
        assert process.returncode == 0


@pytest.mark.slow
@pytest.mark.extended
def test_latencies_of_both_are_measured(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "POLICIES", ("guarded",))  # each takes a daemon and two processes more
    monkeypatch.setattr(latency, "Size", lambda: SMALL)
    assert latency.main(["--words", "6", "--requests", "16"]) == 0
    said = capsys.readouterr().out
    for policy in latency.POLICIES:
        for service in ("decoder", "http"):
            assert len([line for line in said.splitlines() if line.split()[:2] == [policy, service]]) == 2
    assert "inf" not in said
