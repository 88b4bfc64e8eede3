"""Models of which fewer blocks are alike: what is unlike really is, and the comparison runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from microbench import partial_fusion


def shapes(unlike: int, model: int) -> list[torch.Size]:
    config = {"model": model, "unlike": unlike, "channels": 4}
    return [p.shape for p in partial_fusion.resnet(config).parameters()]


def test_the_last_blocks_differ_and_no_others():
    assert shapes(0, 0) == shapes(0, 1)
    for unlike in (1, 3, 8):
        one, other = shapes(unlike, 0), shapes(unlike, 1)
        # A width inside a block is in the first convolution, its norm's two vectors, and the second convolution.
        assert sum(a != b for a, b in zip(one, other, strict=True)) == 4 * unlike


@pytest.mark.extended
def test_what_is_alike_runs_for_all_and_the_rest_once_a_model(tmp_path: Path):
    out = tmp_path / "found.json"
    flags = ["--models", "2", "--channels", "4", "--edge", "8", "--alike", "8", "6", "--repeats", "2", "--steps", "1"]
    assert partial_fusion.main([*flags, "--out", str(out)]) == 0
    alike, unlike = json.loads(out.read_text())["found"]
    assert (alike["alike"], unlike["alike"]) == (8, 6)
    assert unlike["for_all"] < alike["for_all"] <= alike["operators"] < unlike["operators"]
    assert len(alike["rates"]["array"]) == len(alike["rates"]["plain"]) == 2
