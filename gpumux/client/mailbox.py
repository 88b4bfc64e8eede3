"""Whom a received message is for: a caller that waits for its ref, or the handler of its job."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from gpumux.wire.messages import Refusal

Handler = Callable[[Any, list[bytes]], None]
Answer = tuple[Any, list[bytes]]

_POSTED = 1024  # requests sent without waiting whose refusal can still be traced to their job


class Mailbox:
    """Numbers requests and sorts what comes back. Guarded by the session's lock, except that
    registering and expecting are single dictionary operations and need none."""

    def __init__(self) -> None:
        self._refs = itertools.count(1)
        self._answers: dict[int, list[Answer]] = {}
        self._posted: OrderedDict[int, str] = OrderedDict()  # ref to job
        self._handlers: dict[str, Handler] = {}

    def expect(self) -> tuple[int, list[Answer]]:
        """A new ref, and the list its answer will be put into."""
        ref = next(self._refs)
        answer: list[Answer] = []
        self._answers[ref] = answer
        return ref, answer

    def forget(self, ref: int) -> None:
        """Nobody waits for `ref` any more; a late answer is dropped."""
        self._answers.pop(ref, None)

    def posted(self, job: str) -> int:
        """A ref for a request nobody waits for. Its Refusal goes to the handler of `job`."""
        ref = next(self._refs)
        self._posted[ref] = job
        if len(self._posted) > _POSTED:
            self._posted.popitem(last=False)
        return ref

    def register(self, job: str, handler: Handler) -> None:
        self._handlers[job] = handler

    def unregister(self, job: str) -> None:
        self._handlers.pop(job, None)

    def deliver(self, ref: int, message: Any, frames: list[bytes]) -> None:
        """Sort in one message; `ref` 0 when it answers no request. One nobody wants is dropped."""
        if not ref:
            self.deliver_to(getattr(message, "job", ""), message, frames)
            return
        answer = self._answers.get(ref)
        if answer is not None:
            answer.append((message, frames))
            return
        job = self._posted.pop(ref, None)
        if job is not None and isinstance(message, Refusal):
            self.deliver_to(job, message, frames)

    def deliver_to(self, job: str, message: Any, frames: list[bytes]) -> None:
        """Hand a message to its job's handler, if it has one still."""
        handler = self._handlers.get(job)
        if handler is not None:
            handler(message, frames)
