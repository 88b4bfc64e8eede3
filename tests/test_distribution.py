"""What is installed under which name: the package and the command are gpumux, the distribution is not, as another
project has that name on the public index. So nothing may tell people to install that one."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
THIS = Path(__file__).resolve()
NAME = "gpumux-torch"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# What a checkout holds beside its own files.
OTHERS = {".git", ".venv", "build", "dist", "shared", "results", "node_modules", "__pycache__", "__compiled__"}
OTHERS |= {".mypy_cache", ".ruff_cache", ".hypothesis", ".pytest_cache"}  # hundreds of megabytes that tools made
INSTALLS = re.compile(r"\binstall\b([^\n`#;&|]*)")
OTHER_PROJECT = re.compile(r"gpumux(\[.*)?([<>=!~@].*)?", re.S)
EXTRA_OF_IT = re.compile(r"gpumux(?<![\w/-]gpumux)\\?\[")  # in a regular expression as well
LOOKS_IT_UP = re.compile(r"""(?:version|metadata|distribution|requires|files)\(\s*["']gpumux["']""")


def offences(text: str) -> list[str]:
    """Where a text installs or looks up the distribution of the other project."""
    if "gpumux" not in text:
        return []
    patterns = (EXTRA_OF_IT, LOOKS_IT_UP) if re.search("""["']gpumux["']""", text) else (EXTRA_OF_IT,)
    found = [match[0] for pattern in patterns for match in pattern.finditer(text)]
    for line in text.splitlines() if "install" in text else ():
        for match in INSTALLS.finditer(line):
            if re.search(r"\b(pip\d?|uv|pipx|tool|PIP)\b", line[: match.start()]):
                words = re.split(r"""[\s,"'()]+""", match[1])
                found += [f"install {word}" for word in words if OTHER_PROJECT.fullmatch(word.rstrip(".:"))]
    return found


def texts() -> Iterator[tuple[Path, str]]:
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in OTHERS and not name.endswith(".egg-info")]
        for path in (Path(folder, name) for name in names):
            try:
                text = path.read_text()
            except (UnicodeDecodeError, OSError):
                continue  # a picture, or a socket
            if path != THIS:
                yield path.relative_to(ROOT), text


def test_nothing_tells_people_to_install_another_project() -> None:
    read = list(texts())
    assert len(read) > 500
    assert {str(path): found for path, text in read if (found := offences(text))} == {}


@pytest.mark.parametrize(
    "text",
    [
        "pip install gpumux",
        "see `pip install gpumux`.",
        "pip install 'gpumux[plot]' here",
        "pictures need gpumux[plot]",
        "RUN pip install --no-cache-dir gpumux==0.1.0 && rm -rf /src",
        'subprocess.run([sys.executable, "-m", "pip", "install", "-U", "gpumux"])',
        "uv pip install gpumux>=0.2",
        "$(PIP) install gpumux",
        'importlib.metadata.version("gpumux")',
    ],
)
def test_what_does_is_found(text: str) -> None:
    assert offences(text)


@pytest.mark.parametrize(
    "text",
    [
        f"pip install {NAME}[plot]",
        f"pip install '{NAME}>=0.1'",
        "$ pip install -e .      # it puts gpumux on PATH",
        "pip install 'mypy>=2' setuptools && python -m gpumux.compile_core",
        "/opt/gpumux/bin/pip install '.[compile]' && /opt/gpumux/bin/python -P -m gpumux.compile_core",
        "install -d -o gpumux -g gpumux -m 2770 /run/gpumux/0",
    ],
)
def test_what_does_not_is_not(text: str) -> None:
    assert not offences(text)


def test_the_package_and_the_command_are_gpumux_and_the_distribution_has_its_own_name() -> None:
    assert PROJECT["name"] == NAME
    assert PROJECT["scripts"] == {"gpumux": "gpumux.cli.main:main"}


def test_extras_that_name_others_name_this_distributions() -> None:
    extras = PROJECT["optional-dependencies"]
    own = [asked for wanted in extras.values() for asked in wanted if asked.startswith("gpumux")]
    assert own
    for asked in own:
        match = re.fullmatch(rf"{NAME}\[([\w,]+)\]", asked)
        assert match is not None, asked
        assert set(match[1].split(",")) <= extras.keys()
