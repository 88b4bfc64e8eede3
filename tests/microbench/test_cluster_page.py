"""The pictures of a cluster's status page."""

from __future__ import annotations

import struct
import sys

import pytest

from microbench import cluster_page
from tests.metrics.chromium import chromium


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["cluster_page", *arguments])
    return cluster_page.main()


@pytest.mark.slow
@pytest.mark.extended
def test_it_takes_each_picture_on_each_screen(monkeypatch, tmp_path):
    chromium()
    monkeypatch.setattr(cluster_page, "LOOKS", 2)
    assert run(monkeypatch, "--out", str(tmp_path), "--sizes", "small") == 0
    found = {path.stem: path.read_bytes() for path in tmp_path.iterdir()}
    screens = [(400, "light"), (400, "dark"), (1280, "light"), (1280, "dark")]
    assert set(found) == {f"small_{width}_{kind}" for width, kind in screens}
    assert len(set(found.values())) == len(found)
    for name, png in found.items():
        assert struct.unpack(">I", png[16:20])[0] == int(name.split("_")[1])


def test_the_sheet_needs_every_picture_it_shows(monkeypatch, capsys, tmp_path):
    assert {name.split("_")[0] for name in cluster_page.SHEETS} == {"small", "large"}
    with pytest.raises(SystemExit):
        run(monkeypatch, "--out", str(tmp_path), "--sheet", str(tmp_path), "--sizes", "small")
    assert "pictures of small and large" in capsys.readouterr().err
