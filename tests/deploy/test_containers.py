"""The container file and the manifests fit the package, the command line and each other."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import tomllib
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

from gpumux import __version__
from gpumux.cli.main import build_parser
from gpumux.config import load
from gpumux.integrations import kubernetes
from gpumux.integrations.kubernetes.__main__ import parser as plugin_command
from gpumux.metrics.gauges import STALE_S
from gpumux.metrics.series import Metrics
from gpumux.metrics.server import MetricsServer
from tests.metrics.contract import figures

from .packages import ROOT, need, wheel

FILE = (ROOT / "deploy/container/Containerfile").read_text().replace("\\\n", " ")
KUBERNETES = ROOT / "deploy" / "kubernetes"


def instruction(name):
    (found,) = re.findall(rf"^{name} (.*)$", FILE, re.MULTILINE)
    return found


def documents(name):
    return list(yaml.safe_load_all((KUBERNETES / name).read_text()))


(DAEMON,) = documents("daemonset.yaml")
POD = DAEMON["spec"]["template"]["spec"]
CONTAINER, *PLUGINS = POD["containers"]
*EXAMPLES, QUOTA = documents("example-pods.yaml")


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


def test_the_daemon_and_pods_run_as_users_and_the_plugins_have_no_capabilities():
    group = POD["securityContext"]["runAsGroup"]
    assert f"groupadd --gid {group} " in FILE
    assert instruction("USER") == "gpumux"
    assert POD["securityContext"]["runAsNonRoot"]
    for pod in EXAMPLES:
        context = pod["spec"]["securityContext"]
        assert context["runAsNonRoot"]
        assert context["runAsUser"] != POD["securityContext"]["runAsUser"]
    for container in (CONTAINER, *PLUGINS):
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["securityContext"]["readOnlyRootFilesystem"]


def test_every_mount_has_a_volume_and_all_meet_at_one_directory_of_the_host():
    sockets, volumes = set(), {volume["name"]: volume for volume in POD["volumes"]}
    for container in (*POD["initContainers"], *POD["containers"]):
        for mount in container["volumeMounts"]:
            volume = volumes[mount["name"]]
            if "hostPath" in volume:
                assert volume["hostPath"]["path"] == mount["mountPath"], "pods are told paths of the host"
            if mount["mountPath"].startswith("/run/gpumux"):
                sockets.add(mount["mountPath"])
    assert sockets == {"/run/gpumux/0"}, "where clients look for GPU 0"
    for pod in EXAMPLES:
        assert "volumes" not in pod["spec"], "shares bring the mount along"


def test_the_daemon_alone_asks_for_the_gpu_and_pods_for_shares_that_are_offered():
    assert CONTAINER["resources"]["limits"]["nvidia.com/gpu"] == 1
    offered = {(given := plugin(each)).resource: given for each in PLUGINS}
    for pod in EXAMPLES:
        for container in pod["spec"]["containers"]:
            ((resource, shares),) = [item for item in container["resources"]["limits"].items() if "/" in item[0]]
            assert 1 <= shares <= offered[resource].shares
    for resource in QUOTA["spec"]["hard"]:
        assert resource.removeprefix("requests.") in offered


def plugin(container):
    """What a plugin's container was started with."""
    assert container["command"] == ["python", "-m", kubernetes.__name__]
    return plugin_command().parse_args(container["args"])


def test_plugins_and_daemon_agree_and_no_more_shares_are_offered_than_there_are():
    environ = {each["name"]: each["value"] for each in CONTAINER["env"]}
    config, given = load({}, environ), [plugin(each) for each in PLUGINS]
    assert {(str(each.grants), each.endpoint) for each in given} == {(config.grants, config.grants_endpoint)}
    (of,) = {each.of for each in given}
    assert sum(each.shares for each in given) <= of
    assert len({each.resource for each in given}) == len(given)
    (socket,) = {str(Path(config.grants_endpoint.removeprefix("ipc://")).parent)}
    assert f"chmod 755 {socket}" in POD["initContainers"][0]["command"][2], "pods of any user come in"
    mounts = {mount["mountPath"]: mount.get("readOnly", False) for mount in CONTAINER["volumeMounts"]}
    assert mounts[config.grants], "the daemon makes no grants"
    for each in given:
        assert str(each.kubelet) in {volume.get("hostPath", {}).get("path") for volume in POD["volumes"]}


KUBERNETES_VERSION = "1.34.0"
SCHEMAS = ("kubernetes-validate", "1.37.0", "85136d018a27b50ec7fc049d902bfa5193f5976807e6c0f408e3ab6fe078cad9")
HELM = ("helm-python-sdk", "0.2.2", "28cc13abaf134c3a7e37f070c939be8d9cdc9825c3c8b8b2d35161073bcd4578")


