"""One model of an array: its captured steps and its Python objects. Below: the memory of all models' state."""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch

from gpumux.capture.fetching import without_modes
from gpumux.capture.local_state import Pull, dictionaries, install, load_local
from gpumux.capture.staleness import StalenessHooks, Wording
from gpumux.capture.state import ALL, Part, Place, StateTable, byte_view
from gpumux.capture.step import Choice, KeepMore, StepFunction
from gpumux.capture.structure import State, Structure, from_local
from gpumux.capture.tracer import Tracer
from gpumux.client.arguments import several
from gpumux.client.job import example_arguments
from gpumux.client.snapshots import SnapshotMetadata
from gpumux.errors import LocalWrite, NotFusible, StaleState
from gpumux.fuse import zeros
from gpumux.program import operators


def _words(name: str) -> Wording:
    return Wording(
        name,
        "",
        "call the array's sync() first",
        "call the array's sync() before changing it, and its load() afterwards",
    )


class Member:
    """A model of an array, with `step`, `model` and `optimizer` as the factory made them.

    Its state tensors are buffers of `table`, numbered alike in all models of one kind. twice: trace the step a second
    time, as a job does. on_read: called when the local model is read while the array's state is newer."""

    def __init__(
        self,
        name: str,
        step: Callable[..., Any],
        model: Any,
        optimizer: Any,
        *,
        max_variants: int | None,
        devices: tuple[str, str] = ("cpu", "cpu"),
        twice: bool = True,
        on_read: Callable[[Member], None] | None = None,
    ) -> None:
        self.name = name
        self.on_read = on_read
        self.table = StateTable(
            several(model, torch.nn.Module, "model"), several(optimizer, torch.optim.Optimizer, "optimizer"), *devices
        )
        self._zeros = zeros.places(self.table.optimizers)
        self._structures: dict[Structure, Structure] = {}
        self._lost: dict[int, Place] = {}
        tracer = Tracer(self.table, operators.is_allowed)
        structure, host = from_local(self.table)
        self.state = State(self._intern(structure), host, frozenset(i for i, _ in structure.kept))
        self.guard = StalenessHooks(_words(name), self.table, _Source(self))
        self._function = StepFunction(
            step, self.table, tracer, self.guard, intern=self._intern, max_variants=max_variants, twice=twice
        )

    def _intern(self, structure: Structure) -> Structure:
        return self._structures.setdefault(structure, structure)

    def choose(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Choice:
        """The Program and batch of a step now. Raises CaptureError or a subclass, or LocalWrite; nothing changes
        then."""
        choice = self.choose_from(self.state, args, kwargs) or self.choose_from(self.state, args, kwargs)
        assert choice is not None, "all gradients that the step reads are kept"
        return choice

    def choose_from(self, state: State, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Choice | None:
        """The Program and batch of a step from `state`. None if more gradients must be kept than before; `state.keep`
        is updated then. Raises as `choose`."""
        if self._zeros:  # a schedule, or a loaded state, may have set them
            zeros.put(self.table.optimizers, self._zeros, zeros.LEAST)
        self.guard.check_writes(bytes_too=True)
        self._take_gradients()
        choice = self._function.choose(args, kwargs, state)
        if isinstance(choice, KeepMore):
            self.state.keep = choice.keep
            return None
        if choice.program.skips:
            raise NotFusible(
                "the step steps an optimizer under a GradScaler, which an array of models does not",
                "use bfloat16, or keep each model's scale in a buffer (docs/fusion.md, Loss scaling)",
            )
        if choice.program.checks:
            raise NotFusible(
                f"the step checks values ({choice.program.checks[0][1].wrong}), which an array of models does not",
                "turn the checks off: validate_args=False",
            )
        if choice.program.written or choice.program.on_batch:
            raise NotFusible(
                "the step changes its batch (in place, or by requires_grad_()), which the models of an array share",
                "begin the step with x = x.clone()",
            )
        return choice

    def advance(self, choice: Choice) -> None:
        """Apply the Python side effects of a step that has run."""
        self.state = choice.after(self.state.keep)
        choice.apply(self.table)
        self.guard.newer()

    def _take_gradients(self) -> None:
        """Forget gradients that the script cleared. Raises LocalWrite if it set some that a step reads."""
        changes = self.guard.gradient_changes()
        if not changes:
            return
        if any(i in self.state.keep for i, value in changes.items() if value is not None):
            raise LocalWrite(f"gradients were changed while {self.name} holds them", self.guard.words.load)
        gone = [i for i, value in changes.items() if value is None]
        self.state.structure = self._intern(self.state.structure.without_gradients(gone))
        self.guard.gradients.changes_taken()

    def dictionaries(self, pull: Pull) -> dict[str, Any]:
        """{"model": ..., "optimizer": ...} of the array's state."""
        with self.guard.suspended():
            found = dictionaries(self.table, self.state, pull)
        if self._zeros:
            several_of = found["optimizer"]
            for each in several_of if isinstance(several_of, list) else [several_of]:
                each["param_groups"] = zeros.restored(each["param_groups"])
        return found

    def install(self, pull: Pull) -> None:
        """Copy the array's state into the local model and optimizer."""
        with without_modes():
            install(self.table, self.state, pull, mine=self.guard.gradients.written())
            self.guard.fetched(ALL)

    def resume(self, kept: SnapshotMetadata) -> None:
        """Overwrite the local model and optimizer with a snapshot, and adopt them as the array's state: the caller
        copies the buffers. Raises ConfigError for a snapshot of another model."""
        with self.guard.suspended(writes=True):
            kept.put_back(self.table)
            self._adopt()
        self.guard.fetched(ALL, adopted=True)

    def adopt(self, state: dict[str, Any]) -> None:
        """Load `state` into the local objects and adopt them as the array's state: the caller copies the buffers."""
        self._lost = self.guard.gradients.lost()
        with self.guard.suspended(writes=True):
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
        zeros.put(self.table.optimizers, self._zeros, 0.0)


class _Source:
    """Where a member's staleness hooks fetch its state from."""

    def __init__(self, member: Member) -> None:
        self._member = member

    def structure(self) -> Structure:
        return self._member.state.structure

    def fetch(self, parts: frozenset[Part]) -> None:
        if self._member.on_read is None:
            raise StaleState(
                f"the model of {self._member.name} was read, and its steps are only tried", "read it afterwards"
            )
        self._member.on_read(self._member)


__all__ = ["Member", "example_arguments"]


# ---- The state of an array: each buffer of the models' tables, B times, one model after another.


Key: TypeAlias = "tuple[str, int, int]"  # name, bytes of one model, number of earlier keys with that name and size
STREAM: Key = ("random generator", 0, 0)


_keys: WeakKeyDictionary[StateTable, tuple[list[Key], Counter[tuple[str, int]]]] = WeakKeyDictionary()


def keys_of(table: StateTable) -> list[Key]:
    """A key for each buffer, the same in every model's table even if tables found their buffers in another order."""
    keys, seen = _keys.setdefault(table, ([], Counter()))  # kept, since buffers are only ever added
    for buffer in table.buffers[len(keys) :]:
        named = buffer.name, buffer.nbytes
        keys.append((*named, seen[named]))
        seen[named] += 1
    return keys


def key_of(table: StateTable, index: int) -> Key:
    return keys_of(table)[index]


class ArrayMemory:
    """State of all models. `lines[key]` holds one buffer of every model: B equal parts, model b's the b-th."""

    def __init__(self, models: int) -> None:
        self.models = models
        self.lines: dict[Key, torch.Tensor] = {}
        self._maps: dict[Key, mmap.mmap] = {}

    def line(self, key: Key, nbytes: int) -> tuple[torch.Tensor, bool]:
        """The line of a key, and whether it is new (zeros)."""
        found = self.lines.get(key)
        if found is not None:
            return found, False
        return self._new(key, nbytes * self.models), True

    def _new(self, key: Key, nbytes: int) -> torch.Tensor:
        """Zeros on a page boundary, freed with their last reference."""
        try:
            self._maps[key] = mmap.mmap(-1, max(1, nbytes))
        except (OSError, MemoryError) as error:
            raise NotFusible(
                f"there is no memory for {nbytes} bytes of state ({error})", "put fewer models into one array"
            ) from error
        made = self.lines[key] = torch.frombuffer(self._maps[key], dtype=torch.uint8)[:nbytes]
        return made

    def run(self, key: Key, first: int, count: int) -> torch.Tensor:
        """The parts of `count` models from model `first` on, as the start of a storage of its own."""
        nbytes = self.lines[key].numel() // self.models
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._maps[key], dtype=torch.uint8, count=nbytes * count, offset=nbytes * first)

    def part(self, key: Key, model: int) -> torch.Tensor:
        line = self.lines[key]
        nbytes = line.numel() // self.models
        return line[model * nbytes : (model + 1) * nbytes]

    def push(self, key: Key, model: int, table: StateTable, index: int) -> None:
        """Copy the local bytes of a buffer in, if it is filled."""
        buffer = table.buffers[index]
        if buffer.filled:
            part = self.part(key, model)
            for storage, start in buffer.home:
                part[start : start + storage.nbytes()].copy_(byte_view(storage))

    def pull(self, model: int, table: StateTable) -> Callable[[Callable[[int, torch.Tensor], None]], None]:
        """A function that passes each buffer of a model held here to a writer, as `local_state.install` takes it."""

        def pull(write: Callable[[int, torch.Tensor], None]) -> None:
            for index in range(len(table.buffers)):
                key = key_of(table, index)
                if key in self.lines:
                    write(index, self.part(key, model))

        return pull

    def without(self, model: int) -> ArrayMemory:
        """A copy without one model."""
        made = ArrayMemory(self.models - 1)
        for key, line in self.lines.items():
            rows = line.view(self.models, -1)
            made._new(key, line.numel() // self.models * made.models)
            made.lines[key].view(made.models, -1).copy_(torch.cat([rows[:model], rows[model + 1 :]]))
        return made

    def with_one(self) -> ArrayMemory:
        """A copy with one more model, of zeros, at its end."""
        made = ArrayMemory(self.models + 1)
        for key, line in self.lines.items():
            made._new(key, line.numel() // self.models * made.models)
            made.lines[key][: line.numel()].copy_(line)
        return made
