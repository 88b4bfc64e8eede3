"""Support: a real Chromium, and axe-core, which finds what keeps people from using a page.

axe-core (MPL-2.0) is fetched by the tests and is no part of the repository: it is larger than the package's pages
together, and only tests need it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from microbench.browser import BrowserFailed, Page, find
from tests.deploy.packages import install, npm

AXE = (
    "axe-core",
    "4.14.1",
    "sha512-FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ==",
)


def chromium() -> str:
    """The path of a Chromium, which is installed where there is none, or skip the test."""
    try:
        return find()
    except BrowserFailed:
        return install("chromium", "chromium")


def until(page: Page, condition: str, limit_s: float = 60.0) -> None:
    """Wait until a JavaScript expression is true. Raises BrowserFailed if it does not become so."""
    page.evaluate(
        f"""new Promise((done, failed) => {{
            const end = Date.now() + {1000 * limit_s};
            (function again() {{
                if ({condition}) done(true);
                else if (Date.now() > end) failed(new Error("not true in time"));
                else setTimeout(again, 20);
            }})();
        }})"""
    )


@cache
def _axe() -> str:
    return (npm(*AXE) / "axe.min.js").read_text()


def violations(page: Page) -> list[Any]:
    """What axe-core has against the page as it is now: [rule, where] each."""
    if page.evaluate("typeof axe") == "undefined":
        page.evaluate(f"{_axe()};undefined")
    found: list[Any] = page.evaluate(
        "axe.run(document, {resultTypes: ['violations']}).then(result => result.violations.map(each =>"
        " [each.id, each.nodes.map(node => node.target.join(' ') + ': ' + node.failureSummary).slice(0, 3)]))"
    )
    return found


def outside(page: Page) -> list[Any]:
    """What lies outside the window to the right, so that one would have to scroll sideways."""
    found: list[Any] = page.evaluate(
        "[...(document.scrollingElement.scrollWidth > innerWidth ? ['the page'] : []), ..."
        "[...document.querySelectorAll('body *')].filter(e => e.getBoundingClientRect().right > innerWidth + 0.5"
        " && !e.closest('.unseen')).map(e => `${e.tagName} ${e.id} ${e.className} ${e.textContent.slice(0, 30)}`)]"
    )
    return found
