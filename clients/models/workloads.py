"""The workloads of the HFTA paper, ready to train: a factory of steps, and batches drawn at random.

    from clients.models.workloads import workload

    transformer = workload("transformer", "tiny")
    step, model, optimizer = transformer.factory({"lr": 0.5, "seed": 1})
    loss = step(*transformer.batch(0))

Each has its optimizer, batch size and shapes from the paper (section 4 and appendix H): `full` is that, `small` is for
measuring on a CPU, and `tiny` takes milliseconds a step there. `cnn` is not the paper's; it is the convolutional
classifier of this package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clients.models import bert, dcgan, language, pointnet
from clients.models.cnn import DigitsCNN
from clients.models.mobilenet import MobileNetV2, MobileNetV3
from clients.models.resnet import resnet18
from gpumux.errors import ConfigError

Batch = tuple[Tensor, ...]
Config = Mapping[str, Any]
Step = Callable[..., Tensor]
# A step with what it trains. Of a GAN both models and both optimizers.
Made = tuple[Step, Any, Any]
DTYPES = (torch.float32, torch.float64)
SIZES = ("full", "small", "tiny")
KEYS = (
    "lr",
    "betas",
    "weight_decay",
    "dropout",
    "feature_transform",
    "seed",
    "gamma",
    "step_size",
    "foreach",
    "version",
)


@dataclass(frozen=True)
class Recipe:
    """`draw(size, n, generator)` gives a batch of n samples in float32; `batch_size` is of each of SIZES, the full one
    the paper's; `lr` is the optimizer's default. `build(size, config)` makes the model and `loss(model, *batch)` a
    scalar of it; a GAN has neither, since it is two models and two losses."""

    draw: Callable[[str, int, torch.Generator], Batch]
    batch_size: tuple[int, int, int]
    optimizer: type[torch.optim.Optimizer]
    lr: float
    build: Callable[[str, Config], nn.Module] | None = None
    loss: Callable[..., Tensor] | None = None


@dataclass(frozen=True)
class Workload:
    """A recipe at one size. `factory(config)` gives a step with its model and optimizer, for `client.submit` or a fused
    array."""

    name: str
    size: str
    batch_size: int
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    def factory(self, config: Config) -> Made:
        """The keys of a config, all optional: those of the paper's table 12 (`lr`, `betas`, `weight_decay`,
        `feature_transform`, `version`; `gamma` and `step_size` are for `scheduler`), `dropout`, the optimizer's
        `foreach`, and `seed`, which torch's generator is set to before weights are drawn. The step's own draws follow
        from there, or from the seed of the job. Raises ConfigError."""
        unknown = sorted(set(config) - set(KEYS))
        if unknown:
            raise ConfigError(f"{unknown[0]!r} is not a hyper-parameter of these workloads", f"use {', '.join(KEYS)}")
        torch.manual_seed(config.get("seed", 0))
        recipe = RECIPES[self.name]
        if recipe.build is None or recipe.loss is None:
            return _gan(self, config)
        model = recipe.build(self.size, config).to(self.device, self.dtype)
        optimizer = make_optimizer(recipe, model.parameters(), config)
        loss_of = recipe.loss

        def step(*batch: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, *batch)
            loss.backward()
            optimizer.step()
            return loss

        return step, model, optimizer

    def batch(self, seed: int) -> Batch:
        """A batch drawn from its own generator, always the same for a seed: floating-point inputs in the workload's
        dtype."""
        drawn = RECIPES[self.name].draw(self.size, self.batch_size, torch.Generator().manual_seed(seed))
        return tuple(x.to(self.device, self.dtype if x.is_floating_point() else None) for x in drawn)

    def configs(self, models: int) -> list[dict[str, Any]]:
        """So many configurations that differ in learning rate, schedule and seed."""
        lr = RECIPES[self.name].lr
        return [
            {"lr": lr * (0.5 + b / models), "seed": b, "gamma": 0.5 + 0.4 * b / models, "step_size": 5 * (1 + b % 4)}
            for b in range(models)
        ]


def workload(
    name: str,
    size: str = "tiny",
    batch_size: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Workload:
    """Raises ConfigError for a name, size, type or number of samples that there is not."""
    if name not in RECIPES:
        raise ConfigError(f"no workload is called {name!r}", f"use one of {', '.join(RECIPES)}")
    if size not in SIZES:
        raise ConfigError(f"no workload has a size {size!r}", f"use one of {', '.join(SIZES)}")
    if dtype not in DTYPES:
        raise ConfigError(f"a workload can't be of {dtype}", "use float32 or float64; autocast is the step's")
    if batch_size is not None and batch_size < 2:
        raise ConfigError(f"a batch of {batch_size} is too small", "batch norm needs two samples")
    default = RECIPES[name].batch_size[SIZES.index(size)]
    return Workload(name, size, batch_size or default, dtype, device)


def scheduler(optimizer: torch.optim.Optimizer, config: Config) -> torch.optim.lr_scheduler.StepLR:
    """The paper's schedule: the learning rate times `gamma` every `step_size` epochs."""
    return torch.optim.lr_scheduler.StepLR(optimizer, config.get("step_size", 20), config.get("gamma", 0.5))


