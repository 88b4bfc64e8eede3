"""A real daemon on the CPU, from the outside: clients' steps and state, deaths, floods, departures."""

from __future__ import annotations

import json
import random
import signal
import struct
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest
import zmq

from gpumux.cli.control import Control
from gpumux.cli.main import EX_FAILED, EX_USAGE, main
from gpumux.client.session import Session
from gpumux.device.cpu.device import may_be_less_nice
from gpumux.errors import DaemonGone
from gpumux.program import codec as programs
from gpumux.program.profile import load
from gpumux.wire import codec
from gpumux.wire import messages as msg
from tests.program import samples

from .live import SOON_S, LiveJob, alive, floats, read_floats, serving, slow

GARBAGE = 10_000


@pytest.fixture
def session(daemon):
    with Session.connect(daemon.endpoint, SOON_S) as session:
        yield session


def status_when(control, condition):
    """The first status for which `condition` holds. What is waited for needs the processor, too."""
    for _ in range(100_000):
        body = control.status()
        if condition(body):
            return body
        threading.Event().wait(0.002)
    raise AssertionError(f"never came true: {body}")


def scrape(daemon):
    with urllib.request.urlopen(daemon.metrics_url, timeout=SOON_S) as answer:
        return answer.read().decode()


def sample(text, line_start):
    """The value of the one series that begins so; 0 when there is none yet."""
    found = [line for line in text.splitlines() if line.startswith(line_start)]
    assert len(found) <= 1, found
    return float(found[0].rsplit(" ", 1)[1]) if found else 0.0


def test_steps_return_results(session):
    job = LiveJob(session, samples.add_one())
    for i in range(20):
        (result,) = job.run(floats(i, 1, 2, 3), slot=i % 2)
        assert read_floats(result, 4) == (i + 1, 2, 3, 4)
    job.close()


def test_state_lives_in_the_daemon_and_moves_in_order(session):
    job = LiveJob(session, samples.counter(), new_buffers=[4], binding=[0])
    job.push([0], floats(10))
    for _ in range(3):
        job.run(scalars=[0.5])
    assert read_floats(memoryview(job.pull([0])), 1) == (11.5,)
    job.close()


def test_two_sessions_work_side_by_side_and_see_only_their_own(daemon, session):
    with Session.connect(daemon.endpoint, SOON_S) as other:
        mine = LiveJob(session, samples.counter(), new_buffers=[4], binding=[0], priority=1)
        theirs = LiveJob(other, samples.counter(), new_buffers=[4], binding=[0])
        for i in range(1, 11):
            (a,), (b,) = mine.run(scalars=[1.0]), theirs.run(scalars=[2.0])
            assert (read_floats(a, 1), read_floats(b, 1)) == ((float(i),), (2.0 * i,))
        theirs.data.release()
        mine.close()


def test_a_paused_job_waits_and_a_resumed_one_goes_on(daemon, session):
    job = LiveJob(session, samples.add_one(), name="to-pause")
    with Control(daemon.endpoint, SOON_S) as control:
        control.change("pause", job.id)
        number = job.post(floats(1, 2, 3, 4))
        body = status_when(control, lambda b: any(j["queued"] for j in b["jobs"] if j["job"] == job.id))
        assert [j["state"] for j in body["jobs"] if j["job"] == job.id] == ["paused"]
        assert number not in job.done
        control.change("resume", job.id)
        assert isinstance(job.wait(number), msg.StepDone)
        control.change("stop", job.id, drain=True)
        assert session.wait(lambda: bool(job.ended), SOON_S)
    job.data.release()


