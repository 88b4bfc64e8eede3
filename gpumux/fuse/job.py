"""An array of models as one job of a daemon."""

from __future__ import annotations

import logging
import uuid
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeAlias

import msgpack
import torch

from gpumux.capture.generator import ClientGenerator
from gpumux.capture.lower import Lowered
from gpumux.capture.state import Buffer, StateTable
from gpumux.capture.step import Choice, StepProgram
from gpumux.capture.structure import State, Structure
from gpumux.client import snapshots
from gpumux.client.arguments import job_spec, whole
from gpumux.client.future import StepFuture
from gpumux.client.job import Job, WriteNotes
from gpumux.client.recovery import KeptJob, find_kept, open_job
from gpumux.client.session import Session, devices_of
from gpumux.client.snapshots import Counts, SnapshotMetadata
from gpumux.errors import ConfigError, GpumuxError, JobClosed, NotFusible
from gpumux.fuse import arguments
from gpumux.fuse.array import BaseArray, Factory
from gpumux.fuse.member import STREAM, keys_of
from gpumux.fuse.template import Fused
from gpumux.fuse.variants import Options, Variant
from gpumux.program.ir import ITEM_BYTES, Program, Storage, aligned
from gpumux.types import JobSpec, JobStatistics
from gpumux.wire.codec import MAX_INT
from gpumux.wire.messages import MAX_NOTES

# ---- What a snapshot of an array's job says of its models, so that another program can resume them.
#
# A snapshot of an array's job holds the lines of all models' state (see `member.py`). Its notes are those of a job,
# and for each model the notes that a job of that model alone would have, with the lines that its buffers are parts of.
# From these each model's own snapshot is rebuilt.


fuse_log = logging.getLogger("gpumux.fuse")


def _part(kept: SnapshotMetadata, line: int, model: int, models: int) -> torch.Tensor:
    data = kept.buffers[line]
    nbytes = data.numel() // models
    return data[model * nbytes : (model + 1) * nbytes]


def _of_one(kept: SnapshotMetadata, said: Any, model: int, models: int) -> SnapshotMetadata:
    """The snapshot that a job of one model alone would have left."""
    parts = []
    for line in said["lines"]:
        part = _part(kept, line, model, models)
        parts += [part, torch.zeros(aligned(part.numel()) - part.numel(), dtype=torch.uint8)]
    notes = said["notes"]
    parts.append(torch.frombuffer(bytearray(notes), dtype=torch.uint8))
    return SnapshotMetadata(torch.cat(parts), len(notes))


# ---- A fused Program whose every state slot is a line of a whole array, even if it uses one model's part only.
#
# In a daemon a job's buffers are the array's lines (see `member.py`). If models are only partly alike, a Program has
# state of one model alone. That state is the model's part of the line, so that every Program of the job finds it
# there.


Part: TypeAlias = "tuple[int, int, int]"  # number of the line, its bytes, offset of the slot's first byte


def on_lines(program: Program, parts: Sequence[Part]) -> Program:
    """`program` with `parts[i]` for state slot i. Slots of one line become one storage; lines are numbered from 0, each
    used at least once. Raises NotFusible if a tensor can't begin where its part does."""
    storages: list[Storage] = []
    moved: list[tuple[int, int]] = []  # for each storage: the new one, and its first byte there
    found: dict[int, int] = {}
    for storage in program.storages:
        line, nbytes, start = parts[storage.slot] if storage.kind == "state" else (-1, storage.nbytes, 0)
        at = found.get(line) if line >= 0 else None
        if at is None:
            at = len(storages)
            storages.append(Storage(storage.kind, nbytes, line if line >= 0 else storage.slot))
            if line >= 0:
                found[line] = at
        moved.append((at, start))
    views = []
    for view in program.views:
        at, start = moved[view.storage]
        elements, rest = divmod(start, ITEM_BYTES[view.dtype])
        if rest:
            raise NotFusible(
                f"a model's part of a tensor of {view.dtype} would begin amid an element, at byte {start}",
                "use fuse.Array, which runs in this process",
            )
        views.append(replace(view, storage=at, offset=view.offset + elements))
    return replace(program, storages=tuple(storages), views=tuple(views))


# ---- The job.


log = logging.getLogger("gpumux.client")


