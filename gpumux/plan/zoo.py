"""The built-in models (gpumux/plan/models.py). Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

VGG: dict[int, tuple[int | str, ...]] = {
    11: (64, "M", 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M"),
    16: (64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512, 512, "M", 512, 512, 512, "M"),
    19: (64, 64, "M", 128, 128, "M", *[256] * 4, "M", *[512] * 4, "M", *[512] * 4, "M"),
}


class Classifier(nn.Module):
    """Features, flattened, then dense layers."""

    def __init__(self, features: nn.Module, classifier: nn.Module) -> None:
        super().__init__()
        self.features, self.classifier = features, classifier

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.classifier(torch.flatten(self.features(x), 1))
        return found


def _dense(wide: int, hidden: int, classes: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(wide, hidden), nn.ReLU(inplace=True), nn.Dropout(),
        nn.Linear(hidden, hidden), nn.ReLU(inplace=True), nn.Dropout(),
        nn.Linear(hidden, classes),
    )  # fmt: skip


def vgg(depth: int, norm: bool = False) -> nn.Module:
    layers: list[nn.Module] = []
    channels = 3
    for each in VGG[depth]:
        if isinstance(each, str):
            layers.append(nn.MaxPool2d(2, 2))
        else:
            layers.append(nn.Conv2d(channels, each, 3, padding=1))
            layers += [nn.BatchNorm2d(each)] if norm else []
            layers.append(nn.ReLU(inplace=True))
            channels = each
    return Classifier(nn.Sequential(*layers), _dense(512 * 7 * 7, 4096, 1000))


def alexnet() -> nn.Module:
    """Layer sizes as in the guidelines' table 2: 96, 256, 384, 384 and 256 filters."""
    features = nn.Sequential(
        nn.Conv2d(3, 96, 11, stride=4, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2),
        nn.Conv2d(96, 256, 5, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2),
        nn.Conv2d(256, 384, 3, padding=1), nn.ReLU(inplace=True),
        nn.Conv2d(384, 384, 3, padding=1), nn.ReLU(inplace=True),
        nn.Conv2d(384, 256, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2),
    )  # fmt: skip
    return Classifier(features, _dense(256 * 6 * 6, 4096, 1000))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a skip connection; `width` channels inside, four times `planes` at the
    end."""

    def __init__(self, channels: int, planes: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * planes
        self.conv1, self.bn1 = nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or channels != out:
            self.downsample = nn.Sequential(nn.Conv2d(channels, out, 1, stride=stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        skip = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        out: Tensor = self.relu(self.bn3(self.conv3(x)) + skip)
        return out


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a skip connection; `planes` channels after each."""

    def __init__(self, channels: int, planes: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, planes, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2, self.bn2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False), nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or channels != planes:
            skip = nn.Conv2d(channels, planes, 1, stride=stride, bias=False)
            self.downsample = nn.Sequential(skip, nn.BatchNorm2d(planes))

    def forward(self, x: Tensor) -> Tensor:
        skip = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        out: Tensor = self.relu(self.bn2(self.conv2(x)) + skip)
        return out


class ResNet(nn.Module):
    """Stages of `depths` blocks: bottlenecks, `widening` times as wide inside as they are named, or, at `widening` 0,
    basic blocks. `stem`: channels of the first convolution and of the first stage's blocks."""

    def __init__(self, depths: Sequence[int], widening: int, classes: int = 1000, stem: int = 64) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, stem, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(stem)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, stride=2, padding=1)
        channels, stages = stem, []
        for stage, depth in enumerate(depths):
            planes = stem << stage
            blocks: list[nn.Module] = []
            for i in range(depth):
                stride = 2 if stage and i == 0 else 1
                if widening:
                    blocks.append(Bottleneck(channels, planes, planes * widening, stride))
                    channels = 4 * planes
                else:
                    blocks.append(BasicBlock(channels, planes, stride))
                    channels = planes
            stages.append(nn.Sequential(*blocks))
        self.layers = nn.Sequential(*stages)
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(self.maxpool(self.relu(self.bn1(self.conv1(x)))))
        out: Tensor = self.fc(torch.flatten(self.avgpool(x), 1))
        return out


