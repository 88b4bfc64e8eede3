"""The process that has to do with the snapshots' disk: a slow one, or a full one, keeps no step waiting.

It does one thing after the other, as the daemon asks (link.py), at the lowest priority, and ends with the daemon.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from gpumux.errors import GpumuxError, SnapshotFailed, UnknownJob
from gpumux.model import GENERATOR_BYTES
from gpumux.program.ir import aligned
from gpumux.recovery.layout import places
from gpumux.recovery.link import PACKET
from gpumux.recovery.store import GENERATOR, NOTES, Array, Owner, Snapshot, Store, buffer_name

_PR_SET_PDEATHSIG = 1


class Writer:
    """Carries out one request after the other."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._read: Snapshot | None = None  # what `read` found, until `fill` has put it where it is wanted
        self._verbs: dict[str, Callable[[dict[str, Any], list[int]], Any]] = {
            "save": self._save,
            "read": self._find_whole,
            "fill": self._fill,
            "find": self._find,
            "forget": lambda a, _: store.forget(Owner(a["uid"], a["job"])),
            "expire": self._expire,
            "kept": self._kept,
        }

    def answer(self, packet: bytes, fds: list[int]) -> bytes:
        """What to say to a request. Its descriptors are closed."""
        try:
            verb, arguments = msgpack.unpackb(packet)
            return bytes(msgpack.packb(["", self._verbs[verb](arguments, fds)]))
        except GpumuxError as error:
            return bytes(msgpack.packb([error.code, [error.message, error.remedy]]))
        except (OSError, ValueError, MemoryError) as error:
            said = f"the snapshot's process failed: {type(error).__name__}: {error}"
            return bytes(msgpack.packb([SnapshotFailed.code, [said[:1000], "see that the machine has memory left"]]))
        finally:
            for fd in fds:
                os.close(fd)

    def _save(self, a: dict[str, Any], fds: list[int]) -> int:
        owner = Owner(a["uid"], a["job"])
        with _mapped(fds[0]) as data, _mapped(fds[1]) as beside:
            sizes = np.frombuffer(beside, np.uint64, a["buffers"]).tolist()
            whole = np.frombuffer(data, np.uint8)
            tensors = {buffer_name(i): whole[at : at + n] for i, (at, n) in enumerate(places(sizes))}
            region = whole[sum(map(aligned, sizes)) :][:GENERATOR_BYTES]
            tensors[GENERATOR] = region[8 : 8 + int(region[:8].view(np.uint64)[0])]
            tensors[NOTES] = np.frombuffer(beside, np.uint8, a["notes"], 8 * a["buffers"])
            nbytes = sum(t.nbytes for t in tensors.values())
            facts = {k: str(a[k]) for k in ("name", "uid", "job", "number", "steps")} | {"saved": f"{time.time():.3f}"}
            try:
                self._store.make_room(owner, nbytes, a["limit"], _owners(a["living"]))
                return self._store.save(owner, a["number"], tensors, facts)
            finally:
                tensors.clear()
                del whole, region  # the mapping can't be closed under them

    def _find_whole(self, a: dict[str, Any], _: list[int]) -> dict[str, Any]:
        found, bad = self._store.read(Owner(a["uid"], a["job"]), a["numbers"])
        self._read = found
        if found is None:
            there = f"; damaged: {', '.join(map(str, bad))}" if bad else ""
            raise UnknownJob(f"there is no whole snapshot of this job{there}", "start the job anew")
        nbytes = sum(aligned(b.nbytes) for b in found.buffers) + GENERATOR_BYTES + found.notes.nbytes
        return {"number": found.number, "nbytes": nbytes, "notes": found.notes.nbytes, "bad": bad}

    def _fill(self, _: dict[str, Any], fds: list[int]) -> None:
        found, self._read = self._read, None
        if found is None:
            raise SnapshotFailed("the snapshot that was read is gone", "try again")
        with _mapped(fds[0], write=True) as memory:
            whole: Array = np.frombuffer(memory, np.uint8)
            sizes = [b.nbytes for b in found.buffers]
            for (at, n), buffer in zip(places(sizes), found.buffers, strict=True):
                whole[at : at + n] = buffer
            at = sum(map(aligned, sizes))
            whole[at : at + 8] = np.frombuffer(found.generator.nbytes.to_bytes(8, "little"), np.uint8)
            whole[at + 8 : at + 8 + found.generator.nbytes] = found.generator
            at += GENERATOR_BYTES
            whole[at : at + found.notes.nbytes] = found.notes
            del whole

    def _find(self, a: dict[str, Any], _: list[int]) -> dict[str, Any]:
        kept = self._store.find(a["uid"], a["name"])
        return {"job": kept.owner.job, "numbers": list(kept.numbers)}

    def _expire(self, a: dict[str, Any], _: list[int]) -> int:
        return len(self._store.expire(a["before"], _owners(a["living"])))

    def _kept(self, a: dict[str, Any], _: list[int]) -> dict[str, int]:
        kept = list(self._store.kept())
        return {"jobs": len(kept), "nbytes": sum(k.nbytes for k in kept)}


def _owners(pairs: list[list[Any]]) -> frozenset[Owner]:
    return frozenset(Owner(uid, job) for uid, job in pairs)


@contextmanager
def _mapped(fd: int, write: bool = False) -> Iterator[mmap.mmap]:
    prot = mmap.PROT_READ | mmap.PROT_WRITE if write else mmap.PROT_READ
    mapping = mmap.mmap(fd, os.fstat(fd).st_size, mmap.MAP_SHARED, prot)
    try:
        yield mapping
    finally:
        try:
            mapping.close()
        except BufferError:
            pass  # an error on its way out keeps the arrays of where it arose, and with them the mapping: they go together


def main() -> None:
    """`python -m gpumux.recovery.writer SOCKET PARENT ROOT`, started by link.py."""
    sock = socket.socket(fileno=int(sys.argv[1]))
    # A daemon that is killed takes its writer along: the next one finds nobody else in the directory.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[2]):
        return
    for ignored in (signal.SIGINT, signal.SIGTERM):  # the daemon says when it is time
        signal.signal(ignored, signal.SIG_IGN)
    os.nice(19)
    store = Store(Path(sys.argv[3]))
    store.tidy()
    writer = Writer(store)
    while True:
        packet, fds, _, _ = socket.recv_fds(sock, PACKET, 2)
        if not packet:
            return
        answer = writer.answer(packet, list(fds))
        try:
            sock.send(answer)
        except OSError:
            return


if __name__ == "__main__":
    main()
