"""`gpumux deploy`: write the files that run gpumux as a service, watch it, or share it among a cluster's users."""

from __future__ import annotations

import argparse
import errno
from pathlib import Path

from gpumux.cli.setup.installation import deployment_files
from gpumux.cli.text import counted, emit
from gpumux.errors import ConfigError

KINDS = ("systemd", "prometheus", "grafana", "kubernetes", "slurm")


def run(args: argparse.Namespace) -> int:
    written, same = write(deployment_files() / args.kind, Path(args.out), force=args.force)
    for path in written:
        emit(str(path))
    unchanged = f", {len(same)} there already" if same else ""
    readme = Path(args.out) / "README.md"
    emit(f"{counted(len(written), 'file')} written{unchanged}; {readme} has the commands that use them")
    return 0


def write(source: Path, target: Path, *, force: bool = False) -> tuple[list[Path], list[Path]]:
    """Copy the files below `source` into the directory `target`, made if it is not there; returns (files written, files
    that were there already with the same content).

    Raises ConfigError, before anything is written, if a file is there with other content and not `force`; and if a file
    can't be written."""
    files = sorted(path for path in source.rglob("*") if path.is_file())
    content = {target / path.relative_to(source): path.read_bytes() for path in files}
    place = target
    try:
        there = {path: path.read_bytes() for path in content if path.exists()}
        changed = [path for path in there if there[path] != content[path]]
        if changed and not force:
            names = ", ".join(str(path) for path in changed)
            raise ConfigError(f"there already, and different: {names}", "--force replaces them, or write elsewhere")
        written = [path for path in content if path not in there or path in changed]
        for place in written:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content[place])
            if content[place].startswith(b"#!"):
                place.chmod(0o755)  # a wheel need not keep the mode
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "make room, then repeat it with --force" if full else "name a directory that you may write with -o"
        raise ConfigError(f"can't write {error.filename or place}: {error.strerror}", remedy) from error
    return written, [path for path in content if path not in written]
