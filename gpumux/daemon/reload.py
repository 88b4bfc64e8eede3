"""SIGHUP: read the configuration again and use what can be used while the daemon runs.

It is read on a thread of its own, since a file system or a directory service (user names in access rules) may take long. A
configuration with a mistake changes nothing. What is in force applies to requests from then on: jobs that are open
stay as they are, also where a rule would not let them in any more. Keys of tcp clients need no reload.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from gpumux.config import Config
from gpumux.core import events as ev
from gpumux.daemon import logs
from gpumux.daemon.desk import Desk, log
from gpumux.daemon.settings import compare, core_config, shared_limit, wire_limits
from gpumux.errors import ConfigError


class Reloading:
    """`read` gives the configuration as it is now, from the same places as at the start. Raises ConfigError."""

    def __init__(self, desk: Desk, read: Callable[[], Config], call_soon: Callable[[Callable[[], None]], None]) -> None:
        self._desk = desk
        self._read = read
        self._call_soon = call_soon  # on the loop's thread
        self._reading = False
        self._again = False

    def begin(self) -> None:
        """Read it; what follows comes on a later turn of the loop. While it is being read, note that it is to be read again."""
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
