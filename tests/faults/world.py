"""The virtual clock, the connections between clients and a daemon, the faults, and what must hold at the end."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from hashlib import blake2b
from random import Random
from typing import Any
from unittest import mock

from gpumux import hostmemory
from gpumux.config import Config
from gpumux.types import Fault
from gpumux.wire import messages as msg
from gpumux.wire import router as wire
from tests.daemon.fakes import Daemon
from tests.faults.client import Broken, Client, Lost, unfinished
from tests.faults.parts import Device, DirectWriter, Disk

LONGEST_S = 900.0  # of virtual time: a history that takes longer is stuck
TICK_S = 0.25
CHECK_EVERY = 8  # turns of the daemon between two checks of the scheduler's invariants, half of the time otherwise
LEASE_S = 3.0
FREE_BYTES = 1 << 36  # of the machine's memory
MOST_OPERATIONS = (
    8  # on the disk for a snapshot: two directories made and forced, a file forced, named, an old one deleted
)
CRASH = Fault("executor_crashed", "its process died", "look at the machine")
FAULTS = (
    "cut", "cut", "silent", "executor", "executor", "daemon killed", "daemon stopped", "client killed",
    "client resumed", "disk full", "disk read-only", "disk slow", "writer killed", "power lost",
)  # fmt: skip


class World:
    """One history. `seed` decides everything in it."""

    def __init__(self, seed: int) -> None:
        self.seed, self.now = seed, 100.0
        self.random = Random(seed)
        self.happened: list[str] = []
        self._digest = blake2b(digest_size=16)
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.disk = Disk()
        self.clients: list[Client] = []
        self._lives: dict[Client, Any] = {}
        self._epoch = 0  # of the daemon: what was on its way to or from an earlier one is lost
        self._sessions: dict[str, Client] = {}
        self._ready: dict[str, float] = {}  # when the newest message of a session arrives
        self._names = itertools.count()
        self._interrupted = 0.0  # when the daemon last went away
        self._slow = False
        self._finishing = False
        self._turns = 0
        self._bugs: list[Any] = []  # what daemons have counted as such
        self.daemon: Daemon | None = None
        self._start()

    # ---- time

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now + seconds, next(self._order), call))

    def run(self) -> str:
        """Run the history to its end. Returns a digest of all that was said. Raises AssertionError."""
        with mock.patch.object(hostmemory, "free_bytes", return_value=FREE_BYTES):  # what this machine has is no part
            return self._run()

    def _run(self) -> str:
        try:
            self._populate()
            self._tick()
            while unfinished(self.clients):
                self._advance()
                if self.now > 100.0 + LONGEST_S:
                    raise Broken(f"stuck: {', '.join(unfinished(self.clients))}")
            self._quiet()
        finally:
            if self.daemon is not None:
                self._end(self.daemon)
            self.disk.close()
        if self._bugs:
            raise Broken(f"daemons found inconsistencies of their own: {self._bugs}")
        return self._digest.hexdigest()

    def _advance(self) -> None:
        self.now, _, call = heapq.heappop(self._heap)
        if self.daemon is not None:
            self.daemon.now = self.now
        call()
        self._turn()

    def _tick(self) -> None:
        self.after(TICK_S, self._tick)

    # ---- the daemon

    def _start(self) -> None:
        self._epoch += 1
        self._finishing = False
        epoch = self._epoch

        def later(call: Callable[[], None]) -> None:
            self.after(self.random.uniform(2.0, 6.0) if self._slow else self.random.uniform(0.001, 0.05), call)

        writer = DirectWriter(self.disk.store(), later)
        # Snapshots expire by the clock of the world outside, where no time passes.
        self.daemon = Daemon(Config(), device=Device(), writer=writer)
        self.daemon.now = self.now
        self.note(f"daemon {epoch} starts")

    @property
    def writer(self) -> DirectWriter:
        assert self.daemon is not None
        return self.daemon.loop._snapshot_requests._writer  # type: ignore[return-value]

    def _turn(self) -> None:
        """The daemon does what it can, and what it says goes on its way."""
        daemon = self.daemon
        if daemon is None:
            return
        self._turns += 1
        daemon.consistent = self._turns % CHECK_EVERY == 0
        self.writer.hear()
        daemon.turn()
        sent, daemon.router.sent = daemon.router.sent, []
        for session, message, frames in sent:
            self._digest.update(f"{self.now:.6f} {session} {type(message).__name__}".encode())
            client = self._sessions.get(session)
            if client is not None:
                self._send(session, lambda c=client, s=session, m=message, f=frames: self._deliver(c, s, m, f))
        if daemon.device.work and not self._finishing:
            self._finishing = True
            self.after(self.random.uniform(0.001, 0.02), lambda e=self._epoch: self._finish(e))

    def _finish(self, epoch: int) -> None:
        if epoch == self._epoch and self.daemon is not None:
            self._finishing = False
            if self.daemon.device.work:
                self.daemon.device.finish(self.now)

    def _end(self, daemon: Daemon) -> None:
        """End a daemon, which was consistent until now."""
        found = [m for m in daemon.metrics.registry.collect() if m.name == "gpumux_inconsistencies"]
        self._bugs += [s for metric in found for s in metric.samples if s.name.endswith("_total") and s.value]
        daemon.close()
        self.writer.close()
        self.daemon = None

    def _kill_daemon(self) -> None:
        if self.daemon is None:
            return
        self._end(self.daemon)
        self._interrupted = self.now
        sessions, self._sessions = self._sessions, {}
        for session, client in sessions.items():
            self.after(self.random.uniform(0.0, 0.5), lambda c=client, s=session: self._lose(c, s))
        self.after(self.random.uniform(0.1, 2.0), self._start)

    def _stop_daemon(self) -> None:
        """As systemd stops it: clients are asked for snapshots, then all sessions end."""
        if self.daemon is not None:
            self.daemon.loop.stop("the world says so")
            self._interrupted = self.now
            self.after(self.random.uniform(0.5, 3.0), lambda e=self._epoch: e == self._epoch and self._kill_daemon())

    # ---- connections

    def connect(self, client: Client) -> bool:
        daemon = self.daemon
        if daemon is None or self.random.random() < 0.05:
            return False
        client.session = f"{client.name}-{next(self._names)}"
        self._sessions[client.session] = client
        daemon.connect(client.session, client.uid, inline=True)
        return True

    def say(self, client: Client, message: msg.Message, *frames: bytes) -> None:
        session, epoch = client.session, self._epoch

        def arrive() -> None:
            if epoch == self._epoch and self.daemon is not None and session in self.daemon.router.open:
                peer = self.daemon.router.open[session]
                self.daemon.router.arrivals.append(wire.Incoming(session, peer, message, list(frames)))  # type: ignore[arg-type]

        if self._sessions.get(session) is not client:
            raise Lost
        self._send(f">{session}", arrive)

    def _send(self, way: str, call: Callable[[], None]) -> None:
        """Messages of one connection and direction keep their order."""
        when = max(self._ready.get(way, 0.0), self.now + self.random.choice((0.0002, 0.001, 0.01, 0.05)))
        self._ready[way] = when
        self.after(when - self.now, call)

    def _deliver(self, client: Client, session: str, message: Any, frames: list[bytes]) -> None:
        if client.session == session and not client.dead:
            client.inbox.append((message, frames))
            self._wake(client)

    def leave(self, client: Client) -> None:
        """The client's side ends its session; the daemon hears of it."""
        session, client.session = client.session, ""
        if self._sessions.pop(session, None) is None:
            return
        self.after(self.random.uniform(0.0, 0.1), lambda e=self._epoch: self._closed(e, session))

    def _closed(self, epoch: int, session: str) -> None:
        if epoch == self._epoch and self.daemon is not None and session in self.daemon.router.open:
            peer = self.daemon.router.open.pop(session)
            self.daemon.router.arrivals.append(wire.Closed(session, peer, "gone"))  # type: ignore[arg-type]

    def _lose(self, client: Client, session: str) -> None:
        """The client notices that its session is gone."""
        if client.session == session and not client.dead:
            client.session = ""
            self._wake(client, Lost())

    # ---- clients

    def random_for(self, name: str) -> Random:
        return Random(f"{self.seed} {name}")

    def job_id(self, name: str) -> str:
        return blake2b(f"{self.seed} {name} {next(self._names)}".encode(), digest_size=16).hexdigest()

    def blameless(self, client: Client) -> bool:
        """Whether nothing has happened for a while that may cost this client its job."""
        return self.now - self._interrupted > 30.0

    def _add(self, client: Client) -> None:
        self.clients.append(client)
        self._lives[client] = client.life()
        self.after(self.random.uniform(0.0, 0.5), lambda: self._wake(client))

    def _wake(self, client: Client, error: Exception | None = None) -> None:
        """Let a client go on until it waits."""
        if client.dead or client not in self._lives:
            return
        life = self._lives[client]
        try:
            waits = life.throw(error) if error is not None else life.send(None)
        except StopIteration:
            del self._lives[client]
            return
        except Lost:
            raise AssertionError(f"{client.name} ended by a loss") from None
        if waits is not None:
            self.after(waits, lambda: self._wake(client))

    def _populate(self) -> None:
        self._add(Client(self, "sheltered", 1000, self.random.randint(10, 25), sheltered=True))
        for number in range(self.random.randint(1, 4)):
            uid = self.random.choice((1001, 1002))
            self._add(Client(self, f"job{number}", uid, self.random.randint(5, 25)))
        for _ in range(self.random.randint(1, 6)):
            kind = self.random.choice(FAULTS)
            self.after(self.random.uniform(0.1, 4.0), lambda k=kind: self._fault(k))

    # ---- faults

    def note(self, what: str) -> None:
        self.happened.append(f"{self.now - 100:8.3f} {what}")
        self._digest.update(what.encode())

    def _fault(self, kind: str) -> None:
        others = [c for c in self.clients if not (c.sheltered or c.finished or c.dead)]
        self.note(kind)
        if kind == "daemon killed":
            self._kill_daemon()
        elif kind == "daemon stopped":
            self._stop_daemon()
        elif kind.startswith("disk"):
            self.disk.fault = {"disk full": "ENOSPC", "disk read-only": "EROFS"}.get(kind, "")
            self._slow = kind == "disk slow"
            self.after(self.random.uniform(0.5, 4.0), self._mend)
        elif kind == "writer killed":
            if self.daemon is not None:
                self.writer.die(self.disk, self.random.randint(0, MOST_OPERATIONS))
        elif kind == "power lost":
            if self.daemon is not None:
                self.writer.die(self.disk, self.random.randint(0, MOST_OPERATIONS))
                self._kill_daemon()
            self.disk.lose_power(self.random)
        elif others:
            self._hurt(self.random.choice(others), kind)

    def _mend(self) -> None:
        self.disk.fault, self._slow = "", False

    def _hurt(self, client: Client, kind: str) -> None:
        session, epoch = client.session, self._epoch
        if kind in ("cut", "silent") and not session:
            return  # it has none just now
        if kind == "executor":
            if self.daemon is not None and client.job in self.daemon.device.jobs:
                self.daemon.device.lose(client.job, CRASH)
        elif kind in ("cut", "silent"):
            # A connection that is cut is noticed at once or by the lease; by either end first.
            late = LEASE_S if kind == "silent" else 0.2
            self._sessions.pop(session, None)
            self.after(self.random.uniform(0.0, late), lambda: self._closed(epoch, session))
            self.after(self.random.uniform(0.0, late), lambda: self._lose(client, session))
        else:  # its process dies; perhaps it is started again, and goes on with the job of its name
            client.dead = True
            self._sessions.pop(session, None)
            self.after(self.random.uniform(0.0, LEASE_S), lambda: self._closed(epoch, session))
            if kind == "client resumed":
                heir = Client(self, client.name, client.uid, len(client.batches))
                heir.began, heir.kept, heir.snapshot = True, client.kept, client.snapshot
                self.after(self.random.uniform(0.1, 5.0), lambda: self._add(heir))

    # ---- the end

    def _quiet(self) -> None:
        """All clients are gone: nothing of them may be left but snapshots of jobs that were not finished."""
        self._mend()
        if self.daemon is None:
            return
        for session in list(self.daemon.router.open):
            self._closed(self._epoch, session)
        for client in self.clients:
            client.dead = True
        end = self.now + 40.0
        while self.now < end and self.daemon is not None:
            self._advance()
        if self.daemon is None:  # it was being stopped
            return
        loop = self.daemon.loop
        requests = loop._snapshot_requests
        left = {
            "jobs": loop.context.records.jobs,
            "sessions": loop.context.records.sessions,
            "jobs being opened": loop.context.records.opening,
            "jobs on the device": self.daemon.device.jobs,
            "launches": list(self.daemon.device.work),
            "bytes charged": loop.scheduler.snapshot()["memory"]["used"],
            "shared memory": loop.segments.used_bytes,
            "shared memory by user": loop.segments.used_by,
            "snapshots of jobs": requests._jobs,
            "notes": requests._notes_bytes.total(),
            "questions for kept jobs": requests._finds,
            "reads": requests._restoring._reading,
            "the writer's requests": not self.writer.quiet,
        }
        rest = {name: what for name, what in left.items() if what}
        if rest:
            raise Broken(f"left at the end: {rest}")
