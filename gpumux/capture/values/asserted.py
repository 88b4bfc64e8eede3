"""What a plain run checks of values, and a trace over tensors without values can't.

Some checks of torch are operators that return nothing (torch.linalg's, assertions) or read a boolean in Python
(torch.distributions, gaussian_nll_loss). They become conditions on results of the step. one_hot checks its indices only
where it writes ones at them, which it does not do over tensors without values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gpumux.capture.source import calling, user_line, value_check

aten = torch.ops.aten

# Those with which torch's Python reads whether an argument is valid.
_READ = (aten._is_all_true.default, aten._local_scalar_dense.default)

_ASSERTED = {
    aten._linalg_check_errors.default: aten.eq.Scalar,
    aten._assert_async.default: aten.ne.Scalar,
    aten._assert_async.msg: aten.ne.Scalar,
}
_KNOWN = frozenset((*_READ, *_ASSERTED, aten.arange.default, aten.eq.Tensor))

_NOT_DONE = False, None


class AssertedValues:
    """Takes the operators that check values, or compute one_hot, out of a trace. `run`: records an operator of the
    step; `require`: notes a boolean tensor that must be true in every step, and what is wrong if it is not."""

    def __init__(
        self, run: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any], require: Callable[[torch.Tensor, str], None]
    ) -> None:
        self._run, self._require = run, require
        self._classes: tuple[torch.Tensor | None, tuple[int, int]] = None, (0, 0)  # the newest arange, and its call

    def dispatch(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[bool, Any]:
        """Whether the operator was done here, and what it returns."""
        if func not in _KNOWN:
            return _NOT_DONE
        if func is aten.arange.default:
            self._classes = self._run(func, tuple(args), kwargs), calling()
            return True, self._classes[0]
        if func is aten.eq.Tensor:
            if args[1] is not self._classes[0] or self._classes[1] != calling():
                return _NOT_DONE
            return True, self._run(func, (self._looked_up(*args), args[1]), {})
        if func in _ASSERTED:
            good = self._run(_ASSERTED[func], (args[0], 0), {})
            wrong = "an assertion does not hold" + "".join(f": {text}" for text in args[1:])
            if func is aten._linalg_check_errors.default:
                wrong = (
                    f"{args[1]}: the matrix has no such result: it is singular, not positive-definite, or not finite"
                )
            self._require(self._run(aten.all.default, (good,), {}), f"{user_line()}: {wrong}")
            return True, None
        if args[0].dtype != torch.bool or (check := value_check()) is None:
            return _NOT_DONE
        wrong, expected = check
        good = args[0] if expected else self._run(aten.logical_not.default, (args[0],), {})
        self._require(self._run(aten.all.default, (good,), {}), f"{user_line()}: {wrong}")
        return True, torch.tensor(True) if func is aten._is_all_true.default else expected

    def _looked_up(self, source: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        """What one_hot compares with its classes: each index, looked up in the classes. That checks it, and changes
        none that is in range."""
        table = self._run(aten.unsqueeze.default, (classes, 1), {})
        found: torch.Tensor = self._run(
            aten.squeeze.dim, (self._run(aten.embedding.default, (table, source), {}), -1), {}
        )
        return found
