"""A typical script, in plain torch and with the fewest lines changed for a job: all state at its end is equal."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from clients import script
from tests.client.between.support import assert_equal

DROPOUT = "0.2"


def test_a_script_as_people_write_it(endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUMUX_ENDPOINT", endpoint)
    found = []
    for where, more in (("plain", []), ("muxed", ["--gpumux"])):
        arguments = ["--out", str(tmp_path / where), "--dropout", DROPOUT, *more]
        with pytest.raises(KeyboardInterrupt):  # in the middle of the second epoch
            script.main([*arguments, "--interrupt", "12"])
        found.append(script.main(arguments))
    assert_equal(found[1], found[0])
    assert found[0]["epoch"] == 3
    checkpoints = [torch.load(tmp_path / where / "checkpoint.pt") for where in ("plain", "muxed")]
    assert_equal(checkpoints[1], checkpoints[0])
