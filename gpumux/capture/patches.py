"""What must behave differently in Python while a step is traced: random-number state and `math`.

Checkpointing saves the generator's state before a block and sets it again to recompute the block
with the same draws. Under fake tensors nothing is drawn, so `RngTape` keeps the *position* in the
job's stream of draws instead: each drawing operator has a slot number, going back to a saved
position reuses slots, and the device makes equal slots draw equal numbers (ir.Op.random).
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gpumux.capture.gpu.autocast import refuse_lost_scaling
from gpumux.capture.source import by_numbers, user_line
from gpumux.capture.swapping import here, swapped
from gpumux.capture.symbols import Scope, is_symbol
from gpumux.errors import CaptureError, DataDependent


class RngTape:
    """The draws of one step, in order, and where in them the traced code stands."""

    def __init__(self) -> None:
        self.position = 0
        self._draws: list[tuple[Any, ...]] = []
        self._saved: dict[int, tuple[torch.Tensor, int]] = {}

    @property
    def rewinds(self) -> bool:
        """Whether draws from here on may have to be drawn again: somebody has noted a position."""
        return bool(self._saved)

    def draw(self, signature: tuple[Any, ...]) -> int:
        """The slot of the next draw. `signature` says what is drawn (operator, shape, type)."""
        slot = self.position
        self.position += 1
        if slot == len(self._draws):
            self._draws.append(signature)
        elif self._draws[slot] != signature:
            raise CaptureError(
                f"recomputation at {user_line()} draws other random numbers than the first time",
                "make the recomputed block draw the same shapes in the same order, or checkpoint it without dropout",
            )
        return slot

    def save(self) -> torch.Tensor:
        """Stands in for torch.get_rng_state: a token for the present position."""
        with torch.utils._python_dispatch._disable_current_modes():
            token = torch.zeros(1, dtype=torch.uint8)
        self._saved[token.untyped_storage()._cdata] = (token, self.position)
        return token

    def restore(self, token: torch.Tensor) -> None:
        """Stands in for torch.set_rng_state."""
        found = self._saved.get(token.untyped_storage()._cdata)
        if found is None:
            raise CaptureError(
                f"{user_line()} sets the random state to one saved outside the step",
                "seed the job with submit(..., seed=...) and leave the generator's state alone inside the step",
            )
        self.position = found[1]

    def finish(self) -> None:
        """Raises CaptureError when the step ends inside a rewound stretch: the next step's draws
        would then repeat this one's."""
        if self.position != len(self._draws):
            raise CaptureError(
                "the step leaves the random state rewound, so every step would draw the same numbers",
                "restore the state you saved (torch.random.fork_rng does) before the step returns",
            )


def _scaler_guard(name: str, gpu: bool) -> Callable[..., Any]:
    """A GradScaler keeps its scale, and what it found of each optimizer's gradients, outside of the model, and decides
    in Python whether the optimizer's step is taken."""
    plain = getattr(torch.amp.GradScaler, name)

    def method(self: torch.amp.GradScaler, *args: Any, **kwargs: Any) -> Any:
        if not self.is_enabled():
            if gpu:
                refuse_lost_scaling(f"GradScaler.{name}()")
            return plain(self, *args, **kwargs)
        raise CaptureError(
            f"{user_line()} calls GradScaler.{name}(), which decides in Python by what the gradients hold",
            "torch.autocast with bfloat16 needs no scaling: GradScaler(enabled=False); for float16 keep the scale in a"
            " buffer of the model (docs/fusion.md, Loss scaling)",
        )

    return method


def _format(self: Any, spec: str) -> str:
    """f"{lr:.3f}" on a traced number: text made of it can decide anything, so its value is guarded."""
    node = self.node
    value = node.guard_float() if node.is_float() else node.guard_int()
    return format(value, spec)


def _refuse_seed(*_: Any, **__: Any) -> None:
    raise CaptureError(
        f"{user_line()} seeds the random generator inside the step",
        "seed the job once with submit(..., seed=...)",
    )


def _value_guard(name: str) -> Callable[..., Any]:
    """A stand-in for a method that hands out tensor values without any operator noticing."""
    plain = getattr(torch._C.TensorBase, name)
    tracing = threading.get_ident()

    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != tracing:
            return plain(self, *args, **kwargs)
        raise DataDependent(
            f"{user_line()} reads a tensor's values in Python (.{name}())",
            "keep the computation in tensors, or return the tensor from the step and read it outside",
        )

    return method


_MATH = ("sqrt", "exp", "log", "cos", "sin", "tanh", "floor", "ceil", "log2", "log10")


