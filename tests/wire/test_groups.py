"""The groups of a local peer come from the kernel, as they were when it connected."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from gpumux.wire import peers
from gpumux.wire.router import Opened
from tests.wire.world import HELLO


def test_a_session_knows_its_peers_groups(world, make_client):
    make_client(world).send(HELLO)
    peer = world.next(Opened).peer
    assert (peer.uid, peer.gid, peer.key) == (os.getuid(), os.getgid(), "")
    assert set(peer.groups) == set(os.getgroups())


MANY = """
import os, socket, sys
os.setgroups(range(1000, 1000 + int(sys.argv[2])))
sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
sock.connect(sys.argv[1])
sock.recv(1)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root may join groups")
@pytest.mark.parametrize("count", [0, 255, 5000])
def test_a_peer_in_very_many_groups(count, tmp_path):
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen()
        with subprocess.Popen([sys.executable, "-c", MANY, path, str(count)]) as child:
            connection, _ = listener.accept()
            with connection:
                assert sorted(peers._peer_groups(connection)) == list(range(1000, 1000 + count))
        assert child.returncode == 0
