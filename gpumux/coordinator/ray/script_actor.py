"""A script that runs on a node of a Ray cluster: an actor there has it as its child, and this process follows it.

The actor ends with the process that made it, and Ray kills what an actor leaves behind: no script goes on unseen.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from gpumux.coordinator.ray.membership import join
from gpumux.coordinator.ray.plan import NAMESPACE, SHORT, RayNode, name_of, node_and_number, nodes_of
from gpumux.coordinator.script import ScriptCommand, ScriptOutput, ScriptProcess
from gpumux.errors import ConfigError, DaemonGone

CALLS: Final = 3  # at a time: a `read`, a signal, and the one after it
ANSWER_S: Final = 30.0
HOW_TO_SHIP: Final = (
    'pip install "ray[default]" on all nodes, and leave large files out by a .gitignore; or name a directory that the'
    " node has, too, by --cwd"
)


class ScriptActor:
    """On the node. `start` first."""

    def __init__(self) -> None:
        self._script: ScriptProcess | None = None

    def start(self, command: ScriptCommand) -> tuple[str, str]:
        """Start the script; ("", ""), or what is wrong with the command and what to do."""
        try:
            self._script = ScriptProcess(command)
        except ConfigError as error:
            return error.message, error.remedy
        return "", ""

    def read(self) -> ScriptOutput:
        assert self._script is not None
        return self._script.read()

    def signal(self, number: int) -> None:
        assert self._script is not None
        self._script.signal(number)

    def close(self) -> None:
        if self._script is not None:
            self._script.close()


class RayNodes:
    """The nodes of the Ray cluster at HOST:PORT, which this process joins. ship: a directory of this machine that is
    copied to the node of a script, to be the script's; "": none. Raises ConfigError if it can't."""

    def __init__(self, address: str, ship: str) -> None:
        try:
            import ray
        except ImportError:
            raise ConfigError(
                "this coordinator's nodes are Ray's, which this program needs", "pip install ray"
            ) from None
        try:
            join(address, ship)
        except (OSError, ValueError, RuntimeError) as error:  # Ray's own is a ConnectionError
            if ship and not isinstance(error, OSError):
                raise ConfigError(f"Ray can't copy {ship}: {_line(error)}", HOW_TO_SHIP) from error
            raise ConfigError(
                f"the coordinator's Ray cluster at {address} can't be joined from here: {_line(error)}",
                "run this on one of its nodes, as Ray's user (`ray status --address ADDRESS` shows them)",
            ) from error
        self._ray = ray
        self._ship = ship
        here = ray.get_runtime_context().get_node_id()
        self._nodes = nodes_of(ray.nodes())
        self._here = next(node.address for node in self._nodes if node.id == here)

    def close(self) -> None:
        """Leave Ray, which ends the actors that this process made."""
        self._ray.shutdown()

    def find(self, name: str) -> RayNode:
        """The Ray node of the coordinator's node `name`. Raises DaemonGone if it is gone."""
        found = node_and_number(name, self._nodes)
        if found is None:
            raise DaemonGone(f"Ray has no node {name} any more", "try again: another one is chosen then")
        return found[0]

    def is_here(self, node: RayNode) -> bool:
        """Whether the node is on this machine."""
        return node.address == self._here

    def local_endpoints(self, node: RayNode, names: list[str]) -> dict[str, str]:
        """Of those of the coordinator's nodes `names` that are this Ray node's, the endpoints on its machine. Raises
        DaemonGone."""
        found = {name: node_and_number(name, [node]) for name in names}
        try:
            actors = {
                name: self._ray.get_actor(name_of(node.id, each[1]), NAMESPACE) for name, each in found.items() if each
            }
            refs = {name: actor.endpoints.remote() for name, actor in actors.items()}
            return {name: str(self._ray.get(ref, timeout=ANSWER_S)[0]) for name, ref in refs.items()}
        except (self._ray.exceptions.RayError, ValueError) as error:
            raise DaemonGone(f"the daemons of Ray node {node.id[:SHORT]} do not answer", "try again") from error

    def start(self, node: RayNode, command: ScriptCommand) -> RayScript:
        """Start a script on the node. Raises ConfigError and DaemonGone."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        actor = (
            self._ray.remote(ScriptActor)
            .options(
                num_cpus=0,
                max_concurrency=CALLS,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
            )
            .remote()
        )
        command = replace(command, directory="") if self._ship else command  # Ray starts the actor in the copy
        try:
            wrong, remedy = self._ray.get(actor.start.remote(command))
        except self._ray.exceptions.RuntimeEnvSetupError as error:
            raise ConfigError(f"Ray can't copy {self._ship} to the node: {_line(error)}", HOW_TO_SHIP) from error
        except self._ray.exceptions.RayError as error:
            raise DaemonGone(f"Ray node {node.id[:SHORT]} was lost: {_line(error)}", "try again") from error
        if wrong:
            raise ConfigError(wrong, remedy)
        return RayScript(self._ray, actor, node)


class RayScript:
    """A RunningScript in an actor. `read` raises DaemonGone if the node, or the connection to it, is lost."""

    def __init__(self, ray: Any, actor: Any, node: RayNode) -> None:
        self._ray = ray
        self._actor = actor
        self._node = node

    def read(self) -> ScriptOutput:
        try:
            return ScriptOutput(*self._ray.get(self._actor.read.remote()))
        except self._ray.exceptions.RayError as error:
            raise DaemonGone(
                f"Ray node {self._node.host} ({self._node.id[:SHORT]}), where the script runs, was lost, or its actor:"
                f" {_line(error)}",
                "the script has ended with it; run it again, and another node is chosen",
            ) from error

    def signal(self, number: int) -> None:
        self._actor.signal.remote(number)

    def close(self) -> None:
        """Kill the script if it still runs, and end the actor."""
        try:
            self._ray.get(self._actor.close.remote(), timeout=ANSWER_S)
        except self._ray.exceptions.RayError:
            return  # it is lost, and the script with it
        self._ray.kill(self._actor)


def _line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
