"""A queue between clients' messages and long work: users take turns, and so do the sessions of each user.

What puts items into such a queue bounds them for every user (docs/security.md has the table), and forgets those of a
session that has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, Generic, TypeVar

T = TypeVar("T")

DAEMON: Final = 1 << 32  # stands for the daemon's own work where users take turns; no uid is as large


class RoundRobin(Generic[T]):
    """A queue in which users take turns, and the owners (sessions, or jobs) of each user."""

    def __init__(self) -> None:
        # By uid and owner. In both dictionaries the next in turn comes first; none is empty.
        self.items: dict[int, dict[str, deque[T]]] = {}

    def count(self, uid: int, owner: str) -> int:
        """The number of items of this owner."""
        return len(self.items.get(uid, {}).get(owner, ()))

    def count_of(self, uid: int) -> int:
        """The number of items of all owners of this user."""
        return sum(map(len, self.items.get(uid, {}).values()))

    def add(self, uid: int, owner: str, item: T) -> None:
        """Append an item to the owner's queue."""
        self.items.setdefault(uid, {}).setdefault(owner, deque()).append(item)

    def next(self, may_run: Callable[[int], bool] = lambda uid: True) -> tuple[int, T] | None:
        """Remove and return the next item, with its user. Users for which `may_run` is false are skipped. Returns None
        if there is no such item."""
        uid = next(filter(may_run, self.items), None)
        if uid is None:
            return None
        owners = self.items.pop(uid)
        owner = next(iter(owners))
        items = owners.pop(owner)
        item = items.popleft()
        if items:
            owners[owner] = items  # after the user's other owners
        if owners:
            self.items[uid] = owners  # after the other users
        return uid, item

    def forget(self, uid: int, owner: str) -> list[T]:
        """Remove and return an owner's items. Idempotent."""
        owners = self.items.get(uid, {})
        items = owners.pop(owner, ())
        if not owners:
            self.items.pop(uid, None)
        return list(items)

    def drop(self, unwanted: Callable[[T], bool]) -> None:
        """Drop the items for which `unwanted` is true."""
        for uid, owners in list(self.items.items()):
            left = {name: deque(item for item in items if not unwanted(item)) for name, items in owners.items()}
            self.items[uid] = {name: items for name, items in left.items() if items}
            if not self.items[uid]:
                del self.items[uid]
