"""Access rules: their file, the rule that applies to a user, and the errors for mistakes."""

from __future__ import annotations

import grp
import os
import pwd
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumux.access import BUILT_IN, Access, Rule, refuse_gang, refuse_priority, refuse_submit, refuse_weight
from gpumux.config import Config, load
from gpumux.errors import AccessDenied, ConfigError, from_code
from gpumux.types import Gang, Peer, Priority
from gpumux.wire.peers import peer_of

ME = pwd.getpwuid(os.getuid()).pw_name
MY_GROUP = grp.getgrgid(os.getgid()).gr_name


def rules(tmp_path, text):
    path = tmp_path / "gpumux.toml"
    path.write_text(text)
    return load({}, {}, path).rules


def test_names_and_numbers_become_ids(tmp_path):
    got = rules(
        tmp_path,
        f"""
        [access.rules.me]
        users = ["{ME}", 4242]
        groups = ["{MY_GROUP}", 77]
        keys = ["laptop", "desk.key"]
        max_priority = "low"
        max_jobs = 2
        max_bytes = 4096
        max_weight = 2
        operator = true
        [access.rules.default]
        submit = false
        """,
    )
    me = Rule(
        "me", frozenset({os.getuid(), 4242}), frozenset({os.getgid(), 77}), frozenset({"laptop", "desk"}),
        max_priority=Priority.LOW, max_jobs=2, max_bytes=4096, max_weight=2.0, operator=True,
    )  # fmt: skip
    assert got == (me, Rule("default", submit=False))


def test_no_rules_allow_what_the_limits_allow():
    access = Access(Config().rules)
    assert access.rule_for(Peer(1, 1, 1)) == BUILT_IN
    assert refuse_submit(BUILT_IN, Priority.HIGH, 1e3) is None
    assert not access.may_operate(Peer(1, 1, 1))
    assert access.may_operate(Peer(0, 0, 1)), "root always may"


@pytest.mark.parametrize(
    ("body", "says", "remedy"),
    [
        ("[access.rules.a]\nusers = ['nobody-has-this-name']", "no user 'nobody-has-this-name'", "number"),
        ("[access.rules.a]\ngroups = ['no-such-group-here']", "no group 'no-such-group-here'", "number"),
        ("[access.rules.a]\nusers = [true]", "True is no user", "quotes"),
        ("[access.rules.a]\nusers = [-1]", "-1 is no user", "quotes"),
        ("[access.rules.a]\nusers = 'root'", "must be a list", "["),
        ("[access.rules.a]\nusers = [1]\nmax_prioritty = 'low'", "max_prioritty", "did you mean max_priority?"),
        ("[access.rules.a]\nusers = [1]\nmax_priority = 'medium'", "can't be 'medium'", '"low"'),
        ("[access.rules.a]\nusers = [1]\nmax_jobs = 0", "1 or more", "leave it out"),
        ("[access.rules.a]\nusers = [1]\nmax_jobs = 1.5", "1 or more", "leave it out"),
        ("[access.rules.a]\nusers = [1]\nmax_weight = nan", "above 0", "leave it out"),
        ("[access.rules.a]\nusers = [1]\nsubmit = 'no'", "true or false", "quotes"),
        ("[access.rules.a]\nusers = [1]\nsubmit = 0", "true or false", "quotes"),
        ("[access.rules.a]\nkeys = ['../x']", "key files", "laptop"),
        ("[access.rules.a]\nmax_jobs = 1", "names nobody", "users, groups or keys"),
        ("[access.rules.default]\nusers = [1]", "no other rule names", "every rule but"),
        ("[access.rules.a]\nusers = [1]\n[access.rules.b]\nusers = [1]", "of both 'a' and 'b'", "keep one"),
        ("[access.rules.'a b']\nusers = [1]", "no name for a rule", "letters"),
        ("[access]\nrules = 3", "must be tables", "[access.rules.NAME]"),
        ("[access.rules]\na = 3", "must be a table", "[access.rules.a]"),
        ("[daemon.rules.a]\nusers = [1]", "wrong table", "[access]"),
    ],
)
def test_a_mistake_is_named_with_its_place(tmp_path, body, says, remedy):
    with pytest.raises(ConfigError) as caught:
        rules(tmp_path, body)
    assert says in caught.value.message
    assert str(tmp_path / "gpumux.toml") in caught.value.message
    assert remedy in caught.value.remedy


def test_rules_are_for_the_file_alone():
    with pytest.raises(ConfigError, match="GPUMUX_RULES is not a setting"):
        load({}, {"GPUMUX_RULES": "x"})
    with pytest.raises(ConfigError, match="--rules is not a setting"):
        load({"rules": "x"}, {})


