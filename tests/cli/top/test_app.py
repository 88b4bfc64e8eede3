"""The screen of `gpumux top`, driven by Textual's own pilot: keys, sizes, and a daemon that comes and goes."""

from __future__ import annotations

import asyncio
import re
import signal
from contextlib import asynccontextmanager

import pytest
from textual.widgets import Input, Static

from gpumux.cli.top.app import DARK, LIGHT, JobTable, Told, TopApp
from gpumux.cli.top.dialogs import KEYS, ChoiceScreen, ExplainScreen, TextScreen
from gpumux.cli.top.drawing import STYLES
from gpumux.cli.top.feed import Broke, Lost, StatusAnswer
from gpumux.errors import AdmissionRefused, DaemonGone, UnknownJob

from .bodies import BREAKS, body, job, later

ENDPOINT = "ipc:///run/gpumux/0/gpumux.sock"
CALLED = {
    "question_mark": "?", "slash": "/", "less_than_sign": "<", "greater_than_sign": ">", "escape": "Esc",
    "ctrl+c": "Ctrl-C", "ctrl+z": "Ctrl-Z",
}  # fmt: skip
EXPLAINED = {
    "verdict": "mean 1.04: kept", "causes": ["It is alone."],
    "remedies": [{"text": "wait", "command": "gpumux status"}],
    "sentences": ["All of it."], "story": ["1 s ago it opened"],
}  # fmt: skip


class FakeFeed:
    """Keeps what is asked. `control` notes what questions do to it."""

    def __init__(self):
        self.questions, self.closed, self.calls = [], 0, []

    def start(self, tell):
        self.tell = tell

    def ask(self, question):
        self.questions.append(question)

    def close(self):
        self.closed += 1

    def answer(self):
        """Put the questions, as the daemon would take them."""
        for question in self.questions:
            question.answered(question.put(self))
        self.questions.clear()

    def refuse(self, error):
        for question in self.questions:
            question.refused(error)
        self.questions.clear()

    def change(self, verb, job, drain=False):
        self.calls.append((verb, job, drain))

    def regrade(self, job, priority):
        self.calls.append(("priority", job, priority))

    def explain(self, job):
        self.calls.append(("explain", job))
        return EXPLAINED


class Screen:
    """A running app with what a test needs of it."""

    def __init__(self, app, pilot, feed):
        self.app, self.pilot, self.feed = app, pilot, feed

    async def hear(self, *heard):
        for each in heard:
            self.feed.tell(each)
        await self.pilot.pause()

    async def take(self, *bodies):
        await self.hear(*map(StatusAnswer, bodies))

    async def press(self, *keys):
        await self.pilot.press(*keys)
        await self.pilot.pause()

    async def answer(self):
        self.feed.answer()
        await self.pilot.pause()

    def text(self, name):
        widget = self.app.screen_stack[0].query_one(f"#{name}", Static)
        return widget.content.plain if widget.display else ""

    @property
    def table(self):
        return self.app.screen_stack[0].query_one(JobTable)

    def column(self, title):
        """The cells under a title, from the top."""
        at = [column.label.plain.strip(" ▼▲") for column in self.table.ordered_columns].index(title)
        return [self.table.get_row_at(row)[at].plain.strip() for row in range(self.table.row_count)]

    @property
    def titles(self):
        return [column.label.plain.strip() for column in self.table.ordered_columns]

    @property
    def said(self):
        return [notification.message for notification in self.app._notifications]

    def dialog(self):
        return self.app.screen.query_one(".dialog Static", Static).content.plain


@asynccontextmanager
async def running(*bodies, size=(120, 36), given=None, clock=lambda: 0.0):
    feed = FakeFeed()
    app = TopApp(feed, 2.0, ENDPOINT, given=given, clock=clock)
    async with app.run_test(size=size, notifications=True) as pilot:
        found = Screen(app, pilot, feed)
        await found.take(*bodies)
        yield found
    assert feed.closed == 1


def on_screen(test):
    """A test that is a coroutine."""

    def run(*arguments, **named):
        asyncio.run(test(*arguments, **named))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def jobs(count, high=1):
    return [job(f"j{i}", "high" if i <= high else "low", name=f"sweep-{i}") for i in range(1, count + 1)]


