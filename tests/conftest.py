"""What every test gets: a leak check, an environment of its own, short runtime directories."""

from __future__ import annotations

import functools
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

# Workers have more threads than there are cores. One of OpenMP's that waits for others gives its core away at once
# instead of turning in a loop, which took a sixth of the processor time. Read when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# The tests themselves look into the core, put things in their place and read its source, which takes the Python files.
# What they start as processes runs what users would have, which is compiled after `make core`;
# tests/scheduler/test_compiled_is_equal.py compares the two.
os.environ["GPUMUX_CORE"] = "interpreted"
import gpumux.scheduler  # noqa: F401

del os.environ["GPUMUX_CORE"]

import pytest
from hypothesis import HealthCheck, settings

from tests.cases import mark_extended
from tests.global_state import changed
from tests.global_state import settings as process_settings
from tests.leaks import leaked, logging_as_before, snapshot

pytest_plugins = ["pytester"]

SETTLE_S = 30.0  # how long asynchronous teardown may take before it is called a leak; machines are busy at times
FAILED_SETTLE_S = 1.0  # after a failed test: its traceback keeps what the test held
SLOW_TIMEOUT_S = 900.0  # of a slow test; it may meet a busy machine, too
FAILED = pytest.StashKey[bool]()  # of a test: whether it did
PREFIX = f"gm{os.getpid()}-"  # names are short: an AF_UNIX path holds 107 bytes

UNHURRIED: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow],
}  # machines are busy at times
settings.register_profile("dev", **UNHURRIED)
settings.register_profile("ci", **UNHURRIED, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until all is collected: what tests import stays, and collections on the way would find nothing
    # A shell that runs this in the background has it ignore Ctrl-C, and what it starts would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "leaves_runtime_files: kills a daemon, which then can't clean up after itself")


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Slow tests run last, so that a mistake the quick ones find shows early. Where files are run side by side, those
    with slow tests are first, so that no worker is left alone with one."""
    mark_extended(items)
    slow = [item for item in items if item.get_closest_marker("slow") is not None]
    for item in slow:
        item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT_S))
    if hasattr(config, "workerinput"):
        files = {item.path for item in slow}
        items.sort(key=lambda item: item.path not in files)
    else:
        items.sort(key=lambda item: item in slow)


def pytest_collection_finish() -> None:
    """What is imported by now stays. A full collection, which the leak check makes where there is more of something
    than before, would walk all of it: a third of a second each time."""
    freeze()
    gc.enable()


SCRIPTS_FREEZE = [False]  # whether the test under way is one that calls `gc.freeze()`


def freeze() -> None:
    """Freeze all objects. gpumux undoes it where a script has frozen some, to find its tensors, and leaves these. To
    ask the collector whether a script has would have it count them all, 0.05 seconds at each capture."""
    gc.collect()
    gc.freeze()
    fetching = sys.modules.get("gpumux.capture.fetching")
    if fetching is not None:  # some test file has imported it
        undo = getattr(fetching.undo_freeze, "__wrapped__", fetching.undo_freeze)

        @functools.wraps(undo)
        def undo_of_scripts() -> None:
            if SCRIPTS_FREEZE[0]:
                undo()

        fetching.undo_freeze = undo_of_scripts


@pytest.fixture
def freezes() -> Iterator[None]:
    """Of a test that calls `gc.freeze()`."""
    SCRIPTS_FREEZE[0] = True
    yield
    SCRIPTS_FREEZE[0] = False
    freeze()


@pytest.fixture(scope="session")
def endpoint() -> Iterator[str]:
    """Of a daemon with one thread, for all tests that need no daemon of their own, because a start takes seconds. Each
    test opens jobs of its own."""
    from microbench.daemon import running_daemon  # torch takes seconds to import
    from tests.compiler import COMPILER

    with running_daemon(threads=1, settings=COMPILER) as daemon:
        yield daemon.endpoint


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch has one thread, as a daemon of the tests has."""
    from tests.threads import one_thread as one  # torch takes seconds to import

    with one():
        yield


@pytest.fixture
def in_float64() -> Iterator[None]:
    """Torch's default type is float64, so that differences of summation stay far below a test's bounds."""
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.fixture(scope="session", autouse=True)
def no_leaks_in_all() -> Iterator[None]:
    """What module and session fixtures leave behind, which no single test's check can see."""
    before = snapshot()
    yield
    found = leaked(before, SETTLE_S)
    found += [f"{path} left behind" for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*")]
    assert not found, "the test run leaks: " + "; ".join(found)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = yield
    if report.when == "call":
        item.stash[FAILED] = report.failed
    return report


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    before, set_before = snapshot(), process_settings()
    yield
    left = changed(set_before)
    found = leaked(before, FAILED_SETTLE_S if request.node.stash.get(FAILED, False) else SETTLE_S)
    assert not found, "the test leaks: " + "; ".join(found)
    assert not left, "later tests of this process would find changed: " + "; ".join(left)


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides the daemon and the settings of the user that runs the tests."""
    for name in list(os.environ):
        if name.startswith("GPUMUX_"):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def logging_stays() -> Iterator[None]:
    with logging_as_before():
        yield


@pytest.fixture
def runtime_dir(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A directory for a daemon's sockets, on a short path. What is in it at the end besides lock
    files (removing those would be a race) is a leak, unless the test says leaves_runtime_files."""
    path = Path(tempfile.mkdtemp(prefix=PREFIX))
    yield path
    left = sorted(str(p.relative_to(path)) for p in path.rglob("*") if not p.is_dir() and p.suffix != ".lock")
    shutil.rmtree(path)
    if not request.node.get_closest_marker("leaves_runtime_files"):
        assert not left, f"left in the runtime directory: {', '.join(left)}"
