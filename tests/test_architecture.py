"""The shape of the package: which way imports point, what the core may know, how large a module is,
what `import gpumux` costs, and that type information ships."""

from __future__ import annotations

import ast
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import gpumux

ROOT = Path(gpumux.__file__).resolve().parent.parent
PACKAGE = ROOT / "gpumux"
MAX_LINES = 400

# Parts of gpumux, and the parts each may import. An arrow may skip layers, never turn back.
BASE = frozenset(
    {"errors", "model", "access", "config", "hostmemory", "gpumux"}
)  # "gpumux": the package itself, for its version
SHARED = BASE | {"program"}
ARROWS: dict[str, frozenset[str]] = {
    "errors": frozenset(),
    "model": frozenset(),
    "access": frozenset({"errors", "model"}),
    "rules": frozenset({"errors", "model", "access"}),  # names to ids, for the configuration alone
    "config": frozenset({"errors", "model", "access", "rules", "gpumux"}),
    "compiled": frozenset({"errors"}),  # which core runs
    "compile_core": frozenset({"errors", "compiled"}),
    "hostmemory": frozenset({"errors"}),  # what the kernel says, for whoever asks
    "program": BASE,
    "core": SHARED | {"compiled"},
    "wire": SHARED,
    "device": SHARED,
    "metrics": SHARED,
    "recovery": SHARED | {"wire"},  # snapshots on a disk, and the process that writes them
    "daemon": SHARED | {"core", "wire", "device", "metrics", "recovery"},
    "simulate": SHARED | {"core", "device"},
    "plan": SHARED | {"device", "simulate"},  # roofline and pictures
    "cli": SHARED | {"compiled", "core", "wire", "device", "metrics", "recovery", "daemon", "simulate", "plan", "fuse"},
    "client": SHARED | {"wire"},
    "fuse": SHARED
    | {"client", "wire", "device", "simulate"},  # captures and submits as a job does, runs as the device does
    "integrations": SHARED | {"client"},  # training frameworks, each in a module that imports it
    "__main__": frozenset({"cli"}),
    "gpumux": frozenset(),
}

# Imports against the arrows that are meant, each with its reason.
EXCEPTIONS: dict[tuple[str, str], str] = {
    (
        "gpumux.client",
        "gpumux.fuse.submit.submit_array",
    ): "users look for it beside submit; nothing of the client uses it",
}

IMPURE = ("zmq", "torch", "time", "threading", "asyncio", "multiprocessing", "socket", "os", "random", "datetime")


@dataclass(frozen=True)
class Import:
    importer: str  # dotted module
    imported: str  # dotted module
    line: int


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def nodes(source: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(source)))


def imports_of(name: str, source: str, *, is_package: bool) -> list[Import]:
    """Every import of a module, also those inside functions and under TYPE_CHECKING."""
    found = []
    for node in nodes(source):
        if isinstance(node, ast.Import):
            found += [Import(name, alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = name.split(".")[: None if is_package and node.level == 1 else -(node.level - is_package)]
                base = ".".join([*parents, base] if base else parents)
            # `from gpumux.wire import codec` reaches gpumux.wire.codec; a class name does no harm here.
            found += [Import(name, f"{base}.{alias.name}", node.lineno) for alias in node.names]
    return found


@cache
def all_imports() -> list[Import]:
    return [
        found
        for name, path in modules().items()
        for found in imports_of(name, path.read_text(), is_package=path.name == "__init__.py")
    ]


def part(module: str) -> str:
    """`gpumux.core.queue` -> core; `gpumux.__version__` -> gpumux."""
    rest = module.split(".")[1:]
    return rest[0] if rest and rest[0] in ARROWS else "gpumux"


def against_the_arrows(imports: list[Import]) -> list[str]:
    return [
        f"{i.importer}:{i.line} imports {i.imported}"
        for i in imports
        if i.imported.split(".")[0] == "gpumux"
        and part(i.imported) != part(i.importer)
        and part(i.imported) not in ARROWS[part(i.importer)]
        and (i.importer, i.imported) not in EXCEPTIONS
    ]


def impure(imports: list[Import]) -> list[str]:
    return [
        f"{i.importer}:{i.line} imports {i.imported}"
        for i in imports
        if part(i.importer) == "core" and i.imported.split(".")[0] in IMPURE
    ]


def test_imports_follow_the_arrows():
    assert against_the_arrows(all_imports()) == []


def test_the_core_is_pure():
    assert impure(all_imports()) == []


def test_only_the_package_imports_the_module_that_a_users_verb_is_named_after():
    """Whoever imports gpumux.client.submit past the package puts the module where users find the function."""
    direct = [i for i in all_imports() if i.imported.startswith("gpumux.client.submit")]
    assert {i.importer for i in direct if i.imported != "gpumux.client.submit"} == {"gpumux.client"}


def test_every_part_has_its_arrows():
    parts = {name.split(".")[1] for name in modules() if "." in name}
    assert parts <= set(ARROWS)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("gpumux.core.queue", "from gpumux.wire import codec"),
        ("gpumux.core.queue", "def f():\n    import gpumux.daemon.loop"),
        ("gpumux.core.queue", "from ..device import cpu"),
        ("gpumux.client.submit", "from gpumux.core.events import Tick"),
        ("gpumux.wire.router", "from gpumux.daemon import loop"),
        ("gpumux.program.ir", "import gpumux.device.contract"),
        ("gpumux.errors", "from . import model"),
    ],
)
def test_the_arrow_check_can_fail(module: str, source: str):
    assert len(against_the_arrows(imports_of(module, source, is_package=False))) == 1


