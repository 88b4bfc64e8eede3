"""Which connections to a listening socket may stay. Pure: times are seconds of any monotonic clock.

    of one user                      its sessions and SLACK more; of one address, over tcp, the same
    that have no session             STRANGERS_PER_USER of a user, STRANGERS in all, each for HELLO_S seconds
    in all                           those of all sessions and 2 * SLACK
    root's and the daemon's user's   RESERVED each, whatever others have

So connections that say nothing keep nobody out for long, and root is let in while all other places are taken.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

SLACK = 32  # connections of a user beyond its sessions: commands that come and go, clients that reconnect
STRANGERS_PER_USER = 64  # as many clients of one user may come at the same moment
STRANGERS = 192
RESERVED = 32
RESERVED_SESSIONS = 16
HELLO_S = 5.0
_READS = 2  # the first may have begun before the time was over

Owner = int | str  # a uid, or the address of a tcp connection, whose key is not known yet
Connection = tuple[int, int]  # a descriptor and the inode of its socket: descriptors are reused


@dataclass(frozen=True, slots=True)
class Bounds:
    """The most connections in all (without the reserves), of one user, and in the reserve of each who has one."""

    in_all: int
    own: int
    reserved: int


def bounds(max_sessions: int, max_sessions_per_user: int, file_limit: int) -> Bounds:
    """As many as sessions may need, within half of the process's limit of descriptors."""
    half = file_limit // 2
    reserved = min(RESERVED, half // 8)
    return Bounds(
        min(max_sessions + 2 * SLACK, half - 2 * reserved), min(max_sessions_per_user + SLACK, half), reserved
    )


@dataclass(slots=True)
class _Record:
    owner: Owner
    inode: int
    since: float  # since when it has no session
    named: bool = False  # it had a session when it was last looked at
    due: int = -1  # how often the daemon had read all messages when the time for Hello was over; -1: it is not


class ConnectionTable:
    """The connections that are open. `reserved`: the users who have a reserve. `named`: the connections that have a
    session now, kept by the caller."""

    def __init__(self, reserved: Collection[int]) -> None:
        self._reserved = frozenset(reserved)
        self._records: dict[int, _Record] = {}  # by descriptor

    def __len__(self) -> int:
        return len(self._records)

    def owners(self) -> list[Owner]:
        """The owner of each connection."""
        return [record.owner for record in self._records.values()]

    def add(
        self, connection: Connection, owner: Owner, now: float, named: Collection[Connection], limits: Bounds
    ) -> bool:
        """Add a new connection. Returns False if it is to be shut down; it stays in the table until `remove`."""
        fd, inode = connection
        others = [(fd, record) for fd, record in self._records.items()]
        self._records[fd] = _Record(owner, inode, now)
        mine = sum(record.owner == owner for _, record in others)
        strangers = [r.owner for fd, r in others if (fd, r.inode) not in named]
        if connection not in named and strangers.count(owner) >= STRANGERS_PER_USER:
            return False
        if mine >= limits.own:
            return False
        if owner in self._reserved and mine < limits.reserved:
            return True
        pool = len(others) - sum(min(limits.reserved, self._count(uid)) for uid in self._reserved if uid != owner)
        if owner in self._reserved:
            pool -= limits.reserved
        common = sum(each not in self._reserved for each in strangers)
        return pool < limits.in_all and (connection in named or common < STRANGERS)

    def remove(self, fd: int) -> None:
        """Remove a connection that was closed. Idempotent."""
        self._records.pop(fd, None)

    def overdue(self, now: float, named: Collection[Connection], reads: int) -> list[Connection]:
        """The connections that have had no session for HELLO_S, since they began or since it ended. `reads`: how often
        the daemon has read all that had arrived. A daemon that is late may not have read a Hello yet, so it has to have
        done that after the time was over."""
        found = []
        for fd, record in self._records.items():
            connection = fd, record.inode
            if connection in named:
                record.named, record.due = True, -1
                continue
            if record.named:
                record.named, record.since = False, now
            if now - record.since < HELLO_S:
                continue
            if record.due < 0:
                record.due = reads
            elif reads >= record.due + _READS:
                found.append(connection)
        return found

    def connections(self) -> list[Connection]:
        """Every connection."""
        return [(fd, record.inode) for fd, record in self._records.items()]

    def _count(self, owner: Owner) -> int:
        return sum(record.owner == owner for record in self._records.values())
