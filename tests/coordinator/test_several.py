"""Endpoints with ranges, and what names of DNS stand for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumux.coordinator.several import MOST_DAEMONS, Services, expanded, look_up
from gpumux.errors import ConfigError


@pytest.mark.parametrize(
    ("endpoint", "found"),
    [
        ("tcp://a:1", ["tcp://a:1"]),
        ("tcp://[::1]:7777", ["tcp://[::1]:7777"]),
        ("tcp://gpu[1-3]:7777", ["tcp://gpu1:7777", "tcp://gpu2:7777", "tcp://gpu3:7777"]),
        ("tcp://gpu[08-10,2]:1", ["tcp://gpu08:1", "tcp://gpu09:1", "tcp://gpu10:1", "tcp://gpu2:1"]),
        ("tcp://r[1,2]n[5]:[1-2]", ["tcp://r1n5:1", "tcp://r1n5:2", "tcp://r2n5:1", "tcp://r2n5:2"]),
        ("ipc:///run/gpumux/[0-1]/gpumux.sock", ["ipc:///run/gpumux/0/gpumux.sock", "ipc:///run/gpumux/1/gpumux.sock"]),
    ],
)
def test_ranges_are_read_as_slurm_writes_them(endpoint: str, found: list[str]):
    assert expanded(endpoint) == found


@given(st.integers(0, 500), st.integers(0, 40), st.integers(1, 5))
def test_a_range_has_every_number_once_with_its_zeros(first: int, more: int, width: int):
    text = f"tcp://n[{first:0{width}d}-{first + more}]:1"
    assert expanded(text) == [f"tcp://n{number:0{width}d}:1" for number in range(first, first + more + 1)]


@pytest.mark.parametrize("wrong", ["[3-1]", "[1-9999999999]", f"[0-{MOST_DAEMONS}]"])
def test_a_range_that_can_not_be_is_refused(wrong: str):
    with pytest.raises(ConfigError, match=r"has the range .* write it from a smaller to a larger number"):
        expanded(f"tcp://a{wrong}:1")


def test_more_daemons_than_a_cluster_can_have_are_refused_before_they_are_made():
    with pytest.raises(ConfigError, match="stands for 1000000000000 daemons"):
        expanded("tcp://a[0-999]b[0-999]c[0-999]d[0-999]:1")


def test_each_address_of_a_service_is_an_endpoint():
    places = {"one": ["10.0.0.2", "[fd00::1]", "fe80::1%eth0"], "other": ["10.0.0.2"]}
    found = Services(lambda name: places[name]).endpoints(["tcp://one:7", "tcp://other:7", "tcp://other:8"])
    assert found == ["tcp://10.0.0.2:7", "tcp://[fd00::1]:7", "tcp://10.0.0.2:8"]


def test_this_machine_has_an_address():
    assert look_up("127.0.0.1") == ["127.0.0.1"]
    assert look_up("::1") == ["[::1]"]
