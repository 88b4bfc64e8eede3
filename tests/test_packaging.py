"""What a release holds, and what it answers: a source distribution and a wheel are built as for a release, from this
tree and without a network."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from email import message_from_bytes
from email.message import Message
from importlib.util import find_spec
from pathlib import Path

import pytest

from gpumux.cli import doctor
from gpumux.cli.main import build_parser, main
from gpumux.cli.setup import installation
from gpumux.cli.setup.deploy import KINDS

ROOT = Path(__file__).resolve().parent.parent
SITE_PACKAGES = Path(sysconfig.get_path("purelib"))
LIMIT_S = 120


def execute(*command: object, cwd: Path = ROOT, **more: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command], cwd=cwd, capture_output=True, text=True, timeout=LIMIT_S, check=False, **more
    )


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked source distribution."""
    place = tmp_path_factory.mktemp("sdist")
    done = execute(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", place)
    assert done.returncode == 0, done.stderr
    with tarfile.open(next(place.glob("*.tar.gz"))) as archive:
        archive.extractall(place, filter="data")
    (found,) = (path for path in place.iterdir() if path.is_dir())
    return found


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, unpacked, built of the source distribution."""
    place = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "--no-cache-dir"]
    done = execute(*build, "--wheel-dir", place, sdist)
    assert done.returncode == 0, done.stderr
    (file,) = place.glob("gpumux_torch-*.whl")
    zipfile.ZipFile(file).extractall(place / "unpacked")
    return place / "unpacked"


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_the_source_distribution_has_every_file_of_the_repository(sdist: Path) -> None:
    listed = execute("git", "ls-files", "-z")
    if listed.returncode:
        pytest.skip("this is no git checkout")
    tracked = {name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()}
    assert len(tracked) > 500
    assert tracked - files(sdist) == set()
    assert not any("__compiled__" in name or name.endswith((".so", ".pyc")) for name in files(sdist))


def metadata(wheel: Path) -> Message:
    (found,) = wheel.glob("gpumux_torch-*.dist-info/METADATA")
    return message_from_bytes(found.read_bytes())


def test_the_wheel_has_the_package_and_nothing_else(wheel: Path) -> None:
    names = files(wheel)
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"gpumux"}
    modules = {
        str(path.relative_to(ROOT)) for path in (ROOT / "gpumux").rglob("*.py") if "__pycache__" not in str(path)
    }
    assert modules <= names
    page = {f"gpumux/metrics/page/{name}" for name in files(ROOT / "gpumux" / "metrics" / "page")}
    assert {f"gpumux/metrics/page/{name}" for name in ("index.html", "page.js", "uplot/uPlot.iife.min.js")} <= page
    assert "gpumux/metrics/page/uplot/LICENSE" in page
    assert {"gpumux/py.typed", *page, "gpumux/simulate/profiles/vgg16-b4.json"} <= names
    assert not any(name.endswith((".so", ".pyc")) for name in names)  # what `make core` made is for this machine
    (points,) = wheel.glob("*.dist-info/entry_points.txt")
    assert "gpumux = gpumux.cli.main:main" in points.read_text()


def test_the_wheel_says_what_it_is(wheel: Path) -> None:
    said = metadata(wheel)
    assert (said["Name"], said["License-Expression"]) == ("gpumux-torch", "Apache-2.0")
    assert any(name.endswith("licenses/LICENSE") for name in files(wheel))
    assert {"plot", "plan", "tune", "cuda", "compile"} <= set(said.get_all("Provides-Extra", []))


@pytest.mark.parametrize("kind", KINDS)
def test_the_wheel_carries_the_files_that_deploy_writes(kind: str, wheel: Path, tmp_path: Path) -> None:
    found = installation.deployment_files(wheel / "gpumux")
    assert found == wheel / "gpumux" / "deploy"
    assert {name: (ROOT / "deploy" / kind / name).read_bytes() for name in files(ROOT / "deploy" / kind)} == {
        name: (found / kind / name).read_bytes() for name in files(found / kind)
    }


# ---- Without torch: an environment with all that is installed here but torch.


@pytest.fixture(scope="module")
def without_torch(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables of an environment with the wheel and all packages that are installed here, except torch."""
    place = tmp_path_factory.mktemp("packages")
    for path in SITE_PACKAGES.iterdir():
        left_out = ("torch", "functorch", "gpumux", "_gpumux", "__editable__", "__pycache__")
        if not path.name.lower().startswith(left_out) and path.suffix != ".pth":
            (place / path.name).symlink_to(path)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GPUMUX", "PYTHON"))}
    return {**kept, "PYTHONPATH": f"{wheel}:{place}", "XDG_RUNTIME_DIR": str(place / "run")}


def commands(parser: argparse.ArgumentParser, words: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Every command and subcommand of the command line."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        return [words]
    return [found for name, sub in below[0].choices.items() for found in commands(sub, (*words, name))]


# What a command needs beside its name to be asked for something.
ARGUMENTS: dict[str, str] = {
    "trace": "-o trace.json",
    "simulate": "--high vgg16-b4 --steps 5 --warmup 5",
    "plan burst": "vgg16 --gpus 2 --global-batch 8",
    "plan profile": "vgg16 -o profile.json",
    "plan network": "--ranks 2 -o network.json",
    "plan batch": "alexnet --memory 12GB",
    "plan memory": "gpt2 --batch 8",
    "plan gpus": "--speedup 3 --overhead 0.1",
    "plan servers": "--model vgg16 --workers 8 --compute 0.5",
    "tune": "sweep:factory --space space.toml --trials 2 --steps 5",
    "deploy": "systemd -o written",
    "completion": "bash",
    "grants make": "--dir grants pod 25",
    "grants list": "--dir grants",
    "grants release": "--dir grants pod",
    "keys": "laptop",
    "jobs priority": "j1 high",
    "jobs weight": "j1 2",
    "jobs profile": "j1 -o profile.json",
    "cluster up": "none.toml",
    "cluster run": "train.py",
    "cluster explain": "j1",
    "cluster cancel": "j1",
    "cluster drain": "n1",
    **{f"jobs {verb}": "j1" for verb in ("pause", "resume", "stop", "explain")},
}
# Need no torch and no daemon.
ALONE = {
    "version", "simulate", "plan gpus", "completion", "deploy", "config", "keys", "grants make", "grants list",
}  # fmt: skip
NEED_TORCH = {
    "serve", "plan burst", "plan profile", "plan network", "plan batch", "plan memory", "plan servers", "tune",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("command", [" ".join(words) for words in commands(build_parser())])
@pytest.mark.every(9)
def test_without_torch_each_command_answers_or_says_so_in_a_sentence(
    command: str, without_torch: dict[str, str], tmp_path: Path
) -> None:
    words = [*command.split(), *ARGUMENTS.get(command, "").split()]
    done = execute(sys.executable, "-S", "-m", "gpumux", *words, cwd=tmp_path, env=without_torch)
    assert "Traceback" not in done.stderr
    if command in NEED_TORCH:
        assert (done.returncode, done.stderr) == (78, "gpumux: torch is not installed\n  pip install 'torch>=2.11'\n")
    elif command == "doctor":
        assert done.returncode == 1
        assert "torch is not installed" in done.stdout
    elif command in ALONE:
        assert (done.returncode, done.stderr) == (0, "")
    elif command == "grants release":
        assert (done.returncode, done.stderr.splitlines()[0]) == (1, "gpumux: there is no grant pod in grants")
    elif command == "cluster run":
        assert (done.returncode, done.stderr.startswith("gpumux: no coordinator answers at ")) == (1, True)
    elif command == "cluster up":
        assert done.returncode == 78
        assert done.stderr.startswith("gpumux: can't read the cluster's file none.toml")
    else:  # asks a daemon or a coordinator, and there is none
        assert done.returncode == 1
        what = "coordinator" if command.startswith("cluster") else "daemon"
        assert done.stderr.startswith(f"gpumux: no {what} at ")
        assert len(done.stderr.splitlines()) == 2


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("jobs --help", 0, ""),
        ("grants list --dir grants", 0, ""),
        ("status", 78, "gpumux: pyzmq is not installed\n  pip install 'pyzmq>=26'\n"),
    ],
)
def test_without_any_package_too(command: str, code: int, said: str, wheel: Path, tmp_path: Path) -> None:
    """As `pip install --no-deps` leaves it."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("GPUMUX", "PYTHON"))}
    done = execute(
        sys.executable, "-S", "-m", "gpumux", *command.split(), cwd=tmp_path, env={**env, "PYTHONPATH": str(wheel)}
    )
    assert (done.returncode, done.stderr) == (code, said)


def test_what_is_missing_is_named_as_the_project_asks_for_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert sorted(installation.REQUIREMENTS.values()) == sorted(project["dependencies"])
    assert installation.missing(ModuleNotFoundError("x", name="yours")) is None
    part = installation.missing(ModuleNotFoundError("x", name="torch.later"))
    assert part is not None
    assert part.message == "the torch that is installed here has no torch.later"


# ---- Another project with this one's name.


def installed(place: Path, version: str, command: str) -> Path:
    """A directory with a distribution called gpumux that installs `command`."""
    info = place / f"{installation.OTHER}-{version}.dist-info"
    info.mkdir(parents=True)
    summary = "A simple web interface for queueing GPU jobs in the cloud."
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: gpumux\nVersion: {version}\nSummary: {summary}\n")
    (info / "entry_points.txt").write_text(f"[console_scripts]\ngpumux = {command}\n")
    return place


def test_the_doctor_recognises_another_project_with_this_name(tmp_path: Path) -> None:
    place = installed(tmp_path, "1.0.1", "gpumux.gpumux:main")
    found = doctor.distribution([str(place)])
    assert found.level == doctor.FAIL
    assert found.detail.startswith("gpumux 1.0.1 (A simple web interface for queueing GPU jobs in the cloud), another")
    assert "pip uninstall gpumux, then" in found.remedy


def test_an_older_installation_of_this_project_is_not_another_one(tmp_path: Path) -> None:
    assert installation.other_project([str(installed(tmp_path, "0.1.0", installation.COMMAND))]) is None
    assert doctor.distribution([str(tmp_path / "empty")]).level == doctor.OK


def test_a_package_that_the_other_project_has_overwritten_says_so(wheel: Path, tmp_path: Path) -> None:
    place = installed(tmp_path / "place", "1.0.1", "gpumux.gpumux:main")
    (place / "gpumux").mkdir()
    for path in (wheel / "gpumux").iterdir():
        (place / "gpumux" / path.name).symlink_to(path)
    (place / "gpumux" / "__init__.py").unlink()
    (place / "gpumux" / "__init__.py").write_text("")
    done = execute(sys.executable, "-m", "gpumux", "doctor", cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(place)})
    assert done.returncode == 1
    assert done.stderr.startswith("gpumux: gpumux 1.0.1 (A simple web interface")
    assert "pip uninstall gpumux" in done.stderr
    assert "Traceback" not in done.stderr


# ---- Editable installs and type checkers.


@pytest.fixture(scope="module")
def editable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with an editable installation of this tree, and nothing else."""
    place = tmp_path_factory.mktemp("editable")
    script = f"from hatchling.build import build_editable; print(build_editable({str(place)!r}))"
    done = execute(sys.executable, "-c", script)
    assert done.returncode == 0, done.stderr
    venv.create(place / "env", symlinks=True)
    python = place / "env" / "bin" / "python"
    asked = execute(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
    zipfile.ZipFile(place / done.stdout.split()[-1]).extractall(asked.stdout.strip())
    return python


def test_an_editable_installation_is_a_plain_path(editable: Path, tmp_path: Path) -> None:
    (file,) = editable.parents[1].rglob("*gpumux*.pth")
    assert file.read_text().split() == [str(ROOT)]
    done = execute(editable, "-c", "import gpumux; print(gpumux.__file__)", cwd=tmp_path)
    assert done.stdout.strip() == str(ROOT / "gpumux" / "__init__.py"), done.stderr


SCRIPT = """\
import gpumux
from gpumux.client import SubmitOptions

def step(x: int) -> int:
    return x

with gpumux.submit(step, example=(1,), priority='low') as job:
    job.step(1)
    more = job.add(step, example=(1,))
    more(1)
    job.sync()
    stats = job.stats()
    print(stats["exactness"], stats.get("tolerance", {}).get("float32"), stats["steps_done"] + 1)

options: SubmitOptions = {"priority": "high", "max_slowdown": 1.05}
gpumux.submit(step, example=(1,), **options)
"""


STATISTICS = {'stats["steps_done"]': 'stats["step_done"]', 'print(stats["exactness"]': 'print(stats["exact"]'}
OPTIONS = {'"max_slowdown"': '"max_slowdwon"'}


def changed(changes: dict[str, str]) -> str:
    text = SCRIPT
    for right, wrong in changes.items():
        assert right in text
        text = text.replace(right, wrong)
    return text


SCRIPTS: dict[str, tuple[dict[str, str], list[str]]] = {  # what is wrong, and what mypy says of it
    "right": ({}, []),
    "priority": ({"priority='low'": "priority='hgih'"}, ['"priority"']),
    "arguments": ({"job.step(1)": "job.step('1')", "more(1)": "more('1')"}, ['"step"', "Argument 1"]),
    "name": ({"with gpumux.submit(": "with gpumux.sumbit("}, ['"sumbit"']),
    "figures": (STATISTICS, ['"exact"', '"step_done"']),
    "options": (OPTIONS, ['"max_slowdwon"']),
}


@pytest.mark.slow
@pytest.mark.extended
def test_mypy_sees_the_types_through_an_editable_installation(editable: Path, tmp_path: Path) -> None:
    """One run for all scripts, as mypy reads gpumux and torch first."""
    (tmp_path / "mypy.ini").write_text("[mypy]\nstrict = true\nignore_missing_imports = true\n")
    for name, (changes, _) in SCRIPTS.items():
        (tmp_path / f"{name}.py").write_text(changed(changes))
    options = ["--config-file", tmp_path / "mypy.ini", "--cache-dir", tmp_path / "cache"]
    scripts = [f"{name}.py" for name in SCRIPTS]
    done = execute(sys.executable, "-m", "mypy", *options, "--python-executable", editable, *scripts, cwd=tmp_path)
    found: dict[str, list[str]] = {name: [] for name in SCRIPTS}
    for line in done.stdout.splitlines():
        name = line.partition(".py:")[0]
        if name in found and ": error:" in line:
            found[name].append(line)
    for name, (_, errors) in SCRIPTS.items():
        assert len(found[name]) == len(errors), done.stdout + done.stderr
        assert all(what in line for what, line in zip(errors, found[name], strict=True)), found[name]


FRAMEWORK = """\
from gpumux.integrations.huggingface import on_gpumux

on_gpumux(object(), priority="hgih").__class__
"""


@pytest.mark.skipif(find_spec("basedpyright") is None, reason="pip install basedpyright")
def test_pyright_sees_them_too(editable: Path, tmp_path: Path) -> None:
    """As editors have it. One run for all scripts; basedpyright brings the node that it needs."""
    scripts = {
        **{name: changed(changes) for name, (changes, _) in SCRIPTS.items()},
        "key": changed({'stats.get("tolerance", {})': 'stats["tolerance"]'}),
        "framework": FRAMEWORK,
    }
    for name, text in scripts.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "standard"}')
    options = ("--outputjson", "--level", "error", "--pythonpath", editable, "--project", tmp_path)
    done = execute(sys.executable, "-m", "basedpyright", *options, cwd=tmp_path)
    found: dict[str, list[int]] = {name: [] for name in scripts}
    for each in json.loads(done.stdout)["generalDiagnostics"]:
        found[Path(each["file"]).stem].append(each["range"]["start"]["line"])
    lines = SCRIPT.split("\n")
    submitted = lines.index("with gpumux.submit(step, example=(1,), priority='low') as job:")
    (printed,) = [at for at, line in enumerate(lines) if line.startswith("    print(")]
    expected = {
        "right": [],
        "priority": [submitted],
        "arguments": [submitted + 1, submitted + 3],
        "name": [submitted],
        "figures": [printed, printed],
        "key": [printed],  # only there for results that are equivalent
        "options": [printed + 2],
        "framework": [2],
    }
    assert found == expected, done.stdout


# ---- `gpumux deploy`.


@pytest.mark.parametrize("kind", KINDS)
def test_deploy_writes_every_file_of_its_kind(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deploy", kind, "-o", str(tmp_path / "made")]) == 0
    assert files(tmp_path / "made") == files(ROOT / "deploy" / kind)
    assert f"{len(files(tmp_path / 'made'))} files written" in capsys.readouterr().out
    for path in (tmp_path / "made").rglob("*.sh"):
        assert os.access(path, os.X_OK)


def test_deploy_replaces_no_file_that_was_changed_unless_told_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["deploy", "slurm", "-o", str(tmp_path)]
    assert main(command) == 0
    (tmp_path / "gpumux.conf").write_text("PARTITIONS=ours\n")
    (tmp_path / "epilog.sh").unlink()
    capsys.readouterr()
    assert main(command) == 78
    assert f"different: {tmp_path / 'gpumux.conf'}" in capsys.readouterr().err
    assert not (tmp_path / "epilog.sh").exists()  # nothing is written where something is in the way
    assert main([*command, "--force"]) == 0
    assert "2 files written, 6 there already" in capsys.readouterr().out
    assert (tmp_path / "gpumux.conf").read_bytes() == (ROOT / "deploy/slurm/gpumux.conf").read_bytes()


def test_deploy_names_what_it_cannot_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["deploy", "grafana", "-o", str(tmp_path / "file")]) == 78
    assert "can't write" in capsys.readouterr().err
