"""Grants: who may make them, which token opens which, and what they do to a session."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumux.access import OPEN, refuse_priority
from gpumux.errors import AccessDenied, ConfigError
from gpumux.types import Peer, Priority
from gpumux.wire import messages as m
from gpumux.wire.grants import TOKEN, GrantDirectory, holder, with_token
from gpumux.wire.limits import Limits
from gpumux.wire.router import Closed, Incoming, Opened, Router
from tests.wire.world import HELLO, LOCAL_HELLO, LocalClient, World, step

MEMORY = 1000


def granted(token: str, local: bool = False) -> m.GrantedHello:
    return m.GrantedHello(m.PROTOCOL_VERSION, "test", "client", 0, "", not local, token)


@pytest.fixture
def grants(tmp_path: Path) -> GrantDirectory:
    return GrantDirectory(tmp_path / "grants")


@pytest.fixture
def world(grants: GrantDirectory, runtime_dir: Path):
    router = Router(
        [f"ipc://{runtime_dir}/grants.sock", f"ipc://{runtime_dir}/g.sock"], runtime_dir, Limits(), grants=grants
    )
    router.device = {"memory_bytes": MEMORY}
    yield World(router)
    router.close()


def test_a_token_opens_its_own_grant_and_no_other(grants):
    one = grants.make("one", 25, 100, max_priority=Priority.LOW)
    two = grants.make("two", 1, 3, max_priority=Priority.HIGH)
    found = grants.grant_of(one, MEMORY)
    assert (found.name, found.max_bytes, found.weight, found.max_priority) == ("one", 250, 0.25, Priority.LOW)
    assert grants.grant_of(two, MEMORY).max_bytes == 333
    for wrong in ("one", "one.", "", ".", "two." + one.split(".")[1], one + "0", "../one." + one.split(".")[1]):
        with pytest.raises(AccessDenied, match="no such grant"):
            grants.grant_of(wrong, MEMORY)


def test_the_file_holds_no_secret_and_others_may_read_it(grants):
    secret = grants.make("one", 25, 100, max_priority=Priority.LOW, devices=["share-3"]).split(".")[1]
    path = grants.path / "one.json"
    assert secret not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o644
    (record,) = grants.records()
    assert (record.name, record.devices) == ("one", ("share-3",))


def test_a_grant_made_anew_has_another_token_and_a_released_one_none(grants):
    old = grants.make("one", 25, 100, max_priority=Priority.LOW)
    new = grants.make("one", 50, 100, max_priority=Priority.LOW)
    with pytest.raises(AccessDenied):
        grants.grant_of(old, MEMORY)
    assert grants.grant_of(new, MEMORY).shares == 50
    assert (grants.release("one"), grants.release("one")) == (True, False)
    with pytest.raises(AccessDenied):
        grants.grant_of(new, MEMORY)
    assert list(grants.path.iterdir()) == []


@pytest.mark.parametrize("mode", [0o775, 0o757])
@pytest.mark.parametrize("loose", ["directory", "file"])
def test_what_others_could_have_written_is_not_trusted(grants, loose, mode):
    token = grants.make("one", 25, 100, max_priority=Priority.LOW)
    (grants.path if loose == "directory" else grants.path / "one.json").chmod(mode)
    with pytest.raises(AccessDenied, match="others may write"):
        grants.grant_of(token, MEMORY)


@pytest.mark.skipif(os.geteuid() != 0, reason="run as root: files are given to another user")
@pytest.mark.parametrize("loose", ["directory", "file"])
def test_what_belongs_to_another_user_is_not_trusted(grants, loose):
    token = grants.make("one", 25, 100, max_priority=Priority.LOW)
    os.chown(grants.path if loose == "directory" else grants.path / "one.json", 12345, -1)
    with pytest.raises(AccessDenied, match="others may write"):
        grants.grant_of(token, MEMORY)


@pytest.mark.parametrize("other", ["directory", "pipe"])
def test_what_is_no_file_is_no_grant(grants, other):
    token = grants.make("one", 25, 100, max_priority=Priority.LOW)
    path = grants.path / "one.json"
    path.unlink()
    path.mkdir(0o755) if other == "directory" else os.mkfifo(path, 0o644)
    with pytest.raises(AccessDenied, match="others may write"):
        grants.grant_of(token, MEMORY)


def test_the_smallest_share_of_the_smallest_device_is_a_limit(grants):
    assert grants.grant_of(grants.make("one", 1, 1000, max_priority=Priority.LOW), 10).max_bytes == 1


def test_a_link_is_no_grant(grants, tmp_path):
    token = grants.make("one", 25, 100, max_priority=Priority.LOW)
    (grants.path / "one.json").rename(tmp_path / "one.json")
    (grants.path / "one.json").symlink_to(tmp_path / "one.json")
    with pytest.raises(AccessDenied, match="can't be read"):
        grants.grant_of(token, MEMORY)


@pytest.mark.parametrize(
    "change",
    [
        {"shares": 101}, {"shares": 0}, {"shares": "25"}, {"shares": True}, {"of": 10**9}, {"max_priority": "top"},
        {"token_sha256": "abc"}, {"token_sha256": None}, {"devices": [1]}, {"devices": None}, {},
    ],
    ids=str,
)  # fmt: skip
def test_a_file_that_is_no_grant_lets_nobody_in(grants, change):
    token = grants.make("one", 25, 100, max_priority=Priority.LOW)
    path = grants.path / "one.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}) if change else "[")
    with pytest.raises(AccessDenied, match="can't be understood"):
        grants.grant_of(token, MEMORY)


@given(st.binary(max_size=200))
def test_no_file_at_all_is_more_than_an_error(tmp_path_factory, data):
    grants = GrantDirectory(tmp_path_factory.mktemp("grants"))
    (grants.path / "one.json").write_bytes(data)
    with pytest.raises(AccessDenied):
        grants.grant_of("one.x", MEMORY)


@pytest.mark.parametrize(
    ("name", "shares", "of"), [("../x", 1, 1), ("", 1, 1), ("a", 0, 1), ("a", 2, 1), ("a", 1, 0), ("a", 1, 1001)]
)
def test_names_and_numbers_are_checked(grants, name, shares, of):
    with pytest.raises(ConfigError) as error:
        grants.make(name, shares, of, max_priority=Priority.LOW)
    assert error.value.remedy
    assert not grants.path.exists()


def test_a_holder_is_a_user_of_its_own_and_never_root(grants):
    token = grants.make("one", 25, 100, max_priority=Priority.LOW)
    other = grants.make("two", 25, 100, max_priority=Priority.LOW)
    root = Peer(0, 0, 7, (0, 27))
    one, two = (holder(root, grants.grant_of(each, MEMORY)) for each in (token, other))
    assert one.uid < -1
    assert two.uid < -1
    assert one.uid != two.uid
    assert holder(Peer(5, 5, 9, ()), grants.grant_of(token, MEMORY)).uid == one.uid, "all of a grant's processes"
    assert (one.pid, one.groups, one.gid) == (7, (), -1)
    assert not OPEN.may_operate(one)
    rule = OPEN.rule_for(one)
    assert (rule.max_bytes, rule.max_priority) == (250, Priority.LOW)
    fault = refuse_priority(rule, Priority.HIGH)
    assert fault is not None
    assert "the grant one" in fault.remedy


def test_clients_say_the_token_of_their_environment_on_this_machine_alone():
    environ = {TOKEN: "one.secret"}
    assert with_token(LOCAL_HELLO, {}) is LOCAL_HELLO
    assert with_token(HELLO, environ) is HELLO, "inline: over tcp a key says what a client may"
    said = with_token(LOCAL_HELLO, environ)
    assert isinstance(said, m.GrantedHello)
    assert said.grant == "one.secret"


def test_only_holders_are_let_in_where_grants_count_and_nowhere_else(world, grants, make_client):
    token = grants.make("one", 25, 100, max_priority=Priority.LOW)
    here, there = world.router.addresses
    for address, hello, says in (
        (here, HELLO, "were granted a share"),
        (here, granted("one.wrong"), "no such grant"),
        (there, granted(token), "don't count at this endpoint"),
    ):
        client = make_client(world, endpoint=address)
        client.send(hello)
        world.until(lambda _, before=dict(world.router.counters): dict(world.router.counters) != before)
        refusal = client.refusal()
        assert (refusal.code, bool(refusal.remedy)) == ("access_denied", True)
        assert says in refusal.message
    opened = world.open(make_client(world, endpoint=here), granted(token))
    assert opened.peer.grant is not None
    assert opened.peer.grant.max_bytes == MEMORY // 4
    assert world.open(make_client(world, endpoint=there)).peer.uid == os.getuid()


def test_a_released_grant_ends_its_sessions_and_no_others(world, grants, make_client):
    token, other = (grants.make(name, 25, 100, max_priority=Priority.LOW) for name in ("one", "two"))
    one, two = (make_client(world, endpoint=world.router.addresses[0]) for _ in range(2))
    gone, stays = world.open(one, granted(token)).session, world.open(two, granted(other)).session
    grants.release("one")
    world.now += 1.0
    closed = [each for each in world.router.expire(world.now) if isinstance(each, Closed)]
    assert [each.session for each in closed] == [gone]
    assert "released" in one.refusal().message
    world.serves(two, stays, 1)
    one.send(granted(token))
    world.until(lambda _: world.router.counters["stranger_access_denied"] == 1)
    assert "no such grant" in one.refusal().message


def test_a_holder_has_a_channel_as_the_process_that_the_kernel_names(world, grants, make_client, runtime_dir):
    token = grants.make("one", 25, 100, max_priority=Priority.LOW)
    client = make_client(world, endpoint=world.router.addresses[0])
    local = LocalClient(world, client, granted(token, local=True))
    local.say(step(1))
    assert world.next(Incoming).message.step == 1
    assert client.welcome.channel == f"{runtime_dir}/grants.sock.chan", "in the directory that a container has"
    for path in (runtime_dir / "grants.sock", Path(client.welcome.channel)):
        assert path.stat().st_mode & 0o777 == 0o666
    assert (runtime_dir / "g.sock").stat().st_mode & 0o022 == 0
    local.close()


def test_a_flooding_holder_is_cut_off(world, grants, make_client):
    world.router.use_limits(Limits(messages_per_s=1, burst_messages=4))
    token = grants.make("one", 25, 100, max_priority=Priority.LOW)
    client = make_client(world, endpoint=world.router.addresses[0])
    session = world.open(client, granted(token)).session
    for _ in range(10):
        client.send(m.Heartbeat(0.0))
    closed = world.next(Closed)
    assert closed.session == session
    assert world.router.counters["flood"] == 1


def test_a_repeated_greeting_gets_the_same_answer(world, grants, make_client):
    token = grants.make("one", 25, 100, max_priority=Priority.LOW)
    client = make_client(world, endpoint=world.router.addresses[0])
    first = world.open(client, granted(token))
    assert isinstance(first, Opened)
    client.send(granted(token))
    client.send(m.Step("0" * 32, 1, 1, 0, [], 0))
    world.next(Incoming)
    assert client.receive(m.Welcome).session == first.session
