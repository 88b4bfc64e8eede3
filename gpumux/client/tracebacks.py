"""Tracebacks as users read them: they end at the line of their own code that an error is about.

The frames of gpumux and torch in between, and the error of torch's that caused one of gpumux's, are left out. With the
environment variable GPUMUX_TRACEBACK=full everything is shown.
"""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

from gpumux.capture.source import is_user_code
from gpumux.errors import GpumuxError

VARIABLE = "GPUMUX_TRACEBACK"

P = ParamSpec("P")
T = TypeVar("T")


def fold(error: BaseException) -> None:
    """Leave only frames of the user's code in the traceback of an error of gpumux's that is about to be raised again.
    Those of its cause stand for them where it has none. Other errors stay as they are."""
    if not isinstance(error, GpumuxError) or os.environ.get(VARIABLE) == "full":
        return
    kept = list(_frames_of_user(error.__traceback__))
    if not kept and error.__cause__ is not None:
        kept = list(_frames_of_user(error.__cause__.__traceback__))
    made: types.TracebackType | None = None
    for found in reversed(kept):
        made = types.TracebackType(made, found.tb_frame, found.tb_lasti, found.tb_lineno)
    error.__traceback__ = made
    error.__cause__ = None
    error.__suppress_context__ = True


def folded(function: Callable[P, T]) -> Callable[P, T]:
    """The function with its errors folded."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except GpumuxError as error:
            fold(error)
            raise

    return call


def _frames_of_user(traceback: types.TracebackType | None) -> Iterator[types.TracebackType]:
    while traceback is not None:
        if is_user_code(traceback.tb_frame.f_code):
            yield traceback
        traceback = traceback.tb_next