@on_screen
async def test_the_verdict_is_the_first_line_and_changes_with_the_daemon():
    async with running(body()) as screen:
        assert screen.text("headline").startswith(" ✓ PROMISE KEPT: j1 job j1")
        assert screen.text("verdicts").startswith(" ✓ j1 job j1: mean 1.04 of 1.10")
        await screen.take(later(body(jobs=[job("j1", "high", BREAKS)])))
        assert screen.text("headline").startswith(" ✗ PROMISE BROKEN: j1 job j1")
        assert screen.column("PROMISE") == ["tail 2.36 of 1.20 BROKEN"]


@on_screen
async def test_before_the_first_answer_it_says_so():
    async with running() as screen:
        await screen.hear(Lost(DaemonGone("nothing is there", "start one")))
        assert screen.text("headline").startswith(" ✗ NO ANSWER")
        assert "start one" in screen.text("verdicts")
        await screen.press("e", "p", "x", "P", "greater_than_sign", "space", "r")
        assert screen.feed.questions == []


@pytest.mark.parametrize("count", [0, 3, 30, 300])
def test_any_number_of_jobs_is_shown(count):
    @on_screen
    async def test():
        async with running(body(jobs=jobs(count)), size=(80, 24)) as screen:
            assert screen.table.row_count == count
            assert screen.table.display == bool(count)
            assert bool(screen.text("empty")) != bool(count)
            if count:
                assert screen.column("NAME")[:3] == ["sweep-1", "sweep-2", "sweep-3"]
                await screen.press("end")
                assert screen.app.chosen()["name"] == f"sweep-{count}"
                await screen.take(later(body(jobs=jobs(count))))
                assert screen.app.chosen()["name"] == f"sweep-{count}"

    test()


@on_screen
async def test_columns_leave_as_the_terminal_narrows_and_come_back():
    async with running(body()) as screen:
        wide = screen.titles
        await screen.pilot.resize_terminal(40, 24)
        await screen.pilot.pause()
        assert screen.titles == ["JOB", "NAME", "PRIO", "PROMISE"]
        assert screen.table.row_count == 3
        await screen.pilot.resize_terminal(120, 36)
        await screen.pilot.pause()
        assert screen.titles == wide


@pytest.mark.parametrize("size", [(120, 36), (80, 24), (40, 24), (200, 60), (20, 8), (3, 2), (80, 1)])
def test_no_line_is_wider_than_the_terminal(size):
    @on_screen
    async def test():
        async with running(body(), later(body()), size=size) as screen:
            for name in ("headline", "verdicts", "about", "meters", "charts", "notes"):
                assert all(len(line) <= size[0] for line in screen.text(name).splitlines())

    test()


@on_screen
async def test_the_cursor_stays_with_its_job_when_rows_move():
    before = body(jobs=jobs(5))
    async with running(before) as screen:
        await screen.press("down", "j", "k", "down")
        assert screen.app.chosen()["short"] == "j3"
        await screen.take(later(body(jobs=jobs(5)[1:])))
        assert screen.app.chosen()["short"] == "j3"
        await screen.press("greater_than_sign", "r")  # by JOB, backwards
        assert screen.column("JOB") == ["j5", "j4", "j3", "j2"]
        assert screen.app.chosen()["short"] == "j3"
        await screen.take(later(body(jobs=jobs(2)[:1])))
        assert screen.app.chosen()["short"] == "j1"


@on_screen
async def test_sorting_by_keys_and_by_a_click_on_a_title():
    before = body(jobs=jobs(12))
    async with running(before, later(before, j7=(50, 1.0))) as screen:
        assert screen.column("JOB") == [f"j{i}" for i in range(1, 13)]
        await screen.press("comma", "comma", "greater_than_sign", "greater_than_sign", "full_stop", "full_stop")
        assert screen.text("notes") == " by NAME"
        at = screen.titles.index("STEP/S")
        left = sum(column.get_render_width(screen.table) for column in screen.table.ordered_columns[:at])
        await screen.pilot.click(JobTable, offset=(left + 2, 0))
        await screen.pilot.pause()
        assert screen.column("JOB")[0] == "j7"
        assert screen.titles[at] == "STEP/S▼"
        await screen.press("r")
        assert screen.column("JOB")[-1] == "j7"
        assert screen.text("notes") == " by STEP/S, backwards"