def test_priority_and_weight_are_changed_from_the_command_line(daemon, session, capsys):
    job = LiveJob(session, samples.counter(), new_buffers=[4], binding=[0], name="to-change", priority=1)

    def change(*words):
        code = main(
            ["jobs", words[0], "to-change", *words[1:], "--endpoint", daemon.endpoint, "--timeout", str(SOON_S)]
        )
        return code, capsys.readouterr()

    for number in range(1, 60):
        assert read_floats(job.run(scalars=[1.0])[0], 1) == (float(number),)
    code, said = change("weight", "2.5")
    assert (code, "has weight 2.5 from now on" in said.out) == (0, True)
    assert change("priority", "low")[0] == 0
    assert read_floats(job.run(scalars=[1.0])[0], 1) == (60.0,)
    code, said = change("priority", "high")
    assert code == 0 if may_be_less_nice() else (code, "LimitNICE" in said.err) == (EX_FAILED, True)
    with Control(daemon.endpoint, SOON_S) as control:
        (entry,) = [entry for entry in control.status()["jobs"] if entry["name"] == "to-change"]
    assert (entry["weight"], entry["priority"]) == (2.5, "high" if may_be_less_nice() else "low")
    assert read_floats(job.run(scalars=[1.0])[0], 1) == (61.0,)
    code, said = change("weight", "1e6")
    assert (code, "no number from 0.001 to 1000" in said.err) == (EX_USAGE, True)
    job.close()


def test_a_job_is_profiled_to_a_file_from_the_command_line(daemon, session, tmp_path, capsys):
    job = LiveJob(session, samples.sgd_linear(), new_buffers=[12], binding=[0], name="to-profile")
    out = tmp_path / "profile.json"
    command = ["jobs", "profile", "to-profile", "-o", str(out), "--endpoint", daemon.endpoint, "--timeout", str(SOON_S)]
    assert main(command) == EX_FAILED
    assert "run two steps of it first" in capsys.readouterr().err
    assert not out.exists()
    for _ in range(3):
        job.run(floats(*range(24)), floats(*range(8)), scalars=[0.1])
    assert main(command) == 0
    assert f"{len(samples.sgd_linear().ops)} operators" in capsys.readouterr().out
    profile = load(out)
    assert profile.name == "to-profile"
    assert profile.sources() == {"measured": len(samples.sgd_linear().ops)}
    assert profile.versions["torch"]
    job.close()


def test_a_job_is_explained_from_the_command_line(daemon, session, capsys):
    job = LiveJob(session, samples.add_one(), name="to-explain")
    job.run(floats(1, 2, 3, 4))
    with Control(daemon.endpoint, SOON_S) as control:
        control.change("pause", job.id)
    command = ["jobs", "explain", "to-explain", "--endpoint", daemon.endpoint, "--timeout", str(SOON_S)]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "to-explain" in said
    assert ": paused\n" in said
    assert "    $ gpumux jobs resume j" in said
    assert said.splitlines()[-1].startswith("--story has all")
    assert main([*command, "--story"]) == 0
    said = capsys.readouterr().out
    assert "--story has" not in said
    assert "piece 0 (operator 0: aten.add.Scalar)" in said, "the daemon knows what operators are called"
    assert "job paused" in said
    job.close()


def test_a_paused_job_that_is_told_to_drain_answers_its_steps_and_ends(daemon, session):
    job = LiveJob(session, samples.add_one(), name="to-drain")
    with Control(daemon.endpoint, SOON_S) as control:
        control.change("pause", job.id)
        number = job.post(floats(1, 2, 3, 4))
        control.change("stop", job.id, drain=True)
        assert isinstance(job.wait(number), msg.StepDone)
        assert session.wait(lambda: bool(job.ended), SOON_S)
    job.data.release()


def test_a_program_that_crashes_its_kernel_fails_its_job_and_no_other(daemon, session):
    with Session.connect(daemon.endpoint, SOON_S) as other:
        bystander = LiveJob(other, samples.counter(), new_buffers=[4], binding=[0])
        job = LiveJob(session, samples.crash_div())
        number = job.post(struct.pack("4q", -(2**63), 4, 6, 8), struct.pack("4q", -1, 2, 2, 2))
        answer = job.wait(number)
        assert isinstance(answer, msg.StepFailed)
        assert answer.code in ("executor_crashed", "job_failed")
        assert session.wait(lambda: bool(job.ended), SOON_S)
        (result,) = bystander.run(scalars=[3.0])
        assert read_floats(result, 1) == (3.0,)
        bystander.close()
    job.data.release()


