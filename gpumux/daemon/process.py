"""What a daemon does to its process, and says of it, before it opens anything."""

from __future__ import annotations

import logging
import resource

from gpumux.core import RUNS

LEAST_FILES = 1024

log = logging.getLogger("gpumux.daemon")


def raise_file_limit() -> None:
    """Descriptors are what a daemon has most of; the usual soft limit of 1024 is about 80 jobs."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard < LEAST_FILES:
        log.warning(
            "this process may open %d descriptors only, which is room for few jobs; raise the limit (LimitNOFILE, "
            "`ulimit -Hn`) to %d or more", hard, LEAST_FILES,
        )  # fmt: skip


def say_core() -> None:
    """Which core runs; a warning where one was compiled that does not fit."""
    if RUNS.remedy:
        log.warning("core: %s; %s", RUNS, RUNS.remedy)
    else:
        log.info("core: %s", RUNS)
