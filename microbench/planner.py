"""How quickly burst-parallel plans are found, next to the published search in the same run, and what the plans are
worth.

With --profiles DIR, which holds DeepPool's `profile/*.prof`, the layer times are theirs; without, they are modelled.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from math import inf
from pathlib import Path
from typing import Any, TypeAlias

from gpumux.device.sim.spec import A100
from gpumux.errors import ConfigError
from gpumux.plan import branches as splits
from gpumux.plan import costs, deeppool, optimal
from gpumux.plan import measure as roofline
from gpumux.plan import plan as rules
from gpumux.plan.costs import Costs, ProfiledCosts, powers_of_two, preset
from gpumux.plan.graph import LayerGraph, reduce
from gpumux.plan.layers import LayerProfile, ModelProfile, Timing
from gpumux.plan.models import find
from gpumux.plan.plan import Placement, evaluate
from gpumux.plan.query import PlanQuery
from gpumux.plan.trace import trace
from microbench import a100, common

FASTER = 10.0  # times as fast as published, wanted
CHAIN_S = 1.0  # for 1,000 layers on 1,024 GPUs, wanted at most
LIMITS = (1.5, 2.0, 4.0, inf)
SIZES = (8, 1024)
TURN_S = 0.03
LONG_S = 12.0  # turns that take longer together stop early, after three

Search: TypeAlias = Callable[[LayerGraph, Costs, float, int], Placement]


def main(argv: Sequence[str] | None = None) -> int:
    arguments = common.parser(__doc__)
    arguments.add_argument("--profiles", type=Path, metavar="DIR", help="where DeepPool's A100_*.prof lie")
    arguments.add_argument("--repeats", type=int, default=9)
    arguments.add_argument("--models", nargs="+", choices=list(a100.MODELS), default=list(a100.MODELS))
    arguments.add_argument("--sizes", nargs="+", type=int, default=list(SIZES), metavar="GPUS")
    arguments.add_argument("--limit", type=float, default=2.0)
    arguments.add_argument("--layers", type=int, default=1000, help="of the long chain")
    args = arguments.parse_args(argv)
    machine = common.machine()
    print(common.describe(machine))
    report: dict[str, Any] = {"machine": machine, "limit": args.limit, "models": {}, "targets": {}}
    rows, gains = [], []
    for name in args.models:
        profile = a100.profile(args.profiles, name) if args.profiles else modelled(name)
        graph = reduce(profile)
        found: dict[str, Any] = {"sources": profile.sources(), "layers": len(graph.layers), "blocks": graph.blocks}
        for size, gpus in enumerate(args.sizes):
            batch = a100.MODELS[name].batch * max(1, gpus // 8)
            timed = searches(graph, gpus, batch, args.limit, args.repeats)
            found[str(gpus)] = timed
            ratio = timed["ratio"]
            printed = a100.MODELS[name].paper[size] if gpus in SIZES else None
            rows.append(
                [f"{name}, {gpus} GPUs", _ms(timed["optimal_s"]), _ms(timed["first_s"]), _ms(timed["deeppool_s"]),
                 f"{ratio.median:.1f}", f"{ratio.low:.1f}-{ratio.high:.1f}", f"{timed['first_ratio'].median:.1f}",
                 f"{timed['looked_up_ratio'].median:.1f}", "-" if printed is None else f"{printed * 1e3:.0f} ms",
                 f"{timed['iteration_s']['optimal'] * 1e3:.3f}", f"{timed['iteration_s']['deeppool'] * 1e3:.3f}",
                 str(timed["deeppool_over_limit"])]
            )  # fmt: skip
            for what, each in (("optimal", ratio), ("the first search", timed["first_ratio"])):
                report["targets"][f"{name} on {gpus}: {what} over deeppool"] = {
                    "value": each.median, "target": FASTER, "met": each.median >= FASTER,
                }  # fmt: skip
        found["gains"] = worth(graph, a100.MODELS[name].batch, args.sizes[0])
        for each in found["gains"]:
            gains.append([f"{name}, limit {each['limit'] or 'none'}", f"{each['data_parallel_s'] * 1e3:.3f}",
                          f"{each['burst_s'] * 1e3:.3f}", f"{each['gain']:.2f}", f"{each['idle']:.0%}",
                          a100.MODELS[name].reported])  # fmt: skip
        report["models"][name] = found
    chain = long_chain(args.layers, args.repeats)
    report["chain"] = chain
    report["targets"][f"a chain of {args.layers} layers on 1,024 GPUs, seconds"] = {
        "value": chain["optimal_s"].median, "target": CHAIN_S, "met": chain["optimal_s"].median <= CHAIN_S,
    }  # fmt: skip
    header = (
        "model",
        "optimal",
        "the first time",
        "deeppool",
        "ratio",
        "spread",
        "first",
        "over tables",
        "table 3",
        "plan ms",
        "deeppool's",
        "over limit",
    )
    print(common.table(header, rows))
    print(
        f"\na chain of {args.layers} layers on 1,024 GPUs: {_ms(chain['optimal_s'])}, published"
        f" {_ms(chain['deeppool_s'])}\n"
    )
    print(
        common.table(("8 GPUs as in figure 9", "DP ms", "burst ms", "gain", "idle", "the paper on burst alone"), gains)
    )
    common.report("planner", args.out, report)
    return 0


def _ms(figure: common.Figure) -> str:
    return f"{figure.median * 1e3:.3f} ms"


def modelled(name: str) -> ModelProfile:
    """The same model with times by the roofline."""
    model = a100.MODELS[name]
    return roofline.roofline_profile(trace(find(name, model.shape), whole=model.whole), A100)


def searches(graph: LayerGraph, gpus: int, batch: int, limit: float, repeats: int) -> dict[str, Any]:
    """Both searches in turns, from profiles in memory to a plan. `first_s`: ours with all it keeps between searches
    gone."""
    model = ProfiledCosts(graph, batch, powers_of_two(gpus), preset("nvswitch"))
    ways: dict[str, tuple[Search, Costs]] = {
        "optimal": (optimal.search, model),
        "first": (optimal.search, model),
        "deeppool": (deeppool.search, model),
        "looked_up": (deeppool.search, LookedUp(model)),
    }
    samples: dict[str, list[float]] = {name: [] for name in ways}
    placements = {name: search(graph, given, limit, gpus) for name, (search, given) in ways.items()}
    began = time.monotonic()
    for done in range(repeats):
        if done >= 3 and time.monotonic() - began > LONG_S:
            break
        for name, (search, given) in ways.items():
            samples[name].append(turn(search, graph, given, limit, gpus, forgetting=name == "first"))
    plans = {
        name: evaluate(graph, model, placements[name], gpus=gpus, batch=batch, limit=limit)
        for name in ("optimal", "deeppool")
    }
    return {
        **{f"{name}_s": common.figure(each) for name, each in samples.items()},
        "ratio": common.figure([a / b for a, b in zip(samples["deeppool"], samples["optimal"], strict=True)]),
        "looked_up_ratio": common.figure(
            [a / b for a, b in zip(samples["looked_up"], samples["optimal"], strict=True)]
        ),
        "first_ratio": common.figure([a / b for a, b in zip(samples["deeppool"], samples["first"], strict=True)]),
        "samples": samples,
        "global_batch": batch,
        "iteration_s": {name: plan.seconds for name, plan in plans.items()},
        "deeppool_over_limit": len(plans["deeppool"].over_limit()),
        "optimal_over_limit": len(plans["optimal"].over_limit()),
    }


class LookedUp:
    """Costs that are computed once: what the published search would take with ready tables."""

    def __init__(self, costs: ProfiledCosts) -> None:
        self.counts, self.tables = costs.counts, costs.tables
        self.comp, self.sync = lru_cache(None)(costs.comp), lru_cache(None)(costs.sync)
        self.comm, self.moved = lru_cache(None)(costs.comm), lru_cache(None)(costs.moved)


def turn(search: Search, graph: LayerGraph, given: Costs, limit: float, gpus: int, *, forgetting: bool) -> float:
    """Seconds of the processor for one search, over as many as fit into TURN_S, at least one: its caches know either
    search then. Time in which others had the processor is not counted; both searches are one thread. `forgetting`:
    before each, what our search keeps from one time to the next is dropped."""
    spent, searches = 0.0, 0
    while spent < TURN_S or not searches:
        if forgetting:
            forget()
            graph, given = anew(graph, given)
        began = time.thread_time()
        search(graph, given, limit, gpus)
        spent += time.thread_time() - began
        searches += 1
    return spent / searches


def forget() -> None:
    """Drop what our search keeps beside the graph."""
    for kept in (costs._shares, rules._inverse, splits.splits_table, splits._parts):
        kept.cache_clear()


def anew(graph: LayerGraph, model: Costs) -> tuple[LayerGraph, ProfiledCosts]:
    """The same, without what a graph keeps of itself."""
    assert isinstance(model, ProfiledCosts)
    made = replace(graph)
    return made, replace(model, graph=made)


def worth(graph: LayerGraph, batch: int, gpus: int) -> list[dict[str, Any]]:
    """Burst parallelism over data parallelism, as the model has it."""
    network = preset("nvswitch")
    query = PlanQuery(graph, batch, gpus, powers_of_two(gpus), network)
    plain = query.data_parallel(gpus)
    found = []
    for limit in LIMITS:
        plan = replace(query, limit=limit).plan()
        found.append(
            {"limit": None if limit == inf else limit, "data_parallel_s": plain.seconds, "burst_s": plan.seconds,
             "gain": plain.seconds / plan.seconds, "idle": plan.idle / (gpus * plan.seconds)}
        )  # fmt: skip
    return found


def long_chain(layers: int, repeats: int) -> dict[str, Any]:
    """Random layers one behind the other, on 1,024 GPUs."""
    draws = random.Random(0)
    made = []
    for i in range(layers):
        base, rate = draws.uniform(1e-5, 2e-4), draws.uniform(1e-6, 4e-5)
        times = tuple(Timing(n, base + rate * n, 2 * (base + rate * n)) for n in (1, 2, 4, 8, 16, 32, 64))
        before = (f"l{i - 1}",) if i else ()
        made.append(
            LayerProfile(f"l{i}", "random", before, draws.randint(1, 800) << 10, draws.randint(0, 30) << 20, times)
        )
    graph = reduce(ModelProfile("chain", "none", tuple(made)))
    return searches(graph, 1024, 1024, 2.0, min(3, repeats)) | {"layers": layers}


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigError as error:
        print(f"{error.message}: {error.remedy}", file=sys.stderr)
        sys.exit(78)
