"""A Hugging Face Trainer: a small BERT that tells whether a sentence of numbers rises, with evaluation and
TensorBoard."""

import sys
from typing import Any

import torch
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments


def sentences(count: int, seed: int) -> list[dict[str, Any]]:
    draws = torch.Generator().manual_seed(seed)
    made = [torch.randint(1, 50, (12,), generator=draws) for _ in range(count)]
    return [{"input_ids": words, "labels": int(words[-1] > words[0])} for words in made]


def main(directory: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50, max_position_embeddings=16, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=64,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    args = TrainingArguments(
        directory, num_train_epochs=2, per_device_train_batch_size=16, gradient_accumulation_steps=2,
        learning_rate=1e-3, logging_steps=1, eval_strategy="epoch", save_strategy="no", report_to="tensorboard",
        use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model, args, train_dataset=sentences(160, 1), eval_dataset=sentences(32, 2))
    trainer.train()
    return dict(model.state_dict())


if __name__ == "__main__":
    main(sys.argv[1])
