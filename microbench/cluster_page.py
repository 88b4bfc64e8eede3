"""The status page of a cluster as pictures: of 64 simulated nodes and 300 jobs, of 8 and 20, and of none.

    python -m microbench.cluster_page --out build/cluster_page
    python -m microbench.cluster_page --sheet docs/img       # also the contact sheet of docs/cluster.md

The coordinator, its placement and the page are the real ones. Daemons and clients are played, on a virtual clock that
goes on ten seconds a look: daemons agree to everything and say what they say of a promise, clients leave when asked to.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

from gpumux.cluster import events as ev
from gpumux.cluster.events import DeviceFacts, PlacementConfig, Quota
from gpumux.cluster.jobs import JobPhase
from gpumux.coordinator.core import (
    Coordinator,
    CoordinatorConfig,
    DaemonAway,
    DaemonFound,
    Happening,
    Order,
    PromiseSeen,
    Tell,
)
from gpumux.coordinator.metrics import ClusterPage
from gpumux.types import Peer, SessionId
from gpumux.wire import messages as msg
from gpumux.wire.router import Incoming, Opened
from microbench.browser import Browser, BrowserFailed, find, writer
from microbench.status_page import HEIGHT, SCREENS, sheet, take, until

GIB = 2**30
LOOK_S: Final = 10.0  # of the virtual clock
LOOKS: Final = 30  # before pictures are taken
USERS: Final = {
    1000: ("ada", "vision"),
    1001: ("ben", "vision"),
    1002: ("chen", "speech"),
    1003: ("dora", "speech"),
    0: ("root", "root"),
}
SIZES: Final = {"none": (0, 0), "small": (8, 20), "large": (64, 300)}  # nodes and jobs
SHEETS: Final = ("large_1280_light", "large_400_dark", "small_1280_dark", "small_400_light")
KEPT = "mean 1.03 of 1.10, tail 1.12 of 1.20 in 256 steps: kept"
BROKEN = "mean 1.17 of 1.10, tail 1.42 of 1.20 in 256 steps: BROKEN for 12 s"
UNKNOWN = "mean ? of 1.10, tail ? of 1.20: not measured yet"
T = TypeVar("T")


class PlayedCluster:
    """A coordinator with played daemons and clients, and as much of its loop as the page uses. Each `ask` lets LOOK_S
    pass, in which some jobs end and as many are submitted. `stuck`: it answers nothing."""

    turning = True

    def __init__(self, nodes: int, jobs: int, seed: int = 1, step_s: float = LOOK_S) -> None:
        placement = PlacementConfig(
            quotas={"ada": Quota(devices=max(2, nodes // 8), jobs=jobs + 100), "ben": Quota(high_devices=nodes // 4)},
            group_quotas={"speech": Quota(devices=max(2, nodes // 2))},
            weights={"chen": 2.0},
        )
        self.coordinator = Coordinator(CoordinatorConfig(placement), lambda peer: USERS[peer.uid])
        self.leaving = ""
        self.stuck = False
        self.step_s = step_s
        self._now = 0.0
        self._numbers = random.Random(seed)
        self._names: dict[str, str] = {}
        self._one = threading.Lock()
        for uid in USERS:
            hello = msg.Hello(msg.PROTOCOL_VERSION, "0", "control", 1, "", False)
            self.happen(Opened(SessionId(str(uid)), Peer(uid, uid, 7), hello, False))
        for at in range(nodes):
            facts = DeviceFacts(80 * GIB)
            self.happen(DaemonFound(f"{chr(97 + at // 8)}{at % 8}", chr(97 + at // 8), (f"ipc:///{at}",), facts))
        for _ in range(jobs):
            self._now += 2.0
            self.submit()
        names = sorted(self.coordinator.daemons)
        for node in names:
            self.happen(PromiseSeen(node, True, KEPT))
        if nodes > 3:
            high = [node for node in names if self.coordinator.placement.nodes[node].devices[0].high is not None]
            for node, kept, verdict in zip(high, (False, None), (BROKEN, UNKNOWN), strict=False):
                self.happen(PromiseSeen(node, kept, verdict))
            self._now += 5.0
            self.happen(DaemonAway(names[-1], "no answer for 10 s"))
            self.say(0, msg.DrainNode(1, names[3], True))

    # ---- what a loop does

    def now(self) -> float:
        return self._now

    def silent_s(self) -> float:
        return 60.0 if self.stuck else 0.0

    def ask(self, question: Callable[[Coordinator], T], limit_s: float = 0.0) -> T:
        with self._one:
            if self.stuck:
                raise TimeoutError
            return question(self.coordinator)

    # ---- what happens

    def advance(self) -> None:
        """Let a look's time pass."""
        with self._one:
            self._now += self.step_s
            for job in list(self.coordinator.jobs.values()):
                placed = self.coordinator.placement.jobs[job.id]
                if placed.phase is JobPhase.RUNNING and self._numbers.random() < 0.01:
                    self.say(job.uid, msg.PlacedJobEnded(1, job.id, ""))
                    self.submit()

    def submit(self, **fields: Any) -> str:
        """A job of a random user; its id."""
        uid = self._numbers.choice([1000, 1000, 1001, 1002, 1003])
        high = len(self._names) % 4 == 0
        job = f"{self._numbers.getrandbits(128):032x}"
        given = {
            "name": f"{'serve' if high else 'train'}-{len(self._names)}", "priority": int(high),
            "devices": self._numbers.choice([1, 1, 1, 2, 4]), "nbytes": self._numbers.randint(4, 36) * GIB,
            "programs": [], "urgency": 0, "movable": True, "attempt": 0, **fields,
        }  # fmt: skip
        self._names[job] = given["name"]
        self.say(uid, msg.PlaceJob(1, job, **given))
        return job

    def say(self, uid: int, message: msg.Message) -> None:
        """A client's message."""
        self.happen(Incoming(SessionId(str(uid)), Peer(uid, uid, 7), message, []))

    def happen(self, happening: Happening) -> None:
        """Let it happen, and daemons and clients do as they are told."""
        to_do = [happening]
        while to_do:
            for action in self.coordinator.handle(to_do.pop(0), self._now):
                match action:
                    case Order(ev.ReserveDevice() as command):
                        to_do.append(ev.DeviceReserved(command.attempt, command.device))
                    case Order(ev.ConfirmDevice() as command):
                        to_do.append(ev.DeviceConfirmed(command.attempt, command.device))
                    case Tell(session, msg.VacateDevices() as asked):
                        peer = Peer(int(session), int(session), 7)
                        to_do.append(Incoming(session, peer, msg.DevicesVacated(asked.job, asked.attempt), []))