def test_a_user_beats_a_group_and_a_group_the_default_and_the_first_group_counts():
    ml = Rule("ml", groups=frozenset({50, 51}))
    staff = Rule("staff", groups=frozenset({60}))
    alice = Rule("alice", users=frozenset({1001}))
    rest = Rule("default", submit=False)
    access = Access((rest, ml, staff, alice))
    assert access.rule_for(Peer(1001, 50, 1, (60,))) is alice
    assert access.rule_for(Peer(1002, 9, 1, (60, 51))) is ml
    assert access.rule_for(Peer(1002, 60, 1)) is staff, "the primary group counts"
    assert access.rule_for(Peer(1002, 9, 1, (61,))) is rest


def test_a_key_is_no_user_of_this_machine():
    laptop = Rule("laptop", keys=frozenset({"laptop"}))
    everyone = Rule("everyone", users=frozenset({0}), groups=frozenset({0, 50}))
    access = Access((everyone, laptop))
    remote = peer_of("x" * 40)
    assert access.rule_for(Peer(remote.uid, -1, -1, key="laptop")) is laptop
    assert access.rule_for(Peer(remote.uid, -1, -1, key="other")) == BUILT_IN
    assert access.rule_for(Peer(remote.uid, 0, -1, (50,), key="other")) == BUILT_IN


@given(
    st.lists(st.tuples(st.sets(st.integers(0, 5)), st.sets(st.integers(0, 5))), max_size=5),
    st.integers(0, 5),
    st.sets(st.integers(0, 5)),
)
def test_exactly_one_rule_applies_and_it_names_the_peer(bodies, uid, groups):
    """Compared with the sentence in the documentation, implemented word by word."""
    made = tuple(Rule(f"r{i}", frozenset(u), frozenset(g)) for i, (u, g) in enumerate(bodies))
    named = [rule for rule in made if uid in rule.users] or [rule for rule in made if rule.groups & groups]
    peer = Peer(uid, 99, 1, tuple(groups))
    assert Access(made).rule_for(peer) == (named[0] if named else BUILT_IN)


def test_refusals_name_the_rule_and_the_remedy():
    rule = Rule("students", submit=True, max_priority=Priority.LOW, max_weight=2.0)
    for fault in (
        refuse_submit(Rule("guests", submit=False), Priority.LOW, 1.0),
        refuse_submit(rule, Priority.HIGH, 1.0),
        refuse_priority(rule, Priority.HIGH),
        refuse_weight(rule, 3.0),
    ):
        assert isinstance(from_code(fault.code, fault.message, fault.remedy), AccessDenied)
        assert "rule '" in fault.message
        assert "[access.rules." in fault.remedy
    assert refuse_submit(rule, Priority.LOW, 2.0) is None


# ---- gangs: where the store may be

GANG = Gang("ab" * 16, 0, 2, "127.0.0.1:29500")


@pytest.mark.parametrize(
    ("networks", "store", "says"),
    [
        ((), "127.0.0.1:29500", ""),
        ((), "localhost:1", ""),
        ((), "[::1]:29500", ""),
        ((), "10.1.2.3:29500", 'stores in [gangs], such as stores = ["10.1.2.3"]'),
        (("10.0.0.0/8",), "10.1.2.3:29500", ""),
        (("10.0.0.0/8",), "11.1.2.3:29500", "stores in [gangs]"),
        (("10.0.0.0/8",), "[fe80::1]:29500", "stores in [gangs]"),
        (("0.0.0.0/0",), "login.example:29500", "write its address"),
        ((), "127.0.0.1", "127.0.0.1:29500"),
        ((), "127.0.0.1:0", "127.0.0.1:29500"),
        ((), "127.0.0.1:70000", "127.0.0.1:29500"),
        ((), ":29500", "127.0.0.1:29500"),
    ],
)
def test_a_store_is_on_this_machine_or_in_a_network_that_is_named(networks, store, says):
    fault = refuse_gang(replace(GANG, store=store), networks)
    assert (fault is not None and says in fault.remedy) if says else fault is None


@pytest.mark.parametrize(
    "changed",
    [
        {"rank": 2}, {"rank": -1}, {"ranks": 0}, {"ranks": 5000}, {"id": "ab"}, {"id": "AB" * 16}, {"timeout_s": 0.0},
        {"timeout_s": float("nan")}, {"timeout_s": 1e9},
    ],
)  # fmt: skip
def test_a_gang_that_makes_no_sense_is_refused(changed):
    fault = refuse_gang(replace(GANG, **changed), ())
    assert fault is not None
    assert fault.code == "refused"
    assert fault.remedy


def test_networks_of_stores_come_from_the_file(tmp_path):
    path = tmp_path / "gpumux.toml"
    path.write_text('[gangs]\nstores = ["10.0.0.0/8", "192.168.1.7"]')
    assert load({}, {}, path).stores == ("10.0.0.0/8", "192.168.1.7")
    path.write_text('[gangs]\nstores = ["everywhere"]')
    with pytest.raises(ConfigError, match="'everywhere' is no network"):
        load({}, {}, path)
