"""A cluster's file: what it says, and errors that name the place and what to write there."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpumux.cluster.events import DeviceChoice, Quota
from gpumux.coordinator import config
from gpumux.coordinator.daemons import DaemonAddress
from gpumux.errors import ConfigError

WHOLE = """
[[daemons]]
endpoint = "tcp://10.0.0.1:7777"
name = "a0"
host = "a"
[[daemons]]
endpoint = "ipc:///run/gpumux/1/gpumux.sock"
host = "b"
[placement]
choice = "spread"
patience_s = 60
[quotas.users.ada]
devices = 4
high_devices = 2
[quotas.groups.vision]
jobs = 20
[weights]
ada = 2
"""


def read(tmp_path: Path, text: str) -> config.ClusterFile:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    return config.load(path)


def test_a_whole_file(tmp_path: Path):
    found = read(tmp_path, WHOLE)
    assert found.daemons == (
        DaemonAddress("a0", "a", "tcp://10.0.0.1:7777"),
        DaemonAddress("b:1", "b", "ipc:///run/gpumux/1/gpumux.sock"),
    )
    placement = found.placement
    assert (placement.choice, placement.patience_s) == (DeviceChoice.SPREAD, 60)
    assert placement.quotas == {"ada": Quota(4, 2)}
    assert placement.group_quotas == {"vision": Quota(jobs=20)}
    assert placement.weights == {"ada": 2.0}


def test_the_example_in_the_module_is_a_whole_file(tmp_path: Path):
    assert config.__doc__ is not None
    found = read(tmp_path, config.__doc__.partition("\n\n")[2])
    assert found.daemons[0].node == "a0"
    assert found.placement.quotas["ada"] == Quota(4, 2, 20)


def test_an_entry_may_stand_for_several_daemons(tmp_path: Path):
    found = read(
        tmp_path,
        """
[[daemons]]
endpoint = "tcp://gpu[01-02]:[1-2]"
[[daemons]]
service = "tcp://gpumux.gpumux.svc:7777"
""",
    )
    assert [each.node for each in found.daemons] == ["gpu01:1", "gpu01:2", "gpu02:1", "gpu02:2"]
    assert [each.host for each in found.daemons] == ["gpu01", "gpu01", "gpu02", "gpu02"]
    assert found.services == ("tcp://gpumux.gpumux.svc:7777",)
    assert config.of_endpoints(["tcp://a[1-2]:7"]).daemons[1] == DaemonAddress("a2:7", "a2", "tcp://a2:7")


def test_daemons_are_named_after_their_endpoints():
    assert config.address("tcp://10.0.0.1:7777") == DaemonAddress("10.0.0.1:7777", "10.0.0.1", "tcp://10.0.0.1:7777")
    found = config.address("ipc:///run/gpumux/3/gpumux.sock", host="h")
    assert found.node == "h:3"
    beside = [config.address(f"ipc:///tmp/mine/{name}.sock", host="h").node for name in ("a", "b", "gpumux")]
    assert beside == ["h:mine-a", "h:mine-b", "h:mine"]


ONE = '[[daemons]]\nendpoint = "tcp://a:1"\n'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "names no daemons"),
        ("daemons = []", "names no daemons"),
        ("daemons = [3]", "[[daemons]] 1 is 3"),
        ("[[daemons]]\nname = 'a'", "has no endpoint"),
        ("[[daemons]]\nendpoint = 'a'", "not an endpoint"),
        ("[[daemons]]\nendpoint = 7", "endpoint is 7"),
        (ONE + ONE, "two daemons"),
        (ONE + 'nam = "a"', "did you mean 'name'"),
        (ONE + "[placment]", "did you mean 'placement'"),
        (ONE + "[placement]\npatiense_s = 1", "did you mean 'patience_s'"),
        (ONE + "[placement]\npatience_s = 'long'", "write a number"),
        (ONE + "[placement]\npatience_s = -1", "above 0"),
        (ONE + "[placement]\nchoice = 'best'", "learned, spread, pack"),
        (ONE + "[placement]\nquotas = 3", "no 'quotas'"),
        (ONE + "[quotas]\nada = 3", "known are users, groups"),
        (ONE + "[quotas.users]\nada = 3", "write a table"),
        (ONE + "[quotas.users.ada]\ndevices = -1", "0 or more"),
        (ONE + "[quotas.users.ada]\ndevice = 1", "did you mean 'devices'"),
        (ONE + "[weights]\nada = 'much'", "1e-06 to 1e+06"),
        (ONE + "[weights]\nada = 0", "1e-06 to 1e+06"),
        (ONE + "[weights]\nada = 1e300", "1e-06 to 1e+06"),
        (ONE + "[weights]\nada = nan", "1e-06 to 1e+06"),
        (ONE + f"[weights]\nada = {'9' * 4000}", "1e-06 to 1e+06"),
        (ONE + f"[placement]\nretry_s = {'9' * 4000}", "write a number"),
        (ONE + "[placement]\nretry_s = true", "write a number"),
        (ONE + "[placement]\nmoves_at_once = -1", "whole number of moves"),
        (ONE + "[placement]\nmoves_at_once = 1.5", "whole number of moves"),
        (ONE + "[placement]\nlease_s = 1000", "daemons allow 120 s"),
        (ONE + "[placement]\nmove_gain = inf", "a gain of 0 or more"),
        (ONE + 'name = "a\\u0007"', "printable"),
        (ONE + 'name = ""', "printable"),
        (ONE + f'name = "{"a" * 201}"', "printable"),
        ("[[daemons]]\nendpoint = 'tcp://a[1-2]:1'\nname = 'a'", "a name for 2 daemons"),
        ("[[daemons]]\nendpoint = 'tcp://a[2-1]:1'", "has the range 2-1"),
        ("[[daemons]]\nendpoint = 'tcp://a[1-2,1]:1'", "two daemons have the name a1:1"),
        ("[[daemons]]\nservice = 'ipc:///run/a.sock'", "write tcp://NAME:PORT"),
        ("[[daemons]]\nservice = 'tcp://a:*'", "write tcp://NAME:PORT"),
        ("[[daemons]]\nservice = 'tcp://a:1'\nname = 'a'", "more than a service"),
        ("[[daemons]]\nservice = 7", "service is 7"),
        ("[[daemons", "not valid TOML"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, says: str):
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert says in f"{caught.value.message} {caught.value.remedy}"


def test_a_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(ConfigError, match="can't read"):
        config.load(tmp_path / "none.toml")
