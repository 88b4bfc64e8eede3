"""/metrics over HTTP, and the passing of snapshots between two threads."""

from __future__ import annotations

import http.client
import socket
import threading
import urllib.error
import urllib.request
from contextlib import ExitStack
from dataclasses import replace

import pytest
from prometheus_client.registry import Collector

from gpumux.errors import ConfigError, EndpointBusy
from gpumux.metrics import gauges
from gpumux.metrics import server as metrics_server
from gpumux.metrics.gauges import SnapshotBox
from gpumux.metrics.series import Metrics
from gpumux.metrics.server import MetricsServer

from .contract import figures

LONG = 60.0  # seconds; a bound for a broken test


@pytest.fixture(autouse=True)
def closed_at_once(monkeypatch):
    """A server looks twice a second whether it is to end, for which nearly every test here would wait."""
    plain = metrics_server._Server.serve_forever
    monkeypatch.setattr(metrics_server._Server, "serve_forever", lambda server: plain(server, poll_interval=0.01))


@pytest.fixture
def server():
    server = MetricsServer(Metrics([int]).registry, "127.0.0.1", 0)
    yield server
    server.close()


def test_a_free_port_is_picked_and_served(server):
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=LONG) as answer:
        body = answer.read().decode()
    assert answer.status == 200
    assert "gpumux_daemon_start_time_seconds" in body


def scrape(server):
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=LONG) as answer:
        return answer.read()


def test_a_slow_client_delays_no_other(server):
    with ExitStack() as stack:
        for said in (b"", b"GET /metrics", b"GET /metrics HTTP/1.0\r\nHost: x\r\n"):
            slow = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            slow.sendall(said)
        for _ in range(3):
            assert b"gpumux_daemon_start_time_seconds" in scrape(server)


def test_the_next_connection_takes_the_place_of_the_oldest(server, monkeypatch):
    monkeypatch.setattr(metrics_server, "MAX_OPEN", 2)
    monkeypatch.setattr(metrics_server._Handler, "timeout", LONG)  # the second says nothing for a while
    with ExitStack() as stack:
        first, second = (stack.enter_context(socket.create_connection(("127.0.0.1", server.port))) for _ in range(2))
        assert b"gpumux_daemon_start_time_seconds" in scrape(server)
        first.settimeout(LONG)
        assert first.recv(1) == b""
        second.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        second.settimeout(LONG)
        assert second.recv(15) == b"HTTP/1.0 200 OK"


def test_one_page_is_rendered_at_a_time():
    """Two renderings would meet at the barrier; a single one times out there."""
    barrier, met = threading.Barrier(2), []

    class Meeting(Collector):
        def describe(self):
            return []

        def collect(self):
            try:
                barrier.wait(0.2)
                met.append(True)
            except threading.BrokenBarrierError:
                barrier.reset()
            return []

    registry = Metrics([int]).registry
    registry.register(Meeting())
    server = MetricsServer(registry, "127.0.0.1", 0)
    scrapers = [threading.Thread(target=scrape, args=(server,)) for _ in range(2)]
    for thread in scrapers:
        thread.start()
    for thread in scrapers:
        thread.join()
    server.close()
    assert met == []


def test_closing_ends_connections_that_are_open():
    server = MetricsServer(Metrics([int]).registry, "127.0.0.1", 0)
    with socket.create_connection(("127.0.0.1", server.port)) as slow:
        scrape(server)  # by now the slow one has its thread
        server.close()
        slow.settimeout(LONG)
        assert slow.recv(1) == b""


def test_a_taken_port_is_a_typed_error_that_names_it(server):
    with pytest.raises(EndpointBusy, match=f"{server.port}.*--metrics-port"):
        MetricsServer(Metrics([int]).registry, "127.0.0.1", server.port)


def test_an_address_that_is_not_this_machine_s_is_a_mistake():
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1:0.*--metrics-port"):  # reserved for documentation
        MetricsServer(Metrics([int]).registry, "192.0.2.1", 0)


def test_a_scrape_wakes_the_loop_and_gets_its_snapshot():
    box = SnapshotBox(lambda: box.publish(figures()))
    assert box.fetch() == figures()
    assert not box.wanted()


def test_scrapes_close_together_share_a_snapshot(monkeypatch):
    monkeypatch.setattr(gauges, "FRESH_S", 1e9)
    woken = []
    box = SnapshotBox(lambda: woken.append(1) or box.publish(figures()))
    assert box.fetch() is box.fetch()
    assert len(woken) == 1


def test_a_stuck_loop_leaves_the_last_snapshot(monkeypatch):
    monkeypatch.setattr(gauges, "FRESH_S", 0.0)
    monkeypatch.setattr(gauges, "STALE_S", 0.0)
    box = SnapshotBox(lambda: None)
    assert box.fetch() is None
    box.publish(figures())
    assert box.fetch() == figures()
    assert box.wanted()


def test_a_scrape_that_waits_is_let_go_when_the_loop_ends(monkeypatch):
    monkeypatch.setattr(gauges, "STALE_S", 1e6)
    asked = threading.Event()
    box = SnapshotBox(asked.set)
    got = []
    scrape = threading.Thread(target=lambda: got.append(box.fetch()))
    scrape.start()
    assert asked.wait(LONG)
    box.close()
    scrape.join(LONG)
    assert got == [None]


