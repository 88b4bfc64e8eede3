"""What an idiom is, how it is run, and how two runs are compared."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Protocol

import torch
from torch import nn

from gpumux import client, errors


class Train(Protocol):
    """What a script calls with its step: `gpumux.client.submit(...).step`, or the step itself in the plain run.

    `add` and `load_state` are those of the last job, for scripts changed to use them; `endpoint` is for scripts that
    train through an integration, and None in the plain run."""

    @property
    def endpoint(self) -> str | None: ...

    def __call__(
        self, step: Callable[..., Any], example: Any, *, model: Any = None, optimizer: Any = None, **given: Any
    ) -> Callable[..., Any]: ...

    def add(self, step: Callable[..., Any], example: Any) -> Callable[..., Any]: ...

    def load_state(self) -> None: ...


class _Plain:
    endpoint = None

    def __call__(self, step: Callable[..., Any], example: Any, **_: Any) -> Callable[..., Any]:
        return step

    def add(self, step: Callable[..., Any], example: Any) -> Callable[..., Any]:
        return step

    def load_state(self) -> None:
        pass


def _script_state(given: dict[str, Any]) -> Any:
    """What a refused submit must leave as it is: models, optimizers, gradients and the random generator."""
    held = [given.get("model"), given.get("optimizer")]
    flat = [one for each in held for one in (each if isinstance(each, (list, tuple)) else [each])]
    modules = [one for one in flat if isinstance(one, nn.Module)]
    gradients = [p.grad for m in modules for p in m.parameters()]
    flags = [[m.training for m in one.modules()] for one in modules]
    return settled([flat, gradients, flags, torch.get_rng_state()])


class _Through:
    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.jobs: list[client.Job[Any]] = []

    def __call__(self, step: Callable[..., Any], example: Any, **given: Any) -> Callable[..., Any]:
        before = _script_state(given)
        try:
            self.jobs.append(client.submit(step, example=example, endpoint=self.endpoint, **given))
        except errors.GpumuxError as error:
            changed = difference(before, _script_state(given), "state")
            if changed is not None:
                raise AssertionError(f"a refused submit changed the script's state: {changed}") from error
            raise
        return self.jobs[-1].step

    def add(self, step: Callable[..., Any], example: Any) -> Callable[..., Any]:
        return self.jobs[-1].add(step, example=example)

    def load_state(self) -> None:
        self.jobs[-1].load_state()


Script = Callable[[Train], Any]  # returns all that is compared: numbers, tensors, modules, and containers of them


@dataclass(frozen=True)
class Idiom:
    """`refused`: the error that the script as written ends with; `instead`: what to write. `changed`: the script with
    that change, which works. `differs`: how its results differ from the plain run's, where a warning says so. With none
    of these, it works as written."""

    theme: str
    title: str
    script: Script
    refused: type[errors.GpumuxError] | None = None
    instead: str = ""
    changed: Script | None = None
    needs: tuple[str, ...] = ()  # packages
    differs: str = ""

    @property
    def name(self) -> str:
        return f"{self.theme}-{self.script.__name__}"

    @property
    def works(self) -> bool:
        """Whether the script works as written."""
        return self.refused is None and not self.differs


REGISTRY: list[Idiom] = []


def idiom(
    title: str, *, refused: type[errors.GpumuxError] | None = None, instead: str = "", changed: Script | None = None,
    needs: tuple[str, ...] = (), differs: str = "",
) -> Callable[[Script], Script]:  # fmt: skip
    """Enter a script into the registry. Its theme is the name of its module."""
    if (refused is None) != (not instead):
        raise ValueError("what is refused says what to write instead")

    def enter(script: Script) -> Script:
        theme = script.__module__.rpartition(".")[2]
        REGISTRY.append(Idiom(theme, title, script, refused, instead, changed, needs, differs))
        return script

    return enter


def run_plainly(script: Script) -> Any:
    return _run(script, _Plain())


def run_through(script: Script, endpoint: str) -> Any:
    """Run the script with jobs at this daemon; they are closed at its end. Raises what it raises."""
    train = _Through(endpoint)
    try:
        found = _run(script, train)
        return settled(found)
    finally:
        for job in train.jobs:
            job.close()


def _run(script: Script, train: Train) -> Any:
    """What the script returns, and the state of torch's generator at its end."""
    with one_thread():
        random.seed(0)
        torch.manual_seed(0)
        found = settled(script(train))
        return [found, torch.get_rng_state()]


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def settled(value: Any) -> Any:
    """The value with futures waited for, and modules and optimizers replaced by copies of their state."""
    if isinstance(value, client.StepFuture):
        return settled(value.result())
    if isinstance(value, nn.Module):
        return settled(dict(value.state_dict()))
    if isinstance(value, torch.optim.Optimizer):
        return settled(value.state_dict())
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: settled(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {key: settled(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [settled(each) for each in value]
    return value


def difference(one: Any, other: Any, path: str = "result") -> str | None:
    """Where two settled results differ in a bit, None if they are the same."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        same = (
            isinstance(one, torch.Tensor)
            and isinstance(other, torch.Tensor)
            and one.dtype == other.dtype
            and one.shape == other.shape
            and torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (one, other)))
        )
        return None if same else f"{path}: {one!r:.200} and {other!r:.200}"
    if type(one) is not type(other):
        return f"{path}: {type(one).__name__} and {type(other).__name__}"
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return f"{path}: keys {sorted(map(str, one.keys() ^ other.keys()))}"
        pairs = [(f"{path}[{key!r}]", one[key], other[key]) for key in one]
    elif isinstance(one, list):
        if len(one) != len(other):
            return f"{path}: {len(one)} and {len(other)} entries"
        pairs = [(f"{path}[{i}]", a, b) for i, (a, b) in enumerate(zip(one, other, strict=True))]
    else:
        return None if one == other or one != one != other else f"{path}: {one!r:.200} and {other!r:.200}"
    return next((found for name, a, b in pairs if (found := difference(a, b, name)) is not None), None)
