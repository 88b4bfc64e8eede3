"""`make cluster-demo`: a gang and six low jobs over four Ray nodes of this machine, one of which is killed.

Four Ray nodes start here, then `gpumux cluster up --ray` with a CPU daemon on each. A high job that runs on all four by
a plan and six low jobs ask the coordinator for a place. In the middle a node is killed: its low jobs go on elsewhere,
and the gang, for which no other device is left, goes on with three. At the end losses and parameters are compared with
plain runs, those of low jobs bit for bit, and a table says what became of each job. Then the coordinator is asked to
stop, and its daemons have to be gone while Ray still runs. Exit status 0 only if all of that held. Needs ray.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clients.common import show_demo
from clients.data import digits
from gpumux import client
from gpumux.burst.placement import RankPlacement
from gpumux.cli.control import Control
from gpumux.cli.text import table
from gpumux.errors import GpumuxError
from gpumux.wire.endpoint import living_holder, parse
from microbench.daemon import GPUMUX
from microbench.ray_nodes import RESOURCE, RayFailed, RayNodes, ray_nodes

NODES, LOW_JOBS = 4, 6
GANG = 4  # devices of the gang, at most
SMALL = 1e-9  # the largest difference of a gang's losses and parameters, in float64
STEPS, BATCH = 40, 60  # a batch that 4 and 3 devices divide
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

    def places(self) -> dict[str, list[str]]:
        """The nodes that each job is on, by its name."""
        with Control(self.endpoint, STOP_S, coordinator=True) as control:
            return {job["name"]: job["nodes"] for job in control.status()["jobs"]}

    def show(self, verb: str) -> None:
        """Print what `gpumux cluster status` or `jobs` says."""
        command = [*GPUMUX, "cluster", verb, "--cluster", self.endpoint]
        found = subprocess.run(command, capture_output=True, text=True, timeout=STOP_S, check=True)
        print(f"\n$ gpumux cluster {verb}\n{found.stdout}", flush=True)

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
def coordinator(ray: RayNodes) -> Iterator[Cluster]:
    """`gpumux cluster up --ray`, with a daemon on each node. Stopped at the end."""
    place = Path(tempfile.mkdtemp(prefix="gm-"))
    endpoint, log = f"ipc://{place}/gpumux.sock", place / "log"
    command = [*GPUMUX, "cluster", "up", "--endpoint", endpoint, "--state-dir", str(place / "state")]
    command += ["--ray", ray.address, "--device", "cpu", "--resource", RESOURCE]
    command += ["--daemon-state-dir", str(place / "snapshots")]  # from which a job goes on when its node dies
    try:
        with open(log, "wb") as out:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, process_group=0)
        try:
            yield Cluster(endpoint, log, process)
        finally:
            if process.poll() is None:  # in order, or its daemons would outlive it
                process.terminate()
                try:
                    process.wait(STOP_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
    finally:
        shutil.rmtree(place, ignore_errors=True)


# ---- The jobs.


class TrainingJob:
    """A small training job, and the losses of its steps. Until it is submitted it trains in this process. Number 0 is
    the gang, in float64; the others are low jobs."""

    def __init__(self, number: int) -> None:
        torch.manual_seed(number)
        self.number = number
        self.name = f"low-{number}" if number else "gang"
        self.dtype = torch.float32 if number else torch.float64
        self.model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)).to(self.dtype)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.losses: list[float] = []
        self.step: Callable[[Tensor, Tensor], Any] = self.train
        self._batches = digits().batches(BATCH, number)

    def train(self, x: Tensor, y: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(x.flatten(1).to(self.dtype)), y)
        loss.backward()
        self.optimizer.step()
        return loss

    def submit(self, cluster: str, devices: int, stack: ExitStack) -> None:
        """Have the steps run in the cluster from now on, those of the gang on so many devices, until the stack is
        closed."""
        plan = RankPlacement(devices, {"0": tuple(range(devices)), "2": (0,)})  # the first layer on all of them
        example = next(digits().batches(BATCH, 0))
        job = client.submit(
            self.train, example=example, model=self.model, optimizer=self.optimizer, name=self.name, cluster=cluster,
            priority="low" if self.number else "high", plan=None if self.number else plan,
        )  # fmt: skip
        self.step = stack.enter_context(job).step

    def run(self, steps: int) -> None:
        for x, y in islice(self._batches, steps):
            loss = self.step(x, y)
            self.losses.append(float(loss.detach() if isinstance(loss, Tensor) else loss))

    def compared(self) -> str:
        """Run the same steps here, and say how close the job came. Raises ClusterFailed if that is not close enough."""
        alone = TrainingJob(self.number)
        alone.run(STEPS)
        same = all(map(torch.equal, self.model.parameters(), alone.model.parameters()))
        apart = max(abs(a - b) for a, b in zip(self.losses, alone.losses, strict=True))
        if self.losses == alone.losses and same:
            return "bit-equal"
        close = all(
            torch.allclose(a, b, rtol=SMALL, atol=SMALL)
            for a, b in zip(self.model.parameters(), alone.model.parameters(), strict=True)
        )
        if self.number or apart > SMALL or not close:
            raise ClusterFailed(
                f"{self.name} did not train what the same steps train alone; losses differ by {apart:.1e}"
            )
        return f"losses within {apart:.0e}"


@contextmanager
def submitted(cluster: str, devices: int, lows: int) -> Iterator[list[TrainingJob]]:
    """The gang, on so many devices, and so many low jobs, in the cluster."""
    jobs = [TrainingJob(number) for number in range(lows + 1)]
    with ExitStack() as stack:
        for job in jobs:
            job.submit(cluster, devices, stack)
        yield jobs


Places = dict[str, list[str]]


def summary(jobs: Sequence[TrainingJob], before: Places, after: Places, died: str) -> str:
    """A table of what became of each job. Raises ClusterFailed if one did not train what it should."""
    rows = []
    for job in jobs:
        was, now = before[job.name], after[job.name]
        lost = [node for node in was if died in node]
        what = "went on elsewhere" if lost else "stayed" if was == now else "moved"
        if len(now) < len(was):
            what = f"goes on with {len(now)} of {len(was)} devices"
        rows.append([job.name, " ".join(was), " ".join(now), what, str(len(job.losses)), job.compared()])
    return table(("JOB", "WAS ON", "IS ON", "WHEN A NODE DIED", "STEPS", "AS A PLAIN RUN"), rows)


def victim(ray: RayNodes, places: Places) -> int:
    """The number of a node with a rank of the gang, and with a low job if there is such a one. The head is none: Ray
    would end with it."""
    found = range(1, len(ray.ids))

    def has(number: int, name: str) -> bool:
        return any(ray.ids[number][:8] in node for node in places[name])

    lows = [name for name in places if name != "gang"]
    return max(found, key=lambda number: (has(number, "gang"), any(has(number, name) for name in lows)))


def show(count: int, lows: int) -> None:
    """The whole demo. Raises ClusterFailed if something did not hold."""
    began = time.monotonic()
    with ray_nodes(count) as ray, coordinator(ray) as cluster:
        print(f"{count} Ray nodes are up after {time.monotonic() - began:.0f} s; a daemon starts on each", flush=True)
        nodes = cluster.wait_until_up(count)
        print(f"the coordinator has {len(nodes)} daemons after {time.monotonic() - began:.0f} s", flush=True)
        cluster.show("status")
        with submitted(cluster.endpoint, min(GANG, count), lows) as jobs:
            for job in jobs:
                job.run(STEPS // 2)
            cluster.show("jobs")
            before = cluster.places()
            began = time.monotonic()
            died = ray.remove(victim(ray, before))
            left = cluster.wait_until_up(count - 1)
            took = time.monotonic() - began
            if any(died[:8] in each["name"] for each in left):
                raise ClusterFailed(f"node {died[:8]} was killed, and the coordinator lost another one")
            if not any(died[:8] in node for node in before["gang"]):
                raise ClusterFailed(f"no rank of the gang was on node {died[:8]}, which was killed: {before['gang']}")
            print(f"Ray node {died[:8]} was killed; {took:.1f} s later the coordinator has lost it", flush=True)
            for job in jobs:
                job.run(STEPS - STEPS // 2)
            cluster.show("jobs")
            after = cluster.places()
            if len(after["gang"]) != min(GANG, count - 1):
                raise ClusterFailed(f"the gang goes on on {after['gang']}, and {count - 1} nodes were left")
        print(summary(jobs, before, after, died[:8]), flush=True)
        cluster.show("status")
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
    flags.add_argument("--nodes", type=int, choices=range(3, 17), default=NODES, help="how many (default: 4)")
    flags.add_argument("--jobs", type=int, choices=range(1, 17), default=LOW_JOBS, help="low jobs (default: 6)")
    args = flags.parse_args(argv)
    if find_spec("ray") is None:
        print("cluster: ray is not installed\n  pip install ray", file=sys.stderr)
        return 78
    return show_demo("cluster", partial(show, args.nodes, args.jobs), ClusterFailed, RayFailed)


if __name__ == "__main__":
    sys.exit(main())
