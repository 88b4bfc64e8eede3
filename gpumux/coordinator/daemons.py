"""A coordinator's connection to one daemon: a thread that carries out orders one after the other, and looks in between
whether the daemon is there and what it has learned.

All that it finds is passed to `report` as happenings of `core.py`. A daemon that can't be reached is tried again for as
long as the coordinator runs. While it is away, reservations are refused in its name at once.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from gpumux.client.session import Session
from gpumux.cluster import events as ev
from gpumux.cluster.events import DeviceFacts, PairMeasured
from gpumux.coordinator.core import DaemonAway, DaemonFound, Happening, Order, PromiseSeen
from gpumux.errors import ConfigError, DaemonGone, GpumuxError
from gpumux.wire import messages as msg
from gpumux.wire.endpoint import parse

log = logging.getLogger("gpumux.coordinator")

CONNECT_S: Final = 5.0
ANSWER_S: Final = 5.0  # for an answer to an order; the placement gives a daemon longer than that
LOOK_EVERY_S: Final = 1.0  # whether the session is alive
LEARN_EVERY_S: Final = 30.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
MOST_JOBS: Final = 64  # of a device; the daemon refuses what is too many for it


@dataclass(frozen=True, slots=True)
class DaemonAddress:
    """Where a daemon is. `node`: the name that people call it by; `host`: its machine."""

    node: str
    host: str
    endpoint: str


Report = Callable[["DaemonLink", Happening], None]


class MembershipChange(NamedTuple):
    """What makes the daemons that are known those that are wanted: nodes that leave, and daemons that join after that.
    A node whose daemon is at another address is in both, since jobs of the old one are not there."""

    left: list[str]
    joined: list[DaemonAddress]


def difference(known: Mapping[str, DaemonAddress], wanted: Iterable[DaemonAddress]) -> MembershipChange:
    """Both in the order given. `known` is by node; nodes of `wanted` are distinct."""
    new = {each.node: each for each in wanted}
    return MembershipChange(
        [node for node, address in known.items() if new.get(node) != address],
        [address for node, address in new.items() if known.get(node) != address],
    )


class DaemonLink:
    """The thread. `report` is called in it."""

    def __init__(self, address: DaemonAddress, report: Report) -> None:
        self.address = address
        self._report = report
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._pairs: dict[tuple[str, str], tuple[float, float, int]] = {}  # as reported last
        self._seen = PromiseSeen(address.node, None, "")  # as reported last
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"gpumux-{address.node}", daemon=True)
        self._thread.start()

    def order(self, order: Order) -> None:
        """Have it carried out, after those before it."""
        self._orders.put(order)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def end(self) -> None:
        """Have the thread end, after the order under way. What it still reports is of no use."""
        self._ended.set()
        self._orders.put(None)

    def close(self) -> None:
        """End the thread; waits for an order under way."""
        self.end()
        self._thread.join()

    # ---- the thread

    def _say(self, happening: Happening) -> None:
        self._report(self, happening)

    def _run(self) -> None:
        pause = FIRST_PAUSE_S
        said = False
        while not self._ended.is_set():
            try:
                session = Session.connect(self.address.endpoint, CONNECT_S, role="control")
            except GpumuxError as error:
                if not said:
                    self._say(DaemonAway(self.address.node, str(error), self.address.host))
                said = True
                self._refuse_for(pause, error.message)
                pause = min(2 * pause, LONGEST_PAUSE_S)
                continue
            began, why = time.monotonic(), ""
            try:
                self._serve(session)
            except GpumuxError as error:
                why = str(error)
            except Exception as error:
                log.exception("node %s: its answers are not understood", self.address.node)
                why = f"its answers are not understood: {type(error).__name__}: {error}"
            finally:
                session.close()
            if why and not self._ended.is_set():
                self._say(DaemonAway(self.address.node, why))
                if time.monotonic() - began > LONGEST_PAUSE_S:
                    pause = FIRST_PAUSE_S
                self._refuse_for(pause, why)  # one that is there and can't be used is not asked without a pause
                pause = min(2 * pause, LONGEST_PAUSE_S)
            said = True

    def _serve(self, session: Session) -> None:
        """Carry out orders until the daemon is gone, which raises."""
        self._say(self._found(session))
        self._seen = PromiseSeen(self.address.node, None, "")  # the coordinator knows nothing of its jobs yet
        learn_at = 0.0
        while True:
            now = time.monotonic()
            if now >= learn_at:
                self._learn(session)
                self._judge(session)
                learn_at = now + LEARN_EVERY_S
            try:
                order = self._orders.get(timeout=LOOK_EVERY_S)
            except queue.Empty:
                if session.dead is not None:
                    raise session.dead from None
                continue
            if order is None:
                return
            try:
                self._carry_out(session, order)
            except DaemonGone as gone:
                self._refuse(order, gone.message)
                raise

    def _found(self, session: Session) -> DaemonFound:
        if session.welcome.device.get("kind") == "cluster":
            raise ConfigError(
                f"{self.address.endpoint} is a coordinator's endpoint, and no daemon's", "name its daemons instead"
            )
        body = session.call(msg.GetStatus(0), timeout=ANSWER_S)[0].body
        given, others = self.address.endpoint, [str(each) for each in body["daemon"]["endpoints"]]
        reachable = [each for each in others if each != given and "*" not in each and parse(each)]
        memory = int(body["memory"]["total_bytes"] or body["device"]["memory_bytes"])
        return DaemonFound(
            self.address.node, self.address.host, (given, *reachable), DeviceFacts(max(1, memory), MOST_JOBS)
        )

    def _learn(self, session: Session) -> None:
        """Report what the daemon has measured of pairs of programs, if it is new."""
        body: dict[str, Any] = session.call(msg.GetInterference(0, ""), timeout=ANSWER_S)[0].body
        for pair in body["pairs"]:
            key = pair["high"]["program"], pair["low"]["program"]
            figures = float(pair["slowdown"]), float(pair["low_speed"]), int(pair["samples"])
            if self._pairs.get(key) != figures:
                self._pairs[key] = figures
                self._say(PairMeasured(key[0], key[1], *figures))

    def _judge(self, session: Session) -> None:
        """Report what the daemon says of its high job, if that is new. There may be several that were not placed by a
        cluster: the one that fares worst counts."""
        body: dict[str, Any] = session.call(msg.GetStatus(0), timeout=ANSWER_S)[0].body
        promises = [job["promise"] for job in body["jobs"] if job["priority"] == "high" and job["promise"]]
        known = [promise for promise in promises if promise.get("kept") is not None]
        worst = min(known, key=lambda promise: bool(promise["kept"]), default=None)
        seen = PromiseSeen(
            self.address.node,
            None if worst is None else bool(worst["kept"]),
            "" if worst is None else str(worst["verdict"]),
        )
        if seen != self._seen:
            self._seen = seen
            self._say(seen)

    def _carry_out(self, session: Session, order: Order) -> None:
        command = order.command
        try:
            match command:
                case ev.ReserveDevice():
                    session.call(
                        msg.Reserve(0, command.job, int(command.priority), command.memory_bytes, command.lease_s),
                        timeout=ANSWER_S,
                    )
                    self._say(ev.DeviceReserved(command.attempt, command.device))
                case ev.ConfirmDevice():
                    session.call(msg.ConfirmReservation(0, command.job, command.lease_s), timeout=ANSWER_S)
                    self._say(ev.DeviceConfirmed(command.attempt, command.device))
                case ev.ReleaseDevice():
                    session.call(msg.ReleaseReservation(0, command.job), timeout=ANSWER_S)
        except DaemonGone:
            raise
        except GpumuxError as error:
            self._refuse(order, error.message)

    def _refuse(self, order: Order, reason: str) -> None:
        command = order.command
        if not isinstance(command, ev.ReleaseDevice):
            self._say(ev.DeviceRefused(command.attempt, command.device, reason))

    def _refuse_for(self, seconds: float, reason: str) -> None:
        """Refuse all orders that come in the next seconds."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            try:
                order = self._orders.get(timeout=left)
            except queue.Empty:
                return
            if order is None:
                return
            self._refuse(order, reason)