def make_optimizer(recipe: Recipe, params: Any, config: Config) -> torch.optim.Optimizer:
    options: dict[str, Any] = {"lr": config.get("lr", recipe.lr), "weight_decay": config.get("weight_decay", 0.0)}
    options["foreach"] = config.get("foreach")
    if recipe.optimizer is torch.optim.Adam:
        options["betas"] = config.get("betas", (0.9, 0.999))
    return recipe.optimizer(params, **options)


def _gan(of: Workload, config: Config) -> Made:
    """Two losses and two optimizers, one after the other in one step, as in PyTorch's example."""
    generator = dcgan.Generator(of.size).to(of.device, of.dtype)
    discriminator = dcgan.Discriminator(of.size).to(of.device, of.dtype)
    config = {"betas": (0.5, 0.999), **config}
    d_optimizer = make_optimizer(RECIPES[of.name], discriminator.parameters(), config)
    g_optimizer = make_optimizer(RECIPES[of.name], generator.parameters(), config)

    def step(real: Tensor) -> Tensor:
        noise = torch.randn(real.shape[0], dcgan.NOISE[of.size], 1, 1, dtype=real.dtype, device=real.device)
        fake = generator(noise)
        d_optimizer.zero_grad()
        d_loss = F.softplus(-discriminator(real)).mean() + F.softplus(discriminator(fake.detach())).mean()
        d_loss.backward()
        d_optimizer.step()
        g_optimizer.zero_grad()
        g_loss = F.softplus(-discriminator(fake)).mean()
        g_loss.backward()
        g_optimizer.step()
        return torch.stack([d_loss.detach(), g_loss.detach()])

    return step, (generator, discriminator), (g_optimizer, d_optimizer)


# ---- losses ----------------------------------------------------------------------------------------


def _classify(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(x), labels)


