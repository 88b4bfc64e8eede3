"""Prolog and epilog, with a systemctl that writes down its arguments."""

from __future__ import annotations

import subprocess

import pytest

from gpumux.wire import endpoint

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
        (tools / "systemctl").chmod(0o755)
        given = (HOME / "gpumux.conf").read_text().replace("/run/gpumux-slurm", str(self._marks))
        self._conf.write_text(f"{given}PATH={tools}:$PATH\n")

    def run(self, script, job, gpus="0", partition="shared"):
        env = {"SLURM_JOB_ID": str(job), "SLURM_JOB_PARTITION": partition, "GPUMUX_SLURM_CONF": str(self._conf)}
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


def test_scripts_can_be_run():
    for name in ("prolog.sh", "epilog.sh", "taskprolog.sh"):
        assert (HOME / name).stat().st_mode & 0o111
