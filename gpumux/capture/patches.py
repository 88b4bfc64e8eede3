"""Python functions that are replaced while a step is traced: random-number state, `math`, and others.

Checkpointing saves the generator's state before a block and sets it again to recompute the block with the same draws.
Over fake tensors nothing is drawn, so `RngTape` keeps the *position* in the job's stream of draws instead. Each drawing
operator has a slot number; going back to a saved position reuses slots; the device makes operators with equal slots
draw equal numbers (ir.Op.random).
"""

from __future__ import annotations

import builtins
import inspect
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.fx.experimental import sym_node
from torch.nn.parallel import DistributedDataParallel

from gpumux.capture.gpu.loss_scaling import Scaling
from gpumux.capture.source import by_numbers, is_user_code, reader, user_line
from gpumux.capture.swapping import here, swapped
from gpumux.capture.symbols import Scope, is_lifted, is_symbol, of_enumeration
from gpumux.capture.values import functions
from gpumux.capture.values.conjugates import Conjugates
from gpumux.capture.values.gradients import product
from gpumux.capture.watch.walk import Origin, of_path
from gpumux.errors import CaptureError, DataDependent

Known = Callable[[torch.Tensor], "torch.Tensor | None"]


class RngTape:
    """The draws of one step, in order, and the present position among them."""

    def __init__(self) -> None:
        self.position = 0
        self._draws: list[tuple[Any, ...]] = []
        self._saved: dict[int, tuple[torch.Tensor, int]] = {}

    @property
    def rewinds(self) -> bool:
        """Whether later draws may be repeated, because a position was saved."""
        return bool(self._saved)

    def draw(self, signature: tuple[Any, ...]) -> int:
        """The slot of the next draw. `signature`: what is drawn (operator, shape, type)."""
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
        """Replaces torch.get_rng_state: returns a token for the present position."""
        with torch.utils._python_dispatch._disable_current_modes():
            token = torch.zeros(1, dtype=torch.uint8)
        self._saved[token.untyped_storage()._cdata] = (token, self.position)
        return token

    def restore(self, token: torch.Tensor) -> None:
        """Replaces torch.set_rng_state."""
        found = self._saved.get(token.untyped_storage()._cdata)
        if found is None:
            raise CaptureError(
                f"{user_line()} sets the random state to one saved outside the step",
                "seed the job with submit(..., seed=...) and leave the generator's state alone inside the step",
            )
        self.position = found[1]

    def finish(self) -> None:
        """Raises CaptureError if the step ends before the end of a repeated block, because the next step would repeat
        draws of this one."""
        if self.position != len(self._draws):
            raise CaptureError(
                "the step leaves the random state rewound, so every step would draw the same numbers",
                "restore the state you saved (torch.random.fork_rng does) before the step returns",
            )


def _format(self: Any, spec: str) -> str:
    """Formatting of a traced number, f"{lr:.3f}". Guards its value, because Python may decide anything by the text."""
    node = self.node
    value = node.guard_float() if node.is_float() else node.guard_int()
    return format(value, spec)


def _hash(self: Any) -> int:
    """The hash of a traced number. A lifted one has none, as torch's symbolic ints have none: it would be left in a
    cache (functools.lru_cache) as a key."""
    if is_symbol(self) and is_lifted(self.node.expr):
        raise TypeError("unhashable type: a number that changes from step to step")
    return _HASH(self)


_HASH: Callable[[Any], int] = torch.SymFloat.__hash__


def _operand_of_symbols(node: Any, number: Any) -> Any:
    """Replaces torch's to_node, for which members of an IntEnum are no numbers: a lifted number would equal none of
    them."""
    return _TO_NODE(node, of_enumeration(number))


_TO_NODE = sym_node.to_node


