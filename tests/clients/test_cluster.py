"""The demo of a cluster over Ray, with fewer nodes."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from clients import cluster


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")
def test_the_demo_loses_the_node_that_is_killed_and_no_other(capsys: pytest.CaptureFixture[str]):
    status = cluster.main(["--nodes", "2"])
    out, err = capsys.readouterr()
    assert status == 0, out + err
    assert "2 of 2 nodes up" in out
    assert "was killed" in out
    assert "1 of 1 nodes up" in out
    assert "2 jobs of 40 steps each are bit-equal to plain runs" in out


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(cluster, "find_spec", lambda name: None)
    assert cluster.main([]) == 78
    assert "pip install ray" in capsys.readouterr().err