class Conv(nn.Module):
    """A convolution, batch norm and a rectifier."""

    def __init__(self, channels: int, out: int, kernel: int | tuple[int, int], stride: int = 1) -> None:
        super().__init__()
        rows, columns = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = ((rows - 1) // 2, (columns - 1) // 2) if stride == 1 else (0, 0)
        self.conv = nn.Conv2d(channels, out, kernel, stride, padding, bias=False)
        self.bn, self.relu = nn.BatchNorm2d(out, eps=0.001), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(self.bn(self.conv(x)))
        return out


class Fork(nn.Module):
    """Parallel branches, concatenated along the channels."""

    def __init__(self, **branches: nn.Module) -> None:
        super().__init__()
        for name, branch in branches.items():
            self.add_module(name, branch)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.children()], 1)


def _chain(channels: int, *layers: tuple[int, int | tuple[int, int]], stride: int = 1) -> nn.Sequential:
    """Convolutions one after the other; the last one has the stride."""
    made = []
    for i, (out, kernel) in enumerate(layers):
        made.append(Conv(channels, out, kernel, stride if i + 1 == len(layers) else 1))
        channels = out
    return nn.Sequential(*made)


def _pooled(channels: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.AvgPool2d(3, stride=1, padding=1), Conv(channels, out, 1))


def _a(channels: int, pool: int) -> Fork:
    return Fork(
        branch1x1=Conv(channels, 64, 1),
        branch5x5=_chain(channels, (48, 1), (64, 5)),
        branch3x3dbl=_chain(channels, (64, 1), (96, 3), (96, 3)),
        branch_pool=_pooled(channels, pool),
    )


def _c(c: int) -> Fork:
    row, column = (1, 7), (7, 1)
    return Fork(
        branch1x1=Conv(768, 192, 1),
        branch7x7=_chain(768, (c, 1), (c, row), (192, column)),
        branch7x7dbl=_chain(768, (c, 1), (c, column), (c, row), (c, column), (192, row)),
        branch_pool=_pooled(768, 192),
    )


def _e(channels: int) -> Fork:
    def both() -> Fork:
        return Fork(a=Conv(384, 384, (1, 3)), b=Conv(384, 384, (3, 1)))

    return Fork(
        branch1x1=Conv(channels, 320, 1),
        branch3x3=nn.Sequential(Conv(channels, 384, 1), both()),
        branch3x3dbl=nn.Sequential(Conv(channels, 448, 1), Conv(448, 384, 3), both()),
        branch_pool=_pooled(channels, 192),
    )


def inception_v3() -> nn.Module:
    stem = nn.Sequential(
        Conv(3, 32, 3, stride=2),
        nn.Sequential(nn.Conv2d(32, 32, 3, bias=False), nn.BatchNorm2d(32), nn.ReLU(inplace=True)),
        Conv(32, 64, 3), nn.MaxPool2d(3, 2), Conv(64, 80, 1),
        nn.Sequential(nn.Conv2d(80, 192, 3, bias=False), nn.BatchNorm2d(192), nn.ReLU(inplace=True)),
        nn.MaxPool2d(3, 2),
    )  # fmt: skip
    six = Fork(
        branch3x3=Conv(288, 384, 3, stride=2),
        branch3x3dbl=_chain(288, (64, 1), (96, 3), (96, 3), stride=2),
        branch_pool=nn.MaxPool2d(3, 2),
    )
    seven = Fork(
        branch3x3=_chain(768, (192, 1), (320, 3), stride=2),
        branch7x7x3=_chain(768, (192, 1), (192, (1, 7)), (192, (7, 1)), (192, 3), stride=2),
        branch_pool=nn.MaxPool2d(3, 2),
    )
    mixed = nn.Sequential(
        _a(192, 32), _a(256, 64), _a(288, 64), six, _c(128), _c(160), _c(160), _c(192), seven, _e(1280), _e(2048)
    )
    features = nn.Sequential(stem, mixed, nn.AdaptiveAvgPool2d(1), nn.Dropout())
    return Classifier(features, nn.Linear(2048, 1000))


