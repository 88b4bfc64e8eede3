"""Whether anybody listens at an ipc endpoint, asked of the kernel.

ZeroMQ connects in the background and tries again for ever; that there is nobody shows only as silence.
A plain connection says so at once. Nothing is sent on it, and a daemon drops it without a word.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from gpumux.errors import DaemonGone
from gpumux.wire.endpoint import Endpoint
from gpumux.wire.lock import recorded_holder


def check_listening(endpoint: Endpoint, remedy: str) -> None:
    """Raises DaemonGone, with `remedy`, when nobody listens there. A tcp endpoint is not asked."""
    if endpoint.path is None:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC) as probe:
        try:
            probe.connect(os.fspath(endpoint.path))
        except FileNotFoundError:
            raise DaemonGone(f"no daemon at {endpoint.text}", remedy) from None
        except ConnectionRefusedError:
            raise DaemonGone(
                f"no daemon at {endpoint.text}: one that was killed left its socket behind", remedy
            ) from None
        except PermissionError:
            raise DaemonGone(
                f"this user may not connect to {endpoint.text}", "ask for write permission on the socket"
            ) from None
        except OSError:
            return  # somebody listens, but is busy; or ZeroMQ knows better


def unanswered(endpoint: Endpoint, remedy: str) -> DaemonGone:
    """The error for a daemon that said nothing in time: it may be there and stuck."""
    holder = None if endpoint.path is None else living_holder(endpoint.path)
    if holder is None:
        return DaemonGone(f"no daemon answers at {endpoint.text}", remedy)
    return DaemonGone(
        f"process {holder} holds {endpoint.text} but does not answer",
        f"look whether it is stopped or stuck (ps -o stat,wchan {holder}); wait for it, or kill it and start another",
    )


def living_holder(path: Path) -> int | None:
    """The process that the endpoint's lock names, if it lives."""
    pid = recorded_holder(path)
    if pid is None:
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass  # it lives, as somebody else
    return pid
