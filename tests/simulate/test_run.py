"""The simulation: a job alone is not slowed, the same seed is the same run, and its counts add up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpumux.device.sim.cost import Kernel
from gpumux.device.sim.spec import A100, preset
from gpumux.errors import ConfigError
from gpumux.scheduler import events as ev
from gpumux.simulate.result import percentile
from gpumux.simulate.run import Simulation, simulate, solo
from gpumux.types import Priority
from tests.simulate.jobs import step

HIGH, LOW = Priority.HIGH, Priority.LOW
POLICIES = ["fifo", "streams", "paced"]
PAIR = [step("hi", [100e-6] * 12), step("lo", [150e-6] * 10, LOW)]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("graphs", [True, False])
def test_alone_is_alone_under_every_policy(policy: str, graphs: bool) -> None:
    result = simulate([PAIR[0]], A100, policy, steps=30, warmup_steps=5, graphs=graphs)
    (job,) = result.jobs
    assert job.mean_slowdown == pytest.approx(1.0, rel=2e-3)
    assert job.p99_slowdown == pytest.approx(1.0, rel=2e-3)
    assert job.relative_throughput == pytest.approx(1.0, rel=2e-2)
    assert result.harvested_s == 0.0
    assert job.solo.step_s >= job.step_work_s * 0.99


def test_single_launches_cost_host_time_where_kernels_are_short() -> None:
    short = step("short", [3e-6] * 60)
    assert solo(short, A100, graphs=False).step_s > 1.2 * solo(short, A100).step_s


def test_pacing_protects_the_high_job_and_both_get_something() -> None:
    shared = preset("a100+shared-queue")
    found = {policy: simulate(PAIR, shared, policy, steps=60, warmup_steps=10) for policy in POLICIES}
    slowdowns = {policy: result.job("hi").mean_slowdown for policy, result in found.items()}
    assert 1.0 < slowdowns["paced"] < slowdowns["fifo"]
    for result in found.values():
        assert result.job("lo").relative_throughput > 0.05
        assert 0.8 < result.total_throughput < 2.0
        assert result.harvest == pytest.approx(result.harvested_s / result.window_s)
        assert sum(result.busy.sm_seconds.values()) <= result.busy.device_s * A100.sms * (1 + 1e-9)
        assert result.busy.device_s <= result.ended_at


def test_the_same_seed_is_the_same_run_and_another_is_not() -> None:
    jobs = [step("hi", [100e-6] * 4, rate=800.0), PAIR[1]]
    first, again, other = (simulate(jobs, A100, "paced", seconds=0.2, seed=s, timeline=True) for s in (1, 1, 2))
    assert first.figures() == again.figures()
    assert first.timeline == again.timeline
    assert first.job("hi").step_seconds != other.job("hi").step_seconds


def test_a_poisson_client_submits_at_its_rate_and_loses_no_arrival() -> None:
    result = simulate([step("hi", [100e-6] * 4, rate=500.0)], A100, seconds=4.0)
    assert len(result.jobs[0].step_seconds) == pytest.approx(2000, rel=0.1)


def test_a_client_that_thinks_leaves_the_device_idle() -> None:
    result = simulate([step("hi", [100e-6] * 4, think_s=1e-3)], A100, steps=50)
    job = result.jobs[0]
    assert job.mean_slowdown == pytest.approx(1.0, rel=0.02)
    assert result.busy.device_s < 0.35 * result.ended_at


def test_two_low_jobs_share_by_weight() -> None:
    jobs = [step("light", [100e-6] * 5, LOW), step("heavy", [120e-6] * 5, LOW, weight=3.0, max_inflight=8)]
    result = simulate(jobs, A100, seconds=0.5)
    assert result.job("heavy").device_s / result.job("light").device_s == pytest.approx(3.0, rel=0.25)


def test_ends_by_time_by_steps_and_by_interrupt() -> None:
    assert simulate(PAIR, A100, seconds=0.01).ended_at == pytest.approx(0.01)
    counted = simulate(PAIR, A100, steps=7, warmup_steps=3)
    assert counted.job("hi").steps == 7
    assert len(counted.job("hi").step_seconds) == 10
    assert counted.job("hi").warmup == 3
    assert counted.job("lo").warmup == 0
    assert 0 < counted.window_s < counted.ended_at
    simulation = Simulation(PAIR, A100)

    def interrupt() -> None:
        raise KeyboardInterrupt

    simulation.at(0.005, interrupt)
    partial = simulation.run(seconds=1.0)
    assert partial.interrupted
    assert 0 < len(partial.job("hi").step_seconds) < 10
    assert not counted.interrupted
    with pytest.raises(ConfigError, match="without an end"):
        Simulation(PAIR, A100).run()


def test_a_window_that_never_began_has_no_figures_but_the_steps() -> None:
    result = simulate(PAIR, A100, seconds=0.005, warmup_steps=1000)
    assert result.window_s == 0.0
    assert result.job("hi").figures()["mean_slowdown"] is None
    assert result.job("hi").figures()["warmup_slowdown"] > 1.0
    assert result.figures()["total_throughput"] is None


def test_progress_is_reported() -> None:
    heard: list[float] = []
    simulate(PAIR, A100, seconds=0.3, progress=lambda simulation: heard.append(simulation.now))
    assert heard == sorted(heard)
    assert len(heard) > 1


def test_a_job_may_come_later_and_be_paused() -> None:
    simulation = Simulation([PAIR[0], replace(PAIR[1], starts_at=0.02)], A100, timeline=True)
    low = simulation.clients[1]
    simulation.at(0.04, lambda: simulation.feed(ev.PauseRequested(low.id)))
    result = simulation.run(seconds=0.08)
    mine = [row for row in result.timeline if row.job == "lo"]
    assert min(row.started for row in mine) > 0.02
    assert max(row.ended for row in mine) < 0.042


def test_kernels_may_change_under_way_without_notice() -> None:
    simulation = Simulation([PAIR[0]], A100)
    slow = tuple(k._replace(block_s=2 * k.block_s) for k in PAIR[0].kernels)
    simulation.at(0.05, lambda: simulation.change("hi", slow))
    result = simulation.run(seconds=0.1)
    seconds = result.jobs[0].step_seconds
    assert seconds[-1] == pytest.approx(2 * seconds[5], rel=0.02)
    with pytest.raises(ConfigError, match="give as many"):
        simulation.change("hi", slow[1:])


def test_a_recut_is_announced_and_used_by_later_steps() -> None:
    simulation = Simulation([PAIR[0]], A100, timeline=True)
    before = len(simulation.clients[0].cuts[0].seconds)
    simulation.at(0.01, lambda: simulation.recut("hi", (0, 6, 12)))
    result = simulation.run(seconds=0.03)
    by_step: dict[int, int] = {}
    for row in result.timeline:
        by_step[row.step] = by_step.get(row.step, 0) + 1
    assert by_step[1] == before
    assert by_step[max(by_step) - 1] == 2
    for wrong in ((0, 12, 12), (1, 12), (0, 11)):
        with pytest.raises(ConfigError, match="bounds"):
            simulation.recut("hi", wrong)


def test_timeline_rows_are_launches_in_the_order_they_ended() -> None:
    result = simulate(PAIR, A100, seconds=0.02, timeline=True)
    ends = [row.ended for row in result.timeline]
    assert ends == sorted(ends)
    assert {row.job for row in result.timeline} == {"hi", "lo"}
    assert all(row.started < row.ended for row in result.timeline)
    assert simulate(PAIR, A100, seconds=0.02).timeline == []


def test_work_is_conserved() -> None:
    """A job's counted work is that of its answered steps and of the one under way."""
    result = simulate(PAIR, A100, "streams", seconds=0.1)
    for job in result.jobs:
        whole = len(job.step_seconds) * job.step_work_s
        assert whole <= job.work_s + 1e-12 <= whole + 2 * job.step_work_s


def test_the_scheduler_keeps_its_invariants_in_a_simulation() -> None:
    simulation = Simulation([*PAIR, step("lo2", [700e-6, 10e-6], LOW, rate=300.0)], A100)
    for moment in range(1, 40):
        simulation.at(moment * 1e-3, simulation.scheduler.check_invariants)
    simulation.run(seconds=0.04)


def test_names_must_differ_and_policies_exist() -> None:
    with pytest.raises(ConfigError, match="name of its own"):
        Simulation([PAIR[0], PAIR[0]], A100)
    with pytest.raises(ConfigError, match="no policy"):
        Simulation(PAIR, A100, "wishful")


def test_a_kernel_that_can_not_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="blocks"):
        replace(PAIR[0], kernels=(Kernel("k", 0, 1e-4, 1, 0),))


def test_percentiles() -> None:
    assert [percentile(range(1, 101), share) for share in (0.5, 0.99, 1.0)] == [50, 99, 100]
    assert percentile([], 0.5) != percentile([], 0.5)
