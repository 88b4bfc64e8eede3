"""The shape of the package: which way imports point, what the scheduler may know, how large a module is,
and what `import gpumux` costs."""

from __future__ import annotations

import ast
import gc
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import gpumux

ROOT = Path(gpumux.__file__).resolve().parent.parent
PACKAGE = ROOT / "gpumux"
MAX_LINES = 1000

MAX_MODULES = 15  # directly in a folder
SMALL = 60  # lines; a smaller module that one other in its folder imports, and nothing else, belongs into it

# Parts of gpumux, and the parts each may import. An arrow may skip layers, never turn back.
BASE = frozenset(
    {"errors", "types", "access", "config", "files", "hostmemory", "pictures", "wording", "gpumux"}
)  # "gpumux": the package itself, for its version
SHARED = BASE | {"program"}
ARROWS: dict[str, frozenset[str]] = {
    "errors": frozenset(),
    "types": frozenset(),
    "wording": frozenset(),
    "access": frozenset({"errors", "types"}),
    "config": frozenset({"errors", "types", "access", "wording", "gpumux"}),
    "compiled": frozenset({"errors"}),  # whether the scheduler runs compiled
    "compile_core": frozenset({"errors", "compiled"}),
    "files": frozenset({"errors"}),
    "hostmemory": frozenset({"errors"}),
    "pictures": frozenset({"errors", "files"}),
    "notebook": frozenset(),
    "program": frozenset({"errors", "types", "files"}),
    "scheduler": frozenset({"errors", "types", "access", "compiled", "wording"}),
    "cluster": frozenset({"errors", "types", "wording"}),
    "wire": frozenset({"errors", "types", "hostmemory", "gpumux"}),
    "metrics": frozenset({"errors", "types", "gpumux"}),
    "device": SHARED,
    "daemon": SHARED | {"scheduler", "wire", "device", "metrics"},
    "coordinator": SHARED | {"access", "cluster", "wire", "client", "daemon", "metrics"},
    "simulate": SHARED | {"scheduler", "device"},
    "plan": SHARED | {"device", "simulate", "fuse"},  # roofline and pictures; a captured step
    "capture": SHARED,
    "burst": SHARED | {"capture"},
    "waves": SHARED | {"capture"},
    "client": SHARED | {"capture", "wire", "burst", "waves", "notebook"},
    # captures and submits as a job does, runs as the device does
    "fuse": SHARED | {"capture", "client", "wire", "device", "notebook"},
    "tune": SHARED | {"client", "fuse", "simulate"},
    "cli": SHARED | {"compiled", "wire", "device", "daemon", "simulate", "plan", "tune", "coordinator"},
    # training frameworks, each in a module that imports it; names of the daemons on Ray's nodes
    "integrations": SHARED | {"client", "wire", "coordinator"},
    "__main__": frozenset({"cli", "gpumux"}),
    "gpumux": frozenset(),
}

# Imports against the arrows that are meant, each with its reason.
EXCEPTIONS: dict[tuple[str, str], str] = {
    (
        "gpumux.client",
        "gpumux.fuse.job.submit_array",
    ): "users look for it beside submit; nothing of the client uses it",
    ("gpumux.client.recovery", "gpumux.fuse.replay.GroupReplay"): "loaded where a job comes back that ran in a group",
} | {
    ("gpumux", f"gpumux.{name}"): "names for users and type checkers, loaded at first use"
    for name in (
        "client",
        "fuse",
        "client.future.StepFuture",
        "client.job.Job",
        "client.submit.submit",
        "fuse.job.submit_array",
    )
}

CLIENT = {"client", "capture"}
PURE = {"scheduler", "cluster"}
IMPURE = ("zmq", "torch", "time", "threading", "asyncio", "multiprocessing", "socket", "os", "random", "datetime")


@dataclass(frozen=True)
class Import:
    importer: str  # dotted module
    imported: str  # dotted module
    line: int


@cache
def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def nodes(source: str) -> tuple[ast.AST, ...]:
    """The module, and all that is in it."""
    return tuple(ast.walk(ast.parse(source)))


@pytest.fixture(scope="module", autouse=True)
def million_nodes() -> Iterator[None]:
    """Of all modules, kept while these tests run. To look for garbage among them takes longer than to make them."""
    gc.disable()
    yield
    nodes.cache_clear()
    gc.enable()


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
    """`gpumux.scheduler.jobs` -> scheduler; `gpumux.__version__` -> gpumux."""
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
        if part(i.importer) in PURE and i.imported.split(".")[0] in IMPURE
    ]


def test_imports_follow_the_arrows():
    assert against_the_arrows(all_imports()) == []


def test_the_scheduler_and_the_placement_are_pure():
    assert impure(all_imports()) == []


def test_only_the_package_imports_the_module_that_a_users_verb_is_named_after():
    """An import of gpumux.client.submit past the package would put the module where users find the function. The one in
    gpumux is read by type checkers alone."""
    direct = [i for i in all_imports() if i.imported.startswith("gpumux.client.submit.")]
    assert {i.importer for i in direct} == {"gpumux", "gpumux.client"}