class Links:
    """The links to all daemons of the cluster, by node. They come and go as `follow` is told.

    `report` gets what is found of those that are there, in their threads. What a link finds after its daemon has left
    is dropped by `current`, which the thread that calls `follow` asks before it uses a report."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._by_node: dict[str, DaemonLink] = {}
        self._leaving: list[DaemonLink] = []

    def follow(self, wanted: Sequence[DaemonAddress]) -> list[str]:
        """Open and close links, so that there is one for each of these; returns the nodes that have left."""
        known = {node: link.address for node, link in self._by_node.items()}
        change = difference(known, wanted)
        self._leaving = [link for link in self._leaving if link.alive]
        for node in change.left:
            link = self._by_node.pop(node)
            link.end()
            self._leaving.append(link)
        for address in change.joined:
            self._by_node[address.node] = DaemonLink(address, self._report)
        return change.left

    def link(self, node: str) -> DaemonLink | None:
        return self._by_node.get(node)

    def current(self, link: DaemonLink) -> bool:
        return self.link(link.address.node) is link

    def order(self, order: Order) -> Happening | None:
        """Have it carried out; a refusal if its daemon has left."""
        command = order.command
        link = self._by_node.get(command.device.node)
        if link is not None:
            link.order(order)
        elif not isinstance(command, ev.ReleaseDevice):
            return ev.DeviceRefused(command.attempt, command.device, "its daemon has left the cluster")
        return None

    def close(self) -> None:
        """End all threads; waits for orders under way."""
        links = [*self._by_node.values(), *self._leaving]
        for link in links:
            link.end()
        for link in links:
            link.close()
