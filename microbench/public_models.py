"""Models and losses as others publish them: each trains some steps plainly and through a daemon, to the same bits.

    pip install --no-deps timm torchvision vit-pytorch x-transformers ...  (what PACKAGES names)
    python -m microbench.public_models --out FILE.json

The models are made by the packages' own functions, small where they can be, with dropout and stochastic depth where
they have them, and so are the losses where the package has one. What is compared: the loss of every step, and all
parameters and buffers at the end. What is refused is listed with its reason; with --replay NAME one runs alone, and
says where.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from microbench import common
from microbench.daemon import running_daemon
from microbench.public_optimizers import Outcome, losses_of, packed, replay, tried

STEPS = 6
SEED = 5

Batch = tuple[Any, ...]


class Case(NamedTuple):
    """model: what trains. loss: of a batch. batch: one, from a generator. step: what the package does after each
    optimizer step, in the submitted step."""

    model: nn.Module
    loss: Callable[..., Tensor]
    batch: Callable[[Generator], Batch]
    after: Callable[[], Any] = lambda: None
    also: tuple[nn.Module, ...] = ()


Maker = Callable[[], Case]


def images(made: nn.Module, size: int = 64, classes: int = 10, count: int = 2, channels: int = 3) -> Case:
    """A classifier of images."""
    return Case(
        made,
        lambda x, y: F.cross_entropy(made(x), y),
        lambda g: (
            torch.randn(count, channels, size, size, generator=g),
            torch.randint(0, classes, (count,), generator=g),
        ),
    )


def masks(made: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], shape: tuple[int, ...], classes: int = 1) -> Case:
    """A segmentation network: a batch of `shape`, and masks of as many classes."""

    def batch(g: Generator) -> Batch:
        return torch.randn(shape, generator=g), (torch.rand(shape[0], classes, *shape[2:], generator=g) > 0.5).float()

    return Case(made, lambda x, y: loss(made(x), y), batch)


def tokens(made: nn.Module, loss: Callable[..., Tensor], words: int, shape: tuple[int, int] = (2, 16)) -> Case:
    return Case(made, loss, lambda g: (torch.randint(0, words, shape, generator=g),))


def noise(made: nn.Module, loss: Callable[[Tensor], Tensor], *shape: int) -> Case:
    return Case(made, loss, lambda g: (torch.rand(shape, generator=g),))


def _timm(name: str, size: int = 64, **settings: Any) -> Maker:
    def make() -> Case:
        return images(import_module("timm").create_model(name, num_classes=10, **settings), size)

    return make


def _timm_recipe() -> Case:
    """As in timm's train.py: mixup in the loop's place, soft targets, an average of the weights after each step."""
    timm, data, loss = (import_module(f"timm{part}") for part in ("", ".data", ".loss"))
    utils = import_module("timm.utils")
    model = timm.create_model("vit_tiny_patch16_224", num_classes=10, img_size=32, depth=3, drop_path_rate=0.2)
    average = utils.ModelEmaV3(model, decay=0.9)
    target = data.mixup.mixup_target
    criterion = loss.SoftTargetCrossEntropy()

    def step(x: Tensor, y: Tensor, lam: float) -> Tensor:
        mixed = x * lam + x.flip(0) * (1.0 - lam)
        value: Tensor = criterion(model(mixed), target(y, 10, lam, 0.1))
        return value

    def batch(g: Generator) -> Batch:
        x, y = torch.randn(4, 3, 32, 32, generator=g), torch.randint(0, 10, (4,), generator=g)
        return x, y, float(torch.rand((), generator=g))

    return Case(model, step, batch, lambda: average.update(model), (average.module,))


def _torchvision(name: str, size: int = 64, **settings: Any) -> Maker:
    def make() -> Case:
        return images(
            import_module("torchvision.models").get_model(name, weights=None, num_classes=10, **settings), size
        )

    return make


def _torchvision_segmentation() -> Case:
    network = import_module("torchvision.models.segmentation").lraspp_mobilenet_v3_large(
        weights=None, weights_backbone=None, num_classes=3
    )

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(network(x)["out"], y)

    def batch(g: Generator) -> Batch:
        return torch.randn(2, 3, 64, 64, generator=g), torch.randint(0, 3, (2, 64, 64), generator=g)

    return Case(network, loss, batch)


def _vit_pytorch(module: str, name: str, **settings: Any) -> Maker:
    def make() -> Case:
        return images(getattr(import_module(module), name)(num_classes=10, **settings), size=32)

    return make


_VIT = {"image_size": 32, "patch_size": 8, "dim": 32, "depth": 2, "heads": 2, "mlp_dim": 48}


def _vit_encoder(**settings: Any) -> nn.Module:
    vit: nn.Module = import_module("vit_pytorch").ViT(num_classes=10, **_VIT, **settings)
    return vit


def _vit_masked(module: str, name: str, **settings: Any) -> Maker:
    def make() -> Case:
        made = getattr(import_module(module), name)(encoder=_vit_encoder(pool="mean"), masking_ratio=0.75, **settings)
        return noise(made, made, 2, 3, 32, 32)

    return make


def _vit_dino() -> Case:
    made = import_module("vit_pytorch").Dino(
        _vit_encoder(), image_size=32, hidden_layer="to_latent", projection_hidden_size=32, projection_layers=2,
        num_classes_K=64,
    )  # fmt: skip
    return noise(made, made, 2, 3, 32, 32)._replace(after=made.update_moving_average)


def _vit_distillation() -> Case:
    package = import_module("vit_pytorch.distill")
    teacher = import_module("torchvision.models").resnet18(weights=None, num_classes=10)
    student = package.DistillableViT(num_classes=10, dropout=0.1, **_VIT)
    made = package.DistillWrapper(student=student, teacher=teacher, temperature=3, alpha=0.5)
    return images(student, 32)._replace(model=made, loss=made)


def _x_transformers(**settings: Any) -> Maker:
    def make() -> Case:
        package = import_module("x_transformers")
        layers = package.Decoder(dim=32, depth=2, heads=2, attn_dropout=0.1, ff_dropout=0.1, **settings)
        made = package.AutoregressiveWrapper(
            package.TransformerWrapper(num_tokens=50, max_seq_len=32, attn_layers=layers)
        )
        return tokens(made, made, 50, (2, 17))

    return make


def _x_translation() -> Case:
    made = import_module("x_transformers").XTransformer(
        dim=32, enc_num_tokens=50, enc_depth=2, enc_heads=2, enc_max_seq_len=16, dec_num_tokens=50, dec_depth=2,
        dec_heads=2, dec_max_seq_len=16, tie_token_emb=True,
    )  # fmt: skip

    def batch(g: Generator) -> Batch:
        source, target = (torch.randint(0, 50, (2, 12), generator=g) for _ in range(2))
        return source, target, torch.ones(2, 12, dtype=torch.bool)

    return Case(made, lambda source, target, mask: made(source, target, mask=mask), batch)


def _x_continuous() -> Case:
    package = import_module("x_transformers")
    layers = package.Encoder(dim=32, depth=2, heads=2, use_rmsnorm=True)
    made = package.ContinuousTransformerWrapper(dim_in=8, dim_out=8, max_seq_len=16, attn_layers=layers)
    return noise(made, lambda x: F.mse_loss(made(x), x.flip(1)), 2, 16, 8)


def _smp(name: str, encoder: str, loss: str, **arguments: Any) -> Maker:
    def make() -> Case:
        package = import_module("segmentation_models_pytorch")
        network = getattr(package, name)(encoder, encoder_weights=None, classes=1)
        return masks(network, getattr(package.losses, loss)(**arguments), (2, 3, 64, 64))

    return make


def _monai(name: str, loss: str, shape: tuple[int, ...], settings: dict[str, Any], **arguments: Any) -> Maker:
    def make() -> Case:
        network = getattr(import_module("monai.networks.nets"), name)(**settings)
        return masks(network, getattr(import_module("monai.losses"), loss)(**arguments), shape)

    return make


def _monai_classifier() -> Case:
    nets = import_module("monai.networks.nets")
    made = nets.DenseNet(2, 1, 10, init_features=8, growth_rate=4, block_config=(2, 2), dropout_prob=0.1)
    return images(made, 32, channels=1)


def _monai_vae() -> Case:
    made = import_module("monai.networks.nets").AutoencoderKL(
        spatial_dims=2, in_channels=1, out_channels=1, channels=(8, 8), latent_channels=2, num_res_blocks=1,
        attention_levels=(False, True), norm_num_groups=4,
    )  # fmt: skip

    def loss(x: Tensor) -> Tensor:
        again, mu, sigma = made(x)
        kl = 0.5 * torch.sum(mu.pow(2) + sigma.pow(2) - torch.log(sigma.pow(2)) - 1, dim=[1, 2, 3])
        return F.l1_loss(again, x) + 1e-3 * kl.mean()

    return noise(made, loss, 2, 1, 16, 16)


def _graph(layer: str, **settings: Any) -> Maker:
    """Two dense layers over a batch of graphs, then a pooling by DiffPool where `layer` is one of its."""

    def make() -> Case:
        package = import_module("torch_geometric.nn")
        made = nn.ModuleList([getattr(package, layer)(6, 16, **settings), getattr(package, layer)(16, 4, **settings)])

        def loss(x: Tensor, edges: Tensor, mask: Tensor, y: Tensor) -> Tensor:
            hidden = made[0](x, edges, mask=mask).relu()
            pooled, _, link, entropy = package.dense_diff_pool(x, edges, made[1](hidden, edges, mask=mask), mask)
            value: Tensor = F.mse_loss(pooled.mean((1, 2)), y) + link + entropy
            return value

        def batch(g: Generator) -> Batch:
            edges = (torch.rand(2, 9, 9, generator=g) > 0.6).float()
            lengths = torch.randint(4, 10, (2, 1), generator=g)
            return (
                torch.randn(2, 9, 6, generator=g), edges, torch.arange(9) < lengths, torch.randn(2, generator=g)
            )  # fmt: skip

        return Case(made, loss, batch)

    return make


def _graph_sparse(layer: str, **settings: Any) -> Maker:
    """Two layers over an edge list, as in the package's examples (gcn.py, gat.py)."""

    def make() -> Case:
        package = import_module("torch_geometric.nn")
        made = nn.ModuleList([getattr(package, layer)(6, 16, **settings), getattr(package, layer)(16, 3, **settings)])

        def loss(x: Tensor, edges: Tensor, y: Tensor) -> Tensor:
            hidden = F.dropout(F.elu(made[0](F.dropout(x, 0.5), edges)), 0.5)
            return F.cross_entropy(made[1](hidden, edges), y)

        def batch(g: Generator) -> Batch:
            edges = torch.randint(0, 12, (2, 40), generator=g)
            return torch.randn(12, 6, generator=g), edges, torch.randint(0, 3, (12,), generator=g)

        return Case(made, loss, batch)

    return make


