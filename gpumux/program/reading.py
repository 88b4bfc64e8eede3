"""Reads JSON files that users may have edited: every mistake is a ConfigError that names the place and the remedy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpumux.errors import ConfigError

MAX_FILE_BYTES = 256 << 20


def read_text(path: Path, what: str) -> str:
    """A file's text. what: what the file should hold, as in "a profile". Raises ConfigError."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB", f"name {what}")
        return path.read_text()
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not text", f"name {what}") from None
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}", f"give the path of {what}") from None


def header(
    text: str, kind: str, version: int, units: Mapping[str, str], remedy: str, what: str = "profile"
) -> dict[str, Any]:
    """The JSON map in `text`, if its format, version and units are these. what: what the file should hold. Raises
    ConfigError."""
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not JSON: {error}", remedy) from None
    if not isinstance(body, dict) or body.get("format") != kind:
        raise ConfigError(f"this is no {what}", f'a {what} says "format": "{kind}"; {remedy}')
    if body.get("version") != version:
        raise ConfigError(
            f"a {what} of version {body.get('version')!r}, and this gpumux reads {version}",
            f"use the gpumux that made it, or make it again: {remedy}",
        )
    if body.get("units") != units:
        raise ConfigError(f"units {body.get('units')!r}", f"this gpumux reads {units}")
    return body


def same_keys(where: str, body: Mapping[str, object], wanted: set[str], remedy: str) -> None:
    """Check that exactly these keys are there. Raises ConfigError."""
    unknown, missing = sorted(set(body) - wanted), sorted(wanted - set(body))
    if unknown:
        raise ConfigError(f"{where} has the unknown key {unknown[0]!r}", f"its keys are {', '.join(sorted(wanted))}")
    if missing:
        raise ConfigError(f"{where} lacks {missing[0]!r}", remedy)


def text(where: str, value: object) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{where} is {value!r}", "give a string")
    return value


def whole(where: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{where} is {value!r}", "give a whole number")
    return value


def flag(where: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{where} is {value!r}", "give true or false")
    return value


def number(where: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{where} is {value!r}", "give a number")
    try:
        return float(value)
    except OverflowError:
        raise ConfigError(f"{where} is beyond what a float holds", "give a smaller number") from None


def items(where: str, value: object) -> list[Any]:
    if not isinstance(value, list):
        raise ConfigError(f"{where} is {value!r}", "give a list")
    return value


def names(where: str, value: object) -> dict[str, str]:
    """A map of names to versions."""
    if not isinstance(value, dict):
        raise ConfigError(f"{where} is {value!r}", "give a map of names to versions")
    return {name: text(f"{where}.{name}", each) for name, each in value.items()}
