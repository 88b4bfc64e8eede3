"""The rules name only what exists, and each alert fires on its scenario and on no other."""

from __future__ import annotations

import re
import subprocess

import pytest
import yaml

from . import promql
from .packages import ROOT, need

HOME = ROOT / "deploy" / "prometheus"
LIMIT_S = 120


def load(name):
    return yaml.safe_load((HOME / name).read_text())


def rules(name):
    return [rule for group in load(name)["groups"] for rule in group["rules"]]


RECORDING, ALERTS = rules("recording.rules.yml"), rules("alerts.rules.yml")
NAMES = [rule["alert"] for rule in ALERTS]
RECORDED = promql.recorded_labels(RECORDING)


def promtool(*arguments):
    tool = need("promtool", "prometheus")
    return subprocess.run([tool, *map(str, arguments)], capture_output=True, text=True, timeout=LIMIT_S)


def scenarios():
    return load("rules_test.yml")["tests"]


@pytest.mark.parametrize("rule", [*RECORDING, *ALERTS], ids=lambda rule: rule.get("alert") or rule["record"])
def test_a_rule_names_only_what_is_in_the_contract(rule):
    assert promql.mistakes(rule["expr"], RECORDED) == []


@pytest.mark.parametrize(
    ("expression", "mistake"),
    [
        ("rate(gpumux_step_total[5m])", "no metric gpumux_step_total"),
        ('gpumux_queue_depth{prio="low"}', "gpumux_queue_depth has no label prio"),
        ("sum by (gpu) (gpumux_sessions)", "nothing here has a label gpu"),
        ('gpumux_job_info{jobid="gpumux_sessions"}', "gpumux_job_info has no label jobid"),
        ("gpumux_step_seconds", "no metric gpumux_step_seconds"),
        ("job:gpumux_slowdwn:ratio", "no metric job:gpumux_slowdwn:ratio"),
        ("vector(1)", "names no metric of gpumux"),
    ],
)
def test_mistakes_are_found(expression, mistake):
    assert mistake in promql.mistakes(expression, RECORDED)


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_an_alert_says_how_bad_it_is_what_happened_and_what_to_do(rule):
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
    assert rule["annotations"]["runbook_url"] == f"runbook.md#{rule['alert'].lower()}"


def test_the_runbook_has_a_section_for_each_alert_and_no_other():
    assert re.findall(r"^## (\w+)$", (HOME / "runbook.md").read_text(), re.MULTILINE) == NAMES


INHIBITIONS = yaml.safe_load((HOME / "alertmanager.yml").read_text())["inhibit_rules"]


def named(matchers):
    """The alerts that a list of matchers names."""
    (matcher,) = matchers
    return [name for name in NAMES if re.fullmatch(re.fullmatch(r'alertname=~?"(.+)"', matcher)[1], name)]


@pytest.mark.parametrize("rule", INHIBITIONS, ids=lambda rule: rule["source_matchers"][0])
def test_an_inhibition_names_alerts_that_there_are_and_labels_that_both_have(rule):
    sources, targets = named(rule["source_matchers"]), named(rule["target_matchers"])
    assert sources
    assert targets
    assert not set(sources) & set(targets)
    for side in ("source_matchers", "target_matchers"):  # each alternative is an alert
        pattern = re.fullmatch(r'alertname=~?"(.+)"', rule[side][0])[1]
        assert len(named(rule[side])) == pattern.count("|") + 1
    labels = {
        check["alertname"]: set(alert["exp_labels"])
        for scenario in scenarios()
        for check in scenario["alert_rule_test"]
        for alert in check.get("exp_alerts", [])
    }
    for name in (*sources, *targets):
        assert set(rule.get("equal", [])) <= labels[name], name