def _deepcopy(self: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """Replaces Tensor.__deepcopy__, which copies bytes in Python: optimizers begin their state with copies. Raises
    CaptureError for one with gaps between its elements, which a copy in a step does not keep."""
    if id(self) in memo or not self.is_leaf:
        return _DEEPCOPY(self, memo)
    copy = self.detach().clone()
    if copy.stride() != self.stride():
        raise CaptureError(
            f"{user_line()} makes a deep copy of a tensor whose elements do not lie side by side", "use x.clone()"
        )
    copy.requires_grad_(self.requires_grad)
    if self.grad is not None:
        copy.grad = _deepcopy(self.grad, memo)
    memo[id(self)] = copy
    return copy


_DEEPCOPY: Callable[..., torch.Tensor] = torch.Tensor.__deepcopy__


def _refuse_seed(*_: Any, **__: Any) -> None:
    raise CaptureError(
        f"{user_line()} seeds the random generator inside the step",
        "seed the job once with submit(..., seed=...)",
    )


def _value_guard(name: str, constant: Known) -> Callable[..., Any]:
    """A replacement for a method that returns tensor values without running an operator."""
    plain = getattr(torch._C.TensorBase, name)
    tracing = threading.get_ident()

    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != tracing:
            return plain(self, *args, **kwargs)
        if (value := constant(self)) is not None:
            with torch.utils._python_dispatch._disable_current_modes():
                return plain(value, *args, **kwargs)
        raise DataDependent(
            f"{reader()} reads a tensor's values in Python (.{name}())",
            "keep the computation in tensors, or return the tensor from the step and read it outside",
        )

    return method


def _text_guard(name: str) -> Callable[..., Any]:
    """A replacement for a method of tensors that makes a text. Code of the user's gets none: it would be a text of the
    trace's tensor, the same in every step."""
    plain = getattr(torch.Tensor, name)

    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(2)  # the function of `here` is in between
        if not is_user_code(caller.f_code) or caller.f_globals.get("__name__") == "logging":
            return plain(self, *args, **kwargs)
        raise DataDependent(
            f'{reader()} makes a text of a tensor (f"{{loss:.4f}}", str(loss))',
            "return the tensor from the step, and make the text of what job.step gives",
        )

    return here(plain, method)


# Fused optimizers pass hyperparameters to operators whose schemas say `float`. There torch reads the plain value of a
# symbol, and the trace would hold for this learning rate alone.
_FUSED = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")


def _fused_wrapper(scope: Scope, name: str) -> Callable[..., Any]:
    plain = getattr(torch, name)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        symbols = {key: value for key, value in kwargs.items() if is_symbol(value)}
        with scope.numbers_of(name, symbols):
            return plain(*args, **{key: scope.lift(v).value if key in symbols else v for key, v in kwargs.items()})

    return wrapper


def _as_tensor(data: Any, dtype: torch.dtype | None = None, device: Any = None) -> Any:
    """Replaces torch.as_tensor, which reads the plain value of a symbol. ASGD puts numbers into its state with it."""
    if not is_symbol(data) or not by_numbers():
        return _AS_TENSOR(data, dtype=dtype, device=device)
    kind = dtype or (torch.get_default_dtype() if isinstance(data, torch.SymFloat) else torch.int64)
    return torch.zeros((), dtype=kind).fill_(data)


# ---- DistributedDataParallel
#
# With one process in its group it computes what the module inside computes: the gradients and buffers that it would
# average over the processes are those of this one. A trace calls the module alone, because the reducer copies gradients
# into buckets of its own, from C++.

_LEAVE_OUT = "leave that out: it makes no difference to one process"


def _of_one_process(self: DistributedDataParallel, *inputs: Any, **kwargs: Any) -> Any:
    """Replaces DistributedDataParallel.forward. Raises CaptureError for one that computes something else than its
    module does, or whose reducer would run operators in the backward pass all the same."""
    processes = self.process_group.size()
    if processes > 1:
        raise _refused_parallel(
            f"over {processes} processes, which average their gradients; a job's steps run in the daemon, apart from"
            " other processes",
            "start the script as one process (torchrun --nproc-per-node=1), with the whole batch in its step"
            " (submit's microbatches= runs it in parts), or train without gpumux",
        )
    if self._comm_hooks:
        raise _refused_parallel("with a communication hook, which may change gradients", _LEAVE_OUT)
    if self.mixed_precision is not None:
        raise _refused_parallel(
            "with mixed_precision=, which keeps a second copy of the parameters", "use torch.autocast in the step"
        )
    for option, given in (
        ("delay_all_reduce_named_params", self._delay_all_reduce_params),
        ("find_unused_parameters", self.find_unused_parameters),
        ("static_graph", self.static_graph),
    ):
        if given:
            raise _refused_parallel(f"with {option}=, which keeps tensors of its own about gradients", _LEAVE_OUT)
    self.reducer._reset_state()  # after a forward pass without a backward pass it waits for gradients
    return self.module(*inputs, **kwargs)


def _refused_parallel(what: str, remedy: str) -> CaptureError:
    return CaptureError(f"{user_line()} calls a DistributedDataParallel {what}", remedy)


# ---- collectives that a step calls itself (dist.all_reduce)
#
# Among one process they leave a tensor as it is, or copy it to where they gather.

_INTO_ONE = ("output_tensor", "input_tensor")
_GATHERS = {
    "all_gather": ("tensor_list", "tensor"), "all_gather_into_tensor": _INTO_ONE, "all_gather_single": _INTO_ONE,
}  # fmt: skip
_COLLECTIVES = ("all_reduce", "reduce", "broadcast", "barrier", *_GATHERS)


_signature = cache(inspect.signature)  # every trace asks for all of them


class _Over:
    """What a collective with async_op=True returns."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _among_one(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces a function of torch.distributed, whose operators no Program can have."""
    signature = _signature(plain)

    def collective(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        processes = dist.get_world_size(given.get("group"))
        if processes > 1:
            raise CaptureError(
                f"{user_line()} calls torch.distributed.{name} among {processes} processes; a job's steps run in the"
                " daemon, apart from other processes",
                "start the script as one process (torchrun --nproc-per-node=1), with the whole batch in its step, or"
                " train without gpumux",
            )
        if name in _GATHERS:
            into, tensor = (given[each] for each in _GATHERS[name])
            if isinstance(into, list):
                (into,) = into
            if (into.dtype, into.numel()) != (tensor.dtype, tensor.numel()):
                return plain(*args, **kwargs)  # which raises
            with torch.no_grad():
                into.copy_(tensor.reshape(into.shape))
        return _Over() if given.get("async_op") else None

    return collective


def _collectives() -> list[tuple[Any, str, Any]]:
    if not dist.is_available():
        return []
    modules = (dist, dist.distributed_c10d)
    return [
        (module, name, here(getattr(module, name), _among_one(name, getattr(module, name))))
        for module in modules
        for name in _COLLECTIVES
        if hasattr(module, name)  # torch 2.13 has all_gather_single in place of all_gather_into_tensor
    ]


def _quiet_print(*values: Any, file: Any = None, **_: Any) -> None:
    """Replaces print. A trace runs the step's Python for itself, and later steps run none: what a step prints would
    appear at capture and never again."""
    line = user_line()
    if file is not None and file not in (sys.stdout, sys.stderr):
        raise CaptureError(
            f"{line} prints to a file inside the step",
            "return what it prints from the step, and print that outside: gpumux runs a step's Python only when it"
            " captures it",
        )
    if line not in _told:
        _told.add(line)
        log.warning(
            "%s prints inside the step: nothing is printed, because gpumux runs a step's Python only when it captures"
            " it. Return what it prints, and print that outside",
            line,
        )


def _log_and_warn(self: logging.Logger, record: logging.LogRecord) -> None:
    """Replaces Logger.handle. What the user's own code logs is logged at capture, with a warning that later steps log
    nothing. Packages say at capture what they would say at the first step."""
    _HANDLE(self, record)
    line = f"{record.pathname}:{record.lineno}"
    if of_path(record.pathname) is Origin.OWN and line not in _told:
        _told.add(line)
        log.warning(
            "%s logs inside the step: that is done when the step is captured and never again, because gpumux runs a"
            " step's Python only then. Return what it logs, and log that outside",
            line,
        )


_HANDLE: Callable[[logging.Logger, logging.LogRecord], None] = logging.Logger.handle
log = logging.getLogger("gpumux.client")
_told: set[str] = set()  # lines with a print, or that log, that were warned of
_AS_TENSOR = torch.as_tensor
_CAPTURABLE = "_get_capturable_supported_devices"


def _and_cpu(known: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """A list of devices with "cpu" added, because the tensors of a traced step lie there."""
    return lambda *args, **kwargs: [*known(*args, **kwargs), "cpu"]


@contextmanager
def patched(
    scope: Scope, tape: RngTape, scaling: Scaling, conjugates: Conjugates, *,
    gpu: bool = False, constant: Known = lambda tensor: None,
) -> Iterator[None]:  # fmt: skip
    """Replace the functions for the length of a trace. They act on traced values only, so that another thread can call
    `math.sqrt` meanwhile. `gpu`: optimizers use their implementation for many tensors at once by default, as they do
    on a GPU. `constant`: the value of a tensor that is made from constants alone, else None."""
    random: dict[str, Callable[..., Any]] = {
        "get_rng_state": tape.save,
        "set_rng_state": tape.restore,
        "manual_seed": _refuse_seed,
        "seed": _refuse_seed,
    }
    swaps: list[tuple[Any, str, Any]] = [
        *((torch, name, here(getattr(torch, name), new)) for name, new in random.items()),
        *((torch.random, name, here(getattr(torch.random, name), new)) for name, new in random.items()),
        (builtins, "print", here(print, _quiet_print)), (logging.Logger, "handle", here(_HANDLE, _log_and_warn)),
        (torch.SymFloat, "__format__", _format), (torch.SymInt, "__format__", _format),
        (torch.SymFloat, "__hash__", _hash),
        (sym_node, "to_node", _operand_of_symbols),
        (torch.Tensor, "__deepcopy__", here(torch.Tensor.__deepcopy__, _deepcopy)),
        (torch.Tensor, "tolist", _value_guard("tolist", constant)),
        (torch.Tensor, "numpy", _value_guard("numpy", constant)),
        (torch.Tensor, "__format__", _text_guard("__format__")),
        (torch.Tensor, "__repr__", _text_guard("__repr__")),
        (torch.Tensor, "prod", here(torch.Tensor.prod, product)), (torch, "prod", here(torch.prod, product)),
        *scaling.swaps(), *conjugates.swaps(),
        *((torch, name, here(getattr(torch, name), _fused_wrapper(scope, name))) for name in _FUSED),
        (DistributedDataParallel, "forward", here(DistributedDataParallel.forward, _of_one_process)),
        *_collectives(),
        *functions.swaps(scope),
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
        optimizers = sys.modules["torch.optim.optimizer"]  # torch.optim deletes the name `optimizer`
        known = getattr(optimizers, name)
        swaps.append((optimizers, name, here(known, _and_cpu(known))))
    with scaling.cleaned(), swapped(swaps):
        yield
