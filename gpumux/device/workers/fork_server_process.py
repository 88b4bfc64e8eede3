"""The fork server's process. It imports torch, forks an executor for each job and checkers of its Programs, and tells
the daemon how they ended.

Run as `python -m gpumux.device.workers.fork_server_process FD [OPERATOR...]`; the operators are looked up. It stays
single-threaded and runs no parallel region: a fork after OpenMP has started its threads hangs in the child. When the
daemon ends, the socket closes, and this process ends with its children and what they have forked. If it is killed, the
kernel kills its children.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib
import mmap
import os
import resource
import select
import signal
import socket
import struct
import sys
import termios
import traceback
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any

# What is imported stays: collections on the way would find nothing, and take a fifth of this process's start.
if __name__ == "__main__":
    gc.disable()

import torch

from gpumux.device import codecache
from gpumux.device.cpu import executor
from gpumux.device.workers.channel import (
    CHECKED,
    EXITED,
    FORK,
    KILL,
    READY,
    REFUSED,
    RENICE,
    WARMED,
    Channel,
    unpack,
)
from gpumux.device.workers.confinement import Confinement, confine, may_be_looked_into
from gpumux.device.workers.output import Output
from gpumux.errors import GpumuxError, ProgramError
from gpumux.hostmemory import free_bytes
from gpumux.program.check import check, schema
from gpumux.program.codec import encode
from gpumux.program.ir import Op, Program, ProgramLimits, Storage, TensorRef, View

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
MOST_READS = 5  # of a pipe, to have read what it held
QUIET_MS = 5000  # without a request, before the fork server's memory is put into huge pages
_OOM_SCORE = 500  # the kernel takes these processes before the daemon
HUGE_PAGE_BYTES = 2 << 20  # on x86-64, and on arm64 with pages of 4 KiB
LEAST_FREE_BYTES = 1 << 30  # of the machine and of this process's control groups, that jobs are to find
_MADV_COLLAPSE = 25  # Linux 6.1
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


# ---- The set-up of every child, right after the fork.


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent is gone, even one that is gone already."""
    if _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(0)


def name_process(name: str) -> None:
    """The name shown by ps and top, at most 15 bytes."""
    _libc.prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def settle(parent: int, name: str, keep: Iterable[int]) -> None:
    """Give this process its own process group, no core dumps, and no descriptors but `keep` and the standard ones. It
    ignores interrupts at the daemon's terminal, which the daemon handles. It gets no session of its own: the kernel
    would give each session an equal part of the cores (autogroup), and niceness would have no effect between jobs."""
    die_with(parent)
    os.setpgid(0, 0)
    name_process(name)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the fork server's handler is about its own children
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE))
    except OSError:
        pass  # a hardened container may forbid it, and nothing depends on it
    wanted = {0, 1, 2, *keep}
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd not in wanted:
            try:
                os.close(fd)
            except OSError:
                pass  # the descriptor that listdir itself used


def leave_terminal() -> None:
    """Give up the daemon's terminal, with which children could do as the user at it."""
    with suppress(OSError):  # there is none
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY)
        fcntl.ioctl(terminal, termios.TIOCNOTTY)
        os.close(terminal)


