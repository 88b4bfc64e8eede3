"""`gpumux doctor`: each check on an invented machine, and all of them on this one."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace

import pytest

from gpumux.cli import doctor
from gpumux.cli.doctor import FAIL, OK, WARN
from gpumux.cli.main import main
from gpumux.config import Config
from gpumux.device.nvidia import Nvidia


def machine(tmp_path, **files):
    """A root directory with these files; `__` stands for a slash."""
    for name, content in files.items():
        path = tmp_path / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return tmp_path


DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.1  Thu\nGCC version: 13\n"


def test_no_driver_is_a_warning(tmp_path):
    found = doctor.gpu(tmp_path)
    assert (found.level, found.detail) == (WARN, "no NVIDIA driver")


def test_a_driver_without_devices_fails(tmp_path):
    assert doctor.gpu(machine(tmp_path, proc__driver__nvidia__version=DRIVER)).level == FAIL


def test_a_driver_with_devices_is_well(tmp_path):
    found = doctor.gpu(machine(tmp_path, proc__driver__nvidia__version=DRIVER, dev__nvidia0="", dev__nvidiactl=""))
    assert (found.level, found.detail) == (OK, "1 GPU, driver 580.1")


GPU = Nvidia("580.1", ("nvidia0",), False, "2.11.0+cu130", "13.0", True)


@pytest.mark.parametrize(
    ("settings", "lacks", "level", "says"),
    [
        ({}, {}, OK, "takes GPU 0"),
        ({}, {"driver": ""}, OK, "takes the CPU: there is no NVIDIA driver"),
        ({}, {"torch": "2.13.0+cpu", "torch_cuda": ""}, WARN, "built without CUDA"),
        ({}, {"bindings": False}, FAIL, "cuda-bindings is missing"),
        ({"device": "cpu"}, {}, OK, "takes cpu, as asked"),
        ({"device": "cuda"}, {"driver": ""}, FAIL, "can't take GPU 0: there is no NVIDIA driver"),
        ({"device": "cuda"}, {"gpus": ()}, FAIL, "no GPU in /dev"),
        ({"device": "cuda"}, {"torch": "2.13.0+cpu", "torch_cuda": ""}, FAIL, "built without CUDA"),
        ({"device": "cuda", "gpu": 1}, {}, FAIL, "can't take GPU 1: there are 1"),
    ],
)
def test_the_doctor_says_which_device_serve_takes_and_what_it_lacks(settings, lacks, level, says):
    found = doctor.device(Config(**settings), replace(GPU, **lacks))
    assert (found.level, says in found.detail) == (level, True), found
    assert bool(found.remedy) == (level != OK)


@pytest.mark.parametrize(
    ("version", "level"), [("2.11.0+cu130", OK), ("2.13.0a1", OK), ("3.0", OK), ("2.9.1", FAIL), (None, FAIL)]
)
def test_the_version_of_torch(monkeypatch, version, level):
    def find(name):
        if version is None:
            raise doctor.importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(doctor.importlib.metadata, "version", find)
    assert doctor.torch().level == level


def test_a_cpu_quota_below_the_cores_is_a_warning(tmp_path):
    root = machine(tmp_path, proc__self__cgroup="0::/box\n")
    box = root / "sys/fs/cgroup/box"
    box.mkdir(parents=True)
    (box / "cpu.max").write_text("50000 100000\n")
    (cpu,) = doctor.cgroup(root)
    assert (cpu.level, cpu.detail) == (WARN, "0.5 cores")


@pytest.mark.parametrize(("used", "cache", "level"), [(7 << 30, 6 << 30, OK), (8 << 30, 1 << 20, WARN)])
def test_page_cache_in_a_memory_limit_is_shown_and_counts_as_free(tmp_path, used, cache, level):
    root = machine(tmp_path, proc__self__cgroup="0::/box\n")
    box = root / "sys/fs/cgroup/box"
    box.mkdir(parents=True)
    (box / "memory.max").write_text(str(8 << 30))
    (box / "memory.current").write_text(str(used))
    (box / "memory.stat").write_text(f"inactive_file {cache}\n")
    found = doctor.memory(root)
    assert found.level == level
    assert ("7.0 GiB free of 8.0 GiB" if level == OK else "1.0 MiB free of 8.0 GiB") in found.detail
    assert "page cache" in found.detail


def test_no_limits_are_said_to_be_none(tmp_path):
    root = machine(tmp_path, proc__self__cgroup="0::/\n")
    assert [f.level for f in [*doctor.cgroup(root), doctor.memory(root)]] == [OK, OK]


def test_a_path_too_long_for_a_socket_fails(tmp_path):
    found = list(doctor.runtime_dir(tmp_path / ("x" * 120)))
    assert (found[0].name, found[0].level) == ("socket path", FAIL)


def test_a_directory_anyone_may_write_to_fails(tmp_path):
    path = tmp_path / "r"
    path.mkdir()
    assert list(doctor.runtime_dir(path))[-1].level == OK
    os.chmod(path, 0o777)
    assert list(doctor.runtime_dir(path))[-1].level == FAIL


def test_memfd_and_shared_memory_work_here():
    levels = {f.name: f.level for f in doctor.shared_memory()}
    assert levels["memfd"] == OK


def test_a_wrong_configuration_fails_with_the_remedy(tmp_path, capsys, runtime_dir):
    path = tmp_path / "c.toml"
    path.write_text("[daemon]\npolcy = 'fifo'\n")
    endpoint = f"ipc://{runtime_dir}/none.sock"
    assert main(["doctor", "--config", str(path), "--endpoint", endpoint]) == 1
    out = capsys.readouterr().out
    assert "fail  configuration" in out
    assert "-> did you mean policy?" in out


def test_an_endpoint_that_is_none_fails(capsys):
    assert main(["doctor", "--endpoint", "bla"]) == 1
    assert "fail  endpoint" in capsys.readouterr().out


def test_of_several_endpoints_the_first_ipc_one_is_looked_at(capsys, runtime_dir, monkeypatch, tmp_path):
    (tmp_path / "clients").mkdir()
    monkeypatch.setenv("GPUMUX_CURVE_SECRET_KEY", "x")
    monkeypatch.setenv("GPUMUX_CURVE_CLIENT_KEYS", str(tmp_path / "clients"))
    monkeypatch.setenv("GPUMUX_ENDPOINT", f"tcp://127.0.0.1:1,ipc://{runtime_dir}/none.sock")
    main(["doctor"])
    assert f"none at ipc://{runtime_dir}/none.sock" in capsys.readouterr().out


def test_json_has_every_finding(capsys, runtime_dir):
    endpoint = f"ipc://{runtime_dir}/none.sock"
    code = main(["doctor", "--json", "--endpoint", endpoint])
    findings = json.loads(capsys.readouterr().out)
    assert {"gpu", "cpu", "torch", "memfd", "open files", "daemon", "configuration"} <= {f["name"] for f in findings}
    assert code == int(any(f["level"] == FAIL for f in findings))
    assert all(f["remedy"] for f in findings if f["level"] != OK)


def test_a_daemon_of_another_version_is_a_warning(monkeypatch):
    class Other:
        def __init__(self, endpoint, timeout):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *rest):
            pass

        def status(self):
            return {"daemon": {"version": "0.0.1"}, "device": {"name": "A CPU"}}

    monkeypatch.setattr(doctor, "Control", Other)
    found = doctor.daemon("tcp://127.0.0.1:1", 1.0)
    assert (found.level, "0.0.1" in found.remedy) == (WARN, True)


def test_what_jobs_are_charged_and_hold_is_said():
    jobs = [
        {"short": "j1", "memory_bytes": 2 << 30, "measured_bytes": 1 << 30},
        {"short": "j2", "memory_bytes": 1 << 30, "measured_bytes": 0},
    ]
    assert doctor.charged_and_measured(jobs) == "memory: j1 is charged 2.0 GiB and holds 1.0 GiB"
    assert doctor.charged_and_measured(jobs[1:]) == ""


def test_the_state_directory(tmp_path):
    """Free room depends on the machine, so only errors of the directory itself are checked."""
    assert doctor.state_dir("").level == OK
    home = tmp_path / "state"
    home.mkdir(mode=0o700)
    assert str(home) in doctor.state_dir(str(home)).detail
    assert str(home / "new") in doctor.state_dir(str(home / "new")).detail
    home.chmod(0o755)
    found = doctor.state_dir(str(home))
    assert (found.level, found.remedy) == (WARN, f"chmod 700 {home}")
    for unsafe in (home, tmp_path):  # a daemon does not start there
        unsafe.chmod(0o777)
        found = doctor.state_dir(str(home))
        assert (found.level, f"chmod go-w {unsafe}" in found.remedy) == (FAIL, True)
        unsafe.chmod(0o700)
    (home / "file").touch()
    assert doctor.state_dir(str(home / "file")).level == FAIL


def test_what_job_processes_are_kept_from_is_tried(monkeypatch):
    found = {finding.name: finding for finding in doctor.job_processes("auto")}
    assert list(found) == ["jobs: user", "jobs: privileges", "jobs: memory", "jobs: memory group", "jobs: calls"]
    assert all(finding.level != doctor.FAIL for finding in found.values()), found
    assert found["jobs: privileges"].level == found["jobs: memory"].level == doctor.OK
    assert found["jobs: memory group"].level == doctor.OK, "a machine without has the other limit"
    assert all(finding.remedy for finding in found.values() if finding.level == doctor.WARN)
    off = {finding.name: finding for finding in doctor.job_processes("off")}
    assert "confine is off" in off["jobs: calls"].detail or "libseccomp" in off["jobs: calls"].detail


def test_what_should_be_in_force_and_is_not_fails(monkeypatch):
    said = {"found": {}, "doubts": ["memory"]}

    def run(*args, **kwargs):
        return subprocess.CompletedProcess(args, 0, json.dumps(said).encode())

    monkeypatch.setattr(subprocess, "run", run)
    (finding,) = doctor.job_processes("auto")
    assert finding.level == doctor.FAIL
    assert "private memory is bounded" in finding.detail
    said = {"error": "[Errno 1] prctl(38)"}
    (finding,) = doctor.job_processes("auto")
    assert finding.level == doctor.FAIL
    assert "prctl(38)" in finding.detail
    assert "confine" in finding.remedy
