"""What the fuzzers found worth keeping, and whatever once broke a decoder, is replayed in every run of the tests."""

from __future__ import annotations

import random

import pytest

from tests.fuzz import mutate
from tests.fuzz.decoders import read
from tests.fuzz.seeds import seeds
from tests.fuzz.targets import TARGETS

ROUNDS = 3  # changes to each input


@pytest.mark.parametrize("target", TARGETS)
def test_the_corpus_breaks_no_decoder(target):
    inputs = read(target)
    assert len(inputs) >= len(seeds()[target]), "the corpus of this target is missing"
    valid = sum(TARGETS[target](data) for data in inputs)
    assert 0 < valid < len(inputs), "both kinds are in it"


@pytest.mark.parametrize("target", TARGETS)
def test_nor_do_small_changes_to_it(target):
    rng = random.Random(7)

    def plain(data: bytes, most: int) -> bytes:
        at = rng.randrange(len(data) + 1)
        return (data[:at] + rng.randbytes(rng.randrange(3)) + data[at + rng.randrange(3) :])[:most]

    for data in read(target):
        for _ in range(ROUNDS):
            TARGETS[target](mutate.mutate(target, data, 4096, rng.randrange(2**32), plain))


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_can_fail(target, monkeypatch):
    """Each would notice a decoder that lets another error out."""
    from tests.fuzz import targets

    def broken(*args, **kwargs):
        raise KeyError("not the error that was promised")

    for name in ("decode", "decode_step", "outline"):
        monkeypatch.setattr(targets, name, broken)
    monkeypatch.setattr(targets.programs, "decode", broken)
    monkeypatch.setattr(targets.records, "unpack", broken)
    with pytest.raises(KeyError):
        TARGETS[target](seeds()[target][0])
