"""Prolog and epilog, with a systemctl that writes down its arguments."""

from __future__ import annotations

import configparser
import os
import pwd
import re
import subprocess
import sys

import pytest

from gpumux.config import load
from gpumux.errors import AccessDenied
from gpumux.types import Priority
from gpumux.wire import endpoint
from gpumux.wire.grants import GrantDirectory

from .packages import ROOT

HOME = ROOT / "deploy" / "slurm"
LIMIT_S = 60


class Node:
    """A compute node: jobs come and go by Slurm's own environment variables."""

    def __init__(self, place):
        self._marks, self._told, self._conf = place / "marks", place / "told", place / "slurm.conf"
        tools = place / "tools"
        tools.mkdir()
        (tools / "systemctl").write_text(f'#!/bin/bash\necho "$@" >> "{self._told}"\n[[ "$*" != *@13 ]]\n')
        # Jobs and what Slurm says of them.
        self.resources = place / "resources"
        self.resources.mkdir()
        (tools / "scontrol").write_text(
            f'#!/bin/bash\nif [[ "$1 $2" == "show hostnames" ]]; then\n'
            f'  [[ $3 == "n[1-2]" ]] && printf "n1\\nn2\\n" || echo "$3"\n'
            f'else\n  [[ "$1 $2 $3 $4" == "--oneliner --details show job" ]] && cat "{self.resources}/$5"\nfi\n'
        )
        (tools / "gpumux").write_text(f'#!/bin/bash\nexec "{sys.executable}" -m gpumux "$@"\n')
        for tool in tools.iterdir():
            tool.chmod(0o755)
        given = (HOME / "gpumux.conf").read_text()
        self.shares = place / "shares"
        for default, here in (
            ("/run/gpumux-slurm", self._marks),
            ("/run/gpumux-shares", self.shares),
            ("/opt/gpumux/bin/gpumux", tools / "gpumux"),
            ("GPUMUX_USER=gpumux", f"GPUMUX_USER={pwd.getpwuid(os.getuid()).pw_name}"),
        ):
            given = given.replace(default, str(here))
        self._conf.write_text(f"{given}PATH={tools}:$PATH\n")
        self.grants = GrantDirectory(self._marks / "grants" / "0")

    def run(self, script, job, gpus="0", partition="shared"):
        said = self.resources / str(job)
        if not said.exists():
            said.write_text(f"JobId={job} JobState=RUNNING TresPerNode=(null)\n")
        env = {"SLURM_JOB_ID": str(job), "SLURM_JOB_PARTITION": partition, "GPUMUX_SLURM_CONF": str(self._conf)}
        env |= {"SLURM_JOB_UID": str(os.getuid()), "SLURMD_NODENAME": "n1", "PYTHONPATH": str(ROOT)}
        if gpus:
            env["SLURM_JOB_GPUS"] = gpus
        return subprocess.run(["/bin/bash", HOME / script], env=env, capture_output=True, text=True, timeout=LIMIT_S)

    def prolog(self, job, **given):
        done = self.run("prolog.sh", job, **given)
        assert done.returncode == 0, done.stderr

    def epilog(self, job, **given):
        done = self.run("epilog.sh", job, **given)
        assert done.returncode == 0, done.stderr

    def told(self):
        """Arguments of systemctl since the last call."""
        said = self._told.read_text().splitlines() if self._told.exists() else []
        self._told.write_text("")
        return said

    def marks(self):
        return sorted(p.name for p in self._marks.glob("gpu*/*"))


@pytest.fixture
def node(tmp_path):
    return Node(tmp_path)


def test_the_first_job_of_a_gpu_starts_its_daemon_and_the_last_one_stops_it(node):
    node.prolog(1)
    node.prolog(2)
    assert node.told() == ["start gpumux@0", "start gpumux@0"]
    node.epilog(1)
    assert node.told() == []
    node.epilog(2)
    assert node.told() == ["stop gpumux@0"]


def test_a_job_with_several_gpus_has_a_daemon_each(node):
    node.prolog(1, gpus="0,3")
    node.prolog(2, gpus="3")
    assert node.told() == ["start gpumux@0", "start gpumux@3", "start gpumux@3"]
    node.epilog(1, gpus="0,3")
    assert node.told() == ["stop gpumux@0"]


def test_an_epilog_needs_no_list_of_gpus_and_may_run_twice(node):
    node.prolog(1, gpus="1")
    node.told()
    node.epilog(1, gpus="")
    node.epilog(1, gpus="")
    assert node.told() == ["stop gpumux@1"]


def test_other_partitions_and_jobs_without_a_gpu_are_left_alone(node):
    node.prolog(1, partition="batch")
    node.prolog(2, gpus="")
    node.epilog(1, partition="batch")
    assert (node.told(), node.marks()) == ([], [])


