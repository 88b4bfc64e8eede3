"""Hugging Face models built from small configurations, 20 steps each, bit for bit. No downloads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gpumux.capture.step import StepFunction
from gpumux.errors import ConfigError
from gpumux.integrations.huggingface import on_gpumux
from tests.client.parity import Work, assert_same, check

transformers = pytest.importorskip("transformers", reason="the extra `test` brings it")

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


def text(model: Any, optimizer: Any, vocabulary: int) -> Work:
    g = torch.Generator().manual_seed(3)
    data = [torch.randint(0, vocabulary, (2, 12), generator=g) for _ in range(3)]
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, 8:] = 0

    def step(ids: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(input_ids=ids, attention_mask=attention, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    def loop(run: Any) -> list[Any]:
        return [run(data[i % 3], mask) for i in range(20)]

    return Work([model], [optimizer], [(step, (data[0], mask))], loop)


def images(model: Any, optimizer: Any, size: int) -> Work:
    g = torch.Generator().manual_seed(3)
    data = [(torch.randn(2, 3, size, size, generator=g), torch.randint(0, 5, (2,), generator=g)) for _ in range(3)]

    def step(pixels: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        optimizer.zero_grad()
        out = model(pixel_values=pixels, labels=labels)
        out.loss.backward()
        optimizer.step()
        return out.loss, out.logits

    def loop(run: Any) -> list[Any]:
        return [run(*data[i % 3]) for i in range(20)]

    return Work([model], [optimizer], [(step, data[0])], loop)


def bert(**options: Any) -> Work:
    model = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=50, max_position_embeddings=16, **SMALL))
    model.train()
    return text(model, torch.optim.AdamW(model.parameters(), lr=1e-3, **options), 50)


def bert_checkpointed() -> Work:
    work = bert(foreach=True)  # fewer operators to capture
    work.models[0].activation_checkpointing_enable()
    return work


def gpt2() -> Work:
    config = transformers.GPT2Config(vocab_size=50, n_positions=16, n_embd=32, n_layer=2, n_head=2)
    model = transformers.GPT2LMHeadModel(config)
    model.train()
    return text(model, torch.optim.Adam(model.parameters(), lr=1e-3), 50)


def vit() -> Work:
    config = transformers.ViTConfig(image_size=16, patch_size=8, num_labels=5, hidden_dropout_prob=0.1, **SMALL)
    model = transformers.ViTForImageClassification(config)
    model.train()
    return images(model, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True), 16)


def resnet() -> Work:
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=5, layer_type="basic"
    )
    model = transformers.ResNetForImageClassification(config)
    model.train()
    return images(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), 32)


@pytest.mark.parametrize("make", [bert, bert_checkpointed, gpt2, vit, resnet], ids=lambda f: f.__name__)
@pytest.mark.every(5)
def test_equal_to_the_plain_loop(make: Any, endpoint: str) -> None:
    check(make, endpoint)


@pytest.mark.filterwarnings("ignore")
def test_a_callback_that_looks_at_gradients_is_refused_by_name(endpoint: str, tmp_path: Path) -> None:
    """It was called, and found none."""

    class Norms(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            raise AssertionError("it was called")

    class Quiet(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        """Looks at none."""

    model = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=50, max_position_embeddings=16, **SMALL))
    data = [{"input_ids": torch.arange(12), "labels": torch.arange(12)}] * 2
    given = transformers.TrainingArguments(
        str(tmp_path), max_steps=1, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no",
        per_device_train_batch_size=2,
    )  # fmt: skip
    trainer = on_gpumux(transformers.Trainer(model, given, train_dataset=data), endpoint=endpoint)
    trainer.add_callback(Norms())
    trainer.add_callback(Quiet())
    with pytest.raises(ConfigError, match=r"the callback Norms has on_pre_optimizer_step\(\)"):
        trainer.train()
    trainer.remove_callback(Norms)
    assert trainer.train().global_step == 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("one_thread")
def test_a_trainer_trains_a_second_time_and_its_optimizer_is_its_own_again(endpoint: str, tmp_path: Path) -> None:
    """`step()` of its optimizer did nothing after training, and a schedule could not be made for it again."""

    def twice(daemon: str | None) -> list[Any]:
        torch.manual_seed(7)
        model = transformers.BertForMaskedLM(
            transformers.BertConfig(vocab_size=50, max_position_embeddings=16, **SMALL)
        )
        data = [{"input_ids": torch.arange(n, n + 12), "labels": torch.arange(12)} for n in range(6)]
        given = transformers.TrainingArguments(
            str(tmp_path), max_steps=3, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no",
            per_device_train_batch_size=2, lr_scheduler_type="constant",
        )  # fmt: skip
        trainer = transformers.Trainer(model, given, train_dataset=data)
        if daemon is not None:
            trainer = on_gpumux(trainer, endpoint=daemon)
        losses = [trainer.train().training_loss for _ in range(2)]
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        trainer.optimizer.step()
        return [losses, model.state_dict()]

    assert_same(twice(endpoint), twice(None), "twice")


@pytest.mark.parametrize("name", ["linear", "cosine", "polynomial", "inverse_sqrt"])
def test_a_schedule_stepped_in_the_step_is_captured_by_its_phases(
    name: str, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its formulas begin with float(current_step)."""
    captures = []
    capture = StepFunction._capture

    def counted(*args: Any) -> Any:
        captures.append(name)
        return capture(*args)

    monkeypatch.setattr(StepFunction, "_capture", counted)

    def make() -> Work:
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = transformers.get_scheduler(name, optimizer, 3, 20)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            return loss

        def loop(run: Any) -> list[Any]:
            return [(run(torch.full((2, 3), i / 8)), schedule.get_last_lr()) for i in range(24)]

        return Work([model], [optimizer], [(step, (torch.ones(2, 3),))], loop)

    check(make, endpoint)
    assert len(captures) <= 7  # with numbers as constants; then in the warm-up, after it, and after the last step
