"""The metric contract: docs/metrics.md, the frozen list and the live registry agree."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gpumux.metrics.gauges import GaugeCollector, JobFigures, PromiseFigures
from gpumux.metrics.series import Metrics
from gpumux.types import StepTimes
from gpumux.wire.messages import REGISTRY
from tests.metrics.contract import FROZEN, HIGH, JOB, figures

DOC = Path(__file__).parents[2] / "docs" / "metrics.md"


def metrics_with(snapshot):
    metrics = Metrics(REGISTRY.values())
    metrics.registry.register(GaugeCollector(lambda: snapshot, "1.2.3"))
    return metrics


def touch_everything(metrics):
    metrics.step_done(1, StepTimes(0.001, 0.002, 0.003))
    metrics.step_failed("job_failed")
    metrics.launched(0)
    metrics.rejected("admission_refused")
    metrics.job_opened(0)
    metrics.job_failed("executor_crashed")
    metrics.transferred(True, 5)
    metrics.snapshot_saved(5, 0.1)
    metrics.snapshot_failed("snapshot_failed")


def exposed(metrics):
    """name -> (type, label names), as a scraper sees them."""
    found = {}
    for family in text_string_to_metric_families(generate_latest(metrics.registry).decode()):
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = {key for sample in family.samples for key in sample.labels} - {"le"}
        found[name] = (family.type, tuple(sorted(labels)))
    return found


def documented():
    rows = re.findall(r"^\| `(gpumux_\w+)` \| (\w+) \|([^|]*)\|([^|]*)\|([^|]+)\|$", DOC.read_text(), re.MULTILINE)
    assert all(unit.strip() and meaning.strip() for *_, unit, meaning in rows)
    return {name: (kind, tuple(sorted(re.findall(r"`(\w+)`", labels)))) for name, kind, labels, _, _ in rows}


def test_the_live_registry_is_the_frozen_list():
    metrics = metrics_with(figures(JOB, HIGH))
    touch_everything(metrics)
    assert exposed(metrics) == FROZEN


def test_nothing_but_the_frozen_list_is_on_the_page():
    metrics = metrics_with(figures(JOB, HIGH))
    touch_everything(metrics)
    text = generate_latest(metrics.registry).decode()
    assert "_created" not in text
    series = {re.match(r"\w+", line)[0] for line in text.splitlines() if not line.startswith("#")}
    histograms = {name for name, (kind, _) in FROZEN.items() if kind == "histogram"}
    parts = {name + part for name in histograms for part in ("_bucket", "_sum", "_count")}
    assert series == set(FROZEN) - histograms | parts


def test_the_page_documents_exactly_the_frozen_list():
    assert documented() == FROZEN


def test_a_forgotten_job_leaves_no_series():
    text = generate_latest(metrics_with(figures()).registry).decode()
    assert 'job_id="' in generate_latest(metrics_with(figures(JOB)).registry).decode()
    assert 'job_id="' not in text
    assert "gpumux_sessions 1.0" in text


def test_values_reach_the_page():
    metrics = metrics_with(figures(JOB))
    touch_everything(metrics)
    text = generate_latest(metrics.registry).decode()
    for line in (
        'gpumux_steps_total{priority="high"} 1.0',
        'gpumux_step_seconds_bucket{le="0.005",priority="high"} 1.0',
        'gpumux_step_seconds_bucket{le="0.0025",priority="high"} 0.0',
        'gpumux_job_device_busy_seconds_total{job_id="j1"} 1.5',
        'gpumux_job_info{job_id="j1",name="sweep",priority="low",uid="1000"} 1.0',
        'gpumux_queue_depth{priority="low"} 2.0',
        'gpumux_queue_depth{priority="high"} 0.0',
        'gpumux_jobs{priority="low",state="open"} 1.0',
        'gpumux_protocol_errors_total{reason="malformed"} 3.0',
        'gpumux_build_info{version="1.2.3"} 1.0',
    ):
        assert line in text.splitlines(), line


def test_buckets_span_fifty_microseconds_to_ten_seconds():
    text = generate_latest(metrics_with(figures()).registry).decode()
    edges = [float(e) for e in re.findall(r'gpumux_step_seconds_bucket\{le="([^"]+)",priority="low"\}', text)]
    assert (edges[0], edges[-2], edges[-1]) == (50e-6, 10.0, float("inf"))


def test_a_reason_a_peer_made_up_becomes_other():
    metrics = metrics_with(None)
    metrics.step_failed("<script>")
    metrics.rejected("x" * 1000)
    text = generate_latest(metrics.registry).decode()
    assert 'gpumux_step_failures_total{reason="other"} 1.0' in text
    assert 'gpumux_rejections_total{reason="other"} 1.0' in text
    assert "script" not in text


def test_a_users_job_name_can_not_break_the_page():
    evil = JobFigures("j2", 'a"}\n' + "x" * 1000 + "\x1b[0m", 0, "high", "open", 0, 0, 0, 0.0, 0)
    text = generate_latest(metrics_with(figures(evil)).registry).decode()
    families = {family.name for family in text_string_to_metric_families(text)}
    assert "gpumux_job_info" in families
    (line,) = [line for line in text.splitlines() if line.startswith("gpumux_job_info")]
    assert len(line) < 200
    assert "\x1b" not in line


def test_promises_reach_the_page():
    text = generate_latest(metrics_with(figures(JOB, HIGH)).registry).decode()
    for line in (
        'gpumux_job_slowdown_ratio{job_id="j2"} 1.02',
        'gpumux_job_slowdown_target_ratio{job_id="j2"} 1.05',
        'gpumux_job_promise_kept{job_id="j2"} 1.0',
        'gpumux_job_promise_broken_seconds{job_id="j2"} 0.0',
        'gpumux_job_steps_over_target_total{job_id="j2"} 3.0',
        'gpumux_held_seconds_total{reason="ban"} 0.25',
        'gpumux_held_seconds_total{reason="gap"} 0.0',
        "gpumux_bans_total 5.0",
        "gpumux_harvested_device_seconds_total 12.5",
        "gpumux_interference_pairs 40.0",
        "gpumux_interference_worst_ratio 1.25",
    ):
        assert line in text.splitlines(), line


def test_what_was_not_measured_has_no_series():
    unknown = PromiseFigures(1.05, None, None, True, 0, None, 0, 0, 0.0, "mean ?", 0.0)
    fresh = JobFigures("j3", "new", 1, "high", "open", 0, 0, 0, 0.0, 0, promise=unknown)
    text = generate_latest(metrics_with(figures(fresh, guard=None)).registry).decode()
    assert "gpumux_job_slowdown_ratio{" not in text
    assert "gpumux_job_promise_kept{" not in text
    assert 'gpumux_job_slowdown_target_ratio{job_id="j3"} 1.05' in text
    assert "gpumux_bans_active " not in text.replace("# HELP gpumux_bans_active ", "").replace(
        "# TYPE gpumux_bans_active ", ""
    )
