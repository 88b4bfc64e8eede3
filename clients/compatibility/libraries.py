"""Libraries around torch."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.data import DataLoader, TensorDataset

from clients.compatibility.parts import batches_of, classifier, network, usual_step
from clients.compatibility.suite import Train, idiom


def _bert() -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(
            vocab_size=20, max_position_embeddings=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=16,
        )
    )  # fmt: skip


@idiom("transformers: outputs = model(**batch), the step returns outputs.loss", needs=("transformers",))
def transformers_loss(train: Train) -> Any:
    model = _bert()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(batch: dict[str, Tensor]) -> Tensor:
        model.train()
        outputs = model(**batch)
        loss: Tensor = outputs.loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    batches = [{"input_ids": torch.randint(1, 20, (4, 6)), "labels": torch.randint(0, 2, (4,))} for _ in range(4)]
    run = train(step, (batches[0],), model=model, optimizer=optimizer)
    return [run(batch).item() for batch in batches], model


@idiom(
    "transformers: the step returns the model's output, read as outputs.loss and outputs['logits']",
    needs=("transformers",),
)
def transformers_output(train: Train) -> Any:
    model = _bert()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(input_ids: Tensor, labels: Tensor) -> Any:
        outputs = model(input_ids=input_ids, labels=labels)
        outputs.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return outputs

    batches = [(torch.randint(1, 20, (4, 6)), torch.randint(0, 2, (4,))) for _ in range(4)]
    run = train(step, batches[0], model=model, optimizer=optimizer)
    history = []
    for batch in batches:
        outputs = run(*batch)
        history.append((outputs.loss.item(), outputs["logits"].argmax(-1), outputs[0].item()))
    return history, model


def _trainer(train: Train, **options: Any) -> Any:
    with _own_accelerate():
        return _train_bert(train, **options)


def _train_bert(train: Train, **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    from gpumux.integrations.huggingface import on_gpumux

    model = _bert()
    data = [{"input_ids": torch.randint(1, 20, (6,)), "labels": int(torch.randint(0, 2, ()))} for _ in range(16)]
    with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        args = TrainingArguments(
            directory, num_train_epochs=2, per_device_train_batch_size=4, learning_rate=1e-3, logging_steps=1,
            save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True, **options,
        )  # fmt: skip
        trainer = Trainer(model, args, train_dataset=data)
        if train.endpoint is not None:
            trainer = on_gpumux(trainer, endpoint=train.endpoint)
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], model


@idiom("transformers.Trainer, its default arguments", needs=("transformers", "accelerate"))
def trainer(train: Train) -> Any:
    return _trainer(train)


@idiom("transformers.Trainer with gradient_accumulation_steps=2", needs=("transformers", "accelerate"))
def trainer_accumulates(train: Train) -> Any:
    return _trainer(train, gradient_accumulation_steps=2)


@idiom("transformers.Trainer with bf16=True", needs=("transformers", "accelerate"))
def trainer_bf16(train: Train) -> Any:
    return _trainer(train, bf16=True)


def _lightning(train: Train, **options: Any) -> Any:
    import lightning.pytorch as pl

    from gpumux.integrations.lightning import GpumuxStrategy

    class Net(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            x, y = batch
            loss = F.cross_entropy(self.net(x), y)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=1e-2)

    net = Net()
    loader = DataLoader(TensorDataset(torch.randn(24, 8), torch.randint(0, 4, (24,))), batch_size=4)
    if train.endpoint is not None:
        options["strategy"] = GpumuxStrategy(endpoint=train.endpoint)
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as directory:
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=directory, **options,
        )  # fmt: skip
        trainer.fit(net, loader)
    return trainer.callback_metrics["loss"], net


@idiom("Lightning, with gradient_clip_val", needs=("lightning",))
def lightning(train: Train) -> Any:
    return _lightning(train, gradient_clip_val=1.0)


@idiom("Lightning with accumulate_grad_batches=2", needs=("lightning",))
def lightning_accumulates(train: Train) -> Any:
    return _lightning(train, accumulate_grad_batches=2)


@contextmanager
def _own_accelerate() -> Iterator[None]:
    """Inside, accelerate's settings (precision, accumulation), which it keeps in the process and its environment, are
    those of one script."""
    from accelerate.state import AcceleratorState, GradientState

    with patch.dict(os.environ):
        try:
            yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()


@contextmanager
def _accelerator(**options: Any) -> Iterator[Any]:
    from accelerate import Accelerator

    with _own_accelerate():
        yield Accelerator(cpu=True, **options)


@idiom(
    "Accelerate: prepare and accelerator.backward",
    needs=("accelerate",),
)
def accelerate(train: Train) -> Any:
    with _accelerator() as accelerator:
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        data = TensorDataset(torch.randn(24, 8), torch.randint(0, 4, (24,)))
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=6))

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            return loss

        run = train(step, next(iter(loader)), model=model, optimizer=optimizer)
        return [run(x, y).item() for x, y in loader], accelerator.unwrap_model(model)


@idiom(
    "Accelerate: with accelerator.accumulate(model), in the step",
    needs=("accelerate",),
)
def accelerate_accumulates(train: Train) -> Any:
    with _accelerator(gradient_accumulation_steps=2) as accelerator:
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        data = TensorDataset(torch.randn(24, 8), torch.randint(0, 4, (24,)))
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=6))

        def step(x: Tensor, y: Tensor) -> Tensor:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            return loss

        run = train(step, batches_of(1)[0], model=model, optimizer=optimizer)
        return [run(x, y).item() for x, y in loader], accelerator.unwrap_model(model)


@idiom("Accelerate: a prepared schedule, stepped in the step after the optimizer", needs=("accelerate",))
def accelerate_schedules(train: Train) -> Any:
    with _accelerator() as accelerator:
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
        model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            return loss

        batches = batches_of()
        run = train(step, batches[0], model=model, optimizer=optimizer)
        losses = [(run(x, y).item(), schedule.get_last_lr()) for x, y in batches]
        return losses, accelerator.unwrap_model(model)


@idiom("torchmetrics: accuracy(preds, y) and MeanMetric on a step's results", needs=("torchmetrics",))
def torchmetrics(train: Train) -> Any:
    from torchmetrics import MeanMetric
    from torchmetrics.classification import MulticlassAccuracy

    model, optimizer, batches = classifier()

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        optimizer.zero_grad()
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        return loss.detach(), logits.detach()

    run = train(step, batches[0], model=model, optimizer=optimizer)
    accuracy, mean = MulticlassAccuracy(num_classes=4), MeanMetric()
    seen = []
    for x, y in batches:
        loss, preds = run(x, y)
        seen.append(accuracy(preds, y).item())
        mean.update(loss)
    return seen, accuracy.compute(), mean.compute(), model


@idiom(
    "torchmetrics.MeanMetric().update(loss) of a step that returns the loss alone",
    needs=("torchmetrics",),
)
def torchmetrics_mean(train: Train) -> Any:
    from torchmetrics import MeanMetric

    model, optimizer, batches = classifier()
    run = train(usual_step(model, optimizer), batches[0], model=model, optimizer=optimizer)
    mean = MeanMetric()
    for x, y in batches:
        mean.update(run(x, y), weight=len(x))
    return mean.compute(), model


@idiom("einops: rearrange and Rearrange in the model", needs=("einops",))
def einops(train: Train) -> Any:
    from einops import rearrange, reduce
    from einops.layers.torch import Rearrange

    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Sequential(Rearrange("b c (h p) (w q) -> b (h w) (c p q)", p=4, q=4), nn.Linear(16, 8))
            self.qkv, self.head = nn.Linear(8, 24), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            parts = self.qkv(self.embed(x)).chunk(3, dim=-1)
            q, k, v = (rearrange(part, "b n (h d) -> b h n d", h=2) for part in parts)
            out = F.scaled_dot_product_attention(q, k, v)
            pooled: Tensor = self.head(reduce(rearrange(out, "b h n d -> b n (h d)"), "b n d -> b d", "mean"))
            return pooled

    model = Patches()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = [(torch.randn(3, 1, 8, 8), torch.randint(0, 4, (3,))) for _ in range(4)]
    run = train(usual_step(model, optimizer), batches[0], model=model, optimizer=optimizer)
    return [run(x, y).item() for x, y in batches], model


@idiom("torch.optim.swa_utils: AveragedModel, SWALR and update_bn")
def swa(train: Train) -> Any:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    swa_model, scheduler = AveragedModel(model), SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    batches = batches_of(3)
    run = train(usual_step(model, optimizer), batches[0], model=model, optimizer=optimizer)
    losses = []
    for epoch in range(4):
        for x, y in batches:
            losses.append(run(x, y).item())
        if epoch >= 1:
            swa_model.update_parameters(model)
            scheduler.step()
    update_bn([x for x, _ in batches], swa_model)
    with torch.no_grad():
        return losses, swa_model(batches[0][0]), swa_model, model


@idiom("an exponential average inside the step: ema_model.update_parameters(model)")
def ema_inside(train: Train) -> Any:
    model, optimizer, batches = classifier()
    ema_model = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        ema_model.update_parameters(model)
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(x, y).item() for x, y in batches], ema_model, model
