"""What docs/multiplexing.md, docs/measured.md and the README say was measured of the guard is what lies in
microbench/results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MULTIPLEXING, MEASURED, README = (
    (ROOT / page).read_text() for page in ("docs/multiplexing.md", "docs/measured.md", "README.md")
)


def result(name: str) -> Any:
    return json.loads((ROOT / f"microbench/results/{name}.json").read_text())


def cell(page: str, first: str) -> str:
    """The last cell but the command's of the one row whose first begins so."""
    (row,) = [line for line in page.splitlines() if line.startswith(f"| {first}")]
    return row.strip().strip("|").split("|")[1].strip()


def test_the_sweep():
    pairs = result("sim-sweep")
    feasible = [pair for pair in pairs if pair["feasible"]]
    shares = [pair["harvest_share"] for pair in feasible]
    worst = {key: max(pair[key] for pair in pairs) for key in pairs[0] if key.endswith("slowdown")}
    below = [str(pair["pair"]) for pair in feasible if pair["harvest_share"] < 0.8]
    assert len(pairs) == 100
    assert {pair["seed"] for pair in pairs} == {0}
    assert (
        cell(MULTIPLEXING, "worst mean, worst 99th percentile")
        == f"{worst['mean_slowdown']:.3f}, {worst['p99_slowdown']:.4f}: kept in every one of them"
    )
    assert worst["mean_slowdown"] <= 1.05
    assert worst["p99_slowdown"] <= 1.10
    assert (
        cell(MULTIPLEXING, f"share of the oracle's harvest, mean of the {len(feasible)} feasible pairs")
        == f"{sum(shares) / len(shares):.2f}"
    )
    harvested, possible = (sum(pair[key] for pair in feasible) for key in ("harvest", "oracle_harvest"))
    assert cell(MULTIPLEXING, "of all work") == f"{harvested / possible:.2f}"
    assert cell(MULTIPLEXING, "pairs below 0.80") == f"{len(below)} ({', '.join(below)}); lowest {min(shares):.2f}"
    assert cell(MULTIPLEXING, "worst mean while learning") == f"{worst['learning_mean_slowdown']:.3f}"


def test_the_sweep_of_another_seed():
    pairs = result("sim-sweep-seed-1")
    shares = [pair["harvest_share"] for pair in pairs if pair["feasible"]]
    mean, tail = (max(pair[key] for pair in pairs) for key in ("mean_slowdown", "p99_slowdown"))
    assert (len(pairs), {pair["seed"] for pair in pairs}) == (100, {1})
    assert mean <= 1.05
    assert tail <= 1.10
    told = (
        f"worst mean {mean:.3f}, worst 99th percentile {tail:.4f}; of the {len(shares)} feasible pairs"
        f" {sum(shares) / len(shares):.2f} of the oracle's harvest on average and {sum(s < 0.8 for s in shares)} below"
        " 0.80"
    )
    assert told in " ".join(MULTIPLEXING.split())


def test_the_sweeps_of_further_seeds():
    sweeps = [(seed, result(f"sim-sweep-seed-{seed}")) for seed in (2, 3, 4)]
    assert all({pair["seed"] for pair in pairs} == {seed} and len(pairs) == 100 for seed, pairs in sweeps)
    mean, tail = (max(pair[key] for _, pairs in sweeps for pair in pairs) for key in ("mean_slowdown", "p99_slowdown"))
    assert mean <= 1.05
    assert tail <= 1.10
    shares = [[pair["harvest_share"] for pair in pairs if pair["feasible"]] for _, pairs in sweeps]
    first, second, third = (f"{sum(of) / len(of):.2f}" for of in shares)
    told = f"worst mean {mean:.3f}, worst 99th percentile {tail:.4f}, shares of {first}, {second} and {third}"
    assert told in " ".join(MULTIPLEXING.split())


