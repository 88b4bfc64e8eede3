"""Which daemon a client talks to. The rule itself is shared with the daemon (wire/endpoint.py)."""

from __future__ import annotations

from gpumux.wire.endpoint import Endpoint, check_private, resolve

__all__ = ["resolve_endpoint"]


def resolve_endpoint(endpoint: str | None = None) -> Endpoint:
    """The explicit endpoint, else GPUMUX_ENDPOINT, else this machine's daemon of GPU 0.

    Raises ConfigError for a malformed endpoint, or a default below /tmp that another user made.
    """
    found = resolve(endpoint)
    if found.path is not None:
        check_private(found.path.parent)
    return found
