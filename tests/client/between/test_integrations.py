"""Row M4 where the loop is a framework's: Lightning's averages of the weights end with the right ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from tests.client.between.support import DATA, Script, X, adam, assert_equal, network, same

# Lightning takes seconds to import, which every worker would do that only collects tests.


def module_of(pl: Any) -> Any:
    class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layers = network()

        def training_step(self, batch: Any, index: int) -> Tensor:
            x, y = batch
            return F.cross_entropy(self.layers(x), y)

        def validation_step(self, batch: Any, index: int) -> None:
            x, y = batch
            self.log("right", (self.layers(x).argmax(1) == y).float().mean())

        def configure_optimizers(self) -> Any:
            return adam(self.layers)

    return Module()


def ema(pl: Any) -> Any:
    return pl.callbacks.EMAWeightAveraging(decay=0.9)


def swa(pl: Any) -> Any:
    return pl.callbacks.StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("callback", [ema, swa])
def test_m4_averages_of_lightning(callback: Any, endpoint: str, tmp_path: Path) -> None:
    pl = pytest.importorskip("lightning.pytorch")
    from gpumux.integrations.lightning import GpumuxStrategy

    if callback is ema and not hasattr(pl.callbacks, "EMAWeightAveraging"):
        pytest.skip("this Lightning has no such callback")
    batches = TensorDataset(torch.cat([x for x, _ in DATA]), torch.cat([y for _, y in DATA]))
    found = []
    for options in ({}, {"strategy": GpumuxStrategy(endpoint=endpoint)}):
        torch.manual_seed(7)
        module = module_of(pl)
        trainer = pl.Trainer(
            max_epochs=3, accelerator="cpu", callbacks=[callback(pl)], logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path, **options,
        )  # fmt: skip
        trainer.fit(module, DataLoader(batches, batch_size=4), DataLoader(batches, batch_size=20))
        found.append((module.state_dict(), trainer.callback_metrics))
    assert_equal(found[1], found[0])


def test_m4_an_average_put_in_for_an_evaluation_and_taken_out_again(endpoint: str) -> None:
    def script(s: Script) -> Any:
        average = [p.detach().clone() for p in s.model.parameters()]
        out = []
        for i in range(4):
            s.train(1, i)
            with torch.no_grad():
                for mine, theirs in zip(average, s.model.parameters(), strict=True):
                    mine.lerp_(theirs, 0.1)
                kept = [p.detach().clone() for p in s.model.parameters()]
                for p, mine in zip(s.model.parameters(), average, strict=True):
                    p.copy_(mine) if i % 2 else p.data.copy_(mine)
                s.model.eval()
                out.append(s.model(X))
                s.model.train()
                for p, mine in zip(s.model.parameters(), kept, strict=True):
                    p.copy_(mine) if i % 2 else p.data.copy_(mine)
        return out

    same(script, endpoint)