@pytest.mark.parametrize("name", ["zmq", "torch", "time", "threading"])
def test_the_purity_check_can_fail(name: str):
    source = f"def late():\n    from {name} import something"
    assert len(impure(imports_of("gpumux.core.queue", source, is_package=False))) == 1


def test_modules_stay_readable():
    sizes = {name: len(path.read_text().splitlines()) for name, path in modules().items()}
    assert {name: size for name, size in sizes.items() if size > MAX_LINES} == {}


def test_nothing_pickles_or_evaluates():
    """What a client sends is data: the daemon's side has no way to turn it into code. The client compares pickles, and
    never reads one."""
    calls = []
    reads = []
    for name, path in modules().items():
        for node in nodes(path.read_text()):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "pickle":
                reads += [f"{name}:{node.lineno} {node.attr}"] if node.attr != "dumps" else []
            if isinstance(node, ast.ImportFrom) and node.module == "pickle":
                reads.append(f"{name}:{node.lineno} import from pickle")
            if part(name) == "client":
                continue
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"eval", "exec"}:
                calls.append(f"{name}:{node.lineno} {node.func.id}")
    pickles = [i for i in all_imports() if i.imported.split(".")[0] in {"pickle", "dill", "cloudpickle", "marshal"}]
    assert calls == []
    assert reads == []
    assert [i for i in pickles if part(i.importer) != "client" or i.imported != "pickle"] == []


def loaded_after(code: str) -> set[str]:
    """Top-level modules in a fresh interpreter after `code`."""
    script = f"import sys\n{code}\nprint('|'.join(sorted({{m.split('.')[0] for m in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    return set(done.stdout.strip().splitlines()[-1].split("|"))


def test_import_gpumux_is_light():
    assert not loaded_after("import gpumux") & {"torch", "zmq", "numpy", "prometheus_client"}


def test_the_check_for_light_imports_can_fail():
    assert "json" in loaded_after("import json")


def test_the_client_package_loads_torch_only_when_used():
    assert "torch" not in loaded_after("from gpumux import client")


def test_submit_is_the_function_however_often_it_is_asked_for():
    """It lives in a module of its own name, which Python's import system would put in its place."""
    assert "json" in loaded_after(
        "from gpumux import client\n"
        "assert callable(client.submit) and client.submit is client.submit\n"
        "from gpumux.client import Job, StepFuture, submit\n"
        "assert submit is client.submit\n"
        "import json"
    )


def test_help_is_light():
    code = (
        "import contextlib, io, runpy\n"
        "sys.argv = ['gpumux', '--help']\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as out:\n"
        "    runpy.run_module('gpumux.cli.main', run_name='__main__')\n"
        "assert 'serve' in out.getvalue()"
    )
    assert "torch" not in loaded_after(code)


def test_the_daemon_process_loads_no_torch():
    """The daemon's main process hands torch work to executor processes (DESIGN 6)."""
    daemon = [name for name in modules() if part(name) in {"daemon", "core", "wire", "metrics"}]
    assert "torch" not in loaded_after("import " + ", ".join(daemon))


def test_type_information_ships(tmp_path: Path):
    """A wheel, built as a release would be, carries py.typed, every module, the licence and the command."""
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "--no-cache-dir"]
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (source / name).write_bytes((ROOT / name).read_bytes())
    for path in PACKAGE.rglob("*"):
        if path.is_file() and path.suffix != ".pyc":
            target = source / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    subprocess.run([*build, "--wheel-dir", str(tmp_path), str(source)], check=True, timeout=120)
    (wheel,) = tmp_path.glob("gpumux-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        entry_points = archive.read(next(n for n in names if n.endswith("entry_points.txt"))).decode()
    assert {"gpumux/py.typed", "gpumux/metrics/page.html"} <= names
    assert {str(path.relative_to(ROOT)) for path in modules().values()} <= names
    assert any(name.endswith("LICENSE") for name in names)
    assert not any(name.endswith(".so") for name in names)  # what `make core` made is for this machine
    assert "gpumux = gpumux.cli.main:main" in entry_points
