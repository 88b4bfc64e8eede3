"""The screen of `gpumux top`, with Textual: a shell around what state.py, panels.py and columns.py say.

The feed's thread posts what it hears as messages; everything else happens in the thread of the screen.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from rich.style import Style
from rich.text import Text
from textual import events, on
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.coordinate import Coordinate
from textual.message import Message
from textual.widgets import DataTable, Footer, Input, Static

from gpumux.cli.control import Control
from gpumux.cli.jobs import explanation
from gpumux.cli.text import printable
from gpumux.cli.top import columns, panels
from gpumux.cli.top.dialogs import ChoiceScreen, ExplainScreen, help_screen
from gpumux.cli.top.drawing import Line, Styled
from gpumux.cli.top.feed import Broke, Heard, Lost, Question, StatusAnswer, StatusSource
from gpumux.cli.top.state import TopState
from gpumux.errors import GpumuxError
from gpumux.types import Priority

LOOK_S = 1.0  # between two looks at how long the daemon has been silent
# Colours that are told apart without red and green (after Okabe and Ito), for dark and for light themes.
DARK = {
    "dim": "#9aa0aa",
    "trend": "#6b7480",
    "bold": "bold",
    "good": "#56c9a5",
    "bad": "bold #ff8a5c",
    "unsure": "#e6c84f",
    "high": "#6cb9f0",
    "low": "#e0a030",
    "limit": "#e6c84f",
    "good banner": "bold #06251b on #3fbf95",
    "bad banner": "bold #2a0d00 on #ff7a45",
    "banner": "bold #10141c on #c4cad4",
}
LIGHT = {
    "dim": "#5c6370",
    "trend": "#8a919c",
    "bold": "bold",
    "good": "#00694c",
    "bad": "bold #b03a00",
    "unsure": "#7a5c00",
    "high": "#005a96",
    "low": "#8f5f00",
    "limit": "#7a5c00",
    "good banner": "bold #ffffff on #00694c",
    "bad banner": "bold #ffffff on #b03a00",
    "banner": "bold #ffffff on #4a5160",
}


class Told(Message):
    """What the feed heard."""

    def __init__(self, heard: Heard) -> None:
        super().__init__()
        self.heard = heard


class Replied(Message):
    """A question was answered: `act` says so on the screen."""

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__()
        self.act = act


class JobTable(DataTable[Text]):
    """Its rows are places, not jobs: what stands at a place changes, so that cursor and scrolling stay."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j", "cursor_down", "down", show=False),
        Binding("k", "cursor_up", "up", show=False),
        Binding("home", "scroll_top", "first", show=False),
        Binding("end", "scroll_bottom", "last", show=False),
    ]


