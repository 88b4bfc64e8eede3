"""Which grants a node has: one for every container that was given shares, until nothing on the node uses them.

A share is a device to the kubelet, with an id. It gives an id to one container at a time, and does not say when it
takes one back: that is known by its list of what is in use, and at the latest when it gives the id to another
container. No clock is read here: `now` is seconds of any monotonic clock.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from gpumux.errors import ConfigError
from gpumux.types import Priority
from gpumux.wire.grants import MOST_SHARES, GrantDirectory

GRACE_S = 120.0  # between an allocation and the pod's place in the kubelet's list, at most

_RESOURCE = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Offer:
    """What a node offers under one resource name: `shares` of the `of` that its device has, at most at this
    priority."""

    resource: str = "gpumux.dev/share"
    shares: int = 100
    of: int = 100
    max_priority: Priority = Priority.LOW

    def __post_init__(self) -> None:
        if not _RESOURCE.fullmatch(self.resource):
            raise ConfigError(f"{self.resource!r} is no resource's name", "write DOMAIN/NAME, like gpumux.dev/share")
        if not 1 <= self.shares <= self.of <= MOST_SHARES:
            raise ConfigError(
                f"{self.shares} of {self.of} shares are offered", f"a device has 1 to {MOST_SHARES}; offer some of them"
            )

    def devices(self) -> list[str]:
        """The ids of the shares."""
        return [f"{self.name}-{number}" for number in range(self.shares)]

    @property
    def name(self) -> str:
        return self.resource.partition("/")[2]


class NodeShares:
    """Makes and releases the grants of one offer. Grants are found again in the directory after a restart."""

    def __init__(self, offer: Offer, directory: GrantDirectory) -> None:
        self.offer = offer
        self._directory = directory
        self._ids = frozenset(offer.devices())
        self._unused_since: dict[str, float] = {}  # by grant

    def allocate(self, devices: Sequence[str]) -> str:
        """Grant these shares to a container. Returns the token. Grants that held any of them before are released: their
        containers are over. Raises ConfigError for shares that are not offered."""
        asked = set(devices)
        if not asked or not asked <= self._ids or len(asked) != len(devices):
            raise ConfigError(
                f"{sorted(devices)} are not shares of this node", f"it offers {len(self._ids)} of {self.offer.resource}"
            )
        for grant, held in self._grants().items():
            if held & asked:
                self._release(grant)
        name = f"pod-{secrets.token_hex(8)}"
        return self._directory.make(
            name, len(asked), self.offer.of, max_priority=self.offer.max_priority, devices=sorted(asked)
        )

    def release_unused(self, in_use: Collection[tuple[str, str]], now: float) -> list[str]:
        """Release grants of which no share was in use for GRACE_S. Returns their names. `in_use`: pairs of a resource
        and a device."""
        used = {device for resource, device in in_use if resource == self.offer.resource}
        grants = self._grants()
        unused = [grant for grant, held in grants.items() if not held & used]
        self._unused_since = {grant: self._unused_since.get(grant, now) for grant in unused}
        over = [grant for grant, since in self._unused_since.items() if now - since >= GRACE_S]
        for grant in over:
            self._release(grant)
        return over

    def _grants(self) -> dict[str, set[str]]:
        """The shares of each grant that this offer made, with more shares to offer than now perhaps."""
        return {
            record.name: set(record.devices)
            for record in self._directory.records()
            if {each.rpartition("-")[0] for each in record.devices} == {self.offer.name}
        }

    def _release(self, grant: str) -> None:
        self._directory.release(grant)
        self._unused_since.pop(grant, None)
