"""From layers to a chain of layers and blocks, and graphs of another form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumux.errors import ConfigError
from gpumux.plan.costs import Network, ProfiledCosts, away_share, divisors, moved_share, powers_of_two, preset
from gpumux.plan.graph import MAX_BRANCHES, Block, members, reduce
from gpumux.plan.layers import LayerProfile, ModelProfile, Timing, dumps, load, loads, save
from gpumux.plan.query import PlanQuery
from tests.plan.graphs import layer


def graph(*layers: LayerProfile):
    return reduce(ModelProfile("m", "d", layers))


def test_chains_skips_and_nested_blocks():
    found = graph(
        layer("a"), layer("b", "a"), layer("c", "b"), layer("d", "b"), layer("e", "c", "d"), layer("f", "a", "e"),
        layer("g", "f")
    )  # fmt: skip
    assert found.chain == (0, Block(0, ((1, Block(1, ((2,), (3,))), 4), ())), 5, 6)
    assert found.blocks == 2
    assert found.notes == ()


def test_several_inputs_and_results_get_a_common_layer_that_costs_nothing():
    found = graph(layer("a"), layer("b"), layer("c", "a", "b"), layer("d", "c"), layer("e", "c"))
    names = [each.name for each in found.layers]
    assert (names[0], names[-1]) == ("inputs", "outputs")
    assert found.layers[0].times[0].seconds == found.layers[-1].times[0].seconds == 0
    assert found.chain == (0, Block(0, ((1,), (2,))), 3, Block(1, ((4,), (5,))), 6)


def test_what_is_no_block_is_merged_and_said_so():
    """A way from one branch into the middle of another."""
    found = graph(layer("a"), layer("b", "a"), layer("c", "a"), layer("d", "b", "c"), layer("e", "b", "d"))
    assert [each.name for each in found.layers] == ["a", "b..d", "e"]
    assert found.chain == (0, 1, 2)
    (merged,) = [each for each in found.layers if each.kind == "merged"]
    assert merged.times == (Timing(1, 3.0, 6.0),)
    assert merged.parameter_bytes == 12
    assert "counts as one layer" in found.notes[0]


def test_branches_that_meet_before_the_others_get_a_fork_of_their_own():
    """Queries and keys meet in the scores, and the values join them later."""
    found = graph(
        layer("x", output_bytes=24), layer("q", "x"), layer("k", "x"), layer("v", "x"), layer("scores", "q", "k"),
        layer("values", "scores", "v"), layer("out", "values"),
    )  # fmt: skip
    assert [each.name for each in found.layers] == ["x", "x.parting", "q", "k", "v", "scores", "values", "out"]
    parting = found.layers[1]
    assert (parting.output_bytes, parting.parameter_bytes, parting.times[0].seconds) == (24, 0, 0.0)
    assert found.chain == (0, Block(0, ((1, Block(1, ((2,), (3,))), 5), (4,))), 6, 7)
    assert found.notes == ()


def test_a_fork_of_their_own_moves_no_samples():
    """The inserted layer takes no time and has no place of its own, so the plan is as good as without it."""
    attention = [timed("x", 1), timed("q", 4, "x"), timed("k", 4, "x"), timed("v", 8, "x"),
                 timed("scores", 1, "q", "k"),
                 timed("values", 1, "scores", "v")]  # fmt: skip
    found = PlanQuery(graph(*attention), 4, 4, (1, 2, 4), Network("n", 1e6, 0.01), 2.0).plan()
    places = {each.name: found.placement.gpus[i] for i, each in enumerate(found.graph.layers)}
    assert places["x.parting"] == places["x"]
    assert not found.over_limit()
    assert found.placement.away  # the values run beside the queries and keys
    assert not any(row.comm for row in found.rows if found.graph.layers[row.layer].name == "x.parting")


def timed(name: str, seconds: float, *inputs: str) -> LayerProfile:
    """No quicker on more GPUs."""
    return layer(name, *inputs, times=tuple(Timing(n, seconds, seconds) for n in (1, 2, 4)), parameter_bytes=0)


def test_what_is_merged_is_called_as_the_module_around_it():
    found = graph(
        layer("a"), layer("net.inner.b", "a"), layer("net.inner.c", "a"),
        layer("net.inner.d", "net.inner.b", "net.inner.c"),
        layer("e", "net.inner.b", "net.inner.d"),
    )  # fmt: skip
    assert [each.name for each in found.layers] == ["a", "net.inner", "e"]
    assert found.notes[0].startswith("net.inner (3 layers between a and e)")


def test_more_branches_than_can_be_searched_are_merged():
    wide = [layer(f"b{i}", "a") for i in range(MAX_BRANCHES + 1)]
    found = graph(layer("a"), *wide, layer("z", *(each.name for each in wide)))
    assert len(found.layers) == 3
    assert "more than" in found.notes[0]


def test_a_block_that_ends_where_the_one_around_it_does():
    found = graph(layer("a"), layer("b", "a"), layer("c", "b"), layer("d", "b"), layer("e", "a", "c", "d"))
    assert [each.name for each in found.layers] == ["a", "b", "c..d", "e"]
    assert found.chain == (0, Block(0, ((1, 2), ())), 3)


def test_profiles_survive_a_file(tmp_path):
    profile = ModelProfile(
        "m", "a100", (layer("a"), layer("b", "a", flops=1.5)), {"torch": "2"}, "2026-01-02T03:04:05Z", "n"
    )
    save(profile, tmp_path / "p.json")
    assert load(tmp_path / "p.json") == profile
    assert profile.sources() == {"model": 2}


def test_times_that_fall_with_the_batch_are_said():
    steady = tuple(Timing(n, 1.0 + n, 2.0) for n in (1, 2, 4))
    assert not ModelProfile("m", "a100", (replace(layer("a"), times=steady),)).unsteady()
    shaken = (steady[0], Timing(2, 30.0, 2.0), steady[2])
    said = ModelProfile("m", "a100", (replace(layer("a"), times=shaken),)).unsteady()
    assert "batches of 2 took 4.6 times as long as batches of 4" in said


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (('"gpumux-layers"', '"gpumux-other"'), "no profile"),
        (('"gpumux-layers"', '"gpumux-profile"'), "the profile of a step"),
        (('"version": 1', '"version": 2'), "version 2"),
        (('"B a sample"', '"KiB"'), "units"),
        (('"kind": "Linear", ', ""), "lacks 'kind'"),
        (('"kind"', '"sort"'), "unknown key"),
        (('"times": [[1, 1.0, 2.0]]', '"times": [[1, 1.0]]'), "samples, forward, backward"),
        (('"times": [[1, 1.0, 2.0]]', '"times": []'), "no times"),
        (('"times": [[1, 1.0, 2.0]]', '"times": [[2, 1, 1], [1, 1, 1]]'), "rising"),
        (('"times": [[1, 1.0, 2.0]]', '"times": [[1, -1.0, 2.0]]'), "negative"),
        (('"inputs": ["a"]', '"inputs": ["x"]'), "no earlier layer"),
        (('"name": "b"', '"name": "a"'), "called 'a'"),
        (('"source": "model"', '"source": "hearsay"'), "source"),
    ],
)
def test_a_wrong_file_is_refused_by_place(change, says):
    text = dumps(ModelProfile("m", "a100", (layer("a"), layer("b", "a"))))
    assert change[0] in text
    with pytest.raises(ConfigError, match=says):
        loads(text.replace(*change))


def test_times_lie_on_lines_between_and_in_proportion_above():
    profile = layer("a", times=(Timing(2, 2.0, 4.0), Timing(4, 3.0, 6.0)))
    assert profile.at(3) == Timing(3, 2.5, 5.0)
    assert profile.at(8) == Timing(8, 6.0, 12.0)
    with pytest.raises(ConfigError, match="smallest batch is 2"):
        profile.at(1)


def test_samples_move_as_far_as_they_must():
    assert moved_share(2, 2) == 0
    assert moved_share(1, 4) == moved_share(4, 1) == 3 / 4  # the one that has all keeps a quarter
    assert moved_share(2, 4) == 1 / 4
    assert moved_share(3, 4) == 1 / 4  # the new one receives its whole share
    assert away_share(2, 4) == away_share(4, 2) == 1 / 2
    link = Network("n", 10.0, 1.0)
    assert link.all_reduce(40, 4) == 2 * (30 / 10 + 1)
    assert link.all_reduce(40, 1) == link.all_reduce(0, 8) == 0
    for wrong in ({"bandwidth": 0}, {"latency": -1}):
        with pytest.raises(ConfigError):
            Network(**({"name": "n", "bandwidth": 1.0, "latency": 0.0} | wrong))
    with pytest.raises(ConfigError, match="nvswitch"):
        preset("carrier pigeon")


def test_a_batch_that_does_not_divide_is_refused_with_what_would():
    found = graph(layer("a"))
    with pytest.raises(ConfigError, match="does not divide among 4") as caught:
        ProfiledCosts(found, 6, powers_of_two(8), preset("25g"))
    assert "1,2,3,6" in caught.value.remedy
    assert divisors(6, 8) == (1, 2, 3, 6)
    for counts in ((), (2, 1), (0, 1)):
        with pytest.raises(ConfigError, match="GPU counts"):
            ProfiledCosts(found, 6, counts, preset("25g"))
    with pytest.raises(ConfigError, match="overlap"):
        ProfiledCosts(found, 6, (1,), preset("25g"), 1.5)


@pytest.mark.parametrize("overlap", [0.0, 0.5])
@pytest.mark.parametrize("batches", [((1, 4), (1, 2)), ((1, 2), (1, 4)), ((1, 2), (1, 2)), ((1,), (1, 2, 4))])
def test_layers_timed_at_different_batches_cost_the_same_as_alone(batches: Sequence[Sequence[int]], overlap: float):
    """Of two layers, one timed at fewer batches than the other, at others, or neither at the requested ones."""
    times = [tuple(Timing(n, 1.0 + n / 4, 2.0 + n / 2) for n in each) for each in batches]
    a, b = layer("a", times=times[0], parameter_bytes=0), layer("b", "a", times=times[1])
    costs = ProfiledCosts(graph(a, b), 8, (2, 4, 8), Network("n", 8.0, 0.5), overlap)
    tables = costs.tables()
    for i in range(2):
        assert tables.single[i] == costs.comp(i, 1)
        for place, g in enumerate(costs.counts):
            assert tables.work[i, place] == costs.comp(i, g) + costs.sync(i, g)


@given(st.lists(st.lists(st.integers(0, 100), min_size=1, max_size=3), max_size=12))
@settings(max_examples=300)
def test_every_graph_becomes_a_chain_of_all_its_layers(inputs: list[list[int]]):
    """For any connections, nothing is lost or counted twice."""
    layers = [layer("l0")]
    for i, each in enumerate(inputs, start=1):
        layers.append(layer(f"l{i}", *sorted({f"l{n % i}" for n in each}), parameter_bytes=i))
    found = graph(*layers)
    assert sorted(members(found.chain)) == list(range(len(found.layers)))
    assert sum(each.parameter_bytes for each in found.layers) == sum(each.parameter_bytes for each in layers)
    assert sum(each.at(1).seconds for each in found.layers) == pytest.approx(3.0 * len(layers))
    ours, theirs = (PlanQuery(found, 4, 4, (1, 2, 4), preset("25g"), 4.0, algorithm=each).plan()
                    for each in ("optimal", "deeppool"))  # fmt: skip
    assert theirs.over_limit() or ours.seconds <= theirs.seconds * (1 + 1e-12)
