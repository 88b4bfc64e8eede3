"""How often an optimizer's step goes over the parameters: bytes that its operators read and write, in sizes of the
parameters.

eager        torch's optimizer with its default of many tensors at once (foreach=True), numbers as they are
capturable   torch's own way for a captured step: the learning rate and the step count lie in memory (capturable=True
             where the optimizer has it, else a learning rate that is a tensor)
first form   the step's Program as a GPU runs it (gpumux/device/cuda/operators.py), if all its numbers changed from step
             to step
gpumux       the same with the hyperparameters that no schedule usually changes written into it
             (gpumux/capture/symbols.py)

Counted operator by operator on small tensors of the CPU, so no GPU is needed, and no time is measured: an operator that
writes in place reads and writes, views cost nothing. Numbers of one element are left out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from gpumux.capture.staleness import StalenessHooks, Wording
from gpumux.capture.state import Part, StateTable
from gpumux.capture.step import Choice, StepFunction
from gpumux.capture.structure import State, Structure, from_local
from gpumux.capture.symbols import ConstantScalars
from gpumux.capture.tracer import Tracer
from gpumux.device.cuda import operators
from gpumux.device.cuda.operators import Number
from gpumux.device.run.schema import DTYPES, constant
from gpumux.program import operators as allowlist
from gpumux.program.ir import Program, ScalarRef, Tag, TensorRef
from microbench import common

COUNT, SIZE = 4, 4096  # parameters, and elements of each
WHOLE = COUNT * SIZE * 4  # bytes

Make = Callable[..., torch.optim.Optimizer]
OPTIMIZERS: dict[str, tuple[Make, dict[str, Any]]] = {
    "Adam": (torch.optim.Adam, {}),
    "AdamW": (torch.optim.AdamW, {}),
    "AdamW, amsgrad": (torch.optim.AdamW, {"amsgrad": True}),
    "NAdam": (torch.optim.NAdam, {}),
    "Adamax": (torch.optim.Adamax, {}),
    "RMSprop": (torch.optim.RMSprop, {}),
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD, momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4}),
    "Adagrad": (torch.optim.Adagrad, {}),
}
FUSED: dict[str, tuple[Make, dict[str, Any]]] = {
    "AdamW, fused": (torch.optim.AdamW, {"fused": True}),
    "SGD, momentum, fused": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4, "fused": True}),
}


class Counting(TorchDispatchMode):
    """Adds up bytes read and written, of tensors of more than one element."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet, schema = func.overloadpacket.__name__, func._schema
        if func.is_view or packet in ("empty_like", "empty", "detach", "_foreach_norm"):
            return out
        fresh = packet.rstrip("_") in ("copy", "zero", "fill", "_foreach_zero", "_foreach_copy")
        given = [*zip(schema.arguments, args, strict=False)]
        given += [(a, kwargs[a.name]) for a in schema.arguments[len(args) :] if a.name in kwargs]
        for argument, value in given:
            written = argument.alias_info is not None and argument.alias_info.is_write
            reads = not (written and (fresh or argument.name == "out"))
            self.nbytes += (reads + written) * _bytes(value)
        if not any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments):
            self.nbytes += _bytes(out)
        return out


def _bytes(value: Any) -> int:
    return sum(t.nbytes for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor) and t.numel() > 1)


def model_of() -> torch.nn.Module:
    model = torch.nn.Module()
    for i in range(COUNT):
        model.register_parameter(f"p{i}", torch.nn.Parameter(torch.rand(SIZE) + 1))
    for parameter in model.parameters():
        parameter.grad = torch.rand(SIZE)
    return model


@contextmanager
def capturable_on_the_cpu() -> Iterator[None]:
    """torch allows it on devices that capture alone."""
    name = "_get_capturable_supported_devices"
    modules = [m for key, m in sys.modules.items() if key.startswith("torch.optim.") and hasattr(m, name)]
    before = [getattr(m, name) for m in modules]
    for module in modules:
        setattr(module, name, lambda *args, **kwargs: ["cpu"])
    try:
        yield
    finally:
        for module, plain in zip(modules, before, strict=True):
            setattr(module, name, plain)


