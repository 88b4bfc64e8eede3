"""Which part of the configuration is whose, and which may change while a daemon runs."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, NamedTuple

from gpumux.access import Access, Rule
from gpumux.config import Config
from gpumux.daemon import logs
from gpumux.daemon.context import Desk, log
from gpumux.errors import ConfigError
from gpumux.scheduler import events as ev
from gpumux.scheduler.config import CoreConfig
from gpumux.wire.limits import Limits

# What counts from the next request on. Everything else is part of something that was made at the start: sockets, the
# device, what clients were told when they came.
RELOADABLE = frozenset(
    {
        "rules", "metrics_names", "log_level", "log_format", "drain_s", "max_sessions", "max_sessions_per_user", "max_jobs",
        "max_jobs_per_user", "max_bytes_per_user", "max_programs_per_job", "max_inflight", "max_shared_bytes", "max_shared_bytes_per_user",
        "keep_s", "max_snapshot_bytes_per_user",
    }
)  # fmt: skip


def core_config(config: Config) -> CoreConfig:
    """The core's part of the daemon's configuration."""
    return CoreConfig(
        policy=config.policy,
        max_jobs=config.max_jobs,
        max_jobs_per_uid=config.max_jobs_per_user,
        max_bytes_per_uid=config.max_bytes_per_user or None,
        max_inflight=config.max_inflight,
        max_programs_per_job=config.max_programs_per_job,
        access=Access(config.rules),
    )


def wire_limits(config: Config) -> Limits:
    """The wire's part of the configuration."""
    return Limits(
        max_message_bytes=config.max_message_bytes,
        max_sessions=config.max_sessions,
        max_sessions_per_user=config.max_sessions_per_user,
        heartbeat_s=config.heartbeat_s,
        lease_s=config.lease_s,
    )


def shared_limit(config: Config) -> int:
    """Bytes of shared memory the daemon may hold: as set, or half of the machine's memory."""
    return config.max_shared_bytes or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


class Difference(NamedTuple):
    """What a new configuration changes: the one to use from now on, and sentences about what is in force and what needs
    a restart."""

    config: Config
    changed: list[str]
    waiting: list[str]


def compare(old: Config, new: Config) -> Difference:
    """What of `new` can be used in the place of `old` at once."""
    use: dict[str, Any] = {}
    changed, waiting = [], []
    for spec in fields(Config):
        before, after = getattr(old, spec.name), getattr(new, spec.name)
        if before == after:
            continue
        if spec.name in RELOADABLE:
            use[spec.name] = after
            changed.append(_rules(before, after) if spec.name == "rules" else f"{spec.name} {before!r} -> {after!r}")
        else:
            waiting.append(f"{spec.name} {before!r} -> {after!r}")
    return Difference(replace(old, **use), changed, waiting)


def _rules(before: tuple[Rule, ...], after: tuple[Rule, ...]) -> str:
    old, new = ({rule.name: rule for rule in rules} for rules in (before, after))
    parts = [f"{name} added" for name in new if name not in old]
    parts += [f"{name} removed" for name in old if name not in new]
    parts += [f"{name} changed" for name, rule in new.items() if name in old and old[name] != rule]
    return "access rules: " + (", ".join(parts) or "another order")


# ---- SIGHUP: read the configuration again and use what can be used while the daemon runs.
#
# It is read on a thread of its own, since a file system or a directory service (user names in access rules) may take
# long. A configuration with a mistake changes nothing. What is in force applies to requests from then on: jobs that are
# open stay as they are, also where a rule would not let them in any more. Keys of tcp clients need no reload.


class Reloading:
    """`read` gives the configuration as it is now, from the same places as at the start. Raises ConfigError."""

    def __init__(self, desk: Desk, read: Callable[[], Config], call_soon: Callable[[Callable[[], None]], None]) -> None:
        self._desk = desk
        self._read = read
        self._call_soon = call_soon  # on the loop's thread
        self._reading = False
        self._again = False

    def begin(self) -> None:
        """Read it; what follows comes on a later turn of the loop. While it is being read, note that it is to be read
        again."""
        if self._reading:
            self._again = True
            return
        self._reading = True
        threading.Thread(target=self._attempt, name="gpumux-reload", daemon=True).start()

    def _attempt(self) -> None:
        try:
            found: Config | Exception = self._read()
        except Exception as error:  # noqa: BLE001 - the loop's thread says what to make of it
            found = error
        self._call_soon(lambda: self._use(found))

    def _use(self, found: Config | Exception) -> None:
        self._reading = False
        if self._again:
            self._again = False
            self.begin()
            return
        if isinstance(found, Exception) and not isinstance(found, ConfigError):
            raise found  # a bug
        desk = self._desk
        if isinstance(found, Exception):
            desk.metrics.config_in_force.set(0)
            log.error("the configuration was not reloaded, the old one stays in force: %s", found)
            return
        difference = compare(desk.config, found)
        desk.config = config = difference.config
        desk.feed(ev.Reconfigured(core_config(config)))
        desk.router.use_limits(wire_limits(config))
        desk.segments.limit, desk.segments.user_limit = shared_limit(config), config.max_shared_bytes_per_user or None
        logs.set_up(config.log_level, config.log_format)
        desk.metrics.config_in_force.set(1)
        log.info("the configuration was reloaded: %s", "; ".join(difference.changed) or "nothing has changed")
        if difference.waiting:
            log.warning("these settings wait for a restart of the daemon: %s", "; ".join(difference.waiting))
