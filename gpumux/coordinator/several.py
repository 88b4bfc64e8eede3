"""Daemons that are named together: nodes as Slurm writes them, and what a name of DNS stands for."""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import product
from typing import TypeAlias

from gpumux.errors import ConfigError
from gpumux.wire.endpoint import parse

log = logging.getLogger("gpumux.coordinator")

MOST_DAEMONS = 4096  # that one endpoint may stand for
_RANGES = re.compile(r"\[((?:\d+(?:-\d+)?)(?:,\d+(?:-\d+)?)*)\]")  # [::1] is no range

Lookup: TypeAlias = Callable[[str], Sequence[str]]


def expanded(endpoint: str) -> list[str]:
    """The endpoints that one with ranges stands for, as Slurm writes lists of hosts: tcp://gpu[01-04,7]:[7777-7780].
    Zeros before the first number are kept. Raises ConfigError for a range that ends before it begins, or for more
    than MOST_DAEMONS."""
    pieces = _RANGES.split(endpoint)
    choices = [_numbers(piece, endpoint) if at % 2 else [piece] for at, piece in enumerate(pieces)]
    count = 1
    for each in choices:
        count *= len(each)
    if count > MOST_DAEMONS:
        raise ConfigError(f"{endpoint[:200]} stands for {count} daemons", f"name {MOST_DAEMONS} at most")
    return ["".join(chosen) for chosen in product(*choices)]


def _numbers(text: str, endpoint: str) -> list[str]:
    found: list[str] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        last = last or first
        if len(last) > 9 or len(first) > 9 or int(last) < int(first) or int(last) - int(first) >= MOST_DAEMONS:
            raise ConfigError(
                f"{endpoint[:200]} has the range {part[:40]}",
                f"write it from a smaller to a larger number, of {MOST_DAEMONS} at most: [01-16]",
            )
        found += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return found


def look_up(name: str) -> list[str]:
    """The addresses of a name, sorted, IPv6 ones in brackets. Raises OSError."""
    found = {(family, place[0]) for family, _, _, _, place in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    return sorted(f"[{place}]" if family == socket.AF_INET6 else str(place) for family, place in found)


class Services:
    """The endpoints that names of DNS stand for, such as a headless Service of Kubernetes: one daemon at each address
    of the name. A name that can't be looked up keeps the addresses it had: a name server that is away must not take
    a cluster apart, and daemons that are gone are noticed by themselves."""

    def __init__(self, lookup: Lookup = look_up) -> None:
        self._lookup = lookup
        self._known: dict[str, Sequence[str]] = {}

    def endpoints(self, services: Sequence[str]) -> list[str]:
        """The endpoints of these services (tcp://NAME:PORT), each once, in the order of services and addresses."""
        found: dict[str, None] = {}
        for service in services:
            name, _, port = service.removeprefix("tcp://").rpartition(":")
            try:
                self._known[service] = self._lookup(name)
            except OSError as error:
                log.warning(
                    "%s can't be looked up (%s): %d daemons stay as they are",
                    name, error, len(self._known.get(service, ())),
                )  # fmt: skip
            for place in self._known.get(service, ()):
                with suppress(ConfigError):  # an address of a scope: fe80::1%eth0
                    found[parse(f"tcp://{place}:{port}").text] = None
        return list(found)