def test_kill_9_of_a_client_mid_step_frees_its_job_and_harms_no_other(daemon, session):
    job = LiveJob(session, samples.counter(), new_buffers=[4], binding=[0], priority=1)
    with Control(daemon.endpoint, SOON_S) as control:
        before = control.status()
    victim = subprocess.Popen(
        [sys.executable, "-m", "tests.daemon.victim", daemon.endpoint, "steps"], stdout=subprocess.PIPE, text=True
    )
    assert victim.stdout.readline() == "submitted\n"
    with Control(daemon.endpoint, SOON_S) as control:  # another: one that says nothing for long is cut off
        working = status_when(control, lambda b: any(j["outstanding"] for j in b["jobs"] if j["name"] == "victim"))
        assert working["memory"]["free_bytes"] < before["memory"]["free_bytes"]
        victim.kill()
        victim.wait(SOON_S)
        victim.stdout.close()
        for i in range(1, 6):
            (result,) = job.run(scalars=[1.0])
            assert read_floats(result, 1) == (float(i),)
        after = status_when(control, lambda b: [j["name"] for j in b["jobs"]] == ["live"])
        assert after["memory"] == before["memory"]
    job.close()


def test_a_scrape_shows_what_the_daemon_did(daemon, session):
    job = LiveJob(session, samples.add_one(), name="scraped", priority=1)
    with Control(daemon.endpoint, SOON_S) as control:
        (label,) = [entry["short"] for entry in control.status()["jobs"] if entry["name"] == "scraped"]
    before = scrape_when(daemon, lambda t: f'gpumux_job_info{{job_id="{label}"' in t)
    assert "scraped" not in before, "the port asks for no password"
    for _ in range(5):
        job.run(floats(0, 0, 0, 0))[0].release()
    text = scrape_when(daemon, lambda t: sample(t, f'gpumux_job_steps_total{{job_id="{label}"}}') == 5)
    for name in ("gpumux_steps_total", "gpumux_step_seconds_count", "gpumux_launches_total"):
        series = name + '{priority="high"}'
        assert sample(text, series) - sample(before, series) == 5
    assert sample(text, f'gpumux_job_device_busy_seconds_total{{job_id="{label}"}}') > 0
    assert sample(text, f'gpumux_job_memory_bytes{{job_id="{label}"}}') > 0
    job.close()
    gone = scrape_when(daemon, lambda t: f'job_id="{label}"' not in t)
    assert "gpumux_build_info" in gone


def scrape_when(daemon, condition):
    for _ in range(10_000):
        text = scrape(daemon)
        if condition(text):
            return text
        threading.Event().wait(0.01)
    raise AssertionError(f"never came true:\n{text}")


def looked_at(text):
    """Frames the daemon has read, whatever it thought of them."""
    names = ("gpumux_messages_received_total{", "gpumux_protocol_errors_total{")
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(names))


def test_garbage_and_floods_harm_no_other_client(daemon, session):
    """Thousands of mutated messages, in and out of sessions, while another client works. Those
    that the daemon cut off unread don't count."""
    job = LiveJob(session, samples.counter(), new_buffers=[4], binding=[0], priority=1)
    start = looked_at(scrape(daemon))
    rng = random.Random(20)
    expected = 0.0
    with zmq.Context() as context:
        while looked_at(scrape(daemon)) - start < GARBAGE:
            for _ in range(20):
                with context.socket(zmq.DEALER) as sock:
                    sock.setsockopt(zmq.LINGER, 1000)
                    sock.connect(daemon.endpoint)
                    for frames in attack(rng, rng.randrange(20, 400), job.id):
                        if not sock.poll(100, zmq.POLLOUT):
                            break  # the daemon has cut this connection off
                        sock.send_multipart(frames, zmq.NOBLOCK)
                expected += 1.0
                (result,) = job.run(scalars=[1.0])
                assert read_floats(result, 1) == (expected,)
    assert session.dead is None
    text = scrape(daemon)
    for reason in ("malformed", "flood"):
        assert sample(text, f'gpumux_protocol_errors_total{{reason="{reason}"}}') > 0
    while [listed["job"] for listed in seen_from_elsewhere(daemon)] != [job.id]:
        pass
    job.close()


