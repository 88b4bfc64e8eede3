"""`microbatches=k`: a split step stays within the stated tolerance of the whole one, or is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NotRequired, get_origin, get_type_hints

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import nn

from gpumux import client, errors
from gpumux.capture.microbatch import proof
from gpumux.capture.microbatch.split import TOLERANCE
from gpumux.plan.memory import ways
from gpumux.program.memory import plan
from gpumux.types import JobStatistics
from tests.client.parity import Work, batches, plain, simple_loop, through


def assert_close(a: Any, b: Any, what: str, tolerance: float) -> None:
    """Equal structure, and every tensor within `tolerance` of its largest element."""
    la, sa = pytree.tree_flatten_with_path(a)
    lb, sb = pytree.tree_flatten_with_path(b)
    assert str(sa) == str(sb), f"{what}: another structure"
    for (path, x), (_, y) in zip(la, lb, strict=True):
        where = f"{what}{pytree.keystr(path)}"
        if isinstance(x, torch.Tensor):
            assert (x.dtype, x.shape) == (y.dtype, y.shape), where
            if x.is_floating_point() and x.numel():
                off = float((x.double() - y.double()).abs().max()) / max(float(x.double().abs().max()), 1e-12)
                assert off <= tolerance, f"{where} is off by {off}"
            else:
                assert torch.equal(x, y), where
        else:
            assert x == y or repr(x) == repr(y), f"{where}: {x!r} is not {y!r}"


def check(make: Callable[[], Work], endpoint: str, tolerance: float = 1e-9) -> list[Any]:
    """The plain loop on whole batches, and the split one. In float64, where nothing but the order of sums differs."""
    before = torch.get_default_dtype()
    if tolerance < 1e-6:
        torch.set_default_dtype(torch.float64)
    try:
        want, want_states = plain(make)
        got, got_states = through(make, endpoint)
    finally:
        torch.set_default_dtype(before)
    assert_close(want, got, "results", tolerance)
    assert_close(want_states, got_states, "state", tolerance)
    return got


def data_of(*shapes: tuple[int, ...], **options: Any) -> list[tuple[torch.Tensor, ...]]:
    return [
        tuple(t.to(torch.get_default_dtype()) if t.is_floating_point() else t for t in batch)
        for batch in batches(*shapes, **options)
    ]


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 10))


def classify(model: nn.Module, opt: Any, data: Any, each: Any = None, **options: Any) -> Work:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        return loss

    return Work([model], [opt], [(step, data[0])], simple_loop(data, 12, each), {"microbatches": 4, **options})


@pytest.mark.every(5)
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5, foreach=False),
        lambda p: torch.optim.Adam(p, lr=1e-2),
        lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True, foreach=False),
        lambda p: torch.optim.RMSprop(p, lr=1e-2, centered=True),
    ],
    ids=["sgd", "nesterov", "dampening", "adam", "amsgrad", "rmsprop"],
)
@pytest.mark.parametrize("parts", [2, 8])
def test_optimizers(optimizer: Any, parts: int, endpoint: str) -> None:
    def make() -> Work:
        model = mlp()
        return classify(model, optimizer(model.parameters()), data_of((8, 12)), microbatches=parts)

    check(make, endpoint)


def test_clipping_schedulers_and_results_of_every_kind(endpoint: str) -> None:
    def make() -> Work:
        model = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(54, 10))
        opt = torch.optim.Adam(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 12)
        data = data_of((8, 1, 8, 8))

        def step(x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
            opt.zero_grad(set_to_none=False)
            out = model(x)
            loss = F.cross_entropy(out, y)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            opt.step()
            right = out.argmax(1) == y
            return {
                "loss": loss, "norm": norm, "perplexity": loss.exp(), "right": right.sum(),
                "share": right.double().mean(), "out": out, "each": right, "labels": y, "size": x.shape[0],
                "lr": opt.param_groups[0]["lr"],
            }  # fmt: skip

        return Work([model], [opt], [(step, data[0])], simple_loop(data, 12, scheduler.step), {"microbatches": 4})

    results = check(make, endpoint)
    assert results[0]["size"] == 8
    assert results[0]["out"].shape == (8, 10)


class Small(nn.Module):
    """A language model: tied weights, learned positions, layer norm, attention."""

    def __init__(self, norm_first: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.position = nn.Embedding(6, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout, batch_first=True, norm_first=norm_first)
        self.body = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x) + self.position(torch.arange(x.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.head(self.body(h, mask=mask, is_causal=True))


def tokens(steps: int = 3) -> list[tuple[torch.Tensor, ...]]:
    """Sequences with different numbers of padded positions, so that parts have different numbers of labels."""
    made = []
    for x, _ in data_of((8, 6), classes=20, integer=True, count=steps):
        labels = x.clone()
        for row in range(8):
            labels[row, 6 - row % 5 :] = -100
        made.append((x, labels))
    return made


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight": True},
        {"label_smoothing": 0.1},
        {"reduction": "sum"},
        {"weight": True, "label_smoothing": 0.1},
    ],
    ids=["mean", "weights", "smoothing", "sum", "weighted smoothing"],
)
@pytest.mark.every(3)
def test_a_language_model_with_labels_to_ignore(options: dict[str, Any], endpoint: str) -> None:
    def make() -> Work:
        model = Small()
        model.register_buffer("importance", torch.rand(20) + 0.5)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)  # test_optimizers has the longer ones
        data = tokens()
        given = {**options, "weight": model.importance} if "weight" in options else options

        def step(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            opt.zero_grad()
            loss = F.cross_entropy(model(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), **given)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            return loss

        return Work([model], [opt], [(step, data[0])], simple_loop(data, 3), {"microbatches": 4})

    check(make, endpoint)


def test_a_mean_over_a_mask_given_with_the_batch(endpoint: str) -> None:
    def make() -> Work:
        model = nn.Linear(6, 6)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        data = [(x, z, (x > 0.3).to(x.dtype)) for x, z, _ in data_of((8, 6), (8, 6))]

        def step(x: torch.Tensor, z: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            opt.zero_grad()
            x = x - x.mean(0)  # of the batch alone, computed before the parts
            error = ((model(x) - z) ** 2 * mask).sum() / mask.sum().clamp(min=1)
            loss = error + 0.1 * F.mse_loss(model(x), z) + 1e-3 * sum(p.square().sum() for p in model.parameters())
            loss.backward()
            opt.step()
            return loss

        return Work([model], [opt], [(step, data[0])], simple_loop(data, 9), {"microbatches": 2})

    check(make, endpoint)


@pytest.mark.every(2)
@pytest.mark.parametrize("onednn", [True, False])
def test_recurrent_networks_with_time_first(onednn: bool, endpoint: str) -> None:
    """In double precision torch makes an LSTM of products; oneDNN takes single precision."""

    def make() -> Work:
        model = nn.ModuleList([nn.LSTM(6, 8, num_layers=2, bidirectional=onednn), nn.Linear(16 if onednn else 8, 10)])
        opt = torch.optim.Adam(model.parameters())
        data = data_of((8, 3, 6))

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            opt.zero_grad()
            h, _ = model[0](x.transpose(0, 1))
            flat = model[1](h.flatten(0, 1))
            loss = F.cross_entropy(flat, y.repeat(3))
            loss.backward()
            opt.step()
            return loss

        return Work([model], [opt], [(step, data[0])], simple_loop(data, 6), {"microbatches": 4})

    check(make, endpoint, tolerance=1e-4 if onednn else 1e-9)


def test_accumulation_over_steps_and_an_added_evaluation(endpoint: str) -> None:
    def make() -> Work:
        model = mlp()
        opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        data = data_of((8, 12))

        def accumulate(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = F.cross_entropy(model(x), y) / 3
            loss.backward()
            return loss

        def apply() -> torch.Tensor:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
            return norm

        def evaluate(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            model.eval()
            with torch.no_grad():
                out = model(x)
            model.train()
            return out, (out.argmax(1) == y).sum()

        def loop(step: Any, update: Any, test: Any) -> list[Any]:
            out = []
            for i in range(12):
                out.append(step(*data[i % 3]))
                if i % 3 == 2:
                    out += [update(), test(*data[0])]
            return out

        return Work(
            [model], [opt], [(accumulate, data[0]), (apply, ()), (evaluate, data[0])], loop, {"microbatches": 4}
        )

    check(make, endpoint)


def test_instance_norm_and_frozen_batch_norm(endpoint: str) -> None:
    def make() -> Work:
        model = nn.Sequential(
            nn.Conv2d(1, 6, 3),
            nn.InstanceNorm2d(6, affine=True),
            nn.BatchNorm2d(6),
            nn.GroupNorm(2, 6),
            nn.Flatten(),
            nn.Linear(216, 10),
        )
        model[2].eval()
        return classify(model, torch.optim.SGD(model.parameters(), lr=0.1), data_of((8, 1, 8, 8)))

    check(make, endpoint)


def test_indexing_by_position_and_checkpointing(endpoint: str) -> None:
    def make() -> Work:
        model = mlp()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        data = data_of((8, 12))

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            opt.zero_grad()
            out = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).log_softmax(1)
            loss = -out[torch.arange(len(y)), y].mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
            return loss

        return Work([model], [opt], [(step, data[0])], simple_loop(data, 6), {"microbatches": 4})

    check(make, endpoint)


def test_two_backward_passes_into_gradients_that_stay(endpoint: str) -> None:
    def make() -> Work:
        model = mlp()
        opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        data = data_of((8, 12))

        def step(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            out = model(x)
            first, second = F.cross_entropy(out, y), 0.1 * out.square().mean()
            first.backward(retain_graph=True)
            second.backward()
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(0.99)
            opt.step()
            opt.zero_grad(set_to_none=False)
            return first, first + second

        return Work([model], [opt], [(step, data[0])], simple_loop(data, 6), {"microbatches": 4})

    check(make, endpoint)


def test_two_steps_of_an_adversarial_pair(endpoint: str) -> None:
    def make() -> Work:
        g, d = nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(), nn.Linear(8, 1))
        og, od = torch.optim.Adam(g.parameters(), lr=1e-2), torch.optim.Adam(d.parameters(), lr=1e-2)
        data = [(x, z) for x, z, _ in data_of((8, 6), (8, 4))]

        def critic(x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
            od.zero_grad()
            real, fake = d(x), d(g(z).detach())
            loss = F.binary_cross_entropy_with_logits(real, torch.ones_like(real))
            loss = loss + F.binary_cross_entropy_with_logits(fake, torch.zeros(x.shape[0], 1))
            loss.backward()
            od.step()
            return loss

        def generator(z: torch.Tensor) -> torch.Tensor:
            og.zero_grad()
            loss = -F.logsigmoid(d(g(z))).mean()
            loss.backward()
            og.step()
            return loss

        def loop(first: Any, second: Any) -> list[Any]:
            return [r for i in range(6) for r in (first(*data[i % 3]), second(data[i % 3][1]))]

        return Work([g, d], [og, od], [(critic, data[0]), (generator, (data[0][1],))], loop, {"microbatches": 2})

    check(make, endpoint)


def test_another_batch_size_is_a_variant(endpoint: str) -> None:
    def make() -> Work:
        data = [*data_of((8, 12), count=2), *data_of((4, 12), count=1)]
        model = mlp()
        return classify(model, torch.optim.Adam(model.parameters()), data, microbatches=2)

    check(make, endpoint)


def test_single_precision_and_autocast_stay_within_the_stated_tolerance(endpoint: str) -> None:
    def make(cast: bool) -> Work:
        model = mlp()
        opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        data = batches((8, 12))

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cast):
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            return loss

        return Work([model], [opt], [(step, data[0])], simple_loop(data, 3), {"microbatches": 4})

    check(lambda: make(False), endpoint, TOLERANCE["float32"])
    check(lambda: make(True), endpoint, TOLERANCE["bfloat16"])


def test_gradient_penalty_and_a_running_mean(endpoint: str) -> None:
    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
            self.register_buffer("mean", torch.zeros(1))

    def make() -> Work:
        model = Running()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        data = [(x, z) for x, z, _ in data_of((8, 6), (8,))]

        def step(x: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
            opt.zero_grad()
            x = x.detach().requires_grad_()
            advantage = torch.tanh((advantage - advantage.mean()) / advantage.std())
            out = model.net(x)
            (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            loss = (out[:, 0] * advantage - model.mean * out[:, 0]).mean() + ((grad.norm(dim=1) - 1) ** 2).mean()
            model.mean = 0.9 * model.mean + 0.1 * out.detach().mean(0)
            loss.backward()
            opt.step()
            return loss

        return Work([model], [opt], [(step, data[0])], simple_loop(data, 6), {"microbatches": 4})

    check(make, endpoint)


def test_gradients_that_do_not_depend_on_what_the_model_makes(endpoint: str) -> None:
    """Those of the weights are made before the parts, of whole samples; those of the bias after them. Both read the
    gradient of the loss, which is made once."""

    def make() -> Work:
        model = nn.Linear(12, 10)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        data = data_of((8, 12))

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            opt.zero_grad()
            loss = model(x).sum() / len(x) ** 2 + model(x).mean()
            loss.backward()
            opt.step()
            return loss

        return Work([model], [opt], [(step, data[0])], simple_loop(data, 6), {"microbatches": 2})

    check(make, endpoint)


def mixup(x: torch.Tensor) -> torch.Tensor:
    return 0.7 * x + 0.3 * x[torch.randperm(len(x))]


def queue_of(model: nn.Module, out: torch.Tensor) -> torch.Tensor:
    model.queue[: len(out)] = out.detach()[:, 0]
    return out.mean()


REFUSED: list[tuple[str, Callable[..., torch.Tensor], str]] = [
    ("batch norm", lambda m, x, y: F.cross_entropy(m(F.batch_norm(x, None, None, training=True)), y),
     "batch norm in training"),
    ("pairwise distances", lambda m, x, y: torch.cdist(m(x), m(x)).sum(), "relates samples of the batch to each other"),
    ("condensed distances", lambda m, x, y: torch.pdist(m(x)).sum(), "relates samples"),
    ("contrastive", lambda m, x, y: F.cross_entropy(m(x) @ m(x).T, torch.arange(len(x))), "relates samples"),
    ("softmax over the batch", lambda m, x, y: (m(x).softmax(0) * x[:, :10]).sum(), "_softmax mixes samples"),
    ("centred", lambda m, x, y: (m(x) - m(x).mean(0)).square().mean(), "together with single samples"),
    ("clamped mean", lambda m, x, y: F.cross_entropy(m(x), y).clamp(min=0.1), "together with single samples"),
    ("squared mean", lambda m, x, y: F.cross_entropy(m(x), y) ** 2, "what pow at"),
    ("worst sample", lambda m, x, y: F.cross_entropy(m(x), y, reduction="none").max(), "single samples"),
    ("hardest samples", lambda m, x, y: F.cross_entropy(m(x), y, reduction="none").topk(4)[0].mean(), "single samples"),
    ("hardest half", lambda m, x, y: F.cross_entropy(m(x), y, reduction="none").topk(len(x) // 2)[0].mean(),
     "topk mixes samples"),
    ("spread", lambda m, x, y: m(x).std(), "single samples"),
    ("neighbours", lambda m, x, y: (m(x) - m(x.roll(1, 0))).square().mean(), "roll mixes samples"),
    ("halves", lambda m, x, y: (m(x[: len(x) // 2]) * m(x[len(x) // 2 :])).mean(), "mixes samples"),
    ("first sample", lambda m, x, y: (m(x) * m(x)[0]).mean(), "picks certain samples"),
    ("mixup", lambda m, x, y: m(mixup(x)).mean(), "draws numbers that depend on how many samples"),
    ("load balance", lambda m, x, y: m(x).mean() + (m(x).softmax(1).mean(0) ** 2).sum(),
     "together with single samples"),
    ("memory bank", lambda m, x, y: queue_of(m, m(x)), "writes values of single samples into the job's state"),
    ("fixed size", lambda m, x, y: (m(x) * torch.ones(8, 1)).mean(), "not on one of 2 parts"),
    ("labels of its own", lambda m, x, y: F.cross_entropy(m(x), m(x).argmax(1)),
     "labels that the step works out itself"),
]  # fmt: skip


def refusal(step: Callable[..., Any], example: Any, model: Any, optimizers: Any, endpoint: str) -> errors.NotSplittable:
    with pytest.raises(errors.NotSplittable) as caught:
        client.submit(
            step, example=example, model=model, optimizer=optimizers, microbatches=2, endpoint=endpoint
        ).close()  # fmt: skip
    return caught.value


def test_what_mixes_the_batch_before_the_model_is_to_be_done_before_the_step(endpoint: str) -> None:
    model = nn.Linear(12, 10)
    for mixed, said in ((lambda x: x.flip(0), "flip mixes samples"), (mixup, "randperm draws numbers")):
        refused = refusal(lambda x, mixed=mixed: model(mixed(x)).mean(), (torch.randn(8, 12),), model, None, endpoint)
        assert said in refused.message
        assert "before the step is called" in refused.remedy
    refused = refusal(lambda x: (model(x).flip(0) * x[:, :10]).mean(), (torch.randn(8, 12),), model, None, endpoint)
    assert "flip mixes samples" in refused.message
    assert "before the step" not in refused.remedy, "the loop does not have what the model gives"


def test_what_follows_an_update_on_the_same_samples_is_a_step_of_its_own(endpoint: str) -> None:
    """As the generator's half of a GAN's step, which reads the discriminator that the first half has changed."""
    judge, maker = nn.Linear(6, 1), nn.Linear(4, 6)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (judge, maker)]

    def step(real: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        optimizers[0].zero_grad()
        (judge(maker(noise).detach()) - judge(real)).mean().backward()
        optimizers[0].step()
        optimizers[1].zero_grad()
        loss: torch.Tensor = -judge(maker(noise)).mean()
        loss.backward()
        optimizers[1].step()
        return loss

    refused = refusal(step, (torch.randn(8, 6), torch.randn(8, 4)), [judge, maker], optimizers, endpoint)
    assert "reads state that the step has changed by then" in refused.message
    assert "job.add" in refused.remedy


@pytest.mark.parametrize(("loss_of", "says"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_losses_that_do_not_split_are_refused_by_name(
    loss_of: Callable[..., torch.Tensor], says: str, endpoint: str
) -> None:
    torch.manual_seed(0)
    model = nn.Linear(12, 10)
    model.register_buffer("queue", torch.zeros(8))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = batches((8, 12))[0]

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        opt.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        opt.step()
        return loss

    with pytest.raises(errors.NotSplittable) as caught:
        client.submit(
            step, example=(x, y), model=model, optimizer=opt, microbatches=2, endpoint=endpoint
        ).close()  # fmt: skip
    assert says in caught.value.message
    assert f"{__file__}:" in caught.value.message
    assert caught.value.remedy


SAMPLES = {
    "largest": (lambda out: out.max(), "neither the sum nor the mean"),
    "spread": (lambda out: out.std(), "neither the sum nor the mean"),
    "certain samples": (lambda out: out[0], "returns certain samples"),
    "anything odd": (lambda out: (out > 0).any(), "neither the sum nor the mean"),
    "order": (lambda out: out.argmax(0), "neither the sum nor the mean"),
    "positions": (lambda out: torch.arange(len(out)), "can't be put together"),
}


@pytest.mark.parametrize("what", SAMPLES)
def test_results_that_cannot_be_put_together_are_refused(what: str, endpoint: str) -> None:
    result, says = SAMPLES[what]
    model = mlp()
    x, y = batches((8, 12))[0]

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return result(model(x))

    with pytest.raises(errors.NotSplittable, match=says):
        client.submit(step, example=(x, y), model=model, microbatches=2, endpoint=endpoint).close()


def training() -> tuple[nn.Module, Any, Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 256), nn.Dropout(0.5), nn.ReLU(), nn.Linear(256, 10))
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        return loss

    return model, opt, step, batches((64, 12))[0]


def test_a_number_that_does_not_divide_the_batch_is_refused_when_submitted_and_later(endpoint: str) -> None:
    model, opt, step, (x, y) = training()
    with pytest.raises(errors.NotSplittable, match="5 microbatches do not divide a batch of 64"):
        client.submit(step, example=(x, y), model=model, optimizer=opt, microbatches=5, endpoint=endpoint)
    with client.submit(step, example=(x, y), model=model, optimizer=opt, microbatches=4, endpoint=endpoint) as job:
        job.step(x, y).result()
        with pytest.raises(errors.NotSplittable, match="4 microbatches do not divide a batch of 63"):
            job.step(x[:63], y[:63])
        job.step(x, y).result()  # the job goes on
        job.sync()
    for wrong in (0, -1, 1.0, True, 10**6):
        with pytest.raises(errors.ConfigError, match="microbatches is"):
            client.submit(step, example=(x, y), model=model, optimizer=opt, microbatches=wrong, endpoint=endpoint)


def test_the_phases_of_an_optimizer_share_one_proof(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """AdamW makes its state in the first step. A batch of another shape has a proof of its own."""
    proven: list[int] = []
    prove = proof.prove

    def counted(*args: Any, **options: Any) -> Any:
        proven.append(len(args[0]))
        return prove(*args, **options)

    monkeypatch.setattr(proof, "prove", counted)
    model, _, _, (x, y) = training()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    with client.submit(
        step, example=(x, y), model=model, optimizer=optimizer, microbatches=2, endpoint=endpoint
    ) as job:  # fmt: skip
        assert len(proven) == 1
        first = [float(job.step(x, y).result()) for _ in range(3)]
        assert len(proven) == 1
        job.step(x[: len(x) // 2], y[: len(y) // 2]).result()
    assert len(proven) == 2
    assert first[2] < first[0]


@pytest.mark.parametrize("splits", [True, False])
def test_the_memory_of_the_proof_goes_back_also_if_it_fails(
    splits: bool, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client kept four times its model's memory (2,175 MiB where 469 are needed, for 25 M parameters)."""
    returned: list[bool] = []

    def block() -> ExitStack:
        stack = ExitStack()
        stack.callback(returned.append, True)
        return stack

    monkeypatch.setattr("gpumux.capture.microbatch.split.freed_is_reused", block)
    model, optimizer, step, batch = training()
    ours = step if splits else lambda x, y: step(x, y) + torch.argsort(model(x).flatten())
    try:
        client.submit(ours, example=batch, model=model, optimizer=optimizer, microbatches=2, endpoint=endpoint).close()
    except errors.NotSplittable:
        assert not splits
    else:
        assert splits
    assert returned


