"""Calls operators with arguments that are smaller than the others imply, where reading past them ends the process.

`python -m tests.program.guard_pages` makes calls of all allowed operators with several tensors, forward and backward:
those of torch's own test samples, and of side_calls.py. It makes each tensor smaller in a dimension, or one number
expanded to the old size, and each list of tensors shorter. It writes side_arguments.json, the table of all allowed
operators, and says which calls crash though `fake_call` and validate.py accept them. It needs the package `expecttest`,
as those samples do. Crashes by the values of an index remain: only index inputs are checked by value (indices.py).

A row of the table says what keeps an operator's kernel within its arguments:
    one      it has one tensor
    rule     check.py or validate.py compares its arguments (`calls` that they let pass were tried)
    kernel   torch's shape rules or the kernel compares them (so many `calls`)
    index    as `kernel`, but for values of an index that the Program computes (so many `crashes`)
    gpu      only GPUs have a kernel, which nothing here can try
"""

from __future__ import annotations

import ctypes
import faulthandler
import io
import itertools
import json
import logging
import mmap
import os
import pickle
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from gpumux.program import check, onednn_lstm, operators, validate
from gpumux.program.ir import View
from tests.program import side_calls
from tests.program.side_calls import Args, operator

aten = torch.ops.aten
Call = tuple[Args, dict[str, Any]]
_libc = ctypes.CDLL(None, use_errno=True)
_maps: list[mmap.mmap] = []  # for the life of the process
LIMIT_S = 20
MOST = 30_000  # elements of a tensor of a sample that is tried
TABLE = Path(__file__).with_name("side_arguments.json")


