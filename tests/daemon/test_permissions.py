"""What one user learns of another's jobs: what sharing a device takes, and no more."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client import generate_latest

from gpumux.access import Rule
from gpumux.config import Config
from gpumux.daemon import report
from gpumux.daemon.report import page_explanation
from gpumux.metrics.gauges import GaugeCollector
from gpumux.wire import messages as msg
from tests.program import samples

from .fakes import Daemon

MINE, THEIRS = "a" * 32, "b" * 32
SECRET = "secret-project"
OPERATORS = Rule("admins", users=frozenset({2000}), operator=True)


def shared(config: Config | None = None) -> Daemon:
    """Two users with a job each; `theirs` runs, with a name that other users must not see."""
    daemon = Daemon(config or Config(rules=(OPERATORS,)))
    for session, uid, job, name in (("me", 1001, MINE, "mine"), ("they", 1000, THEIRS, SECRET)):
        daemon.connect(session, uid=uid)
        daemon.open_job(session, job, name=name, inflight=6)
        daemon.load(session, job, samples.add_one())
    daemon.say("they", msg.Step(THEIRS, 1, 0, 0, [], 0))
    daemon.say("me", msg.Step(MINE, 1, 0, 0, [], 0))
    return daemon


@pytest.fixture
def daemon():
    daemon = shared()
    yield daemon
    daemon.close()


def entry(body: dict, short: str) -> dict:
    (found,) = (job for job in body["jobs"] if job["short"] == short)
    return found


def status(daemon: Daemon, session: str) -> dict:
    ((answer, _),) = daemon.say(session, msg.GetStatus(5))
    return answer.body


def test_a_neighbour_sees_a_short_id_priority_state_and_share(daemon):
    found = entry(status(daemon, "me"), "j2")
    assert (found["job"], found["name"], found["pid"], found["mine"]) == ("", "", 0, False)
    assert (found["priority"], found["state"], found["uid"]) == ("low", "open", 1000)
    assert {"device_busy_s", "memory_bytes", "promise", "weight"} <= set(found)
    own = entry(status(daemon, "me"), "j1")
    assert (own["job"], own["name"], own["mine"]) == (MINE, "mine", True)


@pytest.mark.parametrize("uid", [0, 2000, 1000], ids=["root", "operator", "owner, from elsewhere"])
def test_its_owner_root_and_operators_see_all_of_it(daemon, uid):
    daemon.connect("t", uid=uid)
    found = entry(status(daemon, "t"), "j2")
    assert (found["job"], found["name"], found["mine"]) == (THEIRS, SECRET, True)


def test_nothing_a_neighbour_may_ask_for_tells_names_ids_or_operators(daemon):
    """Whatever answer comes, in whatever form."""
    session = daemon.router.open["me"]
    assert session.uid == 1001
    asked = [
        msg.GetStatus(1), msg.JobStats(2, THEIRS), msg.JobStats(3, MINE), msg.ExplainJob(4, MINE),
        msg.ExplainJob(5, THEIRS), msg.ProfileJob(6, THEIRS, None), msg.PauseJob(7, THEIRS),
        msg.CloseJob(8, THEIRS, False), msg.OpenJob(9, THEIRS, "x", 0, 1.0, 1.1, None, 1, 0), msg.RecordTrace(10, 1.0),
        msg.RecordTrace(11, 0.0),
    ]  # fmt: skip
    heard = []
    for message in asked:
        heard += daemon.say("me", message)
        daemon.now += 0.1
    text = ""
    for message, frames in heard:
        text += repr(message)
        if isinstance(message, msg.TracePart):
            text += repr(msg.unpack(frames[0]))
    assert "JobSeen" in text
    assert "j2" in text
    assert SECRET not in text
    assert text.count(THEIRS) == 0, text


def test_the_story_of_ones_own_job_names_neighbours_by_short_id():
    daemon = shared()
    try:
        for number in range(2, 7):  # the low window is theirs
            daemon.say("they", msg.Step(THEIRS, number, 0, number - 1, [], 0))
        daemon.say("me", msg.Step(MINE, 2, 0, 1, [], 0))
        ((answer, _),) = daemon.say("me", msg.ExplainJob(4, MINE))
        raw = "\n".join(daemon.loop.scheduler.story(MINE) + daemon.loop.scheduler.explain(MINE))
        told = "\n".join(answer.body["story"] + answer.body["sentences"])
        assert THEIRS in raw, "the neighbour is part of the story"
        assert "j2" in told
        assert THEIRS not in told
        assert SECRET not in told
    finally:
        daemon.close()


@pytest.mark.parametrize(("setting", "there"), [("hidden", False), ("shown", True)])
def test_metrics_which_ask_for_no_password_name_jobs_only_where_the_operator_said_so(setting, there):
    daemon = shared(Config(metrics_names=setting))
    try:
        daemon.metrics.add_gauges(GaugeCollector(daemon.loop.figures, "0"))
        text = generate_latest(daemon.metrics.registry).decode()
        assert 'job_id="j2"' in text
        assert (SECRET in text) is there
        assert THEIRS not in text
    finally:
        daemon.close()


@pytest.mark.parametrize(("setting", "there"), [("hidden", False), ("shown", True)])
def test_the_status_page_explains_jobs_without_operators_and_names_them_only_where_the_operator_said_so(setting, there):
    daemon = shared(Config(metrics_names=setting))
    try:
        scheduler, context = daemon.loop.scheduler, daemon.loop.context
        daemon.say("they", msg.PauseJob(8, THEIRS))
        found = page_explanation(scheduler, context, "j2")
        assert found == {
            "short": "j2",
            "name": SECRET if there else "",
            "priority": "low",
            "verdict": "paused",
            "causes": [],
            "remedies": [{"text": "let it go on", "command": "gpumux jobs resume j2"}],
        }
        assert page_explanation(scheduler, context, "j1")["priority"] == "low"
        assert page_explanation(scheduler, context, "j3") is None
        assert page_explanation(scheduler, context, THEIRS) is None, "whole ids are not for it"
    finally:
        daemon.close()


def test_another_thread_has_the_loop_explain_a_job_and_hears_when_it_does_not(daemon):
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(daemon.loop.explain, "j1")
        while not asked.done():
            daemon.turn()
        assert asked.result()["short"] == "j1"
        with pytest.raises(TimeoutError):
            pool.submit(daemon.loop.explain, "j1").result()
        daemon.turn()


def test_an_explanation_that_fails_is_a_bug_of_a_report_and_ends_nothing(daemon, monkeypatch):
    monkeypatch.setattr(report, "page_explanation", lambda *_: 1 / 0)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(daemon.loop.explain, "j1")
        while not asked.done():
            daemon.turn()
        with pytest.raises(TimeoutError, match="its log has the reason"):
            asked.result()
    assert len(status(daemon, "me")["jobs"]) == 2


def test_a_body_of_status_is_whole_json_for_either(daemon):
    for session in ("me", "they"):
        json.dumps(status(daemon, session), allow_nan=False)


def test_only_an_operator_takes_the_recorder_over(daemon):
    assert daemon.say("me", msg.RecordTrace(1, 600.0)) == []
    ((refused, _),) = daemon.say("they", msg.RecordTrace(2, 1.0))
    assert refused.code == "admission_refused"
    daemon.connect("admin", uid=2000)
    assert daemon.say("admin", msg.RecordTrace(3, 1.0)) == []
    ended = [m for to, m, _ in daemon.router.sent if to == "me" and isinstance(m, msg.TracePart)]
    assert [m.last for m in ended] == [True]
    assert "an operator records now" in ended[0].reason
    daemon.connect("root", uid=0)
    ((refused, _),) = daemon.say("root", msg.RecordTrace(4, 1.0))
    assert refused.code == "admission_refused", "operators wait for each other"


def test_one_user_does_not_take_all_shared_memory():
    daemon = Daemon(Config(max_shared_bytes_per_user=4096))
    try:
        for session, uid, job in (("me", 1001, MINE), ("they", 1000, THEIRS)):
            daemon.connect(session, uid=uid)
            daemon.open_job(session, job)
            ((loaded, _),) = daemon.load(session, job, samples.add_one(), new_buffers=[8192])
            assert isinstance(loaded, msg.ProgramLoaded)
        ((refused, _),) = daemon.say("me", msg.OpenTransfer(7, MINE, 1, [0], False))
        assert "max_shared_bytes_per_user" in refused.remedy
        daemon.disconnect("me")
        daemon.disconnect("they")
        assert daemon.loop.segments.used_by == {}
        assert daemon.loop.segments.used_bytes == 0
    finally:
        daemon.close()
