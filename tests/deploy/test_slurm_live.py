"""A real Slurm takes the shipped lines and scripts: a controller and two nodes, all of them here."""

from __future__ import annotations

import getpass
import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from .packages import ROOT, libraries, need
from .test_slurm import HOME, LIMIT_S

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "libhwloc15", "liblz4-1")
NODES = ("gpu-node-1", "gpu-node-2")
STOP_S = 20


class Slurm:
    """Programs of Slurm, and what they need to find each other.

    `slurmctld` and `slurmd` drop the Gres= of their nodes where their files have other names, and Debian's do: so they
    run by links.
    """

    def __init__(self, place: Path):
        controller = Path(need("slurmctld-wlm", *PACKAGES))
        self._place, self._host = place, socket.gethostname().partition(".")[0]
        plugins = next((controller.parents[1] / "lib").glob("*-linux-gnu/slurm-wlm"))
        paths = ":".join([*libraries(str(controller)).values(), str(plugins)])
        self.env = {**os.environ, "LD_LIBRARY_PATH": paths, "SLURM_CONF": str(place / "slurm.conf")}
        self.tools = place / "tools"
        self.tools.mkdir()
        for name in ("slurmctld", "slurmd", "slurmstepd"):
            (self.tools / name).symlink_to(controller.with_name(f"{name}-wlm"))
        self._clients = controller.parents[1] / "bin"
        for name, text in {
            "systemctl": f'echo "$@" >>{place}/"$SLURMD_NODENAME.told"',
            "gpumux": f'exec "{sys.executable}" -m gpumux "$@"',
            "scontrol": f'exec "{self._clients}/scontrol" "$@"',
            **{
                name: f"export GPUMUX_SLURM_CONF={place}/$SLURMD_NODENAME.conf LD_LIBRARY_PATH={paths} "
                f'PYTHONPATH={ROOT} SLURM_CONF={place}/slurm.conf\nexec "{HOME / name}"'
                for name in ("prolog.sh", "epilog.sh", "taskprolog.sh")
            },
        }.items():
            (self.tools / name).write_text(f"#!/bin/bash\n{text}\n")
            (self.tools / name).chmod(0o755)
        self._configure(plugins)

    def _configure(self, plugins):
        """The shipped lines, with two nodes that are this machine, and what a cluster without accounts needs."""
        place, user = self._place, getpass.getuser()
        with ExitStack() as held:
            sockets = [held.enter_context(socket.socket()) for _ in range(3)]
            for each in sockets:
                each.bind(("127.0.0.1", 0))
            port, *ports = [each.getsockname()[1] for each in sockets]
        shipped = (HOME / "slurm.conf").read_text().replace("/etc/slurm/gpumux", str(self.tools))
        (nodes,) = [line for line in shipped.splitlines() if line.startswith("NodeName=")]
        names, rest = nodes.split(" ", 1)
        assert names == "NodeName=gpu-node-[1-4]"
        ours = [
            f"NodeName={name} NodeHostname={self._host} NodeAddr=127.0.0.1 Port={at} {rest}"
            for name, at in zip(NODES, ports, strict=True)
        ]
        (place / "slurm.conf").write_text(
            shipped.replace(nodes, "\n".join(ours)).replace("gpu-node-[1-4]", "gpu-node-[1-2]")
            + f"ClusterName=test\nSlurmctldHost={self._host}(127.0.0.1)\nSlurmctldPort={port}\n"
            f"SlurmUser={user}\nSlurmdUser={user}\nPluginDir={plugins}\nStateSaveLocation={place}/state\n"
            f"SlurmdSpoolDir={place}/%n.spool\nSlurmdPidFile={place}/%n.pid\nSlurmctldPidFile={place}/controller.pid\n"
            # No daemon may be reached from elsewhere, as none asks for credentials.
            "CommunicationParameters=NoCtldInAddrAny,NoInAddrAny\nAuthType=auth/none\nCredType=cred/none\n"
            "ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nJobAcctGatherType=jobacct_gather/none\n"
            "SelectType=select/cons_tres\nSlurmdParameters=config_overrides\nMpiDefault=none\n"
        )
        (place / "gres.conf").write_text((HOME / "gres.conf").read_text())
        for name in NODES:
            (place / f"{name}.conf").write_text(
                (HOME / "gpumux.conf")
                .read_text()
                .replace("/run/gpumux-slurm", str(place / f"{name}.marks"))
                .replace("/run/gpumux-shares", str(place / f"{name}.shares"))
                .replace("/opt/gpumux/bin/gpumux", str(self.tools / "gpumux"))
                .replace("GPUMUX_USER=gpumux", f"GPUMUX_USER={user}")
                + f"PATH={self.tools}:$PATH\n"
            )
            (place / f"{name}.spool").mkdir()
        (place / "state").mkdir()

    @contextmanager
    def daemon(self, name, *arguments):
        with (self._place / f"{name}.log").open("w") as log:
            process = subprocess.Popen(
                [self.tools / name, "-D", *arguments], stdout=log, stderr=log, env=self.env, cwd=self._place
            )
            try:
                yield
                assert process.poll() is None, (self._place / f"{name}.log").read_text()
            finally:
                process.terminate()
                try:
                    process.wait(STOP_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    def command(self, name, *arguments):
        return subprocess.run(
            [self._clients / name, *arguments],
            env=self.env,
            cwd=self._place,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )


@pytest.fixture
def slurm(tmp_path):
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = "none"
    if not address.startswith("127."):
        pytest.skip(f"needs this machine's name, {name}, to be an address of the loopback interface, not {address}")
    made = Slurm(tmp_path)
    with ExitStack() as running:
        running.enter_context(made.daemon("slurmctld", "-c"))
        for node in NODES:
            running.enter_context(made.daemon("slurmd", "-N", node, "-d", str(made.tools / "slurmstepd")))
        yield made


SHOW = """
echo "$SLURMD_NODENAME $GPUMUX_ENDPOINT ${GPUMUX_GRANT%.*} ${CUDA_VISIBLE_DEVICES-unset}"
cp "$SLURMD_NODENAME".marks/grants/0/slurm-*.json "$SLURMD_NODENAME".grant
"""


def test_a_running_slurm_gives_a_job_its_shares_on_each_node_and_no_more_than_there_are(slurm, tmp_path):
    done = slurm.command("srun", "-N2", "-p", "shared", "--gres=gpumux_share:30", "bash", "-c", SHOW)
    assert done.returncode == 0, done.stderr
    for line, name in zip(sorted(done.stdout.splitlines()), NODES, strict=True):
        assert line == f"{name} ipc://{tmp_path}/{name}.shares/0/gpumux.sock slurm-1 "
        record = json.loads((tmp_path / f"{name}.grant").read_text())
        assert (record["shares"], record["of"]) == (30, 100)
        assert (tmp_path / f"{name}.told").read_text().splitlines()[0] == "start gpumux@0"
    refused = slurm.command("srun", "-p", "shared", "--gres=gpumux_share:101", "true")
    assert refused.returncode != 0
    assert "Requested node configuration is not available" in refused.stderr
    # A job that needs all of a node's shares starts once its epilogs have given back those of the first.
    done = slurm.command("srun", "-N2", "-p", "shared", "--gres=gpumux_share:100", "true")
    assert done.returncode == 0, done.stderr
    assert not [each for name in NODES for each in tmp_path.glob(f"{name}.marks/grants/0/slurm-1.json")]
