"""What `gpumux top` shows above the table for a moment: keys, an explanation, a question. With Textual."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from gpumux.cli.top.columns import COLUMNS
from gpumux.cli.top.drawing import BEYOND, HIGH, LIMIT, LOW

SCROLLING = (
    Binding("j", "scroll_down", "down", show=False),
    Binding("k", "scroll_up", "up", show=False),
)
KEYS = (
    ("? h", "these keys"),
    ("q, Ctrl-C", "end"),
    ("up down, j k, PgUp PgDn, Home End:", "choose a job"),
    ("e, Enter", "explain it: how it fares, why, and what to do about it"),
    ("p", "pause it, or let it go on"),
    ("P", "make it high or low"),
    ("x", "stop it"),
    ("/", "filter: words of names, ids, priorities, states and promises"),
    ("Esc", "clear the filter"),
    ("< >", "sort by the next column to the left or right"),
    ("r", "sort backwards"),
    ("a click on a title:", "sort by that column, and backwards"),
    ("space", "freeze the table; what is said of promises goes on"),
    ("Ctrl-Z", "back to the shell, until `fg`"),
)
KEY_CELLS = 9  # what stands beside longer ones is further to the right
NOTES = (
    f"Bars: {HIGH} high jobs, {LOW} low ones.",
    f"The chart of slowdown is of the job under the cursor if that is a high one, else of the one that is worst off. "
    f"{LIMIT * 3} is the mean that was promised, {BEYOND} what is beyond.",
    "Jobs of others can't be explained or changed, unless you are an operator.",
    "TEXTUAL_THEME=textual-light is for light terminals, NO_COLOR=1 for none of the colours. With Shift the mouse "
    "selects text.",
)


class TextScreen(ModalScreen[None]):
    """Text that scrolls; any of its keys closes it. text: with the styles of Rich."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,enter,e,question_mark,h", "dismiss", "close")]

    def __init__(self, title: str, text: Text) -> None:
        super().__init__()
        self._title, self._text = title, text

    def compose(self) -> ComposeResult:
        with _Scroll(classes="dialog") as box:
            yield Static(self._text, id="text")
        box.border_title = Text(self._title)  # which is not read as markup
        box.border_subtitle = "Esc closes"


class _Scroll(VerticalScroll):
    BINDINGS: ClassVar[list[BindingType]] = list(SCROLLING)


class ExplainScreen(TextScreen):
    """The explanation of a job, which comes after the screen: `show` takes it. `s` asks for all that is known."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("s", "story", "all of it")]

    def __init__(self, title: str) -> None:
        asking = Text("asking the daemon ...")
        super().__init__(title, asking)
        self._brief = self._whole = asking
        self._is_whole = False

    def show(self, brief: Text, whole: Text) -> None:
        """Show the explanation. whole: with all that is known."""
        self._brief, self._whole = brief, whole
        self._draw()

    def action_story(self) -> None:
        self._is_whole = not self._is_whole
        self._draw()

    def _draw(self) -> None:
        self.query_one("#text", Static).update(self._whole if self._is_whole else self._brief)
        what = "s: in brief" if self._is_whole else "s: all that is known"
        self.query_one(".dialog").border_subtitle = f"{what}, Esc closes"


class ChoiceScreen(ModalScreen[str]):
    """A question whose answers are keys. Dismissed with the chosen one's name, or "" for none.

    choices: (key, name, what it does)."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,n,q", "leave", "no")]

    def __init__(self, title: str, text: str, choices: Sequence[tuple[str, str, str]]) -> None:
        super().__init__()
        self._title, self._text, self._choices = title, text, choices

    def compose(self) -> ComposeResult:
        made = Text(self._text + "\n")
        for key, _, meaning in (*self._choices, ("n", "", "leave it as it is")):
            made.append(f"\n  {key}  ", "bold").append(meaning)
        with _Scroll(classes="dialog question") as box:
            yield Static(made)
        box.border_title = Text(self._title)  # which is not read as markup

    def on_key(self, event: events.Key) -> None:
        for key, name, _ in self._choices:
            if event.key == key:
                event.stop()
                self.dismiss(name)

    def action_leave(self) -> None:
        self.dismiss("")


def help_screen() -> TextScreen:
    """The keys, and what columns and signs mean."""
    text = Text()
    for keys, meaning in (*KEYS, ("", ""), *((column.title, column.meaning) for column in COLUMNS)):
        text.append(keys.ljust(KEY_CELLS), "bold").append(f" {meaning}\n")
    for note in NOTES:
        text.append(f"\n{note}\n")
    text.rstrip()
    return TextScreen("keys", text)