def invalid(items):
    """Where documents are not what Kubernetes' own schemas, with no unknown fields, say."""
    home = wheel(*SCHEMAS) / "kubernetes_validate/kubernetes-json-schema" / f"v{KUBERNETES_VERSION}-local-strict"
    definitions = json.loads((home / "_definitions.json").read_text())
    registry = Registry().with_resource("/api/_definitions.json", Resource(definitions, DRAFT202012))
    found = []
    for item in items:
        group, _, version = item["apiVersion"].rpartition("/")
        name = "-".join(filter(None, (item["kind"], group.partition(".")[0], version))).lower()
        schema = json.loads((home / f"{name}.json").read_text())
        found += [error.message for error in Draft202012Validator(schema, registry=registry).iter_errors(item)]
    return found


def test_manifests_are_what_kubernetes_schemas_say():
    files = ("namespace.yaml", "daemonset.yaml", "example-pods.yaml")
    assert invalid([item for name in files for item in documents(name)]) == []
    wrong = json.loads(json.dumps(DAEMON))
    wrong["spec"]["template"]["spec"]["containers"][0]["port"] = []
    assert invalid([wrong]), "a wrong field is noticed"


_RENDER = """
import json, sys
from helm_python import chart
try:
    with chart.Chart.load(sys.argv[1]) as loaded:
        values = json.loads(sys.argv[2])
        loaded.validate_schema(values)
        said = chart.lint(sys.argv[1], values, strict=True)
        rendered = loaded.render(values, name="gpumux", namespace="gpumux")
except Exception as error:
    said, rendered = {"errors": [str(error)]}, {}
print(json.dumps([said["errors"], rendered]))
"""


def helm(**values):
    """What Helm finds wrong, and what it renders."""
    command = [sys.executable, "-c", _RENDER, str(KUBERNETES / "chart"), json.dumps(values)]
    environ = {**os.environ, "PYTHONPATH": str(wheel(*HELM))}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=120)
    assert done.returncode == 0, done.stderr
    errors, rendered = json.loads(done.stdout)
    return errors, rendered.get("gpumux/templates/daemonset.yaml", "")


def plain(item):
    """A manifest without what only a release of Helm has."""
    text = json.dumps(item)
    for only in (
        ', "app.kubernetes.io/instance": "gpumux"', ', "app.kubernetes.io/managed-by": "Helm"',
        ', "imagePullPolicy": "IfNotPresent"',
    ):  # fmt: skip
        text = text.replace(only, "")
    return json.loads(text)


def test_the_chart_renders_the_manifest_and_is_what_the_schemas_say():
    errors, rendered = helm()
    assert errors == []
    (item,) = yaml.safe_load_all(rendered)
    assert plain(item) == DAEMON
    assert invalid([item]) == []
    about = yaml.safe_load((KUBERNETES / "chart/Chart.yaml").read_text())
    assert about["appVersion"] == __version__


def test_the_charts_values_reach_the_plugins_and_mistakes_are_refused():
    errors, rendered = helm(
        sharesOfADevice=8, offers=[{"resource": "example.com/part", "shares": 8, "maxPriority": "high"}],
        image={"repository": "registry.example/gpumux", "tag": "1"},
    )  # fmt: skip
    assert errors == []
    pod = yaml.safe_load(rendered)["spec"]["template"]["spec"]
    assert {each["image"] for each in pod["containers"]} == {"registry.example/gpumux:1"}
    (given,) = [plugin(each) for each in pod["containers"][1:]]
    assert (given.resource, given.shares, given.of, given.max_priority) == ("example.com/part", 8, 8, "high")
    for wrong in (
        {"offers": [{"resource": "gpumux.dev/share", "shares": 101, "maxPriority": "low"}]},
        {"offers": [{"resource": "gpumux.dev/share", "shares": 1, "maxPriority": "top"}]},
        {"offers": [{"resource": "gpumux.dev/-share", "shares": 1, "maxPriority": "low"}]},
        {"gpuResource": None},
        {"resources": {"limits": "64Gi"}},
        {"share": 10},
    ):
        assert helm(**wrong)[0], wrong
    one = {"shares": 1, "maxPriority": "low"}
    for names in (("a.dev/share", "b.dev/share"), ("a.dev/gpumux",), ("a.dev/Share", "a.dev/share")):
        (said,) = helm(offers=[{"resource": name, **one} for name in names])[0]
        assert "is no name for another container" in said


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
