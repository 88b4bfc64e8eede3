"""The searches against an exhaustive one, and against each other."""

from __future__ import annotations

from math import inf
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumux.errors import ConfigError
from gpumux.plan import branches, deeppool, optimal
from gpumux.plan.costs import Costs, GivenCosts, Network, ProfiledCosts, powers_of_two
from gpumux.plan.graph import LayerGraph
from gpumux.plan.layers import LayerProfile, Timing
from gpumux.plan.plan import BurstPlan, evaluate
from tests.plan.graphs import Amounts, brute_force, chain_graph, layer, random_chain, random_costs, random_graph, times

LIMITS = (1.0, 1.25, 1.5, 2.0, 3.0, 8.0, inf)
COUNTS = ((1, 2), (1, 2, 4), (1, 2, 3), (2, 4), (1, 4))


def planned(search, graph: LayerGraph, costs: Costs, limit: float, gpus: int) -> BurstPlan:
    return evaluate(graph, costs, search.search(graph, costs, limit, gpus), gpus=gpus, batch=1, limit=limit)


def check_against_everything(
    graph: LayerGraph, costs: Costs, limit: float, gpus: int
) -> tuple[BurstPlan, BurstPlan] | None:
    """The optimum is what trying everything finds, to the last bit, and the published search is never better, but by
    going over the limit; then no worse than the optimum under the limit it really kept. None: no plan keeps it."""
    amounts = Amounts(graph, costs)
    least = brute_force(amounts, limit, gpus)
    if least == inf:
        with pytest.raises(ConfigError, match="no plan"):
            optimal.search(graph, costs, limit, gpus)
        return None
    ours, theirs = (planned(search, graph, costs, limit, gpus) for search in (optimal, deeppool))
    assert ours.seconds == least
    assert not ours.over_limit()
    for plan in (ours, theirs):
        assert (plan.seconds, list(plan.times), plan.width) == times(amounts, plan.placement)
        check_rows(plan)
    if theirs.over_limit():
        reached = max(a for a in theirs.amplification if a is not None)
        if reached < inf:
            assert planned(optimal, graph, costs, max(limit, reached), gpus).seconds <= theirs.seconds
    else:
        assert ours.seconds <= theirs.seconds
    return ours, theirs


def check_rows(plan: BurstPlan) -> None:
    """No GPU does two things at once, none exists beyond the cluster, and nothing happens after the end."""
    for place, row in enumerate(plan.rows):
        assert row.first >= 0
        assert row.first + row.gpus <= plan.gpus
        assert row.end <= plan.seconds
        for other in plan.rows[place + 1 :]:
            apart = other.first >= row.first + row.gpus or row.first >= other.first + other.gpus
            assert apart or other.start >= row.end or row.start >= other.end
    assert plan.idle >= 0


@pytest.mark.slow
def test_the_optimum_is_what_trying_everything_finds():
    """2,200 random chains and branch-join graphs."""
    differ, exceed, side_by_side = 0, 0, 0
    for seed in range(2200):
        random = Random(seed)
        counts = random.choice(COUNTS)
        graph = random_graph(random, 6 if len(counts) == 2 else 5) if seed % 3 else random_chain(random, 5)
        costs = random_costs(random, len(graph.layers), counts)
        found = check_against_everything(graph, costs, random.choice(LIMITS), counts[-1] + random.choice((0, 0, 1, 2)))
        if found is not None:
            ours, theirs = found
            differ += not theirs.over_limit() and ours.seconds < theirs.seconds
            exceed += bool(theirs.over_limit())
            side_by_side += bool(ours.placement.away)
    assert min(differ, exceed, side_by_side) > 50  # the cases that matter are among them


def test_what_is_worked_out_a_bit_at_a_time_is_the_same(monkeypatch: pytest.MonkeyPatch):
    """Arrays are split if they would be large; here all are."""
    for module in (branches, branches):
        monkeypatch.setattr(module, "CHUNK", 1)
    for seed in range(120):
        random = Random(seed)
        counts = random.choice(COUNTS)
        graph = random_graph(random, 5)
        costs = random_costs(random, len(graph.layers), counts)
        check_against_everything(graph, costs, random.choice(LIMITS), counts[-1] + random.choice((0, 1)))


@given(st.data())
@settings(max_examples=75)
def test_the_optimum_is_exact_for_whatever_graph(data: st.DataObject):
    random = data.draw(st.randoms(use_true_random=False))
    counts = data.draw(st.sampled_from(COUNTS))
    graph = random_graph(random, 6 if len(counts) == 2 else 5)
    costs = random_costs(random, len(graph.layers), counts, scale=data.draw(st.integers(1, 200)))
    limit = data.draw(st.sampled_from(LIMITS) | st.floats(1, 20))
    check_against_everything(graph, costs, limit, counts[-1] + data.draw(st.integers(0, 3)))