class EncoderLayer(nn.Module):
    """Pre-norm attention with separate projections, and a feed-forward of four widths."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def _split(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(2, (self.heads, -1)).transpose(1, 2)
        return heads

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = self._split(self.query(y)), self._split(self.key(y)), self._split(self.value(y))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Encoder(nn.Module):
    """[N, T] tokens -> [N, classes]."""

    def __init__(
        self, *, layers: int = 6, width: int = 512, heads: int = 8, length: int = 128, words: int = 30_000
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.position = nn.Parameter(torch.zeros(length, width))
        self.layers = nn.Sequential(*(EncoderLayer(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.layers(self.embed(tokens) + self.position)
        out: Tensor = self.head(self.norm(x).mean(1))
        return out


class LanguageLayer(nn.Module):
    """Attention with one projection for queries, keys and values, and a feed-forward of four widths, both with dropout.
    `causal`: pre-norm, and no token sees later ones, as in GPT-2; else post-norm, as in BERT."""

    def __init__(self, width: int, heads: int, causal: bool, dropout: float = 0.1) -> None:
        super().__init__()
        self.heads, self.causal, self.chance = heads, causal, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.projection, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        activation = nn.GELU(approximate="tanh" if causal else "none")
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), activation, nn.Linear(4 * width, width))
        self.drop1, self.drop2 = nn.Dropout(dropout), nn.Dropout(dropout)

    def _mixed(self, x: Tensor) -> Tensor:
        q, k, v = self.projection(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        chance = self.chance if self.training else 0.0
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=chance, is_causal=self.causal)
        out: Tensor = self.drop1(self.out(mixed.transpose(1, 2).flatten(2)))
        return out

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor
        if self.causal:
            x = x + self._mixed(self.norm1(x))
            out = x + self.drop2(self.mlp(self.norm2(x)))
        else:
            x = self.norm1(x + self._mixed(x))
            out = self.norm2(x + self.drop2(self.mlp(x)))
        return out


class Language(nn.Module):
    """[N, T] tokens -> [N, T, words] logits, the output tied to the input embedding, 12 layers. `causal`: GPT-2; else
    BERT with its head for masked language modelling, on whole sequences without padding."""

    def __init__(self, *, words: int, length: int, causal: bool, width: int = 768, heads: int = 12) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(words, width), nn.Embedding(length, width)
        self.start = nn.Identity() if causal else nn.LayerNorm(width)
        self.drop = nn.Dropout(0.1)
        self.layers = nn.ModuleList(LanguageLayer(width, heads, causal) for _ in range(12))
        head = (nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.head = nn.LayerNorm(width) if causal else nn.Sequential(*head)
        self.decoder = nn.Linear(width, words, bias=not causal)
        self.decoder.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.start(self.embed(tokens) + self.position.weight[: tokens.shape[1]]))
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.decoder(self.head(x))
        return logits


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "alexnet": alexnet,
    "vgg11": lambda: vgg(11),
    "vgg16": lambda: vgg(16),
    "vgg19_bn": lambda: vgg(19, norm=True),
    "resnet50": lambda: ResNet((3, 4, 6, 3), 1),
    "wide_resnet101_2": lambda: ResNet((3, 4, 23, 3), 2),
    "inception_v3": inception_v3,
    "transformer": Encoder,
    "bert_base": lambda: Language(words=30_522, length=512, causal=False),
    "gpt2": lambda: Language(words=50_257, length=1024, causal=True),
}
