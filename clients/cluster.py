"""`make cluster-demo`: a coordinator over four Ray nodes of this machine, and what it does when one of them dies.

Four Ray nodes start here, then `gpumux cluster up --ray` with a CPU daemon on each. `gpumux cluster status` is shown,
one node is killed, and the coordinator has lost it as soon as Ray says so. At the end the coordinator is asked to stop,
and its daemons have to be gone while Ray still runs. Exit status 0 only if all of that held. Needs ray.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from clients.common import INTERRUPTED
from gpumux.cli.control import Control
from gpumux.errors import GpumuxError
from gpumux.wire.endpoint import living_holder, parse
from microbench.daemon import GPUMUX
from microbench.ray_nodes import RESOURCE, RayFailed, RayNodes, ray_nodes

NODES = 4
START_S, STOP_S = 180.0, 60.0


class ClusterFailed(Exception):
    """Something the demo promises did not hold."""


class Cluster:
    """A running coordinator over Ray."""

    def __init__(self, endpoint: str, log: Path, process: subprocess.Popen[bytes]) -> None:
        self.endpoint = endpoint
        self._log = log
        self._process = process

    def nodes(self) -> list[dict[str, Any]]:
        """Those of `gpumux cluster status --json`; none while it starts."""
        if self._process.poll() is not None:
            raise ClusterFailed(
                f"`gpumux cluster up` ended with status {self._process.returncode}:\n{self._log.read_text()}"
            )
        try:
            with Control(self.endpoint, 5.0, coordinator=True) as control:
                found: list[dict[str, Any]] = control.status()["nodes"]
                return found
        except GpumuxError:
            return []

    def wait_until_up(self, count: int) -> list[dict[str, Any]]:
        """The nodes, once exactly so many are there and all are up. Raises ClusterFailed."""
        end = time.monotonic() + START_S
        while True:
            nodes = self.nodes()
            if [each["state"] for each in nodes] == ["up"] * count:
                return nodes
            if time.monotonic() > end:
                raise ClusterFailed(f"{count} nodes are not up after {START_S:.0f} s:\n{self._log.read_text()}")
            time.sleep(0.1)

    def show(self) -> None:
        """Print `gpumux cluster status`."""
        command = [*GPUMUX, "cluster", "status", "--cluster", self.endpoint]
        found = subprocess.run(command, capture_output=True, text=True, timeout=STOP_S, check=True)
        print(f"\n$ gpumux cluster status\n{found.stdout}", flush=True)

    def stop(self) -> None:
        """As `gpumux cluster down` does. Raises ClusterFailed if it does not end in order."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            status = self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise ClusterFailed(f"the coordinator did not stop:\n{self._log.read_text()}") from None
        if status:
            raise ClusterFailed(f"the coordinator ended with status {status}:\n{self._log.read_text()}")


@contextmanager
def coordinator(ray: RayNodes, device: str) -> Iterator[Cluster]:
    """`gpumux cluster up --ray`, with a daemon on each node. Killed at the end if it was not stopped."""
    place = Path(tempfile.mkdtemp(prefix="gm-"))
    endpoint, log = f"ipc://{place}/gpumux.sock", place / "log"
    command = [*GPUMUX, "cluster", "up", "--endpoint", endpoint, "--state-dir", str(place / "state")]
    command += ["--ray", ray.address, "--device", device, "--resource", RESOURCE]
    try:
        with open(log, "wb") as out:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, process_group=0)
        try:
            yield Cluster(endpoint, log, process)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    finally:
        shutil.rmtree(place, ignore_errors=True)


def show(device: str, count: int) -> None:
    """The whole demo. Raises ClusterFailed if something did not hold."""
    began = time.monotonic()
    with ray_nodes(count) as ray, coordinator(ray, device) as cluster:
        print(f"{count} Ray nodes are up after {time.monotonic() - began:.0f} s; a daemon starts on each", flush=True)
        nodes = cluster.wait_until_up(count)
        print(f"the coordinator has {len(nodes)} daemons after {time.monotonic() - began:.0f} s", flush=True)
        cluster.show()
        # Jobs come here: a gang with a plan and low jobs, submitted to cluster.endpoint before the node dies, and their
        # results compared with undisturbed runs after it.
        began = time.monotonic()
        died = ray.remove(count - 1)
        left = cluster.wait_until_up(count - 1)
        took = time.monotonic() - began
        if any(died[:8] in each["name"] for each in left):
            raise ClusterFailed(f"node {died[:8]} was killed, and the coordinator lost another one")
        print(
            f"Ray node {died[:8]} was killed; {took:.1f} s later it is none of the coordinator's any more", flush=True
        )
        cluster.show()
        cluster.stop()
        alive = [each["name"] for each in nodes if _runs(each["endpoint"])]
        if alive:
            raise ClusterFailed(f"daemons still run: {', '.join(alive)}")
        os.kill(ray.process.pid, 0)  # Ray goes on: it was not the coordinator's
        print("the coordinator has stopped, its daemons with it, and Ray goes on", flush=True)


def _runs(endpoint: str) -> bool:
    path = parse(endpoint).path
    return path is not None and living_holder(path) is not None


def main(argv: Sequence[str] | None = None) -> int:
    flags = argparse.ArgumentParser(description="A coordinator over four Ray nodes of this machine.")
    flags.add_argument("--device", choices=("cpu", "sim"), default="cpu", help="of the daemons (default: cpu)")
    flags.add_argument("--nodes", type=int, choices=range(2, 17), default=NODES, help="how many (default: 4)")
    args = flags.parse_args(argv)
    if find_spec("ray") is None:
        print("cluster: ray is not installed\n  pip install ray", file=sys.stderr)
        return 78
    try:
        show(args.device, args.nodes)
    except KeyboardInterrupt:
        print("\ninterrupted; everything that was started has been stopped", file=sys.stderr)
        return INTERRUPTED
    except (ClusterFailed, RayFailed, GpumuxError) as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
