"""ChangeJob: another priority or weight for a job that is open.

The answer leaves when the core says that the change is in force (JobChanged, in execute.py), or when the job ends before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gpumux.access import refuse_priority, refuse_weight
from gpumux.core import admission
from gpumux.core import events as ev
from gpumux.daemon.books import SessionRecord
from gpumux.daemon.desk import Desk, log
from gpumux.device.contract import Regrading
from gpumux.errors import AdmissionRefused, JobClosed, ProtocolError
from gpumux.model import Fault, Priority
from gpumux.wire import messages as msg

MAX_CHANGES = 16  # of one job, asked for and not in force


class Changes:
    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self.handlers: dict[type, Callable[[SessionRecord, Any, Sequence[bytes]], None]] = {msg.ChangeJob: self._change}

    def _change(self, session: SessionRecord, m: msg.ChangeJob, frames: Sequence[bytes]) -> None:
        record = self._desk.sight.governed(session, m.job)
        if record.unloading or record.over:
            raise JobClosed(f"job {record.short} is closing", "nothing of it can be changed any more")
        if m.priority is None and m.weight is None:
            raise ProtocolError("a ChangeJob that changes nothing", "give a priority or a weight")
        if m.priority not in (None, Priority.LOW, Priority.HIGH):
            raise ProtocolError(f"priority {m.priority}", "use 0 (low) or 1 (high)")
        if len(record.changes) >= MAX_CHANGES:
            raise AdmissionRefused(f"{len(record.changes)} changes of the job are under way", "wait for one to end")
        priority = None if m.priority is None else Priority(m.priority)
        fault = self._refuses(session, priority, m.weight)
        if fault is not None:
            self._desk.refuse(session, m.ref, fault)
            return
        who = "its client" if record.session is session else f"user {session.peer.uid}"
        log.info("job %s: %s asks for priority %s, weight %s", record.short, who, m.priority, m.weight)
        self._desk.recall()  # as for a pause
        record.changes.append((session, m.ref))
        self._desk.feed(ev.ChangeRequested(record.id, priority, m.weight))

    def _refuses(self, session: SessionRecord, priority: Priority | None, weight: float | None) -> Fault | None:
        """Why the session may not give a job these, or None. An operator may give what any job can have."""
        rule = self._desk.sight.rule(session)
        fault = None
        if weight is not None:
            fault = admission.refuse_weight(weight) or refuse_weight(rule, weight)
        if fault is None and priority is not None:
            fault = refuse_priority(rule, priority)
            if fault is None and isinstance(self._desk.device, Regrading):
                fault = self._desk.device.may_regrade(priority)
        return fault