def open_peak() -> int:
    """A descriptor that resets the process's peak memory when it is written to; -1 where that is forbidden."""
    try:
        return os.open("/proc/self/clear_refs", os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return -1


def enclose(parent: int, kind: str, given: Confinement) -> None:
    """Confine this process, with a folder of its user's own for compiled code, if it changes the user: a compiler's
    products are loaded as code. Raises OSError."""
    folder = os.environ.get(codecache.VARIABLE)
    if given.user is not None and folder and kind == "executor":  # others compile nothing
        os.environ[codecache.VARIABLE] = codecache.own_folder(folder, given.user, given.group)
    confine(given)
    die_with(parent)  # that was lost with the user


def renice(pid: int, nice: int) -> None:
    """Set the niceness of all threads of a child."""
    try:
        for thread in map(int, os.listdir(f"/proc/{pid}/task")):
            os.setpriority(os.PRIO_PROCESS, thread, nice)
    except (FileNotFoundError, ProcessLookupError):
        pass  # it has ended, or a thread has
    except PermissionError as error:
        print(f"process {pid} keeps its niceness: {error.strerror}", file=sys.stderr, flush=True)


# ---- The checker: a child that checks Programs of one job. Fake execution holds Python's global lock for long, so it
# needs a process of its own. The kernel ends it if a check takes too long; the daemon learns that from its exit status.


def warm_checker() -> None:
    """Check a small Program in the fork server: torch imports hundreds of modules at its first fake operator, and no
    check should wait for that. Nothing is computed."""
    x = View(0, "float32", (1,), (1,))
    op = Op("aten.add.Tensor", (TensorRef(0), TensorRef(0)), outs=(1,))
    storages = (Storage("input", 4, 0), Storage("temp", 4))
    check(encode(Program(storages, (x, replace(x, storage=1)), (op,), (0,), (1,))))


def check_programs(settings: dict[str, Any], fds: list[int]) -> None:
    """Check Programs one after another, in a new fork, until one can't be checked, none has come for `idle_s`, or
    `most_programs` were. `fds`: the channel's descriptor. Raises EOFError when the daemon has closed the channel."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    with socket.socket(fileno=fds[0]) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", settings["idle_s"], 0))
        channel = Channel(sock)
        for _ in range(settings["most_programs"]):
            try:
                _, _, (program,) = channel.receive()
            except BlockingIOError:
                return
            limit_check(settings["cpu_s"], settings["wall_s"])
            checked = check_program(channel, settings, program)
            signal.alarm(0)
            if not checked:
                return


def limit_check(cpu_s: int, wall_s: int) -> None:
    """Have the kernel end this process if its next check takes longer."""
    signal.alarm(wall_s)
    used = resource.getrusage(resource.RUSAGE_SELF)
    most, hard = int(used.ru_utime + used.ru_stime) + cpu_s, resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def check_program(channel: Channel, settings: dict[str, Any], program: int) -> bool:
    """Check the encoded Program in the descriptor `program`, which this closes. Returns whether the check came to its
    end: a Program that is refused by it is no reason to distrust the process, any more than one that passes."""
    with mmap.mmap(program, 0, prot=mmap.PROT_READ) as memory:
        encoded = bytes(memory[:])
    os.close(program)
    try:
        report = check(encoded, ProgramLimits(**settings["limits"]), tuple(settings["extra_ops"]))
    except GpumuxError as error:
        channel.send(REFUSED, [error.code, error.message, error.remedy])
        return True
    except (RuntimeError, ValueError, TypeError, KeyError, IndexError, RecursionError, MemoryError) as error:
        fault = ProgramError(f"the check of the program failed: {error}"[:500], "report the step that made it")
        channel.send(REFUSED, [fault.code, fault.message, fault.remedy])
        return False
    footprint = report.footprint
    sizes = list(astuple(footprint))
    operators = [op.target for op in report.program.ops]
    channel.send(CHECKED, [report.content_hash, sizes, operators, report.program.scalars, report.live])
    return True


# ---- The fuser: a child that makes and proves one fused Program (gpumux/device/workers/fusing.py). What does it is no
# part of a device, so the daemon names it; no client can.


def fuse_program(settings: dict[str, Any], fds: list[int]) -> None:
    """Call the function that is named in the settings, `module:function`, with the channel and the settings, in a new
    fork. `fds`: the channel's descriptor."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    limit_check(settings["cpu_s"], settings["wall_s"])
    module, name = settings["function"].split(":")
    getattr(importlib.import_module(module), name)(Channel(socket.socket(fileno=fds[0])), settings)


# ---- Huge pages. A fork copies an entry of the page table for every page of private memory, and the end of the child
# frees them again: with torch imported that is 57,000 pages of 4 KiB, 3 to 4 ms for the fork and for the end, in the
# kernel, which a job's step may have to wait for. In pages of 2 MiB it is 1 ms in all (microbench.forks). A child
# that writes to such a page copies 4 KiB of it, as before.


def collapsing(maps: Iterable[str] | None = None) -> Iterator[bool]:
    """Put this process's private memory into huge pages, one in each turn, which takes up to some 10 ms. Yields whether
    the kernel did it: it does not where a page was never used, and before Linux 6.1. It ends where memory gets short:
    unused parts of a huge page take memory, and children that were forked before keep the old pages, so that all of it
    may be there twice. `maps`: the lines of /proc/self/maps (tests)."""
    lines = Path("/proc/self/maps").read_text().splitlines() if maps is None else maps
    for start in _huge_pages(lines):
        try:
            if free_bytes() < LEAST_FREE_BYTES:
                return
        except OSError:
            return  # nothing says how much there is
        yield collapse(start)


def collapse(start: int) -> bool:
    """Put the huge page at address `start` of this process together. Returns whether the kernel did it."""
    return bool(_libc.madvise(start, HUGE_PAGE_BYTES, _MADV_COLLAPSE) == 0)


def _huge_pages(lines: Iterable[str]) -> Iterator[int]:
    """The addresses of all huge pages that lie within writable memory of no file."""
    for line in lines:
        addresses, modes, _, _, _, *name = line.split()
        if not modes.startswith("rw-p") or name not in ([], ["[heap]"]):
            continue
        low, high = (int(text, 16) for text in addresses.split("-"))
        yield from range(-(-low // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES, high - HUGE_PAGE_BYTES + 1, HUGE_PAGE_BYTES)


# ---- The fork server.


_CHILDREN = {"executor": executor.main, "checker": check_programs, "fuser": fuse_program}


@dataclass(slots=True)
class Child:
    """A process that was forked and has not been reaped. It leads a process group, which what it forks can't leave."""

    token: int
    pid: int
    may_stop: bool  # a signal that stops it does not end it
    output: Output | None  # until it is closed
    stopped: bool = False  # it was stopped, and killed therefore


class ForkServerProcess:
    def __init__(self, control: Channel) -> None:
        self._control = control
        self._poller = select.poll()
        self._poller.register(control, select.POLLIN)
        self._children: dict[int, Child] = {}  # by pid
        self._pids: dict[int, int] = {}  # by token
        self._outputs: dict[int, Child] = {}  # by the descriptor of its output
        self._changed, self._changes = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)  # readable when a child has changed
        self._poller.register(self._changed, select.POLLIN)
        self._collapsing: Iterator[bool] | None = collapsing()

    def serve(self) -> None:
        """Serve requests. Raises EOFError when the daemon is gone."""
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only signals with a handler are written to the pipe
        signal.set_wakeup_fd(self._changes, warn_on_full_buffer=False)
        try:
            quiet_ms = QUIET_MS
            while True:
                ready = self._poller.poll(None if self._collapsing is None else quiet_ms)
                quiet_ms = QUIET_MS if ready else 0
                if not ready and self._collapsing is not None and next(self._collapsing, None) is None:
                    self._collapsing = None
                for fd, _ in ready:
                    if fd == self._control.fileno():
                        tag, body, fds = self._control.receive()
                        self._obey(tag, unpack(body), fds)
                    elif fd == self._changed:
                        self._look_after_children()
                    elif fd in self._outputs:
                        self._pass_on(self._outputs[fd])
        finally:
            for child in self._children.values():
                kill_group(child.pid)

    def _obey(self, tag: int, body: Any, fds: list[int]) -> None:
        if tag == FORK:
            token, kind, settings = body
            self._fork(token, kind, settings, fds)
        elif tag == KILL:
            pid = self._pids.get(body)
            if pid is not None:  # the child was not reaped, so no other process can have its id
                kill_group(pid)
        elif tag == RENICE:
            token, nice = body
            if token in self._pids:
                renice(self._pids[token], nice)

    def _fork(self, token: int, kind: str, settings: dict[str, Any], fds: list[int]) -> None:
        parent = os.getpid()
        output, printed = os.pipe()
        os.set_blocking(output, False)
        try:
            with warnings.catch_warnings():
                # numpy's BLAS has an idle thread, which handles forks itself; there is no other thread.
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
        except OSError as error:
            os.close(output)
            os.close(printed)
            self._control.send(EXITED, [token, None, f"fork: {error.strerror}"])
            _close(fds)
            return
        if pid == 0:
            _child(parent, kind, settings, fds, printed)
        os.close(printed)
        _close(fds)
        with suppress(OSError):  # it has ended
            os.setpgid(pid, pid)  # as the child does: one of both comes before it is killed
        own = settings["confinement"]["user"]
        name = f"gpumux-{kind} {pid}" + (f" (user {own})" if own is not None else "")
        child = Child(token, pid, own is None and kind == "executor", Output(output, name, monotonic()))
        self._children[pid], self._pids[token], self._outputs[output] = child, pid, child
        self._poller.register(output, select.POLLIN)

    def _look_after_children(self) -> None:
        """Reap children that have ended, and report them. Kill those that a signal has stopped, but the daemon's own
        user's jobs: a stopped executor would hold its place on the device for ever (`gpumux jobs pause` is the way to
        have a job wait), and a stopped checker the Programs of its user's other jobs."""
        with suppress(BlockingIOError):
            os.read(self._changed, 4096)
        for child in self._children.values():
            with suppress(ChildProcessError):  # it has ended
                if not child.may_stop and os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOHANG) is not None:
                    child.stopped = True
                    kill_group(child.pid)
        with suppress(ChildProcessError):  # there are none
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                self._reap(ended.si_pid)

    def _reap(self, pid: int) -> None:
        kill_group(pid)  # what it has forked; the group is its own for as long as it is not reaped
        _, status = os.waitpid(pid, 0)
        child = self._children.pop(pid, None)
        if child is None:
            return  # not forked by this process, but left to it
        del self._pids[child.token]
        for _ in range(MOST_READS):
            self._pass_on(child)
        self._close_output(child)
        if child.stopped:
            why = "was stopped by a signal from outside, and was ended therefore"
            self._control.send(EXITED, [child.token, None, why])
        else:
            self._control.send(EXITED, [child.token, status, ""])

    def _pass_on(self, child: Child) -> None:
        """Print some of what a child has written."""
        if child.output is None:
            return
        said = child.output.read(monotonic())
        if said is None:
            self._close_output(child)
        else:
            say(said)

    def _close_output(self, child: Child) -> None:
        output, child.output = child.output, None
        if output is None:
            return
        say(output.end())
        del self._outputs[output.fd]
        self._poller.unregister(output.fd)
        os.close(output.fd)


def say(text: str) -> None:
    """Print to the daemon's standard error. That it is closed or full ends no job."""
    if text:
        with suppress(OSError):
            os.write(2, text.encode(errors="replace"))


def kill_group(pid: int) -> None:
    """Kill a child and what it has forked."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _child(parent: int, kind: str, settings: dict[str, Any], fds: list[int], printed: int) -> None:
    """Run a child, which prints to `printed`; never returns. The fork server's finalisers and exit handlers don't run
    in a child."""
    code = 70
    try:
        signal.set_wakeup_fd(-1)
        may_be_looked_into(True)  # only such a process may write to its files in /proc, if it is not root
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        settle(parent, f"gpumux-{kind[:8]}", fds)
        settings["usual"] = os.getpriority(os.PRIO_PROCESS, 0)
        os.nice(settings["nice"])
        settings["peak"] = open_peak()  # before it is closed to this process, too
        enclose(parent, kind, Confinement(**settings.pop("confinement")))
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
    name_process("gpumux-zygote")
    leave_terminal()
    may_be_looked_into(False)
    control = Channel(socket.socket(fileno=fd))
    try:
        control.send(READY, {"torch": torch.__version__, "unknown": [op for op in operators if not _known(op)]})
        warm_checker()  # while the daemon and its first client start
        # Present objects are never garbage, here or in a child: collections need not visit them. To collect the few
        # that are garbage already takes a fifth of a second, and frees no page.
        gc.freeze()
        gc.enable()
        control.send(WARMED, [])
        ForkServerProcess(control).serve()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the daemon is gone


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