@on_screen
async def test_the_filter_takes_letters_that_are_keys_elsewhere_and_escape_clears_it():
    async with running(body(jobs=[*jobs(3), job("j9", name="pixel-qx")])) as screen:
        await screen.press("slash", *"pixel-qx")
        assert screen.column("JOB") == ["j9"]
        assert screen.feed.questions == []
        await screen.press("enter")
        assert not screen.app.query_one("#filter", Input).display
        assert screen.text("notes").startswith(" 'pixel-qx': 1 of 4 jobs")
        await screen.press("slash", "q", "q")
        assert "'qq'" in screen.text("empty")
        await screen.press("escape")
        assert screen.table.row_count == 4
        assert screen.text("notes") == ""


@on_screen
async def test_a_kept_table_stays_and_the_verdict_goes_on():
    before = body()
    async with running(before, later(before, j1=(50, 1.0))) as screen:
        await screen.press("space")
        broken = later(body(jobs=[job("j1", "high", BREAKS), job("j5")]), 4.0)
        await screen.take(broken)
        assert screen.column("JOB") == ["j1", "j2", "j3"]
        assert screen.text("headline").startswith(" ✗ PROMISE BROKEN")
        await screen.press("space")
        assert screen.column("JOB") == ["j1", "j5"]


@pytest.mark.parametrize("key", ["question_mark", "h"])
def test_help_has_the_keys_and_any_of_its_keys_closes_it(key):
    @on_screen
    async def test():
        async with running(body()) as screen:
            await screen.press(key)
            assert isinstance(screen.app.screen, TextScreen)
            shown = screen.dialog()
            assert all(keys in shown and meaning in shown for keys, meaning in KEYS)
            named = set(re.split("[ ,:]+", " ".join(keys for keys, _ in KEYS)))
            for binding in TopApp.BINDINGS:
                assert named & {CALLED.get(each, each) for each in binding.key.split(",")}, binding
            await screen.press("j", "k")
            await screen.press("q")
            assert not isinstance(screen.app.screen, TextScreen)
            assert screen.app.is_running

    test()


@on_screen
async def test_an_explanation_is_that_of_jobs_explain():
    async with running(body()) as screen:
        await screen.press("e")
        assert isinstance(screen.app.screen, ExplainScreen)
        assert "asking" in screen.dialog()
        await screen.answer()
        assert screen.feed.calls == [("explain", "j1" * 16)]
        assert screen.dialog().splitlines() == [
            "j1 job j1 (high): mean 1.04: kept", "", "why", "  It is alone.", "", "what to do", "  wait",
            "    $ gpumux status",
        ]  # fmt: skip
        await screen.press("s")
        assert "  1 s ago it opened" in screen.dialog()
        await screen.press("s", "escape", "enter")
        assert isinstance(screen.app.screen, ExplainScreen)
        screen.feed.refuse(UnknownJob("no such job", "`gpumux jobs` lists them"))
        await screen.pilot.pause()
        assert screen.dialog() == "no such job\n`gpumux jobs` lists them"


@on_screen
async def test_commands_to_paste_name_the_daemon_if_the_user_did():
    async with running(body(), given="ipc:///a b/s.sock") as screen:
        await screen.press("e")
        await screen.answer()
        assert "    $ gpumux status --endpoint 'ipc:///a b/s.sock'" in screen.dialog().splitlines()


@on_screen
async def test_an_explanation_that_comes_too_late_is_dropped():
    async with running(body()) as screen:
        await screen.press("e", "escape")
        await screen.answer()
        assert not isinstance(screen.app.screen, ExplainScreen)


@pytest.mark.every(5)
@pytest.mark.parametrize("name", ["a[/bad] [red]b", "[bold", "\\[x]", "]", "[link=x]"])
def test_names_that_look_like_markup_are_shown_as_they_are(name):
    @on_screen
    async def test():
        async with running(body(jobs=[job("j1", "high", name=name)])) as screen:
            assert screen.column("NAME") == [name]
            await screen.press("x", "escape", "e")
            await screen.answer()
            assert screen.dialog().startswith(f"j1 {name} (high)")
            dialog = screen.app.screen.query_one(".dialog")
            assert dialog._border_title.plain == f"j1 {name}"

    test()


@on_screen
async def test_pause_and_resume():
    async with running(body()) as screen:
        await screen.press("p")
        await screen.answer()
        assert screen.feed.calls == [("pause", "j1" * 16, False)]
        assert screen.said == ["j1 job j1 is paused: p lets it go on"]
        await screen.take(later(body(jobs=[job("j1", "high", paused=True, state="paused")])))
        await screen.press("p")
        await screen.answer()
        assert screen.feed.calls[-1] == ("resume", "j1" * 16, False)


