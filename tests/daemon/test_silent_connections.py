"""Two users with as many connections as they can have, who say nothing: root and other users are let in."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from gpumux.client.session import Session
from gpumux.wire import messages as msg
from tests.daemon.live import QUICK, SOON_S, serving

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can connect as other users")

# Connects as the user given, 165 times and again whenever it is cut, until its input ends; says when it has begun.
SILENT = """
import os, select, socket, sys

path, uid = sys.argv[1], int(sys.argv[2])
os.setgid(uid)
os.setuid(uid)
poller, held = select.poll(), {}
poller.register(0, select.POLLIN | select.POLLHUP)

def connect():
    made = socket.socket(socket.AF_UNIX)
    made.setblocking(False)
    if made.connect_ex(path):
        made.close()  # the line is full
        return
    held[made.fileno()] = made
    poller.register(made, select.POLLHUP)

for _ in range(165):
    connect()
print("begun", flush=True)
while True:
    for fd, _ in poller.poll(10):
        if fd == 0:
            sys.exit()
        poller.unregister(fd)
        held.pop(fd).close()
    while len(held) < 165:
        before = len(held)
        connect()
        if len(held) == before:
            break
"""


def test_two_users_who_say_nothing_lock_nobody_out(tmp_path: Path):
    before = os.umask(0)
    try:
        with serving(tmp_path, *QUICK) as daemon:
            socket_path = tmp_path / "gpumux.sock"
            for path in (tmp_path, *tmp_path.parents):
                if path.stat().st_uid == 0 and path != Path("/"):
                    path.chmod(path.stat().st_mode | stat.S_IXGRP | stat.S_IXOTH)
            crowds = [
                subprocess.Popen(
                    [sys.executable, "-c", SILENT, str(socket_path), str(uid)],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                )
                for uid in (1001, 1002)
            ]  # fmt: skip
            try:
                for crowd in crowds:
                    assert crowd.stdout is not None
                    assert crowd.stdout.readline() == b"begun\n"
                for _ in range(3):
                    session = Session.connect(daemon.endpoint, SOON_S, role="control")
                    report, _ = session.call(msg.GetStatus(0))
                    assert report.body["jobs"] == []
                    session.close()
                assert all(crowd.poll() is None for crowd in crowds)
            finally:
                for crowd in crowds:
                    crowd.communicate()
            assert [crowd.returncode for crowd in crowds] == [0, 0]
    finally:
        os.umask(before)
