"""A cluster's status page in a real browser: no, few and many nodes and jobs, wide and narrow, light and dark, or with
no answer. The coordinator is real; daemons and clients are played (microbench/cluster_page.py)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpumux.cluster.events import DeviceFacts
from gpumux.coordinator import metrics
from gpumux.coordinator.core import DaemonFound
from gpumux.metrics.server import CLUSTER_FILES
from microbench.browser import Browser, Page
from microbench.cluster_page import BROKEN, SIZES, PlayedCluster, served
from microbench.status_page import SCREENS
from tests.metrics.chromium import chromium, focused, outside, reachable, tabbed, until, violations

pytestmark = pytest.mark.slow

HOSTILE = "<img src=x onerror=document.title='owned'>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser(chromium()) as opened:
        yield opened


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every answer is a new one."""
    monkeypatch.setattr(metrics, "FRESH_S", 0.0)


def look(page: Page, looks: int = 3) -> None:
    """Have it look so often at least, sooner than it would by itself."""
    page.evaluate(f"(async () => {{ while (seen.length < {looks} && !problem) await look(); }})()")


def text(page: Page, selector: str) -> str:
    return page.evaluate(f"document.querySelector({selector!r}).innerText")


def shown(page: Page, selector: str) -> bool:
    return page.evaluate(f"Boolean(document.querySelector({selector!r}).offsetParent)")


def find(page: Page, words: str) -> None:
    page.evaluate(
        f"(input => {{ input.value = {words!r}; input.dispatchEvent(new Event('input')) }})"
        "(document.getElementById('filter'))"
    )


@pytest.mark.every(4)
@pytest.mark.parametrize(
    "size", [pytest.param(size, marks=pytest.mark.extended if size == "small" else ()) for size in SIZES]
)
def test_it_fits_every_screen_and_keeps_no_reader_out(size: str, browser: Browser):
    cluster = PlayedCluster(*SIZES[size])
    with served(cluster) as page:
        for width, dark in SCREENS if size == "small" else (SCREENS[0], SCREENS[-1]):
            opened = browser.open(f"{page.address}/", width, 900, dark=dark)
            look(opened)
            assert opened.evaluate("problem") is None
            assert outside(opened) == [], f"{width} pixels need scrolling sideways"
            assert opened.evaluate("getComputedStyle(document.body).backgroundColor") == (
                "rgb(13, 17, 23)" if dark else "rgb(255, 255, 255)"
            )
            if (width, dark) == SCREENS[-1]:
                opened.evaluate("document.querySelectorAll('[id$=-more]').forEach(each => each.hidden || each.click())")
            if size != "none":
                opened.evaluate("document.querySelector('#waiting button').click()")
                until(opened, "document.querySelector('#explained-text .verdict')")
            assert violations(opened) == []
            assert outside(opened) == [], f"{width} pixels need scrolling sideways once all is open"
            opened.close()


def test_what_matters_stands_first_in_words(browser: Browser):
    cluster = PlayedCluster(*SIZES["large"])
    with served(cluster) as page:
        opened = browser.open(f"{page.address}/", 1280, 900)
        look(opened)
        broken = text(opened, "#nodes tr td")
        assert text(opened, "#summary").startswith("✗ 1 of ")
        assert text(opened, "#summary").endswith(f" promises is BROKEN: on {broken}")
        assert opened.evaluate("document.title").startswith("✗ 1 of ")
        assert "✗ BROKEN" in text(opened, "#nodes tr")
        assert BROKEN in text(opened, "#nodes tr")
        assert text(opened, "#matters").startswith("1 node away (h7); 1 node draining (a3); ")
        assert "AWAY for " in text(opened, "#nodes tr:nth-child(2)")
        assert "no answer for 10 s" in text(opened, "#nodes tr:nth-child(2)")
        assert "DRAINING for " in text(opened, "#nodes tr:nth-child(3)")
        tops = opened.evaluate(
            "['summary', 'matters', 'nodes', 'waiting', 'users', 'pictures', 'placed']"
            ".map(id => document.getElementById(id).getBoundingClientRect().top)"
        )
        assert tops == sorted(tops)
        assert tops[1] < 200, "one has to scroll to it"
        waits = opened.evaluate("seen[seen.length - 1].waiting.map(job => job.since_s)")
        assert waits == sorted(waits, reverse=True)
        assert text(opened, "#waiting td:nth-child(2)").startswith("It needs ")
        assert opened.evaluate("document.querySelectorAll('#nodes tr').length") == 10
        opened.evaluate("document.getElementById('nodes-more').click()")
        assert opened.evaluate("document.querySelectorAll('#nodes tr').length") == 64
        labels = opened.evaluate("Object.values(charts).map(each => each.series.map(line => line.label).join())")
        assert labels == ["on devices,high waiting,low waiting", "high,low", "placed,moved,ended", "in use"]
        find(opened, "draining")
        assert text(opened, "#filtered").startswith("1 of 64 nodes and 0 of 300 jobs match")
        find(opened, "uid 1000")
        assert text(opened, "#filtered").startswith("0 of 64 nodes")
        opened.close()


def test_what_is_placed_and_moved_is_counted_while_it_is_open(browser: Browser):
    cluster = PlayedCluster(*SIZES["small"])
    with served(cluster) as page:
        opened = browser.open(f"{page.address}/", 1280, 900)
        look(opened, 1)
        before = cluster.coordinator.counts["started"]
        for _ in range(300):
            cluster.advance()
        now = cluster.coordinator.counts["started"]
        assert now > before
        until(opened, f"charts.moves.series[0] && charts.moves.series[0].values.at(-1) === {now - before}")
        opened.close()


