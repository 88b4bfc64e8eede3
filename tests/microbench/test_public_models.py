"""A quick run over models that are equal, refused, different, and not to be trained plainly."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Generator, Tensor, nn

from microbench import public_models
from microbench.daemon import running_daemon
from microbench.public_models import Case


def perceptron(scale: float = 1.0) -> Case:
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    return Case(model, lambda x: model(x).square().mean() * scale, lambda g: (torch.randn(2, 3, generator=g),))


def reads() -> Case:
    """Its loss decides by a value."""
    case = perceptron()

    def loss(x: Tensor) -> Tensor:
        found = case.loss(x)
        return found if found.item() > 0.5 else found * 2.0

    return case._replace(loss=loss)


def unequal() -> Case:
    """Made differently each time."""
    unequal.made = getattr(unequal, "made", 0) + 1  # type: ignore[attr-defined]
    return perceptron(float(unequal.made))  # type: ignore[attr-defined]


def without_a_batch() -> Case:
    def batch(g: Generator) -> tuple[Tensor, ...]:
        raise OSError("no data")

    return perceptron()._replace(batch=batch)


@pytest.mark.extended
def test_a_quick_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    name = "models-of-a-test"
    monkeypatch.setitem(sys.modules, "models_of_a_test", ModuleType("models_of_a_test"))
    makers = {"perceptron": perceptron, "reads": reads, "unequal": unequal, "without": without_a_batch}
    monkeypatch.setitem(public_models.PACKAGES, name, makers)
    out = tmp_path / "result.json"
    with running_daemon() as daemon:
        monkeypatch.setattr(public_models, "running_daemon", lambda: nullcontext(daemon))
        assert public_models.main(["--packages", name, "--out", str(out)]) == 1
        result = json.loads(out.read_text())
        found = result["packages"][name]
        assert found["equal"] == ["perceptron"]
        assert found["differs"] == {"unequal": "from step 0"}
        assert found["refused"].keys() == {"reads"}
        assert "DataDependent" in found["refused"]["reads"]
        assert found["needs more"] == {"without": "OSError: no data"}
        assert result["share"] == pytest.approx(1 / 3)
        assert f"refused: {name} reads" in capsys.readouterr().out
        assert public_models.main(["--packages", name, "--replay", "perceptron"]) == 0
    monkeypatch.setitem(public_models.PACKAGES, "no-such-package", {})
    with pytest.raises(SystemExit):
        public_models.main(["--packages", "no-such-package"])
    assert "install them" in capsys.readouterr().err


def test_the_page_has_the_numbers_of_the_result():
    root = Path(public_models.__file__).parents[1]
    result = json.loads((root / "microbench" / "results" / "cpu-public-models.json").read_text())
    page = (root / "docs" / "compatibility.md").read_text()
    counts, packages = result["counts"], result["packages"]
    assert f"trains {sum(counts.values())} models and losses of {len(packages)} packages" in page
    share = f"{round(100 * result['share'])} % of those that train plainly"
    assert f"{counts['equal']} are equal in every bit ({share}), none differs" in page
    assert counts["differs"] == 0
    assert set(packages) == set(public_models.PACKAGES)
