"""The names of a peer's user and group, by which a cluster's quotas, weights and fair shares count."""

from __future__ import annotations

import grp
import pwd

from gpumux.types import Peer


def names_of(peer: Peer) -> tuple[str, str]:
    """The user and its main group as the system names them, by number where it has no name; of a CURVE key the key's
    name for both."""
    if peer.key:
        return peer.key, peer.key
    try:
        user = pwd.getpwuid(peer.uid).pw_name
    except KeyError:
        user = str(peer.uid)
    try:
        group = grp.getgrgid(peer.gid).gr_name
    except (KeyError, OverflowError):
        group = str(peer.gid)
    return user, group
