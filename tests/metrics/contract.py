"""Support: the frozen list of metrics, each with its kind and labels, and figures of a small daemon."""

from __future__ import annotations

from gpumux.metrics.gauges import Figures, GangFigures, GuardFigures, JobFigures, PairFigures, PromiseFigures
from gpumux.types import DeviceInfo

# Of a coordinator; tests/coordinator/test_metrics.py compares them with docs/cluster.md.
CLUSTER = {
    "gpumux_cluster_jobs": ("gauge", ("priority", "state")),
    "gpumux_cluster_longest_wait_seconds": ("gauge", ("priority",)),
    "gpumux_cluster_nodes": ("gauge", ("state",)),
    "gpumux_cluster_node_jobs": ("gauge", ("node",)),
    "gpumux_cluster_node_memory_bytes": ("gauge", ("node",)),
    "gpumux_cluster_node_used_bytes": ("gauge", ("node",)),
    "gpumux_cluster_promise_kept": ("gauge", ("node",)),
    "gpumux_cluster_jobs_submitted_total": ("counter", ()),
    "gpumux_cluster_jobs_answered_total": ("counter", ("outcome",)),
    "gpumux_cluster_jobs_started_total": ("counter", ()),
    "gpumux_cluster_jobs_moved_total": ("counter", ()),
    "gpumux_cluster_pairs": ("gauge", ()),
}

# Frozen: changing a line breaks users' dashboards. Add; don't rename.
FROZEN = {
    "gpumux_build_info": ("gauge", ("version",)),
    "gpumux_config_last_reload_successful": ("gauge", ()),
    "gpumux_daemon_start_time_seconds": ("gauge", ()),
    "gpumux_device_info": ("gauge", ("kind", "name", "threads", "torch")),
    "gpumux_device_memory_bytes": ("gauge", ()),
    "gpumux_device_memory_free_bytes": ("gauge", ()),
    "gpumux_dropped_replies_total": ("counter", ()),
    "gpumux_job_device_busy_seconds_total": ("counter", ("job_id",)),
    "gpumux_job_failures_total": ("counter", ("reason",)),
    "gpumux_job_info": ("gauge", ("job_id", "name", "priority", "uid")),
    "gpumux_job_memory_bytes": ("gauge", ("job_id",)),
    "gpumux_job_steps_total": ("counter", ("job_id",)),
    "gpumux_job_models": ("gauge", ("job_id",)),
    "gpumux_peers_wait_seconds_total": ("counter", ("job_id",)),
    "gpumux_collective_bytes_total": ("counter", ("direction", "job_id")),
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
    "gpumux_interference_pairs": ("gauge", ()),
    "gpumux_interference_worst_ratio": ("gauge", ()),
    "gpumux_bans_total": ("counter", ()),
    "gpumux_harvested_device_seconds_total": ("counter", ()),
    "gpumux_held_seconds_total": ("counter", ("reason",)),
    "gpumux_job_baseline_samples": ("gauge", ("job_id",)),
    "gpumux_job_estimate_samples": ("gauge", ("job_id",)),
    "gpumux_job_host_wait_seconds_total": ("counter", ("job_id",)),
    "gpumux_job_memory_measured_bytes": ("gauge", ("job_id",)),
    "gpumux_jobs_outgrown_total": ("counter", ()),
    "gpumux_inconsistencies_total": ("counter", ("scope",)),
    "gpumux_job_promise_broken_seconds": ("gauge", ("job_id",)),
    "gpumux_job_promise_kept": ("gauge", ("job_id",)),
    "gpumux_job_slowdown_p99_ratio": ("gauge", ("job_id",)),
    "gpumux_job_slowdown_ratio": ("gauge", ("job_id",)),
    "gpumux_job_slowdown_target_ratio": ("gauge", ("job_id",)),
    "gpumux_job_solo_step_seconds": ("gauge", ("job_id",)),
    "gpumux_job_steps_over_target_total": ("counter", ("job_id",)),
    "gpumux_transfers_total": ("counter", ("direction",)),
    "gpumux_job_state_snapshot_bytes": ("gauge", ("job_id",)),
    "gpumux_job_state_snapshot_timestamp_seconds": ("gauge", ("job_id",)),
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
PROMISE = PromiseFigures(
    1.05, 1.02, 1.04, True, 3, 0.010, 24, 80, 0.5, "mean 1.02 of 1.05, tail 1.04 of 1.10 in 80 steps: kept", 0.0
)
GANG = GangFigures(0.5, 640, 320)
HIGH = JobFigures("j2", "train", 1000, "high", "open", 2, 1, 4096, 1.5, 7, promise=PROMISE, gang=GANG)
GUARD = GuardFigures(2, 5, 1, 12.5, {"ban": 0.25, "gap": 0.0})


PAIR = PairFigures("3f2a91c0", "9b01dd23", 0.5, 1.25, 0.4)


def figures(*jobs, guard=GUARD):
    return Figures(1.0, DEVICE, jobs, 1, 64, 1 << 30, 1 << 29, {"malformed": 3}, guard, pairs=(PAIR,), pairs_known=40)