def _diffusion(**settings: Any) -> Maker:
    def make() -> Case:
        package = import_module("denoising_diffusion_pytorch")
        network = package.Unet(dim=8, dim_mults=(1, 2), flash_attn=False, dropout=0.1)
        made = package.GaussianDiffusion(network, image_size=16, timesteps=50, **settings)
        return noise(made, made, 2, 3, 16, 16)

    return make


def _diffusion_elucidated() -> Case:
    package = import_module("denoising_diffusion_pytorch")
    made = package.ElucidatedDiffusion(
        package.Unet(dim=8, dim_mults=(1, 2), random_fourier_features=True), image_size=16
    )
    return noise(made, made, 2, 3, 16, 16)


def _diffusion_1d() -> Case:
    package = import_module("denoising_diffusion_pytorch")
    made = package.GaussianDiffusion1D(
        package.Unet1D(dim=8, dim_mults=(1, 2), channels=4), seq_length=16, timesteps=50, objective="pred_v"
    )
    return noise(made, made, 2, 4, 16)


def _quantized(name: str, **settings: Any) -> Maker:
    """An autoencoder around a quantizer of vectors, as in the package's examples."""

    def make() -> Case:
        quantizer = getattr(import_module("vector_quantize_pytorch"), name)(**settings)
        made = nn.ModuleDict({"in": nn.Linear(12, 16), "quantizer": quantizer, "out": nn.Linear(16, 12)})

        def loss(x: Tensor) -> Tensor:
            found, *rest = quantizer(made["in"](x))
            commitment = rest[1].sum() if len(rest) > 1 else torch.zeros(())
            return F.l1_loss(made["out"](found), x) + commitment

        return noise(made, loss, 2, 10, 12)

    return make


