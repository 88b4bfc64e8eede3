"""The device plugin, with a kubelet that speaks its API and with a daemon that enforces what was granted."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import uuid
from http.server import BaseHTTPRequestHandler, HTTPServer

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumux.client.session import Session
from gpumux.errors import AccessDenied, AdmissionRefused, ConfigError, DaemonGone
from gpumux.integrations.kubernetes import __main__ as command
from gpumux.integrations.kubernetes.plugin import DevicePlugin, Node
from gpumux.integrations.kubernetes.shares import GRACE_S, NodeShares, Offer
from gpumux.program import codec
from gpumux.types import Priority
from gpumux.wire import messages as msg
from gpumux.wire.grants import TOKEN, GrantDirectory
from tests.daemon.live import SOON_S, serving
from tests.integrations.kubelet import LIMIT_S, FakeKubelet
from tests.program import samples

IDS = [f"share-{number}" for number in range(100)]


class Ready:
    """A daemon's /readyz."""

    def __init__(self):
        self.ok = True
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200 if outer.ok else 503)
                self.end_headers()

            def log_message(self, *args):
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/readyz"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self):
        self._server.shutdown()
        self._thread.join(LIMIT_S)
        self._server.server_close()


@pytest.fixture(scope="module", autouse=True)
def grpc_runs(tmp_path_factory):
    """What grpc opens once in a process is open before the first test is watched for leaks, until the last."""
    kubelet = FakeKubelet(tmp_path_factory.mktemp("first"))
    node = Node(kubelet.place / "grants", "ipc:///x/y", "", kubelet.place, kubelet.place / "pods.sock")
    plugin = DevicePlugin(Offer(), node)
    plugin.step(0.0)
    kubelet.allocate(["share-0"])
    yield
    plugin.close()
    kubelet.stop()


@pytest.fixture
def ready():
    made = Ready()
    yield made
    made.close()


@pytest.fixture
def kubelet(tmp_path_factory):
    made = FakeKubelet(tmp_path_factory.mktemp("k"))
    yield made
    made.stop()


@pytest.fixture
def grants(tmp_path):
    return GrantDirectory(tmp_path / "grants")


@pytest.fixture
def plugin(kubelet, ready, grants):
    node = Node(
        grants.path, "ipc:///run/gpumux/0/pods/gpumux.sock", ready.url, kubelet.place, kubelet.place / "pods.sock"
    )
    made = DevicePlugin(Offer(), node)
    yield made
    made.close()


def healths(kubelet):
    seen = kubelet.health.get(timeout=LIMIT_S)
    assert sorted(seen) == sorted(IDS)
    (health,) = set(seen.values())
    return health


def test_it_registers_once_and_says_that_all_shares_are_healthy(plugin, kubelet):
    plugin.step(0.0)
    plugin.step(5.0)
    assert kubelet.registered == [{1: b"v1beta1", 2: b"gpumux-share.sock", 3: b"gpumux.dev/share", 4: b""}]
    assert healths(kubelet) == "Healthy"
    assert kubelet.options() == b""


def test_shares_follow_the_daemons_readiness(plugin, kubelet, ready):
    plugin.step(0.0)
    assert healths(kubelet) == "Healthy"
    ready.ok = False
    plugin.step(5.0)
    assert healths(kubelet) == "Unhealthy"
    ready.ok = True
    plugin.step(10.0)
    assert healths(kubelet) == "Healthy"


def test_it_registers_with_a_kubelet_that_restarts(plugin, kubelet):
    plugin.step(0.0)
    assert healths(kubelet) == "Healthy"
    kubelet.stop()
    plugin.step(5.0)  # away: logged, and tried again
    kubelet.start()
    plugin.step(10.0)
    assert len(kubelet.registered) == 2
    assert healths(kubelet) == "Healthy"
    assert len(kubelet.allocate(IDS[:3])) == 1


