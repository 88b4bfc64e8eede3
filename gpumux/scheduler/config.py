"""The scheduler's settings. Counts, seconds and bytes; None means that a value is derived."""

from __future__ import annotations

from dataclasses import dataclass

from gpumux.access import OPEN, Access
from gpumux.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits and windows of one daemon. Raises ConfigError when a value makes no sense.

    `memory_bytes` caps what jobs may take below the device's own size, `max_bytes_per_uid` what those of one user
    may. `access` are the rules that say which users may do what; some may set lower limits. The `*_launches` and
    `*_window_s` fields are windows: outstanding launches and predicted seconds of the high class, of
    the low class while a high job is active, and of the low class while none is (`guarded` widens the
    second up to the third where that costs nothing). A window in seconds that is None is twice its
    launches times the device's piece target: pieces are cut at operators, so they miss the target by
    up to about that much.
    """

    policy: str = "guarded"
    max_jobs: int = 1024
    max_jobs_per_uid: int = 256
    max_bytes_per_uid: int | None = None
    max_inflight: int = 64
    max_programs_per_job: int = 64
    max_transfers_per_job: int = 16
    memory_bytes: int | None = None
    high_launches: int = 2
    low_launches: int = 1
    low_idle_launches: int = 4
    high_window_s: float | None = None
    low_window_s: float | None = None
    low_idle_window_s: float | None = None
    story_records: int = 20_000
    access: Access = OPEN

    def __post_init__(self) -> None:
        counts = (
            "max_jobs", "max_jobs_per_uid", "max_inflight", "max_programs_per_job", "max_transfers_per_job",
            "high_launches", "low_launches", "low_idle_launches", "story_records",
        )  # fmt: skip
        for name in counts:
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name} is {value}", "set it to 1 or more")
        for name in ("max_bytes_per_uid", "memory_bytes", "high_window_s", "low_window_s", "low_idle_window_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} is {value}", "set it above 0, or leave it out")
