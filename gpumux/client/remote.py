"""The client's side of a job's data: uploads Programs, fills and reads slots, copies state.

A local daemon shares memory: a batch is copied once, into its slot, and results once, out of it. Over TCP the same
tensors travel as frames.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Protocol, TypeAlias

import torch

from gpumux.capture.lower import Lowered, LoweredRank
from gpumux.capture.state import StateTable, byte_view, raw_bytes
from gpumux.client.session import Loading, Session, Waits
from gpumux.errors import DaemonGone, GpumuxError, JobFailed, from_code
from gpumux.program import codec
from gpumux.program.indices import undo_of
from gpumux.program.ir import Program, SlotLayout, View, aligned, contiguous_strides, slot_layout
from gpumux.types import GENERATOR_BYTES
from gpumux.wire import messages as m

Home = list[tuple[torch.UntypedStorage, int]]  # storages of a buffer, and the byte of it at which each begins

Uploaded: TypeAlias = "Lowered | LoweredRank"

PORTION_BYTES = 32 << 20  # bytes of state copied at once; a fetch has two portions under way


@dataclass(slots=True)
class Slot:
    """Tensors over one slot of a Program's data segment, ready to copy into and out of."""

    inputs: list[torch.Tensor]
    results: list[torch.Tensor]


class RemoteProgram:
    """A Program in the daemon: its data segment and free slots."""

    def __init__(
        self, number: int, lowered: Uploaded, slots: int, memory: Any | None, *, home: torch.device | None = None
    ) -> None:
        """`home`: where results go, if not to the CPU."""
        self.number = number
        self.home = torch.device("cpu") if home is None else home
        self._elsewhere = self.home.type != "cpu"
        self.program = lowered.program
        self.layout: SlotLayout = slot_layout(lowered.program)
        self._strides = [_own_strides(self.program.views[v]) for v in self.program.results]
        self.free = set(range(slots))  # a set: giving a slot back twice must not make it two
        self.inline = memory is None
        self._memory = memory
        # Inline, the same slots lie in private memory; their bytes travel as frames.
        size = slots * self.layout.nbytes
        whole = torch.zeros(size, dtype=torch.uint8) if memory is None else torch.frombuffer(memory, dtype=torch.uint8)
        self._bytes = whole
        self.slots = [self._slot(whole, i * self.layout.nbytes) for i in range(slots)]
        self.copied_in = 0  # bytes copied from batches so far
        self.device_s: float | None = None  # device seconds of the newest answered step
        self.fails_alone = undo_of(self.program) is not None  # whether a step whose values are refused may be undone

    def _slot(self, whole: torch.Tensor, base: int) -> Slot:
        views = self.program.views
        inputs = [
            _typed(whole, base + at, views[v].dtype, views[v].size, views[v].stride)
            for at, v in zip(self.layout.inputs, self.program.inputs, strict=True)
        ]
        results = [
            _typed(whole, base + at, views[v].dtype, views[v].size, None)
            for at, v in zip(self.layout.results, self.program.results, strict=True)
        ]
        return Slot(inputs, results)

    def laid(self, slot: int, batch: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The tensors of a batch that lies in a slot: the slot's own, because those of `batch` may lie on a GPU."""
        return self.slots[slot].inputs

    def fill(self, slot: int, tensors: Sequence[torch.Tensor]) -> list[bytes]:
        """Copy a batch into a slot, once. Returns the frames to send (none when memory is shared)."""
        frames: list[bytes] = []
        for at, target, source in zip(self.layout.inputs, self.slots[slot].inputs, tensors, strict=True):
            lay(target, source.detach())
            self.copied_in += source.nbytes
            if self.inline:
                start = slot * self.layout.nbytes + at
                storage = self.program.storages[self.program.views[self.program.inputs[len(frames)]].storage]
                frames.append(self._bytes[start : start + storage.nbytes].numpy().tobytes())
        return frames

    def give_generator(self, slot: int, state: torch.Tensor) -> None:
        """Copy the generator's state, the last input, into a slot that holds the batch already."""
        self.slots[slot].inputs[-1].copy_(state)

    def take(self, slot: int, frames: Sequence[Any]) -> list[torch.Tensor]:
        """Copy the results out of a slot, to the device of the local model."""
        found = self._taken(slot, frames)
        return [tensor.to(self.home) for tensor in found] if self._elsewhere else found

    def _taken(self, slot: int, frames: Sequence[Any]) -> list[torch.Tensor]:
        results = self.slots[slot].results
        if self.inline:
            out = []
            for target, frame, stride in zip(results, frames, self._strides, strict=True):
                flat = torch.frombuffer(bytearray(frame), dtype=target.dtype) if len(frame) else target.reshape(-1)
                whole = flat.reshape(target.shape)
                out.append(whole if stride is None else _laid_out(whole, stride))
            return out
        return [
            result.clone() if stride is None else _laid_out(result, stride)
            for result, stride in zip(results, self._strides, strict=True)
        ]

    def release(self) -> None:
        self.slots.clear()
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._memory = None


def bytes_of(table: StateTable, buffers: Sequence[int], homes: Sequence[Home] | None = None) -> torch.Tensor:
    """The local bytes of job buffers (uint8), each aligned to 64 bytes. `homes`: the storages that hold them, if those
    are no longer the table's."""
    data = torch.zeros(size_of(table, buffers), dtype=torch.uint8)
    copy_local(table, buffers, data, homes)
    return data


def size_of(table: StateTable, buffers: Sequence[int]) -> int:
    """The bytes of job buffers, each aligned to 64 bytes."""
    return sum(aligned(table.buffers[b].nbytes) for b in buffers)


def copy_local(
    table: StateTable, buffers: Sequence[int], data: torch.Tensor, homes: Sequence[Home] | None = None
) -> None:
    """Write `bytes_of` into `data` (uint8). Bytes that no tensor uses stay as they are."""
    for start, part in _parts(table, buffers, homes):
        data[start : start + part.numel()].copy_(part)


def _parts(
    table: StateTable, buffers: Sequence[int], homes: Sequence[Home] | None = None
) -> Iterator[tuple[int, torch.Tensor]]:
    """The bytes that local storages hold of job buffers, each with its place in `bytes_of`."""
    at = 0
    for i, b in enumerate(buffers):
        for storage, start in table.buffers[b].local if homes is None else homes[i]:
            yield at + start, byte_view(storage)
        at += aligned(table.buffers[b].nbytes)


def lay(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy into a view of equal strides. Elements that an expanded dimension repeats are copied once."""
    if 0 in target.stride():
        for dim, stride in enumerate(target.stride()):
            if stride == 0 and target.shape[dim] > 1:
                target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    target.copy_(source)


def _own_strides(view: View) -> tuple[int, ...] | None:
    """The strides of a result that lies contiguous in its slot and did not in the step; None for all others. The
    script's own kernels choose their order of summation by them. Elements that overlap (windows) stay contiguous."""
    taken = 1
    for stride, size in sorted(zip(view.stride, view.size, strict=True)):
        if size > 1 and stride > 0:
            if stride < taken:
                return None
            taken = stride * size
    return None if view.stride == contiguous_strides(view.size) else view.stride


def _laid_out(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    made = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype)
    lay(made, tensor)
    return made


def _typed(
    whole: torch.Tensor, offset: int, dtype: str, size: tuple[int, ...], stride: tuple[int, ...] | None
) -> torch.Tensor:
    kind: torch.dtype = getattr(torch, dtype)
    base = torch.empty(0, dtype=kind)
    if stride is None:
        stride = torch.empty(size, dtype=kind, device="meta").stride()
    return base.set_(whole.untyped_storage(), offset // base.element_size(), size, stride)


class SendObserver(Protocol):
    """Is called with the Programs and the state that the daemon is sent, so that a recovery can send them again."""

    def loaded(self, number: int) -> None: ...

    def pushed(self, buffers: Sequence[int], data: torch.Tensor | None) -> None:
        """The bytes of these buffers, each aligned to 64 bytes, are sent. None: local memory keeps them until it is
        fetched into."""
        ...


def portions(table: StateTable, buffers: Sequence[int]) -> Iterator[list[int]]:
    """Split job buffers, in order, into portions of at most PORTION_BYTES, or of one larger buffer: staging memory need
    not be as large as the state."""
    some: list[int] = []
    held = 0
    for b in buffers:
        nbytes = aligned(table.buffers[b].nbytes)
        if held and held + nbytes > PORTION_BYTES:  # empty ones go with others
            yield some
            some, held = [], 0
        some.append(b)
        held += nbytes
    if some:
        yield some


def to_push(
    table: StateTable, buffers: Sequence[int], observer: SendObserver | None, *, first: bool
) -> Iterator[tuple[list[int], torch.Tensor | None]]:
    """Portions of job buffers to send, with their bytes; None: their local bytes, without another copy of them. The
    observer is told of each portion before it is sent, because a recovery repeats what failed on the way. `first`: as
    in Remote.push."""
    parameters = _parameters(table) if first and observer is not None else frozenset()
    for kept in (False, True):
        for some in portions(table, [b for b in buffers if (b in parameters) is kept]):
            data = None if kept or observer is None else bytes_of(table, some)
            if observer is not None:
                observer.pushed(some, data)
            yield some, data


def _parameters(table: StateTable) -> frozenset[int]:
    """The buffers in which nothing but parameters lies, on the CPU. No step puts other tensors in their place."""
    parameters = {t.untyped_storage()._cdata for t in table.params}
    return frozenset(
        i
        for i, buffer in enumerate(table.buffers)
        if buffer.local and all(s._cdata in parameters and s.device.type == "cpu" for s, _ in buffer.local)
    )


@dataclass(frozen=True, slots=True)
class StateRead:
    """A snapshot that was read, one part from each daemon: the reply, and the frames of the state where it shares no
    memory. `bad`: numbers of damaged snapshots. `held`, of a copy: the job buffers that each part has, in order, and
    perhaps further ones that the daemon has had since."""

    snapshot: int
    bad: list[int]
    parts: list[tuple[m.SnapshotRead, Sequence[bytes | bytearray]]]
    held: tuple[tuple[int, ...], ...] = ()


def snapshot_bytes(session: Session, read: m.SnapshotRead, frames: Sequence[bytes | bytearray]) -> torch.Tensor:
    """The bytes of a snapshot as a tensor over the shared segment, or the frame, that they came in."""
    if read.segment:
        return torch.frombuffer(session.segment(read.segment, read.nbytes), dtype=torch.uint8)
    frame = frames[0]  # a bytearray if it is this process's own copy, which nothing writes to
    return torch.frombuffer(frame if isinstance(frame, bytearray) else bytearray(frame), dtype=torch.uint8)


def error_of(ended: m.JobEnded | None) -> GpumuxError:
    """The error for a verb of a job that has ended so; None: it was closed."""
    if ended is None or not ended.code:
        said = ended if ended is not None and ended.message else None
        message, remedy = (said.message, said.remedy) if said else ("the job is closed", "submit it again")
        return from_code("job_closed", message, remedy)
    return from_code(ended.code, ended.message, ended.remedy)


class Remote:
    """Every request of a job to its daemon, but steps."""

    def __init__(
        self, session: Session, job: str, table: StateTable, waits: Waits, *, observer: SendObserver | None = None
    ) -> None:
        self.session = session
        self.waits = waits
        self.job = job
        self._observer = observer
        self._table = table
        self._loads: list[tuple[Uploaded, list[int], list[int]]] = []  # by number: sizes of new buffers, binding
        self._remote_index: dict[int, int] = {}  # job buffer -> the daemon's buffer
        self._numbers: dict[tuple[str, tuple[int, ...]], int] = {}
        self.programs: dict[int, RemoteProgram] = {}
        self._transfers = 0
        self._ended: dict[int, tuple[m.TransferDone, Sequence[Any]]] = {}
        self.ended: m.JobEnded | None = None
        self._first_generator = b""  # its state when the job began; b"": as its seed makes it
        self.give_up_s: float | None = None  # seconds to wait for a copy of state; None: while the daemon lives

    def stop_observing(self) -> None:
        """Call the observer no more. Idempotent."""
        self._observer = None

    def call(
        self,
        make: Callable[..., Any],
        *args: Any,
        frames: Sequence[bytes] = (),
        meanwhile: Callable[[], float] | None = None,
    ) -> tuple[Any, Sequence[Any]]:
        # Checking a large Program or draining a queue may take long; a daemon that dies ends the wait.
        return self.session.call(make(0, self.job, *args), frames, timeout=None, meanwhile=meanwhile)

    # ---- programs --------------------------------------------------------------------------------

    def upload(self, lowered: Uploaded, ranked: Any = None) -> int:
        """Upload a Program and the state that it is the first to use. Returns its number in the daemon. `ranked`: what
        ranks run of it, in a GangRemote."""
        before, known = self.loads, set(self._remote_index)
        number = self.add(lowered)
        if number == before:
            if self._observer is not None:
                self._observer.loaded(number)
            self.push([b for b in lowered.binding if b not in known and self._table.buffers[b].filled], first=True)
        return number

    def add(self, lowered: Uploaded, *, load: bool = True) -> int:
        """Have the daemon load a Program, without the state of its buffers. Returns its number in the daemon. Equal
        Programs on equal buffers are sent once. `load`: False if it is to be loaded later, by its number."""
        encoded = codec.encode(lowered.program)
        key = (codec.content_hash(encoded), lowered.binding)
        if key in self._numbers:
            return self._numbers[key]
        fresh = [b for b in lowered.binding if b not in self._remote_index]
        index = dict(self._remote_index)
        for b in fresh:
            index[b] = len(index)
        number = len(self._loads)
        sizes = [self._table.buffers[b].nbytes for b in fresh]
        self._loads.append((lowered, sizes, [index[b] for b in lowered.binding]))
        try:
            if load:
                self.load(number, encoded)
        except BaseException:
            self._loads.pop()
            raise
        self._remote_index = index
        self._numbers[key] = number
        return number

    def post_step(self, step: int, number: int, slot: int, scalars: list[Any], frames: Sequence[Any]) -> None:
        """Send a step, whose batch lies in the slot or in `frames`."""
        self.session.post_step(m.Step(self.job, step, number, slot, scalars, len(frames)), frames)

    def load(self, number: int, encoded: bytes | None = None) -> None:
        """Have the daemon load the recorded Program `number`. `encoded`: its bytes, where the caller has them."""
        lowered, sizes, binding = self._loads[number]
        program = lowered.program
        loading = Loading(len(program.ops), program.kind == "compiled")
        frames = [codec.encode(program) if encoded is None else encoded]
        reply, _ = self.call(m.LoadProgram, number, sizes, binding, frames=frames, meanwhile=loading)
        memory = self.session.segment(reply.segment, reply.slots * reply.slot_bytes) if reply.segment else None
        self.programs[number] = RemoteProgram(number, lowered, reply.slots, memory, home=self._table.home)

    def hashes(self) -> list[str]:
        """The content hashes of the job's Programs, oldest first. Any thread may ask."""
        return list(dict.fromkeys(content for content, _ in list(self._numbers)))  # another one may add to them

    def bound(self, number: int) -> tuple[Program, tuple[int, ...]]:
        """The job's Program `number`, and the job buffer of each of its state slots."""
        lowered, _, _ = self._loads[number]
        return lowered.program, lowered.binding

    @property
    def loads(self) -> int:
        """How many Programs the job has. Their numbers are below it."""
        return len(self._loads)

    def reset(self, session: Session) -> None:
        """Use another session, whose daemon has none of the job's Programs and state."""
        self.release()
        self.session = session
        self._ended.clear()
        self.ended = None

    # ---- state -----------------------------------------------------------------------------------

    def resident(self) -> list[int]:
        """Job buffers that exist in the daemon, in the daemon's order."""
        return list(self._remote_index)

    def held(self) -> tuple[tuple[int, ...], ...]:
        """Job buffers that exist in each of the job's daemons, in its order."""
        return (tuple(self._remote_index),)

    def sizes(self) -> list[int]:
        """On how many daemons, besides one, the job's Programs can run."""
        return []

    def loaded_buffers(self) -> list[int]:
        """Job buffers of the Programs loaded so far, in the daemon's order."""
        return self.resident()[: sum(len(sizes) for _, sizes, _ in self._loads[: len(self.programs)])]

    def _transfer(self, buffers: Sequence[int], push: bool) -> tuple[int, Any]:
        """Open a transfer. Returns its number, and the daemon's reply (TransferSegment)."""
        self._transfers += 1
        remote = [self._remote_index[b] for b in buffers]
        reply, _ = self.call(m.OpenTransfer, self._transfers, remote, push)
        return self._transfers, reply

    def _wait_transfer(self, number: int) -> Sequence[Any]:
        ended = lambda: number in self._ended or self.ended is not None  # noqa: E731
        if not self.waits.wait(self.session, ended, self.give_up_s):
            raise DaemonGone(
                f"the daemon lives but has not copied the state within {self.give_up_s:g} s", "look at gpumux status"
            )
        if number not in self._ended:
            raise self.end_error()
        done, frames = self._ended.pop(number)
        if done.code:
            raise from_code(done.code, done.message, done.remedy)
        return frames

    def end_error(self) -> GpumuxError:
        return error_of(self.ended)

    def push(self, buffers: Sequence[int], *, first: bool = False) -> None:
        """Copy local state to the daemon, in order with the steps submitted so far. `first`: it is sent for the first
        time, so that the job has not fetched into its local memory yet."""
        for some, data in to_push(self._table, buffers, self._observer, first=first):
            self._put(some, data)

    def put(self, buffers: Sequence[int], data: torch.Tensor | None) -> None:
        """Copy bytes (one tensor, each buffer on 64 of them) to the daemon's buffers. None: the local bytes."""
        at = 0
        for some in portions(self._table, buffers):
            nbytes = size_of(self._table, some)
            self._put(some, None if data is None else data[at : at + nbytes])
            at += nbytes

    def _put(self, buffers: Sequence[int], data: torch.Tensor | None) -> None:
        """Send `data`; by default the local bytes, without another copy of them."""
        number, reply = self._transfer(buffers, True)
        frames = []
        if not reply.segment:
            frames = [(bytes_of(self._table, buffers) if data is None else data).numpy().tobytes()]
        else:
            with self.session.take_segment(reply.segment, reply.nbytes) as segment:
                for start, part in _parts(self._table, buffers) if data is None else [(0, data)]:
                    here = part.cpu()
                    segment.write(start, raw_bytes(here))
        self.session.post(m.FillTransfer(0, self.job, number, len(frames)), frames)
        self._wait_transfer(number)

    def pull(self, write: Callable[[int, torch.Tensor], None], wanted: Collection[int] | None = None) -> None:
        """Fetch state (all, or the `wanted` buffers), after the steps submitted so far: `write(job buffer, its bytes)`.
        No step of the job may be submitted meanwhile: what is fetched in portions would belong to different steps. A
        portion is on its way while another is written."""
        split = list(portions(self._table, [b for b in self.resident() if wanted is None or b in wanted]))
        opened = self._transfer(split[0], False) if split else None
        for some, coming in zip_longest(split, split[1:]):
            assert opened is not None
            following = self._transfer(coming, False) if coming is not None else None
            self._take(some, *opened, write)
            opened = following

    def _take(
        self, buffers: Sequence[int], number: int, reply: Any, write: Callable[[int, torch.Tensor], None]
    ) -> None:
        memory = self.session.segment(reply.segment, reply.nbytes) if reply.segment else None
        frames = self._wait_transfer(number)
        if memory is None:
            staging = (
                torch.frombuffer(bytearray(frames[0]), dtype=torch.uint8)
                if frames and len(frames[0])
                else torch.empty(0, dtype=torch.uint8)
            )
        else:
            staging = torch.frombuffer(memory, dtype=torch.uint8)
        at = 0
        for b in buffers:
            nbytes = self._table.buffers[b].nbytes
            write(b, staging[at : at + nbytes])
            at += aligned(nbytes)
        del staging, memory
        self.session.release_segment(reply.segment)

    # ---- state that the daemon kept

    def read_snapshot(self, numbers: Sequence[int]) -> StateRead:
        """Read the first whole one of these snapshots of the job. Raises UnknownJob if none is, and ConfigError if the
        daemon keeps none."""
        read, frames = self.session.call(m.ReadSnapshot(0, self.job, list(numbers)), timeout=None)
        return StateRead(read.snapshot, list(read.bad), [(read, frames)])

    def forget_read(self, read: StateRead) -> None:
        """Free the memory of a snapshot that is not used."""
        for one, _ in read.parts:
            if one.segment:
                self.session.take_segment(one.segment, one.nbytes).close()

    def restore(self, read: StateRead | None, steps: int) -> None:
        """Put back the state of a snapshot and its generator, into the buffers of the Programs loaded so far. None:
        there is none, and the generator is as the job began with it. `steps`: how many steps will be run again."""
        generator = self._first_generator
        if read is not None:
            ((found, frames),) = read.parts
            data = snapshot_bytes(self.session, found, frames)
            buffers = self.loaded_buffers()
            end = size_of(self._table, buffers)
            if end + GENERATOR_BYTES + found.notes != data.numel():
                raise JobFailed(
                    f"snapshot {found.snapshot} of job {self.job} holds {data.numel()} bytes where the job has {end}",
                    "somebody else wrote it; submit the job again",
                )
            if buffers:
                self.put(buffers, data[:end])
            generator = data[end : end + GENERATOR_BYTES].numpy().tobytes()
            del data
            self.session.release_segment(found.segment)
        self.replay(steps, generator)

    def go_on(self, generator: bytes) -> None:
        """The job begins with a generator in this state: it goes on from what was kept of another one."""
        self._first_generator = generator
        self.replay(0, generator)

    def replay(self, steps: int, generator: bytes) -> None:
        """So many steps will be run again, from a generator in this state; b"": from the one that it has."""
        self.session.call(m.Replay(0, self.job, steps, 1), [generator], timeout=None)

    def on_transfer(self, done: m.TransferDone, frames: Sequence[Any]) -> None:
        self._ended[done.transfer] = (done, frames)

    def release(self) -> None:
        for program in self.programs.values():
            program.release()
        self.programs.clear()