@on_screen
async def test_a_low_job_is_made_high_at_once_and_a_high_one_low_after_a_question():
    async with running(body()) as screen:
        await screen.press("down", "P")
        await screen.answer()
        assert screen.feed.calls == [("priority", "j2" * 16, 1)]
        await screen.press("up", "P")
        assert isinstance(screen.app.screen, ChoiceScreen)
        await screen.press("n")
        assert screen.feed.questions == []
        await screen.press("P", "y")
        await screen.answer()
        assert screen.feed.calls[1:] == [("priority", "j1" * 16, 0)]


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("key", "calls"),
    [("y", [("stop", "j1" * 16, False)]), ("d", [("stop", "j1" * 16, True)]), ("n", []), ("escape", []), ("x", [])],
)
def test_a_job_is_stopped_only_after_a_question(key, calls):
    @on_screen
    async def test():
        async with running(body()) as screen:
            await screen.press("x")
            assert screen.feed.questions == []
            assert "j1 job j1" in screen.dialog()
            await screen.press(key)
            await screen.answer()
            assert screen.feed.calls == calls

    test()


@on_screen
async def test_another_users_job_can_not_be_changed_or_explained():
    async with running(body(jobs=[job("j1", "high", name="", job="", mine=False, uid=9)])) as screen:
        await screen.press("p", "P", "x", "e")
        assert screen.feed.questions == []
        assert screen.said == ["job j1 belongs to user 9: ask its owner, or an operator"] * 4


@on_screen
async def test_a_refusal_is_said_with_its_remedy():
    async with running(body()) as screen:
        await screen.press("p")
        screen.feed.refuse(AdmissionRefused("it [may] not be", "wait"))
        await screen.pilot.pause()
        assert screen.said == ["it [may] not be\nwait"]


@on_screen
async def test_a_daemon_that_goes_and_comes_back():
    now = [0.0]
    async with running(body(), clock=lambda: now[0]) as screen:
        now[0] = 5.0
        await screen.hear(Lost(DaemonGone("no daemon answers", "start one with `gpumux serve`")))
        assert screen.text("headline").startswith(" ✗ NO ANSWER for 5.0s: what stands below was so before")
        assert "gpumux serve" in screen.text("verdicts")
        assert screen.table.row_count == 3
        await screen.take(body())
        assert screen.text("headline").startswith(" ✓ PROMISE KEPT")
        assert "no daemon answers" not in screen.text("verdicts")


@pytest.mark.parametrize("key", ["q", "ctrl+c", "ctrl+q"])
def test_keys_that_end_it(key):
    @on_screen
    async def test():
        async with running(body()) as screen:
            await screen.press(key)
            assert not screen.app.is_running
            assert screen.app.return_code == 0

    test()


@pytest.mark.parametrize("keys", [("slash", "a"), ("question_mark",), ("x",)])
def test_ctrl_c_ends_it_wherever_it_is(keys):
    @on_screen
    async def test():
        async with running(body()) as screen:
            await screen.press(*keys)
            await screen.press("ctrl+c")
            assert not screen.app.is_running

    test()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_end_it_in_order(number):
    @on_screen
    async def test():
        async with running(body()) as screen:
            signal.raise_signal(number)
            while screen.app.is_running:  # the loop takes the signal in its next turns
                await asyncio.sleep(0)
            assert screen.app.return_code == 0

    before = signal.getsignal(number)
    test()
    assert signal.getsignal(number) == before


@on_screen
async def test_a_bug_in_the_feed_ends_it_and_is_kept():
    async with running(body()) as screen:
        bug = ZeroDivisionError()
        await screen.hear(Broke(bug))
        assert screen.app.broke is bug


def test_every_style_has_a_colour_in_dark_and_in_light():
    assert set(DARK) == set(LIGHT) == set(STYLES) - {""}


@on_screen
async def test_light_themes_have_colours_of_their_own():
    async with running(body()) as screen:
        dark = screen.app.screen_stack[0].query_one("#headline", Static).content.spans
        screen.app.theme = "textual-light"
        screen.app.post_message(Told(StatusAnswer(body())))
        await screen.pilot.pause()
        assert screen.app.screen_stack[0].query_one("#headline", Static).content.spans != dark
