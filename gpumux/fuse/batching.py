"""The default for operators without a rule: torch.func's batching of the one operator.

Its slow fallback, a loop over the models, is turned off, so that what torch can't batch is refused here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gpumux.fuse.call import Call, Operand, flat
from gpumux.fuse.emit import Declined
from gpumux.program.ir import ScalarRef


@contextmanager
def _no_fallback() -> Iterator[None]:
    functorch: Any = torch._C._functorch
    before = functorch._is_vmap_fallback_enabled()
    functorch._set_vmap_fallback_enabled(False)
    try:
        yield
    finally:
        functorch._set_vmap_fallback_enabled(before)


def batched(call: Call) -> Any:
    """The operator's result, model dimension first. One that writes in place and can't be batched so is done apart, and what
    comes out is copied to where it writes. Raises Declined."""
    call.same_numbers()
    if any(isinstance(v, ScalarRef) for v in flat(call.args)):
        raise Declined("it takes a number that is another at every step")
    try:
        return _batched(call, call.func)
    except Declined:
        apart = _out_of_place(call)
        if apart is None:
            raise
    place = call.written[0].all()
    return place.copy_(_batched(call, apart))


def _out_of_place(call: Call) -> Any:
    """The operator that makes a new tensor where this one writes to its first argument, and to nothing else."""
    if not call.name.endswith("_") or len(call.written) != 1:
        return None
    packet = getattr(torch.ops.aten, call.name.removesuffix("_"), None)
    found = None if packet is None else getattr(packet, call.target.split(".")[2], None)
    names = [a.name for a in call.func._schema.arguments]
    return found if found is not None and [a.name for a in found._schema.arguments] == names else None


def _batched(call: Call, func: Any) -> Any:
    stacked: list[torch.Tensor] = []

    def put(operand: Operand) -> Any:
        if operand.alike:
            return operand.one()
        stacked.append(operand.all())
        return _Hole(len(stacked) - 1)

    holes = call.filled(put)
    spread: list[Any] = []  # what the operator returned, tensors replaced by their number

    def one(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        args = _fill(holes, given)
        schema = func._schema
        positional = [args[a.name] for a in schema.arguments if not a.kwarg_only]
        named = {a.name: args[a.name] for a in schema.arguments if a.kwarg_only and args[a.name] != a.default_value}
        out = func(*positional, **named)
        made: list[torch.Tensor] = []
        spread[:] = [_number(out, made)]
        return tuple(made)

    try:
        with _no_fallback():
            made = torch.func.vmap(one, in_dims=0, out_dims=0, randomness="error")(*stacked)
    except (RuntimeError, ValueError, NotImplementedError, TypeError, IndexError, AttributeError) as error:
        raise Declined(f"torch can't batch it: {str(error).splitlines()[0] if str(error) else error!r}") from error
    return _fill(spread[0], made)


class _Hole:
    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


def _number(value: Any, made: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        made.append(value)
        return _Hole(len(made) - 1)
    return type(value)(_number(v, made) for v in value) if type(value) in (list, tuple) else value


def _fill(value: Any, given: Any) -> Any:
    if isinstance(value, _Hole):
        return given[value.index]
    if isinstance(value, dict):
        return {k: _fill(v, given) for k, v in value.items()}
    return type(value)(_fill(v, given) for v in value) if type(value) in (list, tuple) else value