@given(st.randoms(use_true_random=False), st.sampled_from(LIMITS), st.sampled_from((0.0, 0.5)))
@settings(max_examples=75)
def test_costs_of_the_network_model_are_searched_exactly_too(random: Random, limit: float, overlap: float):
    """Whole numbers again: they stay exact under powers of two. This is the way of few counts and no blocks."""
    layers = tuple(
        LayerProfile(f"l{i}", "Linear", (), random.choice((0, 1, 2, 16)), random.choice((0, 0, 4, 64)),
                     tuple(Timing(n, base + rate * n, 2.0 * (base + rate * n)) for n in (1, 2, 4)))
        for i in range(random.randint(1, 5))
        for base, rate in [(float(random.randint(0, 9)), float(random.choice((0, 1, 5, 30))))]
    )  # fmt: skip
    graph = LayerGraph("random", "none", layers, tuple(range(len(layers))))
    costs = ProfiledCosts(graph, 4, (1, 2, 4), Network("n", 2.0, float(random.choice((0, 1)))), overlap)
    tables = costs.tables()
    for i in range(len(layers)):
        assert tables.single[i] == costs.comp(i, 1)
        for a, g in enumerate(costs.counts):
            assert tables.work[i, a] == costs.comp(i, g) + costs.sync(i, g)
            for b, h in enumerate(costs.counts):
                assert tables.comm([i])[0, a, b] == costs.comm(i, g, h)
                assert tables.transfers([i])[0, 1, a, b] == costs.moved(i, g, h)
    check_against_everything(graph, costs, limit, 4)


@given(st.randoms(use_true_random=False), st.integers(2, 25))
@settings(max_examples=40)
def test_long_chains_are_no_worse_than_published(random: Random, length: int):
    counts = (1, 2, 4, 8, 16, 32, 64, 128)
    graph, costs = chain_graph(length), random_costs(random, length, counts, scale=5000)
    for limit in (1.0, 1.5, 3.0, inf):
        ours, theirs = (planned(search, graph, costs, limit, 128) for search in (optimal, deeppool))
        assert not ours.over_limit()
        assert theirs.over_limit() or ours.seconds <= theirs.seconds
        if limit == inf:
            assert ours.seconds == theirs.seconds  # without a limit both are shortest paths


def strict_example() -> tuple[LayerGraph, GivenCosts]:
    """The example of docs/planning.md. Under a limit of 4, layer 1 is reached soonest on 2 GPUs from 1, but that path
    exceeds the limit (7 s on 2 GPUs, 3 s alone); from 2 GPUs it keeps the limit, 3 s later. Algorithm 1 keeps only the
    first path."""
    graph = LayerGraph("example", "none", tuple(layer(f"l{i}") for i in range(3)), (0, 1, 2))
    single = np.array([10.0, 3.0, 40.0])
    compute = np.array([[10.0, 9.0], [3.0, 2.0], [40.0, 20.0]])
    gradients = np.array([[0.0, 9.0], [0.0, 0.0], [0.0, 0.0]])
    between = np.zeros((3, 2, 2))
    between[0, 0, 1] = between[0, 1, 0] = 5.0
    between[1, 0, 1] = between[1, 1, 0] = 30.0
    return graph, GivenCosts((1, 2), compute, gradients, single, between, between)


def test_the_documented_example_where_published_is_not_optimal():
    graph, costs = strict_example()
    ours, theirs = (planned(search, graph, costs, 4.0, 2) for search in (optimal, deeppool))
    assert (ours.seconds, ours.placement.gpus, ours.over_limit()) == (40.0, (2, 2, 2), ())
    assert (theirs.seconds, theirs.placement.gpus, theirs.over_limit()) == (53.0, (1, 1, 1), ())


def test_published_may_exceed_the_limit():
    """The other example there: every way Algorithm 1 keeps to the last layer exceeds the limit, and one GPU would
    not."""
    graph = chain_graph(2)
    single, compute = np.array([10.0, 1.0]), np.array([[10.0, 5.0], [1.0, 2.0]])
    between = np.zeros((2, 2, 2))
    between[0, 0, 1], between[0, 1, 0] = 2.0, 4.0
    costs = GivenCosts((1, 2), compute, np.zeros((2, 2)), single, between, between)
    ours, theirs = (planned(search, graph, costs, 2.0, 2) for search in (optimal, deeppool))
    assert (ours.placement.gpus, ours.seconds, ours.over_limit()) == ((1, 1), 11.0, ())
    assert (theirs.placement.gpus, theirs.seconds, theirs.over_limit()) == ((2, 2), 7.0, (1,))
    assert theirs.amplification == (1.0, 4.0)


def test_a_limit_below_one_is_refused():
    graph, costs = strict_example()
    for limit in (0.5, float("nan")):
        with pytest.raises(ConfigError, match="amplification limit"):
            optimal.search(graph, costs, limit, 2)


def test_a_long_chain_takes_memory_linear_in_layers():
    """Only the edges of a chunk of layers are held beside the tables and one row a layer."""
    import tracemalloc

    def peak(length: int) -> int:
        layers = tuple(layer(f"l{i}", seconds=float(i % 7 + 1)) for i in range(length))
        graph = LayerGraph("long", "none", layers, tuple(range(length)))
        costs = ProfiledCosts(graph, 1024, powers_of_two(1024), Network("n", 1e3, 0.1))
        optimal.search(graph, costs, 2.0, 1024)  # what is kept with the graph is made now
        tracemalloc.start()
        optimal.search(graph, costs, 2.0, 1024)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    assert peak(5000) < 2.5 * peak(2500)
