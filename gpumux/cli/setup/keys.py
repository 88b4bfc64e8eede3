"""`gpumux keys`: make a pair of CURVE keys, for a client or a daemon that is reached over TCP."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from gpumux.cli.text import emit
from gpumux.errors import ConfigError
from gpumux.wire.peers import make_keys

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def run(args: argparse.Namespace) -> int:
    if not NAME.fullmatch(args.name):
        raise ConfigError(
            f"{args.name!r} is no name for a key",
            "use letters, digits, dots, dashes and underscores, and begin with one of the first two",
        )
    place = Path(args.out)
    there = [str(path) for path in (place / f"{args.name}.key", place / f"{args.name}.key_secret") if path.exists()]
    if there:
        raise ConfigError(f"there already: {' and '.join(there)}", "choose another name, or remove the old key first")
    try:
        public, secret = make_keys(place, args.name)
    except OSError as error:
        raise ConfigError(f"can't write {error.filename or place}: {error.strerror}", "name another -o DIR") from error
    emit(f"{secret}  for its holder alone: a client's GPUMUX_CURVE_KEY, a daemon's curve_secret_key")
    emit(f"{public}  for the other side: into a daemon's curve_client_keys, or a client's GPUMUX_CURVE_SERVER")
    return 0
