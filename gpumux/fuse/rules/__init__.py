"""Rules, by operator name: how one operator runs for all models at once.

A module of this package registers its rules when it is imported; `load` imports them all. Start with `table.py`.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from gpumux.fuse.rules.table import PER_MODEL, RULES, Rule, per_model, rule

__all__ = ["PER_MODEL", "RULES", "Rule", "load", "per_model", "rule"]


def load() -> None:
    for module in iter_modules(__path__):
        import_module(f"{__name__}.{module.name}")
