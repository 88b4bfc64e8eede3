"""The command line without a daemon: help, usage, exit codes, and modules that are never imported."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys

import pytest

from gpumux import __version__
from gpumux.cli import doctor, jobs, text
from gpumux.cli.main import EX_CONFIG, EX_FAILED, EX_USAGE, build_parser, exit_code, log_format, main
from gpumux.client.session import Session
from gpumux.errors import ConfigError, DaemonGone, EndpointBusy, UnknownJob
from gpumux.wire.endpoint import EndpointLock

COMMANDS = ("serve", "status", "top", "trace", "jobs", "doctor", "simulate", "plan", "version")


@pytest.mark.parametrize("argv", [["--help"], *[[name, "--help"] for name in COMMANDS], ["version"]])
def test_no_help_imports_torch_or_other_heavy_things(argv):
    code = (
        "import sys, contextlib, io\n"
        "from gpumux.cli.main import main\n"
        "with contextlib.redirect_stdout(io.StringIO()) as out:\n"
        f"    code = main({argv!r})\n"
        "assert out.getvalue()\n"
        "print(code, *sorted({m.split('.')[0] for m in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    exit_status, *modules = done.stdout.split()
    assert exit_status == "0"
    assert not {"torch", "numpy", "prometheus_client", "zmq"} & set(modules)


@pytest.mark.parametrize("name", ["serve", "top", "trace", "jobs", "doctor", "simulate", "plan"])
def test_help_teaches_by_example(name, capsys):
    assert main([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert "examples:" in out
    assert f"gpumux {name}" in out


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["bogus"],
        ["serve", "--bogus"],
        ["jobs", "pause"],
        ["jobs", "list", "j1"],
        ["jobs", "explode", "j1"],
        ["jobs", "profile", "j1"],
        ["jobs", "pause", "j1", "-o", "x"],
        ["jobs", "pause", "j1", "high"],
        ["jobs", "priority", "j1"],
        ["jobs", "priority", "j1", "middle"],
        ["jobs", "weight", "j1", "nan"],
        ["jobs", "weight", "j1", "-1"],
        ["jobs", "weight", "j1", "inf"],
    ],
)
def test_wrong_usage_is_64_and_says_why(argv, capsys):
    assert main(argv) == EX_USAGE
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        ["serve", "--policy", "nope"],
        ["serve", "--endpoint", "ftp://x"],
        ["serve", "--endpoint", ""],
        ["serve", "--gpu", "-1"],
        ["serve", "--metrics-port", "many"],
        ["status", "--endpoint", "bla"],
        ["jobs", "--endpoint", "ipc://relative"],
    ],
)
def test_a_wrong_value_of_a_flag_is_wrong_usage(argv, capsys):
    assert main(argv) == EX_USAGE
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "environ"), [(["--config", "/nonexistent.toml"], {}), ([], {"GPUMUX_POLICY": "nope"})]
)
def test_a_wrong_configuration_is_78_and_says_how_to_mend_it(flags, environ, capsys, monkeypatch):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert main(["serve", *flags]) == EX_CONFIG
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("gpumux: ")
    assert second.startswith("  ")


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["--log-format", "json", "--bogus"], EX_USAGE, "unrecognized arguments: --bogus"),
        (["--log-format=json", "--policy", "nope"], EX_USAGE, "'nope'"),
        (["--log-format", "json", "--endpoint", "ftp://x"], EX_USAGE, "ftp://x"),
        (["--log-format", "json", "--config", "/nonexistent.toml"], EX_CONFIG, "/nonexistent.toml"),
        (["--config", "FILE"], EX_CONFIG, "polcy"),
    ],
)
def test_a_daemon_that_is_to_log_json_says_what_is_wrong_as_a_line_of_its_log(
    argv, code, says, tmp_path, monkeypatch, capsys
):
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])  # as in a process that has not set it up
    monkeypatch.setattr(root, "level", root.level)
    (tmp_path / "gpumux.toml").write_text('[daemon]\nlog_format = "json"\npolcy = "fifo"\n')
    given = [str(tmp_path / "gpumux.toml") if word == "FILE" else word for word in argv]
    assert main(["serve", *given]) == code
    body = json.loads(capsys.readouterr().err)
    assert (body["level"], body["logger"], says in body["message"]) == ("error", "gpumux.daemon", True)


def test_the_form_of_a_log_is_guessed_from_a_command_line_that_is_wrong(tmp_path):
    (tmp_path / "broken.toml").write_text("log_format = json")
    asked = {"GPUMUX_LOG_FORMAT": "json"}
    assert log_format(["serve"], asked) == "json"
    assert log_format(["serve", "--log-format", "text"], asked) == "text"
    assert log_format(["status"], asked) == "text"
    for argv in (["serve", "--log-format"], ["serve", "--config", str(tmp_path / "broken.toml")], ["serve"]):
        assert log_format(argv, {}) == "text"


@pytest.mark.parametrize("named", [("--device", "cuda"), ("--gpu", "0"), ("--gpu", "0", "--device", "auto")])
def test_a_gpu_that_is_named_and_cant_be_had_is_78_and_never_the_cpu(named, runtime_dir):
    """A machine without a GPU; the environment hides those of a machine with some."""
    flags = [*named, "--endpoint", f"ipc://{runtime_dir}/g.sock", "--metrics-port", "off"]
    done = subprocess.run(
        [sys.executable, "-m", "gpumux.cli.main", "serve", *flags], capture_output=True, text=True, timeout=120,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == EX_CONFIG
    assert "serves" not in done.stderr
    assert "--device cpu" in done.stderr


def test_no_daemon_is_a_typed_error_that_says_how_to_start_one(runtime_dir, capsys):
    assert main(["status", "--endpoint", f"ipc://{runtime_dir}/none.sock"]) == EX_FAILED
    assert "gpumux serve" in capsys.readouterr().err


def test_a_daemon_that_was_killed_is_known_to_be_gone_at_once(runtime_dir, capsys, monkeypatch):
    """Replaces the clock: waiting for an answer fails the test."""
    monkeypatch.setattr("gpumux.cli.control.Control._receive", lambda *args: pytest.fail("it waited"))
    path = runtime_dir / "g.sock"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
        killed.listen()
    for command in (["status"], ["jobs"], ["jobs", "stop", "j1"]):
        assert main([*command, "--endpoint", f"ipc://{path}"]) == EX_FAILED
        said = capsys.readouterr().err
        assert "was killed left its socket" in said
        assert "gpumux serve" in said
    found = doctor.daemon(f"ipc://{path}", 1.0)
    assert (found.level, "left its socket" in found.detail, "gpumux serve" in found.remedy) == ("warn", True, True)
    path.unlink()


def test_a_daemon_that_holds_the_endpoint_and_does_not_answer_is_named(runtime_dir, capsys):
    path = runtime_dir / "g.sock"
    lock = EndpointLock(path)
    with socket.socket(socket.AF_UNIX) as stuck:
        stuck.bind(str(path))
        stuck.listen()
        assert main(["status", "--endpoint", f"ipc://{path}", "--timeout", "0.2"]) == EX_FAILED
        said = capsys.readouterr().err
        found = doctor.daemon(f"ipc://{path}", 0.2)
        with pytest.raises(DaemonGone, match=r"holds .* but does not answer"):
            Session.connect(f"ipc://{path}", 0.2)
    assert f"process {os.getpid()} holds ipc://{path} but does not answer" in said
    assert (found.level, "does not answer" in found.detail) == ("fail", True)
    lock.close()
    path.unlink()


@pytest.mark.parametrize("seconds", ["inf", "nan", "-1", "0", "1e9", "soon", ""])
def test_a_timeout_is_a_number_of_seconds(seconds, capsys):
    for command in ("status", "top", "jobs", "doctor"):
        assert main([command, f"--timeout={seconds}"]) == EX_USAGE
        assert "seconds" in capsys.readouterr().err


@pytest.mark.parametrize("twice", [["g.sock", "g.sock"], ["g.sock", "g.sock.chan"]])
def test_an_endpoint_that_is_taken_by_the_daemon_itself_is_a_wrong_configuration(runtime_dir, twice):
    flags = [flag for name in twice for flag in ("--endpoint", f"ipc://{runtime_dir}/{name}")]
    done = subprocess.run(
        [sys.executable, "-m", "gpumux.cli.main", "serve", "--device", "cpu", *flags, "--metrics-port", "off"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == EX_CONFIG
    assert "every --endpoint once" in done.stderr
    assert list(runtime_dir.iterdir()) == []


def test_exit_codes_follow_the_error():
    assert exit_code(ConfigError("x")) == 78
    assert exit_code(EndpointBusy("x")) == 75
    assert exit_code(DaemonGone("x")) == 1


def test_version(capsys):
    assert main(["version", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gpumux"] == __version__
    assert main(["--version"]) == 0


def test_every_setting_with_a_flag_is_passed_on():
    from gpumux.cli.main import SETTINGS

    args = build_parser().parse_args(["serve"])
    assert set(SETTINGS) <= set(vars(args))
    assert set(vars(args)) - set(SETTINGS) == {"command", "config"}


def job(**changes):
    base = {
        "job": "ab" * 16, "short": "j1", "name": "sweep", "uid": 1000, "priority": "low", "state": "open",
        "paused": False,
        "steps_done": 3, "steps_failed": 0, "queued": 1, "device_busy_s": 61.0, "memory_bytes": 2048,
        "max_slowdown": 1.1, "models": 1, "promise": None,
    }  # fmt: skip
    return base | changes


@pytest.mark.parametrize("wanted", ["ab" * 16, "ab", "j1", "sweep"])
def test_a_job_is_found_by_id_prefix_short_id_or_name(wanted):
    other = job(job="cd" * 16, short="j2", name="other")
    assert jobs.find([other, job()], wanted)["short"] == "j1"


def test_an_unknown_job_gets_the_nearest_one():
    with pytest.raises(UnknownJob, match="did you mean sweep"):
        jobs.find([job()], "sweeep")


def test_what_is_asked_of_a_job_may_stand_on_either_side_of_the_verb():
    for words in (["--timeout", "3", "pause", "j1"], ["pause", "j1", "--timeout", "3"]):
        args = build_parser().parse_args(["jobs", *words])
        assert (args.verb, args.job, args.timeout, args.json) == ("pause", "j1", 3.0, False)
    assert build_parser().parse_args(["jobs", "--json"]).verb == "list"


def test_an_unknown_or_ambiguous_job_is_refused():
    both = [job(), job(job="ac" * 16, short="j2")]
    with pytest.raises(UnknownJob, match="no job 'zz'"):
        jobs.find(both, "zz")
    with pytest.raises(UnknownJob, match="j1, j2"):
        jobs.find(both, "sweep")
    with pytest.raises(UnknownJob, match="2 jobs"):
        jobs.find(both, "a")


def test_the_table_lines_up_and_hides_control_characters():
    lines = jobs.job_table([job(), job(short="j10", name="evil\x1b[2J"), job(name="array", models=8)]).splitlines()
    assert "array (8 models)" in lines[3]
    assert len({line.index("1000") for line in lines[1:]}) == 1
    assert "\x1b" not in "".join(lines)
    assert "1m01s" in lines[1]
    assert "2.0 KiB" in lines[1]


def test_a_job_that_drains_and_is_paused_shows_both():
    rows = jobs.job_table([job(state="draining", paused=True), job(state="paused", paused=True)]).splitlines()
    assert "draining, paused" in rows[1]
    assert " paused " in rows[2]
    assert "draining" not in rows[2]


def promised(**changes):
    verdict = "mean 1.03 of 1.10, tail 1.06 of 1.20 in 80 steps: kept"
    return {"verdict": verdict, "slowdown": 1.03, "slowdown_p99": 1.06, "kept": True} | changes


BROKEN = "mean 1.31 of 1.10, tail 2.36 of 1.20 in 80 steps: BROKEN for 12 s"


def test_the_table_says_what_was_promised_and_which_jobs_are_held():
    rows = jobs.job_table(
        [
            job(priority="high", promise=promised()),
            job(priority="high", promise=promised(slowdown=1.31, kept=False, verdict=BROKEN)),
            job(priority="high", promise=promised(slowdown=None, kept=None)),
            job(priority="high", promise=None),
            job(promise={"held": "ban", "too_long": None}),
            job(promise={"held": "", "too_long": None}),
        ]
    ).splitlines()
    assert rows[1].endswith("1.03 kept")
    assert rows[2].endswith("1.31 BROKEN")
    assert rows[3].endswith("?")
    assert rows[4].endswith("2.0 KiB")
    assert rows[5].endswith("held: ban")
    assert rows[6].endswith("2.0 KiB")


def test_promises_stand_first_the_broken_ones_before_all_others():
    kept = [job(short=f"j{n}", priority="high", promise=promised()) for n in range(6)]
    broken = job(short="j9", name="bert\x1b", priority="high", promise=promised(kept=False, verdict=BROKEN))
    assert text.verdicts([job(promise=None)]) == []
    assert text.verdicts([kept[0], broken]) == [
        f"promise  j9 bert?: {BROKEN}",
        "promise  j0 sweep: mean 1.03 of 1.10, tail 1.06 of 1.20 in 80 steps: kept",
    ]
    many = text.verdicts([*kept, broken])
    assert many[0] == f"promise  j9 bert?: {BROKEN}"
    assert many[-1] == "promise  3 more high jobs, none broken"
    assert len(text.verdicts([broken] * 20)) == 20  # all that are broken


def test_an_explanation_is_verdict_causes_and_commands_and_more_only_if_asked():
    body = {
        "verdict": BROKEN,
        "causes": ["Beside 'sweep' it loses 0.2 s a second."],
        "remedies": [{"text": "hold 'sweep' back", "command": "gpumux jobs pause j2"}, {"text": "wait", "command": ""}],
        "sentences": ["All of it."],
        "story": ["1.0 job opened"],
    }
    brief = jobs.explanation(job(priority="high"), body)
    assert brief == [
        f"j1 sweep (high): {BROKEN}", "",
        "why", "  Beside 'sweep' it loses 0.2 s a second.", "",
        "what to do", "  hold 'sweep' back", "    $ gpumux jobs pause j2", "  wait",
    ]  # fmt: skip
    whole = jobs.explanation(job(priority="high"), body, story=True)
    assert whole[-5:] == ["all that is known", "  All of it.", "", "what happened last", "  1.0 job opened"]
    named = jobs.explanation(job(priority="high"), body, endpoint="ipc:///tmp/a b.sock")
    assert "    $ gpumux jobs pause j2 --endpoint 'ipc:///tmp/a b.sock'" in named
    nothing = jobs.explanation(job(), {**body, "causes": [], "remedies": []})
    assert "why" not in nothing
    assert "what to do" not in nothing


def test_a_number_of_things_has_its_plural():
    assert [text.counted(n, "job") for n in (0, 1, 2, 1200)] == ["0 jobs", "1 job", "2 jobs", "1,200 jobs"]


def test_quantities_read_naturally():
    assert [text.size(n) for n in (5, 1536, 3 << 30)] == ["5 B", "1.5 KiB", "3.0 GiB"]
    assert [text.duration(s) for s in (0.25, 90, 7260)] == ["0.2s", "1m30s", "2h01m"]


def test_status_in_words():
    body = {
        "daemon": {
            "version": "1", "pid": 7, "uptime_s": 5.0, "policy": "paced", "endpoints": ["ipc:///x"],
            "metrics_host": "127.0.0.1", "metrics_port": 0,
        },
        "device": {"kind": "cpu", "name": "A CPU", "torch_version": "2.13", "threads": 1, "parallel": 2},
        "memory": {"total_bytes": 1 << 30, "free_bytes": 1 << 29, "shared_bytes": 0},
        "sessions": 0,
        "jobs": [],
        "guard": None,
    }  # fmt: skip
    out = jobs.describe(body)
    assert "guard" not in out
    held = {"ban": 61.0, "gap": 0.001}
    guard = {"bans": 2, "bans_total": 5, "probes_total": 1, "harvested_s": 90.0, "held_s": held}
    told = jobs.describe({**body, "guard": guard})
    assert "2 bans in force, 5 ever; low work ran for 1m30s beside high jobs, held: ban 1m01s\n" in told
    assert "metrics  off" in out
    assert "no jobs" in out
    assert "policy paced\n" in out  # a daemon from before it could be compiled
    daemon = {**body["daemon"], "core": "compiled"}
    assert "policy paced, core compiled\n" in jobs.describe({**body, "daemon": daemon})
    assert "512.0 MiB free of 1.0 GiB" in out


@pytest.mark.parametrize("command", ["serve", "status", "top", "jobs", "doctor", "simulate"])
def test_a_command_answers_wrong_usage_with_its_own(command, capsys):
    assert main([command, "--bogus"]) == EX_USAGE
    said = capsys.readouterr().err
    assert said.startswith(f"usage: gpumux {command} ")
    assert "unrecognized arguments: --bogus" in said


def test_python_runs_the_package_as_the_command():
    command = [sys.executable, "-m", "gpumux"]
    done = subprocess.run([*command, "version", "--json"], capture_output=True, text=True, check=True, timeout=120)
    assert json.loads(done.stdout)["gpumux"] == __version__
    assert subprocess.run([*command, "nonsense"], capture_output=True, timeout=120).returncode == EX_USAGE