def of_torch(make: Make, options: dict[str, Any], *, in_memory: bool) -> float:
    """Passes of the optimizer's second step. `in_memory`: what changes from step to step lies there."""
    options = dict(options)
    if in_memory:
        try:
            make(model_of().parameters(), **options, capturable=True)
            options["capturable"] = True
        except TypeError:
            options["lr"] = torch.tensor(options.get("lr", 1e-3))
    if "fused" not in options:
        options["foreach"] = True
    optimizer = make(model_of().parameters(), **options)
    with capturable_on_the_cpu():
        optimizer.step()
        with Counting() as counting:
            optimizer.step()
    return float(counting.nbytes / WHOLE)


class _Nothing:
    """A job's state that is never newer elsewhere."""

    def __init__(self, structure: Structure) -> None:
        self._structure = structure

    def structure(self) -> Structure:
        return self._structure

    def fetch(self, parts: frozenset[Part]) -> None:
        raise AssertionError(parts)


def program_of(make: Make, options: dict[str, Any], constants: ConstantScalars | None) -> Program:
    """Of a step that is one call of the optimizer's, its second, for a GPU."""
    model = model_of()
    optimizer = make(model.parameters(), **options)
    table = StateTable([model], [optimizer], "cpu", "cuda")
    structure, host = from_local(table)
    known: dict[Structure, Structure] = {}
    state = State(known.setdefault(structure, structure), host, frozenset(i for i, _ in structure.kept))
    guard = StalenessHooks(Wording("it", "", "", ""), table, _Nothing(structure))

    def step() -> None:
        optimizer.step()

    function = StepFunction(
        step, table, Tracer(table, allowlist.is_allowed), guard,
        intern=lambda s: known.setdefault(s, s), max_variants=4, twice=False, constants=constants,
    )  # fmt: skip
    first = function.choose((), {}, state)
    assert isinstance(first, Choice), "the gradients are there"
    second = function.choose((), {}, first.after(state.keep))
    assert isinstance(second, Choice)
    guard.remove()
    return second.program.lowered.program


def of_program(program: Program) -> float:
    """Passes of a Program's operators, as a GPU carries them out."""
    storages = [torch.ones(max(1, s.nbytes), dtype=torch.uint8) for s in program.storages]
    views = [
        torch.empty(0, dtype=DTYPES[v.dtype]).set_(storages[v.storage].untyped_storage(), v.offset, v.size, v.stride)
        for v in program.views
    ]
    numbers = [
        Number(torch.tensor(0.5, dtype=torch.float64), torch.tensor(0.5), torch.tensor(1), kind == "float")
        for kind in program.scalars
    ]

    def value(arg: Any) -> Any:
        if isinstance(arg, TensorRef):
            return views[arg.view]
        if isinstance(arg, ScalarRef):
            return numbers[arg.index]
        if isinstance(arg, tuple):
            return [value(a) for a in arg]
        return constant(arg) if isinstance(arg, Tag) else arg

    with Counting() as counting:
        for index, op in enumerate(program.ops):
            run = operators.call(index, op, lambda target: True)
            run(*map(value, op.args), **{key: value(arg) for key, arg in op.kwargs})
    return float(counting.nbytes / WHOLE)


def passes(name: str) -> dict[str, float]:
    """Of one optimizer, by way."""
    make, options = {**OPTIMIZERS, **FUSED}[name]
    found = {
        "eager": of_torch(make, options, in_memory=False), "capturable": of_torch(make, options, in_memory=True),
    }  # fmt: skip
    if name not in FUSED:  # those have no form without
        found["first form"] = of_program(program_of(make, options, None))
    return found | {"gpumux": of_program(program_of(make, options, ConstantScalars()))}


def main(argv: list[str] | None = None) -> int:
    args = common.parser(__doc__).parse_args(argv)
    found = {name: passes(name) for name in {**OPTIMIZERS, **FUSED}}
    ways = ("eager", "capturable", "first form", "gpumux")
    rows = [[name, *(f"{of[way]:.1f}" if way in of else "" for way in ways)] for name, of in found.items()]
    print(common.table(["passes", *ways], rows))
    over = [name for name, of in found.items() if of["gpumux"] > of["capturable"]]
    print("at most torch's own captured step: " + ("all" if not over else f"all but {', '.join(over)}"))
    common.report("optimizer_passes", args.out, {"machine": common.machine(), "passes": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