def _point_loss(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    return pointnet.loss(model(x), labels)


def _token_loss(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=bert.IGNORED)


# ---- batches: labels follow from the inputs, so that there is something to learn ---------------------


def _images(edge: tuple[int, int, int]) -> Callable[[str, int, torch.Generator], Batch]:
    def draw(size: str, n: int, g: torch.Generator) -> Batch:
        labels = torch.randint(0, 10, (n,), generator=g)
        pixels = edge[SIZES.index(size)]
        x = torch.randn(n, 3, pixels, pixels, generator=g)
        return x + (labels.view(-1, 1, 1, 1) / 5 - 1), labels

    return draw


def _clouds(size: str, n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Points [N, 3, P] on ellipsoids, and the longest axis."""
    points = {"full": 2500, "small": 256, "tiny": 32}[size]
    axes = torch.rand(n, 3, 1, generator=g) + 0.2
    x = F.normalize(torch.randn(n, 3, points, generator=g), dim=1) * axes
    return x, axes.squeeze(2).argmax(1)


def _parts(size: str, n: int, g: torch.Generator) -> Batch:
    x, _ = _clouds(size, n, g)
    return x, (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()


def _faces(size: str, n: int, g: torch.Generator) -> Batch:
    pixels = dcgan.pixels(size)
    return (torch.tanh(torch.randn(n, dcgan.COLOURS, 1, 1, generator=g) + torch.zeros(pixels, pixels)),)


def _sentences(size: str, n: int, g: torch.Generator) -> Batch:
    """Tokens that count up from a random one, and those that follow."""
    shape = language.SIZES[size]
    start = torch.randint(0, shape.words, (n, 1), generator=g)
    tokens = (start + torch.arange(shape.length + 1)) % shape.words
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _masked_sentences(size: str, n: int, g: torch.Generator) -> Batch:
    """The same with padding at the end and every seventh token masked."""
    shape, length = bert.SIZES[size], {"full": 32, "small": 32, "tiny": 8}[size]
    start = torch.randint(0, shape.words, (n, 1), generator=g)
    tokens = 2 + (start + torch.arange(length)) % (shape.words - 2)
    tokens[torch.arange(length) >= torch.randint(length // 2, length + 1, (n, 1), generator=g)] = bert.PADDING
    chosen = (torch.arange(length) % 7 == 1).expand(n, -1) & (tokens != bert.PADDING)
    return tokens.masked_fill(chosen, 1), tokens.masked_fill(~chosen, bert.IGNORED)


def _dropped(config: Config) -> dict[str, Any]:
    return {"dropout": config["dropout"]} if "dropout" in config else {}


def _point_options(config: Config) -> dict[str, Any]:
    return {"feature_transform": config.get("feature_transform", True)} | _dropped(config)


MOBILENETS: dict[str, type[nn.Module]] = {"V2": MobileNetV2, "V3-Large": MobileNetV3}
CNN = {
    "full": {"width": 32, "colours": 3, "edge": 32},
    "small": {"width": 8, "colours": 3, "edge": 32},
    "tiny": {"width": 4, "colours": 3, "edge": 8},
}
_ADAM, _ADADELTA = (torch.optim.Adam, 1e-3), (torch.optim.Adadelta, 0.5)

RECIPES: dict[str, Recipe] = {
    "cnn": Recipe(
        _images((32, 32, 8)), (64, 4, 4), *_ADAM,
        lambda size, config: DigitsCNN(**CNN[size], **_dropped(config)), _classify,
    ),
    "pointnet_cls": Recipe(
        _clouds, (32, 8, 4), *_ADAM,
        lambda size, config: pointnet.Classification(size, 16 if size == "full" else 3, **_point_options(config)),
        _point_loss,
    ),
    "pointnet_seg": Recipe(
        _parts, (32, 8, 4), *_ADAM,
        lambda size, config: pointnet.Segmentation(size, feature_transform=config.get("feature_transform", True)),
        _point_loss,
    ),
    "dcgan": Recipe(_faces, (128, 16, 4), torch.optim.Adam, 2e-4),
    "resnet18": Recipe(_images((32, 32, 16)), (128, 8, 4), *_ADADELTA, lambda size, config: resnet18(size), _classify),
    "mobilenet_v3": Recipe(
        _images((32, 32, 16)), (1024, 8, 4), *_ADAM,
        lambda size, config: MOBILENETS[config.get("version", "V3-Large")](size, **_dropped(config)), _classify,
    ),
    "transformer": Recipe(
        _sentences, (32, 2, 4), *_ADADELTA,
        lambda size, config: language.LanguageModel(size, **_dropped(config)), _token_loss,
    ),
    "bert_medium": Recipe(
        _masked_sentences, (32, 4, 4), *_ADADELTA, lambda size, config: bert.Bert(size, **_dropped(config)), _token_loss
    ),
}  # fmt: skip
