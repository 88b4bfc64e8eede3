"""The status page: its data, its headers, and the page itself in a browser if there is one."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import subprocess
from dataclasses import replace
from html import unescape
from itertools import count

import pytest

from gpumux.metrics.gauges import BanFigures
from gpumux.metrics.series import Metrics
from gpumux.metrics.server import MetricsServer

from .contract import HIGH, JOB, figures

BAN = BanFigures("j2", "j1", 1.7, "tail", 3.0, 61.0)
ENDING = replace(BAN, left_s=0.04)
HOSTILE = "<img src=x onerror=document.title='owned'>"
VERDICT = "mean 1.02 of 1.05, tail 2.36 of 1.10 in 80 steps: BROKEN since 12 s"
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def moving():
    """Figures that advance with every call: a second, ten steps and half a second of the device later."""
    for n in count():
        low = replace(JOB, name=HOSTILE, held="tail" if n % 2 else "", steps_done=n, device_busy_s=0.25 * n)
        high = replace(
            HIGH, steps_done=10 * n, device_busy_s=0.5 * n, promise=replace(HIGH.promise, kept=n < 1, verdict=VERDICT)
        )
        yield replace(figures(high, low), when=1000.0 + n, bans=(BAN, ENDING))


@pytest.fixture
def server():
    server = MetricsServer(Metrics([int]).registry, "127.0.0.1", 0)
    yield server
    server.close()


def ask(server, path, method="GET"):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    connection.request(method, path)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer, content


def test_the_data_is_what_the_figures_say(server):
    server.watch(moving().__next__)
    answer, content = ask(server, "/status.json")
    assert (answer.status, answer.getheader("Content-Type")) == (200, "application/json")
    said = json.loads(content)
    assert said["when"] == 1000.0
    high, low = said["jobs"]
    assert high["promise"]["verdict"] == VERDICT
    assert (high["short"], high["promise"]["target"], low["held"], low["promise"]) == ("j2", 1.05, "", None)
    assert low["name"] == HOSTILE
    ban = {"high": "j2", "low": "j1", "ratio": 1.7, "why": "tail", "since_s": 3.0, "left_s": 61.0}
    assert said["bans"] == [ban, ban | {"left_s": 0.04}]
    assert said["guard"]["bans_active"] == 2
    pair = {"high": "3f2a91c0", "low": "9b01dd23", "share": 0.5, "slowdown": 1.25, "low_speed": 0.4}
    assert (said["pairs"], said["pairs_known"]) == ([pair], 40)


def test_before_the_daemon_is_ready_there_is_a_page_and_no_data(server):
    answer, content = ask(server, "/")
    assert answer.status == 200
    assert content.startswith(b"<!doctype html>")
    answer, content = ask(server, "/status.json")
    assert answer.status == 503
    assert "error" in json.loads(content)


def test_metrics_are_where_they_were(server):
    for path in ("/metrics", "/metrics?name[]=x"):
        assert ask(server, path)[0].status == 200
    assert b"gpumux_daemon_start_time_seconds" in ask(server, "/metrics")[1]


def test_it_takes_only_questions_and_may_be_neither_framed_nor_cached(server):
    assert ask(server, "/", "POST")[0].status == 405
    assert ask(server, "/", "HEAD")[1] == b""
    answer, _ = ask(server, "/")
    policy = answer.getheader("Content-Security-Policy")
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert answer.getheader("Cache-Control") == "no-store"


def test_the_page_asks_no_other_host(server):
    page = ask(server, "/")[1].decode()
    assert set(re.findall(r"https?://[^\"' )]+", page)) == {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|eval\(", page)


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_a_browser_draws_it(server, tmp_path):
    server.watch(moving().__next__)
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile", "--dump-dom",
        "--virtual-time-budget=6000", f"http://127.0.0.1:{server.port}/",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    page = done.stdout
    assert "<title>gpumux</title>" in page, "a job's name was run as code"
    assert "<img" not in page
    text = unescape(re.sub(r"<[^>]+>", "|", page[page.index("<body>") : page.index("<script>")]))
    assert HOSTILE in unescape(page)
    assert "gpumux" in text
    assert "no answer" not in text
    assert "10.0" in text  # steps a second
    assert f"j2 train: {VERDICT}" in text
    assert "1.02 BROKEN" in text
    assert "1.70" in text  # of the ban
    assert "1 min 1 s" in text  # which ends then
    assert "1.25 x" in text  # of the pair of programs
    assert "a moment" in text
    assert "|0.0 s" not in text
    slow, share, held = (
        re.search(rf'<svg id="{name}".*?</svg>', page, re.DOTALL)[0] for name in ("slow", "share", "held")
    )
    assert re.search(r'polyline points="[\d., ]{20,}"', slow)
    assert share.count("<rect") >= 4
    assert "<rect" in held
