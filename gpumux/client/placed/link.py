"""A job's session with the coordinator of its cluster.

A thread of its own receives what the coordinator says, and makes the session anew when the coordinator was started
again. The job goes on at its daemon meanwhile. When the job has to move, another thread does it (`Recovery.leave`, and
then a recovery elsewhere), unless a verb of the user's comes first.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from gpumux.client.placed.handover import Handover, take
from gpumux.client.placed.kept import START_IT, KeptPlace, coordinator_at, forget
from gpumux.client.placed.state import Notice, PlaceState
from gpumux.client.recovery import LeaveOrder, Recovery, snapshot_interval_s
from gpumux.client.session import CONNECT_S, Asked, Session
from gpumux.errors import (
    AccessDenied,
    AdmissionRefused,
    ConfigError,
    DaemonGone,
    GpumuxError,
    JobClosed,
    JobFailed,
    NotOwner,
    TooFewRanks,
    from_code,
)
from gpumux.wire import messages as m
from gpumux.wire.endpoint import resolve_coordinator

log = logging.getLogger("gpumux.client")

EXPLAIN_S: Final = 30.0  # between two lines of the log about why a job waits
LOOK_S: Final = 5.0  # how often the thread looks whether it is time for one, and whether there are new Programs
MOST_PROGRAMS: Final = 64  # of a job, of which a coordinator takes note
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 2.0  # between attempts to reach the coordinator
JOIN_S: Final = 60.0  # for the answer to PlaceJob; long, since a session that ends in order gives its job up
ANSWER_S: Final = 10.0  # for answers of the coordinator, without which the job goes on
PATIENCE_S: Final = 60.0  # how long a verb of the user's may keep a job from moving
MOST_TRIES: Final = 8  # placements in a row that came to nothing for one cause, after which that is the job's
MOST_UNREACHED: Final = 4  # daemons that a job that has not run tries to reach, before its submit is given up
MOST_TEXT: Final = 250  # characters of a reason that a message carries

# A session with the daemons at these endpoints, rank by rank, each reached within so many seconds.
Connect = Callable[[Sequence[str], float], Session]


class CoordinatorLink:
    """The `JobPlace` of a job of a cluster. `join` must be called first, and `ended` last."""

    def __init__(
        self, *, cluster: str, request: m.PlaceJob, connect: Connect, limited: bool, reconnect_s: float,
        kept: Sequence[KeptPlace] = (),
    ) -> None:  # fmt: skip
        """cluster: "auto" or an endpoint. request: what the job asks for; its `attempt` is filled in here. limited: the
        user has limited the job's memory to what is asked for. reconnect_s: how long a job that waits for devices waits
        for a coordinator that is gone. kept: what daemons have of the job that this one goes on from. Raises
        ConfigError for a malformed endpoint, and for a job that can't have the devices that `gpumux cluster run` holds
        for it."""
        self._endpoint = resolve_coordinator(cluster)
        self._held: Handover | None = take(self._endpoint.text, request)  # by `gpumux cluster run`, for this job
        if self._held is not None:
            request = replace(request, job=self._held.job, nbytes=self._held.nbytes)
        self._request = request
        self._connect = connect
        self._limited = limited
        self._reconnect_s = reconnect_s
        self._gone_since: float | None = None
        self._state = PlaceState(request.job)
        self._changed = threading.Condition()  # held while the state is looked at or changed, and what follows is sent
        self._inbox: deque[Any] = deque()
        self._session: Session | None = None
        self._stop = threading.Event()
        self._told = threading.Event()  # the coordinator was told of the end, if it could be
        self._recovery: weakref.ref[Recovery] | None = None
        self._has = request.devices  # how many devices it was opened on
        self._sizes: list[int] = []  # on how many devices, fewer than asked for, it may go on
        self._unwanted = False  # the coordinator that came back refused it
        self._moving = False  # a thread does what was ordered
        self._ran = False  # it was opened at a daemon
        self._accepted = False  # the daemon where it is being opened has accepted it
        self._kept = set(kept)  # what daemons may still have of the job: its own snapshots, and what it goes on from
        self._tries = 0
        self._unreached = 0  # daemons that were given and could not be reached
        self._kind = ""  # of the devices that it was traced for
        self._waits_since = self._explained = time.monotonic()

    @property
    def job(self) -> str:
        """The job's id, at the coordinator and at every daemon."""
        return self._request.job

    # ---- the session with the coordinator

    def join(self) -> None:
        """Ask the coordinator for devices; again, when it is back, if it goes before it has answered. Raises DaemonGone
        if there is no coordinator, ConfigError if it is a daemon, and what it refuses with."""
        try:
            self._join()
        except DaemonGone as gone:
            if self._session is None or self._reconnect_s <= 0.0:
                raise
            log.warning("job %r was not answered by its coordinator, and asks again: %s", self._request.name, gone)
        threading.Thread(target=self._run, name="gpumux-place", daemon=True).start()

    def _join(self) -> None:
        session = coordinator_at(self._endpoint)
        try:
            session.register(self.job, lambda message, frames: self._inbox.append(message))
            with self._changed:  # what is sent after it says what has changed since
                before, self._session = self._session, session  # first: after an interrupt, `ended` uses it
                asked = session.ask(replace(self._request, attempt=self._state.attempt()))
            if before is not None:
                before.close()
            if not session.wait(lambda: asked.reply() is not None, JOIN_S):
                raise DaemonGone(f"the coordinator at {self._endpoint.text} does not answer", START_IT)
            asked.forget()
            reply = asked.reply()
            if isinstance(reply, m.Refusal):
                raise from_code(reply.code, reply.message, reply.remedy)
        except GpumuxError:  # after an interrupt, `ended` still uses it
            session.close()
            raise

    def _run(self) -> None:
        """The thread's work."""
        pause = FIRST_PAUSE_S
        while not self._stop.is_set():
            session = self._session
            assert session is not None
            try:
                if session.dead is not None:
                    self._join()
                    pause, self._gone_since = FIRST_PAUSE_S, None
                    with self._changed:
                        self._post_sizes()
                    log.warning("job %r: its coordinator is back", self._request.name)
                    continue
                session.wait(lambda: bool(self._inbox) or self._stop.is_set(), LOOK_S)
            except DaemonGone as gone:
                if self._gone_since is None and not self._stop.is_set():
                    self._gone_since = time.monotonic()
                    log.warning(
                        "job %r has lost its coordinator, and goes on where it runs: %s", self._request.name,
                        gone.message,
                    )  # fmt: skip
                self._stop.wait(pause)
                pause = min(pause * 1.5, LONGEST_PAUSE_S)
            except GpumuxError as error:  # the coordinator that came back does not take the job
                self._was_refused(error)
                self._stop.wait(EXPLAIN_S)
            self._read_inbox()
            with self._changed:
                self._tell_programs()
            self._explain()
        self._told.wait()
        if self._session is not None:
            self._session.close()

    def _was_refused(self, error: GpumuxError) -> None:
        with self._changed:
            if self._state.held:
                if not self._unwanted:
                    log.warning("job %r: its coordinator does not take it back: %s", self._request.name, error)
                self._unwanted = True
            else:
                self._state.answered(m.JobAnswered(self.job, "refused", error.message))
                self._changed.notify_all()

    def _read_inbox(self) -> None:
        while self._inbox:
            message = self._inbox.popleft()
            if message is None:  # the job was dropped without close()
                self.ended("its client dropped it")
                continue
            with self._changed:
                state = self._state
                if isinstance(message, m.JobPlaced):
                    self._post(state.placed(message))
                elif isinstance(message, m.VacateDevices):
                    self._post(state.vacate(message))
                elif isinstance(message, m.JobAnswered):
                    self._post(state.answered(message))
                self._changed.notify_all()
        self._move_if_ordered()

    def _post_sizes(self) -> None:
        """Say with how many devices a gang may go on. Needs the lock."""
        gang = self._request.devices > 1
        if gang and self._session is not None and self._session.welcome.device.get("gang_sizes"):
            self._post([m.GangSizes(self.job, self._sizes)])

    def _post(self, notices: Sequence[Notice | m.ProgramsKnown | m.GangSizes]) -> None:
        """Send to the coordinator. One that is gone learns what it has to know from the next PlaceJob. Needs the
        lock."""
        for notice in notices:
            with suppress(GpumuxError):
                assert self._session is not None
                self._session.post(notice)

    def _tell_programs(self) -> None:
        """Tell the coordinator of the job's Programs, if there are others than it was told of: a batch of another shape
        makes one, and so does a step that is added. It looks at the newest. Needs the lock."""
        recovery = self._recovery() if self._recovery is not None else None
        if recovery is None or self._session is None or self._session.dead is not None:
            return
        programs = recovery.programs()[-MOST_PROGRAMS:]
        if programs != self._request.programs:
            self._request = replace(self._request, programs=programs)
            self._post([m.ProgramsKnown(self.job, programs)])

    def _explain(self) -> None:
        """Log why the job waits, if it has waited for long."""
        now = time.monotonic()
        with self._changed:
            waits = not self._state.held and self._state.answer is None and not self._stop.is_set()
            if not waits or now - max(self._explained, self._waits_since) < EXPLAIN_S:
                return
            self._explained, session = now, self._session
        assert session is not None
        try:
            body = session.call(m.ExplainJob(0, self.job), timeout=ANSWER_S)[0].body
        except GpumuxError:
            return  # the coordinator is gone, which is logged, or the job has just got devices
        why = " ".join(body.get("sentences") or [str(body.get("verdict", ""))])
        log.warning("job %r has waited %.0f s for devices: %s", self._request.name, now - self._waits_since, why)

    # ---- moving

    def _move_if_ordered(self) -> None:
        with self._changed:
            if self._moving or self._recovery is None or not (self._state.order or self._state.may_take):
                return
            self._moving = True
        threading.Thread(target=self._move, name="gpumux-move", daemon=True).start()

    def _move(self) -> None:
        """Leave the daemon as ordered, and open the job again where it was placed, until nothing is left to do."""
        tried: LeaveOrder | None = None
        try:
            while (recovery := self._to_move(tried)) is not None:
                tried = self._state.order
                if tried is not None:
                    recovery.leave(PATIENCE_S)
                else:
                    recovery.ensure_open()
                del recovery
        except BaseException as error:
            with self._changed:
                self._moving = False
            if not isinstance(error, GpumuxError):
                raise
            log.info("job %r could not be moved, until its next verb: %s", self._request.name, error)

    def _to_move(self, tried: LeaveOrder | None) -> Recovery | None:
        """The job, if there is something to do besides the order that was tried already; otherwise the thread ends."""
        with self._changed:
            recovery = self._recovery() if self._recovery is not None else None
            order = self._state.order
            todo = order is not tried if order is not None else self._state.may_take
            if recovery is not None and not recovery.closed and todo and not self._stop.is_set():
                return recovery
            self._moving = False
            return None

    # ---- JobPlace: what the job asks and says

    def attach(self, recovery: Recovery, sizes: list[int]) -> None:
        """The job was submitted: from now on it may be moved, or go on with another number of devices."""
        self.opened()
        self._recovery = weakref.ref(recovery)
        weakref.finalize(recovery, self._inbox.append, None).atexit = False
        with self._changed:
            self._tell_programs()
            if recovery.recorder is not None:  # otherwise it ends with its node
                self._sizes = [size for size in sizes if size < self._request.devices]
                self._post_sizes()
            if recovery.recorder is None and self._request.movable:
                self._request = replace(self._request, movable=False)
                log.warning(
                    "job %r can't be moved, and ends with its node: the daemon on %s takes no snapshots; start it with"
                    " --state-dir",
                    self._request.name, ", ".join(self._state.nodes),
                )  # fmt: skip
                with suppress(GpumuxError):  # a coordinator that is gone learns it when it is back
                    assert self._session is not None
                    self._session.ask(replace(self._request, attempt=self._state.attempt())).forget()
        self._move_if_ordered()  # as it may have been while the job was submitted

    def order(self) -> LeaveOrder | None:
        """Whether the job has to leave its daemon."""
        return self._state.order

    def left(self, forgotten: bool) -> None:
        """See JobPlace."""
        with self._changed:
            if forgotten:
                self._kept -= self._here()
            self._post(self._state.left())
            self._waits_since = time.monotonic()

    def _here(self) -> set[KeptPlace]:
        return {KeptPlace(endpoint, self.job) for endpoint in self._state.endpoints}

    def forget(self) -> None:
        """See JobPlace."""
        forget(self._kept - self._here(), self._request.name)

    def connect(self, session: Session | None, timeout: float) -> Session | None:
        """See JobPlace. `session`: None for a job that was not opened yet. Raises AdmissionRefused for one that gets no
        devices."""
        if session is not None:
            session.close()
        with self._changed:
            state = self._state
            if state.order is not None:
                self._post(state.left())
                self._waits_since = time.monotonic()
            if not state.held:
                if not self._changed.wait_for(lambda: state.may_take or state.answer is not None, timeout):
                    self._raise_gone()
                    return None
                self._raise_answer()
                state.take()
            endpoints, running, self._accepted = state.endpoints, state.running, False
            if self._held is not None:
                endpoints = self._held.local(state.nodes, endpoints)
        try:
            if len(endpoints) not in (self._request.devices, *self._sizes):
                raise ConfigError(f"{len(endpoints)} daemons were given", f"give {self._request.devices}")
            fresh = self._connect(endpoints, CONNECT_S)
            why = self._unfit(fresh)
        except GpumuxError as error:
            if running:
                raise  # it may come back there
            self._unreached += 1
            if not self._ran and self._unreached >= MOST_UNREACHED:
                raise DaemonGone(
                    f"none of the daemons that the cluster gave could be reached: {error.message}",
                    "see `gpumux cluster status`; over tcp they have the coordinator's key (GPUMUX_CURVE_SERVER), and"
                    " know this client's (GPUMUX_CURVE_KEY)",
                ) from error
            self._not_started(0, str(error))
            return None
        if why:
            fresh.close()
            self._not_started(0, why)
            return None
        return fresh

    def _raise_gone(self) -> None:
        """Raises DaemonGone if the coordinator has been gone for too long."""
        gone_s = 0.0 if self._gone_since is None else time.monotonic() - self._gone_since
        if gone_s > self._reconnect_s:
            raise DaemonGone(f"the coordinator at {self._endpoint.text} has been gone for {gone_s:.0f} s", START_IT)

    def _raise_answer(self) -> None:
        answer = self._state.answer
        if answer is None:
            return
        message = f"job {self._request.name!r} was {answer.outcome} by its cluster"
        message += f": {answer.reason}" if answer.reason else ""
        if self._ran or answer.outcome != "refused":
            raise JobFailed(message, "submit it again")
        raise AdmissionRefused(message, "ask for fewer devices or less memory, or ask the cluster's operator")

    def _unfit(self, session: Session) -> str:
        """Why a job that ran elsewhere can't go on in this session; "" if it can."""
        kind = str(session.welcome.device["kind"])
        if not self._ran:
            self._kind = kind
            return ""
        if kind != self._kind:
            return f"the job was captured for a {self._kind} device, and this is a {kind} one"
        if not snapshot_interval_s(session):
            return "the daemon takes no snapshots (--state-dir), so that the job could not go on from one"
        return ""

    def accepted(self) -> None:
        """The daemon has opened the job: what it refuses from now on is for want of memory."""
        self._accepted = True

    def opened(self) -> None:
        """The job runs at the daemon that `connect` gave a session with."""
        with self._changed:
            self._state.opened()
            self._kept |= self._here()
            count = len(self._state.endpoints)
        if count != self._has:
            log.warning(
                "job %r goes on with %d of the %d devices that it asked for", self._request.name, count,
                self._request.devices,
            )  # fmt: skip
        self._ran, self._tries, self._has = True, 0, count

    def refused(self, session: Session, error: GpumuxError) -> bool:
        """The job could not be opened on this session, or brought back. Whether it waits for other devices now."""
        nbytes = 0
        if self._is_too_few(error):
            self._drop_size()
        elif isinstance(error, AdmissionRefused):
            if self._accepted and self._limited:
                return False  # the user's limit is too low
            nbytes = 2 * self._request.nbytes if self._accepted else 0
        elif isinstance(error, (JobClosed, NotOwner)) and not self._ran and not self._accepted:
            pass  # the daemon still closes the job that was tried there before
        elif isinstance(error, AccessDenied) and self._ran and not self._accepted:
            pass  # the daemon where it ran took it, and others may
        elif not isinstance(error, DaemonGone) or session.dead is None or self._state.running:
            return False
        if not self._state.held or self._tries >= MOST_TRIES:
            return False
        self._tries += 1
        session.close()
        self._not_started(nbytes, error.message)
        return True

    def _is_too_few(self, error: GpumuxError) -> bool:
        """Whether the job can't go on with as few devices as it was given, and could with more."""
        wide = isinstance(error, AdmissionRefused) and self._accepted and self._limited  # a rank needs more memory
        return len(self._state.endpoints) in self._sizes and (wide or isinstance(error, TooFewRanks))

    def _drop_size(self) -> None:
        """The job goes on with as few devices as it has no longer."""
        with self._changed:
            self._sizes.remove(len(self._state.endpoints))
            self._post_sizes()

    def outgrown(self) -> bool:
        """See JobPlace."""
        if not self._state.held or len(self._state.endpoints) not in self._sizes:
            return False
        self._drop_size()
        with self._changed:
            return self._changed.wait_for(lambda: self._state.order is not None, ANSWER_S)

    def _not_started(self, nbytes: int, why: str) -> None:
        log.warning(
            "job %r could not be opened on %s%s: %s", self._request.name, ", ".join(self._state.nodes),
            f", and asks for {nbytes} bytes" if nbytes else "", why,
        )  # fmt: skip
        with self._changed:
            if nbytes:
                self._request = replace(self._request, nbytes=nbytes)
            self._post(self._state.not_started(nbytes, _line(why)))
            self._waits_since = time.monotonic()

    def ended(self, fault: str) -> None:
        """The job is over, and holds nothing any more. `fault`: why it failed, "" if it did not. Idempotent."""
        with self._changed:
            if self._stop.is_set():
                return
            self._stop.set()
            asked = self._post_end(fault)
        session = self._session
        try:
            if session is not None and asked is not None:
                session.wait(lambda: asked.reply() is not None, ANSWER_S)
        except GpumuxError as error:
            log.info("job %r ended without its coordinator's word: %s", self._request.name, error)
        finally:
            self._told.set()
        if session is not None:
            session.close()

    def _post_end(self, fault: str) -> Asked | None:
        """Needs the lock."""
        if self._session is None:
            return None  # there was no coordinator
        try:
            return self._session.ask(m.PlacedJobEnded(0, self.job, _line(fault)))
        except GpumuxError:
            return None  # a coordinator that comes back notices that the job does not


def _line(text: str) -> str:
    """The text as a message can carry it: errors of user code have line breaks, and some are long."""
    return "".join(character if character.isprintable() else " " for character in text)[:MOST_TEXT]
