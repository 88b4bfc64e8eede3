"""docs/security.md says what is so: its example is a configuration, its numbers are the code's, its score the
unit's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpumux.access import Access
from gpumux.config import Config, load
from gpumux.daemon import context as turns
from gpumux.daemon import logs, requests, tracing
from gpumux.daemon import requests as changes
from gpumux.daemon import requests as questions
from gpumux.daemon.snapshots import requests as snapshots
from gpumux.daemon.snapshots import store
from gpumux.types import MAX_JOB_NAME, Peer, Priority
from gpumux.wire import codec as fields
from gpumux.wire import connections as bounds
from gpumux.wire import listen as connections
from gpumux.wire.limits import Limits

PAGE = (Path(__file__).parents[1] / "docs/security.md").read_text()


def test_the_example_is_read_and_means_what_it_says(tmp_path):
    text = re.search(r"```toml\n(.*?)```", PAGE, re.S)[1]
    path = tmp_path / "gpumux.toml"
    path.write_text(text.replace('"students"', "501", 1).replace('"gpumux-admins"', "502"))
    access = Access(load({}, {}, path).rules)
    student = access.rule_for(Peer(1000, 100, 1, (501,)))
    assert (student.name, student.max_priority, student.max_jobs, student.max_bytes) == (
        "students",
        Priority.LOW,
        2,
        1 << 33,
    )
    assert access.may_operate(Peer(1000, 502, 1))
    assert access.rule_for(Peer(-7, -1, -1, key="laptop")).name == "laptop"
    assert not access.rule_for(Peer(1000, 100, 1)).submit


@pytest.mark.parametrize(
    ("row", "numbers"),
    [
        ("connections", (connections.SLACK, 2 * connections.SLACK)),
        ("connections without a session", (bounds.STRANGERS_PER_USER, bounds.STRANGERS, int(bounds.HELLO_S))),
        ("kept free for root, and for the daemon's user", (bounds.RESERVED, bounds.RESERVED_SESSIONS)),
        ("sessions", (Config().max_sessions_per_user, Config().max_sessions)),
        ("messages, bytes of a session", (int(Limits().messages_per_s), int(Limits().bytes_per_s) >> 30)),
        ("jobs", (Config().max_jobs_per_user, Config().max_jobs)),
        (
            "Programs of a job; of a user, not loaded yet",
            (Config().max_programs_per_job, requests.MAX_UNLOADED, requests.MAX_ENCODED_BYTES >> 20),
        ),
        (
            "steps in flight, transfers, profiles, changes of a job",
            (Config().max_inflight, requests.MAX_TRANSFERS, questions.MAX_PROFILES, changes.MAX_CHANGES),
        ),
        ("questions of a session that wait", (turns.MAX_WAITING,)),
        (
            "jobs opened and closed again; of a session that wait",
            (turns.OPENED_AT_ONCE, int(turns.OPENED_PER_S), int(turns.TRUSTED_OPENED_PER_S), turns.MAX_WAITING),
        ),
        ("Programs checked", (turns.CHECKED_AT_ONCE, int(turns.CHECKED_PER_S))),
        (
            "snapshots: of a job under way; questions of a session for kept ones; to be read",
            (1, snapshots.MAX_FINDS, snapshots.MAX_READS),
        ),
        ("jobs whose snapshots are kept, the newest, and those that are open", (store.MOST_KEPT,)),
        (
            "notes of snapshots that wait for the disk",
            (snapshots.MAX_NOTES_BYTES_PER_USER >> 20, snapshots.MAX_NOTES_BYTES >> 20),
        ),
        ("recordings", (int(tracing.MAX_SECONDS), tracing.MAX_RECORDS)),
        ("names; other strings; lists", (MAX_JOB_NAME, fields.MAX_NAME, fields.MAX_LIST)),
        ("descriptors of the daemon", (connections.RESERVE,)),
    ],
)
def test_bounds_are_those_of_the_code(row, numbers):
    (said,) = re.findall(rf"^\| {re.escape(row)} \| (.*?) \| ", PAGE, re.M)
    assert [int(n.replace(",", "")) for n in re.findall(r"\d[\d,]*", said)] == list(numbers)


def test_settings_it_names_exist():
    for name in re.findall(r"`((?:max|metrics|curve)_\w+)`", PAGE):
        assert hasattr(Config(), name) or name in ("max_priority", "max_weight", "max_bytes"), name


def test_the_rate_of_the_log_is_the_codes():
    assert f"written at {logs.LINES_PER_S:.0f} a second" in PAGE
