"""The argument of a rule: one operator call of the template, and its operands in whatever form they are.

A rule is a function `rule(call) -> result`, run while an FusionEmitter is active: torch operators on the tensors it
gets become operators of the fused Program. It returns what the operator returns, each tensor with the model
dimension first (strides are free: `movedim` a result to that). See docs/fusion.md, "Writing a rule".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from gpumux.device.run.schema import constant
from gpumux.fuse.emit import Declined
from gpumux.fuse.template import Varying
from gpumux.program.check import schema
from gpumux.program.ir import Complex, Op, ScalarRef, Tag, TensorRef, View

if TYPE_CHECKING:
    from gpumux.fuse.layout import Placements


class Operand:
    """One tensor argument: a view of the template, and the place of its content in the fused Program."""

    __slots__ = ("placements", "view")

    def __init__(self, placements: Placements, view: View) -> None:
        self.placements = placements
        self.view = view

    @property
    def size(self) -> tuple[int, ...]:
        """Size of each model's tensor."""
        return self.view.size

    @property
    def dim(self) -> int:
        return len(self.view.size)

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.view.dtype)
        return found

    @property
    def alike(self) -> bool:
        """Whether all models have the same content, which is then kept once."""
        return self.placements.of(self.view).alike

    def one(self) -> torch.Tensor:
        """The content that all models share, of this operand's size. Valid only if `alike`."""
        return self.placements.one(self.view)

    def all(self, rank: int | None = None) -> torch.Tensor:
        """All models' tensors as one of size [B, *size], without a copy if strides allow (alike: expanded).
        `rank`: pad with dimensions of size 1 after the model dimension until there are `rank` others."""
        tensor = self.placements.all(self.view)
        for _ in range(max(0, (rank or 0) - self.dim)):
            tensor = tensor.unsqueeze(1)
        return tensor

    def merged(self, dim: int) -> torch.Tensor:
        """The model dimension merged into dimension `dim`, models outermost: size[dim] becomes B * size[dim]. Makes
        no copy if the content, or an earlier copy of it, is in that order."""
        return self.placements.merged(self.view, dim)

    def mergeable(self, dim: int) -> bool:
        """Whether `merged(dim)` costs no copy now."""
        return self.placements.mergeable(self.view, dim)

    def of(self, model: int) -> torch.Tensor:
        """One model's tensor."""
        return self.placements.one_of(self.view, model)


