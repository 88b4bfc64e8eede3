"""A daemon's array whose program is gone goes on in another: what a snapshot's notes say of its models, and back.

A snapshot of an array's job holds the lines of all models' state (`memory.py`). Its notes are those of a job, and for each
model those that a job of that model alone would have had, with the line that each buffer is a part of: taken apart
again, each model has a snapshot of its own.
"""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING, Any

import msgpack
import torch

from gpumux.client import keepsake
from gpumux.client.keepsake import Keepsake
from gpumux.errors import ConfigError
from gpumux.fuse.memory import STREAM, keys_of
from gpumux.program.ir import aligned
from gpumux.wire.keeping import MAX_NOTES

if TYPE_CHECKING:
    from gpumux.fuse.submit import ArrayJob

log = logging.getLogger("gpumux.fuse")


def notes_of(ref: weakref.ref[ArrayJob]) -> tuple[bytes, int]:
    """What goes with a snapshot taken now, and how many steps are behind it."""
    array = ref()
    assert array is not None, "an array that is gone takes no snapshots"
    job = array.job
    resident = job._remote.resident()
    plain = keepsake.write(job._table, job._state, resident, job._counts)
    place = {buffer: index for index, buffer in enumerate(resident)}
    lines = {key: place[slot] for key, slot in array._slots.items() if slot in place}
    models = []
    for member in array._members:
        keys = keys_of(member.table)
        own = [buffer for buffer, key in enumerate(keys) if key in lines]
        notes = keepsake.write(member.table, member.state, own, job._counts)
        models.append({"notes": notes, "lines": [lines[keys[buffer]] for buffer in own]})
    body = {**msgpack.unpackb(plain, strict_map_key=False), "models": models, "stream": lines.get(STREAM)}
    packed = bytes(msgpack.packb(body))
    if len(packed) > MAX_NOTES:
        log.warning(
            "array %r: its models are too many to be resumed by another program; save() writes a checkpoint", array.name
        )
        packed = plain
    return packed, job._counts.all


def put_back(array: ArrayJob, kept: Keepsake) -> None:
    """Overwrite the models, as the factory made them, with a snapshot's. Raises ConfigError when they are others."""
    body = kept._body
    models = body.get("models")
    if models is None:
        raise ConfigError("what was kept of that name is no array", "go on with client.submit(..., resume=...)")
    if len(models) != len(array):
        raise ConfigError(
            f"the array that was kept has {len(models)} models, and here are {len(array)}",
            "give configs for as many, in the order that they had",
        )
    try:
        for model, (member, said) in enumerate(zip(array._members, models, strict=True)):
            member.resume(_of_one(kept, said, model, len(models)))
        if body["stream"] is not None:
            for model in range(len(models)):
                array._memory.part(STREAM, model).copy_(_part(kept, body["stream"], model, len(models)))
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"the kept array can't be read: {error}", "start it anew") from error


def _part(kept: Keepsake, line: int, model: int, models: int) -> torch.Tensor:
    data = kept._buffers[line]
    nbytes = data.numel() // models
    return data[model * nbytes : (model + 1) * nbytes]


def _of_one(kept: Keepsake, said: Any, model: int, models: int) -> Keepsake:
    """A snapshot as a job of one model alone would have left it."""
    parts = []
    for line in said["lines"]:
        part = _part(kept, line, model, models)
        parts += [part, torch.zeros(aligned(part.numel()) - part.numel(), dtype=torch.uint8)]
    notes = said["notes"]
    parts.append(torch.frombuffer(bytearray(notes), dtype=torch.uint8))
    return Keepsake(torch.cat(parts), len(notes))
