"""Lightning's loop with accumulated batches, plainly and through the strategy, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gpumux import errors
from tests.client.parity import assert_same

pl = pytest.importorskip("lightning.pytorch", reason="the extra `test` brings it")

from gpumux.integrations.lightning import GpumuxStrategy  # noqa: E402 - needs Lightning

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_thread")]


class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 4))
        self.seen: list[Any] = []

    def training_step(self, batch: Any) -> Tensor:
        loss = F.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any) -> None:
        self.log("right", F.cross_entropy(self.layers(batch[0]), batch[1]))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen += [
            outputs["loss"].item(),
            self.trainer.optimizers[0].param_groups[0]["lr"],
            self.trainer.global_step,
        ]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 0.9**i)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit(directory: Path, endpoint: str | None, make: Any = Module, **options: Any) -> list[Any]:
    torch.manual_seed(7)
    module = make()
    data = TensorDataset(torch.randn(28, 8), torch.randint(0, 4, (28,)))  # seven batches
    if endpoint is not None:
        options["strategy"] = GpumuxStrategy(endpoint=endpoint)
    trainer = pl.Trainer(
        max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=directory, **options,
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=14))
    assert "optimizer_zero_grad" not in vars(module)
    assert "log" not in vars(module)
    return [module.seen, module.state_dict(), dict(trainer.callback_metrics), torch.get_rng_state()]


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_grad_batches": 2},
        {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5},
        {"accumulate_grad_batches": 3, "val_check_interval": 2},  # also amid accumulated batches
    ],
    ids=["two", "three, clipped", "validated in between"],
)
def test_accumulated_batches(options: dict[str, Any], endpoint: str, tmp_path: Path) -> None:
    assert_same(fit(tmp_path, endpoint, **options), fit(tmp_path, None, **options), "fit")


def test_a_count_of_accumulated_batches_that_changes_by_epochs(endpoint: str, tmp_path: Path) -> None:
    def options() -> dict[str, Any]:
        return {"callbacks": [pl.callbacks.GradientAccumulationScheduler({0: 1, 1: 2, 2: 3})]}

    assert_same(fit(tmp_path, endpoint, **options()), fit(tmp_path, None, **options()), "fit")


def test_a_training_step_that_is_refused_leaves_the_module_as_it_was(endpoint: str, tmp_path: Path) -> None:
    class Branches(Module):
        def training_step(self, batch: Any) -> Tensor:
            loss: Tensor = self.layers(batch[0]).mean()
            return loss if loss > 0 else -loss

    module = Branches()
    with pytest.raises(errors.DataDependent):
        fit(tmp_path, endpoint, lambda: module, accumulate_grad_batches=2)
    assert "optimizer_zero_grad" not in vars(module)
    assert "log" not in vars(module)