def test_a_container_gets_the_socket_read_only_and_a_token_of_its_own(plugin, kubelet, grants):
    plugin.step(0.0)
    (one, two) = kubelet.allocate(IDS[:25], IDS[25:30])
    for (envs, mounts), shares in ((one, 25), (two, 5)):
        assert mounts == [("/run/gpumux/0/pods", "/run/gpumux/0/pods", True)]
        assert envs["GPUMUX_ENDPOINT"] == "ipc:///run/gpumux/0/pods/gpumux.sock"
        assert envs["NVIDIA_VISIBLE_DEVICES"] == "void"
        grant = grants.grant_of(envs[TOKEN], 1000)
        assert (grant.shares, grant.max_bytes, grant.max_priority) == (shares, shares * 10, Priority.LOW)
    assert one[0][TOKEN] != two[0][TOKEN]


def test_shares_that_are_not_offered_are_refused_and_nothing_is_granted(plugin, kubelet, grants):
    plugin.step(0.0)
    for wrong in (["share-100"], ["gpu-0"], [], ["share-1", "share-1"]):
        code, details = kubelet.refused(wrong)
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert "100 of gpumux.dev/share" in details
    assert grants.records() == []


def test_a_grant_is_released_when_the_kubelet_lists_its_pod_no_more(plugin, kubelet, grants):
    plugin.step(0.0)
    ((envs, _),) = kubelet.allocate(IDS[:25])
    kubelet.pods["trainer"] = ("gpumux.dev/share", IDS[:25])
    plugin.step(5.0)
    plugin.step(5.0 + 10 * GRACE_S)
    assert grants.grant_of(envs[TOKEN], 1000)
    del kubelet.pods["trainer"]
    kubelet.pods["another"] = ("example.com/share", IDS[:25])  # another resource with ids like ours
    plugin.step(6.0 + 10 * GRACE_S)
    plugin.step(7.0 + 11 * GRACE_S)
    with pytest.raises(AccessDenied):
        grants.grant_of(envs[TOKEN], 1000)


def test_shares_that_are_given_again_release_the_old_grant_at_once(plugin, kubelet, grants):
    plugin.step(0.0)
    ((old, _),) = kubelet.allocate(IDS[:25])
    ((new, _),) = kubelet.allocate(IDS[24:40])
    with pytest.raises(AccessDenied):
        grants.grant_of(old[TOKEN], 1000)
    assert grants.grant_of(new[TOKEN], 1000).shares == 16


def test_nothing_is_released_while_the_kubelet_does_not_say_what_is_used(plugin, kubelet, grants):
    plugin.step(0.0)
    kubelet.allocate(IDS[:25])
    kubelet.stop()
    plugin.step(5.0)
    plugin.step(5.0 + 2 * GRACE_S)
    assert len(grants.records()) == 1


def test_a_directory_of_grants_that_others_may_write_to_stops_no_plugin(plugin, kubelet, grants):
    plugin.step(0.0)
    kubelet.allocate(IDS[:25])
    grants.path.chmod(0o777)
    plugin.step(5.0)
    assert "others may write" in kubelet.refused(IDS[30:31])[1]
    grants.path.chmod(0o755)
    assert len(kubelet.allocate(IDS[30:31])) == 1


def test_a_plugin_that_restarts_knows_the_grants_it_made(grants):
    before = NodeShares(Offer(), grants)
    before.allocate(IDS[:2])
    after = NodeShares(Offer(), grants)
    assert after.release_unused([], 0.0) == []
    (gone,) = after.release_unused([], GRACE_S)
    assert gone.startswith("pod-")
    assert grants.records() == []


def test_a_grant_in_use_again_has_its_time_anew(grants):
    shares = NodeShares(Offer(), grants)
    shares.allocate(IDS[:2])
    shares.release_unused([], 0.0)
    shares.release_unused([("gpumux.dev/share", IDS[1])], GRACE_S - 1)
    assert shares.release_unused([], GRACE_S) == []
    assert shares.release_unused([], 2 * GRACE_S - 1) == []
    assert len(shares.release_unused([], 2 * GRACE_S)) == 1


