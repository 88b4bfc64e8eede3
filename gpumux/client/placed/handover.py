"""Devices that `gpumux cluster run` reserved for the first job that its script submits.

A file on the script's node says which job of the coordinator they are held for, and GPUMUX_CLUSTER_JOB names the file.
The first `submit(..., cluster=)` removes the file and goes on under that job's id. Removing is what decides between
processes of one script, so that one of them has the devices, and the others ask for their own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from gpumux.errors import ConfigError
from gpumux.types import Priority
from gpumux.wire.messages import PlaceJob

ENVIRONMENT: Final = "GPUMUX_CLUSTER_JOB"


@dataclass(frozen=True, slots=True)
class Handover:
    """What is held. cluster: the coordinator's endpoint, as the script names it; job: the id; priority: 0 (low) or 1
    (high); nbytes: memory on each of the devices. beside: of nodes on the script's machine, the endpoints that are
    reached there without a network, by the nodes' names."""

    cluster: str
    job: str
    priority: int
    devices: int
    nbytes: int
    beside: Mapping[str, str]

    def text(self) -> str:
        return json.dumps(asdict(self))

    def check(self, request: PlaceJob) -> None:
        """Raises ConfigError if the job that is submitted needs other devices than those that are held."""
        if (request.priority, request.devices) != (self.priority, self.devices):
            asked, held = Priority(request.priority).name.lower(), Priority(self.priority).name.lower()
            raise ConfigError(
                f"the job {request.name!r} is a {asked} one with gpus={request.devices}, and"
                f" `gpumux cluster run` holds --gpus {self.devices} for a {held} one",
                f"run it with --priority {asked} --gpus {request.devices}",
            )
        if request.nbytes > self.nbytes:
            raise ConfigError(
                f"the job {request.name!r} asks for {request.nbytes} bytes on each device (its memory_limit=, or else"
                f" an estimate), and `gpumux cluster run` holds {self.nbytes}",
                f"run it with --memory {-(-request.nbytes // 2**20)}MiB",
            )

    def local(self, nodes: Sequence[str], endpoints: Sequence[str]) -> tuple[str, ...]:
        """The endpoints of these nodes, those without a network where there are such."""
        return tuple(self.beside.get(node, endpoint) for node, endpoint in zip(nodes, endpoints, strict=True))


def take(cluster: str, request: PlaceJob, environ: Mapping[str, str] | None = None) -> Handover | None:
    """The devices that are held for this job, which is submitted to the coordinator at the endpoint `cluster`. None if
    none are, or another submit() has them.

    Raises ConfigError if the job needs others, or the file can't be read."""
    named = (os.environ if environ is None else environ).get(ENVIRONMENT, "")
    if not named:
        return None
    file = Path(named)
    try:
        found = Handover(**json.loads(file.read_text()))
        if found.cluster != cluster:
            return None
        found.check(request)
        file.unlink()
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{ENVIRONMENT} names {named}, which can't be read: {error}",
            "it is set by `gpumux cluster run`; unset it elsewhere",
        ) from error
    return found
