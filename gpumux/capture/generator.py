"""The client's random generator: a job's steps draw from it, and after each step it has the state that the plain loop
would have left.

A step carries the state of torch's default generator, or of one that the job has for itself, as one more tensor of its
batch, and draws from that state in the daemon (`Program.generator`). The client must skip what the step draws. The
number of 32-bit words that an operator takes depends on the operator, the number of elements and the processor
(`exponential_`, for one, draws differently with MKL). So it is measured when the step is captured: the operator runs
here, on as many elements, and the words it took are counted. Skipping as many words after each step costs a few
nanoseconds a word and waits for nothing.

In three cases `step()` waits for the answer instead, which brings the generator's state after the step: the number of
words depends on data (`poisson`); it depends on a normal number that an earlier draw left over (fewer than 16 are drawn
in pairs, and the second of a pair is kept for the next call); skipping would take longer than what it saves.
"""

from __future__ import annotations

import threading
import weakref
from math import prod
from time import perf_counter
from typing import Any

import torch

from gpumux.program.ir import (
    ITEM_BYTES,
    STREAM_BYTES,
    Arg,
    Complex,
    Op,
    Program,
    ScalarRef,
    Tag,
    TensorRef,
    View,
    extent,
)
from gpumux.program.validate import leaves, op_args, out_views

# Operators whose number of words does not depend on the values of their arguments.
_BY_SIZE_ALONE = frozenset(
    f"aten.{name}"
    for name in (
        "bernoulli.default", "bernoulli.p", "bernoulli.Tensor", "bernoulli_.Tensor", "bernoulli_.float",
        "cauchy.default", "cauchy_.default", "exponential.default", "exponential_.default", "geometric.default",
        "geometric_.default", "log_normal.default", "log_normal_.default", "multinomial.default",
        "native_dropout.default", "normal.Tensor_Tensor", "normal.Tensor_float", "normal.float_Tensor",
        "normal.float_float", "normal_.default", "normal_functional.default", "rand.default", "rand_like.default",
        "randint.default", "randint.low", "randint_like.default", "randint_like.low_dtype", "randn.default",
        "randn_like.default", "random.default", "random.from", "random.to", "random_.default", "random_.from",
        "random_.to", "randperm.default", "uniform.default", "uniform_.default",
    )
)  # fmt: skip
_NEVER_ON_THE_CPU = "aten._scaled_dot_product_flash_attention_for_cpu.default"  # its kernel there has no dropout
# An operator on more elements is not run to be measured; its steps are long enough to wait for the answer.
_MEASURED_ELEMENTS = 1 << 22
_MOST_BLOCKS = 2000  # searched for a number of words that is neither one nor two an element
_BLOCK = 624  # words that the Mersenne Twister makes at once
_AT = slice(24, 24 + 8 * _BLOCK)  # the twister's state within the bytes of torch.Generator.get_state()
_NEXT = slice(16, 24)  # the next word's index in that state
# After the state lie the normal numbers kept for the next call, of 64 and of 32 bits: bytes of the number, byte that
# says whether there is one, type.
_KEPT = ((slice(5024, 5032), 5040, torch.float64), (slice(5048, 5052), 5052, torch.float32))
_SCRATCH = 1 << 14  # elements of 64 bits, drawn to skip twice as many words

WAIT_S = 500e-6  # approximate cost of waiting for an answer to a loop that could go on (microbench/draws.py)
SHARE = 0.02  # the part of a step's time that skipping may take

_measured: dict[tuple[Any, ...], int | None] = {}


def words_drawn(program: Program) -> int | None:
    """The number of words of the generator that one step takes, None if it depends on more than the Program. Operators
    that share a random slot (recomputation) draw the same numbers, once."""
    total = 0
    seen: set[int] = set()
    for op in program.ops:
        if op.random is None or op.random in seen:
            continue
        seen.add(op.random)
        words = _words_of(program, op)
        if words is None:
            return None
        total += words
    return total


def _words_of(program: Program, op: Op) -> int | None:
    if op.target == _NEVER_ON_THE_CPU:
        return 0
    given = list(leaves(op_args(op)))
    if op.target not in _BY_SIZE_ALONE or any(isinstance(arg, ScalarRef) for arg in given):
        return None  # the number may differ at the next step
    read = [program.views[arg.view] for arg in given if isinstance(arg, TensorRef)]
    made = [program.views[view] for view in out_views(op.outs)]
    elements = max((prod(view.size) for view in (*read, *made)), default=0)
    if elements > _MEASURED_ELEMENTS:
        return None
    numbers = tuple(repr(arg) for arg in given if not isinstance(arg, TensorRef))
    key = (op.target, numbers, tuple((view.dtype, view.size, view.stride) for view in read))
    if key not in _measured:
        _measured[key] = _measure(program, op, elements)
    return _measured[key]


