"""Start-up and shut-down of a daemon: open everything in order, serve, close it in reverse.

Exit codes: 0 stopped as asked, 64 wrong usage (cli), 70 an error inside gpumux, 74 the device failed beyond repair
(every client was told), 75 the endpoint, the metrics port or the state is another's, or a coordinator can't write its
state, 78 the configuration is wrong or the device can't be had. SIGHUP has the configuration read again
(daemon/config_reload.py). SIGTERM and SIGINT ask for a clean stop, at any time from the first line of `run` on; more of
them change nothing, since stopping is bounded (drain_s, and 10 s for the device), and SIGKILL ends it at once.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType

from gpumux import __version__
from gpumux.config import Config
from gpumux.daemon import logs
from gpumux.daemon.config_reload import shared_limit, wire_limits
from gpumux.daemon.inconsistencies import CrashReports
from gpumux.daemon.loop import Loop
from gpumux.daemon.report import Identity
from gpumux.daemon.snapshots.writer import DirectoryLock, WriterClient
from gpumux.daemon.state.directory import open_log, open_state_directory
from gpumux.daemon.state.learned import NAME, LearnedFile
from gpumux.daemon.systemd import ServiceManager
from gpumux.device import registry
from gpumux.device.base import Device
from gpumux.device.workers import confinement
from gpumux.errors import ConfigError, DeviceLost, EndpointBusy, GpumuxError, StateNotKept
from gpumux.metrics.gauges import GaugeCollector
from gpumux.metrics.series import Metrics
from gpumux.metrics.server import MetricsServer
from gpumux.program.profile import load as load_profile
from gpumux.scheduler import RUNS
from gpumux.scheduler.policy import POLICIES
from gpumux.wire import endpoint
from gpumux.wire.grants import GrantDirectory
from gpumux.wire.messages import FROM_CLIENT
from gpumux.wire.peers import ServerCurve
from gpumux.wire.router import Router

# ---- Settings of the process, before the daemon opens anything.


LEAST_FILES = 64  # with fewer there is no room for the daemon's own and a job's
ENOUGH_FILES = 1024
LEAST_PROCESSES = 64  # processes and threads: those of the daemon, libzmq, its three processes, torch, and a job's

log = logging.getLogger("gpumux.daemon")


def raise_file_limit() -> None:
    """Raise the soft limit of open descriptors to the hard one: the usual 1024 is enough for about 80 jobs. Raises
    ConfigError if the daemon could not work with so few."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard == resource.RLIM_INFINITY:
        return
    if hard < LEAST_FILES:
        raise ConfigError(
            f"this process may open {hard} descriptors only, and the daemon needs {LEAST_FILES} or more",
            f"raise the limit (LimitNOFILE, `ulimit -Hn`) to {ENOUGH_FILES} or more",
        )
    if hard < ENOUGH_FILES:
        log.warning(
            "this process may open %d descriptors only, which is room for few jobs; raise the limit (LimitNOFILE, "
            "`ulimit -Hn`) to %d or more", hard, ENOUGH_FILES,
        )  # fmt: skip


def raise_process_limit() -> None:
    """Raise the soft limit of processes and threads to the hard one. Raises ConfigError if the daemon could not work
    with so few: libzmq would end it where no thread can be made. Root has no such limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    resource.setrlimit(resource.RLIMIT_NPROC, (hard, hard))
    if os.geteuid() != 0 and hard != resource.RLIM_INFINITY and hard < LEAST_PROCESSES:
        raise ConfigError(
            f"this user may have {hard} processes and threads only, and the daemon needs {LEAST_PROCESSES} or more",
            "raise the limit (LimitNPROC, TasksMax, `ulimit -Hu`)",
        )


def say_core() -> None:
    """Log whether the scheduler runs compiled or interpreted; warn if the compiled modules don't fit."""
    if RUNS.remedy:
        log.warning("core: %s; %s", RUNS, RUNS.remedy)
    else:
        log.info("core: %s", RUNS)


# ---- Starting, serving and stopping.


EX_OK, EX_SOFTWARE, EX_IOERR, EX_TEMPFAIL, EX_CONFIG = 0, 70, 74, 75, 78
FUSER = "gpumux.fuse.equal:serve"  # makes fused Programs of equal jobs, in a process of its own
SWITCH_INTERVAL_S = 1e-4  # how long the metrics thread may keep the loop waiting for the interpreter


class Stopped(Exception):
    """A stop was requested before the daemon served."""


class StopRequest:
    """Whether a stop was requested, and why. Signal handlers set it."""

    def __init__(self) -> None:
        self.reason = ""
        self._listener: Callable[[str], None] | None = None

    def ask(self, reason: str) -> None:
        self.reason = self.reason or reason
        if self._listener is not None:
            self._listener(self.reason)

    def tell(self, listener: Callable[[str], None]) -> None:
        """Call `listener` when a stop is requested, at once if one was."""
        self._listener = listener
        if self.reason:
            listener(self.reason)

    def check(self) -> None:
        """Raise Stopped if a stop was requested. Called between the steps of starting."""
        if self.reason:
            log.info("stopped while starting: %s", self.reason)
            raise Stopped


