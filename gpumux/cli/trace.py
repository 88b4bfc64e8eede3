"""`gpumux trace`: record what runs, as a file that Perfetto opens."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gpumux import __version__
from gpumux.cli.chrome import trace
from gpumux.cli.control import Control, Recorded
from gpumux.cli.text import emit, emit_json, printable
from gpumux.errors import GpumuxError
from gpumux.wire.records import PieceRan, WasBanned, WasHeld


def run(args: argparse.Namespace) -> int:
    path = Path(args.out)
    check_writable(path)
    started = time.time()
    with Control(args.endpoint, args.timeout) as control:
        device = f"{control.welcome.device['kind']}, {control.welcome.device['name']}"
        if sys.stderr.isatty():
            sys.stderr.write(f"recording for {args.seconds:g} s; Ctrl-C ends it early\n")
        made = control.record(args.seconds)
    about = {"gpumux": __version__, "device": device, "started (Unix time)": started, "cut": made.reason}
    write(path, trace(made.records, made.seconds, printable(device), about))
    if made.reason:
        sys.stderr.write(f"gpumux: the recording is shorter than asked: {made.reason}\n")
    counts = {
        "pieces": sum(isinstance(record, PieceRan) for record in made.records),
        "held": sum(isinstance(record, WasHeld) for record in made.records),
        "bans": sum(isinstance(record, WasBanned) for record in made.records),
    }
    if args.json:
        emit_json({"file": args.out, "seconds": made.seconds, "cut": made.reason, **counts})
    else:
        emit(describe(made, counts, args.out))
    return 0


def describe(made: Recorded, counts: dict[str, int], out: str) -> str:
    what = f"{counts['pieces']} pieces, {counts['held']} held spans, {counts['bans']} bans in {made.seconds:.2f} s"
    return f"{out}: {what}; open it at https://ui.perfetto.dev"


def check_writable(path: Path) -> None:
    """Before anything is recorded for nothing. Raises GpumuxError."""
    if path.is_dir() or not path.parent.is_dir():
        why = "it is a directory" if path.is_dir() else f"there is no directory {path.parent}"
        raise GpumuxError(f"can't write {path}: {why}", "name a file with -o")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise GpumuxError(f"can't write {path}: no permission", "name another file with -o")


def write(path: Path, content: dict[str, Any]) -> None:
    """All of it or nothing: a viewer that looks meanwhile sees the old file. Raises GpumuxError."""
    if path.exists() and not path.is_file():  # a pipe, or /dev/stdout
        with path.open("w") as out:
            json.dump(content, out, separators=(",", ":"))
        return
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as out:
            try:
                json.dump(content, out, separators=(",", ":"))
                out.flush()
                os.chmod(out.name, 0o666 & ~_umask())
                os.replace(out.name, path)
            except BaseException:
                os.unlink(out.name)
                raise
    except OSError as error:
        raise GpumuxError(f"can't write {path}: {error.strerror}", "name another file with -o") from error


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