def test_a_daemon_that_does_not_start_fails_the_prolog_and_leaves_no_mark(node):
    done = node.run("prolog.sh", 1, gpus="13")
    assert done.returncode == 1
    assert "journalctl -u gpumux@13" in done.stderr
    assert node.marks() == []


def test_gpus_that_are_no_indices_are_refused(node):
    done = node.run("prolog.sh", 1, gpus="../../etc")
    assert (done.returncode, node.told()) == (1, [])
    assert "no list of GPU indices" in done.stderr


def test_tasks_find_the_daemon_of_their_first_gpu_where_it_listens(node, monkeypatch, tmp_path):
    said = node.run("taskprolog.sh", 1, gpus="2,3").stdout.splitlines()
    monkeypatch.setattr(endpoint, "SYSTEM_RUNTIME", tmp_path)
    (tmp_path / "gpumux" / "2").mkdir(parents=True)
    expected = endpoint.default_endpoint(2, {}).replace(str(tmp_path), "/run")
    assert said == [f"export GPUMUX_ENDPOINT={expected}", "export CUDA_VISIBLE_DEVICES="]
    assert node.run("taskprolog.sh", 1, partition="batch").stdout == ""


# ---- Jobs that ask for shares.


def asking(node, job, resources):
    (node.resources / str(job)).write_text(f"JobId={job} UserId=ann(1000) {resources} Command=train.sh\n")


def task(node, job):
    said = node.run("taskprolog.sh", job, gpus="").stdout.splitlines()
    return dict(line.removeprefix("export ").partition("=")[::2] for line in said)


def on_nodes(*groups):
    """As `scontrol --details show job` of Slurm 22.05 says it; each group is nodes and what the job has on each."""
    return " ".join(f"  Nodes={nodes} CPU_IDs=0 Mem=0 GRES={held} MinCPUsNode=1" for nodes, held in groups)


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("resources", "gpu", "shares"),
    [
        ("TresPerNode=gres:gpumux_share:25", 0, 25),
        ("TresPerNode=gres/gpumux_share:25", 0, 25),
        ("TresPerNode=gres/gpumux_share=25", 0, 25),
        ("TresPerNode=gres:gpumux_share", 0, 1),
        (f"{on_nodes(('n1', 'gpumux_share(CNT:25)'))} TresPerNode=gres:gpumux_share:20", 0, 25),
        (f"JOB_GRES=gpumux_share:60 {on_nodes(('n[1-2]', 'gpumux_share(CNT:30)'))}", 0, 30),
        (f"JOB_GRES=gpumux_share:gpu0:0,gpumux_share:gpu1:80 {on_nodes(('n1', 'gpumux_share:gpu1(CNT:80)'))}", 1, 80),
        (on_nodes(("n2", "gpumux_share:gpu0(CNT:8)"), ("n1", "gpumux_share:gpu1(CNT:7)"), ("n3", "")), 1, 7),
        (on_nodes(("n1", "license_server(CNT:3),gpumux_share:gpu1(CNT:7)")), 1, 7),
        ("TresPerNode=gres:license_server:3,gres:gpumux_share:gpu1:7", 1, 7),
        (f"{on_nodes(('n1', ''))} TresPerNode=gres:license_server:3,gpumux_share:gpu1:7", 1, 7),
    ],
)
def test_a_job_gets_the_shares_that_slurm_says_it_has(node, resources, gpu, shares):
    asking(node, 17, resources)
    node.prolog(17, gpus="")
    assert node.told() == [f"start gpumux@{gpu}"]
    environ = task(node, 17)
    assert environ["GPUMUX_ENDPOINT"] == f"ipc://{node.shares}/{gpu}/gpumux.sock"
    assert environ["CUDA_VISIBLE_DEVICES"] == ""
    grants = GrantDirectory(node.grants.path.with_name(str(gpu)))
    grant = grants.grant_of(environ["GPUMUX_GRANT"], 10_000)
    assert (grant.name, grant.max_bytes, grant.max_priority) == ("slurm-17", 100 * shares, Priority.LOW)
    assert (node.shares / str(gpu)).stat().st_mode & 0o777 == 0o755, "jobs of any user come in"
    node.epilog(17, gpus="")
    assert node.told() == [f"stop gpumux@{gpu}"]
    with pytest.raises(AccessDenied):
        grants.grant_of(environ["GPUMUX_GRANT"], 10_000)
    assert task(node, 17) == {}


def test_of_shares_of_several_gpus_the_most_count_and_the_job_is_told(node):
    asking(node, 17, on_nodes(("n1", "gpumux_share:gpu0(CNT:10),gpumux_share:gpu1(CNT:20),gpumux_share:gpu2(CNT:5)")))
    node.prolog(17, gpus="")
    assert node.told() == ["start gpumux@1"]
    grants = GrantDirectory(node.grants.path.with_name("1"))
    assert [(record.name, record.shares) for record in grants.records()] == [("slurm-17", 20)]
    (said,) = [line for line in task(node, 17) if line.startswith("print ")]
    assert "shares of several GPUs" in said
    asking(node, 18, on_nodes(("n1", "gpumux_share:gpu0(CNT:10)")))
    node.prolog(18, gpus="")
    assert not [line for line in task(node, 18) if line.startswith("print ")]


