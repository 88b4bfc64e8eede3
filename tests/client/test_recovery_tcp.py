"""Jobs over tcp, with CURVE: after their daemon was killed they end with the results of an undisturbed run."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpumux.wire.peers import make_keys
from microbench.killed import dropout_adam, plain
from microbench.kills import Phoenix, differences, submit

SEED = 5


pytestmark = pytest.mark.usefixtures("one_thread")  # as the daemons here have


@pytest.fixture
def port() -> Iterator[int]:
    """A port that is held for the length of the test, also while no daemon listens, so that no other test or connection
    gets it. A listener that binds it by number does get it: libzmq sets SO_REUSEADDR as well, and this socket does not
    listen."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])


@pytest.mark.slow
@pytest.mark.timeout(900)  # daemons start, and machines are busy
@pytest.mark.extended
def test_a_killed_daemon_costs_a_remote_job_time_and_no_training(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    server, alice = (make_keys(tmp_path / name, name) for name in ("daemon", "alice"))
    clients = tmp_path / "clients"
    clients.mkdir()
    (clients / "alice.key").write_text(alice[0].read_text())
    monkeypatch.setenv("GPUMUX_CURVE_KEY", str(alice[1]))
    monkeypatch.setenv("GPUMUX_CURVE_SERVER", str(server[0]))
    config = tmp_path / "gpumux.toml"
    config.write_text(f'[access]\ncurve_secret_key = "{server[1]}"\ncurve_client_keys = "{clients}"\n')
    address = f"tcp://127.0.0.1:{port}"
    daemon = Phoenix(tmp_path, flags=["--endpoint", address, "--config", str(config)])
    try:
        daemon.wait_until_ready()
        run = submit(dropout_adam(SEED), address)
        with run.job:
            log = run.job._recovery.recorder.log
            run.job._recovery.snapshots._due = float("inf")  # three turns may take longer than until the first one
            for _ in range(3):
                run.turn()
            daemon.kill()  # nothing was saved yet
            while not any(point.saved and number >= 1 for number, point in log._points.items()):
                run.turn()
                threading.Event().wait(0.01)  # the writer of snapshots has the lowest priority
            daemon.restart()  # in order, as systemd does: SIGTERM, last snapshots, another process
            for _ in range(6):
                run.turn()
            run.finish()
            alone = dropout_adam(SEED)
            assert differences(run.results, plain(alone, run.turns)) == 0
            assert differences(run.trial.state(), alone.state()) == 0
        daemon.stop()
    finally:
        daemon.close()
    back = [r.getMessage() for r in caplog.records if "It is back after" in r.getMessage()]
    assert len(back) == 2
    assert "from its first state" in back[0]
    assert f"the daemon at {address} is gone" in back[0]
    assert "from snapshot" in back[1]
    assert "the daemon is leaving" in back[1]
    assert (tmp_path / "state" / "snapshots").is_dir()
