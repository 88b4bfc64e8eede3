"""A Lightning module: digits, a small network, validation, TensorBoard."""

import sys
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from clients.data import digits
from gpumux.integrations.lightning import GpumuxStrategy


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        logits = self.net(x)
        loss = F.cross_entropy(logits, y)
        self.log("loss", loss)
        self.log("accuracy", (logits.argmax(1) == y).float().mean(), on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("validation", F.cross_entropy(self.net(x), y))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=3e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def main(directory: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    data, net = digits(), Net()
    train = DataLoader(TensorDataset(data.x_train, data.y_train), batch_size=128, shuffle=True, drop_last=True)
    test = DataLoader(TensorDataset(data.x_test, data.y_test), batch_size=128)
    trainer = pl.Trainer(
        strategy=GpumuxStrategy(priority="low", name="digits"),
        max_epochs=2, accelerator="cpu", gradient_clip_val=1.0, log_every_n_steps=1, default_root_dir=directory,
        logger=TensorBoardLogger(directory), enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(net, train, test)
    return dict(net.state_dict())


if __name__ == "__main__":
    main(sys.argv[1])