def submit_array(
    factory: Factory, configs: Sequence[Any], example: Any, *, seeds: Sequence[int] | None = None,
    choose: Literal["measured", "fused", "per-model"] | None = None, per_model_operators: Sequence[str] = (),
    partial: bool = False, times_file: str | Path | None = "", max_variants: int | None = None, name: str | None = None,
    priority: Literal["high", "low"] = "low", endpoint: str | None = None, weight: float = 1.0,
    max_slowdown: float = 1.10, memory_limit: int | None = None, max_inflight: int = 2, resume: str | None = None,
    replay_bytes: int = 1 << 30, reconnect_s: float = 600.0, cluster: str | None = None,
) -> ArrayJob:  # fmt: skip
    """Train the models of `configs` as one job of a daemon: an Array whose steps go through the job's queue, beside
    other jobs, with their priorities. Arguments are those of Array and of client.submit.

    resume: name of an array of yours whose client is gone, or closed it with keep=True. It must have as many models,
        in the same order, as when it was kept (after the last add() or remove()). The state of the models that the
        factory makes is overwritten, random streams included, and `array.resumed_steps` is the number of steps before.
    choose: by default "measured" for a CPU (in this process, with as many threads as torch has here). "fused" for a
        GPU, and verified in this process; "measured" is refused there.
    seeds: on a GPU each model's draws are those of the plain loop after torch.cuda.manual_seed(seed). Without them a
        stream begins at a seed made of the state of torch's generator when the factory returned.
    cluster: refused. add() and remove() make another job at the same daemon, and a coordinator might place that
        elsewhere, or have the array wait for devices with its job closed.

    Raises what Array and submit raise. Nothing local is changed by a failed submit."""
    arguments.check_factory(factory)
    if cluster is not None:
        raise ConfigError(
            "an array of models is not placed by a coordinator",
            "say endpoint= of one of its daemons, which `gpumux cluster status` lists, in place of cluster=; or give"
            " each model a submit(..., cluster=) of its own",
        )
    name = (resume or "array") if name is None else name
    spec = job_spec(factory, priority, name, weight, max_slowdown, memory_limit, max_inflight, 0)
    replay_bytes = whole("replay_bytes", replay_bytes, 0, MAX_INT, "give bytes")
    session = Session.connect(endpoint)
    array: ArrayJob | None = None
    try:
        devices = devices_of(session)
        on_gpu = devices[1] == "cuda"
        if choose == "measured" and on_gpu:
            raise ConfigError(
                'choose="measured" times operators in this process, and the daemon has a GPU',
                'leave it out, or say "fused"',
            )
        how = choose or ("fused" if on_gpu else "measured")
        options = Options(how, per_model_operators, times_file, partial, verified=on_gpu)
        job_options = _JobOptions(session.endpoint, spec, max_variants, replay_bytes, reconnect_s)
        array = ArrayJob(
            factory, configs, example, seeds=seeds, name=name, devices=devices, options=options, job_options=job_options
        )
        array.open(session, find_kept(session, resume) if resume is not None else None)
    except BaseException:
        if array is not None:
            array.close(drain=False)
        session.close()
        raise
    return array


@dataclass(frozen=True, slots=True)
class _JobOptions:
    """The options of every job that an array opens."""

    endpoint: str
    spec: JobSpec
    max_variants: int | None
    replay_bytes: int
    reconnect_s: float

    def open(
        self, session: Session, table: StateTable, models: int, kept: KeptJob | None, counts: Counts | None,
        write_notes: WriteNotes,
    ) -> Job[Any]:  # fmt: skip
        spec = replace(self.spec, models=models)
        job_id, last = (uuid.uuid4().hex, 0) if kept is None else (kept.job, kept.newest)
        open_job(session, job_id, spec, kept is not None)
        snapshot = None if kept is None else kept.snapshot
        return Job(
            session, job_id, spec, table, max_variants=self.max_variants, replay_bytes=self.replay_bytes,
            reconnect_s=self.reconnect_s, kept=snapshot, last_snapshot=last, counts=counts, write_notes=write_notes,
        )  # fmt: skip


