"""Shape rules that torch's fake execution does not hold but kernels rely on.

Each of these kernels reads past a buffer when a side argument is shorter than the main one says
(measured, or read in the kernel). No torch here.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from gpumux.errors import ProgramError
from gpumux.program.ir import Op, Program, TensorRef, View


def guard(program: Program, op: Op) -> None:
    """Raises ProgramError when `op` breaks such a rule. Kinds of arguments were checked before."""
    rule = _RULES.get(op.target)
    if rule is not None:
        rule([program.views[a.view] if isinstance(a, TensorRef) else a for a in op.args])


def _count(view: View) -> int:
    return prod(view.size)


def _same_size(args: list[object], one: int, other: int) -> None:
    a, b = args[one], args[other]
    if isinstance(a, View) and isinstance(b, View) and a.size != b.size:
        raise ProgramError(f"arguments {one} and {other} differ in size: {a.size} and {b.size}")


def _holds(args: list[object], positions: tuple[int, ...], count: int) -> None:
    for position in positions:
        view = args[position] if position < len(args) else None
        if isinstance(view, View) and _count(view) != count:
            raise ProgramError(f"argument {position} has {_count(view)} elements, the kernel reads {count}")


def _same(one: int, other: int) -> Callable[[list[object]], None]:
    return lambda args: _same_size(args, one, other)


def _channels(data: int, stats: tuple[int, ...]) -> Callable[[list[object]], None]:
    """The tensors at `stats`, where given, hold one number a channel (dimension 1) of `data`."""

    def rule(args: list[object]) -> None:
        view = args[data]
        if isinstance(view, View):
            if len(view.size) < 2:
                raise ProgramError(f"argument {data} has no channels")
            _holds(args, stats, view.size[1])

    return rule


def _layer_norm_backward(args: list[object]) -> None:
    view, normalized = args[1], args[2]
    if isinstance(view, View) and isinstance(normalized, tuple):
        rank = len(normalized)
        if view.size[len(view.size) - rank :] != normalized:
            raise ProgramError(f"the normalized shape {normalized} does not end {view.size}")
        _same_size(args, 0, 1)
        _holds(args, (3, 4), prod(view.size[: len(view.size) - rank]))
        _holds(args, (5, 6), prod(normalized))


def _batch_norm_backward(args: list[object]) -> None:
    _same_size(args, 0, 1)
    training = args[7]
    _channels(1, (2, 5, 6) if training else (2, 3, 4))(args)


def _group_norm_backward(args: list[object]) -> None:
    n, channels, inner, groups = args[5:9]
    if isinstance(n, int) and isinstance(channels, int) and isinstance(inner, int) and isinstance(groups, int):
        _holds(args, (0, 1), n * channels * inner)
        _holds(args, (2, 3), n * groups)
        _holds(args, (4,), channels)


def _group_norm(args: list[object]) -> None:
    n, channels, inner = args[3:6]
    if isinstance(n, int) and isinstance(channels, int) and isinstance(inner, int):
        _holds(args, (0,), n * channels * inner)
        _holds(args, (1, 2), channels)


_RULES: dict[str, Callable[[list[object]], None]] = {
    "aten.max_pool2d_with_indices_backward.default": _same(0, 7),
    "aten.max_pool3d_with_indices_backward.default": _same(0, 7),
    "aten.adaptive_max_pool2d_backward.default": _same(0, 2),
    "aten.adaptive_max_pool3d_backward.default": _same(0, 2),
    "aten.fractional_max_pool2d_backward.default": _same(0, 4),
    "aten.fractional_max_pool3d_backward.default": _same(0, 4),
    "aten.max_unpool2d.default": _same(0, 1),
    "aten.max_unpool3d.default": _same(0, 1),
    "aten.native_layer_norm_backward.default": _layer_norm_backward,
    "aten.native_group_norm.default": _group_norm,
    "aten.native_group_norm_backward.default": _group_norm_backward,
    "aten.native_batch_norm_backward.default": _batch_norm_backward,
    "aten.native_batch_norm.default": _channels(0, (1, 2, 3, 4)),
    "aten._native_batch_norm_legit.default": _channels(0, (1, 2, 3, 4)),
    "aten._native_batch_norm_legit_functional.default": _channels(0, (1, 2, 3, 4)),
    "aten._native_batch_norm_legit_no_training.default": _channels(0, (1, 2, 3, 4)),
    "aten._batch_norm_with_update.default": _channels(0, (1, 2, 3, 4)),
    "aten._batch_norm_no_update.default": _channels(0, (1, 2, 3, 4)),
    "aten.cudnn_batch_norm.default": _channels(0, (1, 2, 3, 4)),
}
