"""Real users of one daemon: each is let in, refused or limited exactly as the configuration says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.users import become

from .live import QUICK, SOON_S, serving

ROOT = Path(__file__).parents[2]
STUDENT, STUDENTS = 63_011, 63_110  # ids that need no entry anywhere
GUEST, OTHER, ADMIN = 63_012, 63_013, 63_014
RULES = f"""
[access.rules.students]
groups = [{STUDENTS}]
max_priority = "low"
max_jobs = 1
max_bytes = 65536
max_weight = 2.0

[access.rules.guests]
users = [{GUEST}]
submit = false

[access.rules.admins]
users = [{ADMIN}]
operator = true
"""

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="takes on other users' ids: run as root")


class User:
    """A client process with a user id of its own."""

    def __init__(self, endpoint: str, uid: int, groups: list[int]):
        command = [*become(uid, uid, groups), sys.executable, "-m", "tests.daemon.stranger", endpoint]
        self._process = subprocess.Popen(
            command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "HOME": "/"}
        )

    def do(self, *request):
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def leave(self) -> None:
        self._process.stdin.close()
        self._process.stdout.close()
        assert self._process.wait(SOON_S) == 0


@contextmanager
def users(endpoint: str, **who: tuple[int, list[int]]):
    made = {name: User(endpoint, uid, groups) for name, (uid, groups) in who.items()}
    try:
        yield made
    finally:
        for user in made.values():
            user.leave()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    import shutil
    import tempfile

    path = Path(tempfile.mkdtemp(prefix="gmaccess-"))
    config = path / "gpumux.toml"
    config.write_text(RULES)
    path.chmod(0o755)
    before = os.umask(0)  # every user may connect: what follows is not the effect of file modes
    try:
        with serving(path, "--config", str(config), *QUICK) as daemon:
            os.umask(before)
            yield daemon
    finally:
        os.umask(before)
        shutil.rmtree(path)


def refused(answer, code: str, *said: str) -> None:
    assert isinstance(answer, dict), answer
    assert answer["code"] == code, answer
    for word in said:
        assert word in answer["message"] + answer["remedy"], answer


def test_each_user_may_do_what_the_rules_say_and_no_more(daemon):
    who = {
        "student": (STUDENT, [STUDENTS]),
        "guest": (GUEST, []),
        "other": (OTHER, []),
        "admin": (ADMIN, []),
    }
    with users(daemon.endpoint, **who) as people:
        student, guest, other, admin = (people[name] for name in who)
        # which users may submit, at which priority and weight, how many jobs and how much memory
        refused(guest.do("open", "mine", 0, 1.0), "access_denied", "'guests'", "submit in [access.rules.guests]")
        refused(student.do("open", "mine", 1, 1.0), "access_denied", "'students'", "max_priority")
        refused(student.do("open", "mine", 0, 2.5), "access_denied", "max_weight in [access.rules.students]")
        job = student.do("open", "thesis", 0, 2.0)
        assert isinstance(job, str)
        refused(student.do("open", "more", 0, 1.0), "admission_refused", "max_jobs in [access.rules.students]")
        refused(student.do("load", job, 1 << 20), "admission_refused", "max_bytes in [access.rules.students]")
        assert student.do("load", job, 4) == ""
        theirs = other.do("open", "secret", 1, 50.0)
        assert isinstance(theirs, str)
        # what each user sees
        (seen,) = [entry for entry in student.do("status") if not entry["mine"]]
        assert (seen["job"], seen["name"], seen["pid"], seen["uid"]) == ("", "", 0, OTHER)
        assert sorted(entry["name"] for entry in admin.do("status")) == ["secret", "thesis"]
        # what each user may change
        for stranger in (student, guest):
            for request in (("pause", theirs), ("stop", theirs), ("change", theirs, 0, None)):
                refused(stranger.do(*request), "not_owner")
        refused(student.do("change", job, 1, None), "access_denied", "max_priority")
        refused(student.do("change", job, None, 3.0), "access_denied", "max_weight")
        assert student.do("change", job, None, 1.5) == ""
        assert admin.do("change", job, 0, 30.0) == ""
        assert [entry["weight"] for entry in student.do("status") if entry["mine"]] == [30.0]
        assert admin.do("pause", theirs) == ""
        assert admin.do("stop", theirs) == ""
        assert other.do("change", job, 0, None)["code"] == "not_owner"


def test_rules_that_change_count_for_the_next_connection(daemon):
    path = Path(daemon.endpoint.removeprefix("ipc://")).parent / "gpumux.toml"
    said = len(daemon.lines)
    with users(daemon.endpoint, guest=(GUEST, [])) as people:
        guest = people["guest"]
        refused(guest.do("open", "mine", 0, 1.0), "access_denied")
        try:
            path.write_text(RULES.replace("submit = false", "max_jobs = 1"))
            daemon.process.send_signal(signal.SIGHUP)
            daemon.until("reloaded", said)
            assert isinstance(guest.do("open", "mine", 0, 1.0), str)
            refused(guest.do("open", "mine", 0, 1.0), "admission_refused", "max_jobs in [access.rules.guests]")
        finally:
            path.write_text(RULES)
            daemon.process.send_signal(signal.SIGHUP)
