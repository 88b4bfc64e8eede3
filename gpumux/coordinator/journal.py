"""What a coordinator keeps over a restart: an SQLite file in its state directory, written before anything is sent.

Only rows that have changed are written, in one transaction for each happening that changed something. The values are
msgpack. A file that can't be read, or is of another version, is refused: without it a coordinator would take its jobs
for unknown.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import msgpack

from gpumux.cluster.saved import facts_of, job_data, node_data, restore
from gpumux.coordinator.core import Answered, ClientJob, Coordinator, CoordinatorConfig
from gpumux.errors import ConfigError, EndpointBusy, StateNotKept
from gpumux.types import JobId, Peer

NAME: Final = "cluster.sqlite"
VERSION: Final = 1
MOVE_AWAY: Final = "move it away: jobs that run go on, and have to be submitted again to be placed anew"
SECTIONS: Final = ("facts", "nodes", "jobs", "answers", "drained")


class Journal:
    """The file in `directory`. Raises EndpointBusy if another coordinator uses it, and ConfigError for any other reason
    why it can't be opened."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / NAME
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
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
            if found in (0, VERSION):
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
        if found not in (0, VERSION):
            raise ConfigError(
                f"{self.path} is of version {found}", "use the gpumux that wrote it, or another --state-dir"
            )
        self._written: dict[tuple[str, str], bytes] = {}  # what is in the file

    def load(
        self, config: CoordinatorConfig, names: Callable[[Peer], tuple[str, str]], now: float | None = None
    ) -> Coordinator:
        """The coordinator as it was kept; a new one if none was. `names` and `now` are the Coordinator's. Raises
        ConfigError for a file that can't be read."""
        try:
            rows = self._file.execute("SELECT section, key, value FROM kept").fetchall()
            self._written = {(section, key): bytes(value) for section, key, value in rows}
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
            return Coordinator(
                config, names, placement=placement, jobs=jobs, answers=in_order, drained=kept["drained"], now=now
            )
        except (sqlite3.Error, KeyError, TypeError, ValueError, IndexError, msgpack.UnpackException) as error:
            raise ConfigError(
                f"{self.path} can't be read: {type(error).__name__}: {error}",
                MOVE_AWAY,
            ) from error

    def keep(self, coordinator: Coordinator) -> None:
        """Write what has changed since the last call. Raises StateNotKept if it can't be written: nothing may be sent
        then."""
        found = self._data(coordinator)
        changed = [key for key, value in found.items() if self._written.get(key) != value]
        gone = [key for key in self._written if key not in found]
        if not gone and changed in ([], [_FACTS]) and _FACTS in self._written:
            return  # the clock alone
        try:
            self._file.execute("BEGIN")
            self._file.executemany(
                "INSERT OR REPLACE INTO kept VALUES (?, ?, ?)", [(*key, found[key]) for key in changed]
            )
            self._file.executemany("DELETE FROM kept WHERE section = ? AND key = ?", gone)
            self._file.execute("COMMIT")
        except sqlite3.Error as error:
            raise StateNotKept(
                f"{self.path} can't be written: {error}", "make room on its disk, and start the coordinator again"
            ) from error
        self._written = found

    def close(self) -> None:
        self._file.close()

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
        for drained in coordinator.drained:
            found["drained", drained] = pack(None)
        return found


_FACTS: Final = ("facts", "")