class ArrayJob(BaseArray):
    """An array made by `submit_array`. `job` is its job, for pause(), resume(), stats() and so on: another one after
    each add() and remove()."""

    job: Job[Any]

    def __init__(
        self, factory: Factory, configs: Sequence[Any], example: Any, *, seeds: Sequence[int] | None, name: str,
        devices: tuple[str, str], options: Options, job_options: _JobOptions,
    ) -> None:  # fmt: skip
        super().__init__(
            factory, configs, example, seeds=seeds, max_variants=job_options.max_variants, name=name, options=options,
            devices=devices,
        )  # fmt: skip
        self._job_options = job_options
        self._opened = False  # whether a job was opened
        self.resumed_steps = 0
        self._kind_known = False  # whether the models are known to be of one kind

    def open(self, session: Session, kept: KeptJob | None = None) -> None:
        """Open a job for the present models, with their state or with that of a kept job."""
        if kept is not None:
            self._put_back(kept.snapshot)
            self._kind_known = True  # they may be at different steps of their optimizers
        self.table = StateTable([], [], *self._devices)  # the job's: each buffer is a line of all models' state
        self._slots: dict[Any, int] = {}
        self._dirty = False  # whether the daemon's state is newer than `_memory`
        self._last = []
        counts = self.job.counts if self._opened else None
        self.job = job = self._job_options.open(
            session, self.table, len(self), kept, counts, partial(_notes_of, weakref.ref(self))
        )
        self.resumed_steps = max(self.resumed_steps, job.resumed_steps)
        first, self._opened = not self._opened, True
        self._capture()
        if first:
            self._variants.check_operators()
        self._kind_known = True
        job.attach(_Function(self), *self._example)
        job.start()

    def _write_notes(
        self, table: StateTable, state: State, resident: Sequence[int], counts: Counts,
        generator: ClientGenerator | None,
    ) -> bytes:  # fmt: skip
        """The notes of a snapshot taken now (`client.job.WriteNotes`)."""
        plain = snapshots.write(table, state, resident, counts, generator)
        place = {buffer: index for index, buffer in enumerate(resident)}
        lines = {key: place[slot] for key, slot in self._slots.items() if slot in place}
        models = []
        for member in self._members:
            keys = keys_of(member.table)
            own = [buffer for buffer, key in enumerate(keys) if key in lines]
            notes = snapshots.write(member.table, member.state, own, counts)
            models.append({"notes": notes, "lines": [lines[keys[buffer]] for buffer in own]})
        body = {**msgpack.unpackb(plain, strict_map_key=False), "models": models, "stream": lines.get(STREAM)}
        packed = bytes(msgpack.packb(body))
        if len(packed) > MAX_NOTES:
            fuse_log.warning(
                "array %r: its models are too many to be resumed by another program; save() writes a checkpoint",
                self.name,
            )
            packed = plain
        return packed

    def _put_back(self, kept: SnapshotMetadata) -> None:
        """Overwrite the models, as the factory made them, with a snapshot's. Raises ConfigError if they are others."""
        body = kept.body
        models = body.get("models")
        if models is None:
            raise ConfigError("what was kept of that name is no array", "go on with client.submit(..., resume=...)")
        if len(models) != len(self):
            raise ConfigError(
                f"the array that was kept has {len(models)} models, and here are {len(self)}",
                "give configs for as many, in the order that they had",
            )
        try:
            for model, (member, said) in enumerate(zip(self._members, models, strict=True)):
                member.resume(_of_one(kept, said, model, len(models)))
            if body["stream"] is not None:
                for model in range(len(models)):
                    self._memory.part(STREAM, model).copy_(_part(kept, body["stream"], model, len(models)))
        except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(f"the kept array can't be read: {error}", "start it anew") from error

    def _changed(self) -> None:
        """Replace the job by another of the same name; all state is here."""
        super()._changed()
        paused = self.job.paused
        self.job.close(sync=False)
        session = Session.connect(self._job_options.endpoint)
        try:
            self.open(session)
            if paused:
                self.job.pause()
        except BaseException:
            session.close()
            raise

    def _attach(self, fused: Fused, choices: Sequence[Choice], first: int) -> StepProgram:
        keys = self._keys(fused, choices, first)
        lines = list(dict.fromkeys(key for key, _, _ in keys))
        sizes = [self._memory.lines[key].numel() for key in lines]
        parts = [(at := lines.index(key), sizes[at], sizes[at] // len(self) * model) for key, model, _ in keys]
        plain: Lowered = choices[0].program.lowered
        lowered = replace(
            plain, program=on_lines(fused.program, parts), binding=tuple(map(self._slot, lines)),
            counts=(len(fused.scalars), 0, 0), groups=(), flags=(), reads_dropped=frozenset(),
            exit=Structure((), (), ()), replays=(), replayed=0,
        )  # fmt: skip
        program = StepProgram(lowered)
        self.job.upload(program)
        return program

    def _variant(self, choices: Sequence[Choice], per_model: bool) -> Variant:
        """Models of one kind that are at different steps share the operators they have in common."""
        known = self._kind_known and not self._variants.partial
        partly = known and len({self._variants.kind(c) for c in choices}) > 1
        return self._variants.get(choices, 0, per_model, partly)

    def _slot(self, key: Any) -> int:
        found = self._slots.get(key)
        if found is None:
            line = self._memory.lines[key]
            found = self._slots[key] = len(self.table.buffers)
            home = [(line.untyped_storage(), 0)] if line.numel() else []
            self.table.buffers.append(Buffer(key[0], line.numel(), True, home))
        return found

    def choice(self, batch: tuple[Any, ...], named: dict[str, Any], per_model: bool, state: State) -> Choice:
        """The Program and inputs of the job's step on this batch."""
        choices = self._choices(self._batches(batch, named, per_model))
        variant = self._variant(choices, per_model)
        self._last = [variant]
        values = [*variant.scalars(choices), *self._together(choices)]
        return _ArrayChoice(variant.runner, values, variant.tensors(choices), self, choices, state)  # type: ignore[arg-type]

    def step(self, *batch: Any, per_model: bool = False, **named: Any) -> StepFuture:
        """One step of every model, as Array.step, in the job's queue: returns a StepFuture. Raises NotFusible for
        models that take different paths and can't share a Program, and what Job.step raises."""
        self._check_open()
        return self.job.step(batch, per_model, **named)

    def advance(self, choices: Sequence[Choice]) -> None:
        """Note that the models make these steps in the daemon."""
        self._dirty = True
        for member, choice in zip(self._members, choices, strict=True):
            member.advance(choice)

    def stats(self) -> JobStatistics:
        """The daemon's statistics of the job. Results are "equivalent": a batched product may be rounded in another
        order than each model's own, to a relative difference of about 1e-6 a step in float32 and 1e-15 in float64."""
        return {**self.job.stats(), "exactness": "equivalent"}

    def _fetch(self) -> None:
        if self._opened and self._dirty:
            if self._closed:
                raise JobClosed(
                    f"{self.name} is closed, and what it trained is gone from the daemon",
                    "call sync(), state_dict() or save() before close()",
                )
            self.job.sync()  # writes the lines of `_memory`, which the table's buffers are in
            self._dirty = False

    def _send(self) -> None:
        if self._opened:
            self.job.load_state()

    def close(self, drain: bool = True, *, sync: bool = True, keep: bool = False) -> None:
        """End the job, and delete its state in the daemon. The trained state is copied to the local models, or
        discarded without `sync` or `drain`. keep: save it, for `submit_array(..., resume=name)`, as Job.close does.
        Idempotent."""
        if sync and drain and self._opened and self._dirty and not self._closed:
            try:
                self.sync()
            except GpumuxError as error:
                log.warning("%s ends, and what it trained could not be brought back: %s", self.name, error.message)
        if keep and not self._closed:
            self.job.close(keep=True)
        self._release()
        if self._opened:
            self.job.close(drain=drain, sync=False)

    def __enter__(self) -> ArrayJob:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _notes_of(
    ref: weakref.ref[ArrayJob], table: StateTable, state: State, resident: Sequence[int], counts: Counts,
    generator: ClientGenerator | None,
) -> bytes:  # fmt: skip
    array = ref()
    assert array is not None, "an array that is gone takes no snapshots"
    return array._write_notes(table, state, resident, counts, generator)


@dataclass(slots=True)
class _ArrayChoice(Choice):
    array: ArrayJob
    choices: list[Choice]
    state: State  # of the job, which has no models and optimizers of its own: the same after each step

    def after(self, keep: frozenset[int]) -> State:
        return State(self.state.structure, self.state.host, keep)

    def apply(self, table: StateTable) -> None:
        self.array.advance(self.choices)


class _Function:
    """The array as what its job steps (`client.job.Steppable`)."""

    microbatches, compiled = 1, False

    def __init__(self, array: ArrayJob) -> None:
        self._array = array
        self.name = array.name

    def choose(self, args: tuple[Any, ...], kwargs: dict[str, Any], state: State) -> Choice:
        batch, per_model = args
        return self._array.choice(batch, kwargs, per_model, state)


__all__ = ["ArrayJob", "submit_array"]
