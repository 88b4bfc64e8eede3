"""What `submit(..., cluster=)` does besides: ask for devices, and open the job where it is placed."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar, cast

import torch

from gpumux.capture.batch.containers import flatten
from gpumux.client.arguments import whole
from gpumux.client.gang import GangSession
from gpumux.client.placed.link import CoordinatorLink
from gpumux.client.session import CONNECT_S, Session
from gpumux.errors import GpumuxError
from gpumux.types import JobSpec
from gpumux.wire.messages import PlaceJob

T = TypeVar("T")
MOST_URGENCY: Final = 1000
LEAST_BYTES: Final = 64 << 20
STATE_COPIES: Final = 4  # a parameter, its gradient, and two of an optimizer like Adam


def place_request(
    spec: JobSpec, devices: int, models: Sequence[torch.nn.Module], example: Any, urgency: Any, *, movable: bool
) -> PlaceJob:
    """What a new job asks the coordinator for. Raises ConfigError for an urgency that is no number."""
    return PlaceJob(
        ref=0,
        job=uuid.uuid4().hex,
        name=spec.name,
        priority=int(spec.priority),
        devices=devices,
        nbytes=spec.memory_limit or estimated_bytes(models, example),
        programs=[],
        urgency=whole("urgency", urgency, -MOST_URGENCY, MOST_URGENCY, f"use {-MOST_URGENCY} to {MOST_URGENCY}"),
        movable=movable,
        attempt=0,
    )


def connect_ranks(endpoints: Sequence[str], timeout: float, *, timeout_s: float | None) -> Session:
    """A session with the daemons of a job, rank by rank, each reached within `timeout` seconds. `timeout_s`: how long a
    rank waits for another one; None for a job on one device."""
    if timeout_s is None:
        return Session.connect(endpoints[0], timeout)
    return cast("Session", GangSession.connect(endpoints, timeout_s, timeout))  # it has what a job uses of one


def estimated_bytes(models: Sequence[torch.nn.Module], example: Any) -> int:
    """Device memory to ask for where the user has not said: a job is not captured before it has a device."""
    parameters = {id(p): p.nbytes for model in models for p in model.parameters()}
    buffers = {id(b): b.nbytes for model in models for b in model.buffers()}
    batch = sum(leaf.nbytes for leaf in flatten(example)[0] if isinstance(leaf, torch.Tensor))
    return max(LEAST_BYTES, STATE_COPIES * sum(parameters.values()) + sum(buffers.values()) + 2 * batch)


def submit_placed(link: CoordinatorLink, opened: Callable[[Session], T]) -> T:
    """Wait for devices, and return what `opened` makes of a session with their daemons; again elsewhere if those can't
    take the job. `opened` must leave nothing behind when it fails. Raises AdmissionRefused or JobFailed if the
    coordinator gives the job no devices, and any other error of `opened`."""
    try:
        link.join()
        while True:
            session = link.connect(None, CONNECT_S)
            if session is None:
                continue
            try:
                return opened(session)
            except BaseException as error:
                known = isinstance(error, GpumuxError) and link.refused(session, error)
                session.close()
                if not known:
                    raise
    except BaseException as error:
        link.ended(str(error) if isinstance(error, GpumuxError) else type(error).__name__)
        raise
