"""Splits the configuration into the scheduler's and the wire's parts, and reloads it while the daemon runs."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, NamedTuple

from gpumux.access import Access, Rule
from gpumux.config import RELOADABLE, Config, users_together
from gpumux.daemon import logs
from gpumux.daemon.context import DaemonContext, log
from gpumux.errors import ConfigError
from gpumux.scheduler import events as ev
from gpumux.scheduler.config import SchedulerConfig
from gpumux.scheduler.fusion.groups import FusionRules
from gpumux.wire.limits import Limits


def core_config(config: Config) -> SchedulerConfig:
    """The scheduler's part of the daemon's configuration."""
    return SchedulerConfig(
        policy=config.policy,
        max_jobs=config.max_jobs,
        max_jobs_per_uid=config.max_jobs_per_user,
        max_bytes_per_uid=config.max_bytes_per_user or None,
        max_inflight=config.max_inflight,
        max_programs_per_job=config.max_programs_per_job,
        access=Access(config.rules),
    )


def fusion_rules(config: Config) -> FusionRules | None:
    """When jobs run as one; None: never."""
    if config.fuse_most < 2:
        return None
    return FusionRules(
        wait_s=config.fuse_wait_s,
        gather_s=config.fuse_gather_s,
        settle_s=config.fuse_settle_s,
        retry_s=config.fuse_retry_s,
        most=config.fuse_most,
        agreed=users_together(config.fuse_together),
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
    """The result of a reload: the configuration to use from now on, sentences about changes in force, and sentences
    about changes that need a restart."""

    config: Config
    changed: list[str]
    waiting: list[str]


def compare(old: Config, new: Config) -> Difference:
    """Find the settings of `new` that can replace those of `old` while the daemon runs."""
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
# A thread of its own reads it, since a file system or a directory service (user names in access rules) may take long. A
# configuration with a mistake changes nothing. New settings apply to later requests: open jobs stay as they are, even
# if a rule would refuse them now. Keys of tcp clients need no reload.


class Reloading:
    """Reloads the configuration. `read` reads it from the same places as at the start, and raises ConfigError."""

    def __init__(
        self, context: DaemonContext, read: Callable[[], Config], call_soon: Callable[[Callable[[], None]], None]
    ) -> None:
        self._context = context
        self._read = read
        self._call_soon = call_soon  # on the loop's thread
        self._reading = False
        self._again = False

    def begin(self) -> None:
        """Start reading; the result is used in a later turn of the loop. If a read is under way, another follows it."""
        if self._reading:
            self._again = True
            return
        self._reading = True
        threading.Thread(target=self._attempt, name="gpumux-reload", daemon=True).start()

    def _attempt(self) -> None:
        try:
            found: Config | Exception = self._read()
        except Exception as error:  # noqa: BLE001 - the loop's thread handles it
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
        context = self._context
        if isinstance(found, Exception):
            context.metrics.config_in_force.set(0)
            log.error("the configuration was not reloaded, the old one stays in force: %s", found)
            return
        difference = compare(context.config, found)
        context.config = config = difference.config
        context.feed(ev.Reconfigured(core_config(config)))
        context.router.use_limits(wire_limits(config))
        context.segments.limit, context.segments.user_limit = (
            shared_limit(config),
            config.max_shared_bytes_per_user or None,
        )
        logs.set_up(config.log_level, config.log_format)
        context.metrics.config_in_force.set(1)
        log.info("the configuration was reloaded: %s", "; ".join(difference.changed) or "nothing has changed")
        if difference.waiting:
            log.warning("these settings wait for a restart of the daemon: %s", "; ".join(difference.waiting))