class Call:
    """One operator of the template. `args` are its arguments by name, defaults filled in: Operand, plain value,
    Varying, ScalarRef of the fused Program, None, or lists of them."""

    def __init__(self, placements: Placements, op: Op, model: int = 0) -> None:
        """model: the model that the op's ScalarRefs belong to."""
        self.placements = placements
        self.op = op
        self._model = model
        self.target = op.target
        self.models = placements.models
        self.func: Any = schema(op.target).overload
        given = dict(op.kwargs)
        self.args: dict[str, Any] = {}
        self.keyword_only: set[str] = set()
        for index, argument in enumerate(self.func._schema.arguments):
            if argument.kwarg_only:
                self.keyword_only.add(argument.name)
            if index < len(op.args) and not argument.kwarg_only:
                self.args[argument.name] = self._resolve(op.args[index])
            elif argument.name in given:
                self.args[argument.name] = self._resolve(given.pop(argument.name))
            else:
                self.args[argument.name] = argument.default_value if argument.has_default_value() else None

        if given or len(op.args) > len(self.args) - len(self.keyword_only):
            raise Declined(f"{op.target} takes no such arguments: {len(op.args)}, {', '.join(given)}")

    def __getitem__(self, name: str) -> Any:
        return self.args[name]

    def number(self, name: str) -> Any:
        """An argument that must be a plain number. Raises Declined if it differs between models or steps."""
        value = self.args[name]
        if isinstance(value, (Varying, ScalarRef)):
            raise Declined(f"{name} is no constant")
        return value

    @property
    def name(self) -> str:
        """Name without the overload, such as `add_` for `aten.add_.Tensor`."""
        return self.target.split(".")[1]

    def _resolve(self, arg: Any) -> Any:
        if isinstance(arg, TensorRef):
            return Operand(self.placements, self.placements.template.program.views[arg.view])
        if isinstance(arg, tuple):
            return [self._resolve(a) for a in arg]
        if isinstance(arg, ScalarRef):
            return self.placements.scalar(arg, self._model)
        if isinstance(arg, Tag):
            return constant(arg) if arg.kind != "device" else torch.device(self.placements.emitter.device)
        if isinstance(arg, Complex):
            return complex(arg.re, arg.im)
        return arg

    def operands(self) -> Iterator[Operand]:
        """All tensor arguments, including those in lists."""
        yield from (v for v in flat(self.args) if isinstance(v, Operand))

    def varying(self) -> Iterator[tuple[str, Varying]]:
        """The numbers that differ between models."""
        for name, value in self.args.items():
            yield from ((name, v) for v in flat(value) if isinstance(v, Varying))

    @property
    def varies(self) -> bool:
        """Whether any number differs between models."""
        return any(True for _ in self.varying())

    def same_numbers(self, *but: str) -> None:
        """Raise Declined if a number outside the arguments `but` differs between models."""
        for name, value in self.varying():
            if name not in but:
                raise Declined(f"{name} differs between models: {value.values}")

    @property
    def written(self) -> list[Operand]:
        """The operands that the operator changes in place."""
        from gpumux.capture.recorder import HIDDEN_WRITES

        hidden = HIDDEN_WRITES.get(self.target, ())
        found: list[Operand] = []
        for index, argument in enumerate(self.func._schema.arguments):
            if (argument.alias_info is not None and argument.alias_info.is_write) or index in hidden:
                found += [v for v in flat(self.args[argument.name]) if isinstance(v, Operand)]
        return found

    def outputs(self) -> list[View | None]:
        """The template's views of the results, lists of them flattened."""
        views = self.placements.template.program.views
        return [None if v is None else views[v] for v in flat(list(self.op.outs))]

    def vector(self, varying: Varying, dtype: torch.dtype, rank: int) -> torch.Tensor:
        """A tensor of `dtype` and size [B, 1, ...], with `rank` ones, of numbers that differ between models. Raises
        Declined for types in which the operator's numbers would be rounded."""
        return self.placements.vector(varying, dtype).reshape(self.models, *[1] * rank)

    def invoke(self, changes: dict[str, Any], func: Any = None) -> Any:
        """Call the operator, or `func`, with the same arguments except for those in `changes`, by name. All operands
        must be in `changes`. Raises Declined if a number that differs between models is left."""
        func = func or self.func
        self.same_numbers(*[name for name, value in changes.items() if not isinstance(value, Varying)])
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for argument in func._schema.arguments:
            value = changes.get(argument.name, self.args.get(argument.name, argument.default_value))
            if not argument.kwarg_only:
                args.append(value)
            elif not is_default(value, argument):
                kwargs[argument.name] = value
        return self.placements.emitter.emit(func, tuple(args), kwargs, self.placements.scalar_values)

    def filled(self, put: Callable[[Operand], Any]) -> dict[str, Any]:
        """All arguments, with `put(operand)` in place of each operand."""

        def fill(value: Any) -> Any:
            if isinstance(value, Operand):
                return put(value)
            return [fill(v) for v in value] if isinstance(value, list) else value

        return {name: fill(value) for name, value in self.args.items()}


def flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [leaf for v in value for leaf in flat(v)]
    return [value]


def is_default(value: Any, argument: Any) -> bool:
    if isinstance(value, (torch.Tensor, ScalarRef)):
        return False
    return bool(type(value) is type(argument.default_value) and value == argument.default_value)


__all__ = ["Call", "Declined", "Operand", "flat", "is_default"]


# ---- Operators without a rule: torch.func batches the single operator.
#
# torch's slow fallback, a loop over the models, is turned off, so that operators it can't batch are refused here.


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
    """The operator's result, model dimension first. An in-place operator that can't be batched is run out of place,
    and its result copied to its operand. Raises Declined."""
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
    """The out-of-place variant of an operator that writes its first argument and nothing else; None if it has none."""
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
        return _Placeholder(len(stacked) - 1)

    holes = call.filled(put)
    spread: list[Any] = []  # the operator's result, with each tensor replaced by its number

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


class _Placeholder:
    """Stands for a tensor, by its index, in a structure of arguments or results."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


def _number(value: Any, made: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        made.append(value)
        return _Placeholder(len(made) - 1)
    return type(value)(_number(v, made) for v in value) if type(value) in (list, tuple) else value


def _fill(value: Any, given: Any) -> Any:
    if isinstance(value, _Placeholder):
        return given[value.index]
    if isinstance(value, dict):
        return {k: _fill(v, given) for k, v in value.items()}
    return type(value)(_fill(v, given) for v in value) if type(value) in (list, tuple) else value
