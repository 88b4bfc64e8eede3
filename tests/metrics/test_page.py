"""The status page: its data, its headers and its files. test_page_in_chromium.py has what a browser makes of them."""

from __future__ import annotations

import hashlib
import http.client
import json
import re
from dataclasses import replace
from importlib.resources import files
from itertools import combinations, count
from math import dist

import pytest

from gpumux.metrics import server as server_module
from gpumux.metrics.gauges import BanFigures
from gpumux.metrics.series import Metrics
from gpumux.metrics.server import MetricsServer
from gpumux.scheduler.guard.decisions import REASONS
from tests.deploy.packages import ROOT

from .contract import HIGH, JOB, figures

BAN = BanFigures("j2", "j1", 1.7, "tail", 3.0, 61.0)
ENDING = replace(BAN, left_s=0.04)
HOSTILE = "<img src=x onerror=document.title='owned'>"
VERDICT = "mean 1.02 of 1.05, tail 2.36 of 1.10 in 80 steps: BROKEN for 12 s"
PAGE = files("gpumux.metrics").joinpath("page")
FILES = ("/", "/elements.js", "/chart.js", "/looks.js", "/page.js", "/page.css", "/uplot.js", "/uplot.css")


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
    assert said["host"]
    again = json.loads(ask(server, "/status.json")[1])
    assert again["started"] == said["started"], "by which a daemon is told from the one before"
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
    for path in FILES:
        answer, content = ask(server, path)
        assert answer.status == 200
        assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//|@import|url\(""", content.decode())
        assert path == "/uplot.js" or not re.search(r"https?://", content.decode())
        assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", content.decode())


def test_no_script_or_style_but_the_servers_own_files_may_be_used(server):
    answer, page = ask(server, "/")
    policy = answer.getheader("Content-Security-Policy")
    assert "unsafe" not in policy
    assert "script-src 'self'" in policy
    text = page.decode()
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script>", text)
    assert set(re.findall(r'(?:src|href)="([^"]+)"', text)) == {*FILES[1:], "data:,", "/metrics"}


def test_every_reason_for_which_low_work_is_held_is_explained():
    script = PAGE.joinpath("page.js").read_text()
    block = script[script.index("const REASONS") :]
    assert tuple(re.findall(r"^  (\w+): \"", block[: block.index("};")], re.MULTILINE)) == REASONS


def test_the_chart_library_is_the_one_the_manual_names():
    manual = (ROOT / "docs" / "dependencies.md").read_text()
    for name in ("uPlot.iife.min.js", "uPlot.min.css"):
        digest = hashlib.sha256(PAGE.joinpath("uplot", name).read_bytes()).hexdigest()
        assert digest in manual
    assert "(v1.6.32)" in PAGE.joinpath("uplot", "uPlot.iife.min.js").read_text()[:80]
    assert "uPlot 1.6.32" in manual
    assert "MIT License" in PAGE.joinpath("uplot", "LICENSE").read_text()


# ---- Explanations of one job


def test_an_explanation_is_asked_for_by_a_short_id(server, monkeypatch):
    monkeypatch.setattr(server_module, "EXPLAIN_EVERY_S", 0.0)
    asked = []
    server.watch(
        moving().__next__, explain=lambda short: asked.append(short) or ({"short": short} if short == "j2" else None)
    )
    answer, content = ask(server, "/explain.json?job=j2")
    assert (answer.status, json.loads(content)) == (200, {"short": "j2"})
    answer, content = ask(server, "/explain.json?job=%3Cb%3E&x=1")
    assert answer.status == 404
    assert "'<b>'" in json.loads(content)["error"]
    assert ask(server, "/explain.json")[0].status == 404
    assert asked == ["j2", "<b>", ""]


def test_a_daemon_that_does_not_answer_is_told_from_a_job_that_is_not_there(server):
    def busy(short):
        raise TimeoutError

    server.watch(moving().__next__, explain=busy)
    answer, content = ask(server, "/explain.json?job=j2")
    assert answer.status == 503
    assert "does not answer" in json.loads(content)["error"]


def test_however_many_ask_the_loop_explains_no_more_often(server, monkeypatch):
    monkeypatch.setattr(server_module, "EXPLAIN_EVERY_S", 1e6)
    asked = []
    server.watch(moving().__next__, explain=lambda short: asked.append(short) or {"short": short})
    found = [ask(server, "/explain.json?job=j2")[0].status for _ in range(3)]
    assert found == [200, 429, 429]
    assert asked == ["j2"]


# ---- Colours: told apart by people with any kind of colour vision.

# Machado, Oliveira and Fernandes 2009, table 1, severity 1: how linear RGB looks without one kind of cones.
VISIONS = {
    "all cones": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900),
    ),
}  # fmt: skip
XYZ = ((0.4124564, 0.3575761, 0.1804375), (0.2126729, 0.7151522, 0.0721750), (0.0193339, 0.1191920, 0.9503041))
APART = 15.0  # CIE 1976 colour difference; about 2 is just noticed side by side
CONTRAST = 3.0  # WCAG 2.2, 1.4.11, for graphics; text has 4.5, which axe-core checks


def linear(colour):
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]


def times(matrix, vector):
    return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]


def lab(rgb):
    def f(t):
        return t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116

    x, y, z = (f(each / sum(row)) for each, row in zip(times(XYZ, rgb), XYZ, strict=True))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def palettes():
    """The variables of light and of dark screens."""
    light, dark = PAGE.joinpath("page.css").read_text().split("@media (prefers-color-scheme: dark)")
    dark = dark[: dark.index("* {")]
    return [dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", each)) for each in (light, dark)]


@pytest.mark.parametrize("vision", VISIONS)
def test_high_jobs_and_reasons_have_colours_that_are_told_apart(vision):
    for palette in palettes():
        seen = [
            lab([min(1.0, max(0.0, c)) for c in times(VISIONS[vision], linear(palette[f"c{i}"]))]) for i in range(1, 9)
        ]
        assert min(dist(a, b) for a, b in combinations(seen, 2)) >= APART


def test_lines_and_marks_stand_out_from_the_paper():
    def luminance(colour):
        return times(XYZ, linear(colour))[1]

    for palette in palettes():
        paper = luminance(palette["paper"])
        for name in [*(f"c{i}" for i in range(1, 9)), "low1", "edge", "bad"]:
            light, dark = sorted((luminance(palette[name]), paper), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= CONTRAST, name
