"""A rank's peers: the other processes of a job on several devices, and the collectives that it carries out with them.

torch.distributed with gloo carries the bytes; nothing below it is our own. The process joins the group after its fork,
since a child forked from a process of a group hangs. There is one group, of all ranks: members of a collective exchange
messages two by two.

A message is a packet of PACKET_BYTES and, if its data do not fit there, the data. The packet begins with the number of
the step, of the collective and of the part of it, and the number of bytes. Both ends must agree on all of them: gloo
would sum tensors of two different collectives without an error, and end the process where a message is longer than
expected. So packets are matched by their order alone, and a difference is found at once; data are matched by a tag
made of all these numbers, and are looked at only after the packet.

all_reduce: the views of one dtype, one after the other, are one flat buffer of N elements. Member i of n (by rank) owns
the elements [i N // n, (i + 1) N // n). Each member sends every other one its part, adds the parts it receives in the
order of ranks, times `scale`, and sends the sum to all others. So the bits do not depend on which message comes first,
and a member sends and receives 2 (n - 1) / n of the buffer where the parts are even. A buffer of at most DIRECT_BYTES,
whose time is that of the messages, goes to all members whole instead, and each adds it all up: n - 1 times the buffer.
So does any buffer of two members, for whom both ways move the same bytes.

exchange: all views for one rank travel in one message, each of them dense, in the order in which they stand.
"""

from __future__ import annotations

import os
import struct
import threading
import traceback
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from time import monotonic
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from gpumux.access import is_loopback, split_store
from gpumux.device.run.interpreter import first_lines
from gpumux.errors import ConfigError, GpumuxError, JobFailed, PeersLost
from gpumux.program.ir import DIRECT_BYTES, Collective
from gpumux.types import Gang

_HEAD = struct.Struct("<qqqq")  # step, sequence, part, bytes of data
PACKET_BYTES = 1024
INLINE_BYTES = PACKET_BYTES - _HEAD.size
_PACKET_TAG = 0
_LOOPBACK = "lo"
_THREADS = "/proc/self/task"
_RESUBMIT = "see why that rank ended (gpumux jobs, its daemon's log), then submit the job again"

Moved = dict[int, tuple[int, int]]  # by rank: bytes of data sent to it, and received from it


class MessageId(NamedTuple):
    """Which message of a job: the step, the number of the collective in it, and the part of the collective."""

    step: int
    sequence: int
    part: int

    def tag(self, nbytes: int) -> int:
        """gloo's tag for its data: 31 bits, not 0."""
        return (zlib.crc32(_HEAD.pack(*self, nbytes)) & 0x3FFFFFFF) | 0x40000000

    def __str__(self) -> str:
        return f"part {self.part} of collective {self.sequence} of step {self.step}"


# ---- The group.


def join(gang: Gang) -> None:
    """Find the peers. Raises PeersLost if one does not come within the gang's time."""
    place = split_store(gang.store)
    if place is None:
        raise ConfigError(f"the store {gang.store!r} is no host:port", "write it like 127.0.0.1:29500")
    host, port = place
    if is_loopback(host):  # gloo would listen on the interface of the machine's name
        os.environ["GLOO_SOCKET_IFNAME"] = _LOOPBACK
    patience = timedelta(seconds=gang.timeout_s)
    before = set(os.listdir(_THREADS))
    try:
        store = TCPStore(host, port, is_master=False, timeout=patience, wait_for_workers=False)
        dist.init_process_group(
            "gloo", store=PrefixStore(gang.id, store), rank=gang.rank, world_size=gang.ranks, timeout=patience
        )
    except (RuntimeError, ValueError) as error:
        raise PeersLost(
            f"rank {gang.rank} of {gang.ranks} did not find its peers at {gang.store} within {gang.timeout_s:g} s:"
            f" {first_lines(error)}",
            "see that the client still runs and every rank's daemon can reach it; then submit the job again",
        ) from error
    _make_considerate(set(os.listdir(_THREADS)) - before)


def _make_considerate(threads: set[str]) -> None:
    """Have gloo's threads interrupt no other thread when they wake up.

    gloo's thread polls a connection again and again while another thread holds its lock. Where cores are few, the
    thread that wakes up to a message often interrupts the one that holds the lock, and each message then takes a time
    slice, 4 ms."""
    for thread in threads:
        try:
            os.sched_setscheduler(int(thread), os.SCHED_BATCH, os.sched_param(0))
        except OSError:
            pass  # it has ended, or this may not be set here: messages are as fast as they are without it