def _math_wrapper(scope: Scope, name: str) -> Callable[..., Any]:
    plain = getattr(math, name)

    def wrapper(*args: Any) -> Any:
        if len(args) == 1 and is_symbol(args[0]):
            return scope.symbol(scope.apply(name, scope.lift(args[0])))
        return plain(*args)

    return wrapper


def _pow_wrapper(scope: Scope) -> Callable[[Any, Any], Any]:
    plain = math.pow

    def wrapper(a: Any, b: Any) -> Any:
        if is_symbol(a) or is_symbol(b):
            fa, fb = scope.apply("float", scope.lift(a)), scope.apply("float", scope.lift(b))
            return scope.symbol(scope.apply("pow", fa, fb))
        return plain(a, b)

    return wrapper


# Fused optimizers hand hyperparameters to operators whose schemas say `float`; torch asks a symbol for its plain value
# there, which would make the trace one for this learning rate alone.
_FUSED = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")


def _fused_wrapper(scope: Scope, name: str) -> Callable[..., Any]:
    plain = getattr(torch, name)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        symbols = {key: value for key, value in kwargs.items() if is_symbol(value)}
        with scope.numbers_of(name, symbols):
            return plain(*args, **{key: scope.lift(v).value if key in symbols else v for key, v in kwargs.items()})

    return wrapper


def _as_tensor(data: Any, dtype: torch.dtype | None = None, device: Any = None) -> Any:
    """torch.as_tensor, which asks a symbol for its plain value. ASGD makes its numbers into state with it."""
    if not is_symbol(data) or not by_numbers():
        return _AS_TENSOR(data, dtype=dtype, device=device)
    kind = dtype or (torch.get_default_dtype() if isinstance(data, torch.SymFloat) else torch.int64)
    return torch.zeros((), dtype=kind).fill_(data)


_AS_TENSOR = torch.as_tensor
_SCALER = ("scale", "unscale_", "step", "update")
_CAPTURABLE = "_get_capturable_supported_devices"


def _and_cpu(known: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """Where the tensors of a traced step lie, whatever will run it."""
    return lambda *args, **kwargs: [*known(*args, **kwargs), "cpu"]


@contextmanager
def patched(scope: Scope, tape: RngTape, gpu: bool = False) -> Iterator[None]:
    """Swap the functions in for the length of a trace. They act on tracing values only, so another
    thread that calls `math.sqrt` meanwhile notices nothing. Optimizers take their implementation of many tensors at
    once by default where a GPU is concerned (`gpu`), as they would there."""
    random: dict[str, Callable[..., Any]] = {
        "get_rng_state": tape.save,
        "set_rng_state": tape.restore,
        "manual_seed": _refuse_seed,
        "seed": _refuse_seed,
    }
    swaps: list[tuple[Any, str, Any]] = [
        *((torch, name, here(getattr(torch, name), new)) for name, new in random.items()),
        *((torch.random, name, here(getattr(torch.random, name), new)) for name, new in random.items()),
        (torch.SymFloat, "__format__", _format), (torch.SymInt, "__format__", _format),
        (torch.Tensor, "tolist", _value_guard("tolist")),
        (torch.Tensor, "numpy", _value_guard("numpy")),
        *((torch.amp.GradScaler, name, here(getattr(torch.amp.GradScaler, name), _scaler_guard(name, gpu))) for name in _SCALER),
        *((torch, name, here(getattr(torch, name), _fused_wrapper(scope, name))) for name in _FUSED),
        (math, "pow", _pow_wrapper(scope)), *((math, name, _math_wrapper(scope, name)) for name in _MATH),
    ]  # fmt: skip
    if not gpu:
        swaps.append((torch, "as_tensor", here(torch.as_tensor, _as_tensor)))
    else:
        on_gpu: dict[str, Callable[..., Any]] = {
            "get_rng_state": lambda *_, **__: tape.save(), "set_rng_state": lambda token, *_, **__: tape.restore(token),
            **dict.fromkeys(("manual_seed", "manual_seed_all", "seed", "seed_all"), _refuse_seed),
        }  # fmt: skip
        swaps += [(torch.cuda, name, here(getattr(torch.cuda, name), new)) for name, new in on_gpu.items()]
        swaps += [
            (module, _CAPTURABLE, here(getattr(module, _CAPTURABLE), _and_cpu(getattr(module, _CAPTURABLE))))
            for name, module in list(sys.modules.items())
            if name.startswith("torch.optim.") and hasattr(module, _CAPTURABLE)
        ]
        name = "_get_foreach_kernels_supported_devices"
        optimizers = sys.modules["torch.optim.optimizer"]  # torch.optim takes the name away from itself
        known = getattr(optimizers, name)
        swaps.append((optimizers, name, here(known, _and_cpu(known))))
    with swapped(swaps):
        yield