def test_alertmanager_accepts_its_part():
    tool = need("amtool", "prometheus-alertmanager")
    done = subprocess.run(
        [tool, "check-config", HOME / "alertmanager.yml"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(INHIBITIONS)} inhibit rules" in done.stdout


def test_prometheus_accepts_the_configuration_and_the_rules():
    done = promtool("check", "config", HOME / "prometheus.yml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_accepts_the_scrape_job_for_kubernetes(tmp_path):
    """All but the discovery itself, which Debian builds its Prometheus without."""
    file = ROOT / "deploy/kubernetes/prometheus-scrape.yml"
    document = yaml.safe_load(file.read_text())
    assert document["scrape_configs"][0].pop("kubernetes_sd_configs")[0]["role"] == "pod"
    (tmp_path / "scrape.yml").write_text(yaml.safe_dump(document))
    done = promtool("check", "config", "--syntax-only", tmp_path / "scrape.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    ours, theirs = (yaml.safe_load(path.read_text())["scrape_configs"] for path in (file, HOME / "prometheus.yml"))
    assert ours[0]["job_name"] == theirs[0]["job_name"]
    daemon = yaml.safe_load((ROOT / "deploy/kubernetes/daemonset.yaml").read_text())
    container = daemon["spec"]["template"]["spec"]["containers"][0]
    kept = {rule["regex"] for rule in ours[0]["relabel_configs"] if rule.get("action") == "keep"}
    assert kept == {daemon["metadata"]["labels"]["app.kubernetes.io/name"], container["ports"][0]["name"]}


def test_the_rules_pass_their_own_tests():
    done = promtool("test", "rules", HOME / "rules_test.yml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_set_off_and_kept_silent():
    fires, silent = set(), set()
    for scenario in scenarios()[1:]:
        for check in scenario["alert_rule_test"]:
            (fires if check.get("exp_alerts") else silent).add(check["alertname"])
    assert fires == silent == set(NAMES)
    well = scenarios()[0]
    assert {check["alertname"] for check in well["alert_rule_test"]} == set(NAMES)
    assert not any(check.get("exp_alerts") for check in well["alert_rule_test"])


def crossed():
    """Each scenario on top of the machine on which all is well; of all other alerts silence is expected."""
    well, *others = scenarios()
    base = {item["series"]: item for item in well["input_series"]}
    for scenario in others:
        series = base | {item["series"]: item for item in scenario["input_series"]}
        checks = scenario["alert_rule_test"]
        own = {check["alertname"] for check in checks}
        times = {check["eval_time"] for check in checks}
        more = [{"eval_time": time, "alertname": name} for time in sorted(times) for name in NAMES if name not in own]
        yield {**scenario, "input_series": list(series.values()), "alert_rule_test": checks + more}


def run(tmp_path, alerts, tests):
    (tmp_path / "alerts.yml").write_text(alerts)
    document = {
        "rule_files": [str(HOME / "recording.rules.yml"), str(tmp_path / "alerts.yml")],
        "evaluation_interval": "1m",
        "tests": tests,
    }
    (tmp_path / "test.yml").write_text(yaml.safe_dump(document, sort_keys=False))
    return promtool("test", "rules", tmp_path / "test.yml")


def test_a_scenario_sets_off_its_own_alert_and_no_other(tmp_path):
    done = run(tmp_path, (HOME / "alerts.rules.yml").read_text(), list(crossed()))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.every(6)
def test_an_alert_that_is_deaf_or_always_on_is_found_out(tmp_path, name):
    """The scenarios can fail: with the alert broken in either way its own do."""
    own = [test for test in scenarios()[1:] if test["alert_rule_test"][0]["alertname"] == name]
    for broken in ("vector(0) > 1", "vector(1)"):
        rule = next(rule for rule in ALERTS if rule["alert"] == name)
        rule = {key: value for key, value in rule.items() if key != "for"} | {"expr": broken}
        done = run(tmp_path, yaml.safe_dump({"groups": [{"name": "broken", "rules": [rule]}]}), own)
        assert done.returncode != 0
        assert name in done.stdout + done.stderr
