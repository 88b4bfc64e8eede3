"""A real daemon under clients that lie: every message in valid sessions, changed; its local channel;
bytes that are no ZeroMQ. Meanwhile an honest client's steps are right, and afterwards nothing is left
behind."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import suppress
from pathlib import Path

import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpumux.cli.control import Control
from gpumux.client.session import Session
from gpumux.program import codec as programs
from gpumux.types import GENERATOR_BYTES
from gpumux.wire import messages as keeping
from gpumux.wire import messages as msg
from gpumux.wire.codec import decode, encode
from tests.daemon.live import SOON_S, LiveJob, read_floats, serving
from tests.program import samples

PROGRAM = programs.encode(samples.counter())
OTHERS = "f" * 32
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))  # for a longer run: other lies each time

NUMBERS = st.sampled_from([0, 1, 2, 3, 7, 2**31, 2**53, 2**63 - 1])
GENERATORS = [[b""], [b"short"], [bytes(GENERATOR_BYTES)], [b"\xff" * GENERATOR_BYTES]]
FLOATS = st.sampled_from([0.0, 1.0, -1.0, 1e-300, 1e300])


class Liar:
    """A session with its channel and a loaded program: all that an honest client has."""

    def __init__(self, context: zmq.Context, endpoint: str) -> None:
        self.endpoint = endpoint
        self.sock = context.socket(zmq.DEALER)
        self.sock.setsockopt(zmq.LINGER, 0)
        self.sock.connect(endpoint)
        self.say(msg.Hello(msg.PROTOCOL_VERSION, "0.1.0", "client", 1, "2", False))
        self.welcome = self.hear(msg.Welcome)
        self.channel = self.connect(self.welcome.channel)
        self.channel.send(encode(msg.OpenChannel(msg.PROTOCOL_VERSION, self.welcome.nonce))[0])
        assert isinstance(decode((self.channel.recv(1 << 16),))[0], msg.ChannelOpened)
        self.job = uuid.uuid4().hex
        self.say(msg.OpenJob(1, self.job, "liar", 1, 1.0, 1.1, None, 2, 0))
        self.hear(msg.JobOpened)  # it may wait for its turn, and what comes before that has no job
        self.say(msg.LoadProgram(2, self.job, 0, [4], [0]), PROGRAM)
        self.hear(msg.ProgramLoaded)
        assert isinstance(decode((self.channel.recv(1 << 16),))[0], msg.SegmentPassed)
        self.number = 0

    def connect(self, path: str, kind: int = socket.SOCK_SEQPACKET) -> socket.socket:
        made = socket.socket(socket.AF_UNIX, kind)
        made.settimeout(SOON_S)
        try:
            made.connect(path)
        except OSError:
            made.close()
            raise
        return made

    def say(self, message: msg.Message, *frames: bytes) -> None:
        self.sock.send_multipart(encode(message, frames))

    def hear(self, kind: type):
        while self.sock.poll(SOON_S * 1000):
            message, _ = decode(self.sock.recv_multipart())
            if isinstance(message, kind):
                return message
            assert not isinstance(message, msg.Refusal), message
        raise AssertionError(f"no {kind.__name__} came")

    def honest_step(self) -> bytes:
        self.number += 1
        return bytes(encode(msg.Step(self.job, self.number, 0, self.number % 2, [1.0], 0))[0])

    def work(self, steps: int) -> None:
        for _ in range(steps):
            self.channel.send(self.honest_step())
            answer, _ = decode((self.channel.recv(1 << 16),))
            assert isinstance(answer, msg.StepDone), answer

    def close(self) -> None:
        for end in (self.channel, self.sock):
            end.close()


def requests(job: st.SearchStrategy[str]):
    """Messages of every kind a client may send, well-formed, with odd numbers. (message, payload frames)"""
    optional = st.none() | NUMBERS
    empty: st.SearchStrategy[list[bytes]] = st.just([])
    lists = st.lists(NUMBERS, max_size=3)
    scalars = st.lists(FLOATS | NUMBERS, max_size=3)
    return st.one_of(
        *(
            st.tuples(
                st.builds(opening, NUMBERS, job, st.just("x"), NUMBERS, FLOATS, FLOATS, optional, NUMBERS, NUMBERS),
                empty,
            )
            for opening in (msg.OpenJob, msg.OpenFusibleJob)
        ),
        st.tuples(st.builds(msg.LoadProgram, NUMBERS, job, NUMBERS, lists, lists), st.just([PROGRAM[:40]])),
        st.tuples(st.builds(msg.Step, job, NUMBERS, NUMBERS, NUMBERS, scalars, st.just(0)), empty),
        st.tuples(st.builds(msg.Step, job, NUMBERS, NUMBERS, NUMBERS, scalars, st.just(1)), st.just([b"inline"])),
        st.tuples(st.builds(msg.OpenTransfer, NUMBERS, job, NUMBERS, lists, st.booleans()), empty),
        st.tuples(st.builds(msg.FillTransfer, NUMBERS, job, NUMBERS, st.just(0)), empty),
        st.tuples(st.builds(msg.PauseJob, NUMBERS, job), empty),
        st.tuples(st.builds(msg.ResumeJob, NUMBERS, job), empty),
        st.tuples(st.builds(msg.ChangeJob, NUMBERS, job, optional, st.none() | FLOATS), empty),
        st.tuples(st.builds(msg.JobStats, NUMBERS, job), empty),
        st.tuples(st.builds(msg.GetStatus, NUMBERS), empty),
        st.tuples(st.builds(msg.ProfileJob, NUMBERS, job, optional), empty),
        st.tuples(st.builds(msg.ExplainJob, NUMBERS, job), empty),
        st.tuples(st.builds(msg.GetInterference, NUMBERS, st.text(max_size=9)), empty),
        st.tuples(st.builds(msg.Reserve, NUMBERS, job, NUMBERS, NUMBERS, FLOATS), empty),
        st.tuples(st.builds(msg.ConfirmReservation, NUMBERS, job, FLOATS), empty),
        st.tuples(st.builds(msg.ReleaseReservation, NUMBERS, job), empty),
        st.tuples(st.builds(msg.RecordTrace, NUMBERS, FLOATS), empty),
        st.tuples(
            st.builds(msg.PlaceJob, NUMBERS, job, st.just("x"), NUMBERS, NUMBERS, NUMBERS, st.just([]), NUMBERS,
                      st.booleans(), NUMBERS),
            empty,
        ),
        st.tuples(st.builds(msg.JobNotStarted, job, NUMBERS, NUMBERS, st.sampled_from(["", "why"])), empty),
        st.tuples(st.builds(msg.ProgramsKnown, job, st.lists(st.sampled_from(["ab", "cd"]), max_size=3)), empty),
        st.tuples(st.builds(msg.GangSizes, job, st.lists(NUMBERS, max_size=3)), empty),
        st.tuples(st.builds(msg.DevicesVacated, job, NUMBERS), empty),
        st.tuples(st.builds(msg.PlacedJobEnded, NUMBERS, job, st.sampled_from(["", "why"])), empty),
        st.tuples(st.builds(msg.DrainNode, NUMBERS, st.sampled_from(["", "n"]), st.booleans()), empty),
        st.tuples(st.builds(keeping.PrepareSnapshot, NUMBERS, job), empty),
        st.tuples(st.builds(keeping.TakeSnapshot, NUMBERS, job, NUMBERS, NUMBERS, st.just(1)), st.just([b"notes"])),
        st.tuples(st.builds(keeping.FindKept, NUMBERS, st.sampled_from(["liar", "../..", ""])), empty),
        st.tuples(st.builds(keeping.ReadSnapshot, NUMBERS, job, lists), empty),
        st.tuples(st.builds(keeping.Replay, NUMBERS, job, NUMBERS, st.just(1)), st.sampled_from(GENERATORS)),
        st.tuples(
            st.builds(
                msg.GrantedHello, st.just(msg.PROTOCOL_VERSION), st.just("0.1.0"), st.just("client"), NUMBERS,
                st.just(""), st.booleans(), st.sampled_from(["", "a.b", "../../a.b"]),
            ),
            empty,
        ),
        st.tuples(st.builds(msg.Heartbeat, FLOATS), empty),
        st.tuples(st.builds(msg.CloseJob, NUMBERS, job, st.booleans()), empty),
    )  # fmt: skip


MINE = "0" * 32  # stands for the liar's own job
EDITS = st.lists(
    st.tuples(st.sampled_from(["flip", "cut", "insert", "repeat"]), st.floats(0, 1), st.integers(0, 255)), max_size=3
)
ACTIONS = st.one_of(
    st.tuples(st.just("request"), requests(st.sampled_from([MINE, MINE, OTHERS])), EDITS),
    st.tuples(st.just("frames"), st.lists(st.binary(max_size=40), max_size=4), st.none()),
    st.tuples(st.just("channel"), st.binary(max_size=60), EDITS),
    st.tuples(st.just("channel step"), st.sampled_from([0, 1, 2, 8, 200]), EDITS),
    st.tuples(st.just("channel message"), requests(st.just(MINE)), EDITS),
    st.tuples(st.just("channel long"), st.integers(1, 12), st.booleans()),
    st.tuples(st.just("channel descriptors"), st.integers(1, 8), st.none()),
    st.tuples(
        st.just("channel stranger"),
        st.sampled_from(["nothing", "garbage", "another protocol", "nonce again", "descriptors"]),
        st.none(),
    ),
    st.tuples(st.just("raw"), st.binary(max_size=100), st.sampled_from(["gpumux.sock", "gpumux.sock.chan"])),
    st.tuples(st.just("hang up"), st.sampled_from(["close", "read", "write"]), st.none()),
)


def edited(data: bytes, edits) -> bytes:
    changed = bytearray(data)
    for kind, where, byte in edits or ():
        at = int(where * len(changed))
        if kind == "flip" and at < len(changed):
            changed[at] ^= byte or 1
        elif kind == "cut":
            del changed[at:]
        elif kind == "insert":
            changed[at:at] = bytes([byte])
        elif kind == "repeat":
            changed += changed[at:]
    return bytes(changed)


def act(liar: Liar, action: str, what, how) -> None:
    """Do one thing. That the daemon has hung up already is no error."""
    own = liar.job.encode()
    with suppress(OSError, zmq.Again):
        if action == "request":
            message, frames = what
            parts = [bytes(part).replace(MINE.encode(), own) for part in encode(message, frames)]
            liar.sock.send_multipart([edited(parts[0], how), *parts[1:]], zmq.NOBLOCK)
        elif action == "frames":
            liar.sock.send_multipart(what or [b""], zmq.NOBLOCK)
        elif action == "channel":
            liar.channel.send(edited(what, how) or b"\x00", socket.MSG_DONTWAIT)
        elif action == "channel step":
            for _ in range(what + 1):
                liar.channel.send(edited(liar.honest_step(), how) or b"\xc1", socket.MSG_DONTWAIT)
        elif action == "channel message":
            packet = bytes(encode(*what)[0]).replace(MINE.encode(), own)
            liar.channel.send(edited(packet, how) or b"\xc1", socket.MSG_DONTWAIT)
        elif action == "channel long":
            for _ in range(what):
                liar.channel.send(b"\xc1" + bytes(32_767), socket.MSG_DONTWAIT)
            if how:
                liar.channel.send(b"\x00", socket.MSG_DONTWAIT)
        elif action == "channel descriptors":
            with open(os.devnull, "rb") as null:
                socket.send_fds(liar.channel, [liar.honest_step()], [null.fileno()] * what, socket.MSG_DONTWAIT)
        elif action == "channel stranger":
            with liar.connect(liar.welcome.channel) as stranger:
                if what == "descriptors":
                    with open(os.devnull, "rb") as null:
                        socket.send_fds(stranger, [b"x" * 32], [null.fileno()])
                elif what == "garbage":
                    stranger.send(b"g" * 32)
                elif what != "nothing":
                    protocol = msg.PROTOCOL_VERSION + (what == "another protocol")
                    stranger.send(encode(msg.OpenChannel(protocol, liar.welcome.nonce))[0])
        elif action == "raw":
            path = str(Path(liar.endpoint.removeprefix("ipc://")).with_name(how))
            kind = socket.SOCK_SEQPACKET if how.endswith(".chan") else socket.SOCK_STREAM
            with liar.connect(path, kind) as stranger:
                stranger.send(what)
        elif action == "hang up":
            if what == "close":
                liar.channel.close()
            else:
                liar.channel.shutdown(socket.SHUT_RD if what == "read" else socket.SHUT_WR)


@pytest.fixture(scope="module")
def daemon():
    path = Path(tempfile.mkdtemp(prefix="gmfuzz-"))
    with serving(path, "--state-dir", str(path / "state")) as daemon:
        yield daemon
    left = [p.name for p in path.iterdir() if p.suffix != ".lock" and p.name != "state"]
    shutil.rmtree(path)
    assert daemon.process.returncode == 0, daemon.log
    assert left == []
    assert "internal error" not in daemon.log


class Witness:
    """An honest client whose counter has to be right, whatever happens next door."""

    def __init__(self, session: Session) -> None:
        self.job = LiveJob(session, samples.counter(), new_buffers=[4], binding=[0], name="witness")
        self.value = 0.0

    def check(self) -> None:
        for _ in range(2):
            (result,) = self.job.run(scalars=[1.0])
            self.value += 1.0
            assert read_floats(result, 1) == (self.value,)


@pytest.fixture(scope="module")
def witness(daemon):
    with Session.connect(daemon.endpoint, SOON_S) as session:
        witness = Witness(session)
        yield witness
        witness.job.close()


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def alone_again(endpoint: str) -> None:
    """Wait until only the witness is left."""
    with Control(endpoint, SOON_S) as control:
        while True:
            body = control.status()
            if body["sessions"] == 2 and [job["name"] for job in body["jobs"]] == ["witness"]:
                return


def test_whatever_a_client_does_it_costs_only_itself(daemon, witness):
    pid = daemon.process.pid
    witness.check()
    alone_again(daemon.endpoint)
    before, grown = descriptors(pid), []

    @settings(
        max_examples=EXAMPLES or 40,
        derandomize=not EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(actions=st.lists(ACTIONS, min_size=1, max_size=12))
    def lies(actions):
        with zmq.Context() as context:
            liar = Liar(context, daemon.endpoint)
            try:
                liar.work(1)
                for action in actions:
                    act(liar, *action)
            finally:
                liar.close()
        witness.check()
        grown.append(resident(pid))

    lies()
    alone_again(daemon.endpoint)
    assert daemon.process.poll() is None, daemon.log
    end = time.monotonic() + SOON_S
    while descriptors(pid) > before + 2 and time.monotonic() < end:
        witness.check()  # libzmq lets go of a connection in a thread of its own, after the session has ended
    assert descriptors(pid) <= before + 2, "descriptors were left behind"
    assert grown[-1] - grown[len(grown) // 2] < 32 << 20, f"memory grows: {grown}"


def test_connections_that_never_identify_themselves_delay_no_other(daemon, witness):
    """Very many at once, in the middle of ZeroMQ's greeting."""
    path = daemon.endpoint.removeprefix("ipc://")
    held = []
    try:
        for _ in range(200):
            stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            stranger.settimeout(SOON_S)
            held.append(stranger)
            while stranger.connect_ex(path) == errno.EAGAIN:
                pass  # more come at once than wait in line
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # one too many: it was cut
                stranger.send(struct.pack("!B", 0xFF))
        witness.check()
    finally:
        for stranger in held:
            stranger.close()
    witness.check()


FLOOD = """
import socket, sys
held = []
for _ in range(3000):
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stranger.setblocking(False)
    if not stranger.connect_ex(sys.argv[1]):
        held.append(stranger)
    if len(held) > 600:
        while len(held) > 300:
            held.pop().close()
"""


def test_a_flood_of_connections_finds_few_descriptors_and_ends_no_session(daemon, witness):
    """More than it may have open, faster than Python looks at them."""
    pid = daemon.process.pid
    usual, most = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    flooders = []
    try:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (descriptors(pid) + 250, most))
        for _ in range(3):
            flooders.append(
                subprocess.Popen([sys.executable, "-S", "-c", FLOOD, daemon.endpoint.removeprefix("ipc://")])
            )
        while any(flooder.poll() is None for flooder in flooders):
            witness.check()
        assert [flooder.returncode for flooder in flooders] == [0, 0, 0]
        Session.connect(daemon.endpoint, SOON_S).close()  # a client that comes afterwards is let in
    finally:
        for flooder in flooders:
            flooder.kill()
            flooder.wait()
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (usual, most))
    alone_again(daemon.endpoint)
    assert daemon.process.poll() is None, daemon.log
