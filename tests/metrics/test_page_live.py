"""The status page of a real daemon, on a simulated GPU with jobs of a real client."""

from __future__ import annotations

import re

import pytest

from gpumux.cli.control import Control
from gpumux.cli.jobs import explanation
from microbench.browser import Browser
from microbench.daemon import running_daemon
from microbench.status_page import clients

from .chromium import chromium, until

pytestmark = pytest.mark.slow


@pytest.mark.leaves_runtime_files
def test_it_shows_the_jobs_explains_them_as_the_command_does_and_says_when_the_daemon_was_killed(runtime_dir):
    with (
        Browser(chromium()) as browser,
        running_daemon(
            policy="guarded", device="sim", directory=runtime_dir, settings={"GPUMUX_METRICS_NAMES": "shown"}
        ) as daemon,
    ):
        (address,) = re.findall(r"metrics at (http://\S+)/metrics", daemon.log.read_text())
        page = browser.open(f"{address}/", 1280, 900)
        until(page, "document.querySelector('#empty').offsetParent")
        with clients(daemon, 3):
            until(page, "document.querySelector('#high .mark') && /KEPT|BROKEN/.test(document.body.innerText)")
            until(page, "charts.share.series.some(each => each.values.some(value => value > 0.01))")
            said = page.evaluate("document.querySelector('#high .verdict').innerText")
            assert re.match(r"mean \d+\.\d+ of 3\.00, tail \d+\.\d+ of 5\.00 in \d+ steps?: (kept|BROKEN for)", said)
            daemon.change("pause", "j2")
            until(page, "[...document.querySelectorAll('#low td')].some(each => each.innerText === 'paused')")
            page.evaluate("explain('j2')")
            until(page, "document.querySelector('#explained-text .verdict')")
            shown = page.evaluate("document.querySelector('#explanation').innerText").splitlines()
            with Control(daemon.endpoint, 60.0) as control:
                (job,) = (each for each in control.status()["jobs"] if each["short"] == "j2")
                lines = explanation(job, control.explain(job["job"]))
            assert lines[0] == "j2 sweep-lr-1 (low): paused"
            for line in ("paused", "let it go on", "gpumux jobs resume j2"):
                assert line in shown
                assert any(line in each for each in lines)
            daemon.change("resume", "j2")
        until(page, "document.querySelector('#empty').offsetParent")
        daemon.process.kill()
        daemon.process.wait()
        until(page, "problem")
        assert page.evaluate("document.querySelector('#alert').innerText").startswith("No answer from the daemon.")
        assert page.evaluate("document.title").startswith("? no answer, ")
