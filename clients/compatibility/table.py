"""The table of docs/compatibility.md, made from the registry: python -m clients.compatibility.table"""

from __future__ import annotations

import sys
from pathlib import Path

from clients.compatibility import themes
from clients.compatibility.suite import REGISTRY, Idiom

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
BEGIN, END = "<!-- idioms -->\n", "<!-- end of idioms -->\n"


def verdict(one: Idiom) -> str:
    if one.differs:
        return f"differs: {one.differs}"
    if one.refused is None:
        return "as written"
    works = "with a change" if one.changed is not None else "refused"
    return f"{works} ({one.refused.__name__}): {one.instead}"


def table() -> str:
    lines = []
    for theme in themes.THEMES:
        rows = [one for one in REGISTRY if one.theme == theme]
        lines += [f"\n## {theme.replace('_', ' ').capitalize()}\n\n| idiom | works |\n|---|---|\n"]
        lines += [f"| {one.title.replace('|', '/')} | {verdict(one)} |\n" for one in rows]
    works = sum(one.works for one in REGISTRY)
    return f"{len(REGISTRY)} idioms, {works} of them work as written.\n" + "".join(lines)


def page() -> str:
    """docs/compatibility.md with the present table."""
    head, _, rest = PAGE.read_text().partition(BEGIN)
    return head + BEGIN + table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page())
    sys.exit(0)
