"""One model of an array: its captured steps, and where its Python side stands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gpumux.client.alone import alone
from gpumux.client.arguments import several
from gpumux.client.capturing import example_arguments
from gpumux.client.keepsake import Keepsake
from gpumux.client.localstate import Pull, dictionaries, install, load_local
from gpumux.client.stale import StaleGuard, Words
from gpumux.client.state import ALL, Part, Place, StateTable
from gpumux.client.structure import Structure, from_local
from gpumux.client.trace import Tracer
from gpumux.client.variants import Choice, KeepMore, State, StepFunction
from gpumux.errors import LocalWrite, StaleState
from gpumux.program import allowlist


def _words(name: str) -> Words:
    return Words(
        name,
        "",
        "call the array's sync() first",
        "call the array's sync() before changing it, and its load() afterwards",
    )


class Member:
    """`step`, `model` and `optimizer` as a factory made them. `twice`: trace the step once more, as a job does. Its
    tensors of state are buffers of `table`, numbered alike in all models of one kind."""

    def __init__(
        self,
        name: str,
        step: Callable[..., Any],
        model: Any,
        optimizer: Any,
        max_variants: int,
        devices: tuple[str, str] = ("cpu", "cpu"),
        twice: bool = True,
        *,
        bring: Callable[[Member], None] | None = None,
    ) -> None:
        self.name = name
        self.bring = bring
        self.table = StateTable(
            several(model, torch.nn.Module, "model"), several(optimizer, torch.optim.Optimizer, "optimizer"), *devices
        )
        self._structures: dict[Structure, Structure] = {}
        self._lost: dict[int, Place] = {}
        tracer = Tracer(self.table, allowlist.is_allowed, by_device=False)  # arrays are made of the CPU's operators
        structure, host = from_local(self.table)
        self.state = State(self._intern(structure), host, frozenset(i for i, _ in structure.kept))
        self.guard = StaleGuard(_words(name), self.table, _Source(self))
        self._function = StepFunction(step, self.table, tracer, self.guard, self._intern, max_variants, twice=twice)

    def _intern(self, structure: Structure) -> Structure:
        return self._structures.setdefault(structure, structure)

    def choose(self, args: tuple[Any, ...], kwargs: dict[str, Any], at: State | None = None) -> Choice:
        """What a step on this batch runs, now or from the state `at`. Raises CaptureError and its kin, and LocalWrite;
        nothing changes then. With `at`, KeepMore when more gradients must be kept, as they are from then on."""
        self.guard.check_writes(bytes_too=True)
        self._take_gradients()
        try:
            return self._function.choose(args, kwargs, at or self.state)
        except KeepMore as more:
            self.state.keep = more.keep
            if at is not None:
                raise
            return self._function.choose(args, kwargs, self.state)

    def advance(self, choice: Choice) -> None:
        """The step has run: what its Python would have changed is changed."""
        self.state = choice.after(self.state.keep)
        choice.settle(self.table)
        self.guard.newer()

    def _take_gradients(self) -> None:
        """Go on without the gradients that the script cleared. Raises LocalWrite where it set some that a step reads."""
        changes = self.guard.gradient_changes()
        if not changes:
            return
        if any(i in self.state.keep for i, value in changes.items() if value is not None):
            raise LocalWrite(f"gradients were changed while {self.name} holds them", self.guard.words.load)
        gone = [i for i, value in changes.items() if value is None]
        self.state.structure = self._intern(self.state.structure.without_gradients(gone))
        self.guard.gradients.told()

    def dictionaries(self, pull: Pull) -> dict[str, Any]:
        """{"model": ..., "optimizer": ...} of the array's state."""
        with self.guard.quiet():
            return dictionaries(self.table, self.state, pull)

    def install(self, pull: Pull) -> None:
        """The array's state into the local model and optimizer."""
        with alone():
            install(self.table, self.state, pull, mine=self.guard.gradients.written())
            self.guard.fetched(ALL)

    def resume(self, kept: Keepsake) -> None:
        """Overwrite the local model and optimizer with a snapshot, and take that for the array's: the caller copies the buffers.
        Raises ConfigError where it is of another model."""
        with self.guard.quiet(writes=True):
            kept.put_back(self.table)
            self._adopt()
        self.guard.fetched(ALL, adopted=True)

    def adopt(self, state: dict[str, Any]) -> None:
        """Take the local state, with `state` loaded into it first, for the array's: the caller copies the buffers."""
        self._lost = self.guard.gradients.lost()
        with self.guard.quiet(writes=True):
            load_local(self.table, state)
            self._adopt()
        self.guard.fetched(ALL, adopted=True)

    def _adopt(self) -> None:
        self.table.refresh()
        structure, host = from_local(self.table, self._lost)
        keep = self.state.keep | frozenset(i for i, _ in structure.kept)
        self.state = State(self._intern(structure), host, keep)

    def release(self) -> None:
        self.guard.remove()


class _Source:
    """What a member's guard fetches from."""

    def __init__(self, member: Member) -> None:
        self._member = member

    def structure(self) -> Structure:
        return self._member.state.structure

    def fetch(self, parts: frozenset[Part]) -> None:
        if self._member.bring is None:
            raise StaleState(
                f"the model of {self._member.name} was read, and its steps are only tried", "read it afterwards"
            )
        self._member.bring(self._member)


__all__ = ["Member", "example_arguments"]