def _perceiver() -> Case:
    made = import_module("perceiver_pytorch").Perceiver(
        input_channels=3, input_axis=2, num_freq_bands=4, max_freq=10.0, depth=2, num_latents=8, latent_dim=16,
        num_classes=10, attn_dropout=0.1, ff_dropout=0.1, weight_tie_layers=True,
    )  # fmt: skip

    def batch(g: Generator) -> Batch:
        return torch.randn(2, 16, 16, 3, generator=g), torch.randint(0, 10, (2,), generator=g)

    return Case(made, lambda x, y: F.cross_entropy(made(x), y), batch)


def _metric_learning(loss: str, **settings: Any) -> Maker:
    def make() -> Case:
        made = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        criterion = getattr(import_module("pytorch_metric_learning.losses"), loss)(**settings)
        both = nn.ModuleList([made, criterion])

        def batch(g: Generator) -> Batch:
            return torch.randn(8, 8, generator=g), torch.arange(8) // 2

        return Case(both, lambda x, y: criterion(made(x), y), batch)

    return make


def _kornia(loss: str, **settings: Any) -> Maker:
    """A small network that makes an image anew, under a loss for images."""

    def make() -> Case:
        made = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1), nn.Sigmoid())
        criterion = getattr(import_module("kornia.losses"), loss)(**settings)

        def value(x: Tensor) -> Tensor:
            found: Tensor = criterion(made(x), x)
            return found.mean()

        return noise(made, value, 2, 1, 32, 32)

    return make


