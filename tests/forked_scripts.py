"""Scripts that run in forks of one Python which has imported what they need: torch takes seconds to import."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMIT_S = 60.0
# Reads a script in each line; answers with the status of the process that ran it, and what that printed.
SERVER = """
import importlib, json, os, sys, tempfile, traceback
for module in sys.argv[1:]:
    importlib.import_module(module)
print("ready", flush=True)
for line in sys.stdin:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        pid = os.fork()
        if pid == 0:
            for fd, file in ((0, open(os.devnull)), (1, out), (2, err)):
                os.dup2(file.fileno(), fd)
            status = 1
            try:
                exec(compile(json.loads(line), "script", "exec"), {"__name__": "__main__"})
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        said = []
        for file in (out, err):
            file.seek(0)
            said.append(file.read().decode(errors="replace"))
        print(json.dumps([status, *said]), flush=True)
"""


class ForkedScripts:
    def __init__(self, server: subprocess.Popen[str]) -> None:
        self._server = server

    def run(self, code: str) -> subprocess.CompletedProcess[str]:
        """Run a script in a new process; its modules are imported already. Raises TimeoutError after a minute."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(code) + "\n")
        self._server.stdin.flush()
        if not select.select([self._server.stdout], [], [], LIMIT_S)[0]:
            raise TimeoutError(f"the script did not end within {LIMIT_S:.0f} s:\n{code}")
        status, out, err = json.loads(self._server.stdout.readline())
        return subprocess.CompletedProcess(["script"], status, out, err)


@contextmanager
def forked_scripts(*modules: str) -> Iterator[ForkedScripts]:
    """A Python that imports `modules`, for as long as the block; what runs in it is ended with it."""
    command = [sys.executable, "-c", SERVER, *modules]
    with subprocess.Popen(
        command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0
    ) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == "ready\n"
            yield ForkedScripts(server)
        finally:
            os.killpg(server.pid, signal.SIGKILL)
