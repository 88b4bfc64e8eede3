"""Where the steps of a daemon's jobs are traced, and where they run."""

from __future__ import annotations

import warnings

from gpumux.client.session import Session
from gpumux.errors import SimulatedDeviceWarning


def devices_of(session: Session, stacklevel: int = 3) -> tuple[str, str]:
    """The device type on which a job's steps are traced, and the one that they run on. Warns of a daemon that computes
    nothing, so many calls further up."""
    device = session.welcome.device
    if device["kind"] == "cuda":
        return "cpu", "cuda"  # the daemon runs on its GPU what was traced on the CPU; this process needs none
    if device["kind"] != "sim":
        return str(device["kind"]), str(device["kind"])
    warnings.warn(
        f"the daemon only SIMULATES its device ({device['name']}): steps take time, every result is "
        "zero and nothing is trained. For real results submit to a daemon on a real device (gpumux serve --device cpu)",
        SimulatedDeviceWarning,
        stacklevel=stacklevel,
    )
    return "cpu", "cpu"
