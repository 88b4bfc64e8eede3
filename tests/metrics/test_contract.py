"""The metric contract: docs/metrics.md, the frozen list below and the live registry agree."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gpumux.metrics.gauges import Figures, GaugeCollector, GuardFigures, JobFigures, PromiseFigures
from gpumux.metrics.series import Metrics
from gpumux.types import DeviceInfo, StepTimes
from gpumux.wire.messages import REGISTRY

DOC = Path(__file__).parents[2] / "docs" / "metrics.md"

# Frozen: changing a line breaks users' dashboards. Add; don't rename.
FROZEN = {
    "gpumux_build_info": ("gauge", ("version",)),
    "gpumux_config_last_reload_successful": ("gauge", ()),
    "gpumux_daemon_start_time_seconds": ("gauge", ()),
    "gpumux_device_info": ("gauge", ("kind", "name", "threads", "torch")),
    "gpumux_device_memory_bytes": ("gauge", ()),
    "gpumux_device_memory_free_bytes": ("gauge", ()),
    "gpumux_dropped_replies_total": ("counter", ()),
    "gpumux_job_device_busy_seconds_total": ("counter", ("job",)),
    "gpumux_job_failures_total": ("counter", ("reason",)),
    "gpumux_job_info": ("gauge", ("job", "name", "priority", "uid")),
    "gpumux_job_memory_bytes": ("gauge", ("job",)),
    "gpumux_job_steps_total": ("counter", ("job",)),
    "gpumux_job_models": ("gauge", ("job",)),
    "gpumux_jobs": ("gauge", ("priority", "state")),
    "gpumux_jobs_opened_total": ("counter", ("priority",)),
    "gpumux_launches_total": ("counter", ("priority",)),
    "gpumux_loop_busy_seconds_total": ("counter", ()),
    "gpumux_messages_received_total": ("counter", ("type",)),
    "gpumux_outstanding_launches": ("gauge", ("priority",)),
    "gpumux_programs_loaded_total": ("counter", ()),
    "gpumux_protocol_errors_total": ("counter", ("reason",)),
    "gpumux_queue_depth": ("gauge", ("priority",)),
    "gpumux_rejections_total": ("counter", ("reason",)),
    "gpumux_sessions": ("gauge", ()),
    "gpumux_sessions_lost_total": ("counter", ()),
    "gpumux_sessions_opened_total": ("counter", ()),
    "gpumux_shared_memory_bytes": ("gauge", ()),
    "gpumux_snapshot_timestamp_seconds": ("gauge", ()),
    "gpumux_step_device_seconds": ("histogram", ("priority",)),
    "gpumux_step_failures_total": ("counter", ("reason",)),
    "gpumux_step_queue_seconds": ("histogram", ("priority",)),
    "gpumux_step_seconds": ("histogram", ("priority",)),
    "gpumux_steps_total": ("counter", ("priority",)),
    "gpumux_transfer_bytes_total": ("counter", ("direction",)),
    "gpumux_ban_probes_total": ("counter", ()),
    "gpumux_bans_active": ("gauge", ()),
    "gpumux_bans_total": ("counter", ()),
    "gpumux_harvested_device_seconds_total": ("counter", ()),
    "gpumux_held_seconds_total": ("counter", ("reason",)),
    "gpumux_job_baseline_samples": ("gauge", ("job",)),
    "gpumux_job_estimate_samples": ("gauge", ("job",)),
    "gpumux_job_host_wait_seconds_total": ("counter", ("job",)),
    "gpumux_job_memory_measured_bytes": ("gauge", ("job",)),
    "gpumux_jobs_outgrown_total": ("counter", ()),
    "gpumux_job_promise_kept": ("gauge", ("job",)),
    "gpumux_job_slowdown_p99_ratio": ("gauge", ("job",)),
    "gpumux_job_slowdown_ratio": ("gauge", ("job",)),
    "gpumux_job_slowdown_target_ratio": ("gauge", ("job",)),
    "gpumux_job_solo_step_seconds": ("gauge", ("job",)),
    "gpumux_job_steps_over_target_total": ("counter", ("job",)),
    "gpumux_transfers_total": ("counter", ("direction",)),
    "gpumux_job_state_snapshot_bytes": ("gauge", ("job",)),
    "gpumux_job_state_snapshot_timestamp_seconds": ("gauge", ("job",)),
    "gpumux_replayed_steps_total": ("counter", ()),
    "gpumux_restores_total": ("counter", ()),
    "gpumux_state_snapshot_bytes_total": ("counter", ()),
    "gpumux_state_snapshot_failures_total": ("counter", ("reason",)),
    "gpumux_state_snapshot_seconds_total": ("counter", ()),
    "gpumux_state_snapshots_damaged_total": ("counter", ()),
    "gpumux_state_snapshots_read_total": ("counter", ()),
    "gpumux_state_snapshots_total": ("counter", ()),
}

DEVICE = DeviceInfo("cpu", "a CPU", 1 << 30, 2, 1, "2.13", {"low": 0.002})
JOB = JobFigures("j1", "sweep", 1000, "low", "open", 2, 1, 4096, 1.5, 7, saved=1.0, saved_bytes=5, measured_bytes=3000)
PROMISE = PromiseFigures(1.05, 1.02, 1.04, True, 3, 0.010, 24, 80, 0.5)
HIGH = JobFigures("j2", "train", 1000, "high", "open", 2, 1, 4096, 1.5, 7, promise=PROMISE)
GUARD = GuardFigures(2, 5, 1, 12.5, {"ban": 0.25, "gap": 0.0})


def figures(*jobs, guard=GUARD):
    return Figures(1.0, DEVICE, jobs, 1, 64, 1 << 30, 1 << 29, {"malformed": 3}, guard)


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
    assert 'job="' not in text
    assert "gpumux_sessions 1.0" in text


def test_values_reach_the_page():
    metrics = metrics_with(figures(JOB))
    touch_everything(metrics)
    text = generate_latest(metrics.registry).decode()
    for line in (
        'gpumux_steps_total{priority="high"} 1.0',
        'gpumux_step_seconds_bucket{le="0.005",priority="high"} 1.0',
        'gpumux_step_seconds_bucket{le="0.0025",priority="high"} 0.0',
        'gpumux_job_device_busy_seconds_total{job="j1"} 1.5',
        'gpumux_job_info{job="j1",name="sweep",priority="low",uid="1000"} 1.0',
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
        'gpumux_job_slowdown_ratio{job="j2"} 1.02',
        'gpumux_job_slowdown_target_ratio{job="j2"} 1.05',
        'gpumux_job_promise_kept{job="j2"} 1.0',
        'gpumux_job_steps_over_target_total{job="j2"} 3.0',
        'gpumux_held_seconds_total{reason="ban"} 0.25',
        'gpumux_held_seconds_total{reason="gap"} 0.0',
        "gpumux_bans_total 5.0",
        "gpumux_harvested_device_seconds_total 12.5",
    ):
        assert line in text.splitlines(), line


def test_what_was_not_measured_has_no_series():
    unknown = PromiseFigures(1.05, None, None, True, 0, None, 0, 0, 0.0)
    fresh = JobFigures("j3", "new", 1, "high", "open", 0, 0, 0, 0.0, 0, promise=unknown)
    text = generate_latest(metrics_with(figures(fresh, guard=None)).registry).decode()
    assert "gpumux_job_slowdown_ratio{" not in text
    assert "gpumux_job_promise_kept{" not in text
    assert 'gpumux_job_slowdown_target_ratio{job="j3"} 1.05' in text
    assert "gpumux_bans_active " not in text.replace("# HELP gpumux_bans_active ", "").replace(
        "# TYPE gpumux_bans_active ", ""
    )