@contextmanager
def served(cluster: PlayedCluster, *, port: int = 0, named: bool = True) -> Iterator[ClusterPage]:
    page = ClusterPage("127.0.0.1", port, allowed_hosts=(), named=named)
    try:
        page.watch(cluster)
        yield page
    finally:
        page.close()


def pictures(browser: Browser, size: str, write: Callable[[str, bytes], None]) -> None:
    """Take those of a cluster of that size, after LOOKS."""
    cluster = PlayedCluster(*SIZES[size])
    with served(cluster) as page:
        opened = [(width, dark, browser.open(f"{page.address}/", width, HEIGHT, dark=dark)) for width, dark in SCREENS]
        for number in range(1, LOOKS if size != "none" else 3):
            cluster.advance()
            for _, _, each in opened:
                until(each, f"seen.length >= {number}")
        take(opened, size, write)
        for _, _, each in opened:
            each.close()


def main() -> int:
    made = argparse.ArgumentParser(
        prog="python -m microbench.cluster_page", description=(__doc__ or "").splitlines()[0]
    )
    made.add_argument("--out", type=Path, default=Path("build/cluster_page"), metavar="DIR", help="where pictures go")
    made.add_argument("--sheet", type=Path, metavar="DIR", help="where the contact sheet goes, too")
    made.add_argument("--sizes", nargs="+", choices=tuple(SIZES), default=tuple(SIZES), help="(default: all)")
    args = made.parse_args()
    if args.sheet and (not args.sheet.is_dir() or not {"small", "large"} <= set(args.sizes)):
        made.error("--sheet takes a directory that is there, and pictures of small and large")
    args.out.mkdir(parents=True, exist_ok=True)
    write = writer(args.out)
    try:
        with Browser(find()) as browser:
            for size in args.sizes:
                pictures(browser, size, write)
            if args.sheet:
                (args.sheet / "cluster_page.png").write_bytes(sheet(browser, args.out, SHEETS))
    except BrowserFailed as error:
        made.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
