"""Prints the functions of torch that bypass `__torch_function__` and whose results depend on a tensor's stale
values."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn

from gpumux.capture import fetching as overrides
from gpumux.capture.fetching import ReadHandler, mark_stale, without_fetching
from gpumux.capture.state import Part

# Functions that change settings, write files, or are modes.
_ACT = (
    "set_",
    "manual_seed",
    "use_",
    "fork",
    "wait",
    "seed",
    "init_",
    "import_",
    "save",
    "load",
    "compile",
    "autocast_",
    "_",
    "from_file",
)


class _Counting(ReadHandler):
    """Counts what is fetched."""

    fetches = 0

    def fetch(self, parts: frozenset[Part]) -> None:
        self.fetches += 1

    def mark_stale(self, tensor: Tensor, part: Part | None, index: int = -1) -> None: ...
    def gradient(self, index: int) -> Tensor | None: ...
    def gradient_set(self, index: int, value: Tensor | None) -> None: ...
    def gradient_zeroed(self, index: int, value: Tensor) -> None: ...
    def has(self, module: nn.Module) -> bool:
        return False


_ARGUMENTS: tuple[Callable[[Tensor], tuple[Any, ...]], ...] = (
    lambda p: (p,),
    lambda p: (p, p),
    lambda p: (p, p, p),
    lambda p: ([p],),
    lambda p: ((3,), p),
    lambda p: (0, p),
    lambda p: (torch.zeros(p.shape), p),
)
_FORMS = (((), torch.float32), ((), torch.int64), ((3,), torch.float32), ((3,), torch.int64), ((3, 3), torch.float32))


def _result(
    function: Callable[..., Any], tensor: Tensor, arguments: Callable[[Tensor], tuple[Any, ...]]
) -> tuple[bool, list[Tensor]]:
    """Whether it fetched, and the tensors that it gave."""
    keeper = _Counting()
    mark_stale(tensor, keeper, Part.MODEL)
    torch.manual_seed(0)
    try:
        out = pytree.tree_leaves(function(*arguments(tensor)))
    except Exception:  # noqa: BLE001  it takes no such arguments
        return False, []
    with without_fetching():
        return keeper.fetches > 0, [x.detach().clone() for x in out if isinstance(x, Tensor)]


def _sees_nothing(function: Callable[..., Any]) -> bool:
    """Whether the values of a tensor that is behind come into its result, and no fetch was asked for."""
    for shape, dtype in _FORMS:
        for arguments in _ARGUMENTS:
            asked, one = _result(function, torch.full(shape, 1, dtype=dtype), arguments)
            _, other = _result(function, torch.full(shape, 2, dtype=dtype), arguments)
            if not asked and len(one) == len(other) and not all(map(torch.equal, one, other)):
                return True
    return False


def _asked(owner: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    ignored = torch.overrides.get_ignored_functions()
    for name in dir(owner):
        function = getattr(owner, name)
        if name.startswith(_ACT) or isinstance(function, type) or not callable(function):
            continue
        with contextlib.suppress(TypeError):  # what has no hash is in no set
            if function in ignored or name in overrides.TORCH:
                yield name, function


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    overrides.install()
    for owner, of in ((torch, "torch"), (Tensor, "Tensor"), (F, "functional")):
        print(*(f"{of}.{name}" for name, function in _asked(owner) if _sees_nothing(function)), sep="\n")
