"""Ray nodes on one machine, for as long as a `with` block: the demo of a cluster and tests. Needs ray.

with ray_nodes(4) as nodes:
    ...  # a Ray cluster at nodes.address
    nodes.remove(3)

The nodes belong to a process of their own, since Ray takes over signals and logging of the process that uses it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

RESOURCE = "gpumux_node"
OBJECT_STORE_BYTES = 80 * 2**20  # Ray's least, about
STOP_S = 60.0
# Ray asks a node every 3 s, and calls it dead after five times without an answer. That is 15 s, and here 1.5 s.
HEALTH = {"health_check_period_ms": 500, "health_check_failure_threshold": 3}


class RayFailed(RuntimeError):
    """Ray did not start, or did not do what it was asked."""


@dataclass(frozen=True)
class RayNodes:
    """`address` is the cluster's, `ids` are those of its nodes; the first is the head."""

    process: subprocess.Popen[str]
    address: str
    ids: tuple[str, ...]

    def remove(self, number: int) -> str:
        """End a node as a crash does; its id. Ray calls it dead 1.5 s later."""
        return self._ask(f"remove {number}")

    def _ask(self, words: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(words + "\n")
        self.process.stdin.flush()
        return _line(self.process)


@contextmanager
def ray_nodes(count: int) -> Iterator[RayNodes]:
    """Start them, each with one CPU slot and one of the custom resource. Raises RayFailed."""
    directory = Path(tempfile.mkdtemp(prefix="gm-r"))  # Ray's paths of sockets are long
    environment = {**os.environ, "RAY_TMPDIR": str(directory), "RAY_USAGE_STATS_ENABLED": "0"}
    environment["RAY_DEDUP_LOGS"] = "0"
    process = subprocess.Popen(
        [sys.executable, "-m", "microbench.ray_nodes", str(count)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment,
        process_group=0,
    )  # fmt: skip
    try:
        address, *ids = _line(process).split()
        yield RayNodes(process, address, tuple(ids))
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()
        shutil.rmtree(directory, ignore_errors=True)


MARK = "ray_nodes: "  # begins the lines that answer, as Ray prints, too


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(MARK):
            return line.removeprefix(MARK).strip()
    raise RayFailed(f"the process of the Ray nodes ended with status {process.wait()}")


def main(count: int) -> None:
    """Be that process: nodes until the end of stdin."""
    from ray.cluster_utils import Cluster

    arguments = {"num_cpus": 1, "num_gpus": 0, "resources": {RESOURCE: 1}, "object_store_memory": OBJECT_STORE_BYTES}
    cluster = Cluster(
        initialize_head=True, head_node_args={**arguments, "include_dashboard": False, "_system_config": HEALTH}
    )
    nodes = [cluster.head_node, *(cluster.add_node(**arguments) for _ in range(count - 1))]
    print(MARK + " ".join([cluster.address, *(node.node_id for node in nodes)]), flush=True)
    for line in sys.stdin:
        node = nodes[int(line.split()[1])]
        cluster.remove_node(node, allow_graceful=False)
        print(MARK + node.node_id, flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]))
