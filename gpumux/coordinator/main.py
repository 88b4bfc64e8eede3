"""Start-up and shut-down of a coordinator. Exit codes and signals are those of a daemon (daemon/main.py)."""

from __future__ import annotations

import grp
import logging
import os
import pwd
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from gpumux import __version__
from gpumux.access import Access
from gpumux.config import Config
from gpumux.coordinator.config import ClusterFile, address, distinct
from gpumux.coordinator.core import Coordinator, CoordinatorConfig
from gpumux.coordinator.daemons import DaemonAddress
from gpumux.coordinator.journal import Journal
from gpumux.coordinator.loop import CoordinatorLoop
from gpumux.coordinator.metrics import ClusterPage
from gpumux.coordinator.several import Services
from gpumux.daemon import logs
from gpumux.daemon.config_reload import wire_limits
from gpumux.daemon.main import StopRequest, curve_keys, hangups, served, stop_signals
from gpumux.errors import ConfigError
from gpumux.types import Peer
from gpumux.wire import endpoint
from gpumux.wire.endpoint import COORDINATOR, resolve_coordinator
from gpumux.wire.router import Router
from gpumux.wording import counted

log = logging.getLogger("gpumux.coordinator")


RESOLVE_S = 30.0  # how often services are looked up

Follow = Callable[[Sequence[DaemonAddress]], None]
Membership = Callable[[Follow], AbstractContextManager[Any]]


def names_of(peer: Peer) -> tuple[str, str]:
    """The user and its main group as the system names them, by number where it has no name; of a CURVE key the key's
    name for both. Quotas, weights and fair shares count by them."""
    if peer.key:
        return peer.key, peer.key
    try:
        user = pwd.getpwuid(peer.uid).pw_name
    except KeyError:
        user = str(peer.uid)
    try:
        group = grp.getgrgid(peer.gid).gr_name
    except (KeyError, OverflowError):
        group = str(peer.gid)
    return user, group


def run(
    config: Config, cluster: ClusterFile, *, again: Callable[[], ClusterFile] | None = None,
    membership: Membership | None = None, ray: str = "",
) -> int:  # fmt: skip
    """Serve until a stop is requested. Returns the exit code; errors are logged. Of `config` it takes endpoint, access
    rules, keys, limits, logging and `state_dir`; without that nothing survives a restart. `again` reads the cluster's
    file once more (SIGHUP). `membership` says which daemons there are while the coordinator runs: it is entered with
    what it tells them to. `ray`: the address of their Ray cluster, which clients are told."""
    stop = StopRequest()
    with stop_signals(stop.ask, signal.SIG_IGN):
        logs.set_up(config.log_level, config.log_format)
        return served(
            lambda stack: serve(config, cluster, stack, stop, again, membership, ray),
            log,
            "the coordinator ends; jobs go on where they run",
        )


def serve(
    config: Config, cluster: ClusterFile, stack: ExitStack, stop: StopRequest,
    again: Callable[[], ClusterFile] | None, membership: Membership | None, ray: str,
) -> None:  # fmt: skip
    """Open the parts and serve. `stack` closes them, also after an error."""
    page = serve_page(config, stack) if config.metrics_port >= 0 else None
    settings = CoordinatorConfig(
        cluster.placement,
        Access(config.rules),
        rejoin_s=3 * config.lease_s,
        max_jobs=config.max_jobs_per_user,
        page="" if page is None else page.address,
        uid=os.getuid(),
    )
    texts = config.endpoint or (resolve_coordinator().text,)
    router = Router(texts, endpoint.runtime_dir(COORDINATOR), wire_limits(config), curve_keys(config))
    stack.callback(router.close, "the coordinator leaves; jobs go on where they run")
    router.device = {"kind": "cluster", "name": "coordinator", "gang_sizes": True, "ray": ray}
    journal = None
    if config.state_dir:
        journal = Journal(Path(config.state_dir))
        stack.callback(journal.close)
    else:
        log.warning("without --state-dir nothing is kept over a restart: jobs then go on, but are not placed anew")
    coordinator = Coordinator(settings, names_of) if journal is None else journal.load(settings, names_of)
    for job in coordinator.jobs.values():
        log.info("job %s %r was kept; its client has %g s to come back", job.short, job.name, settings.rejoin_s)
    stop.check()
    services = Services()
    daemons = all_daemons(cluster, services)
    loop = CoordinatorLoop(coordinator, router, None if membership else daemons, journal=journal)
    stack.callback(loop.close)
    stop.tell(loop.stop)
    if page is not None:
        page.watch(loop)
    reread = Reread(cluster, again, loop.follow, services)
    stack.enter_context(hangups(loop.stop, reread.begin))
    if membership is None:
        stack.enter_context(every(RESOLVE_S, reread.look_up))
    else:
        stack.enter_context(membership(loop.follow))
    count = "daemons that come and go" if membership else counted(len(daemons), "daemon")
    log.info("gpumux %s coordinates %s at %s", __version__, count, ", ".join(router.addresses))
    loop.run()
    log.info("stopped: %s", stop.reason)


