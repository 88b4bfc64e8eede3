"""A loop with Accelerate: digits, a small network, two batches accumulated for each step of the optimizer."""

import sys

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.tensorboard import SummaryWriter

from clients.data import digits


def main(directory: str, epochs: int = 2) -> dict[str, Tensor]:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = TensorDataset(digits().x_train, digits().y_train)
    loader = DataLoader(data, batch_size=64, shuffle=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(loader))
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return loss

    with SummaryWriter(directory) as writer:
        for epoch in range(epochs):
            for i, (x, y) in enumerate(loader):
                loss = train_step(x, y)
                schedule.step()
                writer.add_scalar("loss", loss.item(), epoch * len(loader) + i)
    trained: dict[str, Tensor] = accelerator.unwrap_model(model).state_dict()
    return trained


if __name__ == "__main__":
    main(sys.argv[1])
