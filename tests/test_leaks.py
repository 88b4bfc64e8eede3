"""Each leak check can fail: one thing is leaked on purpose, named, and taken back."""

from __future__ import annotations

import logging
import mmap
import os
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest
import zmq

from tests.leaks import SHM, growth, leaked, logging_as_before, snapshot


@contextmanager
def a_thread() -> Iterator[None]:
    release = threading.Event()
    thread = threading.Thread(target=release.wait, name="forgotten")
    thread.start()
    yield
    release.set()
    thread.join()


@contextmanager
def a_child() -> Iterator[None]:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield
    child.communicate(b"\n")


@contextmanager
def a_zombie() -> Iterator[None]:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    yield
    os.waitpid(pid, 0)


@contextmanager
def a_socket() -> Iterator[None]:
    with socket.socket(socket.AF_UNIX):
        yield


@contextmanager
def a_memfd() -> Iterator[None]:
    fd = os.memfd_create("forgotten")
    yield
    os.close(fd)


@contextmanager
def a_mapping() -> Iterator[None]:
    fd = os.memfd_create("forgotten")
    os.ftruncate(fd, 4096)
    with mmap.mmap(fd, 4096):
        os.close(fd)
        yield


@contextmanager
def a_zmq_context() -> Iterator[None]:
    before = snapshot().zmq_contexts
    with zmq.Context() as context, context.socket(zmq.PAIR):
        while snapshot().zmq_contexts == before:  # its thread has yet to name itself
            pass
        yield


@contextmanager
def an_eventfd() -> Iterator[None]:
    fd = os.eventfd(0)
    yield
    os.close(fd)


@contextmanager
def shared_memory() -> Iterator[None]:
    path = SHM / f"gpumux-test-{uuid.uuid4().hex}"
    path.write_bytes(b"")
    yield
    path.unlink()


LEAKS = [
    (a_thread, "thread 'forgotten' still runs"),
    (a_child, "child process"),
    (a_zombie, "child process"),
    (a_socket, "1 more socket descriptor open"),
    (a_memfd, "1 more memfd descriptor open"),
    (a_mapping, "1 more memfd mapping"),
    (a_zmq_context, "1 more ZeroMQ context not terminated"),
    (an_eventfd, "1 more eventfd descriptor open"),
    (shared_memory, "left behind"),
]


@pytest.mark.every(3)
@pytest.mark.parametrize(("leak", "words"), LEAKS, ids=[leak.__name__ for leak, _ in LEAKS])
def test_a_leak_is_found_and_its_end_is_seen(leak: Callable[[], ExitStack], words: str):
    before = snapshot()
    with leak():
        found = leaked(before, settle_s=0)
        assert any(words in line for line in found), found
    assert leaked(before) == []


STRANGER = """
import mmap, os, sys
if os.fork():
    os._exit(0)  # its parent is then nobody of ours
with open(sys.argv[1], "wb+") as file:
    file.truncate(4096)
    mapping = mmap.mmap(file.fileno(), 4096)
print("ready", flush=True)
sys.stdin.read()
os.unlink(sys.argv[1])
print("done", flush=True)
"""


@pytest.mark.skipif(not SHM.is_dir(), reason="needs /dev/shm")
@pytest.mark.parametrize("ours", [False, True])
def test_shared_memory_that_a_stranger_has_mapped_is_no_leak_of_ours(ours: bool):
    before = snapshot()
    path = f"{SHM}/leak-test-{os.getpid()}"
    environment = dict(os.environ) if ours else {}
    command = [sys.executable, "-c", STRANGER, path]
    with subprocess.Popen(command, env=environment, stdin=-1, stdout=-1, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.wait()
        found = [line for line in leaked(before, settle_s=0) if "/dev/shm" in line]
        process.stdin.close()
        assert process.stdout.readline() == "done\n"
    assert bool(found) is ours
    assert leaked(before) == []


def test_what_was_there_before_is_no_leak():
    with a_socket(), a_thread():
        assert leaked(snapshot(), settle_s=0) == []


def test_a_context_whose_thread_names_itself_late_is_no_new_one():
    before = snapshot()
    assert growth(before, replace(before, zmq_contexts=before.zmq_contexts + 1)) == []


def test_teardown_that_takes_a_moment_is_waited_for():
    before = snapshot()
    release = threading.Event()
    thread = threading.Thread(target=release.wait)
    thread.start()
    threading.Timer(0.05, release.set).start()
    assert leaked(before) == []


PLUGIN_TEST = """
import threading

def test_leaky():
    threading.Thread(target=threading.Event().wait, name="forgotten", daemon=True).start()
"""


def test_the_suite_fails_for_a_test_that_leaks(pytester: pytest.Pytester):
    """The fixture in conftest.py, not only the functions here, turns a leak into a failure."""
    root = pytester.path
    (root / "tests").mkdir()
    (root / "tests" / "__init__.py").touch()
    here = os.path.dirname(__file__)
    for name in ("leaks.py", "cases.py", "global_state.py", "conftest.py"):
        with open(os.path.join(here, name)) as source:
            (root / "tests" / name).write_text(source.read().replace("SETTLE_S = 30.0", "SETTLE_S = 0.0"))
    (root / "tests" / "test_leaky.py").write_text(PLUGIN_TEST)
    (root / "pytest.ini").write_text("[pytest]\ntestpaths = tests\n")
    done = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    done.assert_outcomes(passed=1, errors=1)
    done.stdout.fnmatch_lines(["*thread 'forgotten' still runs*"])


def test_a_process_in_the_place_of_another_is_not_one_more() -> None:
    before = replace(snapshot(), children=frozenset({(1, "daemon"), (2, "other")}))
    assert growth(before, replace(before, children=frozenset({(3, "daemon"), (2, "other")}))) == []
    (line,) = growth(before, replace(before, children=frozenset({(3, "daemon"), (4, "daemon"), (2, "other")})))
    assert "daemon" in line
    (line,) = growth(before, replace(before, children=frozenset({(1, "daemon"), (2, "other"), (5, "third")})))
    assert line == "child process 5 still there: third"


@pytest.mark.parametrize("name", [None, "gpumux", "gpumux.wire.peers", "gpumux.that_is_new"])
def test_levels_do_not_outlive_a_test(name: str | None):
    last = logging.getLogger("gpumux.that_is_new.and_below" if name == "gpumux.that_is_new" else "gpumux.wire.peers")
    with logging_as_before():
        logging.getLogger(name).setLevel(logging.CRITICAL)
        logging.disable(logging.CRITICAL)
        assert not last.isEnabledFor(logging.WARNING)
    assert last.isEnabledFor(logging.WARNING)