def test_every_part_has_its_arrows():
    parts = {name.split(".")[1] for name in modules() if "." in name}
    assert parts <= set(ARROWS)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("gpumux.scheduler.jobs", "from gpumux.wire import codec"),
        ("gpumux.scheduler.jobs", "def f():\n    import gpumux.daemon.loop"),
        ("gpumux.scheduler.jobs", "from ..device import cpu"),
        ("gpumux.client.submit", "from gpumux.scheduler.events import Tick"),
        ("gpumux.wire.router", "from gpumux.daemon import loop"),
        ("gpumux.program.ir", "import gpumux.device.base"),
        ("gpumux.errors", "from . import types"),
    ],
)
def test_the_arrow_check_can_fail(module: str, source: str):
    assert len(against_the_arrows(imports_of(module, source, is_package=False))) == 1


@pytest.mark.parametrize("name", ["zmq", "torch", "time", "threading"])
def test_the_purity_check_can_fail(name: str):
    source = f"def late():\n    from {name} import something"
    for module in ("gpumux.scheduler.jobs", "gpumux.cluster.placement"):
        assert len(impure(imports_of(module, source, is_package=False))) == 1


def test_modules_stay_readable():
    sizes = {name: len(path.read_text().splitlines()) for name, path in modules().items()}
    assert {name: size for name, size in sizes.items() if size > MAX_LINES} == {}


def folders() -> dict[str, list[str]]:
    """Modules that lie directly in each package, by its name."""
    found: dict[str, list[str]] = {}
    for name, path in modules().items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        found.setdefault(package, []).extend([name] if path.name != "__init__.py" else [])
    return found


def test_folders_stay_readable():
    assert {name: len(found) for name, found in folders().items() if len(found) > MAX_MODULES} == {}


# Small modules with one importer in their folder that are meant, each with its reason.
SMALL_ALONE: dict[str, str] = {}


def too_small(imports: list[Import], sizes: dict[str, int]) -> set[str]:
    """Modules under SMALL lines that only one module imports, which lies in the same folder."""
    importers: dict[str, set[str]] = {}
    for found in imports:
        target = found.imported if found.imported in sizes else found.imported.rpartition(".")[0]
        if target in sizes and target != found.importer:
            importers.setdefault(target, set()).add(found.importer)
    return {
        name
        for name, by in importers.items()
        if sizes[name] < SMALL and len(by) == 1 and {b.rpartition(".")[0] for b in by} == {name.rpartition(".")[0]}
    }


def test_no_small_module_serves_its_neighbour_alone():
    sizes = {name: len(path.read_text().splitlines()) for name, path in modules().items() if path.name != "__init__.py"}
    assert too_small(all_imports(), sizes) == set(SMALL_ALONE)


def test_the_check_for_small_modules_can_fail():
    there = [Import("gpumux.wire.codec", "gpumux.wire.bits.pack", 1), Import("gpumux.cli.main", "gpumux.wire.codec", 1)]
    sizes = {"gpumux.wire.codec": SMALL - 1, "gpumux.wire.bits": SMALL - 1, "gpumux.cli.main": SMALL - 1}
    assert too_small(there, sizes) == {"gpumux.wire.bits"}  # codec's importer lies elsewhere
    assert too_small(there, {**sizes, "gpumux.wire.bits": SMALL}) == set()


def test_every_folder_says_what_lives_there():
    """In at most ten lines."""
    said = {name: ast.get_docstring(ast.parse(modules()[name].read_text())) or "" for name in folders()}
    assert {name for name, text in said.items() if not text or len(text.splitlines()) > 10} == set()


# Modules that import each other for types alone; none may be added.
CYCLES: set[frozenset[str]] = set()


def cycles(imports: list[Import]) -> set[frozenset[str]]:
    """Groups of modules each of which reaches all others by imports, those for types counted."""
    known = set(modules())
    graph: dict[str, set[str]] = {}
    for found in imports:
        whole, name = found.imported, found.imported.rpartition(".")[0]
        target = whole if whole in known else name
        if target in known and target != found.importer and modules()[target].name != "__init__.py":
            graph.setdefault(found.importer, set()).add(target)

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        todo = [start]
        while todo:
            for other in graph.get(todo.pop(), ()):
                if other not in seen:
                    seen.add(other)
                    todo.append(other)
        return seen

    reach = {name: reached(name) for name in graph}
    return {
        frozenset(other for other in reach[name] if name in reach.get(other, ()))
        for name in graph
        if name in reach[name]
    }


def test_no_imports_in_circles():
    assert cycles(all_imports()) == CYCLES


def test_the_check_for_circles_can_fail():
    there = [Import("gpumux.errors", "gpumux.types.JobId", 1), Import("gpumux.types", "gpumux.errors.GpumuxError", 1)]
    assert cycles(there) == {frozenset({"gpumux.errors", "gpumux.types"})}