def seen_from_elsewhere(daemon):
    """The jobs, by a process that sent no garbage: a message of this one's that is read late may cost it another
    connection, which has the number of the one it came by (wire/peers.py)."""
    command = [sys.executable, "-m", "gpumux", "jobs", "--json", "--endpoint", daemon.endpoint]
    done = subprocess.run([*command, "--timeout", str(SOON_S)], capture_output=True, text=True, timeout=2 * SOON_S)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def attack(rng, count, other_job):
    """`count` messages of one connection: an honest hello first, in half of them, then nonsense."""
    hello = codec.encode(msg.Hello(msg.PROTOCOL_VERSION, "0.1.0", "client", 1, "2", True))
    if rng.random() < 0.5:
        yield hello
    mine = f"{rng.getrandbits(128):032x}"
    program = programs.encode(samples.add_one())
    for _ in range(count):
        number = rng.choice([0, 1, 2, 7, 2**31, 2**63 - 1])
        job = rng.choice([mine, mine, other_job, "f" * 32])
        honest = rng.choice(
            [
                lambda: codec.encode(msg.OpenJob(number, job, "evil", rng.randrange(3), 1.0, 1.1, None, 2, 0)),
                lambda: codec.encode(msg.LoadProgram(number, job, number, [number], [0]), [mutated(rng, program)]),
                lambda: codec.encode(msg.Step(job, number, number, number, [1.0], 0)),
                lambda: codec.encode(msg.OpenTransfer(number, job, number, [number], rng.random() < 0.5)),
                lambda: codec.encode(msg.FillTransfer(number, job, number, 0)),
                lambda: codec.encode(msg.JobStats(number, job)),
                lambda: hello,
            ]
        )()
        yield [mutated(rng, frame) if rng.random() < 0.4 else frame for frame in honest]


def mutated(rng, data):
    """`data` with a few bytes changed, cut, doubled or added."""
    data = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(4)
        if kind == 0 and at < len(data):
            data[at] = rng.randrange(256)
        elif kind == 1:
            del data[at:]
        elif kind == 2:
            data[at:at] = rng.randbytes(rng.randrange(1, 9))
        else:
            data += data[:at]
    return bytes(data)


def test_a_second_daemon_on_the_endpoint_is_refused(daemon):
    done = subprocess.run(
        [sys.executable, "-m", "gpumux.cli.main", "serve", "--device", "cpu", "--endpoint", daemon.endpoint],
        capture_output=True, text=True, timeout=SOON_S,
    )  # fmt: skip
    assert done.returncode == 75
    assert str(daemon.process.pid) in done.stderr
    with Control(daemon.endpoint, SOON_S) as control:
        assert control.status()["daemon"]["pid"] == daemon.process.pid


def children_of(pid):
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.every(2)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_daemon_that_is_told_to_stop_tells_its_clients_at_once(runtime_dir, number):
    with serving(runtime_dir) as daemon, Session.connect(daemon.endpoint, SOON_S) as session:
        job = LiveJob(session, slow())
        job.post(bytes(4 * 1024 * 1024))
        children = children_of(daemon.process.pid)
        assert children
        daemon.process.send_signal(number)
        with pytest.raises(DaemonGone, match=signal.Signals(number).name):
            session.wait(lambda: False, SOON_S)
        assert daemon.stop() == 0, daemon.log
        assert not any(alive(pid) for pid in children)
        job.data.release()
