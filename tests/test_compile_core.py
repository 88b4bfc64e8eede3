"""The build of the compiled core: what it needs, says and leaves. Whether it works, `make core` and
tests/scheduler/test_compiled_is_equal.py show."""

from __future__ import annotations

import ast
import errno
import os
import shutil
import sysconfig
from pathlib import Path

import pytest

from gpumux import compile_core, compiled
from gpumux.errors import BuildFailed
from tests import test_architecture


@pytest.fixture
def package(tmp_path: Path) -> Path:
    made = tmp_path / "gpumux"
    shutil.copytree(compiled.PACKAGE, made, ignore=shutil.ignore_patterns("__pycache__", "__compiled__"))
    return made


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretends that all tools are there."""
    monkeypatch.setattr(compile_core, "_tools", lambda: (["cc"], []))


def _source(module: str) -> Path:
    return (compiled.PACKAGE / "scheduler").joinpath(*module.split(".")).with_suffix(".py")


def test_what_is_compiled_is_there_and_all_it_is_made_with_is_looked_at() -> None:
    scheduler = compiled.PACKAGE / "scheduler"
    core = {".".join(path.relative_to(scheduler).with_suffix("").parts) for path in scheduler.rglob("*.py")}
    assert set(compile_core.MODULES) <= core
    imports = [
        found.imported.split(".")
        for path in scheduler.rglob("*.py")
        for found in test_architecture.imports_of(f"gpumux.scheduler.{path.stem}", path.read_text(), is_package=False)
    ]
    beside = {names[1] for names in imports if names[0] == "gpumux"} - {"scheduler"}
    assert "types" in beside
    assert beside <= set(compiled.BESIDE)


def test_what_may_return_a_value_says_so_where_it_is_compiled() -> None:
    """mypyc takes the end of a function with a result to be unreachable: reaching it is undefined. mypy finds all such
    functions except for bodies that are only a docstring, which return None in Python."""
    found = []
    for module in compile_core.MODULES:
        nodes = list(ast.walk(ast.parse(_source(module).read_text())))
        protocols = [n for n in nodes if isinstance(n, ast.ClassDef) and "Protocol" in map(ast.unparse, n.bases)]
        never_run = {id(node) for protocol in protocols for node in protocol.body}
        for node in nodes:
            if (
                id(node) not in never_run
                and isinstance(node, ast.FunctionDef)
                and "abstractmethod" not in map(ast.unparse, node.decorator_list)
                and ast.unparse(node.returns or ast.Constant(None)) != "None"
            ):
                body = [line for line in node.body if not isinstance(line, ast.Pass)]
                if all(isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant) for line in body):
                    found.append(f"{module}.{node.name}")
    assert found == []


def test_numbers_of_modules_that_are_compiled_are_final() -> None:
    """So they are part of the machine code; others are looked up by name each time, a tenth of the guard's time."""
    found = []
    for name in compile_core.MODULES:
        for node in ast.parse(_source(name).read_text()).body:
            if isinstance(node, ast.Assign):
                value = node.value.operand if isinstance(node.value, ast.UnaryOp) else node.value
                if isinstance(value, ast.Constant) and type(value.value) in (int, float):
                    found.append(f"{name}.py, line {node.lineno}")
    assert found == [], "say NAME: Final = …"


@pytest.mark.parametrize(
    ("without", "says"),
    [
        ("mypyc", ["pip install"]),
        ("cc", ["C compiler"]),
        ("headers", ["python3-dev"]),
        ("libc", ["limits.h: No such file", "libc6-dev"]),
    ],
)
def test_without_a_tool_it_stays_interpreted_and_a_line_says_why(
    without: str,
    says: list[str],
    package: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(compiled, "PACKAGE", package)
    monkeypatch.setattr(compile_core, "find_spec", lambda name: None if name == without else "there")
    monkeypatch.setattr(shutil, "which", lambda name: None if without == "cc" else name)
    include = tmp_path / "include"
    include.mkdir()
    if without != "headers":
        (include / "Python.h").touch()
    compiler = tmp_path / "cc-without-libc"
    compiler.write_text("#!/bin/sh\necho trial.c:1:\necho 'fatal error: limits.h: No such file'\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(include))
    assert compile_core.main(["--optional"]) == 0
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "interpreted" in said
    assert all(part in said for part in says)
    assert compile_core.main([]) == 1
    assert capsys.readouterr().err == said
    assert compiled.choose({}, package).directory is None


@pytest.mark.usefixtures("tools")
def test_a_full_disk_is_reported_in_a_line(
    package: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "made.so")

    monkeypatch.setattr(compiled, "PACKAGE", package)
    monkeypatch.setattr(compile_core, "_translate_and_compile", fail)
    assert compile_core.main(["--optional"]) == 1, "an error, not a tool that is missing"
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "made.so: No space left on device" in said
    assert "MB" in said


@pytest.mark.usefixtures("tools")
def test_an_unchanged_core_is_not_compiled_again_and_a_changed_one_replaces_it(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []

    def compile_it(files: dict[str, bytes], work: Path, target: Path, compiler: list[str], headers: list[str]) -> None:
        assert b"class Job" in files["scheduler/jobs.py"]
        target.mkdir()
        made.append(target)

    monkeypatch.setattr(compile_core, "_translate_and_compile", compile_it)
    place = package / "scheduler" / "__compiled__"
    (place / ".new-killed" / "work").mkdir(parents=True)
    (place / "cpython-39-x86_64-linux-gnu-0123").mkdir()
    fresh, first = compile_core.build(package)
    assert fresh
    assert compile_core.build(package) == (False, first)
    assert compiled.choose({}, package).directory == first
    assert compile_core.build(package, force=True) == (True, first)
    (package / "scheduler" / "explain.py").write_text("# changed\n")
    fresh, second = compile_core.build(package)
    assert fresh
    assert sorted(os.listdir(place)) == sorted([".lock", "cpython-39-x86_64-linux-gnu-0123", second.name])
    assert len(made) == 3


@pytest.mark.usefixtures("tools")
@pytest.mark.parametrize("error", [BuildFailed("cc failed"), KeyboardInterrupt()])
def test_a_build_that_fails_leaves_nothing(
    package: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(files: dict[str, bytes], work: Path, target: Path, *rest: object) -> None:
        work.mkdir()
        raise error

    monkeypatch.setattr(compile_core, "_translate_and_compile", fail)
    with pytest.raises(type(error)):
        compile_core.build(package)
    assert os.listdir(package / "scheduler" / "__compiled__") == [".lock"]


def test_what_a_tool_says_that_fails_is_told(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_core, "_tools", lambda: (["false"], []))
    with pytest.raises(BuildFailed, match="one_thing is wrong"):
        compile_core._run(["sh", "-c", "echo one_thing is wrong; exit 3"])


def test_a_directory_that_can_not_be_written_is_an_error_with_a_remedy(package: Path) -> None:
    shutil.rmtree(package / "scheduler")
    (package / "scheduler").touch()  # not even root can make a directory in it
    with pytest.raises(BuildFailed, match=r"can't write.*user gpumux was installed by"):
        compile_core.build(package)
