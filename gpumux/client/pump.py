"""Sending and receiving without a thread in between: whoever waits does it.

A step's round trip would pay for two thread hops. Instead any thread sends and receives under one
lock, and one of those that wait is the *leader*: it alone sleeps on the socket's descriptor, outside
the lock, so that others can still send. What it receives it hands to whoever it is for; the others
sleep on a condition until then, and one of them takes over when the leader has what it waited for.

Steps and their answers have a lane of their own (wire/lane.py), which is looked at first: what the
daemon put there before a ZeroMQ message is handed over before it.

ZeroMQ's descriptor signals changes, not levels: after any call on the socket its events must be
looked at before somebody sleeps on it. `_drain` does that. `_stale` says that it is still to be done:
a sender leaves it to whoever sleeps next, and does it itself only while a leader sleeps already.
Asking costs as much as a message, so nobody asks twice.

Ctrl-C may come anywhere, but takes effect only outside sending and receiving (interrupts.py): every
message is handed over whole and once, and no lock stays held.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from gpumux.client.connection import BROKEN, LANE, MESSAGE, Connection
from gpumux.client.interrupts import Shield
from gpumux.errors import DaemonGone, GpumuxError, from_code

T = TypeVar("T")
_FOREVER = 3600.0  # one sleep; nobody sleeps longer without looking


class Pump:
    """Moves messages between one connection and the threads of this process. `dispatch` is called
    with each message's frames, under the lock, `answered` with each message of the lane; they may
    `send`, but not `wait`.

    `dead` is why nothing moves any more; `heard` and `sent` are when something last did.
    """

    def __init__(
        self, connection: Connection, dispatch: Callable[[list[bytes]], None], answered: Callable[[bytes], None]
    ) -> None:
        self.dead: GpumuxError | None = None
        self.heard = self.sent = time.monotonic()
        self._connection = connection
        self._dispatch = dispatch
        self._answered = answered
        self._closed = False
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._leader: int | None = None  # thread that sleeps on the sockets
        self._sleepers = 0  # threads that wait on the condition
        self._draining = False
        self._stale = True

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        """Raises the error of a dead connection."""
        with self._lock:
            self.raise_if_dead()
            self._stale = True
            self._connection.send(parts)
            self.sent = time.monotonic()
            if self._leader is not None:
                self._drain()

    def send_step(self, message: bytes | memoryview) -> None:
        """Send by the lane; by ZeroMQ when there is none. Raises the error of a dead connection."""
        with self._lock:
            if self.dead is not None:
                self.raise_if_dead()
            if self._connection.send_step(message):
                self.sent = time.monotonic()
                return
            self._drain()  # a lane that was closed: why is under way, or here already
            self.send([message])

    def drain(self) -> None:
        """Dispatch what has arrived, without waiting, and notice a broken connection."""
        with self._lock:
            if not self._closed:
                self._drain()
                self._check_connection()

    def wait(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """Receive until `predicate()` is true; False when `timeout` seconds pass first.

        The predicate is called under the lock after messages were handed over. Raises
        the error of a connection that dies before the predicate holds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        me = threading.get_ident()
        happened = 0
        try:
            while True:
                with self._lock:
                    left = _FOREVER if deadline is None else deadline - time.monotonic()
                    if self._look(predicate, happened, left):
                        return True
                    if left <= 0:
                        return False
                    if self._leader is not None:
                        happened = 0
                        self._sleep(left)
                        continue
                    self._leader = me
                happened = self._connection.poll(left)
                self._leader = None
        finally:
            if self._sleepers or self._leader == me:
                self._step_down(me)

    def _look(self, predicate: Callable[[], bool], happened: int, left: float) -> bool:
        """Receive what there is until the predicate holds, and say whether it does."""
        if self._draining:
            raise GpumuxError("a handler can't wait for the daemon", "wait in the thread that asked")
        if predicate():
            return True
        if self._closed:
            pass
        elif happened == LANE and not self._stale:
            if self._take_steps(predicate):
                return True
        elif happened or self._stale or left <= 0:
            self._drain(predicate, expected=bool(happened & MESSAGE))
            if happened & BROKEN:
                self._check_connection()
            if predicate():
                return True
        if self.dead is not None:
            self.raise_if_dead()
        return False

    def _sleep(self, timeout: float) -> None:
        self._sleepers += 1
        try:
            self._changed.wait(timeout)
        finally:
            self._sleepers -= 1

    def _step_down(self, me: int) -> None:
        """Leave `wait`, however it ends: somebody else must watch the socket now."""
        if self._leader == me:
            self._leader = None
        if self._sleepers:
            with self._lock:
                self._changed.notify_all()

    def _drain(self, predicate: Callable[[], bool] | None = None, expected: bool = False) -> None:
        """Hand over all that has arrived, or as much as makes `predicate` true. Needs the lock."""
        if self._draining:
            return  # a handler posts: the drain below it goes on afterwards
        self._stale = True
        if self._take_steps(predicate):
            return
        while expected or self._connection.readable():
            if self._take_one(predicate):
                return
            expected = False
        self._stale = False

    def _take_steps(self, predicate: Callable[[], bool] | None) -> bool:
        """Hand over the lane's messages; whether `predicate` holds now, which ends it early."""
        if self._draining:
            return False
        while self._take_step():
            if predicate is not None and predicate():
                return True
        return False

    def _take_step(self) -> bool:
        """Hand over one message of the lane; whether there was one."""
        with Shield():
            message = self._connection.receive_step()
            if message is None:
                return False
            self._hand_over(self._answered, message)
        return True

    def _take_one(self, predicate: Callable[[], bool] | None) -> bool:
        """Hand over one message; whether `predicate` holds now."""
        with Shield():
            parts = self._connection.receive()
            if parts is None:
                return False
            while self._take_step():
                pass  # written before this message, so handed over before it
            self._hand_over(self._dispatch, parts)
        return predicate is not None and predicate()

    def _hand_over(self, to: Callable[[T], None], what: T) -> None:
        self.heard = time.monotonic()
        self._draining = True
        try:
            to(what)
        finally:
            self._draining = False
            if self._sleepers or self._leader is not None:
                self._tell_others()

    def _tell_others(self) -> None:
        if self._sleepers:
            self._changed.notify_all()
        if self._leader not in (None, threading.get_ident()):
            self._connection.wake()

    def _check_connection(self) -> None:
        if self.dead is None and (error := self._connection.lost()) is not None:
            self._drain()  # what came before the break still counts
            self.die(error)

    def die(self, error: GpumuxError) -> None:
        """Nothing moves from now on; every wait raises. The first reason stays."""
        with self._lock:
            if self.dead is None:
                self.dead = error
                self._connection.working = False
            self._tell_others()

    def raise_if_dead(self) -> None:
        if self.dead is not None:
            raise from_code(self.dead.code, self.dead.message, self.dead.remedy)

    def end(self) -> bool:
        """Say goodbye and make every wait raise, then wait until no thread sleeps on the socket.
        False when that had happened before."""
        with self._lock:
            if self._closed:
                return False
            if self.dead is None:
                self._connection.say_goodbye()
            self._closed = True
            self.die(DaemonGone("this session is closed", "open another"))
            while self._leader not in (None, threading.get_ident()):
                self._sleep(1.0)
        return True
