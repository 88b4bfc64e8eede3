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


def focused(page: Page) -> str:
    """What has the focus, as it is called, and " UNSEEN" if nothing on the screen shows that."""
    return page.evaluate(
        """(e => {
            if (!e || e === document.body) return "";
            const box = e.getBoundingClientRect(), style = getComputedStyle(e);
            const outlined = style.outlineStyle !== "none" && parseInt(style.outlineWidth) >= 2
                && style.outlineColor !== getComputedStyle(document.body).backgroundColor;
            const seen = outlined && box.width > 0 && box.right <= innerWidth
                && box.bottom <= innerHeight + 1 && box.top >= -1;
            return (e.getAttribute("aria-label") || e.id || e.innerText).trim() + (seen ? "" : " UNSEEN");
        })(document.activeElement)"""
    )


def tabbed(page: Page) -> list[str]:
    """What has the focus, Tab by Tab, from where it is until it leaves the page or comes round to the first."""
    found: list[str] = []
    while True:
        page.press("Tab")
        name = focused(page)
        if not name or name in found[:1]:
            return found
        found.append(name)


def reachable(page: Page) -> list[str]:
    """What is to be reached without a mouse, as it is called, in the order in which it stands."""
    found: list[str] = page.evaluate(
        "[...document.querySelectorAll('button, input, summary, a[href], [tabindex]')].filter(e => e.offsetParent)"
        ".map(e => (e.getAttribute('aria-label') || e.id || e.innerText).trim())"
    )
    return found
