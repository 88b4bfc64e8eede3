"""The documents: how long architecture.md may be, and that files, modules, tests, headings, options and metrics they
name exist."""

from __future__ import annotations

import contextlib
import io
import re
from functools import cache
from pathlib import Path

import pytest

from gpumux.cli.main import build_parser

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("deploy/**/*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
MAX_WORDS = 4000
ENDINGS = "py|md|toml|json|sh|c|html|yml|yaml|png|txt"
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
# A path with folders, anywhere in the prose, or a bare file name in code; `::` and a test's name may follow.
FOLDERS = re.compile(rf"(?<![\w/.:~{{}}-])((?:[\w.-]+/)+(?:[\w.*-]+\.(?:{ENDINGS}))?)(?:::([\w*]+))?(?![\w/*{{}}-])")
BARE = re.compile(r"`([\w-]+\.(?:py|c))(?:::([\w*]+))?`")
WITHOUT = ("ROOT/", "NAME/", "N/", "OUT/", "DIR/")  # parts of a path that stand for something
# Named where no file of the repository is meant.
ELSEWHERE = {"parallelizationPlanner.py", "train.py"}


def words(text: str) -> int:
    return len(text.split())


@cache
def tracked() -> tuple[Path, ...]:
    """Every file of the repository that a page may name by its bare name."""
    homes = ("gpumux", "tests", "microbench", "clients", "tools", "deploy")
    return tuple(path for home in homes for path in (ROOT / home).rglob("*") if path.is_file())


def places(name: str, page: Path, folders: frozenset[Path] = frozenset()) -> list[Path]:
    """Where a path that a page names lies: from the root, the package or the page's own folder. A bare name may lie in
    any of `folders`."""
    if "/" not in name:
        return [path for path in tracked() if path.name == name and path.parent in folders]
    return [base / name for base in (ROOT, ROOT / "gpumux", page.parent) if (base / name).exists()]


def missing_files(text: str, page: Path) -> set[str]:
    """Paths in the text, but for its blocks of commands, that lead nowhere, and tests that no such file has. A bare
    name has to be in a folder that the same page names, itself or by another file in it."""
    prose = FENCE.sub("", re.sub(r"\w+://\S+|^ {4}.*$", "", text, flags=re.MULTILINE))
    named = [path for name, _ in FOLDERS.findall(prose) for path in places(name, page)]
    folders = frozenset(path if path.is_dir() else path.parent for path in named)
    found = set()
    for pattern in (FOLDERS, BARE):
        for name, test in pattern.findall(prose):
            if name in ELSEWHERE or any(part in name for part in WITHOUT) or name.isupper() or _no_path(name):
                continue
            there = places(name, page, folders)
            if not there:
                found.add(name)
            elif test and not any(_has_test(path, test) for path in there):
                found.add(f"{name}::{test}")
    return found


def _no_path(name: str) -> bool:
    """`read/write` and `1/2/` are no paths: one without an ending has to begin with a folder of the repository."""
    return name.endswith("/") and not any((base / name.split("/")[0]).is_dir() for base in (ROOT, ROOT / "gpumux"))


def _has_test(path: Path, name: str) -> bool:
    return re.search(rf"^def {name.replace('*', '[a-z_0-9]+')}\(", path.read_text(), re.MULTILINE) is not None


def missing_modules(text: str) -> set[str]:
    """Modules behind `python -m` that are not there."""
    named = set(re.findall(r"-m ((?:gpumux|clients|microbench|tests|tools)(?:\.\w+)*)", text))
    return {
        name
        for name in named
        if not (ROOT / f"{name.replace('.', '/')}.py").exists()
        and not (ROOT / name.replace(".", "/") / "__main__.py").exists()
    }


def headings(text: str) -> set[str]:
    """The anchors of a page's headings."""
    titles = re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", title).lower()).replace(" ", "-") for title in titles}


def missing_headings(text: str, page: Path) -> set[str]:
    """Links to headings that the page they lead to does not have."""
    found = set()
    for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", text):
        to = page.parent / target if target else page
        if to.exists() and anchor not in headings(to.read_text()):
            found.add(f"{target}#{anchor}")
    return found


COMMAND = re.compile(r"gpumux (serve|status|top|trace|jobs|doctor|simulate|plan \w+|tune|completion)\b([^`\n#|]*)")


@cache
def help_of(verb: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        build_parser().parse_args([*verb.split(), "--help"])
    return out.getvalue()


def missing_options(text: str) -> set[str]:
    """Options in commands that the command does not have."""
    return {
        f"gpumux {verb} {option}"
        for verb, rest in COMMAND.findall(text.replace("\\\n", " "))
        for option in re.findall(r"(?<![\w-])--[a-z][a-z-]*", rest)
        if not re.search(rf"{option}(?![\w-])", help_of(verb))
    }


NO_METRICS = {"gpumux_version", "gpumux_node", "gpumux_share"}  # a field of the protocol, resources of Ray and of Slurm


def missing_metrics(text: str) -> set[str]:
    """Metrics that neither docs/metrics.md has nor the table of docs/cluster.md, which other tests compare with the
    daemon and the coordinator."""
    known = set(re.findall(r"gpumux_[a-z0-9_]+", (ROOT / "docs/metrics.md").read_text()))
    known |= set(re.findall(r"^\| `(gpumux_[a-z0-9_]+)`", (ROOT / "docs/cluster.md").read_text(), re.MULTILINE))
    return set(re.findall(r"\bgpumux_[a-z0-9_]+\b", text)) - known - NO_METRICS


def test_architecture_can_be_read_in_a_sitting() -> None:
    assert words((ROOT / "docs/architecture.md").read_text()) <= MAX_WORDS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_is_there(page: Path) -> None:
    text = page.read_text()
    assert missing_files(text, page) == set()
    assert missing_modules(text) == set()
    assert missing_headings(text, page) == set()
    assert missing_options(text) == set()
    assert missing_metrics(text) == set()


def test_the_checks_can_fail() -> None:
    page = ROOT / "docs/architecture.md"
    text = (
        "`gpumux/client/nothing.py` beside gpumux/client/job.py, `scheduler/policy.py`, `windows.py`, `nothing.py`,"
        " `fork_server.py`, `gpumux/nowhere/`, `tests/test_docs.py::test_nothing`, `test_docs.py::test_the_checks_*`,"
        " [a](plain-loop.md#nothing), [b](plain-loop.md#between-two-steps) and `python -m microbench.nothing`.\n"
        "```\nnot/a/path.py\n```\n"
        "`gpumux serve --gpu 0 --no-such-option`, `gpumux plan gpus --speedup 3 --slowdown 4`, gpumux_no_metric"
    )
    assert missing_files(text, page) == {
        "gpumux/client/nothing.py", "nothing.py", "fork_server.py", "gpumux/nowhere/",
        "tests/test_docs.py::test_nothing"
    }  # fmt: skip
    assert missing_modules(text) == {"microbench.nothing"}
    assert missing_headings(text, page) == {"plain-loop.md#nothing"}
    assert missing_options(text) == {"gpumux serve --no-such-option", "gpumux plan gpus --slowdown"}
    assert missing_metrics(text) == {"gpumux_no_metric"}
    assert words("four words of text") == 4


def test_it_reads_paths_in_the_pages() -> None:
    """So that a page full of wrong paths can't pass because none is recognised."""
    text = FENCE.sub("", (ROOT / "docs/architecture.md").read_text())
    assert len({name for name, _ in FOLDERS.findall(text)}) > 60


def test_the_tree_has_every_folder() -> None:
    tree = (ROOT / "docs/architecture.md").read_text().split("+---")[0]
    named = set(re.findall(r"(?:^|\s)([a-z]+)/(?=\s)", tree)) - {"gpumux"}
    folders = {path.parent for path in (ROOT / "gpumux").rglob("__init__.py")} - {ROOT / "gpumux"}
    assert named == {path.name for path in folders if path.parent.name != "fuse"}
