"""How a command says that it was used or configured wrongly. A daemon that is to log JSON says so as a line of its log:
whoever collects the log would not find it otherwise, and what reads it could not parse it."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpumux.config import ENV_CONFIG
from gpumux.errors import GpumuxError

EX_USAGE = 64


class WrongUsage(SystemExit):
    """Wrong on the command line. `usage` is what would be right, "" if the error alone says it."""

    def __init__(self, command: str, message: str, remedy: str = "", usage: str = "") -> None:
        super().__init__(EX_USAGE)
        self.command = command
        self.message = message
        self.remedy = remedy
        self.usage = usage


def say(error: WrongUsage | GpumuxError, argv: Sequence[str]) -> None:
    """On stderr, in the form that the daemon's log would have."""
    if log_format(argv, os.environ) == "json":
        from gpumux.daemon import logs

        logs.set_up("info", "json")
        text = f"{error.message} — {error.remedy}" if error.remedy else error.message
        logging.getLogger("gpumux.daemon").error("%s", text)
        return
    said = f"{error.usage}{error.command}: error" if isinstance(error, WrongUsage) else "gpumux"
    remedy = f"\n  {error.remedy}" if error.remedy else ""
    sys.stderr.write(f"{said}: {error.message}{remedy}\n")


def log_format(argv: Sequence[str], environ: Mapping[str, str]) -> str:
    """What `gpumux serve` was asked to log, as far as that can be told from sources that hold a mistake; else "text"."""
    if argv[:1] != ["serve"]:
        return "text"
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--log-format")
    parser.add_argument("--config")
    try:
        flags, _ = parser.parse_known_args(argv)
    except (argparse.ArgumentError, SystemExit):
        return "text"
    given = flags.log_format or environ.get("GPUMUX_LOG_FORMAT")
    path = flags.config or environ.get(ENV_CONFIG)
    if given is None and path:
        try:
            table = tomllib.loads(Path(path).read_text(encoding="utf-8")).get("daemon")
        except (OSError, ValueError):  # which may be the mistake
            return "text"
        given = table.get("log_format") if isinstance(table, dict) else None
    return given if isinstance(given, str) else "text"
