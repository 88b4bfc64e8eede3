"""The fork server's process. It imports torch, forks an executor for each job and a checker for each check, and tells
the daemon how they ended.

Run as `python -m gpumux.device.workers.fork_server_process FD [OPERATOR...]`; the operators are looked up. It stays
single-threaded and runs no parallel region: a fork after OpenMP has started its threads hangs in the child. When the
daemon ends, the socket closes, this process ends, and the kernel kills its children.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import sys
import traceback
import warnings
from typing import Any

import torch

from gpumux.device.cpu import executor
from gpumux.device.workers import checker, process
from gpumux.device.workers.channel import EXITED, FORK, KILL, READY, WARMED, Channel, unpack
from gpumux.errors import ProgramError
from gpumux.program.check import schema

_CHILDREN = {"executor": executor.main, "checker": checker.main}


class ForkServerProcess:
    def __init__(self, control: Channel) -> None:
        self._control = control
        self._poller = select.poll()
        self._poller.register(control, select.POLLIN)
        self._pids: dict[int, int] = {}  # by token
        self._ends: dict[int, int] = {}  # token by the pipe that ends with the child

    def serve(self) -> None:
        """Serve requests. Raises EOFError when the daemon is gone."""
        while True:
            for fd, _ in self._poller.poll():
                if fd == self._control.fileno():
                    tag, body, fds = self._control.receive()
                    self._obey(tag, unpack(body), fds)
                elif fd in self._ends:
                    self._reap(fd)

    def _obey(self, tag: int, body: Any, fds: list[int]) -> None:
        if tag == FORK:
            token, kind, settings = body
            self._fork(token, kind, settings, fds)
        elif tag == KILL:
            pid = self._pids.get(body)
            if pid is not None:  # the child was not reaped, so no other process can have its id
                os.kill(pid, signal.SIGKILL)

    def _fork(self, token: int, kind: str, settings: dict[str, Any], fds: list[int]) -> None:
        parent = os.getpid()
        alive, held = os.pipe()
        try:
            with warnings.catch_warnings():
                # numpy's BLAS has an idle thread, which handles forks itself; there is no other thread.
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
        except OSError as error:
            os.close(alive)
            os.close(held)
            self._control.send(EXITED, [token, None, f"fork: {error.strerror}"])
            _close(fds)
            return
        if pid == 0:
            _child(parent, kind, settings, fds, held)
        os.close(held)
        _close(fds)
        self._pids[token] = pid
        self._ends[alive] = token
        self._poller.register(alive, select.POLLIN)

    def _reap(self, end: int) -> None:
        token = self._ends.pop(end)
        self._poller.unregister(end)
        os.close(end)
        _, status = os.waitpid(self._pids.pop(token), 0)
        self._control.send(EXITED, [token, status, ""])


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _child(parent: int, kind: str, settings: dict[str, Any], fds: list[int], held: int) -> None:
    """Run a child; never returns. The fork server's finalisers and exit handlers don't run in a child."""
    code = 70
    try:
        process.settle(parent, f"gpumux-{kind[:8]}", [*fds, held])
        _CHILDREN[kind](settings, fds)
        code = 0
    except EOFError:
        code = 0  # the daemon is gone
    except BaseException:  # noqa: BLE001 - the last frame of a process: report, then exit
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _known(target: str) -> bool:
    try:
        schema(target)
    except ProgramError:
        return False
    return True


def main(fd: int, operators: list[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    process.name_process("gpumux-zygote")
    control = Channel(socket.socket(fileno=fd))
    try:
        control.send(READY, {"torch": torch.__version__, "unknown": [op for op in operators if not _known(op)]})
        checker.warm()  # while the daemon and its first client start
        gc.collect()
        gc.freeze()  # present objects are never garbage, here or in a child: collections need not visit them
        control.send(WARMED, [])
        ForkServerProcess(control).serve()
    except (EOFError, BrokenPipeError):
        pass  # the daemon is gone


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
