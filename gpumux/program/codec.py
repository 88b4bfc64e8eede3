"""Programs as bytes: a versioned, canonical, strict encoding (docs/protocol.md, "Programs").

    "gpux"  u16 version  u32 body length  body (msgpack)  constants, back to back

The body is one array: kind, device, numerics, storages, names, views, ops, inputs, results, scalars, constant lengths,
gates; in version 2 also layers and spans, of which a Program of version 1 has none; in version 3 also those, which may
be empty, and the view of the generator's state, which one of version 1 or 2 has not; in version 4 all of these, of
which the generator may be nil, and one more of the numerics, the precision of convolutions. Names (operator targets,
keyword names) are listed once, in order of first use; operators name them by index. Arguments are msgpack's own nil,
bool, int, float and string, or a small array that starts with a tag (`TUPLE` ...).

One Program has one encoding: `decode` refuses bytes that `encode` would not have made, so the hash of
the bytes is the hash of the Program. It is finer than `==`, which takes 1, 1.0 and True for equal.
Constants stay outside the body so that msgpack only ever parses a few megabytes, whose worst case in
Python objects is bounded.
"""

from __future__ import annotations

from gpumux.program.decoder import decode
from gpumux.program.encoder import content_hash, encode
from gpumux.program.limits import DEFAULT, Limits

__all__ = ["DEFAULT", "Limits", "content_hash", "decode", "encode"]