def test_steps_that_come_at_random():
    rows = result("sim-arrivals")["rows"]
    for at in range(0, len(rows), 3):
        random, regular, paced = rows[at : at + 3]
        assert (random["policy"], random["random"], regular["random"]) == ("guarded", True, False)
        assert paced["policy"] == "paced"
        assert random["mean_slowdown"] <= 1.05
        assert random["p99_slowdown"] <= 1.10
        steps = f"| {random['step_s'] * 1e3:.1f} ms, {random['rate']:.0f} a second |"
        guarded = (
            f"{random['mean_slowdown']:.3f}, {random['p99_slowdown']:.3f} | {random['low']:.2f} | {regular['low']:.2f}"
        )
        other = f"{paced['mean_slowdown']:.2f}, {paced['p99_slowdown']:.2f} | {paced['low']:.2f}"
        assert f"{steps} {guarded} | {other} |" in MULTIPLEXING
    assert len(rows) == 18
    wanted = (2e-3, 100.0, True, "guarded")
    (told,) = [row for row in rows if (row["step_s"], row["rate"], row["random"], row["policy"]) == wanted]
    assert (
        cell(MEASURED, "simulated A100: high steps of 2 ms at random")
        == f"{told['mean_slowdown']:.3f} and {told['p99_slowdown']:.3f}; {told['low']:.2f}"
    )


def test_the_guards_cost():
    forms = [result("cpu-core_rate"), result("cpu-core_rate-interpreted")]
    assert [found["machine"]["core"] for found in forms] == ["compiled", "interpreted"]
    rates, cost, launch, micros = [], [], [], []
    for found in forms:
        paced, guarded = (found["events_per_second"][policy] for policy in ("paced", "guarded"))
        event, of_launch = (
            "{:.1f}, {:.1f} and {:.1f}".format(*[found[key][jobs]["median"] for jobs in ("10", "100", "1000")])
            for key in ("cost", "cost_of_a_launch")
        )
        rates.append(" and ".join(f"{round(paced[jobs]['median'], -3):,.0f}" for jobs in ("100", "1000")))
        cost.append(event)
        launch.append(of_launch)
        both = [[1e6 / of[jobs]["median"] for jobs in ("10", "100", "1000")] for of in (guarded, paced)]
        micros.append(
            "({:.0f} to {:.0f} us against {:.0f} to {:.0f})".format(*[f(of) for of in both for f in (min, max)])
        )
    assert cell(MEASURED, "core events a second of processor time under `paced`") == "; ".join(rates)
    assert cell(MEASURED, "an event under `guarded` over one under `paced`") == "; ".join(cost)
    told = (
        f"{cost[0]} times with 10, 100 and 1,000 jobs where the core is compiled {micros[0]}, {cost[1]} where it is not"
        f" {micros[1]}, " + f"and for a launch {launch[0]} compiled"
    )
    assert told in " ".join(MULTIPLEXING.split())


def test_a_high_job_next_to_a_greedy_one():
    found = result("cpu-priority")["policies"]
    slowdowns = {policy: of["slowdown"]["median"] for policy, of in found.items()}
    low = {policy: of["low_steps_per_s"]["median"] for policy, of in found.items()}
    policies = ["fifo", "streams", "paced", "guarded"]
    assert sorted(policies) == sorted(found)
    said = [f"{slowdowns[each]:.{1 if slowdowns[each] >= 10 else 2}f} `{each}`" for each in policies]
    assert cell(README, "a high job's step beside a greedy low one, over alone") == ", ".join(said)
    assert cell(README, "low steps a second in these runs") == ", ".join(f"{low[each]:.1f}" for each in policies)
    assert slowdowns["guarded"] <= 1.10, "promised"


def test_what_its_parts_are_worth():
    whole_guard, *others = result("sim-guard-parts")["parts"]
    assert whole_guard["part"] == "nothing"
    section = MULTIPLEXING.split("### What its parts are worth")[1].split("###")[0]
    table = [[cell.strip() for cell in line.split("|")[2:5]] for line in section.splitlines() if line.startswith("| ")]
    found = []
    for part in others:
        low = [(one["low"], of_all["low"]) for one, of_all in zip(part["rows"], whole_guard["rows"], strict=True)]
        kept = sum(one for one, _ in low) / sum(of_all for _, of_all in low)
        less = sum(one < 0.5 * of_all for one, of_all in low if of_all > 0.01)
        over = sum(row["mean"] > 1.05 or row["p99"] > 1.10 for row in part["rows"])
        found.append([f"{kept:.2f}", str(less), str(over)])
    assert table[1:] == found
