"""The dashboard names only what exists, answers the main question first, and its files fit together."""

from __future__ import annotations

import re

import pytest
import yaml

from tests.metrics.contract import FROZEN

from . import dashboard, promql
from .packages import ROOT
from .test_prometheus import RECORDED

HOME = ROOT / "deploy" / "grafana"
QUERIES = list(dashboard.queries())


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.panel)
def test_a_query_names_only_what_is_in_the_contract(query):
    assert promql.mistakes(query.expression, RECORDED) == []
    assert "$" not in query.expression, "a variable the test does not know"


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.panel)
def test_a_legend_names_labels_that_are_there(query):
    possible = set().union(*(promql.labels_of(s.metric, RECORDED) for s in promql.selectors(query.expression)))
    assert set(re.findall(r"{{(\w+)}}", query.legend)) <= possible


def test_the_variables_query_names_what_exists():
    (variable,) = [v for v in dashboard.load()["templating"]["list"] if v["type"] == "query"]
    metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"]).groups()
    assert label in promql.labels_of(metric, RECORDED)


def test_the_first_row_answers_the_main_question():
    everything = dashboard.load()["panels"]
    assert everything[0]["type"] == "row"
    end = next(i for i, panel in enumerate(everything) if i and panel["type"] == "row")
    shown = " ".join(target["expr"] for panel in everything[1:end] for target in panel["targets"])
    for metric in (
        "job:gpumux_promise_kept:bool",
        "job:gpumux_slowdown:ratio",
        "instance:gpumux_harvested_device:rate5m",
    ):
        assert metric in shown


def test_panels_do_not_overlap_and_ids_are_unique():
    taken, ids = set(), []
    for panel in dashboard.load()["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {(at["x"] + dx, at["y"] + dy) for dx in range(at["w"]) for dy in range(at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
        ids.append(panel["id"])
    assert len(set(ids)) == len(ids)


def test_every_metric_an_operator_acts_on_is_shown_or_alerted():
    """Not all of the contract belongs on the dashboard; what is left out is a choice, made here."""
    texts = [q.expression for q in QUERIES]
    for name in ("recording.rules.yml", "alerts.rules.yml"):
        texts += [
            r["expr"]
            for g in yaml.safe_load((ROOT / "deploy/prometheus" / name).read_text())["groups"]
            for r in g["rules"]
        ]
    used = {re.sub(r"_(bucket|sum|count)$", "", s.metric) if s.metric not in FROZEN else s.metric
            for text in texts for s in promql.selectors(text)}  # fmt: skip
    left_out = {
        "gpumux_build_info", "gpumux_job_baseline_samples", "gpumux_job_estimate_samples",
        "gpumux_interference_pairs", "gpumux_interference_worst_ratio", "gpumux_job_promise_broken_seconds",
        "gpumux_job_host_wait_seconds_total", "gpumux_job_models", "gpumux_job_solo_step_seconds",
        "gpumux_job_steps_over_target_total", "gpumux_jobs_opened_total", "gpumux_messages_received_total",
        "gpumux_programs_loaded_total", "gpumux_sessions_opened_total", "gpumux_step_device_seconds",
        "gpumux_transfer_bytes_total", "gpumux_transfers_total", "gpumux_job_state_snapshot_bytes",
        "gpumux_job_state_snapshot_timestamp_seconds", "gpumux_replayed_steps_total", "gpumux_restores_total",
        "gpumux_state_snapshot_bytes_total", "gpumux_state_snapshot_seconds_total", "gpumux_state_snapshots_read_total",
        "gpumux_state_snapshots_total", "gpumux_peers_wait_seconds_total", "gpumux_collective_bytes_total",
    }  # fmt: skip
    assert set(FROZEN) - used == left_out


def test_the_provisioning_files_fit_together():
    sources = yaml.safe_load((HOME / "provisioning/datasources/gpumux.yml").read_text())["datasources"]
    assert [source["type"] for source in sources] == ["prometheus"]
    (provider,) = yaml.safe_load((HOME / "provisioning/dashboards/gpumux.yml").read_text())["providers"]
    readme = (HOME / "README.md").read_text()
    assert f"{provider['options']['path']}/gpumux.json" in readme
