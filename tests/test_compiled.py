"""The choice of the core: compiled modules are used only with these sources and this interpreter."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpumux import compiled
from gpumux.cli import doctor as checks
from gpumux.errors import ConfigError

COMPILED = {"GPUMUX_CORE": "compiled"}
INTERPRETED = {"GPUMUX_CORE": "interpreted"}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """gpumux' sources, as in a tree in which nothing was compiled."""
    made = tmp_path / "gpumux"
    shutil.copytree(compiled.PACKAGE, made, ignore=shutil.ignore_patterns("__pycache__", "__compiled__"))
    return made


def make(package: Path) -> Path:
    """An empty directory, of the right name."""
    directory = package / "scheduler" / "__compiled__" / compiled.name(compiled.sources(package))
    directory.mkdir(parents=True)
    return directory


def test_without_a_compiled_scheduler_it_is_interpreted_and_nothing_is_wrong(package: Path) -> None:
    found = compiled.choose({}, package)
    assert (found.kind, found.directory, found.remedy) == ("interpreted", None, "")
    (package / "scheduler" / "__compiled__").mkdir()
    (package / "scheduler" / "__compiled__" / ".lock").touch()
    assert compiled.choose({}, package) == found
    with pytest.raises(ConfigError, match=r"was not compiled.*python -P -m gpumux.compile_core"):
        compiled.choose(COMPILED, package)


def test_one_of_these_sources_is_used_unless_it_is_not_to_be(package: Path) -> None:
    directory = make(package)
    for environ in ({}, COMPILED):
        found = compiled.choose(environ, package)
        assert (found.kind, found.directory, found.remedy) == ("compiled", directory, "")
    found = compiled.choose(INTERPRETED, package)
    assert (found.kind, found.remedy) == ("interpreted", "")


@pytest.mark.parametrize("path", ["scheduler/jobs.py", "scheduler/explain.py", "types.py", "compile_core.py"])
def test_a_change_of_any_source_leaves_what_was_compiled_unused(package: Path, path: str) -> None:
    make(package)
    with (package / path).open("a") as file:
        file.write("# changed\n")
    found = compiled.choose({}, package)
    assert found.kind == "interpreted"
    assert "other sources" in found.why
    assert "compile_core" in found.remedy
    with pytest.raises(ConfigError, match="other sources"):
        compiled.choose(COMPILED, package)


def test_a_new_file_is_a_change_and_a_touched_one_is_none(package: Path) -> None:
    directory = make(package)
    (package / "scheduler" / "jobs.py").touch()
    assert compiled.choose({}, package).directory == directory
    (package / "scheduler" / "another.py").touch()
    assert compiled.choose({}, package).directory is None


def test_one_for_another_interpreter_is_not_used(package: Path) -> None:
    make(package).rename(package / "scheduler" / "__compiled__" / "cpython-39-x86_64-linux-gnu-0123")
    found = compiled.choose({}, package)
    assert found.kind == "interpreted"
    assert compiled.tag() in found.why
    assert found.remedy


def test_another_word_is_an_error(package: Path) -> None:
    with pytest.raises(ConfigError, match=r"'fast'.*compiled or interpreted"):
        compiled.choose({"GPUMUX_CORE": "fast"}, package)


@pytest.mark.parametrize(
    ("environ", "level", "words"),
    [({}, checks.OK, "compiled"), (INTERPRETED, checks.OK, "GPUMUX_CORE"), ({"GPUMUX_CORE": "x"}, checks.FAIL, "'x'")],
)
def test_the_doctor_says_which(
    environ: dict[str, str], level: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    found = checks.core()
    # After a change of the core the compiled modules are out of date, and an error says so.
    assert found.level == level or (not environ and found.level == checks.WARN and found.remedy)
    assert words in found.detail


def run(package: Path, code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, cwd=package.parent, env=environ, capture_output=True, text=True, timeout=60, check=False
    )


def test_modules_come_from_there_first_and_the_others_from_the_sources(package: Path) -> None:
    made = make(package)
    (made / "explain.py").write_text("compiled = True\n")  # stands for an extension module
    (made / "together__mypyc.py").touch()  # and this for the library
    code = (
        "from gpumux.scheduler import explain, jobs, RUNS; print(RUNS.kind, hasattr(explain, 'compiled'),"
        " jobs.__file__)"
    )
    assert run(package, code).stdout.split() == ["compiled", "True", str(package / "scheduler" / "jobs.py")]
    assert run(package, code, **INTERPRETED).stdout.split()[:2] == ["interpreted", "False"]


def test_a_daemon_that_is_to_be_compiled_and_can_not_be_says_what_to_do(package: Path) -> None:
    code = "import sys; from gpumux.cli.main import main; sys.exit(main(['serve', '--device', 'sim']))"
    done = run(package, code, **COMPILED)
    assert done.returncode == 78
    assert "python -P -m gpumux.compile_core" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_was_compiled_and_is_damaged_is_reported(package: Path) -> None:
    (make(package) / f"together__mypyc{compiled.SUFFIX}").write_bytes(b"no library")
    code = "import sys; from gpumux.cli.main import main; sys.exit(main(['serve', '--device', 'sim']))"
    done = run(package, code)
    assert done.returncode == 78
    assert "can't be loaded" in done.stderr
    assert "--force" in done.stderr
    assert "Traceback" not in done.stderr
    found = run(package, "from gpumux.cli import doctor; print(doctor.core().level, doctor.FAIL)").stdout.split()
    assert found[0] == found[1]


def test_help_works_whatever_the_scheduler_is(package: Path) -> None:
    code = "import sys; from gpumux.cli.main import main; sys.exit(main(['--help']))"
    assert run(package, code, **COMPILED).returncode == 0
