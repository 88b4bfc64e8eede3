"""What is installed here: another project under the same name, packages that are missing, the files of deploy/.

Imports nothing of gpumux but its errors, so that it also works in an environment where another project has overwritten
`gpumux/__init__.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from gpumux.errors import ConfigError

PACKAGE = Path(__file__).resolve().parents[2]
OTHER = "gpumux"  # what another project on the public index is called; this one is gpumux-torch
COMMAND = "gpumux.cli.main:main"  # what the command `gpumux` of this project runs
MEND = (
    f"pip uninstall {OTHER}, then repeat the installation of this project with --force-reinstall: both write to"
    " the directory gpumux/ and to the command `gpumux`, so that removing one takes files of the other along"
)

# What to install for a module that can't be imported.
REQUIREMENTS = {
    "torch": "torch>=2.11",
    "numpy": "numpy>=1.26",
    "zmq": "pyzmq>=26",
    "msgpack": "msgpack>=1.1",
    "prometheus_client": "prometheus-client>=0.20",
    "safetensors": "safetensors>=0.4",
    "networkx": "networkx>=3",
}


@dataclass(frozen=True, slots=True)
class OtherProject:
    """A distribution called `gpumux` that is not this project."""

    version: str
    summary: str

    def __str__(self) -> str:
        about = f" ({self.summary.rstrip('.')})" if self.summary else ""
        return f"{OTHER} {self.version}{about}, another project"


def other_project(path: Iterable[str] | None = None) -> OtherProject | None:
    """The other project with this one's name, if it is installed. path: where to look, instead of `sys.path`.

    It is told by the command it installs: an older installation of this project has the same name and this command."""
    for found in metadata.distributions(name=OTHER, path=sys.path if path is None else list(path)):
        if not any(each.value == COMMAND for each in found.entry_points):
            return OtherProject(found.version, found.metadata["Summary"] or "")
    return None


def missing(error: ModuleNotFoundError) -> ConfigError | None:
    """The error to report for a module that a command needed, None if it is of no package that gpumux depends on."""
    name = (error.name or "").partition(".")[0]
    if name not in REQUIREMENTS:
        return None
    requirement = REQUIREMENTS[name]
    if error.name != name and find_spec(name) is not None:  # a part of it
        return ConfigError(f"the {name} that is installed here has no {error.name}", f"pip install '{requirement}'")
    return ConfigError(f"{requirement.partition('>')[0]} is not installed", f"pip install '{requirement}'")


def check_torch() -> None:
    """Raise ConfigError if torch is not installed. It is not imported, which takes seconds."""
    if find_spec("torch") is None:
        raise ConfigError("torch is not installed", f"pip install '{REQUIREMENTS['torch']}'")


def deployment_files(package: Path = PACKAGE) -> Path:
    """The directory with the files of deploy/: in the installed package, or beside it in a checkout. Raises
    ConfigError."""
    for found in (package / "deploy", package.parent / "deploy"):
        if (found / "systemd").is_dir():
            return found
    raise ConfigError(
        f"{package} came without the files of deploy/", "repeat the installation, from a wheel or a checkout"
    )