def programs(job: Any) -> list[Any]:
    return [p.program for p in job._remote.programs.values()]


def test_stats_say_equivalent_and_one_microbatch_changes_nothing(endpoint: str) -> None:
    model, opt, step, (x, y) = training()
    options: dict[str, Any] = {"example": (x, y), "model": model, "optimizer": opt, "endpoint": endpoint}
    with client.submit(step, **options) as job:
        whole = programs(job)
    with client.submit(step, microbatches=1, **options) as job:
        assert programs(job) == whole
        assert job.stats()["exactness"] == "bit-equal"
        assert "tolerance" not in job.stats()
        job.add(lambda x, y: model(x).sum(), example=(x, y), microbatches=2)
        assert job.stats()["exactness"] == "equivalent"
    with client.submit(step, microbatches=4, **options) as job:
        stats = job.stats()
        assert stats["exactness"] == "equivalent"
        assert stats["tolerance"] == TOLERANCE
        assert list(stats["microbatches"].values()) == [4]
        hints = get_type_hints(JobStatistics, include_extras=True)  # what type checkers read
        required = {key for key, hint in hints.items() if get_origin(hint) is not NotRequired}
        assert stats.keys() == required | {"because", "tolerance", "microbatches"}


def work(program: Any) -> list[int]:
    """Multiplications and additions of each matrix product, the bulk of these steps' time."""
    found = []
    for op in program.ops:
        if op.target in ("aten.mm.default", "aten.addmm.default"):
            a, b = [program.views[v.view].size for v in op.args[-2:]]
            found.append(a[0] * a[1] * b[1])
    return found


