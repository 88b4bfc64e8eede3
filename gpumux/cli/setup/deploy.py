"""`gpumux deploy`: write the files that run gpumux as a service, watch it, or share it among a cluster's users; and the
manual pages."""

from __future__ import annotations

import argparse
import errno
from collections.abc import Mapping
from pathlib import Path

from gpumux.cli.setup import man
from gpumux.cli.setup.installation import deployment_files
from gpumux.cli.text import emit
from gpumux.errors import ConfigError
from gpumux.wording import counted

KINDS = ("systemd", "prometheus", "grafana", "kubernetes", "slurm")
MAN = "man"  # made from the command line and the settings; all else is copied


def run(args: argparse.Namespace) -> int:
    target = Path(args.out)
    if args.kind == MAN:
        content = man.pages(args.parser, args.flags)
        use = f"read them with `man -l {target}/man1/gpumux.1`, or make {target} part of MANPATH"
    else:
        source = deployment_files() / args.kind
        files = sorted(path for path in source.rglob("*") if path.is_file())
        content = {str(path.relative_to(source)): path.read_bytes() for path in files}
        use = f"{target / 'README.md'} has the commands that use them"
    written, same = write({target / name: body for name, body in content.items()}, target, force=args.force)
    for path in written:
        emit(str(path))
    unchanged = f", {len(same)} there already" if same else ""
    emit(f"{counted(len(written), 'file')} written{unchanged}; {use}")
    return 0


def write(content: Mapping[Path, bytes], target: Path, *, force: bool = False) -> tuple[list[Path], list[Path]]:
    """Write files below the directory `target`, made if it is not there; returns (files written, files that were there
    already with the same content).

    Raises ConfigError, before anything is written, if a file is there with other content and not `force`; and if a file
    can't be written."""
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
