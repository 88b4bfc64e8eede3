"""docs/protocol.md says what the code does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from gpumux.config import Config
from gpumux.daemon.config_reload import wire_limits
from gpumux.daemon.effects import MAX_SCALARS
from gpumux.daemon.requests import MAX_ENCODED_BYTES, MAX_UNLOADED
from gpumux.device.workers.checks import CPU_S
from gpumux.wire import channel, router
from gpumux.wire import messages as m
from gpumux.wire.limits import Limits

PAGE = (Path(__file__).parents[2] / "docs/protocol.md").read_text()
ROWS = {int(row[1]): row for row in re.finditer(r"^\| (\d+) \| (\w+) \| ([CD, ]+) \|(.*)\|$", PAGE, re.M)}
WORDS = {
    int: "int", float: "float", str: "str", bytes: "bytes", bool: "bool", int | None: "optional int",
    float | None: "optional float",
    list[int]: "list of int", list[str]: "list of str", list[float | int]: "list of float or int",
}  # fmt: skip


def test_every_message_is_there_and_no_other():
    assert {tag: row[2] for tag, row in ROWS.items()} == {tag: cls.__name__ for tag, cls in m.REGISTRY.items()}


@pytest.mark.parametrize("tag", m.REGISTRY)
def test_fields_types_and_senders(tag: int):
    cls = m.REGISTRY[tag]
    hints = get_type_hints(cls, vars(m))
    row = ROWS[tag]
    written = re.sub(r"\([^()]*\)", "", row[4].partition(". One frame")[0])
    stated = [part.strip() for part in written.split(", ") if part.strip()]
    assert stated == [f"{name}: {WORDS.get(hints[name], 'map')}" for name in cls.__match_args__]
    assert ("C" in row[3]) == (cls in m.FROM_CLIENT)


def test_the_local_channel():
    for stated in (
        f"one packet of at most {channel.PACKET:,} bytes",
        f"begin with the byte 0x{channel.MORE:02X} and carry up to {channel.PACKET - 1:,} bytes of it each",
        f"It takes {_names(channel.FROM_CLIENT)} from the client, {_names(channel.FROM_DAEMON)} from the daemon",
    ):
        assert stated in PAGE.replace("\n  ", " ").replace("\n", " ")


def _names(classes: frozenset[type[Any]]) -> str:
    *most, last = [cls.__name__ for cls in m.REGISTRY.values() if cls in classes]
    return f"{', '.join(most)} and {last}"


def test_the_limits_are_those_of_a_daemon_without_configuration():
    assert wire_limits(Config()) == Limits()


def test_what_the_daemon_bounds_itself():
    for stated in (
        f"A Program may declare {MAX_SCALARS:,} of them at most",
        f"| {MAX_UNLOADED}, {MAX_ENCODED_BYTES >> 20} MiB |",
        f"| {CPU_S} s of processor time; users in turn |",
    ):
        assert stated in PAGE


def test_the_limits_are_the_defaults():
    limits = Limits()
    for stated in (
        f"| {limits.max_message_bytes >> 20} MiB (`max_message_bytes`) |",
        f"| {limits.max_control_bytes >> 10} KiB; 16 MiB |",
        f"| {limits.messages_per_s:,.0f} a second, bursts of {limits.burst_messages:,.0f} |",
        f"| {limits.sessionless_per_s:,.0f} a second, bursts of {limits.burst_sessionless:,.0f} |",
        f"`heartbeat_s` is {limits.heartbeat_s:g} and `lease_s` {limits.lease_s:g}",
        f"| {limits.max_sessions:,}; {limits.max_sessions_per_user} |",
        f"| {limits.send_queue:,} |",
        f"At most {channel.MAX_PENDING} connections in all, {channel.MAX_PENDING_PER_USER} of a user",
        f"for {channel.PENDING_S:g} seconds at most.",
        f"at most {router.MAX_DESCRIPTORS} descriptors",
    ):
        assert stated in PAGE