def serve_page(config: Config, stack: ExitStack) -> ClusterPage:
    """Serve the status page and the metrics until `stack` closes. Raises EndpointBusy and ConfigError."""
    page = ClusterPage(
        config.metrics_host,
        config.metrics_port,
        allowed_hosts=config.allowed_hosts,
        named=config.metrics_names == "shown",
    )
    stack.callback(page.close)
    log.info("metrics at %s/metrics, the status page at %s/", page.address, page.address)
    return page


def all_daemons(cluster: ClusterFile, services: Services) -> tuple[DaemonAddress, ...]:
    """The daemons of the file, and those that its services stand for now. Raises ConfigError where both name one."""
    found = [address(endpoint) for endpoint in services.endpoints(cluster.services)]
    return distinct([*cluster.daemons, *found])


@contextmanager
def every(seconds: float, do: Callable[[], None]) -> Iterator[None]:
    """A block beside which a thread does something again and again."""
    over = threading.Event()

    def repeat() -> None:
        while not over.wait(seconds):
            do()

    threading.Thread(target=repeat, name="gpumux-services", daemon=True).start()
    try:
        yield
    finally:
        over.set()


class Reread:
    """Reads the cluster's file again, for the daemons in it (SIGHUP), and looks up the services of what was read last.
    A thread of its own does, since a file system and a name server may take long. A file with a mistake changes
    nothing."""

    def __init__(
        self, cluster: ClusterFile, again: Callable[[], ClusterFile] | None, follow: Follow, services: Services
    ) -> None:
        self._cluster = cluster
        self._again = again
        self._follow = follow
        self._services = services
        self._newest = cluster
        self._told: tuple[DaemonAddress, ...] = ()
        self._one_at_a_time = threading.Lock()

    def begin(self) -> None:
        """Start reading; what is found is used in a later turn of the loop."""
        threading.Thread(target=self.read, name="gpumux-reread", daemon=True).start()

    def read(self) -> None:
        """Read the file, and have its daemons followed."""
        if self._again is None:
            log.warning("there is no file of daemons to read again: they were named on the command line, or by Ray")
            return
        with self._one_at_a_time:  # the last to read finds what was written before the last request
            try:
                found = self._again()
                daemons = all_daemons(found, self._services)
            except ConfigError as error:
                log.error("the cluster's file was not used, the daemons stay as they are: %s", error)
                return
            log.info("the cluster's file was read again: %s", counted(len(daemons), "daemon"))
            if found.placement != self._cluster.placement:
                log.warning("placement, quotas and weights wait for a restart of the coordinator")
            self._newest, self._told = found, daemons
            self._follow(daemons)

    def look_up(self) -> None:
        """Look up the services of the file, if it has some, and have their daemons followed if they are others."""
        with self._one_at_a_time:
            if not self._newest.services:
                return
            try:
                daemons = all_daemons(self._newest, self._services)
            except ConfigError as error:
                log.error("the services were not used, the daemons stay as they are: %s", error)
                return
            if daemons != self._told:
                log.info("with what the services stand for: %s", counted(len(daemons), "daemon"))
                self._told = daemons
                self._follow(daemons)