def test_grants_of_a_larger_offer_are_released_after_it_was_made_smaller(grants):
    NodeShares(Offer(), grants).allocate(["share-10", "share-99"])
    smaller = NodeShares(Offer(shares=60), grants)
    smaller.release_unused([], 0.0)
    assert len(smaller.release_unused([], GRACE_S)) == 1
    assert grants.records() == []


def test_a_port_that_speaks_no_http_is_a_daemon_that_is_not_ready(kubelet, grants):
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/readyz"

        def answer():
            with server.accept()[0] as connection:
                connection.recv(1 << 16)
                connection.sendall(b"220 mail\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        node = Node(grants.path, "ipc:///x/y", url, kubelet.place, kubelet.place / "pods.sock")
        plugin = DevicePlugin(Offer(), node)
        try:
            plugin.step(0.0)
            assert healths(kubelet) == "Unhealthy"
        finally:
            thread.join(LIMIT_S)
            plugin.close()


def test_two_offers_of_one_device_leave_each_others_grants_alone(grants):
    low = NodeShares(Offer(shares=60), grants)
    high = NodeShares(Offer("gpumux.dev/high-share", 40, 100, Priority.HIGH), grants)
    low.allocate(["share-0"])
    token = high.allocate(["high-share-0"])
    grants.make("slurm-7", 1, 100, max_priority=Priority.LOW)  # and what others made
    low.release_unused([], 0.0)
    low.release_unused([], GRACE_S)
    assert [record.name[:4] for record in grants.records()] == ["pod-", "slur"]
    assert grants.grant_of(token, 1000).max_priority is Priority.HIGH


@given(st.lists(st.sets(st.sampled_from(IDS[:12]), min_size=1, max_size=12), max_size=6), st.data())
@settings(max_examples=25, deadline=None)
def test_grants_never_overlap_and_never_exceed_the_device(tmp_path_factory, allocations, data):
    grants = GrantDirectory(tmp_path_factory.mktemp("grants"))
    shares, now = NodeShares(Offer(shares=12, of=12), grants), 0.0
    for devices in allocations:
        shares.allocate(sorted(devices))
        in_use = data.draw(st.sets(st.sampled_from(IDS[:12])))
        now += data.draw(st.floats(0.0, 2 * GRACE_S))
        shares.release_unused([("gpumux.dev/share", each) for each in in_use], now)
        held = [device for record in grants.records() for device in record.devices]
        assert len(held) == len(set(held))
        assert sum(record.shares for record in grants.records()) <= 12


@pytest.mark.parametrize(
    "wrong",
    [
        ("share", 1, 1), ("a/", 1, 1), ("/b", 1, 1), ("a/b/c", 1, 1), ("a/-b", 1, 1), ("a/b-", 1, 1), ("a./b", 1, 1),
        ("A/b", 1, 1), ("a/b_c", 1, 1), ("a/" + 64 * "b", 1, 1), ("a/b", 2, 1), ("a/b", 0, 1), ("a/b", 1, 1001),
    ],
)  # fmt: skip
def test_an_offer_is_checked(wrong):
    with pytest.raises(ConfigError) as error:
        Offer(*wrong)
    assert error.value.remedy


def test_wrong_configuration_ends_the_command_with_78(tmp_path, caplog):
    assert command.main(["--grants", str(tmp_path), "--endpoint", "tcp://127.0.0.1:7", "--shares", "1"]) == 78
    assert command.main(["--grants", str(tmp_path), "--endpoint", "ipc:///x/y", "--shares", "101"]) == 78
    assert "not on this machine" in caplog.text


# ---- With a daemon.


def submit(session, name, nbytes, priority=0):
    """Open a job and load a program with so many bytes of state; the job."""
    job = uuid.uuid4().hex
    session.register(job, lambda message, frames: None)
    session.call(msg.OpenJob(0, job, name, priority, 1.0, 1.1, None, 2, 0))
    session.call(msg.LoadProgram(0, job, 0, [nbytes], [0]), [codec.encode(samples.counter())], SOON_S)
    return job


def test_a_pods_share_is_enforced_from_its_allocation_to_its_end(kubelet, grants, runtime_dir, monkeypatch, tmp_path):
    pods = runtime_dir / "pods"
    pods.mkdir(mode=0o755)
    monkeypatch.setenv("GPUMUX_GRANTS", str(grants.path))
    monkeypatch.setenv("GPUMUX_GRANTS_ENDPOINT", f"ipc://{pods}/gpumux.sock")
    with serving(runtime_dir) as daemon:
        for name in ("GPUMUX_GRANTS", "GPUMUX_GRANTS_ENDPOINT"):
            monkeypatch.delenv(name)
        log = (tmp_path / "plugin.log").open("w")
        arguments = {
            "--grants": grants.path,
            "--endpoint": f"ipc://{pods}/gpumux.sock",
            "--ready-url": daemon.metrics_url.replace("/metrics", "/readyz"),
            "--kubelet": kubelet.place,
            "--pod-resources": kubelet.place / "pods.sock",
        }
        words = [str(word) for pair in arguments.items() for word in pair]
        process = subprocess.Popen([sys.executable, "-m", "gpumux.integrations.kubernetes", *words], stderr=log)
        try:
            while healths(kubelet) != "Healthy":
                pass
            ((small, _), (large, _)) = kubelet.allocate(IDS[:1], IDS[1:51])
            endpoint = small["GPUMUX_ENDPOINT"]
            with pytest.raises(AccessDenied, match="granted a share"):
                Session.connect(endpoint)
            monkeypatch.setenv(TOKEN, small[TOKEN])
            with pytest.raises(AccessDenied, match="don't count"):
                Session.connect(daemon.endpoint)
            with Session.connect(endpoint) as first:
                monkeypatch.setenv(TOKEN, large[TOKEN])
                with Session.connect(endpoint) as second:
                    memory = first.welcome.device["memory_bytes"]
                    with pytest.raises(AdmissionRefused, match=r"your share of the device \(1 of 100\)"):
                        submit(first, "greedy", memory // 90)
                    with pytest.raises(AccessDenied, match="above what rule"):
                        submit(first, "important", 4, priority=1)
                    submit(first, "a", 4)
                    theirs = submit(second, "b", memory // 90)
                    jobs = {job["name"]: job for job in second.call(msg.GetStatus(0))[0].body["jobs"]}
                    assert (jobs["b"]["weight"], jobs[""]["weight"]) == (0.5, 0.01 / 2)  # "greedy" is open, too
                    assert not jobs[""]["mine"], "another pod's"
                    # The pod's end: the kubelet gives its shares to another container.
                    kubelet.allocate(IDS[1:2])
                    daemon.until("was released")
                    with pytest.raises((AccessDenied, DaemonGone)):
                        second.call(msg.JobStats(0, theirs))
                    first.call(msg.GetStatus(0))
        finally:
            process.send_signal(signal.SIGTERM)
            code = process.wait(SOON_S)
            log.close()
        assert code == 0, (tmp_path / "plugin.log").read_text()
        assert not list(kubelet.place.glob("gpumux-*"))


def test_a_socket_on_a_mount_that_can_not_be_written_to_can_be_connected_to(tmp_path):
    """Containers have the daemon's directory read-only."""
    if os.geteuid() != 0:
        pytest.skip("mounts: run as root")
    place, script = tmp_path / "pods", 'mount --bind -o ro $0 $0 && mount -o remount,bind,ro $0 && exec "$1" -c "$2" $0'
    place.mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place / "s"))
        listener.listen()
        code = textwrap.dedent("""
            import os, socket, sys
            socket.socket(socket.AF_UNIX).connect(sys.argv[1] + "/s")
            try:
                os.unlink(sys.argv[1] + "/s")
            except OSError as error:
                print(error.strerror)
        """)
        command = ["unshare", "--mount", "sh", "-c", script, str(place), sys.executable, code]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
        if "unshare failed" in done.stderr or "permission denied" in done.stderr.lower():
            pytest.skip(f"no mount namespace here: {done.stderr.strip()}")
        assert (done.stdout, done.stderr) == ("Read-only file system\n", "")
