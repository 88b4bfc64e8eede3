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


class Groups(Module):
    """Its optimizer has the parameters in another order than the module, and not all of them."""

    def configure_optimizers(self) -> Any:
        weights = [p for p in self.parameters() if p.ndim > 1]
        biases = [p for name, p in self.named_parameters() if p.ndim == 1 and not name.startswith("layers.0")]
        return torch.optim.AdamW([{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}])


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_what_is_clipped_are_the_gradients_of_the_optimizer(algorithm: str, endpoint: str, tmp_path: Path) -> None:
    options = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": algorithm}
    assert_same(fit(tmp_path, endpoint, Groups, **options), fit(tmp_path, None, Groups, **options), "fit")


class Hooks(Module):
    def on_before_backward(self, loss: Tensor) -> None:
        self.log("scaled", loss)

    def on_after_backward(self) -> None:
        for p in self.parameters():
            assert p.grad is not None
            p.grad.nan_to_num_().mul_(0.9)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.log("steepest", torch.stack([p.grad.abs().max() for p in self.parameters() if p.grad is not None]).max())
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad.add_(p.detach(), alpha=0.01)

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        torch.nn.utils.clip_grad_value_(self.layers[0].parameters(), 0.01)


@pytest.mark.parametrize("batches", [1, 2])
def test_hooks_of_the_module_are_part_of_the_step(batches: int, endpoint: str, tmp_path: Path) -> None:
    options = {"gradient_clip_val": 0.5, "accumulate_grad_batches": batches}
    found = fit(tmp_path, endpoint, Hooks, **options)
    assert_same(found, fit(tmp_path, None, Hooks, **options), "fit")
    assert {"scaled", "steepest"} <= found[2].keys()


def test_hooks_that_can_not_be_are_refused_by_name(endpoint: str, tmp_path: Path) -> None:
    class Norms(pl.Callback):  # type: ignore[misc, name-defined]
        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            """It would see no gradients."""

    class Own(Module):
        def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
            (2.0 * loss).backward()

    with pytest.raises(errors.ConfigError, match=r"a callback, Norms, with on_before_optimizer_step\(\)"):
        fit(tmp_path, endpoint, callbacks=[Norms()])
    with pytest.raises(errors.ConfigError, match=r"a backward\(\) of its own"):
        fit(tmp_path, endpoint, Own)


@pytest.mark.parametrize("batches", [1, 2])
def test_mixed_precision_of_bfloat16(batches: int, endpoint: str, tmp_path: Path) -> None:
    options = {"precision": "bf16-mixed", "accumulate_grad_batches": batches, "gradient_clip_val": 0.5}
    assert_same(fit(tmp_path, endpoint, **options), fit(tmp_path, None, **options), "fit")


def test_other_precisions_are_refused(endpoint: str, tmp_path: Path) -> None:
    with pytest.raises(errors.ConfigError, match="the precision bf16-true"):
        fit(tmp_path, endpoint, precision="bf16-true")
