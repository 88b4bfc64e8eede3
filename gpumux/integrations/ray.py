"""The daemon of a Ray worker's node, for jobs of Ray Train, Ray Tune and plain Ray tasks and actors.

    from gpumux import client
    from gpumux.integrations.ray import endpoint

    def train_loop_per_worker(config):
        ...
        job = client.submit(step, example=batch, model=model, optimizer=optimizer, endpoint=endpoint())

`gpumux cluster up --ray` starts the daemons, and each holds its GPU as far as Ray knows. So a worker asks Ray for no
GPU (`ScalingConfig(use_gpu=False)`), but for a share of the custom resource that the nodes with daemons have
(`resources_per_worker={"gpumux_node": 0.001}` beside `up --ray --resource gpumux_node`), and gets its share of a GPU
from the daemon.
"""

from __future__ import annotations

import os
from typing import Any, Final

import ray
from ray.exceptions import RayError

from gpumux.client.session import Session
from gpumux.coordinator.ray.plan import NAMESPACE, name_of, number_of
from gpumux.errors import ConfigError, DaemonGone
from gpumux.wire import messages as msg

ANSWER_S: Final = 30.0  # a daemon that died is started again in less


def endpoint(number: int | None = None) -> str:
    """The endpoint of a daemon on the node of the Ray worker that calls this. number: which of its daemons, from 0;
    None: the one with the fewest jobs now.

    Raises ConfigError outside of Ray and for a number that the node does not have, and DaemonGone if it has no daemon,
    or none that answers."""
    if not ray.is_initialized():
        raise ConfigError("this process is not in a Ray cluster", "call endpoint() in a task or an actor of Ray")
    node = ray.get_runtime_context().get_node_id()
    named = [str(each["name"]) for each in ray.util.list_named_actors(True) if each["namespace"] == NAMESPACE]
    numbers = sorted(found for name in named if (found := number_of(name, node)) is not None)
    if not numbers:
        raise DaemonGone(
            f"no gpumux daemon is on this Ray node, {node[:8]}",
            "`gpumux cluster up --ray` starts them; where some nodes have none, ask for the resource of those that do",
        )
    if number is not None and number not in numbers:
        raise ConfigError(
            f"this Ray node has no daemon {number}", f"choose one of {', '.join(map(str, numbers))}, or leave it out"
        )
    try:
        actors = [ray.get_actor(name_of(node, each), NAMESPACE) for each in (numbers if number is None else [number])]
        local = [str(each[0]) for each in ray.get([each.endpoints.remote() for each in actors], timeout=ANSWER_S)]
    except (RayError, ValueError) as error:
        raise DaemonGone(f"the daemons of this Ray node, {node[:8]}, do not answer", "try again in a moment") from error
    return local[0] if len(local) == 1 else _least_busy(local)


def _least_busy(endpoints: list[str]) -> str:
    """The one with the fewest jobs; workers that ask at the same time are spread by their process ids."""
    jobs: dict[str, int] = {}
    gone: DaemonGone | None = None
    for each in endpoints:
        try:
            with Session.connect(each, role="control") as session:
                body: dict[str, Any] = session.call(msg.GetStatus(0), timeout=ANSWER_S)[0].body
        except DaemonGone as error:
            gone = error
            continue
        jobs[each] = len(body["jobs"])
    if not jobs:
        assert gone is not None
        raise gone
    best = [each for each in endpoints if jobs.get(each) == min(jobs.values())]
    return best[os.getpid() % len(best)]
