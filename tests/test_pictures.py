"""How pictures look, in one place: told apart by any eye and without colour, and written or refused in one way."""

from __future__ import annotations

import os
import re
from itertools import combinations
from pathlib import Path

import pytest

from gpumux import files, pictures
from gpumux.errors import ConfigError
from microbench import redraw

ROOT = Path(__file__).parents[1]
COLOR = re.compile(r"""["']#[0-9a-fA-F]{6}["']""")
# The screen of `gpumux top` has a theme, and marks what it draws with characters.
OWN_COLORS = {"gpumux/pictures.py", "gpumux/cli/top/app.py"}


def luminance(color: str) -> float:
    """Relative luminance as WCAG has it, 0 to 1."""
    parts = (int(color[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_no_two_looks_differ_by_colour_alone():
    for one, other in combinations(pictures.LOOKS, 2):
        assert one.color != other.color
        assert one.marker != other.marker
        assert (one.dashes, one.hatch) != (other.dashes, other.hatch)


def test_high_and_low_work_differ_in_black_and_white():
    high, low = luminance(pictures.HIGH_COLOR), luminance(pictures.LOW_COLOR)
    assert (low + 0.05) / (high + 0.05) > 2
    assert (1.05) / (high + 0.05) > 4.5, "white text on it is readable"


def test_no_other_module_has_colours_of_its_own():
    modules = [*ROOT.glob("gpumux/**/*.py"), *ROOT.glob("microbench/**/*.py")]
    found = {str(path.relative_to(ROOT)) for path in modules if COLOR.search(path.read_text())}
    assert found - OWN_COLORS == set()
    assert "gpumux/pictures.py" in found, "or nothing would be found anywhere"


def test_a_picture_that_can_not_be_written_is_refused_before_and_after(tmp_path):
    for path in (tmp_path, tmp_path / "none" / "a.png"):
        with pytest.raises(ConfigError, match=f"can't write {path}"):
            pictures.check(path)
        with pytest.raises(ConfigError, match=f"can't write {path}"):
            pictures.save(pictures.figure(1.0, 1.0), path)


def test_text_replaces_a_file_whole_and_leaves_links_and_pipes_what_they_are(tmp_path):
    kept, link, pipe = tmp_path / "kept", tmp_path / "link", tmp_path / "pipe"
    kept.write_text("old")
    link.symlink_to(kept)
    files.check_writable(link)
    files.write_text(link, "new")
    assert link.is_symlink()
    assert kept.read_text() == "new"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    files.check_writable(pipe)
    files.write_text(pipe, "through")
    assert os.read(reader, 10) == b"through"
    os.close(reader)
    assert sorted(os.listdir(tmp_path)) == ["kept", "link", "pipe"]
    with pytest.raises(ConfigError, match="can't write"):
        files.write_text(kept / "below", "new")


def test_the_manual_shows_every_picture_and_each_diagram_can_be_drawn_again(tmp_path, capsys):
    pages = "".join(page.read_text() for page in [ROOT / "README.md", *ROOT.glob("docs/*.md")])
    kept = {path.name for path in (ROOT / "docs/img").iterdir()}
    assert {name for name in kept if f"img/{name})" not in pages} == set()
    assert set(redraw.DRAWN) <= kept
    assert redraw.main(["--out", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == set(redraw.DRAWN)
    assert redraw.main(["--out", str(tmp_path / "none")]) == 78
    assert "there is no directory" in capsys.readouterr().err
