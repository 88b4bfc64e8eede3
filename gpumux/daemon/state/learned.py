"""What the guard has learned of interference: shown to clients, and kept in the state directory over restarts.

The file `interference` holds it by content hashes of programs, so a job that comes back after a restart of the daemon
is protected from its first step by what was measured before. It is written when something was learned, at most every
SAVE_EVERY_S, and at the end; a killed daemon has lost the newest measurements. What was learned on another device, or
under other rules of cutting programs, is not taken up.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from hashlib import sha256
from math import inf
from typing import Any, Final

import msgpack

from gpumux.daemon.records import ProgramNames, SessionRecord
from gpumux.daemon.round_robin import DAEMON
from gpumux.daemon.segments import Offload
from gpumux.metrics.gauges import PairFigures
from gpumux.scheduler.guard.interference import VERSION, PairSlowdown
from gpumux.scheduler.scheduler import Scheduler
from gpumux.types import DeviceInfo

log = logging.getLogger("gpumux.daemon")

# ---- The file.

NAME: Final = "interference"
MAX_BYTES: Final = 64 << 20


class LearnedFile:
    """The file in a directory, given by a descriptor that stays open. `shown`: the file's path, for messages."""

    def __init__(self, directory: int, shown: str) -> None:
        self._directory = directory
        self.shown = shown

    def read(self) -> bytes:
        """Its content, empty if there is none. Raises OSError."""
        try:
            fd = os.open(NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=self._directory)
        except FileNotFoundError:
            return b""
        with open(fd, "rb") as file:
            if os.fstat(fd).st_uid != os.geteuid():
                raise PermissionError("it belongs to another user")
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise OSError(f"it has more than {MAX_BYTES} bytes")
        return content

    def set_aside(self) -> str:
        """Give it another name, and return that. Raises OSError."""
        os.rename(NAME, f"{NAME}.other", src_dir_fd=self._directory, dst_dir_fd=self._directory)
        return f"{self.shown}.other"

    def write(self, content: bytes) -> None:
        """Replace it. Raises OSError, and leaves the former one then. What lies under the new file's name is removed
        before, not opened: it may be a pipe, at which opening would wait, or another name of a file elsewhere."""
        new = f"{NAME}.new"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        with suppress(FileNotFoundError):
            os.unlink(new, dir_fd=self._directory)
        fd = os.open(new, flags, 0o600, dir_fd=self._directory)
        with open(fd, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(fd)
        os.rename(new, NAME, src_dir_fd=self._directory, dst_dir_fd=self._directory)
        os.fsync(self._directory)


# ---- Keeping it.

SAVE_EVERY_S: Final = 60.0
FIGURES_EVERY_S: Final = 5.0
MOST_PROGRAMS: Final = 256  # high programs that are kept: those met last
MOST_KEPT_BYTES: Final = 32 << 20  # of these, packed
MOST_PAIRS: Final = 64  # in an answer: those that lose most
MOST_RANGES: Final = 64  # of each pair
MOST_FIGURES: Final = 32  # pairs on the status page
FEW_SAMPLES: Final = 10
NOTHING: Final[bytes] = msgpack.packb([])  # kept of a program of which too much is known
DIGEST: Final = 32  # bytes of a program's digest, which come before what is kept of it


class Learned:
    """What was learned, for clients, operators and the next daemon. `file` is None for a daemon without a state
    directory, which forgets it at its end."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        names: ProgramNames,
        offload: Offload,
        file: LearnedFile | None,
        device: DeviceInfo,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler, self._names, self._offload = scheduler, names, offload
        self._file, self._device, self._clock = file, device, clock
        self._kept: dict[str, tuple[int, bytes]] = {}  # by program: the number of its state, and that, packed
        self._unpacked: list[
            tuple[str, int]
        ] = []  # programs, with the numbers of their states, that are to be packed before the file is written
        self._unwritten = False  # something was packed that is not in the file
        self._pairs: list[PairSlowdown] = []
        self._pairs_due = -inf
        self.due = inf  # when `save` is to be called

    # ---- what clients and operators see

    def body(self, session: SessionRecord, operates: bool, program: str) -> dict[str, Any]:
        """The body of an answer to GetInterference, as docs/protocol.md has it. The session sees the names of its own
        user's programs; an operator's sees all. `program`: a name, or the beginning of a content hash; "": all."""
        uid = None if operates else session.peer.uid
        pairs = [pair for pair in self._current() if not program or self._is_of(pair, program, uid)]
        return {
            "pairs": [self._shown(pair, uid) for pair in pairs[:MOST_PAIRS]],
            "left_out": max(0, len(pairs) - MOST_PAIRS),
            "kept_in": self._file.shown if self._file is not None else "",
        }

    def figures(self) -> tuple[tuple[PairFigures, ...], int]:
        """The pairs for the status page, and the number of all; those of few samples are left out, since chance puts
        them first."""
        pairs = [pair for pair in self._current() if pair.samples >= FEW_SAMPLES]
        found = [PairFigures(each.high[:8], each.low[:8], each.share, each.slowdown, each.low_speed) for each in pairs]
        return tuple(found[:MOST_FIGURES]), len(pairs)

    def _current(self) -> list[PairSlowdown]:
        """The pairs as of a few seconds ago at most: a daemon with many of them does not count them for every
        question."""
        now = self._clock()
        if now >= self._pairs_due:
            self._pairs, self._pairs_due = self._scheduler.interference(), now + FIGURES_EVERY_S
        return self._pairs

    def _is_of(self, pair: PairSlowdown, program: str, uid: int | None) -> bool:
        return any(each.startswith(program) or self._names.of(each, uid) == program for each in (pair.high, pair.low))

    def _shown(self, pair: PairSlowdown, uid: int | None) -> dict[str, Any]:
        ranges = sorted(pair.ranges, key=lambda each: (-each.slowdown, each.first))[:MOST_RANGES]
        return {
            "high": {"program": pair.high, "name": self._names.of(pair.high, uid)},
            "low": {"program": pair.low, "name": self._names.of(pair.low, uid)},
            "share": pair.share,
            "slowdown": pair.slowdown,
            "low_speed": pair.low_speed,
            "samples": pair.samples,
            "solo_s": pair.solo_s,
            "cut_into": pair.cut_into,
            "ranges": [each._asdict() for each in sorted(ranges)],
            "ranges_left_out": len(pair.ranges) - len(ranges),
        }

    # ---- keeping it

    def save(self) -> None:
        """Called when `due`: once a while, pack the programs of which something was learned since they were last
        packed, one in each call, since the loop waits for it. Then have the file written."""
        if not self._unpacked:
            self._unpacked = self._changed()
            self._unwritten = self._unwritten or bool(self._unpacked)
        if self._unpacked:
            self._pack(*self._unpacked.pop())
        self.due = self._clock() + (0.0 if self._unpacked else SAVE_EVERY_S)
        if self._unwritten and not self._unpacked and self._file is not None:
            self._unwritten = False
            file, content = self._file, self._content()
            self._offload.submit(DAEMON, NAME, lambda: _write(file, content), self._written, lambda: None)

    def _written(self, done: bool) -> None:
        """The file was written, or could not be: then it is tried again the next time."""
        self._unwritten = self._unwritten or not done

    def close(self) -> None:
        """Write what was learned since the last time. The scheduler takes no more events."""
        if self._file is None:
            return
        found = self._changed()
        for program, changes in found:
            self._pack(program, changes)
        if found or self._unwritten:
            _write(self._file, self._content())

    def _changed(self) -> list[tuple[str, int]]:
        """The programs of which something was learned since they were last packed, with the numbers of their states."""
        newest = [*self._scheduler.learned().items()][-MOST_PROGRAMS:]
        return [each for each in newest if each[0] not in self._kept or self._kept[each[0]][0] != each[1]]

    def _pack(self, program: str, changes: int) -> None:
        self._kept.pop(program, None)
        packed: bytes = msgpack.packb(self._scheduler.kept(program))
        self._kept[program] = changes, sealed(packed if len(packed) < MOST_KEPT_BYTES - DIGEST else NOTHING)
        while len(self._kept) > MOST_PROGRAMS or self._kept_bytes() > MOST_KEPT_BYTES:
            del self._kept[next(iter(self._kept))]

    def _kept_bytes(self) -> int:
        return sum([len(packed) for _, packed in self._kept.values()])

    def _content(self) -> list[Any]:
        """What is to be in the file; later changes don't change it."""
        programs = {program: packed for program, (_, packed) in self._kept.items()}
        return [VERSION, _about(self._device), programs, self._names.all()]

    def take_up(self) -> None:
        """Take up what an earlier daemon kept. Called once, when the scheduler has its device."""
        file = self._file
        if file is None:
            return
        self.due = self._clock() + SAVE_EVERY_S
        try:
            content = file.read()
            if not content:
                return
            version, about, programs, names = msgpack.unpackb(content, strict_map_key=False)
            if version != VERSION or about != _about(self._device):
                aside = file.set_aside()
                log.info("%s is of another version or device: it is now %s, and all is learned anew", file.shown, aside)
                return
            taken = [str(program) for program, packed in programs.items() if self._take_up(str(program), packed)]
            learned = self._scheduler.learned()
            self._kept = {program: (learned.get(program, 0), programs[program]) for program in taken}
            for program, uid, name in names:
                self._names.add(str(program), int(uid), str(name))
        except Exception as error:  # noqa: BLE001 - whatever is wrong with the file, the daemon does without it
            log.warning(
                "can't read what was learned of interference (%s), so it is learned again: %s", file.shown, error
            )
            return
        count = f"{len(taken)} of {len(programs)} programs"
        log.info("taken up what was learned of interference: %s, from %s", count, file.shown)

    def _take_up(self, program: str, packed: bytes) -> bool:
        """Whether the scheduler took it."""
        try:
            content = packed[DIGEST:]
            if sealed(content) != packed:
                raise ValueError("its bytes are not those that were written")
            self._scheduler.take_up(program, msgpack.unpackb(content))
        except Exception as error:  # noqa: BLE001
            log.warning("what was kept of program %s is damaged, and learned again: %s", program[:16], error)
            return False
        return True


def sealed(content: bytes) -> bytes:
    """With its digest, by which damage is found out: the numbers themselves are not looked at."""
    return sha256(content).digest() + content


def _about(device: DeviceInfo) -> dict[str, Any]:
    """What has to be equal for measurements to mean the same."""
    facts = asdict(device)
    return {key: facts[key] for key in ("kind", "name", "threads", "parallel", "piece_target_s")} | {
        "shares": list(device.shares)
    }


def _write(file: LearnedFile, content: list[Any]) -> bool:
    """Whether it was written."""
    try:
        file.write(msgpack.packb(content))
        return True
    except OSError as error:
        log.warning("can't write what was learned of interference (%s): %s", file.shown, error)
        return False
