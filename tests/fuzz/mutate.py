"""Changes to an input that keep some of its form, so that a fuzzer gets past the first check.

Bytes alone are half of it. The other half takes the msgpack inside apart, changes a value somewhere in the tree, and
packs it again; Programs get their header with the right length.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgpack

from gpumux.program.codec import HEADER, MAGIC
from gpumux.program.ir import IR_VERSION

INTERESTING: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 127, 128, 255, 256, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1,
    -(2**63), 0.0, -0.0, 1.5, float("nan"), float("inf"), 5e-324, "", "a" * 31, "a" * 32, "0" * 32, "\x1b[31m",
    "\ud7ff", "x" * 300, b"", b"\x00" * 64, [], [[]], {}, {"a": {}},
)  # fmt: skip
PREFIX = {"message": 1, "channel": 0, "trace": 0}  # bytes before the msgpack


def mutate(target: str, data: bytes, most: int, seed: int, plain: Callable[[bytes, int], bytes]) -> bytes:
    """`plain` is the fuzzer's own mutator of bytes."""
    rng = random.Random(seed)
    if rng.random() < 0.5:
        return plain(data, most)
    changed = _program(data, rng) if target in ("program", "edge") else _message(data, PREFIX[target], rng)
    return changed[:most] if changed is not None else plain(data, most)


def _message(data: bytes, prefix: int, rng: random.Random) -> bytes | None:
    body = _unpacked(data[prefix:])
    return None if body is None else data[:prefix] + _packed(_changed(body, rng))


def _program(data: bytes, rng: random.Random) -> bytes | None:
    if len(data) < HEADER.size:
        return None
    _, _, length = HEADER.unpack_from(data)
    body = _unpacked(data[HEADER.size : HEADER.size + length])
    if body is None:
        return None
    packed = _packed(_changed(body, rng))
    return HEADER.pack(MAGIC, IR_VERSION, len(packed)) + packed + data[HEADER.size + length :]


def _unpacked(data: bytes) -> Any:
    try:
        return msgpack.unpackb(data, strict_map_key=False)
    except Exception:  # noqa: BLE001 - whatever is wrong with it, it is no tree to change
        return None


def _packed(tree: Any) -> bytes:
    packed: bytes = msgpack.packb(tree, unicode_errors="surrogatepass")
    return packed


def _changed(tree: Any, rng: random.Random) -> Any:
    """The tree with one to three changes, at places that are as likely deep as shallow."""
    for _ in range(rng.randrange(1, 4)):
        tree = _change(tree, rng, 0)
    return tree


def _change(tree: Any, rng: random.Random, depth: int) -> Any:
    if isinstance(tree, list) and tree and depth < 12 and rng.random() < 0.85:
        tree = list(tree)
        at = rng.randrange(len(tree))
        kind = rng.random()
        if kind < 0.75:
            tree[at] = _change(tree[at], rng, depth + 1)
        elif kind < 0.82:
            del tree[at]
        elif kind < 0.9:
            tree.insert(at, tree[rng.randrange(len(tree))])
        elif kind < 0.96:
            tree.insert(at, rng.choice(INTERESTING))
        else:
            tree[at] = tree
            tree = list(tree)
            tree[at] = []
        return tree
    if isinstance(tree, dict) and tree and rng.random() < 0.85:
        key = rng.choice(list(tree))
        return {**tree, key: _change(tree[key], rng, depth + 1)}
    if type(tree) is int and rng.random() < 0.6:
        return max(-(2**63), min(2**64 - 1, tree + rng.choice((-1, 1, -2, 2, 64, -64, 1 << 32, 1 << 62))))
    return rng.choice(INTERESTING)