def run(config: Config, *, last: bool = False, again: Callable[[], Config] | None = None) -> int:
    """Serve until a stop is requested. Returns the exit code; errors are logged, one line each. `last`: the process
    ends next, so signals to stop it are ignored from the return on. `again` reads the configuration again (SIGHUP);
    None: a reload uses the same one."""
    stop, reload = StopRequest(), Hangup()
    with stop_signals(stop.ask, signal.SIG_IGN if last else None), hangups(stop.ask, reload.ask):
        return _run(config, stop, reload, again or (lambda: config))


def _run(config: Config, stop: StopRequest, reload: Hangup, again: Callable[[], Config]) -> int:
    logs.set_up(config.log_level, config.log_format)
    # After a bug the daemon ends: otherwise clients would wait for answers that never come.
    return served(lambda stack: serve(config, stack, stop, reload, again), log, "the daemon ends")


def served(serve: Callable[[ExitStack], None], log: logging.Logger, end: str) -> int:
    """Have a daemon, or a coordinator, serve until its end; the exit code. Errors are logged, a bug as `end`. What
    `serve` puts on the stack is closed."""
    try:
        with ExitStack() as stack:
            serve(stack)
    except Stopped:
        return EX_OK
    except (EndpointBusy, StateNotKept) as error:
        log.error("%s", error)
        return EX_TEMPFAIL
    except ConfigError as error:
        log.error("%s", error)
        return EX_CONFIG
    except DeviceLost as error:
        log.critical("%s", error)
        return EX_IOERR
    except GpumuxError as error:
        log.error("%s: %s", type(error).__name__, error)
        return EX_SOFTWARE
    except Exception:
        log.critical("internal error, %s", end, exc_info=True)
        return EX_SOFTWARE
    return EX_OK


def serve(config: Config, stack: ExitStack, stop: StopRequest, reload: Hangup, again: Callable[[], Config]) -> None:
    """Open the daemon's parts and serve. `stack` closes them, also after an error."""
    started, began = time.time(), time.monotonic()
    raise_file_limit()
    raise_process_limit()
    say_core()
    state = open_state(config, stack)
    crashes = keep_crashes(config, state, stack)
    texts = config.endpoint or (endpoint.default_endpoint(config.gpu),)
    grants = GrantDirectory(Path(config.grants)) if config.grants else None
    if grants is not None:
        texts = (config.grants_endpoint, *texts)
    router = Router(texts, endpoint.runtime_dir(config.gpu), wire_limits(config), curve_keys(config), grants=grants)

    def leave() -> None:
        router.close(stop.reason or "the daemon failed; see its log")

    stack.callback(leave)
    metrics = Metrics(FROM_CLIENT)  # ports and locks that another daemon may hold come before the device, which is slow
    metrics.start_time.set(started)
    server = bind_metrics(config, metrics, stack)
    lock = lock_snapshots(config, state, stack)
    stop.check()
    device = open_device(config, stack)
    stop.check()
    writer = open_snapshots(config, lock, stack)
    router.device = {**asdict(device.info), "shares": list(device.info.shares)}  # a message holds lists
    if writer is not None:
        router.device["snapshot_s"] = config.snapshot_s
    router.device["holds_low_work"] = POLICIES[config.policy].holds_low_work  # clients report their waits only then
    port = server.port if server is not None else 0
    identity = Identity(config, router.addresses, device.info, started, port, began)
    loop = Loop(
        identity, router, device.device, metrics=metrics, shared_limit=shared_limit(config), writer=writer,
        crashes=crashes,
        learned=keep_learned(config, state),
    )  # fmt: skip
    stack.callback(loop.close)
    stack.callback(leave)  # runs before slow closing, so that clients are told first
    metrics.add_gauges(GaugeCollector(loop.snapshots.fetch, __version__))
    if server is not None:
        server.watch(loop.snapshots.fetch, loop.snapshots.silent_s, loop.explain)
        log.info("metrics at http://%s:%d/metrics", config.metrics_host, port)

    stop.tell(loop.stop)
    reloading = loop.reloading(again)
    reload.tell(lambda: loop.call_soon(reloading.begin))
    stack.enter_context(quick_interpreter())
    manager = ServiceManager()
    manager.watch(loop)
    what = f"serves {device.info.name} at {', '.join(router.addresses)}"
    log.info("gpumux %s %s", __version__, what)
    manager.ready(what)
    try:
        loop.run()
    except DeviceLost as error:
        stop.reason = stop.reason or error.message  # `leave` tells every client
        raise
    log.info("stopped: %s", stop.reason)


class Hangup:
    """SIGHUPs, which request a reload of the configuration. One that comes while starting takes effect afterwards."""

    def __init__(self) -> None:
        self._asked = False
        self._listener: Callable[[], None] | None = None

    def ask(self) -> None:
        self._asked = True
        if self._listener is not None:
            self._listener()

    def tell(self, listener: Callable[[], None]) -> None:
        """Call `listener` when one comes, at once if one has."""
        self._listener = listener
        if self._asked:
            listener()


