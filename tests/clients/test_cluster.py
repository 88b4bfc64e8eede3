"""The demo of a cluster over Ray, with fewer nodes."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from clients import cluster


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")
def test_the_demo_loses_the_node_that_is_killed_and_no_other(capsys: pytest.CaptureFixture[str]):
    status = cluster.main(["--nodes", "3", "--jobs", "3"])
    out, err = capsys.readouterr()
    assert status == 0, out + err
    assert "3 of 3 nodes up" in out
    assert "was killed" in out
    assert "2 of 2 nodes up" in out
    rows = [line for line in out.splitlines() if line.startswith(("gang ", "low-")) and " 40 " in line]
    assert len(rows) == 4
    assert all(row.endswith("bit-equal") for row in rows if row.startswith("low-"))
    assert "goes on with 2 of 3 devices" in rows[0]


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(cluster, "find_spec", lambda name: None)
    assert cluster.main([]) == 78
    assert "pip install ray" in capsys.readouterr().err
