"""How pictures look: one palette, one set of sizes, one way to write them. matplotlib is an extra, imported when a
picture is made.

The colours are those of Okabe and Ito, which people with any colour vision tell apart. No picture tells by colour
alone: each line has a marker and a dash pattern of its own, each kind of bar a hatch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from gpumux import files
from gpumux.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, VERMILION = "#0072b2", "#e69f00", "#009e73", "#d55e00"
SKY, PURPLE, YELLOW, BLACK = "#56b4e9", "#cc79a7", "#f0e442", "#000000"
GREY = "#555555"
# As `gpumux top` and the status page have them: high work is blue and plain, low work orange and hatched.
HIGH_COLOR, LOW_COLOR, LINE_COLOR = BLUE, ORANGE, GREY
LOW_HATCH = "////"

WIDE, NARROW = 9.0, 6.5  # inches; a page shows the wide ones at four fifths of their size
TEXT, TITLE, DENSE = 9, 10, 8  # points; DENSE where numbers stand close together
DPI = 120


class Look(NamedTuple):
    """How one curve or one kind of bar is drawn."""

    color: str
    marker: str
    dashes: str | tuple[int, tuple[int, ...]]
    hatch: str


LOOKS = (
    Look(BLUE, "o", "-", ""),
    Look(ORANGE, "s", "--", "////"),
    Look(GREEN, "^", "-.", "...."),
    Look(VERMILION, "D", ":", "xxxx"),
    Look(PURPLE, "v", (0, (5, 1, 1, 1, 1, 1)), "\\\\\\\\"),
    Look(SKY, "P", "--", "++++"),
    Look(BLACK, "X", "-", "----"),
    Look(GREY, "*", ":", "oooo"),
)


def figure(width: float, height: float) -> Figure:
    """An empty figure of so many inches. Raises ConfigError if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("pictures need matplotlib", "pip install matplotlib") from None
    return Figure(figsize=(width, height), dpi=DPI, layout="constrained")


def check(path: Path) -> None:
    """Check a picture's path before a long run. Raises ConfigError if `figure` or `save` would."""
    figure(1.0, 1.0)
    files.check_writable(path)


def save(drawn: Figure, path: Path) -> None:
    """Write a PNG, or an SVG where the path ends so, with the same bytes for the same picture. Raises ConfigError if
    the file can't be written."""
    from matplotlib import rc_context

    svg = path.suffix == ".svg"
    try:
        with rc_context({"svg.hashsalt": "gpumux", "svg.fonttype": "none", "hatch.linewidth": 0.6}):
            drawn.savefig(path, format="svg" if svg else "png", metadata={"Date" if svg else "Software": None})
    except OSError as error:
        raise files.not_written(path, error.strerror) from None


def label(axes: Axes, x: str, y: str, title: str = "", *, legend: bool = False) -> None:
    """Names of the axes, each with its unit; the title; a legend of what has a label."""
    axes.set_xlabel(x, fontsize=TEXT)
    axes.set_ylabel(y, fontsize=TEXT)
    if title:
        axes.set_title(title, fontsize=TITLE)
    axes.tick_params(labelsize=TEXT)
    if legend:
        axes.legend(fontsize=TEXT)


def literal(text: str) -> str:
    """Text of users as it is, where matplotlib would take what stands between dollar signs for mathematics."""
    return text.replace("$", r"\$")