def _measure(program: Program, op: Op, elements: int) -> int | None:
    """Run the operator from several states of a generator, one of them with kept normal numbers. Returns the number of
    words, or None if it is not the same each time, the kept numbers change, or torch refuses."""
    _, name, overload = op.target.split(".")
    call = getattr(getattr(torch.ops.aten, name), overload)
    takes_generator = any(argument.name == "generator" for argument in call._schema.arguments)
    # Torch's default generator is used only for the few operators that take no other.
    generator = torch.Generator() if takes_generator else torch.default_generator
    more = {"generator": generator} if takes_generator else {}
    before = generator.get_state()
    taken: set[int | None] = set()
    try:
        for seed, kept in ((1, False), (2, False), (1, True)):
            args = [_value(program, arg) for arg in op.args]
            kwargs = {key: _value(program, arg) for key, arg in op.kwargs}
            start = generator.manual_seed(seed).get_state()
            if kept:
                start = with_kept(start)
                generator.set_state(start)
            with torch.no_grad():
                call(*args, **kwargs, **more)
            taken.add(_words_between(start, generator.get_state(), elements))
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return None
    finally:
        generator.set_state(before)
    return taken.pop() if len(taken) == 1 else None


def _value(program: Program, arg: Arg) -> Any:
    """An argument of a call, with made-up tensors: halves and ones are valid as probabilities and as counts."""
    if isinstance(arg, TensorRef):
        view = program.views[arg.view]
        dtype: torch.dtype = getattr(torch, view.dtype)
        count = extent(View(0, view.dtype, view.size, view.stride)) // ITEM_BYTES[view.dtype]
        flat = torch.full((count,), 0.5 if dtype.is_floating_point else 1, dtype=dtype, device="cpu")
        return flat.as_strided(view.size, view.stride)
    if isinstance(arg, tuple):
        return [_value(program, item) for item in arg]
    if isinstance(arg, Complex):
        return complex(arg.re, arg.im)
    if isinstance(arg, Tag):
        return torch.device("cpu") if arg.kind == "device" else getattr(torch, arg.name)
    return arg


def _words_between(start: torch.Tensor, end: torch.Tensor, elements: int) -> int | None:
    """The number of words between the states `start` and `end`. None if skipping that many leads to another state (a
    normal number kept for the next call came or went), or if the states are too far apart. One or two words an element
    are tried first."""
    for words in (2 * elements, elements):
        if torch.equal(_after(start, words), end):
            return words
    skipper = torch.Generator().set_state(start)
    blocks, at = 0, start
    while not torch.equal(at[_AT], end[_AT]):
        if blocks == _MOST_BLOCKS:
            return None
        blocks += 1
        skip(_BLOCK, skipper)
        at = skipper.get_state()
    words = blocks * _BLOCK + _place(end) - _place(at)
    return words if words >= 0 and torch.equal(_after(start, words), end) else None


def with_kept(state: torch.Tensor) -> torch.Tensor:
    """The state with a normal number of either size kept for the next call."""
    found = state.clone()
    for place, valid, dtype in _KEPT:
        found[place] = torch.tensor([0.75], dtype=dtype).view(torch.uint8)
        found[valid] = 1
    return found


def _after(start: torch.Tensor, words: int) -> torch.Tensor:
    generator = torch.Generator().set_state(start)
    skip(words, generator)
    return generator.get_state()


def _place(state: torch.Tensor) -> int:
    return int.from_bytes(bytes(state[_NEXT].tolist()), "little")


def skip(words: int, generator: torch.Generator | None = None) -> None:
    """Advance the generator (default: torch's default one) by `words` 32-bit words."""
    pairs, odd = divmod(words, 2)
    scratch = torch.empty(min(pairs, _SCRATCH), dtype=torch.int64, device="cpu")
    while pairs:
        part = scratch[:pairs]
        part.random_(generator=generator)
        pairs -= part.numel()
    if odd:
        torch.empty(1, dtype=torch.int32, device="cpu").random_(generator=generator)


class ClientGenerator:
    """A generator of this process from which steps draw: torch's default one, shared by jobs, or `own`, one that a job
    has for itself. `lock` is held from reading the state for a step until the generator was advanced past the step, so
    that no two steps draw the same numbers."""

    def __init__(self, own: torch.Generator | None = None) -> None:
        self.own = own
        self.lock = threading.RLock()
        self._source = torch.default_generator if own is None else own
        self._s_per_word = 4e-9

    def state(self) -> torch.Tensor:
        """Its state, uint8 of STATE_BYTES."""
        return self._source.get_state()

    def set_state(self, state: torch.Tensor) -> None:
        """Set its state to the one after a step. Raises RuntimeError if it is none."""
        self._source.set_state(state)

    def waits(self, words: int | None, step_s: float | None) -> bool:
        """Whether to wait for the answer of a step instead of skipping its words. `words`: their number, None if
        unknown; `step_s`: the seconds that the step took when it last ran. A known number is skipped while the process
        has other jobs, because the thread could not send their steps while it waits."""
        if words is None:
            return True
        return len(open_jobs) <= 1 and words * self._s_per_word > max(WAIT_S, SHARE * (step_s or 0.0))

    def skip(self, words: int) -> None:
        began = perf_counter()
        skip(words, self.own)
        if words > 16 * _BLOCK:
            self._s_per_word = (perf_counter() - began) / words


STATE_BYTES = int(torch.Generator().get_state().numel())
assert STATE_BYTES <= STREAM_BYTES
client_generator = ClientGenerator()
open_jobs: weakref.WeakSet[object] = weakref.WeakSet()  # of this process, whatever they draw from
