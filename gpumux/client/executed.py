"""Which functions run while a step is traced.

Reading the step's code says what it may call by name. What Python and torch call by themselves
(`__getitem__`, a context manager, a metaclass's property, `Function.backward`, a hook) and what is
called by a computed name shows only when it runs.
"""

from __future__ import annotations

import sys
import types
from typing import Any

Executed = dict[int, tuple[types.CodeType, dict[str, Any]]]  # by id, which the code object keeps from reuse


class Observer:
    """Within `with observer:`, notes every code object that starts in this thread, with its globals, but
    for what starts between `pause` and `resume` (torch's own machinery, which is most of it) and for what an import
    runs: modules, which are made once, and finders that others put in its way. A profiler of the user's pauses."""

    def __init__(self) -> None:
        self.found: Executed = {}
        self._before: Any = None
        self._around: types.FrameType | None = None  # who observes

    def _note(self, frame: types.FrameType, event: str, _: Any) -> None:
        if event == "call":
            code = frame.f_code
            if id(code) not in self.found and not self._importing(frame):
                self.found[id(code)] = (code, frame.f_globals)

    def _importing(self, frame: types.FrameType | None) -> bool:
        """Whether a frame runs for an `import` of what is observed; the program around it may be one, too."""
        while frame is not None and frame is not self._around:
            if frame.f_code.co_filename.startswith("<frozen importlib"):
                return True
            frame = frame.f_back
        return False

    def __enter__(self) -> Observer:
        self._around = sys._getframe(1)
        self._before = sys.getprofile()
        self.resume()
        return self

    def pause(self) -> None:
        sys.setprofile(None)

    def resume(self) -> None:
        sys.setprofile(self._note)

    def __exit__(self, *_: object) -> None:
        self._around = None
        sys.setprofile(self._before if callable(self._before) else None)
        if self._before is not None and not callable(self._before):
            self._before.enable()  # cProfile's, which is no function
