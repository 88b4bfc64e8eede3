"""Losses and their reductions train what serial training trains."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.fuse.rules.found import by
from tests.fuse.serial import batches, check, steady

nn = torch.nn
F = torch.nn.functional
Tensor = torch.Tensor


class Weighted(nn.Module):
    """With weights of the classes, as a loss keeps them."""

    def __init__(self, dim: int = 0, count: int = 4) -> None:
        super().__init__()
        self.inner = nn.Linear(5, count) if not dim else nn.Conv2d(3, count, 2)
        self.register_buffer("classes", torch.linspace(0.5, 2.0, count))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner(x), self.classes


# `out` is what the model gave, `w` weights of its classes, `y` labels.
LABELLED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "mean": lambda out, w, y: F.cross_entropy(out, y),
    "sum": lambda out, w, y: F.cross_entropy(out, y, reduction="sum"),
    "none": lambda out, w, y: F.cross_entropy(out, y, reduction="none").square().mean(),
    "weights, ignored, smoothed": lambda out, w, y: F.cross_entropy(out, y, w, ignore_index=2, label_smoothing=0.1),
    "ignored": lambda out, w, y: F.cross_entropy(out, y, ignore_index=1),
    "one sample": lambda out, w, y: F.cross_entropy(out[0], y[0], w),
}  # fmt: skip


@pytest.mark.covering
@pytest.mark.parametrize("per_model", [False, True])
@pytest.mark.parametrize("case", LABELLED)
def test_cross_entropy(case: str, per_model: bool):
    array = check(
        steady(Weighted, loss=lambda out, y: LABELLED[case](*out, y)), batches(6, 5, classes=4), per_model=per_model
    )
    assert by(array, "rule") >= {"nll_loss_forward", "nll_loss_backward"}
    assert by(array, "per-model") == set()


@pytest.mark.parametrize("per_model", [False, True])
def test_cross_entropy_of_images(per_model: bool):
    def loss(given: tuple[Tensor, Tensor]) -> Tensor:
        out, w = given
        labels = (out[:, 0].detach().abs() * 3).long().clamp(0, 3)
        return F.cross_entropy(out, labels, w, ignore_index=1) + F.cross_entropy(out, labels, reduction="sum")

    array = check(steady(lambda: Weighted(2), loss=loss), batches(2, 3, 4, 5), per_model=per_model)
    assert by(array, "rule") >= {"nll_loss2d_forward", "nll_loss2d_backward"}


MARGINS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "one label": lambda out, w, y: (
        F.multi_margin_loss(out, y) + F.multi_margin_loss(out, y, 2, weight=w, reduction="sum")
    ),
    "some labels": lambda out, w, y: (
        F.multilabel_margin_loss(out, some(y))
        + F.multilabel_margin_loss(out, some(y), reduction="none").square().mean()
    ),
    "one sample": lambda out, w, y: (
        F.multi_margin_loss(out[0], y[:1], weight=w) + F.multilabel_margin_loss(out[0], some(y)[0])
    ),
}  # fmt: skip


def some(y: Tensor) -> Tensor:
    """[N, 4]: a label or two, and the end mark of the list."""
    return torch.stack([y, torch.where(y > 1, 0, -1), torch.full_like(y, -1), y], 1)


@pytest.mark.every(3)
@pytest.mark.parametrize("per_model", [False, True])
@pytest.mark.parametrize("case", MARGINS)
def test_margins(case: str, per_model: bool):
    array = check(
        steady(Weighted, loss=lambda out, y: MARGINS[case](*out, y)), batches(6, 5, classes=4), per_model=per_model
    )
    kinds = {"one label": {"multi_margin_loss"}, "some labels": {"multilabel_margin_loss_forward"}}
    assert by(array, "rule") >= kinds.get(case, kinds["one label"] | kinds["some labels"])
    assert by(array, "per-model") == set()


def hot(out: Tensor, y: Tensor) -> Tensor:
    return F.one_hot(y, out.shape[1]).to(out.dtype)


OTHERS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "squares": lambda out, w, y: F.mse_loss(out, hot(out, y)) + F.mse_loss(out, hot(out, y), reduction="sum"),
    "robust": lambda out, w, y: (
        F.smooth_l1_loss(out, hot(out, y), beta=0.5) + F.huber_loss(out, hot(out, y), delta=0.7, reduction="sum")
        + F.l1_loss(out, hot(out, y))
    ),
    "binary": lambda out, w, y: (
        F.binary_cross_entropy_with_logits(out, hot(out, y), w, pos_weight=w)
        + F.binary_cross_entropy(out.sigmoid(), hot(out, y), w)
        + F.soft_margin_loss(out, 2 * hot(out, y) - 1)
        + F.mse_loss(out, hot(out, y), reduction="none").square().mean()
    ),
    "distributions": lambda out, w, y: (
        F.kl_div(out.log_softmax(1), hot(out, y) * 0.9 + 0.025, reduction="batchmean")
        + F.cross_entropy(out, (w * out).softmax(1)) + F.poisson_nll_loss(out, hot(out, y))
    ),
}  # fmt: skip


@pytest.mark.covering
@pytest.mark.parametrize("per_model", [False, True])
@pytest.mark.parametrize("case", OTHERS)
def test_losses_element_by_element(case: str, per_model: bool):
    array = check(
        steady(Weighted, loss=lambda out, y: OTHERS[case](*out, y)), batches(6, 5, classes=4), per_model=per_model
    )
    known = {t for t in by(array, "batched", "per-model") if "loss" in t or "entropy" in t}
    assert not known & {
        f"{n}{end}" for n in ("mse_loss", "huber_loss", "binary_cross_entropy") for end in ("", "_backward")
    }
    assert by(array, "per-model") == set()


def test_a_loss_of_few_operators():
    array = check(steady(lambda: nn.Linear(5, 4), loss=F.cross_entropy), batches(6, 5, classes=4))
    assert len(array.programs[0].ops) <= len(array.decisions) + 8
