"""Support: a real Chromium, for tests of pages."""

from __future__ import annotations

from microbench.browser import BrowserFailed, find
from tests.deploy.packages import install


def chromium() -> str:
    """The path of a Chromium, which is installed where there is none, or skip the test."""
    try:
        return find()
    except BrowserFailed:
        return install("chromium", "chromium")
