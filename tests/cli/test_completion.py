"""Completions, in the shells themselves."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpumux.cli.completion import SHELLS, script
from gpumux.cli.main import EX_USAGE, JOB_VERBS, build_parser, main
from tests.deploy.packages import libraries, need

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")

ASK = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_gpumux
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def bash(tmp_path_factory):
    """Completes words in a bash whose `gpumux` prints the jobs given."""
    home = tmp_path_factory.mktemp("completion")
    (home / "script").write_text(script("bash", build_parser()))
    fake = home / "gpumux"
    fake.write_text(f"#!{sys.executable}\nprint(open({str(home / 'jobs')!r}).read())\n")
    fake.chmod(0o755)

    def complete(*words: str, jobs: tuple[dict, ...] = ()) -> list[str]:
        (home / "jobs").write_text(json.dumps(jobs, indent=2, sort_keys=True))
        environ = {**os.environ, "PATH": f"{home}:{os.environ['PATH']}"}
        done = subprocess.run(
            ["bash", "--norc", "-c", ASK, "bash", str(home / "script"), *words],
            capture_output=True, text=True, env=environ, cwd=home, timeout=120,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, ""), done
        return done.stdout.split()

    complete.home = home
    return complete


def test_commands_verbs_flags_and_values(bash):
    assert set(bash("gpumux", "")) >= {"serve", "status", "jobs", "doctor", "completion"}
    assert bash("gpumux", "ser") == ["serve"]
    assert set(bash("gpumux", "jobs", "")) == set(JOB_VERBS)
    assert bash("gpumux", "serve", "--po") == ["--policy"]
    assert bash("gpumux", "serve", "--policy", "") == ["fifo", "streams", "paced", "guarded"]
    assert bash("gpumux", "serve", "--log-format", "j") == ["json"]
    assert bash("gpumux", "serve", "--threads", "") == [], "nobody knows the number"
    assert set(bash("gpumux", "plan", "")) >= {"burst", "profile"}
    assert "--global-batch" in bash("gpumux", "plan", "burst", "--")
    assert {"--within", "--optimizer"} <= set(bash("gpumux", "plan", "memory", "--"))
    assert set(bash("gpumux", "plan", "memory", "--optimizer", "")) == {"sgd", "momentum", "adamw"}
    assert bash("gpumux", "completion", "") == list(SHELLS)
    assert bash("gpumux", "nonsense", "") == bash("gpumux", "")


def test_files_are_completed_where_a_file_belongs(bash):
    (bash.home / "my-config.toml").write_text("")
    assert bash("gpumux", "serve", "--config", "my-") == ["my-config.toml"]
    assert bash("gpumux", "trace", "-o", "my-") == ["my-config.toml"]


def test_jobs_come_from_the_daemon(bash):
    jobs = ({"short": "j1", "name": "bert-serve", "job": "a" * 32}, {"short": "j2", "name": "", "job": ""})
    assert bash("gpumux", "jobs", "pause", "", jobs=jobs) == ["bert-serve", "j1", "j2"]
    assert bash("gpumux", "jobs", "--timeout", "3", "pause", "b", jobs=jobs) == ["bert-serve"]
    assert bash("gpumux", "jobs", "priority", "j1", "", jobs=jobs) == ["low", "high"]
    assert bash("gpumux", "jobs", "pause", "", jobs=()) == []


def test_a_name_that_is_a_command_is_not_run(bash):
    """Shells expand the words they complete with, and an operator sees all users' names."""
    trap = bash.home / "trapped"
    names = (f"$(touch {trap})", f"`touch {trap}`", f"x;touch {trap}", "${HOME}", 'a" b')
    jobs = tuple({"short": f"j{n}", "name": name} for n, name in enumerate(names))
    assert bash("gpumux", "jobs", "stop", "", jobs=jobs) == ["j0", "j1", "j2", "j3", "j4"]
    assert not trap.exists()


def test_an_interactive_bash_uses_it(bash):
    """The function as a shell finds it, by `complete -p`."""
    done = subprocess.run(
        ["bash", "--norc", "-c", f'eval "$(cat {bash.home}/script)"; complete -p gpumux'],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.strip() == "complete -F _gpumux gpumux"


@pytest.mark.parametrize("shell", SHELLS)
def test_each_script_is_printed_and_names_every_command(shell, capsys):
    assert main(["completion", shell]) == 0
    said = capsys.readouterr().out
    for word in ("serve", "jobs", "doctor", "burst", "weight"):
        assert word in said
    assert main(["completion", "tcsh"]) == EX_USAGE


ZSH = ("zsh", "zsh", "zsh-common")
FISH = ("fish", "fish", "fish-common", "libpcre2-32-0")


@pytest.mark.every(2)
@pytest.mark.parametrize("packages", [ZSH, FISH], ids=lambda p: p[0])
def test_other_shells_find_no_mistake_in_their_script(packages, tmp_path):
    tool = need(*packages)
    path = tmp_path / "script"
    path.write_text(script(packages[0], build_parser()) + "\n")
    environ = {**os.environ, **libraries(tool), "HOME": str(tmp_path)}
    done = subprocess.run([tool, "-n", path], capture_output=True, text=True, timeout=120, env=environ)
    assert (done.returncode, done.stderr) == (0, "")


def test_fish_completes(tmp_path):
    """Asks in the way that the shell itself does."""
    tool = need(*FISH)
    path = tmp_path / "script"
    path.write_text(script("fish", build_parser()) + "\n")
    environ = {**os.environ, **libraries(tool), "HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}

    def complete(line: str) -> list[str]:
        # One that was unpacked, and not installed, looks for its own functions elsewhere.
        own = Path(tool).parents[1] / "share" / "fish" / "functions"
        ask = f"set -p fish_function_path {own}; source {path}; complete -C '{line}'"
        done = subprocess.run([tool, "-c", ask], capture_output=True, text=True, timeout=120, env=environ)
        assert done.returncode == 0, done.stderr
        return [word.split("\t")[0] for word in done.stdout.splitlines()]

    assert complete("gpumux ser") == ["serve"]
    assert set(complete("gpumux jobs ")) >= set(JOB_VERBS)
    assert complete("gpumux serve --polic") == ["--policy"]
    assert complete("gpumux serve --policy ") == ["fifo", "guarded", "paced", "streams"]
