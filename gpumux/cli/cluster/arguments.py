"""The command line of `gpumux cluster`. Imports nothing that is slow."""

from __future__ import annotations

import argparse

from gpumux.cli.arguments import size, whole

VERBS = {
    "up": "run the coordinator of some daemons, until Ctrl-C",
    "run": "run a script beside the device that the coordinator chooses for it",
    "status": "show the coordinator's daemons and how full they are",
    "jobs": "list the jobs of the cluster, where they are and why they wait",
    "explain": "say why a job waits, or where it is",
    "cancel": "end a job, wherever it is",
    "drain": "give a node no more jobs, and move away those that can be moved",
    "down": "stop the coordinator of this machine; jobs go on where they run",
}

ABOUT = """\
examples:
  gpumux cluster up ipc:///run/gpumux/0/gpumux.sock ipc:///run/gpumux/1/gpumux.sock
  gpumux cluster up cluster.toml --state-dir /var/lib/gpumux/cluster
  gpumux cluster up --ray           # a daemon on each GPU of a Ray cluster
  gpumux cluster run train.py --epochs 3
  gpumux cluster status
  gpumux cluster drain box:0        # and `--undo` when it may have jobs again

A training loop asks for a place with client.submit(..., cluster="auto"), and gpus=4 for four of them. A cluster's file
has names, quotas and weights beside endpoints: see docs/cluster.md.
"""

RUN = """\
Run a Python script on the node that the coordinator chooses, beside its daemon, so that batches and results go there
through shared memory. Devices are held for the script's first client.submit(..., cluster="auto"), which must ask for
as many, of the same priority. Output is shown as it comes, and the script's exit code is returned. Ctrl-C interrupts
the script; a second one ends it by SIGTERM, a third one by SIGKILL. If the job has to move later, the script stays
where it is, and its data goes over the network.

examples:
  gpumux cluster run train.py --epochs 3
  gpumux cluster run --priority high --gpus 2 --memory 8GiB train.py
  gpumux cluster run --ship --env OMP_NUM_THREADS=4 train.py      # where nodes share no files

Options stand before the script, what stands after it is the script's. Over Ray the script runs as Ray's user, with
Ray's environment of the node. Without Ray it can run on this machine only, and is refused if another one is chosen.

exit codes: the script's, 128 and a signal's number if that ended it; 1 there are no devices, or the node was lost;
64 wrong usage; 78 the script can't be started as it is set up
"""


def _add_run(run: argparse.ArgumentParser) -> None:
    run.description, run.formatter_class = RUN, argparse.RawDescriptionHelpFormatter
    run.add_argument("--name", help="of its job (default: the script's, without .py)")
    run.add_argument("--priority", choices=("low", "high"), default="low", help="of its job (default: low)")
    run.add_argument("--gpus", metavar="N", type=whole, default=1, help="devices of its job (default: 1)")
    run.add_argument(
        "--memory", metavar="SIZE", type=size, default=2**30, help="of its job, on each device (default: 1GiB)"
    )
    run.add_argument("--env", metavar="NAME=VALUE", action="append", default=[], help="a variable for the script")
    run.add_argument("--cwd", metavar="DIR", help="its directory on the node (default: this one)")
    run.add_argument("--ship", action="store_true", help="copy this directory, or --cwd, to the node for it")
    run.add_argument("--python", metavar="PATH", default="", help="its interpreter on the node (default: Ray's there)")
    run.add_argument("script", metavar="SCRIPT", help="a Python file, from that directory")
    run.add_argument("arguments", metavar="ARGUMENT", nargs=argparse.REMAINDER, help="of the script")


def add(parser: argparse.ArgumentParser, parser_class: type[argparse.ArgumentParser]) -> None:
    """The verbs of `gpumux cluster`."""
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=parser_class)
    made = {
        name: verbs.add_parser(name, help=meaning, description=meaning[0].upper() + meaning[1:] + ".")
        for name, meaning in VERBS.items()
    }
    _add_run(made["run"])
    up = made["up"]
    up.add_argument(
        "daemons",
        metavar="ENDPOINT|FILE.toml",
        nargs="*",
        help="the daemons (also 'tcp://gpu[01-16]:7777'), or the cluster's file",
    )
    up.add_argument("--config", metavar="FILE", help="TOML file with a daemon's settings: access, keys, limits, logs")
    up.add_argument("--state-dir", metavar="DIR", help="where jobs are kept over a restart of the coordinator")
    up.add_argument("--endpoint", metavar="URL", action="append", help="where to listen (default: of this machine)")
    up.add_argument("--metrics-port", metavar="PORT", default="off", help="metrics and status page (default: off)")
    ray = up.add_argument_group("daemons on the nodes of a Ray cluster")
    ray.add_argument(
        "--ray", metavar="ADDRESS", nargs="?", const="auto",
        help="start them there (without ADDRESS: the cluster of this machine, else a new one)",
    )  # fmt: skip
    ray.add_argument("--device", choices=("cuda", "cpu", "sim"), help="of each daemon: one a GPU (default), or others")
    ray.add_argument("--daemons-per-node", metavar="N", type=int, help="how many, of devices other than GPUs (1)")
    ray.add_argument("--resource", metavar="NAME", help="only on nodes with this custom resource")
    ray.add_argument("--port", metavar="PORT", type=int, help="of each node's first daemon, with keys (7777)")
    ray.add_argument("--daemon-config", metavar="FILE", help="settings of the daemons, at this path on each node")
    ray.add_argument("--daemon-state-dir", metavar="DIR", help="on each node, for snapshots of the daemons' jobs")
    for name in ("explain", "cancel"):
        made[name].add_argument("job", metavar="JOB", help="its id, the beginning of one, or its name")
    made["drain"].add_argument("node", metavar="NODE", help="a node's name, or a host's for all of its nodes")
    made["drain"].add_argument("--undo", action="store_true", help="it may have jobs again")
    for name, verb in made.items():
        if name != "up":
            where = "which coordinator (also GPUMUX_CLUSTER; default: the one of this machine)"
            verb.add_argument("--cluster", metavar="URL", default="auto", help=where)
        if name not in ("up", "run"):
            verb.add_argument("--timeout", metavar="SECONDS", type=float, default=5.0, help="how long to wait for it")
        if name in ("status", "jobs", "explain"):
            verb.add_argument("--json", action="store_true", help="print JSON, for scripts")
