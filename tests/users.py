"""Commands under other user ids. Only root can run them."""

from __future__ import annotations

from tests.deploy.packages import need


def become(uid: int, gid: int, groups: list[int], *, read_all: bool = True) -> list[str]:
    """A prefix for a command that runs it as another user. read_all: it may read all users' files (but write no
    socket), since the Python that runs the tests may be in another user's home."""
    words = [need("setpriv", "util-linux"), f"--reuid={uid}", f"--regid={gid}"]
    words += [f"--groups={','.join(map(str, groups))}"] if groups else ["--clear-groups"]
    caps = "-all,+dac_read_search" if read_all else "-all"
    return [*words, f"--inh-caps={caps}", f"--ambient-caps={caps}"]
