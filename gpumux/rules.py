"""The tables [access.rules.NAME] of a configuration file as access rules, with every name checked.

    [access.rules.students]
    groups = ["students"]          # names or numbers
    max_priority = "low"
    max_jobs = 2

    [access.rules.default]         # everybody whom no other rule names
    submit = false

A rule is read whole or not at all: an unknown user, group or key would silently leave somebody under another rule.
Groups are those the kernel recorded for a connection, so no directory service is asked while the daemon runs.
"""

from __future__ import annotations

import difflib
import grp
import pwd
import re
from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any

from gpumux.access import DEFAULT, Rule
from gpumux.errors import ConfigError
from gpumux.model import Priority

MAX_RULES = 1024
MAX_ID = 2**32 - 2
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PRIORITIES = {priority.name.lower(): priority for priority in Priority}


def read(tables: Any, where: str) -> tuple[Rule, ...]:
    """The rules in a table of tables, in order. `where` names the file. Raises ConfigError."""
    if not isinstance(tables, dict):
        raise ConfigError(f"{where} must be tables, not {tables!r}", "write [access.rules.NAME] and its settings below")
    if len(tables) > MAX_RULES:
        raise ConfigError(f"{where}: {len(tables)} rules", f"write {MAX_RULES} at most; one can name many users")
    rules = tuple(_rule(name, body, f"{where}.{name}") for name, body in tables.items())
    _nobody_twice(rules, where)
    return rules


def _rule(name: str, body: Any, where: str) -> Rule:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{where}: {name!r} is no name for a rule", "use letters, digits, dots and dashes")
    if not isinstance(body, dict):
        raise ConfigError(f"{where} must be a table, not {body!r}", f"write [access.rules.{name}]")
    for key in body:
        if key not in _READERS:
            near = difflib.get_close_matches(key, _READERS, n=1, cutoff=0.6)
            remedy = f"did you mean {near[0]}?" if near else "a rule has: " + ", ".join(_READERS)
            raise ConfigError(f"{where}: {key} is no setting of a rule", remedy)
    values = {key: _READERS[key](value, f"{where}: {key}") for key, value in body.items()}
    rule = Rule(name, **values)
    named = bool(rule.users or rule.groups or rule.keys)
    if named is (name == DEFAULT):
        who = "is for everybody no other rule names" if named else "names nobody"
        raise ConfigError(f"{where} {who}", "give every rule but `default` users, groups or keys")
    return rule


def _nobody_twice(rules: tuple[Rule, ...], where: str) -> None:
    for kind in ("users", "groups", "keys"):
        seen: dict[Any, str] = {}
        for rule in rules:
            for one in getattr(rule, kind):
                if one in seen:
                    raise ConfigError(
                        f"{where}: {one} stands in the {kind} of both {seen[one]!r} and {rule.name!r}", "keep one"
                    )
                seen[one] = rule.name


def _ids(value: Any, where: str, lookup: Callable[[str], int], what: str) -> frozenset[int]:
    """Names and numbers as ids."""
    found = set()
    for one in _list(value, where):
        if isinstance(one, int) and not isinstance(one, bool) and 0 <= one <= MAX_ID:
            found.add(one)
        elif isinstance(one, str):
            try:
                found.add(lookup(one))
            except (KeyError, ValueError):
                raise ConfigError(
                    f"{where}: there is no {what} {one!r} on this machine",
                    f"mend the name, or write the {what}'s number",
                ) from None
        else:
            raise ConfigError(f"{where}: {one!r} is no {what}", "write names in quotes, or numbers")
    return frozenset(found)


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise ConfigError(f"{where} must be a list, not {value!r}", 'write ["one", "two"]')
    return value


def _users(value: Any, where: str) -> frozenset[int]:
    return _ids(value, where, lambda name: pwd.getpwnam(name).pw_uid, "user")


def _groups(value: Any, where: str) -> frozenset[int]:
    return _ids(value, where, lambda name: grp.getgrnam(name).gr_gid, "group")


def _keys(value: Any, where: str) -> frozenset[str]:
    names = _list(value, where)
    if not all(isinstance(name, str) and name and "/" not in name for name in names):
        raise ConfigError(f"{where} must name key files", 'write ["laptop"] for laptop.key in curve_client_keys')
    return frozenset(name.removesuffix(".key") for name in names)


def _flag(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{where} must be true or false, not {value!r}", "write it without quotes")
    return value


def _priority(value: Any, where: str) -> Priority:
    if not isinstance(value, str) or value not in _PRIORITIES:
        raise ConfigError(f"{where} can't be {value!r}", 'choose "low" or "high"')
    return _PRIORITIES[value]


def _count(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{where} must be a whole number of 1 or more, not {value!r}", "leave it out for no limit")
    return value


def _weight(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value <= 0:
        raise ConfigError(f"{where} must be a number above 0, not {value!r}", "leave it out for no limit")
    return float(value)


_READERS: Mapping[str, Callable[[Any, str], Any]] = {
    "users": _users,
    "groups": _groups,
    "keys": _keys,
    "submit": _flag,
    "max_priority": _priority,
    "max_jobs": _count,
    "max_bytes": _count,
    "max_weight": _weight,
    "operator": _flag,
}