def test_without_nodes_or_jobs_it_says_what_to_do(browser: Browser):
    cluster = PlayedCluster(0, 0)
    with served(cluster) as page:
        opened = browser.open(f"{page.address}/", 1280, 900)
        look(opened)
        assert "gpumux cluster up cluster.toml" in text(opened, "#no-nodes")
        parts = ("#empty", "#nodes-part", "#waiting-part", "#users-part", "#placed-part", "#pictures", "#summary")
        assert [shown(opened, part) for part in parts] == [False] * len(parts)
        cluster.happen(DaemonFound("a0", "a", ("ipc:///a0",), DeviceFacts(2**34)))
        until(opened, "document.querySelector('#empty').offsetParent")
        assert 'cluster="auto"' in text(opened, "#empty")
        assert not shown(opened, "#no-nodes")
        assert text(opened, "#summary") == "No high job runs: nothing is promised"
        assert violations(opened) == []
        opened.close()


@pytest.mark.parametrize("named", [False, True])
def test_names_are_text_and_are_shown_only_where_the_operator_said_so(named: bool, browser: Browser):
    cluster = PlayedCluster(8, 0)
    job = cluster.submit(name=HOSTILE, priority=1)
    user = cluster.coordinator.placement.jobs[job].request.user  # type: ignore[index]
    with served(cluster, named=named) as page:
        opened = browser.open(f"{page.address}/", 1280, 900)
        look(opened)
        assert (HOSTILE in text(opened, "#placed")) is named
        assert (user in text(opened, "#users")) is named
        assert ("uid " in text(opened, "#users")) is not named
        assert opened.evaluate("document.querySelectorAll('img').length") == 0
        opened.evaluate("document.querySelector('#placed button').click()")
        until(opened, "document.querySelector('#explained-text .verdict')")
        assert text(opened, "#explained-text").startswith("It has run on ")
        assert f"gpumux cluster explain {job[:8]}" in text(opened, "#explained-text")
        names = opened.evaluate("performance.getEntriesByType('resource').map(each => new URL(each.name).pathname)")
        assert set(names) == {*CLUSTER_FILES, "/status.json", "/explain.json"} - {"/"}
        opened.close()


def test_a_coordinator_that_is_stuck_or_gone_leaves_nothing_that_looks_like_now(browser: Browser):
    cluster = PlayedCluster(*SIZES["small"])
    with served(cluster) as page:
        opened = browser.open(f"{page.address}/", 1280, 900)
        look(opened)
        cluster.stuck = True
        until(opened, "problem")
        assert "The coordinator has no answer yet." in text(opened, "#alert")
        cluster.stuck = False
        until(opened, "!problem")
        assert not shown(opened, "#alert")
        cluster.leaving = "told to stop"
        until(opened, "!document.getElementById('alert').hidden")
        assert text(opened, "#alert") == "The coordinator is leaving and takes no more work. told to stop"
        cluster.leaving = ""
    until(opened, "problem")
    seen_at = opened.evaluate("clock(seen[seen.length - 1].when)")
    assert "No answer from the coordinator." in text(opened, "#alert")
    assert "gpumux cluster up cluster.toml" in text(opened, "#alert")
    assert text(opened, "#summary").startswith(f"? Not known now. At {seen_at}: ")
    assert "? BROKEN THEN" in text(opened, "#nodes tr")
    assert opened.evaluate("document.title").startswith("? no answer, ")
    assert violations(opened) == []
    with served(PlayedCluster(8, 0), port=int(page.address.split(":")[2])):
        until(opened, "!problem && !document.querySelector('#empty').hidden")
        assert opened.evaluate("seen.length") <= 2, "what the coordinator before did is no part of this one's history"
        opened.close()


def test_focus_and_rows_stay_while_figures_go_on(browser: Browser):
    cluster = PlayedCluster(*SIZES["small"])
    with served(cluster) as page:
        opened = browser.open(f"{page.address}/", 1280, 900)
        look(opened)
        opened.evaluate("document.querySelectorAll('#waiting button')[2].focus()")
        before, looks = opened.evaluate("[document.activeElement.getAttribute('aria-label'), seen.length]")
        look(opened, looks + 2)
        assert opened.evaluate("document.activeElement.getAttribute('aria-label')") == before
        opened.close()


def test_without_a_mouse_each_part_is_reached_in_the_order_it_stands_and_why_a_job_waits_is_read(browser: Browser):
    cluster = PlayedCluster(*SIZES["small"])
    with served(cluster) as page:
        opened = browser.open(f"{page.address}/", 1280, 900)
        look(opened)
        stands = reachable(opened)
        assert "filter" in stands
        assert sum(name.startswith("Explain ") for name in stands) >= 2
        assert tabbed(opened) == stands
        while not focused(opened).startswith("Explain "):
            opened.press("Tab")
        asked = focused(opened)
        opened.press("Enter")
        until(opened, "document.querySelector('#explained-text .verdict')")
        assert opened.evaluate("document.querySelector('#explanation').contains(document.activeElement)")
        opened.press("Escape")
        until(opened, "!document.querySelector('#explanation').open")
        assert focused(opened) == asked
        opened.close()
