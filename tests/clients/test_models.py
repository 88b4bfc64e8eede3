"""The workloads are the published models, and learn. That gpumux captures them: tests/client/test_models.py."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import transformers
from torch import nn

from clients.models import bert, dcgan, language, mobilenet, pointnet, resnet
from clients.models.workloads import RECIPES, scheduler, workload
from gpumux.errors import ConfigError

pytestmark = pytest.mark.usefixtures("one_thread")


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


PUBLISHED = {
    # PyTorch's DCGAN example: the sums of its layer shapes, as its summaries print them
    "generator": (dcgan.Generator, 3_576_704),
    "discriminator": (dcgan.Discriminator, 2_765_568),
    # torchvision's documentation, `num_params` of the ImageNet weights
    "resnet18": (lambda: resnet.resnet18(classes=1000), 11_689_512),
    "mobilenet_v2": (lambda: mobilenet.MobileNetV2(classes=1000), 3_504_872),
    "mobilenet_v3_large": (lambda: mobilenet.MobileNetV3(classes=1000), 5_483_032),
    # 33,278 words and 2 layers of the word language model's shapes, in and out not tied, with the paper's sizes
    "transformer": (
        language.LanguageModel,
        2 * 33_278 * 128 + 33_278 + 2 * (4 * (128 * 128 + 128) + 2 * (128 * 128 + 128) + 4 * 128),
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_as_many_parameters_as_published(name: str):
    build, published = PUBLISHED[name]
    with torch.device("meta"):
        assert count(build()) == published


def test_pointnets_parameters_are_those_of_its_paper():
    """Its table 6: 3.5 million, and 0.8 million without the transformation networks (for ModelNet's 40 classes)."""
    with torch.device("meta"):
        model = pointnet.Classification(classes=40)
        plain = count(model) - count(model.features.input_transform) - count(model.features.feature_transform)
        segmentation = pointnet.Segmentation()
    assert round(count(model) / 1e6, 1) == 3.5
    assert round(plain / 1e6, 1) == 0.8
    widths = (1088, 512, 256, 128)  # of its head, with biases and batch norms (fxia22/pointnet.pytorch)
    head = sum(a * b + 3 * b for a, b in pairwise(widths)) + 128 * 4 + 4
    assert count(segmentation) == count(model.features) + head


def test_bert_medium_is_that_of_transformers():
    config = transformers.BertConfig(
        hidden_size=512, num_hidden_layers=8, num_attention_heads=8, intermediate_size=2048, vocab_size=30_522
    )
    with torch.device("meta"):
        theirs, ours = transformers.BertForMaskedLM(config), bert.Bert()
    assert count(ours) == count(theirs)
    assert sorted(p.shape for p in ours.parameters()) == sorted(p.shape for p in theirs.parameters())
    # "Well-Read Students Learn Better" has 41.4 million for the encoder with its pooler, which a language model lacks
    pooler, head = 512 * 512 + 512, 512 * 512 + 512 + 2 * 512 + 30_522
    assert round((count(ours) - head + pooler) / 1e6, 1) == 41.4


@pytest.mark.parametrize("name", RECIPES)
def test_a_tiny_one_learns(name: str):
    made = workload(name, "tiny", dtype=torch.float64)
    config = {"seed": 1, "lr": 0.5} if name == "resnet18" else {"seed": 1, "lr": 4 * RECIPES[name].lr, "dropout": 0.0}
    step, _, _ = made.factory(config)
    batch = made.batch(3)
    losses = torch.stack([step(*batch).detach() for _ in range(12)])
    if name == "dcgan":
        losses = losses[:, 0]  # the discriminator's; the two losses pull against each other
    assert losses.isfinite().all()
    assert losses[-3:].mean() < losses[:3].mean()


@pytest.mark.parametrize("name", RECIPES)
def test_batches_and_weights_are_those_of_their_seeds(name: str):
    made = workload(name)
    for a, b, other in zip(made.batch(1), made.batch(1), made.batch(2), strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, other)

    def weights(seed: int) -> list[torch.Tensor]:
        _, model, _ = made.factory({"seed": seed})
        return [p for m in (model if isinstance(model, tuple) else (model,)) for p in m.parameters()]

    assert all(map(torch.equal, weights(1), weights(1)))
    assert not all(map(torch.equal, weights(1), weights(2)))


def test_hyperparameters_reach_the_optimizer():
    config = {"lr": 0.25, "betas": (0.8, 0.9), "weight_decay": 0.125, "gamma": 0.5, "step_size": 2}
    _, _, optimizer = workload("pointnet_cls").factory(config)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.25, (0.8, 0.9), 0.125)
    schedule = scheduler(optimizer, config)
    optimizer.step()
    schedule.step()
    schedule.step()
    assert group["lr"] == 0.125
    _, model, _ = workload("pointnet_cls").factory({"feature_transform": False})
    assert model.features.feature_transform is None


def test_what_there_is_not_is_refused():
    for arguments, named in (
        (("nonsense",), "nonsense"),
        (("cnn", "huge"), "huge"),
        (("cnn", "tiny", 1), "batch of 1"),
        (("cnn", "tiny", 4, torch.float16), "float16"),
    ):
        with pytest.raises(ConfigError, match=named):
            workload(*arguments)
    with pytest.raises(ConfigError, match="learning_rate"):
        workload("cnn").factory({"learning_rate": 1.0})