def test_operators_are_shorter_and_the_step_needs_less_memory(endpoint: str) -> None:
    model, opt, step, (x, y) = training()
    options: dict[str, Any] = {"example": (x, y), "model": model, "optimizer": opt, "endpoint": endpoint}
    with client.submit(step, **options) as job:
        whole, *_ = programs(job)
    with client.submit(step, microbatches=4, **options) as job:
        split, *_ = programs(job)
    assert max(work(split)) * 4 == max(work(whole))
    assert sum(work(split)) == sum(work(whole))
    assert plan(split).peak_bytes < 0.6 * plan(whole).peak_bytes


def test_plan_memory_says_what_microbatches_need(endpoint: str) -> None:
    """It captures a loop over both halves, which needs no proof on real numbers."""

    class Scored(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            made = [part for _ in range(4) for part in (nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))]
            self.layers = nn.Sequential(*made)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x).square().mean()

    torch.manual_seed(0)
    model, x = Scored(), torch.randn(128, 64)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        opt.zero_grad()
        loss = model(x)
        loss.backward()
        opt.step()
        return loss

    with client.submit(step, example=(x,), model=model, optimizer=opt, microbatches=2, endpoint=endpoint) as job:
        split, *_ = programs(job)
    looped = ways.captured_step(model, lambda parameters: torch.optim.SGD(parameters, lr=0.1), (x,), parts=2)
    assert plan(looped).peak_bytes == pytest.approx(plan(split).peak_bytes, rel=0.1)


def test_dropout_draws_other_masks_for_each_part_and_repeats_with_the_seed(endpoint: str) -> None:
    def run(seed: int) -> torch.Tensor:
        torch.manual_seed(0)
        drop = nn.Dropout(0.5)
        x = torch.ones(8, 64)
        with client.submit(drop, example=(x,), model=drop, microbatches=4, seed=seed, endpoint=endpoint) as job:
            return torch.stack([job.step(x).result() for _ in range(2)])

    first = run(1)
    assert torch.equal(first, run(1))
    assert not torch.equal(first, run(2))
    assert set(first.unique().tolist()) == {0.0, 2.0}
    rows = {tuple(row.tolist()) for row in first.flatten(0, 1)}
    assert len(rows) == 16, "every sample of every step has a mask of its own"
    assert 0.4 < float((first > 0).double().mean()) < 0.6