@pytest.mark.parametrize(
    ("path", "changes", "silent_s", "status", "said"),
    [
        ("/healthz", {}, 0.0, 200, "ok"),
        ("/readyz", {}, 0.0, 200, "ok"),
        ("/healthz", {}, 5.0, 200, "the dispatch loop has not turned for 5 s"),
        ("/healthz", {}, 40.0, 503, "the dispatch loop has not turned for 40 s"),
        ("/readyz", {}, 40.0, 503, "the dispatch loop has not turned for 40 s"),
        ("/healthz", {"leaving": "the daemon got SIGTERM"}, 0.0, 200, "ok"),
        ("/readyz", {"leaving": "the daemon got SIGTERM"}, 0.0, 503, "leaving: the daemon got SIGTERM"),
        ("/healthz", None, 0.0, 200, "starting"),
        ("/readyz", None, 0.0, 503, "starting"),
        ("/healthz", None, 40.0, 503, "the dispatch loop has not turned for 40 s"),
    ],
)
def test_probes_say_whether_the_daemon_lives_and_takes_work(server, path, changes, silent_s, status, said):
    server.watch(lambda: None if changes is None else replace(figures(), **changes), lambda: silent_s)
    assert ask(server, path) == (status, f"{said}\n")


def test_a_loop_is_silent_from_the_first_question_that_it_leaves_unanswered(monkeypatch):
    """And not since the last snapshot, which nothing may have asked for in a long while."""
    monkeypatch.setattr(gauges, "STALE_S", 0.0)
    now = 0.0
    monkeypatch.setattr(gauges.time, "monotonic", lambda: now)
    box = SnapshotBox(lambda: None)
    box.publish(figures())
    assert box.silent_s() == 0.0
    now = 1000.0
    box.fetch()
    assert box.silent_s() == 0.0
    now = 1020.0
    box.fetch()
    assert box.silent_s() == 20.0
    box.publish(figures())
    assert box.silent_s() == 0.0
    now = 1030.0
    box.fetch()
    now = 1031.0
    box.close()
    assert box.silent_s() == 0.0


@pytest.mark.parametrize("path", ["/metric", "/metrics/", "/favicon.ico", "/healthz/x", "/../metrics"])
def test_there_is_nothing_elsewhere(server, path):
    status, said = ask(server, path)
    assert (status, "/metrics, /healthz and /readyz" in said) == (404, True)


def ask(server, path):
    """The status and the text of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=LONG)
    connection.request("GET", path)
    answer = connection.getresponse()
    found = answer.status, answer.read().decode()
    connection.close()
    return found


def answer_to(port: int, *headers: str) -> str:
    """The status line of the answer to a request with these headers."""
    with socket.create_connection(("127.0.0.1", port), timeout=LONG) as connection:
        connection.sendall("\r\n".join(["GET /metrics HTTP/1.1", *headers, "Connection: close", "", ""]).encode())
        with connection.makefile("rb") as answer:
            return answer.readline().decode().split(" ", 2)[1]


OWN = (
    "127.0.0.1", "127.0.0.1:9402", "[::1]:9402", "192.0.2.7", "localhost:9402", "LOCALHOST", "localhost.", "gpu7:9402",
    "page.localhost", "metrics.example.org", "Metrics.Example.ORG.:443", "gpu7.corp.example:9402",
)  # fmt: skip
FOREIGN = (
    "evil.example", "evil.example:9402", "127.0.0.1.evil.example", "localhost.evil.example", "gpu7.evil.example",
    "metrics.example.org.evil.example", "x.metrics.example.org", "127.0.0.1@evil.example", "evil.example/127.0.0.1",
    "[::1].evil.example", "[::1", "[localhost]", "gpu7:x", "..", ".", "",
)  # fmt: skip


@pytest.fixture
def known(monkeypatch):
    """A server on a machine called gpu7.corp.example, with another name in the configuration."""
    monkeypatch.setattr(metrics_server, "_names_of_machine", lambda: frozenset({"gpu7.corp.example"}))
    server = MetricsServer(Metrics([int]).registry, "127.0.0.1", 0, ["Metrics.example.org"])
    yield server
    server.close()


@pytest.mark.parametrize("host", OWN)
def test_a_name_of_this_machine_is_served(known, host):
    assert answer_to(known.port, f"Host: {host}") == "200"
    assert answer_to(known.port, f"Host: {host}", f"Origin: http://{host}") == "200"


@pytest.mark.parametrize("host", FOREIGN)
def test_another_name_is_refused(known, host):
    """A site's own name that resolves to this machine (DNS rebinding)."""
    assert answer_to(known.port, f"Host: {host}") == "421"


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1", "http://[", "file://"])
def test_a_page_of_another_origin_is_refused(known, origin):
    assert answer_to(known.port, f"Host: 127.0.0.1:{known.port}", f"Origin: {origin}") == "403"
    assert answer_to(known.port, f"Origin: {origin}") == "403"


def test_the_machine_knows_its_own_name():
    assert metrics_server.is_allowed(socket.getfqdn(), ())
    assert {socket.gethostname().lower(), socket.getfqdn().lower()} <= metrics_server._names_of_machine()


def test_a_refusal_says_what_to_do(known):
    request = urllib.request.Request(f"http://127.0.0.1:{known.port}/status.json", headers={"Host": "evil.example"})
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=LONG)
    with caught.value as refused:
        assert b"allowed_hosts" in refused.read()
