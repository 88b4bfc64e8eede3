"""What arrays may take of this machine's memory, and what one of them took."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpumux.hostmemory import free_bytes

SHARE = 0.5  # of the free memory, for one array: the data, torch and other processes have the rest
SLACK = (
    64 << 20
)  # what capture, graphs and the allocator take whatever is trained, and the measurement can't tell apart

_STATUS, _REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def default_limit() -> int:
    """Bytes an array may take if nobody says."""
    return int(SHARE * free_bytes())


@dataclass(frozen=True, slots=True)
class Measured:
    """One array's memory, predicted and as the kernel saw it: bytes by which the process's peak rose."""

    predicted: int
    measured: int

    @property
    def scale(self) -> float:
        """By how much predictions are to be raised: 1.0 where what was measured beyond the slack is no more."""
        return max(1.0, (self.measured - SLACK) / max(1, self.predicted))


class Meter:
    """Begun before an array is made, read when it has run a few steps and touched all of its memory."""

    def __init__(self) -> None:
        with suppress(OSError):  # the peak starts over; where that is forbidden it may be one of before, and tells less
            _REFS.write_text("5")
        self._before = _resident("VmRSS:")

    def read(self, predicted: int) -> Measured:
        return Measured(predicted, max(0, _resident("VmHWM:") - self._before))


def _resident(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    return 0
