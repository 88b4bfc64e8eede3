"""`gpumux grants`: what it makes opens a grant, and mistakes are told."""

from __future__ import annotations

import json

import pytest

from gpumux.cli.main import EX_CONFIG, EX_FAILED, EX_USAGE, main
from gpumux.errors import AccessDenied
from gpumux.types import Priority
from gpumux.wire.grants import GrantDirectory


def test_a_grant_from_its_making_to_its_release(tmp_path, capsys):
    place = ["--dir", str(tmp_path / "grants")]
    assert main(["grants", "list", *place]) == 0
    assert capsys.readouterr().out == f"no grants in {place[1]}, which is not there\n"
    assert main(["grants", "make", *place, "slurm-17", "25", "--max-priority", "high"]) == 0
    token = capsys.readouterr().out.strip()
    grant = GrantDirectory(tmp_path / "grants").grant_of(token, 1000)
    assert (grant.name, grant.max_bytes, grant.max_priority) == ("slurm-17", 250, Priority.HIGH)
    assert main(["grants", "list", *place]) == 0
    assert capsys.readouterr().out == "slurm-17  25 of 100 shares, priority up to high\n"
    assert main(["grants", "list", *place, "--json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)
    assert listed == {"name": "slurm-17", "shares": 25, "of": 100, "max_priority": "high", "devices": []}
    assert main(["grants", "release", *place, "slurm-17"]) == 0
    assert main(["grants", "release", *place, "slurm-17"]) == EX_FAILED
    assert "gpumux grants list" in capsys.readouterr().err
    with pytest.raises(AccessDenied):
        GrantDirectory(tmp_path / "grants").grant_of(token, 1000)


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["make", "--dir", "D", "../x", "25"], EX_CONFIG, "no name for a grant"),
        (["make", "--dir", "D", "x", "0"], EX_CONFIG, "0 of 100 shares"),
        (["make", "--dir", "D", "x", "101"], EX_CONFIG, "101 of 100 shares"),
        (["make", "--dir", "D", "x", "many"], EX_USAGE, "invalid int value"),
        (["make", "x", "25"], EX_USAGE, "--dir"),
        (["make", "--dir", "/dev/null/x", "x", "25"], EX_CONFIG, "can't write the grant"),
        (["release", "--dir", "D", "../x"], EX_CONFIG, "no name for a grant"),
    ],
)  # fmt: skip
def test_mistakes(tmp_path, monkeypatch, capsys, words, code, says):
    monkeypatch.chdir(tmp_path)
    assert main(["grants", *words]) == code
    assert says in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
