"""`gpumux version`."""

from __future__ import annotations

import argparse
import platform

from gpumux import __version__
from gpumux.cli.text import emit, emit_json
from gpumux.wire.messages import PROTOCOL_VERSION


def run(args: argparse.Namespace) -> int:
    facts = {"gpumux": __version__, "protocol": PROTOCOL_VERSION, "python": platform.python_version()}
    if args.json:
        emit_json(facts)
    else:
        emit(f"gpumux {facts['gpumux']}, protocol {facts['protocol']}, Python {facts['python']}")
    return 0
