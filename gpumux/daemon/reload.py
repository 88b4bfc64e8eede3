"""SIGHUP: read the configuration again and use what can be used while the daemon runs.

It is read on a thread of its own, since a file system or a directory service (user names in access rules) may take long. A
configuration with a mistake changes nothing. What is in force applies to requests from then on: jobs that are open
stay as they are, also where a rule would not let them in any more. Keys of tcp clients need no reload.
"""

from __future__ import annotations

from collections.abc import Callable

from gpumux.config import Config
from gpumux.core import events as ev
from gpumux.daemon import logs
from gpumux.daemon.desk import Desk, log
from gpumux.daemon.offload import Offload
from gpumux.daemon.settings import compare, core_config, shared_limit, wire_limits
from gpumux.errors import ConfigError


class Reloading:
    """`read` gives the configuration as it is now, from the same places as at the start. Raises ConfigError."""

    def __init__(self, desk: Desk, offload: Offload, read: Callable[[], Config]) -> None:
        self._desk = desk
        self._offload = offload
        self._read = read

    def begin(self) -> None:
        """Read it; what follows comes on a later turn of the loop."""
        self._offload.submit(self._attempt, self._use)

    def _attempt(self) -> Config | ConfigError:
        try:
            return self._read()
        except ConfigError as error:
            return error

    def _use(self, found: Config | ConfigError) -> None:
        desk = self._desk
        if isinstance(found, ConfigError):
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
