"""Copies the daemon's state into the local objects, or into dictionaries."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from gpumux.capture.fetching import plain_state
from gpumux.capture.state import ALL, Part, Place, StateTable, byte_view
from gpumux.capture.structure import DeviceLeaf, HostLeaf, State, thaw
from gpumux.errors import ConfigError

Pull = Callable[[Callable[[int, torch.Tensor], None]], None]


def install(
    table: StateTable, state: State, pull: Pull, parts: frozenset[Part] = ALL, mine: Collection[int] = ()
) -> None:
    """Overwrite these parts of the local state with the daemon's. `pull` calls its argument with the buffers' numbers
    and bytes (uint8); buffers of other parts are ignored. `mine`: buffers that are newer here and stay as they are."""
    wanted = None if parts == ALL else state.structure.buffers(table, parts)

    def write(buffer: int, data: torch.Tensor) -> None:
        if buffer in mine or (wanted is not None and buffer not in wanted):
            return
        for storage, start in table.buffers[buffer].home:
            byte_view(storage).copy_(data[start : start + storage.nbytes()])
        table.buffers[buffer].filled = True

    pull(write)
    if Part.MODEL in parts:
        torch.autograd.graph.increment_version([t for _, t in table.tensors])  # so that autograd refuses older graphs
    if Part.OPTIMIZER in parts:
        for optimizer, frozen in zip(table.optimizers, state.structure.optimizers, strict=True):
            _put_state(optimizer, _state(table, frozen, state, table.local), table)


def _put_state(optimizer: Any, fresh: Any, table: StateTable) -> None:
    """Write the state into the dictionaries and step counters that exist, as the optimizer does, because a script may
    hold them."""
    old = plain_state(optimizer.state)
    if type(old) not in (dict, defaultdict):
        optimizer.state = fresh
        return
    merged = {key: _merged(old.get(key), entry, table) for key, entry in fresh.items()}
    for key, entry in old.items():
        if type(entry) is dict and not entry:  # made by a script that looked for state that is not there
            merged.setdefault(key, entry)
    old.clear()
    old.update(merged)
    optimizer.state = old


def _merged(old: Any, entry: Any, table: StateTable) -> Any:
    if type(old) is not dict or type(entry) is not dict:
        return entry
    for key, value in entry.items():
        mine = old.get(key)
        if mine is value or not isinstance(mine, torch.Tensor) or not isinstance(value, torch.Tensor):
            continue
        counter = mine.dim() == value.dim() == 0 and table.lookup(value) is None
        if counter and mine.dtype == value.dtype:
            mine.copy_(value)
            entry[key] = mine
    old.clear()
    old.update(entry)
    return old


def _state(table: StateTable, frozen: Any, state: State, tensor_at: Callable[[Place], torch.Tensor]) -> Any:
    def make(leaf: Any) -> Any:
        if isinstance(leaf, DeviceLeaf):
            return tensor_at(leaf.place)
        if isinstance(leaf, HostLeaf):
            value = state.host[leaf.var]
            return value if leaf.dtype is None else torch.tensor(value, dtype=leaf.dtype)
        return leaf.value

    out: Any = defaultdict(dict)
    for (kind, key), tree in frozen:
        out[table.params[key] if kind == "p" else key] = thaw(tree, make)
    return out


def dictionaries(table: StateTable, state: State, pull: Pull) -> dict[str, Any]:
    """{"model": state_dict(s), "optimizer": state_dict(s)} of the daemon's state."""
    fetched: dict[int, torch.Tensor] = {}
    pull(lambda buffer, data: fetched.__setitem__(buffer, data.clone()))

    def tensor_at(place: Place) -> torch.Tensor:
        if place.buffer not in fetched:
            return table.local(place).detach().cpu().clone()
        base = torch.empty(0, dtype=place.dtype)
        view = base.set_(fetched[place.buffer].untyped_storage(), place.offset, place.size, place.stride)
        return view.clone(memory_format=torch.preserve_format)

    def model_dict(model: torch.nn.Module) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key, value in model.state_dict(keep_vars=True).items():
            place = table.place(value) if isinstance(value, torch.Tensor) else None
            out[key] = tensor_at(place) if place is not None else _on_cpu(value)
        return out

    def optimizer_dict(optimizer: Any, frozen: Any) -> dict[str, Any]:
        before = optimizer.state
        try:
            optimizer.state = _state(table, frozen, state, tensor_at)
            packed: dict[str, Any] = optimizer.state_dict()
            return packed
        finally:
            optimizer.state = before

    models: list[Any] = [model_dict(x) for x in table.models]
    optimizers: list[Any] = [
        optimizer_dict(o, f) for o, f in zip(table.optimizers, state.structure.optimizers, strict=True)
    ]
    return {
        "model": models[0] if len(models) == 1 else models,
        "optimizer": optimizers[0] if len(optimizers) == 1 else optimizers,
    }


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) and value.device.type != "cpu" else value


def load_local(table: StateTable, state: dict[str, Any]) -> None:
    """Load dictionaries, as `dictionaries` returns them, into the local models and optimizers. Raises ConfigError for
    another mapping, such as a model's own state_dict, of which nothing would be loaded."""
    if not isinstance(state, Mapping) or not state.keys() & {"model", "optimizer"}:
        found = "has neither 'model' nor 'optimizer'" if isinstance(state, Mapping) else f"is a {type(state).__name__}"
        raise ConfigError(
            f"the state to load {found}",
            'give {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, or one of the two',
        )
    for owners, key in ((table.models, "model"), (table.optimizers, "optimizer")):
        value = state.get(key)
        if value is None:
            continue
        for owner, one in zip(owners, value if len(owners) > 1 else [value], strict=True):
            owner.load_state_dict(one)
