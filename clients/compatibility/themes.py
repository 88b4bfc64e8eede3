"""Imports every module of idioms, which enters them into the registry."""

from __future__ import annotations

from clients.compatibility import (
    architectures,
    bad_input,
    batches,
    changing_numbers,
    first_use,
    libraries,
    optimizers,
    outside_tensors,
    refusals,
    results,
    training,
    transforms,
)

THEMES = sorted(
    module.__name__.rpartition(".")[2]
    for module in (
        architectures, bad_input, batches, changing_numbers, first_use, libraries, optimizers, outside_tensors,
        refusals, results, training, transforms,
    )
)  # fmt: skip