class OpenDevice:
    """An open device and its facts."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.info = device.open()


def open_device(config: Config, stack: ExitStack) -> OpenDevice:
    """Choose and open the device, and log which and why."""
    name, why = registry.choose(config.device, config.gpu)
    log.info("device: %s", why)
    low_nice = 0 if config.policy == "fifo" else config.low_nice  # fifo has no priorities
    confined = confinement.trial(config.confine)
    if config.confine != "off":
        confinement.may_be_looked_into(False)
    device = registry.make(
        name,
        gpu=config.gpu,
        threads=config.threads,
        low_nice=low_nice,
        gpu_shares=config.gpu_shares == "on",
        gpu_model=config.gpu_model,
        profiles=[load_profile(Path(path)) for path in config.profiles],
        allow_ops=config.allow_ops,
        confined=confined,
        fuser=FUSER if config.fuse_most > 1 else "",
    )
    stack.callback(device.close)
    opened = OpenDevice(device)
    info = opened.info
    log.info(
        "device: %s, %s, torch %s, intra-op threads a piece: %d, pieces at once: %s",
        info.kind, info.name, info.torch_version, info.threads, info.parallel or "any number",
    )  # fmt: skip
    if info.kind != "sim":
        log.info("processes of jobs: %s", "; ".join(m.what for m in confined.measures if not m.missing))
        for measure in confined.measures:
            if measure.missing:
                level = logging.INFO if measure.name == confinement.GROUPS else logging.WARNING
                log.log(level, "processes of jobs: %s", measure.missing)
    if info.kind == "sim":
        log.warning("this daemon SIMULATES its device: steps take time and compute nothing, and every result is zero")
    return opened


def curve_keys(config: Config) -> ServerCurve | None:
    if not config.curve_secret_key:
        return None
    return ServerCurve(Path(config.curve_secret_key), Path(config.curve_client_keys))


def bind_metrics(config: Config, metrics: Metrics, stack: ExitStack) -> MetricsServer | None:
    if config.metrics_port < 0:
        return None
    server = MetricsServer(metrics.registry, config.metrics_host, config.metrics_port, config.allowed_hosts)
    stack.callback(server.close)
    return server


def lock_snapshots(config: Config, state: int | None, stack: ExitStack) -> DirectoryLock | None:
    """Lock the snapshots' directory, if the daemon keeps them. Raises EndpointBusy if another daemon has it."""
    if state is None or not config.snapshot_s:
        return None
    lock = DirectoryLock(Path(config.state_dir) / "snapshots", state)
    stack.callback(lock.close)
    return lock


def open_snapshots(config: Config, lock: DirectoryLock | None, stack: ExitStack) -> WriterClient | None:
    """Start the process that writes snapshots."""
    if lock is None:
        return None
    writer = WriterClient(lock)
    stack.callback(writer.close)
    log.info("snapshots: every %g s, in %s", config.snapshot_s, lock.root)
    return writer


def open_state(config: Config, stack: ExitStack) -> int | None:
    """Open the state directory, or make it. Returns its descriptor, None if there is none. Raises ConfigError if others
    may write to it."""
    if not config.state_dir:
        return None
    state = open_state_directory(Path(config.state_dir))
    stack.callback(os.close, state)
    return state


def keep_learned(config: Config, state: int | None) -> LearnedFile | None:
    """Where what is learned of interference is kept."""
    return None if state is None else LearnedFile(state, str(Path(config.state_dir).absolute() / NAME))


def keep_crashes(config: Config, state: int | None, stack: ExitStack) -> CrashReports:
    """Have a crash of the interpreter, and reports of bugs, written to crash.log in the state directory."""
    if state is None:
        faulthandler.enable()
        stack.callback(faulthandler.disable)
        return CrashReports(None)
    crashes = open_log("crash.log", state, Path(config.state_dir) / "crash.log")
    stack.callback(os.close, crashes)
    faulthandler.enable(crashes)
    stack.callback(faulthandler.disable)
    return CrashReports(crashes)


@contextmanager
def stop_signals(stop: Callable[[str], None], afterwards: signal.Handlers | None = None) -> Iterator[None]:
    """Have SIGTERM and SIGINT call `stop`, each time they come: wrappers (timeout, terminals, containers) often deliver
    one request twice. On exit they get the handler `afterwards`, or the one from before."""

    def asked(number: int, frame: FrameType | None) -> None:
        stop(f"the daemon got {signal.Signals(number).name}")

    before = {number: signal.signal(number, asked) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if afterwards is None else afterwards)


@contextmanager
def hangups(stop: Callable[[str], None], reload: Callable[[], None]) -> Iterator[None]:
    """Have SIGHUP call `reload`, or `stop` if it reports that the process's terminal is gone."""
    terminal = os.isatty(2)

    def heard(number: int, frame: FrameType | None) -> None:
        if terminal and not os.isatty(2):
            stop("the terminal it was started on is gone")
        else:
            reload()

    before = signal.signal(signal.SIGHUP, heard)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


@contextmanager
def quick_interpreter() -> Iterator[None]:
    """Settings of the whole process that the loop's latency depends on."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()
    gc.disable()  # the loop collects when it is idle
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
        sys.setswitchinterval(interval)
