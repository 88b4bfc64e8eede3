"""Start-up and shut-down of a coordinator. Exit codes and signals are those of a daemon (daemon/main.py)."""

from __future__ import annotations

import logging
import signal
from contextlib import ExitStack
from pathlib import Path

from gpumux import __version__
from gpumux.access import Access
from gpumux.config import Config
from gpumux.coordinator.config import ClusterFile
from gpumux.coordinator.core import Coordinator, CoordinatorConfig
from gpumux.coordinator.journal import Journal
from gpumux.coordinator.loop import CoordinatorLoop
from gpumux.coordinator.metrics import serve_metrics
from gpumux.coordinator.names import names_of
from gpumux.daemon import logs
from gpumux.daemon.config_reload import wire_limits
from gpumux.daemon.main import (
    EX_CONFIG,
    EX_OK,
    EX_SOFTWARE,
    EX_TEMPFAIL,
    Stopped,
    StopRequest,
    curve_keys,
    stop_signals,
)
from gpumux.errors import ConfigError, EndpointBusy, GpumuxError
from gpumux.wire import endpoint
from gpumux.wire.endpoint import COORDINATOR, resolve_coordinator
from gpumux.wire.router import Router

log = logging.getLogger("gpumux.coordinator")


def run(config: Config, cluster: ClusterFile) -> int:
    """Serve until a stop is requested. Returns the exit code; errors are logged. Of `config` it takes endpoint, access
    rules, keys, limits, logging and `state_dir`; without that nothing survives a restart."""
    stop = StopRequest()
    with stop_signals(stop.ask, signal.SIG_IGN):
        logs.set_up(config.log_level, config.log_format)
        try:
            with ExitStack() as stack:
                serve(config, cluster, stack, stop)
        except Stopped:
            return EX_OK
        except EndpointBusy as error:
            log.error("%s", error)
            return EX_TEMPFAIL
        except ConfigError as error:
            log.error("%s", error)
            return EX_CONFIG
        except GpumuxError as error:
            log.error("%s: %s", type(error).__name__, error)
            return EX_SOFTWARE
        except Exception:
            log.critical("internal error, the coordinator ends; jobs go on where they run", exc_info=True)
            return EX_SOFTWARE
    return EX_OK


def serve(config: Config, cluster: ClusterFile, stack: ExitStack, stop: StopRequest) -> None:
    """Open the parts and serve. `stack` closes them, also after an error."""
    settings = CoordinatorConfig(
        cluster.placement, Access(config.rules), rejoin_s=3 * config.lease_s, max_jobs=config.max_jobs_per_user
    )
    texts = config.endpoint or (resolve_coordinator().text,)
    router = Router(texts, endpoint.runtime_dir(COORDINATOR), wire_limits(config), curve_keys(config))
    stack.callback(router.close, "the coordinator leaves; jobs go on where they run")
    router.device = {"kind": "cluster", "name": f"{len(cluster.daemons)} daemons"}
    journal = None
    if config.state_dir:
        journal = Journal(Path(config.state_dir))
        stack.callback(journal.close)
    else:
        log.warning("without --state-dir nothing is kept over a restart: jobs then go on, but are not placed anew")
    coordinator = Coordinator(settings, names_of) if journal is None else journal.load(settings)
    for job in coordinator.jobs.values():
        log.info("job %s %r was kept; its client has %g s to come back", job.short, job.name, settings.rejoin_s)
    stop.check()
    loop = CoordinatorLoop(coordinator, router, cluster.daemons, journal=journal)
    stack.callback(loop.close)
    stop.tell(loop.stop)
    if config.metrics_port >= 0:
        serve_metrics(loop, config.metrics_host, config.metrics_port, stack)
    log.info(
        "gpumux %s coordinates %d daemons at %s", __version__, len(cluster.daemons), ", ".join(router.addresses)
    )  # fmt: skip
    loop.run()
    log.info("stopped: %s", stop.reason)