def _is_private(name: str) -> bool:
    """Names such as `__version__` are public."""
    return name.startswith("_") and not name.startswith("__")


def private(name: str, source: str) -> set[str]:
    """Private names of our modules that this one imports, or takes as an attribute of a module it imports."""
    known = set(modules())
    bound, found = {}, set()
    for each in imports_of(name, source, is_package=False):
        if each.imported in known:
            bound[each.imported.rpartition(".")[2]] = each.imported
        elif each.imported.startswith("gpumux.") and _is_private(each.imported.rpartition(".")[2]):
            found.add(f"{name}: {each.imported}")
    for node in nodes(source):
        if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in bound):
            continue
        if _is_private(node.attr):
            found.add(f"{name}: {bound[node.value.id]}.{node.attr}")
    return found


def test_no_module_reaches_for_anothers_private_names():
    found = set().union(*(private(name, path.read_text()) for name, path in modules().items()))
    assert found == set()


def test_the_check_for_private_names_can_fail():
    assert private("gpumux.cli.main", "from gpumux.errors import _secret")
    assert private("gpumux.cli.main", "from gpumux import errors\nerrors._secret()")


# Private names that other packages give to their objects.
FOREIGN = {
    "_buffers", "_cudnn_rnn", "_exit", "_fields", "_is_view", "_modules", "_parameters", "_storage", "_values",
    "_version",
}  # fmt: skip


def owned(source: str) -> set[str]:
    """Private names that a module defines: functions, classes, fields, and attributes of its own objects."""
    found = set()
    for node in nodes(source):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node):
            found.add(node.attr)
    return {name for name in found if _is_private(name)}


def is_own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def is_torchs(node: ast.expr) -> bool:
    """Whether it is an attribute of torch or of a module of torch."""
    return (
        is_torchs(node.value) if isinstance(node, ast.Attribute) else isinstance(node, ast.Name) and node.id == "torch"
    )


def private_attributes(sources: dict[str, str]) -> set[str]:
    """Private attributes of objects whose class is in another module: `job._remote` outside client/job.py."""
    owners = {name: owned(source) for name, source in sources.items()}
    known = set[str]().union(*owners.values()) - FOREIGN
    return {
        f"{name}: .{node.attr}"
        for name, source in sources.items()
        for node in nodes(source)
        if isinstance(node, ast.Attribute) and node.attr in known - owners[name]
        if not (is_own(node) or is_torchs(node))
    }


def test_no_module_reaches_into_anothers_objects():
    assert private_attributes({name: path.read_text() for name, path in modules().items()}) == set()


def test_the_check_for_private_attributes_can_fail():
    job = "class Job:\n    def __init__(self): self._remote = 1"
    assert private_attributes({"job": job, "array": "def f(job): return job._remote"}) == {"array: ._remote"}
    assert private_attributes({"job": job + "\ndef f(job): return job._remote"}) == set()


def twice(sources: list[str]) -> set[str]:
    seen: set[str] = set()
    again: set[str] = set()
    for source in sources:
        tree = nodes(source)[0]
        assert isinstance(tree, ast.Module)
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                (again if node.name in seen else seen).add(node.name)
    return again


def test_no_public_class_has_its_name_twice():
    assert twice([path.read_text() for path in modules().values()]) == set()


def test_the_check_for_names_can_fail():
    assert twice(["class A: ...", "class A: ...", "class B: ..."]) == {"A"}


MAX_POSITIONAL = 4


def positional(sources: list[str]) -> set[str]:
    """Classes whose `__init__` takes more than MAX_POSITIONAL arguments by position."""
    return {
        node.name
        for source in sources
        for node in nodes(source)
        if isinstance(node, ast.ClassDef)
        for method in node.body
        if isinstance(method, ast.FunctionDef)
        and method.name == "__init__"
        and len(method.args.posonlyargs + method.args.args) - 1 > MAX_POSITIONAL
    }


def test_constructors_of_many_arguments_take_them_by_name():
    assert positional([path.read_text() for path in modules().values()]) == set()


def test_the_check_for_constructors_can_fail():
    few = "class A:\n    def __init__(self, a, b, c, d, *, e): ..."
    many = "class B:\n    def __init__(self, a, b, c, d, e): ..."
    assert positional([few, many]) == {"B"}


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
            if part(name) in CLIENT:
                continue
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"eval", "exec"}:
                calls.append(f"{name}:{node.lineno} {node.func.id}")
    pickles = [i for i in all_imports() if i.imported.split(".")[0] in {"pickle", "dill", "cloudpickle", "marshal"}]
    assert calls == []
    assert reads == []
    assert [i for i in pickles if part(i.importer) not in CLIENT or i.imported != "pickle"] == []


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
    """The daemon's main process hands torch work to executor processes."""
    daemon = [name for name in modules() if part(name) in {"daemon", "scheduler", "wire", "metrics"}]
    assert "torch" not in loaded_after("import " + ", ".join(daemon))
