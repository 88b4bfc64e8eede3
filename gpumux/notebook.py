"""Tables that a notebook shows in the place of an object's repr."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape


def facts_table(title: str, facts: Mapping[str, str]) -> str:
    """HTML: the title, and a row for each fact. Whatever the texts hold is shown as it is."""
    rows = "".join(
        f'<tr><th style="text-align: left">{escape(name)}</th><td style="text-align: left">{escape(value)}</td></tr>'
        for name, value in facts.items()
    )
    return f"<table><caption>{escape(title)}</caption>{rows}</table>"
