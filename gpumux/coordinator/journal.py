"""What a coordinator keeps over a restart: an SQLite file in its state directory, written before anything is sent.

Only rows that have changed are written, in one transaction for each happening that changed something. The values are
msgpack. A file that can't be read, or is of another version, is refused: without it a coordinator would take its jobs
for unknown.

What was learned, the costs of pairs of programs and the programs of jobs by name, is written every LEARNED_EVERY_S, as
it changes all the time and no answer hangs on it. Its rows lie in the order in which they were written, oldest first.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import Any, Final

import msgpack

from gpumux.cluster.costs import MOST_PAIRS
from gpumux.cluster.events import PairMeasured
from gpumux.cluster.saved import facts_of, job_data, node_data, restore
from gpumux.coordinator.core import MOST_NAMES, Answered, ClientJob, Coordinator, CoordinatorConfig
from gpumux.daemon.state.directory import open_state_directory
from gpumux.errors import ConfigError, EndpointBusy, StateNotKept
from gpumux.types import JobId, Peer

NAME: Final = "cluster.sqlite"
VERSION: Final = 2  # 1 had no LEARNED and no times of drains
READABLE: Final = (0, 1, VERSION)  # 0: a new file
MOVE_AWAY: Final = "move it away: jobs that run go on, and have to be submitted again to be placed anew"
SECTIONS: Final = ("facts", "nodes", "jobs", "answers", "drained")
LEARNED: Final = {"pairs": MOST_PAIRS, "programs": MOST_NAMES}  # sections, and the most rows of each
LEARNED_EVERY_S: Final = 30.0


class Journal:
    """The file in `directory`. `wall`: seconds since the epoch, which pass while no coordinator runs, too. Raises
    EndpointBusy if another coordinator uses it, and ConfigError for any other reason why it can't be opened, among them
    that others may write to the directory: SQLite follows links in the place of the files that it makes beside it."""

    def __init__(self, directory: Path, wall: Callable[[], float] = time.time) -> None:
        self.path = directory / NAME
        self._wall = wall
        try:
            os.close(open_state_directory(directory))
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
            self._file = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False, timeout=0.0)
            self._file.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._file.execute("PRAGMA journal_mode = WAL")
            self._file.execute("PRAGMA synchronous = FULL")
            self._file.execute("BEGIN IMMEDIATE")  # takes the lock, which is held until the file is closed
            self._file.execute(
                "CREATE TABLE IF NOT EXISTS kept (section TEXT, key TEXT, value BLOB, PRIMARY KEY (section, key))"
            )
            self._file.execute("COMMIT")
            found: int = self._file.execute("PRAGMA user_version").fetchone()[0]
            if found in READABLE:
                self._file.execute(f"PRAGMA user_version = {VERSION}")
        except (OSError, sqlite3.Error) as error:
            if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY:
                raise EndpointBusy(
                    f"another coordinator uses {self.path}", "stop it first, or give this one another --state-dir"
                ) from error
            damaged = getattr(error, "sqlite_errorcode", None) in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT)
            raise ConfigError(
                f"{self.path} can't be opened: {error}",
                MOVE_AWAY if damaged else "see that it is this user's, and that there is room on the disk",
            ) from error
        if found not in READABLE:
            raise ConfigError(
                f"{self.path} is of version {found}", "use the gpumux that wrote it, or another --state-dir"
            )
        self._written: dict[tuple[str, str], bytes] = {}  # what is in the file besides what was learned
        self._learned = (0, 0)  # how many pairs and programs the coordinator had been told of when they were written
        self._learned_at = -inf

    def load(
        self, config: CoordinatorConfig, names: Callable[[Peer], tuple[str, str]], now: float | None = None
    ) -> Coordinator:
        """The coordinator as it was kept; a new one if none was. `names` and `now` are the Coordinator's. Raises
        ConfigError for a file that can't be read."""
        try:
            rows = self._file.execute("SELECT section, key, value FROM kept ORDER BY rowid").fetchall()
            self._written = {(section, key): bytes(value) for section, key, value in rows if section not in LEARNED}
            kept: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
            for (section, key), value in self._written.items():
                kept[section][key] = msgpack.unpackb(value)
            if not kept["facts"]:
                return Coordinator(config, names, now=now)
            nodes = kept["nodes"].values()
            placement = restore(config.placement, kept["facts"][""], nodes, [each[1] for each in kept["jobs"].values()])
            jobs = [ClientJob(JobId(key), each[0]["name"], each[0]["uid"]) for key, each in kept["jobs"].items()]
            answers = {JobId(key): Answered(**each) for key, each in kept["answers"].items()}
            in_order = dict(sorted(answers.items(), key=lambda item: item[1].number))
            begins = placement.now if now is None else now
            drained = {node: self._as_of(wall, begins) for node, wall in kept["drained"].items()}
            found = Coordinator(
                config, names, placement=placement, jobs=jobs, answers=in_order, drained=drained, now=now
            )
            _learn(found, [(section, bytes(value)) for section, _, value in rows if section in LEARNED])
            self._learned = found.placement.costs.learned, found.programs_told
            return found
        except (sqlite3.Error, KeyError, TypeError, ValueError, IndexError, msgpack.UnpackException) as error:
            raise ConfigError(
                f"{self.path} can't be read: {type(error).__name__}: {error}",
                MOVE_AWAY,
            ) from error

    def keep(self, coordinator: Coordinator, *, last: bool = False) -> None:
        """Write what has changed since the last call. `last`: and what was learned, since the coordinator ends. Raises
        StateNotKept if it can't be written: nothing may be sent then."""
        found = self._data(coordinator)
        changed = [key for key, value in found.items() if self._written.get(key) != value]
        gone = [key for key in self._written if key not in found]
        learned = self._news(coordinator, last)
        if not gone and not learned and changed in ([], [_FACTS]) and _FACTS in self._written:
            return  # the clock alone
        try:
            self._file.execute("BEGIN")
            self._file.executemany(
                "INSERT OR REPLACE INTO kept VALUES (?, ?, ?)", [(*key, found[key]) for key in changed]
            )
            self._file.executemany("DELETE FROM kept WHERE section = ? AND key = ?", gone)
            self._keep_learned(learned)
            self._file.execute("COMMIT")
        except sqlite3.Error as error:
            raise StateNotKept(
                f"{self.path} can't be written: {error}", "make room on its disk, and start the coordinator again"
            ) from error
        self._written = found

    def close(self) -> None:
        self._file.close()

    def _news(self, coordinator: Coordinator, last: bool) -> list[tuple[str, str, bytes]]:
        """Rows of what was learned since they were last written, oldest first, if it is time to write them."""
        costs, pack = coordinator.placement.costs, msgpack.packb
        learned = costs.learned, coordinator.programs_told
        if learned == self._learned or not (last or coordinator.placement.now >= self._learned_at + LEARNED_EVERY_S):
            return []
        pairs, programs = (after - before for after, before in zip(learned, self._learned, strict=True))
        rows = [("pairs", f"{each.high} {each.low}", pack(each)) for each in costs.newest(pairs)]
        for uid, name, hashes in coordinator.newest_programs(programs):
            rows.append(("programs", f"{uid} {name}", pack([uid, name, hashes])))
        self._learned, self._learned_at = learned, coordinator.placement.now
        return rows

    def _keep_learned(self, rows: list[tuple[str, str, bytes]]) -> None:
        self._file.executemany("INSERT OR REPLACE INTO kept VALUES (?, ?, ?)", rows)
        for section in {section for section, _, _ in rows}:
            self._file.execute(
                "DELETE FROM kept WHERE section = ?1 AND rowid <= (SELECT rowid FROM kept WHERE section = ?1"
                " ORDER BY rowid DESC LIMIT 1 OFFSET ?2)",
                (section, LEARNED[section]),
            )

    def _as_of(self, wall: float | None, now: float) -> float | None:
        """The time of a wall clock by the coordinator's clock, which is at `now`."""
        return None if wall is None else now - max(0.0, self._wall() - wall)

    def _data(self, coordinator: Coordinator) -> dict[tuple[str, str], bytes]:
        placement, pack = coordinator.placement, msgpack.packb
        found: dict[tuple[str, str], bytes] = {_FACTS: pack(facts_of(placement))}
        for node in placement.nodes.values():
            found["nodes", node.name] = pack(node_data(node))
        for job in coordinator.jobs.values():
            found["jobs", job.id] = pack([{"name": job.name, "uid": job.uid}, job_data(placement.jobs[job.id])])
        for name, answer in coordinator.answers.items():
            key = "answers", str(name)
            found[key] = self._written.get(key) or pack(asdict(answer))  # an answer never changes
        for drained, since in coordinator.drained.items():
            wall = None if since is None else self._wall() - (placement.now - since)
            found["drained", drained] = self._written.get(("drained", drained)) or pack(wall)  # it never changes
        return found


def _learn(coordinator: Coordinator, rows: list[tuple[str, bytes]]) -> None:
    """Tell the coordinator what was learned, oldest first."""
    for section, value in rows:
        data = msgpack.unpackb(value)
        if section == "pairs":
            coordinator.placement.costs.learn(PairMeasured(*data))
        else:
            uid, name, hashes = data
            coordinator.learn_programs(int(uid), str(name), tuple(map(str, hashes)))


_FACTS: Final = ("facts", "")