class Messages:
    """Messages to and from other ranks, the bytes of data that went each way, and the seconds of waiting until all
    peers had come to them, as their packets show. All tensors are flat bytes."""

    def __init__(self, rank: int, timeout_s: float, clock: Callable[[], float] = monotonic) -> None:
        self.rank = rank
        self._timeout_s, self._clock = timeout_s, clock
        self.begin()

    def begin(self) -> None:
        """Count from here."""
        self.moved: Moved = {}
        self._waited_s, self._began = 0.0, self._clock()

    @property
    def exchange_s(self) -> float:
        """Seconds since `begin` without those in which a peer was awaited."""
        return max(0.0, self._clock() - self._began - self._waited_s)

    def swap(self, mark: MessageId, sends: dict[int, torch.Tensor], receives: dict[int, torch.Tensor]) -> None:
        """Send each rank its tensor while those of `receives` are filled. Every tensor is dense and may be sent as soon
        as this returns. Raises PeersLost."""
        packets = {rank: torch.empty(PACKET_BYTES, dtype=torch.uint8) for rank in receives}
        coming = {rank: self._post(mark, rank, "recv", packet, _PACKET_TAG) for rank, packet in packets.items()}
        large = {
            rank: self._post(mark, rank, "recv", target, mark.tag(target.numel()))
            for rank, target in receives.items()
            if target.numel() > INLINE_BYTES
        }
        going: list[tuple[int, dist.Work]] = []
        for rank, data in sends.items():
            nbytes = data.numel()
            packet = torch.zeros(PACKET_BYTES, dtype=torch.uint8)
            packet[: _HEAD.size] = torch.frombuffer(bytearray(_HEAD.pack(*mark, nbytes)), dtype=torch.uint8)
            if nbytes <= INLINE_BYTES:
                packet[_HEAD.size : _HEAD.size + nbytes] = data
            going.append((rank, self._post(mark, rank, "send", packet, _PACKET_TAG)))
            if nbytes > INLINE_BYTES:
                going.append((rank, self._post(mark, rank, "send", data, mark.tag(nbytes))))
            self._count(rank, nbytes, 0)
        posted = self._clock()
        for rank, packet_came in coming.items():
            self._wait(mark, rank, packet_came)
        self._waited_s += self._clock() - posted
        for rank, target in receives.items():
            packet, nbytes = packets[rank], target.numel()
            check(mark, nbytes, self.rank, rank, packet)
            if nbytes <= INLINE_BYTES:
                target.copy_(packet[_HEAD.size : _HEAD.size + nbytes])
            self._count(rank, 0, nbytes)
        for rank, work in (*large.items(), *going):
            self._wait(mark, rank, work)

    def _post(self, mark: MessageId, rank: int, way: str, data: torch.Tensor, tag: int) -> dist.Work:
        try:
            work = dist.isend(data, rank, tag=tag) if way == "send" else dist.irecv(data, rank, tag=tag)
        except RuntimeError as error:
            raise self._lost(mark, rank, error) from error
        assert work is not None  # this process is in the group
        return work

    def _wait(self, mark: MessageId, rank: int, work: dist.Work) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise self._lost(mark, rank, error) from error

    def _lost(self, mark: MessageId, rank: int, error: RuntimeError) -> PeersLost:
        text = first_lines(error)
        how = f"did not answer within {self._timeout_s:g} s" if "Timed out" in text else "is gone"
        return PeersLost(f"rank {rank} {how}, in {mark}: {text}", _RESUBMIT)

    def _count(self, rank: int, sent: int, received: int) -> None:
        before = self.moved.get(rank, (0, 0))
        self.moved[rank] = before[0] + sent, before[1] + received


def check(mark: MessageId, nbytes: int, own: int, rank: int, packet: torch.Tensor) -> None:
    """Raise PeersLost unless the packet from this rank belongs to the message that is expected."""
    *theirs, size = _HEAD.unpack(bytes(packet[: _HEAD.size].tolist()))
    if MessageId(*theirs) != mark or size != nbytes:
        raise PeersLost(
            f"rank {rank} sent {size} bytes for {MessageId(*theirs)}, where rank {own} expects {nbytes} for {mark}",
            "the ranks' programs do not belong together: submit the job again, and report this if it happens again",
        )


# ---- Collectives. `tensor(view)` gives the tensor of a view of the Program.


def all_reduce(messages: Messages, one: Collective, step: int, tensors: Sequence[torch.Tensor]) -> None:
    """Replace each tensor by its sum over the members, times the scale. See the module."""
    by_type: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_type.setdefault(tensor.dtype, []).append(tensor)
    for number, alike in enumerate(by_type.values()):
        dense = len(alike) == 1 and alike[0].is_contiguous()
        flat = alike[0].view(-1) if dense else torch.cat([tensor.reshape(-1) for tensor in alike])
        if len(one.members) == 2 or flat.numel() * flat.itemsize <= DIRECT_BYTES:
            _sum_directly(messages, one, MessageId(step, one.sequence, 2 * number), flat)
        else:
            _sum_in_parts(messages, one, MessageId(step, one.sequence, 2 * number), flat)
        if not dense:
            for tensor, part in zip(alike, flat.split([tensor.numel() for tensor in alike]), strict=True):
                tensor.copy_(part.view(tensor.shape))


def _sum_directly(messages: Messages, one: Collective, mark: MessageId, flat: torch.Tensor) -> None:
    others = [rank for rank in one.members if rank != messages.rank]
    parts = {rank: torch.empty_like(flat) for rank in others}
    data = _bytes(flat)
    messages.swap(mark, dict.fromkeys(others, data), {rank: _bytes(part) for rank, part in parts.items()})
    parts[messages.rank] = flat
    _sum(flat, [parts[rank] for rank in one.members], one.scale)