def test_a_job_without_shares_on_this_node_has_no_grant(node):
    asking(node, 17, on_nodes(("n1", "license_server(CNT:1)"), ("n2", "gpumux_share(CNT:30)"), ("n11", "gpumux_share")))
    node.prolog(17, gpus="")
    assert (node.told(), node.marks()) == ([], [])


def test_shares_that_are_no_number_fail_the_prolog(node):
    asking(node, 17, on_nodes(("n1", "gpumux_share:a100:30")))
    done = node.run("prolog.sh", 17, gpus="")
    assert (done.returncode, node.marks()) == (1, [])
    assert "gpumux_share:a100:30 of job 17, which is no number of shares" in done.stderr


def test_the_token_is_for_the_jobs_user_alone(node):
    asking(node, 17, "TresPerNode=gres:gpumux_share:25")
    node.prolog(17, gpus="")
    (token,) = node.grants.path.parents[1].glob("tokens/*")
    assert token.stat().st_mode & 0o777 == 0o600
    place = node.grants.path
    assert [each.stat().st_mode & 0o777 for each in (place, *place.parents[:2])] == [0o755] * 3, "the daemon reads it"
    assert token.stat().st_uid == os.getuid()


def test_jobs_of_one_gpu_have_a_grant_each(node):
    for job in (1, 2):
        asking(node, job, f"TresPerNode=gres:gpumux_share:{job}0")
        node.prolog(job, gpus="")
    assert [(record.name, record.shares) for record in node.grants.records()] == [("slurm-1", 10), ("slurm-2", 20)]
    node.told()
    node.epilog(1, gpus="")
    assert [record.name for record in node.grants.records()] == ["slurm-2"]
    assert node.told() == []


def test_more_shares_than_a_gpu_has_fail_the_prolog_and_leave_nothing(node):
    asking(node, 17, "TresPerNode=gres:gpumux_share:101")
    done = node.run("prolog.sh", 17, gpus="")
    assert done.returncode == 1
    assert "101 of 100 shares" in done.stderr
    assert (node.marks(), node.grants.records()) == ([], [])
    assert not list(node.grants.path.parents[1].glob("tokens/*"))


def test_slurms_lines_name_what_the_scripts_and_the_daemon_use(monkeypatch):
    """GresTypes, Gres, Name, Type, Count and Flags are Slurm's keys; the files of this directory agree on the rest."""
    settings = dict(line.split("=", 1) for line in lines("slurm.conf"))
    assert settings.pop("GresTypes") == "gpumux_share"
    assert set(settings) == {"Prolog", "Epilog", "TaskProlog", "PrologFlags", "NodeName", "PartitionName"}
    for key in ("Prolog", "Epilog", "TaskProlog"):
        assert (HOME / settings[key].rpartition("/")[2]).is_file()
    nodes = dict(word.split("=", 1) for word in f"NodeName={settings['NodeName']}".split())
    gres = [dict(word.split("=", 1) for word in line.split()) for line in lines("gres.conf")]
    assert gres == [{"Name": "gpumux_share", "Count": "100", "Flags": "CountOnly"}]
    assert nodes["Gres"] == "gpumux_share:100"
    of = re.search(r"^GPUMUX_SHARES_OF_A_GPU=(\d+)$", (HOME / "gpumux.conf").read_text(), re.MULTILINE)[1]
    assert of == gres[0]["Count"]
    unit = configparser.ConfigParser(strict=False, interpolation=None, dict_type=Repeated)
    unit.optionxform = str
    unit.read(HOME / "gpumux@.service.d" / "shares.conf")
    environ = dict(line.replace("%i", "0").split("=", 1) for line in unit["Service"]["Environment"].splitlines())
    config = load({}, environ)
    assert config.grants == "/run/gpumux-slurm/grants/0"
    assert config.grants_endpoint == "ipc:///run/gpumux-shares/0/gpumux.sock"


class Repeated(dict):
    """Keys that stand several times in a unit's section add up."""

    def __setitem__(self, key, value):
        if isinstance(value, list) and key in self:
            self[key].extend(value)
        else:
            super().__setitem__(key, value)


def lines(name):
    return [line for line in (HOME / name).read_text().splitlines() if line and not line.startswith("#")]


def test_scripts_can_be_run():
    for name in ("prolog.sh", "epilog.sh", "taskprolog.sh"):
        assert (HOME / name).stat().st_mode & 0o111
