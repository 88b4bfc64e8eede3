"""The table of rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from gpumux.fuse.call import Call

Rule: TypeAlias = Callable[[Call], Any]

RULES: dict[str, Rule] = {}
PER_MODEL: dict[str, str] = {}  # operators that run once a model, with the reason


def rule(*targets: str) -> Callable[[Rule], Rule]:
    """Register a rule for operators, as "mm" or "add.Tensor" (no overload: `.default`)."""

    def register(function: Rule) -> Rule:
        for target in map(_full, targets):
            assert target not in RULES, f"two rules for {target}"
            RULES[target] = function
        return function

    return register


def per_model(reason: str, *targets: str) -> None:
    """Let operators run once a model where nothing better is known."""
    for target in map(_full, targets):
        PER_MODEL[target] = reason


def _full(target: str) -> str:
    return f"aten.{target}" if "." in target else f"aten.{target}.default"
