"""The container file and the manifests fit the package, the command line and each other."""

from __future__ import annotations

import json
import re
import subprocess
import time
import tomllib
import urllib.request
from dataclasses import replace

import pytest
import yaml

from gpumux.cli.main import build_parser
from gpumux.config import load
from gpumux.metrics.gauges import STALE_S
from gpumux.metrics.series import Metrics
from gpumux.metrics.server import MetricsServer
from tests.metrics.contract import figures

from .packages import ROOT, need

FILE = (ROOT / "deploy/container/Containerfile").read_text().replace("\\\n", " ")
KUBERNETES = ROOT / "deploy" / "kubernetes"


def instruction(name):
    (found,) = re.findall(rf"^{name} (.*)$", FILE, re.MULTILINE)
    return found


def documents(name):
    return list(yaml.safe_load_all((KUBERNETES / name).read_text()))


(DAEMON,) = documents("daemonset.yaml")
POD = DAEMON["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
EXAMPLES = documents("example-pods.yaml")


def test_what_is_copied_exists_and_reaches_the_build():
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignored[0] == "*"
    copied = [path for line in re.findall(r"^COPY (.*)$", FILE, re.MULTILINE) for path in line.split()[:-1]]
    assert copied
    for path in copied:
        assert (ROOT / path).exists(), path
        assert f"!{path}" in ignored, path
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {project["readme"], *project["license-files"], "pyproject.toml"} <= set(copied)


def test_the_python_of_the_image_is_one_the_package_takes():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    version = tuple(map(int, re.search(r"python:(\d+)\.(\d+)", FILE).groups()))
    assert version >= tuple(map(int, re.search(r"(\d+)\.(\d+)", project["requires-python"]).groups()))


def test_the_entry_point_sets_the_umask_and_hands_arguments_through(tmp_path):
    tool = tmp_path / "gpumux"
    tool.write_text('#!/bin/sh\numask\necho "$@"\n')
    tool.chmod(0o755)
    command = [*json.loads(instruction("ENTRYPOINT")), *json.loads(instruction("CMD"))]
    done = subprocess.run(
        command, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True, timeout=120
    )
    mask, arguments = done.stdout.splitlines()
    assert int(mask, 8) == 0o007
    assert arguments.split() == json.loads(instruction("CMD"))


def commands():
    yield json.loads(instruction("CMD"))
    yield json.loads(re.search(r"^HEALTHCHECK .* CMD (\[.*\])$", FILE, re.MULTILINE)[1])[1:]
    yield CONTAINER["args"]


@pytest.mark.parametrize("command", list(commands()), ids=" ".join)
def test_commands_are_ones_the_program_takes(command):
    build_parser().parse_args(command)


def test_probes_ask_for_paths_that_the_daemon_serves_at_the_port_it_has():
    (port,) = (port for port in CONTAINER["ports"] if port["name"] == "metrics")
    assert port["containerPort"] == load({}, {}).metrics_port
    assert CONTAINER["args"][CONTAINER["args"].index("--metrics-host") + 1] == "0.0.0.0"  # where the kubelet asks
    server = MetricsServer(Metrics([int]).registry, "127.0.0.1", 0)
    try:
        server.watch(lambda: replace(figures(), when=time.time()))
        for probe in ("livenessProbe", "readinessProbe", "startupProbe"):
            get = CONTAINER[probe]["httpGet"]
            assert get["port"] == "metrics"
            with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{get['path']}", timeout=120) as answer:
                assert answer.read() == b"ok\n"
    finally:
        server.close()


def test_the_daemonset_names_its_gpu_and_the_image_takes_what_is_there():
    for command, device in ((CONTAINER["args"], "cuda"), (json.loads(instruction("CMD")), "auto")):
        args = build_parser().parse_args(command)
        assert load({"gpu": args.gpu, "device": args.device}, {}).device == device


def test_nothing_runs_as_root_and_clients_are_in_the_daemons_group():
    group = POD["securityContext"]["runAsGroup"]
    assert f"groupadd --gid {group} " in FILE
    assert instruction("USER") == "gpumux"
    assert POD["securityContext"]["runAsNonRoot"]
    for pod in EXAMPLES:
        context = pod["spec"]["securityContext"]
        assert context["runAsNonRoot"]
        assert context["runAsUser"] != POD["securityContext"]["runAsUser"]
        assert group in context["supplementalGroups"]


def test_every_mount_has_a_volume_and_all_meet_at_one_directory_of_the_host():
    sockets = set()
    for pod in (POD, *(example["spec"] for example in EXAMPLES)):
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            for mount in container["volumeMounts"]:
                volume = volumes[mount["name"]]
                if mount["mountPath"].startswith("/run/gpumux"):
                    sockets.add((volume["hostPath"]["path"], mount["mountPath"]))
    # In the container too it has to be where clients look for GPU 0.
    assert sockets == {("/run/gpumux/0", "/run/gpumux/0")}


def test_the_daemon_alone_asks_for_the_gpu_and_pods_go_where_it_is():
    assert CONTAINER["resources"]["limits"]["nvidia.com/gpu"] == 1
    for pod in EXAMPLES:
        assert pod["spec"]["nodeSelector"] == POD["nodeSelector"]
        for container in pod["spec"]["containers"]:
            assert "nvidia.com/gpu" not in container["resources"].get("limits", {})


def test_labels_ports_and_times_fit():
    template = DAEMON["spec"]["template"]
    assert DAEMON["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    (port,) = CONTAINER["ports"]
    assert str(port["containerPort"]) == instruction("EXPOSE")
    assert POD["terminationGracePeriodSeconds"] > 15  # drain_s and the device's ten seconds
    for probe in ("livenessProbe", "readinessProbe", "startupProbe"):
        assert CONTAINER[probe]["timeoutSeconds"] > STALE_S  # for which an answer waits for the loop


def test_kustomize_puts_the_manifests_together():
    kubectl = need("kubectl", "kubernetes-client")
    done = subprocess.run([kubectl, "kustomize", KUBERNETES], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [item["kind"] for item in yaml.safe_load_all(done.stdout)] == ["Namespace", "DaemonSet"]
