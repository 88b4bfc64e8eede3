"""Questions wait here for their turn: one is answered in each turn of the loop, users in turn and their sessions in turn.

An answer to GetStatus or ExplainJob looks at all jobs, or at all that is remembered, which takes longer than anything else a
message makes the loop do. Answered as they come, a hundred of them in one pass would hold up everybody's steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from gpumux.daemon.books import SessionRecord
from gpumux.errors import AdmissionRefused
from gpumux.model import SessionId

MOST_WAITING = 16  # questions of one session

Answer = Callable[[], None]


class Turns:
    def __init__(self) -> None:
        self._waiting: dict[int, dict[SessionId, deque[Answer]]] = {}  # by uid; in both, whose turn is next comes first

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, session: SessionRecord, answer: Answer) -> None:
        """Have a question answered when it is its turn. Raises AdmissionRefused when the session has asked too many."""
        lines = self._waiting.setdefault(session.peer.uid, {})
        line = lines.setdefault(session.id, deque())
        if len(line) >= MOST_WAITING:
            raise AdmissionRefused(f"{len(line)} questions of this session wait for an answer", "wait for answers")
        line.append(answer)

    def next(self) -> None:
        """Answer the question whose turn it is."""
        if not self._waiting:
            return
        uid = next(iter(self._waiting))
        lines = self._waiting.pop(uid)
        session = next(iter(lines))
        line = lines.pop(session)
        answer = line.popleft()
        if line:
            lines[session] = line  # behind all others
        if lines:
            self._waiting[uid] = lines
        answer()

    def forget(self, session: SessionRecord) -> None:
        """The session is over, and wants no answers."""
        lines = self._waiting.get(session.peer.uid, {})
        lines.pop(session.id, None)
        if not lines:
            self._waiting.pop(session.peer.uid, None)
