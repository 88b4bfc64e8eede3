"""`submit(..., cluster=, resume=)`: what daemons of a cluster kept of a job whose client is gone.

A job may have left snapshots at several daemons: those that it could not tell to forget them, and the last one. The
newest is found by the time in its notes. The job that goes on is a new one for the coordinator, under another id, and
may run anywhere. What was kept stays where it is for as long as that job may need it, and is forgotten when it ends.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from gpumux.client.recovery import KeptJob, find_kept
from gpumux.client.session import CONNECT_S, Session
from gpumux.errors import AdmissionRefused, ConfigError, DaemonGone, GpumuxError, UnknownJob
from gpumux.types import JobSpec
from gpumux.wire import messages as m
from gpumux.wire.endpoint import Endpoint, resolve_coordinator

log = logging.getLogger("gpumux.client")

START_IT: Final = "start it (gpumux cluster up), or name another with cluster= or GPUMUX_CLUSTER"
FORGET_S: Final = 1.0  # for a daemon to be reached that is to forget something


class KeptPlace(NamedTuple):
    """A daemon, and a job of which it keeps snapshots."""

    endpoint: str
    job: str


@dataclass(frozen=True, slots=True)
class KeptInCluster:
    """newest: what the job goes on from; places: all daemons that kept something of a job of its name."""

    newest: KeptJob
    places: tuple[KeptPlace, ...]


def coordinator_at(endpoint: Endpoint) -> Session:
    """A session with the coordinator there. Raises DaemonGone if there is none, and ConfigError for a daemon."""
    try:
        session = Session.connect(endpoint.text, CONNECT_S, role="control")
    except DaemonGone:
        raise DaemonGone(f"no coordinator answers at {endpoint.text}", START_IT) from None
    if session.welcome.device.get("kind") != "cluster":
        session.close()
        raise ConfigError(
            f"{endpoint.text} is a daemon's endpoint, and no coordinator's",
            "submit with endpoint= there, or name the cluster's coordinator",
        )
    return session


def find_in_cluster(cluster: str, name: str) -> KeptInCluster:
    """Ask all daemons of the cluster for the job of this name, and read the newest state of it. Raises UnknownJob if
    none has kept it, AdmissionRefused if it is still open, ConfigError if what was kept can't be resumed, and
    DaemonGone if there is no coordinator."""
    with coordinator_at(resolve_coordinator(cluster)) as session:
        nodes: list[dict[str, Any]] = session.call(m.GetStatus(0))[0].body["nodes"]
    newest: KeptJob | None = None
    places: list[KeptPlace] = []
    silent, unfit = [], None
    for node in nodes:
        try:
            if node["state"] not in ("up", "draining"):
                raise DaemonGone(f"node {node['name']} is {node['state']}", "wait until it is back")
            with Session.connect(node["endpoint"], CONNECT_S) as session:
                found = find_kept(session, name)
        except UnknownJob:
            continue
        except AdmissionRefused:
            raise
        except ConfigError as error:
            unfit = error
            continue
        except GpumuxError as error:
            log.info("node %s was not asked for job %r: %s", node["name"], name, error)
            silent.append(node["name"])
            continue
        places.append(KeptPlace(node["endpoint"], found.job))
        if newest is None or _age(found) > _age(newest):
            newest = found
    if silent:
        log.warning("nodes %s could not be asked what they kept of job %r", ", ".join(silent), name)
    if newest is not None:
        return KeptInCluster(newest, tuple(places))
    if unfit is not None:
        raise unfit
    raise UnknownJob(
        f"no job called {name!r} of yours was kept by a daemon of the cluster"
        + (f"; {', '.join(silent)} could not be asked" if silent else ""),
        "wait until these are back (gpumux cluster status), or submit it without resume="
        if silent
        else "submit it without resume=",
    )


def _age(kept: KeptJob) -> tuple[float, int]:
    return kept.snapshot.saved_at, kept.snapshot.counts.all


def forget(places: Iterable[KeptPlace], name: str) -> None:
    """Have daemons forget what they kept: a job that was opened and closed with its work done leaves nothing. One that
    can't be reached keeps it for its `keep_s`."""
    for place in places:
        try:
            with Session.connect(place.endpoint, FORGET_S) as session:
                session.open_job(place.job, JobSpec(name=name))
                session.call(m.CloseJob(0, place.job, True), timeout=CONNECT_S)
        except GpumuxError as error:
            log.info("the daemon at %s keeps what it has of job %r: %s", place.endpoint, name, error)
