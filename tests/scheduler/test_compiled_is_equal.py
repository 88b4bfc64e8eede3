"""The compiled core does what the interpreted one does, to the last bit of every time and the last word of every
sentence."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from itertools import zip_longest
from pathlib import Path

import pytest

from gpumux import compiled

CONTEXT = 3  # lines before the first that differs
LIMIT_S = 180


def test_what_is_compiled_does_what_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choice = compiled.choose({})
    if choice.directory is None:
        pytest.skip(f"there is no compiled core (`make core` makes one): {choice.why}")
    told, running = {}, {}
    with ExitStack() as stack:
        for kind in (compiled.INTERPRETED, compiled.COMPILED):
            monkeypatch.setenv(compiled.ENVIRONMENT, kind)
            command = [sys.executable, "-m", "tests.scheduler.trace", str(tmp_path / kind)]
            running[kind] = stack.enter_context(
                subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            )
            stack.callback(running[kind].kill)  # before it is waited for, where the time was not enough
        answers = {kind: process.communicate(timeout=LIMIT_S)[0] for kind, process in running.items()}
    for kind, said in answers.items():
        assert running[kind].returncode == 0, said
        which, where = said.splitlines()[-1].split(maxsplit=1)
        assert which == kind
        assert where.endswith(".py" if kind == compiled.INTERPRETED else compiled.SUFFIX)
        told[kind] = (tmp_path / kind).read_text().splitlines()
    lines = list(zip_longest(told[compiled.INTERPRETED], told[compiled.COMPILED]))
    assert len(lines) > 10_000
    for at, (one, other) in enumerate(lines):
        if one != other:
            case = next(line for line, _ in reversed(lines[:at]) if line and line.startswith("== "))
            before = "\n".join(str(line) for line, _ in lines[max(0, at - CONTEXT) : at])
            pytest.fail(f"{case}\n{before}\ninterpreted: {one}\ncompiled:    {other}")
