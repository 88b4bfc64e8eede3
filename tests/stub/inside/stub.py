"""What the stand-in for libcuda reports to tests (libcuda.c)."""

from __future__ import annotations

import ctypes


class Stub:
    """The library that this process has as its libcuda."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")
        self.library.stub_violations.restype = ctypes.c_char_p
        self.library.stub_called.restype = ctypes.c_char_p
        self.leaks = False  # whether the test may leave handles behind

    def reset(self) -> None:
        self.library.stub_reset()

    def violations(self) -> list[str]:
        """Calls against the rules, oldest first."""
        return self.library.stub_violations().decode().splitlines()

    def live(self, what: str) -> int:
        """The number of handles or ranges of memory of a kind."""
        return int(self.library.stub_live(what.encode()))

    def called(self) -> dict[str, int]:
        """How often each call was made."""
        found: dict[str, int] = {}
        while name := self.library.stub_called(len(found)):
            found[name.decode()] = self.library.stub_calls(name)
        return found

    def fail(self, call: str, status: int, after: int = 0) -> None:
        """Have the call fail once, after `after` more calls."""
        self.library.stub_fail(call.encode(), status, after)

    def sticky(self, status: int) -> None:
        """Have every later call fail."""
        self.library.stub_break(status)

    def hold(self, on: bool) -> None:
        """Have streams run nothing until they are released."""
        self.library.stub_hold(int(on))

    def devices(self, count: int) -> None:
        self.library.stub_devices(count)
