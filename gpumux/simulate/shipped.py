"""Profiles by name: those that come with gpumux, and anybody's files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gpumux.errors import ConfigError
from gpumux.program.profile import StepProfile, load


def directory() -> Path:
    """Where the shipped profiles lie."""
    return Path(__file__).parent / "profiles"


def names() -> Sequence[str]:
    """Of the shipped profiles, in order."""
    return sorted(path.stem for path in directory().glob("*.json"))


def find(name: str) -> StepProfile:
    """The shipped profile called `name`, or the file of that path. Raises ConfigError when it is neither."""
    if name in names():
        return load(directory() / f"{name}.json")
    path = Path(name)
    if not path.exists():
        shipped = ", ".join(names())
        raise ConfigError(
            f"{name!r} is neither a file nor a shipped profile",
            f"record one with `gpumux jobs profile`, or choose one of {shipped}",
        )
    return load(path)
