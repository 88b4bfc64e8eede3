"""Calls operators with arguments that are smaller than the others imply, where reading past them ends the process.

`python -m tests.program.guard_pages` takes the calls that torch's own test samples (operators, forward and backward)
make of allowed operators, and says which of them crash with an argument that `fake_call` and validate.py accept: made
smaller in a dimension, or one number expanded to the old size. It needs the package `expecttest`, as those samples do.
Crashes that depend on the values of an index remain: index inputs are checked by value before a step (indices.py).
"""

from __future__ import annotations

import ctypes
import faulthandler
import itertools
import logging
import mmap
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from gpumux.program import check, operators, validate
from gpumux.program.ir import View

aten = torch.ops.aten
_libc = ctypes.CDLL(None, use_errno=True)
_maps: list[mmap.mmap] = []  # for the life of the process
LIMIT_S = 20


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
    if tensor.dim():
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


def crashes(func: Any, calls: Sequence[Sequence[Any]], spec: TreeSpec) -> Iterator[int]:
    """The positions of those calls that end a process of their own.

    To be called where there is one thread only: the kernels of a child wait forever for threads that its parent had.
    """
    at = 0
    while at < len(calls):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            faulthandler.disable()
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(LIMIT_S)
            for leaves in calls[at:]:
                os.write(write, b".")
                with suppress(Exception):
                    ours = [guarded(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
                    args, kwargs = tree_unflatten(ours, spec)
                    func(*args, **kwargs)
            os._exit(0)
        os.close(write)
        done = 0
        while some := os.read(read, 4096):
            done += len(some)
        os.close(read)
        if not os.WIFSIGNALED(os.waitpid(child, 0)[1]):
            return
        at += done
        yield at - 1


class Separate:
    """`crashes` in a process that has one thread, for callers that may have several."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def crashes(self, func: Any, calls: Sequence[Sequence[Any]], spec: TreeSpec) -> list[int]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pickle.dump((str(func), [tree_unflatten(leaves, spec) for leaves in calls]), self._process.stdin)
        self._process.stdin.flush()
        found: list[int] = pickle.load(self._process.stdout)  # noqa: S301 - of our own process
        return found


@contextmanager
def separate() -> Iterator[Separate]:
    command = [sys.executable, "-m", "tests.program.guard_pages", "--serve"]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        one = Separate(process)
        one.crashes(aten.relu.default, [], tree_flatten(())[1])  # answered when it has started
        yield one  # the end of its input ends it


def _serve() -> None:
    torch.set_num_threads(1)
    while True:
        try:
            name, calls = pickle.load(sys.stdin.buffer)  # noqa: S301 - of our own process
        except EOFError:
            return
        _, packet, overload = name.split(".")
        func = getattr(getattr(aten, packet), overload)
        flat = [tree_flatten(call) for call in calls]
        found = list(crashes(func, [leaves for leaves, _ in flat], flat[0][1])) if flat else []
        pickle.dump(found, sys.stdout.buffer)
        sys.stdout.buffer.flush()


def variants(leaves: Sequence[Any]) -> Iterator[tuple[int, list[Any]]]:
    """The calls with one argument made smaller, each with that argument's position."""
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            for less in smaller(leaf):
                yield position, [less if i == position else other for i, other in enumerate(leaves)]


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
        plain = all(t.layout == torch.strided and t.device.type == "cpu" and 0 < t.numel() < 4000 for t in tensors)
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


def main() -> int:
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    found, tried = _of_samples(), 0
    bad: dict[str, list[str]] = {}
    for name in sorted(found):
        for func, leaves, spec in found[name]:
            calls = [each for each in variants(leaves) if accepted(func, each[1], spec)]
            tried += len(calls)
            for at in crashes(func, [call for _, call in calls], spec):
                position, call = calls[at]
                shapes = [tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else leaf for leaf in call]
                bad.setdefault(name, []).append(f"argument {position} of {shapes}")
    print(f"{len(found)} operators, {tried} calls with a smaller argument that the check accepts")
    for name, lines in bad.items():
        print(f"{name}: {len(lines)} crash, such as {lines[0][:150]}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(_serve() if sys.argv[1:] == ["--serve"] else main())