class TopApp(App[None]):
    """feed: asks the daemon; started and closed here. endpoint: what the daemon is called on the screen. given: what
    --endpoint said, for commands to paste. clock: in seconds, rising."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Static { height: auto; width: 100%; text-wrap: nowrap; }
    Screen { background: $background; }
    #charts { margin-bottom: 1; }
    #empty { padding: 1 2; text-wrap: wrap; }
    JobTable { height: 1fr; background: $background; scrollbar-size-vertical: 1; }
    JobTable:focus { background-tint: $foreground 0%; }
    JobTable > .datatable--cursor { background: $primary 35%; color: $foreground; }
    Input { border: none; height: 1; padding: 0 1; }
    ModalScreen { align: center middle; background: $background 60%; }
    .dialog { width: 90%; max-width: 100; height: auto; max-height: 90%; border: round $primary; padding: 0 1;
              background: $surface; scrollbar-size-vertical: 1; }
    .dialog Static { text-wrap: wrap; }
    .question { border: round $warning; max-width: 72; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("question_mark,h", "help", "help", key_display="?"),
        Binding("q", "quit", "end"),
        Binding("ctrl+c", "quit", "end", show=False, priority=True),
        Binding("e", "explain", "explain"),
        Binding("slash", "filter", "filter", key_display="/"),
        Binding("less_than_sign,comma", "sort(-1)", "sort", key_display="<>"),
        Binding("greater_than_sign,full_stop", "sort(1)", "sort", show=False),
        Binding("r", "backwards", "backwards", show=False),
        Binding("space", "freeze", "freeze"),
        Binding("p", "pause", "pause"),
        Binding("P", "priority", "priority", key_display="P"),
        Binding("x", "stop", "stop"),
        Binding("escape", "clear", "clear", show=False),
        Binding("ctrl+z", "suspend_process", "suspend", show=False),
    ]

    def __init__(
        self,
        feed: StatusSource,
        interval_s: float,
        endpoint: str,
        *,
        given: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self.state = TopState(interval_s, clock())
        self.broke: BaseException | None = None  # a bug that ended the feed
        self._feed, self._endpoint, self._given, self._clock = feed, endpoint, given, clock
        self._jobs: list[columns.Job] = []  # of the rows of the table
        self._columns: list[tuple[columns.Column, int]] = []
        self._headings: list[str] = []
        self._cells: list[list[Styled]] = []

    # ---- Beginning and end.

    def compose(self) -> ComposeResult:
        for name in ("headline", "verdicts", "about", "meters", "charts", "notes"):
            yield Static(id=name)
        table = JobTable(
            cursor_type="row", show_row_labels=False, cursor_foreground_priority="renderable", zebra_stripes=False
        )
        yield table
        yield Static(id="empty")
        yield Input(placeholder="filter: words of names, ids, states ...", id="filter")
        yield Footer(compact=True)

    def on_mount(self) -> None:
        self.query_one("#filter").display = False
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self.exit)
        self._feed.start(lambda heard: self.post_message(Told(heard)))
        self.set_interval(LOOK_S, self._look)
        self.query_one(JobTable).focus()

    def on_unmount(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.remove_signal_handler(number)
        self._feed.close()

    # ---- What comes in.

    @on(Told)
    def _told(self, message: Told) -> None:
        heard, now = message.heard, self._clock()
        if isinstance(heard, StatusAnswer):
            self.state.take(heard.body, now, early=heard.early)
        elif isinstance(heard, Lost):
            self.state.lose(heard.error)
        elif isinstance(heard, Broke):
            self.broke = heard.error
            self.exit()
        self.draw()

    @on(Replied)
    def _replied(self, message: Replied) -> None:
        message.act()

    @on(events.Resize)
    def _resized(self) -> None:
        self.call_after_refresh(self.draw)

    def _look(self) -> None:
        if self.state.silent_s(self._clock()) is not None:
            self.draw()

    @on(Input.Changed, "#filter")
    def _filtered(self, event: Input.Changed) -> None:
        self.state.wanted = event.value
        self.draw()

    @on(Input.Submitted, "#filter")
    def _filter_done(self) -> None:
        self._close_filter()

    @on(DataTable.HeaderSelected)
    def _title_clicked(self, event: DataTable.HeaderSelected) -> None:
        self.state.sort_by(self._columns[event.column_index][0].title)
        self.draw()

    @on(DataTable.RowHighlighted)
    def _moved(self) -> None:
        self._draw_charts()

    @on(DataTable.RowSelected)
    def _row_chosen(self) -> None:
        self.action_explain()

    # ---- Drawing.

    def draw(self) -> None:
        """Show the state."""
        if not self.is_running or not self.screen_stack:
            return
        main = self.screen_stack[0]
        width = self.size.width
        state, space = self.state, self._room()
        silent = state.silent_s(self._clock())
        main.query_one("#headline", Static).update(self._text([(panels.headline(state.view, silent, width),)]))
        lines = panels.verdicts(state.view, width, space.verdict_lines) if state.view is not None else []
        if state.lost is not None:
            lines = [*panels.away(state.lost, self._endpoint, width), *lines]
        self._put("verdicts", lines)
        shown = state.shown
        self._put("about", [panels.about(shown, self._endpoint, width)] if shown is not None else [])
        self._put("meters", panels.meters(shown, width, space.meters) if shown is not None else [])
        self._put("notes", panels.notes(state, len(state.rows()), width))
        self._draw_table(width)
        self._draw_charts()

    def _put(self, name: str, lines: Iterable[Line]) -> None:
        found = list(lines)
        widget = self.screen_stack[0].query_one(f"#{name}", Static)
        widget.display = bool(found)
        widget.update(self._text(found))

    def _text(self, lines: Iterable[Line]) -> Text:
        return Text("\n", no_wrap=True).join([self._styled(line) for line in lines])

    def _styled(self, line: Line) -> Text:
        text = Text(no_wrap=True)
        for span in line:
            text.append(span.text, self._style(span.style))
        return text

    def _style(self, name: str) -> Style:
        colours = DARK if self.current_theme.dark else LIGHT
        return Style.parse(colours[name]) if name else Style.null()

    def _draw_charts(self) -> None:
        shown, chosen = self.state.shown, self.chosen()
        short = chosen["short"] if chosen is not None else ""
        found = panels.charts(shown, self.state.history, short, self.size.width, self._room()) if shown else []
        self._put("charts", found)

    def _room(self) -> panels.Room:
        shown = self.state.shown
        return panels.room(*self.size, len(shown["jobs"]) if shown is not None else 0)

    def _draw_table(self, width: int) -> None:
        """Change what changed of the table."""
        table = self.screen_stack[0].query_one(JobTable)
        empty = self.screen_stack[0].query_one("#empty", Static)
        chosen, jobs = self.chosen(), self.state.rows()
        table.display, empty.display = bool(jobs), not jobs
        if not jobs:
            empty.update(Text(panels.nothing(self.state, self._endpoint)))
        shown = self.state.shown
        # The bar beside the table takes a cell, whether or not it is there.
        found = columns.layout(width - 1, shown["jobs"] if shown is not None else [])
        headings = [columns.heading(*each, self.state.sorted_by, self.state.backwards) for each in found]
        if headings != self._headings or found != self._columns:
            table.clear(columns=True)
            for (_, wide), heading in zip(found, headings, strict=True):
                table.add_column(Text(heading), width=wide)
            self._columns, self._headings, self._cells = found, headings, []
        made = [columns.row(job, found, self.state.history.steps) for job in jobs]
        while len(self._cells) > len(made):
            self._cells.pop()
            table.remove_row(str(len(self._cells)))
        for row, cells in enumerate(made):
            if row >= len(self._cells):
                table.add_row(*(self._styled((cell,)) for cell in cells), key=str(row))
                continue
            for column, (cell, before) in enumerate(zip(cells, self._cells[row], strict=True)):
                if cell != before:
                    table.update_cell_at(Coordinate(row, column), self._styled((cell,)))
        self._cells, self._jobs = made, jobs
        if chosen is not None:
            at = next((i for i, job in enumerate(jobs) if job["short"] == chosen["short"]), None)
            if at is not None and at != table.cursor_row:
                table.move_cursor(row=at, scroll=True)

    # ---- The chosen job.

    def chosen(self) -> columns.Job | None:
        """The job under the cursor."""
        row = self.screen_stack[0].query_one(JobTable).cursor_row
        return self._jobs[row] if 0 <= row < len(self._jobs) else None

    def _mine(self) -> columns.Job | None:
        """The chosen job, if it may be changed; otherwise it says why not."""
        job = self.chosen()
        if job is None:
            self.notify("there is no job to choose", severity="warning")
        elif not job["mine"]:
            self.notify(
                f"job {job['short']} belongs to user {job['uid']}: ask its owner, or an operator",
                severity="warning", markup=False,
            )  # fmt: skip
            return None
        return job

    def _ask(
        self, put: Callable[[Control], Any], answered: Callable[[Any], None], refused: Callable[[GpumuxError], None]
    ) -> None:
        """Have the feed put a question; `answered` is called with the result or `refused` with the error, in the
        screen's thread."""
        self._feed.ask(
            Question(
                put,
                lambda answer: self.post_message(Replied(lambda: answered(answer))),
                lambda error: self.post_message(Replied(lambda: refused(error))),
            )
        )

    def _do(self, put: Callable[[Control], None], said: str) -> None:
        """Have the daemon change something, and say so."""
        self._ask(
            put,
            lambda _: self.notify(said, markup=False),
            lambda error: self.notify(_in_words(error), severity="error", markup=False),
        )

    # ---- Keys.

    def action_help(self) -> None:
        self.push_screen(help_screen())

    def action_freeze(self) -> None:
        self.state.freeze()
        self.draw()

    def action_sort(self, step: int) -> None:
        self.state.sort_by_neighbour([column for column, _ in self._columns], step)
        self.draw()

    def action_backwards(self) -> None:
        self.state.backwards = not self.state.backwards
        self.draw()

    def action_filter(self) -> None:
        found = self.query_one("#filter", Input)
        found.display = True
        found.focus()

    def action_clear(self) -> None:
        self.query_one("#filter", Input).value = ""
        self._close_filter()

    def _close_filter(self) -> None:
        self.query_one("#filter").display = False
        self.query_one(JobTable).focus()

    def action_explain(self) -> None:
        job = self._mine()
        if job is None:
            return
        screen = ExplainScreen(_called(job))
        self.push_screen(screen)

        def show(body: dict[str, Any]) -> None:
            if screen.is_attached:
                brief, whole = (explanation(job, body, story=story, endpoint=self._given) for story in (False, True))
                screen.show(self._explained(brief), self._explained(whole))

        def refused(error: GpumuxError) -> None:
            if screen.is_attached:
                screen.show(Text(_in_words(error)), Text(_in_words(error)))

        self._ask(lambda control: control.explain(job["job"]), show, refused)

    def _explained(self, lines: Iterable[str]) -> Text:
        """The lines of an explanation: titles and commands stand out."""
        text = Text()
        for number, line in enumerate(lines):
            style = "high" if line.lstrip().startswith("$ ") else "bold" if number == 0 or line[:1].strip() else ""
            text.append(printable(line) + "\n", self._style(style))
        text.rstrip()
        return text

    def action_pause(self) -> None:
        job = self._mine()
        if job is None:
            return
        verb, said = ("resume", "goes on") if job["paused"] else ("pause", "is paused: p lets it go on")
        self._do(lambda control: control.change(verb, job["job"]), f"{_called(job)} {said}")

    def action_priority(self) -> None:
        """Make the job high or low; a high one only after a question, since its promise ends."""
        job = self._mine()
        if job is None:
            return
        new = Priority.LOW if job["priority"] == "high" else Priority.HIGH

        def change(answer: str | None) -> None:
            if answer:
                name = new.name.lower()
                self._do(
                    lambda control: control.regrade(job["job"], priority=int(new)), f"{_called(job)} is {name} now"
                )

        if new is Priority.HIGH:
            change("high")
            return
        text = f"{_called(job)} is high. As a low job it has no promise and is held back for the sake of high ones."
        self.push_screen(ChoiceScreen("make it low?", text, [("y", "low", "make it low")]), change)

    def action_stop(self) -> None:
        job = self._mine()
        if job is None:
            return
        waiting = job["queued"] + job["running"]
        text = (
            f"{_called(job)}. Its state in the daemon is lost, but for what its program has fetched or a snapshot "
            f"keeps. Steps that are not answered yet: {waiting}."
        )

        def stop(answer: str | None) -> None:
            if answer:
                self._do(
                    lambda control: control.change("stop", job["job"], drain=answer == "drain"), f"{_called(job)} stops"
                )

        choices = [("y", "now", "stop it now: those steps fail"), ("d", "drain", "answer those steps first, then stop")]
        self.push_screen(ChoiceScreen("stop this job?", text, choices), stop)


def _called(job: columns.Job) -> str:
    return f"{job['short']} {printable(job['name'])[:32]}".rstrip()


def _in_words(error: GpumuxError) -> str:
    return printable(error.message) + (f"\n{printable(error.remedy)}" if error.remedy else "")
