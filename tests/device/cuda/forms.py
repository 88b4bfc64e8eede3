"""Calls of every form that reads its number from device memory, beside torch's own operator with the number itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from gpumux.device.cuda.operators import FORMS, Number

# Options of fused optimizers beside the learning rate.
ADAM = {"beta1": 0.8, "beta2": 0.9, "weight_decay": 0.1, "eps": 1e-3, "amsgrad": True, "maximize": True}
SGD = {"momentum": 0.9, "weight_decay": 0.1, "dampening": 0.2, "nesterov": True, "maximize": False,
       "is_first_step": False}  # fmt: skip


class Call(NamedTuple):
    """A call of a form with the arguments `fed` and `options`. `plain(value)`: the result of the operator on equal
    tensors."""

    target: str
    form: Callable[..., Any]
    fed: list[Any]
    options: dict[str, Any]
    plain: Callable[[float], Any]


def number_of(value: float, device: str = "cpu") -> Number:
    return Number(
        torch.tensor(value, dtype=torch.float64, device=device), torch.tensor(value, device=device),
        torch.tensor(0, device=device), True,
    )  # fmt: skip


def calls(dtype: torch.dtype, number: Number) -> Iterator[Call]:
    """Calls of all forms whose operator this torch has. Tensors lie on the number's device."""
    generator = torch.Generator().manual_seed(1)
    device = number.f64.device

    def made() -> torch.Tensor:
        return ((torch.rand(5, generator=generator) + 0.5).to(dtype)).to(device)

    for target, form in FORMS.items():
        packet = getattr(torch.ops.aten, target.split(".")[1], None)  # not every formula has both forms
        overload = getattr(packet, target.split(".")[2], None)
        if overload is None or any(str(a.real_type) == "List[number]" for a in overload._schema.arguments):
            continue  # ScalarList: the same functions as Scalar
        fed: list[Any] = []
        options: dict[str, Any] = {}
        if "_fused_" in target:
            fed = [[made() for _ in range(3)] for _ in range(3 if "sgd" in target else 5)]
            fed += [] if "sgd" in target else [[torch.full((), 2.0, device=device) for _ in range(3)]]
            options = {"lr": number, **(SGD if "sgd" in target else ADAM)}
            options["momentum" if "sgd" in target else "beta1"] = number
        for argument in [] if fed else overload._schema.arguments:
            kind = str(argument.real_type)
            if kind == "Tensor":
                fed.append(made() > 1 if argument.name == "mask" else made())
            elif kind == "List[Tensor]":
                fed.append([made() for _ in range(3)])
            elif kind in ("number", "Optional[number]") and not any(f is number for f in fed):
                if argument.name == "alpha" and "Scalar" in target:
                    continue
                if argument.kwarg_only:
                    options[argument.name] = number
                    break
                fed.append(number)
            elif kind == "List[int]":
                fed.append([2, 3])
        if target in ("aten.full.default", "aten.scalar_tensor.default"):
            options |= {"dtype": dtype, "device": device}
        yield Call(target, form, fed, options, _plain(overload, _copies(fed), options, number))


def _copies(value: Any) -> Any:
    if isinstance(value, list):
        return [_copies(item) for item in value]
    return value.clone() if isinstance(value, torch.Tensor) else value


def _plain(overload: Any, arguments: list[Any], options: dict[str, Any], number: Number) -> Callable[[float], Any]:
    def call(value: float) -> Any:
        given = [value if item is number else item for item in _copies(arguments)]
        named = {name: value if item is number else item for name, item in options.items()}
        returned = overload(*given, **named)
        return given[0] if returned is None else returned  # _foreach_ in place

    return call