def guarded(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that ends where a page begins that can't be read or written. An expanded number stays one."""
    if tensor.numel() > 1 and not any(tensor.stride()):
        return guarded(tensor.as_strided((1,), (1,)).clone()).as_strided(tensor.shape, tensor.stride())
    nbytes = tensor.numel() * tensor.element_size()
    pages = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, pages + mmap.PAGESIZE)
    _maps.append(memory)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if _libc.mprotect(ctypes.c_void_p(start + pages), mmap.PAGESIZE, 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    if not nbytes:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    view = torch.frombuffer(memoryview(memory)[pages - nbytes : pages], dtype=tensor.dtype).view(tensor.shape)
    return view.copy_(tensor)


def smaller(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """What takes the place of a tensor."""
    for dim, size in enumerate(tensor.shape):
        for less in {size - 1, 1, 0}:
            if 0 <= less < size:
                yield tensor.narrow(dim, 0, less).contiguous()
    if tensor.dim() and tensor.numel():
        yield tensor.select(0, 0).contiguous()
        yield tensor.flatten()[:1].clone()
        yield tensor.flatten()[:0].clone()
        yield tensor.flatten()[:1].as_strided(tensor.shape, (0,) * tensor.dim())


def accepted(func: Any, leaves: Sequence[Any], spec: TreeSpec) -> bool:
    """Whether the check of a Program lets this call pass."""
    mode = FakeTensorMode()
    views = [
        View(0, str(leaf.dtype).split(".")[-1], tuple(leaf.shape), leaf.stride(), 0)
        if isinstance(leaf, torch.Tensor)
        else leaf
        for leaf in leaves
    ]
    try:
        with mode:
            fakes = [mode.from_tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            args, kwargs = tree_unflatten(fakes, spec)
            check.fake_call(func, args, kwargs, "cpu")
        rule = validate._RULES.get(str(func))
        if rule is not None:
            rule([tuple(each) if isinstance(each, list) else each for each in tree_unflatten(views, spec)[0]])
    except Exception:  # noqa: BLE001 - refused in whatever way
        return False
    return True


def crashes(func: Any, calls: Sequence[Call]) -> tuple[int, list[int]]:
    """How many of the calls the check of a Program accepts, and the positions of those that end a process then. A call
    that ends it while it is checked is refused: checks have processes of their own.

    To be called where there is one thread only: the kernels of a child wait forever for threads that its parent had.
    """
    at, taken, found = 0, 0, []
    while at < len(calls):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            faulthandler.disable()
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(LIMIT_S)
            for args, kwargs in calls[at:]:
                os.write(write, b".")
                leaves, spec = tree_flatten((args, kwargs))
                if not accepted(func, leaves, spec):
                    continue
                os.write(write, b"+")
                with suppress(Exception):
                    ours = [guarded(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
                    args, kwargs = tree_unflatten(ours, spec)
                    func(*args, **kwargs)
            os._exit(0)
        os.close(write)
        said = b""
        while some := os.read(read, 4096):
            said += some
        os.close(read)
        taken += said.count(b"+")
        at += said.count(b".")
        if os.WIFSIGNALED(os.waitpid(child, 0)[1]) and said.endswith(b"+"):
            found.append(at - 1)
    return taken, found


class Separate:
    """`crashes` in a process that has one thread, for callers that may have several."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def crashes(self, func: Any, calls: Sequence[Call]) -> tuple[int, list[int]]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        written = io.BytesIO()
        torch.save(calls, written)  # pickle alone can't say every type of tensor
        pickle.dump((str(func), written.getvalue()), self._process.stdin)
        self._process.stdin.flush()
        found: tuple[int, list[int]] = pickle.load(self._process.stdout)  # noqa: S301 - of our own process
        return found


@contextmanager
def separate() -> Iterator[Separate]:
    command = [sys.executable, "-m", "tests.program.guard_pages", "--serve"]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        one = Separate(process)
        one.crashes(aten.relu.default, [])  # answered when it has started
        yield one  # the end of its input ends it


def _prepare() -> None:
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    accepted(aten.relu.default, *tree_flatten(((torch.zeros(1),), {})))  # the first takes seconds, and no child should


def _serve() -> None:
    _prepare()
    while True:
        try:
            name, written = pickle.load(sys.stdin.buffer)  # noqa: S301 - of our own process
        except EOFError:
            return
        calls = torch.load(io.BytesIO(written), weights_only=False)
        pickle.dump(crashes(operator(name), calls), sys.stdout.buffer)
        sys.stdout.buffer.flush()


def variants(args: Args, kwargs: dict[str, Any]) -> Iterator[Call]:
    """The calls with one tensor made smaller, or one list of tensors shorter."""
    leaves, spec = tree_flatten((args, kwargs))
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            for less in smaller(leaf):
                yield tree_unflatten([*leaves[:position], less, *leaves[position + 1 :]], spec)
    for at, each in enumerate(args):
        if isinstance(each, list) and each and isinstance(each[0], torch.Tensor):
            for shorter in (each[:-1], []) if len(each) > 1 else ([],):
                yield (*args[:at], shorter, *args[at + 1 :]), kwargs


# ---- Calls that torch's samples make.


class _Calls(TorchDispatchMode):
    """Keeps small calls of allowed operators that have several tensors, five of each at most."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, list[tuple[Any, list[Any], TreeSpec]]] = {}
        self._shapes: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, spec = tree_flatten((args, kwargs or {}))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        known = self.found.setdefault(str(func), [])
        key = (str(func), *((tuple(tensor.shape), tensor.dtype) for tensor in tensors))
        plain = all(t.layout == torch.strided and t.device.type == "cpu" and 0 < t.numel() < MOST for t in tensors)
        if str(func) in operators.ALLOWED and len(tensors) > 1 and plain and len(known) < 5 and key not in self._shapes:
            self._shapes.add(key)
            copies = [
                leaf.detach().clone(memory_format=torch.contiguous_format) if isinstance(leaf, torch.Tensor) else leaf
                for leaf in leaves
            ]
            known.append((func, copies, spec))
        return func(*args, **(kwargs or {}))


def _of_samples() -> dict[str, list[tuple[Any, list[Any], TreeSpec]]]:
    from torch.testing._internal.common_methods_invocations import op_db

    calls = _Calls()
    for op in op_db:
        for dtype in {torch.float32, torch.int64} & op.supported_dtypes("cpu"):
            grad = dtype is torch.float32 and op.supports_autograd
            with suppress(Exception):
                for sample in itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=grad), 12):
                    with suppress(Exception), calls:
                        out = op(sample.input, *sample.args, **sample.kwargs)
                        outs = [o for o in tree_flatten(out)[0] if isinstance(o, torch.Tensor) and o.requires_grad]
                        if outs:
                            torch.autograd.backward(outs, [torch.ones_like(o) for o in outs])
    for kind in (torch.nn.LSTM, torch.nn.GRUCell, torch.nn.LSTMCell):
        model = kind(5, 3)
        out = model(torch.randn(4, 2, 5) if kind is torch.nn.LSTM else torch.randn(2, 5))
        with calls:
            out = model(torch.randn(4, 2, 5) if kind is torch.nn.LSTM else torch.randn(2, 5))
            sum(each.sum() for each in tree_flatten(out)[0]).backward()
    for make in (
        lambda params: torch.optim.Adam(params, fused=True, amsgrad=True),
        lambda params: torch.optim.SGD(params, 0.1, momentum=0.9, fused=True),
        lambda params: torch.optim.Adagrad(params, fused=True),
    ):
        model = torch.nn.Linear(5, 3)
        optimizer = make(model.parameters())
        for _ in range(2):
            model(torch.randn(2, 5)).sum().backward()
            with calls:
                optimizer.step()
    return {name: found for name, found in calls.found.items() if found}


def tensors(name: str) -> int:
    """How many tensors an operator takes, a list being several."""
    kinds = [str(argument.type) for argument in operator(name)._schema.arguments]
    return sum(2 if "List[" in kind else 1 for kind in kinds if "Tensor" in kind)


def only_on_gpus(name: str) -> bool:
    packet = name.replace("aten.", "aten::").removesuffix(".default")
    return not any(torch._C._dispatch_has_kernel_for_dispatch_key(packet, key) for key in _CPU_KEYS)


_CPU_KEYS = (
    "CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd", "CompositeExplicitAutogradNonFunctional",
    "MkldnnCPU",
)  # fmt: skip


def has_rule(name: str) -> bool:
    given = check._SIDES, check._FUSED, check._RECURRENT
    return name in validate._RULES or any(operator(name) in rules for rules in given)


def every_call() -> dict[str, list[Call]]:
    """Valid calls of allowed operators with several tensors, by name."""
    calls = {name: [tree_unflatten(leaves, spec) for _, leaves, spec in each] for name, each in _of_samples().items()}
    lists = [name for name in operators.ALLOWED if name.startswith("aten._foreach")]
    for func, args, kwargs in (*side_calls.written(), *side_calls.of_lists(lists)):
        calls.setdefault(str(func), []).append((args, kwargs))
    for name in operators.ALLOWED - calls.keys():  # an operator in place takes what the other form takes
        packet, overload = name.removeprefix("aten.").split(".")
        other = f"aten.{packet.rstrip('_')}.{overload}"
        if packet.endswith("_") and other in calls:
            calls[name] = calls[other]
    return calls


def row(name: str, calls: list[Call]) -> dict[str, Any]:
    """The operator's row of the table; `by` is "" if there is none to give."""
    if tensors(name) < 2:
        return {"by": "one"}
    taken, crashed, valid = 0, [], 0
    for args, kwargs in calls:
        valid += crashes(operator(name), [(args, kwargs)])[0]
        smaller_calls = list(variants(args, kwargs))
        count, bad = crashes(operator(name), smaller_calls)
        taken += count
        crashed += [shapes(smaller_calls[at]) for at in bad]
    if not valid:
        return {"by": "gpu" if only_on_gpus(name) else ""}
    if crashed and name != str(onednn_lstm.BACKWARD):  # whose workspace has to be what the forward layer made
        return {"by": "index", "calls": taken, "crashes": len(crashed), "such as": crashed[0][:150]}
    return {"by": "rule" if has_rule(name) else "kernel", "calls": taken}


def main() -> int:
    _prepare()
    calls = every_call()
    table = {}
    for name in sorted(operators.ALLOWED):
        table[name] = row(name, calls.get(name, []))
        if table[name]["by"] in ("", "index"):
            print(name, table[name] if table[name]["by"] else "no valid call is known, or it is refused", flush=True)
    TABLE.write_text("{\n" + ",\n".join(f"{json.dumps(n)}: {json.dumps(r)}" for n, r in table.items()) + "\n}\n")
    counts = Counter(each["by"] for each in table.values())
    tried = sum(each.get("calls", 0) for each in table.values())
    print(f"{len(table)} operators: {dict(counts)}; {tried} calls with a smaller argument that the check accepts")
    return 0 if all(each["by"] for each in table.values()) else 1


def shapes(call: Call) -> str:
    """The shapes of a call's tensors, and its other arguments."""
    return ", ".join(
        str(tuple(leaf.shape)) if isinstance(leaf, torch.Tensor) else str(leaf) for leaf in tree_flatten(call)[0]
    )


if __name__ == "__main__":
    sys.exit(_serve() if sys.argv[1:] == ["--serve"] else main())