def _sum_in_parts(messages: Messages, one: Collective, mark: MessageId, flat: torch.Tensor) -> None:
    members, count = one.members, flat.numel()
    edges = [i * count // len(members) for i in range(len(members) + 1)]
    parts = {rank: flat[edges[i] : edges[i + 1]] for i, rank in enumerate(members)}
    own = parts.pop(messages.rank)
    got = {rank: torch.empty_like(own) for rank in parts}
    messages.swap(
        mark, {rank: _bytes(part) for rank, part in parts.items()}, {rank: _bytes(part) for rank, part in got.items()}
    )
    got[messages.rank] = own
    _sum(own, [got[rank] for rank in members], one.scale)
    data = _bytes(own)
    messages.swap(
        mark._replace(part=mark.part + 1),
        dict.fromkeys(parts, data),
        {rank: _bytes(part) for rank, part in parts.items()},
    )


def _sum(into: torch.Tensor, parts: Sequence[torch.Tensor], scale: float) -> None:
    """The sum in this order, times `scale`, in the type of the parts, all of which but `into` are overwritten."""
    total = parts[0]
    for part in parts[1:]:
        total.add_(part)
    if scale != 1.0:
        total.mul_(scale)
    if total is not into:
        into.copy_(total)


def exchange(
    messages: Messages, one: Collective, step: int, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]
) -> None:
    """Send each of `sends` and fill each of `receives`, which stand for the collective's."""
    going: dict[int, list[torch.Tensor]] = {}
    coming: dict[int, list[torch.Tensor]] = {}
    for (rank, _), tensor in zip(one.sends, sends, strict=True):
        going.setdefault(rank, []).append(tensor)
    for (rank, _), tensor in zip(one.receives, receives, strict=True):
        coming.setdefault(rank, []).append(tensor)
    packed = {rank: _packed(tensors) for rank, tensors in going.items()}
    space = {rank: _space(tensors) for rank, tensors in coming.items()}
    messages.swap(MessageId(step, one.sequence, 0), packed, space)
    for rank, tensors in coming.items():
        if len(tensors) > 1 or not tensors[0].is_contiguous():
            _unpack(space[rank], tensors)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor as flat bytes, without a copy."""
    return tensor.reshape(-1).view(torch.uint8)


def _packed(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    dense = [_bytes(tensor.contiguous()) for tensor in tensors]
    return dense[0] if len(dense) == 1 else torch.cat(dense)


def _space(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Where the data of these tensors is received: in place if it is one dense tensor."""
    if len(tensors) == 1 and tensors[0].is_contiguous():
        return _bytes(tensors[0])
    return torch.empty(sum(tensor.numel() * tensor.itemsize for tensor in tensors), dtype=torch.uint8)


def _unpack(data: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    at = 0
    for tensor in tensors:
        nbytes = tensor.numel() * tensor.itemsize
        part = data[at : at + nbytes]
        at += nbytes
        part = part if part.storage_offset() % tensor.itemsize == 0 else part.clone()
        tensor.copy_(part.view(tensor.dtype).view(tensor.shape))


# ---- The thread that carries them out.


class _Task(NamedTuple):
    run: Callable[[Messages], None]
    ended: Callable[[Moved, float], None]


class Peers:
    """A thread that joins the gang and then carries out collectives, one after the other. It waits in gloo, without a
    core. `joined` is called when the peers are connected, and `failed` with the first error, both in this thread;
    nothing is carried out after an error."""

    def __init__(self, gang: Gang, joined: Callable[[], None], failed: Callable[[GpumuxError], None]) -> None:
        self.gang = gang
        self._joined, self._failed = joined, failed
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        # No reason to keep a process that ends: the job is over then.
        threading.Thread(target=self._run, name="gpumux-peers", daemon=True).start()

    def begin(self, run: Callable[[Messages], None], ended: Callable[[Moved, float], None]) -> None:
        """Have the thread carry out `run`, then call `ended` with the bytes that it moved, and the seconds that this
        took when the peers were there."""
        self._tasks.put(_Task(run, ended))

    def leave(self) -> None:
        """Leave the gang once all that was begun is carried out."""
        self._tasks.put(None)

    def _run(self) -> None:
        try:
            with torch.inference_mode():  # a thread's own
                if self.gang.ranks > 1:
                    join(self.gang)
                self._joined()
                messages = Messages(self.gang.rank, self.gang.timeout_s)
                while (task := self._tasks.get()) is not None:
                    messages.begin()
                    task.run(messages)
                    task.ended(messages.moved, messages.exchange_s)
                if dist.is_initialized():
                    dist.destroy_process_group()
                while self._tasks.get() is None:
                    pass  # it left before
                raise PeersLost("the job has left its gang", "open a job for a new gang")
        except GpumuxError as error:
            self._failed(error)
        except Exception as error:  # noqa: BLE001 - the last frame of a thread: the job must not wait for ever
            traceback.print_exc()
            self._failed(
                JobFailed(
                    f"its collectives failed: {type(error).__name__}: {first_lines(error)}", "see the daemon's log"
                )
            )
