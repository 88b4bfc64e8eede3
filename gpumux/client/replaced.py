"""Buffers and optimizer state that a step replaces: the script may hold the tensors that stood there.

In the plain loop those keep their values, while others stand in their places. So the places get other local memory, and the old
tensors are plain ones of the script's. Where their last values were never here, reading them raises StaleState.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from gpumux.client.ledger import Record
from gpumux.client.state import Part, Place, StateTable
from gpumux.client.structure import Structure


class Replaces(NamedTuple):
    """Of one Program, by the job's buffers. `written`: all that it writes in place, kept or not. `beside`: in which something
    else lies, which stays."""

    model: frozenset[int]
    optimizer: frozenset[int]
    written: frozenset[int]
    beside: frozenset[int]


NOTHING = Replaces(frozenset(), frozenset(), frozenset(), frozenset())


def replaces(record: Record, anew: Iterable[Place], after: Structure, table: StateTable) -> Replaces:
    """What a trace does, whose things lie at `anew` from then on, in a job that is as `after` says."""
    places = set(anew)
    storages = frozenset[int]().union(*(op.writes for op in record.ops))
    written = frozenset(buffer for buffer, storage in record.state_storage.items() if storage in storages)
    if not places:
        return NOTHING._replace(written=written)
    buffers = {place.buffer for place in places}
    model = after.buffers(table, {Part.MODEL}) & buffers
    optimizer = after.buffers(table, {Part.OPTIMIZER}) & buffers - model
    beside = {place.buffer for place in after.places() if place.buffer in optimizer and place not in places}
    return Replaces(frozenset(model), frozenset(optimizer), written, frozenset(beside))
