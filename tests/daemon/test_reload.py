"""SIGHUP: what changes at once, what waits for a restart, and what a mistake in the file does: nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import threading
from dataclasses import fields, replace
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from gpumux.access import Rule
from gpumux.cli.control import Control
from gpumux.client.session import Session
from gpumux.config import Config
from gpumux.daemon.config_reload import RELOADABLE, compare
from gpumux.errors import AccessDenied, AdmissionRefused, ConfigError
from gpumux.wire import messages as msg
from tests.daemon.stepping import JOB, OTHER, only
from tests.program import samples

from .fakes import Daemon
from .live import QUICK, SOON_S, LiveJob, serving

GUESTS = Rule("guests", users=frozenset({1001}), submit=False)


def test_every_reloadable_setting_is_one():
    assert {spec.name for spec in fields(Config)} >= RELOADABLE


def test_a_difference_says_what_is_in_force_and_what_waits():
    old = Config(max_jobs=4, rules=(GUESTS, Rule("a", users=frozenset({1}))))
    new = Config(max_jobs=8, policy="fifo", rules=(replace(GUESTS, submit=True), Rule("b", users=frozenset({1}))))
    found = compare(old, new)
    assert found.config == replace(old, max_jobs=8, rules=new.rules)
    assert found.changed == ["max_jobs 4 -> 8", "access rules: b added, a removed, guests changed"]
    assert found.waiting == ["policy 'guarded' -> 'fifo'"]
    assert compare(old, old) == (old, [], [])
    assert compare(Config(rules=(GUESTS, Rule("default"))), Config(rules=(Rule("default"), GUESTS))).changed == [
        "access rules: another order"
    ]


def reload(daemon: Daemon, found: Config | ConfigError) -> None:
    def read() -> Config:
        if isinstance(found, ConfigError):
            raise found
        return found

    reloading = daemon.loop.reloading(read)
    daemon.loop.call_soon(reloading.begin)
    daemon.turn()
    while reloading._reading:  # on another thread
        daemon.turn()


def in_force(daemon: Daemon) -> bool:
    text = generate_latest(daemon.metrics.registry).decode()
    return "gpumux_config_last_reload_successful 1.0" in text.splitlines()


@pytest.fixture
def daemon():
    daemon = Daemon(Config(max_jobs_per_user=1))
    daemon.connect("s", uid=1001)
    daemon.open_job("s", JOB)
    yield daemon
    daemon.close()


def test_limits_and_rules_count_for_the_next_request_and_what_is_open_stays(daemon):
    again = msg.OpenJob(7, OTHER, "more", 0, 1.0, 1.1, None, 2, 0)
    assert only(daemon.say("s", again)).code == "admission_refused"
    reload(daemon, Config(max_jobs_per_user=2, rules=(GUESTS,)))
    assert only(daemon.say("s", again)).code == "access_denied"
    ((loaded, _),) = daemon.load("s", JOB, samples.add_one())
    assert isinstance(loaded, msg.ProgramLoaded), "the job that was open goes on"
    reload(daemon, Config(max_jobs_per_user=2))
    assert isinstance(only(daemon.say("s", again)), msg.JobOpened)


def test_two_requests_at_once_end_with_what_the_file_says_last(daemon):
    files, reading = [Config(max_jobs=5), Config(max_jobs=6)], threading.Event()

    def read() -> Config:
        reading.wait(SOON_S)
        return files.pop(0)

    reloading = daemon.loop.reloading(read)
    for _ in range(3):
        daemon.loop.call_soon(reloading.begin)
    daemon.turn()
    reading.set()
    while files or daemon.loop.scheduler.config.max_jobs != 6:
        daemon.turn()


def test_a_mistake_changes_nothing_and_is_said(daemon, caplog):
    before = daemon.loop.context.config
    assert in_force(daemon)
    reload(daemon, ConfigError("that is wrong", "mend it"))
    assert daemon.loop.context.config is before
    assert daemon.loop.scheduler.config.max_jobs_per_uid == 1
    assert "was not reloaded, the old one stays in force: that is wrong" in caplog.text
    assert not in_force(daemon)
    reload(daemon, before)
    assert in_force(daemon)


# ---- a real daemon


@pytest.fixture(scope="module")
def live():
    path = Path(tempfile.mkdtemp(prefix="gmreload-"))
    config = path / "gpumux.toml"
    config.write_text("[limits]\nmax_jobs_per_user = 1\n")
    with serving(path, "--config", str(config), "--log-format", "json", *QUICK) as daemon:
        daemon.config = config
        yield daemon
    shutil.rmtree(path)


def hang_up(daemon, text: str, words: str) -> dict:
    """Write the file, send SIGHUP, and the line of the log that answers."""
    said = len(daemon.lines)
    daemon.config.write_text(text)
    daemon.process.send_signal(signal.SIGHUP)
    return json.loads(daemon.until(words, said))


def test_a_running_daemon_reloads_its_file(live):
    with Session.connect(live.endpoint, SOON_S) as session:
        job = LiveJob(session, samples.add_one(), name="first")
        with pytest.raises(AdmissionRefused, match="1 jobs open"):
            LiveJob(session, samples.add_one())
        body = hang_up(live, "[limits]\nmax_jobs_per_user = 2\n[daemon]\npolicy = 'fifo'\n", "was reloaded")
        assert body["message"] == "the configuration was reloaded: max_jobs_per_user 1 -> 2"
        assert "policy 'guarded' -> 'fifo'" in json.loads(live.until("wait for a restart"))["message"]
        second = LiveJob(session, samples.add_one())
        bad = hang_up(live, "[limits]\nmax_jobs_per_user = 'many'\n", "was not reloaded")
        assert bad["level"] == "error"
        assert "max_jobs_per_user must be a whole number" in bad["message"]
        assert "was not reloaded" in hang_up(live, "[limits\n", "not valid TOML")["message"]
        me = f"[access.rules.me]\nusers = [{os.getuid()}]\nsubmit = false\n"
        hang_up(live, me, "access rules: me added")
        with pytest.raises(AccessDenied, match="'me'"):
            LiveJob(session, samples.add_one())
        assert hang_up(live, me, "nothing has changed")
        with Control(live.endpoint, SOON_S) as control:
            assert control.status()["daemon"]["policy"] == "guarded"
        job.close()
        second.close()


def test_its_log_is_one_object_a_line_with_ids(live):
    lines = [json.loads(line) for line in live.lines]
    assert {"time", "level", "logger", "message"} <= set.intersection(*map(set, lines))
    opened = next(line for line in lines if "'first' opened" in line["message"])
    assert (opened["job"], opened["uid"]) == ("j1", os.getuid())
    assert any(line.get("session") for line in lines)
