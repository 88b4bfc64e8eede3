"""The data of a cluster's status page says what is so, with names of jobs and users only where the operator said so."""

from __future__ import annotations

import json

import pytest

from gpumux.coordinator.core import DaemonAway, PromiseSeen
from gpumux.coordinator.page import MOST_REASONS, body, explanation
from gpumux.wire import messages as msg
from microbench.cluster_page import PlayedCluster
from tests.coordinator.test_core import GIB, JOB, OTHER, Cluster

THIRD, FOURTH = "c" * 32, "d" * 32


@pytest.fixture
def cluster() -> Cluster:
    """Two nodes full of ada's jobs, a high and a low one; ben's and then ada's next job wait."""
    made = Cluster()
    made.connect("s")
    made.connect("t", 1001)
    made.connect("root", 0)
    made.place("s", priority=1, nbytes=15 * GIB, name="serve")
    made.place("s", OTHER, nbytes=15 * GIB)
    made.now = 20.0
    made.place("t", THIRD, 1001, nbytes=15 * GIB, name="of ben")
    made.now = 30.0
    made.place("s", FOURTH, nbytes=15 * GIB, devices=2)
    return made


def see(cluster: Cluster, named: bool = True):
    return body(cluster.coordinator, cluster.now, named=named)


def test_what_waits_stands_longest_first_with_its_reason(cluster: Cluster):
    cluster.now = 50.0
    found = see(cluster)
    assert [(job["short"], job["since_s"]) for job in found["waiting"]] == [(THIRD[:8], 30.0), (FOURTH[:8], 20.0)]
    assert "user ada holds 2 of 3 devices" in found["waiting"][1]["why"]
    assert {job["state"] for job in found["placed"]} == {"running"}
    assert found["counts"]["submitted"] == 4


def test_nodes_say_their_promise_and_since_when_they_are_away_or_draining(cluster: Cluster):
    high = cluster.coordinator.placement.jobs[JOB].devices[0].node  # type: ignore[index]
    other = next(node for node in ("n0", "n1") if node != high)
    cluster.happen(PromiseSeen(high, False, "mean 1.30 of 1.10: BROKEN"))
    cluster.say("root", msg.DrainNode(9, other, True), 0)
    cluster.now = 37.0
    nodes = {node["name"]: node for node in see(cluster)["nodes"]}
    assert (nodes[high]["kept"], nodes[high]["verdict"]) == (False, "mean 1.30 of 1.10: BROKEN")
    assert (nodes[high]["state"], nodes[high]["since_s"]) == ("up", None)
    assert (nodes[other]["state"], nodes[other]["since_s"]) == ("draining", 7.0)
    cluster.say("root", msg.DrainNode(9, other, True), 0)  # again: it has drained all the time
    cluster.happen(DaemonAway(high, "it is gone"))
    cluster.now = 40.0
    nodes = {node["name"]: node for node in see(cluster)["nodes"]}
    assert nodes[other]["since_s"] == 10.0
    assert (nodes[high]["state"], nodes[high]["since_s"], nodes[high]["why"]) == ("away", 3.0, "it is gone")
    assert (nodes[high]["kept"], nodes[high]["verdict"]) == (None, "")
    cluster.say("root", msg.DrainNode(9, other, False), 0)
    assert {node["name"]: node for node in see(cluster)["nodes"]}[other]["since_s"] is None
    assert "endpoint" not in nodes[high]


def test_a_node_that_was_drained_at_a_time_that_was_not_kept_has_none():
    cluster = Cluster(nodes=0)
    cluster.coordinator.drained["n0"] = None  # as files of before kept it
    cluster.found("n0")
    (node,) = see(cluster)["nodes"]
    assert (node["state"], node["since_s"]) == ("draining", None)


def test_users_have_their_devices_beside_quota_and_fair_share(cluster: Cluster):
    ada, ben = see(cluster)["users"]
    assert (ada["user"], ada["devices"], ada["high_devices"], ada["jobs"], ada["waiting"]) == ("ada", 2, 1, 3, 1)
    assert (ada["share"], ada["fair_share"], ada["quota"]["devices"]) == (1.0, 0.5, 3)
    assert (ben["user"], ben["devices"], ben["share"], ben["quota"]["devices"]) == ("ben", 0, 0.0, None)


def test_without_names_neither_jobs_nor_users_nor_groups_have_one_anywhere(cluster: Cluster):
    found = json.dumps(see(cluster, named=False))
    for job in (JOB, OTHER, THIRD, FOURTH):
        assert job not in found
        found += json.dumps(explanation(cluster.coordinator, job[:8], named=False))
    for name in ("serve", "of ben", "ada", '"ben', "user ben", "vision"):
        assert name not in found
    assert "uid 1000" in found


@pytest.mark.parametrize("named", [False, True])
def test_quotas_in_reasons_name_whose_they_are_by_the_same_rule(named: bool):
    played = PlayedCluster(8, 40)
    found = body(played.coordinator, played.now(), named=named)
    said = " ".join(
        sentence
        for job in found["waiting"]
        for sentence in explanation(played.coordinator, job["short"], named=named)["sentences"]  # type: ignore[index]
    )
    assert ("user ada holds" in said) is named
    assert ("uid 1000 holds" in said) is not named
    assert ("group speech holds" in said) is named
    assert ("its group holds" in said) is not named
    assert bool(found["groups"]) is named


def test_an_explanation_is_the_commands_and_of_no_unknown_job(cluster: Cluster):
    found = explanation(cluster.coordinator, JOB[:8], named=True)
    assert found is not None
    assert found["sentences"][0].startswith("It has run on ")
    assert explanation(cluster.coordinator, "nothing", named=True) is None


def test_a_large_cluster_has_reasons_for_the_longest_waits_alone():
    played = PlayedCluster(64, 300)
    found = body(played.coordinator, played.now(), named=False)
    assert len(found["nodes"]) == 64
    assert len(found["waiting"]) + len(found["placed"]) == 300
    assert [bool(job["why"]) for job in found["waiting"]] == [
        place < MOST_REASONS for place in range(len(found["waiting"]))
    ]
    assert json.dumps(found, allow_nan=False)
