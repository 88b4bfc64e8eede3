"""A loop of one's own: digits, a small network, TensorBoard."""

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

from clients.data import digits


def main(directory: str, steps: int = 40) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    batches = digits().batches(batch_size=64, seed=0)

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    torch.manual_seed(1)
    with SummaryWriter(directory) as writer:
        for i in range(steps):
            loss = train_step(*next(batches))
            schedule.step()
            writer.add_scalar("loss", loss.item(), i)
    return model.state_dict()


if __name__ == "__main__":
    main(sys.argv[1])