def _kornia_augmented() -> Case:
    """Augmentations of kornia with fixed places, and its measure of focus as the loss."""
    geometry = import_module("kornia.geometry.transform")
    filters = import_module("kornia.filters")
    made = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1))

    def loss(x: Tensor, angle: Tensor) -> Tensor:
        turned = geometry.rotate(x, angle)
        return F.mse_loss(made(filters.gaussian_blur2d(turned, (3, 3), (1.0, 1.0))), turned)

    return Case(
        made, loss, lambda g: (torch.rand(2, 3, 16, 16, generator=g), 90 * torch.rand(2, generator=g))
    )  # fmt: skip


def _transformers(model: str, config: str, **settings: Any) -> Maker:
    """A model of transformers with its own loss on tokens and labels."""

    def make() -> Case:
        package = import_module("transformers")
        made = getattr(package, model)(getattr(package, config)(vocab_size=50, **settings))
        made.train()

        def batch(g: Generator) -> Batch:
            ids = torch.randint(3, 50, (2, 12), generator=g)
            return ids, ids.clone()

        return Case(made, lambda ids, labels: made(input_ids=ids, labels=labels).loss, batch)

    return make


_SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}

# What each package trains. The keys are what `pip install` takes.
PACKAGES: dict[str, dict[str, Maker]] = {
    "timm": {
        "resnet10t": _timm("resnet10t"),
        "resnest14d": _timm("resnest14d"),
        "efficientnet_b0": _timm("efficientnet_b0", drop_rate=0.2, drop_path_rate=0.2),
        "mobilenetv3_small_050": _timm("mobilenetv3_small_050"),
        "regnety_002": _timm("regnety_002"),
        "convnext_atto": _timm("convnext_atto", drop_path_rate=0.1),
        "vit_tiny_patch16_224": _timm("vit_tiny_patch16_224", 32, img_size=32, depth=3, drop_path_rate=0.1),
        "swin_tiny_patch4_window7_224": _timm("swin_tiny_patch4_window7_224", 64, img_size=64, depths=(1, 1, 1, 1)),
        "beit_base_patch16_224": _timm("beit_base_patch16_224", 32, img_size=32, depth=2, embed_dim=48, num_heads=2),
        "mixer_s16_224": _timm("mixer_s16_224", 32, img_size=32),
        "levit_128s": _timm("levit_128s", 224),
        "mobilevit_xxs": _timm("mobilevit_xxs"),
        "xcit_nano_12_p16_224": _timm("xcit_nano_12_p16_224", 32, depth=2),
        "ViT with mixup, soft targets and ModelEmaV3": _timm_recipe,
    },
    "torchvision": {
        "shufflenet_v2_x0_5": _torchvision("shufflenet_v2_x0_5"),
        "squeezenet1_1": _torchvision("squeezenet1_1"),
        "mnasnet0_5": _torchvision("mnasnet0_5"),
        "googlenet": _torchvision("googlenet", aux_logits=False, init_weights=True),
        "lraspp_mobilenet_v3_large": _torchvision_segmentation,
    },
    "vit-pytorch": {
        "ViT": _vit_pytorch("vit_pytorch", "ViT", dropout=0.1, emb_dropout=0.1, **_VIT),
        "SimpleViT": _vit_pytorch("vit_pytorch", "SimpleViT", **_VIT),
        "CaiT": _vit_pytorch(
            "vit_pytorch.cait", "CaiT", cls_depth=1, dropout=0.1, layer_dropout=0.05, **_VIT
        ),
        "DeepViT": _vit_pytorch("vit_pytorch.deepvit", "DeepViT", dropout=0.1, **_VIT),
        "CCT": _vit_pytorch(
            "vit_pytorch.cct", "CCT", img_size=32, embedding_dim=32, n_conv_layers=1, num_layers=2, num_heads=2,
            mlp_ratio=2.0, positional_embedding="learnable",
        ),
        "LeViT": _vit_pytorch(
            "vit_pytorch.levit", "LeViT", image_size=32, stages=2, dim=(16, 24), depth=1, heads=(2, 3), mlp_mult=2,
        ),
        "MAE": _vit_masked("vit_pytorch.mae", "MAE", decoder_dim=32, decoder_depth=1),
        "SimMIM": _vit_masked("vit_pytorch.simmim", "SimMIM"),
        "Dino": _vit_dino,
        "DistillWrapper": _vit_distillation,
    },
    "x-transformers": {
        "Decoder": _x_transformers(),
        "Decoder with rotary positions, GLU and RMSNorm": _x_transformers(
            rotary_pos_emb=True, ff_glu=True, ff_swish=True, use_rmsnorm=True, attn_one_kv_head=True
        ),
        "Decoder with ALiBi and residual attention": _x_transformers(alibi_pos_bias=True, residual_attn=True),
        "Decoder with layer dropout": _x_transformers(layer_dropout=0.2),
        "XTransformer": _x_translation,
        "ContinuousTransformerWrapper": _x_continuous,
    },
    "segmentation-models-pytorch": {
        "Unet, DiceLoss": _smp("Unet", "resnet18", "DiceLoss", mode="binary"),
        "FPN, FocalLoss": _smp("FPN", "mobilenet_v2", "FocalLoss", mode="binary"),
        "DeepLabV3Plus, SoftBCEWithLogitsLoss": _smp("DeepLabV3Plus", "resnet18", "SoftBCEWithLogitsLoss"),
        "Segformer, JaccardLoss": _smp("Segformer", "mit_b0", "JaccardLoss", mode="binary"),
        "UnetPlusPlus, TverskyLoss": _smp("UnetPlusPlus", "resnet18", "TverskyLoss", mode="binary"),
        "Linknet, LovaszLoss": _smp("Linknet", "resnet18", "LovaszLoss", mode="binary"),
    },
    "monai": {
        "UNet, DiceLoss": _monai(
            "UNet", "DiceLoss", (2, 1, 16, 16, 16),
            {"spatial_dims": 3, "in_channels": 1, "out_channels": 1, "channels": (4, 8, 16), "strides": (2, 2),
             "num_res_units": 2, "dropout": 0.1},
            sigmoid=True,
        ),
        "SegResNet, DiceCELoss": _monai(
            "SegResNet", "DiceCELoss", (2, 1, 16, 16, 16),
            {"init_filters": 8, "out_channels": 1, "dropout_prob": 0.2},
            sigmoid=True,
        ),
        "UNETR, DiceFocalLoss": _monai(
            "UNETR", "DiceFocalLoss", (1, 1, 16, 16, 16),
            {"in_channels": 1, "out_channels": 1, "img_size": (16, 16, 16), "feature_size": 4, "hidden_size": 24,
             "mlp_dim": 32, "num_heads": 2},
            sigmoid=True,
        ),
        "SwinUNETR, GeneralizedDiceLoss": _monai(
            "SwinUNETR", "GeneralizedDiceLoss", (1, 1, 64, 64),
            {"in_channels": 1, "out_channels": 1, "feature_size": 12, "spatial_dims": 2, "depths": (1, 1, 1, 1)},
            sigmoid=True,
        ),
        "DenseNet": _monai_classifier,
        "AutoencoderKL": _monai_vae,
    },
    "denoising-diffusion-pytorch": {
        "GaussianDiffusion": _diffusion(),
        "GaussianDiffusion, objective v, min-SNR weights, offset noise": _diffusion(
            objective="pred_v", min_snr_loss_weight=True, offset_noise_strength=0.1
        ),
        "GaussianDiffusion1D": _diffusion_1d,
        "ElucidatedDiffusion": _diffusion_elucidated,
    },
    "torch-geometric": {
        "DenseGCNConv with DiffPool": _graph("DenseGCNConv"),
        "DenseSAGEConv with DiffPool": _graph("DenseSAGEConv", normalize=True),
        "GCNConv": _graph_sparse("GCNConv"),
        "GCNConv without self loops": _graph_sparse("GCNConv", add_self_loops=False, normalize=False),
        "SAGEConv": _graph_sparse("SAGEConv"),
        "GATConv": _graph_sparse("GATConv"),
        "TransformerConv": _graph_sparse("TransformerConv"),
    },
    "vector-quantize-pytorch": {
        "VectorQuantize": _quantized("VectorQuantize", dim=16, codebook_size=32, decay=0.8),
        "FSQ": _quantized("FSQ", dim=16, levels=[8, 5, 5]),
        "ResidualVQ": _quantized("ResidualVQ", dim=16, codebook_size=32, num_quantizers=2),
    },
    "perceiver-pytorch": {"Perceiver": _perceiver},
    "pytorch-metric-learning": {
        "ArcFaceLoss": _metric_learning("ArcFaceLoss", num_classes=4, embedding_size=8),
        "ProxyAnchorLoss": _metric_learning("ProxyAnchorLoss", num_classes=4, embedding_size=8),
        "NTXentLoss": _metric_learning("NTXentLoss"),
        "TripletMarginLoss": _metric_learning("TripletMarginLoss"),
    },
    "kornia": {
        "SSIMLoss": _kornia("SSIMLoss", window_size=5),
        "MS_SSIMLoss": _kornia("MS_SSIMLoss"),
        "PSNRLoss": _kornia("PSNRLoss", max_val=1.0),
        "TotalVariation and InverseDepthSmoothnessLoss": _kornia("InverseDepthSmoothnessLoss"),
        "rotate and gaussian_blur2d": _kornia_augmented,
    },
    "transformers": {
        "BertForMaskedLM": _transformers("BertForMaskedLM", "BertConfig", **_SMALL),
        "LlamaForCausalLM": _transformers("LlamaForCausalLM", "LlamaConfig", **_SMALL),
        "Qwen3ForCausalLM": _transformers(
            "Qwen3ForCausalLM", "Qwen3Config", head_dim=16, num_key_value_heads=2, **_SMALL
        ),
        "T5ForConditionalGeneration": _transformers(
            "T5ForConditionalGeneration", "T5Config", d_model=32, d_kv=16, d_ff=48, num_layers=2, num_heads=2,
            decoder_start_token_id=0, pad_token_id=0
        ),
        "DebertaV2ForMaskedLM": _transformers("DebertaV2ForMaskedLM", "DebertaV2Config", relative_attention=True,
                                              pos_att_type=["p2c", "c2p"], **_SMALL),
        "MixtralForCausalLM": _transformers(
            "MixtralForCausalLM", "MixtralConfig", num_local_experts=4, num_key_value_heads=2, **_SMALL
        ),
        "MambaForCausalLM": _transformers(
            "MambaForCausalLM", "MambaConfig", hidden_size=32, num_hidden_layers=2, state_size=4
        ),
    },
}  # fmt: skip


