"""The status page in a real browser: how it looks with no, few and many jobs, on a wide and a narrow screen, light and
dark, and what it says when the daemon does not answer.

The daemon's figures are made here, so that each state is there when it is looked at. tests/microbench has the page of
real daemons.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from gpumux.metrics.gauges import BanFigures, Figures, JobFigures
from gpumux.metrics.series import Metrics
from gpumux.metrics.server import FILES, MetricsServer
from gpumux.scheduler.guard.decisions import REASONS
from microbench.browser import Browser, BrowserFailed, Page

from .chromium import chromium, focused, outside, reachable, tabbed, until, violations
from .contract import GUARD, HIGH, JOB, PROMISE, figures

pytestmark = pytest.mark.slow

BROKEN = replace(
    PROMISE, slowdown=1.05, slowdown_p99=2.36, kept=False, broken_for_s=12.0, target=1.1,
    verdict="mean 1.05 of 1.10, tail 2.36 of 1.20 in 256 steps: BROKEN for 12 s",
)  # fmt: skip
UNKNOWN = replace(
    PROMISE, slowdown=None, slowdown_p99=None, kept=False, verdict="mean ? of 1.05, tail ? of 1.10: not measured yet"
)
HOSTILE = "<img src=x onerror=document.title='owned'>"
LONG = "a-name-as-long-as-the-daemon-lets-it-be-and-without-any-space-xx"
BAN = BanFigures("j1", "j5", 1.7, "tail", 3.0, 61.0)
SCREENS = [(1280, False), (1280, True), (400, False), (400, True)]  # width, dark


def jobs(number: int) -> list[JobFigures]:
    """One high job in ten at least, the others low: some held, for every reason there is."""
    if number == 0:
        return []
    promises = [BROKEN, PROMISE, UNKNOWN][: max(1, number // 10)]
    found = [replace(HIGH, short=f"j{i}", name=f"serve-{i}", promise=p) for i, p in enumerate(promises, 1)]
    for i in range(len(found) + 1, number + 1):
        name = HOSTILE if i == 2 else LONG if i == number else f"sweep-{i}"
        held = (*REASONS, "")[i % (len(REASONS) + 1)]
        low = replace(JOB, short=f"j{i}", name=name, held=held, held_by="j1" if held else "", held_for_s=0.3 * i)
        found.append(replace(low, state="paused", held="") if i % 7 == 0 else low)
    return found


class State:
    """The figures of a daemon: a second passes, and every job goes on, each time they are asked for."""

    def __init__(self, *jobs: JobFigures) -> None:
        self.jobs = list(jobs)
        self.answers = True
        self.stands_still = False
        self.set_back_s = 0.0  # by which its machine's clock was set back
        self.leaving = ""
        self._second = 0
        self._one = threading.Lock()

    def fetch(self) -> Figures | None:
        with self._one:
            n = self._second = self._second + (not self.stands_still)
            moved = [
                replace(job, steps_done=n * (10 if job.priority == "high" else i), device_busy_s=n * 0.4 / (i + 1))
                for i, job in enumerate(self.jobs)
            ]
            guard = replace(GUARD, held_s={reason: 0.1 * n * (i < 3) for i, reason in enumerate(REASONS)})
            found = replace(figures(*moved, guard=guard), when=1.7e9 + n - self.set_back_s, leaving=self.leaving)
            return replace(found, bans=(BAN,) if len(self.jobs) > 4 else ()) if self.answers else None


def explain(short: str) -> dict[str, object] | None:
    if short == "j9":
        raise TimeoutError
    return None if short not in ("j1", "j2") else {
        "short": short, "name": HOSTILE if short == "j2" else "serve-1", "priority": "high", "verdict": BROKEN.verdict,
        "causes": ["Beside j2 it loses 0.110 s a second; most in piece 3 (operators 4 to 9)."],
        "remedies": [{"text": "hold j2 back", "command": "gpumux jobs pause j2"}, {"text": "a pause", "command": ""}],
    }  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser(chromium()) as opened:
        yield opened


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """Serve a state; the address of its page."""
    servers = []

    def start(state: State, port: int = 0) -> str:
        server = MetricsServer(Metrics([int]).registry, "127.0.0.1", port)
        server.watch(state.fetch, explain=explain)
        servers.append(server)
        return f"http://127.0.0.1:{server.port}/"

    start.stop = lambda: servers.pop().close()
    yield start
    for server in servers:
        server.close()


@pytest.fixture
def show(browser: Browser, serve: Callable[..., str]) -> Iterator[Callable[..., Page]]:
    """Open the page of a state, once it has looked a few times."""
    pages = []

    def open_page(state: State, width: int = 1280, dark: bool = False, looks: int = 3) -> Page:
        page = browser.open(serve(state), width, 900, dark=dark)
        pages.append(page)
        look(page, looks)
        return page

    yield open_page
    for page in pages:
        page.close()


def look(page: Page, looks: int = 3) -> None:
    """Have it look so often at least, sooner than it would by itself."""
    page.evaluate(f"(async () => {{ while (seen.length < {looks} && !problem) await look(); }})()")


def text(page: Page, selector: str) -> str:
    """What one reads there."""
    return page.evaluate(f"document.querySelector({selector!r}).innerText")


def shown(page: Page, selector: str) -> bool:
    return page.evaluate(f"Boolean(document.querySelector({selector!r}).offsetParent)")


@pytest.mark.every(4)
@pytest.mark.parametrize("number", [0, pytest.param(3, marks=pytest.mark.extended), 30])
def test_it_fits_every_screen_and_keeps_no_reader_out(number, browser, serve):
    address = serve(State(*jobs(number)))
    pages = [browser.open(address, width, 900, dark=dark) for width, dark in SCREENS]
    try:
        for (width, dark), page in zip(SCREENS, pages, strict=True):
            look(page)
            assert page.evaluate("problem") is None
            assert outside(page) == [], f"{width} pixels need scrolling sideways"
            assert page.evaluate("getComputedStyle(document.body).backgroundColor") == (
                "rgb(13, 17, 23)" if dark else "rgb(255, 255, 255)"
            )
            page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
            assert violations(page) == []
            if number:
                page.evaluate("document.querySelector('button').click()")
                until(page, "document.querySelector('#explanation ul')")
                assert violations(page) == []
            assert outside(page) == [], f"{width} pixels need scrolling sideways once all is open"
    finally:
        for page in pages:
            page.close()


def test_without_jobs_it_says_how_to_submit_one(show):
    page = show(State())
    assert "client.submit(" in text(page, "#empty")
    assert "gpumux doctor" in text(page, "#empty")
    assert [shown(page, name) for name in ("#important", "#others", "#pictures", "#alert", "#summary")] == [False] * 5


def test_the_important_job_comes_first_with_its_verdict_in_words(show):
    page = show(State(*jobs(3)))
    assert text(page, "#summary") == "✗ The promise is BROKEN: j1 serve-1"
    assert page.evaluate("document.title").startswith("✗ The promise is BROKEN, ")
    card = text(page, "#high li")
    assert card.startswith("✗ BROKEN")
    assert BROKEN.verdict in card
    assert "10\xa0steps/s" in card
    assert "40\xa0% of\xa0device".replace(" ", "\xa0") in card
    tops = page.evaluate(
        "['summary', 'high', 'low', 'pictures'].map(id => document.getElementById(id).getBoundingClientRect().top)"
    )
    assert tops == sorted(tops)
    assert tops[1] < 450, "one has to scroll to it"


def test_of_many_promises_the_broken_one_comes_first_and_the_others_are_counted(show):
    high = jobs(30)[:3]
    page = show(State(high[1], high[2], high[0]))
    assert text(page, "#summary") == "✗ 1 of 3 promises is BROKEN: j1 serve-1"
    assert text(page, "#high li .mark") == "✗ BROKEN"
    marks = page.evaluate("[...document.querySelectorAll('.mark')].map(each => each.innerText)")
    assert marks == ["✗ BROKEN", "✓ KEPT", "? NOT KNOWN"]
    colours = page.evaluate("[...document.querySelectorAll('#high .key')].map(each => each.style.background)")
    assert len(set(colours)) == 3


def test_kept_and_unknown_promises_are_called_so(show):
    high = jobs(30)[:3]
    state = State(high[1])
    page = show(state)
    assert text(page, "#summary") == "✓ The promise to j2 serve-2 is kept"
    state.jobs = [high[1], high[2]]
    until(page, "document.querySelectorAll('#high li').length === 2")
    assert text(page, "#summary") == "? 1 of 2 promises known and kept, the rest is not measured yet"
    state.jobs = [high[2]]
    until(page, "document.querySelectorAll('#high li').length === 1")
    assert text(page, "#summary") == "? The promise to j3 serve-3 is not measured yet"


def test_a_name_is_text_and_the_title_has_host_and_device(show):
    page = show(State(*jobs(3)))
    host = page.evaluate("seen[0].host")
    assert text(page, "h1") == f"gpumux on {host}: a CPU"
    assert page.evaluate("document.title").endswith(f", {host}: a CPU - gpumux")
    assert HOSTILE in text(page, "#low")
    assert page.evaluate("document.querySelectorAll('img').length") == 0


def test_thirty_jobs_show_those_with_the_largest_share_and_sum_the_rest(show):
    page = show(State(*jobs(30)))
    assert page.evaluate("document.querySelectorAll('#low tr').length") == 10
    assert text(page, "#others-title") == "Low jobs (27)"
    assert text(page, "#low tr").startswith("j4 ")
    assert text(page, "#rest").startswith("17 more jobs: together ")
    share = page.evaluate("charts.share.series.map(each => each.label)")
    assert share == [
        "j1 serve-1",
        "j2 serve-2",
        "j3 serve-3",
        *(f"j{i} sweep-{i}" for i in range(4, 8)),
        "23 other jobs",
    ]
    page.evaluate("document.getElementById('more').click()")
    assert page.evaluate("document.querySelectorAll('#low tr').length") == 27
    assert text(page, "#rest") == ""


def test_why_a_job_is_held_stands_where_it_is_held(show):
    page = show(State(*jobs(30)))
    page.evaluate("document.getElementById('more').click()")
    rows = page.evaluate("[...document.querySelectorAll('#low tr')].map(each => each.children[1].innerText)")
    held = [row for row in rows if row.startswith("held ")]
    assert "held 2 s for j1 (tail): the step that runs may not lose more" in held
    assert {row.split("(")[1].split(")")[0] for row in held} == set(REASONS)
    assert "paused" in rows
    assert "runs" in rows
    legend = page.evaluate("[...document.querySelectorAll('#held .legend li')].map(each => each.innerText)")
    assert len(legend) == 4, "three reasons occurred, and the moment"
    assert any("learning: what it costs that job is tried" in each and "10 %" in each for each in legend)


def test_the_filter_finds_jobs_by_name_state_and_reason_and_hides_no_broken_promise(show):
    page = show(State(*jobs(30)))

    def find(words: str) -> list[str]:
        page.evaluate(
            f"(input => {{ input.value = {words!r}; input.dispatchEvent(new Event('input')) }})"
            "(document.getElementById('filter'))"
        )
        return page.evaluate(
            "[...document.querySelectorAll('#high li b, #low td:first-child')].filter(each => each.offsetParent)"
            ".map(each => each.innerText.split(' ')[0])"
        )

    assert find("SWEEP-1") == ["j10", "j11", "j12", "j13", "j14", "j15", "j16", "j17", "j18", "j19"]
    assert text(page, "#filtered") == "10 of 30 jobs match"
    assert text(page, "#summary") == "✗ 1 of 3 promises is BROKEN: j1 serve-1"
    assert find("held tail") == ["j5", "j13", "j29"]  # j21 is paused
    assert find("paused") == ["j7", "j14", "j21", "j28"]
    assert find("serve-2") == ["j2"]
    assert find("no such") == []
    assert text(page, "#filtered") == "0 of 30 jobs match"
    assert len(find("")) == 13


def test_the_cursor_says_the_values_of_its_moment_in_all_charts(show):
    page = show(State(*jobs(3)), looks=4)
    x, y = page.evaluate(
        "(box => [box.left + charts.share.plot.valToPos(seen[2].when, 'x'), box.top + 40])"
        "((document.querySelector('#share').scrollIntoView(), charts.share.plot.over.getBoundingClientRect()))"
    )
    page.point(x, y)
    moment = page.evaluate("clock(seen[2].when)")
    for name in ("share", "held", "mean", "tail"):
        until(page, f"document.querySelector('#{name} .legend li').innerText === {moment!r}")
    assert text(page, "#share .legend li:nth-child(2)").split() == ["j1", "serve-1", "40", "%"]
    assert page.evaluate("document.querySelector('#mean .u-wrap').getAttribute('aria-label')").endswith(
        "now j1 serve-1 1.05"
    )
    page.point(1, 1)
    until(page, "document.querySelector('#tail .legend li').innerText === 'now'")


def test_a_slowdown_above_the_axis_is_drawn_at_its_end_and_said(show):
    broken = replace(HIGH, promise=replace(PROMISE, slowdown_p99=19.5, kept=False))
    page = show(State(broken))
    page.evaluate("draw()")
    drawn = page.evaluate("charts.tail.plot.data[1].filter(v => v !== null)")
    assert set(drawn) == {4}
    assert page.evaluate("charts.tail.plot.scales.y.max") > 4
    assert "19.50" in text(page, "#tail .legend")
    assert "drawn at 4.00 where it is more" in text(page, "#tail figcaption")
    assert "drawn at" not in text(page, "#mean figcaption")


def test_no_curve_is_drawn_where_nothing_was_seen(show):
    page = show(State(*jobs(3)))
    page.evaluate("(last => { seen.push({...last, when: last.when + 9, gap: true}); draw(); })(seen[seen.length - 1])")
    for name in ("mean", "share", "held"):
        values = page.evaluate(f"charts.{name}.series[0].values")
        assert values[-2] is None
        assert None not in values[2:-2]


def test_each_high_job_keeps_its_colour_and_one_that_ended_gives_it_back(show):
    high = [replace(HIGH, short=f"j{i}", name="", promise=PROMISE) for i in range(1, 11)]
    state = State(*high[:9])
    page = show(state)
    assert page.evaluate("[...colours.values()]") == [1, 2, 3, 4, 5, 6, 7, 8, 1]
    assert text(page, "#pictures-title") == "While this page has been open; 1 high job more in no chart"
    state.jobs = [*high[2:8], high[9]]
    until(page, "!colours.has('j1')")
    assert page.evaluate("[...colours.entries()]") == [*([f"j{i}", i] for i in range(3, 9)), ["j10", 1]]


def pixels(page: Page, name: str, colour: str) -> int:
    """How many of a chart have that colour."""
    return page.evaluate(
        f"""(canvas => {{
            const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
            const wanted = parseInt("ff{colour[5:]}{colour[3:5]}{colour[1:3]}", 16); // its bytes from the last
            return new Uint32Array(data.buffer).filter(pixel => pixel === wanted).length;
        }})(document.querySelector("#{name} canvas"))"""
    )


def test_the_curves_are_drawn_in_the_jobs_own_colours_which_follow_the_screen(show):
    page = show(State(*jobs(3)), looks=4)
    until(page, "charts.share.plot.status === 1")
    assert pixels(page, "share", "#0072b2") > 200, "an area"
    assert pixels(page, "mean", "#0072b2") > 10, "a line"
    page.prefer(dark=True)
    until(page, "getComputedStyle(document.body).backgroundColor === 'rgb(13, 17, 23)'")
    look(page, page.evaluate("seen.length") + 1)
    while pixels(page, "share", "#0072b2"):  # drawn a moment later where the machine is busy
        look(page, page.evaluate("seen.length") + 1)
    assert pixels(page, "share", "#56b4e9") > 200


def test_focus_and_rows_stay_while_figures_go_on(show):
    page = show(State(*jobs(30)))
    page.evaluate("document.querySelectorAll('#low button')[3].focus()")
    before = page.evaluate("[document.activeElement.getAttribute('aria-label'), seen.length]")
    until(page, f"seen.length >= {before[1] + 2}")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == before[0] == "Explain j7"


def test_an_explanation_is_that_of_the_command_line_with_commands_to_paste(show):
    page = show(State(*jobs(3)))
    page.evaluate("document.querySelector('#high button').click()")
    until(page, "document.querySelector('#explanation ul')")
    assert text(page, "#explained") == "j1 serve-1 (high)"
    said = text(page, "#explained-text")
    for part in (BROKEN.verdict, "Why", "Beside j2 it loses", "What to do", "gpumux jobs pause j2"):
        assert part in said
    assert "gpumux jobs explain j1 --story" in said
    assert page.evaluate("document.querySelector('#explanation').matches(':modal')")
    page.evaluate("document.querySelector('#close').click()")
    assert not shown(page, "#explanation")


@pytest.mark.parametrize(("width", "dark"), [SCREENS[0], SCREENS[-1]])
def test_without_a_mouse_each_part_is_reached_in_the_order_it_stands_and_is_seen_to_be(width, dark, show):
    page = show(State(*jobs(30)), width, dark)
    stands = reachable(page)
    assert stands[:4] == ["Explain j1", "Explain j2", "Explain j3", "filter"]
    assert stands[4].startswith("Explain j")
    assert {"more", "bans-title", "/metrics"} <= set(stands)
    assert tabbed(page) == stands


def test_without_a_mouse_why_a_job_is_held_is_asked_read_and_left(show):
    page = show(State(*jobs(3)))
    page.press("Tab")
    page.press("Tab")  # the filter
    for letter in "held":
        page.press(letter)
    until(page, "document.getElementById('filtered').innerText.length > 0")
    page.press("Tab")
    assert focused(page) == "Explain j2"
    page.press("Enter")
    until(page, "document.querySelector('#explanation ul')")
    assert text(page, "#explained").startswith("j2 ")
    inside = [page.evaluate("document.querySelector('#explanation').contains(document.activeElement)")]
    for _ in range(4):  # nothing behind it is reached
        page.press("Tab")
        inside.append(
            page.evaluate("document.activeElement === document.body || !document.activeElement.closest('main')")
        )
    assert all(inside)
    page.press("Escape")
    until(page, "!document.querySelector('#explanation').open")
    assert focused(page) == "Explain j2", "where it was"


def test_a_job_that_ended_or_a_busy_daemon_has_no_explanation_and_the_page_says_so(show):
    page = show(State(*jobs(30)))
    for short, said in (("j4", "no job is called 'j4': it has ended"), ("j9", "the daemon does not answer")):
        page.evaluate(f"explain('{short}')")
        until(page, f"document.querySelector('#explained-text').innerText.includes({said!r})")
        assert f"gpumux jobs explain {short}" in text(page, "#explained-text")


def test_a_daemon_that_is_gone_leaves_nothing_that_looks_like_now(show, serve):
    state = State(*jobs(3))
    page = show(state)
    port = page.evaluate("Number(location.port)")
    serve.stop()
    until(page, "problem")
    seen_at = page.evaluate("clock(seen[seen.length - 1].when)")
    assert "No answer from the daemon." in text(page, "#alert")
    assert "systemctl status 'gpumux@*'" in text(page, "#alert")
    assert text(page, "#summary") == f"? Not known now. At {seen_at}: The promise is BROKEN: j1 serve-1"
    assert text(page, ".mark") == "? BROKEN THEN"
    assert page.evaluate("document.title").startswith("? no answer, ")
    assert violations(page) == []
    serve(State(*jobs(3)), port)
    until(page, "!problem")
    assert not shown(page, "#alert")
    assert page.evaluate("seen.length") <= 2, "what the daemon before did is no part of this one's history"


def test_a_daemon_whose_clock_was_set_back_goes_on_and_has_no_times_that_are_to_come(show):
    state = State(*jobs(3))
    page = show(state)
    state.set_back_s = 3600.0
    until(page, "seen[seen.length - 1].when < 1.7e9")
    look(page, looks=3)
    assert not page.evaluate("problem")
    assert page.evaluate("seen.every((now, i) => i === 0 || now.when > seen[i - 1].when)")
    assert text(page, "#share .legend li:nth-child(2)").split()[-1] == "%"


def test_a_loop_that_stands_still_is_told_from_one_that_goes_on(show):
    state = State(*jobs(3))
    page = show(state)
    state.stands_still = True
    until(page, "problem")
    assert "The daemon's loop stands still." in text(page, "#alert")
    state.stands_still = False
    until(page, "!problem")
    assert text(page, "#summary").startswith("✗ The promise")
    assert not page.evaluate("seen[seen.length - 1].gap"), "it answered all the time"


def test_a_daemon_that_starts_or_leaves_is_called_so(show):
    state = State()
    state.answers = False
    page = show(state, looks=1)
    assert "the daemon is starting" in text(page, "#alert")
    assert "gpumux doctor" in text(page, "#alert")
    assert not shown(page, "#empty")
    assert violations(page) == []
    state.answers = True
    until(page, "!problem")
    assert page.evaluate("seen[0].gap")
    state.leaving = "told to stop"
    until(page, "!document.getElementById('alert').hidden")
    assert text(page, "#alert") == "The daemon is leaving and takes no more work. told to stop"


def test_an_answer_it_can_not_draw_is_said_and_not_hidden(show):
    page = show(State(*jobs(3)))
    page.evaluate("(() => { globalThis.drawTables = () => { throw new Error('no such field') } })()")
    until(page, "problem")
    assert "could not draw the answer. no such field" in text(page, "#alert")
    assert text(page, "#summary") == "? Not known now"
    assert page.evaluate("document.title").startswith("? not known now")


def test_the_browser_lets_it_ask_no_other_host(show):
    page = show(State())
    with pytest.raises(BrowserFailed):
        page.evaluate("fetch('http://127.0.0.2:9/')")
    names = page.evaluate("performance.getEntriesByType('resource').map(each => new URL(each.name).pathname)")
    assert set(names) == {*FILES, "/status.json"} - {"/"}