def trained(make: Maker, daemon: str | None) -> tuple[list[float], list[Tensor]]:
    """Losses, and parameters and buffers at the end. `daemon`: its endpoint; None trains plainly."""
    torch.manual_seed(SEED)
    case = make()
    models = [case.model, *case.also]
    random = Generator().manual_seed(SEED)
    data = [case.batch(random) for _ in range(STEPS)]
    optimizer = torch.optim.AdamW([p for p in case.model.parameters() if p.requires_grad], lr=1e-3)

    def step(*batch: Any) -> Tensor:
        loss = case.loss(*batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        case.after()
        return loss

    losses = losses_of(step, data, models, optimizer, daemon, seed=SEED)
    return losses, [t.detach() for model in models for t in (*model.parameters(), *model.buffers())]


def missing(packages: Sequence[str]) -> list[str]:
    """Those that can't be imported."""
    found = []
    for package in packages:
        try:
            import_module(package.replace("-", "_"))
        except ImportError:
            found.append(package)
    return found


def main(argv: list[str] | None = None) -> int:
    parser = common.parser(__doc__)
    parser.add_argument("--packages", nargs="+", default=list(PACKAGES), choices=PACKAGES, help="these alone")
    parser.add_argument("--replay", metavar="NAME", help="this one alone, with the whole error")
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    for name in ("gpumux", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if lacking := missing(args.packages):
        parser.error(
            f"can't be imported: {', '.join(lacking)}. Remedy: install them (pip install --no-deps), or name others"
        )
    cases = {name: make for package in args.packages for name, make in PACKAGES[package].items()}
    if args.replay and args.replay not in cases:
        parser.error(f"none of {', '.join(args.packages)} has {args.replay}")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the daemon's executors
    try:
        with running_daemon() as daemon:
            if args.replay:
                return replay(partial(trained, cases[args.replay]), daemon.endpoint)
            outcomes: dict[str, list[Outcome]] = {}
            for package in args.packages:
                for name, make in PACKAGES[package].items():
                    one = tried(name, partial(trained, make), daemon.endpoint)
                    outcomes.setdefault(package, []).append(one)
                    print(f"{package} {name}: {one.kind} {one.why}", file=sys.stderr, flush=True)
    finally:
        torch.set_num_threads(threads)
    found = {package: packed(package.replace("-", "_"), those) for package, those in outcomes.items()}
    return report(found, args.out)


def report(packages: dict[str, Any], out: Any) -> int:
    kinds = ("equal", "differs", "refused", "needs more")
    rows = [[f"{name} {one['version']}", *(str(len(one[kind])) for kind in kinds)] for name, one in packages.items()]
    print(common.table(["package", *kinds], rows))
    for package, one in packages.items():
        for kind in kinds[1:]:
            for name, why in one[kind].items():
                print(f"{kind}: {package} {name}: {why}")
    count = {kind: sum(len(one[kind]) for one in packages.values()) for kind in kinds}
    share = count["equal"] / max(1, sum(count.values()) - count["needs more"])
    print(f"{count['equal']} equal in every bit: {share:.0%} of those that train plainly")
    common.report("public_models", out, {"steps": STEPS, "counts": count, "share": share, "packages": packages})
    return 1 if count["differs"] else 0


if __name__ == "__main__":
    sys.exit(main())
